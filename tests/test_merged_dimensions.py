"""Merged dimensions: 5 steps of a batch of 16 in one dimension of 80, which 8 devices split along the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from programs import arg, source_of

from toast_cli import xla
from toast_cli.cli.app import run
from toast_cli.dimensions import analyse
from toast_cli.dimensions.merged import reorderable, set_apart
from toast_cli.hardware import load_spec
from toast_cli.pipeline import partition
from toast_cli.request import Request
from toast_cli.rewrite.variants import variants_of

T, B, D, H = 5, 16, 24, 40
MESH = "h100-8"
W, U = arg(D, H), arg(H, H)


def perceptron(x: Any, w: Any, u: Any) -> Any:
    return jnp.tanh(jnp.tanh(x @ w) @ u)


def trained(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(weights: Any, *data: Any) -> Any:
        value, gradients = jax.value_and_grad(lambda weights: loss(weights, *data))(weights)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    return step


def steps_apart(y: Any) -> Any:
    """A loss in which the first step has no part."""
    return jnp.mean(y.reshape(T, B, -1)[1:] ** 2)


def plain(weights: Any, x: Any) -> Any:
    return steps_apart(perceptron(x.reshape(T * B, D), *weights))


def three(weights: Any, x: Any) -> Any:
    return jnp.mean(perceptron(x.reshape(T * B * 3, D), *weights).reshape(T, B, 3, H)[1:] ** 2)


def in_scan(weights: Any, x: Any) -> Any:
    return lax.scan(lambda c, x: (c + plain(weights, x), None), 0.0, x)[0]


def closed_over(weights: Any, x: Any) -> Any:
    """A loop carries merged rows, and reads others in each step."""
    w, u = weights
    rows = x.reshape(T * B, D) @ w
    return steps_apart(lax.scan(lambda h, _: (jnp.tanh(h @ u + rows), None), jnp.zeros((T * B, H)), None, length=3)[0])


def recurrent(weights: Any, x: Any, actions: Any, state: Any) -> Any:
    """Torso, core and head of an agent with memory: the core takes steps, the others rows."""
    w, u, v, out = weights
    features = jnp.tanh(x.reshape(T * B, D) @ w).reshape(T, B, H)

    def cell(c: Any, f: Any) -> Any:
        c = jnp.tanh(f @ u + c @ v)
        return c, c

    warm, _ = lax.scan(cell, state, features[:2])
    _, states = lax.scan(cell, lax.stop_gradient(warm), features[2:])
    q = (states.reshape((T - 2) * B, H) @ out).reshape(T - 2, B, 7)
    taken = jnp.take_along_axis(q, actions[2:, :, None], -1)[..., 0]
    return jnp.mean((taken[:-1] - lax.stop_gradient(q[1:].max(-1))) ** 2)


def unrolled(weights: Any, x: Any, actions: Any) -> Any:
    """A model that every row is unrolled with, for three steps."""
    w, u, v = weights

    def step(state: Any, action: Any) -> Any:
        state = jnp.tanh(state @ u + jax.nn.one_hot(action, H))
        return state, state @ v

    _, out = lax.scan(step, jnp.tanh(x.reshape(T * B, D) @ w), actions.reshape(T * B, 3).T)
    return jnp.mean(out.reshape(3, T, B, 7)[:, 1:] ** 2)


def images(weights: Any, x: Any) -> Any:
    kernel, matrix = weights
    y = x.reshape(T * B, 8, 8, 3).astype(jnp.float32) / 255.0
    y = lax.conv_general_dilated(y, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    y = lax.reduce_window(jax.nn.relu(y), -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    return steps_apart(y.reshape(T * B, -1) @ matrix)


def with_noise(weights: Any, key: Any, x: Any) -> Any:
    w, u = weights
    h = jnp.tanh(x.reshape(T * B, D) @ w)
    kept = jax.random.bernoulli(jax.random.wrap_key_data(key), 0.5, h.shape)
    return steps_apart(jnp.where(kept, h, 0.0) @ u)


def counted(weights: Any, x: Any) -> Any:
    """Rows that are told apart by their number, and by what a constant says."""
    numbers = jnp.arange(T * B)[:, None] + np.random.default_rng(0).normal(size=(T * B, 1)).astype(np.float32)
    return steps_apart(perceptron(x.reshape(T * B, D), *weights) * numbers)


def permuted(weights: Any, x: Any, order: Any) -> Any:
    return jnp.mean(jnp.sin(perceptron(x.reshape(T * B, D), *weights))[order][: B // 2] ** 2)


def summed_up(weights: Any, x: Any) -> Any:
    return steps_apart(jnp.cumsum(perceptron(x.reshape(T * B, D), *weights), axis=0))


def shifted(weights: Any, x: Any) -> Any:
    """Each row beside the one in front of it."""
    h = perceptron(x.reshape(T * B, D), *weights)
    return steps_apart(h * jnp.pad(h, ((1, 0), (0, 0)))[:-1])


def smoothed(weights: Any, x: Any) -> Any:
    """A convolution along the rows."""
    h = perceptron(x.reshape(T * B, D), *weights)
    return steps_apart(lax.conv_general_dilated(h.T[:, None], jnp.ones((1, 1, 3)), (1,), "SAME")[:, 0].T)


def contrasted(weights: Any, x: Any) -> Any:
    h = perceptron(x.reshape(T * B, D), *weights)
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(h @ h.T)))


def branching(weights: Any, x: Any) -> Any:
    rows = x.reshape(T * B, D)
    return steps_apart(
        lax.cond(x[0, 0, 0] > 0.0, lambda: perceptron(rows, *weights), lambda: jnp.sin(rows @ weights[0]))
    )


def embedded(weights: Any, words: Any) -> Any:
    table, u = weights
    return steps_apart(jnp.tanh(table[words.reshape(T * B)] @ u))


def ensemble(weights: Any, x: Any) -> Any:
    return jnp.mean(jax.vmap(perceptron)(x.reshape(2, T * B, D), *weights).reshape(2, T, B, H)[:, 1:] ** 2)


def normalised(weights: Any, x: Any) -> Any:
    w, u = weights
    h = x.reshape(T * B, D) @ w
    return steps_apart((h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-3) @ u)


def weighted(weights: Any, x: Any, rows: Any) -> Any:
    """An argument has the merged dimension."""
    return jnp.mean(rows[:, None] * perceptron(x.reshape(T * B, D), *weights))


X, INDEX = arg(T, B, D), arg(T * B, dtype=jnp.int32)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "plain": (trained(plain), ((W, U), X)),
    "three": (trained(three), ((W, U), arg(T, B, 3, D))),
    "in scan": (trained(in_scan), ((W, U), arg(4, T, B, D))),
    "closed over": (trained(closed_over), ((W, U), X)),
    "recurrent": (trained(recurrent), ((W, U, U, arg(H, 7)), X, arg(T, B, dtype=jnp.int32), arg(B, H))),
    "unrolled": (trained(unrolled), ((W, U, arg(H, 7)), X, arg(T, B, 3, dtype=jnp.int32))),
    "images": (trained(images), ((arg(3, 3, 3, 8), arg(128, 16)), arg(T, B, 8, 8, 3, dtype=jnp.uint8))),
    "noise": (trained(with_noise), ((W, U), arg(2, dtype=jnp.uint32), X)),
    "counted": (trained(counted), ((W, U), X)),
    "permuted": (trained(permuted), ((W, U), X, INDEX)),
    "summed up": (trained(summed_up), ((W, U), X)),
    "shifted": (trained(shifted), ((W, U), X)),
    "smoothed": (trained(smoothed), ((W, U), X)),
    "contrasted": (trained(contrasted), ((W, U), X)),
    "branching": (trained(branching), ((W, U), X)),
    "embedded": (trained(embedded), ((arg(100, H), U), arg(T, B, dtype=jnp.int32))),
    "ensemble": (trained(ensemble), ((arg(2, D, H), arg(2, H, H)), arg(2, T, B, D))),
    "normalised": (trained(normalised), ((W, U), X)),
    "weighted": (trained(weighted), ((W, U), X, arg(T * B))),
    "largest": (lambda weights, x: jnp.argmax(perceptron(x.reshape(T * B, D), *weights).max(-1)), ((W, U), X)),
}


def results_of(source: Any) -> list[Any]:
    program, random = source.program, np.random.default_rng(0)
    inputs = []
    for argument in program.arguments:
        value = program.values[argument.value]
        whole = value.dtype[0] in "iu"
        inputs.append(random.integers(0, 7, value.shape) if whole else random.normal(size=value.shape))
        inputs[-1] = inputs[-1].astype({"i32": "int32", "ui8": "uint8", "ui32": "uint32"}.get(value.dtype, "float32"))
    shapes = [program.values[result.value].shape for result in program.results]
    return xla.run_program(xla.write_bytecode(source.module), inputs, shapes, 1, shardy=True)


def both_variants(run: Callable[..., Any], *shapes: Any) -> tuple[Any, Any]:
    source = source_of(run, *shapes)
    variants = variants_of(source, Request("-", MESH), [load_spec(MESH).mesh({"data": 8})])
    assert len(variants) == 2 and variants[1][0].program.parted
    assert "merged in another order" in variants[1][0].notices[-1]
    return variants[0][0], variants[1][0]


@pytest.mark.parametrize("name", CASES)
def test_numbers_stay_what_they_were(name: str) -> None:
    run, shapes = CASES[name]
    source, reordered = both_variants(run, *shapes)
    for before, after in zip(results_of(source), results_of(reordered), strict=True):
        np.testing.assert_allclose(after, before, rtol=2e-4, atol=1e-5 * max(1.0, np.abs(before).max()))


def saved(folder: Path, run: Callable[..., Any], *shapes: Any) -> str:
    path = folder / "program.mlir"
    path.write_text(jax.jit(run).lower(*shapes).as_text(debug_info=True))
    return str(path)


@pytest.mark.parametrize("name", ["plain", "three", "in scan", "recurrent", "unrolled", "images", "noise", "ensemble"])
def test_devices_exchange_nothing_but_gradients(tmp_path: Path, name: str) -> None:
    """As in a program whose batch comes first."""
    run, shapes = CASES[name]
    outcome = partition(Request(saved(tmp_path, run, *shapes), MESH, "data=8", strategy="data-parallel"))
    assert outcome.source.program.parted
    assert {collective.kind for collective in outcome.report.collectives} == {"all-reduce"}


def rows_given(weights: Any, x: Any) -> Any:
    """Inputs come merged, and what the torso makes of them is less."""
    return steps_apart(jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]))


GIVEN = (trained(rows_given), ((arg(512, H), arg(H, 8)), arg(T * B, 512)))


@pytest.mark.parametrize("name", ["recurrent", "branching", "given"])
def test_what_is_written_is_equal_on_eight_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run, shapes = GIVEN if name == "given" else CASES[name]
    program = saved(tmp_path, run, *shapes)
    options = ["--mesh", MESH, "--mesh-shape", "data=8", "--strategy", "data-parallel", "--verify", "cpu"]
    assert run_toast("partition", program, *options) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "verdict of XLA: agreed" in told and "100.0 % of the" in told
    assert ("merged in another order, [5, 16] as [16, 5]" in told) == (name != "given")


def run_toast(*arguments: str) -> int:
    return run(list(arguments))


@pytest.mark.parametrize(
    "option", [{"strategy": "data-parallel"}, {"pins": ("data/0=data",), "iterations": 50}], ids=str
)
def test_inputs_that_come_merged_are_split_as_they_are(tmp_path: Path, option: dict[str, Any]) -> None:
    """Data-parallel, the torso's rows are split without regard to steps and batch, and gathered where they are taken
    apart."""
    run, shapes = GIVEN
    outcome = partition(Request(saved(tmp_path, run, *shapes), MESH, "data=8", **option))
    assert not outcome.source.program.parted
    assert [list(axes) for axes in outcome.report.arguments[-1].sharding] == [["data"], []]
    gathered = [one.bytes for one in outcome.report.collectives if one.kind == "all-gather"]
    assert "pins" in option or (gathered and max(gathered) == T * B * 8 * 4)


def test_results_that_leave_merged(tmp_path: Path) -> None:
    source = source_of(lambda weights, x: perceptron(x.reshape(T * B, D), *weights), (W, U), X)
    dimensions = analyse(source.program)
    assert reorderable(source.program, dimensions, [(8,)]) == []
    apart = set_apart(source.program, dimensions, [(8,)])
    assert T * B in analyse(apart).class_sizes and T * B not in dimensions.class_sizes
    assert set_apart(source.program, dimensions, [(5,)]) is source.program


def scaled_groups(weights: Any, x: Any) -> Any:
    """Weights in fewer bits, whose scales are those of 20 groups of 6 rows; the product sums over all rows."""
    numbers, scales, first = weights
    whole = (numbers.astype(jnp.float32).reshape(20, 6, H) * scales[:, None]).reshape(120, H)
    return jnp.tanh(x @ first) @ whole


@pytest.mark.parametrize("form", ["stablehlo", "spmd"])
def test_groups_that_shards_cross_are_made_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    shapes = (arg(120, H, dtype=jnp.int8), arg(20, H), arg(D, 120)), arg(1, D)
    program = saved(tmp_path, scaled_groups, *shapes)
    options = ["--mesh", MESH, "--mesh-shape", "data=8", "--pin", "*2=None,data", "--format", form, "--verify", "cpu"]
    assert run_toast("partition", program, *options, "--iterations", "50") == 0
    assert "verdict of XLA: agreed" in " ".join(capsys.readouterr().out.split())


def heads(weights: Any, x: Any) -> Any:
    """Five heads of a width of 16."""
    q, k, v = ((x @ w).reshape(*x.shape[:2], T, B) for w in weights[:3])
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.mean((jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape) @ weights[3]) ** 2)


@pytest.mark.parametrize(
    ("run", "shapes", "mesh", "first"),
    [
        (plain, ((W, U), X), (8,), [1]),
        (plain, ((W, U), X), (5,), []),
        (plain, ((W, U), X), (2, 2), [1]),
        (heads, ((arg(80, 80),) * 4, arg(8, 4, 80)), (8,), []),
        (lambda w, x: jnp.mean(perceptron(x.reshape(64, D), *w).reshape(4, 16, H)[1:] ** 2), ((W, U), arg(4, 16, D)),
         (4,), [1]),
        (lambda w, x: jnp.mean(perceptron(x.reshape(64, D), *w).reshape(16, 4, H)[:, 1:] ** 2),
         ((W, U), arg(16, 4, D)), (4,), []),
    ],
    ids=["steps first", "steps divide", "two axes", "heads", "a batch behind steps", "a batch in front"],
)  # fmt: skip
def test_what_is_merged_in_another_order(
    run: Callable[..., Any], shapes: tuple[Any, ...], mesh: tuple[int, ...], first: list[int]
) -> None:
    program = source_of(trained(run), *shapes).program
    assert [merge.first for merge in reorderable(program, analyse(program), [mesh])] == first


def test_the_program_as_it_is_written(tmp_path: Path) -> None:
    program = saved(tmp_path, *CASES["plain"][:1], *CASES["plain"][1])
    outcome = partition(Request(program, MESH, "data=8", iterations=50, as_written=True))
    assert not outcome.source.program.parted
