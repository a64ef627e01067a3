"""HLO text with GSPMD's shardings, for XLA without Shardy: annotated, or the program of one device.

The text is parsed again; every parameter has a sharding, and XLA reads each of them. `Sharding` custom calls stand
where Shardy's form has constraints with `--annotate full`: behind every value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from toast_cli import xla
from toast_cli.emit.annotations import (
    Annotations,
    Reshard,
    Undo,
    annotate_boundary,
    annotated,
    full_annotations,
    keep_branch_operands,
)
from toast_cli.emit.minimal import reduced_behind_transposes
from toast_cli.emit.misread import in_regions, shardings_at
from toast_cli.emit.shardy import check_manual_regions, read_sharding
from toast_cli.emit.spmd.rules import group_bounds
from toast_cli.emit.spmd.writer import manual_region, refuse_bound
from toast_cli.errors import ToastError, UsageError
from toast_cli.frontend.constraints import manual_axes
from toast_cli.frontend.known_numbers import CONDITIONALS
from toast_cli.frontend.rules import RaggedDot, general_ragged_dot, ragged_dot
from toast_cli.frontend.source import Source, Use
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import Sharding, axes_of, replicated, without
from toast_cli.program.ops import BLOCK_SCALED_DOT, BROADCAST_IN_DIM, CUSTOM_CALL, RAGGED_DOT
from toast_cli.program.values import on_host, remade_values, transposed
from toast_cli.xla import ir, main_function
from toast_cli.xla.build import INDEX, Builder

REGION = "sdy.manual_computation"
CONSTANT = "stablehlo.constant"
CONSTRAINT_TARGET = "Sharding"
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
    with in_regions(source, lowered, sums_too=False) as (source, lowered):
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


# ---------------------------------------------------------------- the program of one device
# Writes the program of one device as HLO text, for XLA without Shardy.


def emit_spmd_hlo(source: Source, lowered: PartitionedProgram) -> bytes:
    """The program of each device as HLO text.

    Raises `UsageError` for programs with manual regions of their own, with host callbacks, and with ops that only XLA
    with Shardy accepts.
    """
    refuse_bound(source)
    refuse_shardy_only(source, lowered)
    with source.module.context, ir.Location.unknown():
        module = source.module.operation.clone()
        function = main_function(module)
        region, in_shardings, out_shardings = manual_region(source, lowered, function)
        read = sum(bool(list(argument.uses)) for argument in region.regions[0].blocks[0].arguments)
        write_out_ragged(module)
        every_axis = frozenset(range(len(lowered.axis_sizes)))
        flatten(region, Boundary(in_shardings, out_shardings, every_axis), lowered.axis_sizes)
        notation = GspmdNotation(source, lowered.axis_sizes)
        annotate_boundary(function.operation, "arg_attrs", in_shardings, notation, [])
        annotate_boundary(function.operation, "res_attrs", out_shardings, notation, [])
        module.verify()
        text = xla.stablehlo_to_hlo_text(bare_bytecode(module))
    entrances, exits = text.count(f'"{ENTRANCE}"'), text.count(f'"{EXIT}"')
    if entrances > read or exits != len(out_shardings):  # XLA drops readers in branches that constants rule out
        raise ToastError(
            f"boundaries were lost on the way to HLO: {(entrances, exits)} of {(read, len(out_shardings))} are there",
            hint="write the program with --format spmd, and report this as a bug",
        )
    text = with_host_memory(with_partitions(text, prod(lowered.axis_sizes)), source)
    xla.hlo_text_to_proto(text)
    return text.encode()


# ---------------------------------------------------------------- where shardings stand
# Chooses the shardings of HLO text: constraints behind every value and at the start of branches.


def hlo_annotations(source: Source, lowered: PartitionedProgram) -> Annotations:
    """A constraint on every value: GSPMD's propagation goes further than Shardy's, so fewer do not give the plan.

    Products that are scattered over some axes and reduced over others are computed in their final sharding if the
    partitioner finds the collectives by itself: given the computed sharding, it all-reduces over all axes. Values that
    are recomputed for each use have a sharding of their own: the conversion to HLO merges equal constants, and GSPMD
    would propagate shardings from the readers of one to those of the other.
    """
    computed = {
        value: sharding
        for value, sharding in lowered.computed.items()
        if value not in lowered.found
        or axes_of(lowered.shardings[value]) - axes_of(sharding) >= {*lowered.partial.get(value, ())}
    }
    program, remade = source.program, remade_values(source.program)
    recomputed = tuple(
        (handle.owner.operation, sharding)
        for value, (handle, sharding) in enumerate(zip(source.definitions, lowered.shardings, strict=True))
        if remade[value] and sharding and program.producer[value] >= 0
    )
    found = full_annotations(source, replace(lowered, computed=computed))
    constraints = tuple(one for one in found.constraints if not is_folded(source, lowered, one.handle))
    entrances = tuple(branch_entrances(source, lowered))
    return replace(found, constraints=constraints, recomputed=recomputed, reshards=(*entrances, *found.reshards))


def branch_entrances(source: Source, lowered: PartitionedProgram) -> Iterator[Reshard]:
    """A constraint at the start of each branch on every array from outside: in HLO they are the arguments of a
    computation, and GSPMD would propagate the sharding that a reader in one branch needs to all of them."""
    remade = remade_values(source.program)
    for conditional in xla.walk_ops(source.module, *CONDITIONALS):
        for region in conditional.regions:
            body = [view.operation for view in region.blocks[0].operations]
            reads: dict[int, list[Use]] = {}
            for operation, operand, handle in xla.outer_operands(body):
                value = source.numbers.get(handle)
                if value is not None and lowered.shardings[value] and not remade[value]:
                    reads.setdefault(value, []).append(Use(operation, operand))
            for value, uses in reads.items():
                sharding = lowered.shardings[value]
                yield Reshard(value, sharding, sharding, body[0], uses[0], tuple(uses), ())


def is_folded(source: Source, lowered: PartitionedProgram, handle: Any) -> bool:
    """True if only a transpose reads a value: XLA:TPU folds it into the product that makes the value, unless a
    constraint is in between. The one behind the transpose suffices."""
    value = source.numbers.get(handle)
    if value is None:
        return False
    behind = transposed(source.program, value)
    return behind is not None and (behind.op, 0) not in lowered.required and len(lowered.path(value)) == 1


# ---------------------------------------------------------------- GSPMD's notation
# Writes shardings in GSPMD's notation.
#
# `{devices=[4,1,2]<=[8] last_tile_dim_replicate}` means: dimension 0 in four parts, dimension 1 whole, two copies of
# each part; devices 0 to 7 in row-major order. `<=[4,2]T(1,0)` numbers them through a 4 x 2 grid column by column.
# Notation: xla/hlo/ir/hlo_sharding.h and tile_assignment.h.

REPLICATED, MANUAL = "{replicated}", "{manual}"


def gspmd_string(sharding: Sharding, axis_sizes: tuple[int, ...], manual: frozenset[int] = frozenset()) -> str:
    """GSPMD's text of `sharding` on a mesh with these axis sizes, devices in row-major order, as XLA itself prints it.

    Args:
        manual: manual axes of the region that the array is in; they are left out of `sharding`.
    """
    by_hand = [axis for axis in sorted(manual) if axis_sizes[axis] > 1]
    if manual and all(size == 1 or axis in manual for axis, size in enumerate(axis_sizes)):
        return MANUAL
    sharding = without(sharding, manual)
    tiles = [prod(axis_sizes[axis] for axis in axes) for axes in sharding]
    if prod(tiles) == 1 and not by_hand:
        return REPLICATED
    used = [axis for axes in sharding for axis in axes] + by_hand
    unused = [axis for axis in range(len(axis_sizes)) if axis not in used]
    copies = prod(axis_sizes[axis] for axis in unused)
    last = " last_tile_dim_replicate" if copies > 1 else ""
    if by_hand:
        tiles.append(prod(axis_sizes[axis] for axis in by_hand))
        last = f" last_tile_dims={{manual{', replicated' if copies > 1 else ''}}}"
    if copies > 1:
        tiles.append(copies)
    dimensions, order = merged([axis for axis in used + unused if axis_sizes[axis] > 1], axis_sizes)
    grid = f"[{commas(dimensions)}]"
    if len(dimensions) > 1:
        grid += f"T({commas(order)})"
    return "{" + f"devices=[{commas(tiles)}]<={grid}" + last + "}"


def merged(order: list[int], axis_sizes: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Grid and transposition that list the devices with mesh axes in `order`, in the fewest dimensions.

    Axes that are adjacent both on the mesh and in `order` are merged; axes of size 1 are left out.
    """
    present = sorted(order)
    runs: list[list[int]] = []
    for axis in order:
        if runs and present.index(axis) == present.index(runs[-1][-1]) + 1:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    by_mesh = sorted(range(len(runs)), key=lambda k: runs[k][0])
    dimensions = [prod(axis_sizes[axis] for axis in runs[k]) for k in by_mesh]
    return dimensions, [by_mesh.index(k) for k in range(len(runs))]


