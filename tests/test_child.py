"""Work in a child: answers, errors, deaths and limits, from a fork of this process and from a new one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import child_tasks
import pytest

from toast_cli.base import children
from toast_cli.base.children import ChildError, in_child, in_fork
from toast_cli.base.errors import InputError, SpecError
from toast_cli.frontend.loading import parse

pytestmark = pytest.mark.children


@pytest.fixture(params=["fork", "process"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(children, "may_fork", lambda: request.param == "fork")
    return str(request.param)


def both_ways(rows: list[tuple[Any, ...]], once: str) -> list[Any]:
    """Each row in a fork and in a new process; the task that takes seconds in a process alone, which sets its limits
    as a fork does."""
    pairs = [(way, *row) for row in rows for way in ("fork", "process") if (way, row[0]) != ("fork", once)]
    return [pytest.param(*pair, id=f"{pair[0]}-{pair[1]}-{number}") for number, pair in enumerate(pairs)]


ANSWERS: list[tuple[Any, ...]] = [
    ("doubled", (b"ab", 3), b"ababab"),
    ("doubled", (b"x" * 1_000_000, 3), b"x" * 3_000_000),
    ("waiting", (b"",), b"slow"),
    ("noisy", (b"",), b"heard"),
]


@pytest.mark.parametrize(("way", "task", "arguments", "answer"), both_ways(ANSWERS, "waiting"), indirect=["way"])
def test_answers(
    way: str, task: str, arguments: tuple[object, ...], answer: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    assert in_child(getattr(child_tasks, task), *arguments, seconds=1) == answer
    assert capfd.readouterr() == ("", "")


def test_an_error_of_the_users_arrives_as_it_was_raised(way: str) -> None:
    with pytest.raises(SpecError) as caught:
        in_child(child_tasks.refused, b"", seconds=5)
    assert (caught.value.what, caught.value.where, caught.value.hint) == ("wrong", "a.yaml:3", "right")


DEATHS: list[tuple[Any, ...]] = [
    ("killed", ChildError, "1 == 2"),
    ("left", ChildError, "crashed"),
    ("busy", ChildError, "more than 1 seconds of processor time"),
    ("large", ChildError, "more than 3.0 GiB of memory"),
    ("large_in_native_code", ChildError, "more than 3.0 GiB of memory"),
    ("broken", RuntimeError, "ZeroDivisionError: oh"),
]


@pytest.mark.parametrize(("way", "task", "kind", "reason"), both_ways(DEATHS, "busy"), indirect=["way"])
def test_a_death_is_an_error(way: str, task: str, kind: type[Exception], reason: str) -> None:
    with pytest.raises(kind, match=reason):
        in_child(getattr(child_tasks, task), b"", seconds=1)
    assert in_child(child_tasks.doubled, b"a", 2, seconds=1) == b"aa"


def test_a_machine_without_room_is_not_called_a_damaged_program(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that is killed, or cannot be started, says nothing about the program."""
    with pytest.raises(ChildError, match="killed it") as caught:
        in_child(child_tasks.slain, b"", seconds=1)
    assert not caught.value.of_input
    monkeypatch.setattr(os, "fork", no_room)
    monkeypatch.setattr(subprocess, "Popen", no_room)
    with pytest.raises(InputError, match=r"was not read, because of .* could not be started") as told:
        parse(b"module {}", "a.mlir")
    assert told.value.hint is not None and "memory" in told.value.hint


def no_room(*_: object, **__: object) -> None:
    raise OSError(11, "Resource temporarily unavailable")


def test_an_answer_that_is_cut_off_is_no_answer(tmp_path: Path) -> None:
    """A limit on the size of files holds for what a child writes, too, and would cut off modules that Python caches."""
    path = tmp_path / "program.mlir"
    path.write_text("func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> { return %a : tensor<4xf32> }")
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100));"
        "from toast_cli.cli import command; command()"
    )
    arguments = [sys.executable, "-c", code, "inspect", str(path)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "no room for its answer" in ended.stderr and "ulimit -f" in ended.stderr


PARENT = """
import sys
from tests.child_tasks import announced
from toast_cli.base import children
children.may_fork = lambda: sys.argv[1] == "fork"
children.in_child(announced, sys.argv[2], seconds=600)
"""


@pytest.mark.parametrize("kind", ["fork", "process"])
def test_a_child_does_not_outlive_its_parent(tmp_path: Path, kind: str) -> None:
    told = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, kind, str(told)], cwd=Path(__file__).parent.parent)
    while not (told.exists() and told.read_text()):
        assert parent.poll() is None
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    assert ends(int(told.read_text()))


def ends(process: int) -> bool:
    """Waits until a process is gone; a hundred seconds are never needed."""
    for _ in range(10_000):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def test_a_fork_answers_raises_and_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "may_fork", lambda: True)
    assert in_fork(lambda: {"a": (1, b"x")}) == {"a": (1, b"x")}
    assert in_fork(os.getpid) != os.getpid()
    with pytest.raises(ZeroDivisionError, match="oh"):
        in_fork(lambda: child_tasks.broken(b""))
    with pytest.raises(RuntimeError, match="a library of XLA ended the process: 1 == 2"):
        in_fork(lambda: child_tasks.killed(b""))
    with pytest.raises(RuntimeError, match="a library of XLA ended the process: "):
        in_fork(lambda: child_tasks.left(b""))
