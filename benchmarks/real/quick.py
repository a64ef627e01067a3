"""Memory and collectives of programs of published packages, in seconds for each: predicted beside XLA's own figures.

For each program that `benchmarks.real.lower` has lowered, each mesh of TPUs and each plan, XLA:TPU is asked how much
memory one device needs (see `benchmarks/calibrate_memory.py`: given next to none, it stops after scheduling and says
so), and XLA's partitioner which collectives it makes. `python -m benchmarks.real.quick` adds the points that the table
lacks. Every run predicts all stored points again, prints them and their summary, and with `--write docs` puts the
summary and the ten that are furthest off into the documentation. Plans are stored, so that a point means the same
whatever the search finds today; points whose plan means something else by now are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.calibrate import Point, read_points
from benchmarks.calibrate_memory import needed, starved_options
from benchmarks.common import Row, note, show
from benchmarks.corpus import fingerprint, restore, searched, store
from benchmarks.real.lower import FOLDER, path_of
from benchmarks.real.programs import PROGRAMS, chosen
from toast_cli import xla
from toast_cli.dimensions import analyse
from toast_cli.emit import write
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.frontend import Source, load
from toast_cli.hardware import Spec, load_spec
from toast_cli.plan.decisions import Plan
from toast_cli.plan.lower import lower
from toast_cli.plan.patterns import make_problem
from toast_cli.plan.problem import Problem
from toast_cli.report.build import collective_facts
from toast_cli.report.promises import promised_collectives
from toast_cli.tactics import strategies
from toast_cli.verify.ahead import target_of
from toast_cli.verify.child import Failure
from toast_cli.verify.partitioned import collectives_after_partitioning
from toast_cli.verify.traffic import compare_traffic

TABLE = Path(__file__).resolve().parents[1] / "data" / "real.jsonl"
START, END = "<!-- real: written by benchmarks/real/quick.py -->", "<!-- real: end -->"
PEAK_AIM, SHARE_AIM = 0.08, 0.98
POINTS = {
    "program": "{program}", "mesh": "{mesh}", "plan": "{plan}", "predicted GiB": "{predicted_gib:.3f}",
    "needed GiB": "{needed_gib:.3f}", "error": "{error:+.1%}", "as promised": "{share:.1%}",
}  # fmt: skip
SUMMARY = {
    "": "{name}", "points": "{points}", "programs": "{programs}", "peak, median": "{median:.1%}",
    "90th percentile": "{p90:.1%}", "bias": "{bias:+.1%}", "collectives as promised": "{promised}",
    "rejected by the compiler": "{rejected}",
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    names = chosen(options.names, options.split)
    if options.seconds:
        fill(names, options)
    stored = [p for p in read_points(options.table) if p["program"] in names and p["mesh"] in options.mesh]
    rows, stale = predict([p for p in stored if p["plan"] in options.plans], options.folder, options.without)
    show("peak memory of one device", POINTS, sorted(rows, key=lambda row: row["error"]))
    show("summary", SUMMARY, summary(rows))
    print(f"{len(rows)} points, {stale} stale ones left out")
    for point in stored:
        if "failed" in point:
            print(f"no figure: {point['program']} {point['mesh']} {point['plan']}: {point['failed'][:160]}")
    if options.write:
        write_page(options.write / "cost-model.md", rows)
    return 0


# -- asking -----------------------------------------------------------------------------------------------------------


def fill(names: list[str], options: argparse.Namespace) -> None:
    """Adds the points that the table lacks."""
    start = time.monotonic()
    known = {(p["program"], p["mesh"], p["plan"]) for p in read_points(options.table)}
    for mesh in options.mesh:
        for name in names:
            path = path_of(name, options.folder)
            if all((name, mesh, label) in known for label in options.plans) or not path.exists():
                continue
            spec, source = load_spec(mesh), load(str(path))
            problem = problem_of(source, spec)
            for label, plan in plans_of(problem, [p for p in options.plans if (name, mesh, p) not in known]):
                point = {"program": name, "mesh": mesh, "plan": label, "decisions": store(plan)}
                point |= {"fingerprint": fingerprint(problem, plan)} | ask(source, problem, plan, spec)
                with options.table.open("a") as table:
                    table.write(json.dumps(point) + "\n")
                note(f"{name} {mesh} {label}: {point.get('needed_bytes', 0) / 2**30:.3f} GiB {point.get('failed', '')}")
            if time.monotonic() - start > options.seconds:
                return


def problem_of(source: Source, spec: Spec) -> Problem:
    return make_problem(source.program, analyse(source.program), spec.mesh())


def plans_of(problem: Problem, labels: list[str]) -> Iterator[tuple[str, Plan]]:
    """The search's plan and strategies, of those that apply."""
    known = strategies(problem)
    for label in labels:
        plan = searched(problem) if label == "search" else known.get(label)
        if plan is not None:
            yield label, plan


