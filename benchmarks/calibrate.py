"""Compiles the corpus of `corpus.py` ahead of time with XLA:TPU and stores what buffer assignment and the compiler's
cycle estimates say.

Needs libtpu and no TPU. `python benchmarks/calibrate.py` adds the points that `data/programs.jsonl` lacks (a point is
one program, slice and plan; `--most` and `--seconds` bound one run), one JSON line each; `calibration.py` compares the
table with the model. The table holds figures and no programs:

* `program`, `slice`, `plan`: what was compiled, see `corpus.py`; `decisions`: the plan; `fingerprint`: of the layouts
  it meant.
* `argument_bytes`, `output_bytes`, `alias_bytes`, `temp_bytes`: of one device, from XLA's memory statistics. Peak is
  arguments + outputs - aliases + temporaries.
* `cycles`: sum of `estimated_cycles` over everything that runs, loops counted. `collectives`: kind -> [runs, bytes of
  results per device].
* `astray`: values that Shardy takes elsewhere than planned, as the emitter found. `seconds`: of compiling.
* `exhausted`: when it does not fit, what the compiler says it needs and has, in bytes; the figures above are then
  absent.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import zstandard

from benchmarks.common import note
from benchmarks.corpus import PLANS, PROGRAMS, SLICES, Loaded, fingerprint, load_case, plan_of, store
from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.collectives import collectives_in
from toast_cli.ask_xla.compile import Answer, compile_for, target_of
from toast_cli.emit import Written, write
from toast_cli.plan.decisions import Plan
from toast_cli.plan.lower import lower

TABLE = Path(__file__).resolve().parent / "data" / "programs.jsonl"
FOLDER = Path("build/calibration")
Point = dict[str, Any]

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_USED = re.compile(
    r"(?:Used|for HLO temporaries) \(?([\d.]+)([KMG]?)\)? (?:of|exceeds available HBM) \(?([\d.]+)([KMG]?)\b"
)


def main(arguments: list[str] | None = None) -> int:
    parser = options_of(__doc__, TABLE)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where to keep compiled texts")
    options = parser.parse_args(arguments)
    return fill(
        options,
        lambda loaded, plan, point: measure(loaded, plan, options.keep and options.keep / name_of(point)),
        summary,
    )


def fill(
    options: argparse.Namespace, look: Callable[[Loaded, Plan, Point], Point], said: Callable[[Point], str]
) -> int:
    """Adds what `look` finds of the points that the table lacks, and tells of each."""
    start, added = time.monotonic(), 0
    known = {key(point) for point in read_points(options.table)}
    for loaded, point, plan in wanted(options):
        if added >= options.most or time.monotonic() - start > options.seconds:
            break
        if key(point) in known:
            continue
        known.add(key(point))
        point |= look(loaded, plan, point)
        with options.table.open("a") as table:
            table.write(json.dumps(point) + "\n")
        added += 1
        note(said(point))
    return 0


def wanted(options: argparse.Namespace) -> Iterator[tuple[Loaded, Point, Plan]]:
    """The points asked for, shuffled, so that a table that is not complete is a fair sample."""
    triples = list(product(options.programs, options.slices, options.plans))
    random.Random(0).shuffle(triples)
    known = {(point["program"], point["slice"], point["plan"]) for point in read_points(options.table)}
    for program, slice_name, label in triples:
        if (program, slice_name, label) in known:
            continue
        loaded = load_case(program, slice_name, options.folder)
        plan = plan_of(loaded.problem, label)
        if plan is not None:
            point: Point = {"program": program, "slice": slice_name, "plan": label}
            yield loaded, point | {"decisions": store(plan), "fingerprint": fingerprint(loaded.problem, plan)}, plan


def key(point: Point) -> tuple[str, ...]:
    """Two plans of one meaning are one point."""
    return point["program"], point["slice"], point["fingerprint"]


def name_of(point: Point) -> str:
    """A file name for a point."""
    return re.sub(r"\W+", "_", f"{point['program']} {point['slice']} {point['plan']}") + ".hlo.zst"


def measure(loaded: Loaded, plan: Plan, keep: Path | None = None) -> Point:
    """What XLA:TPU makes of a plan; the compiled text goes to `keep`."""
    written = write(loaded.source, lower(loaded.problem, plan), "bytecode")
    facts = compile_for(written.content, "stablehlo", target_of(loaded.spec))
    point: Point = {"ops": loaded.source.program.source_op_count, "astray": astray_values(written)}
    if isinstance(facts, Failure):
        return point | failed(facts)
    if keep:
        keep.parent.mkdir(parents=True, exist_ok=True)
        keep.write_bytes(zstandard.ZstdCompressor(level=9).compress(facts.hlo_text.encode()))
    return point | figures(facts, loaded)


def astray_values(written: Written) -> int:
    """How many values Shardy takes elsewhere than planned, as the emitter found."""
    return sum(int(text.split()[0]) for text in written.notes if "elsewhere than planned" in text)


def figures(facts: Answer, loaded: Loaded) -> Point:
    mesh = loaded.problem.mesh
    traffic: dict[str, list[float]] = {}
    for collective in collectives_in(facts.hlo_text, mesh.names, mesh.sizes):
        if collective.axes and prod(mesh.sizes[mesh.names.index(a)] for a in collective.axes if a in mesh.names) > 1:
            entry = traffic.setdefault(collective.kind, [0.0, 0.0])
            entry[0] += collective.count
            entry[1] += collective.count * collective.bytes
    return {
        "argument_bytes": facts.argument_bytes, "output_bytes": facts.output_bytes, "alias_bytes": facts.alias_bytes,
        "temp_bytes": facts.temp_bytes, "peak_bytes": facts.peak_bytes, "cycles": facts.cycles, "collectives": traffic,
        "seconds": round(facts.seconds, 1),
    }  # fmt: skip


def failed(failure: Failure) -> Point:
    """Out of memory with the compiler's own figures, or the reason of another failure."""
    found = _USED.search(failure.reason)
    if found is None:
        return {"failed": failure.reason[:200]}
    used, used_unit, limit, limit_unit = found.groups()
    return {"exhausted": [round(float(used) * _UNITS[used_unit]), round(float(limit) * _UNITS[limit_unit])]}


