"""Brings the first run in README.md up to date: `make readme`. Its times differ from machine to machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
FIRST_RUN = ("partition", "sample_models/t2b_train.mlirbc.zst", "--mesh", "v4-32", "-o", "sharded.mlir")
LEFT_OUT = "[…: where the time goes, collectives, arguments, notes, search, time]"


def first_run() -> str:
    """The report of the README's first command, 100 columns wide, without the sections that list much. It runs in a
    folder that holds the sample models alone.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sample_models").symlink_to(ROOT / "sample_models")
        ran = subprocess.run(
            [sys.executable, "-m", "toast_cli", *FIRST_RUN],
            env={**os.environ, "COLUMNS": "100", "PYTHONIOENCODING": "utf-8", "PYTHONPATH": str(ROOT)},
            cwd=folder,
            check=True,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
    shown = "\n".join(line.rstrip() for line in ran.stdout.strip().splitlines())
    return shown[: shown.index("where the time goes, ")] + LEFT_OUT + shown[shown.rindex("\nwrote ") :]


def with_first_run(readme: str, shown: str) -> str:
    """The README with this report in its block. Raises ValueError when it has no such block."""
    marked = re.compile(r"(<!-- first run -->\n```\n).*?(```\n)", re.DOTALL)
    if not marked.search(readme):
        raise ValueError("README.md has no block 'first run'")
    return marked.sub(lambda found: f"{found[1]}{shown}\n{found[2]}", readme)


def main() -> None:
    README.write_text(with_first_run(README.read_text(encoding="utf-8"), first_run()), encoding="utf-8")


if __name__ == "__main__":
    main()
