"""The program boiled down to different cost items: work items (ops that cost alike) and array items (values that do).

Enters: a `Problem`. Leaves: `Items`, each with how many ops or values it stands for. Shardings are not known yet: an
item says which op patterns decide them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from toast_cli.compiler import convolution_tiles, reduction_combining, sunk_conversions, unsliced_fusions
from toast_cli.compiler.compilation import Compilation, compile_program
from toast_cli.compiler.kernel import Kernel
from toast_cli.compiler.kernel import Side as KernelSide
from toast_cli.compiler.kernels import arithmetic
from toast_cli.compiler.liveness import Lives
from toast_cli.compiler.narrowing import Narrowing
from toast_cli.compiler.profile import CompilerProfile
from toast_cli.compiler.reduction_motion import reductions_each
from toast_cli.compiler.space_to_batch import Images
from toast_cli.compiler.tiling import Tiling
from toast_cli.compiler.unsliced_fusions import Making
from toast_cli.cost.model import Attained
from toast_cli.dimensions.model import SlotKind
from toast_cli.evaluate.neighbour_items import NeighbourItem, neighbour_items
from toast_cli.evaluate.sum_items import SumItem, sum_items
from toast_cli.plan.loop_reads import LOOP_READS
from toast_cli.plan.problem import Problem
from toast_cli.program.model import Op
from toast_cli.program.ops import ARGUMENT, CARRY, OpKind
from toast_cli.program.regions import Region, all_readings, readings

# Slots whose splitting makes an op communicate.
_COMMUNICATE = frozenset({SlotKind.REDUCTION, SlotKind.PERMUTATION})


NO_REGION = -1


class Side(NamedTuple):
    """What a kernel does on one side of its op, in bytes of whole arrays.

    Attributes:
        read: on a result's side, by what finishes a contraction. through: what passes through the vector unit, or is
            written. flops: elementwise. passing, staying, beside, widest, given: see `kernel.Side`.
        packed: what of `through` counts though it stays on the chip, see `convolution_tiles`.
    """

    read: float = 0.0
    through: float = 0.0
    flops: float = 0.0
    passing: float = 0.0
    staying: float = 0.0
    beside: float = 0.0
    widest: float = 0.0
    packed: float = 0.0
    given: float = 0.0


NOTHING = Side()


@dataclass(frozen=True, slots=True)
class WorkItem:
    """Ops of one pattern that cost alike, with the kernel each belongs to. Bytes and FLOPs are those of whole arrays.

    Attributes:
        pattern, kind, dtype: of the ops. flops: of one op itself; 0 where another op's kernel does its work.
        operands, results: what the kernel does on each side.
        kernels: 1, or 0 where the op is part of another op's kernel or rides on one.
        unfinished: bytes of a contraction that elementwise work finishes before it is written.
        whole_bytes: [results] whether they are stored or not.
        summed: a `SumItem` takes care of partial results. carried: they are added to what a loop carries, where they
            stay partial.
        needed: [results] the part of the bits that readers need, see `narrowing`.
        copies: a convolution for which an argument is copied, see `image_copies`.
        late: nothing waits for the results, see `overlap`. in_loop: the ops stand in a loop.
        region: the op, where it is a manual region, which has a price of its own; else -1.
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
    copies: bool
    late: bool
    in_loop: bool
    region: int
    share: float
    runs: float
    op: int
    ops: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ItemReader:
    """One way in which an array item is read.

    Attributes:
        pattern, position: ops of this pattern read it as this operand.
        region: equal where reads share copies: in the same loop, or all outside of loops, and not in branches beside
            each other. runs: how often it is read for each array in one run.
        ahead_region, ahead_runs: the same of what is made ahead of loops that only read the array. whole_ahead: as
            `regions.Reading` has it, false where there are none.
        needed: the part of the bits that these readers need, see `narrowing`.
    """

    pattern: int
    position: int
    region: int
    runs: float
    ahead_region: int
    ahead_runs: float
    whole_ahead: bool
    needed: float

    @property
    def whole_if_ahead(self) -> bool | None:
        """As `regions.Reading` has it."""
        return self.whole_ahead if self.region != self.ahead_region else None


_Way = tuple[int, int, int, float, int, float, bool, float]  # the fields of a `ItemReader`


