"""Where shardings have to stand for the compiler to partition as the plan says, as plain data.

Enters: a `Source` and a `PartitionedProgram`. Leaves: `Marks`, which `annotate` writes into the module in one dialect
or another. What each compiler makes of a sharding on an operation, and why Shardy's form needs pins instead, is in
`docs/emitting.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from toast_cli.frontend.source import Source, Use
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.reshard import waypoints
from toast_cli.plan.sharding import Sharding
from toast_cli.program.ops import CARRY, RESULT, kind_of
from toast_cli.program.rematerialised import remade_values
from toast_cli.program.transposed import transposed
from toast_cli.xla import ir


@dataclass(frozen=True, slots=True)
class Pin:
    """A value lies, from where it is defined on, as `shardings` say one after the other: all its uses see the last.

    Several shardings are a value that is computed in the first, partial, and reduce-scattered step by step to the last.
    Where a loop's body hands its argument on unchanged, it goes on doing so.
    """

    handle: Any  # ir.Value: an op result or a block argument
    shardings: tuple[Sharding, ...]


@dataclass(frozen=True, slots=True)
class Reshard:
    """`value` (its number) is brought to `sharding` in front of `anchor`; `uses` see the outcome instead of the value.

    `edges` are the uses in the program: (op, position). Dimensions in `open` are left to propagation (which must find
    what `sharding` says of them). `through` are shardings on the way, spelled out where XLA would find a worse one (see
    `plan.reshard`).
    """

    value: int
    sharding: Sharding
    anchor: Any  # ir.Operation
    uses: tuple[Use, ...]
    edges: tuple[tuple[int, int], ...]
    open: frozenset[int] = frozenset()
    through: tuple[Sharding, ...] = ()

    @property
    def steps(self) -> tuple[tuple[Sharding, frozenset[int]], ...]:
        """Each constraint's sharding and open dimensions, of which there are none on the way."""
        return (*((sharding, frozenset[int]()) for sharding in self.through), (self.sharding, self.open))


@dataclass(frozen=True, slots=True)
class Marks:
    """Everything that gets written into a module.

    Attributes:
        arguments, results: shardings of the entry function's arguments and results, in order.
        operations: (operation, sharding of each result) where the sharding stands on the operation itself.
        pins, reshards: where it stands on a constraint after a definition or before a use.
    """

    arguments: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    operations: tuple[tuple[Any, tuple[Sharding, ...]], ...] = ()
    pins: tuple[Pin, ...] = ()
    reshards: tuple[Reshard, ...] = ()


def argument_marks(source: Source, lowered: PartitionedProgram) -> Marks:
    """Shardings on the entry function's arguments and results alone."""
    arguments = tuple(lowered.shardings[argument.value] for argument in source.program.arguments)
    return Marks(arguments, result_shardings(source, lowered))


def pinned_marks(source: Source, lowered: PartitionedProgram) -> Marks:
    """Arguments, results, a pin on every value of the program and a reshard wherever a use needs another sharding."""
    boundary = argument_marks(source, lowered)
    return Marks(
        boundary.arguments,
        boundary.results,
        pins=tuple(all_pins(source, lowered)),
        reshards=tuple(all_reshards(source, lowered)),
    )


def operation_marks(source: Source, lowered: PartitionedProgram) -> Marks:
    """The same with shardings on the operations themselves.

    Pins stay where a value goes on in another sharding than it is computed in, and where a sharding on the operation
    would be lost.
    """
    boundary = argument_marks(source, lowered)
    pins = [pin for pin in all_pins(source, lowered) if len(pin.shardings) > 1 or needs_pin(pin.handle)]
    return Marks(
        boundary.arguments,
        boundary.results,
        operations=tuple(operation_shardings(source, lowered)),
        pins=tuple(pin if needs_pin(pin.handle) else Pin(pin.handle, pin.shardings[1:]) for pin in pins),
        reshards=tuple(all_reshards(source, lowered)),
    )


def needs_pin(handle: Any) -> bool:
    """Whether a sharding on the operation that defines `handle` would not arrive in HLO.

    CHLO operations are expanded on the way; of a loop, what it only passes through is left out, and its sharding counts
    wrong.
    """
    return isinstance(handle, ir.BlockArgument) or handle.owner.name.startswith(("chlo.", "stablehlo.while"))


def result_shardings(source: Source, lowered: PartitionedProgram) -> tuple[Sharding, ...]:
    """Sharding of each result of the entry function: what its use requires, else what the value has."""
    shardings = []
    for number, op in enumerate(source.program.ops):
        if op.name == RESULT:
            shardings.append(lowered.required.get((number, 0), lowered.shardings[op.operands[0]]))
    return tuple(shardings)


