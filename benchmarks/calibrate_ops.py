"""Cycles that XLA:TPU estimates for small programs, beside what the cost model predicts.

`--compile` compiles the cases of `op_cases.py` ahead of time (needs libtpu and no TPU; a second or less each) and adds
rows to `benchmarks/data/ops.csv`: case, chip, kernels (instructions with an estimate) and cycles, loops counted. What
is there already is kept. Arguments are left in main memory (`xla_msa_max_cross_program_prefetches=0`): by default the
compiler loads them into on-chip memory before the program starts, at no estimated cost, which a program larger than
that memory cannot do.

Without it: predicts every stored case and prints, for each family and chip, how far predicted compute is from the
cycles.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Row, markdown_table, note, show, write_json
from benchmarks.op_cases import Case, cases
from toast_cli.hardware import Axis, Mesh, find_preset

DATA = Path(__file__).with_name("data") / "ops.csv"
FIELDS = ("case", "chip", "kernels", "cycles")
TOPOLOGIES = {
    "v3": "v3:2x2",
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
MEGACORE = frozenset({"v4", "v5p"})
OPTIONS = {"xla_msa_max_cross_program_prefetches": 0}

COLUMNS = {
    "family": "{family}", "chip": "{chip}", "set": "{set}", "cases": "{cases}", "median error %": "{median:.0f}",
    "90th percentile %": "{ninth:.0f}", "bias %": "{bias:+.0f}",
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    chosen = {name: case for name, case in cases().items() if not options.family or case.family in options.family}
    if options.compile:
        for chip in options.chips:
            compile_cases(chosen, chip)
        return 0
    rows = predict(chosen, options.chips)
    if options.worst:
        for row in sorted(rows, key=lambda r: -abs(r["error"]))[: options.worst]:
            print("{case:70} {chip:6} compiled {compiled:10.1f} us, predicted {predicted:10.1f} us".format_map(row))
    show("predicted compute against XLA:TPU's cycles", COLUMNS, summary(rows))
    write_json(options.json, rows)
    return 0


# -- compiling --------------------------------------------------------------------------------------------------------


def compile_cases(chosen: dict[str, Case], chip: str) -> None:
    """Adds the rows of one chip that are missing. A case the compiler refuses is told and left out."""
    import jax
    from jax.experimental import topologies

    from toast_cli.ask_xla.compile import estimated_cycles

    known = {(row["case"], row["chip"]) for row in stored()}
    kind = {"chip_config_name": "megacore"} if chip in MEGACORE else {}
    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip], **kind).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    DATA.parent.mkdir(exist_ok=True)
    new = not DATA.exists()
    with DATA.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if new:
            writer.writeheader()
        for name, case in chosen.items():
            if (name, chip) in known:
                continue
            shapes = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in case.arguments]
            try:
                text = jax.jit(case.function).lower(*shapes).compile(compiler_options=OPTIONS).as_text()
            except jax.errors.JaxRuntimeError as error:
                note(f"{chip} {name}: {str(error).splitlines()[0][:120]}")
                continue
            row = {
                "case": name,
                "chip": chip,
                "kernels": text.count('"estimated_cycles"'),
                "cycles": round(estimated_cycles(text)),
            }
            writer.writerow(row)
            file.flush()


def stored() -> list[dict[str, str]]:
    if not DATA.exists():
        return []
    with DATA.open(newline="") as file:
        return list(csv.DictReader(file))


# -- predicting -------------------------------------------------------------------------------------------------------


def predict(chosen: dict[str, Case], chips: list[str]) -> list[Row]:
    """One row for each stored case: compiled and predicted microseconds, error relative to compiled."""
    rows: list[Row] = []
    programs: dict[str, Any] = {}
    for row in stored():
        name, chip = row["case"], row["chip"]
        if name not in chosen or chip not in chips or float(row["cycles"]) == 0:
            continue
        if name not in programs:
            programs[name] = analysed(chosen[name])
        compiled = float(row["cycles"]) / find_preset(chip).chip.clock_hertz
        predicted = compute_seconds(*programs[name], chip)
        rows.append(
            {"case": name, "chip": chip, "family": chosen[name].family, "set": "test" if chosen[name].test else "fit",
             "compiled": 1e6 * compiled, "predicted": 1e6 * predicted, "error": predicted / compiled - 1}
        )  # fmt: skip
    return rows


def analysed(case: Case) -> tuple[Any, Any]:
    """Program and dimensions of a case."""
    import tempfile

    import jax

    from toast_cli.dimensions import analyse
    from toast_cli.frontend import load

    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in case.arguments]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "case.mlir")
        path.write_text(jax.jit(case.function).lower(*shapes).as_text())
        program = load(str(path)).program
    return program, analyse(program)


def compute_seconds(program: Any, dimensions: Any, chip: str) -> float:
    """Predicted compute time on one device."""
    from toast_cli.plan.problem import make_problem
    from toast_cli.price.evaluator import Evaluator
    from toast_cli.price.profiles import find_profile

    mesh = one_device(chip)
    profile = find_profile(mesh.chip)
    return Evaluator(make_problem(program, dimensions, mesh), profile=profile).cost(()).compute_seconds


def one_device(chip: str) -> Mesh:
    """A mesh of one device, whose memory holds anything."""
    return Mesh("one", find_preset(chip).chip, (Axis("data", 1, ()),), 2**60)


MANY = 10  # cases of which a 90th percentile says something
OFF = 15.0  # percent: families with smaller errors are not listed


def summary(rows: list[Row]) -> list[Row]:
    """Per family, chip and set: median and 90th percentile of the error's size in percent, and its median with sign."""
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row in rows:
        for family in (row["family"], "all"):
            groups[family, row["chip"], row["set"]].append(100 * row["error"])
    found = []
    for (family, chip, kind), errors in groups.items():
        sizes = sorted(map(abs, errors))
        found.append(
            {"family": family, "chip": chip, "set": kind, "cases": len(errors), "median": median(sizes),
             "ninth": sizes[int(0.9 * (len(sizes) - 1))], "bias": median(errors)}
        )  # fmt: skip
    return sorted(found, key=lambda r: (r["chip"], r["set"], r["family"]))


def by_family(rows: list[Row]) -> list[str]:
    """Lines of a Markdown table of the test cases in the rows of `summary`: all, and families with a median error of
    `OFF` percent or more on some chip, down, chips across. A cell is the median of the error's size, with the 90th
    percentile in parentheses where there are ten cases or more.
    """
    chips = list(dict.fromkeys(row["chip"] for row in rows))
    cells: dict[str, Row] = {}
    shown = {"all", *(row["family"] for row in rows if row["set"] == "test" and row["median"] >= OFF)}
    judged = (row for row in rows if row["set"] == "test" and row["family"] in shown)
    for row in sorted(judged, key=lambda row: row["family"]):
        line = cells.setdefault(row["family"], {"family": row["family"]})
        line[row["chip"]] = f"{row['median']:.0f}" + (f" ({row['ninth']:.0f})" if row["cases"] >= MANY else "")
    columns = {"family": "{family}"} | {f"{chip} %": f"{{{chip}}}" for chip in chips}
    return markdown_table(columns, [dict.fromkeys(chips, "–") | line for line in cells.values()])


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="compile the cases that are missing; needs libtpu")
    parser.add_argument("--chips", nargs="+", default=["v4", "v5e", "v5p", "v6e"], choices=list(TOPOLOGIES))
    parser.add_argument("--family", nargs="+", help="only these families")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="list the N worst predictions")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON; - for stdout")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
