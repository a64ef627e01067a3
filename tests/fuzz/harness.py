"""Commands in forked workers that see signals, hangs and memory: a `Case` goes in, an `Outcome` and what is wrong
with it come out.

A server process loads toast once and forks itself for each case, which then costs some ten milliseconds. The server
is a process of its own because the tests' process runs threads, which a fork does not survive.
"""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

ROOT = Path(__file__).parent.parent.parent
DOCUMENTED = {0, 1, 2, 3, 130, 141}
# What a command may use at most, in seconds of processor time and bytes.
MOST_SECONDS, MOST_BYTES = 60.0, 4 << 30
# Waiting longer than this is a hang, however busy the machine is.
_PATIENCE_SECONDS = 400.0
# Address space: a case that goes beyond is stopped before the machine runs out of memory.
_ADDRESS_SPACE = 12 << 30
_OUTPUT = 1 << 18
PRELOADED = (
    "numpy", "yaml", "zstandard", "rich.console", "rich.table", "toast_cli.cli.app", "toast_cli.pipeline",
    "toast_cli.xla", "toast_cli.frontend.normalise", "toast_cli.frontend.formats", "toast_cli.report.terminal",
    "toast_cli.emit", "toast_cli.report.inspection", "toast_cli.tactics.requests", "toast_cli.base.children",
    "toast_cli.frontend.loading", "toast_cli.ask_xla.verdict", "toast_cli.report.model",
    "toast_cli.report.command_tables", "toast_cli.report.explain",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A command line, and the files (and standard input) that it finds in its working directory."""

    arguments: tuple[str, ...]
    files: dict[str, bytes] = field(default_factory=dict)
    stdin: bytes = b""
    environment: dict[str, str] = field(default_factory=dict)
    name: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a command ended. `signal`: the one that killed it, 0 for none. `bytes`: its largest process."""

    code: int
    signal: int
    output: bytes
    complaints: bytes
    seconds: float
    bytes: int
    hung: bool
    files: dict[str, bytes]

    @property
    def said(self) -> str:
        return self.complaints.decode("utf-8", "replace")


def wrong_with(outcome: Outcome) -> list[str]:
    """What a command must never do, and did."""
    found = []
    text = outcome.output + outcome.complaints
    if outcome.hung or outcome.seconds > MOST_SECONDS:
        found.append(f"hang ({outcome.seconds:.0f} s of processor time)")
    elif outcome.signal:
        found.append(f"killed by {signal.Signals(outcome.signal).name}")
    elif outcome.code not in DOCUMENTED:
        found.append(f"exit code {outcome.code}")
    if b"Traceback (most recent" in text:
        found.append("traceback")
    if outcome.bytes > MOST_BYTES:
        found.append(f"{outcome.bytes >> 20} MiB of memory")
    if b"\x1b" in text:
        found.append("escape sequence")
    if outcome.code == 2 and not outcome.hung and not outcome.signal and not text.strip():
        found.append("exit code 2 without a word")
    if any(name.endswith(".tmp") for name in outcome.files):
        found.append("temporary file left")
    return found


class Server:
    """A process that runs cases. `tree`: the checkout whose toast is run."""

    def __init__(self, tree: Path = ROOT) -> None:
        # In a fork of the preloaded process, memory that numpy's threads hold does not count; one thread is enough.
        environment = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"}
        environment |= {"NO_COLOR": "1", "COLUMNS": "100"}
        command = [sys.executable, str(Path(__file__).resolve())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(OSError):
                stream.close()
        self._process.wait()

    def run(self, case: Case) -> Outcome:
        """Runs one case, and waits for it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        _send(self._process.stdin, (case.arguments, case.files, case.stdin, case.environment))
        return Outcome(*_receive(self._process.stdout))


def _send(stream: IO[bytes], value: object) -> None:
    content = pickle.dumps(value)
    stream.write(struct.pack("<q", len(content)) + content)
    stream.flush()


def _receive(stream: IO[bytes]) -> tuple:  # type: ignore[type-arg]
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError("the server of fuzzing has ended")
    found: tuple = pickle.loads(stream.read(struct.unpack("<q", head)[0]))  # type: ignore[type-arg]
    return found


# -- in the server ----------------------------------------------------------------------------------------------------


def serve() -> None:
    from importlib import import_module

    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    for name in PRELOADED:
        with suppress(ImportError):
            import_module(name)
    _warm_up()
    while True:
        try:
            request = _receive(requests)
        except EOFError:
            return
        _send(answers, _run(*request))


def _warm_up() -> None:
    """Loads what only a command line loads, with commands that read no program: the compiler's contexts have
    threads, which no fork survives."""
    from io import StringIO

    from toast_cli.cli import main

    before, sys.stdout = sys.stdout, StringIO()
    for arguments in (["mesh", "show", "v4-32"], ["tactics"], ["partition", "--help"]):
        main(arguments)
    sys.stdout = before


def _run(arguments: tuple[str, ...], files: dict[str, bytes], stdin: bytes, environment: dict[str, str]) -> tuple:  # type: ignore[type-arg]
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        work = folder / "work"
        work.mkdir()
        for name, content in files.items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_bytes(content)
        (folder / "in").write_bytes(stdin)
        child = os.fork()
        if child == 0:
            _be_command(arguments, folder, environment)
        hung, began = False, time.monotonic()
        pause = 0.0005
        while True:
            ended, status, usage = os.wait4(child, os.WNOHANG)
            if ended:
                break
            if time.monotonic() - began > _PATIENCE_SECONDS:
                hung = True
                os.killpg(child, signal.SIGKILL)
                _, status, usage = os.wait4(child, 0)
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)  # orphans
        made = {
            str(path.relative_to(work)): path.read_bytes()[:_OUTPUT]
            for path in sorted(work.rglob("*"))
            if path.is_file() and str(path.relative_to(work)) not in files
        }
        return (
            os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1,
            os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
            (folder / "out").read_bytes()[:_OUTPUT],
            (folder / "err").read_bytes()[:_OUTPUT],
            usage.ru_utime + usage.ru_stime,
            usage.ru_maxrss * 1024,
            hung,
            made,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _be_command(arguments: tuple[str, ...], folder: Path, environment: dict[str, str]) -> None:
    code = 99
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
        os.chdir(folder / "work")
        os.environ |= environment
        for descriptor, name, flags in (
            (0, "in", os.O_RDONLY),
            (1, "out", os.O_RDWR | os.O_CREAT),
            (2, "err", os.O_RDWR | os.O_CREAT),
        ):
            os.dup2(os.open(folder / name, flags | os.O_APPEND), descriptor)
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(n, mode, encoding="utf-8") for n, mode in ((0, "r"), (1, "w"), (2, "w"))
        )
        from toast_cli.cli import main

        code = main(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        import traceback

        os.write(2, traceback.format_exc().encode("utf-8", "replace"))
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve()
