"""Every pass of the compiler model can be switched off, and then the prediction is another one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec
from programs import PLAIN, Case, arg, evaluator_of, mesh_of, round_mesh, source_of, source_of_text
from ragged_programs import program
from test_decoding_memory import BATCH, FEATURES, LAYERS, ORDERS, for_all_positions, scanned_over, step

from toast_cli.hardware import Mesh, chip_names, find_preset
from toast_cli.plan.decisions import Plan
from toast_cli.price.cost import Attained
from toast_cli.price.profile import PASSES, CompilerProfile
from toast_cli.price.profiles import find_profile, profiles_of
from toast_cli.program.ops import REDUCE

ROOT = Path(__file__).resolve().parents[1]
BF16 = jnp.bfloat16
TILED = replace(PLAIN, passes=PLAIN.passes | {"narrowing", "tiled-reduce-scatter", "small-gathers"})


def widening(x: Any, w: Any) -> Any:
    """The gradient of a transposed convolution's kernel."""

    def made(w: Any) -> Any:
        return lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    return jax.grad(lambda w: jnp.sum(jnp.tanh(made(w))))(w)


def reused(x: Any, v: Any, w: Any) -> Any:
    y = x * 2.0
    return y @ v, y.T @ w


def queried(x: Any, v: Any, w: Any, g: Any) -> Any:
    """Queries that products alone read, and a gradient of theirs whose sum is a bias' gradient."""
    queries = x @ v
    gradient = g @ queries
    return queries @ w, w @ gradient, gradient.sum(0)


def looked_up(x: Any, w: Any, labels: Any) -> Any:
    """The gradient of a classifier's loss."""

    def loss(w: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels, axis=-1).sum()

    return jax.grad(loss)(w)


def recurrent(x: Any, w: Any) -> Any:
    return lax.fori_loop(0, 64, lambda _, h: jnp.tanh(h @ w), x)


def widened(x: Any, w: Any) -> Any:
    y = (x @ w).astype(jnp.float32)
    return y.sum(0), jnp.sort(y, 1)


def convolved(x: Any, v: Any, w: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    return layer(jnp.tanh(layer(x, v)), w)


def updated(x: Any, v: Any, w: Any) -> Any:
    """Two layers and their update; the gradients are there long before the program uses them."""
    loss = jax.grad(lambda v, w: jnp.sum(jnp.tanh(x @ v) @ w), argnums=(0, 1))
    first, second = loss(v, w)
    return v - first, w - second


def looping(x: Any, v: Any, w: Any) -> Any:
    return lax.fori_loop(0, 3, lambda _, c: jnp.tanh(jnp.tanh(c @ v) @ w), x)


def decoding(cache: Any, weights: Any, x: Any) -> Any:
    return for_all_positions(scanned_over, partial(step, "btkh", 1), cache, weights, x)


def stacked(stack: Any) -> Any:
    def outer(_: Any, stack: Any) -> Any:
        return lax.scan(lambda c, x: (c, jnp.sin(x) * 2.0), 0.0, stack)[1]

    return lax.fori_loop(0, 3, outer, stack)


def projected(x: Any, w: Any, v: Any) -> Any:
    """A product of few rows before a loop, which would keep its result meanwhile."""
    looped = jnp.sort(x @ w)
    product = x[:8].T @ jnp.sort(x[:8] @ v, 0)
    return lax.fori_loop(0, 5, lambda _, c: jnp.sort(jnp.sort(c @ looped, 1), 0) @ looped.T, x), product


def attended(q: Any, k: Any, v: Any) -> Any:
    """Causal attention with the softmax in f32."""
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k, preferred_element_type=jnp.float32) * 0.125
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30))
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights.astype(BF16), v)


def gated(x: Any, g: Any) -> Any:
    """Pieces of one gradient, each added to a carry of its own."""

    def step(trip: Any, carried: Any) -> Any:
        both = x.T @ jnp.sin(g * trip)
        return carried[0] + both[:, :8], carried[1] + both[:, 8:]

    return lax.fori_loop(0, 5, step, (jnp.zeros((16, 8)), jnp.zeros((16, 8))))


def finished_twice(x: Any, w: Any) -> Any:
    y = x @ w
    return jnp.tanh(y), y * 2.0


