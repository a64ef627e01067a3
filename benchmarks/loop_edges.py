"""What loops communicate in each trip or once: a strategy as it is, with what loops read gathered before them, with
what they add up reduced behind them, and with both.

    python -m benchmarks.loop_edges sample_models/rnn_train.mlirbc.zst --plans fsdp "fsdp x megatron"
    python -m benchmarks.loop_edges --compile

One row for each plan: step and peak as predicted. `--compile` asks XLA:TPU, ahead of time, for its step and
collectives. Without a program: the tiny twin of the sample `rnn_train`, an LSTM.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import FOLDER, Row, note, show, write_json
from benchmarks.real.measure import measured
from toast_cli.pipeline import Outcome, partition
from toast_cli.plan.decisions import Replicate
from toast_cli.plan.loops import ACCUMULATORS, LOOP_READS
from toast_cli.plan.problem import Problem
from toast_cli.price.evaluator import Evaluator
from toast_cli.request import Request
from toast_cli.tactics import strategies

TWIN = FOLDER / "rnn_tiny.stablehlo.zst"
# Where each plan communicates -> the roles that it keeps whole.
EDGES: dict[str, tuple[str, ...]] = {
    "each trip": (), "reads before": (LOOP_READS,), "sums behind": (ACCUMULATORS,), "both": (LOOP_READS, ACCUMULATORS),
}  # fmt: skip
FIGURES = ("compiled_ms", "moving_ms", "share")
COLUMNS = {
    "mesh": "{mesh}", "plan": "{plan}", "loops": "{loops}", "predicted ms": "{ms:.3f}", "peak MiB": "{mib:.0f}",
    "compiled ms": "{compiled_ms:.3f}", "moving": "{moving_ms:.3f}", "as promised": "{share:.1%}",
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="?", type=Path, default=TWIN)
    parser.add_argument("--mesh", nargs="+", default=["v4-32"])
    parser.add_argument("--plans", nargs="+", metavar="PLAN", default=["fsdp"])
    parser.add_argument("--compile", action="store_true", help="needs the extra `tpu`")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    for mesh in options.mesh:
        outcome = partition(Request(str(options.program), mesh, iterations=1))
        for plan in options.plans:
            for row in rows_of(outcome, mesh, plan, compiles=options.compile):
                rows.append(row)
                note(str(row))
    show("what loops communicate, and where", COLUMNS, rows)
    write_json(options.json, rows)
    return 0


def rows_of(outcome: Outcome, mesh: str, plan: str, *, compiles: bool) -> list[Row]:
    """A strategy with each of `EDGES` that its program has loops for."""
    problem, found = outcome.problem, []
    evaluator, strategy = Evaluator(problem), strategies(problem)[plan]
    for label, roles in EDGES.items():
        if not set(roles) <= set(problem.roles):
            continue
        of = (*strategy, *kept(problem, roles))
        cost = evaluator.exact_cost(of)
        row: Row = {"mesh": mesh, "plan": plan, "loops": label, **dict.fromkeys(FIGURES, float("nan"))}
        row |= {"ms": 1e3 * cost.step_seconds, "mib": cost.peak_bytes / 2**20}
        compiled = measured(outcome, of, mesh) if compiles else {"failed": ""}
        if "failed" not in compiled:
            moving = compiled["communication"]
            row |= {"moving_ms": 1e3 * moving, "compiled_ms": 1e3 * (compiled["compute"] + moving)}
            row |= {"share": compiled["share"]}
        found.append(row)
    return found


def kept(problem: Problem, roles: tuple[str, ...]) -> list[Replicate]:
    """These roles whole over every axis."""
    return [Replicate(problem.roles.index(role), axis) for role in roles for axis in range(len(problem.mesh.sizes))]


if __name__ == "__main__":
    sys.exit(main())