def peak_bytes(point: Point) -> float:
    """Compiled peak of one device; what the compiler would have needed where it does not fit."""
    if "exhausted" in point:
        return float(point["exhausted"][0])
    return float(point["argument_bytes"] + point["output_bytes"] - point["alias_bytes"] + point["temp_bytes"])


def read_points(table: Path = TABLE) -> list[Point]:
    """The stored table."""
    return [json.loads(line) for line in table.read_text().splitlines()] if table.exists() else []


def summary(point: Point) -> str:
    """One line about a point, for people who wait."""
    what = f"{point['program']} {point['slice']} {point['plan']}"
    if "failed" in point:
        return f"{what}: {point['failed']}"
    fits = "does not fit" if "exhausted" in point else f"{point['cycles'] / 1e6:.1f} M cycles, {point['seconds']} s"
    return f"{what}: {peak_bytes(point) / 2**30:.2f} GiB, {fits}"


def options_of(documentation: str | None, table: Path) -> argparse.ArgumentParser:
    """What every script that measures points of the corpus is told: which ones, and into which table."""
    parser = argparse.ArgumentParser(description=(documentation or "").split("\n\n")[0])
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS), metavar="NAME")
    parser.add_argument("--slices", nargs="+", default=list(SLICES), choices=list(SLICES), metavar="SLICE")
    parser.add_argument("--plans", nargs="+", default=list(PLANS), metavar="PLAN", help="e.g. fsdp 'random 0'")
    parser.add_argument("--most", type=int, default=10**9, metavar="N", help="points to add at most")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no point after so long")
    parser.add_argument("--table", type=Path, default=table, metavar="FILE")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where lowered programs are kept")
    return parser


if __name__ == "__main__":
    sys.exit(main())
