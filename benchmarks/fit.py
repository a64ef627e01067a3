"""What `--fit auto` does where memory is short: which lever it takes, and how the prediction agrees with XLA:TPU.

Each program gets a fraction of the memory of its smallest plan as written. A row has the lever taken, and the peak and
the step as predicted and as XLA:TPU has them ahead of time (extra `tpu`): what it says to need when it has next to no
memory (see `calibrate_memory`), and compute plus exposed communication of the compiled program (minutes each, so only
with `--compile-seconds`). Rows are kept in `--table`; rows that the table has are left alone. Programs are sample
models with batches that need gigabytes of each device, and programs of published packages (`benchmarks.real.lower`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from textwrap import wrap

from benchmarks.calibrate_memory import needed, starved_options
from benchmarks.common import Row, markdown_table, note, put_between, show, spearman
from benchmarks.real.lower import path_of
from sample_models import block, decoder, moe, resnet50, rnn, scan, ssm, vit
from sample_models.common import Sample, encode, lower
from toast_cli import xla
from toast_cli.ask_xla.compile import target_of
from toast_cli.candidates.ask_compiler import compiler_for
from toast_cli.candidates.fitting import options_of
from toast_cli.hardware import Spec, load_spec
from toast_cli.pipeline import Outcome, partition
from toast_cli.request import Fit, Request

# Sample models whose smallest plan needs 3 to 12 GiB.
SAMPLES: dict[str, Callable[[], Sample]] = {
    "decoder": lambda: decoder.training("decoder", "", decoder.Config(
        layers=2, model=2048, heads=8, kv_heads=1, head=256, ff=8192, vocab=32000, batch=128, seq=1024)),
    "scan": lambda: scan.training("scan", "", scan.Config(6, 1024, 8, 128, 2816, 16000, 128, 1024)),
    "block": lambda: block.training("block", "", block.Config(2, 4096, 32, 128, 16384, 1024, 32)),
    "ssm": lambda: ssm.training("ssm", "", ssm.Config(2, 2048, 2048, 32000, 128, 1024)),
    "vit": lambda: vit.training("vit", "", vit.Config(2, 1024, 16, 64, 4096, 1000, 2048, 224, 16)),
    "moe": lambda: moe.training("moe", "", moe.Config(
        layers=2, model=1024, heads=16, head=64, ff=4096, experts=16, groups=256, capacity=96, vocab=32000,
        batch=256, seq=1024)),
    "rnn": lambda: rnn.training("rnn", "", rnn.Config(2, 1024, 2048, 16000, 2048, 64)),
    "resnet": lambda: resnet50.training("resnet", "", resnet50.Config(2048, 224, 64, (1, 1, 1, 1), 1000)),
}  # fmt: skip
REAL_PROGRAMS = (
    "scan own kept", "scan maxtext kept", "linen mixer", "nnx decoder", "gpt2", "haiku decoder", "dinov2",
)  # fmt: skip
NAMES = (*SAMPLES, *REAL_PROGRAMS)
SMALL, LARGE = ("v5e-8", "data=4,model=2"), ("v5e-64", "data=16,model=4")
MACHINES = {"scan own kept": LARGE, "scan maxtext kept": LARGE}  # program -> mesh and shape, if not `SMALL`
SHARES = (0.75, 0.5, 0.35)  # of the smallest plan's peak; "as written" has no limit
TABLE = Path(__file__).resolve().parent / "data" / "fit.jsonl"
LOWERED, REAL = Path("build/fit"), Path("build/real")
START, END = "<!-- fit: written by benchmarks/fit.py -->", "<!-- fit: end -->"
COLUMNS = {
    "program": "{program}", "memory": "{memory}", "lever": "{lever}", "predicted GiB": "{predicted_gib:.2f}",
    "XLA:TPU GiB": "{gib:.2f}", "peak": "{peak_error:+.0%}", "predicted ms": "{predicted_ms:.1f}",
    "XLA:TPU ms": "{ms:.1f}", "step": "{step_error:+.0%}", "search time": "{times:.1f}×",
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help="programs (default: all)")
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES)
    parser.add_argument("--iterations", type=int, help="plans of each search (default: as toast has it)")
    parser.add_argument("--compile-seconds", type=float, default=0.0, help="compile too, each program for so long")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--show", action="store_true", help="only print the table")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table into this page: docs/accuracy.md")
    options = parser.parse_args(arguments)
    known = read(options.table)
    for name in () if options.show else options.names:
        for row in points(name, options, {(row["program"], row["memory"]) for row in known}):
            with options.table.open("a") as table:
                table.write(json.dumps(row) + "\n")
            note(json.dumps(row))
    rows = [{**row, **figures(row)} for row in read(options.table) if row["program"] in options.names]
    show("made to fit", COLUMNS, rows)
    print(*summary(rows), sep="\n")
    wrapped = [line for text in summary(rows) for line in wrap(text, 120, break_on_hyphens=False)]
    if options.write:
        page, table = by_program(rows)
        put_between(options.write, START, END, [*markdown_table(page, table, words=len(page)), "", *wrapped])
    return 0


def by_program(rows: list[Row]) -> tuple[dict[str, str], list[Row]]:
    """Columns and rows of the page's table: a program in each row, a memory in each column."""
    memories = list(dict.fromkeys(row["memory"] for row in rows))
    found: dict[str, Row] = {}
    for row in rows:
        kept = row["lever"] if row["fits"] else "no plan"
        error = f" ({row['peak_error']:+.0%})" if row["peak_error"] == row["peak_error"] else ""
        found.setdefault(row["program"], {"program": row["program"]})[row["memory"]] = kept + error
    table = [dict.fromkeys(memories, "–") | row for row in found.values()]
    heads = {"a v5e's" if memory == "as written" else memory: f"{{{memory}}}" for memory in memories}
    return {"program": "{program}", **heads}, table


