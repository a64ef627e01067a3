"""Where shardings have to stand for the compiler to partition as the plan says, as plain data.

Enters: a `Source` and a `LoweredPlan`. Leaves: `Marks`, which `annotate` writes into the module in one dialect or another.
What each compiler makes of a sharding on an operation, and why Shardy's form needs pins instead, is in `docs/emitting.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from toast_cli.frontend.source import Source, Use
from toast_cli.plan.layout import Layout
from toast_cli.plan.lowered import LoweredPlan
from toast_cli.plan.reshard import waypoints
from toast_cli.program.model import CARRY, RESULT
from toast_cli.program.remade import remade_values
from toast_cli.xla import ir


@dataclass(frozen=True, slots=True)
class Pin:
    """A value lies, from where it is defined on, as `layouts` say one after the other: all its uses see the last.

    Several layouts are a value that is computed in the first, partial, and reduce-scattered step by step to the last. Where a loop's body hands
    its argument on unchanged, it goes on doing so.
    """

    handle: Any  # ir.Value: an op result or a block argument
    layouts: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class Reshard:
    """`value` (its number) is brought to `layout` in front of `anchor`; `uses` see the outcome instead of the value.

    `edges` are the uses in the program: (op, position). Dimensions in `open` are left to propagation (which must find what `layout` says of them).
    `through` are layouts on the way, spelled out where XLA would find a worse one (see `plan.reshard`).
    """

    value: int
    layout: Layout
    anchor: Any  # ir.Operation
    uses: tuple[Use, ...]
    edges: tuple[tuple[int, int], ...]
    open: frozenset[int] = frozenset()
    through: tuple[Layout, ...] = ()

    @property
    def steps(self) -> tuple[tuple[Layout, frozenset[int]], ...]:
        """Each constraint's layout and open dimensions, of which there are none on the way."""
        return (*((layout, frozenset[int]()) for layout in self.through), (self.layout, self.open))


@dataclass(frozen=True, slots=True)
class Marks:
    """Everything that gets written into a module.

    Attributes:
        arguments, results: layouts of the entry function's arguments and results, in order.
        operations: (operation, layout of each result) where the sharding stands on the operation itself.
        pins, reshards: where it stands on a constraint after a definition or before a use.
    """

    arguments: tuple[Layout, ...]
    results: tuple[Layout, ...]
    operations: tuple[tuple[Any, tuple[Layout, ...]], ...] = ()
    pins: tuple[Pin, ...] = ()
    reshards: tuple[Reshard, ...] = ()


def argument_marks(source: Source, lowered: LoweredPlan) -> Marks:
    """Shardings on the entry function's arguments and results alone."""
    arguments = tuple(lowered.layouts[argument.value] for argument in source.program.arguments)
    return Marks(arguments, result_layouts(source, lowered))


def pinned_marks(source: Source, lowered: LoweredPlan) -> Marks:
    """Arguments, results, a pin on every value of the program and a reshard wherever a use needs another layout."""
    boundary = argument_marks(source, lowered)
    return Marks(
        boundary.arguments,
        boundary.results,
        pins=tuple(all_pins(source, lowered)),
        reshards=tuple(all_reshards(source, lowered)),
    )


def operation_marks(source: Source, lowered: LoweredPlan) -> Marks:
    """The same with shardings on the operations themselves.

    Pins stay where a value goes on in another layout than it is computed in, and where a sharding on the operation would be lost.
    """
    boundary = argument_marks(source, lowered)
    pins = [pin for pin in all_pins(source, lowered) if len(pin.layouts) > 1 or needs_pin(pin.handle)]
    return Marks(
        boundary.arguments,
        boundary.results,
        operations=tuple(operation_layouts(source, lowered)),
        pins=tuple(pin if needs_pin(pin.handle) else Pin(pin.handle, pin.layouts[1:]) for pin in pins),
        reshards=tuple(all_reshards(source, lowered)),
    )


def needs_pin(handle: Any) -> bool:
    """Whether a sharding on the operation that defines `handle` would not arrive in HLO.

    CHLO operations are expanded on the way; of a loop, what it only passes through is left out, and its sharding counts wrong.
    """
    return isinstance(handle, ir.BlockArgument) or handle.owner.name.startswith(("chlo.", "stablehlo.while"))


def result_layouts(source: Source, lowered: LoweredPlan) -> tuple[Layout, ...]:
    """Layout of each result of the entry function: what its use requires, else what the value has."""
    layouts = []
    for number, op in enumerate(source.program.ops):
        if op.name == RESULT:
            layouts.append(lowered.required.get((number, 0), lowered.layouts[op.operands[0]]))
    return tuple(layouts)


