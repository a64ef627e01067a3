"""How often MCTS finds the proven optimum: `--search exact` as the ground truth, then MCTS with its default budget for
many seeds.

One row for each program and two-axis mesh: the gap to the bound on every sharding, and where the plan is proven how
many seeds reached it and how far off the worst was. Exits with 1 when fewer than 95 % of the seeds reach
one, or one seed is more than 2 % off.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Row, choose, is_tiny, note, show, write_json
from toast_cli.dimensions import Dimensions, analyse
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.frontend import load
from toast_cli.hardware import load_spec, parse_shape
from toast_cli.plan.patterns import make_problem
from toast_cli.program.model import Program
from toast_cli.search.incumbent import SearchResult
from toast_cli.search.objective import PRICE
from toast_cli.search.run import Settings, run_search
from toast_cli.tactics import starting_plans

MESHES = ("v4-32:data=8,model=2", "h100-8:data=4,model=2", "p100-8:data=4,model=2")
REACHED = 1.0 + 1e-6  # of the optimum's time with the price of its decisions

COLUMNS = {
    "program": "{program}", "mesh": "{mesh}", "optimum ms": "{best_ms:.4f}", "gap %": "{gap:.2f}",
    "proof s": "{proof_seconds:.1f}", "reached": "{reached}", "worst %": "{worst:.3f}", "evaluations": "{evaluations}",
    "": "{verdict}",
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", help="sample models by name (default: the tiny twins)")
    parser.add_argument("--mesh", nargs="+", default=MESHES, help="specifications, NAME or NAME:axis=size,...")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each proof")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    names = options.programs or [name for name in choose([]) if is_tiny(name)]
    rows: list[Row] = []
    for name, path in choose(names).items():
        program = load(str(path)).program
        dimensions = analyse(program)
        for mesh in options.mesh:
            rows.append(measure(name, program, dimensions, mesh, options.seeds, options.seconds))
            note(
                "{program} {mesh}: gap {gap:.2f} %, reached {reached}, worst {worst:.3f} % {verdict}".format_map(
                    rows[-1]
                )
            )
    show(f"MCTS against the proven optimum, {options.seeds} seeds", COLUMNS, rows, {"missed": "red", "open": "dim"})
    write_json(options.json, rows)
    return 1 if any(row["verdict"] == "missed" for row in rows) else 0


def measure(name: str, program: Program, dimensions: Dimensions, mesh: str, seeds: int, seconds: float) -> Row:
    """One row; `worst`: how much slower the worst seed's plan is, in per cent."""
    spec, _, shape = mesh.partition(":")
    problem = make_problem(program, dimensions, load_spec(spec).mesh(parse_shape(shape) if shape else None))
    starts = tuple(starting_plans(problem))
    evaluator = Evaluator(problem)
    exact = run_search(evaluator, Settings("exact", seconds=seconds), starts)
    best = exact.cost.step_seconds
    row: Row = {
        "program": name, "mesh": mesh, "best_ms": 1e3 * best,
        "gap": 100.0 * (best / exact.lower_bound - 1.0) if exact.lower_bound else float("inf"),
        "proof_seconds": exact.seconds, "reached": "", "worst": float("nan"), "evaluations": exact.evaluations,
        "verdict": "open",
    }  # fmt: skip
    if not exact.proven:
        return row
    found = [run_search(evaluator, Settings(seed=seed), starts) for seed in range(seeds)]
    reached = sum(priced(result) <= priced(exact) * REACHED for result in found)
    worst = (
        max((result.cost.step_seconds if result.fits else float("inf") for result in found), default=best) / best - 1.0
    )
    verdict = "" if reached >= 0.95 * seeds and worst <= 0.02 else "missed"
    return {**row, "reached": f"{reached}/{seeds}", "worst": 100.0 * worst, "verdict": verdict}


def priced(result: SearchResult) -> float:
    """Seconds with what each decision must gain, which is what searches compare."""
    return result.cost.step_seconds * (1.0 + PRICE * len(result.plan)) if result.fits else float("inf")


if __name__ == "__main__":
    sys.exit(main())
