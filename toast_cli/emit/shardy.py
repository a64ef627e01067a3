"""Shardy's notation (`sdy.mesh`, `sdy.sharding`, `sdy.sharding_constraint`), and Shardy's own propagation, run
in-process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from toast_cli.emit.annotations import Annotations, Constraint, Reshard, constrainable_values, hands_on
from toast_cli.frontend.attributes import is_placed
from toast_cli.frontend.constraints import quoted
from toast_cli.frontend.source import Source
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import Sharding
from toast_cli.program.ops import BARRIER, MULTIPLY, SQUARE
from toast_cli.xla import (
    declare_mesh,
    free_symbol,
    ir,
    main_function,
    operations_in,
    run_passes,
    sdy,
    walk_ops,
    write_bytecode,
)

SHARDING = "sdy.sharding"  # the attribute of arguments and results
CONSTRAINT = "sdy.sharding_constraint"

Undo = ExitStack  # removes what is added to a module, the last first


def write_shardy(
    source: Source, lowered: PartitionedProgram, annotations: Annotations, *, binary: bool = False
) -> bytes:
    """The program with these annotations; the module of `source` is unchanged afterwards."""
    notation = ShardyNotation(source.module, lowered.axis_names, lowered.axis_sizes)
    with annotated(source.module, annotations, notation):
        # A copy: operations that regions replace (see `misread`) are detached and still read values of the module, and
        # MLIR's bytecode writer, which sorts the users of each value, crashes on a detached user.
        return written(source.module.operation.clone() if binary else source.module, binary=binary)


def written(module: Any, *, binary: bool) -> bytes:
    """A module as text, locations included, or as bytecode."""
    if binary:
        return write_bytecode(module)
    text: bytes = module.operation.get_asm(binary=True, enable_debug_info=True)
    return text


class ShardyNotation:
    """Shardings over one mesh symbol; each different sharding is built once."""

    def __init__(self, module: Any, axis_names: tuple[str, ...], axis_sizes: tuple[int, ...]) -> None:
        self._context = module.context
        self.devices = prod(axis_sizes)
        self._axis_names = axis_names
        axes = ", ".join(f"{quoted(name)}={size}" for name, size in zip(axis_names, axis_sizes, strict=True))
        self.mesh = ir.Attribute.parse(f"#sdy.mesh<[{axes}]>", self._context)
        meshes = [op for op in module.body.operations if op.operation.name == "sdy.mesh"]
        same = [op.attributes["sym_name"].value for op in meshes if op.attributes["mesh"] == self.mesh]
        self._declared = bool(same)
        self._symbol = same[0] if same else free_symbol(module, "mesh")
        self._values: dict[tuple[Sharding, frozenset[int]], Any] = {}
        self._operations: dict[tuple[Sharding, ...], Any] = {}

    def prepare(self, module: Any, undo: Undo) -> None:
        """Declares the mesh, unless the program already declares the same one for its manual regions."""
        if not self._declared:
            undo.callback(declare_mesh(module, self._symbol, self.mesh).erase)

    def _text(self, sharding: Sharding, open: frozenset[int] = frozenset()) -> str:
        dimensions = (
            "{?}" if d in open else "{" + ", ".join(quoted(self._axis_names[axis]) for axis in axes) + "}"
            for d, axes in enumerate(sharding)
        )
        return f"<@{self._symbol}, [{', '.join(dimensions)}]>"

    def of_value(self, sharding: Sharding, open: frozenset[int] = frozenset()) -> Any:
        if (sharding, open) not in self._values:
            self._values[sharding, open] = ir.Attribute.parse(
                f"#sdy.sharding{self._text(sharding, open)}", self._context
            )
        return self._values[sharding, open]

    def of_operation(self, shardings: tuple[Sharding, ...]) -> Any:
        if shardings not in self._operations:
            text = ", ".join(map(self._text, shardings))
            self._operations[shardings] = ir.Attribute.parse(f"#sdy.sharding_per_value<[{text}]>", self._context)
        return self._operations[shardings]

    def region_attributes(
        self, in_shardings: tuple[Sharding, ...], out_shardings: tuple[Sharding, ...]
    ) -> dict[str, Any]:
        """The attributes of a manual region over all mesh axes with these shardings at its boundary."""
        axes = ", ".join(map(quoted, self._axis_names))
        return {
            "in_shardings": self.of_operation(in_shardings),
            "out_shardings": self.of_operation(out_shardings),
            "manual_axes": ir.Attribute.parse(f"#sdy<manual_axes{{{axes}}}>", self._context),
        }

    def constraint(
        self, value: Any, sharding: Sharding, location: Any, where: Any, undo: Undo, open: frozenset[int] = frozenset()
    ) -> list[Any]:
        """A constraint. If all results of an op on one device have closed constraints, Shardy of jaxlib 0.12 takes them
        as a statement about the op's placement, so a constraint that leaves all dimensions open is put between."""
        steps = [open]
        if not isinstance(value, ir.BlockArgument) and is_placed(value.owner) and len(value.owner.results) > 1:
            steps.insert(0, frozenset(range(len(sharding))))
        added: list[Any] = []
        for left in steps:
            operation = ir.Operation.create(
                CONSTRAINT,
                results=[value.type],
                operands=[value],
                attributes={"sharding": self.of_value(sharding, left)},
                loc=location,
                ip=where,
            )
            undo.callback(operation.erase)
            added.append(operation)
            value = operation.results[0]
        return added


