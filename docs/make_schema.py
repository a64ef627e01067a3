"""Writes docs/schema/report.schema.json, the JSON Schema of "toast.report/1", from the dataclasses that reports are made of.

python docs/make_schema.py
"""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from toast_cli.report.model import SCHEMA, Report

TARGET = Path(__file__).parent / "schema" / "report.schema.json"
PLAIN = {str: "string", bool: "boolean", int: "integer", float: "number", NoneType: "null"}


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12). Fields may be added within one version of the layout, so unknown ones are allowed."""
    kinds: dict[str, Any] = {}
    report = _of_class(Report, kinds)
    report["properties"]["schema"] = {"const": SCHEMA}
    report["required"].insert(0, "schema")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:toast:report:1",
        "title": SCHEMA,
        "description": "What `toast partition --json` writes; docs/json-report.md says what each field means.",
        **report,
        "$defs": dict(sorted(kinds.items())),
    }


def text() -> str:
    """The file's content."""
    return json.dumps(schema(), indent=2) + "\n"


def _of_class(kind: type, kinds: dict[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {
        "type": "object",
        "properties": {field.name: _of(hints[field.name], kinds) for field in fields(kind)},
        "required": [field.name for field in fields(kind) if not _optional(field)],
    }


def _optional(field: Field[Any]) -> bool:
    """Whether an older report of the same version may lack the field: it came later, with a default for those."""
    return field.default is not MISSING or field.default_factory is not MISSING


def _of(kind: Any, kinds: dict[str, Any]) -> dict[str, Any]:
    """The schema of one type; dataclasses go into `kinds` and are referred to."""
    if is_dataclass(kind) and isinstance(kind, type):
        if kind.__name__ not in kinds:
            kinds[kind.__name__] = {}  # met already, should it contain itself
            kinds[kind.__name__] = _of_class(kind, kinds)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if get_origin(kind) is list:
        return {"type": "array", "items": _of(get_args(kind)[0], kinds)}
    if get_origin(kind) is dict:
        return {"type": "object", "additionalProperties": _of(get_args(kind)[1], kinds)}
    if kind is float:  # ratios of nothing and infinite times are null
        return {"type": ["number", "null"]}
    return {"type": PLAIN[kind]}


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(text(), encoding="utf-8")