@dataclass(frozen=True, slots=True)
class ArrayItem:
    """Values that one pattern makes and that are read in the same ways.

    Attributes:
        pattern, result: which result of which pattern they are.
        bytes: of one whole array. moved_bytes: the same where it is resharded, see `sunk_conversions`. written_bytes:
            the same as it lies in memory, see `product_operands`.
        shape, tiling: how much memory the array takes, see `tiling`. images: see `space_to_batch`.
        free: it is derived from constants alone. stored: it is written to memory.
        waited_for: it is neither early nor late, see `overlap`.
        readers: without those that take it as it is made under every plan. at_edges: some of them read all of it in
            each trip of a loop that does not make it, so that the plan says where it is gathered for them.
        region: the manual region that makes the first result of it, or -1.
        costs: it can cost something: it is stored, may be partial, or has such readers.
        making: what it takes to make one array whole, where it is not stored, see `unsliced_fusions`. as_made: other
            readers take it as it is made under every plan.
        values: numbers of the values.
    """

    pattern: int
    result: int
    bytes: int
    moved_bytes: int
    written_bytes: float
    shape: tuple[int, ...]
    tiling: Tiling
    images: Images | None
    free: bool
    stored: bool
    waited_for: bool
    readers: tuple[ItemReader, ...]
    at_edges: bool
    region: int
    costs: bool
    values: tuple[int, ...]
    making: Making | None
    as_made: bool

    def can_be_ahead(self, place: int) -> bool:
        """Whether a plan can have all of a copy for the reader at `place` made ahead of loops."""
        reader = self.readers[place]
        return reader.whole_ahead or (self.at_edges and reader.whole_if_ahead is False)


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
    """The items of a problem; `compilation`: of the same program for the same chip, where it is known."""
    made = compilation or compile_program(problem.program, problem.free, problem.mesh.chip, profile)
    shares = _reduction_shares(problem, made)
    sums = sum_items(problem, made.late, made.needs, profile, shares)
    work = work_items(problem, made, problem.terms, shares)
    return Items(work, sums, neighbour_items(problem), _arrays(problem, made), made)


def _reduction_shares(problem: Problem, made: Compilation) -> list[float]:
    """[ops] see `reduction_combining.shares`. A sum is reduced as its last term."""
    program, late = problem.program, made.late
    others = {term for found in problem.sums for term in found.terms if term != max(found.terms)}
    over = [None if number in others else _reduces_over(problem, number) for number in range(len(program.ops))]
    return reduction_combining.shares(
        program, over, [all(late[v] for v in op.results) for op in program.ops], made.profile
    )


def _reduces_over(problem: Problem, number: int) -> tuple[frozenset[int], str, str] | None:
    """Groups that an op reduces over, how it does, and the type of what it makes; None where it does not."""
    pattern, op = problem.patterns[problem.op_pattern[number]], problem.program.ops[number]
    kinds = zip(pattern.groups, pattern.form.kinds, strict=True)
    groups = frozenset([group for group, kind in kinds if kind is SlotKind.REDUCTION])
    if not groups or not op.results:
        return None
    return groups, "add" if op.kind.matrix_unit else op.detail, problem.program.values[op.results[0]].dtype


def work_items(problem: Problem, made: Compilation, terms: frozenset[int], shares: list[float]) -> tuple[WorkItem, ...]:
    """Items of ops that have a kernel, or may have to communicate; terms: ops whose results are added up partial.
    shares: [ops] see `reduction_combining.shares`."""
    done, late, needs, profile = made.kernels, made.late, made.needs, made.profile
    program = problem.program
    sizes = [value.bytes for value in program.values]
    carried = _carried_terms(problem, profile)
    copying = {copy.reader for copy in made.copied_images.values()}
    runs: dict[Any, float] = defaultdict(float)
    combined: dict[Any, float] = defaultdict(float)
    members: dict[Any, list[int]] = defaultdict(list)
    for number, op in enumerate(program.ops):
        if not op.results or op.name in (ARGUMENT, CARRY):
            continue
        kernel, pattern = done[number], problem.patterns[problem.op_pattern[number]]
        region = NO_REGION if op.region is None else number
        known = kernel is not None or region != NO_REGION or pattern.result_pins
        if not known and not _COMMUNICATE.intersection(pattern.form.kinds):
            continue
        key = (
            problem.op_pattern[number],
            op.kind,
            program.values[op.operands[0]].dtype if op.operands else "",
            *_work(problem, op, kernel, profile),
            tuple(sizes[v] for v in op.results),
            number in terms,
            number in carried,
            tuple(needs.of_value(v) for v in op.results),
            number in copying,
            all(late[v] for v in op.results),
            op.loop >= 0,
            region,
        )
        runs[key] += op.trips
        combined[key] += op.trips * shares[number]
        members[key].append(number)
    rows = (
        (key, combined[key] / count if count else 1.0, count, members[key][0], tuple(members[key]))
        for key, count in runs.items()
    )
    return tuple(WorkItem(*key, *rest) for key, *rest in rows)


def _carried_terms(problem: Problem, profile: CompilerProfile) -> set[int]:
    """Ops whose results a loop adds to what it carries, in one piece or in several, and reduces behind it."""
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
    streams = op.kind.matrix_unit  # what a product reads goes to the matrix unit, not through the vector unit
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
            given=float(s.given),
        )
        for s in kernel.operands
    )
    packs = convolution_tiles.packs(op, profile)
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
            float(s.given),
        )
        for s in kernel.results
    )
    return (
        arithmetic(problem.program, op, profile),
        operands,
        results,
        0 if kernel.rides else 1,
        float(kernel.unfinished),
    )


