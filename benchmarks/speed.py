"""How long `toast partition` takes and how much host memory, for the sample models, for other programs by their path,
and for T2B with 6 to 162 layers.

Every figure is the median of `--runs` runs of the whole command in a process of its own, output written: processor
seconds of each stage and of the whole (with those of its own children), its wall seconds, and its peak resident memory.
With `--beside CHECKOUT` the runs alternate with those of another checkout, and its processor seconds and memory stand
beside. Modules are compiled to bytecode before anything is timed, as they are where a package is installed. The
exponent of growth is the slope of log processor seconds over log ops (least squares); of a stage, of its seconds. Exits
with 1 when a target of `TARGETS` is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from math import inf, log
from pathlib import Path
from statistics import mean, median

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Row, choose, note, show, stored_programs, write_json

LAYERS = (6, 18, 54, 162)
STAGES = ("load", "analyse", "search", "report", "emit")
# Most processor seconds of the whole command by ops, and the largest exponent.
TARGETS = {11_000: 5.0, 31_000: 12.0, 100_000: 45.0}
TARGET_EXPONENT = 1.1
GROWTH_MESH = "v5p-64"  # holds even 162 layers
HERE = Path(__file__).resolve().parents[1]
EXITS = (0, 3)  # a plan that fits, or none does

# Runs `toast` with the processor seconds of its stages, and of their children, in the report as their timings.
RUN = """
import os
from contextlib import contextmanager
from toast_cli import pipeline
from toast_cli.cli import command

@contextmanager
def timed(stage, timings, tell):
    before = sum(os.times()[:4])
    yield
    timings[stage] = sum(os.times()[:4]) - before

pipeline._timed = timed
command()
"""

COLUMNS = {
    "program": "{program}", "ops": "{ops:,}", **{stage: f"{{{stage}:.2f}}" for stage in STAGES}, "rest": "{rest:.2f}",
    "processor, s": "{processor:.2f}", "wall, s": "{seconds:.2f}", "beside": "{beside}",
    "target": "{target}", "host MiB": "{peak_mib:,.0f}", "evaluations": "{evaluations:,}",
    "a second": "{rate:,.0f}", "": "{verdict}",
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    samples = choose(options.programs, tiny=False) if options.programs or not options.no_samples else {}
    with tempfile.TemporaryDirectory() as folder:
        options.bytecode = Path(folder) / "bytecode"
        for checkout in filter(None, (HERE, options.beside)):
            compile_modules(checkout, options.bytecode)
        rows = [measure(name, path, options) for name, path in samples.items()]
        grown = [
            measure(f"t2b, {layers} layers", generate("t2b", layers, folder), options, GROWTH_MESH)
            for layers in options.layers
        ]
        if options.unrolled:
            path = generate("unrolled", options.unrolled, folder)
            rows.append(measure(f"unrolled, {options.unrolled} steps", path, options, GROWTH_MESH, runs=1))
        for steps in options.text:
            path = generate("text", steps, folder)
            rows.append(measure(f"text, {steps} steps", path, options, runs=1))
    show(
        f"toast partition, processor seconds; generated programs on {GROWTH_MESH}, the others on {options.mesh}",
        COLUMNS,
        [*rows, *grown],
        {"slow": "red"},
    )
    slopes = {part: exponent(grown, part) for part in (*STAGES, "processor")} if len(grown) > 1 else {}
    if slopes:
        sizes = f"{grown[0]['ops']:,} to {grown[-1]['ops']:,} ops"
        print(f"\nexponent of growth, T2B of {sizes} (aim: at most {TARGET_EXPONENT}):")
        print(
            "  "
            + ", ".join(
                f"{'whole command' if part == 'processor' else part} {slope:.2f}" for part, slope in slopes.items()
            )
        )
    rates = evaluation_rates(options.mesh)
    print("\nplan evaluations a second, T2B: " + ", ".join(f"{kind} {rate:,.0f}" for kind, rate in rates.items()))
    write_json(options.json, {"programs": rows, "layers": grown, "exponents": slopes, "evaluations_per_second": rates})
    slow = [row for row in (*rows, *grown) if row["verdict"]]
    return 1 if slow or slopes.get("processor", 0.0) > TARGET_EXPONENT else 0


def measure(
    name: str, path: Path, options: argparse.Namespace, mesh: str | None = None, runs: int | None = None
) -> Row:
    """One row: medians over the runs; `rest` is what no stage claims, mostly starting Python and importing the
    compiler.
    """
    timed, others = [], []
    for _ in range(runs or options.runs):
        timed.append(run_once(path, mesh or options.mesh, options, HERE))
        if options.beside is not None:
            others.append(run_once(path, mesh or options.mesh, options, options.beside))
    row: Row = {"program": name, "ops": timed[0]["ops"], "evaluations": timed[0]["evaluations"]}
    row.update({key: median(t[key] for t in timed) for key in (*STAGES, "seconds", "processor", "rate", "peak_mib")})
    row["beside"] = ""
    if others:
        other = {key: median(t[key] for t in others) for key in ("processor", "peak_mib")}
        row["beside"] = "{processor:.2f} s, {peak_mib:,.0f} MiB".format_map(other)
    row["rest"] = row["processor"] - sum(row[stage] for stage in STAGES)
    target = next((seconds for ops, seconds in TARGETS.items() if row["ops"] <= ops), None)
    row["target"] = "" if target is None else f"{target:.0f}"
    row["verdict"] = "slow" if target is not None and row["processor"] > target else ""
    note("{program}: {processor:.2f} s of processor time, {peak_mib:,.0f} MiB".format_map(row))
    return row


def environment_of(checkout: Path, bytecode: Path) -> dict[str, str]:
    """Of a process that runs a checkout's modules, their bytecode kept in a folder; the caller's may forbid to."""
    found = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONPYCACHEPREFIX": str(bytecode)}
    found.pop("PYTHONDONTWRITEBYTECODE", None)
    return found


def compile_modules(checkout: Path, bytecode: Path) -> None:
    """Imports all that `toast partition` does, so that the runs that follow find bytecode."""
    modules = "import toast_cli.cli.app, toast_cli.pipeline, toast_cli.report.build"
    subprocess.run([sys.executable, "-c", modules], check=True, cwd=checkout, env=environment_of(checkout, bytecode))


def run_once(path: Path, mesh: str, options: argparse.Namespace, checkout: Path) -> Row:
    """Runs a checkout's command once; its wall and processor time, stages and peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-c", RUN, "partition", str(path.resolve()), "--mesh", mesh, "--quiet"]
        command += ["-o", str(Path(folder) / "out.mlir"), "--json", str(report)]
        start = time.monotonic()
        environment = environment_of(checkout, options.bytecode)
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=checkout, env=environment)
        _, status, usage = os.wait4(child.pid, 0)  # the only way to this one child's memory
        seconds = time.monotonic() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode not in EXITS:
            raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
        facts = json.loads(report.read_text())
    search = facts["search"]
    return {
        **{stage: facts["timings"].get(stage, 0.0) for stage in STAGES}, "seconds": seconds,
        "processor": usage.ru_utime + usage.ru_stime, "peak_mib": usage.ru_maxrss / 1024,
        "ops": facts["program"]["ops"], "evaluations": search["evaluations"],
        "rate": search["evaluations"] / max(search["seconds"], 1e-9),
    }  # fmt: skip


