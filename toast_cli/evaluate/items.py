"""The program as unique cost items. This file makes work items, which are ops of equal cost; sums, halo exchanges and
arrays have files of their own.

In: a `Problem`. Out: `Items`, each with the ops or values it stands for. Shardings are not known yet: an item
names the op patterns that determine them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

from toast_cli.compiler.arithmetic import arithmetic
from toast_cli.compiler.collectives import reductions_each
from toast_cli.compiler.compilation import Compilation, compile_program
from toast_cli.compiler.convolutions import packs_result
from toast_cli.compiler.kernel import Kernel, Rows
from toast_cli.compiler.kernel import Side as KernelSide
from toast_cli.compiler.liveness import Lives
from toast_cli.compiler.profile import CompilerProfile
from toast_cli.cost.model import Attained
from toast_cli.dimensions.model import FactorKind
from toast_cli.evaluate.array_items import NO_REGION, ArrayItem, array_items
from toast_cli.evaluate.neighbour_items import NeighbourItem, neighbour_items
from toast_cli.evaluate.reduction_shares import reduction_shares
from toast_cli.evaluate.sum_items import SumItem, sum_items
from toast_cli.plan.problem import Problem
from toast_cli.program.host_memory import is_transfer
from toast_cli.program.model import HandWritten, Op, Program
from toast_cli.program.ops import ARGUMENT, CARRY, OpKind

# Factors whose splitting makes an op communicate.
_COMMUNICATE = frozenset({FactorKind.REDUCTION, FactorKind.PERMUTATION})


class Side(NamedTuple):
    """Work of a kernel on one operand or result of its op, in bytes of whole arrays.

    Attributes:
        read: of a result, by the epilogue of a contraction. through: bytes that pass through the vector unit, or are
            written. flops: elementwise. passing, staying, beside, widest: see `kernel.Side`.
        packed: part of `through` that counts though it stays on the chip, see `PixelProducts`. rows: arrays whose rows
            run along given dimensions -> their part of these bytes, see `kernel.Side`.
    """

    read: float = 0.0
    through: float = 0.0
    flops: float = 0.0
    passing: float = 0.0
    staying: float = 0.0
    beside: float = 0.0
    widest: float = 0.0
    packed: float = 0.0
    rows: tuple[tuple[Rows, float], ...] = ()


NOTHING = Side()


@dataclass(frozen=True, slots=True)
class WorkItem:
    """Ops of one pattern and equal cost, with the kernel each belongs to. Bytes and FLOPs are those of whole arrays.

    Attributes:
        pattern, kind, dtype: of the ops. flops: of one op itself; 0 where another op's kernel does its work.
        operands, results: the kernel's work on each.
        kernels: 1, or 0 where the op is fused into another op's kernel or scheduled with one.
        unfinished: bytes of a contraction that elementwise work finishes before it is written.
        whole_bytes: [results] stored or not; 0 for those in `one_device.not_reduced`.
        summed: a `SumItem` accounts for partial results. carried: they are added to a loop's carry, where they stay
            partial.
        needed: [results] fraction of the bits that readers need, see `Narrowing`.
        late: nothing waits for the results, see `early_values`. in_loop: the ops are in a loop.
        region: the op's number if it is a manual region, priced by `manual_regions`; else -1.
        kernel: the work of a hand-written kernel.
        share: see `SumItem`.
        runs: executions in one run of the program, of all ops of the item together. ops: their numbers. op: the first.
    """

    pattern: int
    kind: OpKind
    dtype: str
    flops: float
    operands: tuple[Side, ...]
    results: tuple[Side, ...]
    kernels: int
    unfinished: float
    whole_bytes: tuple[int, ...]
    summed: bool
    carried: bool
    needed: tuple[float, ...]
    late: bool
    in_loop: bool
    region: int
    kernel: HandWritten | None
    share: float
    runs: float
    op: int
    ops: tuple[int, ...]


@dataclass(frozen=True)
class Items:
    work: tuple[WorkItem, ...]
    sums: tuple[SumItem, ...]
    neighbours: tuple[NeighbourItem, ...]
    arrays: tuple[ArrayItem, ...]
    compilation: Compilation

    @property
    def lives(self) -> Lives:
        return self.compilation.lives

    @property
    def stored(self) -> list[bool]:
        return self.compilation.stored


def make_items(problem: Problem, profile: CompilerProfile, compilation: Compilation | None = None) -> Items:
    """The items of a problem; compilation: of the same program for the same chip, if known."""
    made = compilation or compile_program(problem.program, problem.free, problem.mesh.chip, profile)
    shares = reduction_shares(problem, made)
    sums = sum_items(problem, made.late, made.needs, profile, shares)
    work = work_items(problem, made, problem.terms, shares)
    return Items(work, sums, neighbour_items(problem), array_items(problem, made), made)


def _type_of(program: Program, op: Op) -> str:
    """The element type that an op computes in; for a hand-written kernel, the type of its largest operand."""
    if op.kind.matrix_unit:
        return program.multiplied_type(op)
    if not op.operands:
        return ""
    arrays = [program.values[value] for value in op.operands]
    return (arrays[0] if op.kernel is None else max(arrays, key=lambda array: array.bytes)).dtype


def work_items(problem: Problem, made: Compilation, terms: frozenset[int], shares: list[float]) -> tuple[WorkItem, ...]:
    """Items of ops that have a kernel or may communicate; terms: ops whose partial results are terms of sums. shares:
    [ops] see `combined_shares`."""
    done, late, needs, profile = made.kernels, made.late, made.needs, made.profile
    program = problem.program
    sizes, unreduced = [value.bytes for value in program.values], problem.not_reduced
    carried = _carried_terms(problem, profile)
    runs: dict[Any, float] = defaultdict(float)
    combined: dict[Any, float] = defaultdict(float)
    members: dict[Any, list[int]] = defaultdict(list)
    for number, op in enumerate(program.ops):
        if not op.results or op.name in (ARGUMENT, CARRY):
            continue
        kernel, pattern = done[number], problem.patterns[problem.op_pattern[number]]
        region = NO_REGION if op.region is None else number
        known = kernel is not None or region != NO_REGION or pattern.result_pins or op.one_device
        if not known and not _COMMUNICATE.intersection(pattern.form.kinds):
            continue
        key = (
            problem.op_pattern[number],
            op.kind,
            _type_of(program, op),
            *_work(problem, op, kernel, profile),
            tuple(0 if v in unreduced else sizes[v] for v in op.results),
            number in terms,
            number in carried,
            tuple(needs.of_value(v) for v in op.results),
            all(late[v] for v in op.results),
            op.loop >= 0,
            region,
            op.kernel,
            op.one_device,
            is_transfer(op),
        )
        runs[key] += op.trips
        combined[key] += op.trips * shares[number]
        members[key].append(number)
    rows = (
        (key[:-2], combined[key] / count if count else 1.0, count, members[key][0], tuple(members[key]))
        for key, count in runs.items()
    )
    return tuple(WorkItem(*key, *rest) for key, *rest in rows)


def _carried_terms(problem: Problem, profile: CompilerProfile) -> set[int]:
    """Ops whose results a loop adds to its carry and reduces after the loop."""
    ends = {end for one in problem.accumulations for end in one.ends}
    return {
        term
        for found in problem.sums
        if found.end in ends or reductions_each(problem.program, found.end, profile) < 1.0
        for term in found.terms
    }


def _work(
    problem: Problem, op: Op, kernel: Kernel | None, profile: CompilerProfile
) -> tuple[float, tuple[Side, ...], tuple[Side, ...], int, float]:
    """The part of a work item that follows from the op's kernel: flops, sides, kernels, unfinished."""
    if kernel is None:
        return 0.0, (NOTHING,) * len(op.operands), (NOTHING,) * len(op.results), 0, 0.0
    streams = op.kind.matrix_unit  # operands of a contraction go to the matrix unit, not through the vector unit
    attained = profile.attained
    operands = tuple(
        Side(
            float(s.bytes),
            0.0 if streams else s.largest * attained.pass_bytes,
            s.flops,
            float(s.passing),
            s.staying,
            s.beside,
            float(s.widest),
            rows=_parts_of_rows(s, problem.program.values[value].shape),
        )
        for s, value in zip(kernel.operands, op.operands, strict=True)
    )
    packs = packs_result(op, profile)
    results = tuple(
        Side(
            float(s.read),
            _write_bytes(attained, s),
            s.flops,
            float(s.passing),
            s.staying,
            s.beside,
            float(s.widest),
            profile.packed_part * _write_bytes(attained, s) if packs and _is_narrow(s) else 0.0,
            _parts_of_rows(s, problem.program.values[value].shape),
        )
        for s, value in zip(kernel.results, op.results, strict=True)
    )
    return (
        arithmetic(problem.program, op, profile),
        operands,
        results,
        0 if kernel.rides else 1,
        float(kernel.unfinished),
    )


def _parts_of_rows(side: KernelSide, shape: tuple[int, ...]) -> tuple[tuple[Rows, float], ...]:
    """Arrays of a side and their part of its bytes, but those whose dimensions are in another order than in the side's
    own shape: its sharding says nothing of their rows."""
    every = side.bytes + side.read or sum(side.rows.values())  # a merged reduction reads nothing itself
    return tuple(
        (array, size / every)
        for array, size in side.rows.items()
        if size and (array[0] == shape or sorted(array[0]) != sorted(shape))
    )


def _write_bytes(attained: Attained, side: KernelSide) -> float:
    return side.bytes * (attained.narrow_write if _is_narrow(side) else 1.0)


def _is_narrow(side: KernelSide) -> bool:
    return side.bytes < 4 * side.elements
