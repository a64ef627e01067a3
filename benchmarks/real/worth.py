"""What each pass of the compiler model is worth on programs of published packages that nobody looked into.

Switches off one pass at a time and predicts the stored points of `judge` again (see `benchmarks.real.quick`; needs the
lowered programs, and no compiler). A figure is by how many percentage points an error grows without the pass, without
its sign: a positive one is what the pass is worth.

* moved: points whose predicted peak or step changes by more than a thousandth.
* peak, mean and 90th percentile: of the error of the predicted peak, over all points. moved: the mean over those that
  move.
* step: the mean error of the predicted step, over the points whose cycles were asked for.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.common import Row, note, show
from benchmarks.corpus import fingerprint, restore
from benchmarks.real.lower import FOLDER, path_of
from benchmarks.real.programs import chosen
from benchmarks.real.quick import MEASURED, TABLE, problem_of, row_of, stored_points
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.frontend import load
from toast_cli.hardware import load_spec

ALL = ""  # with every pass
COLUMNS = {
    "pass": "{name}", "points": "{points}", "moved": "{moved}", "peak, mean": "{mean:+.2f}",
    "peak, 90th percentile": "{p90:+.2f}", "peak of those moved": "{of_moved:+.1f}", "steps": "{steps}",
    "step, mean": "{step:+.2f}",
}  # fmt: skip

Key = tuple[str, str, str]  # program, mesh, plan


@dataclass
class Off:
    """Predicted over measured, less one: of the peak and the step of each point, nan where that was not measured."""

    peak: dict[Key, float] = field(default_factory=dict)
    step: dict[Key, float] = field(default_factory=dict)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    found = measure(chosen(options.names, options.split), options.mesh, options.table, options.folder, options.passes)
    rows = [row_without(name, found) for name in found if name != ALL]
    show("error without each pass less error with all, percentage points", COLUMNS, rows)
    return 0


def measure(names: list[str], meshes: list[str], table: Path, folder: Path, passes: list[str]) -> dict[str, Off]:
    """Pass -> how far predictions are off without it; of all passes of the meshes' compilers, or of `passes`."""
    found: dict[str, Off] = defaultdict(Off)
    points = [p for p in stored_points(table) if not MEASURED.isdisjoint(p)]
    for name in names:
        for mesh in meshes:
            members = [p for p in points if (p["program"], p["mesh"]) == (name, mesh)]
            if not members:
                continue
            note(f"{name} {mesh}, {len(members)} points")
            problem = problem_of(load(str(path_of(name, folder))), load_spec(mesh))
            plans = [(p, restore(p["decisions"])) for p in members]
            known = [(p, plan) for p, plan in plans if fingerprint(problem, plan) == p["fingerprint"]]
            whole = Evaluator(problem)
            profile = whole.profile
            for left_out in (ALL, *sorted(profile.passes.intersection(passes) if passes else profile.passes)):
                evaluator = Evaluator(problem, profile=profile.without(left_out)) if left_out else whole
                for point, plan in known:
                    row = row_of(point, evaluator.exact_cost(plan), problem)
                    found[left_out].peak[name, mesh, point["plan"]] = row["error"]
                    found[left_out].step[name, mesh, point["plan"]] = row["step"]
    return found


def row_without(name: str, found: dict[str, Off]) -> Row:
    """What one pass is worth."""
    whole, off = found[ALL], found[name]
    moved = [
        key
        for key in off.peak
        if any(_moves(a[key], b[key]) for a, b in ((whole.peak, off.peak), (whole.step, off.step)))
    ]
    peaks = [key for key in off.peak if np.isfinite(off.peak[key])]
    steps = [key for key in off.step if np.isfinite(off.step[key])]
    errors = np.array([[abs(of.peak[key]) for key in peaks] for of in (whole, off)])
    growth = {key: abs(off.peak[key]) - abs(whole.peak[key]) for key in peaks}
    p90 = np.percentile(errors, 90, axis=1) if peaks else (0.0, 0.0)
    return {
        "name": name, "points": len(off.peak), "moved": len(moved), "mean": _percent(list(growth.values())),
        "p90": 100 * float(p90[1] - p90[0]), "of_moved": _percent([growth[key] for key in moved if key in growth]),
        "steps": len(steps), "step": _percent([abs(off.step[key]) - abs(whole.step[key]) for key in steps]),
    }  # fmt: skip


def _moves(before: float, after: float) -> bool:
    """Whether a prediction changes by more than a thousandth of what was measured; not where nothing was."""
    return abs(after - before) > 1e-3


def _percent(values: list[float]) -> float:
    return 100 * float(np.mean(values)) if values else 0.0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs (default: all of the split)")
    parser.add_argument("--split", choices=("fit", "judge", "all"), default="judge")
    parser.add_argument("--mesh", nargs="+", default=["v5e-16"])
    parser.add_argument("--passes", nargs="+", default=[], metavar="PASS", help="only these")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--table", type=Path, default=TABLE)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
