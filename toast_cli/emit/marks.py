"""Where shardings have to stand for the compiler to partition as the plan says, as plain data.

Enters: a `Source` and a `PartitionedProgram`. Leaves: `Marks`, which `annotate` writes into the module in one dialect
or another. What each compiler makes of a sharding on an operation, and why Shardy's form needs pins instead, is in
`docs/explanation/emitting.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from toast_cli.emit.barriers import held
from toast_cli.emit.moved_views import constraints_before_views, moved_transposes
from toast_cli.emit.reshards import LOOP, Reshard, all_reshards
from toast_cli.frontend.branches import CONDITIONALS
from toast_cli.frontend.source import Source, Use
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import Sharding, axes_of
from toast_cli.program.model import Program
from toast_cli.program.ops import BARRIER, BROADCAST_IN_DIM, CARRY, DOT_GENERAL, RESHAPE, RESULT, SCATTER
from toast_cli.program.rematerialised import remade_values
from toast_cli.program.transposed import transposed
from toast_cli.xla import dot_dimensions, ir

Operand = tuple[Any, int]  # an operation, and which of its operands


@dataclass(frozen=True, slots=True)
class Pin:
    """A value lies, from where it is defined on, as `shardings` say one after the other: all its uses see the last.

    Several shardings are a value that is computed in the first, partial, and reduce-scattered step by step to the last.
    Where a loop's body hands its argument on unchanged, it goes on doing so.
    """

    handle: Any  # ir.Value: an op result or a block argument
    shardings: tuple[Sharding, ...]


@dataclass(frozen=True, slots=True)
class Marks:
    """Everything that gets written into a module.

    Attributes:
        arguments, results: shardings of the entry function's arguments and results, in order.
        operations: (operation, sharding of each result) where the sharding stands on the operation itself.
        pins, reshards: where it stands on a constraint after a definition or before a use.
        barriers: values behind whose constraints there is an optimization barrier (see `barriers`).
    """

    arguments: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    operations: tuple[tuple[Any, tuple[Sharding, ...]], ...] = ()
    pins: tuple[Pin, ...] = ()
    reshards: tuple[Reshard, ...] = ()
    barriers: tuple[Any, ...] = ()  # ir.Value


def argument_marks(source: Source, lowered: PartitionedProgram) -> Marks:
    """Shardings on the entry function's arguments and results alone."""
    arguments = tuple(lowered.shardings[argument.value] for argument in source.program.arguments)
    return Marks(arguments, result_shardings(source, lowered))


def pinned_marks(source: Source, lowered: PartitionedProgram) -> Marks:
    """Arguments, results, a pin on every value of the program and a reshard wherever a use needs another sharding."""
    boundary = argument_marks(source, lowered)
    reshards = tuple(all_reshards(source, lowered))
    return Marks(
        boundary.arguments,
        boundary.results,
        pins=tuple(all_pins(source, lowered, reshards)),
        reshards=reshards,
        barriers=barriers(source, lowered),
    )


def barriers(source: Source, lowered: PartitionedProgram) -> tuple[Any, ...]:
    """Values that a barrier keeps as they are scattered."""
    return tuple([source.definitions[value] for value in held(source.program, lowered)])


