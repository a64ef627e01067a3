"""The short run of the fuzzer, with fixed seeds (`make fuzz` is the long one); every known case; killed commands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from fuzz import faults
from fuzz.cases import case
from fuzz.corpus import CORPUS, Known
from fuzz.harness import Case, Outcome, Server, wrong_with
from fuzz.strategies import cases
from hypothesis import HealthCheck, given, settings
from sweeps import sweep

MUTATIONS = 96
PIECES = 8


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as one:
        yield one


@pytest.mark.parametrize("piece", sweep(range(PIECES), 0, 1))
def test_damaged_inputs(server: Server, piece: int) -> None:
    for number in range(piece, MUTATIONS, PIECES):
        one = case(Random(f"short/{number}"))
        outcome = server.run(one)
        assert wrong_with(outcome) == [], (number, one.arguments, outcome.said)


@settings(max_examples=16, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(one=cases())
def test_inputs_made_from_grammars(server: Server, one: Case) -> None:
    outcome = server.run(one)
    assert wrong_with(outcome) == [], (one.arguments, outcome.said)


def outcome(**changes: object) -> Outcome:
    fine = Outcome(code=0, signal=0, output=b"", complaints=b"", seconds=1.0, bytes=1, hung=False, files={})
    return replace(fine, **changes)  # type: ignore[arg-type]


# What the fuzzer must see, lest it finds nothing because it looks at nothing.
SEEN = [
    ({}, []),
    ({"code": 2, "complaints": b"error: x"}, []),
    ({"code": 70, "complaints": b"error: x"}, ["exit code 70"]),
    ({"code": -1, "signal": 11}, ["killed by SIGSEGV"]),
    ({"complaints": b"Traceback (most recent call last):"}, ["traceback"]),
    ({"hung": True, "code": -1, "signal": 9}, ["hang (1 s of processor time)"]),
    ({"seconds": 61.0}, ["hang (61 s of processor time)"]),
    ({"bytes": 5 << 30}, ["5120 MiB of memory"]),
    ({"output": b"\x1b[31m"}, ["escape sequence"]),
    ({"code": 2}, ["exit code 2 without a word"]),
    ({"files": {".o.mlir.1.tmp": b""}}, ["temporary file left"]),
]


@pytest.mark.parametrize(("changes", "wrong"), SEEN)
def test_what_is_seen(changes: dict[str, object], wrong: list[str]) -> None:
    assert wrong_with(outcome(**changes)) == wrong


def test_workers_see_signals_exits_and_memory(tmp_path: Path) -> None:
    """A toast that misbehaves, in a checkout of its own."""
    package = tmp_path / "toast_cli" / "cli"
    package.mkdir(parents=True)
    (tmp_path / "toast_cli" / "__init__.py").write_text("")
    (package / "__init__.py").write_text(
        "import os, sys\n"
        "def main(arguments):\n"
        "    if arguments[0] == 'abort': os.kill(os.getpid(), 6)\n"
        "    if arguments[0] == 'eat': block = b'x' * (300 << 20)\n"
        "    if arguments[0] == 'raise': raise ValueError\n"
        "    return 70 if arguments[0] == 'bug' else 0\n"
    )
    with Server(tmp_path) as other:
        outcomes = {word: other.run(Case((word,))) for word in ("abort", "eat", "raise", "bug", "fine")}
    found = {word: wrong_with(outcome) for word, outcome in outcomes.items()}
    assert found["abort"] == ["killed by SIGABRT"] and found["bug"] == ["exit code 70"] and found["fine"] == []
    assert "traceback" in found["raise"] and outcomes["eat"].bytes > 300 << 20 > outcomes["fine"].bytes


# -- hostile inputs, by class: each ends as it should, none with a traceback, a signal, a hang or an escape sequence


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


# -- commands killed at a few random moments; `make faults` does it a hundred times


@pytest.mark.parametrize(
    ("name", "kills"),
    sweep([("partition", 2), ("check", 1), ("sweep", 1), ("verify", 1)], ("partition", 2)),
)
def test_what_killed_commands_leave(name: str, kills: int) -> None:
    assert faults.run(name, kills, seed=7) == []
