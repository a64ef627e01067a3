"""The time model beside XLA:TPU's cycles: single ops (`data/ops.csv`) and whole programs under plans
(`data/programs.jsonl`).

Needs neither libtpu nor compiled programs. Compiled time is the sum of the compiler's `estimated_cycles` over the
chip's clock, loops counted; it holds no collectives and no asynchronous copies, so it stands beside predicted compute.
Ranks are compared among the plans of one program on one slice. `--write docs/accuracy.md` puts tables into
that page, and draws `docs/time.svg`.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from benchmarks import calibrate_ops
from benchmarks.calibrate import FOLDER, TABLE, Point, read_points
from benchmarks.common import Row, markdown_table, put_between, show, spearman, write_json
from benchmarks.corpus import PROGRAMS, fingerprint, load_case, restore
from benchmarks.op_cases import cases
from benchmarks.plot import scatter
from toast_cli.price.evaluator import Evaluator

START, END = "<!-- time: written by benchmarks/calibration_time.py -->", "<!-- time: end -->"
LEAST_RANKED = 3  # plans of one program and slice whose order says anything
CHIPS = ["v4", "v5e", "v5p", "v6e"]

PROGRAM_COLUMNS = {
    "program": "{program}", "slice": "{slice}", "plan": "{plan}", "set": "{set}", "compiled ms": "{compiled:.2f}",
    "predicted ms": "{predicted:.2f}", "error %": "{error:+.0f}",
}  # fmt: skip

FAMILY_COLUMNS = {
    "program": "{program}", "points": "{points}", "compiled ms": "{least:.1f} to {most:.1f}",
    "median error %": "{median:.0f}", "worst %": "{worst:+.0f}", "bias %": "{bias:+.0f}",
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    points = [point for point in read_points(options.table) if point.get("cycles")] if options.table.exists() else []
    programs = predict(points, options.folder)
    ops = calibrate_ops.summary(calibrate_ops.predict(cases(), CHIPS)) if not options.no_ops else []
    show("compute of one device, whole programs", PROGRAM_COLUMNS, programs)
    print("\n".join(told(programs)))
    show("single ops", calibrate_ops.COLUMNS, ops)
    write_json(options.json, {"programs": programs, "ops": ops})
    if options.write:
        write_page(options.write, programs, ops)
    return 0


def predict(points: list[Point], folder: Path = FOLDER) -> list[Row]:
    """One row for each point whose plan still means what was compiled; milliseconds, error in percent."""
    rows: list[Row] = []
    grouped: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for point in points:
        grouped[point["program"], point["slice"]].append(point)
    for (program, slice_name), members in sorted(grouped.items()):
        problem = load_case(program, slice_name, folder).problem
        evaluator = Evaluator(problem)
        for point in members:
            plan = restore(point["decisions"])
            if fingerprint(problem, plan) != point["fingerprint"]:
                continue
            compiled = 1e3 * point["cycles"] / problem.mesh.chip.clock_hertz
            predicted = 1e3 * evaluator.cost(plan).compute_seconds
            rows.append(
                {
                    "program": program,
                    "slice": slice_name,
                    "plan": point["plan"],
                    "set": PROGRAMS[program].split,
                    "compiled": compiled,
                    "predicted": predicted,
                    "error": 100 * (predicted / compiled - 1),
                }
            )
    return rows


def told(rows: list[Row]) -> list[str]:
    """The errors of each set in a line, and how well ranks agree."""
    lines = []
    for name in ("fit", "test"):
        sizes = sorted(abs(row["error"]) for row in rows if row["set"] == name)
        if sizes:
            ninth = sizes[int(0.9 * (len(sizes) - 1))]
            lines.append(
                f"{name}: {len(sizes)} points, median error {median(sizes):.0f} %, 90th percentile {ninth:.0f} %."
            )
    found = ranks(rows)
    if found:
        lines.append(f"Spearman, {len(found)} programs on a slice: median {median(found):.2f}, worst {min(found):.2f}.")
    return lines


def ranks(rows: list[Row]) -> list[float]:
    """Spearman's correlation of compiled and predicted, for each program and slice with enough plans."""
    grouped: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        grouped[row["program"], row["slice"]].append(row)
    return [
        spearman([r["compiled"] for r in members], [r["predicted"] for r in members])
        for members in grouped.values()
        if len(members) >= LEAST_RANKED
    ]


def by_program(rows: list[Row]) -> list[Row]:
    """Errors of the plans of each test program, and the range of compiled times."""
    found = []
    for program in dict.fromkeys(row["program"] for row in rows if row["set"] == "test"):
        members = [row for row in rows if row["program"] == program]
        errors, times = [row["error"] for row in members], [row["compiled"] for row in members]
        found.append(
            {"program": program, "points": len(members), "least": min(times),
             "most": max(times), "median": median(map(abs, errors)), "worst": max(errors, key=abs),
             "bias": median(errors)}
        )  # fmt: skip
    return found


def write_page(page: Path, programs: list[Row], ops: list[Row]) -> None:
    """Puts the tables between the markers of the page, and the plot beside it."""
    lines = [
        *told(programs),
        "",
        *markdown_table(FAMILY_COLUMNS, by_program(programs)),
        "",
        "Single ops:",
        "",
        *calibrate_ops.by_family(ops),
    ]
    put_between(page, START, END, lines)
    points = [
        (r["compiled"], r["predicted"], f"{r['program']} {r['slice']} {r['plan']}", r["set"] == "test")
        for r in programs
    ]
    (page.parent / "time.svg").write_text(scatter("compute of one device", "ms", points), encoding="utf-8")


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=TABLE, metavar="FILE", help="compiled programs")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where lowered programs are kept")
    parser.add_argument("--no-ops", action="store_true", help="whole programs only")
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="put tables and plot into this page: docs/accuracy.md"
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON; - for stdout")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