def operation_marks(source: Source, lowered: PartitionedProgram) -> Marks:
    """The same with shardings on the operations themselves.

    Pins stay where a value goes on in another sharding than it is computed in, and where a sharding on the operation
    would be lost or overwritten.
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
        pin if needs_pin(pin.handle) or is_overwritten(pin.handle, behind) else Pin(pin.handle, pin.shardings[1:])
        for pin in all_pins(source, lowered, reshards)
    ]
    return Marks(
        boundary.arguments,
        boundary.results,
        operations=tuple(operation_shardings(source, lowered, folded, {*reshaped})),
        pins=tuple(pin for pin in whole if pin.shardings),
        reshards=(*stated_in_branches(source, lowered, reshards), *constraints_before_views(source, lowered, turned)),
        barriers=barriers(source, lowered),
    )


def stated_in_branches(source: Source, lowered: PartitionedProgram, reshards: tuple[Reshard, ...]) -> Iterator[Reshard]:
    """Reshards; those in a branch, of an array from outside of it, say first how the array lies there.

    GSPMD drops the sharding of what a branch is given. It would take the first constraint's in the branch for it, and
    exchange the array before the choice, in every run. Not where the conditional gives an array of this type that is
    split over more axes: GSPMD gives the branch the array like that, and would gather it for the constraint.
    """
    remade, sharding_of = remade_values(source.program), sharding_finder(source, lowered)
    for one in reshards:
        around = [] if remade[one.value] else [*conditionals_between(one.read)]
        alike = [result for it in around for result in it.results if result.type == source.definitions[one.value].type]
        if around and all(axes_of(sharding_of(result)) <= axes_of(one.start) for result in alike):
            one = replace(one, through=(one.start, *one.through))
        yield one


def conditionals_between(read: Use) -> Iterator[Any]:
    """The conditionals around an operation that do not hold what it reads, the innermost first."""
    value, operation = read.operation.operands[read.operand], read.operation
    block = value.owner if isinstance(value, ir.BlockArgument) else value.owner.operation.block
    while operation.block != block:
        operation = operation.parent.operation
        if operation.name in CONDITIONALS:
            yield operation


def scattered_as_found(lowered: PartitionedProgram) -> PartitionedProgram:
    """The same plan, in which products that are scattered over some axes and reduced over others are computed as they
    go on, where the partitioner finds the way by itself: told how they are computed, it reduces them over all axes."""
    computed = {
        value: sharding
        for value, sharding in lowered.computed.items()
        if value not in lowered.found
        or axes_of(lowered.shardings[value]) - axes_of(sharding) >= {*lowered.partial.get(value, ())}
    }
    return replace(lowered, computed=computed)


def needs_pin(handle: Any) -> bool:
    """Whether a sharding on the operation that defines `handle` would not arrive in HLO, or not where it belongs.

    CHLO operations are expanded on the way; of a loop, what it only passes through is left out, and its sharding counts
    wrong. Products that add up nothing XLA makes elementwise ones before it partitions, and leaves their sharding on
    its broadcasts of the operands, which lie otherwise.
    """
    if isinstance(handle, ir.BlockArgument):
        return True
    return handle.owner.name.startswith(("chlo.", LOOP)) or adds_nothing_up(handle.owner)


def adds_nothing_up(operation: Any) -> bool:
    """Whether it is a product of two arrays over dimensions that they share or that one of them has."""
    if operation.name != DOT_GENERAL:
        return False
    _, _, contracted, _ = dot_dimensions(operation.attributes["dot_dimension_numbers"])
    return not contracted


def is_overwritten(handle: Any, behind: set[Any]) -> bool:
    """Whether the sharding on the operation that defines `handle` may be overwritten, or taken elsewhere.

    What reads it without changing it (a reshape and one back, a product with one, a slice of all) is folded away, and
    leaves its own sharding on what it read: one in the place of those of several results. And XLA:TPU moves a transpose
    behind the elementwise work that follows a product, which then has shardings of arrays that lie otherwise.
    """
    if isinstance(handle, ir.BlockArgument):
        return False
    return len(handle.owner.results) > 1 or handle.owner.operation in behind


def is_repeated(handle: Any) -> bool:
    """Whether an array is made by a broadcast. XLA:TPU moves broadcasts past reshapes, and leaves their shardings on
    arrays that lie otherwise. How one lies tells what reads it; a constraint behind keeps apart what XLA joins."""
    return bool(handle.owner.name == BROADCAST_IN_DIM)


def result_shardings(source: Source, lowered: PartitionedProgram) -> tuple[Sharding, ...]:
    """Sharding of each result of the entry function: what its use requires, else what the value has."""
    shardings = []
    for number, op in enumerate(source.program.ops):
        if op.name == RESULT:
            shardings.append(lowered.required.get((number, 0), lowered.shardings[op.operands[0]]))
    return tuple(shardings)


def all_pins(source: Source, lowered: PartitionedProgram, reshards: tuple[Reshard, ...]) -> Iterator[Pin]:
    """A pin for every array that an operation makes, and for every array a loop's body or condition is given.

    Values that are made anew for each use take its sharding; arguments of the entry function carry a sharding of their
    own, and so do the results of Shardy's own operations. What nobody reads needs none, nor does a loop's argument that
    all readers see moved ahead of the loop.
    """
    unneeded = unneeded_values(source)
    moved = {(use.operation, use.operand) for one in reshards if one.ahead for use in one.uses}
    for value in pinnable_values(source, lowered):
        handle = source.definitions[value]
        if is_read(handle, unneeded):
            yield Pin(handle, lowered.path(value))
    sharding_of = sharding_finder(source, lowered)
    for loop in loops(source):
        for k, result in enumerate(loop.results):
            if sharding_of(result):
                yield from argument_pins(loop, k, sharding_of(result), unneeded, moved)


def pinnable_values(source: Source, lowered: PartitionedProgram) -> Iterator[int]:
    """Values whose sharding is ours to say: arrays that an operation of the program makes, once."""
    remade = remade_values(source.program)
    producer = source.program.producer  # -1 for what the module computes and nobody needs
    for value, handle in enumerate(source.definitions):
        if not lowered.shardings[value] or remade[value] or producer[value] < 0 or isinstance(handle, ir.BlockArgument):
            continue
        if not handle.owner.name.startswith("sdy."):
            yield value


def scattered_terms(program: Program, lowered: PartitionedProgram) -> Iterator[int]:
    """Partial results of scatters that are added to something else. XLA:TPU and XLA:GPU simplify `a + scatter(zeros,
    updates)` to `scatter(a, updates)` before they partition, and two such scatters to one of all updates in a row
    (libtpu 0.0.42.1, jaxlib 0.10.2): of a tied table's gradient each part was then reduced for itself, and an encoder's
    and a decoder's tokens were exchanged. With a constraint in between the sum is reduced, once.
    """
    for value in lowered.added:
        if program.ops[program.producer[value]].name == SCATTER:
            yield value


def argument_pins(
    loop: Any, number: int, sharding: Sharding, unneeded: set[Any], moved: Collection[Operand] = ()
) -> Iterator[Pin]:
    """Pins on argument `number` of a loop's condition and body, where they read it. moved: uses that see it moved ahead
    of the loop."""
    for region in loop.regions:
        argument = region.blocks[0].arguments[number]
        if is_read(argument, unneeded) and (not moved or not is_moved(argument, moved)):
            yield Pin(argument, (sharding,))


def is_moved(argument: Any, moved: Collection[Operand]) -> bool:
    """Whether all that reads a loop's argument, also in loops that it is handed to, sees it moved ahead of the loop."""
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
    """What the module computes and no result needs."""
    return {handle for value, handle in enumerate(source.definitions) if source.program.producer[value] < 0}


