"""Derives a Pallas kernel's sharding rule: the independent dimensions of its arrays.

An axis of the grid can be split over devices if the body does not read its index and every array has at most one
dimension whose windows follow that index. The axis is then a factor, or several if arrays follow it at different
strides: with grouped heads the queries follow the axis itself, and keys and values the axis divided by the size of a
group. Dimensions are split into whole windows only, so a window is a separate, unsharded factor. Unread results do not
count.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod

from toast_cli.kernels.index_maps import DYNAMIC
from toast_cli.kernels.mosaic import READ, BlockIndex, Mosaic, Window
from toast_cli.program.model import Rule, ValueFactors

Shape = tuple[int, ...]


@dataclass(frozen=True)
class GridRule:
    """A sharding rule; axes: [factors] the axis of the grid that a factor is a part of, -1 for none."""

    rule: Rule
    axes: tuple[int, ...]


@dataclass(frozen=True)
class _Digit:
    """A part of an axis of the grid: `(index // unit) % count`."""

    axis: int
    unit: int
    count: int


def grid_rule(kernel: Mosaic, operands: list[Shape], results: list[Shape], read: list[bool]) -> GridRule | None:
    """The rule of a kernel with operands and results of these shapes; None if they do not match its windows.

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
    sizes, axes, whole = [digit.count for digit in digits], [digit.axis for digit in digits], set[int]()
    same: dict[tuple[BlockIndex, int], int] = {}

    def rest(size: int, index: BlockIndex | None = None, every: int = 0) -> int:
        """An unsharded factor; dimensions with equal windows share it."""
        known = same.get((index, every)) if index is not None and index.axes else None
        if known is None:
            known = len(sizes)
            sizes.append(size)
            axes.append(-1)
            whole.add(known)
            if index is not None and index.axes:
                same[index, every] = known
        return known

    def factors(window: Window | None, shape: Shape) -> ValueFactors:
        found = []
        for d, size in enumerate(shape):
            index = window.index[d] if window is not None else None
            follows = window is not None and _is_whole(window, d, shape)
            own = tuple(numbers[digit] for digit in digits if index is not None and follows and _has(index, digit))
            left = size // prod(sizes[factor] for factor in own)
            if not own:
                own = (rest(size, index, size),)
            elif left > 1:
                own = (*own, rest(left, index, size))
            found.append(own)
        return tuple(found)

    arrays = [factors(window, shape) for window, shape in zip(windows, shapes, strict=True)]
    rule = Rule(
        tuple(sizes), tuple(arrays[: len(operands)]), tuple(arrays[len(operands) :]), frozenset(), frozenset(whole)
    )
    return GridRule(rule, tuple(axes))


def _has(index: BlockIndex, digit: _Digit) -> bool:
    """True if the index has the digit: its unit is at most the digit's, and its range covers the digit's."""
    return bool(
        index.count
        and index.axes == {digit.axis}
        and index.unit <= digit.unit
        and digit.unit * digit.count <= index.unit * index.count
    )


def _digits(
    kernel: Mosaic, axis: int, windows: list[Window | None], shapes: list[Shape], used: list[bool], operands: int
) -> list[_Digit]:
    """The parts of an axis that can be split, the most significant first: a single one if all arrays follow it alike.

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
        mine = [d for d, index in enumerate(window.index) if axis in index.axes]
        if any(not window.index[d].count or not _is_whole(window, d, shape) for d in mine):
            if used[k]:
                return []
            continue
        following += [(k, window.index[d]) for d in mine]
    bounds = {1, size, read} | {at for _, one in following for at in (one.unit, one.unit * one.count)}
    units = sorted(unit for unit in bounds if unit <= size)
    if any(upper % lower for lower, upper in pairwise(units)):
        return []
    every = [_Digit(axis, lower, upper // lower) for lower, upper in pairwise(units)]
    results = [k for k in range(operands, len(windows)) if used[k]]
    found: list[_Digit] = []
    for digit in reversed(every):
        counts = {k: sum(_has(index, digit) for j, index in following if j == k) for k in range(len(windows))}
        free = digit.unit >= read and all(n <= 1 for n in counts.values()) and all(counts[k] == 1 for k in results)
        # Devices have a contiguous range of the axis: a lower digit can be split only if all above it are split
        # completely, which the order of factors within one dimension ensures.
        above = not found or any(all(_has(index, one) for one in (*found, digit)) for _, index in following)
        if not (free and above):
            break
        found.append(digit)
    return found if results else []


def _is_whole(window: Window, dim: int, shape: Shape) -> bool:
    """True if a dimension consists of whole windows, as many as its index counts."""
    return shape[dim] == window.index[dim].count * window.bounds[dim]