def all_pins(source: Source, lowered: PartitionedProgram) -> Iterator[Pin]:
    """A pin for every array that an operation makes, and for every array a loop's body or condition is given.

    Values that are made anew for each use take its sharding; arguments of the entry function carry a sharding of their
    own, and so do the results of Shardy's own operations. What nobody reads needs none.
    """
    unneeded = unneeded_values(source)
    for value in pinnable_values(source, lowered):
        handle = source.definitions[value]
        if is_read(handle, unneeded):
            yield Pin(handle, lowered.path(value))
    sharding_of = sharding_finder(source, lowered)
    for loop in loops(source):
        for k, result in enumerate(loop.results):
            if sharding_of(result):
                yield from argument_pins(loop, k, sharding_of(result), unneeded)


def pinnable_values(source: Source, lowered: PartitionedProgram) -> Iterator[int]:
    """Values whose sharding is ours to say: arrays that an operation of the program makes, once."""
    remade = remade_values(source.program)
    producer = source.program.producer  # -1 for what the module computes and nobody needs
    for value, handle in enumerate(source.definitions):
        if not lowered.shardings[value] or remade[value] or producer[value] < 0 or isinstance(handle, ir.BlockArgument):
            continue
        if not handle.owner.name.startswith("sdy."):
            yield value


def argument_pins(loop: Any, number: int, sharding: Sharding, unneeded: set[Any]) -> Iterator[Pin]:
    """Pins on argument `number` of a loop's condition and body, where they read it."""
    for region in loop.regions:
        argument = region.blocks[0].arguments[number]
        if is_read(argument, unneeded):
            yield Pin(argument, (sharding,))


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


def operation_shardings(source: Source, lowered: PartitionedProgram) -> Iterator[tuple[Any, tuple[Sharding, ...]]]:
    """Each operation that makes arrays of the program, with the sharding in which it computes each of its results.

    Not contractions that only a transpose reads: XLA folds the two into one contraction before it partitions, and then
    takes what stands on the first for that of the folded one, whose dimensions lie otherwise. What the transpose says
    is enough.
    """
    sharding_of = sharding_finder(source, lowered, {value: lowered.path(value)[0] for value in lowered.computed})
    producer = source.program.producer
    seen: set[Any] = set()
    for value, handle in enumerate(source.definitions):
        if not lowered.shardings[value] or producer[value] < 0 or isinstance(handle, ir.BlockArgument):
            continue
        operation = handle.owner.operation
        if operation.name.startswith("sdy.") or needs_pin(handle) or operation in seen:
            continue
        if kind_of(operation.name).contraction and transposed(source.program, value):
            continue
        if len(operation.results) > 1:
            seen.add(operation)
        yield operation, tuple(sharding_of(result) for result in operation.results)


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
    return [loop for loop in dict.fromkeys(found) if loop.name == "stablehlo.while"]  # others are in manual regions


def all_reshards(source: Source, lowered: PartitionedProgram) -> Iterator[Reshard]:
    """One reshard for all uses that read one value, require one sharding and see one another's operations.

    A result of the entry function needs none where one step leads there: the sharding of the result says it.
    """
    groups: dict[tuple[int, Any, Sharding], list[tuple[int, int]]] = {}
    remade = remade_values(source.program)

    def through(value: int, sharding: Sharding) -> tuple[Sharding, ...]:
        return (
            ()
            if remade[value]
            else waypoints(lowered.shardings[value], sharding, lowered.axis_sizes, source.program.values[value].shape)
        )

    for number, position in sorted(lowered.required):
        op, sharding = source.program.ops[number], lowered.required[number, position]
        value = op.operands[position]
        if op.name != RESULT or through(value, sharding):
            use = source.use(number, position)
            groups.setdefault((value, use.operation.operands[use.operand], sharding), []).append((number, position))
    for (value, _, sharding), edges in groups.items():
        for anchor, shared in by_anchor(source, edges):
            uses = tuple(source.use(*edge) for edge in shared)
            yield Reshard(value, sharding, anchor, uses, tuple(shared), through=through(value, sharding))


def by_anchor(source: Source, edges: list[tuple[int, int]]) -> list[tuple[Any, list[tuple[int, int]]]]:
    """Uses with the operation in front of which one reshard can serve them all: the first of those in one block.

    A use inside a region is served by a reshard that stands before that region, when there is one.
    """
    anchors: list[tuple[Any, list[tuple[int, int]]]] = []
    for edge in edges:
        operation = source.use(*edge).operation
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