def _write_bytes(attained: Attained, side: KernelSide) -> float:
    return side.bytes * (attained.narrow_write if _is_narrow(side) else 1.0)


def _is_narrow(side: KernelSide) -> bool:
    return side.bytes < 4 * side.elements


def _arrays(problem: Problem, made: Compilation) -> tuple[ArrayItem, ...]:
    program, stored, late, needs = problem.program, made.stored, made.late, made.needs
    producer = program.producer
    place = [0] * len(program.values)
    for op in program.ops:
        for k, value in enumerate(op.results):
            place[value] = k
    # Sum items take care of these uses.
    into_carries = frozenset(use for one in problem.accumulations for use in one.first)
    sinks = sunk_conversions.NAME in made.profile.passes
    found: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for value in range(len(program.values)):
        maker = producer[value]
        if maker < 0:
            continue
        readers = _ways_of_reading(problem, needs, value, into_carries)
        key = (
            problem.op_pattern[maker],
            place[value],
            program.values[value].bytes,
            sunk_conversions.moved_bytes(program, stored, value) if sinks else program.values[value].bytes,
            program.values[value].bytes * made.parts[value],
            program.values[value].shape,
            made.tiled[value],
            made.images[value],
            problem.free[value],
            stored[value],
            not (made.early[value] or late[value]),
            readers,
            maker if program.ops[maker].region is not None and place[value] == 0 else NO_REGION,
        )
        found[key].append(value)
    items: list[ArrayItem] = []
    for key, values in found.items():
        (pattern, k), measures, readers, region = key[:2], key[2:-2], key[-2], key[-1]
        left = tuple(ItemReader(*r) for r in sorted(readers) if not reads_as_made(problem, pattern, k, r[0], r[1]))
        making = making_of(problem, made, values[0], readers) if left else None
        sums = SlotKind.REDUCTION in problem.patterns[pattern].form.kinds
        at_edges = LOOP_READS in problem.roles and are_at_edges(left)
        item = ArrayItem(
            pattern, k, *measures, left, at_edges, region, costs=sums, values=tuple(values), making=making,
            as_made=len(left) < len(readers),
        )  # fmt: skip
        costs = item.stored or left or region != NO_REGION
        items.append(replace(item, costs=True) if costs else item)
    return tuple(items)


def making_of(problem: Problem, made: Compilation, value: int, readers: Collection[object]) -> Making | None:
    """What it takes to make a value whole, where it is not stored and readers may take different pieces of it."""
    return unsliced_fusions.making(problem.program, made, problem.free, value) if len(readers) > 1 else None


def are_at_edges(readers: Collection[ItemReader]) -> bool:
    """Whether some readers read all of an array in loops that do not make it."""
    return any(reader.whole_if_ahead is False for reader in readers)


def all_readers(problem: Problem, needs: Narrowing, value: int) -> tuple[ItemReader, ...]:
    """Every way in which a value is read, also those that take it as it is made under every plan."""
    return tuple([ItemReader(*way) for way in sorted(_ways_of_reading(problem, needs, value))])


def _ways_of_reading(
    problem: Problem, needs: Narrowing, value: int, but: frozenset[tuple[int, int]] = frozenset()
) -> frozenset[_Way]:
    program = problem.program
    if not program.values[value].shape:  # a scalar has one sharding
        return frozenset()
    # Numbered in the order of their first reads, so that arrays read alike in loops of their own are alike.
    regions: dict[Region, int] = {}
    ways: list[_Way] = []
    uses, reads = program.users[value], all_readings(program)[value]
    if not but.isdisjoint(uses):
        uses = [use for use in uses if use not in but]
        reads = readings(program, value, uses)
    for (op, k), read in zip(uses, reads, strict=True):
        inside, ahead = [regions.setdefault(stop.region, len(regions)) for stop in (read.inside, read.ahead)]
        runs, whole = (inside, read.inside.runs, ahead, read.ahead.runs), bool(read.whole_ahead)
        ways.append((problem.op_pattern[op], k, *runs, whole, needs.of_use(value, op)))
    return frozenset(ways)


def reads_as_made(problem: Problem, maker: int, result: int, reader: int, position: int) -> bool:
    """Whether ops of pattern `reader` take this result of pattern `maker` in the sharding it is made in under every
    plan: nothing is partial or pinned, both choose alike, and the same slots make up the array."""
    one, other = problem.patterns[maker], problem.patterns[reader]
    if one.result_pins or other.operand_pins or SlotKind.REDUCTION in one.form.kinds:
        return False
    alike = problem.chosen_by[maker] == problem.chosen_by[reader]
    return alike and one.form.results[result] == other.form.operands[position]
