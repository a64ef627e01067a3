"""A report as JSON: a `Report` goes in and bytes come out; a stored file goes in and the facts to compare come out."""

from __future__ import annotations

import json
import math
import reprlib
from dataclasses import dataclass
from typing import Any

from toast_cli.errors import InputError
from toast_cli.inputs import read_json
from toast_cli.report.model import SCHEMA, DimensionAxes, Report


@dataclass(frozen=True)
class StoredReport:
    """The facts of a stored report that a later run is compared with; the fields are those of `Report`."""

    path: str
    program_name: str
    mesh_name: str
    chip: str
    devices: int
    summary: str
    step_seconds: float
    communication_seconds: float
    peak_bytes: int
    decisions: tuple[str, ...]
    arguments: tuple[tuple[str, DimensionAxes], ...]


def to_bytes(report: Report) -> bytes:
    """UTF-8 JSON, indented, with a final newline. NaN and infinity are written as null."""
    return write_json(report.to_json())


def write_json(facts: Any) -> bytes:
    return (json.dumps(_finite(facts), indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode(
        "utf-8", "backslashreplace"
    )


def read_report(path: str) -> StoredReport:
    """The stored report at `path`. Raises InputError, with the missing or wrong field, for other files."""
    facts = read_json(path, _REMAKE)
    schema = facts.get("schema") if isinstance(facts, dict) else None
    if schema != SCHEMA:
        found = f'schema "{schema}"' if isinstance(schema, str) else "no schema"
        raise InputError(f'is not a report of schema "{SCHEMA}": it has {found}', where=path, hint=_REMAKE)
    return StoredReport(
        path=path,
        program_name=_field(facts, path, str, "program", "name"),
        mesh_name=_field(facts, path, str, "mesh", "name"),
        chip=_field(facts, path, str, "mesh", "chip"),
        devices=_field(facts, path, int, "mesh", "devices"),
        summary=_field(facts, path, str, "plan", "summary"),
        step_seconds=float(_field(facts, path, (int, float), "predicted", "step_seconds")),
        communication_seconds=float(_field(facts, path, (int, float), "predicted", "communication_seconds")),
        peak_bytes=_field(facts, path, int, "predicted", "peak_bytes"),
        decisions=tuple(
            _field(decision, path, str, "text") for decision in _field(facts, path, list, "plan", "decisions")
        ),
        arguments=tuple(
            (_field(argument, path, str, "name"), _sharding(argument, path))
            for argument in _field(facts, path, list, "arguments")
        ),
    )


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


def _field(facts: Any, path: str, kind: Any, *names: str) -> Any:
    for name in names:
        if not isinstance(facts, dict) or name not in facts:
            raise InputError(f"the report has no {'.'.join(names)}", where=path, hint=_REMAKE)
        facts = facts[name]
    if not isinstance(facts, kind) or isinstance(facts, bool):
        raise InputError(f"{'.'.join(names)} is {reprlib.repr(facts):.40}", where=path, hint=_REMAKE)
    return facts


def _sharding(argument: Any, path: str) -> DimensionAxes:
    sharding: DimensionAxes = _field(argument, path, list, "sharding")
    if not all(isinstance(axes, list) and all(isinstance(axis, str) for axis in axes) for axes in sharding):
        raise InputError(f"sharding is {reprlib.repr(sharding):.40}", where=path, hint=_REMAKE)
    return sharding


def _finite(facts: Any) -> Any:
    if isinstance(facts, dict):
        return {key: _finite(value) for key, value in facts.items()}
    if isinstance(facts, list | tuple):
        return [_finite(value) for value in facts]
    return None if isinstance(facts, float) and not math.isfinite(facts) else facts
