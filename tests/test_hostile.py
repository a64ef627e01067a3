"""Hostile inputs, by class: each ends as it should, none with a traceback, a signal, a hang or an escape sequence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fuzz.corpus import CORPUS, Known
from fuzz.harness import Server, wrong_with


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as one:
        yield one


@pytest.mark.parametrize("known", CORPUS, ids=[known.case.name for known in CORPUS])
def test_hostile_inputs(server: Server, known: Known) -> None:
    outcome = server.run(known.case)
    assert wrong_with(outcome) == []
    assert outcome.code == known.code, outcome.said
    assert known.says in outcome.said
    assert "pwned" not in outcome.files
    if "shardings.py" in outcome.files:
        compile(outcome.files["shardings.py"], "shardings.py", "exec")
        assert b"\nimport os" not in outcome.files["shardings.py"]
