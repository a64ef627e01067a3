"""`toast check` and `toast diff`: a `Report` and limits go in, one `Check` per limit and the drift come out, as text,
JSON, JUnit XML and GitHub annotations.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from xml.etree import ElementTree

from rich.console import RenderableType
from rich.text import Text

from toast_cli.base.errors import UsageError
from toast_cli.base.units import printable, printable_lines
from toast_cli.price.memory_fit import NO, UNSURE
from toast_cli.program.names import slash_path
from toast_cli.program.quantities import format_bytes, format_percent, format_plural, format_seconds, format_sharding
from toast_cli.report import style
from toast_cli.report.model import DimensionAxes, Report, write_json
from toast_cli.report.resharding import Resharding, resharding
from toast_cli.report.resharding import block as resharding_block
from toast_cli.report.terminal import bound_figures, one_line
from toast_cli.request import Request

PASSED, FAILED, ERROR = "passed", "failed", "error"
# Number of arguments with changed shardings that are named; the others are counted.
_NAMED = 3
# Added to figures that come from a compiler.
COMPILED = " compiled"

DIFFERENCE_SCHEMA = "toast.difference/1"


@dataclass(frozen=True)
class CheckLimits:
    """The limits; None for no limit. Tolerances are fractions by which a stored report's figure may be exceeded.

    same_plan: decisions must be those of the stored report.
    """

    max_bytes: int | None = None
    max_step_seconds: float | None = None
    max_communication_seconds: float | None = None
    time_tolerance: float = 0.05
    memory_tolerance: float = 0.05
    communication_tolerance: float = 0.05
    same_plan: bool = False


@dataclass(frozen=True)
class Check:
    """One check: the predicted figure (`found`) and the limit (`allowed`), in words, and whether the limit is kept."""

    name: str
    passed: bool
    found: str
    allowed: str


@dataclass(frozen=True)
class CheckVerdict:
    """The verdict on one program on one mesh, or `error` and `hint` if it could not be checked.

    line: the plan on one line. drift: changes since the report `against`, a line each. seconds: duration.
    """

    program: str
    mesh: str
    line: str = ""
    checks: list[Check] = field(default_factory=list)
    against: str = ""
    drift: list[str] = field(default_factory=list)
    error: str = ""
    hint: str = ""
    seconds: float = 0.0

    @property
    def status(self) -> str:
        """`passed`, `failed` or `error`."""
        if self.error:
            return ERROR
        return PASSED if all(check.passed for check in self.checks) else FAILED

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]


def verdict(
    report: Report, request: Request, limits: CheckLimits, stored: Report | None, against: str, seconds: float
) -> CheckVerdict:
    """The verdict on a plan; `stored` is the report that it is compared with, from the file `against`."""
    drift = plan_drift(stored, report) if stored is not None else []
    line = one_line(replace(report, program=replace(report.program, name=request.program)))
    checks, against = judge(report, limits, stored), against if stored is not None else ""
    return CheckVerdict(request.program, request.mesh, line, checks, against, drift, seconds=seconds)


def judge(report: Report, limits: CheckLimits, stored: Report | None = None) -> list[Check]:
    """Every check in order: the plan fits, then each given limit, then the goal's bounds, then the stored report, whose
    predicted figures are compared with predicted ones."""
    now = _figures(report)
    peak, step = f"{format_bytes(now.peak_bytes)}{now.peak_source}", f"{format_seconds(now.step_seconds)}{now.source}"
    communication = f"{format_seconds(now.communication_seconds)}{now.source}"
    limit_bytes = report.predicted.limit_bytes
    unsure = f" (+{format_percent(report.predicted.peak_error)})" if report.fit == UNSURE else ""
    checks = [Check("fits", report.fit != NO, peak + unsure, f"{format_bytes(limit_bytes)} usable per device")]
    if report.confirmation is not None and report.confirmation.chosen is None:
        checks.append(Check("compiles", False, "no plan", f"one, by {report.confirmation.compiler}"))
    limited = (
        ("memory", now.peak_bytes, limits.max_bytes, peak, "max-memory"),
        ("step time", now.step_seconds, limits.max_step_seconds, step, "max-step-time"),
        ("communication", now.communication_seconds, limits.max_communication_seconds, communication,
         "max-communication"),
    )  # fmt: skip
    for name, value, limit, figure, option in limited:
        if limit is not None:
            write = format_bytes if name == "memory" else format_seconds
            checks.append(Check(name, value <= limit, figure, f"{write(limit)} by {option}"))
    for bound in report.goal.bounds:
        if (bound.figure, bound.limit) != ("peak_memory", limits.max_bytes):  # which is judged above
            figure, allowed = bound_figures(bound)
            checks.append(Check(bound.figure, bound.holds, figure, f"{allowed} by subject-to"))
    if stored is not None:
        checks += _against(report, limits, stored)
    return checks


@dataclass(frozen=True)
class _Figures:
    """The figures that limits apply to. source, peak_source: `COMPILED` for those of a compiler; else empty."""

    peak_bytes: int
    step_seconds: float
    communication_seconds: float
    source: str = ""
    peak_source: str = ""


def _figures(report: Report) -> _Figures:
    """The compiler's figures if available, else the predicted ones."""
    predicted = report.predicted
    row = None if report.confirmation is None else report.confirmation.taken
    # A partitioner alone knows no memory.
    if row is not None and row.step_seconds is not None and row.exposed_seconds is not None:
        peak, source = (predicted.peak_bytes, "") if row.peak_bytes is None else (row.peak_bytes, COMPILED)
        return _Figures(peak, row.step_seconds, row.exposed_seconds, COMPILED, source)
    return _Figures(predicted.peak_bytes, predicted.step_seconds, predicted.communication_seconds)


