"""Pallas kernels for TPU: a `tpu_custom_call` in; its grid and windows, its sharding rule and its arithmetic out."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from toast_cli import xla
from toast_cli.kernels import KernelError
from toast_cli.program.model import Rule, ValueFactors
from toast_cli.xla import ir, operations_in, terminator

# ---------------------------------------------------------------- the kernel
# Reads a Pallas kernel for TPU: its grid, its windows, and how its body uses the grid indices.

TARGET = "tpu_custom_call"
CONFIG = "custom_call_config"
# How a body may read an index of the grid: not at all, or in any way; a number k: only its remainder modulo k.
UNREAD, READ = 1, 0
# The grid axis that a chip's cores share has as many steps as there are cores.
SEMANTICS, CORES = "dimension_semantics", "core_parallel"
# Operation that communicates with other devices -> the operand segment that names the device.
DEVICE_SEGMENT = {"tpu.enqueue_dma": 4, "tpu.sem_signal": 2}


@dataclass(frozen=True)
class BlockIndex:
    """The window index of one dimension: `(index // unit) % count` of one axis of the grid, if `axes` has only that one
    and count is not 0; otherwise only the axes that it depends on are known."""

    axes: frozenset[int]
    unit: int = 1
    count: int = 0


@dataclass(frozen=True)
class BlockWindow:
    """How the grid traverses an array: the shape of the window, and [dimensions] its index."""

    bounds: tuple[int, ...]
    index: tuple[BlockIndex, ...]

    @property
    def axes(self) -> frozenset[int]:
        return frozenset().union(*(index.axes for index in self.index))


@dataclass(frozen=True)
class Mosaic:
    """A Pallas kernel for TPU.

    Attributes:
        name: of the kernel's function. grid: its bounds, `DYNAMIC` for bounds that are operands.
        prefetched: operands in scalar memory, which follow the bounds of the grid.
        windows: of the operands after those, then of the results; None for an array without windows.
        reads: [axes of the grid] how the body reads that index: `UNREAD`, `READ`, or k if it only reads the remainder
            modulo k.
        ordered: True if its steps depend on each other, or on the device, other than by indices.
        work: of all steps together.
    """

    name: str
    grid: tuple[int, ...]
    prefetched: int
    windows: tuple[BlockWindow | None, ...]
    reads: tuple[int, ...]
    ordered: bool
    work: Work

    @property
    def ahead(self) -> int:
        """Number of operands in front of those with windows."""
        return self.grid.count(DYNAMIC) + self.prefetched


def config_of(text: str) -> dict[str, Any]:
    """The configuration that a custom call holds as JSON. Raises `KernelError`."""
    try:
        config: dict[str, Any] = json.loads(text)[CONFIG]
        if not isinstance(config["body"], str):
            raise KernelError("its configuration holds no body")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise KernelError("its configuration is no JSON that holds a body") from None
    return config


def parse_body(config: dict[str, Any]) -> Any:
    """The body as an `ir.Module` in a context of its own. Raises `KernelError`."""
    try:
        return xla.parse_kernel(base64.b64decode(config["body"], validate=True))
    except (binascii.Error, ir.MLIRError, RuntimeError):
        raise KernelError("its body is no kernel that can be read") from None


def main_of(module: Any) -> Any:
    """The kernel's function: the one with windows or a grid, or the only one. Raises `KernelError` if there is none."""
    functions = list(_operations(module.operation.regions[0].blocks[0]))
    for operation in functions:
        if "iteration_bounds" in operation.attributes or "window_params" in operation.attributes:
            return operation
    if len(functions) != 1:
        raise KernelError("it has no grid")
    return functions[0]


def read_mosaic(config: dict[str, Any], data: Callable[[int], Integers | None] = lambda _: None) -> Mosaic:
    """Reads the kernel of a configuration. data: the elements of an operand that is a constant.

    Raises `KernelError` for other kernels than those that JAX makes.
    """
    try:
        return _read(parse_body(config), data)
    except (AttributeError, LookupError, MemoryError, OverflowError, RuntimeError, TypeError, ValueError):
        raise KernelError("it does not look like a kernel of Pallas") from None


