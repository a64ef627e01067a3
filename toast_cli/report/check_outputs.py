"""Verdicts of `toast check` as text, JSON, JUnit XML and GitHub annotations.

In: `CheckVerdict`s. Out: text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from xml.etree import ElementTree

from rich.console import RenderableType
from rich.text import Text

from toast_cli.printable import printable, printable_lines
from toast_cli.quantities import format_plural
from toast_cli.report import style
from toast_cli.report.checks import COMPILED, ERROR, FAILED, PASSED, Check, CheckVerdict
from toast_cli.report.json_file import write_json

SCHEMA = "toast.check/1"

_WORDS = {PASSED: ("ok", style.GOOD), FAILED: ("FAILED", style.BAD), ERROR: ("ERROR", style.BAD)}
# Characters that XML 1.0 cannot hold, not even escaped.
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def as_text(verdicts: Sequence[CheckVerdict], *, quiet: bool = False, verbose: bool = False) -> list[RenderableType]:
    """All checks of a single point; for several points, a line each and the failed checks. quiet: failures only."""
    shown = [verdict for verdict in verdicts if not quiet or verdict.status != PASSED]
    if len(verdicts) == 1 and not verdicts[0].error:
        return [part for verdict in shown for part in _single(verdict, quiet)]
    blocks = [part for verdict in shown for part in _one_of_many(verdict, verbose)]
    return blocks if quiet or len(verdicts) == 1 else [*blocks, Text(totals(verdicts), style.TITLE)]


def totals(verdicts: Sequence[CheckVerdict]) -> str:
    """`3 checks: 1 passed, 1 failed, 1 could not be made`."""
    counts = [(status, sum(verdict.status == status for verdict in verdicts)) for status in (PASSED, FAILED, ERROR)]
    words = {PASSED: "passed", FAILED: "failed", ERROR: "could not be made"}
    summary = ", ".join(f"{count} {words[status]}" for status, count in counts if count)
    return f"{format_plural(len(verdicts), 'check')}: {summary}"


def as_json(verdicts: Sequence[CheckVerdict]) -> str:
    """Schema "toast.check/1"; docs/reference/json.md has the fields."""
    points = [
        {"program": verdict.program, "mesh": verdict.mesh, "status": verdict.status, **_facts(verdict)}
        for verdict in verdicts
    ]
    passed = all(verdict.status == PASSED for verdict in verdicts)
    return write_json({"schema": SCHEMA, "passed": passed, "checks": points}).decode()


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


def _single(verdict: CheckVerdict, quiet: bool) -> list[RenderableType]:
    checks = verdict.failures if quiet else verdict.checks
    parts: list[RenderableType] = [] if quiet else [Text(verdict.line)]
    parts.append(_table(checks))
    if verdict.drift:
        parts.append(style.section(f"plan drift since {verdict.against}", *map(_drift_line, verdict.drift)))
    return parts


def _one_of_many(verdict: CheckVerdict, verbose: bool) -> list[RenderableType]:
    word, look = _WORDS[verdict.status]
    head = style.table([("", "left"), ("", "fold")])
    head.add_row(Text(f"{word:6}", look), f"{_title(verdict)}: {verdict.error}" if verdict.error else verdict.line)
    if verdict.hint:
        head.add_row("", Text(f"hint: {verdict.hint}", style.LABEL))
    parts: list[RenderableType] = [head]
    checks = verdict.checks if verbose else verdict.failures
    if checks:
        parts.append(style.indented(_table(checks)))
    if verdict.drift:
        drift = style.section(f"plan drift since {verdict.against}", *map(_drift_line, verdict.drift))
        parts.append(style.indented(drift))
    return parts


def _table(checks: Sequence[Check]) -> RenderableType:
    """One row per check, the failed ones in red."""
    figures = "found" if any(check.found.endswith(COMPILED) for check in checks) else "predicted"
    rows = style.table([("", "left"), ("", "fold"), (figures, "right"), ("allowed", "fold")])
    for check in checks:
        word, look = _WORDS[PASSED if check.passed else FAILED]
        rows.add_row(Text(word, look), check.name, check.found, check.allowed)
    return rows


def _drift_line(line: str) -> Text:
    return Text(line, {"-": style.BAD, "+": style.GOOD, "~": style.WARNING}.get(line[:1], style.LABEL))


def _title(verdict: CheckVerdict) -> str:
    return f"{verdict.program} on {verdict.mesh}"


def _drift(verdict: CheckVerdict) -> str:
    return "\n".join([f"plan drift since {verdict.against}", *verdict.drift])


def _facts(verdict: CheckVerdict) -> dict[str, object]:
    facts = asdict(verdict)
    return {key: facts[key] for key in ("line", "checks", "against", "drift", "error", "hint", "seconds")}


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
