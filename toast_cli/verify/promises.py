"""What a report promised: the part of a stored `toast.report/1` file that `toast verify` holds XLA to."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from toast_cli.errors import InputError
from toast_cli.report.model import SCHEMA, CollectiveFacts


@dataclass(frozen=True)
class Promises:
    """axes: the mesh, name -> size. Bytes per device. fits: whether the plan was said to stay within `limit_bytes`."""

    axes: dict[str, int]
    collectives: list[CollectiveFacts]
    peak_bytes: int
    argument_bytes: int
    limit_bytes: int
    fits: bool


def read_promises(path: str) -> Promises:
    """The promises in a report stored with `toast partition --json`. Raises `InputError` for anything else."""
    hint = "give a file written by `toast partition --json`"
    try:
        facts = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=path, hint=hint) from None
    except ValueError:
        raise InputError("is not JSON", where=path, hint=hint) from None
    if not isinstance(facts, dict) or facts.get("schema") != SCHEMA:
        raise InputError(f"is not a {SCHEMA} report", where=path, hint=hint)
    try:
        return promises_of(facts)
    except (KeyError, TypeError) as error:
        raise InputError(f"lacks {error}", where=path, hint=hint) from None


def promises_of(facts: dict[str, Any]) -> Promises:
    """The promises in a report's JSON data."""
    predicted = facts["predicted"]
    known = {field.name for field in fields(CollectiveFacts)}
    collectives = [CollectiveFacts(**{k: v for k, v in use.items() if k in known}) for use in facts["collectives"]]
    return Promises(
        facts["mesh"]["axes"], collectives, predicted["peak_bytes"], predicted["argument_bytes"], predicted["limit_bytes"],
        predicted["fits"],
    )  # fmt: skip
