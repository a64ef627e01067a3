"""HLO text with GSPMD's shardings, for XLA without Shardy.

In: a `Source` and a `PartitionedProgram`. Out: the bytes of an HLO text file, parsed again; every parameter has
a sharding, and XLA reads each of them. `Sharding` custom calls stand where Shardy's form has constraints with
`--annotate full`: behind every value.
"""

from __future__ import annotations

import re
from math import prod
from typing import Any, NamedTuple

from toast_cli import xla
from toast_cli.emit.annotate import Undo, annotated
from toast_cli.emit.annotations import Annotations
from toast_cli.emit.barriers import keep_branch_operands
from toast_cli.emit.behind_transposes import reduced_behind_transposes
from toast_cli.emit.dense_products import write_out_ragged
from toast_cli.emit.hlo_annotations import hlo_annotations
from toast_cli.emit.misread import in_regions, shardings_at
from toast_cli.emit.propagate import read_sharding
from toast_cli.emit.shardy import check_manual_regions
from toast_cli.emit.tiling import gspmd_string
from toast_cli.errors import ToastError, UsageError
from toast_cli.frontend.constraints import regions_on
from toast_cli.frontend.exchanges import manual_axes
from toast_cli.frontend.source import Source
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import Sharding, replicated
from toast_cli.program.host_memory import on_host
from toast_cli.program.ops import BROADCAST_IN_DIM, RAGGED_DOT
from toast_cli.program.rematerialised import remade_values
from toast_cli.xla import ir

REGION = "sdy.manual_computation"
CONSTANT, CUSTOM_CALL = "stablehlo.constant", "stablehlo.custom_call"
CONSTRAINT_TARGET = "Sharding"
REPLICATED = "{replicated}"
ENTRANCE, EXIT = "SPMDFullToShardShape", "SPMDShardToFullShape"
# A mesh of one device, as Shardy prints it.
ONE_DEVICE = re.compile(r"<\[\], device_ids=\[(\d+)\]>")

# Collectives that crash it in partially manual regions ("sharding.IsManualSubgroup()").
NOT_OVER_SOME_AXES = ("stablehlo.all_gather", "stablehlo.all_to_all", "stablehlo.collective_broadcast")


def emit_hlo(source: Source, lowered: PartitionedProgram) -> bytes:
    """The program as HLO text with GSPMD shardings.

    Raises `UsageError` for programs that only Shardy can partition.
    """
    refuse_shardy_only(source, lowered)
    devices = prod(lowered.axis_sizes)
    notation = GspmdNotation(source, lowered.axis_sizes)
    with (
        regions_on(source.module, lowered.axis_names, lowered.axis_sizes),
        in_regions(source, lowered, sums_too=False) as (source, lowered),
    ):
        lowered = reduced_behind_transposes(source, lowered, narrow_too=True)
        annotations = hlo_annotations(source, lowered)
        with annotated(source.module, annotations, notation, devices):
            text = xla.stablehlo_to_hlo_text(without_shardy(source, lowered))
    text = with_host_memory(with_partitions(text, devices), source)
    check_arrival(text, annotations, notation)
    xla.hlo_text_to_proto(text)
    return text.encode()


def without_shardy(source: Source, lowered: PartitionedProgram) -> bytes:
    """The module as bytecode, with the bodies of manual regions between custom calls."""
    with source.module.context, ir.Location.unknown():
        numbers = {source.operations[n]: n for n, op in enumerate(source.program.ops) if op.region is not None}
        found = xla.walk_ops(source.module, REGION)
        boundaries = [boundary(region, source, lowered, numbers.get(region)) for region in found]
        module = source.module.operation.clone()
        write_out_ragged(module)
        keep_branch_operands(module)
        regions = dict(zip(xla.walk_ops(module, REGION), boundaries, strict=True))
        replicate_shared_splats(module, {region: at.manual for region, at in regions.items()}, lowered.axis_sizes)
        for region, at in regions.items():
            flatten(region, at, lowered.axis_sizes)
        return bare_bytecode(module)


