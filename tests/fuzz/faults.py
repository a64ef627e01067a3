"""Commands killed at random moments: what is left of them must be whole, and none of their processes may go on.

`python -m fuzz.faults --kills 100` from the folder `tests` is the long run (`make faults`); a test does a handful.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz.corpus import program
from fuzz.harness import ROOT

MARK = "TOAST_FAULTS_MARK"
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)
# Processes that are told to end need a moment for it; nobody waits this long.
_PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class Command:
    """A command line, and the files that it writes."""

    line: str
    writes: tuple[str, ...]

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(self.line.split())


QUICK = "m.mlir --mesh v4-32 --iterations 300"
COMMANDS = {
    "partition": Command(
        f"partition {QUICK} -o o.mlir --json r.json --save-plan p.json", ("o.mlir", "r.json", "p.json")
    ),
    "check": Command(f"check {QUICK} --against s.json --update --output-format json=c.json", ("c.json", "s.json")),
    "sweep": Command(
        f"sweep {QUICK} --seeds 0-3 --jobs 2 --jsonl l.jsonl --csv t.csv --json t.json",
        ("l.jsonl", "t.csv", "t.json"),
    ),
    "verify": Command("verify o.mlir --compiler cpu --report r.json --against m.mlir --json v.json", ("v.json",)),
}


class Faults:
    """One command in a folder of its own: run to its end once, killed any number of times, and run to its end again."""

    def __init__(self, command: Command, folder: Path) -> None:
        self._command = command
        self._folder = folder
        (folder / "m.mlir").write_bytes(program())
        if command is COMMANDS["verify"]:
            self._finish(
                Command("partition m.mlir --mesh h100-8 --iterations 20 -o o.mlir --json r.json", ()).arguments
            )
        began = time.monotonic()
        self._finish(self._command.arguments)
        self.seconds = time.monotonic() - began
        self._whole = self._contents()

    def kill(self, rng: random.Random) -> str:
        """Starts the command, kills its first process at some moment, and looks. Returns what is wrong; empty for
        nothing."""
        for name in self._command.writes:
            if rng.random() < 0.5:
                (self._folder / name).unlink(missing_ok=True)
        before = self._contents()
        mark, moment, number = secrets.token_hex(8), rng.uniform(0, 1.05) * self.seconds, rng.choice(SIGNALS)
        process = subprocess.Popen(
            _toast(self._command.arguments),
            cwd=self._folder,
            env={**_environment(), MARK: mark},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert process.stderr is not None
        time.sleep(moment)
        process.send_signal(number)
        said = process.stderr.read().decode("utf-8", "replace") if not self._alive(mark) else ""
        process.wait()
        process.stderr.close()
        orphans = self._alive(mark)
        if orphans:
            return f"{signal.Signals(number).name} after {moment:.1f} s: {len(orphans)} processes go on: {orphans}"
        # A process that Python was starting says that nothing comes from its parent any more: that is not ours to say.
        if "Traceback" in said and number == signal.SIGKILL and "pickle.load(from_parent)" not in said:
            return f"SIGKILL after {moment:.1f} s: {said}"
        wrong = [name for name in self._command.writes if not self._is_whole(name, before.get(name))]
        return f"{signal.Signals(number).name} after {moment:.1f} s: not whole: {', '.join(wrong)}" if wrong else ""

    def finish(self) -> str:
        """Runs the command to its end once more. Returns what is wrong with what it writes then; empty for nothing."""
        self._finish(self._command.arguments)
        wrong = [
            name
            for name, content in self._contents().items()
            if _lasting(name, content) != _lasting(name, self._whole[name])
        ]
        left = [path.name for path in self._folder.iterdir() if path.name.endswith(".tmp")]
        return ", ".join([*(f"{name} differs" for name in wrong), *(f"{name} is left" for name in left)])

    def _finish(self, arguments: Any) -> None:
        ran = subprocess.run(
            _toast(arguments), cwd=self._folder, env=_environment(), capture_output=True, text=True, check=False
        )
        if ran.returncode:
            raise RuntimeError(f"{' '.join(arguments)} ended with {ran.returncode}: {ran.stderr}")

    def _contents(self) -> dict[str, bytes]:
        return {
            name: (self._folder / name).read_bytes() for name in self._command.writes if (self._folder / name).exists()
        }

    def _is_whole(self, name: str, before: bytes | None) -> bool:
        """Whether a file is not there, as it was, as it is when the command ends, or a log that can be gone on with."""
        path = self._folder / name
        if not path.exists():
            return True  # and so it was, or was replaced by nothing
        content = path.read_bytes()
        if content == before or _lasting(name, content) == _lasting(name, self._whole[name]):
            return True
        if name.endswith(".jsonl"):
            return all(json.loads(line)["schema"] for line in content.split(b"\n")[:-1])
        return name.endswith(".csv") and content.startswith(
            b"program,"
        )  # grows line by line, as its documentation says

    def _alive(self, mark: str) -> list[int]:
        """Processes of the command that do not end, after waiting for them."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            found = list(_marked(mark))
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.05)


def _toast(arguments: Any) -> list[str]:
    return [sys.executable, "-m", "toast_cli", *arguments]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def _marked(mark: str) -> Iterator[int]:
    """Running processes whose environment holds the mark."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and wanted in (entry / "environ").read_bytes():
                    yield int(entry.name)
            except OSError:
                continue


def _lasting(name: str, content: bytes) -> Any:
    """What a file says apart from how long things took; of a log the same in any order."""
    if name.endswith(".jsonl"):
        return sorted(
            json.dumps(_timeless(json.loads(line)), sort_keys=True) for line in content.splitlines() if line.strip()
        )
    if name.endswith(".json"):
        try:
            return _timeless(json.loads(content))
        except ValueError:
            return content
    return content if not name.endswith(".csv") else len(content.splitlines())


def _timeless(facts: Any) -> Any:
    if isinstance(facts, dict):
        return {
            key: _timeless(value)
            for key, value in facts.items()
            if key not in ("seconds", "timings", "time", "compile_seconds")
        }
    return [_timeless(value) for value in facts] if isinstance(facts, list) else facts


def run(name: str, kills: int, seed: int, told: Callable[[str], None] = lambda _: None) -> list[str]:
    """Kills one of `COMMANDS` so many times; returns what was wrong."""
    rng = random.Random(f"{seed}/{name}")
    found: list[str] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        faults = Faults(COMMANDS[name], Path(folder))
        for number in range(kills):
            wrong = faults.kill(rng)
            found += [f"{name}: {wrong}"] * bool(wrong)
            told(f"{name} {number + 1}/{kills}: {wrong or 'whole'}")
        wrong = faults.finish()
        found += [f"{name}, run to its end: {wrong}"] * bool(wrong)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz.faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="in all, over all commands")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=COMMANDS, nargs="*", default=list(COMMANDS))
    options = parser.parse_args()
    found: list[str] = []
    for name in options.only:
        found += run(name, -(-options.kills // len(options.only)), options.seed, lambda text: print(text, flush=True))
    print(f"{options.kills} kills, {len(found)} findings", *found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
