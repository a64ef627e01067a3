"""Merged dimensions: 5 steps of a batch of 16 in one dimension of 80, which 8 devices split along the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from programs import arg, round_mesh, source_of

from toast_cli.candidates.variants import analysed
from toast_cli.cli.app import run
from toast_cli.dimensions import analyse
from toast_cli.dimensions.merged import set_apart
from toast_cli.pipeline import partition
from toast_cli.request import Request

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


def branching(weights: Any, x: Any) -> Any:
    rows = x.reshape(T * B, D)
    return steps_apart(
        lax.cond(x[0, 0, 0] > 0.0, lambda: perceptron(rows, *weights), lambda: jnp.sin(rows @ weights[0]))
    )


X = arg(T, B, D)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "plain": (trained(plain), ((W, U), X)),
    "recurrent": (trained(recurrent), ((W, U, U, arg(H, 7)), X, arg(T, B, dtype=jnp.int32), arg(B, H))),
    "branching": (trained(branching), ((W, U), X)),
}


def saved(folder: Path, run: Callable[..., Any], *shapes: Any) -> str:
    path = folder / "program.mlir"
    path.write_text(jax.jit(run).lower(*shapes).as_text(debug_info=True))
    return str(path)


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
    apart = set_apart(source.program, dimensions, (8,))
    assert T * B in analyse(apart).class_sizes and T * B not in dimensions.class_sizes
    assert set_apart(source.program, dimensions, (5,)) is source.program


def test_each_mesh_has_its_own_dimensions() -> None:
    """What one mesh divides is no matter of another that is tried beside it: a saved plan brings one mesh alone."""
    source = source_of(lambda weights, x: perceptron(x.reshape(T * B, D), *weights), (W, U), X)
    reading = analysed(lambda: source)
    whole, same = (reading(round_mesh(data=size)) for size in (8, 5))
    assert same is source and T * B in analyse(whole.program).class_sizes and whole is reading(round_mesh(model=8))


def scaled_groups(weights: Any, x: Any) -> Any:
    """Weights in fewer bits, whose scales are those of 20 groups of 6 rows; the product sums over all rows."""
    numbers, scales, first = weights
    whole = (numbers.astype(jnp.float32).reshape(20, 6, H) * scales[:, None]).reshape(120, H)
    return jnp.tanh(x @ first) @ whole


def test_groups_that_shards_cross_are_made_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = (arg(120, H, dtype=jnp.int8), arg(20, H), arg(D, 120)), arg(1, D)
    program = saved(tmp_path, scaled_groups, *shapes)
    options = ["--mesh", MESH, "--mesh-shape", "data=8", "--pin", "*2=None,data", "--verify", "cpu"]
    assert run_toast("partition", program, *options, "--iterations", "50") == 0
    assert "verdict of XLA: agreed" in " ".join(capsys.readouterr().out.split())


def heads(weights: Any, x: Any) -> Any:
    """Five heads of a width of 16."""
    q, k, v = ((x @ w).reshape(*x.shape[:2], T, B) for w in weights[:3])
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.mean((jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape) @ weights[3]) ** 2)


@pytest.mark.parametrize(
    ("run", "shapes", "mesh", "apart"),
    [
        (plain, ((W, U), X), (8,), True),
        (plain, ((W, U), X), (5,), False),
        (plain, ((W, U), X), (2, 2), True),
        (heads, ((arg(80, 80),) * 4, arg(8, 4, 80)), (8,), True),
        (lambda w, x: jnp.mean(perceptron(x.reshape(64, D), *w).reshape(4, 16, H)[1:] ** 2), ((W, U), arg(4, 16, D)),
         (4,), False),
    ],
    ids=["steps do not divide", "steps divide", "two axes", "heads", "as many steps as devices"],
)  # fmt: skip
def test_what_is_split_regardless_of_its_parts(
    run: Callable[..., Any], shapes: tuple[Any, ...], mesh: tuple[int, ...], apart: bool
) -> None:
    program = source_of(trained(run), *shapes).program
    assert (set_apart(program, analyse(program), mesh) is not program) == apart