def all_pins(source: Source, lowered: LoweredPlan) -> Iterator[Pin]:
    """A pin for every array that an operation makes, and for every array a loop's body or condition is given.

    Values that are made anew for each use take its layout; arguments of the entry function carry a sharding of their own, and
    so do the results of Shardy's own operations. What nobody reads needs none.
    """
    for value in pinnable_values(source, lowered):
        handle = source.definitions[value]
        if is_read(handle):
            yield Pin(handle, lowered.path(value))
    layout_of = layout_finder(source, lowered)
    for loop in loops(source):
        for k, result in enumerate(loop.results):
            if layout_of(result):
                yield from argument_pins(loop, k, layout_of(result))


def pinnable_values(source: Source, lowered: LoweredPlan) -> Iterator[int]:
    """Values whose layout is ours to say: arrays that an operation of the program makes, once."""
    remade = remade_values(source.program)
    producer = source.program.producer  # -1 for what the module computes and nobody needs
    for value, handle in enumerate(source.definitions):
        if not lowered.layouts[value] or remade[value] or producer[value] < 0 or isinstance(handle, ir.BlockArgument):
            continue
        if not handle.owner.name.startswith("sdy."):
            yield value


def argument_pins(loop: Any, number: int, layout: Layout) -> Iterator[Pin]:
    """Pins on argument `number` of a loop's condition and body, where they read it."""
    for region in loop.regions:
        argument = region.blocks[0].arguments[number]
        if is_read(argument):
            yield Pin(argument, (layout,))


def is_read(handle: Any) -> bool:
    """Whether an operation reads the value, other than to hand a loop's argument on to the next iteration."""
    return any(not hands_on(handle, use.owner.operation) for use in handle.uses)


def hands_on(handle: Any, user: Any) -> bool:
    """Whether `user` ends the block that `handle` is an argument of."""
    return isinstance(handle, ir.BlockArgument) and user.name == "stablehlo.return" and user.block == handle.owner


def operation_layouts(source: Source, lowered: LoweredPlan) -> Iterator[tuple[Any, tuple[Layout, ...]]]:
    """Each operation that makes arrays of the program, with the layout in which it computes each of its results."""
    layout_of = layout_finder(source, lowered, {value: lowered.path(value)[0] for value in lowered.computed})
    producer = source.program.producer
    seen: set[Any] = set()
    for value, handle in enumerate(source.definitions):
        if not lowered.layouts[value] or producer[value] < 0 or isinstance(handle, ir.BlockArgument):
            continue
        operation = handle.owner.operation
        if operation.name.startswith("sdy.") or needs_pin(handle) or operation in seen:
            continue
        if len(operation.results) > 1:
            seen.add(operation)
        yield operation, tuple(layout_of(result) for result in operation.results)


def layout_finder(
    source: Source, lowered: LoweredPlan, computed: dict[int, Layout] | None = None
) -> Callable[[Any], Layout]:
    """A function from an op result to its layout (the one it is computed in, given `computed`).

    A value that a loop only passes through is no value of the program at the loop's result: there it lies as it does outside.
    """
    numbers = {handle: number for number, handle in enumerate(source.definitions)}

    def layout_of(handle: Any) -> Layout:
        number = numbers.get(handle)
        while number is None:
            handle = handle.owner.operands[handle.result_number]
            number = numbers.get(handle)
        return (computed or {}).get(number, lowered.layouts[number])

    return layout_of


def loops(source: Source) -> list[Any]:
    """The `while` operations of the program."""
    found = [source.use(number, 0).operation for number, op in enumerate(source.program.ops) if op.name == CARRY]
    return list(dict.fromkeys(found))


def all_reshards(source: Source, lowered: LoweredPlan) -> Iterator[Reshard]:
    """One reshard for all uses that read one value, require one layout and see one another's operations.

    A result of the entry function needs none where one step leads there: the sharding of the result says it.
    """
    groups: dict[tuple[int, Any, Layout], list[tuple[int, int]]] = {}
    remade = remade_values(source.program)

    def through(value: int, layout: Layout) -> tuple[Layout, ...]:
        return (
            ()
            if remade[value]
            else waypoints(lowered.layouts[value], layout, lowered.axis_sizes, source.program.values[value].shape)
        )

    for number, position in sorted(lowered.required):
        op, layout = source.program.ops[number], lowered.required[number, position]
        value = op.operands[position]
        if op.name != RESULT or through(value, layout):
            use = source.use(number, position)
            groups.setdefault((value, use.operation.operands[use.operand], layout), []).append((number, position))
    for (value, _, layout), edges in groups.items():
        for anchor, shared in by_anchor(source, edges):
            uses = tuple(source.use(*edge) for edge in shared)
            yield Reshard(value, layout, anchor, uses, tuple(shared), through=through(value, layout))


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
