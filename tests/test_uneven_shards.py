"""Uneven shards: 30 tokens or rows on 8 devices are priced as 32, and what XLA makes of them is as promised."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from programs import arg, source_of
from sweeps import sweep

from toast_cli.cli.app import run
from toast_cli.dimensions import analyse
from toast_cli.dimensions.merged import with_uneven
from toast_cli.errors import UsageError
from toast_cli.hardware import load_spec
from toast_cli.pipeline import partition
from toast_cli.request import Request
from toast_cli.rewrite.variants import with_uneven_shards

N, D, H, WORDS = 30, 16, 32, 50
ATTENTION = (arg(D, 3, 8), arg(D, 3, 8), arg(D, 3, 8), arg(3, 8, D))
PERCEPTRON = (arg(D, H), arg(H, D))


def trained(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(weights: Any, *data: Any) -> Any:
        value, gradients = jax.value_and_grad(lambda weights: loss(weights, *data))(weights)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    return step


def attend(x: Any, to: Any, query: Any, key: Any, value: Any, out: Any) -> Any:
    q, k, v = jnp.einsum("bnd,dhc->bnhc", x, query), *(jnp.einsum("bnd,dhc->bnhc", to, w) for w in (key, value))
    scores = jax.nn.softmax(jnp.einsum("bnhc,bmhc->bhnm", q, k))
    return x + jnp.einsum("bhnm,bmhc,hcd->bnd", scores, v, out)


def perceptron(x: Any, up: Any, down: Any) -> Any:
    return x + jax.nn.relu(x @ up) @ down


def with_class_token(weights: Any, x: Any) -> Any:
    """29 patches and one token for the class."""
    attention, layer, token, positions = weights
    x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, D)), x], 1) + positions
    x = perceptron(attend(x, x, *attention), *layer)
    return jnp.mean(perceptron(attend(x, x, *attention), *layer)[:, 0] ** 2)


def next_token(weights: Any, x: Any) -> Any:
    attention, layer = weights
    y = perceptron(attend(x, x, *attention), *layer)
    return jnp.mean((y[:, :-1] - x[:, 1:]) ** 2)


def queries(weights: Any, memory: Any) -> Any:
    own, other, layer, learnt = weights
    x = jnp.broadcast_to(learnt, (2, N, D))
    return jnp.mean(perceptron(attend(attend(x, x, *own), memory, *other), *layer) ** 2)


def words(weights: Any, tokens: Any) -> Any:
    table, layer = weights
    scores = jax.nn.log_softmax(perceptron(table[tokens[:, :-1]], *layer) @ table.T)
    return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], -1))


def pairs(weights: Any, x: Any) -> Any:
    """Rows and columns of all pairs take turns."""
    left, right, attention, layer = weights
    z = x[:, None] * x[None]
    z = z + jnp.einsum("ikd,jkd->ijd", jnp.tanh(z @ left), jnp.tanh(z @ right))
    z = attend(z, z, *attention).swapaxes(0, 1)
    return jnp.mean(perceptron(attend(z, z, *attention), *layer) ** 2)


def rows(weights: Any, x: Any) -> Any:
    h = perceptron(x, *weights)
    h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-3)
    return jnp.mean((h - lax.stop_gradient(h.max(0))) ** 2)  # the gradient of a maximum turns on the last bit of h


def sorted_features(weights: Any, x: Any) -> Any:
    return jnp.mean(jnp.sort(perceptron(x, *weights), -1)[:, :3] ** 2)


def layers(weights: Any, x: Any) -> Any:
    return jnp.mean(lax.scan(lambda h, w: (perceptron(h, *w), None), x, weights)[0] ** 2)


def branches(weights: Any, x: Any) -> Any:
    return jnp.mean(lax.cond(x[0, 0] > 0.0, lambda: perceptron(x, *weights), lambda: jnp.sin(x)) ** 2)


def noise(weights: Any, x: Any, key: Any) -> Any:
    y = perceptron(x, *weights)
    return jnp.mean((y * jax.random.bernoulli(jax.random.wrap_key_data(key), 0.5, y.shape)) ** 2)


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "class token": (with_class_token, ((ATTENTION, PERCEPTRON, arg(1, D), arg(N, D)), arg(2, N - 1, D)), "context"),
    "next token": (next_token, ((ATTENTION, PERCEPTRON), arg(2, N, D)), "context"),
    "queries": (queries, ((ATTENTION, ATTENTION, PERCEPTRON, arg(N, D)), arg(2, 6, D)), "context"),
    "words": (words, ((arg(WORDS, D), PERCEPTRON), arg(4, 9, dtype=jnp.int32)), "vocabulary"),
    "rows": (rows, (PERCEPTRON, arg(N, D)), "data-parallel"),
    "sorted features": (sorted_features, (PERCEPTRON, arg(N, D)), "data-parallel"),
    "layers": (layers, ((arg(3, D, H), arg(3, H, D)), arg(N, D)), "data-parallel"),
    "branches": (branches, (PERCEPTRON, arg(N, D)), "data-parallel"),
    "noise": (noise, (PERCEPTRON, arg(N, D), arg(2, dtype=jnp.uint32)), "data-parallel"),
}


def saved(folder: Path, loss: Callable[..., Any], *shapes: Any) -> str:
    path = folder / "program.mlir"
    path.write_text(jax.jit(trained(loss)).lower(*shapes).as_text(debug_info=True))
    return str(path)


@pytest.mark.parametrize("name", sweep(CASES, "class token", "words", "layers", "branches", "noise"))
def test_numbers_and_collectives_are_as_promised(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    loss, shapes, strategy = CASES[name]
    axis = "model" if strategy == "vocabulary" else "data"
    report = tmp_path / "report.json"
    options = ["--mesh", "h100-8", "--mesh-shape", f"{axis}=8", "--strategy", strategy, "--verify", "cpu"]
    assert run(["partition", saved(tmp_path, loss, *shapes), *options, "--json", str(report)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "verdict of XLA: agreed" in told and "100.0 % of the" in told and "shards are uneven" in told
    facts = json.loads(report.read_text())
    assert facts["program"]["parted"]
    (given,) = (a for a in facts["arguments"] if a["index"] == len(facts["arguments"]) - (2 if name == "noise" else 1))
    assert given["type"] == {"class token": "f32[2,29,16]", "queries": "f32[2,6,16]", "next token": "f32[2,30,16]",
                             "words": "i32[4,9]"}.get(name, "f32[30,16]")  # fmt: skip
    assert axis not in str(given["sharding"])


@pytest.mark.parametrize("form", sweep(["stablehlo", "hlo"], "hlo"))
def test_pairs_go_from_rows_to_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    shapes = ((arg(D, D), arg(D, D), ATTENTION, PERCEPTRON), arg(N, D))
    program = saved(tmp_path, pairs, *shapes)
    options = ["--mesh", "h100-8", "--mesh-shape", "data=8", "--strategy", "context", "--verify", "cpu"]
    assert run(["partition", program, *options, "--format", form, "-o", str(tmp_path / "out")]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "verdict of XLA: agreed" in told and "shards are uneven" in told


@pytest.mark.parametrize(
    ("size", "mesh", "padded"),
    [(30, (8,), 32), (32, (8,), None), (50, (16,), None), (50, (4,), 52), (150, (16,), 160), (100, (8,), 104),
     (100, (4,), None), (150, (4, 4), 160), (66, (16,), None), (65, (2, 4), 72)],
    ids=str,
)  # fmt: skip
def test_what_is_padded(size: int, mesh: tuple[int, ...], padded: int | None) -> None:
    """To what most devices divide, by an eighth at most."""
    program = source_of(trained(rows), PERCEPTRON, arg(size, D)).program
    _, sizes = with_uneven(program, analyse(program), [mesh])
    assert sizes == ({} if padded is None else {size: padded})


def test_the_program_of_one_device_has_even_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = saved(tmp_path, rows, PERCEPTRON, arg(N, D))
    mesh, written = (
        ["--mesh", "h100-8", "--mesh-shape", "data=8"],
        ["--format", "spmd", "-o", str(tmp_path / "out.mlir")],
    )
    assert run(["partition", program, *mesh, "--iterations", "50", *written]) == 0
    assert "shards are uneven" not in capsys.readouterr().out
    assert run(["partition", program, *mesh, "--strategy", "data-parallel", *written]) == 2
    assert "batch (30) cannot be split 8 ways" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"does not divide dimension 0 \(30\)"):
        partition(Request(program, "h100-8", "data=8", iterations=50, pins=("data/0=data",)))
    outcome = partition(Request(program, "h100-8", "data=8", iterations=50, as_written=True))
    assert not outcome.source.program.parted


def test_a_note_on_uneven_shards_is_made_once() -> None:
    """Also of a program that is rewritten once more."""
    mesh = load_spec("h100-8").mesh({"data": 8})
    source = source_of(trained(rows), PERCEPTRON, arg(N, D))
    once = with_uneven_shards((source, analyse(source.program)), [mesh])
    again = with_uneven_shards((once[0], analyse(source.program)), [mesh])
    assert len(again[0].notices) == len(once[0].notices) == len(source.notices) + 1
