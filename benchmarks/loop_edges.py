"""What loops communicate in each trip or once: a strategy as it is, with what loops read gathered before them, with
what they add up reduced behind them, and with both.

    python -m benchmarks.loop_edges sample_models/rnn_train.mlirbc.zst --plans fsdp "fsdp x megatron"

One row for each plan: step and peak as predicted. Without a program: the tiny twin of the sample `rnn_train`, an LSTM.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.common import FOLDER, Row, show
from toast_cli.pipeline import partition
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
COLUMNS = {"mesh": "{mesh}", "plan": "{plan}", "loops": "{loops}", "ms": "{ms:.3f}", "peak MiB": "{mib:.0f}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="?", type=Path, default=TWIN)
    parser.add_argument("--mesh", nargs="+", default=["v4-32"])
    parser.add_argument("--plans", nargs="+", metavar="PLAN", default=["fsdp"])
    options = parser.parse_args()
    rows: list[Row] = []
    for mesh in options.mesh:
        problem = partition(Request(str(options.program), mesh, iterations=1)).problem
        for plan in options.plans:
            rows += [{"mesh": mesh, **row} for row in rows_of(problem, plan)]
    show("what loops communicate, and where", COLUMNS, rows)


def rows_of(problem: Problem, plan: str) -> list[Row]:
    """A strategy with each of `EDGES` that its program has loops for."""
    evaluator, strategy, rows = Evaluator(problem), strategies(problem)[plan], list[Row]()
    for label, roles in EDGES.items():
        if set(roles) <= set(problem.roles):
            cost = evaluator.exact_cost((*strategy, *whole(problem, roles)))
            rows.append({"plan": plan, "loops": label, "ms": 1e3 * cost.step_seconds, "mib": cost.peak_bytes / 2**20})
    return rows


def whole(problem: Problem, roles: tuple[str, ...]) -> list[Replicate]:
    """These roles whole over every axis."""
    return [Replicate(problem.roles.index(role), axis) for role in roles for axis in range(len(problem.mesh.sizes))]


if __name__ == "__main__":
    main()
