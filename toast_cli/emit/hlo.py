"""HLO text with GSPMD's shardings, for XLA without Shardy.

XLA's own converter writes the module with a Shardy constraint on every value as HLO that has both notations; Shardy's
is removed from the text. Before that, what the converter cannot say without Shardy is said with GSPMD's custom calls.
The text is parsed again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from toast_cli import xla
from toast_cli.base.errors import UsageError
from toast_cli.emit.annotations import Constraint, Reshard, around, full_annotations
from toast_cli.emit.minimal import reduced_behind_transposes
from toast_cli.emit.misread import in_regions, shardings_at
from toast_cli.emit.regions.rules import group_bounds
from toast_cli.emit.shardy import CONSTRAINT, ShardyNotation, annotated, read_sharding
from toast_cli.frontend.constraints import manual_axes
from toast_cli.frontend.known_numbers import CONDITIONALS
from toast_cli.frontend.rules import RaggedDot, general_ragged_dot, ragged_dot
from toast_cli.frontend.source import Source, Use
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import Sharding, replicated, without
from toast_cli.program.model import Program
from toast_cli.program.ops import BARRIER, BLOCK_SCALED_DOT, BROADCAST_IN_DIM, CUSTOM_CALL, MANUAL_REGION, RAGGED_DOT
from toast_cli.program.values import on_host, remade_values
from toast_cli.xla import ir
from toast_cli.xla.build import INDEX, Builder

CONSTANT = "stablehlo.constant"
ENTRANCE, EXIT = "SPMDFullToShardShape", "SPMDShardToFullShape"
RESULT = "xla.sdy.FuncResultSharding"
ATTRIBUTE = r'[\w.\-]+=(?:"(?:[^"\\]|\\.)*"|\{[^{}]*\})'

# Collectives that crash it in partially manual regions ("sharding.IsManualSubgroup()").
NOT_OVER_SOME_AXES = ("stablehlo.all_gather", "stablehlo.all_to_all", "stablehlo.collective_broadcast")


def emit_hlo(source: Source, lowered: PartitionedProgram) -> bytes:
    """The program as HLO text with GSPMD shardings.

    Raises `UsageError` for programs that only Shardy can partition.
    """
    refuse_shardy_only(source, lowered)
    lowered, replicated_values = with_whole_constants(source.program, lowered)
    with in_regions(source, lowered, sums_too=False) as (source, lowered):
        lowered = reduced_behind_transposes(source, lowered, narrow_too=True)
        notation = ShardyNotation(source.module, lowered.axis_names, lowered.axis_sizes)
        annotations = full_annotations(source, lowered)
        outside = [value for value in replicated_values if lowered.shardings[value]]  # of regions
        replicated_constants = [Constraint(source.definitions[value], (lowered.shardings[value],)) for value in outside]
        annotations = replace(
            annotations,
            constraints=(*replicated_constants, *annotations.constraints),
            reshards=(*branch_entrances(source, lowered), *annotations.reshards),
        )
        with annotated(source.module, annotations, notation), source.module.context, ir.Location.unknown():
            # Here, since an operation's hash changes with its operands.
            numbers = {source.operations[n]: n for n, op in enumerate(source.program.ops) if op.region is not None}
            regions = xla.walk_ops(source.module, MANUAL_REGION)
            boundaries = [boundary(region, source, lowered, numbers.get(region)) for region in regions]
            module = source.module.operation.clone()
            keep_branch_operands(module)
            write_out_ragged(module)
            # Number and type of the constants of one number outside of manual regions.
            constants = xla.walk_ops(module, BROADCAST_IN_DIM, CONSTANT)
            constants = [op for op in constants if all(holder.name != MANUAL_REGION for holder in around(op))]
            numbered = [(splat_text(op), str(op.results[0].type)) for op in constants]
            outside_regions = {(number, kind) for number, kind in numbered if number}
            for region, shardings in zip(xla.walk_ops(module, MANUAL_REGION), boundaries, strict=True):
                flatten(region, shardings, lowered.axis_sizes, outside_regions)
            text = without_shardy(xla.stablehlo_to_hlo_text(xla.write_bytecode(module)))
    if (devices := prod(lowered.axis_sizes)) > 1:  # as XLA prints it
        text = re.sub(r"\AHloModule [^,\n]+", rf"\g<0>, num_partitions={devices}", text)
    text = with_host_memory(text, source)
    xla.hlo_text_to_proto(text)
    return text.encode()


def without_shardy(text: str) -> str:
    """The text without attributes for Shardy, and without the calls that mark results for it."""
    marked: dict[str, str] = {}  # such a call -> the result itself

    def left_out(call: re.Match[str]) -> str:
        marked[call[1]] = call[2]
        return ""

    def of_others(attributes: re.Match[str]) -> str:
        entries = [entry[0] for entry in re.finditer(ATTRIBUTE, attributes[1]) if not entry[0].startswith("xla.sdy.")]
        return f", frontend_attributes={{{','.join(entries)}}}" if entries else ""

    text = re.sub(rf'\n +(\S+) = \S+ custom-call\((\S+)\), custom_call_target="{RESULT}".*', left_out, text)
    text = re.sub(rf", frontend_attributes=\{{((?:{ATTRIBUTE},?)*)\}}", of_others, text)

    def unmarked(read: re.Match[str]) -> str:
        return re.sub(r"[\w.\-]+", lambda name: marked.get(name[0], name[0]), read[0])

    return re.sub(r"(reshape|tuple)\([^()]*\)", unmarked, text) if marked else text


class RegionShardings(NamedTuple):
    """Shardings of a manual region's operands and results outside of it, and its manual axes."""

    in_shardings: tuple[Sharding, ...]
    out_shardings: tuple[Sharding, ...]
    manual: frozenset[int]