def picked(x: Any, w: Any, labels: Any) -> Any:
    """A loss in f32 of logits in bf16."""
    logits = (x @ w).astype(jnp.float32)
    return logits.sum(1) - jnp.take_along_axis(logits, labels, 1)[:, 0]


def twice_scattered(x: Any, ends: Any) -> Any:
    first = jnp.zeros((2048, 16)).at[ends].add(x[ends])
    return jnp.zeros((2048, 16)).at[ends].add((x @ first.T @ first)[ends])


def exchanged() -> str:
    """A ragged all-to-all, as JAX lowers it for GPUs."""

    def send(x: Any, sizes: Any) -> Any:
        return lax.ragged_all_to_all(x, jnp.zeros_like(x), sizes, sizes, sizes, sizes, axis_name="data")

    over, mesh = PartitionSpec("data"), AbstractMesh((4, 2), ("data", "model"))
    run = jax.shard_map(send, mesh=mesh, in_specs=(over, over), out_specs=over)
    traced = jax.jit(run).trace(arg(4 * 65536, 128), arg(16, dtype=jnp.int32))
    return str(traced.lower(lowering_platforms=("cuda",)).as_text())


S, SQUARE = arg(16, 16), arg(64, 64)
EDGES = arg(4096, dtype=jnp.int32)
IMAGES = (arg(4, 32, 64, 128, dtype=BF16), *(arg(3, 3, 128, 128, dtype=BF16) for _ in range(2)))
CACHE = (arg(LAYERS, *ORDERS["btkh"]), arg(LAYERS, FEATURES, FEATURES), arg(BATCH, FEATURES))
PIECES = replace(
    PLAIN,
    passes=PLAIN.passes | {"product-operands", "one-hot-scatters", "moved-operands"} | {"sliced-products"},
)
HEADS = (arg(2, 4096, 2, 2, 64, dtype=BF16), *(arg(2, 4096, 2, 64, dtype=BF16) for _ in range(2)))
RAGGED = replace(PLAIN, passes=PLAIN.passes | {"ragged-gradients"}, attained=Attained(matrix=0.001))
GROUPED = replace(PLAIN, passes=PLAIN.passes | {"ragged-kernels"}, attained=Attained(matrix=2e-3, grouped=1e-3))
HOLDING = replace(PLAIN, passes=PLAIN.passes | {"held-results"})
MOVING = replace(PLAIN, passes=PLAIN.passes | {"reduction-motion"})

