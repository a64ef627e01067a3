"""What it gains that some ops do otherwise than decisions about groups of dimensions say, predicted and compiled.

Programs in which arrays have a dimension twice or an op needs one whole: axial attention and triangle products (as
folding models have them), attention with few keys, a recurrence, Fourier mixing; and what is named on the command line.
One row for each program and specification whose plan has overrides (all with `--all`): the step with the plan that
decisions about groups lead to, and with the one that is taken. `--compile` asks XLA:TPU, ahead of time, what it makes
of both. Exits with 1 where a compiled step is slower with overrides.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.common import Row, choose, note, show, write_json
from benchmarks.real.measure import measured
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.pipeline import Outcome, Request, partition
from toast_cli.plan.decisions import Override, Plan
from toast_cli.search.overrides import MUST_GAIN, overridden
from toast_cli.search.run import run_search
from toast_cli.tactics import starting_plans

COLUMNS = {
    "program": "{program}", "mesh": "{mesh}", "places": "{places}", "by groups ms": "{by_groups_ms:.3f}",
    "taken ms": "{taken_ms:.3f}", "seconds": "{seconds:.1f}", "compiled": "{compiled_by_groups_ms:.3f}",
    "compiled, taken": "{compiled_taken_ms:.3f}", "as promised": "{share:.1%}",
}  # fmt: skip
FIGURES = ("compiled_by_groups_ms", "compiled_taken_ms", "share")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", help="names from here, sample models or files (default: all from here)")
    parser.add_argument("--mesh", nargs="+", default=["v5e-16", "v4-32"])
    parser.add_argument("--must-gain", type=float, default=MUST_GAIN)
    parser.add_argument("--all", action="store_true", help="rows of plans without overrides, too")
    parser.add_argument("--compile", action="store_true", help="needs the extra `tpu`")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    with TemporaryDirectory() as folder:
        for name in options.programs or PROGRAMS:
            path = str(lowered(name, Path(folder)))
            for mesh in options.mesh:
                row = {"program": Path(name).name, "mesh": mesh, **measure(path, mesh, options)}
                note(str(row))
                if row["places"] or options.all:
                    rows.append(row)
    show("ops that do otherwise", COLUMNS, rows)
    write_json(options.json, rows)
    return 1 if any(row["compiled_taken_ms"] > 1.01 * row["compiled_by_groups_ms"] for row in rows) else 0


def lowered(name: str, folder: Path) -> Path:
    """The program as a file."""
    if name not in PROGRAMS:
        return Path(name) if Path(name).exists() else choose([name])[name]
    run, shapes = PROGRAMS[name]
    path = folder / f"{name}.mlir"
    path.write_text(str(jax.jit(run).lower(*shapes).as_text()))
    return path


def measure(path: str, mesh: str, options: Any) -> Row:
    """Figures of both plans."""
    outcome = partition(Request(path, mesh, iterations=1))
    problem = outcome.problem
    evaluator, starts = Evaluator(problem), tuple(starting_plans(problem))
    by_groups = run_search(evaluator, "mcts", 0, starts=starts)
    better, taken = overridden(evaluator, by_groups, starts, options.must_gain)
    row: Row = {
        "places": sum(len(d.places) for d in taken.plan if isinstance(d, Override)),
        "by_groups_ms": 1e3 * by_groups.cost.step_seconds, "taken_ms": 1e3 * taken.cost.step_seconds,
        "seconds": taken.seconds - by_groups.seconds, **dict.fromkeys(FIGURES, float("nan")),
    }  # fmt: skip
    if options.compile and row["places"]:
        row["compiled_by_groups_ms"], _ = compiled(outcome, evaluator, by_groups.plan, mesh)
        row["compiled_taken_ms"], row["share"] = compiled(outcome, better, taken.plan, mesh)
    return row


def compiled(outcome: Outcome, evaluator: Evaluator, plan: Plan, mesh: str) -> tuple[float, float]:
    """Milliseconds of the compiled step, and the share of what is sent that was promised."""
    found = measured(replace(outcome, evaluator=evaluator), plan, mesh)
    if "failed" in found:
        return float("nan"), float("nan")
    return 1e3 * (found["compute"] + found["communication"]), found["share"]


# -- programs --------------------------------------------------------------------------------------------------------


def arg(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def normal(x: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-6).astype(x.dtype)


def softmax(scores: Any) -> Any:
    return jax.nn.softmax(scores.astype(jnp.float32)).astype(scores.dtype)


def training(run: Callable[..., Any]) -> Callable[..., Any]:
    """A step of gradient descent on the mean square of what a function makes of its weights and inputs."""

    def step(weights: Any, *inputs: Any) -> Any:
        def loss(weights: Any) -> Any:
            return jnp.mean(jnp.square(run(weights, *inputs).astype(jnp.float32)))

        return jax.tree.map(lambda w, g: w - 0.01 * g, weights, jax.grad(loss)(weights))

    return step


def axial(layers: Any, x: Any) -> Any:
    """Attention along rows, then along columns, then a perceptron."""
    for w in layers:
        q, k, v = (jnp.einsum("brcd,dhe->brche", normal(x), at) for at in w["rows"])
        scores = softmax(jnp.einsum("brche,brkhe->brhck", q, k))
        x = x + jnp.einsum("brhck,brkhe,hed->brcd", scores, v, w["rows out"])
        q, k, v = (jnp.einsum("brcd,dhe->brche", normal(x), at) for at in w["columns"])
        scores = softmax(jnp.einsum("brche,bkche->bchrk", q, k))
        x = x + jnp.einsum("bchrk,bkche,hed->brcd", scores, v, w["columns out"])
        x = x + jax.nn.gelu(normal(x) @ w["up"]) @ w["down"]
    return x


def triangles(layers: Any, z: Any) -> Any:
    """Products of edges that leave the same nodes, then of edges that reach them."""
    for both in layers:
        for w, ends in zip(both, ("bikc,bjkc->bijc", "bkic,bkjc->bijc"), strict=True):
            y = normal(z)
            a = jax.nn.sigmoid(y @ w["a gate"]) * (y @ w["a"])
            b = jax.nn.sigmoid(y @ w["b gate"]) * (y @ w["b"])
            z = z + jax.nn.sigmoid(y @ w["gate"]) * (normal(jnp.einsum(ends, a, b)) @ w["out"])
    return z


def fourier(layers: Any, x: Any) -> Any:
    for up, down in layers:
        mixed = jnp.fft.fft(jnp.fft.fft(x.astype(jnp.float32), axis=-1), axis=-2).real.astype(x.dtype)
        x = normal(x + mixed)
        x = normal(x + jax.nn.gelu(x @ up) @ down)
    return x


def few_keys(layers: Any, x: Any) -> Any:
    """Attention with fewer keys than queries over one long sequence."""
    for w in layers:
        q, k, v = (jnp.einsum("bsd,dhe->bshe", normal(x), w[name]) for name in "qkv")
        q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
        scores = softmax(jnp.einsum("bsgre,btge->bgrst", q, k))
        mixed = jnp.einsum("bgrst,btge->bsgre", scores, v)
        x = x + jnp.einsum("bshe,hed->bsd", mixed.reshape(*mixed.shape[:2], -1, mixed.shape[-1]), w["o"])
        x = x + (jax.nn.silu(normal(x) @ w["gate"]) * (normal(x) @ w["up"])) @ w["down"]
    return x


def recurrence(layers: Any, x: Any) -> Any:
    for w, u in layers:

        def step(carry: Any, at: Any, w: Any = w, u: Any = u) -> Any:
            h, c = carry
            i, f, o, g = jnp.split(at @ w + h @ u, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros(x.shape[1:], x.dtype)
        x = lax.scan(step, (start, start), x)[1]
    return x


_AXIAL = {"rows": [arg(256, 8, 32)] * 3, "rows out": arg(8, 32, 256), "columns": [arg(256, 8, 32)] * 3}
_AXIAL |= {"columns out": arg(8, 32, 256), "up": arg(256, 1024), "down": arg(1024, 256)}
_TRIANGLE = dict.fromkeys(("a", "a gate", "b", "b gate", "gate", "out"), arg(128, 128))
_FEW_KEYS = {"q": arg(2048, 16, 128), "k": arg(2048, 4, 128), "v": arg(2048, 4, 128), "o": arg(16, 128, 2048)}
_FEW_KEYS |= {"gate": arg(2048, 8192), "up": arg(2048, 8192), "down": arg(8192, 2048)}
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "axial": (axial, ([_AXIAL] * 2, arg(1, 512, 512, 256))),
    "axial_training": (training(axial), ([_AXIAL] * 2, arg(1, 256, 256, 256))),
    "triangles": (triangles, ([[_TRIANGLE] * 2] * 2, arg(1, 512, 512, 128))),
    "triangles_training": (training(triangles), ([[_TRIANGLE] * 2] * 2, arg(1, 384, 384, 128))),
    "fourier": (fourier, ([(arg(768, 3072), arg(3072, 768))] * 4, arg(4, 4096, 768))),
    "fourier_training": (training(fourier), ([(arg(768, 3072), arg(3072, 768))] * 4, arg(4, 4096, 768))),
    "few_keys": (few_keys, ([_FEW_KEYS] * 2, arg(1, 8192, 2048))),
    "recurrence": (recurrence, ([(arg(2048, 8192),) * 2] * 2, arg(128, 32, 2048))),
    "recurrence_training": (training(recurrence), ([(arg(2048, 8192),) * 2] * 2, arg(64, 64, 2048))),
}

if __name__ == "__main__":
    sys.exit(main())
