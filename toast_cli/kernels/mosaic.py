"""Reads a Pallas kernel for TPU: its grid, its windows, and how its body uses the grid indices.

In: the configuration of a `tpu_custom_call`, which holds the kernel as MLIR bytecode. Out: a `Mosaic`, plain
data, or a `KernelError` for an unknown form.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from toast_cli import xla
from toast_cli.kernels.errors import KernelError
from toast_cli.kernels.index_maps import DYNAMIC, Integers, IntegerValues, Known, grid_indices, short_name
from toast_cli.kernels.mosaic_work import Work, work_of
from toast_cli.xla import ADVANCE, ir

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
class Window:
    """How the grid traverses an array: the shape of the window, and [dimensions] its index."""

    bounds: tuple[int, ...]
    index: tuple[BlockIndex, ...]

    @property
    def axes(self) -> frozenset[int]:
        return frozenset().union(*(one.axes for one in self.index))


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
    windows: tuple[Window | None, ...]
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
        config = json.loads(text)[CONFIG]
        if not isinstance(config["body"], str):
            raise KernelError("its configuration holds no body")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise KernelError("its configuration is no JSON that holds a body") from None
    found: dict[str, Any] = config
    return found


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
    main = main_of(module)
    functions = {
        str(ir.StringAttr(one.attributes["sym_name"]).value): one
        for one in _operations(module.operation.regions[0].blocks[0])
        if "sym_name" in one.attributes
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
    held = [Known(frozenset(), data(operand)) for operand in range(first, first + prefetched)]
    inside = [*grid_indices(grid), *held]
    windows = tuple(None if one is None else _window(one, functions, inside, grid) for one in stated)
    names, exchanging = _found_in(main)
    semantics = [str(one) for one in main.attributes[SEMANTICS]] if SEMANTICS in main.attributes else []
    return Mosaic(
        str(ir.StringAttr(main.attributes["sym_name"]).value),
        grid,
        prefetched,
        windows,
        tuple(
            READ if CORES in said else _reading(arguments[axis], axis, names)
            for axis, said in enumerate([*semantics, *[""] * len(grid)][: len(grid)])
        ),
        exchanging or any(name.startswith("tpu.prng") for name in names),
        work_of(block, dict(zip(arguments, inside, strict=False)), grid),
    )


def _operations(block: Any) -> Iterator[Any]:
    for view in block.operations:
        yield view.operation


def _integer(operation: Any, name: str) -> int:
    return int(ir.IntegerAttr(operation.attributes[name]).value) if name in operation.attributes else 0


def _window(stated: Any, functions: dict[str, Any], known: list[Known], grid: tuple[int, ...]) -> Window | None:
    """One array's window; None for an array that the body copies itself."""
    said = {item.name: item.attr for item in ir.DictAttr(stated)}
    if "transform_indices" not in said:
        return None
    bounds = tuple(int(n) for n in said["window_bounds"])
    block = functions[str(ir.FlatSymbolRefAttr(said["transform_indices"]).value)].regions[0].blocks[0]
    if len(block.arguments) != len(known):
        raise KernelError("a map of its indices has another number of arguments than its grid says")
    if any(len(operation.regions) for operation in _operations(block)):
        raise KernelError("a map of its indices has branches or loops")
    integers = IntegerValues(dict(zip(block.arguments, known, strict=True)))
    returned = list(block.operations[len(block.operations) - 1].operands)
    if len(returned) != len(bounds) or any(n <= 0 for n in bounds):
        raise KernelError("a map of its indices has another number of dimensions than its window")
    by_elements = "window_kind" in said  # its indices count elements, not windows
    return Window(
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
    if any(_integer(one, "dim") == axis for one in names.get("tpu.iteration_bound", ())):
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


def _found_in(main: Any) -> tuple[dict[str, list[Any]], bool]:
    """The operations of a body by name, and True if it communicates with other devices."""
    names: dict[str, list[Any]] = {}

    def visit(operation: Any) -> Any:
        names.setdefault(short_name(operation), []).append(operation)
        return ADVANCE

    main.walk(visit)
    remote = any(name in names for name in ("tpu.device_id", "tpu.sem_barrier", "tpu.get_barrier_semaphore"))
    for name, segment in DEVICE_SEGMENT.items():
        for operation in names.get(name, ()):
            sizes = operation.attributes.get("operandSegmentSizes", ())
            remote = remote or [*sizes, *[0] * 8][segment] > 0
    return names, remote
