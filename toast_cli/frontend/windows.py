"""Reads windows: which elements of the operand an element of a convolution, a pooling, a slice or a pad depends on.

In: an MLIR op with its shapes. Out: a `Window` for each dimension that is not element-wise.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from toast_cli.program.model import Window

Shape = tuple[int, ...]

_DIM_NUMBERS = re.compile(r"#stablehlo\.conv<\[(.*?)\]x\[(.*?)\]->\[(.*?)\]>")


def windows_of(op: Any, name: str, operands: list[Shape], results: list[Shape]) -> tuple[Window, ...]:
    """The windows of an op; empty for an op of another kind."""
    read = _READERS.get(name)
    return tuple(w for w in read(op, operands, results[0]) if _does_something(w)) if read else ()


def convolution_dims(op: Any) -> tuple[list[str], list[str], list[str]]:
    """Dimensions of image, kernel and result of a convolution, in order: b, f, i, o, or the number of a spatial one."""
    found = _DIM_NUMBERS.search(str(op.attributes["dimension_numbers"]))
    lhs, rhs, out = ([d.strip() for d in text.split(",")] for text in found.groups())  # type: ignore[union-attr]
    return lhs, rhs, out


def numbers(op: Any, key: str, default: list[int]) -> list[int]:
    """A list of integers, row by row; a default if the attribute is missing."""
    if key not in op.attributes:
        return default
    attribute = op.attributes[key]
    return [int(x) for x in (np.array(attribute).ravel() if key == "padding" else attribute)]


def _does_something(w: Window) -> bool:
    """True unless the window is the identity."""
    return (w.inputs, w.size, w.stride, w.low, w.dilation) != (w.outputs, 1, 1, 0, 1)


def convolution_windows(op: Any, operands: list[Shape], result: Shape) -> list[Window]:
    lhs, rhs, out = convolution_dims(op)
    spatial = [d for d in out if d.isdigit()]
    ones = [1] * len(spatial)
    strides, dilations, spreads = (numbers(op, k, ones) for k in ("window_strides", "lhs_dilation", "rhs_dilation"))
    low = numbers(op, "padding", [0] * 2 * len(spatial))[::2]
    found = []
    for n, d in enumerate(spatial):
        i, k, o = lhs.index(d), rhs.index(d), out.index(d)
        found.append(
            Window(
                i,
                o,
                operands[0][i],
                result[o],
                operands[1][k],
                strides[n],
                low[n],
                dilations[n],
                spreads[n],
                kernel_dim=k,
            )
        )
    return found


def _pooling(op: Any, operands: list[Shape], result: Shape) -> list[Window]:
    """Windows of a pooling, or of a select-and-scatter, whose windows choose where each element of its source goes."""
    rank = len(operands[0])
    outputs = operands[1] if op.name == "stablehlo.select_and_scatter" else result
    ones = [1] * rank
    names = ("window_dimensions", "window_strides", "base_dilations", "window_dilations")
    size, stride, dilation, spread = (numbers(op, key, ones) for key in names)
    low = numbers(op, "padding", [0] * 2 * rank)[::2]
    return [
        Window(d, d, operands[0][d], outputs[d], size[d], stride[d], low[d], dilation[d], spread[d])
        for d in range(rank)
    ]


def _slice(op: Any, operands: list[Shape], result: Shape) -> list[Window]:
    starts, strides = (numbers(op, key, []) for key in ("start_indices", "strides"))
    return [Window(d, d, operands[0][d], result[d], 1, strides[d], -starts[d]) for d in range(len(result))]


def _pad(op: Any, operands: list[Shape], result: Shape) -> list[Window]:
    low, holes = (numbers(op, key, []) for key in ("edge_padding_low", "interior_padding"))
    return [Window(d, d, operands[0][d], result[d], 1, 1, low[d], holes[d] + 1) for d in range(len(result))]


_READERS: dict[str, Callable[[Any, list[Shape], Shape], list[Window]]] = {
    "stablehlo.convolution": convolution_windows,
    "stablehlo.reduce_window": _pooling,
    "stablehlo.select_and_scatter": _pooling,
    "stablehlo.slice": _slice,
    "stablehlo.pad": _pad,
}
