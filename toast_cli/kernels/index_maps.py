"""Evaluates the integers that a Pallas kernel computes from its grid indices.

In: values of a parsed kernel. Out: for each that is asked for the grid axes that it depends on and, if they can be
computed, its numbers at every point of these axes, never of the whole grid.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from toast_cli.kernels.errors import KernelError
from toast_cli.xla import ir

Integers = NDArray[np.int64]
DYNAMIC = -(2**63)  # a bound of the grid that the program computes
PREFIX = "stable_mosaic."
# An axis of the grid has at most so many steps, and the values that a kernel's branches depend on take 256 MB.
MOST_VALUES = 1 << 25


class Known(NamedTuple):
    """An integer of a kernel: the grid axes that it depends on, and its values, which broadcast to the grid; None if
    unknown. For an array in scalar memory, the values are its elements."""

    axes: frozenset[int]
    values: Integers | None


def short_name(operation: Any) -> str:
    """An operation's name without the prefix of the serialised form: `arith.addi`."""
    return str(operation.name).removeprefix(PREFIX)


def grid_indices(grid: tuple[int, ...]) -> list[Known]:
    """[axes] the indices of a grid, each along its own dimension. Raises `KernelError` if an axis is too long."""
    if max(grid, default=0) > MOST_VALUES:
        raise KernelError(f"an axis of its grid has more than {MOST_VALUES:,} steps")
    indices = []
    for axis, size in enumerate(grid):
        shape = [1] * len(grid)
        shape[axis] = -1
        values = np.arange(size, dtype=np.int64).reshape(shape) if size != DYNAMIC else None
        indices.append(Known(frozenset([axis]), values))
    return indices


class IntegerValues:
    """The integers of a kernel, computed when they are asked for.

    Args:
        known: values from outside (arguments of blocks).

    Attributes:
        complete: False if a value that was asked for is unknown because it would have too many elements.
    """

    def __init__(self, known: dict[Any, Known]) -> None:
        self._axes = {handle: value.axes for handle, value in known.items()}
        self._values = {handle: value.values for handle, value in known.items()}
        self._room = MOST_VALUES
        self.complete = True

    def axes(self, handle: Any) -> frozenset[int]:
        """The grid axes that a value depends on; none for an argument that is not known."""
        if handle not in self._axes:
            operands = () if isinstance(handle, ir.BlockArgument) else handle.owner.operands
            self._axes[handle] = frozenset().union(*map(self.axes, operands))
        return self._axes[handle]

    def values(self, handle: Any) -> Integers | None:
        """[grid, of size 1 along axes that it does not depend on] a value; None if it is unknown."""
        if handle not in self._values:
            self._values[handle] = None if isinstance(handle, ir.BlockArgument) else self._result(handle.owner)
        return self._values[handle]

    def _result(self, operation: Any) -> Integers | None:
        name = short_name(operation)
        if name == "arith.constant":
            return _constant(operation)
        if name not in _OPERATIONS or len(operation.results) != 1:
            return None
        operands = []
        for operand in operation.operands:
            values = self.values(operand)
            if values is None:
                return None
            operands.append(values)
        self._room -= prod(np.broadcast_shapes(*(values.shape for values in operands[name == LOAD :])))
        if self._room < 0:
            self.complete = False
            return None
        with np.errstate(all="ignore"):
            return _OPERATIONS[name](operation, *operands)


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
