"""Times of a GPU beside the cost model's: single ops (`op_cases.py`), the corpus (`corpus.py`) and published programs.

1. `--export FOLDER` writes the corpus, and those of `build/real` that fit, for `gpu_timer.py`, which times them on a
   machine with a GPU; donation is left out, so that a program can run again on the same arrays.
2. `--add FILE…` takes what it printed into `data/gpu_times.jsonl`, of each program the quickest that was
   profiled, or else the quickest.
3. Otherwise: predicts compute time on one device and prints, for each family of ops, how far it is from the time
   measured, and each program. `--each` lists every op, with what it attains, and every program, with what each kernel
   takes; `--fit` prints the parts of peak rates nearest to the ops of the fit set. Programs of `build/real` that were
   not lowered are left out.

What is compared is the time in which the GPU worked, as its profiler saw it, where a row has it. Others have that of a
whole run, of which starting a program took 38 µs: ops that took less than `LEAST_SECONDS` say nothing and are left out.
In programs of a hundred kernels and more each kernel outside loops took 180 to 370 µs there, whatever it does, so the
host is what was timed: those that took less than `LEAST_OF_KERNEL` for each are left out, too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from math import log
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import gpu_cases
from benchmarks.calibrate import FOLDER as CORPUS_FOLDER
from benchmarks.calibrate_ops import COLUMNS as OP_COLUMNS
from benchmarks.calibrate_ops import analysed, by_family, one_device, summary
from benchmarks.common import Row, markdown_table, note, put_between, show, write_json
from benchmarks.corpus import PROGRAMS as CORPUS
from benchmarks.corpus import source_of
from benchmarks.op_cases import cases
from benchmarks.real.lower import path_of
from benchmarks.real.programs import PROGRAMS as REAL
from toast_cli.dimensions import analyse
from toast_cli.frontend import load
from toast_cli.plan.problem import Problem, make_problem
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.profile import CompilerProfile
from toast_cli.price.profiles import find_profile

TABLE = Path(__file__).resolve().parent / "data" / "gpu_times.jsonl"
FIELDS = ("program", "chip", "jax", "seconds", "spread", "temp_bytes", "argument_bytes", "output_bytes")
PROFILED = ("device_seconds", "kernels")  # of newer rows
LEAST_SECONDS, LEAST_PROFILED = 100e-6, 5e-6
LEAST_OF_KERNEL = 380e-6
FAR = 1.5  # predicted over measured, or the other way round, of programs that the page names
MOST_BYTES = 70 * 2**30  # peak of a program that is exported
MOST_FILE_BYTES = 10**6  # as stored: larger programs take long to compile
BEGIN, END = "<!-- gpu times: written by benchmarks/gpu_times.py -->", "<!-- gpu times: end -->"
PROGRAM_COLUMNS = {
    "program": "{program}", "chip": "{chip}", "set": "{set}", "measured ms": "{measured:.1f}",
    "predicted ms": "{predicted:.1f}", "predicted / measured": "{ratio:.2f}",
}  # fmt: skip
EACH_OP = {
    "op": "{case}", "chip": "{chip}", "measured µs": "{measured:.0f}", "predicted µs": "{predicted:.0f}",
    "TFLOP/s": "{teraflops:.1f}", "GB/s": "{gigabytes:.0f}",
}  # fmt: skip
EACH_PROGRAM = PROGRAM_COLUMNS | {
    "kernels outside loops": "{outside:.0f}", "µs for each": "{per_kernel:.0f}", "in loops": "{inside:.0f}",
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    if options.export:
        return export(options.export)
    if options.add:
        add([json.loads(line) for path in options.add for line in path.read_text().splitlines()])
    rows = stored()
    if options.fit:
        print(fit([row for row in rows if row["program"] in op_cases()]))
        return 0
    ops, every = predicted_ops(rows), predicted_programs(rows)
    programs = [row for row in every if row["profiled"] or row["per_kernel"] >= 1e6 * LEAST_OF_KERNEL]
    if options.each:
        print(f"starting a program: {1e6 * next(row['seconds'] for row in rows if row['program'] == 'nothing'):.0f} µs")
        show("single ops", EACH_OP, sorted(ops, key=lambda row: row["case"]))
        show("all programs", EACH_PROGRAM, every)
    show("single ops, predicted against measured", OP_COLUMNS, summary(ops))
    show("programs on one device", PROGRAM_COLUMNS, programs)
    write_json(options.json, {"ops": ops, "programs": programs})
    if options.write:
        tables = [
            *by_family(summary(ops)),
            "",
            *by_set(programs),
        ]
        put_between(options.write, BEGIN, END, tables)
    return 0


def by_set(programs: list[Row]) -> list[str]:
    """Lines of a Markdown table: for each set of programs and chip, predicted over measured; then the furthest off."""
    columns = {head: f"{{{head}}}" for head in ("set", "chip", "programs", "median", "least", "most")}
    rows = []
    for which, chip in sorted({(row["set"], row["chip"]) for row in programs}):
        ratios = [row["ratio"] for row in programs if (row["set"], row["chip"]) == (which, chip)]
        figures = {"median": median(ratios), "least": min(ratios), "most": max(ratios)}
        shown = {name: f"{ratio:.2f}" for name, ratio in figures.items()}
        rows.append({"set": which, "chip": chip, "programs": len(ratios), **shown})
    far = sorted((row for row in programs if not 1 / FAR < row["ratio"] < FAR), key=lambda row: row["ratio"])
    named = ", ".join(f"{row['program']} {row['ratio']:.2f} ({row['chip']})" for row in far)
    listed = fill(f"Off by more than a factor of {FAR:g}: {named}.", 120, break_on_hyphens=False)
    return [*markdown_table(columns, rows, words=2), "", listed]


# -- measuring --------------------------------------------------------------------------------------------------------


def export(folder: Path) -> int:
    """Writes `corpus.NAME.mlirbc` and `real.NAME.mlirbc`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in [*(f"corpus.{name}" for name in CORPUS), *(f"real.{name}" for name in REAL)]:
        path, problem = file_of(name), problem_of(name, "H100")
        if problem is None or path.stat().st_size > MOST_FILE_BYTES:
            continue
        if Evaluator(problem).exact_cost(()).peak_bytes <= MOST_BYTES:
            (folder / f"{name.replace(' ', '_')}.mlirbc").write_bytes(without_donation(path))
    return 0


