"""What each pass of the compiler model is worth: switches off one at a time and predicts every stored point again.

Needs no compiler: what XLA made of each point is stored. Memory is that of `data/memory.jsonl` (XLA:TPU) and
`data/gpu.jsonl` (XLA:GPU), compute time and collectives those of `data/programs.jsonl` (XLA:TPU). A rule must earn its
place on programs that it was not made for, so `MADE_ON` names the families of programs that were looked into when a
pass was made, and the table judges the pass by the others. Every figure is by how many percentage points an
error grows without the pass: a positive one is what the pass is worth.

* memory: of the predicted peak. compute: of the predicted compute time. Both are relative errors without their sign.
* bytes: the part of the bytes of collectives that is not predicted with the right kind.
* moved: points whose prediction changes at all. own: the mean over the families that the pass was made on.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks import calibrate, calibrate_memory, gpu
from benchmarks.calibrate import FOLDER, Point, peak_bytes, read_points
from benchmarks.common import Row, note, show, write_json
from benchmarks.corpus import fingerprint, load_case, restore
from toast_cli.compiler.passes import PASSES
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.plan.problem import Problem

# Program -> its family; programs of one family differ in size alone.
FAMILIES = {
    "mlp": "mlp", "block": "block", "moe": "moe", "t2b_1": "decoder", "t2b_2": "decoder", "t7b": "decoder",
    "long": "decoder", "scan": "scan", "scan_small": "scan", "gns": "graph", "ssm": "state space",
    "ssm_small": "state space", "resnet": "resnet", "unet": "unet", "unet_small": "unet", "vit": "vit",
    "vit_small": "vit", "rnn": "rnn", "itx_decode": "decoding", "itx_prefill": "decoding",
}  # fmt: skip
# Families with a program in the fit set of `corpus.py`: those were looked into for what has no family of its own below.
LOOKED_INTO = frozenset(FAMILIES.values()) - {"mlp", "block", "moe"}
# Pass -> families of the programs that were looked into when it was made, as its commits say.
# None: it was made on small programs written for it, which are not in the corpus.
MADE_ON: dict[str, frozenset[str]] = {
    "narrowing": frozenset({"decoder"}),
    "small-gathers": frozenset(),
    "slice-gathers": frozenset({"decoder"}),
    "tiled-reduce-scatter": frozenset({"block"}),
    "reduction-combining": frozenset(),
    "overlap": frozenset({"decoder"}),
    "shared-exponentials": frozenset({"decoder"}),
    "polynomials": frozenset(),
    "narrow-stores": frozenset({"decoder", "unet"}),
    "product-operands": frozenset(),
    "loop-residency": frozenset(),
    "resident-kernels": frozenset({"rnn"}),
    "accumulator-windows": frozenset({"rnn"}),
    "one-hot-scatters": frozenset(),
    "sliced-products": frozenset(),
    "convolution-tiles": frozenset({"resnet"}),
    "swapped-convolutions": frozenset(),
    "library-convolutions": frozenset(),
    "weight-parts": frozenset(),
    "padded-operands": frozenset(),
    "reduction-motion": frozenset(),
    "space-to-batch": frozenset({"unet"}),
    "image-copies": frozenset(),
    "loop-copies": frozenset({"decoding"}),
    "scan-unification": frozenset({"decoding"}),
    "loops-first": frozenset({"scan"}),
    "loop-gathers-first": frozenset({"scan"}),
    "bf16-widening": frozenset(),
}

COLUMNS = {
    "pass": "{name}", "made on": "{made_on}", "points": "{points}", "moved": "{moved}",
    "memory, median": "{memory_median}", "memory, mean": "{memory_mean}", "compute, median": "{compute_median}",
    "compute, mean": "{compute_mean}", "bytes": "{bytes}", "GPU memory, mean": "{gpu_mean}",
    "own: memory, mean": "{own_memory}", "own: compute, mean": "{own_compute}",
}  # fmt: skip
ALL = ""  # the name under which nothing is switched off


@dataclass
class Errors:
    """[points] of one measure, keyed by point: what was predicted, and how far that is off."""

    predicted: dict[tuple[str, ...], float] = field(default_factory=dict)
    off: dict[tuple[str, ...], float] = field(default_factory=dict)


# measure -> pass switched off -> errors
Found = dict[str, dict[str, Errors]]


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    found = measure(options.passes, options.programs, options.folder)
    rows = [row_of(name, found) for name in options.passes]
    show("error without each pass less error with all, on programs that it was not made for", COLUMNS, rows)
    write_json(options.json, rows)
    return 0


def measure(names: Iterable[str], programs: Iterable[str], folder: Path) -> Found:
    """Every stored point of these programs predicted with all passes, and with each of `names` switched off."""
    found: Found = defaultdict(lambda: defaultdict(Errors))
    wanted, names = set(programs), list(names)
    tables: list[tuple[str, list[Point], str, Callable[[str, str], Problem], Judge]] = [
        ("memory", read_points(calibrate_memory.TABLE), "slice", lambda p, s: load_case(p, s, folder).problem, _memory),
        ("compute", read_points(calibrate.TABLE), "slice", lambda p, s: load_case(p, s, folder).problem, _compute),
        ("gpu", read_points(gpu.TABLE), "spec", lambda p, s: gpu.load_on(p, s, folder).problem, _gpu_memory),
    ]
    for measured, points, place, load, judge in tables:
        grouped: dict[tuple[str, str], list[Point]] = defaultdict(list)
        for point in points:
            if "failed" not in point and point["program"] in wanted:
                grouped[point["program"], point[place]].append(point)
        for (program, where), members in grouped.items():
            problem = load(program, where)
            note(f"{measured}: {program} {where}, {len(members)} points")
            known = [p for p in members if fingerprint(problem, restore(p["decisions"])) == p["fingerprint"]]
            _predict(measured, problem, known, where, names, judge, found)
    return found


# point, evaluator -> (measure, predicted, error) of what the point says
Judge = Callable[[Point, Evaluator], list[tuple[str, float, float]]]


def _predict(
    measured: str, problem: Problem, points: list[Point], where: str, names: list[str], judge: Judge, found: Found
) -> None:
    whole = Evaluator(problem)
    for name in (ALL, *(name for name in names if name in whole.profile.passes)):
        evaluator = Evaluator(problem, profile=whole.profile.without(name)) if name else whole
        for point in points:
            for what, predicted, off in judge(point, evaluator):
                key = point["program"], where, point["plan"], measured
                found[what][name].predicted[key] = predicted
                found[what][name].off[key] = off


def _memory(point: Point, evaluator: Evaluator) -> list[tuple[str, float, float]]:
    peak = evaluator.exact_cost(restore(point["decisions"])).peak_bytes
    return [("memory", peak, abs(peak / point["needed_bytes"] - 1))]


def _gpu_memory(point: Point, evaluator: Evaluator) -> list[tuple[str, float, float]]:
    peak = evaluator.exact_cost(restore(point["decisions"])).peak_bytes
    return [("gpu", peak, abs(peak / peak_bytes(point) - 1))]


def _compute(point: Point, evaluator: Evaluator) -> list[tuple[str, float, float]]:
    if not point.get("cycles"):
        return []
    plan = restore(point["decisions"])
    compiled, predicted = (
        point["cycles"] / evaluator.problem.mesh.chip.clock_hertz,
        evaluator.cost(plan).compute_seconds,
    )
    promised: dict[str, float] = defaultdict(float)
    for use in evaluator.collectives(plan):
        promised[use.kind] += use.bytes * use.count
    agreed = gpu.agreeing(promised, {kind: size for kind, (_, size) in point["collectives"].items()})
    return [("compute", predicted, abs(predicted / compiled - 1)), ("bytes", sum(promised.values()), 1 - agreed)]


def row_of(name: str, found: Found) -> Row:
    """What one pass is worth on the families that it was not made on, and on its own."""
    made_on = MADE_ON.get(name, LOOKED_INTO)
    grown = {what: _grown(by_pass, name) for what, by_pass in found.items()}
    others = {what: [g for program, g, _ in rows if FAMILIES[program] not in made_on] for what, rows in grown.items()}
    own = {what: [g for program, g, _ in rows if FAMILIES[program] in made_on] for what, rows in grown.items()}
    moved = sum(m for rows in grown.values() for program, _, m in rows if FAMILIES[program] not in made_on)
    return {
        "name": name, "points": sum(map(len, others.values())), "moved": moved,
        "made_on": ", ".join(sorted(made_on)) if made_on != LOOKED_INTO else "the fit families",
        "memory_median": _median_growth(found, "memory", name, made_on), "memory_mean": _mean(others.get("memory")),
        "compute_median": _median_growth(found, "compute", name, made_on), "compute_mean": _mean(others.get("compute")),
        "bytes": _mean(others.get("bytes")), "gpu_mean": _mean(others.get("gpu")),
        "own_memory": _mean(own.get("memory")), "own_compute": _mean(own.get("compute")),
    }  # fmt: skip


def _grown(by_pass: dict[str, Errors], name: str) -> list[tuple[str, float, bool]]:
    """(program, by how much the error grows without the pass, whether the prediction changes) of each point."""
    whole, without = by_pass[ALL], by_pass.get(name, Errors())
    return [
        (key[0], off - whole.off[key], abs(without.predicted[key] - whole.predicted[key]) > 1e-9 * whole.predicted[key])
        for key, off in without.off.items()
    ]


def _median_growth(found: Found, what: str, name: str, made_on: frozenset[str]) -> str:
    without = found[what].get(name, Errors()).off
    keys = [key for key in without if FAMILIES[key[0]] not in made_on]
    if not keys:
        return "-"
    before, after = (float(np.median([errors[key] for key in keys])) for errors in (found[what][ALL].off, without))
    return f"{100 * (after - before):+.1f}"


def _mean(grown: list[float] | None) -> str:
    return f"{100 * float(np.mean(grown)):+.1f}" if grown else "-"


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(PASSES)
    parser.add_argument("passes", nargs="*", metavar="PASS", help="only these")
    parser.add_argument("--programs", nargs="+", default=list(FAMILIES), choices=list(FAMILIES), metavar="NAME")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where lowered programs are kept")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON; - for stdout")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.passes if name not in names]
    if unknown:
        parser.error(f"no pass {', '.join(unknown)}; there are {', '.join(names)}")
    options.passes = options.passes or names
    return options


if __name__ == "__main__":
    sys.exit(main())
