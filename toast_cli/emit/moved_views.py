"""Keeps XLA:TPU from moving views past elementwise ops before it partitions HLO.

XLA:TPU moves a transpose in front of the elementwise op that it reads, duplicates that op if it has other users, and
leaves the op's sharding on arrays whose dimensions are then in another order (libtpu 0.0.42.1). It does so with
reshapes, and with its own transposes: it turns a product with a vector into an elementwise product and a sum, for which
it reorders the dimensions. Then the partitioner exchanges whole arrays where no communication was planned. XLA moves no
view past a constraint. After partitioning the constraints are gone, and XLA is free to move views.

A reshape that keeps the sharded dimensions in place needs no constraint: convolutional networks split features into
groups for a norm, XLA:TPU arranges the elementwise ops around that, and a constraint in between cost up to 16 % of a
step.

Replicated arrays have the same sharding wherever they are moved, and get none: a sum of partial products that is
transposed and then added to others is reduced together with them, once XLA has moved the transpose.

In: a `Source` and a `PartitionedProgram`. Out: the transposes to keep in place, and constraints in front of
views.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from math import ceil, prod

from toast_cli.emit.reshards import Reshard, by_anchor
from toast_cli.frontend.source import Source
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.reshard import waypoints
from toast_cli.plan.sharding import Sharding, axes_of, local_shape, shards
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import RESHAPE, TRANSPOSE
from toast_cli.program.rematerialised import remade_values
from toast_cli.program.sums import is_view
from toast_cli.program.transposed import Transposed, transposed
from toast_cli.xla import dot_dimensions, ir

Edge = tuple[int, int]  # an op, and which of its operands

_TILE = (8, 128)  # rows and columns of the tiles of 32 bits that a TPU's memory is divided into (public TPU docs)


def moved_transposes(source: Source, lowered: PartitionedProgram, folded: Collection[int]) -> set[int]:
    """Transposes that XLA may move, whose results need a constraint: all but those that are `folded` into the product
    they read, or into the products that read them."""
    program, remade = source.program, remade_values(source.program)
    return {
        number
        for number, op in enumerate(program.ops)
        if op.name == TRANSPOSE and number not in folded and not remade[value := op.results[0]]
        if program.producer[value] >= 0 and axes_of(lowered.shardings[value])
        if not all(program.ops[reader].kind.matrix_unit for reader, _ in program.users[value])
    }


def constraints_before_views(source: Source, lowered: PartitionedProgram, folded: Collection[int]) -> Iterator[Reshard]:
    """A constraint with an array's sharding in front of the views that may be moved past the op that makes it. None if
    the array is resharded in between, which adds one."""
    program, remade = source.program, remade_values(source.program)
    wanted: dict[tuple[int, ir.Value], dict[Edge, ir.Operation]] = {}
    for number, k in (*views(program, folded), *turned_operands(source)):
        value = program.ops[number].operands[k]
        if (number, k) in lowered.required or remade[value] or not axes_of(lowered.shardings[value]):
            continue
        if view_keeps_sharding(source, lowered, number):
            continue
        use = source.use(number, k)
        handle = use.operation.operands[use.operand]
        if not isinstance(handle, ir.BlockArgument):  # block arguments have a constraint
            wanted.setdefault((value, handle), {})[number, k] = use.operation
    for (value, _), operations in wanted.items():
        current = lowered.shardings[value]
        for anchor, edges in by_anchor(operations):
            uses = tuple(source.use(*edge) for edge in edges)
            first = next(use for use in uses if use.operation == anchor)
            yield Reshard(value, current, current, anchor, first, uses, tuple(edges))


def view_keeps_sharding(source: Source, lowered: PartitionedProgram, number: int) -> bool:
    """True if an op reshapes an array and keeps each sharded dimension, or its major part, in place: the array keeps
    its sharding when the view is moved in front of its maker."""
    program = source.program
    op = program.ops[number]
    if op.name != RESHAPE:
        return False
    current = lowered.shardings[op.operands[0]]
    read, made = (program.values[v].shape for v in (op.operands[0], op.results[0]))
    last = max(dim for dim, axes in enumerate(current) if axes)
    if read[:last] != made[:last] or last >= len(made):
        return False
    return made[last] % shards((current[last],), lowered.axis_sizes) == 0


def views(program: Program, folded: Collection[int]) -> Iterator[Edge]:
    """Views of the results of elementwise ops, and transposes of products that are not folded into them."""
    for number, op in enumerate(program.ops):
        if len(op.results) != 1 or not op.operands or number in folded or program.producer[op.results[0]] < 0:
            continue
        maker = program.ops[program.producer[op.operands[0]]]
        if op.name == TRANSPOSE:
            if computes(maker):
                yield number, 0
        elif maker.kind.elementwise and is_view(op, program):
            yield number, 0


def turned_operands(source: Source) -> Iterator[Edge]:
    """Operands of products with vectors whose dimensions are in another order than XLA's: batch dimensions, free
    dimensions, contracted dimensions."""
    program = source.program
    for number, op in enumerate(program.ops):
        if not op.multiplies_by_vector or program.producer[op.results[0]] < 0:
            continue
        left, right, left_summed, right_summed = dot_dimensions(
            source.operations[number].attributes["dot_dimension_numbers"]
        )
        for k, (shared, summed) in enumerate(((left, left_summed), (right, right_summed))):
            value = op.operands[k]
            shape = program.values[value].shape
            only = [dim for dim in range(len(shape)) if dim not in shared and dim not in summed]
            order = [dim for dim in (*shared, *only, *summed) if shape[dim] > 1]
            if order != sorted(order) and computes(program.ops[program.producer[value]]):
                yield number, k


def computes(maker: Op) -> bool:
    """True if XLA moves views past an op."""
    return maker.kind.fusible or maker.kind.matrix_unit


def reduced_behind_transposes(
    source: Source, lowered: PartitionedProgram, *, narrow_too: bool = False
) -> PartitionedProgram:
    """The same plan, with the reductions of products, and the reshards after them, moved behind a transpose that is the
    product's only reader.

    XLA folds a transpose into the product before it unless a constraint is between them. XLA:TPU then gives a gradient
    the layout of the array that it updates; otherwise it copies weight and moments of an FSDP step to another layout
    and back (a block of 2 layers on v4: 11.8 ms of compute instead of 9.7). If a shard has fewer memory tiles in the
    product's own layout, the updated array has that layout too, and the product is reduced before the transpose: behind
    it XLA:TPU leaves all-reduces instead of reduce-scatters.

    narrow_too: also those of narrow shards (in HLO, where GSPMD all-reduces such a product on XLA:CPU).
    """
    remade = remade_values(source.program)
    shardings, computed, paths = list(lowered.shardings), dict(lowered.computed), dict(lowered.paths)
    required = dict(lowered.required)
    for value in lowered.computed:
        of = transposed(source.program, value)
        if of is None or remade[of.value] or of.value in lowered.computed or not keeps_sharding(lowered, value, of):
            continue
        path = lowered.path(value)
        piece = local_shape(source.program.values[value].shape, path[-1], lowered.axis_sizes)
        if not narrow_too and tiles(piece) < tiles(tuple(piece[dim] for dim in of.order)):
            continue
        del computed[value]
        if value in lowered.found:
            path = path[-1:]
        shardings[value] = path[0]
        want = required.pop((of.op, 0), None)
        if want:
            path = (*path, *waypoints(path[-1], want, lowered.axis_sizes, source.program.values[value].shape), want)
        if len(path) > 1:
            paths[of.value] = tuple(turned(sharding, of) for sharding in path)
            computed[of.value] = paths[of.value][0]
    return replace(lowered, shardings=shardings, computed=computed, required=required, paths=paths)


def tiles(shape: tuple[int, ...]) -> int:
    """Number of memory tiles of an array in row-major order."""
    *outer, rows, columns = (1, 1, *shape)
    return prod(outer) * ceil(rows / _TILE[0]) * ceil(columns / _TILE[1])


def keeps_sharding(lowered: PartitionedProgram, value: int, of: Transposed) -> bool:
    """True if the transposed value has the transposed sharding of the value."""
    return lowered.shardings[of.value] == turned(lowered.required.get((of.op, 0), lowered.shardings[value]), of)


def turned(sharding: Sharding, of: Transposed) -> Sharding:
    """The sharding of the transpose's result, given its operand's."""
    return tuple(sharding[dim] for dim in of.order)
