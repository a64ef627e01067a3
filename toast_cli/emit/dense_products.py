"""Expands matrix products that XLA:CPU does not support. A ragged dot multiplies all rows with each group's matrix,
after zeroing the rows of other groups; a block-scaled dot scales the numbers before it multiplies. Ragged dots are
expanded in HLO as well: all of XLA refuses them there ("only supported with Shardy").

In: a parsed module. Out: one without them.
"""

from __future__ import annotations

from typing import Any

from toast_cli import xla
from toast_cli.emit.spmd.rules.ragged import group_bounds
from toast_cli.frontend.ragged_dots import RaggedDot, general_ragged_dot, ragged_dot
from toast_cli.program.ops import BLOCK_SCALED_DOT, CUSTOM_CALL, RAGGED_DOT
from toast_cli.xla.build import INDEX, Builder

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
