"""Chooses where to write shardings so that the compiler partitions as planned, as plain data.

In: a `Source` and a `PartitionedProgram`. Out: `Marks`, which `annotate` writes into the module in either
dialect. `docs/explanation/emitting.md` describes how each compiler treats a sharding on an operation, and why Shardy's
form needs constraints.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from toast_cli.emit.barriers import held
from toast_cli.emit.moved_views import constraints_before_views, moved_transposes
from toast_cli.emit.reshards import LOOP, Reshard, all_reshards
from toast_cli.frontend.source import Source
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import Sharding, axes_of
from toast_cli.program.model import Program
from toast_cli.program.ops import BARRIER, BROADCAST_IN_DIM, CARRY, DOT_GENERAL, RESHAPE, RESULT, SCATTER
from toast_cli.program.rematerialised import remade_values
from toast_cli.program.transposed import transposed
from toast_cli.xla import dot_dimensions, ir

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
class Marks:
    """Everything that gets written into a module.

    Attributes:
        arguments, results: shardings of the entry function's arguments and results, in order.
        operations: (operation, sharding of each result) for shardings on the operation itself.
        constraints, reshards: constraints after a definition or before a use.
        barriers: values with an optimization barrier behind their constraints (see `barriers`).
    """

    arguments: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    operations: tuple[tuple[Any, tuple[Sharding, ...]], ...] = ()
    constraints: tuple[Constraint, ...] = ()
    reshards: tuple[Reshard, ...] = ()
    barriers: tuple[Any, ...] = ()  # ir.Value


def argument_marks(source: Source, lowered: PartitionedProgram) -> Marks:
    """Shardings on the entry function's arguments and results alone."""
    arguments = tuple(lowered.shardings[argument.value] for argument in source.program.arguments)
    return Marks(arguments, result_shardings(source, lowered))


def constrained_marks(source: Source, lowered: PartitionedProgram) -> Marks:
    """Arguments, results, a constraint on every value of the program and a reshard wherever a use needs another
    sharding."""
    boundary = argument_marks(source, lowered)
    reshards = tuple(all_reshards(source, lowered))
    return Marks(
        boundary.arguments,
        boundary.results,
        constraints=tuple(all_constraints(source, lowered, reshards)),
        reshards=reshards,
        barriers=barriers(source, lowered),
    )


def barriers(source: Source, lowered: PartitionedProgram) -> tuple[Any, ...]:
    """Values that keep their scattered sharding by a barrier."""
    return tuple([source.definitions[value] for value in held(source.program, lowered)])


def operation_marks(source: Source, lowered: PartitionedProgram) -> Marks:
    """The same with shardings on the operations themselves.

    Constraints remain for values that continue in another sharding than they are computed in, and where a sharding on
    the operation would be lost or overwritten.
    """
    boundary = argument_marks(source, lowered)
    reshards = tuple(all_reshards(source, lowered))
    lowered = scattered_as_found(lowered)
    folded = folded_transposes(source, lowered)
    reshaped = reshaped_products(source, lowered)
    turned = {*folded.values()}
    behind = {source.operations[number] for number in turned | moved_transposes(source, lowered, turned)}
    behind |= {source.definitions[value].owner.operation for value, so in reshaped.items() if not so}
    behind |= {source.definitions[value].owner.operation for value in scattered_terms(source.program, lowered)}
    whole = [
        constraint
        if needs_constraint(constraint.handle) or is_overwritten(constraint.handle, behind)
        else Constraint(constraint.handle, constraint.shardings[1:])
        for constraint in all_constraints(source, lowered, reshards)
    ]
    return Marks(
        boundary.arguments,
        boundary.results,
        operations=tuple(operation_shardings(source, lowered, folded, {*reshaped})),
        constraints=tuple(constraint for constraint in whole if constraint.shardings),
        reshards=(*reshards, *constraints_before_views(source, lowered, turned)),
        barriers=barriers(source, lowered),
    )


def scattered_as_found(lowered: PartitionedProgram) -> PartitionedProgram:
    """The same plan, in which products that are scattered over some axes and reduced over others are computed in their
    final sharding if the partitioner finds the collectives by itself: given the computed sharding, it all-reduces over
    all axes."""
    computed = {
        value: sharding
        for value, sharding in lowered.computed.items()
        if value not in lowered.found
        or axes_of(lowered.shardings[value]) - axes_of(sharding) >= {*lowered.partial.get(value, ())}
    }
    return replace(lowered, computed=computed)


def needs_constraint(handle: Any) -> bool:
    """True if a sharding on the operation that defines `handle` would not be preserved in HLO, or be misplaced.

    CHLO operations are expanded in the conversion; loop-invariant values are removed from a loop, which shifts its
    shardings. XLA turns products without contracted dimensions into elementwise ones before it partitions, and leaves
    their sharding on its broadcasts of the operands, which have other dimensions.
    """
    if isinstance(handle, ir.BlockArgument):
        return True
    return handle.owner.name.startswith(("chlo.", LOOP)) or adds_nothing_up(handle.owner)


def adds_nothing_up(operation: Any) -> bool:
    """True for a product of two arrays without contracted dimensions."""
    if operation.name != DOT_GENERAL:
        return False
    _, _, contracted, _ = dot_dimensions(operation.attributes["dot_dimension_numbers"])
    return not contracted


def is_overwritten(handle: Any, behind: set[Any]) -> bool:
    """True if the sharding on the operation that defines `handle` may be overwritten or misplaced.

    Readers that do not change it (a reshape and its inverse, a product with one, a slice of all) are folded away, and
    leave their own sharding on the operation: one in place of those of several results. And XLA:TPU moves a transpose
    behind the elementwise ops that follow a product, which then carry shardings for another order of dimensions.
    """
    if isinstance(handle, ir.BlockArgument):
        return False
    return len(handle.owner.results) > 1 or handle.owner.operation in behind