class Boundary(NamedTuple):
    """Shardings of a manual region's operands and results outside of it, and its manual axes."""

    in_shardings: tuple[Sharding, ...]
    out_shardings: tuple[Sharding, ...]
    manual: frozenset[int]


def boundary(region: Any, source: Source, lowered: PartitionedProgram, number: int | None) -> Boundary:
    """The region's own shardings; for op `number`, a region of the user's program, the plan's,
    which may split further."""
    manual = frozenset(lowered.axis_names.index(axis) for axis in manual_axes(region))
    if number is not None:
        return Boundary(*shardings_at(lowered, number, source.program.ops[number]), manual)
    in_shardings, out_shardings = (
        tuple(read_sharding(one, lowered.axis_names) for one in xla.sdy.TensorShardingPerValueAttr(at).shardings)
        for at in (region.attributes["in_shardings"], region.attributes["out_shardings"])
    )
    return Boundary(in_shardings, out_shardings, manual)


def replicate_shared_splats(module: Any, manual: dict[Any, frozenset[int]], sizes: tuple[int, ...]) -> None:
    """Writes shardings of constants so that they survive the conversion to HLO.

    The conversion turns a splat into a constant and merges equal ones, dropping their shardings. If these differ, XLA's
    propagation chooses one that suits some readers, and the partitioner takes the others' ops to have it as well (a
    gather's gradient that is added to zeros). So such splats are replicated, and each reader slices its shard for free.
    One that is read both in a manual region and outside enters the region like any other replicated array. manual:
    region -> its axes.
    """
    alike: dict[tuple[str, str], list[Any]] = {}
    outside: set[tuple[str, str]] = set()
    local: list[tuple[tuple[str, str], Any]] = []

    for operation in xla.walk_ops(module, BROADCAST_IN_DIM, CONSTANT, inner_first=True):
        number = the_one_number(operation)
        if number is not None:
            array = number, str(operation.results[0].type)
            if operation.parent.operation.name == REGION:
                local.append((array, operation))
            else:
                outside.add(array)
            if operation.results[0].type.rank and GspmdNotation.attribute in operation.attributes:
                alike.setdefault(array, []).append(operation)
    for array, operation in local:
        if array in outside:
            piece = operation.results[0]
            whole = call(ir.InsertionPoint.after(operation), CONSTRAINT_TARGET, piece, piece.type, REPLICATED)
            inside = gspmd_string(replicated(piece.type.rank), sizes, manual[operation.parent.operation])
            there = call(ir.InsertionPoint.after(whole.owner), ENTRANCE, whole, piece.type, inside)
            piece.replace_all_uses_except(there, [whole.owner.operation, *spread_by(piece)])
    for operations in alike.values():
        explicit = {operation: operation.attributes[GspmdNotation.attribute].value for operation in operations}
        if len(set(explicit.values())) > 1:
            for operation, sharding in explicit.items():
                array = operation.results[0]
                first = there = call(
                    ir.InsertionPoint.after(operation), CONSTRAINT_TARGET, array, array.type, REPLICATED
                )
                if sharding != REPLICATED:
                    there = call(ir.InsertionPoint.after(first.owner), CONSTRAINT_TARGET, first, array.type, sharding)
                array.replace_all_uses_except(there, [first.owner.operation, *spread_by(array)])


def spread_by(value: Any) -> list[Any]:
    """The broadcasts of a constant."""
    return [one for use in value.uses if (one := use.owner.operation).name == BROADCAST_IN_DIM]


def the_one_number(operation: Any) -> str | None:
    """The value of a splat constant, as text; None for other operations."""
    while operation.name == BROADCAST_IN_DIM and not isinstance(operation.operands[0], ir.BlockArgument):
        operation = operation.operands[0].owner
    return xla.constant_number(operation) if operation.name == CONSTANT else None


