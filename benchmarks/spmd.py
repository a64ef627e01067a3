"""The program of one device beside its plan: are its collectives the promised ones, are its numbers right, and how long
does it take to write?

    python -m benchmarks.spmd mlp_tiny scan_tiny
    python -m benchmarks.spmd --mesh h100-8:data=4,model=2 a100-16:data=4,model=4 --numbers

One row for each program, mesh and plan: the known strategies and the plan that a search finds. `promised` and
`written` are bytes that each device sends; `share` is the part of the larger that is the same in kind and axes. Below
each row stand the collectives that make a difference: kind, axes, bytes of the result on each device, and how many runs
too many (or too few) were written. Collectives are counted as they are written, before any compiler sees them. `--any
N` adds plans drawn at random, `--random N` random programs under random plans (`tests/random_programs.py`). `--table
FILE` keeps each row as soon as it is known, and rows that it has are not measured again. Exits with 1 where anything
differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from random import Random

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Row, choose, is_tiny, note, show, write_json
from toast_cli import xla
from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.collectives import collectives_in
from toast_cli.ask_xla.numbers import compare_here, compare_numbers
from toast_cli.ask_xla.verdict import Flow, sent_bytes
from toast_cli.emit.hlo import emit_spmd_hlo
from toast_cli.emit.spmd.writer import emit_spmd
from toast_cli.frontend.source import Source
from toast_cli.pipeline import partition
from toast_cli.plan.decisions import Plan, Replicate
from toast_cli.plan.lower import lower
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.problem import Problem
from toast_cli.plan.reshard import PERMUTE
from toast_cli.request import Request
from toast_cli.tactics import strategies

BLOCK = 25  # random programs that are drawn together
Known = frozenset[tuple[str, str, str]]  # program, mesh and plan of rows
MESHES = ("h100-8:data=4,model=2",)

COLUMNS = {
    "program": "{program}", "mesh": "{mesh}", "plan": "{plan}", "seconds": "{seconds:.2f}",
    "promised": "{promised:,.0f}", "written": "{written:,.0f}", "share": "{share:.1%}",
    "differences": "{differing}", "numbers": "{numbers}",
}  # fmt: skip


@dataclass(frozen=True, order=True)
class Sent:
    """One collective. axes: of the mesh, sorted by name; none for permutes, which send between pairs of devices that
    may differ along fewer axes than split the dimension. bytes: of the result on each device."""

    kind: str
    axes: tuple[str, ...]
    bytes: int

    def __str__(self) -> str:
        return f"{self.kind} {'+'.join(self.axes) or '-'} {self.bytes:,}"


Sends = Counter[Sent]  # how often each runs in one run of the program


def promised(lowered: PartitionedProgram) -> Sends:
    """What the plan says."""
    found: Sends = Counter()
    for one in lowered.collectives:
        axes = tuple([lowered.axis_names[axis] for axis in one.axes])
        _enter(found, one.kind, axes, one.local_bytes, one.runs, lowered)
    return found


def written(source: Source, lowered: PartitionedProgram) -> Sends:
    """What stands in the program of one device."""
    found: Sends = Counter()
    text = xla.full_hlo_text(emit_spmd_hlo(source, lowered).decode())
    for one in collectives_in(text, lowered.axis_names, lowered.axis_sizes):
        _enter(found, one.kind, one.axes, one.bytes, one.count, lowered)
    return found


def _enter(
    found: Sends, kind: str, axes: tuple[str, ...], size: float, runs: float, lowered: PartitionedProgram
) -> None:
    """Counts a collective, unless it runs over one device."""
    big = [name for name, n in zip(lowered.axis_names, lowered.axis_sizes, strict=True) if n > 1]
    key = Sent(kind, () if kind == PERMUTE else tuple(sorted(set(axes).intersection(big))), round(size))
    if key.axes or kind == PERMUTE:
        found[key] += runs  # type: ignore[assignment]  # a branch out of two runs half a time


def differences(source: Source, lowered: PartitionedProgram) -> dict[Sent, float]:
    """Runs of each collective that are written beyond those promised; fewer than none where some are missing."""
    return _differences(promised(lowered), written(source, lowered))


def _differences(one: Sends, other: Sends) -> dict[Sent, float]:
    found = {key: other[key] - one[key] for key in sorted({*one, *other})}
    return {key: runs for key, runs in found.items() if abs(runs) > 1e-6}


def traffic(sends: Sends, lowered: PartitionedProgram) -> Counter[tuple[str, tuple[str, ...]]]:
    """Bytes that each device sends, by kind and axes."""
    mesh = dict(zip(lowered.axis_names, lowered.axis_sizes, strict=True))
    found: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for sent, runs in sends.items():
        found[sent.kind, sent.axes] += sent_bytes(Flow(sent.kind, sent.axes, sent.bytes, runs, ""), mesh)  # type: ignore[assignment]
    return found


def compare(
    source: Source,
    lowered: PartitionedProgram,
    *,
    numbers: bool,
    judge: Callable[[Source, bytes, int], str] | None = None,
) -> Row:
    """The figures of one row. judge: who compares numbers, where they are asked for."""
    start = time.process_time()
    try:
        content = emit_spmd(source, lowered)
        seconds = time.process_time() - start
        one, other = promised(lowered), written(source, lowered)
    except Exception as error:  # whatever goes wrong is a row of its own
        return {"seconds": 0.0, "promised": 0, "written": 0, "share": 0.0, "differing": 0, "numbers": brief(error)}
    before, after = traffic(one, lowered), traffic(other, lowered)
    most = max(before.total(), after.total())
    apart = max((before - after).total(), (after - before).total())
    found = _differences(one, other)
    return {
        "seconds": seconds,
        "promised": before.total(),
        "written": after.total(),
        "share": 1 - apart / most if most else 1.0,
        "differing": len(found),
        "differences": {str(key): runs for key, runs in found.items()},
        "numbers": (judge or judged)(source, content, prod(lowered.axis_sizes)) if numbers else "-",
    }


def brief(error: Exception) -> str:
    """What went wrong, in one line."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:200]