def without_donation(path: Path) -> bytes:
    """A stored program as a portable artifact whose results all have buffers of their own."""
    import zstandard

    from toast_cli.xla import ir, main_function, make_context, parse_module, write_bytecode, write_portable_artifact

    with make_context() as context:
        module = parse_module(context, zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes()))
        function = main_function(module)
        kept = [
            {
                one.name: one.attr
                for one in ir.DictAttr(given)
                if one.name not in ("tf.aliasing_output", "jax.buffer_donor")
            }
            for given in function.attributes["arg_attrs"]
        ]
        function.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(attributes) for attributes in kept])
        return write_portable_artifact(write_bytecode(module))


def add(found: Iterable[Row]) -> None:
    """Takes rows of `gpu_timer.py` into the table; errors are told and left out."""
    rows = {(row["program"], row["chip"]): row for row in stored()}
    for row in found:
        if "error" in row:
            note(f"{row['program']}: {row['error']}")
            continue
        kept = [*FIELDS, *(key for key in PROFILED if key in row)]
        row = {key: row[key] for key in kept} | {"chip": row["chip"].removeprefix("NVIDIA ").split()[0]}
        row |= {key: float(f"{row[key]:.4g}") for key in kept if key.endswith("seconds")}
        key = (row["program"], row["chip"])
        rows[key] = min(row, rows.get(key, row), key=lambda of: ("device_seconds" not in of, measured(of)))
    TABLE.write_text("".join(json.dumps(rows[key]) + "\n" for key in sorted(rows)))


def stored() -> list[Row]:
    return [json.loads(line) for line in TABLE.read_text().splitlines()] if TABLE.exists() else []


# -- predicting -------------------------------------------------------------------------------------------------------


def measured(row: Row) -> float:
    """Seconds of GPU work where its profiler told, of a whole run otherwise."""
    seconds: float = row["device_seconds"] if "device_seconds" in row else row["seconds"]
    return seconds


def says_something(row: Row) -> bool:
    """Of a single op."""
    return measured(row) >= (LEAST_PROFILED if "device_seconds" in row else LEAST_SECONDS)


def predicted_ops(rows: Iterable[Row]) -> list[Row]:
    """A row for each op that took long enough, for `calibrate_ops.summary`; µs, error relative to measured."""
    found = []
    for row in rows:
        case = op_cases().get(row["program"])
        if case is None or not says_something(row):
            continue
        problem, seconds = op_problem(row["program"], row["chip"]), measured(row)
        predicted, kernels = seconds_of(problem), Evaluator(problem).kernels(())
        found.append(
            {"case": row["program"], "chip": row["chip"], "family": case.family, "set": set_of(case),
             "measured": 1e6 * seconds, "predicted": 1e6 * predicted, "error": predicted / seconds - 1,
             "teraflops": sum(use.flops for use in kernels) / seconds / 1e12,
             "gigabytes": sum(use.bytes for use in kernels) / seconds / 1e9}
        )  # fmt: skip
    return found


