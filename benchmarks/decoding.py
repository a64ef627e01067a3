"""Decisions that hold in a part of a program only, predicted and compiled: tokens decoded one at a time over a cache of
keys and values (the sample `itx_decode` with few layers and words).

One row for each specification and plan: the search's, that of a search without such decisions, and the fastest of the
strategies that fit. `--compile` asks XLA:TPU, ahead of time, what it makes of them: collectives and the step.
Exits with 1 where the search's plan is slower than another.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax

from benchmarks.common import Row, note, show, write_json
from benchmarks.real.measure import measured
from sample_models.itx import ITX, decode_sample
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.pipeline import Request, partition
from toast_cli.plan.decision_space import DecisionSpace
from toast_cli.plan.decisions import NOWHERE, Plan, Shard
from toast_cli.search.run import Settings, run_search
from toast_cli.tactics import strategies

EVALUATIONS = 6000  # of plans without such decisions
COLUMNS = {
    "mesh": "{mesh}", "plan": "{plan}", "in parts": "{parts}", "predicted ms": "{ms:.3f}",
    "compiled ms": "{compiled_ms:.3f}", "computing": "{compute_ms:.3f}", "moving": "{moving_ms:.3f}",
    "as promised": "{share:.1%}",
}  # fmt: skip
FIGURES = ("compiled_ms", "compute_ms", "moving_ms", "share")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", nargs="+", default=["v5e-16", "v4-32"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--words", type=int, default=32768)
    parser.add_argument("--compile", action="store_true", help="needs the extra `tpu`")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "decode.mlir"
        path.write_text(lowered(options.layers, options.batch, options.words))
        for mesh in options.mesh:
            for row in rows_of(str(path), mesh, compiles=options.compile):
                rows.append(row)
                note(str(row))
    show("decisions that hold in a part only", COLUMNS, rows)
    write_json(options.json, rows)
    least = {row["mesh"]: row["ms"] for row in sorted(rows, key=lambda row: -row["ms"])}
    return 1 if any(row["ms"] > 1.001 * least[row["mesh"]] for row in rows if row["plan"] == "search") else 0


def lowered(layers: int, batch: int, words: int) -> str:
    """The program as StableHLO."""
    sample = decode_sample("decode", "", replace(ITX, layers=layers, batch=batch, vocab=words))
    arguments = jax.eval_shape(sample.init, jax.random.key(0))
    return str(jax.jit(sample.step, donate_argnums=sample.donate).lower(*arguments).as_text())


def rows_of(path: str, mesh: str, *, compiles: bool) -> list[Row]:
    outcome = partition(Request(path, mesh))
    evaluator, plan = Evaluator(outcome.problem), outcome.result.plan
    named = strategies(outcome.problem)
    costs = {name: evaluator.exact_cost(of) for name, of in named.items()}
    fitting = [name for name, cost in costs.items() if cost.peak_bytes <= outcome.problem.mesh.limit_bytes]
    best = min(fitting or costs, key=lambda name: costs[name].step_seconds)
    found: list[Row] = []
    for label, of in (("search", plan), ("everywhere", everywhere(evaluator, plan, named[best])), (best, named[best])):
        row: Row = {
            "mesh": mesh, "plan": label, "parts": sum(isinstance(d, Shard) and d.only != NOWHERE for d in of),
            "ms": 1e3 * evaluator.exact_cost(of).step_seconds, **dict.fromkeys(FIGURES, float("nan")),
        }  # fmt: skip
        compiled = measured(outcome, of, mesh) if compiles else {"failed": ""}
        if "failed" not in compiled:
            moving = compiled["communication"]
            row |= {
                "compute_ms": 1e3 * compiled["compute"], "moving_ms": 1e3 * moving, "share": compiled["share"],
                "compiled_ms": 1e3 * (compiled["compute"] + moving),
            }  # fmt: skip
        found.append(row | {"failed": compiled.get("failed", "")})
    return found


def everywhere(evaluator: Evaluator, plan: Plan, strategy: Plan) -> Plan:
    """The best plan found whose decisions hold everywhere: from the plan without what confines it, and a strategy."""
    start = tuple(d._replace(only=NOWHERE) if isinstance(d, Shard) else d for d in plan)
    with patch.object(DecisionSpace, "parts", lambda _space, _decision: []):
        return run_search(evaluator, Settings(evaluations=EVALUATIONS), (strategy, start)).plan


if __name__ == "__main__":
    sys.exit(main())
