"""Where to write shardings so that the compiler partitions as planned: constraints, reshards and barriers as plain
data.

`docs/explanation/emitting.md` describes how each compiler treats a sharding on an operation, and why Shardy's form
needs constraints.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from toast_cli.frontend.source import Source, Use
from toast_cli.plan.partials import REDUCE_SCATTER
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.reshard import ReshardPart, reshard_parts, waypoints
from toast_cli.plan.sharding import Sharding, axes_of, refines
from toast_cli.program.model import Program
from toast_cli.program.ops import ADD, CARRY, CONVERT, DYNAMIC_SLICE, PAD, REDUCE, RESULT, SCATTER, SLICE, WHILE
from toast_cli.program.values import readings, remade_values, transposed
from toast_cli.xla import ir

Operand = tuple[Any, int]  # an operation, and which of its operands


@dataclass(frozen=True, slots=True)
class Constraint:
    """A value gets `shardings`, one after the other, right after its definition: all its uses see the last.

    Several shardings mean that the value is computed in the first, partial, and reduce-scattered step by step to the
    last. A loop body that passes its argument on unchanged continues to do so.
    """

    handle: Any  # ir.Value: an op result or a block argument
    shardings: tuple[Sharding, ...]


@dataclass(frozen=True, slots=True)
class Annotations:
    """Everything that gets written into a module.

    Attributes:
        arguments, results: shardings of the entry function's arguments and results, in order.
        constraints, reshards: constraints after a definition or before a use.
        barriers: values with an optimization barrier behind their constraints (see `barriers`).
    """

    arguments: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    constraints: tuple[Constraint, ...] = ()
    reshards: tuple[Reshard, ...] = ()
    barriers: tuple[Any, ...] = ()  # ir.Value


def boundary_annotations(source: Source, lowered: PartitionedProgram) -> Annotations:
    """Shardings on the entry function's arguments and results alone."""
    arguments = tuple(lowered.shardings[argument.value] for argument in source.program.arguments)
    return Annotations(arguments, result_shardings(source, lowered))


def full_annotations(source: Source, lowered: PartitionedProgram) -> Annotations:
    """Arguments, results, a constraint on every value of the program and a reshard wherever a use needs another
    sharding. Products that the partitioner scatters by itself are stated where they end: given the sharding that they
    are computed in, it all-reduces over all axes."""
    boundary = boundary_annotations(source, lowered)
    computed = {value: sharding for value, sharding in lowered.computed.items() if value not in lowered.by_partitioner}
    lowered = replace(lowered, computed=computed)
    reshards = tuple(all_reshards(source, lowered))
    return Annotations(
        boundary.arguments,
        boundary.results,
        constraints=tuple(all_constraints(source, lowered, reshards)),
        reshards=reshards,
        barriers=barriers(source, lowered),
    )


def barriers(source: Source, lowered: PartitionedProgram) -> tuple[Any, ...]:
    """Values that keep their scattered sharding by a barrier."""
    return tuple([source.definitions[value] for value in barred_values(source.program, lowered)])


def result_shardings(source: Source, lowered: PartitionedProgram) -> tuple[Sharding, ...]:
    """Sharding of each result of the entry function: the one its use requires, else that of the value."""
    shardings = []
    for number, op in enumerate(source.program.ops):
        if op.name == RESULT:
            shardings.append(lowered.required.get((number, 0), lowered.shardings[op.operands[0]]))
    return tuple(shardings)


def all_constraints(source: Source, lowered: PartitionedProgram, reshards: tuple[Reshard, ...]) -> Iterator[Constraint]:
    """A constraint for every array that an operation makes, and for every argument of a loop's body or condition.

    Values that are recomputed for each use take its sharding; arguments of the entry function, and results of Shardy's
    own operations, carry a sharding already. Unread values need no constraint, nor does a loop's argument that all
    readers see resharded ahead of the loop. XLA:TPU folds a transpose into the product that it alone reads, unless a
    constraint is in between: the one behind the transpose suffices.
    """
    unneeded = unneeded_values(source)
    moved = {(use.operation, use.operand) for reshard in reshards if reshard.ahead for use in reshard.uses}
    for value in constrainable_values(source, lowered):
        handle = source.definitions[value]
        behind = transposed(source.program, value)
        folded = behind is not None and (behind.op, 0) not in lowered.required and len(lowered.path(value)) == 1
        if is_read(handle, unneeded) and not folded:
            yield Constraint(handle, lowered.path(value))
    for loop in loops(source):
        for k, result in enumerate(loop.results):
            if sharding := lowered.shardings[source.numbers[result]]:
                yield from argument_constraints(loop, k, sharding, unneeded, moved)


def constrainable_values(source: Source, lowered: PartitionedProgram) -> Iterator[int]:
    """Values whose sharding the plan decides: arrays that one operation of the program makes."""
    remade = remade_values(source.program)
    producer = source.program.producer  # -1 for values that the module computes and nothing needs
    for value, handle in enumerate(source.definitions):
        if not lowered.shardings[value] or remade[value] or producer[value] < 0 or isinstance(handle, ir.BlockArgument):
            continue
        if not handle.owner.name.startswith("sdy."):
            yield value