def read(table: Path) -> list[Row]:
    """The stored rows."""
    return [json.loads(line) for line in table.read_text().splitlines()] if table.exists() else []


def points(name: str, options: argparse.Namespace, known: set[tuple[str, str]]) -> Iterator[Row]:
    """The rows of a program that are not known yet."""
    wanted = {"as written": None, **{f"{share:.0%}": share for share in options.shares}}
    wanted = {memory: share for memory, share in wanted.items() if (name, memory) not in known}
    if not wanted:
        return
    path, (mesh, shape) = path_of(name, LOWERED if name in SAMPLES else REAL), MACHINES.get(name, SMALL)
    if name in SAMPLES and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(lower(SAMPLES[name]()), "bytecode"))

    def found(**more: object) -> tuple[Outcome, float]:
        begun = time.process_time()
        request = Request(str(path), mesh, shape, iterations=options.iterations, **more)  # type: ignore[arg-type]
        return partition(request, annotated=False), time.process_time() - begun

    smallest, _ = found(minimise=("peak_memory",), fit=Fit.as_written)
    for memory, share in wanted.items():
        limit = None if share is None else round(share * smallest.result.cost.peak_bytes)
        outcome, seconds = found(memory_limit=limit)
        _, before = found(memory_limit=limit, fit=Fit.as_written) if limit else (None, seconds)
        cost = outcome.result.cost
        row = {
            "program": name, "memory": memory, "lever": options_of(outcome.source) or "none",
            "fits": outcome.result.fits, "times": seconds / before, "predicted_peak": cost.peak_bytes,
            "predicted_step": cost.step_seconds,
            "why": next((it for it in outcome.source.notices if it.startswith("cannot be made to fit")), ""),
        }  # fmt: skip
        if outcome.result.fits:
            row |= compiled(outcome, load_spec(mesh), limit, options.compile_seconds)
        yield row


def compiled(outcome: Outcome, spec: Spec, limit: int | None, seconds: float) -> Row:
    """What XLA:TPU says of a program on devices with so much memory."""
    content = outcome.emit("bytecode").content
    chip = replace(spec.chip, memory_bytes=limit, reserved_bytes=0) if limit else spec.chip
    target = target_of(spec)
    devices = xla.tpu_devices(target.topology, target.megacore)[: target.devices]
    row: Row = {}
    try:
        xla.compile_ahead(content, devices, shardy=True, options=starved_options(chip))
    except RuntimeError as error:
        row["peak"] = needed(str(error)).get("needed_bytes")
    if seconds:
        answer = compiler_for(spec, None)(outcome.problem.mesh).judge(content, seconds)
        row |= {"outcome": answer.outcome, "reason": answer.reason[:300]}
        row["step"] = (answer.compute_seconds or 0.0) + answer.exposed_seconds
    return row


def figures(row: Row) -> Row:
    """Units and errors: predicted over compiled, less one."""
    nan = float("nan")
    peak, step = row.get("peak") or nan, row.get("step") or nan
    lever = row["lever"].replace("--", "")
    return {
        "lever": lever if row["fits"] else "no plan",
        "gib": peak / 2**30,
        "ms": step * 1e3,
        "predicted_gib": row["predicted_peak"] / 2**30 if row["fits"] else nan,
        "predicted_ms": row["predicted_step"] * 1e3 if row["fits"] else nan,
        "peak_error": row["predicted_peak"] / peak - 1,
        "step_error": row["predicted_step"] / step - 1,
    }


def summary(rows: list[Row]) -> list[str]:
    """Errors over all compiled rows with a lever, and how the order of a program's steps agrees."""
    levers = [row for row in rows if row["memory"] != "as written"]
    fitting = [row for row in levers if row["fits"]]
    if not fitting:
        return []
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.get("step"):
            groups[row["program"]].append(row)
    orders = [
        spearman([row["predicted_step"] for row in group], [row["step"] for row in group])
        for group in groups.values()
        if len(group) > 2
    ]

    def error(name: str) -> str:
        found = sorted(abs(row[name]) for row in fitting if row[name] == row[name])
        return f"median {median(found):.1%}, worst {found[-1]:.1%} of {len(found)}" if found else "not measured"

    times, programs = median(row["times"] for row in levers), f"{len(orders)} program{'s' if len(orders) > 1 else ''}"
    order = f"median {median(orders):.2f} of {programs}" if orders else "not measured"
    peaks, steps = error("peak_error"), error("step_error")
    return [
        f"A plan was found for {sum(row['fits'] for row in levers)} of {len(levers)} rows with a limit. "
        f"Error of the peak: {peaks}; of the step: {steps}. Order "
        f"of a program's steps (Spearman): {order}. Search time over that of `--fit as-written`: median "
        f"{times:.1f}."
    ]


if __name__ == "__main__":
    sys.exit(main())
