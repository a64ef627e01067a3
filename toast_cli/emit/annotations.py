"""Chooses where to write shardings so that the compiler partitions as planned, as plain data.

In: a `Source` and a `PartitionedProgram`. Out: `Annotations`, which `annotate` writes into the module in either
dialect. `docs/explanation/emitting.md` describes how each compiler treats a sharding on an operation, and why Shardy's
form needs constraints.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from toast_cli.emit.barriers import held
from toast_cli.emit.reshards import LOOP, Reshard, all_reshards
from toast_cli.frontend.source import Source
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import Sharding
from toast_cli.program.model import Program
from toast_cli.program.ops import CARRY, RESULT, SCATTER
from toast_cli.program.rematerialised import remade_values
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
        recomputed: (operation, sharding of its result), of values that are recomputed for each use; HLO only.
        constraints, reshards: constraints after a definition or before a use.
        barriers: values with an optimization barrier behind their constraints (see `barriers`).
    """

    arguments: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    recomputed: tuple[tuple[Any, Sharding], ...] = ()
    constraints: tuple[Constraint, ...] = ()
    reshards: tuple[Reshard, ...] = ()
    barriers: tuple[Any, ...] = ()  # ir.Value


def boundary_annotations(source: Source, lowered: PartitionedProgram) -> Annotations:
    """Shardings on the entry function's arguments and results alone."""
    arguments = tuple(lowered.shardings[argument.value] for argument in source.program.arguments)
    return Annotations(arguments, result_shardings(source, lowered))


def full_annotations(source: Source, lowered: PartitionedProgram) -> Annotations:
    """Arguments, results, a constraint on every value of the program and a reshard wherever a use needs another
    sharding."""
    boundary = boundary_annotations(source, lowered)
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
    return tuple([source.definitions[value] for value in held(source.program, lowered)])


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


def sharding_finder(source: Source, lowered: PartitionedProgram) -> Callable[[Any], Sharding]:
    """A function from an op result to its sharding."""
    return lambda handle: lowered.shardings[source.numbers[handle]]


def loops(source: Source) -> list[Any]:
    """The `while` operations of the program."""
    found = [source.use(number, 0).operation for number, op in enumerate(source.program.ops) if op.name == CARRY]
    return [loop for loop in dict.fromkeys(found) if loop.name == LOOP]  # others are in manual regions
