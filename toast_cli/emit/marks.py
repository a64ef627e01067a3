"""Where shardings have to stand for the compiler to partition as the plan says, as plain data.

Enters: a `Source` and a `LoweredPlan`. Leaves: `Marks`, which `annotate` writes into the module in one dialect or another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from toast_cli.frontend.source import Source, Use
from toast_cli.plan.layout import Layout
from toast_cli.plan.lowered import LoweredPlan
from toast_cli.program.model import RESULT
from toast_cli.xla import ir


@dataclass(frozen=True)
class Constraint:
    """One reshard: `value` is brought to `layout` in front of `anchor`, and `uses` see the outcome instead of the value."""

    value: Any  # ir.Value, the operand that the uses have now
    layout: Layout
    anchor: Any  # ir.Operation
    uses: tuple[Use, ...]


@dataclass(frozen=True)
class Marks:
    """Everything that gets written into a module.

    Attributes:
        arguments, results: layouts of the entry function's arguments and results, in order.
        operations: (operation, layout per result) for each operation whose results carry their layouts.
        constraints: reshards at uses.
    """

    arguments: tuple[Layout, ...]
    results: tuple[Layout, ...]
    operations: tuple[tuple[Any, tuple[Layout, ...]], ...]
    constraints: tuple[Constraint, ...]


def full_marks(source: Source, lowered: LoweredPlan) -> Marks:
    """A sharding on every argument and result, on every op result, and a reshard wherever a use needs another layout."""
    return Marks(
        tuple(lowered.layouts[argument.value] for argument in source.program.arguments),
        result_layouts(source, lowered),
        tuple(operation_layouts(source, lowered)),
        tuple(use_constraints(source, lowered)),
    )


def argument_marks(source: Source, lowered: LoweredPlan) -> Marks:
    """Shardings on the entry function's arguments and results alone."""
    everything = full_marks(source, lowered)
    return Marks(everything.arguments, everything.results, (), ())


def result_layouts(source: Source, lowered: LoweredPlan) -> tuple[Layout, ...]:
    """Layout of each result of the entry function: what its use requires, else what the value has."""
    layouts = []
    for number, op in enumerate(source.program.ops):
        if op.name == RESULT:
            layouts.append(lowered.required.get((number, 0), lowered.layouts[op.operands[0]]))
    return tuple(layouts)


def operation_layouts(source: Source, lowered: LoweredPlan) -> Iterable[tuple[Any, tuple[Layout, ...]]]:
    """Each operation that defines arrays of the program, with the layout of every one of its results.

    A value that a loop only passes through has no definition at the `while`; its result there has the layout it has outside.
    Shardy's own operations (manual regions, constraints that were kept) say themselves where their results lie.
    """
    numbers = {handle: number for number, handle in enumerate(source.definitions)}

    def layout(handle: Any) -> Layout:
        number = numbers.get(handle)
        while number is None:
            handle = handle.owner.operands[handle.result_number]
            number = numbers.get(handle)
        return lowered.layouts[number]

    for handle in source.definitions:
        if isinstance(handle, ir.BlockArgument) or handle.result_number > first_defined(handle, numbers):
            continue
        operation = handle.owner.operation
        if operation.name.startswith("sdy."):
            continue
        layouts = tuple(layout(result) for result in operation.results)
        if any(layouts):
            yield operation, layouts


def first_defined(handle: Any, numbers: dict[Any, int]) -> int:
    """The first result of `handle`'s operation that is a value of the program."""
    if handle.result_number == 0:
        return 0
    return next(result.result_number for result in handle.owner.results if result in numbers)


def use_constraints(source: Source, lowered: LoweredPlan) -> Iterable[Constraint]:
    """One reshard for all uses of one value that require the same layout and see one another's operations.

    A result of the entry function needs none: the sharding of the result says it.
    """
    groups: dict[tuple[Any, Layout], list[Use]] = {}
    for number, position in sorted(lowered.required):
        if source.program.ops[number].name != RESULT:
            use = source.use(number, position)
            value = use.operation.operands[use.operand]
            groups.setdefault((value, lowered.required[number, position]), []).append(use)
    for (value, layout), uses in groups.items():
        for anchor, shared in by_anchor(uses):
            yield Constraint(value, layout, anchor, tuple(shared))


def by_anchor(uses: list[Use]) -> list[tuple[Any, list[Use]]]:
    """Uses with the operation in front of which one reshard can serve them all: the first of those in one block.

    A use inside a region is served by a reshard that stands before that region, when there is one.
    """
    anchors: list[tuple[Any, list[Use]]] = []
    for use in uses:
        for k, (anchor, shared) in enumerate(anchors):
            at = ancestor_in(use.operation, anchor.block)
            if at is None:
                continue
            if at == use.operation and at.is_before_in_block(anchor):
                anchors[k] = (at, [*shared, use])
            elif at == anchor or anchor.is_before_in_block(at):
                shared.append(use)
            else:
                continue
            break
        else:
            anchors.append((use.operation, [use]))
    return anchors


def ancestor_in(operation: Any, block: Any) -> Any | None:
    """The operation of `block` that is, or contains, `operation`; None when there is none."""
    while operation.name != "func.func":
        if operation.block == block:
            return operation
        operation = operation.parent.operation
    return None
