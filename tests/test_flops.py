"""Arithmetic operations: by hand, and against XLA's own count of the same lowered program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from programs import arg, program_of

from toast_cli.frontend.rules import library_flops


def convolution(
    strides: tuple[int, int] = (1, 1),
    padding: Any = "SAME",
    lhs_dilation: tuple[int, int] = (1, 1),
    rhs_dilation: tuple[int, int] = (1, 1),
    feature_groups: int = 1,
    batch_groups: int = 1,
) -> Callable[[Any, Any], Any]:
    def run(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(
            x, w, strides, padding, lhs_dilation, rhs_dilation, ("NHWC", "HWIO", "NHWC"), feature_groups, batch_groups
        )

    return run


IMAGE, KERNEL = arg(4, 16, 12, 8), arg(3, 3, 8, 6)

# name, function, arguments
AS_XLA_COUNTS: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    ("product", lambda x, y: x @ y, (arg(5, 7), arg(7, 3))),
    ("batched product", lambda x, y: jnp.einsum("bij,bjk->bik", x, y), (arg(2, 5, 7), arg(2, 7, 3))),
    ("two contracted dimensions", lambda x, y: jnp.einsum("ijk,jkl->il", x, y), (arg(5, 7, 2), arg(7, 2, 3))),
    ("convolution", convolution(), (IMAGE, KERNEL)),
    ("strided", convolution(strides=(2, 2)), (IMAGE, KERNEL)),
    ("no padding", convolution(padding="VALID"), (IMAGE, KERNEL)),
    ("uneven padding", convolution(padding=((0, 3), (2, 1))), (IMAGE, KERNEL)),
    ("dilated kernel", convolution(rhs_dilation=(2, 3)), (IMAGE, KERNEL)),
    (
        "dilated image (transposed convolution)",
        convolution(lhs_dilation=(2, 2), padding=((1, 1), (1, 1))),
        (IMAGE, KERNEL),
    ),
    ("depthwise", convolution(feature_groups=8), (IMAGE, arg(3, 3, 1, 16))),
    ("batch groups (gradient of a depthwise one)", convolution(batch_groups=2), (IMAGE, KERNEL)),
    ("sum", lambda x: lax.reduce(x, 0.0, lax.add, (0,)), (arg(100, 7),)),
    ("elementwise", lambda x, y: x * y + x, (arg(6, 7), arg(6, 7))),
]


@pytest.mark.parametrize(
    ("run", "shapes"), [case[1:] for case in AS_XLA_COUNTS], ids=[case[0] for case in AS_XLA_COUNTS]
)
def test_counts_agree_with_xla(run: Callable[..., Any], shapes: tuple[Any, ...]) -> None:
    ours = program_of(run, *shapes).flops
    theirs = jax.jit(run).lower(*shapes).cost_analysis()["flops"]
    assert ours == pytest.approx(theirs, rel=0.02)  # a reduction of n numbers is n - 1 additions there


def scatter(x: Any, rows: Any, updates: Any) -> Any:
    where = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    return lax.scatter_add(x, rows, updates, where, mode="promise_in_bounds")


BY_HAND: list[tuple[str, Callable[..., Any], tuple[Any, ...], float]] = [
    ("data movement is free", lambda x: x.T.reshape(42)[3:9], (arg(6, 7),), 0.0),
    ("a transcendental is 4", lambda x: jnp.exp(x), (arg(6, 7),), 4.0 * 42),
    ("sort: n log2 n", lambda x: jnp.sort(x), (arg(16),), 16.0 * 4),
    ("scatter: one for each update", scatter, (arg(6, 4), arg(2, 1, dtype=jnp.int32), arg(2, 4)), 8.0),
    ("fft: 5 n log2 n", lambda x: jnp.fft.fft(x), (arg(2, 16, dtype=jnp.complex64),), 5.0 * 32 * 4),
    ("a loop counts as often as it runs", lambda x: lax.fori_loop(0, 5, lambda i, c: c @ c, x), (arg(4, 4),),
     5 * 128.0),
    ("a branch counts in part", lambda p, x: lax.cond(p, lambda y: y @ y, lambda y: y, x), (arg(dtype=bool), arg(4, 4)),
     65.0),
]  # fmt: skip


@pytest.mark.parametrize(("run", "shapes", "flops"), [case[1:] for case in BY_HAND], ids=[case[0] for case in BY_HAND])
def test_counts_by_hand(run: Callable[..., Any], shapes: tuple[Any, ...], flops: float) -> None:
    assert program_of(run, *shapes).flops == pytest.approx(flops)


def test_factorizations_of_libraries_count_their_arithmetic() -> None:
    assert library_flops("lapack_ssyevd_ffi", [(4, 8, 8)]) == 4 * 9 * 8**3
    assert library_flops("Qr", [(16, 8)]) == pytest.approx(4 / 3 * 16 * 8 * 8)
    assert library_flops("cusolver_potrf_ffi", [(8, 8)]) == pytest.approx(8**3 / 3)
    assert library_flops("lapack_strsm_ffi", [(2, 8, 8), (2, 8, 5)]) == 2 * 8 * 8 * 5
    assert library_flops("my_kernel", [(8, 8)]) == library_flops("Qr", []) == 0.0
    program = program_of(jnp.linalg.eigh, arg(4, 64, 64))
    assert program.flops == pytest.approx(4 * 9 * 64**3, rel=0.05)


def test_a_factorization_of_one_matrix_is_listed_as_whole() -> None:
    ops = program_of(jnp.linalg.eigh, arg(64, 64)).ops
    assert [op.detail for op in ops if op.opaque] == ["lapack_ssyevd_ffi"]
    assert not any(op.opaque for op in program_of(jnp.linalg.eigh, arg(4, 64, 64)).ops)