def plan_drift(stored: Report, report: Report) -> list[str]:
    """The differences of the plan from the stored one: decisions removed (-), added (+) and moved (~), then arguments
    whose sharding differs.

    Empty if there are none.
    """
    before, now = ([decision.text for decision in compared.plan.decisions] for compared in (stored, report))
    gone, new = Counter(before) - Counter(now), Counter(now) - Counter(before)
    lines = [f"- {text}" for text in before if text in gone] + [f"+ {text}" for text in now if text in new]
    kept_before, kept_now = [t for t in before if t not in gone], [t for t in now if t not in new]
    moved = [text for text, old in zip(kept_now, kept_before, strict=False) if text != old]
    lines += [f"~ {text}: now decision {now.index(text) + 1}, was {before.index(text) + 1}" for text in moved[:1]]
    old, new_shardings = _shardings(stored), _shardings(report)
    changed = [name for name in new_shardings if name in old and old[name] != new_shardings[name]]
    for name in changed[:_NAMED]:
        lines.append(f"  {name}: {format_sharding(old[name])} → {format_sharding(new_shardings[name])}")
    if len(changed) > _NAMED:
        lines.append(f"  and {len(changed) - _NAMED} more arguments are sharded differently")
    return lines


def _shardings(report: Report) -> dict[str, DimensionAxes]:
    """Name of each argument -> its sharding; those without a name of their own have their number: `#2`."""
    count_of = Counter(a.name for a in report.arguments)
    return {
        slash_path(a.name) if a.name and count_of[a.name] == 1 else f"{a.name}#{a.index}": a.sharding
        for a in report.arguments
    }


def refuse_other_mesh(stored: Report, path: str, chip: str, devices: int) -> None:
    """Raise UsageError when the stored report is of other chips, or of another number of them."""
    mesh = stored.mesh
    if (mesh.chip, mesh.devices) != (chip, devices):
        raise UsageError(
            f"is of {mesh.devices} devices ({mesh.chip}), the mesh of {devices} ({chip})",
            where=path,
            hint=f"it was made with --mesh {mesh.name}; --update replaces it",
        )


def _against(report: Report, limits: CheckLimits, stored: Report) -> list[Check]:
    now, old = report.predicted, stored.predicted
    checks = [
        _kept("memory", now.peak_bytes, old.peak_bytes, limits.memory_tolerance),
        _kept("step time", now.step_seconds, old.step_seconds, limits.time_tolerance),
        _kept("communication", now.communication_seconds, old.communication_seconds, limits.communication_tolerance),
    ]
    if limits.same_plan:
        texts, old_texts = ([decision.text for decision in compared.plan.decisions] for compared in (report, stored))
        same = texts == old_texts
        text = report.plan.summary if not same else "the same"
        checks.append(
            Check("plan kept", same, "", f"{text}; in the stored report {stored.plan.summary}" if not same else text)
        )
    return checks


def _kept(name: str, now: float, before: float, tolerance: float) -> Check:
    write = format_bytes if name == "memory" else format_seconds
    change = _change(before, now) if before else "was 0"
    allowed = f"{write(before)} in the stored report ({change}, tolerance {format_percent(tolerance)})"
    return Check(f"{name} kept", now <= before * (1 + tolerance), write(now), allowed)


