"""A training block around hand-written attention is planned like one around an op that Shardy can split."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from test_hand_written import CAUSAL, S, attention, gradient, kernels, lowered, on_mesh, splash

from toast_cli import xla
from toast_cli.frontend.loading import load
from toast_cli.kernels.mosaic import TARGET
from toast_cli.pipeline import Outcome, partition
from toast_cli.program.model import HandWritten
from toast_cli.request import Request
from toast_cli.tactics import strategies

BATCH, LENGTH, MODEL, HEADS, WIDTH = 4, 1024, 2048, 16, 128
# Operands and results of the kernels as their author would state them for Shardy: forward, gradients of keys and
# values, and of queries; behind queries, keys and values come what each row of scores needs, and the gradient.
Q, K, ROW = "[b, h, q, d]", "[b, h, k, d]", "[b, h, q, x]"
RULES = {
    "_flash_attention_kernel": f"({Q}, {K}, {K})->({Q}, {ROW}, {ROW})",
    "_flash_attention_dkv_kernel": f"({Q}, {K}, {K}, {ROW}, {ROW}, {Q}, {ROW})->({K}, {K})",
    "_flash_attention_dq_kernel": f"({Q}, {K}, {K}, {ROW}, {ROW}, {Q}, {ROW})->({Q})",
}


def block(weights: dict[str, Any], x: Any) -> Any:
    q, k, v = (jnp.einsum("bsm,mhd->bhsd", x, weights[name]) for name in ("query", "key", "value"))
    return x + jnp.einsum("bhsd,hdm->bsm", attention(q, k, v), weights["out"])


def train_step(weights: dict[str, Any], x: Any) -> Any:
    slopes = jax.grad(lambda w: jnp.mean(block(w, x).astype(jnp.float32) ** 2))(weights)
    return jax.tree.map(lambda w, slope: w - 0.01 * slope, weights, slopes)


def as_stated(text: str, found: dict[str, HandWritten], folder: Path) -> Request:
    """The program with other custom calls in place of the kernels, and a file with their rules; what each takes is
    what its kernel takes."""
    module = xla.parse_module(xla.make_context(), text)
    for call in xla.walk_ops(module, "stablehlo.custom_call"):
        if xla.ir.StringAttr(call.attributes["call_target_name"]).value == TARGET:
            call.attributes["call_target_name"] = call.attributes["kernel_name"]
            del call.attributes["backend_config"], call.attributes["kernel_name"]
    (folder / "stated.mlir").write_text(str(module))
    lines = ["kernels:"]
    for name, rule in RULES.items():
        whole = "need_replication={q, k, d}" if "k, d" in rule and "q, d" in rule else ""
        lines += [f"- name: {name}", f"  rule: {rule} {whole}"]
        lines += [f"  flops: {found[name].flops}", f"  bytes: {found[name].bytes}"]
    (folder / "kernels.yaml").write_text("\n".join(lines))
    return Request(str(folder / "stated.mlir"), "v5e-16", iterations=40, kernels=str(folder / "kernels.yaml"))


def test_a_block_takes_as_long_as_around_an_op_that_shardy_splits(tmp_path: Path) -> None:
    """Under a plan that splits batch and heads, and under the one that the search finds."""
    weights = {name: S((MODEL, HEADS, WIDTH), jnp.bfloat16) for name in ("query", "key", "value")}
    weights["out"] = S((HEADS, WIDTH, MODEL), jnp.bfloat16)
    text = lowered(train_step, weights, S((BATCH, LENGTH, MODEL), jnp.bfloat16))
    (tmp_path / "flash.mlir").write_text(text)
    found = {op.kernel.name: op.kernel for op in kernels(load("f.mlir", content=text.encode())) if op.kernel}
    stated = as_stated(text, found, tmp_path)
    flash = replace(stated, program=str(tmp_path / "flash.mlir"), kernels=None)
    for strategy in ("data-parallel x megatron", None):
        one, other = (partition(replace(each, strategy=strategy)) for each in (flash, stated))
        assert seconds(one) == pytest.approx(seconds(other), rel=0.03)
        queries = next(op.results[0] for op in one.source.program.ops if op.kernel)
        assert strategy is None or one.evaluator.lowered(one.result.plan).shardings[queries] == ((0,), (1,), (), ())


def seconds(outcome: Outcome) -> float:
    return outcome.report.predicted.step_seconds


@pytest.mark.parametrize("kernel", [attention, partial(splash, 8, CAUSAL)])
def test_gradients_of_all_that_attention_reads_have_a_batch(kernel: Any) -> None:
    """Queries, keys and values look like weights there."""
    case = on_mesh(partial(gradient, kernel), *(S((4, 8, 256, 128), jnp.bfloat16),) * 3)
    groups = case.problem.dimensions.groups
    assert groups[case.group("arrays[0].0")].role == "batch"
    assert "data-parallel" in strategies(case.problem)
