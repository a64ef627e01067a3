"""How far plans are from the best of all shardings, which is found without plans (tests/brute_force.py): small programs
of each kind, and random ones.

One row for each program and mesh: milliseconds of the plan that decisions about groups of dimensions lead to, of the
searched plan, and of the best assignment of shardings to all ops; and how far the plan is behind that. In a plan ops do
otherwise than decisions say where that gains what it takes to say it (`--must-gain`, a fraction of the step; a search
that is not asked for a proof wants more). Exits with 1 where a plan is more than 1 % behind.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from brute_force import best_of_all
from programs import case_of, round_mesh
from small_programs import PROGRAMS, Small, random_program

from benchmarks.common import Row, note, show, write_json
from toast_cli.hardware import parse_shape
from toast_cli.search.objective import PRICE
from toast_cli.search.overrides import overridden
from toast_cli.search.run import run_search
from toast_cli.tactics import starting_plans

BEHIND = 1.01
EVALUATIONS = 2000
COLUMNS = {
    "program": "{program}", "mesh": "{mesh}", "by groups": "{by_groups_ms:.5f}", "plan ms": "{plan_ms:.5f}",
    "best ms": "{best_ms:.5f}",
    "behind %": "{behind:.2f}", "decisions": "{decisions}", "": "{verdict}",
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", help=f"by name or number (default: {', '.join(PROGRAMS)})")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="so many random programs")
    parser.add_argument("--mesh", nargs="+", default=["data=4", "data=4,model=2"], help="axis=size,...")
    parser.add_argument("--evaluations", type=int, default=EVALUATIONS)
    parser.add_argument("--must-gain", type=float, default=PRICE)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    names = options.programs or ([] if options.random else list(PROGRAMS))
    chosen = {name: random_program(int(name)) if name.isdigit() else PROGRAMS[name] for name in names}
    chosen |= {str(number): random_program(number) for number in range(options.random)}
    rows: list[Row] = []
    for name, small in chosen.items():
        for mesh in options.mesh:
            rows.append(measure(name, small, mesh, options.evaluations, options.must_gain))
            note("{program} {mesh}: {behind:.2f} % behind {verdict}".format_map(rows[-1]))
    show("plans against the best of all shardings", COLUMNS, rows, {"behind": "red"})
    behind = sum(row["verdict"] != "" for row in rows)
    print(f"{behind} of {len(rows)} more than 1 % behind")
    write_json(options.json, rows)
    return 1 if behind else 0


def measure(name: str, small: Small, mesh: str, evaluations: int, must_gain: float) -> Row:
    case = case_of(small.run, *small.shapes, donate=small.donate, mesh=round_mesh(**parse_shape(mesh)))
    starts = tuple(starting_plans(case.problem))
    by_groups = run_search(case.evaluator, "mcts", 0, evaluations, starts=starts)
    _, found = overridden(case.evaluator, by_groups, starts, must_gain, place_must_gain=0.0)
    best = best_of_all(case.problem)
    ratio = found.cost.step_seconds / best.seconds if best.seconds else 1.0
    return {
        "program": name, "mesh": mesh, "by_groups_ms": 1e3 * by_groups.cost.step_seconds,
        "plan_ms": 1e3 * found.cost.step_seconds, "best_ms": 1e3 * best.seconds,
        "least_ms": 1e3 * best.least, "behind": 100.0 * (ratio - 1.0), "decisions": len(found.plan),
        "verdict": "behind" if ratio > BEHIND else "",
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
