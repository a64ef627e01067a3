"""Memory and collectives of programs of published packages, in seconds for each: predicted beside XLA's own figures.

For each program that `benchmarks.real.lower` has lowered, each mesh and each plan, XLA:TPU is asked how much memory one
device needs (see `benchmarks/calibrate_memory.py`: given next to none, it stops after scheduling and says so; for a
mesh of GPUs XLA:GPU, which takes longer), and XLA's partitioner which collectives it makes. `python -m
benchmarks.real.quick` adds the points that the table lacks. Every run predicts all stored points again, prints them and
their summary; `--write docs/accuracy.md` puts the summary and each family's errors into that page. Plans are stored, so
that a point means the same whatever the search finds today; points whose plan means something else by now are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.calibrate import Point, read_points
from benchmarks.calibrate_memory import needed, starved_options
from benchmarks.common import Row, markdown_table, note, put_between, show
from benchmarks.corpus import fingerprint, restore, searched, store
from benchmarks.real.lower import FOLDER, path_of
from benchmarks.real.programs import PROGRAMS, chosen
from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.collectives import CompiledCollective
from toast_cli.ask_xla.compile import CompilationTarget, collectives_after_partitioning, compile_for, target_of
from toast_cli.ask_xla.confirm import seconds_on
from toast_cli.ask_xla.schedule import scheduled_time
from toast_cli.ask_xla.verdict import compare_traffic
from toast_cli.dimensions import analyse
from toast_cli.emit import write
from toast_cli.frontend import Source, load
from toast_cli.hardware import Spec, load_spec
from toast_cli.plan.decisions import Plan
from toast_cli.plan.lower import lower
from toast_cli.plan.partitioned import CollectiveFacts
from toast_cli.plan.problem import Problem, make_problem
from toast_cli.price.cost import Cost
from toast_cli.price.evaluator import Evaluator
from toast_cli.program.ops import GATHER, SCATTER
from toast_cli.report.build import collective_facts
from toast_cli.tactics import strategies

TABLE = Path(__file__).resolve().parents[1] / "data" / "real.jsonl"
START, END = "<!-- real: written by benchmarks/real/quick.py -->", "<!-- real: end -->"
PEAK_AIM, SHARE_AIM = 0.08, 0.98
LARGE = 0.3  # error of a peak
LEAST = 1e-5  # seconds of exposed communication below which its error says nothing
MEASURED = {"needed_bytes", "compute"}  # what a prediction of costs is held to
POINTS = {
    "program": "{program}", "mesh": "{mesh}", "plan": "{plan}", "predicted GiB": "{predicted_gib:.3f}",
    "needed GiB": "{needed_gib:.3f}", "peak": "{error:+.1%}", "as promised": "{share:.1%}", "step": "{step:+.1%}",
    "exposed": "{exposed:+.1%}",
}  # fmt: skip
SUMMARY = {
    "": "{name}", "points": "{points}", "programs": "{programs}", "collectives as promised": "{promised}",
    "by XLA:TPU's own partitioner": "{own}",
    "peaks": "{peaks}", "peak, median": "{median:.1%}", "90th percentile": "{p90:.1%}", "bias": "{bias:+.1%}",
    "steps": "{steps}", "step, median": "{step:.1%}", "exposed, median": "{exposed:.1%}",
    "exposed, 90th percentile": "{exposed_p90:.1%}", "hidden, 90th percentile": "{hidden:.1%}",
    "rejected by the compiler": "{rejected}",
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    names = chosen(options.names, options.split)
    if options.seconds:
        fill(names, options)
    stored = [p for p in stored_points(options.table) if p["program"] in names and p["mesh"] in options.mesh]
    rows, stale = predict([p for p in stored if p["plan"] in options.plans], options.folder, options.without)
    show("peak memory of one device", POINTS, sorted(rows, key=lambda row: row["error"]))
    show("summary", SUMMARY, summary(rows))
    print(f"{len(rows)} points, {stale} stale ones left out")
    for point in stored:
        for field in ("unpartitioned", "failed", "uncompiled"):
            if field in point:
                print(f"no figure: {point['program']} {point['mesh']} {point['plan']}: {point[field][:160]}")
    if options.write:
        write_page(options.write, rows)
    return 0


# -- asking -----------------------------------------------------------------------------------------------------------


def fill(names: list[str], options: argparse.Namespace) -> None:
    """Asks what the table does not have yet: one question of all points before the next, longer one of any."""
    start = time.monotonic()
    for question in options.ask:
        for mesh in options.mesh:
            for name in names:
                if time.monotonic() - start > options.seconds:
                    return
                path = path_of(name, options.folder)
                known = {
                    p["plan"]: p for p in stored_points(options.table) if (p["program"], p["mesh"]) == (name, mesh)
                }
                asked = [
                    label
                    for label in options.plans
                    if options.again or not ANSWERED[question] & known.get(label, {}).keys()
                ]
                if path.exists() and asked:
                    _fill_program(name, mesh, asked, known, question, options)


def _fill_program(
    name: str, mesh: str, labels: list[str], known: dict[str, Point], question: str, options: argparse.Namespace
) -> None:
    """Asks one question of some plans of a program, and stores each answer."""
    spec, source = load_spec(mesh), load(str(path_of(name, options.folder)))
    problem = problem_of(source, spec)
    for label, plan in plans_of(problem, labels, known):
        point = {"program": name, "mesh": mesh, "plan": label}
        if label not in known:
            point |= {"decisions": store(plan), "fingerprint": fingerprint(problem, plan)}
        elif known[label]["fingerprint"] != fingerprint(problem, plan):
            continue
        content = write(source, lower(problem, plan), "bytecode").content
        answer = QUESTIONS[question](content, source, problem, plan, spec, options.limit)
        with options.table.open("a") as table:
            table.write(json.dumps(point | answer) + "\n")
        note(f"{name} {mesh} {label}: {answer}")


def stored_points(table: Path) -> list[Point]:
    """The table's points; of each, what later lines say beside or instead of what earlier ones do."""
    merged: dict[tuple[str, str, str], Point] = {}
    for line in read_points(table):
        merged.setdefault((line["program"], line["mesh"], line["plan"]), {}).update(line)
    return list(merged.values())