def ask(source: Source, problem: Problem, plan: Plan, spec: Spec) -> Point:
    """What one device needs, and the part of the bytes of collectives that is as promised, by XLA."""
    content = write(source, lower(problem, plan), "bytecode").content
    target = target_of(spec)
    devices = xla.tpu_devices(target.topology, target.megacore)[: target.devices]
    start = time.monotonic()
    try:
        xla.compile_ahead(content, devices, shardy=True, options=starved_options(spec.chip))
        told: Point = {"failed": "compiles in next to no memory"}
    except RuntimeError as error:
        told = needed(str(error))
    told["seconds"] = round(time.monotonic() - start, 1)
    mesh = problem.mesh
    axes = dict(zip(mesh.names, mesh.sizes, strict=True))
    made = collectives_after_partitioning(content, "stablehlo", axes)
    if isinstance(made, Failure):
        return told | {"unpartitioned": made.reason[:300]}
    promised = promised_collectives(collective_facts(source, Evaluator(problem), plan))
    compared = compare_traffic(promised, made, axes)
    return told | {"share": compared.share, "compiled_bytes": compared.compiled_bytes}


# -- telling ----------------------------------------------------------------------------------------------------------


def predict(points: list[Point], folder: Path, without: Iterable[str] = ()) -> tuple[list[Row], int]:
    """One row for each point; and how many points are stale. without: passes of the compiler to leave out."""
    rows: list[Row] = []
    stale = 0
    for name, mesh in dict.fromkeys((p["program"], p["mesh"]) for p in points):
        problem = problem_of(load(str(path_of(name, folder))), load_spec(mesh))
        evaluator = Evaluator(problem)
        if without:
            evaluator = Evaluator(problem, profile=evaluator.profile.without(*without))
        for point in points:
            if (point["program"], point["mesh"]) != (name, mesh) or "needed_bytes" not in point:
                continue
            plan = restore(point["decisions"])
            if fingerprint(problem, plan) != point["fingerprint"]:
                stale += 1
                continue
            rows.append(row_of(point, evaluator.exact_cost(plan).peak_bytes, problem))
    return rows, stale


def row_of(point: Point, predicted: float, problem: Problem) -> Row:
    program, gib = PROGRAMS[point["program"]], 2.0**30
    return {
        "program": point["program"], "family": program.family, "split": program.split, "mesh": point["mesh"],
        "plan": point["plan"], "predicted_gib": predicted / gib, "needed_gib": point["needed_bytes"] / gib,
        "limit_gib": problem.mesh.limit_bytes / gib, "error": predicted / point["needed_bytes"] - 1,
        "share": point.get("share", float("nan")),
    }  # fmt: skip


def summary(rows: list[Row]) -> list[Row]:
    """Over each split, then by mesh and plan."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        for name in (row["split"], f"{row['split']}, {row['mesh']}", f"{row['split']}, {row['plan']}"):
            groups.setdefault(name, []).append(row)
    return [_summed(name, groups[name]) for name in sorted(groups)]


def _summed(name: str, rows: list[Row]) -> Row:
    errors, shares = np.array([row["error"] for row in rows]), np.array([row["share"] for row in rows])
    told = int(np.isfinite(shares).sum())
    rejected = sum(row["predicted_gib"] <= row["limit_gib"] < row["needed_gib"] for row in rows)
    return {
        "name": name, "points": len(rows), "programs": len({row["program"] for row in rows}),
        "median": float(np.median(abs(errors))), "p90": float(np.percentile(abs(errors), 90)),
        "bias": float(np.median(errors)), "promised": f"{int((shares >= SHARE_AIM).sum())} of {told}",
        "rejected": rejected,
    }  # fmt: skip


def write_page(page: Path, rows: list[Row]) -> None:
    """Puts the summary, and the ten points that are furthest off, between the markers of the page."""
    worst = sorted(rows, key=lambda row: -abs(row["error"]))[:10]
    lines = [*_table(SUMMARY, summary(rows)), "", "The ten that are furthest off:", "", *_table(POINTS, worst)]
    before, _, rest = page.read_text(encoding="utf-8").partition(START)
    text = before + START + "\n" + "\n".join(lines) + "\n" + END + rest.partition(END)[2]
    page.write_text(text, encoding="utf-8")


def _table(columns: dict[str, str], rows: list[dict[str, Any]]) -> list[str]:
    heads = ["| " + " | ".join(columns) + " |", "|---|" + "--:|" * (len(columns) - 1)]
    return heads + ["| " + " | ".join(form.format_map(row) for form in columns.values()) + " |" for row in rows]


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs (default: all of the split)")
    parser.add_argument("--split", choices=("fit", "judge", "all"), default="judge")
    parser.add_argument("--mesh", nargs="+", default=["v5e-16", "v4-32"])
    parser.add_argument("--plans", nargs="+", metavar="PLAN", default=["search", "data-parallel"])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no point after so long; 0: ask nothing")
    parser.add_argument("--without", nargs="+", metavar="PASS", default=[], help="passes of the compiler to leave out")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the tables into the documentation: docs")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