def scattered_terms(program: Program, lowered: PartitionedProgram) -> Iterator[int]:
    """Partial results of scatters that are added to something else. XLA:TPU and XLA:GPU simplify `a + scatter(zeros,
    updates)` to `scatter(a, updates)` before they partition, and two such scatters to one of all concatenated updates
    (libtpu 0.0.42.1, jaxlib 0.10.2): each part of a tied table's gradient is then reduced separately, and an encoder's
    and a decoder's tokens are exchanged. With a constraint in between the sum is reduced once."""
    for value in lowered.added:
        if program.ops[program.producer[value]].name == SCATTER:
            yield value


def argument_constraints(
    loop: Any, number: int, sharding: Sharding, unneeded: set[Any], moved: Collection[Operand] = ()
) -> Iterator[Constraint]:
    """Constraints on argument `number` of a loop's condition and body, if they read it. moved: uses that see it
    resharded ahead of the loop."""
    for region in loop.regions:
        argument = region.blocks[0].arguments[number]
        if is_read(argument, unneeded) and (not moved or not is_moved(argument, moved)):
            yield Constraint(argument, (sharding,))


def is_moved(argument: Any, moved: Collection[Operand]) -> bool:
    """True if all readers of a loop's argument, also in loops that it is passed to, see it
    resharded ahead of the loop."""
    for use in argument.uses:
        operation, operand = use.owner.operation, use.operand_number
        if (operation, operand) in moved or hands_on(argument, operation):
            continue
        if operation.name != WHILE or list(operation.results[operand].uses):
            return False
        if not all(is_moved(region.blocks[0].arguments[operand], moved) for region in operation.regions):
            return False
    return True


def unneeded_values(source: Source) -> set[Any]:
    """Values that the module computes and no result needs."""
    return {handle for value, handle in enumerate(source.definitions) if source.program.producer[value] < 0}


def is_read(handle: Any, unneeded: set[Any]) -> bool:
    """True if an operation reads the value, other than to pass a loop's argument on to the next iteration, or to
    compute unneeded values. A constraint with only such readers is removed in the conversion to HLO."""

    def counts(user: Any) -> bool:
        return not hands_on(handle, user) and not (
            unneeded and user.results and all(result in unneeded for result in user.results)
        )

    return any(counts(use.owner.operation) for use in handle.uses)


def hands_on(handle: Any, user: Any) -> bool:
    """True if `user` is the terminator of the block of which `handle` is an argument."""
    return isinstance(handle, ir.BlockArgument) and user.name == "stablehlo.return" and user.block == handle.owner


def loops(source: Source) -> list[Any]:
    """The `while` operations of the program."""
    operations = [source.use(number, 0).operation for number, op in enumerate(source.program.ops) if op.name == CARRY]
    return [loop for loop in dict.fromkeys(operations) if loop.name == WHILE]  # others are in manual regions


# ---------------------------------------------------------------- reshards


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
            want(inside, value, ReshardPart(start, sharding), edge, use.operation, use)
            continue
        (reading,) = readings(source.program, value, [edge])
        wholly = bool(reading.whole_ahead)
        first, rest = reshard_parts(start, sharding, lowered.axis_sizes, shape, whole_ahead=wholly, held=lowered.held)
        if first is not None and reading.ahead != reading.inside:
            want(ahead, value, first, edge, *before_loops(use, loops_around(source.program, reading.ahead.region.loop)))
            if rest is not None:
                want(inside, value, rest, edge, use.operation, use)
            continue
        part = ReshardPart(start, sharding, waypoints(start, sharding, lowered.axis_sizes, shape))
        if op.name != RESULT or part.through:
            want(inside, value, part, edge, use.operation, use)
    for wanted in (ahead, inside):
        for (value, _, stretch), reads in wanted.items():
            for anchor, edges in by_anchor({edge: operation for edge, (operation, _) in reads.items()}):
                uses = tuple(source.use(*edge) for edge in edges)
                read = next(read for operation, read in reads.values() if operation == anchor)
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
Wanted = dict[tuple[int, Any, ReshardPart], dict[tuple[int, int], tuple[Any, Use]]]


def want(wanted: Wanted, value: int, stretch: ReshardPart, edge: tuple[int, int], operation: Any, read: Use) -> None:
    """Adds a use to `wanted`."""
    wanted.setdefault((value, read.operation.operands[read.operand], stretch), {})[edge] = operation, read


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
    loops_inside_out = [holder for holder in around(operation) if holder.name == WHILE and holder != operation]
    for loop in loops_inside_out[: len(loops_inside_out) - count]:
        operation, handle = loop, use.operation.operands[use.operand]
        if isinstance(handle, ir.BlockArgument) and handle.owner.owner == operation:
            use = Use(operation, handle.arg_number)
    return operation, use


