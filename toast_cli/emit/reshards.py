"""Places the reshards of a plan in the module.

In: a `Source` and a `PartitionedProgram`. Out: one `Reshard` for all uses that it can serve, in front of the
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
    """`value` (its number) is resharded from `start` to `sharding` in front of `anchor`; `uses` read the result instead
    of the value.

    `edges` are the uses in the program: (op, position). `read` is the use of the value in the anchor's block: the first
    of the uses, or the operand that passes it into the loop that is the anchor. Dimensions in `open` are left to
    propagation (which must find their part of `sharding`). `through` are intermediate shardings, stated if XLA would
    choose worse ones (see `plan.reshard`). `ahead`: the anchor is a loop around the uses.
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
        """Each constraint's sharding and open dimensions; intermediate ones have no open dimensions."""
        return (*((sharding, frozenset[int]()) for sharding in self.through), (self.sharding, self.open))


def all_reshards(source: Source, lowered: PartitionedProgram) -> Iterator[Reshard]:
    """One reshard for all uses that read one value, require one sharding and can see one another's operations.

    Reshards of loop-invariant values are moved in front of the loop, as far as they do not enlarge the array, and
    completely if the loop slices it or the plan says so (see `reshard.steps_ahead`). These come first, since other
    reshards start from their results. A result of the entry function needs none if one step suffices: its own sharding
    implies it.
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


# Value, its shardings from and to -> uses, each with the operation in front of which it is wanted and where it is read
# there.
Wanted = dict[tuple[int, Any, Stretch], dict[tuple[int, int], tuple[Any, Use]]]


def want(found: Wanted, value: int, stretch: Stretch, edge: tuple[int, int], operation: Any, read: Use) -> None:
    """Adds a use to `found`."""
    found.setdefault((value, read.operation.operands[read.operand], stretch), {})[edge] = operation, read


def loops_around(program: Program, loop: int) -> int:
    """Number of loops around an op in `loop`, that one included; -1 is outside of all."""
    count = 0
    while loop >= 0:
        loop, count = program.loops[loop].parent, count + 1
    return count


def before_loops(use: Use, count: int) -> tuple[Any, Use]:
    """The outermost loop around a use in which the value is invariant, and the value's use by that loop; the use itself
    if there is none. count: number of loops around the value's definition."""
    operation = use.operation
    for loop in enclosing_loops(operation)[count:][::-1]:
        operation, handle = loop, use.operation.operands[use.operand]
        if isinstance(handle, ir.BlockArgument) and handle.owner.owner == operation:
            use = Use(operation, handle.arg_number)
    return operation, use


def enclosing_loops(operation: Any) -> list[Any]:
    """The loops around an operation, the outermost first."""
    found: list[Any] = []
    while operation.name != "func.func":
        operation = operation.parent.operation
        if operation.name == LOOP:
            found.insert(0, operation)
    return found


def by_anchor(wanted: dict[tuple[int, int], Any]) -> list[tuple[Any, list[tuple[int, int]]]]:
    """Groups uses, given by the operations in front of which they want the value, with the anchor at which one reshard
    can serve each group: the first operation in a block.

    A use inside a region is served by a reshard in front of that region, if there is one.
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
    """The operation of `block` that is, or contains, `operation`; None if there is none."""
    while operation.name != "func.func":
        if operation.block == block:
            return operation
        operation = operation.parent.operation
    return None
