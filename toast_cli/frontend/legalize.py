"""Rewrites operations of a converted HLO module that StableHLO does not have:

* named computations become their bodies,
* copies and control dependencies their operand,
* constants of other dialects (Shardy's, CHLO's, arith's) StableHLO's,
* batch normalisations equivalent elementwise operations and sums,
* `dot` becomes `dot_general`,
* operations that do nothing the operand they return,
* elementwise functions and top-k (also as composites, the way jax.export writes them) their CHLO counterpart.

What XLA's optimisation makes (fusions, bitcasts between layouts, asynchronous pairs) is refused: it holds what XLA
decided for one platform. Other operations (`mhlo.stochastic_convert`, …) stay, for the reader to report.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

from toast_cli.base.errors import InputError
from toast_cli.frontend.attributes import place_of
from toast_cli.frontend.inline import (
    ABSORBING,
    CONCATENATION,
    IDLE_KINDS,
    NEUTRAL,
    OVERWRITING,
    UNDOING,
    moved_out,
    replace_operation,
    unchanged_operand,
)
from toast_cli.frontend.rules import general_ragged_dot
from toast_cli.program.ops import CONSTANT, OP_KINDS
from toast_cli.xla import attributes_of, create, dot_dimension_numbers, ir, walk_ops
from toast_cli.xla.build import Builder

# ---------------------------------------------------------------- batch normalisation
# Batch normalisation in elementwise operations and sums.
#
# StableHLO has three operations for it. PyTorch/XLA writes layer normalisations with them, too, as `[1, rows, width]`
# with the rows for features. No partitioner splits them. XLA writes them out, as here, on every platform (its
# `BatchNormExpander`), but only after it has partitioned the program.
#
# With x the operand, N the elements of a feature, r = 1 / sqrt(variance + epsilon), and sums over all dimensions but
# that of features:
#
#     training    mean = sum(x) / N, variance = sum(x²) / N - mean², (x - mean) r scale + offset
#     inference   (x - mean) r scale + offset
#     gradient    with g the result's gradient, offset' = sum(g), c = sum(g (x - mean)), scale' = c r,
#                 x' = scale r / N (N g - offset' - c (x - mean) / (variance + epsilon))

TRAINING, INFERENCE, GRADIENT = (
    "stablehlo.batch_norm_training",
    "stablehlo.batch_norm_inference",
    "stablehlo.batch_norm_grad",
)


class _Writer(Builder):
    """Writes operations in front of a batch normalisation."""

    def __init__(self, norm: Any) -> None:
        super().__init__(norm.context)
        self.ip, self.location, self._norm = ir.InsertionPoint(norm), norm.location, norm
        kind = norm.operands[0].type
        self.dtype, self.shape = str(kind.element_type), tuple(kind.shape)
        self.feature = int(ir.IntegerAttr(norm.attributes["feature_index"]).value)
        self._others = [d for d in range(len(self.shape)) if d != self.feature]
        self.count = prod(self.shape[d] for d in self._others)

    def spread(self, value: Any) -> Any:
        """A per-feature vector, broadcast to the operand's shape."""
        return self.broadcast(value, self.shape, [self.feature])

    def total(self, value: Any) -> Any:
        """The sum over all dimensions but that of features."""
        return self.sum(value, self._others)

    def mean(self, value: Any) -> Any:
        """The mean over the same."""
        total = self.total(value)
        return self.binary("divide", total, self.filled(self.count, total))

    def filled(self, value: float, like: Any) -> Any:
        """A constant of the type of another value."""
        return self.constant(value, self.dtype, tuple(like.type.shape))

    def widened(self, variance: Any) -> Any:
        """variance + epsilon"""
        epsilon = float(ir.FloatAttr(self._norm.attributes["epsilon"]).value)
        return self.binary("add", variance, self.filled(epsilon, variance))


def written_out(norm: Any) -> list[Any]:
    """Writes the expansion of a batch normalisation in front of it; returns a value for each result."""
    write = _Writer(norm)
    x, *others = norm.operands
    ends = [others.pop()] if norm.name == GRADIENT else []  # the result's gradient, of the operand's shape
    values = _FORMULAS[norm.name](write, x, *[write.convert(value, write.dtype) for value in others], *ends)
    return [write.convert(v, str(r.type.element_type)) for v, r in zip(values, norm.results, strict=True)]


def _training(write: _Writer, x: Any, scale: Any, offset: Any) -> list[Any]:
    mean = write.mean(x)
    variance = write.binary(
        "subtract", write.mean(write.binary("multiply", x, x)), write.binary("multiply", mean, mean)
    )
    return [*_inference(write, x, scale, offset, mean, variance), mean, variance]


def _inference(write: _Writer, x: Any, scale: Any, offset: Any, mean: Any, variance: Any) -> list[Any]:
    centred = write.binary("subtract", x, write.spread(mean))
    normal = write.binary("multiply", centred, write.spread(write.unary("rsqrt", write.widened(variance))))
    return [write.binary("add", write.binary("multiply", normal, write.spread(scale)), write.spread(offset))]


