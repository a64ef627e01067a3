"""Streams that are closed, paths that lead nowhere, and Ctrl-C before there is anything to interrupt: a clean message
and its exit code.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fuzz.corpus import program
from sweeps import sweep

from toast_cli.base import files

ROOT = Path(__file__).parent.parent
TOAST = f"{sys.executable} -m toast_cli"

# What a shell does, what the exit code is, what stands on stderr.
COMMANDS = [
    ("stdout is closed", f"{TOAST} inspect m.mlir >&-", 2, "cannot write"),
    ("stdout is closed and there is a file", f"{TOAST} partition m.mlir --mesh v4-32 --iterations 5 --quiet -o - >&-",
     2, "cannot write"),
    ("stdout is full", f"{TOAST} inspect m.mlir >/dev/full", 2, "cannot write"),
    ("stderr is closed", f"{TOAST} inspect nothing.mlir 2>&-", 2, ""),
    ("stderr is full", f"{TOAST} inspect nothing.mlir 2>/dev/full", 2, ""),
    ("stdin is closed", f"{TOAST} inspect - <&-", 2, "closed"),
    ("all are closed", f"{TOAST} inspect - <&- >&- 2>&-", 2, ""),
    ("the reader has left", f"set -o pipefail; {TOAST} mesh list | true", 141, ""),
    ("links go round in circles", f"ln -s a b; ln -s b a; {TOAST} inspect a", 2, "symbolic links"),
    ("an output goes round in circles", f"ln -s a b; ln -s b a; {TOAST} inspect m.mlir --json a/x", 2, "no directory"),
    ("a process substitution", f"{TOAST} inspect <(cat m.mlir)", 0, ""),
    ("the working directory is gone", f"mkdir d; cd d; rmdir ../d; {TOAST} inspect m.mlir --json x.json", 2,
     "No such file"),
    ("a file that may not be read", f"mkfifo p; rm p; mkdir p; {TOAST} inspect p", 2, "directory"),
    ("a name that is no text",
     f"cp m.mlir $'m\\xff.mlir'; {TOAST} partition $'m\\xff.mlir' --mesh v4-32 --iterations 5 --json r.json", 0, ""),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("m.mlir").write_bytes(program())
    return tmp_path


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TOAST_DEBUG": "0"}


@pytest.mark.parametrize(("command", "code", "says"), [c[1:] for c in COMMANDS], ids=[c[0] for c in COMMANDS])
def test_streams_and_paths(folder: Path, command: str, code: int, says: str) -> None:
    ran = subprocess.run(["bash", "-c", command], capture_output=True, env=environment(), cwd=folder, check=False)
    said = ran.stderr.decode()
    assert ran.returncode == code, said
    assert says in said
    assert "Traceback" not in said and "Exception ignored" not in said


def test_a_pipe_is_read_when_somebody_writes(folder: Path) -> None:
    os.mkfifo("p")
    thread = threading.Timer(0.1, lambda: Path("p").write_bytes(program()))
    thread.start()
    assert files.read_file("p", 2**20) == program()
    thread.join()


@pytest.mark.parametrize("seconds", sweep([0.02, 0.15, 0.3, 0.45, 0.6, 0.9], 0.3))
def test_an_interrupt_in_the_first_second(folder: Path, seconds: float) -> None:
    """Python itself is being loaded in the first moments; from toast's first line on, an interrupt is a word and an
    exit code.
    """
    started = [sys.executable, "-c", "from toast_cli.cli import command; print(flush=True); command()"]
    command = [*started, "partition", "m.mlir", "--mesh", "v4-32", "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.02)  # for the first line of the command, which installs the handler
    threading.Timer(seconds, process.send_signal, [signal.SIGINT]).start()
    _, said = process.communicate()
    assert b"Traceback" not in said, said
    assert process.returncode in (0, 130)