def commas(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


# ---------------------------------------------------------------- dense forms of products
# Expands matrix products that XLA:CPU does not support. A ragged dot multiplies all rows with each group's matrix,
# after zeroing the rows of other groups; a block-scaled dot scales the numbers before it multiplies. Ragged dots are
# expanded in HLO as well: all of XLA refuses them there ("only supported with Shardy").

CONVERTED = "mhlo.ragged_dot"


def with_dense_products(module: Any) -> Any:
    """The module itself, or a copy in which each such product is expanded, also in manual regions."""
    if not xla.walk_ops(module, CONVERTED, RAGGED_DOT) and not _scaled_dots(module):
        return module
    module = xla.parse_module(module.context, xla.write_bytecode(module))
    with module.context, xla.ir.Location.unknown():
        for operation in xla.walk_ops(module, CONVERTED):
            _replace(operation, general_ragged_dot(operation)[0])
        write_out_ragged(module)
        build = Builder(module.context)
        for operation in _scaled_dots(module):
            with build.at(xla.ir.InsertionPoint(operation), operation.location):
                _replace(operation, _scaled(build, operation))
    return module


def write_out_ragged(module: Any) -> None:
    """Expands the ragged dots of a module in place."""
    build = Builder(module.context)
    for operation in xla.walk_ops(module, RAGGED_DOT):
        numbers = ragged_dot(operation)
        if numbers is not None:
            with build.at(xla.ir.InsertionPoint(operation), operation.location):
                _replace(operation, _dense(build, operation, numbers))


def _scaled_dots(module: Any) -> list[Any]:
    calls = xla.walk_ops(module, CUSTOM_CALL)
    return [call for call in calls if xla.ir.StringAttr(call.attributes["call_target_name"]).value == BLOCK_SCALED_DOT]


def _scaled(build: Builder, operation: Any) -> Any:
    """Expands a block-scaled dot."""
    left, right, *scales = operation.operands
    sides = [build.convert(side, "f32") for side in (left, right)]
    for k, scale in enumerate(scales):
        *leading, blocks = scale.type.shape
        shape = tuple(sides[k].type.shape)
        apart = (*leading, blocks, shape[-1] // blocks)
        spread = build.broadcast(build.convert(scale, "f32"), apart, range(len(apart) - 1))
        sides[k] = build.binary("multiply", sides[k], build.reshape(spread, shape))
    result = operation.results[0].type
    batch, last = list(range(result.rank - 2)), [result.rank - 1]
    numbers = xla.dot_dimension_numbers([batch, batch, last, last], build.context)
    kind = build.type("f32", tuple(result.shape))
    found = build.one("dot_general", sides, kind, dot_dimension_numbers=numbers)
    return build.convert(found, str(result.element_type))


def _replace(operation: Any, value: Any) -> None:
    operation.results[0].replace_all_uses_with(value)
    operation.operation.erase()


def _dense(build: Builder, operation: Any, at: RaggedDot) -> Any:
    left, right, sizes = operation.operands
    rows = _of_each_group(build, left, sizes, at)
    batch = [[d + 1 for d in at.left_batch], list(at.right_batch)]
    contracting = [[d + 1 for d in at.left_contracting], list(at.right_contracting)]
    if at.group >= 0:
        contracting = [[*contracting[0], 0], [*contracting[1], at.group]]
    elif not at.contracts_rows:
        rows = build.sum(rows, [0])
        batch[0], contracting[0] = list(at.left_batch), list(at.left_contracting)
    result = operation.results[0].type
    shape = tuple(result.shape)
    groups_inside = at.contracts_rows and len(at.left_batch)
    if groups_inside:  # the product has its batch in front of the groups
        shape = (*shape[1 : 1 + groups_inside], shape[0], *shape[1 + groups_inside :])
    numbers = xla.dot_dimension_numbers([*batch, *contracting], build.context)
    kind = build.type(str(result.element_type), shape)
    found = build.one("dot_general", [rows, right], kind, dot_dimension_numbers=numbers)
    if not groups_inside:
        return found
    return build.transpose(found, [groups_inside, *range(groups_inside), *range(groups_inside + 1, len(shape))])


def _of_each_group(build: Builder, left: Any, sizes: Any, at: RaggedDot) -> Any:
    """[groups, ...] the left operand for each group, with zeros in the rows of other groups."""
    groups = sizes.type.shape[-1]
    shape = (groups, *left.type.shape)
    prefix = [d + 1 for d in at.prefix] if len(sizes.type.shape) > 1 else []
    order = sorted(range(len(prefix) + 1), key=[*prefix, 0].__getitem__)
    first, end = (
        build.broadcast(build.transpose(bound, order), shape, sorted([*prefix, 0]))
        for bound in group_bounds(build, sizes)
    )
    row = build.iota(INDEX, shape, at.ragged + 1)
    inside = build.binary("and", build.compare("LE", first, row), build.compare("LT", row, end))
    spread = build.broadcast(left, shape, range(1, len(shape)))
    return build.select(inside, spread, build.constant(0, str(left.type.element_type), shape))
