"""Halo exchanges as cost items: equal arrays that are read through windows form one item, and all ops that read an
array share its exchange. `plan.halo` says what is exchanged under a plan.

In: a `Problem`. Out: `NeighbourItem`s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from toast_cli.plan.halo import WindowRead, read_of, windowed
from toast_cli.plan.op_sharding import OpSharding
from toast_cli.plan.problem import Problem
from toast_cli.program.model import Window

NeighbourReader = tuple[int, tuple[Window, ...]]  # pattern and windows of an op


@dataclass(frozen=True, slots=True)
class NeighbourItem:
    """Arrays of equal size that ops in one loop read through windows. bytes: of one array. readers: distinct ones.
    runs: reads of all these arrays in one run of the program, one reader each. op, value: one reader, and what it
    reads."""

    bytes: int
    readers: tuple[NeighbourReader, ...]
    runs: float
    op: int
    value: int

    @property
    def patterns(self) -> frozenset[int]:
        """Patterns that determine what is exchanged."""
        return frozenset([pattern for pattern, _ in self.readers])

    def reads(self, lowered: Mapping[int, OpSharding]) -> list[WindowRead]:
        """[readers] how each reads the array. lowered: pattern -> its op sharding."""
        return [read_of(windows, lowered[pattern]) for pattern, windows in self.readers]


def neighbour_items(problem: Problem) -> tuple[NeighbourItem, ...]:
    """All arrays of the program that are read through windows."""
    program, pattern = problem.program, problem.op_pattern
    runs: dict[tuple[int, tuple[NeighbourReader, ...]], float] = defaultdict(float)
    example: dict[tuple[int, tuple[NeighbourReader, ...]], tuple[int, int]] = {}
    for value, array in enumerate(program.values):
        for _, readers in windowed(program, value):
            ops = [program.ops[number] for number in readers]
            unlike = dict.fromkeys((pattern[n], op.windows) for n, op in zip(readers, ops, strict=True))
            key = array.bytes, tuple(unlike)
            runs[key] += max(op.trips for op in ops)
            example.setdefault(key, (readers[0], value))
    return tuple(NeighbourItem(*key, count, *example[key]) for key, count in runs.items())
