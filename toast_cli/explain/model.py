"""What an explanation holds. JSON schema "toast.explain/1"; field names are stable."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = "toast.explain/1"


@dataclass(frozen=True)
class Change:
    """What the plan would cost if one thing were different. Seconds a step and bytes per device, of the whole plan
    then.

    what: the difference, in words. note: what else it does.
    """

    what: str
    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    peak_bytes: int
    fits: bool
    note: str = ""


@dataclass(frozen=True)
class Item:
    """Something the explanation lists: an op, a collective, an array. seconds and bytes are 0 where they say
    nothing."""

    text: str
    detail: str
    count: float = 1
    seconds: float = 0.0
    bytes: int = 0


@dataclass(frozen=True)
class Explanation:
    """subject: what is explained ("plan", "decision 3"). sentences: why, in words. items: what it speaks of,
    called `listed`. changes: what else there would be, called `alternatives`; the figures of the plan itself are
    those at the top."""

    program: str
    mesh: str
    axes: dict[str, int]
    summary: str
    step_seconds: float
    peak_bytes: int
    limit_bytes: int
    subject: str
    sentences: list[str]
    listed: str = ""
    items: list[Item] = field(default_factory=list)
    alternatives: str = ""
    changes: list[Change] = field(default_factory=list)
    schema: str = SCHEMA

    def to_json(self) -> dict[str, Any]:
        facts = asdict(self)
        return {"schema": facts.pop("schema"), **facts}