def around(operation: Any) -> Iterator[Any]:
    """An operation and those that hold it, the innermost first, without the function."""
    while operation.name != "func.func":
        yield operation
        operation = operation.parent.operation


def by_anchor(wanted: dict[tuple[int, int], Any]) -> list[tuple[Any, list[tuple[int, int]]]]:
    """Groups uses, given by the operations in front of which they want the value, with the anchor at which one reshard
    can serve each group: the first operation in a block.

    A use inside a region is served by a reshard in front of that region, if there is one.
    """
    anchors: list[tuple[Any, list[tuple[int, int]]]] = []
    for edge, operation in wanted.items():
        for k, (anchor, shared) in enumerate(anchors):
            ancestor = ancestor_in(operation, anchor.block)
            if ancestor is None:
                continue
            if ancestor == anchor or anchor.is_before_in_block(ancestor):
                shared.append(edge)
                break
            if ancestor == operation:
                anchors[k] = (ancestor, [*shared, edge])
                break
        else:
            anchors.append((operation, [edge]))
    return anchors


def ancestor_in(operation: Any, block: Any) -> Any | None:
    """The operation of `block` that is, or contains, `operation`; None if there is none."""
    return next((holder for holder in around(operation) if holder.block == block), None)


# ---------------------------------------------------------------- barriers behind reduce-scattered sums
# XLA merges the slice that takes a device's piece of an all-reduce with a slice that reads the piece, and forms a
# reduce-scatter only of a slice along one dimension, by the axes of the all-reduce. So it leaves an all-reduce if a
# reader takes other elements (`logits[:, 1:]`), or slices the piece further; and XLA:TPU (libtpu 0.0.42.1) takes a
# piece whose last rows are dropped (`logits[:, :-1]`) for a whole one, and fails a check. A barrier behind the piece
# keeps the two slices apart: the result compiles to the planned reduce-scatter and costs nothing, since the piece is
# materialised in any case.
#
# If a loop adds up scattered sums in a wider type (bf16 gradients in f32), XLA moves the reduce-scatter behind the
# loop and fails a check at the conversion (`while_loop_all_reduce_code_motion.cc`, libtpu 0.0.42.1). A barrier
# prevents that.


def barred_values(program: Program, lowered: PartitionedProgram) -> list[int]:
    """Values that are reduce-scattered at their definition, and of which some reader takes a part, or which a loop adds
    up in another type; in program order."""
    return [
        value
        for value in sorted(_scattered(lowered))
        if _is_read_in_parts(program, lowered, value) or _is_added_up_converted(program, value)
    ]


def added_up_converted(program: Program, lowered: PartitionedProgram) -> frozenset[int]:
    """Values that are reduce-scattered at their definition, and that a loop adds up in another type."""
    return frozenset(value for value in _scattered(lowered) if _is_added_up_converted(program, value))


def _scattered(lowered: PartitionedProgram) -> set[int]:
    return {
        collective.value
        for collective in lowered.collectives
        if collective.kind == REDUCE_SCATTER
        and collective.reason == "partial"
        and collective.after == lowered.shardings[collective.value]
    }


def _is_added_up_converted(program: Program, value: int, converted: bool = False) -> bool:
    """True if a loop carries a sum of a value after a conversion."""
    for number, _ in program.users[value]:
        op = program.ops[number]
        if op.name == ADD:
            carried = (program.ops[use].name == CARRY and place == 1 for use, place in program.users[op.results[0]])
            added_up = converted and any(carried)
        else:
            passed_on = (op.kind.view_or_convert or op.name == REDUCE) and len(op.results) == 1
            added_up = passed_on and _is_added_up_converted(program, op.results[0], converted or op.name == CONVERT)
        if added_up:
            return True
    return False


def _is_read_in_parts(program: Program, lowered: PartitionedProgram, value: int) -> bool:
    if program.ops[program.producer[value]].name == CARRY:
        return False
    current = lowered.shardings[value]
    for use in program.users[value]:
        wanted = lowered.required.get(use, current)
        if axes_of(wanted) > axes_of(current) and refines(wanted, current):
            return True
    return any(_takes_parts(program, op) for op, _ in program.users[value])


def _takes_parts(program: Program, number: int) -> bool:
    """True for a slice, a pad with negative padding, or an elementwise op of one array that such an op reads: XLA moves
    the slice before it."""
    op = program.ops[number]
    ends = [(w.low + (w.inputs - 1) * w.dilation + 1, w) for w in op.windows if op.name == PAD]  # in the result
    if op.name in (SLICE, DYNAMIC_SLICE) or any(w.low < 0 or w.outputs < end for end, w in ends):
        return True
    arrays = [value for value in op.operands if program.values[value].shape]
    if not op.kind.elementwise or len(arrays) != 1 or len(op.results) != 1:
        return False
    return any(_takes_parts(program, reader) for reader, _ in program.users[op.results[0]])
