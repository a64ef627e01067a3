"""Temporaries as GPUs' compilers lay them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from programs import arg, evaluator_of, source_of

from toast_cli.dimensions import analyse
from toast_cli.frontend import load
from toast_cli.hardware import find_preset, load_spec
from toast_cli.plan.problem import make_problem
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.gpu_libraries import temporary_growth
from toast_cli.price.profiles import find_profile

CHAIN = """
func.func @main(%x: tensor<64x64x{t}>, %w: tensor<64x64x{t}>) -> tensor<64x64x{t}> {{
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<64x64x{t}>, tensor<64x64x{t}>) -> tensor<64x64x{t}>
  %1 = stablehlo.dot_general %0, %w, contracting_dims = [1] x [0] : (tensor<64x64x{t}>, tensor<64x64x{t}>) -> tensor<64x64x{t}>
  %2 = stablehlo.dot_general %1, %0, contracting_dims = [1] x [0] : (tensor<64x64x{t}>, tensor<64x64x{t}>) -> tensor<64x64x{t}>
  return %2 : tensor<64x64x{t}>
}}
"""  # noqa: E501


def chain_on(spec: str, dtype: str, folder: Path) -> Evaluator:
    path = folder / "p.mlir"
    path.write_text(CHAIN.format(t=dtype))
    program = load(str(path)).program
    return Evaluator(make_problem(program, analyse(program), load_spec(spec).mesh()))


@pytest.mark.parametrize(
    ("chip", "dtype", "widened"),
    [
        ("v4", "bf16", 1.0),
        ("H100", "bf16", 1.0),
        ("V100", "f16", 1.0),
        ("V100", "f32", 1.0),
        ("V100", "bf16", 2.0),
        ("P100", "bf16", 2.0),
    ],
)
def test_what_a_chip_cannot_compute_in_is_widened(chip: str, dtype: str, widened: float, tmp_path: Path) -> None:
    evaluator, profile = chain_on("h100-8", dtype, tmp_path), find_profile(find_preset(chip).chip)
    growth = temporary_growth(evaluator.problem.program, evaluator.items.stored, profile)
    assert growth == pytest.approx(profile.temporary_growth * widened)


def test_tpus_are_what_the_model_is_made_for() -> None:
    tpu, gpu = (find_profile(find_preset(chip).chip) for chip in ("v4", "H100"))
    assert tpu.temporary_growth == 1.0 < gpu.temporary_growth


@pytest.mark.parametrize(
    ("spec", "dtype", "factor"), [("v4-32", "bf16", 1.0), ("h100-8", "f32", 1.12), ("v100-8", "bf16", 2.24)]
)
def test_only_temporaries_grow(spec: str, dtype: str, factor: float, tmp_path: Path) -> None:
    evaluator = chain_on(spec, dtype, tmp_path)
    counted = evaluator.memory_profile(()).max()
    for cost in (evaluator.cost(()), evaluator.exact_cost(())):
        assert cost.peak_bytes == pytest.approx(cost.argument_bytes + factor * (counted - cost.argument_bytes))
        assert counted > cost.argument_bytes


@pytest.mark.parametrize(
    ("chip", "batch", "heads", "groups", "rows", "masked", "expected"),
    [
        ("v6e", 2, 2, 4, 4096, True, 4.25),  # scores, exponentials, scale and filler in f32, and the mask
        ("v6e", 2, 8, 1, 3072, True, 4.25),
        ("v6e", 1, 8, 1, 4096, True, 4.25),
        ("v6e", 1, 2, 4, 4096, True, 1.0),  # one batch of grouped queries: the product's kernel finds the maxima
        ("v6e", 2, 1, 8, 4096, True, 1.0),
        ("v6e", 2, 2, 4, 4096, False, 1.0),
        ("v6e", 2, 2, 4, 2560, True, 1.0),
        ("v6e", 2, 2, 1, 16384, True, 1.0),
        ("v5p", 2, 2, 4, 4096, True, 1.0),
    ],
)
def test_a_masked_softmax_takes_what_the_compiler_allocates(
    chip: str, batch: int, heads: int, groups: int, rows: int, masked: bool, expected: float
) -> None:
    """Arrays of the size of f32 scores that are alive at once, as in programs compiled by libtpu 0.0.42.1."""

    def run(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k, preferred_element_type=jnp.float32) * 0.125
        scores = jnp.where(jnp.tril(jnp.ones((rows, rows), bool)), scores, -1e30) if masked else scores
        return jnp.einsum("bhgqk,bkhd->bqhgd", jax.nn.softmax(scores).astype(jnp.bfloat16), v)

    keys = arg(batch, rows, heads, 128, dtype=jnp.bfloat16)
    source = source_of(run, arg(batch, rows, heads, groups, 128, dtype=jnp.bfloat16), keys, keys)
    cost = evaluator_of(source, f"{chip}-8").cost(())
    scores = 4 * batch * heads * groups * rows**2
    assert (cost.peak_bytes - cost.argument_bytes) / scores == pytest.approx(expected, rel=0.1)
