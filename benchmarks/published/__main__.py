"""Predicts the published runs and prints each beside what was measured.

python -m benchmarks.published [NAME@MESH …] [--write docs/accuracy.md]
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.common import Row, markdown_table, note, put_between, show, table_options
from benchmarks.published.runs import RUNS, Run
from benchmarks.published.step import lowered
from toast_cli.pipeline import partition
from toast_cli.price.evaluator import Evaluator
from toast_cli.request import Fit, Request

COLUMNS = {
    "model": "{name}", "slice": "{mesh}", "batch × length": "{batch} × {seq}", "kept": "{kept}",
    "measured s": "{measured:.2f}", "expected s": "{expected:.2f}", "error %": "{error:+.0f}",
    "all overlaps s": "{lower:.2f}", "nothing overlaps s": "{upper:.2f}", "MFU %": "{mfu:.1f}", "HFU %": "{hfu:.1f}",
    "peak GiB": "{peak:.1f}", "fits": "{fits}",
}  # fmt: skip
START, END = "<!-- published: written by python -m benchmarks.published -->", "<!-- published: end -->"


def main() -> None:
    names, page = table_options(__doc__, "NAME@MESH")
    rows = []
    for run in RUNS:
        if not names or f"{run.name}@{run.mesh}" in names:
            rows.append(predicted(run))
            note(" ".join(form.format_map(rows[-1]) for form in COLUMNS.values()))
    show("published training steps, predicted and measured", COLUMNS, rows)
    if page:
        put_between(page, START, END, markdown_table(COLUMNS, rows, words=4))


def predicted(run: Run) -> Row:
    """A run, measured and predicted with the published mesh. expected: with what the run's compiler flags let overlap.
    error: how far it is from the measured step."""
    content = lowered(run).encode()
    request = Request(
        "step.mlir", run.mesh, mesh_shape=run.axes, strategy=run.strategy, content=content, fit=Fit.as_written
    )
    outcome = partition(request)
    facts = outcome.report.predicted
    flagged = replace(outcome.evaluator.profile, asynchronous=run.asynchronous)
    expected = Evaluator(outcome.problem, profile=flagged).exact_cost(outcome.result.plan).step_seconds
    kept = run.kept if isinstance(run.kept, str) else ", ".join(run.kept)
    return {
        "name": run.name, "mesh": run.mesh, "batch": run.batch, "seq": run.seq,
        "kept": f"{kept} (host)" if run.offloaded else kept, "measured": run.step_seconds,
        "lower": facts.step_seconds_lower, "expected": expected, "upper": facts.step_seconds_upper,
        "error": 100 * (expected / run.step_seconds - 1), "mfu": 100 * facts.mfu, "hfu": 100 * facts.hfu,
        "peak": facts.peak_bytes / 2**30, "fits": "yes" if facts.fits else "no",
    }  # fmt: skip


if __name__ == "__main__":
    main()