def replace_by_region(operation: Any, read: Sequence[Any], region: Any, undo: Undo) -> None:
    """Takes an operation out of its block: readers of its results in `read` read the region's results instead."""
    for old, new in zip(read, region.results, strict=True):
        old.replace_all_uses_with(new)
    operation.detach_from_parent()
    undo.callback(region.erase)
    for old, new in zip(read, region.results, strict=True):
        undo.callback(new.replace_all_uses_with, old)
    undo.callback(ir.InsertionPoint(region).insert, operation)


# ---------------------------------------------------------------- annotations in a module
# Inside the `with` block the module carries them; after it, the module is as before.


@contextmanager
def annotated(
    module: Any, annotations: Annotations, notation: ShardyNotation, *, numbered: bool = False
) -> Iterator[None]:
    """The module carries `annotations` and states the number of partitions that it runs on while the block runs.
    numbered: constraints at uses carry the number of their reshard, see `propagate`."""
    function = main_function(module).operation
    with Undo() as undo:
        with module.context:
            i32 = ir.IntegerType.get_signless(32)
            put(module.operation, "mhlo.num_partitions", ir.IntegerAttr.get(i32, notation.devices), undo)
            put(module.operation, "mhlo.num_replicas", ir.IntegerAttr.get(i32, 1), undo)
            notation.prepare(module, undo)
            annotate_boundary(function, "arg_attrs", annotations.arguments, notation, undo)
            annotate_boundary(function, "res_attrs", annotations.results, notation, undo)
            for value in annotations.barriers:
                put_barrier(value, undo)
            for constraint in annotations.constraints:
                put_constraint(constraint, notation, undo)
            for number, reshard in enumerate(annotations.reshards):
                last = put_reshard(reshard, notation, undo)
                if numbered:
                    last.attributes[RESHARD] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), number)
        yield


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

    undo.callback(restore)


def annotate_boundary(
    function: Any, name: str, shardings: tuple[Sharding, ...], notation: ShardyNotation, undo: Undo
) -> None:
    """Adds a sharding to each dictionary of `arg_attrs` or `res_attrs`; their other entries (donation, paths) stay."""
    if not shardings:
        return
    attributes = function.attributes
    present = list(attributes[name]) if name in attributes else [{}] * len(shardings)
    marked = [
        ir.DictAttr.get({**{item.name: item.attr for item in old}, SHARDING: notation.of_value(sharding)})
        for old, sharding in zip(present, shardings, strict=True)
    ]
    put(function, name, ir.ArrayAttr.get(marked), undo)


def put_barrier(value: Any, undo: Undo) -> None:
    """Puts a barrier right after the definition of an op's result and makes all uses read its result."""
    owner = value.owner
    where = ir.InsertionPoint.after(owner)
    added = ir.Operation.create(BARRIER, results=[value.type], operands=[value], loc=owner.location, ip=where)
    value.replace_all_uses_except(added.results[0], added)
    undo.callback(added.erase)
    undo.callback(added.results[0].replace_all_uses_with, value)


def put_constraint(constraint: Constraint, notation: ShardyNotation, undo: Undo) -> None:
    """Puts constraints right after the definition and makes all uses read the last one, except a loop that passes an
    argument on unchanged."""
    value = constraint.handle
    if isinstance(value, ir.BlockArgument):
        where, location = ir.InsertionPoint.at_block_begin(value.owner), value.owner.owner.location
    else:
        where, location = ir.InsertionPoint.after(value.owner), value.owner.location
    added: list[Any] = []
    for sharding in constraint.shardings:
        added += notation.constraint(value, sharding, location, where, undo)
        value = added[-1].results[0]
    untouched = [
        use.owner.operation for use in constraint.handle.uses if hands_on(constraint.handle, use.owner.operation)
    ]
    constraint.handle.replace_all_uses_except(value, [added[0], *untouched])
    undo.callback(value.replace_all_uses_with, constraint.handle)


