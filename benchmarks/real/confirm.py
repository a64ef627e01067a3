"""Is the plan that `--confirm 5` takes as good as the best of fifteen that are compiled?

For each program that `benchmarks.real.lower` has lowered, `toast partition --confirm 5` runs as a user would run it.
Then the strategies that it did not compile, and further plans of the search, are compiled as well, until there are
fifteen programs that differ. Each answer of the compiler is a line in `--table`, and is kept in the user's cache
(`docs/howto/confirm.md`), so that a run that is stopped goes on where it was: `--seconds` stops it in time. A program
is done when all its plans have answers. `--show` only prints the table.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from math import inf
from pathlib import Path
from statistics import median

from benchmarks.common import Row, note, show, spearman
from benchmarks.real.lower import FOLDER, path_of
from benchmarks.real.programs import chosen
from toast_cli.confirm.cache import key_of, user_cache
from toast_cli.confirm.candidates import candidates
from toast_cli.confirm.compilers import Compiler
from toast_cli.confirm.model import Candidate, Compiled, ConfirmedRow
from toast_cli.confirm.search import compiler_for
from toast_cli.emit import write
from toast_cli.hardware import load_spec
from toast_cli.pipeline import Outcome, Request, partition
from toast_cli.plan.lower import lower
from toast_cli.report.confirmation import one_line
from toast_cli.tactics import strategies
from toast_cli.tactics.strategies import applicable

TABLE = Path("build/confirm.jsonl")
CONFIRMED, COMPILED = 5, 15
BY_HAND = "strategy "
AIM = 0.01
COLUMNS = {
    "program": "{program}", "mesh": "{mesh}", "compiled": "{compiled}", "taken": "{taken}", "step": "{step:.2f} ms",
    "best": "{best}", "its step": "{best_step:.2f} ms", "slower by": "{slower:+.2%}",
    "best strategy": "{strategy}", "step of that": "{strategy_step:.2f} ms", "ranking": "{ranking:.2f}",
    "compilations": "{seconds:.0f} s",
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs (default: all of the split)")
    parser.add_argument("--split", choices=("fit", "judge", "all"), default="judge")
    parser.add_argument("--mesh", nargs="+", default=["v5e-16"])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no compilation after so long")
    parser.add_argument("--show", action="store_true", help="only print the table")
    options = parser.parse_args(arguments)
    names = chosen(options.names, options.split)
    if not options.show:
        fill(names, options)
    report([row for row in read(options.table) if row["program"] in names and row["mesh"] in options.mesh])
    return 0


def read(table: Path) -> list[Row]:
    """The stored answers."""
    return [json.loads(line) for line in table.read_text().splitlines()] if table.exists() else []


def fill(names: list[str], options: argparse.Namespace) -> None:
    """Asks about programs until the time is up; those that are done already are left alone."""
    end = time.monotonic() + options.seconds
    options.table.parent.mkdir(parents=True, exist_ok=True)
    done = {(row["program"], row["mesh"]) for row in read(options.table) if row["by"] == "done"}
    for mesh in options.mesh:
        for name in names:
            path = path_of(name, options.folder)
            if (name, mesh) in done or not path.exists():
                continue
            for row in answers(path, mesh, end):
                with options.table.open("a") as table:
                    table.write(json.dumps({"program": name, "mesh": mesh, **row}) + "\n")
                step = f"{row['step'] * 1e3:.2f} ms" if row.get("step") else row.get("outcome", "")
                note(f"{name} {mesh} {row['by']}: {row['plan']}: {step}")
            if time.monotonic() >= end:
                return


def answers(path: Path, mesh: str, end: float) -> Iterator[Row]:
    """What the compiler says of each plan of one program, those of `--confirm` first; at last, unless the time was up,
    which plan was taken."""
    request = Request(
        str(path), mesh, top=COMPILED, confirm=CONFIRMED, confirm_seconds=max(1.0, end - time.monotonic())
    )
    outcome = partition(request, said=lambda place, count, row: note(f"  {place} of {count}: {one_line(row)}"))
    told = outcome.report.confirmation
    assert told is not None
    if time.monotonic() >= end or any(plan.outcome == "timed out" for plan in told.plans):
        return
    for plan in told.plans:
        if plan.outcome != "not compiled":
            facts = {"plan": plan.name, "outcome": plan.outcome, "reason": plan.reason[:300]}
            figures = {"step": plan.step_seconds, "peak": plan.peak_bytes, "compile_seconds": plan.compile_seconds}
            yield {"by": "confirm", **facts, **figures, "predicted": plan.predicted_step_seconds}
    compiler = compiler_for(load_spec(mesh), None)(outcome.problem.mesh)
    compiled: dict[str, bool] = {}  # by the program that is written; those of `--confirm` are known by now
    for candidate in _further(outcome):
        content = write(outcome.source, lower(outcome.problem, candidate.plan), "bytecode", "minimal").content
        if (key := key_of(content)) in compiled:
            continue
        if sum(compiled.values()) >= COMPILED and not candidate.name.startswith(BY_HAND):
            break
        if time.monotonic() >= end:
            return
        answer = _judged(compiler, content, end - time.monotonic())
        if answer.outcome == "timed out":
            return
        compiled[key] = answer.outcome == "compiled"
        yield _row(ConfirmedRow(candidate, answer))
    yield {"by": "done", "plan": told.chosen, "compiled": sum(compiled.values())}


def _further(outcome: Outcome) -> Iterator[Candidate]:
    """Every strategy that applies, and then the plans of the search."""
    named = {**strategies(outcome.problem), **applicable(outcome.problem)[0]}
    strategic = candidates(outcome.evaluator, [], {BY_HAND + name: plan for name, plan in named.items() if plan})
    yield from (one for one in strategic if one.cost.peak_bytes <= outcome.problem.mesh.limit_bytes)
    yield from candidates(outcome.evaluator, outcome.plans, {})


def _judged(compiler: Compiler, content: bytes, seconds: float) -> Compiled:
    cache, key = user_cache(), key_of(content, *compiler.identity)
    known = cache.find(key)
    if known is None:
        known = compiler.judge(content, seconds)
        cache.keep(key, known)
    return known


def _row(row: ConfirmedRow) -> Row:
    assert row.compiled is not None
    known = row.compiled.outcome == "compiled"
    return {
        "by": "beside", "plan": row.candidate.name, "outcome": row.compiled.outcome,
        "reason": row.compiled.reason[:300], "step": row.step_seconds if known else None,
        "peak": round(row.peak_bytes) if known else None, "compile_seconds": row.compiled.compile_seconds,
        "predicted": row.candidate.cost.step_seconds,
    }  # fmt: skip


def report(rows: Iterable[Row]) -> None:
    """A line for each program that is done, and how many are as good as they should be."""
    programs: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:  # of what was asked twice the last answer counts
        programs.setdefault((row["program"], row["mesh"]), {})[f"{row['by']} {row['plan']}"] = row
    lines = [summary(name, mesh, list(found.values())) for (name, mesh), found in programs.items()]
    told = [line for line in lines if line]
    show("--confirm 5 beside the best of those compiled", COLUMNS, told)
    good = sum(line["slower"] <= AIM for line in told)
    no_worse = sum(line["step"] <= line["strategy_step"] * 1.001 for line in told)
    print(f"{good} of {len(told)} within {AIM:.0%} of the best compiled; {no_worse} no slower than any strategy")
    if told:
        ranks = median(line["ranking"] for line in told)
        print(f"Spearman of predicted and compiled steps, median of programs: {ranks:.2f}")
    for (name, mesh), found in programs.items():
        for row in found.values():
            if row.get("outcome") == "refused":
                print(f"refused: {name} {mesh} {row['plan']}: {row['reason'][:160]}")


def summary(name: str, mesh: str, rows: list[Row]) -> Row | None:
    """One program's line; none while answers are missing."""
    done = next((row for row in rows if row["by"] == "done"), None)
    taken = done["plan"] if done else None
    compiled = [row for row in rows if row.get("step") is not None]
    limit = load_spec(mesh).mesh().limit_bytes
    fitting = sorted((row for row in compiled if row["peak"] <= limit), key=lambda row: float(row["step"]))
    mine = next((row for row in fitting if row["by"] == "confirm" and row["plan"] == taken), None)
    if mine is None:
        return None
    best = fitting[0]
    distinct = [row for row in compiled if row["by"] == "beside"]  # each written program once
    by_hand = [row for row in fitting if not row["plan"].startswith(("search", "corrected"))]
    strategy = by_hand[0] if by_hand else {"plan": "-", "step": inf}
    return {
        "program": name, "mesh": mesh, "compiled": done["compiled"] if done else 0,
        "taken": taken, "step": 1e3 * mine["step"],
        "best": best["plan"], "best_step": 1e3 * best["step"], "slower": mine["step"] / best["step"] - 1,
        "strategy": strategy["plan"].removeprefix(BY_HAND), "strategy_step": 1e3 * strategy["step"],
        "seconds": sum(row["compile_seconds"] for row in compiled if row["by"] == "confirm"),
        "ranking": spearman([row["predicted"] for row in distinct], [row["step"] for row in distinct]),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
