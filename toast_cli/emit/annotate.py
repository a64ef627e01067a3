"""Writes annotations into a module and removes them again.

In: a module and `Annotations`. Inside the `with` block the module carries them in one dialect or the other
(`Notation`); after it, the module is as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from toast_cli.emit.annotations import Annotations, Constraint, hands_on
from toast_cli.emit.reshards import Reshard
from toast_cli.plan.sharding import Sharding
from toast_cli.program.ops import BARRIER
from toast_cli.xla import ir, main_function

Undo = list[Callable[[], None]]

PARTITIONS = "mhlo.num_partitions"
REPLICAS = "mhlo.num_replicas"
ADDED_BARRIER = "kept as it is scattered"  # by its location a barrier is distinguished from those of the program


class Notation(Protocol):
    """The notation of shardings in one dialect."""

    attribute: str
    """Name of the attribute on operations, arguments and results."""

    def prepare(self, module: Any, undo: Undo) -> None:
        """Adds declarations to the module (a mesh) that the notation needs, if any."""

    def of_value(self, sharding: Sharding) -> Any:
        """The attribute of an argument or result of the entry function, or of an operation with one result."""

    def constraint(
        self, value: Any, sharding: Sharding, location: Any, where: Any, open: frozenset[int] = frozenset()
    ) -> list[Any]:
        """New operations at insertion point `where`; the last has one result, which is `value` with `sharding`.

        Dimensions in `open` may be left open, if the notation can express that.
        """


@contextmanager
def annotated(module: Any, annotations: Annotations, notation: Notation, devices: int) -> Iterator[None]:
    """The module carries `annotations` and states that it runs on `devices` partitions while the block runs."""
    undo: Undo = []
    function = main_function(module)
    try:
        with module.context:
            count = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), devices)
            one = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 1)
            put(module.operation, PARTITIONS, count, undo)
            put(module.operation, REPLICAS, one, undo)
            notation.prepare(module, undo)
            annotate_boundary(function.operation, "arg_attrs", annotations.arguments, notation, undo)
            annotate_boundary(function.operation, "res_attrs", annotations.results, notation, undo)
            for operation, sharding in annotations.recomputed:
                put(operation, notation.attribute, notation.of_value(sharding), undo)
            for value in annotations.barriers:
                put_barrier(value, undo)
            for constraint in annotations.constraints:
                put_constraint(constraint, notation, undo)
            for reshard in annotations.reshards:
                put_reshard(reshard, notation, undo)
        yield
    finally:
        for step in reversed(undo):
            step()


def put(operation: Any, name: str, attribute: Any, undo: Undo) -> None:
    """Sets an attribute and records how to restore it."""
    attributes = operation.attributes
    before = attributes.get(name)
    attributes[name] = attribute

    def restore() -> None:
        if before is None:
            del operation.attributes[name]
        else:
            operation.attributes[name] = before

    undo.append(restore)


def annotate_boundary(
    function: Any, name: str, shardings: tuple[Sharding, ...], notation: Notation, undo: Undo
) -> None:
    """Adds a sharding to each dictionary of `arg_attrs` or `res_attrs`; their other entries (donation, paths) stay."""
    if not shardings:
        return
    attributes = function.attributes
    present = list(attributes[name]) if name in attributes else [{}] * len(shardings)
    marked = [
        ir.DictAttr.get({**{item.name: item.attr for item in old}, notation.attribute: notation.of_value(sharding)})
        for old, sharding in zip(present, shardings, strict=True)
    ]
    put(function, name, ir.ArrayAttr.get(marked), undo)


def put_barrier(value: Any, undo: Undo) -> None:
    """Puts a barrier right after the definition of an op's result and makes all uses read its result."""
    owner = value.owner
    location = ir.Location.name(ADDED_BARRIER, childLoc=owner.location)
    where = ir.InsertionPoint.after(owner)
    added = ir.Operation.create(BARRIER, results=[value.type], operands=[value], loc=location, ip=where)
    value.replace_all_uses_except(added.results[0], added)
    undo.append(lambda: remove([added], added.results[0], value))


def is_added_barrier(operation: Any) -> bool:
    """True if an operation of the file is a barrier that toast added."""
    return operation.name == BARRIER and ADDED_BARRIER in str(operation.location)


def put_constraint(constraint: Constraint, notation: Notation, undo: Undo) -> None:
    """Puts constraints right after the definition and makes all uses read the last one, except a loop that passes an
    argument on unchanged."""
    value = constraint.handle
    if isinstance(value, ir.BlockArgument):
        where, location = ir.InsertionPoint.at_block_begin(value.owner), value.owner.owner.location
    else:
        where, location = ir.InsertionPoint.after(value.owner), value.owner.location
    added: list[Any] = []
    for sharding in constraint.shardings:
        added += notation.constraint(value, sharding, location, where)
        value = added[-1].results[0]
    untouched = [
        use.owner.operation for use in constraint.handle.uses if hands_on(constraint.handle, use.owner.operation)
    ]
    constraint.handle.replace_all_uses_except(value, [added[0], *untouched])
    undo.append(lambda: remove(added, value, constraint.handle))


def put_reshard(reshard: Reshard, notation: Notation, undo: Undo) -> None:
    """Puts constraints before the anchor and makes these uses, and no others, read the last one."""
    value = reshard.read.operation.operands[reshard.read.operand]
    anchor, where = reshard.anchor, ir.InsertionPoint(reshard.anchor)
    added: list[Any] = []
    outcome = value
    for sharding, open in reshard.steps:
        added += notation.constraint(outcome, sharding, anchor.location, where, open)
        outcome = added[-1].results[0]
    before = [use.operation.operands[use.operand] for use in reshard.uses]
    for use in reshard.uses:
        use.operation.operands[use.operand] = outcome

    def put_back() -> None:
        for use, handle in zip(reshard.uses, before, strict=True):
            use.operation.operands[use.operand] = handle
        for operation in reversed(added):
            operation.erase()

    undo.append(put_back)


def remove(added: list[Any], outcome: Any, value: Any) -> None:
    """Removes constraints: users of their `outcome` read `value` again."""
    outcome.replace_all_uses_with(value)
    for operation in reversed(added):
        operation.erase()