def _change(before: float, now: float) -> str:
    """`+3.1%`"""
    return f"{'+' if now >= before else '-'}{format_percent(abs(now / before - 1))}"


@dataclass(frozen=True)
class FigureChange:
    """A predicted figure in both; seconds or bytes."""

    name: str
    before: float
    now: float

    @property
    def change(self) -> str:
        """`+3.1%`; empty where nothing changed."""
        if self.before == self.now:
            return ""
        if not self.before:
            return "new"
        return _change(self.before, self.now)


@dataclass(frozen=True)
class Difference:
    """What differs between two reports. heads: programs and meshes, if they differ. drift: see `plan_drift`.
    resharding: None if no array takes another sharding."""

    before: str
    now: str
    heads: list[str]
    figures: list[FigureChange]
    drift: list[str]
    resharding: Resharding | None

    @property
    def same(self) -> bool:
        return not self.heads and not self.drift and all(figure.before == figure.now for figure in self.figures)

    def to_json(self) -> dict[str, Any]:
        return {"schema": DIFFERENCE_SCHEMA, "same": self.same, **asdict(self)}


def difference(before: Report, now: Report, paths: tuple[str, str]) -> Difference:
    """The changes between two reports, which are in these files."""
    heads = []
    if before.program.name != now.program.name:
        heads.append(f"programs: {before.program.name}, then {now.program.name}")
    meshes = [f"{mesh.name} ({mesh.devices} {mesh.chip})" for mesh in (before.mesh, now.mesh)]
    if meshes[0] != meshes[1]:
        heads.append(f"meshes: {meshes[0]}, then {meshes[1]}")
    old, new = before.predicted, now.predicted
    figures = [
        FigureChange("step time", old.step_seconds, new.step_seconds),
        FigureChange("communication", old.communication_seconds, new.communication_seconds),
        FigureChange("peak memory", old.peak_bytes, new.peak_bytes),
    ]
    return Difference(*paths, heads, figures, plan_drift(before, now), resharding(before, now))


def blocks(changes: Difference) -> list[RenderableType]:
    """Renderables for the terminal."""
    rows = style.table([("", "left"), (changes.before, "right"), (changes.now, "right"), ("", "right")])
    for figure in changes.figures:
        shown = format_bytes if figure.name == "peak memory" else format_seconds
        rows.add_row(figure.name, shown(figure.before), shown(figure.now), figure.change)
    lines = [Text(line) for line in changes.drift] or [Text("the same decisions and shardings", style.LABEL)]
    heads = [Text(head) for head in changes.heads]
    moves = [Text(), resharding_block(changes.resharding)] if changes.resharding else []
    return [*heads, rows, Text(), style.section("plan", *lines), *moves]


# ---------------------------------------------------------------- outputs
# Verdicts of `toast check` as text, JSON, JUnit XML and GitHub annotations.

CHECK_SCHEMA = "toast.check/1"

_WORDS = {PASSED: ("ok", style.GOOD), FAILED: ("FAILED", style.BAD), ERROR: ("ERROR", style.BAD)}
# Characters that XML 1.0 cannot hold, not even escaped.
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def as_text(verdicts: Sequence[CheckVerdict], *, quiet: bool = False, verbose: bool = False) -> list[RenderableType]:
    """A line and the failed checks for each point; all checks of a single point. quiet: failures only."""
    shown = [verdict for verdict in verdicts if not quiet or verdict.status != PASSED]
    every = verbose or (len(verdicts) == 1 and not quiet)
    blocks = [part for verdict in shown for part in _blocks_of(verdict, every)]
    return blocks if quiet or len(verdicts) == 1 else [*blocks, Text(totals(verdicts), style.TITLE)]


def totals(verdicts: Sequence[CheckVerdict]) -> str:
    """`3 checks: 1 passed, 1 failed, 1 could not be made`."""
    counts = [(status, sum(verdict.status == status for verdict in verdicts)) for status in (PASSED, FAILED, ERROR)]
    words = {PASSED: "passed", FAILED: "failed", ERROR: "could not be made"}
    summary = ", ".join(f"{count} {words[status]}" for status, count in counts if count)
    return f"{format_plural(len(verdicts), 'check')}: {summary}"


def as_json(verdicts: Sequence[CheckVerdict]) -> str:
    """Schema "toast.check/1"; docs/reference/json.md has the fields."""
    points = [{"status": verdict.status, **asdict(verdict)} for verdict in verdicts]
    passed = all(verdict.status == PASSED for verdict in verdicts)
    return write_json({"schema": CHECK_SCHEMA, "passed": passed, "checks": points}).decode()


