"""How good the plans are that the search finds: against the best known strategy, over several seeds.

One row for each program and mesh: the fastest known strategy that fits (`toast_cli.tactics`) and the search with its
default budget for each seed. `speed-up` is the expert's step time over the worst seed's, `spread` how much slower the
worst seed's plan is than the best's. Exits with 1 when a seed found worse than the expert, or nothing that fits where
an expert fits.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import geometric_mean, median

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Row, choose, note, put_between, show, write_json
from toast_cli.dimensions import Dimensions, analyse
from toast_cli.frontend import load
from toast_cli.hardware import load_spec, parse_shape
from toast_cli.plan.decisions import Plan, Shard
from toast_cli.plan.problem import Problem, make_problem
from toast_cli.price.evaluator import Evaluator
from toast_cli.program.model import Program
from toast_cli.search.run import PLANS, Settings, run_search
from toast_cli.tactics import priced_strategies, starting_plans

MESHES = ("v4-32", "v5e-16", "a100-16", "h100-8", "p100-8", "v6e-64")
START, END = "<!-- quality: written by benchmarks/quality.py -->", "<!-- quality: end -->"
SLACK = 1.0000001  # figures that differ by rounding are equal

COLUMNS = {
    "program": "{program}", "mesh": "{mesh}", "best expert": "{expert}", "its step ms": "{expert_ms:.2f}",
    "search ms": "{best_ms:.2f}", "worst seed": "{worst_ms:.2f}", "speed-up": "{speed_up:.3f}",
    "spread %": "{spread:.2f}", "peak %": "{peak:.0f}", "evaluations": "{evaluations}", "seconds": "{seconds:.1f}",
    "": "{verdict}",
}  # fmt: skip
NOTE = "{program} {mesh}: {expert_ms:.2f} -> {times} ms, {evaluations} evaluations, {seconds:.1f} s {verdict}"


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    rows: list[Row] = []
    for name, path in choose(options.programs, tiny=options.tiny).items():
        program = load(str(path)).program
        dimensions = analyse(program)
        for mesh in options.mesh:
            rows.append(measure(name, program, dimensions, mesh, options))
            note(NOTE.format_map(rows[-1]))
    show("search against the best known strategy that fits", COLUMNS, rows, {"worse": "red", "does not fit": "red"})
    write_json(options.json, rows)
    if options.write:
        put_between(options.write, START, END, page(rows))
    return 1 if any(row["verdict"] in ("worse", "does not fit") for row in rows) else 0


def measure(name: str, program: Program, dimensions: Dimensions, mesh: str, options: argparse.Namespace) -> Row:
    """One row; times in milliseconds (inf: does not fit), the search's seconds are those of one seed on average."""
    spec, _, shape = mesh.partition(":")
    problem = make_problem(program, dimensions, load_spec(spec).mesh(parse_shape(shape) if shape else None))
    expert, expert_ms = best_expert(problem)
    start = time.monotonic()
    starts = () if options.from_nothing else starting_plans(problem)
    results = []
    for seed in range(options.seeds):
        evaluator = Evaluator(problem)  # afresh: what one seed has learnt must not help the next
        results.append(run_search(evaluator, Settings(seed, options.iterations, effort=options.effort), starts))
    seconds = time.monotonic() - start
    times = [1e3 * r.cost.step_seconds if r.fits else float("inf") for r in results]
    best, worst = min(times), max(times)
    verdict = "" if worst <= expert_ms * SLACK else "worse" if worst < float("inf") else "does not fit"
    return {
        "program": name, "mesh": mesh, "expert": expert, "expert_ms": expert_ms, "best_ms": best, "worst_ms": worst,
        "speed_up": expert_ms / worst if worst < float("inf") else float("nan"),
        "spread": 100 * (worst / best - 1) if best < float("inf") else 0.0,
        "peak": max(100 * r.cost.peak_bytes / problem.mesh.limit_bytes for r in results),
        "evaluations": sum(r.evaluations for r in results) // len(results), "seconds": seconds / len(results),
        "verdict": verdict, "times": [round(t, 3) for t in times], "plans": [words(problem, r.plan) for r in results],
    }  # fmt: skip


def best_expert(problem: Problem) -> tuple[str, float]:
    """Name and milliseconds of the fastest known strategy that fits; ("none fits", inf) where none does."""
    evaluator = Evaluator(problem)
    costs = {
        "unsharded": evaluator.exact_cost(()),
        **{one.label: one.cost for one in priced_strategies(evaluator)[0].values()},
    }
    fitting = {name: c.step_seconds * 1e3 for name, c in costs.items() if c.peak_bytes <= problem.mesh.limit_bytes}
    best = min(fitting, key=lambda name: fitting[name], default=None)
    return ("none fits", float("inf")) if best is None else (best, fitting[best])


def page(rows: list[Row]) -> list[str]:
    """What the rows say in sentences."""
    fitting = [row for row in rows if row["expert_ms"] < float("inf")]
    gains = [row["speed_up"] for row in fitting]
    agreeing = sum(row["spread"] <= 1 for row in fitting)
    return [
        f"In {len(rows) - len(fitting)} of {len(rows)} cases no known strategy fits. In the others the search is more "
        f"than 2 % better in {sum(gain > 1.02 for gain in gains)}; the median speed-up is {median(gains):.2f}, the "
        f"geometric mean {geometric_mean(gains):.2f}. Seeds agree within 1 % in {agreeing}.",
    ]


def words(problem: Problem, plan: Plan) -> str:
    """A plan in a line: `batch>data embed>model!1`."""
    names, groups = problem.mesh.names, problem.dimensions.groups
    return " ".join(
        f"{groups[d.group].name}>{names[d.axis]}" + (f"!{''.join(map(str, d.sides))}" if any(d.sides) else "")
        if isinstance(d, Shard) else f"{problem.roles[d.role]}<{names[d.axis]}"
        for d in plan
    )  # fmt: skip


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", help="sample models by name, or files (default: all but the tiny twins)")
    parser.add_argument("--mesh", nargs="+", default=MESHES, help="specifications, NAME or NAME:axis=size,...")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--from-nothing", action="store_true", help="without the strategies to start from")
    parser.add_argument("--effort", choices=list(PLANS), default="medium")
    parser.add_argument("--tiny", action="store_true", help="the tiny twins too")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table into this page: docs/accuracy.md")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