# Pass -> a program where it matters, its arguments, the decisions (dimension, axis and perhaps where alone), what is
# predicted otherwise without the pass, and the machine. What: "more", "less" or "other" peak, compute or communication,
# or other collectives.
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str, str, str | Mesh | CompilerProfile]] = {
    "narrowing": (lambda x, v, w: (x @ v, x @ w), (arg(100, 200), arg(200, 320), arg(200, 320)),
                  "v.1:data w.1:data x.1:data", "more communication", TILED),
    "small-gathers": (lambda b: jnp.sort(b * 2.0), (arg(256),), "b.0:data", "less communication", TILED),
    "slice-gathers": (lambda w: jnp.sort(w * 2.0, 0), (arg(640, 128),), "w.0:data w.0:model", "other communication",
                      "v6e-64"),
    "tiled-reduce-scatter": (lambda x, w: x @ w, (arg(32, 200), arg(200, 64)), "x.1:data x.0:data",
                             "less communication", TILED),
    "reduction-combining": (updated, (arg(64, 32), arg(32, 16), arg(16, 8)), "x.0:data", "more communication", "v4-32"),
    "reduction-motion": (gated, (arg(64, 16), arg(64, 16)), "x.0:data", "more communication", MOVING),
    "overlap": (updated, (arg(64, 32), arg(32, 16), arg(16, 8)), "x.0:data", "other collectives", PLAIN),
    "lookup-rows": (lambda x, i: jnp.zeros((40_000, 16)).at[i].add(jnp.tanh(x)),
                    (arg(200_000, 16), arg(200_000, dtype=jnp.int32)), "", "less peak", "v5e-16"),
    "lookup-steps": (lambda x, i: x[i], (arg(64, 16), EDGES), "", "less compute", "v5e-16"),
    "fusion": (lambda x: jnp.tanh(jnp.sin(x)).sum(), (SQUARE,), "", "more peak", PLAIN),
    "output-fusion": (lambda x, v: jnp.tanh(x @ v), (SQUARE,) * 2, "", "more compute", PLAIN),
    "multi-output-fusion": (finished_twice, (SQUARE,) * 2, "", "more compute", PLAIN),
    "reduction-fusion": (lambda x: ((y := jnp.sort(x, 1) * 2.0), y.sum(1)), (SQUARE,), "", "more compute", PLAIN),
    "unsliced-fusions": (lambda x, v, w: ((y := x * x) @ v, y.T @ w), (SQUARE, arg(64, 32), arg(64, 32)),
                         "x.0:data:v.1", "less compute", "v5e-16"),
    "recomputation": (reused, (SQUARE,) * 3, "", "more peak", PLAIN),
    "shared-exponentials": (lambda x, v, w: ((y := jnp.exp(x)) @ v, y @ w), (SQUARE,) * 3, "", "less peak", PLAIN),
    "masked-softmaxes": (attended, HEADS, "", "less peak", "v6e-64"),
    "product-rows": (attended, (arg(2, 1024, 2, 1, 64, dtype=BF16), *(arg(2, 1024, 2, 64, dtype=BF16),) * 2), "",
                     "more compute", "v6e-64"),
    "polynomials": (lax.erf, (SQUARE,), "", "less compute", replace(PLAIN, attained=Attained(vector=0.01))),
    "narrow-stores": (widened, (arg(64, 64, dtype=BF16),) * 2, "", "more peak", PLAIN),
    "product-operands": (queried, (SQUARE,) * 4, "", "more peak", PIECES),
    "one-hot-scatters": (looked_up, (arg(64, 16), arg(16, 1024), arg(64, 1, dtype=jnp.int32)), "", "more peak", PIECES),
    "sliced-products": (lambda x, w: (x @ w)[-1:], (arg(64, 16), arg(16, 1024)), "", "more peak", PIECES),
    "moved-operands": (lambda x, w: jnp.pad(jnp.sin(x), ((0, 8), (0, 0))) @ w, (SQUARE,) * 2, "", "less peak", PIECES),
    "unfilled-stacks": (lambda x: lax.scan(lambda c, y: (c, jnp.sort(y)), 0.0, x)[1], (arg(8, 1024, 1024),), "",
                        "more compute", "v5e-16"),
    "tiling": (lambda x: jnp.sort(x, 0).sum(0), (arg(100, 100),), "", "less peak", "v4-32"),
    "tile-dimensions": (lambda q, k: jnp.sort(jnp.einsum("bhsd,bhtd->bhst", q, k), 2).sum(1),
                        (arg(128, 8, 10, 64), arg(128, 8, 10, 64)), "", "less compute", "v4-32"),
    "space-to-batch": (convolved, IMAGES, "", "less peak", "v3-32"),
    "convolution-tiles": (lambda x, w: lax.conv(x, w, (1, 1), "SAME"), (arg(16, 64, 32, 32), arg(64, 64, 3, 3)), "",
                          "less compute", "v5e-16"),
    "swapped-convolutions": (widening, (arg(16, 32, 32, 64), arg(3, 3, 64, 32)), "", "less compute", "v5e-16"),
    "fused-lookups": (lambda x, i: jnp.zeros((64, 16)).at[i].add(jnp.tanh(x[i])), (arg(64, 16), EDGES), "",
                      "more peak", "h100-8"),
    "scatter-starts": (twice_scattered, (arg(64, 16), EDGES), "", "less peak", "h100-8"),
    "library-convolutions": (lambda x, w: lax.conv(jnp.sin(x), w, (1, 1), "SAME").sum(),
                             (arg(8, 64, 64, 64), arg(64, 64, 3, 3)), "", "less peak", "h100-8"),
    "library-products": (lambda x, v: jnp.tanh(x @ v), (SQUARE,) * 2, "", "less compute", "h100-8"),
    "normalization-fusion": (jax.nn.softmax, (arg(1024, 1024),), "", "more compute", "h100-8"),
    "atomic-scatters": (lambda x, i, y: x.at[i].add(y), (arg(64, 16), EDGES, arg(4096, 16)), "", "less compute",
                        "h100-8"),
    "masked-groups": (program("rows"), (), "", "less compute", "h100-8"),
    "convolved-arguments": (lambda x, w: lax.conv(x, w, (16, 16), "VALID").sum(),
                            (arg(8, 3, 1024, 1024), arg(64, 3, 16, 16)), "", "less peak", "v4-32"),
    "vector-products": (lambda q, k: jnp.einsum("bhd,bthd->bht", q, k), (arg(16, 16, 128), arg(16, 1024, 16, 128)), "",
                        "less compute", "v5e-16"),
    "gathered-pieces": (lambda x, w: x @ w, (arg(64, 4096), arg(4096, 36 * 1023)), "x.0:data w.1:data", "less peak",
                        "v5e-16"),
    "loop-copies": (decoding, CACHE, "", "less peak", PLAIN),
    "scan-unification": (stacked, (arg(8, 64, 1024),), "", "more peak", PLAIN),
    "bf16-widening": (lambda x, v: (x @ v) @ v, (arg(64, 64, dtype=BF16),) * 2, "", "less peak", "v100-8"),
    "early-results": (updated, (arg(64, 256), arg(256, 512), arg(512, 256)), "", "other peak", PLAIN),
    "held-results": (lambda x, v: v @ (x @ x @ x @ x)[:16, :16], (SQUARE, S), "", "less peak", HOLDING),
    "loops-first": (projected, (SQUARE, arg(64, 2048), arg(64, 512)), "", "more peak", PLAIN),
    "loop-gathers-first": (looping, (arg(4096, 8192), arg(8192, 8192), arg(8192, 8192)), "x.0:data w.0:data v.1:data",
                           "less peak", "v5e-16"),
    "common-subexpressions": (lambda x, v: (x @ v, x @ v), (SQUARE,) * 2, "", "more compute", PLAIN),
    "queued-gathers": (lambda x, a, v, w: x @ a @ v @ w, (*[arg(4096, 4096)] * 2, arg(4096, 512), arg(512, 4096)),
                       "x.0:data v.1:data w.1:data", "less step", "v5e-16"),
    "in-place-updates": (lambda c, x: lax.dynamic_update_slice(c, x, (0, 0)), (SQUARE, S), "", "more peak", PLAIN),
    "memory-space-assignment": (lambda x: x @ x @ x @ x, (S,), "", "more peak", "v4-32"),
    "on-chip-reuse": (lambda x, v, w: (x @ v) @ w, (arg(16, 4096), arg(4096, 4096), arg(4096, 16)), "", "more compute",
                      "v4-32"),
    "fourier-transforms": (lambda x: jnp.fft.rfft(x).real, (arg(1024, 1024),), "", "less compute", "v5e-16"),
    "ragged-blocks": (exchanged(), (), "", "less communication", "h100-8"),
    "ragged-kernels": (program("rows"), (), "", "less compute", GROUPED),
    "ragged-gradients": (program("contracted"), (), "", "less compute", RAGGED),
    "loop-residency": (recurrent, (arg(16, 1024), arg(1024, 1024)), "", "more compute", "v5e-16"),
    "scalar-unit": (lambda x: jnp.sin(x) * 2.0, (arg(),), "", "more compute", "v5e-16"),
    "accumulator-windows": (lambda w, x: lax.scan(lambda total, x: (total + x.T @ x, None), w, x)[0],
                            (arg(2560, 2560), arg(4, 16, 2560)), "", "less compute", "v5e-16"),
    "temporary-growth": (lambda x, v: (x @ v) @ v, (SQUARE,) * 2, "", "less peak", "h100-8"),
}  # fmt: skip