def boundary(region: Any, source: Source, lowered: PartitionedProgram, number: int | None) -> RegionShardings:
    """The region's own shardings; for op `number`, a region of the user's program, the plan's,
    which may split further."""
    manual = frozenset(lowered.axis_names.index(axis) for axis in manual_axes(region))
    if number is not None:
        return RegionShardings(*shardings_at(lowered, number, source.program.ops[number]), manual)
    in_shardings, out_shardings = (
        tuple(read_sharding(s, lowered.axis_names) for s in xla.sdy.TensorShardingPerValueAttr(attribute).shardings)
        for attribute in (region.attributes["in_shardings"], region.attributes["out_shardings"])
    )
    return RegionShardings(in_shardings, out_shardings, manual)


def with_whole_constants(program: Program, lowered: PartitionedProgram) -> tuple[PartitionedProgram, list[int]]:
    """The plan in which arrays that are made of scalars alone are replicated, so that each reader takes its shard for
    free; and these arrays. What is computed from them is replicated as well if its readers differ.

    XLA merges equal ones. GSPMD would give them a sharding that suits some readers, and the partitioner takes the
    others' ops to have it as well (a gather's gradient that is added to zeros).
    """
    remade = remade_values(program)
    shardings, required = list(lowered.shardings), dict(lowered.required)
    to_replicate: set[int] = set()
    for op in reversed(program.ops):
        for value in op.results:
            uses = program.users[value]
            if not (uses and remade[value] and program.values[value].shape):
                continue
            first = not any(program.values[operand].shape for operand in op.operands)
            wanted = {required.get(use, shardings[value]) for use in uses}
            if (
                first
                or len(wanted) > 1
                or any(not to_replicate.isdisjoint(program.ops[use].results) for use, _ in uses)
            ):
                to_replicate.add(value)
    for value in to_replicate:
        own, shardings[value] = shardings[value], replicated(len(program.values[value].shape))
        for use in program.users[value]:
            want = required.pop(use, own)
            if want != shardings[value] and to_replicate.isdisjoint(program.ops[use[0]].results):
                required[use] = want
    return replace(lowered, shardings=shardings, required=required), sorted(to_replicate)


def splat_text(operation: Any) -> str | None:
    """The value of a splat constant, or of a broadcast of one, as text; None for other operations."""
    while operation.name == BROADCAST_IN_DIM and not isinstance(operation.operands[0], ir.BlockArgument):
        operation = operation.operands[0].owner
    return xla.constant_number(operation) if operation.name == CONSTANT else None


