"""How many all-reduces compilers make of those that are written, and how long they take, compiled and predicted.

One row for each program of the corpus and strategy: all-reduces written and compiled in one run, and their seconds by
the formulas of `cost.collectives`: of what was compiled, as predicted, and as predicted where each stays alone (without
the pass `reduction-combining`). Needs the extra `tpu` or `gpu`; programs take half a minute to five.

    python -m benchmarks.reductions resnet scan_small --mesh v5e-16 --strategy data-parallel
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import corpus
from benchmarks.common import Row, note, show, write_json
from benchmarks.fidelity import CORPUS, FOLDER, MOST_SECONDS, program_path
from toast_cli.compiler.profiles import find_profile
from toast_cli.compiler.reduction_combining import NAME
from toast_cli.confirm.compilers import seconds_on
from toast_cli.cost.model import CollectiveUse
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.hardware import load_spec
from toast_cli.pipeline import Request, partition
from toast_cli.tactics import strategies
from toast_cli.verify.ahead import compile_ahead, target_of
from toast_cli.verify.child import Failure
from toast_cli.verify.hlo_text import instructions
from toast_cli.verify.schedule import scheduled_time

COLUMNS = {
    "program": "{program}", "mesh": "{mesh}", "strategy": "{strategy}", "written": "{written:.0f}",
    "compiled": "{compiled}", "compiled ms": "{compiled_ms}", "each alone ms": "{alone_ms:.3f}",
    "predicted ms": "{predicted_ms:.3f}",
}  # fmt: skip
KIND = "all-reduce"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="+", choices=sorted(corpus.PROGRAMS), metavar="PROGRAM")
    parser.add_argument("--mesh", default="v5e-16")
    parser.add_argument("--strategy", default="data-parallel")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    rows = []
    for program in options.programs:
        rows.append(measured(program, options.mesh, options.strategy))
        note(str(rows[-1]))
    show("all-reduces, written and compiled", COLUMNS, rows)
    write_json(options.json, rows)
    return 0


def measured(program: str, mesh_name: str, strategy: str) -> Row:
    """The row of one program."""
    outcome = partition(Request(str(program_path(CORPUS + program, FOLDER)), mesh_name, iterations=1))
    problem, mesh = outcome.problem, outcome.problem.mesh
    plan = strategies(problem).get(strategy)
    if plan is None:
        raise SystemExit(f"{program} has no strategy {strategy}; it has {', '.join(strategies(problem))}")
    profile = find_profile(mesh.chip)
    apart = Evaluator(problem, profile=replace(profile, passes=profile.passes - {NAME}))
    together, alone = reductions(Evaluator(problem).collectives(plan)), reductions(apart.collectives(plan))
    row: Row = {
        "program": program, "mesh": mesh_name, "strategy": strategy, "written": sum(use.count for use in together),
        "predicted_ms": 1e3 * sum(use.seconds for use in together),
        "alone_ms": 1e3 * sum(use.seconds for use in alone),
    }  # fmt: skip
    written = replace(outcome, result=replace(outcome.result, plan=plan)).emit("stablehlo").content
    target = target_of(load_spec(mesh_name))
    facts = compile_ahead(written, "stablehlo", target, timeout_seconds=MOST_SECONDS)
    if isinstance(facts, Failure):
        return row | {"compiled": "-", "compiled_ms": facts.reason[:40]}
    text = facts.hlo_text
    spent = scheduled_time(
        text, mesh.names, mesh.sizes, 0.0, lambda kind, size, axes: seconds_on(mesh, kind, size, axes)
    )
    made = sum(one.runs for one in instructions(text, frozenset({KIND, f"{KIND}-start"})))
    return row | {"compiled": f"{made:.0f}", "compiled_ms": f"{1e3 * spent.by_kind.get(KIND, 0.0):.3f}"}


def reductions(uses: list[CollectiveUse]) -> list[CollectiveUse]:
    return [use for use in uses if use.kind == KIND]


if __name__ == "__main__":
    sys.exit(main())
