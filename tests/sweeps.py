"""Lists of cases of which `make test` runs a few and `make check-all` all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sweep(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """The cases as pytest's parameters. kept: the cases that `make test` runs."""
    cases, left = list(cases), list(kept)
    found = []
    for case in cases:
        marks = () if case in left else (pytest.mark.thorough,)
        found.append(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks))
    assert all(case in cases for case in left), "a case is kept that is in no list"
    return found
