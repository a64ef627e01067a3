"""A clock that tests move themselves, so that no budget in seconds hangs on how busy the machine is."""

from __future__ import annotations

import time

import pytest


class Clock:
    """Stands for `time.monotonic` until the test ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.seconds)