def case_on(machine: str | Mesh | CompilerProfile, source: Any, without: tuple[str, ...]) -> Case:
    """The program on a machine, compiled with some passes switched off; a profile stands for round figures and that
    compiler."""
    mesh = round_mesh(data=4, model=2) if isinstance(machine, CompilerProfile) else mesh_of(machine)
    profile = machine if isinstance(machine, CompilerProfile) else find_profile(mesh.chip)
    return Case(source, evaluator_of(source, mesh, profile=profile.without(*without)))


def plan_of(case: Case, decisions: str) -> Plan:
    said = [decision.split(":") for decision in decisions.split()]
    return tuple(case.shard(place, axis, only=only[0] if only else "") for place, axis, *only in said)


def told(case: Case, plan: Plan) -> tuple[dict[str, float], list[Any]]:
    cost = case.evaluator.exact_cost(plan)
    uses = [(use.kind, use.axes, use.bytes, use.waited_for) for use in case.evaluator.collectives(plan)]
    figures = {"peak": cost.peak_bytes, "compute": cost.compute_seconds, "communication": cost.communication_seconds}
    figures["step"] = cost.step_seconds
    return figures, sorted(uses)


def test_every_pass_has_a_case() -> None:
    assert sorted(CASES) == sorted(PASSES)


