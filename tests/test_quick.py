"""What `make quick` leaves out exists."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import SLOW


@pytest.mark.parametrize("name", sorted(SLOW))
def test_what_is_slow_exists(name: str) -> None:
    file, _, test = name.partition("::")
    text = Path(__file__).with_name(f"{file}.py").read_text(encoding="utf-8")
    assert f"\ndef {test}" in text, "tests/conftest.py names a test that is no more"
