"""Inner products of arrays that are flattened first (`jnp.vdot`), as ones over all dimensions of the arrays.

Norms of gradients, conjugate gradients and L-BFGS multiply whole arrays with each other as if they were vectors. A
dimension that is not the first one of its array is split over no mesh once the array is flat, so that each device would
gather a gradient for its norm. XLA takes the reshapes away before it partitions, unless a sharding stands between.

Enters: a module without calls. Leaves: the same module, rewritten in place: `dot(reshape(x), reshape(y))` of arrays of
one shape contracts all their dimensions. The sum is the same, in another order at most.
"""

from __future__ import annotations

from typing import Any

from toast_cli.frontend.inline import replace_operation
from toast_cli.frontend.leftovers import create
from toast_cli.program.ops import DOT_GENERAL, RESHAPE
from toast_cli.xla import dot_dimension_numbers, ir, walk_ops

PRODUCTS = frozenset({DOT_GENERAL, RESHAPE})
_NUMBERS = "dot_dimension_numbers"


def rewrite_inner_products(module: Any) -> None:
    """Rewrites each product of two flattened arrays. A reshape with a sharding of its own stays."""
    with module.context, ir.Location.unknown():
        for operation in walk_ops(module, DOT_GENERAL):
            left, right = (_before_flattening(handle) for handle in operation.operands)
            if left is not None and right is not None and left.type.shape == right.type.shape:
                _contract_all(operation, left, right)


def _before_flattening(handle: Any) -> Any | None:
    """The array of several dimensions that a vector has all elements of; None where there is none."""
    maker = handle.owner
    if isinstance(maker, ir.Block) or maker.name != RESHAPE or handle.type.rank != 1 or len(maker.attributes):
        return None
    array = maker.operands[0]
    return array if array.type.rank > 1 else None


def _contract_all(operation: Any, left: Any, right: Any) -> None:
    """Two vectors make one number, or each element of one with each of the other, which stays."""
    if operation.results[0].type.rank:
        return
    everything = list(range(left.type.rank))
    kept = {name: operation.attributes[name] for name in operation.attributes}
    numbers = dot_dimension_numbers([[], [], everything, everything], operation.context)
    vectors = [operand.owner for operand in operation.operands]
    made = create(DOT_GENERAL, [left, right], [operation.results[0].type], kept | {_NUMBERS: numbers}, operation)
    replace_operation(operation, made)
    for vector in dict.fromkeys(vectors):
        if not list(vector.results[0].uses):
            vector.erase()