def as_junit(verdicts: Sequence[CheckVerdict]) -> str:
    """JUnit XML: a suite for each program on a mesh, a case for each check; a point without a verdict is one case with
    an error."""
    root = ElementTree.Element("testsuites", name="toast check")
    for verdict in verdicts:
        failures, errors = len(verdict.failures), int(bool(verdict.error))
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=_xml(_title(verdict)),
            tests=str(len(verdict.checks) + errors),
            failures=str(failures),
            errors=str(errors),
            time=f"{verdict.seconds:.3f}",
        )
        if verdict.error:
            _case(suite, verdict, "plan", "error", verdict.error, verdict.hint)
        for check in verdict.checks:
            summary = "" if check.passed else f"{check.found or 'not'}; allowed: {check.allowed}"
            _case(suite, verdict, check.name, "failure" if summary else "", summary, verdict.line)
        if verdict.drift:
            ElementTree.SubElement(suite, "system-out").text = _xml(_drift(verdict))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def as_github(verdicts: Sequence[CheckVerdict]) -> str:
    """GitHub's workflow commands: an error for each failed check, a warning if the plan drifted."""
    lines = []
    for verdict in verdicts:
        if verdict.error:
            lines.append(_annotation("error", verdict, "cannot check", f"{verdict.error}; {verdict.hint}".rstrip("; ")))
        for check in verdict.failures:
            summary = f"{check.name} {check.found}".rstrip()
            lines.append(_annotation("error", verdict, check.name, f"{summary}, allowed: {check.allowed}"))
        if verdict.drift:
            lines.append(_annotation("warning", verdict, "plan drift", _drift(verdict)))
    return "".join(f"{line}\n" for line in lines)


def _blocks_of(verdict: CheckVerdict, every: bool) -> list[RenderableType]:
    word, look = _WORDS[verdict.status]
    head = style.table([("", "left"), ("", "fold")])
    head.add_row(Text(f"{word:6}", look), f"{_title(verdict)}: {verdict.error}" if verdict.error else verdict.line)
    if verdict.hint:
        head.add_row("", Text(f"hint: {verdict.hint}", style.LABEL))
    parts: list[RenderableType] = [head]
    if checks := verdict.checks if every else verdict.failures:
        figures = "found" if any(check.found.endswith(COMPILED) for check in checks) else "predicted"
        heads = [("", "left"), ("", "fold"), (figures, "right"), ("allowed", "fold")]
        words = [Text(*_WORDS[PASSED if check.passed else FAILED]) for check in checks]
        rows = [(word, check.name, check.found, check.allowed) for word, check in zip(words, checks, strict=True)]
        parts.append(style.indented(style.table(heads, rows)))
    if verdict.drift:
        looks = {"-": style.BAD, "+": style.GOOD, "~": style.WARNING}
        lines = [Text(line, looks.get(line[:1], style.LABEL)) for line in verdict.drift]
        parts.append(style.indented(style.section(f"plan drift since {verdict.against}", *lines)))
    return parts


def _title(verdict: CheckVerdict) -> str:
    return f"{verdict.program} on {verdict.mesh}"


def _drift(verdict: CheckVerdict) -> str:
    return "\n".join([f"plan drift since {verdict.against}", *verdict.drift])


def _case(suite: ElementTree.Element, verdict: CheckVerdict, name: str, kind: str, message: str, detail: str) -> None:
    """One test case; `kind` is "failure", "error", or empty for one that passed."""
    case = ElementTree.SubElement(suite, "testcase", classname=_xml(_title(verdict)), name=_xml(name))
    if kind:
        ElementTree.SubElement(case, kind, message=_xml(message)).text = _xml(detail)


def _xml(text: str) -> str:
    return _NO_XML.sub("?", text)


def _annotation(level: str, verdict: CheckVerdict, title: str, message: str) -> str:
    """Escaped as actions/toolkit's `issueCommand` does: properties lose `:` and `,` too."""
    properties = {"file": verdict.program, "title": f"toast check: {title}"}
    title, message = printable(_title(verdict)), printable_lines(message)
    given = ",".join(f"{key}={_escape(value, _PROPERTY)}" for key, value in properties.items())
    return f"::{level} {given}::{_escape(f'{title}: {message}', _MESSAGE)}"


_MESSAGE: dict[str, str | int | None] = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_PROPERTY: dict[str, str | int | None] = {**_MESSAGE, ":": "%3A", ",": "%2C"}


def _escape(text: str, table: dict[str, str | int | None]) -> str:
    return text.translate(str.maketrans(table))