def flatten(region: Any, at: Boundary, sizes: tuple[int, ...]) -> None:
    """Moves the body of a manual region between custom calls: `SPMDFullToShardShape` behind a constraint makes a shard
    of each operand that is read, `SPMDShardToFullShape` makes whole arrays from the shards of results."""
    block = region.regions[0].blocks[0]
    for statement in xla.walk_ops(region, "sdy.sharding_constraint"):
        statement.results[0].replace_all_uses_with(statement.operands[0])
        statement.erase()
    where = ir.InsertionPoint(region)
    for operand, argument, sharding in zip(list(region.operands), block.arguments, at.in_shardings, strict=True):
        if not list(argument.uses):
            continue
        whole = call(where, CONSTRAINT_TARGET, operand, operand.type, gspmd_string(sharding, sizes))
        inside = gspmd_string(sharding, sizes, at.manual)
        argument.replace_all_uses_with(call(where, ENTRANCE, whole, argument.type, inside))
    *body, last = [op.operation for op in block.operations]
    for operation in body:
        operation.move_before(region)
    for piece, result, sharding in zip(list(last.operands), list(region.results), at.out_shardings, strict=True):
        local = call(where, CONSTRAINT_TARGET, piece, piece.type, gspmd_string(sharding, sizes, at.manual))
        result.replace_all_uses_with(call(where, EXIT, local, result.type, gspmd_string(sharding, sizes)))
    region.erase()


def call(where: Any, target: str, value: Any, kind: Any, sharding: str, location: Any = None) -> Any:
    """The result of a custom call on a value, with a sharding; at the value's location if none is given."""
    made = ir.Operation.create(
        CUSTOM_CALL,
        results=[kind],
        operands=[value],
        attributes={
            "call_target_name": ir.StringAttr.get(target, value.context),
            GspmdNotation.attribute: ir.StringAttr.get(sharding, value.context),
        },
        loc=location or value.location,
        ip=where,
    )
    return made.results[0]


def bare_bytecode(module: Any) -> bytes:
    """The module without its `sdy.mesh` declarations, which would become attributes in the HLO.

    An operation that is bound to one device (a host callback) refers to a mesh of that device; it gets a GSPMD sharding
    instead.
    """
    if not any(op.operation.name == "sdy.mesh" for op in module.body.operations):
        return xla.write_bytecode(module)
    clone = module.operation.clone()
    body = clone.regions[0].blocks[0].operations
    meshes = {op.attributes["sym_name"].value: op for op in list(body) if op.operation.name == "sdy.mesh"}
    devices = {
        name: found[1] for name, op in meshes.items() if (found := ONE_DEVICE.search(str(op.attributes["mesh"])))
    }

    for operation in xla.operations_in(clone):
        if "sdy.sharding" in operation.attributes:
            mesh = re.search(r"@(\w+)", str(operation.attributes["sdy.sharding"]))
            if mesh and mesh[1] in devices:
                bind(operation, devices[mesh[1]])
            del operation.attributes["sdy.sharding"]
    for op in meshes.values():
        op.operation.erase()
    return xla.write_bytecode(clone)


def bind(operation: Any, device: str) -> None:
    """Binds the operation to this device."""
    one = f"{{maximal device={device}}}"
    count = len(operation.results)
    text = one if count < 2 else "{" + ", ".join([one] * count) + "}"
    operation.attributes[GspmdNotation.attribute] = ir.StringAttr.get(text, operation.context)


def with_partitions(text: str, devices: int) -> str:
    """Adds the number of devices to the header, as XLA prints it for more than one."""
    return re.sub(r"\AHloModule [^,\n]+", rf"\g<0>, num_partitions={devices}", text) if devices > 1 else text


def with_host_memory(text: str, source: Source) -> str:
    """Marks arguments and results in host memory in the header: those in memory space 5."""
    program, there = source.program, on_host(source.program)
    values = [a.value for a in program.arguments] + [result.value for result in program.results]
    if there.isdisjoint(values):
        return text
    wanted = iter([value in there for value in values])

    def placed(found: re.Match[str]) -> str:
        return f"{found[1]}{{{found[2] or ''}:S(5)}}" if next(wanted, False) else found[0]

    start = text.index("entry_computation_layout={")
    end = text.index("\n", start)
    return text[:start] + re.sub(r"(\w+\[[\d,<=]*\])(?:\{([\d,]*)\})?", placed, text[start:end]) + text[end:]


