"""The memory model beside XLA:TPU's buffer assignment: predicts every point of `data/programs.jsonl` and tabulates the errors.

Needs neither libtpu nor the compiled programs: they are lowered again from the generators of the sample models (seconds each). Points whose
stored plan no longer means what was compiled (`fingerprint`) are left out and counted. The figures that judge are those of the test programs.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.calibrate import FOLDER, TABLE, Point, peak_bytes, read_points
from benchmarks.common import Row, show, write_json
from benchmarks.corpus import fingerprint, load_case, restore
from benchmarks.plot import scatter
from toast_cli.cost.evaluator import Evaluator

GIB = 2.0**30
START, END = "<!-- memory: written by benchmarks/calibration.py -->", "<!-- memory: end -->"
POINTS = {
    "program": "{program}", "split": "{split}", "slice": "{slice}", "plan": "{plan}", "arguments": "{argument_gib:.3f}",
    "predicted GiB": "{predicted_gib:.3f}", "compiled GiB": "{compiled_gib:.3f}", "error": "{error:+.1%}", "astray": "{astray}",
}  # fmt: skip
ERRORS = {
    "": "{name}", "points": "{points}", "median": "{median:.1%}", "90th percentile": "{p90:.1%}", "worst": "{worst:+.1%}",
    "bias": "{bias:+.1%}",
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    points = [p for p in read_points(options.table) if not options.programs or p["program"] in options.programs]
    rows, stale = predict(points, options.folder)
    rows = [row for row in rows if options.split in (None, row["split"])]
    show("peak memory of one device", POINTS, sorted(rows, key=lambda row: row["error"]))
    show("errors", ERRORS, error_table(rows))
    print(f"{stale} stale points left out")
    write_json(options.json, rows)
    if options.write:
        write_page(options.write, rows, stale)
    return 0


def predict(points: list[Point], folder: Path = FOLDER) -> tuple[list[Row], int]:
    """One row for each point that compiled or does not fit; and how many points are stale."""
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
            rows.append(row_of(point, cost.peak_bytes, cost.argument_bytes, problem.mesh.limit_bytes))
    return rows, stale


def row_of(point: Point, predicted: float, arguments: float, limit: float) -> Row:
    compiled = peak_bytes(point)
    return {
        "program": point["program"], "split": point["split"], "slice": point["slice"], "plan": point["plan"],
        "argument_gib": arguments / GIB, "predicted_gib": predicted / GIB, "compiled_gib": compiled / GIB,
        "error": predicted / compiled - 1, "astray": point["astray"], "limit_gib": limit / GIB,
        "fits": predicted <= limit, "compiled_fits": "exhausted" not in point,
    }  # fmt: skip


def verdicts(rows: list[Row]) -> tuple[int, int]:
    """Of how many points the verdict "fits" is the compiler's, and how many it calls fitting though they are over 5 % too large."""
    agreed = sum(row["fits"] == row["compiled_fits"] for row in rows)
    return agreed, sum(row["fits"] and row["compiled_gib"] > 1.05 * row["limit_gib"] for row in rows)


def write_page(folder: Path, rows: list[Row], stale: int) -> None:
    """Puts the tables between the markers of `cost-model.md` in `folder`, and the plot beside it."""
    agreed, wrong = verdicts(rows)
    heads = list(ERRORS)
    table = ["| " + " | ".join(heads) + " |", "|---|" + "--:|" * (len(heads) - 1)]
    table += ["| " + " | ".join(form.format_map(row) for form in ERRORS.values()) + " |" for row in error_table(rows)]
    told = (
        f"{len(rows)} points ({stale} stale ones left out). The verdict whether it fits is the compiler's on {agreed} of {len(rows)}; "
        f"{wrong} are called fitting though they are over 5 % too large."
    )
    page = folder / "cost-model.md"
    before, _, rest = page.read_text().partition(START)
    _, _, after = rest.partition(END)
    page.write_text(before + START + "\n" + "\n".join([told, "", *table]) + "\n" + END + after)
    points = [
        (r["compiled_gib"], r["predicted_gib"], f"{r['program']} {r['slice']} {r['plan']}", r["split"] == "test")
        for r in rows
    ]
    (folder / "memory.svg").write_text(scatter("peak memory of one device", "GiB", points))


def error_table(rows: list[Row]) -> list[Row]:
    """Errors over all rows of each split, then by program."""
    found = [errors(split, [r for r in rows if r["split"] == split]) for split in ("fit", "test")]
    programs = list(dict.fromkeys(r["program"] for r in rows))
    return [row for row in [*found, *(errors(p, [r for r in rows if r["program"] == p]) for p in programs)] if row]


def errors(name: str, rows: list[Row]) -> Row:
    """Median, 90th percentile and worst of the errors of some rows that compiled; empty without any."""
    signed = np.array([row["error"] for row in rows if row["compiled_fits"]])
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
        "--write", type=Path, metavar="FOLDER", help="write table and plot into the documentation: docs"
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON; - for stdout")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