def is_read(handle: Any, unneeded: set[Any]) -> bool:
    """Whether an operation reads the value, other than to hand a loop's argument on to the next iteration, or to make
    what nobody needs. A constraint that only such operations read goes with them on the way to HLO."""

    def counts(user: Any) -> bool:
        return not hands_on(handle, user) and not (user.results and all(result in unneeded for result in user.results))

    return any(counts(use.owner.operation) for use in handle.uses)


def hands_on(handle: Any, user: Any) -> bool:
    """Whether `user` ends the block that `handle` is an argument of."""
    return isinstance(handle, ir.BlockArgument) and user.name == "stablehlo.return" and user.block == handle.owner


def operation_shardings(
    source: Source, lowered: PartitionedProgram, folded: dict[int, int], reshaped: set[int]
) -> Iterator[tuple[Any, tuple[Sharding, ...]]]:
    """Each operation that makes arrays of the program, with the sharding in which it computes each of its results.

    Not contractions and transposes that XLA folds into one contraction before it partitions (see `folded_transposes`):
    it takes what stands on the first for that of the folded one, whose dimensions lie otherwise. A constraint behind
    the transpose is enough. Nor products of what a reshape makes (see `reshaped_products`), and broadcasts of arrays,
    save those that are made anew for each use (see `is_repeated`).
    """
    sharding_of = sharding_finder(source, lowered, {value: lowered.path(value)[0] for value in lowered.computed})
    producer, transposes = source.program.producer, {*folded.values()}
    remade, unneeded = remade_values(source.program), unneeded_values(source)
    seen: set[Any] = set()
    for value, handle in enumerate(source.definitions):
        if not lowered.shardings[value] or producer[value] < 0 or isinstance(handle, ir.BlockArgument):
            continue
        operation = handle.owner.operation
        if operation.name.startswith("sdy.") or needs_pin(handle) or operation in seen:
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
        if operation.name == BARRIER:  # what nobody reads behind it lies as it does in front
            pairs = zip(arrays, operation.operands, strict=True)
            arrays = [before if after in unneeded else after for after, before in pairs]
        yield operation, tuple(map(sharding_of, arrays))


def folded_transposes(source: Source, lowered: PartitionedProgram) -> dict[int, int]:
    """Results of contractions that only a transpose reads, with no constraint between them, and that transpose. Not of
    those that are and stay split along nothing, which lie alike in any order of dimensions."""
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
    """Results of contractions that read what a reshape makes, with no constraint between them; and whether all that
    reads the result takes it as it lies.

    XLA:TPU reshapes behind the contraction instead, and leaves its sharding on that of the array with other dimensions,
    which it then partitions as a windowed product. It finds by itself how a result lies that is taken so, and a
    constraint on it would keep what it joins apart.
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
    """A function from an op result to its sharding (the one it is computed in, given `computed`).

    A value that a loop only passes through is no value of the program at the loop's result, nor inside: there it lies
    as it does outside.
    """
    numbers = {handle: number for number, handle in enumerate(source.definitions)}

    def sharding_of(handle: Any) -> Sharding:
        number = numbers.get(handle)
        while number is None:
            inside = isinstance(handle, ir.BlockArgument)  # of a loop around one that passes it on
            handle = (
                handle.owner.owner.operands[handle.arg_number]
                if inside
                else handle.owner.operands[handle.result_number]
            )
            number = numbers.get(handle)
        return (computed or {}).get(number, lowered.shardings[number])

    return sharding_of


def loops(source: Source) -> list[Any]:
    """The `while` operations of the program."""
    found = [source.use(number, 0).operation for number, op in enumerate(source.program.ops) if op.name == CARRY]
    return [loop for loop in dict.fromkeys(found) if loop.name == LOOP]  # others are in manual regions
