"""What XLA makes of the written programs beside what was predicted, under expert plans and the search's.

One row for each tiny twin and plan: constraints written, values that Shardy's propagation takes elsewhere all the same,
collectives and their bytes (of results, on each device, loops counted) predicted and compiled by XLA:CPU, the share of
bytes that agree in kind and axes, and whether the numbers are those of the unpartitioned program. `--tpu` and `--gpu`
add rows for the given programs, compiled ahead of time for real chips that need not be there (numbers are not run). A
program is a sample model, or one of `corpus.PROGRAMS` as `corpus:NAME`. `data/fidelity.json` has the rows measured so
far: `--stored` that file `--json` that file `--write docs/accuracy.md` adds to them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

import zstandard

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import corpus
from benchmarks.common import Row, choose, is_tiny, markdown_table, note, put_between, show, write_json
from toast_cli import xla
from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.collectives import CompiledCollective, collectives_in
from toast_cli.ask_xla.compile import Dialect, collectives_after_partitioning, compile_for, target_of
from toast_cli.ask_xla.confirm import seconds_on
from toast_cli.ask_xla.numbers import compare_numbers
from toast_cli.ask_xla.schedule import scheduled_time
from toast_cli.ask_xla.verdict import compare_traffic
from toast_cli.hardware import load_spec
from toast_cli.pipeline import Outcome, partition
from toast_cli.plan.decisions import Plan
from toast_cli.plan.problem import Problem
from toast_cli.price.evaluator import Evaluator
from toast_cli.report.build import collective_facts
from toast_cli.request import Request
from toast_cli.tactics import strategies

COLUMNS = {
    "program": "{program}", "plan": "{plan}", "form": "{form}", "compiler": "{compiler} {mesh}", "ops": "{ops}",
    "constraints": "{constraints}", "astray": "{astray}",
    "predicted": "{predicted_count:.0f}", "compiled": "{compiled_count:.0f}",
    "predicted KiB": "{predicted_kib:.1f}", "compiled KiB": "{compiled_kib:.1f}",
    "agreeing": "{agreeing}", "step ms": "{step}", "numbers": "{numbers}",
}  # fmt: skip
BESIDE = {
    "program": "{program}", "plan": "{plan}", "compiler": "{compiler} {mesh}", "StableHLO ms": "{stablehlo:.3f}",
    "form": "{form}", "ms": "{step}", "of StableHLO's": "{ratio:.3f}",
}  # fmt: skip
AGREEMENT = {
    "compiler": "{compiler}", "form": "{form}", "plans": "{plans}", "at least 95 % agree": "{good}",
    "median": "{median:.1%}", "least": "{least:.1%}", "numbers equal": "{equal}",
}  # fmt: skip
BELOW = {
    "program": "{program}", "plan": "{plan}", "largest difference": "{largest}",
    "predicted KiB": "{predicted_kib:.1f}", "compiled KiB": "{compiled_kib:.1f}", "agreeing": "{agreeing}",
}  # fmt: skip
SENTENCE = (
    "Steps in {form} form take {median:.3f} of those of the same plan in StableHLO form (median of {plans} plans), at "
    "most {most:.3f}; {good} at most 3 % longer."
)
START, END = "<!-- fidelity: written by benchmarks/fidelity.py -->", "<!-- fidelity: end -->"
MOST_SECONDS, MOST_DIFFERENCES = 900.0, 8
AIM, LONGER_AIM = 0.95, 0.03
NAMED = 3  # plans below the aim that the page names
FOLDER = Path("build/fidelity")
CORPUS = "corpus:"

Compiler = Literal["cpu", "tpu", "gpu"]


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    rows: list[Row] = [row for file in options.stored for row in json.loads(file.read_text(encoding="utf-8"))]
    for job in jobs(options):
        for row in measure(job, options):
            rows.append(row)
            note(" ".join(form.format_map(row) for form in COLUMNS.values()))
    rows = merged(rows)
    show("written programs, predicted and compiled", COLUMNS, rows, {"wrong": "red"})
    if beside := forms_beside(rows):
        show("steps of one plan in several forms", BESIDE, beside)
    write_json(options.json, rows)
    if options.write:
        write_page(options.write, rows)
    return 1 if any(row["verdict"] == "wrong" for row in rows) else 0


@dataclass(frozen=True)
class Job:
    """A program to partition for a mesh and hand to a compiler."""

    program: str
    mesh: str
    compiler: Compiler


def jobs(options: argparse.Namespace) -> Iterator[Job]:
    """All that was asked for; the tiny twins when nothing was."""
    if options.programs or not (options.stored or options.tpu or options.gpu):
        for name in choose(options.programs, tiny=True):
            if is_tiny(name):
                yield Job(name, options.mesh, "cpu")
    wanted: tuple[tuple[Compiler, list[str], list[str]], ...] = (
        ("tpu", options.tpu, options.tpu_mesh),
        ("gpu", options.gpu, options.gpu_mesh),
    )
    for compiler, programs, meshes in wanted:
        for mesh in meshes:
            for name in programs:
                yield Job(name, mesh, compiler)


def measure(job: Job, options: argparse.Namespace) -> Iterator[Row]:
    """Rows of one program: the search's plan and every expert's that splits something."""
    outcome = partition(Request(str(program_path(job.program, options.keep)), job.mesh, iterations=400))
    plans = {"search": outcome.result.plan, **strategies(outcome.problem)}
    for label, plan in plans.items():
        for form in options.forms if plan and (not options.plans or label in options.plans) else ():
            row = {"program": job.program, "plan": label, "form": form, "mesh": job.mesh, "compiler": job.compiler}
            yield row | compare(outcome, plan, form, job, options)


def program_path(name: str, folder: Path) -> Path:
    """The file of a sample model; a program of the corpus is lowered into `folder` first."""
    if not name.startswith(CORPUS):
        return choose([name])[name]
    name = name.removeprefix(CORPUS)
    if name not in corpus.PROGRAMS:
        raise SystemExit(f"no program {name} in the corpus; there are {', '.join(corpus.PROGRAMS)}")
    corpus.source_of(name, folder)
    return folder / f"{name}.mlirbc.zst"


def compare(outcome: Outcome, plan: Plan, form: str, job: Job, options: argparse.Namespace) -> Row:
    """The figures of one row."""
    problem, mesh = outcome.problem, outcome.problem.mesh
    chosen = replace(outcome, result=replace(outcome.result, plan=plan))
    emitted = chosen.emit(form)
    written, report = emitted.content, emitted.report
    notes = [text for text in report.analysis.notes if "elsewhere than planned" in text]
    promised = collective_facts(outcome.source, Evaluator(problem), plan)
    if job.compiler == "cpu":
        promised = [one.as_written() for one in promised]
    row: Row = {
        "ops": outcome.report.program.ops, "constraints": len(report.constraints),
        "astray": notes[0].split()[0] if notes else "0", "predicted_count": sum(c.count for c in promised),
        "predicted_kib": sum(c.bytes * c.count for c in promised) / 1024, "compiled_count": 0, "compiled_kib": 0.0,
        "agreeing": "-", "step": "-", "numbers": "not run", "verdict": "",
    }  # fmt: skip
    dialect: Dialect = "hlo" if form == "hlo" else "stablehlo"
    found = compiled_collectives(written, dialect, problem, job, options.keep)
    if job.compiler == "cpu" and not options.no_numbers:
        row["numbers"] = numbers(outcome, written, dialect)
    if isinstance(found, Failure):
        return row | {"agreeing": found.reason[:40], "verdict": "wrong"}
    found, seconds = found
    row["step"] = f"{1e3 * seconds:.3f}" if seconds else "-"
    row["compiled_count"] = sum(c.count for c in found)
    row["compiled_kib"] = sum(c.bytes * c.count for c in found) / 1024
    compared = compare_traffic(promised, found, dict(zip(mesh.names, mesh.sizes, strict=True)))
    row["agreeing"], row["share"] = f"{100 * compared.share:.1f} %", compared.share
    row["differences"] = [asdict(difference) for difference in compared.differences[:MOST_DIFFERENCES]]
    row["verdict"] = "" if row["numbers"] in ("equal", "not run") else "wrong"
    return row


def compiled_collectives(
    written: bytes, dialect: Dialect, problem: Problem, job: Job, folder: Path
) -> tuple[list[CompiledCollective], float] | Failure:
    """Those of the partitioned program, or of the final one where real chips are compiled for, and seconds of its step
    (0 where the compiler estimates no cycles). Programs for chips are kept in `folder`.
    """
    mesh = problem.mesh
    if job.compiler == "cpu":
        axes = dict(zip(mesh.names, mesh.sizes, strict=True))
        found = collectives_after_partitioning(written, dialect, axes, timeout_seconds=MOST_SECONDS)
        return found if isinstance(found, Failure) else (found, 0.0)
    target = target_of(load_spec(job.mesh))
    path = folder / f"{hashlib.sha256(written + target.label.encode()).hexdigest()[:24]}.hlo.zst"
    if not path.exists():
        compiled = compile_for(written, dialect, target, shardy=dialect == "stablehlo", timeout_seconds=MOST_SECONDS)
        if isinstance(compiled, Failure):
            return compiled
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(zstandard.compress(compiled.hlo_text.encode()))
    text = zstandard.decompress(path.read_bytes()).decode()
    clock = mesh.chip.clock_hertz if job.compiler == "tpu" else 0.0
    walked = scheduled_time(
        text,
        mesh.names,
        mesh.sizes,
        clock,
        mesh.chip.memory_bytes_per_second,
        lambda k, b, a: seconds_on(mesh, k, b, a),
    )
    return collectives_in(text, mesh.names, mesh.sizes), walked.step_seconds if clock else 0.0


def numbers(outcome: Outcome, written: bytes, dialect: Dialect) -> str:
    """ "equal", or what went wrong."""
    original = xla.write_bytecode(outcome.source.module)
    devices = outcome.problem.mesh.devices
    errors = compare_numbers(original, written, devices, form=dialect, timeout_seconds=MOST_SECONDS)
    if isinstance(errors, Failure):
        return errors.reason[:40]
    wrong = [e for e in errors if e.wrong]
    return f"{len(wrong)} of {len(errors)} differ" if wrong else "equal"


def write_page(page: Path, rows: list[Row]) -> None:
    """Puts summaries between the markers of the page: agreement by compiler and form, the plans furthest below the aim,
    and how long steps of other forms are beside those of StableHLO.
    """
    judged = [row for row in rows if "share" in row]
    below = [row | {"largest": difference(row)} for row in judged if row["share"] < AIM and row["form"] == "stablehlo"]
    below = sorted(below, key=lambda row: row["share"])[:NAMED]
    lines = [
        *markdown_table(AGREEMENT, agreement(judged), words=2), "",
        "Plans of which the fewest bytes agree in StableHLO form:", "",
        *markdown_table(BELOW, below, words=3), "",
    ]  # fmt: skip
    lines += [SENTENCE.format_map(row) for row in lengths(forms_beside(rows))]
    put_between(page, START, END, lines)


def agreement(judged: list[Row]) -> list[Row]:
    """For each compiler and form, how many plans reach the aim."""
    found = []
    for compiler, mesh, form in dict.fromkeys((row["compiler"], row["mesh"], row["form"]) for row in judged):
        members = [r for r in judged if (r["compiler"], r["mesh"], r["form"]) == (compiler, mesh, form)]
        shares = [row["share"] for row in members]
        ran = [row["numbers"] == "equal" for row in members if row["numbers"] != "not run"]
        found.append(
            {
                "compiler": f"XLA:{compiler.upper()}, {mesh}", "form": form, "plans": len(members),
                "good": sum(share >= AIM for share in shares), "median": median(shares), "least": min(shares),
                "equal": f"{sum(ran)} of {len(ran)}" if ran else "not run",
            }
        )  # fmt: skip
    return found


def difference(row: Row) -> str:
    """The largest difference of a row in words."""
    first = row["differences"][0]
    axes, size = "+".join(first["axes"]), f"{first['bytes'] / 1024:.1f} KiB ×{first['count']:.3g}"
    return f"{first['side']}: {first['kind']} over {axes}, {size}"


def lengths(beside: list[Row]) -> list[Row]:
    """For each form, the ratios of `forms_beside`."""
    found = []
    for form in dict.fromkeys(row["form"] for row in beside):
        ratios = [row["ratio"] for row in beside if row["form"] == form]
        good = sum(ratio <= 1 + LONGER_AIM for ratio in ratios)
        found.append({"form": form, "plans": len(ratios), "good": good, "median": median(ratios), "most": max(ratios)})
    return found


def forms_beside(rows: list[Row]) -> list[Row]:
    """Each row of another form than StableHLO that has a step, with the step that the same plan takes in StableHLO and
    how many times as long it is."""
    steps = {title(row): float(row["step"]) for row in rows if row["step"] != "-"}
    found = []
    for row in rows:
        first = steps.get(title(row | {"form": "stablehlo"}))
        if row["form"] != "stablehlo" and row["step"] != "-" and first:
            found.append(row | {"stablehlo": first, "ratio": float(row["step"]) / first})
    return found


def merged(rows: list[Row]) -> list[Row]:
    """Each row once, as it was measured last, and the forms of one plan beside each other."""
    newest = {title(row): row for row in rows}
    plans: dict[str, list[Row]] = {}
    for row in newest.values():
        plans.setdefault(title(row | {"form": ""}), []).append(row)
    return [row for found in plans.values() for row in found]


def title(row: Row) -> str:
    """What a row is called above its differences."""
    form = "" if row["form"] == "stablehlo" else f" {row['form']},"
    return f"{row['program']}, {row['plan']},{form} {row['compiler']} {row['mesh']}"


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("programs", nargs="*", help="names of tiny twins; all when none is given")
    parser.add_argument("--mesh", default="h100-8", metavar="SPEC", help="mesh of the rows for XLA:CPU")
    parser.add_argument("--plans", nargs="+", default=[], metavar="NAME", help="only these plans, e.g. search fsdp")
    parser.add_argument(
        "--forms", nargs="+", default=["stablehlo"], choices=["stablehlo", "hlo"], help="how they are written"
    )
    parser.add_argument("--tpu", nargs="+", default=[], metavar="PROGRAM", help="also these, for XLA:TPU ahead of time")
    parser.add_argument("--tpu-mesh", nargs="+", default=["v4-32"], metavar="SPEC", help="meshes of those")
    parser.add_argument("--gpu", nargs="+", default=[], metavar="PROGRAM", help="also these, for XLA:GPU ahead of time")
    parser.add_argument("--gpu-mesh", nargs="+", default=["h100-8"], metavar="SPEC", help="meshes of those")
    parser.add_argument(
        "--keep", type=Path, default=FOLDER, metavar="FOLDER", help="where programs compiled for chips are kept"
    )
    parser.add_argument("--no-numbers", action="store_true", help="do not run the programs")
    parser.add_argument(
        "--stored", nargs="+", type=Path, default=[], metavar="FILE", help="start with rows that --json wrote"
    )
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put summaries into this page: docs/accuracy.md")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON; - for stdout")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
