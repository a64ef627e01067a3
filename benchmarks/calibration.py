"""The memory model beside what XLA:TPU needs: predicts every point of `data/memory.jsonl` and tabulates the errors.

Needs neither libtpu nor the compiled programs: they are lowered again from the generators of the sample models (seconds
each). Points whose stored plan no longer means what was compiled (`fingerprint`) are left out and counted. The figures
that judge are those of the test programs.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.calibrate import FOLDER, Point, key, read_points
from benchmarks.calibrate import TABLE as COMPILED
from benchmarks.calibrate_memory import TABLE
from benchmarks.common import Row, markdown_table, put_between, show, write_json
from benchmarks.corpus import PROGRAMS, fingerprint, load_case, restore
from benchmarks.plot import scatter
from toast_cli.plan.problem import Problem
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.memory_fit import UNSURE, fit_of, peak_error

GIB = 2.0**30
START, END = "<!-- memory: written by benchmarks/calibration.py -->", "<!-- memory: end -->"
POINTS = {
    "program": "{program}", "split": "{split}", "slice": "{slice}", "plan": "{plan}", "arguments": "{argument_gib:.3f}",
    "predicted GiB": "{predicted_gib:.3f}", "needed GiB": "{needed_gib:.3f}", "error": "{error:+.1%}",
    "astray": "{astray}",
}  # fmt: skip
ERRORS = {
    "": "{name}", "points": "{points}", "median": "{median:.1%}", "90th percentile": "{p90:.1%}",
    "worst": "{worst:+.1%}",
    "bias": "{bias:+.1%}",
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    points = [p for p in read_points(options.table) if not options.programs or p["program"] in options.programs]
    rows, stale = predict(points, options.folder)
    rows = [row for row in rows if options.split in (None, row["split"])]
    show("peak memory of one device", POINTS, sorted(rows, key=lambda row: row["error"]))
    show("errors", ERRORS, error_table(rows))
    print("\n".join(told(rows, stale, yardstick(points, read_points(COMPILED)))))
    write_json(options.json, rows)
    if options.write:
        write_page(options.write, rows, told(rows, stale, yardstick(points, read_points(COMPILED))))
    return 0


def predict(points: list[Point], folder: Path = FOLDER) -> tuple[list[Row], int]:
    """One row for each point; and how many points are stale."""
    rows: list[Row] = []
    stale = 0
    grouped: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for point in points:
        if "failed" not in point:
            grouped[point["program"], point["slice"]].append(point)
    for (program, slice_name), members in grouped.items():
        problem = load_case(program, slice_name, folder).problem
        evaluator = Evaluator(problem)
        for point in members:
            plan = restore(point["decisions"])
            if fingerprint(problem, plan) != point["fingerprint"]:
                stale += 1
                continue
            cost = evaluator.exact_cost(plan)
            rows.append(row_of(point, cost.peak_bytes, cost.argument_bytes, problem))
    return rows, stale


def row_of(point: Point, predicted: float, arguments: float, problem: Problem) -> Row:
    needed, chip = point["needed_bytes"], problem.mesh.chip
    return {
        "program": point["program"], "split": PROGRAMS[point["program"]].split, "slice": point["slice"],
        "plan": point["plan"], "argument_gib": arguments / GIB, "predicted_gib": predicted / GIB,
        "needed_gib": needed / GIB, "error": predicted / needed - 1, "astray": point["astray"],
        "usable_gib": (chip.memory_bytes - chip.reserved_bytes) / GIB,
        "peak_error": peak_error(problem.program, problem.mesh),
    }  # fmt: skip


def verdicts(rows: list[Row]) -> tuple[int, int, int]:
    """(agreed, warned, wrong): on how many rows the prediction and the compiler agree on whether it fits; of the
    others, how many are remarked on because the prediction is near the limit; and how many are called fitting without a
    remark though they are over 5 % too large.
    """
    agreed = warned = wrong = 0
    for row in rows:
        limit, predicted, needed = row["usable_gib"], row["predicted_gib"], row["needed_gib"]
        same = (predicted <= limit) == (needed <= limit)
        remarked = fit_of(predicted, limit, row["peak_error"]) == UNSURE
        agreed += same
        warned += not same and remarked
        wrong += predicted <= limit and needed > 1.05 * limit and not remarked
    return agreed, warned, wrong


def tightened(rows: list[Row]) -> list[Row]:
    """Rows as if the chip had what the program's plans on that slice need on average, of programs with several:
    verdicts that are not easy.
    """
    needs: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        needs[row["program"], row["slice"]].append(row["needed_gib"])
    means = {case: float(np.mean(found)) for case, found in needs.items() if len(found) > 1}
    return [row | {"usable_gib": means[case]} for row in rows if (case := (row["program"], row["slice"])) in means]


def yardstick(points: list[Point], compiled: list[Point]) -> list[tuple[float, float]]:
    """For each point that was also compiled in full: what is needed over the peak that is then reported, and over what
    is assigned.
    """
    needed = {key(point): point["needed_bytes"] for point in points if "failed" not in point}
    found = []
    for point in compiled:
        if key(point) in needed and "peak_bytes" in point:
            assigned = point["argument_bytes"] + point["output_bytes"] - point["alias_bytes"] + point["temp_bytes"]
            found.append((needed[key(point)] / point["peak_bytes"], needed[key(point)] / assigned))
    return found


def told(rows: list[Row], stale: int, yard: list[tuple[float, float]]) -> list[str]:
    """What there is to say besides the table."""
    test = [row for row in rows if row["split"] == "test"]
    said = [f"{len(rows)} points; {stale} more are left out, because their stored plans mean something else today.", ""]
    for what, chosen in (("the chips' memory", test), ("what a program's plans need on average", tightened(test))):
        agreed, warned, wrong = verdicts(chosen)
        said.append(
            f"With {what} as the limit, toast says of {agreed} of {len(chosen)} test points what the compiler says: "
            f"fits or does not fit ({agreed / max(1, len(chosen)):.0%}). {warned} of the others come with a warning. "
            f"{wrong} are said to fit without a warning and need over 5 % more than the limit."
        )
    if yard:
        peaks, assigned = (np.array(ratios) for ratios in zip(*yard, strict=True))
        said.append(
            f"In {len(yard)} full compiles the needed memory is {np.median(peaks):.2f} of the peak ({peaks.min():.2f} "
            f"to {peaks.max():.2f}), and {np.median(assigned):.2f} of what XLA assigns ({assigned.min():.2f} to "
            f"{assigned.max():.2f})."
        )
    return said


def write_page(page: Path, rows: list[Row], said: list[str]) -> None:
    """Puts the tables between the markers of the page, and the plot beside it."""
    put_between(page, START, END, [*said, "", *markdown_table(ERRORS, error_table(rows))])
    points = [
        (r["needed_gib"], r["predicted_gib"], f"{r['program']} {r['slice']} {r['plan']}", r["split"] == "test")
        for r in rows
    ]
    (page.parent / "memory.svg").write_text(scatter("peak memory of one device", "GiB", points))


def error_table(rows: list[Row]) -> list[Row]:
    """Errors over all rows of each split, then by test program."""
    found = [errors(split, [r for r in rows if r["split"] == split]) for split in ("fit", "test")]
    programs = list(dict.fromkeys(r["program"] for r in rows if r["split"] == "test"))
    return [row for row in [*found, *(errors(p, [r for r in rows if r["program"] == p]) for p in programs)] if row]


def errors(name: str, rows: list[Row]) -> Row:
    """Median, 90th percentile and worst of the errors of some rows; empty without any."""
    signed = np.array([row["error"] for row in rows])
    if not len(signed):
        return {}
    size = np.abs(signed)
    return {
        "name": name, "points": len(signed), "median": float(np.median(size)), "p90": float(np.percentile(size, 90)),
        "worst": float(signed[size.argmax()]), "bias": float(np.median(signed)),
    }  # fmt: skip


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("programs", nargs="*", help="only these programs of the corpus")
    parser.add_argument("--split", choices=("fit", "test"))
    parser.add_argument("--table", type=Path, default=TABLE, metavar="FILE")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where lowered programs are kept")
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="put table and plot into this page: docs/accuracy.md"
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON; - for stdout")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