def is_repeated(handle: Any) -> bool:
    """True if an array is made by a broadcast. XLA:TPU moves broadcasts past reshapes, and leaves their shardings on
    arrays with other dimensions. Its sharding follows from its readers; a constraint behind it would prevent fusion."""
    return bool(handle.owner.name == BROADCAST_IN_DIM)


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
    readers see resharded ahead of the loop.
    """
    unneeded = unneeded_values(source)
    moved = {(use.operation, use.operand) for one in reshards if one.ahead for use in one.uses}
    for value in constrainable_values(source, lowered):
        handle = source.definitions[value]
        if is_read(handle, unneeded):
            yield Constraint(handle, lowered.path(value))
    sharding_of = sharding_finder(source, lowered)
    for loop in loops(source):
        for k, result in enumerate(loop.results):
            if sharding_of(result):
                yield from argument_constraints(loop, k, sharding_of(result), unneeded, moved)


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
        if operation.name != LOOP or list(operation.results[operand].uses):
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
        return not hands_on(handle, user) and not (user.results and all(result in unneeded for result in user.results))

    return any(counts(use.owner.operation) for use in handle.uses)


def hands_on(handle: Any, user: Any) -> bool:
    """True if `user` is the terminator of the block of which `handle` is an argument."""
    return isinstance(handle, ir.BlockArgument) and user.name == "stablehlo.return" and user.block == handle.owner


def operation_shardings(
    source: Source, lowered: PartitionedProgram, folded: dict[int, int], reshaped: set[int]
) -> Iterator[tuple[Any, tuple[Sharding, ...]]]:
    """Each operation that makes arrays of the program, with the sharding in which it computes each of its results.

    Except contractions and transposes that XLA folds into one contraction before it partitions (see
    `folded_transposes`): it gives the sharding of the first to the folded one, whose dimensions are in another order; a
    constraint behind the transpose suffices. Also except products of reshaped operands (see `reshaped_products`), and
    broadcasts of arrays, unless they are recomputed for each use (see `is_repeated`).
    """
    sharding_of = sharding_finder(source, lowered, {value: lowered.path(value)[0] for value in lowered.computed})
    producer, transposes = source.program.producer, {*folded.values()}
    remade, unneeded = remade_values(source.program), unneeded_values(source)
    seen: set[Any] = set()
    for value, handle in enumerate(source.definitions):
        if not lowered.shardings[value] or producer[value] < 0 or isinstance(handle, ir.BlockArgument):
            continue
        operation = handle.owner.operation
        if operation.name.startswith("sdy.") or needs_constraint(handle) or operation in seen:
            continue
        if (
            value in folded
            or value in reshaped
            or producer[value] in transposes
            or (is_repeated(handle) and not remade[value])
        ):
            continue
        arrays = list(operation.results)
        if len(arrays) > 1:
            seen.add(operation)
        if operation.name == BARRIER:  # unread results keep their sharding from in front
            pairs = zip(arrays, operation.operands, strict=True)
            arrays = [before if after in unneeded else after for after, before in pairs]
        yield operation, tuple(map(sharding_of, arrays))


def folded_transposes(source: Source, lowered: PartitionedProgram) -> dict[int, int]:
    """Results of contractions that only a transpose reads, with no constraint between them, and that transpose.
    Replicated ones, whose sharding is the same in any order of dimensions, are left out."""
    found = {}
    for op in source.program.ops:
        if op.kind.contraction and len(op.results) == 1:
            (value,) = op.results
            of = transposed(source.program, value)
            if of is None or (of.op, 0) in lowered.required or len(lowered.path(value)) > 1:
                continue
            if axes_of(lowered.shardings[value]) or len(lowered.path(of.value)) > 1:
                found[value] = of.op
    return found


def reshaped_products(source: Source, lowered: PartitionedProgram) -> dict[int, bool]:
    """Results of contractions that read reshaped operands, with no constraint between them; and True if all readers
    take the result in its sharding.

    XLA:TPU reshapes behind the contraction instead, and leaves its sharding on an array with other dimensions, which it
    then partitions as a windowed product. For a result that is read in its sharding, it finds this sharding by itself,
    and a constraint would prevent fusion.
    """
    program, found = source.program, dict[int, bool]()
    for number, op in enumerate(source.program.ops):
        if not op.kind.contraction or len(op.results) != 1:
            continue
        reads = [(number, k) for k, value in enumerate(op.operands) if made_by(program, value) == RESHAPE]
        if any(edge not in lowered.required and len(lowered.path(op.operands[edge[1]])) == 1 for edge in reads):
            (value,) = op.results
            taken_so = not any(edge in lowered.required for edge in program.users[value])
            found[value] = taken_so and len(lowered.path(value)) == 1
    return found


def made_by(program: Program, value: int) -> str:
    """The name of the op that makes a value."""
    return program.ops[program.producer[value]].name


def sharding_finder(
    source: Source, lowered: PartitionedProgram, computed: dict[int, Sharding] | None = None
) -> Callable[[Any], Sharding]:
    """A function from an op result to its sharding (the one it is computed in, given `computed`)."""

    def sharding_of(handle: Any) -> Sharding:
        number = source.numbers[handle]
        return (computed or {}).get(number, lowered.shardings[number])

    return sharding_of


def loops(source: Source) -> list[Any]:
    """The `while` operations of the program."""
    found = [source.use(number, 0).operation for number, op in enumerate(source.program.ops) if op.name == CARRY]
    return [loop for loop in dict.fromkeys(found) if loop.name == LOOP]  # others are in manual regions