def put_reshard(reshard: Reshard, notation: ShardyNotation, undo: Undo) -> Any:
    """Puts constraints before the anchor and makes these uses, and no others, read the last one; returns that."""
    value = reshard.read.operation.operands[reshard.read.operand]
    anchor, where = reshard.anchor, ir.InsertionPoint(reshard.anchor)
    added: list[Any] = []
    for sharding, open in reshard.steps:
        added += notation.constraint(value, sharding, anchor.location, where, undo, open)
        value = added[-1].results[0]
    for use in reshard.uses:
        operands = use.operation.operands
        undo.callback(operands.__setitem__, use.operand, operands[use.operand])
        operands[use.operand] = value
    return added[-1]


# ---------------------------------------------------------------- propagation

# The passes of `sdy-propagation-pipeline` that decide shardings; its clean-up passes would double the time.
QUICK = (
    "symbol-dce,sdy-remove-size-one-axes,sdy-constant-or-scalar-splitter,symbol-dce,sdy-manual-axes-cleanup,sdy-add-data-flow-edges,"
    "sdy-apply-sharding-constraints,sdy-sharding-group-import,sdy-user-priority-propagate,func.func(sdy-sink-data-flow-edges)"
)

VALUES, RESHARD = "toast.values", "toast.reshard"
# Stands for a sub-axis that Shardy created; no plan has them.
PART_OF_AXIS = -1


@dataclass(frozen=True)
class Propagated:
    """`values`: value number -> sharding, if the value still exists. `reshards`: number in `Annotations.reshards` ->
    sharding.

    Axes of size 1 are left out.
    """

    values: dict[int, Sharding]
    reshards: dict[int, Sharding]


def propagate(
    source: Source, lowered: PartitionedProgram, annotations: Annotations, pipeline: str = QUICK
) -> Propagated:
    """All shardings after propagation from these annotations, on a copy of the module."""
    notation = ShardyNotation(source.module, lowered.axis_names, lowered.axis_sizes)
    with Undo() as undo, annotated(source.module, annotations, notation, numbered=True):
        number_values(source, lowered, undo)
        module = source.module.operation.clone()
    # Shardy has no rule for squares. XLA propagates through HLO, where they are products.
    for square in walk_ops(module, SQUARE):
        where, operands = ir.InsertionPoint(square), [square.operands[0]] * 2
        product = ir.Operation.create(MULTIPLY, [square.result.type], operands, loc=square.location, ip=where)
        if VALUES in square.attributes:
            product.attributes[VALUES] = square.attributes[VALUES]
        square.result.replace_all_uses_with(product.result)
        square.erase()
    run_passes(module, pipeline)

    @cache
    def read(attribute: Any) -> tuple[Sharding, ...]:
        """The shardings in a sharding of one or of several values, without axes of size 1."""
        several = sdy.TensorShardingPerValueAttr.isinstance(attribute)
        parts = sdy.TensorShardingPerValueAttr(attribute).shardings if several else [attribute]
        return tuple(without_units(read_sharding(part, lowered.axis_names), lowered.axis_sizes) for part in parts)

    values: dict[int, Sharding] = {}
    reshards: dict[int, Sharding] = {}
    for operation in operations_in(module):
        attributes = operation.attributes
        if (numbers := attributes.get(VALUES)) is not None:
            sharding = attributes.get(SHARDING)
            for k, number in enumerate(ir.DenseI64ArrayAttr(numbers)):
                if number >= 0:
                    replicated = ((),) * len(lowered.shardings[number])
                    values[number] = read(sharding)[k] if sharding is not None else replicated
        elif (number := attributes.get(RESHARD)) is not None:
            (reshards[ir.IntegerAttr(number).value],) = read(attributes["sharding"])
    return Propagated(values, reshards)


def number_values(source: Source, lowered: PartitionedProgram, undo: Undo) -> None:
    """Attaches to each operation the value number of each of its results (-1: none), for values whose sharding the plan
    decides; others propagate freely."""
    operations: dict[Any, list[int]] = defaultdict(list)
    for value in constrainable_values(source, lowered):
        handle = source.definitions[value]
        numbers = operations[handle.owner.operation]
        numbers += [-1] * (handle.result_number + 1 - len(numbers))
        numbers[handle.result_number] = value
    with source.module.context:
        for operation, numbers in operations.items():
            put(operation, VALUES, ir.DenseI64ArrayAttr.get(numbers), undo)


def read_sharding(attribute: Any, axis_names: tuple[str, ...]) -> Sharding:
    """A `#sdy.sharding` as a sharding."""

    def number(axis: Any) -> int:
        reference = sdy.AxisRefAttr(axis)
        return axis_names.index(reference.name) if reference.sub_axis_info is None else PART_OF_AXIS

    dimensions = sdy.TensorShardingAttr(attribute).dimension_shardings
    return tuple(tuple(number(axis) for axis in sdy.DimensionShardingAttr(d).axes) for d in dimensions)


def without_units(sharding: Sharding, axis_sizes: tuple[int, ...]) -> Sharding:
    """The sharding without axes of size 1."""
    return tuple(tuple(axis for axis in axes if axis < 0 or axis_sizes[axis] > 1) for axes in sharding)
