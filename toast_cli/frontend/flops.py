"""Arithmetic operations of one op, on unsharded shapes, as XLA's HloCostAnalysis counts them (a multiply-add is 2).

Enters: an MLIR op with its shapes and rule. Leaves: a float. Data movement counts 0.
"""

from __future__ import annotations

from math import log2, prod
from typing import Any

import numpy as np

from toast_cli.frontend.windows import convolution_dims, numbers
from toast_cli.program.model import Rule

Shape = tuple[int, ...]

# Elementwise ops that cost several vector operations an element: a TPU's extended unary unit takes one register a cycle where
# four arithmetic units work beside it, a GPU's special function units are 16 beside 128 f32 lanes. They matter only where such ops
# outweigh memory traffic, which is rare.
TRANSCENDENTAL = 4.0
_TRANSCENDENTAL_OPS = frozenset(
    [
        "exponential",
        "exponential_minus_one",
        "log",
        "log_plus_one",
        "logistic",
        "tanh",
        "cosine",
        "sine",
        "tan",
        "atan2",
        "power",
        "sqrt",
        "rsqrt",
        "cbrt",
        "divide",
        "remainder",
    ]
)
_MOVEMENT = frozenset(
    [
        "constant",
        "iota",
        "broadcast_in_dim",
        "broadcast",
        "reshape",
        "transpose",
        "slice",
        "dynamic_slice",
        "dynamic_update_slice",
        "concatenate",
        "pad",
        "gather",
        "reverse",
        "bitcast_convert",
        "copy",
        "optimization_barrier",
        "tuple",
        "get_tuple_element",
        "custom_call",
        "all_gather",
        "all_to_all",
        "collective_permute",
        "partition_id",
        "replica_id",
        "create_token",
        "after_all",
        "infeed",
        "outfeed",
        "send",
        "recv",
        "real",
        "imag",
        "complex",
        "return",
        "get_dimension_size",
        "composite",
        "while",
        "case",
        "if",
    ]
)


def op_flops(op: Any, name: str, operands: list[Shape], results: list[Shape], rule: Rule) -> float:
    """Arithmetic operations of one execution of `op`."""
    short = name.removeprefix("stablehlo.").removeprefix("chlo.")
    if not results or short in _MOVEMENT or name.startswith(("toast.", "sdy.")):
        return 0.0
    out = float(prod(results[0]))
    if short in ("dot_general", "dot"):
        return 2.0 * prod(rule.sizes)
    if short == "convolution":
        return convolution_flops(op, operands, results[0])
    if short in ("reduce", "scatter", "select_and_scatter", "all_reduce", "reduce_scatter"):
        return float(prod(operands[-1] if short == "scatter" else operands[0]))
    if short == "reduce_window":
        return out * float(prod(op.attributes["window_dimensions"]))
    if short in ("sort", "top_k"):
        elements = float(prod(operands[0]))
        return elements * max(1.0, log2(max(2.0, elements)))
    if short == "fft":
        return 5.0 * out * log2(max(2, prod(op.attributes["fft_length"])))
    if short in ("cholesky", "triangular_solve"):
        return out * operands[0][-1]
    if name.startswith("chlo.") or short in _TRANSCENDENTAL_OPS:
        return TRANSCENDENTAL * out
    return out


def convolution_flops(op: Any, operands: list[Shape], result: Shape) -> float:
    """2 x batch x output features x input features per group x valid (output, kernel) position pairs per spatial dimension."""
    lhs, rhs, out = convolution_dims(op)
    spatial = [d for d in out if d.isdigit()]
    names = ("window_strides", "lhs_dilation", "rhs_dilation")
    strides, lhs_dilation, rhs_dilation = (numbers(op, key, [1] * len(spatial)) for key in names)
    padding = np.reshape(numbers(op, "padding", [0] * 2 * len(spatial)), (-1, 2))
    features = operands[1][rhs.index("i")]
    flops = 2.0 * result[out.index("b")] * result[out.index("f")] * features
    for n, d in enumerate(spatial):
        flops *= _valid_pairs(
            operands[0][lhs.index(d)], operands[1][rhs.index(d)], result[out.index(d)],
            strides[n], int(padding[n][0]), lhs_dilation[n], rhs_dilation[n],
        )  # fmt: skip
    return flops


def _valid_pairs(size: int, kernel: int, out: int, stride: int, low: int, lhs_dilation: int, rhs_dilation: int) -> int:
    """Pairs (output position, kernel position) of one spatial dimension that read a real element, not padding or a hole."""
    if out * kernel > 4_000_000:  # a window as wide as the array: counting pair by pair is not worth it
        return out * kernel // lhs_dilation
    places = np.arange(out)[:, None] * stride - low + np.arange(kernel)[None, :] * rhs_dilation
    inside = (places >= 0) & (places < (size - 1) * lhs_dilation + 1) & (places % lhs_dilation == 0)
    return int(np.count_nonzero(inside))