def generate(kind: str, size: int, folder: str) -> Path:
    """A generated program's file; made in a process of its own, so that JAX's memory is not counted as a child's."""
    path = Path(folder) / f"{kind}_{size}.mlirbc.zst"
    subprocess.run(
        [sys.executable, str(Path(__file__).with_name("generate.py")), kind, str(size), str(path)], check=True
    )
    return path


def exponent(rows: list[Row], part: str) -> float:
    """Slope of log seconds over log ops."""
    points = [(log(row["ops"]), log(max(row[part], 1e-3))) for row in rows]
    middle_x, middle_y = mean(x for x, _ in points), mean(y for _, y in points)
    return sum((x - middle_x) * (y - middle_y) for x, y in points) / sum((x - middle_x) ** 2 for x, _ in points)


def evaluation_rates(mesh: str) -> dict[str, float]:
    """Plan evaluations a second on T2B, on one core: during a search from scratch, and of the same plans when all is
    memoised. As in `toast partition`, cycles are not looked for; time is that of the processor, which other work on the
    machine changes less.
    """
    from toast_cli.base.children import without_cycle_collection
    from toast_cli.dimensions import analyse
    from toast_cli.frontend import load
    from toast_cli.hardware import load_spec
    from toast_cli.plan.decisions import Plan
    from toast_cli.plan.problem import make_problem
    from toast_cli.price.cost import Cost
    from toast_cli.price.evaluator import Evaluator
    from toast_cli.search.run import Settings, run_search

    program = load(str(stored_programs()["t2b_train"])).program
    evaluator = Evaluator(make_problem(program, analyse(program), load_spec(mesh).mesh(None)))
    plans, cost = list[Plan](), evaluator.cost

    def evaluate(plan: Plan, below: float = inf) -> Cost:
        plans.append(plan)
        return cost(plan, below)

    evaluator.cost = evaluate  # type: ignore[method-assign]

    with without_cycle_collection():
        start = time.process_time()
        run_search(evaluator, Settings(evaluations=2000))
        searched = time.process_time()
        for plan in plans:
            cost(plan)
        ended = time.process_time()
    return {"in a search": len(plans) / (searched - start), "warm": len(plans) / (ended - searched)}


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "programs", nargs="*", help="sample models by name, or files (default: all samples but the tiny twins)"
    )
    parser.add_argument("--no-samples", action="store_true", help="only the generated programs")
    parser.add_argument("--layers", type=int, nargs="*", default=LAYERS, help="sizes of the generated T2B")
    parser.add_argument(
        "--unrolled", type=int, metavar="STEPS", help="also a recurrence of so many steps; 10500 make 500,000 ops"
    )
    parser.add_argument(
        "--text", type=int, nargs="*", default=(), metavar="STEPS",
        help="also a recurrence of so many steps as text without names; 124000 make 992,000 ops",
    )  # fmt: skip
    parser.add_argument("--mesh", default="v4-32")
    parser.add_argument(
        "--beside", type=Path, metavar="CHECKOUT", help="run another checkout's command as well, in turn"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
