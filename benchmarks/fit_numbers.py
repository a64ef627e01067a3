"""Runs three steps of training programs with levers on eight virtual CPU devices, beside the program as written.

Each tiny sample model is recomputed, run in microbatches, and both, with the sharding that toast finds. The state that
a step returns goes into the next one. The results of the third step are compared as `toast verify` compares results:
loss, weights and moments, the gradients' sums. `python -m benchmarks.fit_numbers [NAME...]` prints one row for each
program and lever.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import Row, show
from toast_cli import xla
from toast_cli.ask_xla.compile import as_stablehlo
from toast_cli.ask_xla.numbers import (
    RUNS,
    ResultError,
    Runs,
    for_cpu,
    input_sets,
    narrowest_float,
    new_versions,
    result_errors,
    result_types,
    shake,
    type_name,
)
from toast_cli.base.errors import UsageError
from toast_cli.frontend import load
from toast_cli.pipeline import partition
from toast_cli.request import Fit, Request

SAMPLES = Path(__file__).resolve().parents[1] / "sample_models"
FILES = {path.name.partition("_tiny")[0]: path for path in sorted(SAMPLES.glob("*_tiny.*"))}
LEVERS: dict[str, dict[str, Any]] = {
    "recompute all": {"recompute": "all"},
    "recompute all-but-products": {"recompute": "all-but-products"},
    "microbatches 2": {"microbatches": 2},
    "both": {"recompute": "all", "microbatches": 2},
}
MESH, SHAPE, DEVICES, STEPS = "v5e-8", "data=4,model=2", 8, 3
COLUMNS = {"program": "{program}", "lever": "{lever}", "largest error": "{error:.1e}", "says": "{says}"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", default=tuple(FILES), metavar="NAME", help="programs (default: all)")
    options = parser.parse_args(arguments)
    rows = [row for name in options.names for row in compared(name)]
    show(f"{STEPS} steps on {DEVICES} CPU devices", COLUMNS, rows)
    run = [row for row in rows if row["error"] == row["error"]]
    print(f"Equal: {sum(row['says'] == 'equal' for row in run)} of {len(run)}.")
    return 0


def compared(name: str) -> Iterator[Row]:
    """A row for each lever of a program."""
    for lever, request in LEVERS.items():
        row: Row = {"program": name, "lever": lever, "error": float("nan")}
        try:
            asked = Request(str(FILES[name]), MESH, SHAPE, iterations=300, fit=Fit.as_written, **request)
            outcome = partition(asked, annotated=False)
        except UsageError as error:
            yield row | {"says": error.what}
            continue
        errors = errors_of(load(str(FILES[name])).module, outcome.emit("bytecode").content)
        wrong = [f"{it.what} of {it.type}: {it.error:.1e} > {it.allowed:.1e}" for it in errors if it.wrong]
        yield row | {"error": max(it.error for it in errors if it.looks), "says": "; ".join(wrong[:2]) or "equal"}


def errors_of(original: Any, written: bytes) -> list[ResultError]:
    """Compares the results of the last step of the program as written with those of the original."""
    whole, split = for_cpu(original, xla.parse_module(original.context, as_stablehlo(written, "stablehlo")))
    types, versions = result_types(whole), new_versions(whole)
    programs = []
    for module, count in ((whole, 1), (split, DEVICES)):
        devices = xla.cpu_devices(count)
        programs.append((xla.compile_program(xla.write_bytecode(module), devices, shardy=True), devices))
    inputs, narrowest = input_sets(whole, 0, RUNS), narrowest_float(xla.element_types(whole))

    def run(number: int, arrays: list[list[Any]]) -> Runs:
        results = []
        for state in map(list, arrays):
            for _ in range(STEPS):
                found = xla.execute(*programs[number], state, [shape for shape, _ in types])
                for result, (argument, *_) in versions.items():
                    state[argument] = found[result]
            results.append(found)
        return Runs(results, {k: [arrays[0][number] for number in numbers] for k, numbers in versions.items()})

    shaken = run(0, [shake(one, narrowest, 0) for one in inputs])
    return result_errors([type_name(*kind) for kind in types], narrowest, run(0, inputs), shaken, run(1, inputs))


if __name__ == "__main__":
    sys.exit(main())
