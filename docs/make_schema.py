"""Writes the JSON Schemas in docs/schema: of "toast.report/1", from the dataclasses that reports are made of, and of
mesh specifications.

python docs/make_schema.py
"""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from toast_cli.report.model import SCHEMA, Report

FOLDER = Path(__file__).parent / "schema"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
PLAIN = {str: "string", bool: "boolean", int: "integer", float: "number", NoneType: "null"}


def report() -> dict[str, Any]:
    """JSON Schema of a report (draft 2020-12). Fields may be added within one version of the layout, so unknown ones
    are allowed.
    """
    kinds: dict[str, Any] = {}
    whole = _of_class(Report, kinds)
    whole["properties"]["schema"] = {"const": SCHEMA}
    whole["required"].insert(0, "schema")
    return {
        "$schema": DIALECT,
        "$id": "urn:toast:report:1",
        "title": SCHEMA,
        "description": "What `toast partition --json` writes; docs/reference/json.md says what each field means.",
        **whole,
        "$defs": dict(sorted(kinds.items())),
    }


def mesh_spec() -> dict[str, Any]:
    """JSON Schema of a mesh specification, for editors: the keys and the kinds of their values.
    docs/reference/mesh-spec.md describes them.

    Whether figures fit together (axes and devices, a torus for this chip) is for `toast mesh validate`.
    """
    text, count = {"type": "string"}, {"type": "integer", "minimum": 1}
    quantity = {"type": ["string", "number"]}
    figures = {"bandwidth": quantity, "latency": quantity}
    chip = {
        **dict.fromkeys(("preset", "name"), text),
        "platform": {"enum": ["tpu", "gpu"]},
        "matrix_flops": _section(dict.fromkeys(("f64", "f32", "bf16", "f16", "f8", "i8"), quantity)),
        "matrix_tile": {"type": "array", "items": count, "minItems": 2, "maxItems": 2},
        **dict.fromkeys(("vector_flops", "memory", "reserved", "memory_bandwidth", "host_bandwidth"), quantity),
    }
    network = {"hosts": count, "slices": count, **figures, "per": {"enum": ["device", "chip", "host"]}}
    topology = {
        "core": _section(figures),
        "torus": _one_or_more(count),
        "wraparound": _one_or_more({"type": "boolean"}),
        "link": _section(figures),
        "switch": {"anyOf": [count, _section({"size": count, **figures}, "size")]},
        "network": {"anyOf": [count, _section(network)]},
    }
    axis = {"anyOf": [count, _section({"size": count, "over": _one_or_more(text)})]}
    keys = {
        "name": text,
        "description": text,
        "chip": {"anyOf": [text, _section(chip)]},
        "topology": _section(topology),
        "axes": {"type": "object", "additionalProperties": axis, "minProperties": 1},
        "memory_fraction": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "price": {"type": "number", "exclusiveMinimum": 0},
    }
    return {"$schema": DIALECT, "$id": "urn:toast:mesh-spec", "title": "Mesh specification", **_section(keys, "chip")}


def contents() -> dict[Path, str]:
    """What each file holds."""
    made = {"report.schema.json": report(), "mesh-spec.schema.json": mesh_spec()}
    return {FOLDER / name: json.dumps(schema, indent=2) + "\n" for name, schema in made.items()}


def _section(keys: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": keys, "required": list(required), "additionalProperties": False}


def _one_or_more(kind: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [kind, {"type": "array", "items": kind, "minItems": 1}]}


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
    if get_origin(kind) in (Union, UnionType):
        (only,) = (one for one in get_args(kind) if one is not NoneType)
        return {"anyOf": [_of(only, kinds), {"type": "null"}]}
    if kind is float:  # ratios of nothing and infinite times are null
        return {"type": ["number", "null"]}
    return {"type": PLAIN[kind]}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, content in contents().items():
        path.write_text(content, encoding="utf-8")