def flatten(region: Any, shardings: RegionShardings, sizes: tuple[int, ...], outside: set[tuple[str, str]]) -> None:
    """Moves the body of a manual region between custom calls: `SPMDFullToShardShape` behind a constraint makes a shard
    of each operand that is read, `SPMDShardToFullShape` makes whole arrays from the shards of results.

    A constant that is in `outside`, with which XLA merges it, enters the region like any other replicated array.
    """
    block, where = region.regions[0].blocks[0], ir.InsertionPoint(region)

    def call(target: str, value: Any, kind: Any, sharding: Sharding, manual: frozenset[int] = frozenset()) -> Any:
        """The result of a custom call on a value, with a sharding."""
        names = {"call_target_name": target, "mhlo.sharding": gspmd_string(sharding, sizes, manual)}
        attributes = {name: ir.StringAttr.get(text) for name, text in names.items()}
        return ir.Operation.create(CUSTOM_CALL, [kind], [value], attributes, loc=value.location, ip=where).results[0]

    for statement in xla.walk_ops(region, CONSTRAINT):
        statement.results[0].replace_all_uses_with(statement.operands[0])
        statement.erase()
    for operand, argument, sharding in zip(list(region.operands), block.arguments, shardings.in_shardings, strict=True):
        if list(argument.uses):
            entering = call("Sharding", operand, operand.type, sharding)
            argument.replace_all_uses_with(call(ENTRANCE, entering, argument.type, sharding, shardings.manual))
    *body, last = [op.operation for op in block.operations]
    for operation in body:
        operation.move_before(region)
        number = splat_text(operation)
        if number is not None and (number, str(operation.results[0].type)) in outside:
            constant, everywhere = operation.results[0], replicated(operation.results[0].type.rank)
            constrained = call("Sharding", constant, constant.type, everywhere)
            spread = [use.owner.operation for use in constant.uses if use.owner.name == BROADCAST_IN_DIM]
            readers = [constrained.owner.operation, *spread]
            constant.replace_all_uses_except(
                call(ENTRANCE, constrained, constant.type, everywhere, shardings.manual), readers
            )
    for piece, result, sharding in zip(list(last.operands), list(region.results), shardings.out_shardings, strict=True):
        local = call("Sharding", piece, piece.type, sharding, shardings.manual)
        result.replace_all_uses_with(call(EXIT, local, result.type, sharding))
    region.erase()


def gspmd_string(sharding: Sharding, axis_sizes: tuple[int, ...], manual: frozenset[int] = frozenset()) -> str:
    """GSPMD's text of `sharding` on a mesh with these axis sizes, devices in row-major order, as XLA itself prints it.

    Args:
        manual: manual axes of the region that the array is in; they are left out of `sharding`.
    """
    sharding = without(sharding, manual)
    split = [axis for axes in sharding for axis in axes]
    unused = [axis for axis in range(len(axis_sizes)) if axis not in split and axis not in manual]
    tiles = [prod(axis_sizes[axis] for axis in axes) for axes in (*sharding, sorted(manual), unused)]
    return xla.mesh_sharding(tiles, axis_sizes, [*split, *sorted(manual), *unused])


def with_host_memory(text: str, source: Source) -> str:
    """Marks arguments and results in host memory in the header: those in memory space 5."""
    program, host_values = source.program, on_host(source.program)
    values = [a.value for a in program.arguments] + [result.value for result in program.results]
    if host_values.isdisjoint(values):
        return text
    wanted = iter([value in host_values for value in values])

    def placed(array: re.Match[str]) -> str:
        return f"{array[1]}{{{array[2] or ''}:S(5)}}" if next(wanted, False) else array[0]

    start = text.index("entry_computation_layout={")
    end = text.index("\n", start)
    return text[:start] + re.sub(r"(\w+\[[\d,<=]*\])(?:\{([\d,]*)\})?", placed, text[start:end]) + text[end:]


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


def keep_branch_operands(module: Any) -> None:
    """Keeps GSPMD from giving a branch's operands the shardings of its conditional's results.

    GSPMD passes the operands of a branch as a tuple. If its arrays have the shapes of the results, they get the
    shardings of the results, or of constraints in the branch: they are resharded before the conditional in every run,
    and back in the branch. A barrier in the branch that also takes the branch index gives the tuple other shapes; it
    costs nothing, since XLA does not fuse across a conditional's boundary.
    """
    for conditional in xla.walk_ops(module, *CONDITIONALS):
        result_shapes = sorted(map(shape_of, conditional.results))
        for region in conditional.regions:
            body = [view.operation for view in region.blocks[0].operations]
            outer = xla.outer_operands(body)
            reads = [r for r in outer if isinstance(r[2], ir.BlockArgument) or r[2].owner.name != CONSTANT]
            read = list(dict.fromkeys(value for _, _, value in reads))
            if read and sorted(map(shape_of, read)) == result_shapes:
                place, where = read[0].location, ir.InsertionPoint(body[0])
                passed = [read[0], conditional.operands[0]]
                types = [value.type for value in passed]
                barrier = ir.Operation.create(BARRIER, results=types, operands=passed, loc=place, ip=where)
                for reader, k, value in reads:
                    if value == read[0]:
                        reader.operands[k] = barrier.results[0]