@pytest.mark.parametrize("name", CASES)
def test_without_a_pass_the_prediction_is_another(name: str) -> None:
    run, shapes, decisions, change, machine = CASES[name]
    donated = (0,) if name in ("loop-copies", "scan-unification", "in-place-updates") else ()
    source = source_of_text(run) if isinstance(run, str) else source_of(run, *shapes, donate=donated)
    case = case_on(machine, source, ())
    plan = plan_of(case, decisions)
    (figures, uses), (other, other_uses) = told(case, plan), told(case_on(machine, source, (name,)), plan)
    how, what = change.split()
    if what == "collectives":
        assert uses != other_uses
    else:
        assert other[what] != figures[what]
        assert how == "other" or (other[what] > figures[what]) is (how == "more")


@pytest.mark.parametrize(
    ("rows", "dtype", "machine", "read"),
    [
        (512, BF16, "v6e-8", 0), (2560, BF16, "tpu7x-8", 0), (256, BF16, "v6e-8", 1), (2688, BF16, "v6e-8", 1),
        (512, jnp.float32, "v6e-8", 1), (512, BF16, "v5e-8", 1),
    ],
)  # fmt: skip
def test_rows_of_a_product_that_its_kernel_reduces_are_not_read_again(
    rows: int, dtype: Any, machine: str, read: int
) -> None:
    """The maximum and the sum of a softmax, in attention of bf16 on v6e and tpu7x."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bqd,bkd->bqk", q, k).astype(jnp.float32)
        return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores).astype(dtype), v)

    case = case_on(machine, source_of(attend, *(arg(2, rows, 64, dtype=dtype),) * 3), ())
    scores = 2 * rows * rows * 2  # bytes, in bf16
    assert sum(use.name == REDUCE and use.bytes >= scores for use in case.evaluator.kernels(())) == read


def all_profiles() -> list[CompilerProfile]:
    return [profile for chip in ("", *chip_names()) for profile in profiles_of(chip)]


def test_every_chip_has_a_profile_and_every_profile_only_passes_that_there_are() -> None:
    known = frozenset(PASSES)
    assert all(profiles_of(chip) for chip in chip_names())
    assert all(profile.passes <= known for profile in all_profiles())
    assert known == frozenset().union(*(profile.passes for profile in all_profiles()))


@pytest.mark.parametrize("profile", all_profiles(), ids=lambda profile: f"{profile.compiler} {profile.chip}")
def test_every_figure_that_was_measured_says_where(profile: CompilerProfile) -> None:
    plain = CompilerProfile("", "", "", frozenset())
    named = {"compiler", "version", "chip", "sources"}
    measured = {f.name for f in fields(profile) if getattr(profile, f.name) != getattr(plain, f.name)} - named
    assert measured <= set(profile.sources)
    assert all(profile.sources.values())
    for script in re.findall(r"`python (benchmarks/\w+\.py)", " ".join(profile.sources.values())):
        assert (ROOT / script).exists(), script


def test_the_code_asks_for_no_other_passes_and_for_all() -> None:
    files = [*(ROOT / "toast_cli").rglob("*.py")]
    asked = {name for file in files for name in re.findall(r'"([\w-]+)" (?:not )?in [\w.]*passes', file.read_text())}
    assert asked == set(PASSES)


def test_a_pass_that_a_compiler_does_not_have_cannot_be_switched_off() -> None:
    with pytest.raises(ValueError, match=r"XLA has no pass tiling; it has .*fusion"):
        PLAIN.without("tiling")


def test_profiles_are_found_by_chip() -> None:
    chip = find_preset("v4").chip
    newest = find_profile(chip)
    assert find_profile(replace(chip, name="mine")) is newest
    assert find_profile(replace(chip, preset="")) is PLAIN
