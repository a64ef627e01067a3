"""Arithmetic operations of one op, on unsharded shapes, as XLA's HloCostAnalysis counts them (a multiply-add is 2).

In: an MLIR op with its shapes and rule. Out: a float. Data movement counts 0.
"""

from __future__ import annotations

import re
from math import log2, prod
from typing import Any

import numpy as np

from toast_cli.frontend import attributes as foreign
from toast_cli.frontend.ragged_dots import ragged_flops
from toast_cli.frontend.windows import convolution_dims, convolution_windows
from toast_cli.program.model import Rule, Window
from toast_cli.program.ops import CUSTOM_CALL, RAGGED_DOT, SCATTER, kind_of

Shape = tuple[int, ...]

# Elementwise ops that take several vector operations per element: a TPU's extended unary unit takes one register a
# cycle beside four arithmetic units, a GPU has 16 special function units for 128 f32 lanes. They matter only if such
# ops outweigh memory traffic, which is rare.
SLOW = 4.0

# Factorizations that StableHLO leaves to libraries (LAPACK, cuSOLVER, XLA's own for TPUs): arithmetic operations over
# m n min(m, n) of an m x n matrix, vectors included (Golub, Van Loan, Matrix Computations, 4th edition).
_FACTORIZATION = re.compile(
    r"(?:lapack|cusolver|cublas|hipsolver|hipblas|magma)_[a-z]*?(potrf|getrf|geqrf|orgqr|ungqr|sytrd|hetrd|gehrd|syev|"
    r"heev|gesdd|gesvd|geev|gees|trsm)|(Cholesky|LuDecomposition|Qr|ProductOfElementaryHouseholderReflectors|Eigh)$"
)
_RATIOS = {
    "potrf": 1 / 3, "Cholesky": 1 / 3, "getrf": 2 / 3, "LuDecomposition": 2 / 3, "geqrf": 4 / 3, "orgqr": 4 / 3,
    "ungqr": 4 / 3, "Qr": 4 / 3, "ProductOfElementaryHouseholderReflectors": 4 / 3, "sytrd": 10 / 3, "hetrd": 10 / 3,
    "gehrd": 10 / 3, "syev": 9.0, "heev": 9.0, "Eigh": 9.0, "gesdd": 26.0, "gesvd": 26.0, "geev": 25.0, "gees": 25.0,
}  # fmt: skip


def op_flops(op: Any, name: str, operands: list[Shape], results: list[Shape], rule: Rule) -> float:
    """Arithmetic operations of one execution of `op`. name: of the op, or of a custom call's target."""
    if name == CUSTOM_CALL:
        return library_flops(foreign.text(op.attributes, "call_target_name", str) or "", operands)
    kind = kind_of(name)
    if not results or kind.computes_nothing:
        return 0.0
    out = float(prod(results[0]))
    if name == RAGGED_DOT:
        return ragged_flops(op, rule)
    if kind.contraction:
        return 2.0 * prod(rule.sizes)
    if kind.convolution:
        return convolution_flops(op, operands, results[0])
    if name == "stablehlo.reduce_window":
        return out * float(prod(op.attributes["window_dimensions"]))
    if kind.reduction:
        return float(prod(operands[0]))
    if name == SCATTER:
        return float(prod(operands[-1]))
    if name in ("stablehlo.sort", "chlo.top_k"):
        elements = float(prod(operands[0]))
        return elements * max(1.0, log2(max(2.0, elements)))
    if name == "stablehlo.fft":
        return 5.0 * out * log2(max(2, prod(op.attributes["fft_length"])))
    if name in ("stablehlo.cholesky", "stablehlo.triangular_solve"):
        return out * operands[0][-1]
    return SLOW * out if kind.transcendental or kind.division else out


def library_flops(target: str, operands: list[Shape]) -> float:
    """Arithmetic operations of a library's factorization or triangular solve; 0 for other custom calls.

    Args:
        operands: the first is [..., m, n]; of a triangular solve [..., n, n], and the second the right-hand sides.
    """
    found = _FACTORIZATION.match(target)
    if found is None or not operands or len(operands[0]) < 2:
        return 0.0
    name, (*batch, m, n) = found[found.lastindex or 0], operands[0]
    if name == "trsm":
        return float(n * prod(operands[1]))
    return _RATIOS[name] * prod(batch) * m * n * min(m, n)


def convolution_flops(op: Any, operands: list[Shape], result: Shape) -> float:
    """2 x batch x output features x input features per group x valid (output, kernel) position pairs per spatial
    dimension.
    """
    _, rhs, out = convolution_dims(op)
    features = operands[1][rhs.index("i")]
    flops = 2.0 * result[out.index("b")] * result[out.index("f")] * features
    for window in convolution_windows(op, operands, result):
        flops *= _valid_pairs(window)
    return flops


def _valid_pairs(window: Window) -> int:
    """Pairs (output position, kernel position) of one spatial dimension that read a real element, not padding or a
    hole.
    """
    pairs = window.outputs * window.size
    if pairs > 4_000_000:  # a window as wide as the array: counting pair by pair is too slow
        return pairs // window.dilation
    starts = np.arange(window.outputs)[:, None] * window.stride - window.low
    places = starts + np.arange(window.size)[None, :] * window.spread
    inside = (places >= 0) & (places < (window.inputs - 1) * window.dilation + 1) & (places % window.dilation == 0)
    return int(np.count_nonzero(inside))
