"""Brings README.md up to date: help texts and the output of the first run go in, between their markers.

`make readme` runs it. A test compares the help texts; the first run is not compared, as its times differ from machine
to machine.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
COMMANDS = ("", "partition")  # of the others the README has a table; the site has the help of all
FIRST_RUN = ("partition", "sample_models/t2b_train.mlirbc.zst", "--mesh", "v4-32", "-o", "sharded.mlir")


def help_text(command: str) -> str:
    """What `toast COMMAND --help` prints, 100 columns wide."""
    return _output(*command.split(), "--help")


def first_run() -> str:
    """The report of the README's first command."""
    return _output(*FIRST_RUN)


def block(text: str, marker: str) -> str:
    """The fenced block after `<!-- marker -->`. Raises ValueError when there is none."""
    found = _pattern(marker).search(text)
    if found is None:
        raise ValueError(f"{README.name} has no block {marker!r}")
    return found[2]


def _replaced(text: str, marker: str, content: str) -> str:
    block(text, marker)
    return _pattern(marker).sub(lambda found: f"{found[1]}{content}\n{found[3]}", text)


def _pattern(marker: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {re.escape(marker)} -->\n```\n)(.*?)(```\n)", re.DOTALL)


def _output(*arguments: str) -> str:
    """Runs toast in a directory of its own that sees the sample models. 102 columns: the parser leaves two of them
    free.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sample_models").symlink_to(ROOT / "sample_models")
        columns = "102" if "--help" in arguments else "100"
        ran = subprocess.run(
            [sys.executable, "-m", "toast_cli", *arguments],
            env={**os.environ, "COLUMNS": columns, "PYTHONIOENCODING": "utf-8", "PYTHONPATH": str(ROOT)},
            cwd=folder,
            check=True,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
    return "\n".join(line.rstrip() for line in ran.stdout.strip().splitlines())


def main() -> None:
    text = README.read_text(encoding="utf-8")
    for command in COMMANDS:
        text = _replaced(text, f"help: toast {command}".strip(), help_text(command))
    if "help" not in sys.argv[1:]:  # the first run takes some seconds, and changes with every figure
        text = _replaced(text, "first run", first_run())
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