def problem_of(source: Source, spec: Spec) -> Problem:
    return make_problem(source.program, analyse(source.program), spec.mesh())


def plans_of(problem: Problem, labels: list[str], known: dict[str, Point]) -> Iterator[tuple[str, Plan]]:
    """The plans that are stored, the search's, and strategies, of those that apply."""
    applying = strategies(problem)
    for label in labels:
        if label in known:
            yield label, restore(known[label]["decisions"])
        elif label == "search":
            yield label, searched(problem)
        elif label in applying:
            yield label, applying[label]


def ask_collectives(content: bytes, source: Source, problem: Problem, plan: Plan, _: Spec, limit: float) -> Point:
    """The part of the bytes of collectives that is as promised, by XLA's partitioner on virtual CPU devices."""
    made = _partitioned(content, problem, None, limit)
    if isinstance(made, Failure):
        return {"unpartitioned": made.reason[:300]}
    compared = compare_traffic(promised_of(source, problem, plan), made, _axes(problem))
    return {"share": compared.share, "compiled_bytes": compared.compiled_bytes}


def ask_partitioner(content: bytes, source: Source, problem: Problem, plan: Plan, spec: Spec, limit: float) -> Point:
    """The same by XLA:TPU's own partitioner, which sees the program in simpler form; nothing for GPUs."""
    if spec.chip.platform != "tpu":
        return {"own_share": None}
    made = _partitioned(content, problem, target_of(spec), limit)
    if isinstance(made, Failure):
        return {"own_unpartitioned": made.reason[:300]}
    return {"own_share": compare_traffic(promised_of(source, problem, plan), made, _axes(problem)).share}


def _partitioned(
    content: bytes, problem: Problem, target: CompilationTarget | None, limit: float
) -> list[CompiledCollective] | Failure:
    return collectives_after_partitioning(content, "stablehlo", _axes(problem), target=target, timeout_seconds=limit)


def _axes(problem: Problem) -> dict[str, int]:
    return dict(zip(problem.mesh.names, problem.mesh.sizes, strict=True))


def promised_of(source: Source, problem: Problem, plan: Plan) -> list[CollectiveFacts]:
    """As the partitioner writes them: XLA:TPU narrows and scatters later on."""
    facts = collective_facts(source, Evaluator(problem), plan)
    return [one.as_written() for one in facts]