def predicted_programs(rows: Iterable[Row]) -> list[Row]:
    """A row for each program that was lowered; ms. per_kernel: µs of the run for each kernel outside loops."""
    found: list[Row] = []
    for row in rows:
        kind, _, name = row["program"].partition(".")
        problem = problem_of(row["program"], row["chip"]) if kind in ("corpus", "real") else None
        if problem is not None:
            predicted, outside, inside = seconds_of(problem), *kernels_outside_and_in_loops(problem)
            seconds = measured(row)
            split = CORPUS[name].split if kind == "corpus" else REAL[name.replace("_", " ")].split
            found.append(
                {"program": name, "chip": row["chip"], "set": split, "measured": 1e3 * seconds,
                 "predicted": 1e3 * predicted, "ratio": predicted / seconds, "outside": outside, "inside": inside,
                 "per_kernel": 1e6 * seconds / max(1.0, outside), "profiled": "device_seconds" in row}
            )  # fmt: skip
    return found


def set_of(case: Any) -> str:
    return "judge" if case.family in gpu_cases.FAMILIES else "test" if case.test else "fit"


def seconds_of(problem: Problem, profile: CompilerProfile | None = None) -> float:
    """Predicted compute time on one device, which runs for a moment only."""
    mesh = replace(problem.mesh, chip=replace(problem.mesh.chip, sustained=1.0))
    return Evaluator(replace(problem, mesh=mesh), profile=profile or find_profile(mesh.chip)).cost(()).compute_seconds


def kernels_outside_and_in_loops(problem: Problem) -> tuple[float, float]:
    """Executions of the kernels predicted."""
    ops, found = problem.program.ops, [0.0, 0.0]
    for use in Evaluator(problem).kernels(()):
        found[ops[use.ops[0]].loop >= 0] += use.runs
    return found[0], found[1]


def fit(rows: Iterable[Row]) -> str:
    """The parts of peak rates with the least median error of the ops of the fit set, products and the rest."""
    sized = [row for row in rows if says_something(row) and not op_cases()[row["program"]].test]
    lines = []
    for name, families, parts in (
        ("memory", ("elementwise", "reduction", "movement"), range(60, 101, 2)),
        ("matrix", ("matmul", "products"), range(50, 91, 2)),
    ):
        members = [row for row in sized if op_cases()[row["program"]].family in families]
        errors = {
            part: median(abs(log(_with(row, name, part / 100) / measured(row))) for row in members) for part in parts
        }
        best = min(errors, key=lambda part: errors[part])
        lines.append(f"{name} {best / 100:.2f}: median error {errors[best]:.1%} of {len(members)} ops")
    return "\n".join(lines)


def _with(row: Row, name: str, part: float) -> float:
    problem = op_problem(row["program"], row["chip"])
    profile = find_profile(problem.mesh.chip)
    return seconds_of(problem, replace(profile, attained=replace(profile.attained, **{name: part})))


# -- programs ---------------------------------------------------------------------------------------------------------


@cache
def op_cases() -> dict[str, Any]:
    return cases() | gpu_cases.cases()


@cache
def op_problem(name: str, chip: str) -> Problem:
    return make_problem(*analysed(op_cases()[name]), one_device(chip))


def problem_of(name: str, chip: str) -> Problem | None:
    """`corpus.NAME` or `real.NAME` on one device; None where it was not lowered."""
    kind, _, of = name.partition(".")
    if kind == "corpus":
        program = source_of(of, CORPUS_FOLDER).program
    elif file_of(name).exists():
        program = load(str(file_of(name))).program
    else:
        return None
    return make_problem(program, analyse(program), one_device(chip))


def file_of(name: str) -> Path:
    kind, _, of = name.partition(".")
    return CORPUS_FOLDER / f"{of}.mlirbc.zst" if kind == "corpus" else path_of(of)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=Path, metavar="FOLDER", help="write programs for gpu_timer.py, and end")
    parser.add_argument("--add", type=Path, nargs="+", metavar="FILE", help="take in what gpu_timer.py wrote")
    parser.add_argument("--each", action="store_true", help="list every op and every program, too")
    parser.add_argument("--fit", action="store_true", help="print the parts of peak rates that suit the ops, and end")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into this page: docs/accuracy.md")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON; - for stdout")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
