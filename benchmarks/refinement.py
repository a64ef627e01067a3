"""Whether a finer mesh ever costs more: the same devices with axes in pieces can do all that the coarse mesh can.

One row for each program and pair of meshes: the step of the searched plan on the coarse mesh and on the fine one, and
what each search took. Exits
with 1 where the fine one is more than 1 % slower. A whole slice as one axis is no pair here: over all of a mesh at once
XLA:TPU makes an all-reduce of a reduce-scatter of several axes, so that its refinement has to take two steps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Row, choose, note, show, write_json
from toast_cli.dimensions import Dimensions, analyse
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.frontend import load
from toast_cli.hardware import load_spec, parse_shape
from toast_cli.plan.patterns import make_problem
from toast_cli.program.model import Program
from toast_cli.search import SearchResult
from toast_cli.search.run import run_search
from toast_cli.tactics import starting_plans

PAIRS = (
    ("v5e-256", "a=16,b=16", "a=4,b=4,c=4,d=4"),
    ("v5e-16", "a=4,b=4", "a=2,b=2,c=2,d=2"),
    ("v4-32", "a=8,b=2", "a=4,b=2,c=2"),
)
SLOWER = 1.01

COLUMNS = {
    "program": "{program}", "mesh": "{mesh}", "coarse": "{coarse}", "ms": "{coarse_ms:.3f}", "fine": "{fine}",
    "ms ": "{fine_ms:.3f}", "slower %": "{slower:+.2f}", "s": "{coarse_seconds:.1f}", "s ": "{fine_seconds:.1f}",
    "": "{verdict}",
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", help="sample models by name (default: all but the tiny twins)")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    for name, path in choose(options.programs).items():
        program = load(str(path)).program
        dimensions = analyse(program)
        for spec, coarse, fine in PAIRS:
            rows.append(measure(name, program, dimensions, spec, coarse, fine))
            note(
                "{program} {mesh}: {coarse} {coarse_ms:.3f} ms, {fine} {fine_ms:.3f} ms {verdict}".format_map(rows[-1])
            )
    show("plans on finer meshes", COLUMNS, rows, {"slower": "red"})
    write_json(options.json, rows)
    return 1 if any(row["verdict"] for row in rows) else 0


def measure(name: str, program: Program, dimensions: Dimensions, spec: str, coarse: str, fine: str) -> Row:
    found = [searched(program, dimensions, spec, shape) for shape in (coarse, fine)]
    times = [1e3 * result.cost.step_seconds if result.fits else float("inf") for result in found]
    worse = times[1] > times[0] * SLOWER
    return {
        "program": name, "mesh": spec, "coarse": coarse, "fine": fine, "coarse_ms": times[0], "fine_ms": times[1],
        "coarse_seconds": found[0].seconds, "fine_seconds": found[1].seconds,
        "slower": 100.0 * (times[1] / times[0] - 1.0), "verdict": "slower" if worse else "",
    }  # fmt: skip


def searched(program: Program, dimensions: Dimensions, spec: str, shape: str) -> SearchResult:
    problem = make_problem(program, dimensions, load_spec(spec).mesh(parse_shape(shape)))
    return run_search(Evaluator(problem), "mcts", 0, starts=starting_plans(problem))


if __name__ == "__main__":
    sys.exit(main())