def ask_peak(content: bytes, _: Source, __: Problem, ___: Plan, spec: Spec, limit: float) -> Point:
    """What one device needs: XLA:TPU, given next to no memory, stops after scheduling and says so; XLA:GPU compiles
    to the end."""
    start = time.monotonic()
    if spec.chip.platform == "gpu":
        facts = compile_for(content, "stablehlo", target_of(spec), timeout_seconds=limit)
        failed = isinstance(facts, Failure)
        told: Point = {"failed": facts.reason[:300]} if failed else {"needed_bytes": facts.peak_bytes}
        return told | {"seconds": round(time.monotonic() - start, 1)}
    options = starved_options(spec.chip)
    facts = compile_for(content, "stablehlo", target_of(spec), options=options, timeout_seconds=limit)
    told = needed(facts.reason) if isinstance(facts, Failure) else {"failed": "compiles in next to no memory"}
    return told | {"seconds": round(time.monotonic() - start, 1)}


def ask_step(content: bytes, _: Source, problem: Problem, __: Plan, spec: Spec, limit: float) -> Point:
    """Seconds of computing by the compiler's cycles, and of communication by the formulas of `cost.collectives`, of
    the compiled program."""
    mesh = problem.mesh
    facts = compile_for(content, "stablehlo", target_of(spec), timeout_seconds=limit)
    if isinstance(facts, Failure):
        return {"uncompiled": facts.reason[:300]}
    rates = mesh.chip.clock_hertz, mesh.chip.memory_bytes_per_second
    walked = scheduled_time(facts.hlo_text, mesh.names, mesh.sizes, *rates, lambda k, b, a: seconds_on(mesh, k, b, a))
    return {
        "compute": walked.compute_seconds, "communication": walked.communication_seconds,
        "exposed": walked.exposed_seconds, "compile_seconds": round(facts.seconds, 1),
    }  # fmt: skip


Question = Callable[[bytes, Source, Problem, Plan, Spec, float], Point]
QUESTIONS: dict[str, Question] = {
    "collectives": ask_collectives, "partitioner": ask_partitioner, "peak": ask_peak, "step": ask_step,
}  # fmt: skip
# Question -> the fields of a point that has an answer, be it that there is none.
ANSWERED: dict[str, set[str]] = {
    "collectives": {"share", "unpartitioned"}, "partitioner": {"own_share", "own_unpartitioned"},
    "peak": {"needed_bytes", "failed"}, "step": {"compute", "uncompiled"},
}  # fmt: skip


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
            if (point["program"], point["mesh"]) != (name, mesh):
                continue
            plan = restore(point["decisions"])
            if fingerprint(problem, plan) != point["fingerprint"]:
                stale += 1
                continue
            measured = not MEASURED.isdisjoint(point)
            predicted = evaluator.exact_cost(plan) if measured else None
            rows.append(
                row_of(point, predicted, problem, lookup_seconds(evaluator, plan) if "compute" in point else 0.0)
            )
    return rows, stale


def lookup_seconds(evaluator: Evaluator, plan: Plan) -> float:
    """Seconds of gathers and scatters, whose transfers the compiler's estimate leaves out."""
    return sum(use.seconds for use in evaluator.kernels(plan) if use.name in (GATHER, SCATTER))


def row_of(point: Point, predicted: Cost | None, problem: Problem, lookups: float) -> Row:
    """What is predicted of a point beside what was measured; what was not is nan. predicted: where anything was.
    lookups: see `lookup_seconds`."""
    program, gib, nan = PROGRAMS[point["program"]], 2.0**30, float("nan")
    needed_bytes, compute, communication, exposed = (
        point.get(field, nan) for field in ("needed_bytes", "compute", "communication", "exposed")
    )
    peak = predicted.peak_bytes if predicted else nan
    return {
        "program": point["program"], "family": program.family, "split": program.split, "mesh": point["mesh"],
        "plan": point["plan"], "predicted_gib": peak / gib, "needed_gib": needed_bytes / gib,
        "limit_gib": problem.mesh.limit_bytes / gib, "error": peak / needed_bytes - 1, "share": point.get("share", nan),
        "own_share": _known(point, "own_share"),
        "step": (predicted.step_seconds - lookups) / (compute + exposed) - 1 if predicted else nan,
        "exposed": (predicted.step_seconds - predicted.busy_seconds) / exposed - 1
        if predicted and exposed > LEAST else nan,
        "hidden": 1 - exposed / communication if communication > 0 else nan,
    }  # fmt: skip