def _read(module: Any, data: Callable[[int], Integers | None]) -> Mosaic:
    """Reads the kernel; its function's arguments are grid indices, prefetched scalars, arrays, and scratch memory."""
    main = main_of(module)
    functions = {
        str(ir.StringAttr(operation.attributes["sym_name"]).value): operation
        for operation in _operations(module.operation.regions[0].blocks[0])
        if "sym_name" in operation.attributes
    }
    grid = tuple(int(n) for n in main.attributes["iteration_bounds"]) if "iteration_bounds" in main.attributes else ()
    if any(n <= 0 and n != DYNAMIC for n in grid):
        raise KernelError("a bound of its grid is not positive")
    prefetched = _integer(main, "scalar_prefetch")
    block = main.regions[0].blocks[0]
    arguments = list(block.arguments)
    arrays = len(arguments) - len(grid) - prefetched - _integer(main, "scratch_operands")
    stated = list(main.attributes["window_params"]) if "window_params" in main.attributes else [None] * arrays
    if arrays < 0 or len(stated) != arrays:
        raise KernelError("its function has another number of arguments than its grid and windows say")
    first = grid.count(DYNAMIC)
    scalars = [Integer(frozenset(), data(operand)) for operand in range(first, first + prefetched)]
    inside = [*grid_indices(grid), *scalars]
    windows = tuple(None if window is None else _window(window, functions, inside, grid) for window in stated)
    names, exchanging = _operations_by_name(main)
    semantics = [str(word) for word in main.attributes[SEMANTICS]] if SEMANTICS in main.attributes else []
    return Mosaic(
        str(ir.StringAttr(main.attributes["sym_name"]).value),
        grid,
        prefetched,
        windows,
        tuple(
            READ if CORES in word else _reading(arguments[axis], axis, names)
            for axis, word in enumerate([*semantics, *[""] * len(grid)][: len(grid)])
        ),
        exchanging or any(name.startswith("tpu.prng") for name in names),
        work_of(block, dict(zip(arguments, inside, strict=False)), grid),
    )


def _operations(block: Any) -> Iterator[Any]:
    for view in block.operations:
        yield view.operation


def _integer(operation: Any, name: str) -> int:
    return int(ir.IntegerAttr(operation.attributes[name]).value) if name in operation.attributes else 0


def _window(stated: Any, functions: dict[str, Any], inputs: list[Integer], grid: tuple[int, ...]) -> BlockWindow | None:
    """One array's window; None for an array that the body copies itself."""
    attributes = {item.name: item.attr for item in ir.DictAttr(stated)}
    if "transform_indices" not in attributes:
        return None
    bounds = tuple(int(n) for n in attributes["window_bounds"])
    block = functions[str(ir.FlatSymbolRefAttr(attributes["transform_indices"]).value)].regions[0].blocks[0]
    if len(block.arguments) != len(inputs):
        raise KernelError("a map of its indices has another number of arguments than its grid says")
    if any(len(operation.regions) for operation in _operations(block)):
        raise KernelError("a map of its indices has branches or loops")
    integers = IntegerValues(dict(zip(block.arguments, inputs, strict=True)))
    returned = list(terminator(block).operands)
    if len(returned) != len(bounds) or any(n <= 0 for n in bounds):
        raise KernelError("a map of its indices has another number of dimensions than its window")
    by_elements = "window_kind" in attributes  # its indices count elements, not windows
    return BlockWindow(
        bounds,
        tuple(BlockIndex(integers.axes(value)) if by_elements else _index(integers, value, grid) for value in returned),
    )


