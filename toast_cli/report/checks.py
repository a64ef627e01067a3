"""What `toast check` demands of a plan: a `Report` and limits go in, one `Check` per demand comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from toast_cli.errors import UsageError
from toast_cli.report import style
from toast_cli.report.format import format_bytes, format_percent, format_seconds
from toast_cli.report.json_file import StoredReport
from toast_cli.report.model import Report


@dataclass(frozen=True)
class Check:
    """One demand: what was predicted (`found`), what is allowed, and whether the one is within the other."""

    name: str
    passed: bool
    found: str
    allowed: str


def judge(
    report: Report,
    *,
    max_bytes: int | None = None,
    max_step_seconds: float | None = None,
    stored: StoredReport | None = None,
    tolerance: float = 0.0,
) -> list[Check]:
    """Every demand in order: the plan fits, then each limit that is given, then the stored report's figures.

    A figure may exceed the stored one by the fraction `tolerance`.
    """
    predicted = report.predicted
    peak, step = format_bytes(predicted.peak_bytes), format_seconds(predicted.step_seconds)
    checks = [Check("fits", predicted.fits, peak, f"{format_bytes(predicted.limit_bytes)} usable on each device")]
    if max_bytes is not None:
        checks.append(
            Check("memory", predicted.peak_bytes <= max_bytes, peak, f"{format_bytes(max_bytes)} by --max-memory")
        )
    if max_step_seconds is not None:
        allowed = f"{format_seconds(max_step_seconds)} by --max-step-time"
        checks.append(Check("step time", predicted.step_seconds <= max_step_seconds, step, allowed))
    if stored is not None:
        checks.append(
            _against(
                "memory", predicted.peak_bytes, stored.peak_bytes, tolerance, format_bytes(stored.peak_bytes), peak
            )
        )
        before = format_seconds(stored.step_seconds)
        checks.append(_against("step time", predicted.step_seconds, stored.step_seconds, tolerance, before, step))
    return checks


def checks_table(checks: Sequence[Check]) -> RenderableType:
    """One row a demand, the failed ones in red."""
    rows = style.table([("", "left"), ("", "left"), ("predicted", "right"), ("allowed", "fold")])
    for check in checks:
        verdict = Text("ok", style.GOOD) if check.passed else Text("FAILED", style.BAD)
        rows.add_row(verdict, check.name, check.found, check.allowed)
    return rows


def plan_change(report: Report, stored: StoredReport) -> str:
    """How the strategy differs from the stored one, in a sentence; empty when it does not."""
    if report.plan.summary == stored.summary:
        return ""
    return f"the plan changed from “{stored.summary}” to “{report.plan.summary}”"


def refuse_other_mesh(stored: StoredReport, chip: str, devices: int) -> None:
    """Raise UsageError when the stored report is of other chips, or of another number of them."""
    if (stored.chip, stored.devices) != (chip, devices):
        raise UsageError(
            f"is of {stored.devices} devices ({stored.chip}), the mesh of {devices} ({chip})",
            where=stored.path,
            hint=f"it was made with --mesh {stored.mesh_name}",
        )


def _against(name: str, now: float, before: float, tolerance: float, before_text: str, now_text: str) -> Check:
    change = f"{'+' if now >= before else '-'}{format_percent(abs(now / before - 1))}" if before else "was 0"
    allowed = f"{before_text} in the stored report ({change}, tolerance {format_percent(tolerance)})"
    return Check(f"{name} kept", now <= before * (1 + tolerance), now_text, allowed)
