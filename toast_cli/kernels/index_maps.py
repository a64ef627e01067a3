"""Evaluates the integers that a Pallas kernel computes from its grid indices.

In: a block of a parsed kernel and its grid. Out: for each integer of the block the grid axes that it depends on
and, if known, its values at every point of the grid.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from toast_cli.xla import ir

Integers = NDArray[np.int64]
DYNAMIC = -(2**63)  # a bound of the grid that the program computes
PREFIX = "stable_mosaic."
# Values are computed for grids of at most this many points.
MOST_POINTS = 4_000_000
# Values of one block take at most 128 MB.
MOST_VALUES = 16_000_000


class Known(NamedTuple):
    """An integer of a kernel: the grid axes that it depends on, and its values, which broadcast to the grid; None if
    unknown. For an array in scalar memory, the values are its elements."""

    axes: frozenset[int]
    values: Integers | None


def short_name(operation: Any) -> str:
    """An operation's name without the prefix of the serialised form: `arith.addi`."""
    return str(operation.name).removeprefix(PREFIX)


def grid_indices(grid: tuple[int, ...]) -> list[Known]:
    """[axes] the indices of a grid, each along its own dimension."""
    small = all(n > 0 for n in grid if n != DYNAMIC) and prod(n for n in grid if n > 0) <= MOST_POINTS
    found = []
    for axis, size in enumerate(grid):
        shape = [1] * len(grid)
        shape[axis] = -1
        known = small and size > 0
        found.append(Known(frozenset([axis]), np.arange(size, dtype=np.int64).reshape(shape) if known else None))
    return found


class Integer:
    """Evaluates the integers of a kernel in program order. known: values from outside (arguments of blocks)."""

    def __init__(self, known: dict[Any, Known]) -> None:
        self.known = known
        self.room = MOST_VALUES

    def of(self, handle: Any) -> Known:
        """What is known of a value; an unvisited value does not depend on the grid."""
        return self.known.get(handle, Known(frozenset(), None))

    def visit(self, operation: Any) -> None:
        """Evaluates the results of an operation as far as its operands are known."""
        results = operation.results
        if len(results) == 0:
            return
        operands = [self.of(operand) for operand in operation.operands]
        axes = frozenset().union(*(one.axes for one in operands))
        values = None
        if len(results) == 1:
            name = short_name(operation)
            arrays = [one.values for one in operands]
            if name == "arith.constant":
                values = _constant(operation)
            elif name == "memref.load":
                values = _loaded(arrays)
            elif name in _ARITHMETIC and all(array is not None for array in arrays):
                with np.errstate(all="ignore"):
                    values = _ARITHMETIC[name](operation, *arrays)
            self.room -= values.size if values is not None else 0
            values = values if self.room >= 0 else None
        for result in results:
            self.known[result] = Known(axes, values)


def _constant(operation: Any) -> Integers | None:
    value = operation.attributes["value"]
    if isinstance(value, ir.BoolAttr):
        return np.array(int(value.value))
    return np.array(int(value.value)) if isinstance(value, ir.IntegerAttr) else None


def _loaded(arrays: list[Integers | None]) -> Integers | None:
    """Elements loaded from an array in scalar memory."""
    array, *indices = arrays
    if array is None or array.ndim != len(indices):
        return None
    places = [index for index in indices if index is not None]
    if len(places) < len(indices) or not array.size:
        return None
    bounded = [np.clip(place, 0, size - 1) for place, size in zip(places, array.shape, strict=True)]
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


_ARITHMETIC: dict[str, Callable[..., Integers]] = {
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
