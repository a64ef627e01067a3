"""Heads in attention and the sequence elsewhere (Ulysses), predicted and compiled: blocks of attention over one long
sequence, too long for batches, on one mesh axis.

One row for each specification, direction (forward, training) and plan: the search's, the fastest of the strategies,
and the fastest of two decisions that leaves attention to another group. `--compile` asks XLA:TPU or XLA:GPU, ahead of
time, what it makes of them: collectives, and on TPUs the step. Exits with 1 where the search's plan is slower.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp

from benchmarks.common import Row, note, show, write_json
from benchmarks.real.measure import measured
from toast_cli.hardware import load_spec
from toast_cli.pipeline import partition
from toast_cli.plan.decisions import ASIDE, Plan, Shard
from toast_cli.price.evaluator import Evaluator
from toast_cli.request import Request
from toast_cli.tactics import strategies

COLUMNS = {
    "mesh": "{mesh}", "direction": "{direction}", "plan": "{plan}", "apart": "{apart}", "predicted ms": "{ms:.3f}",
    "compiled ms": "{compiled_ms:.3f}", "computing": "{compute_ms:.3f}", "moving": "{moving_ms:.3f}",
    "as promised": "{share:.1%}",
}  # fmt: skip
FIGURES = ("compiled_ms", "compute_ms", "moving_ms", "share")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", nargs="+", default=["h100-8", "v4-32", "v5e-16"])
    parser.add_argument("--direction", nargs="+", choices=("forward", "training"), default=["forward", "training"])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="needs the extra `tpu` or `gpu`")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    for direction in options.direction:
        with TemporaryDirectory() as folder:
            path = Path(folder) / f"{direction}.mlir"
            path.write_text(lowered(direction, options.tokens, options.width, options.heads, options.layers))
            for mesh in options.mesh:
                for row in rows_of(str(path), mesh, compiles=options.compile):
                    rows.append({"direction": direction, **row})
                    note(str(rows[-1]))
    show("heads in attention, the sequence elsewhere", COLUMNS, rows)
    write_json(options.json, rows)
    least = {(row["direction"], row["mesh"]): row["ms"] for row in sorted(rows, key=lambda row: -row["ms"])}
    searched = [row for row in rows if row["plan"] == "search"]
    return 1 if any(row["ms"] > 1.001 * least[row["direction"], row["mesh"]] for row in searched) else 0


def lowered(direction: str, tokens: int, width: int, heads: int, layers: int) -> str:
    """The program as StableHLO."""

    def arg(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    block = {"q": arg(width, heads, width // heads), "k": arg(width, heads, width // heads)}
    block |= {"v": arg(width, heads, width // heads), "o": arg(heads, width // heads, width)}
    block |= {"up": arg(width, 4 * width), "down": arg(4 * width, width)}
    weights, x = [block] * layers, arg(1, tokens, width)
    if direction == "forward":
        return str(jax.jit(forward).lower(weights, x).as_text())
    return str(jax.jit(train, donate_argnums=0).lower(weights, x, x).as_text())


def forward(weights: Any, x: Any) -> Any:
    for w in weights:
        q, k, v = (jnp.einsum("bsd,dhe->bshe", normal(x), w[name]) for name in "qkv")
        scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) * q.shape[-1] ** -0.5
        x = x + jnp.einsum("bhqk,bkhe,hed->bqd", jax.nn.softmax(scores), v, w["o"])
        x = x + jax.nn.gelu(normal(x) @ w["up"]) @ w["down"]
    return x


def normal(x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def train(weights: Any, x: Any, wanted: Any) -> Any:
    def loss(weights: Any) -> Any:
        return jnp.mean((forward(weights, x) - wanted).astype(jnp.float32) ** 2)

    return jax.tree.map(lambda w, g: w - 0.01 * g, weights, jax.grad(loss)(weights))


def rows_of(path: str, mesh: str, *, compiles: bool) -> list[Row]:
    """The search's plan, the fastest of the strategies that fit, the fastest with attention apart."""
    devices = load_spec(mesh).devices
    outcome = partition(Request(path, mesh, mesh_shape=f"sequence={devices}"))
    problem = outcome.problem
    evaluator, named = Evaluator(problem), strategies(problem)
    costs = {name: evaluator.exact_cost(plan) for name, plan in named.items()}
    fitting = [name for name, cost in costs.items() if cost.peak_bytes <= problem.mesh.limit_bytes]
    best = min(fitting or costs, key=lambda name: costs[name].step_seconds)
    found: list[Row] = []
    for label, plan in (("search", outcome.result.plan), (best, named[best]), ("apart", attention_apart(evaluator))):
        row: Row = {
            "mesh": mesh, "plan": label, "apart": is_apart(plan), "ms": 1e3 * evaluator.cost(plan).step_seconds,
            "decisions": len(plan), **dict.fromkeys(FIGURES, float("nan")),
        }  # fmt: skip
        if compiles:
            compiled = measured(outcome, plan, mesh)
            row["failed"] = compiled.get("failed", "")
            if not row["failed"]:
                moving = compiled["communication"]
                row |= {
                    "compute_ms": 1e3 * compiled["compute"], "moving_ms": 1e3 * moving, "share": compiled["share"],
                    "compiled_ms": 1e3 * (compiled["compute"] + moving), "peak": compiled["peak"],
                    "predicted_peak": compiled["predicted_peak"], "exposed_ms": 1e3 * compiled["exposed"],
                    "compiled_bytes": compiled["compiled_bytes"], "differences": compiled["differences"],
                }  # fmt: skip
        found.append(row)
    return found


def attention_apart(evaluator: Evaluator) -> Plan:
    """The fastest plan of two decisions: one leaves its conflicts alone, another group has the axis there."""
    problem = evaluator.problem
    shards = [d for d in problem.decisions.choices if isinstance(d, Shard)]
    plans = [
        problem.canonical((one, other))
        for one in shards
        for other in shards
        if ASIDE in one.sides and other.group != one.group
    ]
    return min(plans, key=lambda plan: evaluator.cost(plan).step_seconds)


def is_apart(plan: Plan) -> str:
    """Whether a plan leaves a conflict to other decisions."""
    return "yes" if any(ASIDE in d.sides for d in plan if isinstance(d, Shard)) else ""


if __name__ == "__main__":
    sys.exit(main())
