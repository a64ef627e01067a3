"""The program boiled down to different cost items: work items (ops that cost alike) and array items (values that do).

Enters: a `Problem`. Leaves: `Items`, each with how many ops or values it stands for. Layouts are not known yet: an item says
which op patterns decide them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from toast_cli.cost.fusion import materialised
from toast_cli.cost.liveness import Lives, find_lives
from toast_cli.cost.merging import reduction_shares
from toast_cli.plan.problem import Problem
from toast_cli.program.model import ARGUMENT, CARRY


@dataclass(frozen=True, slots=True)
class WorkItem:
    """Ops of one pattern that cost alike. bytes: unsharded, 0 for what is not read from or written to memory.

    reduction_shares: [slots] part of the reductions over each that each op pays, see `merging`; () for all of them. runs:
    executions in one run of the program, all ops of the item together. op: one of them.
    """

    pattern: int
    name: str
    dtype: str
    flops: float
    operand_bytes: tuple[int, ...]
    result_bytes: tuple[int, ...]
    whole_bytes: tuple[int, ...]  # of the results, whether stored or not
    reduction_shares: tuple[float, ...]
    runs: float
    op: int


@dataclass(frozen=True, slots=True)
class Reader:
    """A way an array item is read: by operand `position` of ops of one pattern, `runs` times per run and array."""

    pattern: int
    position: int
    runs: float


@dataclass(frozen=True, slots=True)
class ArrayItem:
    """Values made by one pattern and read in the same ways. values: their numbers; bytes: of one, unsharded."""

    pattern: int
    result: int
    bytes: int
    free: bool
    stored: bool
    readers: tuple[Reader, ...]
    values: tuple[int, ...]


@dataclass(frozen=True)
class Items:
    work: tuple[WorkItem, ...]
    arrays: tuple[ArrayItem, ...]
    lives: Lives
    stored: list[bool]


def make_items(problem: Problem) -> Items:
    program = problem.program
    stored = materialised(program, problem.free)
    return Items(work_items(problem, stored), _arrays(problem, stored), find_lives(program, stored), stored)


def work_items(problem: Problem, stored: list[bool]) -> tuple[WorkItem, ...]:
    program, values = problem.program, problem.program.values
    sizes = [value.bytes for value in values]
    shares = reduction_shares(problem)
    runs: dict[Any, float] = defaultdict(float)
    example: dict[Any, int] = {}
    for number, op in enumerate(program.ops):
        if not op.results or op.name in (ARGUMENT, CARRY):
            continue
        reads = tuple(sizes[v] if stored[v] and not problem.free[v] else 0 for v in op.operands)
        writes = tuple(sizes[v] if stored[v] else 0 for v in op.results)
        if op.name in ("stablehlo.dynamic_slice", "stablehlo.gather", "stablehlo.slice"):  # reads only what it takes
            reads = (min(reads[0], sizes[op.results[0]]), *reads[1:])
        elif op.name in ("stablehlo.dynamic_update_slice", "stablehlo.scatter"):  # writes only what it changes
            update = sizes[op.operands[1 if op.name.endswith("slice") else -1]]
            reads, writes = (0, *reads[1:]), tuple(min(w, update) for w in writes)
        dtype = values[op.operands[0]].dtype if op.operands else ""
        key = (
            problem.op_pattern[number],
            op.name,
            dtype,
            op.flops,
            reads,
            writes,
            tuple(sizes[v] for v in op.results),
            shares[number],
        )
        runs[key] += op.trips
        example.setdefault(key, number)
    return tuple(WorkItem(*key, *rest) for key, *rest in ((k, runs[k], example[k]) for k in runs))


def _arrays(problem: Problem, stored: list[bool]) -> tuple[ArrayItem, ...]:
    program = problem.program
    producer = program.producer
    place = [0] * len(program.values)
    for op in program.ops:
        for k, value in enumerate(op.results):
            place[value] = k
    found: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for value, uses in enumerate(program.users):
        maker = producer[value]
        if maker < 0:
            continue
        readers = frozenset((problem.op_pattern[op], k, problem.edge_trips(op, k)) for op, k in uses)
        key = (
            problem.op_pattern[maker],
            place[value],
            program.values[value].bytes,
            problem.free[value],
            stored[value],
            readers,
        )
        found[key].append(value)
    return tuple(
        ArrayItem(pattern, k, size, free, kept, tuple(Reader(*r) for r in sorted(readers)), tuple(values))
        for (pattern, k, size, free, kept, readers), values in found.items()
    )
