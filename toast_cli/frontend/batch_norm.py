"""Batch normalisation in elementwise operations and sums.

StableHLO has three operations for it. PyTorch/XLA writes layer normalisations with them, too, as `[1, rows, width]`
with the rows for features. No partitioner splits them. XLA writes them out, as here, on every platform (its
`BatchNormExpander`), but only after it has partitioned the program.

In: one of the operations. Out: what takes the place of its results. With x the operand, N the elements of a
feature, r = 1 / sqrt(variance + epsilon), and sums over all dimensions but that of features:

    training    mean = sum(x) / N, variance = sum(x²) / N - mean², (x - mean) r scale + offset
    inference   (x - mean) r scale + offset
    gradient    with g the result's gradient, offset' = sum(g), c = sum(g (x - mean)), scale' = c r,
                x' = scale r / N (N g - offset' - c (x - mean) / (variance + epsilon))
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

from toast_cli.xla import ir
from toast_cli.xla.build import Builder

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
    found = _FORMULAS[norm.name](write, x, *[write.convert(value, write.dtype) for value in others], *ends)
    return [write.convert(v, str(r.type.element_type)) for v, r in zip(found, norm.results, strict=True)]


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
