"""Fused products taken apart: what is found, that numbers stay what they were, and what plans gain by it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brute_force import best_of_all
from jax import lax
from one_meaning import disagreements, plans_of
from programs import arg, evaluator_of, problem_of, round_mesh, source_of, source_of_text
from run_here import run_program
from small_programs import PROGRAMS, Small
from sweeps import sweep

from toast_cli import xla
from toast_cli.ask_xla.compile import virtual_devices
from toast_cli.ask_xla.confirm import Compiled, Compiler
from toast_cli.candidates.variants import SearchSpace, search_variants, variants_of
from toast_cli.cli.app import run
from toast_cli.pipeline import partition
from toast_cli.request import Request
from toast_cli.rewrite.fused_products import fused_parts, with_parts
from toast_cli.search.run import Settings, run_search
from toast_cli.tactics import parse_tactics, starting_plans

H, N = 16, 8


def gated(x: Any, both: Any, down: Any) -> Any:
    gate, value = jnp.split(x @ both, 2, axis=-1)
    return (jax.nn.sigmoid(gate) * value) @ down


def attention(x: Any, qkv: Any, out: Any) -> Any:
    q, k, v = (t.reshape(*x.shape[:2], 4, -1) for t in jnp.split(x @ qkv, 3, axis=-1))
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return x + jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape) @ out


def trained(forward: Callable[..., Any], x: Any, *weights: Any) -> Any:
    gradients = jax.grad(lambda w: jnp.sum(forward(x, *w) ** 2))(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]


def with_bias(x: Any, w: Any, b: Any) -> Any:
    """The bias is as wide as the product."""
    gate, value = jnp.split(x @ w + b, 2, axis=-1)
    return jnp.tanh(gate) * value


def grouped(x: Any, w: Any) -> Any:
    """Parts of different widths: four heads of queries, one of keys, one of values."""
    q, k, v = jnp.split(x @ w, [32, 40], axis=-1)
    return q.reshape(*q.shape[:-1], 4, 8) * k[..., None, :] + v[..., None, :]


def transposed(x: Any, w: Any) -> Any:
    """A weight as PyTorch keeps it, and a product that another layout is made of."""
    a, b = jnp.split((x @ w.T).astype(jnp.bfloat16).transpose(1, 0), 2, axis=0)
    return a * b


def put_together(x: Any, *weights: Any) -> Any:
    """Gates whose weights are arguments of their own, multiplied at once."""
    return jnp.split(x @ jnp.concatenate(weights, axis=1), len(weights), axis=1)


def ahead(x: Any, w: Any, u: Any) -> Any:
    """What the input contributes to the gates is computed for all steps at once, ahead of the loop."""

    def step(h: Any, at: Any) -> tuple[Any, Any]:
        z, r, n = jnp.split(at + h @ u, 3, axis=-1)
        h = jax.nn.sigmoid(z) * h + jnp.tanh(n * jax.nn.sigmoid(r))
        return h, h

    return lax.scan(step, jnp.zeros((x.shape[1], u.shape[0])), x @ w)[1]


def recomputed(x: Any, w: Any) -> Any:
    @jax.checkpoint
    def layer(x: Any, w: Any) -> Any:
        gate, value = jnp.split(jnp.sin(x @ w), 2, axis=-1)
        return gate * value

    return layer(layer(x, w), w)


def layers(x: Any, w: Any) -> Any:
    """A loop over layers, whose weights are slices of one array."""
    return lax.scan(lambda x, w: (with_bias(x, w, 0.5), None), x, w)[0]


def branching(x: Any, w: Any) -> Any:
    return lax.cond(x[0, 0] > 0.0, lambda: with_bias(x, w, 1.0), lambda: with_bias(x, w, 2.0))


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "gated": (gated, (arg(8, H), arg(H, 64), arg(32, H))),
    "attention": (attention, (arg(2, N, H), arg(H, 3 * H), arg(H, H))),
    "bias": (with_bias, (arg(8, H), arg(H, 64), arg(64))),
    "groups": (grouped, (arg(4, H), arg(H, 48))),
    "transposed": (transposed, (arg(8, H), arg(64, H))),
    "put together": (put_together, (arg(8, H), *(arg(H, 32),) * 3)),
    "ahead": (ahead, (arg(5, 4, H), arg(H, 3 * H), arg(H, 3 * H))),
    "recurrence": (PROGRAMS["recurrence"].run, (arg(5, 4, H), arg(4, H), arg(H, 4 * H), arg(H, 4 * H))),
    "recomputed": (recomputed, (arg(8, H), arg(H, 2 * H))),
    "layers": (layers, (arg(8, H), arg(3, H, 2 * H))),
    "branching": (branching, (arg(8, H), arg(H, 64))),
}


def results_of(source: Any) -> list[Any]:
    program, random = source.program, np.random.default_rng(0)
    inputs = [random.normal(size=program.values[a.value].shape).astype(np.float32) for a in program.arguments]
    shapes = [program.values[result.value].shape for result in program.results]
    return run_program(xla.write_bytecode(source.module), inputs, shapes, 1, shardy=True)


# Without those that return several arrays, or have branches, whose products are read forward only.
TRAINED = [name for name in CASES if name not in ("put together", "branching")]


@pytest.mark.parametrize(
    ("name", "direction"), [(name, "training" if name in TRAINED else "forward") for name in CASES]
)
def test_numbers_stay_what_they_were(name: str, direction: str) -> None:
    forward, shapes = CASES[name]
    source = source_of(partial(trained, forward) if direction == "training" else forward, *shapes)
    parted = with_parts(source)
    assert parted is not None and parted.program.parted
    assert fused_parts(parted.program) is None  # also in loops and branches
    assert [a.path for a in parted.program.arguments] == [a.path for a in source.program.arguments]
    assert "lie side by side in a weight" in parted.notices[-1]
    for before, after in zip(results_of(source), results_of(parted), strict=True):
        now, then = np.asarray(after, np.float32), np.asarray(before, np.float32)
        np.testing.assert_allclose(now, then, rtol=1e-5, atol=1e-6 * max(10.0, np.abs(then).max()))  # sums round


def rotary(x: Any, w: Any) -> Any:
    """Halves of heads, which are a dimension of their own."""
    y = (x @ w).reshape(x.shape[0], 4, -1)
    a, b = jnp.split(y, 2, axis=-1)
    return jnp.concatenate([-b, a], axis=-1)


UNFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "halves of heads": (rotary, (arg(8, H), arg(H, 64))),
    "halves of heads of the weight": (lambda x, w: jnp.split(jnp.einsum("bd,dhk->bhk", x, w), 2, axis=-1),
                                      (arg(8, H), arg(H, 4, 16))),
    "shifted by one": (lambda x, w: (x @ w)[:, 1:] - (x @ w)[:, :-1], (arg(8, H), arg(H, 64))),
    "every other": (lambda x, w: (x @ w)[:, ::2], (arg(8, H), arg(H, 64))),
    "more parts than width": (lambda x, w: jnp.split(x @ w, 32, axis=-1), (arg(8, H), arg(H, 64))),
    "no weight": (lambda x: jnp.split(jnp.sin(x) @ jnp.cos(x), 2, axis=-1), (arg(16, 16),)),
    "no product": (lambda x: jnp.split(jnp.sin(x), 2, axis=-1), (arg(16, 64),)),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFUSED)
def test_what_is_no_fused_product(name: str) -> None:
    run, shapes = UNFUSED[name]
    assert fused_parts(source_of(run, *shapes).program) is None


def test_a_program_that_states_shardings_is_read_as_it_is() -> None:
    text = """
    sdy.mesh @mesh = <["data"=4]>
    func.func @main(%x: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
                    %w: tensor<16x64xf32>) -> tensor<8x32xf32> {
      %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
        : (tensor<8x16xf32>, tensor<16x64xf32>) -> tensor<8x64xf32>
      %a = stablehlo.slice %y [0:8, 0:32] : (tensor<8x64xf32>) -> tensor<8x32xf32>
      return %a : tensor<8x32xf32>
    }"""
    for keep, variants in ((False, 2), (True, 1)):
        source = source_of_text(text, keep_shardings=keep)
        assert len(variants_of(source, Request("", ""))) == variants


SEARCHED = {
    "gathers at slices": (attention, (arg(2, 64, 128), arg(128, 384), arg(128, 128)), 2),
    "the batch is split at no cost": (attention, (arg(64, 64, 16), arg(16, 48), arg(16, 16)), 1),
}


@pytest.mark.parametrize("name", SEARCHED)
def test_the_rewritten_program_is_searched_where_slices_cost(name: str) -> None:
    forward, shapes, searched = SEARCHED[name]
    request, meshes = Request("", "", iterations=20), [round_mesh(data=4)]
    variants = variants_of(source_of(forward, *shapes), request)
    found = search_variants(variants, SearchSpace(request, meshes, parse_tactics()), lambda *_: None)
    assert (len(variants), len(found)) == (2, searched)


def test_a_weight_is_taken_apart_in_front_of_the_loop_that_reads_it() -> None:
    source = with_parts(source_of(*_flat("recurrence")))
    (loop,) = xla.walk_ops(source.module, "stablehlo.while")
    carried = [tuple(operand.type.shape) for operand in loop.operands]
    assert carried.count((H, 4, H)) == 2 and (H, 4 * H) not in carried


def _flat(name: str) -> tuple[Any, ...]:
    forward, shapes = CASES[name]
    return (forward, *shapes)


FASTER = {
    "gate and value": Small(gated, (arg(64, 64), arg(64, 1024), arg(512, 64))),
    "queries, keys and values": Small(attention, (arg(2, 64, 128), arg(128, 384), arg(128, 128))),
}


@pytest.mark.parametrize(
    ("name", "mesh"),
    sweep(product(FASTER, [{"data": 4}, {"data": 4, "model": 2}]), *((name, {"data": 4}) for name in FASTER)),
)
def test_no_sharding_of_the_program_as_it_is_written_is_better(name: str, mesh: dict[str, int]) -> None:
    """The search finds the best of all shardings of the program taken apart, which beats all of the one as written."""
    small = FASTER[name]
    source = source_of(small.run, *small.shapes)
    parted = with_parts(source)
    written = best_of_all(problem_of(source, round_mesh(**mesh)))
    evaluator = evaluator_of(parted, round_mesh(**mesh))
    best = best_of_all(evaluator.problem)
    found = run_search(evaluator, Settings(evaluations=500), starts=starting_plans(evaluator.problem))
    assert found.cost.step_seconds <= best.seconds * 1.01
    assert found.cost.step_seconds < written.least * 0.75


@pytest.mark.parametrize("name", ["recurrence", "ahead", "attention"])
def test_evaluator_lowering_and_report_say_the_same(name: str) -> None:
    """Gradients that a loop adds up have parts where they are made, and none where they are added up."""
    forward, shapes = CASES[name]
    source = with_parts(source_of(partial(trained, forward), *shapes))
    evaluator = evaluator_of(source, round_mesh(data=4, model=2))
    for plan in plans_of(evaluator.problem).values():
        assert disagreements(source, evaluator, plan) == []


def wide(folder: Path) -> str:
    """A training step that is faster with heads and widths split."""
    shapes = (arg(8, 64, 512), arg(512, 1536), arg(512, 512))
    lowered = jax.jit(partial(trained, attention)).lower(*shapes)
    path = folder / "program.mlir"
    path.write_text(lowered.as_text(debug_info=True))
    return str(path)


def test_what_is_written_is_equal_on_eight_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The chosen plan is of the program taken apart; arguments and results are the user's."""
    program, report, plan = wide(tmp_path), tmp_path / "report.json", tmp_path / "plan.json"
    options = ["partition", program, "--mesh", "h100-8", "--strategy", "data-parallel:data+megatron:model"]
    options += ["--mesh-shape", "data=2,model=4"]
    said = ["--json", str(report), "--save-plan", str(plan), "--verify", "cpu"]
    assert run([*options, *said]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "verdict of XLA: agreed" in told and "the parts that lie side by side in a weight" in told
    facts = json.loads(report.read_text())
    assert facts["program"]["parted"] is True
    assert [a["type"] for a in facts["arguments"]] == ["f32[8,64,512]", "f32[512,1536]", "f32[512,512]"]
    again = partition(Request(program, "h100-8", "data=2,model=4", plan=str(plan)))
    assert again.source.program.parted and len(again.result.plan) == len(facts["plan"]["decisions"])
    assert run(["explain", program, "--mesh", "h100-8", "--report", str(report), "--quiet"]) == 0


def test_the_program_as_it_is_written(tmp_path: Path) -> None:
    """On request, and where the other does not gain enough; a budget is shared."""
    program = wide(tmp_path)
    assert not partition(Request(program, "h100-8", iterations=50, as_written=True)).source.program.parted
    assert not partition(Request(program, "h100-8", strategy="data-parallel")).source.program.parted
    assert partition(Request(program, "h100-8", iterations=1)).result.evaluations <= 1
    assert partition(Request(program, "h100-8", iterations=51)).result.evaluations <= 51


@dataclass(frozen=True)
class Slow(Compiler):
    """A compiler to which all programs take as long."""

    seconds: float = 1.0

    def judge(self, content: bytes, timeout_seconds: float) -> Compiled:
        return Compiled("compiled", "", self.seconds, 0.0, 0.0, 10)


@pytest.mark.parametrize(("seconds", "parted"), [((1.0, 2.0), True), ((2.0, 1.0), False)])
def test_the_compiler_chooses_between_variants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, float], parted: bool
) -> None:
    """The program taken apart is predicted to be faster; both are compiled, and the compiler's word counts."""
    monkeypatch.setenv("TOAST_CACHE", "off")
    answers = list(seconds)
    monkeypatch.setattr(
        "toast_cli.candidates.ask_compiler.compiler_for",
        lambda *_: lambda mesh: Slow(mesh, virtual_devices(8), seconds=answers.pop(0)),
    )
    strategy = "data-parallel:data+megatron:model"
    outcome = partition(Request(wide(tmp_path), "h100-8", "data=2,model=4", strategy=strategy, confirm=2))
    assert outcome.source.program.parted is parted and answers == []
    facts = outcome.report.confirmation
    assert facts is not None and facts.chosen == ("search" if parted else "search, as written")
    assert [row.name for row in facts.plans][-1] == "search, as written"
