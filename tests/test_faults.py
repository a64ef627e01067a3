"""Commands killed at a few random moments; `make faults` does it a hundred times."""

from __future__ import annotations

import pytest
from fuzz import faults
from sweeps import sweep


@pytest.mark.parametrize(
    ("name", "kills"),
    sweep([("partition", 2), ("check", 1), ("sweep", 1), ("verify", 1)], ("partition", 2)),
)
def test_what_killed_commands_leave(name: str, kills: int) -> None:
    assert faults.run(name, kills, seed=7) == []
