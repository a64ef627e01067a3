"""Array items: values grouped as one cost item if the same pattern makes them and the same readers read them.

In: a `Problem` and the `Compilation` of its program. Out: `ArrayItem`s with their readers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toast_cli.compiler.collectives import Narrowing
from toast_cli.compiler.compilation import Compilation
from toast_cli.compiler.kernels import Making, making_whole
from toast_cli.compiler.layouts import RowCopy, Tiling
from toast_cli.compiler.space_to_batch import Images
from toast_cli.dimensions.model import FactorKind
from toast_cli.plan.loop_reads import LOOP_READS
from toast_cli.plan.problem import Problem
from toast_cli.plan.reshard import runs_by_region
from toast_cli.program.regions import Region, all_readings, readings

NO_REGION = -1


@dataclass(frozen=True, slots=True)
class ItemReader:
    """A group of equal reads of an array item.

    Attributes:
        pattern, position: ops of this pattern read it as this operand.
        region: number shared by reads that share copies: those in the same loop, or all outside of loops, and not in
            sibling branches. runs: reads of each array in one run.
        ahead_region, ahead_runs: the same for copies made ahead of loops that only read the array. whole_ahead: see
            `regions.Reading`, false where there are none.
        needed: fraction of the bits that these readers need, see `Narrowing`.
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
        """`Reading.whole_ahead`, None if the readers are in no such loop."""
        return self.whole_ahead if self.region != self.ahead_region else None


_Way = tuple[int, int, int, float, int, float, bool, float]  # the fields of a `ItemReader`


@dataclass(frozen=True, slots=True)
class ArrayItem:
    """Values that one pattern makes and that have equal readers.

    Attributes:
        pattern, result: the pattern that makes them, and the number of its result.
        bytes: of one whole array. written_bytes: the same as it is stored in memory, see `written_parts`.
        shape, tiling: they decide how much memory the array takes, see `layouts`. images: see `space_to_batch`.
        row_copies: see there.
        free: it is derived from constants alone. stored: it is written to memory.
        waited_for: its collectives are neither early nor late, see `early_values`.
        readers: those that may need another sharding than it is made in. at_edges: some of them read all of it in each
            trip of a loop that does not make it, so that the plan decides where it is gathered for them.
        region: the manual region whose first result it is, or -1.
        costs: it may have a cost: it is stored, may be partial, or has such readers.
        making: work to compute one whole array that is not stored, see `making_whole`. as_made: it also has readers
            that take it in its own sharding under every plan.
        values: numbers of the values.
    """

    pattern: int
    result: int
    bytes: int
    written_bytes: float
    shape: tuple[int, ...]
    tiling: Tiling
    images: Images | None
    row_copies: tuple[RowCopy, ...]
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

    def runs_of(self, places: Sequence[int], *, ahead: bool) -> float:
        """How often one array is moved in one run for the readers at `places`. ahead: of loops, see `Copy`."""
        served = [self.readers[place] for place in places]
        stops = [(r.ahead_region, r.ahead_runs) if ahead else (r.region, r.runs) for r in served]
        return sum(runs_by_region(stops).values())


def array_items(problem: Problem, made: Compilation) -> tuple[ArrayItem, ...]:
    """The array items of all values of the program."""
    program, stored, late, needs = problem.program, made.stored, made.late, made.needs
    producer = program.producer
    place = [0] * len(program.values)
    for op in program.ops:
        for k, value in enumerate(op.results):
            place[value] = k
    # Sum items account for these uses.
    into_carries = frozenset(use for one in problem.accumulations for use in one.first)
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
            program.values[value].bytes * made.parts[value],
            program.values[value].shape,
            made.tiled[value],
            made.images[value],
            made.row_copies.get(value, ()),
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
        sums = FactorKind.REDUCTION in problem.patterns[pattern].form.kinds
        at_edges = LOOP_READS in problem.roles and are_at_edges(left)
        item = ArrayItem(
            pattern, k, *measures, left, at_edges, region, costs=sums, values=tuple(values), making=making,
            as_made=len(left) < len(readers),
        )  # fmt: skip
        costs = item.stored or left or region != NO_REGION or item.row_copies
        items.append(replace(item, costs=True) if costs else item)
    return tuple(items)


def making_of(problem: Problem, made: Compilation, value: int, readers: Collection[object]) -> Making | None:
    """Work to compute a whole value that is not stored and of which readers may take different shards."""
    return making_whole(problem.program, made.stored, problem.free, made.profile, value) if len(readers) > 1 else None


def are_at_edges(readers: Collection[ItemReader]) -> bool:
    """Whether some readers read all of an array in loops that do not make it."""
    return any(reader.whole_if_ahead is False for reader in readers)


def _ways_of_reading(
    problem: Problem, needs: Narrowing, value: int, but: frozenset[tuple[int, int]] = frozenset()
) -> frozenset[_Way]:
    program = problem.program
    if not program.values[value].shape:  # a scalar has one sharding
        return frozenset()
    # Numbered in the order of first reads, so that arrays with equal reads in different loops share an item.
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
    """Whether ops of pattern `reader` read this result of pattern `maker` in its own sharding under every plan: it is
    neither partial nor pinned, both patterns choose alike, and the same factors make up the array."""
    one, other = problem.patterns[maker], problem.patterns[reader]
    if one.result_pins or other.operand_pins or FactorKind.REDUCTION in one.form.kinds:
        return False
    alike = problem.chosen_by[maker] == problem.chosen_by[reader]
    return alike and one.form.results[result] == other.form.operands[position]


def reader_op(problem: Problem, item: ArrayItem, pattern: int, position: int) -> int:
    """The op of that pattern that reads the item's first array as that operand; the array's producer if there is
    none."""
    for op, place in problem.program.users[item.values[0]]:
        if place == position and problem.op_pattern[op] == pattern:
            return op
    return problem.program.producer[item.values[0]]
