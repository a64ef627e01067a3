"""Batch normalisation in elementwise operations and sums.

StableHLO has three operations for it. PyTorch/XLA writes layer normalisations with them, too, as `[1, rows, width]`
with the rows for features. No partitioner splits them. XLA writes them out, as here, on every platform (its
`BatchNormExpander`), but only after it has partitioned the program.

Enters: one of the operations. Leaves: what takes the place of its results. With x the operand, N the elements of a
feature, r = 1 / sqrt(variance + epsilon), and sums over all dimensions but that of features:

    training    mean = sum(x) / N, variance = sum(x²) / N - mean², (x - mean) r scale + offset
    inference   (x - mean) r scale + offset
    gradient    with g the result's gradient, offset' = sum(g), c = sum(g (x - mean)), scale' = c r,
                x' = scale r / N (N g - offset' - c (x - mean) / (variance + epsilon))
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from toast_cli.xla import ir

TRAINING, INFERENCE, GRADIENT = (
    "stablehlo.batch_norm_training",
    "stablehlo.batch_norm_inference",
    "stablehlo.batch_norm_grad",
)


class _Writer:
    """Writes operations in front of a batch normalisation."""

    def __init__(self, norm: Any) -> None:
        self._norm = norm
        self.kind = ir.RankedTensorType(norm.operands[0].type)
        self.feature = int(ir.IntegerAttr(norm.attributes["feature_index"]).value)
        self.per_feature = ir.RankedTensorType.get([self.kind.shape[self.feature]], self.kind.element_type)
        self._others = [d for d in range(self.kind.rank) if d != self.feature]
        self.count = prod(self.kind.shape[d] for d in self._others)

    def __call__(self, name: str, *operands: Any, kind: Any = None, **attributes: Any) -> Any:
        return ir.Operation.create(
            f"stablehlo.{name}",
            results=[kind or operands[0].type],
            operands=list(operands),
            attributes=attributes,
            loc=self._norm.location,
            ip=ir.InsertionPoint(self._norm),
        ).results[0]

    def number(self, value: float, kind: Any) -> Any:
        """A constant of this type; every element has this value."""
        element = ir.FloatAttr.get(kind.element_type, value)
        return self("constant", kind=kind, value=ir.DenseElementsAttr.get_splat(kind, element))

    def converted(self, value: Any) -> Any:
        """A per-feature vector, converted to the operand's element type."""
        return value if value.type == self.per_feature else self("convert", value, kind=self.per_feature)

    def spread(self, value: Any) -> Any:
        """A per-feature vector, broadcast to the operand's shape."""
        return self("broadcast_in_dim", value, kind=self.kind, broadcast_dimensions=_array([self.feature]))

    def sum(self, value: Any) -> Any:
        """The sum over all dimensions but that of features."""
        scalar = ir.RankedTensorType.get([], self.kind.element_type)
        reduction = ir.Operation.create(
            "stablehlo.reduce",
            results=[self.per_feature],
            operands=[value, self.number(0.0, scalar)],
            attributes={"dimensions": _array(self._others)},
            regions=1,
            loc=self._norm.location,
            ip=ir.InsertionPoint(self._norm),
        )
        block = ir.Block.create_at_start(reduction.regions[0], [scalar, scalar], [self._norm.location] * 2)
        with ir.InsertionPoint(block), self._norm.location:
            total = ir.Operation.create("stablehlo.add", results=[scalar], operands=list(block.arguments))
            ir.Operation.create("stablehlo.return", operands=list(total.results))
        return reduction.results[0]

    def widened(self, variance: Any) -> Any:
        """variance + epsilon"""
        epsilon = float(ir.FloatAttr(self._norm.attributes["epsilon"]).value)
        return self("add", variance, self.number(epsilon, self.per_feature))


def _array(numbers: list[int]) -> Any:
    return ir.DenseI64ArrayAttr.get(numbers)


def written_out(norm: Any) -> list[Any]:
    """Writes the expansion of a batch normalisation in front of it; returns a value for each result."""
    write = _Writer(norm)
    x, *others = norm.operands
    ends = [others.pop()] if norm.name == GRADIENT else []  # the result's gradient, of the operand's shape
    found = _FORMULAS[norm.name](write, x, *map(write.converted, others), *ends)
    kinds = [result.type for result in norm.results]
    return [v if v.type == kind else write("convert", v, kind=kind) for v, kind in zip(found, kinds, strict=True)]


def _training(write: _Writer, x: Any, scale: Any, offset: Any) -> list[Any]:
    count = write.number(write.count, write.per_feature)
    mean = write("divide", write.sum(x), count)
    of_squares = write("divide", write.sum(write("multiply", x, x)), count)
    variance = write("subtract", of_squares, write("multiply", mean, mean))
    return [*_inference(write, x, scale, offset, mean, variance), mean, variance]


def _inference(write: _Writer, x: Any, scale: Any, offset: Any, mean: Any, variance: Any) -> list[Any]:
    centred = write("subtract", x, write.spread(mean))
    normal = write("multiply", centred, write.spread(write("rsqrt", write.widened(variance))))
    return [write("add", write("multiply", normal, write.spread(scale)), write.spread(offset))]


def _gradient(write: _Writer, x: Any, scale: Any, mean: Any, variance: Any, gradient: Any) -> list[Any]:
    widened = write.widened(variance)
    inverse = write("rsqrt", widened)
    centred = write("subtract", x, write.spread(mean))
    of_offset = write.sum(gradient)
    along = write.sum(write("multiply", gradient, centred))
    count = write.number(write.count, write.per_feature)
    scaled = write("multiply", gradient, write.number(write.count, write.kind))
    shifted = write("subtract", scaled, write.spread(of_offset))
    turned = write("multiply", centred, write.spread(write("divide", along, widened)))
    factor = write("divide", write("multiply", scale, inverse), count)
    of_x = write("multiply", write("subtract", shifted, turned), write.spread(factor))
    return [of_x, write("multiply", along, inverse), of_offset]


_FORMULAS: dict[str, Callable[..., list[Any]]] = {TRAINING: _training, INFERENCE: _inference, GRADIENT: _gradient}