def judged(source: Source, content: bytes, devices: int) -> str:
    """Whether the numbers are those of the unsplit program."""
    errors = compare_numbers(xla.write_bytecode(source.module), content, devices)
    if isinstance(errors, Failure):
        return errors.reason[:60]
    wrong = sum(error.wrong for error in errors)
    return f"{wrong} of {len(errors)} differ" if wrong else "equal"


def judged_here(source: Source, content: bytes, devices: int) -> str:
    """The same, run in this process: small programs are run in a tenth of the time that starting another takes."""
    for seed in (0, 1):  # an activation at a kink is an accident of the inputs, see `compare_numbers`
        errors = compare_here(xla.write_bytecode(source.module), content, devices, seed, "stablehlo", 600.0)
        wrong = sum(error.wrong for error in errors)
        if not wrong:
            return "equal"
    return f"{wrong} of {len(errors)} differ"


def rows_of(name: str, mesh: str, options: argparse.Namespace, known: Known = frozenset()) -> Iterator[Row]:
    """One for each plan of a stored program, or of a file. known: rows that there are already."""
    spec, _, shape = mesh.partition(":")
    path = name if Path(name).is_file() else str(choose([name])[name])
    outcome = partition(Request(path, spec, mesh_shape=shape or None, iterations=400))
    plans = {"search": outcome.result.plan, **strategies(outcome.problem), **random_plans(outcome.problem, options.any)}
    for label, plan in plans.items():
        if (not options.plans or label in options.plans) and (name, mesh, label) not in known:
            found = compare(outcome.source, lower(outcome.problem, plan), numbers=options.numbers)
            yield {"program": name, "mesh": mesh, "plan": label, **found}


def random_plans(problem: Problem, count: int) -> dict[str, Plan]:
    """So many plans of up to eight decisions drawn at random, by name."""
    choices, rng = problem.decisions.choices, Random(0)
    drawn = [rng.sample(choices, min(len(choices), rng.randint(1, 8))) for _ in range(count)]
    return {f"random {k}": tuple(sorted(plan, key=lambda d: isinstance(d, Replicate))) for k, plan in enumerate(drawn)}


def random_rows(count: int, *, numbers: bool, known: Known = frozenset()) -> Iterator[Row]:
    """One for each of so many random programs under a random plan, on the mesh data=4, model=2; `BLOCK` are drawn
    together, and blocks that are known are left out."""
    for block in range(-(-count // BLOCK)):
        names = [f"random {block * BLOCK + k}" for k in range(min(BLOCK, count - block * BLOCK))]
        if not {(name, "", "random") for name in names} <= known:
            for name, row in zip(names, random_block(len(names), block, numbers=numbers), strict=True):
                yield {"program": name, "mesh": "", "plan": "random", **row}


def random_block(count: int, seed: int, *, numbers: bool) -> list[Row]:
    """So many of them."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from hypothesis import strategies as st
    from random_programs import cases, plans

    rows: list[Row] = []

    @seeded(seed)
    @settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data())
    def measure(data: st.DataObject) -> None:
        case = data.draw(cases())
        plan = data.draw(plans(case.problem))
        rows.append(compare(case.source, case.lowered(plan), numbers=numbers, judge=judged_here))
        if not is_good(rows[-1]):
            note(f"{plan}\n{case.source.module}")

    measure()
    return rows


def read_rows(table: Path | None) -> list[Row]:
    """Rows that were kept before."""
    return [json.loads(line) for line in table.read_text().splitlines()] if table and table.exists() else []


def keep(row: Row, rows: list[Row], table: Path | None) -> None:
    """Enters a row, in the table too."""
    rows.append(row)
    if table:
        with table.open("a") as file:
            file.write(json.dumps(row) + "\n")


def is_good(row: Row) -> bool:
    return not row["differing"] and row["numbers"] in ("equal", "-")


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    rows = read_rows(options.table)
    known = frozenset((row["program"], row["mesh"], row["plan"]) for row in rows)
    names = options.programs or ([] if options.random else [name for name in choose([]) if is_tiny(name)])
    jobs = [(name, mesh) for name in names for mesh in options.mesh]
    for name, mesh in jobs:
        for row in rows_of(name, mesh, options, known):
            keep(row, rows, options.table)
            note(" ".join(form.format_map(row) for form in COLUMNS.values()))
            for key, runs in row.get("differences", {}).items():
                note(f"    {runs:+g} {key}")
    for row in random_rows(options.random, numbers=options.numbers, known=known):
        keep(row, rows, options.table)
    show("programs of one device", COLUMNS, [row for row in rows if not options.random or not is_good(row)], {})
    write_json(options.json, rows)
    good = sum(map(is_good, rows))
    note(f"{good} of {len(rows)} have the promised collectives, one for one")
    return 0 if good == len(rows) else 1


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("programs", nargs="*", help="names of samples, or files; all tiny twins when none is given")
    parser.add_argument("--mesh", nargs="+", default=list(MESHES), metavar="SPEC:SHAPE")
    parser.add_argument("--plans", nargs="+", default=[], metavar="NAME", help="only these plans")
    parser.add_argument("--numbers", action="store_true", help="run the programs on virtual devices as well")
    parser.add_argument("--any", type=int, default=0, metavar="N", help="so many plans drawn at random, too")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="random programs under random plans")
    parser.add_argument("--table", type=Path, metavar="FILE", help="keep rows there, and go on from those it has")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON; - for stdout")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
