"""What each pass of the compiler model is worth: predicts every stored point again without it.

Needs no compiler: what XLA made of each point is stored (`data/real.jsonl`, `memory.jsonl`, `programs.jsonl` and
`gpu.jsonl`). Passes are switched off all at once; where that moves a prediction of a program, by halves, until the ones
that do are found. `python -m benchmarks.passes` prints one row for each pass that moves anything:

* programs: with a plan whose predicted peak, compute time or communication (over the step) moves by `MOVED` or more.
* largest: the largest of these moves.
* peak, compute: by how many percentage points the error of the measured points that move grows without the pass, on
  average: a positive figure is what the pass is worth. Compute of programs in which look-ups take time is left out.
* regret: how much slower, by the whole model, the plan is that looks best without the pass; among the stored plans and
  the strategies of experts.

A pass that moves nothing here, and no plan, goes, unless no stored program has its op. A run takes two hours of
processor time; `--records FILE` keeps what is known of each program, and goes on from there. `--write PAGE` puts what
each pass is worth into a page of the documentation.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import calibrate, calibrate_memory, gpu
from benchmarks.calibrate import Point, peak_bytes, read_points
from benchmarks.common import Row, note, put_between, show
from benchmarks.corpus import fingerprint, load_case, restore
from benchmarks.real import quick
from benchmarks.real.lower import FOLDER, path_of
from toast_cli.frontend import load
from toast_cli.hardware import load_spec
from toast_cli.plan.decisions import Plan
from toast_cli.plan.problem import Problem
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.profile import PASSES
from toast_cli.tactics import strategies

MOVED = 0.01
LOOK_UPS = "lookup-steps"  # the pass that prices look-ups
EXPERTS = 4  # strategies tried beside the stored plans
COLUMNS = {
    "pass": "{name}", "programs": "{programs}", "largest": "{largest:.0%}", "peaks": "{peaks}", "peak": "{peak:+.1f}",
    "computes": "{computes}", "compute": "{compute:+.1f}", "plans": "{plans}", "regret": "{regret:.1%}",
}  # fmt: skip
# What `--write` replaces in a page.
BEGIN, END = "<!-- passes: written by python -m benchmarks.passes -->", "<!-- passes: end -->"
Predicted = dict[str, tuple[float, float, float]]  # plan -> peak bytes, seconds of compute and of communication


@dataclass(frozen=True)
class Job:
    """The stored points of one program on one machine. measured: peak bytes and compute seconds of a point, or None."""

    key: str
    make: Callable[[], Problem]
    points: list[Point]
    measured: Callable[[Point, Problem], tuple[float | None, float | None]]


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    known: dict[str, Any] = {}
    every = list(jobs())
    if options.records.exists():
        known = {record["key"]: record for record in map(json.loads, options.records.read_text().splitlines())}
    for job in every[:: options.each]:
        if job.key not in known and options.only in job.key:
            known[job.key] = record = measure(job, options.passes)
            note(f"{job.key}: {', '.join(record['without']) or 'nothing moves'}")
            with options.records.open("a") as file:
                file.write(json.dumps(record) + "\n")
    table = list(rows(known.values()))
    show("what predictions lose without each pass", COLUMNS, table)
    if options.write:
        put_between(options.write, BEGIN, END, worth_of_each(table, len(known), len(every)))
    return 0


def jobs() -> Iterator[Job]:
    real: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for point in quick.stored_points(quick.TABLE):
        if not quick.MEASURED.isdisjoint(point):
            real[point["program"], point["mesh"]].append(point)
    for (program, where), points in real.items():
        path = path_of(program, FOLDER)
        yield Job(
            f"{program} {where}",
            lambda path=path, where=where: quick.problem_of(load(str(path)), load_spec(where)),
            points,
            lambda point, _: (point.get("needed_bytes"), point.get("compute")),
        )
    tables: list[tuple[Path, str, Any, Callable[[Point, Problem], tuple[float | None, float | None]]]] = [
        (calibrate_memory.TABLE, "slice", load_case, lambda point, _: (point["needed_bytes"], None)),
        (calibrate.TABLE, "slice", load_case, lambda p, problem: (None, _seconds(p, problem))),
        (gpu.TABLE, "spec", gpu.load_on, lambda point, _: (peak_bytes(point), None)),
    ]
    for table, place, loaded, measured in tables:
        corpus: dict[tuple[str, str], list[Point]] = defaultdict(list)
        for point in read_points(table):
            if "failed" not in point:
                corpus[point["program"], point[place]].append(point)
        for (program, where), points in corpus.items():
            make = lambda program=program, where=where, loaded=loaded: loaded(program, where, calibrate.FOLDER).problem  # noqa: E731
            yield Job(f"{table.stem}: {program} {where}", make, points, measured)


def measure(job: Job, passes: list[str]) -> dict[str, Any]:
    """The predictions of one program with all passes, and without each that moves one."""
    problem = job.make()
    whole = Evaluator(problem)
    points = {p["plan"]: p for p in job.points if fingerprint(problem, restore(p["decisions"])) == p["fingerprint"]}
    plans = {name: restore(point["decisions"]) for name, point in points.items()}
    plans |= dict([(f"expert {name}", plan) for name, plan in strategies(problem).items()][:EXPERTS])
    base = _predict(whole, plans)
    without: dict[str, Predicted] = {}
    pending = [[name for name in passes if name in whole.profile.passes]]
    while pending:
        names = pending.pop()
        found = _predict(Evaluator(problem, profile=whole.profile.without(*names)), plans) if names else base
        if largest_move(base, found) < MOVED and _best(base) == _best(found):
            continue
        if len(names) == 1:
            without[names[0]] = found
        else:
            pending += [names[: len(names) // 2], names[len(names) // 2 :]]
    measured = {name: job.measured(point, problem) for name, point in points.items()}
    return {"key": job.key, "base": base, "measured": measured, "without": without}


def rows(records: Any) -> Iterator[Row]:
    for name in PASSES:
        moves, regrets, errors = [], [0.0], ([], [])  # type: ignore[var-annotated]
        for record in records:
            base, found = record["base"], record["without"].get(name)
            if found is None:
                continue
            moves.append(largest_move(base, found))
            if (best := _best(found)) != _best(base):
                regrets.append(sum(base[best][1:]) / sum(base[_best(base)][1:]) - 1)
            for plan, measured in record["measured"].items():
                # A compiler's estimate of a look-up leaves out its transfers.
                for place, was in enumerate(measured[:1] if LOOK_UPS in record["without"] else measured):
                    before, after = (predicted[plan][place] for predicted in (base, found))
                    if was and abs(after - before) > MOVED * was:
                        errors[place].append(100 * (abs(after / was - 1) - abs(before / was - 1)))
        if moves:
            yield {
                "name": name, "programs": len(moves), "largest": max(moves),
                "peaks": len(errors[0]), "peak": float(np.mean(errors[0])) if errors[0] else 0.0,
                "computes": len(errors[1]), "compute": float(np.mean(errors[1])) if errors[1] else 0.0,
                "plans": len(regrets) - 1, "regret": max(regrets),
            }  # fmt: skip


def worth_of_each(table: list[Row], measured: int, programs: int) -> list[str]:
    """Lines of Markdown: for peaks, compute and plans, the passes in the order of what they are worth."""

    def listed(worth: str, form: str, counted: str) -> str:
        ordered = sorted((row for row in table if row[counted] > 0), key=lambda row: -row[worth])
        return ", ".join(f"{row['name']} {form.format(row[worth])}" for row in ordered)

    return [
        f"{measured} of {programs} pairs of a program and a machine were predicted again.",
        "",
        "| of | pass, and points of error that it takes away where it moves the prediction by 1 % |",
        "|---|---|",
        f"| peaks | {listed('peak', '{:+.1f}', 'peaks')} |",
        f"| compute | {listed('compute', '{:+.1f}', 'computes')} |",
        f"| plans | {listed('regret', '{:.1%}', 'plans')} (how much slower the plan is that looks best without it) |",
    ]


def largest_move(base: Predicted, found: Predicted) -> float:
    """The largest relative change of a peak or compute time, or of communication over the step."""
    moves = [0.0]
    for plan, (peak, compute, communication) in base.items():
        other = found[plan]
        moves += [abs(other[0] / peak - 1), abs(other[1] / compute - 1) if compute else 0.0]
        moves.append(abs(other[2] - communication) / max(compute + communication, 1e-12))
    return max(moves)


def _predict(evaluator: Evaluator, plans: dict[str, Plan]) -> Predicted:
    costs = {name: evaluator.exact_cost(plan) for name, plan in plans.items()}
    return {name: (cost.peak_bytes, cost.compute_seconds, cost.communication_seconds) for name, cost in costs.items()}


def _best(predicted: Predicted) -> str:
    return min(predicted, key=lambda plan: sum(predicted[plan][1:]))


def _seconds(point: Point, problem: Problem) -> float | None:
    return point["cycles"] / problem.mesh.chip.clock_hertz if point.get("cycles") else None


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("passes", nargs="*", metavar="PASS", help="only these")
    parser.add_argument("--only", default="", metavar="WORD", help="programs and machines with this in their names")
    parser.add_argument("--each", type=int, default=1, metavar="N", help="only every Nth program and machine")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the worths into this page: docs/accuracy.md")
    parser.add_argument("--records", type=Path, default=Path("build/passes.jsonl"), metavar="FILE")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.passes) - set(PASSES))
    if unknown:
        parser.error(f"no pass {', '.join(unknown)}; there are {', '.join(PASSES)}")
    options.passes = options.passes or list(PASSES)
    return options


if __name__ == "__main__":
    sys.exit(main())
