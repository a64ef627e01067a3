"""The law of one meaning: the evaluator, the lowered program, the report and XLA:CPU name the same collectives.

One row for each tiny twin, mesh and plan: every expert strategy that applies, products of two tactics (of three on a
mesh of three axes), and the plan that a search finds. Compared are kind, axes and bytes, loops counted, as the
partitioner writes them. The first three must agree exactly. XLA's module is read right after partitioning, from a child
process with as many virtual devices as the mesh has, and agrees where no kind and axes differ by more than 1 % of what
is sent. Prints the rows that fail, and how many do not.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Row, choose, is_tiny, note, show, write_json
from toast_cli.errors import UsageError
from toast_cli.pipeline import Outcome, Request, partition
from toast_cli.plan.decisions import Plan
from toast_cli.plan.problem import Problem
from toast_cli.report.build import collective_facts
from toast_cli.tactics import strategies
from toast_cli.tactics.strategies import applicable, strategy
from toast_cli.verify.child import Failure
from toast_cli.verify.partitioned import collectives_after_partitioning
from toast_cli.verify.traffic import compare_traffic

MESHES = ("v4-32", "h100-8", "v4-32 data=4,context=2,model=2")
FIRST = ("data-parallel", "zero2", "fsdp", "context", "expert", "edge", "spatial")
LAST = ("megatron", "megatron+sequence", "context", "expert")
COLUMNS = {
    "program": "{program}", "mesh": "{mesh}", "plan": "{plan}", "promised KiB": "{promised_kib:.1f}",
    "compiled KiB": "{compiled_kib:.1f}", "agreeing": "{agreeing}", "what differs": "{differs}",
}  # fmt: skip
Totals = dict[tuple[str, tuple[str, ...]], tuple[int, int]]  # kind, axes -> bytes, count


@dataclass(frozen=True)
class Job:
    program: str
    path: str
    mesh: str
    plans: tuple[str, ...]


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    programs = {name: path for name, path in choose(options.programs).items() if options.programs or is_tiny(name)}
    jobs = [Job(n, str(p), mesh, tuple(options.plans)) for n, p in programs.items() for mesh in options.mesh]
    rows: list[Row] = []
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for found in pool.map(measure, jobs):
            rows += found
            for row in found:
                note(" | ".join(form.format_map(row) for form in COLUMNS.values()))
    failing = [row for row in rows if row["verdict"]]
    show("rows that fail", COLUMNS, failing)
    print(f"{len(rows) - len(failing)} of {len(rows)} rows agree")
    write_json(options.json, rows)
    return 1 if failing else 0


def measure(job: Job) -> list[Row]:
    """All rows of one program on one mesh."""
    mesh, _, shape = job.mesh.partition(" ")
    outcome = partition(Request(job.path, mesh, shape or None, iterations=400))
    rows = []
    for label, plan in plans_of(outcome.problem, outcome.result.plan).items():
        if not job.plans or label in job.plans:
            rows.append({"program": job.program, "mesh": job.mesh, "plan": label} | judge(outcome, plan))
    return rows


def plans_of(problem: Problem, searched: Plan) -> dict[str, Plan]:
    """Name -> plan, each plan once."""
    found = {"search": searched, **strategies(problem), **applicable(problem)[0]}
    axes = sum(size > 1 for size in problem.mesh.sizes)
    names = [" x ".join(parts) for parts in product(FIRST, LAST)]
    if axes > 2:
        names += [" x ".join(parts) for parts in product(FIRST, LAST[2:], LAST[:2])]
    for name in names:
        with suppress(UsageError):
            found.setdefault(name, strategy(problem, name))
    once: dict[Plan, str] = {}
    for name, plan in found.items():
        if plan:
            once.setdefault(plan, name)
    return {name: plan for plan, name in once.items()}


def judge(outcome: Outcome, plan: Plan) -> Row:
    """What is promised and what XLA compiles."""
    mesh = outcome.problem.mesh
    chosen = replace(outcome, result=replace(outcome.result, plan=plan))
    promised = [one.as_written() for one in collective_facts(outcome.source, outcome.evaluator, plan)]
    axes = dict(zip(mesh.names, mesh.sizes, strict=True))
    row: Row = {"promised_kib": sum(c.bytes * c.count for c in promised) / 1024, "compiled_kib": 0.0}
    found = collectives_after_partitioning(chosen.emit("stablehlo"), "stablehlo", axes, timeout_seconds=600.0)
    if isinstance(found, Failure):
        return row | {"agreeing": "-", "differs": found.reason[:80], "verdict": "wrong"}
    compared = compare_traffic(promised, found, axes)
    texts = [
        f"{d.side} {d.kind} over {'+'.join(d.axes)} {d.bytes} B x{d.count:g} at {d.place}" for d in compared.differences
    ]
    return row | {
        "compiled_kib": sum(c.bytes * c.count for c in found) / 1024,
        "agreeing": f"{100 * compared.share:.1f} %",
        "differs": "; ".join(texts[:3]),
        "differences": [asdict(d) for d in compared.differences],
        "verdict": "wrong" if texts else "",
    }


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("programs", nargs="*", help="sample programs (default: all tiny twins)")
    parser.add_argument("--mesh", action="append", default=None, help="a specification, and a shape behind a blank")
    parser.add_argument("--plans", nargs="*", default=[], help="only these plans")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json")
    options = parser.parse_args(arguments)
    options.mesh = options.mesh or list(MESHES)
    return options


if __name__ == "__main__":
    raise SystemExit(main())
