"""Where arrays that a plan moves are brought from one sharding to another.

Enters: a `Source` and a `PartitionedProgram`. Leaves: a `Reshard` for all uses that one can serve, in front of the
first of them, or of a loop that only reads the array.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from toast_cli.frontend.source import Source, Use
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.reshard import Stretch, stretches, waypoints
from toast_cli.plan.sharding import Sharding
from toast_cli.program.model import Program
from toast_cli.program.ops import RESULT
from toast_cli.program.regions import readings
from toast_cli.program.rematerialised import remade_values
from toast_cli.xla import ir

LOOP = "stablehlo.while"


@dataclass(frozen=True, slots=True)
class Reshard:
    """`value` (its number) is brought from `start` to `sharding` in front of `anchor`; `uses` see the outcome instead
    of the value.

    `edges` are the uses in the program: (op, position). `read` is where the value is read in the anchor's block: the
    first of the uses, or what takes it into the loop that the anchor is. Dimensions in `open` are left to propagation
    (which must find what `sharding` says of them). `through` are shardings on the way, spelled out where XLA would find
    a worse one (see `plan.reshard`). `ahead`: the anchor is a loop around the uses.
    """

    value: int
    start: Sharding
    sharding: Sharding
    anchor: Any  # ir.Operation
    read: Use
    uses: tuple[Use, ...]
    edges: tuple[tuple[int, int], ...]
    open: frozenset[int] = frozenset()
    through: tuple[Sharding, ...] = ()
    ahead: bool = False

    @property
    def steps(self) -> tuple[tuple[Sharding, frozenset[int]], ...]:
        """Each constraint's sharding and open dimensions, of which there are none on the way."""
        return (*((sharding, frozenset[int]()) for sharding in self.through), (self.sharding, self.open))


def all_reshards(source: Source, lowered: PartitionedProgram) -> Iterator[Reshard]:
    """One reshard for all uses that read one value, require one sharding and see one another's operations.

    What a loop only reads is moved in front of it, as far as that makes it no larger, and all the way where the loop
    takes pieces of it or the plan says so (see `reshard.hops_ahead`). These reshards come first: others begin where
    they end. A result of the entry function needs none where one step leads there: the sharding of the result says it.
    """
    ahead: Wanted = {}
    inside: Wanted = {}
    remade = remade_values(source.program)
    for number, position in sorted(lowered.required):
        op, sharding = source.program.ops[number], lowered.required[number, position]
        edge, value, use = (number, position), op.operands[position], source.use(number, position)
        start, shape = lowered.shardings[value], source.program.values[value].shape
        if remade[value]:
            want(inside, value, Stretch(start, sharding), edge, use.operation, use)
            continue
        (reading,) = readings(source.program, value, [edge])
        wholly, held = bool(reading.whole_ahead), lowered.held
        first, rest = stretches(start, sharding, lowered.axis_sizes, shape, whole_ahead=wholly, held=held)
        if first is not None and reading.ahead != reading.inside:
            want(ahead, value, first, edge, *before_loops(use, loops_around(source.program, reading.ahead.region.loop)))
            if rest is not None:
                want(inside, value, rest, edge, use.operation, use)
            continue
        whole = Stretch(start, sharding, waypoints(start, sharding, lowered.axis_sizes, shape))
        if op.name != RESULT or whole.through:
            want(inside, value, whole, edge, use.operation, use)
    for wanted in (ahead, inside):
        for (value, _, stretch), found in wanted.items():
            for anchor, edges in by_anchor({edge: operation for edge, (operation, _) in found.items()}):
                uses = tuple(source.use(*edge) for edge in edges)
                read = next(read for operation, read in found.values() if operation == anchor)
                yield Reshard(
                    value,
                    stretch.start,
                    stretch.end,
                    anchor,
                    read,
                    uses,
                    tuple(edges),
                    through=stretch.through,
                    ahead=wanted is ahead,
                )


# Value, what is read of it and the way from there -> uses, each with the operation in front of which it is wanted and
# where it is read there.
Wanted = dict[tuple[int, Any, Stretch], dict[tuple[int, int], tuple[Any, Use]]]


def want(found: Wanted, value: int, stretch: Stretch, edge: tuple[int, int], operation: Any, read: Use) -> None:
    """Enters a use."""
    found.setdefault((value, read.operation.operands[read.operand], stretch), {})[edge] = operation, read


def loops_around(program: Program, loop: int) -> int:
    """How many loops stand around what is in a loop, that one with them; -1 is outside of all."""
    count = 0
    while loop >= 0:
        loop, count = program.loops[loop].parent, count + 1
    return count


def before_loops(use: Use, count: int) -> tuple[Any, Use]:
    """The outermost of the loops around a use that only read what it reads, and where it goes into that loop; the use
    itself where there is none, since a region stands in the loop's place. count: of the loops that stand around what
    they read."""
    operation = use.operation
    for loop in enclosing_loops(operation)[count:][::-1]:
        operation, handle = loop, use.operation.operands[use.operand]
        if isinstance(handle, ir.BlockArgument) and handle.owner.owner == operation:
            use = Use(operation, handle.arg_number)
    return operation, use


def enclosing_loops(operation: Any) -> list[Any]:
    """Those around an operation, the outermost first."""
    found: list[Any] = []
    while operation.name != "func.func":
        operation = operation.parent.operation
        if operation.name == LOOP:
            found.insert(0, operation)
    return found


def by_anchor(wanted: dict[tuple[int, int], Any]) -> list[tuple[Any, list[tuple[int, int]]]]:
    """Uses, given by the operations in front of which they want it, with the one in front of which one reshard can
    serve them all: the first of those in one block.

    A use inside a region is served by a reshard that stands before that region, when there is one.
    """
    anchors: list[tuple[Any, list[tuple[int, int]]]] = []
    for edge, operation in wanted.items():
        for k, (anchor, shared) in enumerate(anchors):
            at = ancestor_in(operation, anchor.block)
            if at is None:
                continue
            if at == anchor or anchor.is_before_in_block(at):
                shared.append(edge)
                break
            if at == operation:
                anchors[k] = (at, [*shared, edge])
                break
        else:
            anchors.append((operation, [edge]))
    return anchors


def ancestor_in(operation: Any, block: Any) -> Any | None:
    """The operation of `block` that is, or contains, `operation`; None when there is none."""
    while operation.name != "func.func":
        if operation.block == block:
            return operation
        operation = operation.parent.operation
    return None
