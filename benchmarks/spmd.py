"""The program of one device beside its plan: time to write it, wrong results, collectives as promised.

    python -m benchmarks.spmd mlp_tiny scan_tiny

One row for each sample and expert strategy, on 8 virtual devices (data 4, model 2). `promised` and `written` are bytes
that each device sends; `share` is the part of the larger that is the same in kind and axes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from toast_cli import xla
from toast_cli.emit.spmd import emit_spmd
from toast_cli.pipeline import Request, partition
from toast_cli.plan.lower import lower
from toast_cli.report.model import CollectiveFacts
from toast_cli.tactics import strategies
from toast_cli.verify.child import Failure
from toast_cli.verify.collectives import CompiledCollective
from toast_cli.verify.numbers import compare_numbers
from toast_cli.verify.partitioned import collectives_after_partitioning
from toast_cli.verify.traffic import compare_traffic

SAMPLES = Path(__file__).resolve().parents[1] / "sample_models"
MESH, SHAPE = "h100-8", {"data": 4, "model": 2}


def rows(name: str) -> None:
    """Prints the rows of one sample."""
    (path,) = (p for p in SAMPLES.iterdir() if p.name.split(".")[0] == name and p.suffix != ".py")
    shape = ",".join(f"{axis}={size}" for axis, size in SHAPE.items())
    for strategy in strategies(partition(Request(str(path), MESH, mesh_shape=shape, iterations=1)).problem):
        outcome = partition(Request(str(path), MESH, mesh_shape=shape, strategy=strategy))
        start = time.process_time()
        content = emit_spmd(outcome.source, lower(outcome.problem, outcome.result.plan))
        seconds = time.process_time() - start
        errors = compare_numbers(xla.write_bytecode(outcome.source.module), content, 8)
        found = collectives_after_partitioning(content, "stablehlo", SHAPE)
        wrong = (
            errors.reason if isinstance(errors, Failure) else f"{sum(e.wrong for e in errors)} of {len(errors)} differ"
        )
        promised: list[CollectiveFacts] = outcome.report.collectives
        traffic = "" if isinstance(found, Failure) else traffic_of(promised, found)
        print(f"{name:16} {strategy:24} {seconds:6.2f} s  {wrong}  {traffic}", flush=True)


def traffic_of(promised: list[CollectiveFacts], found: list[CompiledCollective]) -> str:
    """Both sums, and how much of them is alike."""
    compared = compare_traffic(promised, found, SHAPE)
    sums = f"promised {compared.promised_bytes:,.0f} written {compared.compiled_bytes:,.0f}"
    return f"{sums} share {compared.share:.1%}"


if __name__ == "__main__":
    for sample in sys.argv[1:] or ["mlp_tiny", "scan_tiny"]:
        rows(sample)