def _index(integers: IntegerValues, handle: Any, grid: tuple[int, ...]) -> BlockIndex:
    """An index that is a digit of one axis of the grid, or the axes that it depends on."""
    axes = integers.axes(handle)
    values = integers.values(handle) if len(axes) == 1 else None
    if values is None or values.size != prod(grid[axis] for axis in axes):
        return BlockIndex(axes)
    values = values.ravel()
    changes = np.flatnonzero(values != values[0])
    unit = int(changes[0]) if len(changes) else len(values)
    count = int(values.max()) + 1
    if count < 1 or not np.array_equal(values, np.arange(len(values)) // unit % count):
        return BlockIndex(axes)
    return BlockIndex(axes, unit, count)


def _reading(index: Any, axis: int, names: dict[str, list[Any]]) -> int:
    """How the body reads an index of the grid: `UNREAD`, `READ` or a modulus."""
    if any(_integer(operation, "dim") == axis for operation in names.get("tpu.iteration_bound", ())):
        return READ
    units = {_divisor(use) for use in index.uses}
    return UNREAD if not units else max(units) if len(units) == 1 else READ


def _divisor(use: Any) -> int:
    """k, if a use takes the remainder modulo the constant k; `READ` for any other use."""
    operation = use.owner.operation
    if short_name(operation) not in ("arith.remsi", "arith.remui") or use.operand_number:
        return READ
    by = operation.operands[1].owner
    if isinstance(by, ir.Block) or short_name(by) != "arith.constant":
        return READ
    value = by.attributes["value"]
    return max(int(value.value), READ) if isinstance(value, ir.IntegerAttr) else READ


def _operations_by_name(main: Any) -> tuple[dict[str, list[Any]], bool]:
    """The operations of a body by name, and True if it communicates with other devices."""
    names: dict[str, list[Any]] = {}
    for operation in operations_in(main):
        names.setdefault(short_name(operation), []).append(operation)
    remote = any(name in names for name in ("tpu.device_id", "tpu.sem_barrier", "tpu.get_barrier_semaphore"))
    for name, segment in DEVICE_SEGMENT.items():
        for operation in names.get(name, ()):
            sizes = operation.attributes.get("operandSegmentSizes", ())
            remote = remote or [*sizes, *[0] * 8][segment] > 0
    return names, remote


# ---------------------------------------------------------------- the sharding rule
# Derives a Pallas kernel's sharding rule: the independent dimensions of its arrays.
#
# An axis of the grid can be split over devices if the body does not read its index and every array has at most one
# dimension whose windows follow that index. The axis is then a factor, or several if arrays follow it at different
# strides: with grouped heads the queries follow the axis itself, and keys and values the axis divided by the size of a
# group. Dimensions are split into whole windows only, so a window is a separate, unsharded factor. Unread results do
# not count.

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Digit:
    """A part of an axis of the grid: `(index // unit) % count`."""

    axis: int
    unit: int
    count: int


def grid_rule(
    kernel: Mosaic, operands: list[Shape], results: list[Shape], read: list[bool]
) -> tuple[Rule, tuple[int, ...]] | None:
    """The rule of a kernel with operands and results of these shapes, and [factors] the axis of the grid that a factor
    is a part of, -1 for none. None if no axis can be split, or the shapes do not match the windows.

    Args:
        read: [results] True if anything reads it.
    """
    if len(operands) + len(results) != kernel.ahead + len(kernel.windows):
        return None
    shapes = [*operands, *results]
    windows = [*[None] * kernel.ahead, *kernel.windows]
    if any(
        window is not None and len(window.bounds) != len(shape) for window, shape in zip(windows, shapes, strict=True)
    ):
        return None
    used = [True] * len(operands) + read
    digits: list[_Digit] = []
    for axis in range(0 if kernel.ordered else len(kernel.grid)):
        digits += _digits(kernel, axis, windows, shapes, used, len(operands))
    numbers = {digit: number for number, digit in enumerate(digits)}
    sizes, axes, unsharded = [digit.count for digit in digits], [digit.axis for digit in digits], set[int]()
    same: dict[tuple[BlockIndex, int], int] = {}

    def rest(size: int, index: BlockIndex | None = None, every: int = 0) -> int:
        """An unsharded factor; dimensions with equal windows share it."""
        factor = same.get((index, every)) if index is not None and index.axes else None
        if factor is None:
            factor = len(sizes)
            sizes.append(size)
            axes.append(-1)
            unsharded.add(factor)
            if index is not None and index.axes:
                same[index, every] = factor
        return factor

    def factors(window: BlockWindow | None, shape: Shape) -> ValueFactors:
        dims = []
        for d, size in enumerate(shape):
            index = window.index[d] if window is not None else None
            follows = window is not None and _is_whole(window, d, shape)
            own = tuple(numbers[digit] for digit in digits if index is not None and follows and _has(index, digit))
            remainder = size // prod(sizes[factor] for factor in own)
            if not own:
                own = (rest(size, index, size),)
            elif remainder > 1:
                own = (*own, rest(remainder, index, size))
            dims.append(own)
        return tuple(dims)

    arrays = [factors(window, shape) for window, shape in zip(windows, shapes, strict=True)]
    rule = Rule(
        tuple(sizes), tuple(arrays[: len(operands)]), tuple(arrays[len(operands) :]), frozenset(), frozenset(unsharded)
    )
    return (rule, tuple(axes)) if digits else None


def _has(index: BlockIndex, digit: _Digit) -> bool:
    """True if the index has the digit: its unit is at most the digit's, and its range covers the digit's."""
    return bool(
        index.count
        and index.axes == {digit.axis}
        and index.unit <= digit.unit
        and digit.unit * digit.count <= index.unit * index.count
    )


def _digits(
    kernel: Mosaic, axis: int, windows: list[BlockWindow | None], shapes: list[Shape], used: list[bool], operands: int
) -> list[_Digit]:
    """The parts of an axis that can be split, the most significant first: a single one if all arrays follow it alike.

    Given an axis of 8 query heads in groups of 4, which queries follow one by one and keys in steps of 4, the parts are
    `(index // 4) % 2` and `index % 4`. Keys have the first one alone.

    Args:
        used: [operands and results] True if the array is used. operands: how many of them are operands.
    """
    size, read = kernel.grid[axis], kernel.reads[axis]
    if size == DYNAMIC or size < 2 or read == READ or size % read:
        return []
    following: list[tuple[int, BlockIndex]] = []  # array, index
    for k, (window, shape) in enumerate(zip(windows, shapes, strict=True)):
        if window is None or axis not in window.axes:
            continue
        dims = [d for d, index in enumerate(window.index) if axis in index.axes]
        if any(not window.index[d].count or not _is_whole(window, d, shape) for d in dims):
            if used[k]:
                return []
            continue
        following += [(k, window.index[d]) for d in dims]
    bounds = {1, size, read} | {n for _, index in following for n in (index.unit, index.unit * index.count)}
    units = sorted(unit for unit in bounds if unit <= size)
    if any(upper % lower for lower, upper in pairwise(units)):
        return []
    every = [_Digit(axis, lower, upper // lower) for lower, upper in pairwise(units)]
    results = [k for k in range(operands, len(windows)) if used[k]]
    free_digits: list[_Digit] = []
    for digit in reversed(every):
        counts = {k: sum(_has(index, digit) for j, index in following if j == k) for k in range(len(windows))}
        free = digit.unit >= read and all(n <= 1 for n in counts.values()) and all(counts[k] == 1 for k in results)
        # Devices have a contiguous range of the axis: a lower digit can be split only if all above it are split
        # completely, which the order of factors within one dimension ensures.
        above = not free_digits or any(all(_has(index, d) for d in (*free_digits, digit)) for _, index in following)
        if not (free and above):
            break
        free_digits.append(digit)
    return free_digits if results else []


def _is_whole(window: BlockWindow, dim: int, shape: Shape) -> bool:
    """True if a dimension consists of whole windows, as many as its index counts."""
    return shape[dim] == window.index[dim].count * window.bounds[dim]


# ---------------------------------------------------------------- arithmetic
# Counts a Pallas kernel's arithmetic: that of its body, times the steps of its grid on which each part runs.
#
# A branch on grid indices counts for the steps on which it is taken: a causal kernel skips about half of its steps. A
# branch on data always counts, and a loop of unknown length counts once; `Work.assumed` says so.

PRODUCTS = ("tpu.matmul", "vector.contract")
_CONTRACTED = re.compile(r"dimension_numbers<\[([\d, ]*)\]")


@dataclass(frozen=True)
class Work:
    """Arithmetic of a kernel over its whole grid.

    Attributes:
        products: operations of the matrix unit; a multiply-add counts 2. vector: elementwise ones and reductions.
        skipped: fraction of the arithmetic that branches on grid indices skip, between 0 and 1. assumed: what the
            counts assume: "as if ...".
    """

    products: float = 0.0
    vector: float = 0.0
    skipped: float = 0.0
    assumed: tuple[str, ...] = ()

    @property
    def flops(self) -> float:
        return self.products + self.vector


def work_of(block: Any, arguments: dict[Any, Integer], grid: tuple[int, ...]) -> Work:
    """The work of a body over its grid. A bound of the grid that the program computes counts as 1."""
    counter = _Counter(IntegerValues(arguments))
    counter.block(block, 1.0, 1.0)
    if not counter.integers.complete:
        counter.assumed["it skipped no step: its grid is too large to look at each"] = None
    steps = prod(n for n in grid if n != DYNAMIC)
    done, unskipped = counter.flops, counter.unskipped
    return Work(
        counter.products * steps,
        (done - counter.products) * steps,
        1.0 - done / unskipped if unskipped else 0.0,
        tuple(counter.assumed),
    )


class _Counter:
    """Sums the arithmetic of one step, averaged over all steps. unskipped: as if no branch were skipped."""

    def __init__(self, integers: IntegerValues) -> None:
        self.integers = integers
        self.assumed: dict[str, None] = {}
        self.products = self.flops = self.unskipped = 0.0

    def block(self, block: Any, times: float, unskipped_times: float) -> None:
        for view in block.operations:
            operation = view.operation
            name = short_name(operation)
            if len(operation.regions) == 0:
                self._count(operation, name, times, unskipped_times)
                continue
            for part, region in zip(self._parts(operation, name), operation.regions, strict=False):
                runs, unskipped_runs = part
                for inner in region.blocks:
                    self.block(inner, times * runs, unskipped_times * unskipped_runs)

    def _parts(self, operation: Any, name: str) -> list[tuple[float, float]]:
        """For each region of an operation, its runs per run of the operation; and its runs if no branch on grid indices
        skipped anything."""
        if name == "scf.if":
            values = self.integers.values(operation.operands[0])
            other = len(operation.regions) > 1 and any(len(b.operations) > 1 for b in operation.regions[1].blocks)
            if values is None:
                return [(0.5, 0.5)] * 2 if other else [(1.0, 1.0)] * 2
            fraction = float(np.mean(values != 0))
            return [(fraction, fraction if other else 1.0), (1.0 - fraction, 1.0 - fraction)]
        if name == "scf.for" and len(operation.operands) >= 3:
            bounds = [self.integers.values(operand) for operand in list(operation.operands)[:3]]
            start, end, step = bounds
            if start is not None and end is not None and step is not None:
                trips = float(np.mean(np.maximum(0, np.ceil((end - start) / np.maximum(step, 1)))))
                return [(trips, trips)]
        if name in ("scf.for", "scf.while"):
            self.assumed["its loops of unknown length ran once"] = None
        return [(1.0, 1.0)] * len(operation.regions)

    def _count(self, operation: Any, name: str, times: float, unskipped_times: float) -> None:
        if len(operation.results) != 1:
            return
        elements = _elements(operation.results[0].type)
        if name in PRODUCTS:
            flops = _product_flops(operation, elements)
            self.products += flops * times
        elif name in ("vector.multi_reduction", "tpu.all_reduce", "vector.reduction"):
            flops = _elements(operation.operands[0].type)
        elif name.startswith("math.") or (name.startswith("arith.") and name.endswith("f") and elements > 1):
            flops = elements
        else:
            return
        self.flops += flops * times
        self.unskipped += flops * unskipped_times


def _elements(kind: Any) -> float:
    return float(prod(kind.shape)) if isinstance(kind, ir.ShapedType) and kind.has_rank else 1.0


def _product_flops(operation: Any, elements: float) -> float:
    """2 times the elements of the result times those along the contracted dimensions."""
    left, right = operation.operands[0].type, operation.operands[1].type
    attributes = operation.attributes
    stated = _CONTRACTED.search(str(attributes["dimension_numbers"])) if "dimension_numbers" in attributes else None
    if stated:
        dims = [int(d) for d in stated[1].split(",") if d.strip()]
        return 2.0 * elements * float(prod(left.shape[d] for d in dims))
    return 2.0 * elements * sqrt(_elements(left) * _elements(right) / max(elements, 1.0))


# ---------------------------------------------------------------- integers of the grid
# Evaluates the integers that a Pallas kernel computes from its grid indices.

Integers = NDArray[np.int64]
DYNAMIC = -(2**63)  # a bound of the grid that the program computes
PREFIX = "stable_mosaic."
# An axis of the grid has at most so many steps, and the values that a kernel's branches depend on take 256 MB.
MOST_VALUES = 1 << 25


class Integer(NamedTuple):
    """An integer of a kernel: the grid axes that it depends on, and its values, which broadcast to the grid; None if
    unknown. For an array in scalar memory, the values are its elements."""

    axes: frozenset[int]
    values: Integers | None


def short_name(operation: Any) -> str:
    """An operation's name without the prefix of the serialised form: `arith.addi`."""
    return str(operation.name).removeprefix(PREFIX)


def grid_indices(grid: tuple[int, ...]) -> list[Integer]:
    """[axes] the indices of a grid, each along its own dimension. Raises `KernelError` if an axis is too long."""
    if max(grid, default=0) > MOST_VALUES:
        raise KernelError(f"an axis of its grid has more than {MOST_VALUES:,} steps")
    indices = []
    for axis, size in enumerate(grid):
        shape = [1] * len(grid)
        shape[axis] = -1
        values = np.arange(size, dtype=np.int64).reshape(shape) if size != DYNAMIC else None
        indices.append(Integer(frozenset([axis]), values))
    return indices


class IntegerValues:
    """The integers of a kernel, computed when they are asked for.

    Args:
        outside: arguments of the kernel.

    Attributes:
        complete: False if a value that was asked for is unknown because it would have too many elements.
    """

    def __init__(self, outside: dict[Any, Integer]) -> None:
        self._axes = {handle: integer.axes for handle, integer in outside.items()}
        self._values = {handle: integer.values for handle, integer in outside.items()}
        self._room = MOST_VALUES
        self.complete = True

    def axes(self, handle: Any) -> frozenset[int]:
        """The grid axes that a value depends on; none for an argument that is not known."""
        waiting = [handle]
        while waiting:
            value = waiting[-1]
            operands = () if isinstance(value, ir.BlockArgument) else value.owner.operands
            unknown = [operand for operand in operands if operand not in self._axes]
            if value not in self._axes and not unknown:
                self._axes[value] = frozenset().union(*(self._axes[operand] for operand in operands))
            if value in self._axes:
                waiting.pop()
            waiting += unknown if value not in self._axes else []
        return self._axes[handle]

    def values(self, handle: Any) -> Integers | None:
        """[grid, of size 1 along axes that it does not depend on] a value; None if it is unknown."""
        waiting = [handle]
        while waiting:
            value = waiting.pop()
            if value in self._values:
                continue
            operation = None if isinstance(value, ir.BlockArgument) else value.owner
            operands = operation.operands if operation is not None and _is_computed(operation) else ()
            unknown = next((operand for operand in operands if operand not in self._values), None)
            if unknown is not None and all(self._values.get(operand, 0) is not None for operand in operands):
                waiting += [value, unknown]
            else:
                self._values[value] = None if operation is None else self._result(operation)
        return self._values[handle]

    def _result(self, operation: Any) -> Integers | None:
        name = short_name(operation)
        if name == "arith.constant":
            return _constant(operation)
        if not _is_computed(operation):
            return None
        operands = []
        for operand in operation.operands:
            values = self._values.get(operand)
            if values is None:
                return None
            operands.append(values)
        self._room -= prod(np.broadcast_shapes(*(values.shape for values in operands[name == LOAD :])))
        if self._room < 0:
            self.complete = False
            return None
        with np.errstate(all="ignore"):
            return _OPERATIONS[name](operation, *operands)


def _is_computed(operation: Any) -> bool:
    return short_name(operation) in _OPERATIONS and len(operation.results) == 1


def _constant(operation: Any) -> Integers | None:
    value = operation.attributes["value"]
    if isinstance(value, ir.BoolAttr):
        return np.array(int(value.value))
    return np.array(int(value.value)) if isinstance(value, ir.IntegerAttr) else None


def _loaded(_: Any, array: Integers, *indices: Integers) -> Integers | None:
    """Elements loaded from an array in scalar memory."""
    if array.ndim != len(indices) or not array.size:
        return None
    bounded = [np.clip(index, 0, size - 1) for index, size in zip(indices, array.shape, strict=True)]
    loaded: Integers = array[tuple(np.broadcast_arrays(*bounded))]
    return loaded


def _divide(_: Any, left: Integers, right: Integers) -> Integers:
    """Rounds towards zero."""
    return np.where(right == 0, 0, np.sign(left) * np.sign(right) * (abs(left) // np.maximum(abs(right), 1)))


def _remainder(operation: Any, left: Integers, right: Integers) -> Integers:
    return left - _divide(operation, left, right) * right


_PREDICATES: list[Callable[[Integers, Integers], Any]] = [
    np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal,
    np.less, np.less_equal, np.greater, np.greater_equal,
]  # fmt: skip


def _compare(operation: Any, left: Integers, right: Integers) -> Integers:
    number = int(ir.IntegerAttr(operation.attributes["predicate"]).value)
    return np.asarray(_PREDICATES[number](left, right), dtype=np.int64)


def _select(_: Any, condition: Integers, left: Integers, right: Integers) -> Integers:
    return np.where(condition != 0, left, right)


def _same(_: Any, value: Integers) -> Integers:
    return value


LOAD = "memref.load"
_OPERATIONS: dict[str, Callable[..., Integers | None]] = {
    LOAD: _loaded,
    "arith.addi": lambda _, a, b: a + b,
    "arith.andi": lambda _, a, b: a & b,
    "arith.ceildivsi": lambda _, a, b: -((-a) // np.where(b == 0, 1, b)),
    "arith.cmpi": _compare,
    "arith.divsi": _divide,
    "arith.divui": _divide,
    "arith.extsi": _same,
    "arith.extui": _same,
    "arith.floordivsi": lambda _, a, b: a // np.where(b == 0, 1, b),
    "arith.index_cast": _same,
    "arith.maxsi": lambda _, a, b: np.maximum(a, b),
    "arith.minsi": lambda _, a, b: np.minimum(a, b),
    "arith.muli": lambda _, a, b: a * b,
    "arith.ori": lambda _, a, b: a | b,
    "arith.remsi": _remainder,
    "arith.remui": _remainder,
    "arith.select": _select,
    "arith.subi": lambda _, a, b: a - b,
    "arith.trunci": _same,
    "arith.xori": lambda _, a, b: a ^ b,
}
