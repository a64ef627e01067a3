"""The data of an explanation. JSON schema "toast.explain/1"; field names are stable."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = "toast.explain/1"


@dataclass(frozen=True)
class Change:
    """The plan's cost if one thing were different: seconds a step and bytes per device, of the whole changed plan.

    what: the difference, in words. note: its other effects.
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
    """A listed op, collective or array. seconds and bytes are 0 if they do not apply. costs: seconds of what could be
    done with it instead ("recompute", "offload"), by name."""

    text: str
    detail: str
    count: float = 1
    seconds: float = 0.0
    bytes: int = 0
    costs: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Explanation:
    """subject: what is explained ("plan", "decision 3"). sentences: the reasons, in words. items: the list with the
    title `listed`. changes: other plans, with the title `alternatives`; the figures at the top are those of the plan
    itself."""

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