def _gradient(write: _Writer, x: Any, scale: Any, mean: Any, variance: Any, gradient: Any) -> list[Any]:
    multiply = partial(write.binary, "multiply")
    widened = write.widened(variance)
    inverse = write.unary("rsqrt", widened)
    centred = write.binary("subtract", x, write.spread(mean))
    of_offset, along = write.total(gradient), write.total(multiply(gradient, centred))
    scaled = multiply(gradient, write.filled(write.count, gradient))
    shifted = write.binary("subtract", scaled, write.spread(of_offset))
    turned = multiply(centred, write.spread(write.binary("divide", along, widened)))
    factor = write.binary("divide", multiply(scale, inverse), write.filled(write.count, scale))
    of_x = multiply(write.binary("subtract", shifted, turned), write.spread(factor))
    return [of_x, multiply(along, inverse), of_offset]


_FORMULAS: dict[str, Callable[..., list[Any]]] = {TRAINING: _training, INFERENCE: _inference, GRADIENT: _gradient}


NAMED = "sdy.named_computation"
OPTIMISED = ("mhlo.fusion", "mhlo.bitcast", "mhlo.async_start", "stablehlo.async_start")
CONSTANTS = ("sdy.constant", "chlo.constant", "arith.constant")
CHLO = tuple(kind.name for kind in OP_KINDS.values() if kind.name.startswith("chlo.") and kind.elementwise)

Values = list[Any]


def legalize(module: Any, path: str) -> None:
    """Rewrites every operation in `REWRITES`, inner ones first.

    Raises `InputError` for what XLA's optimisation makes.
    """
    with module.context, ir.Location.unknown():
        for operation in walk_ops(module, *OPTIMISED, *REWRITES, inner_first=True):
            if operation.name in OPTIMISED:
                what = f"XLA has optimised this program: it has the op {operation.name.partition('.')[2]}"
                hint = "give the program as it was lowered: `lowered.as_text()`, not `compile().as_text()`"
                raise InputError(what, where=place_of(operation, path), hint=hint)
            values = REWRITES[operation.name](operation)
            if values is not None:
                undone = [operand.owner for operand in operation.operands] if operation.name in UNDOING else []
                replace_operation(operation, values)
                for before in undone:  # shape operations that have no users
                    unread = not isinstance(before, ir.Block) and before.name in UNDOING
                    if unread and not list(before.results[0].uses):
                        before.operation.erase()


def move_out(operation: Any) -> Values:
    """Moves the operations of the one block that `operation` holds in front of it; returns what the block yields."""
    block = operation.regions[0].blocks[0]
    for argument, operand in zip(block.arguments, operation.operands, strict=True):
        argument.replace_all_uses_with(operand)
    return moved_out(block, operation)


def first_operand(operation: Any) -> Values:
    """The first operand, for copies and for values that wait for a token."""
    return [operation.operands[0]]


def plain_constant(operation: Any) -> Values | None:
    """A `stablehlo.constant` with the value of a constant of another dialect."""
    value = operation.attributes["value"]
    if not isinstance(value, ir.DenseElementsAttr | ir.DenseResourceElementsAttr):
        return None
    return create(CONSTANT, [], [operation.results[0].type], {"value": value}, operation)


def chlo_top_k(operation: Any) -> Values | None:
    """`chlo.top_k` if the operation takes the largest elements; else None."""
    if "largest" in operation.attributes and not ir.BoolAttr(operation.attributes["largest"]).value:
        return None
    types = [result.type for result in operation.results]
    return create("chlo.top_k", list(operation.operands), types, {"k": operation.attributes["k"]}, operation)


def chlo_composite(operation: Any) -> Values | None:
    """Replaces a composite of a CHLO operation, as jax.export writes it, by the operation, which is easier to split
    than its expansion. None for other composites, and for an operation that this jaxlib does not have."""
    name = str(ir.StringAttr(operation.attributes["name"]).value)
    if name not in (*CHLO, "chlo.top_k") or not operation.context.is_registered_operation(name):
        return None
    entries = operation.attributes.get("composite_attributes", ())
    attributes = {item.name: item.attr for item in entries}
    return create(name, list(operation.operands), [result.type for result in operation.results], attributes, operation)


def general_product(operation: Any) -> Values:
    """A `stablehlo.dot` of matrices or vectors as a `dot_general`, which the analyses look for.

    The conversion from HLO makes a `dot` of products in the usual order, and a `dot_general` of all others.
    """
    left = ir.RankedTensorType(operation.operands[0].type)
    numbers = dot_dimension_numbers([[], [], [left.rank - 1], [0]], operation.context)
    attributes = attributes_of(operation) | {"dot_dimension_numbers": numbers}
    return create("stablehlo.dot_general", list(operation.operands), [operation.results[0].type], attributes, operation)


REWRITES: dict[str, Callable[[Any], Values | None]] = {
    NAMED: move_out,
    **{
        name.replace("chlo.", "mhlo."): lambda op: create(
            op.name.replace("mhlo.", "chlo."), list(op.operands), [result.type for result in op.results], {}, op
        )
        for name in CHLO
    },
    **dict.fromkeys(
        (*IDLE_KINDS, *NEUTRAL, *ABSORBING, CONCATENATION, OVERWRITING),
        lambda op: None if (operand := unchanged_operand(op)) is None else [operand],
    ),
    **dict.fromkeys(CONSTANTS, plain_constant),
    "mhlo.copy": first_operand,
    "mhlo.add_dependency": first_operand,
    "mhlo.ragged_dot": general_ragged_dot,
    "mhlo.topk": chlo_top_k,
    "stablehlo.composite": chlo_composite,
    "stablehlo.dot": general_product,
    **dict.fromkeys((TRAINING, INFERENCE, GRADIENT), written_out),
}