def shape_of(value: Any) -> tuple[int, ...]:
    return tuple(value.type.shape) if isinstance(value.type, ir.RankedTensorType) else ()


def refuse_shardy_only(source: Source, lowered: PartitionedProgram) -> None:
    """Refuses ragged dots and some collectives in partially manual regions, and nested manual regions."""
    for number, op in enumerate(source.program.ops):
        if op.region is None:
            continue
        operation, refused = source.operations[number], ""
        some = set(manual_axes(operation)) < set(lowered.axis_names)
        if some and xla.walk_ops(operation, RAGGED_DOT):
            refused = "ragged_dot in a manual region (shard_map) over some axes"
        elif len(xla.walk_ops(operation, MANUAL_REGION)) > 1:
            refused = "a manual region (shard_map) in another one (axis_index in a shard_map over some axes is one)"
        elif some and xla.walk_ops(operation, *NOT_OVER_SOME_AXES):
            refused = "a manual region (shard_map) over some axes with an all-gather, all-to-all or broadcast in it"
        if refused:
            raise UsageError(
                f"{refused} cannot be written as HLO text without Shardy",
                where=source.location(number),
                hint="write it with --format stablehlo or specs",
            )


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
        blocked_shape = (*leading, blocks, shape[-1] // blocks)
        spread = build.broadcast(build.convert(scale, "f32"), blocked_shape, range(len(blocked_shape) - 1))
        sides[k] = build.binary("multiply", sides[k], build.reshape(spread, shape))
    result = operation.results[0].type
    batch, last = list(range(result.rank - 2)), [result.rank - 1]
    numbers = xla.dot_dimension_numbers([batch, batch, last, last], build.context)
    kind = build.type("f32", tuple(result.shape))
    product = build.one("dot_general", sides, kind, dot_dimension_numbers=numbers)
    return build.convert(product, str(result.element_type))


def _replace(operation: Any, value: Any) -> None:
    operation.results[0].replace_all_uses_with(value)
    operation.operation.erase()


def _dense(build: Builder, operation: Any, dot: RaggedDot) -> Any:
    left, right, sizes = operation.operands
    rows = _of_each_group(build, left, sizes, dot)
    batch = [[d + 1 for d in dot.left_batch], list(dot.right_batch)]
    contracting = [[d + 1 for d in dot.left_contracting], list(dot.right_contracting)]
    if dot.group >= 0:
        contracting = [[*contracting[0], 0], [*contracting[1], dot.group]]
    elif not dot.contracts_rows:
        rows = build.sum(rows, [0])
        batch[0], contracting[0] = list(dot.left_batch), list(dot.left_contracting)
    result = operation.results[0].type
    shape = tuple(result.shape)
    groups_inside = dot.contracts_rows and len(dot.left_batch)
    if groups_inside:  # the product has its batch in front of the groups
        shape = (*shape[1 : 1 + groups_inside], shape[0], *shape[1 + groups_inside :])
    numbers = xla.dot_dimension_numbers([*batch, *contracting], build.context)
    kind = build.type(str(result.element_type), shape)
    product = build.one("dot_general", [rows, right], kind, dot_dimension_numbers=numbers)
    if not groups_inside:
        return product
    return build.transpose(product, [groups_inside, *range(groups_inside), *range(groups_inside + 1, len(shape))])


def _of_each_group(build: Builder, left: Any, sizes: Any, dot: RaggedDot) -> Any:
    """[groups, ...] the left operand for each group, with zeros in the rows of other groups."""
    groups = sizes.type.shape[-1]
    shape = (groups, *left.type.shape)
    prefix = [d + 1 for d in dot.prefix] if len(sizes.type.shape) > 1 else []
    order = sorted(range(len(prefix) + 1), key=[*prefix, 0].__getitem__)
    first, end = (
        build.broadcast(build.transpose(bound, order), shape, sorted([*prefix, 0]))
        for bound in group_bounds(build, sizes)
    )
    row = build.iota(INDEX, shape, dot.ragged + 1)
    inside = build.binary("and", build.compare("LE", first, row), build.compare("LT", row, end))
    spread = build.broadcast(left, shape, range(1, len(shape)))
    return build.select(inside, spread, build.constant(0, str(left.type.element_type), shape))
