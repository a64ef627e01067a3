"""Plans for GPUs, predicted and compiled: XLA:GPU ahead of time over the corpus of `corpus.py`, beside the cost model.

`--compile` adds the points (a program, a specification, a plan) that `data/gpu.jsonl` lacks; it needs the extra `gpu`
and no GPU. Without it the stored points are predicted anew and tabulated, which needs neither. One JSON line each,
figures and no programs:

* `program`, `spec`, `plan`, `decisions`, `fingerprint`: what was compiled, see `corpus.py`.
* `argument_bytes`, `output_bytes`, `alias_bytes`, `temp_bytes`: of one device, as XLA assigned buffers.
* `collectives`: rows of kind, mesh axes, bytes of results on each device, arrays; loops counted. `seconds`: of
  compiling.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.calibrate import FOLDER, Point, peak_bytes, read_points
from benchmarks.common import Row, markdown_table, note, put_between, show, write_json
from benchmarks.corpus import PROGRAMS, Loaded, fingerprint, plan_of, restore, source_of, store
from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.collectives import collectives_in
from toast_cli.ask_xla.compile import compile_for, target_of
from toast_cli.dimensions import analyse
from toast_cli.emit import write
from toast_cli.hardware import load_spec
from toast_cli.plan.decisions import Plan
from toast_cli.plan.lower import lower
from toast_cli.plan.problem import make_problem
from toast_cli.price.evaluator import Evaluator

TABLE = Path(__file__).resolve().parent / "data" / "gpu.jsonl"
SPECS = ("h100-8", "a100-16")
PLANS = (
    "replicated", "data-parallel", "fsdp", "megatron", "data-parallel x megatron", "fsdp x megatron",
    "fsdp x megatron + sequence", "search",
)  # fmt: skip
MIB = 2.0**20
COLUMNS = {
    "program": "{program}", "machine": "{spec}", "plan": "{plan}", "arguments": "{argument_mib:.0f}",
    "compiled": "{compiled_argument_mib:.0f}", "peak": "{peak_mib:.0f}", "compiled peak": "{compiled_peak_mib:.0f}",
    "error": "{error:+.0%}", "collectives": "{traffic_mib:.0f}", "compiled collectives": "{compiled_traffic_mib:.0f}",
    "agreeing": "{agreeing:.0%}", "compile": "{seconds:.0f} s",
}  # fmt: skip
ERRORS = {
    "": "{name}", "points": "{points}", "median": "{median:.1%}", "90th percentile": "{p90:.1%}", "bias": "{bias:+.1%}",
    "collectives agreeing": "{agreeing:.1%}",
}  # fmt: skip
# What `--write` replaces in a page.
BEGIN, END = "<!-- gpu: written by benchmarks/gpu.py -->", "<!-- gpu: end -->"


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    if options.compile:
        add_points(options)
    points = [p for p in read_points(options.table) if p["program"] in options.programs and p["spec"] in options.specs]
    rows, stale = predict(points, options.folder)
    show("plans for GPUs, predicted and compiled by XLA:GPU; MiB of one device", COLUMNS, rows)
    show("errors of the peak", ERRORS, errors(rows))
    print(f"{stale} stale points left out")
    write_json(options.json, rows)
    if options.write:
        replace_table(options.write, rows)
    return 0


# -- compiling --------------------------------------------------------------------------------------------------------


def add_points(options: argparse.Namespace) -> None:
    """Compiles what the table lacks, as long as time is left."""
    start = time.monotonic()
    stored = read_points(options.table)
    asked = {(p["program"], p["spec"], p["plan"]) for p in stored}
    known = {(p["program"], p["spec"], p["fingerprint"]) for p in stored}
    for program, spec, label in product(options.programs, options.specs, options.plans):
        if time.monotonic() - start > options.seconds:
            break
        if (program, spec, label) in asked:
            continue
        loaded = load_on(program, spec, options.folder)
        plan = plan_of(loaded.problem, label)
        if plan is None or (program, spec, fingerprint(loaded.problem, plan)) in known:
            continue
        point: Point = {"program": program, "spec": spec, "plan": label}
        point |= {"decisions": store(plan), "fingerprint": fingerprint(loaded.problem, plan)} | measure(loaded, plan)
        known.add((program, spec, point["fingerprint"]))
        with options.table.open("a") as table:
            table.write(json.dumps(point) + "\n")
        note(f"{program} {spec} {label}: {point.get('failed') or f'{peak_bytes(point) / MIB:.0f} MiB'}")


def load_on(program: str, spec_name: str, folder: Path) -> Loaded:
    """A program of the corpus on a ready specification."""
    source, spec = source_of(program, folder), load_spec(spec_name)
    return Loaded(source, spec, make_problem(source.program, analyse(source.program), spec.mesh()))


def measure(loaded: Loaded, plan: Plan) -> Point:
    """What XLA:GPU makes of a plan."""
    written = write(loaded.source, lower(loaded.problem, plan), "bytecode")
    facts = compile_for(written.content, "stablehlo", target_of(loaded.spec))
    if isinstance(facts, Failure):
        return {"failed": facts.reason[:200]}
    mesh = loaded.problem.mesh
    sums: dict[tuple[str, tuple[str, ...]], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for use in collectives_in(facts.hlo_text, mesh.names, mesh.sizes):
        entry = sums[use.kind, use.axes]
        entry[0] += use.bytes * use.count
        entry[1] += use.count
    return {
        "argument_bytes": facts.argument_bytes, "output_bytes": facts.output_bytes, "alias_bytes": facts.alias_bytes,
        "temp_bytes": facts.temp_bytes, "collectives": [[kind, list(axes), *f] for (kind, axes), f in sums.items()],
        "seconds": round(facts.seconds, 1),
    }  # fmt: skip


# -- predicting -------------------------------------------------------------------------------------------------------


def predict(points: list[Point], folder: Path = FOLDER) -> tuple[list[Row], int]:
    """One row for each point that compiled, in the order of programs and specifications; and how many are stale."""
    rows: list[Row] = []
    stale = 0
    for (program, spec), members in grouped(points):
        problem = load_on(program, spec, folder).problem
        evaluator = Evaluator(problem)
        for point in members:
            plan = restore(point["decisions"])
            if fingerprint(problem, plan) == point["fingerprint"]:
                rows.append(row_of(point, evaluator, plan))
            else:
                stale += 1
    return rows, stale


def grouped(points: list[Point]) -> Iterator[tuple[tuple[str, str], list[Point]]]:
    """Points that compiled, by program and specification."""
    found: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for point in points:
        if "failed" not in point:
            found[point["program"], point["spec"]].append(point)
    yield from sorted(found.items(), key=lambda item: list(PROGRAMS).index(item[0][0]))


def row_of(point: Point, evaluator: Evaluator, plan: Plan) -> Row:
    cost, names = evaluator.exact_cost(plan), evaluator.problem.mesh.names
    promised: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
    for use in evaluator.collectives(plan):
        promised[use.kind, tuple(sorted(names[a] for a in use.axes))] += use.bytes * use.count
    compiled = {(kind, tuple(sorted(axes))): size for kind, axes, size, _ in point["collectives"]}
    return {
        "program": point["program"], "spec": point["spec"], "plan": point["plan"], "seconds": point["seconds"],
        "split": PROGRAMS[point["program"]].split,
        "argument_mib": cost.argument_bytes / MIB, "compiled_argument_mib": point["argument_bytes"] / MIB,
        "peak_mib": cost.peak_bytes / MIB, "compiled_peak_mib": peak_bytes(point) / MIB,
        "error": cost.peak_bytes / peak_bytes(point) - 1, "traffic_mib": sum(promised.values()) / MIB,
        "compiled_traffic_mib": sum(compiled.values()) / MIB, "agreeing": agreeing(promised, compiled),
    }  # fmt: skip


def agreeing(promised: dict[Any, float], compiled: dict[Any, float]) -> float:
    """Bytes that agree in kind and axes, of the larger of what was predicted and compiled."""
    whole = max(sum(promised.values()), sum(compiled.values()))
    return sum(min(size, compiled.get(key, 0.0)) for key, size in promised.items()) / whole if whole else 1.0


def errors(rows: list[Row]) -> list[Row]:
    """Over all rows, by machine, and by what the programs are for: `fit` those that constants come from, `test` the
    others.
    """
    names = ["all", *dict.fromkeys(row["spec"] for row in rows), *dict.fromkeys(row["split"] for row in rows)]
    return [error_row(name, [row for row in rows if name in ("all", row["spec"], row["split"])]) for name in names]


def error_row(name: str, rows: list[Row]) -> Row:
    signed = np.array([row["error"] for row in rows] or [0.0])
    return {
        "name": name, "points": len(rows), "median": float(np.median(abs(signed))),
        "p90": float(np.percentile(abs(signed), 90)), "bias": float(np.median(signed)),
        "agreeing": float(np.median([row["agreeing"] for row in rows] or [1.0])),
    }  # fmt: skip


# -- the page ---------------------------------------------------------------------------------------------------------


def replace_table(page: Path, rows: list[Row]) -> None:
    """Puts the table of errors between the marks of a Markdown page."""
    put_between(page, BEGIN, END, markdown_table(ERRORS, errors(rows)))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("programs", nargs="*", help="only these programs of the corpus")
    parser.add_argument("--specs", nargs="+", default=list(SPECS), metavar="SPEC")
    parser.add_argument("--plans", nargs="+", default=list(PLANS), metavar="PLAN")
    parser.add_argument("--compile", action="store_true", help="first compile what the table lacks")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no compilation after so long")
    parser.add_argument("--table", type=Path, default=TABLE, metavar="FILE")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where lowered programs are kept")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into this page: docs/accuracy.md")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON; - for stdout")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.programs if name not in PROGRAMS]
    if unknown:
        parser.error(f"no program {', '.join(unknown)}; there are {', '.join(PROGRAMS)}")
    options.programs = options.programs or list(PROGRAMS)
    return options


if __name__ == "__main__":
    sys.exit(main())
