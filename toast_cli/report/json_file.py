"""A report as JSON: a `Report` goes in and bytes come out; a stored file goes in and its `Report` comes out."""

from __future__ import annotations

import json
import math
import reprlib
from math import prod
from typing import Any

from toast_cli.errors import InputError
from toast_cli.hardware.schema import MOST_DEVICES
from toast_cli.inputs import read_json, typed
from toast_cli.report.model import SCHEMA, Report


def to_bytes(report: Report) -> bytes:
    """UTF-8 JSON, indented, with a final newline. NaN and infinity are written as null."""
    return write_json(report.to_json())


def write_json(facts: Any) -> bytes:
    return (json.dumps(_finite(facts), indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode(
        "utf-8", "backslashreplace"
    )


def read_report(path: str) -> Report:
    """The stored report at `path`. Raises InputError, with the missing or wrong field, for other files."""
    facts = read_json(path, _REMAKE)
    schema = facts.get("schema") if isinstance(facts, dict) else None
    if schema != SCHEMA:
        found = f'schema "{schema}"' if isinstance(schema, str) else "no schema"
        raise InputError(f'is not a report of schema "{SCHEMA}": it has {found}', where=path, hint=_REMAKE)
    try:
        report: Report = typed(Report, facts, "the report")
    except ValueError as error:
        raise InputError(str(error), where=path, hint=_REMAKE) from None
    sizes = report.mesh.axes.values()
    if not sizes or min(sizes) < 1 or prod(sizes) > MOST_DEVICES:
        raise InputError(f"mesh.axes is {reprlib.repr(report.mesh.axes):.40}", where=path, hint=_REMAKE)
    return report


def is_report(path: str) -> bool:
    """True if the file at `path` holds a report, of any version of the schema."""
    return str(_facts(path).get("schema")).startswith(f"{SCHEMA.partition('/')[0]}/")


def same_facts(path: str, report: Report) -> bool:
    """True if the file at `path` holds this report, apart from durations and the program's path."""
    return _lasting(_facts(path)) == _lasting(json.loads(to_bytes(report)))


def _facts(path: str) -> dict[str, Any]:
    """The JSON object in the file; empty if there is none."""
    try:
        facts = read_json(path, "")
    except InputError:
        return {}
    return facts if isinstance(facts, dict) else {}


def _lasting(facts: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in facts.items() if key != "timings"}
    for part, key in (("search", "seconds"), ("program", "path")):
        if isinstance(kept.get(part), dict):
            kept[part] = {name: value for name, value in kept[part].items() if name != key}
    return kept


_REMAKE = "make one with `toast partition --json FILE`"


def _finite(facts: Any) -> Any:
    if isinstance(facts, dict):
        return {key: _finite(value) for key, value in facts.items()}
    if isinstance(facts, list | tuple):
        return [_finite(value) for value in facts]
    return None if isinstance(facts, float) and not math.isfinite(facts) else facts
