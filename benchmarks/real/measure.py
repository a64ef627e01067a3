"""Predicted beside compiled, for programs of published packages that `benchmarks.real.lower` has lowered.

For each program, mesh and plan (the search's and the known strategies') one row of JSON is appended to `--table`:
collectives promised and compiled (share of bytes that agree in kind and axes), peak memory, step time, wall time of
the command. Points that the table has already are left alone. `--show` prints the table and its summary: the figures
that this project is judged by, the worst ten rows and what is wrong with them. XLA:TPU and XLA:GPU compile ahead of
time (extras `tpu` and `gpu`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

from benchmarks.common import Row, note, show, spearman
from benchmarks.real.lower import FOLDER, path_of
from benchmarks.real.programs import PROGRAMS, chosen
from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.collectives import collectives_in
from toast_cli.ask_xla.compile import compile_for, target_of
from toast_cli.ask_xla.confirm import seconds_on
from toast_cli.ask_xla.schedule import scheduled_time
from toast_cli.ask_xla.verdict import compare_traffic
from toast_cli.hardware import load_spec
from toast_cli.pipeline import Outcome, partition
from toast_cli.plan.decisions import Plan
from toast_cli.price.evaluator import Evaluator
from toast_cli.report.build import collective_facts
from toast_cli.request import Request
from toast_cli.tactics import strategies

TABLE = Path("build/real.jsonl")
AIM_SHARE = 0.98

COLUMNS = {
    "program": "{program}", "mesh": "{mesh}", "plan": "{plan}", "ops": "{ops}", "as promised": "{share:.1%}",
    "peak": "{peak:+.0%}", "compute": "{compute:+.0%}", "step": "{step:+.0%}",
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs (default: all of the split)")
    parser.add_argument("--split", choices=("fit", "judge", "all"), default="judge")
    parser.add_argument("--mesh", nargs="+", default=["v4-32", "v5e-16", "h100-8"])
    parser.add_argument("--plans", nargs="+", metavar="PLAN", help="search, or strategies (default: all)")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no point after so long")
    parser.add_argument("--show", action="store_true", help="only print the table")
    options = parser.parse_args(arguments)
    names = chosen(options.names, options.split)
    if not options.show:
        fill(names, options)
    rows = [row for row in read(options.table) if row["program"] in names and row["mesh"] in options.mesh]
    report(rows)
    return 0


def read(table: Path) -> list[Row]:
    """The stored rows."""
    return [json.loads(line) for line in table.read_text().splitlines()] if table.exists() else []


def fill(names: list[str], options: argparse.Namespace) -> None:
    start = time.monotonic()
    known = {(row["program"], row["mesh"], row["plan"]) for row in read(options.table)}
    options.table.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = path_of(name, options.folder)
        if not path.exists():
            note(f"{name}: not lowered")
            continue
        for mesh in options.mesh:
            for label, point in points(name, path, mesh, options.plans, known):
                row = {"program": name, "family": PROGRAMS[name].family, "mesh": mesh, "plan": label, **point}
                with options.table.open("a") as table:
                    table.write(json.dumps(row) + "\n")
                note(f"{name} {mesh} {label}: {row.get('failed') or figures(row)}")
                if time.monotonic() - start > options.seconds:
                    return


def points(
    name: str, path: Path, mesh: str, plans: list[str] | None, known: set[tuple[str, str, str]]
) -> Iterator[tuple[str, Row]]:
    """(plan's name, figures) of one program on one mesh, for the plans that are not known yet."""
    if plans and all((name, mesh, plan) in known for plan in plans):
        return
    begun = time.process_time()
    outcome = partition(Request(str(path), mesh))
    found = {"search": outcome.result.plan, **strategies(outcome.problem)}
    seconds = time.process_time() - begun
    for label, plan in found.items():
        if plan and (plans is None or label in plans) and (name, mesh, label) not in known:
            yield label, {"processor_seconds": round(seconds, 2), **measured(outcome, plan, mesh)}


def measured(outcome: Outcome, plan: Plan, mesh_name: str) -> Row:
    """Figures of one plan."""
    problem = outcome.problem
    mesh, evaluator = problem.mesh, Evaluator(problem)
    cost = evaluator.exact_cost(plan)
    chosen_plan = replace(outcome, result=replace(outcome.result, plan=plan))
    row: Row = {
        "ops": outcome.report.program.ops,
        "predicted_step": cost.step_seconds,
        "predicted_compute": cost.compute_seconds,
        "predicted_peak": cost.peak_bytes,
        "limit": mesh.limit_bytes,
    }
    facts = compile_for(content_of(chosen_plan), "stablehlo", target_of(load_spec(mesh_name)))
    if isinstance(facts, Failure):
        return row | {"failed": facts.reason[:300]}
    rates = mesh.chip.clock_hertz, mesh.chip.memory_bytes_per_second
    walked = scheduled_time(facts.hlo_text, mesh.names, mesh.sizes, *rates, lambda k, b, a: seconds_on(mesh, k, b, a))
    promised = collective_facts(outcome.source, evaluator, plan)
    compiled = collectives_in(facts.hlo_text, mesh.names, mesh.sizes)
    compared = compare_traffic(promised, compiled, dict(zip(mesh.names, mesh.sizes, strict=True)))
    return row | {
        "peak": facts.device_bytes, "compute": walked.compute_seconds, "communication": walked.communication_seconds,
        "exposed": walked.exposed_seconds, "share": compared.share, "promised_bytes": compared.promised_bytes,
        "compiled_bytes": compared.compiled_bytes, "compile_seconds": round(facts.seconds, 1),
        "differences": [asdict(one) for one in compared.differences[:6]],
    }  # fmt: skip


def content_of(outcome: Outcome) -> bytes:
    """The written program."""
    return outcome.emit("bytecode").content


def figures(row: Row) -> Row:
    """Errors of one row: predicted over compiled, less one."""
    timed = row.get("compute")  # XLA:GPU estimates no cycles
    step = row["compute"] + row["communication"] if timed else 0.0
    return {
        "share": row["share"],
        "peak": row["predicted_peak"] / row["peak"] - 1 if row["peak"] else 0.0,
        "compute": row["predicted_compute"] / row["compute"] - 1 if timed else 0.0,
        "step": row["predicted_step"] / step - 1 if timed else 0.0,
    }


def report(rows: list[Row]) -> None:
    """The table, the summary, and the ten rows that are furthest off."""
    compiled = [{**row, **figures(row)} for row in rows if "failed" not in row]
    show("predicted over compiled", COLUMNS, compiled)
    for row in rows:
        if "failed" in row:
            fits = row["predicted_peak"] <= row["limit"]
            print(f"not compiled: {row['program']} {row['mesh']} {row['plan']} (fits: {fits}): {row['failed'][:120]}")
    for mesh in dict.fromkeys(row["mesh"] for row in compiled):
        here = [row for row in compiled if row["mesh"] == mesh]
        as_promised = sum(row["share"] >= AIM_SHARE for row in here)
        peaks, steps = sorted(abs(row["peak"]) for row in here), [abs(row["step"]) for row in here if row["step"]]
        print(
            f"{mesh}: {len(here)} rows; {as_promised} with >= {AIM_SHARE:.0%} of bytes as promised; "
            f"peak: median {median(peaks):.1%}, 90th percentile {peaks[int(0.9 * (len(peaks) - 1))]:.1%}"
            + (f"; step: median {median(steps):.1%}" if steps else "")
            + f"; ranking: median {ranking(here):.2f}"
        )
    worst = sorted(compiled, key=lambda row: row["share"] - abs(row["peak"]) - abs(row["step"]))[:10]
    for row in worst:
        told = "; ".join(json.dumps(one) for one in row.get("differences", [])[:2])
        print(f"worst: {row['program']} {row['mesh']} {row['plan']}: {told}")


def ranking(rows: list[Row]) -> float:
    """Median over programs of Spearman's correlation between predicted and compiled steps.

    Programs of fewer than three plans say nothing.
    """
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["step"]:
            groups[row["program"]].append(row)
    found = [
        spearman([row["predicted_step"] for row in group], [row["predicted_step"] / (1 + row["step"]) for row in group])
        for group in groups.values()
        if len(group) > 2
    ]
    return median(found) if found else float("nan")


if __name__ == "__main__":
    sys.exit(main())
