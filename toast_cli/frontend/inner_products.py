"""Rewrites inner products of flattened arrays (`jnp.vdot`) so that they contract all dimensions of the arrays.

Gradient norms, conjugate gradients and L-BFGS multiply whole arrays as vectors. In a flat array only the first
dimension can be split, so each device would gather a gradient to compute its norm. XLA removes the reshapes before it
partitions, unless a sharding is between them.

In: a module without calls. Out: the same module, rewritten in place: `dot(reshape(x), reshape(y))` of arrays of
one shape contracts all their dimensions. The sum is the same up to the order of its terms.
"""

from __future__ import annotations

from typing import Any

from toast_cli.frontend.inline import replace_operation
from toast_cli.program.ops import DOT_GENERAL, RESHAPE
from toast_cli.xla import attributes_of, create, dot_dimension_numbers, ir, walk_ops

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
    """The array of several dimensions that was flattened to this vector; None if there is none."""
    maker = handle.owner
    if isinstance(maker, ir.Block) or maker.name != RESHAPE or handle.type.rank != 1 or len(maker.attributes):
        return None
    array = maker.operands[0]
    return array if array.type.rank > 1 else None


def _contract_all(operation: Any, left: Any, right: Any) -> None:
    """Contracts all dimensions of two arrays in an inner product. An outer product stays as it is."""
    if operation.results[0].type.rank:
        return
    everything = list(range(left.type.rank))
    numbers = dot_dimension_numbers([[], [], everything, everything], operation.context)
    vectors = [operand.owner for operand in operation.operands]
    made = create(
        DOT_GENERAL,
        [left, right],
        [operation.results[0].type],
        attributes_of(operation) | {_NUMBERS: numbers},
        operation,
    )
    replace_operation(operation, made)
    for vector in dict.fromkeys(vectors):
        if not list(vector.results[0].uses):
            vector.erase()