def summary(rows: list[Row]) -> list[Row]:
    """Over each split, then by mesh and plan."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        for name in (row["split"], f"{row['split']}, {row['mesh']}", f"{row['split']}, {row['plan']}"):
            groups.setdefault(name, []).append(row)
    return [_summed(name, groups[name]) for name in sorted(groups)]


def _summed(name: str, rows: list[Row]) -> Row:
    fields = ("error", "share", "own_share", "step", "exposed", "hidden")
    errors, shares, own, steps, exposed, hidden = (_finite(rows, field) for field in fields)
    rejected = sum(row["predicted_gib"] <= row["limit_gib"] < row["needed_gib"] for row in rows)
    return {
        "name": name, "points": len(rows), "programs": len({row["program"] for row in rows}),
        "peaks": len(errors), "median": _percentile(abs(errors), 50), "p90": _percentile(abs(errors), 90),
        "bias": _percentile(errors, 50), "steps": len(steps), "step": _percentile(abs(steps), 50),
        "exposed": _percentile(abs(exposed), 50), "exposed_p90": _percentile(abs(exposed), 90),
        "hidden": _percentile(hidden, 90),
        "promised": f"{int((shares >= SHARE_AIM).sum())} of {len(shares)}",
        "own": f"{int((own >= SHARE_AIM).sum())} of {len(own)}", "rejected": rejected,
    }  # fmt: skip


def _known(point: Point, field: str) -> float:
    """A figure of a point, nan where there is none."""
    found = point.get(field)
    return float("nan") if found is None else float(found)


def _finite(rows: list[Row], field: str) -> NDArray[np.float64]:
    """[rows that have it] one measure."""
    values = np.array([row[field] for row in rows])
    return values[np.isfinite(values)]


def _percentile(values: NDArray[np.float64], percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else float("nan")


def families(rows: list[Row]) -> tuple[dict[str, str], list[Row]]:
    """(columns, rows) of a table of the peaks of judged families that have an error above `LARGE`: by mesh the median
    error and, with its sign, the worst."""
    judged = [row for row in rows if row["split"] == "judge" and np.isfinite(row["error"])]
    meshes = sorted({row["mesh"] for row in judged})
    names = sorted({row["family"] for row in judged if abs(row["error"]) > LARGE})
    told: dict[str, Row] = {name: {"family": name} for name in names}
    for name, mesh in product(names, meshes):
        errors = [row["error"] for row in judged if (row["family"], row["mesh"]) == (name, mesh)]
        told[name][mesh] = f"{np.median(np.abs(errors)):.0%}, {max(errors, key=abs):+.0%}" if errors else "–"
    return {"family": "{family}"} | {mesh: f"{{{mesh}}}" for mesh in meshes}, list(told.values())


def write_page(page: Path, rows: list[Row]) -> None:
    """Puts the summary, and the judged families' errors, between the markers of the page."""
    shown = [row for row in summary(rows) if not row["name"].startswith("fit, ")]
    head = "Peaks of the *judge* families with an error of more than 30 %, median error and worst:"
    tables = [*markdown_table(SUMMARY, shown), "", head, ""]
    put_between(page, START, END, [*tables, *markdown_table(*families(rows))])


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs (default: all of the split)")
    parser.add_argument("--split", choices=("fit", "judge", "all"), default="judge")
    parser.add_argument("--mesh", nargs="+", default=["v5e-16", "v4-32"])
    parser.add_argument("--plans", nargs="+", metavar="PLAN", default=["search", "data-parallel", "fsdp x megatron"])
    parser.add_argument("--ask", nargs="+", choices=list(QUESTIONS), default=["collectives", "partitioner", "peak"])
    parser.add_argument("--again", action="store_true", help="ask what the table has as well: what is written changed")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="for one answer (600)")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no point after so long; 0: ask nothing")
    parser.add_argument("--without", nargs="+", metavar="PASS", default=[], help="passes of the compiler to leave out")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into this page: docs/accuracy.md")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
