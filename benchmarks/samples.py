"""Every sample model on every mesh: does `toast partition` end well, and does XLA take what it wrote?

One row for each program and mesh: the exit code (0, or 3 where nothing fits), then for the StableHLO and the HLO form
whether the file reads again and compiles for the mesh's virtual CPU devices, and for tiny twins whether it gives the
unpartitioned program's numbers. Tiny twins are so small that replicating them is best; so they are also written under
the fastest expert strategy that splits something. Exits with 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Row, choose, is_tiny, note, show, write_json
from toast_cli import xla
from toast_cli.emit import emit
from toast_cli.frontend import Source
from toast_cli.frontend.loaded import parse
from toast_cli.pipeline import Request, partition
from toast_cli.plan.decisions import Plan
from toast_cli.plan.lower import lower
from toast_cli.plan.problem import Problem
from toast_cli.tactics import strategies
from toast_cli.verify.child import Failure
from toast_cli.verify.compile import Dialect, compile_on_cpu
from toast_cli.verify.numbers import compare_numbers

MESHES = ("v4-32", "a100-16", "p100-8")
FORMS: tuple[Dialect, ...] = ("stablehlo", "hlo")

COLUMNS = {
    "program": "{program}", "mesh": "{mesh}", "exit": "{exit}", "plan": "{plan}", "stablehlo": "{stablehlo}",
    "hlo": "{hlo}", "seconds": "{seconds:.1f}", "": "{verdict}",
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    rows: list[Row] = []
    for name, path in choose(options.programs, tiny=True).items():
        for mesh in options.mesh:
            for row in measure(name, path, mesh, options.compile_full):
                rows.append(row)
                note("{program} {mesh} {plan}: exit {exit}, stablehlo {stablehlo}, hlo {hlo} {verdict}".format_map(row))
    show("samples x meshes", COLUMNS, rows, {"wrong": "red"})
    write_json(options.json, rows)
    return 1 if any(row["verdict"] == "wrong" for row in rows) else 0


def measure(name: str, path: Path, mesh: str, compile_full: bool) -> Iterator[Row]:
    """Rows of one program on one mesh: the search's plan, and for tiny twins an expert's."""
    start = time.monotonic()
    outcome = partition(Request(str(path), mesh))
    code = 0 if outcome.report.predicted.fits else 3
    plans: dict[str, Plan] = {"search": outcome.result.plan}
    if is_tiny(name):
        plans |= dict(list(splitting(outcome.problem).items())[:1])
    for label, plan in plans.items():
        row: Row = {"program": name, "mesh": mesh, "exit": code, "plan": label, "stablehlo": "-", "hlo": "-"}
        for form in FORMS:
            row[form] = judge(
                outcome.source, outcome.problem, plan, form, run=is_tiny(name), compile_it=is_tiny(name) or compile_full
            )
        good = all(row[form] in ("reads", "compiles", "equal") for form in FORMS)
        yield row | {"seconds": time.monotonic() - start, "verdict": "" if good else "wrong"}
        start = time.monotonic()


def splitting(problem: Problem) -> dict[str, Plan]:
    """Expert strategies that split some argument, by name."""
    plans = strategies(problem).items()
    return {name: plan for name, plan in plans if any(any(at) for at in lower(problem, plan).shardings)}


def judge(source: Source, problem: Problem, plan: Plan, form: Dialect, *, run: bool, compile_it: bool) -> str:
    """How far one form of a plan gets: "reads", "compiles", "equal", or what went wrong."""
    written = emit(source, lower(problem, plan), form)
    parse(written, form)
    devices = problem.mesh.devices
    if run:
        errors = compare_numbers(xla.write_bytecode(source.module), written, devices, form=form)
        if isinstance(errors, Failure):
            return errors.reason[:60]
        wrong = [e for e in errors if e.wrong]
        return f"{len(wrong)} results differ" if wrong else "equal"
    if not compile_it:
        return "reads"
    compiled = compile_on_cpu(written, form, devices, shardy=form == "stablehlo")
    return compiled.reason[:60] if isinstance(compiled, Failure) else "compiles"


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("programs", nargs="*", help="names of samples; all when none is given")
    parser.add_argument("--mesh", nargs="+", default=list(MESHES), metavar="SPEC")
    parser.add_argument("--compile-full", action="store_true", help="compile full-size programs too: minutes each")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON; - for stdout")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
