"""Reads from a `toast.report/1` the figures that XLA's are compared with.

Enters: a report, stored or as JSON data. Leaves: `Promises`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from math import prod
from typing import Any

from toast_cli.errors import InputError
from toast_cli.hardware.schema import MOST_DEVICES
from toast_cli.inputs import read_json
from toast_cli.promised import CollectiveFacts, Promises
from toast_cli.report.model import NO, SCHEMA, UNSURE, YES


def read_promises(path: str) -> Promises:
    """The promises in a report stored with `toast partition --json`. Raises `InputError` for anything else."""
    hint = "give a file written by `toast partition --json`"
    facts = read_json(path, hint)
    if not isinstance(facts, dict) or facts.get("schema") != SCHEMA:
        raise InputError(f"is not a {SCHEMA} report", where=path, hint=hint)
    try:
        promises = promises_of(facts)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"lacks {error}", where=path, hint=hint) from None
    wrong = next(wrong_fields(promises), "")
    if wrong:
        raise InputError(f"{wrong} is not what a report says there", where=path, hint=hint)
    return promises


def wrong_fields(promises: Promises) -> Iterator[str]:
    """Names of fields whose values have another type than in a report."""
    axes = promises.axes
    if (
        not isinstance(axes, dict)
        or not axes
        or not all(type(size) is int and size > 0 for size in axes.values())
        or prod(axes.values()) > MOST_DEVICES
    ):
        yield "mesh.axes"
    for name in ("peak_bytes", "argument_bytes", "limit_bytes", "host_bytes"):
        if type(getattr(promises, name)) is not int:
            yield f"predicted.{name}"
    if type(promises.fits) is not bool:
        yield "predicted.fits"
    if promises.fit not in (YES, UNSURE, NO):
        yield "predicted.fit"
    if type(promises.machine) is not str:
        yield "mesh.name"
    kinds: dict[str, Any] = {
        "str": str,
        "int": int,
        "float": (int, float),
        "bool": bool,
        "list[str]": list,
        "list[int]": list,
    }
    for collective in promises.collectives:
        for field in fields(collective):
            kind = kinds.get(str(field.type))
            if kind is not None and not isinstance(getattr(collective, field.name), kind):
                yield f"collectives.{field.name}"


def promises_of(facts: dict[str, Any]) -> Promises:
    """The promises in a report's JSON data."""
    predicted = facts["predicted"]
    known = {field.name for field in fields(CollectiveFacts)}
    collectives = [CollectiveFacts(**{k: v for k, v in use.items() if k in known}) for use in facts["collectives"]]
    return Promises(
        facts["mesh"]["axes"],
        collectives,
        predicted["peak_bytes"],
        predicted["argument_bytes"],
        predicted["limit_bytes"],
        predicted["fits"],
        facts["mesh"]["name"],
        predicted.get("host_bytes", 0),
        predicted.get("fit", "yes" if predicted["fits"] else "no"),
    )