def check_arrival(text: str, annotations: Annotations, notation: GspmdNotation) -> None:
    """Raises `ToastError` for shardings that the conversion to HLO drops silently because XLA cannot read them.
    Constraints may be missing: XLA folds choices that depend on constants alone, and drops the other branch."""
    entry = text[text.index("\nENTRY ") :]
    parameters = len(re.findall(r" parameter\(\d+\), sharding=", entry))
    unread = [sharding for sharding in sorted(notation.written) if not xla.reads_sharding(sharding)]
    if parameters != len(annotations.arguments) or unread:
        raise ToastError(
            f"shardings were lost on the way to HLO: {parameters} of {len(annotations.arguments)} parameters have one"
            + (f", XLA cannot read {unread[0]}" if unread else ""),
            hint="write the program with --format stablehlo, and report this as a bug",
        )


class GspmdNotation:
    """Shardings as strings. `written` has the different ones that were used."""

    attribute = "mhlo.sharding"

    def __init__(self, source: Source, axis_sizes: tuple[int, ...]) -> None:
        self._context = source.module.context
        self._axis_sizes = axis_sizes
        remade = remade_values(source.program)
        self._remade = {handle for value, handle in enumerate(source.definitions) if remade[value]}
        self._strings: dict[Sharding, str] = {}
        self.written: set[str] = set()

    def prepare(self, module: Any, undo: Undo) -> None:
        """Declares nothing: the strings refer to device numbers. The device count goes into the header."""

    def _text(self, sharding: Sharding) -> str:
        if sharding not in self._strings:
            self._strings[sharding] = gspmd_string(sharding, self._axis_sizes)
        return self._strings[sharding]

    def of_value(self, sharding: Sharding) -> Any:
        self.written.add(self._text(sharding))
        return ir.StringAttr.get(self._text(sharding), self._context)

    def constraint(
        self, value: Any, sharding: Sharding, location: Any, where: Any, open: frozenset[int] = frozenset()
    ) -> list[Any]:
        """A `Sharding` custom call; a value made from constants is recomputed in the sharding instead."""
        if value in self._remade:
            return self._made_again(value, sharding, where)
        self.written.add(self._text(sharding))
        return [call(where, CONSTRAINT_TARGET, value, value.type, self._text(sharding), location).owner.operation]

    def _made_again(self, value: Any, sharding: Sharding, where: Any) -> list[Any]:
        copies: dict[Any, Any] = {}
        added: list[Any] = []

        def copy(handle: Any) -> Any:
            if handle not in self._remade or not handle.type.rank:
                return handle
            if handle not in copies:
                operation = handle.owner.operation
                operands = [copy(operand) for operand in operation.operands]
                clone = operation.clone(ip=where)
                for k, operand in enumerate(operands):
                    clone.operands[k] = operand
                added.append(clone.operation)
                copies[handle] = clone.results[0]
            return copies[handle]

        copy(value)
        added[-1].attributes[self.attribute] = ir.StringAttr.get(self._text(sharding), self._context)
        return added


def refuse_shardy_only(source: Source, lowered: PartitionedProgram) -> None:
    """Refuses ragged dots and some collectives in partially manual regions, and nested manual regions."""
    check_manual_regions(source, lowered.axis_names, lowered.axis_sizes)
    for number, op in enumerate(source.program.ops):
        if op.region is None:
            continue
        operation, what = source.operations[number], ""
        some = set(manual_axes(operation)) < set(lowered.axis_names)
        if some and xla.walk_ops(operation, RAGGED_DOT):
            what = "ragged_dot in a manual region (shard_map) over some axes"
        elif len(xla.walk_ops(operation, REGION)) > 1:
            what = "a manual region (shard_map) in another one (axis_index in a shard_map over some axes is one)"
        elif some and xla.walk_ops(operation, *NOT_OVER_SOME_AXES):
            what = "a manual region (shard_map) over some axes with an all-gather, all-to-all or broadcast in it"
        if what:
            raise UsageError(
                f"{what} cannot be written as HLO text without Shardy",
                where=source.location(number),
                hint="write it with --format stablehlo or specs",
            )
