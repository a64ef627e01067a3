"""Lowers programs of published packages from abstract shapes, each in a process of its own.

Needs the extra `corpus`. Writes `FOLDER/NAME.mlirbc.zst`; a program that is there already is left alone. Nothing is
computed: weights and data are shapes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import warnings
from pathlib import Path

from benchmarks.real.programs import PROGRAMS, chosen

FOLDER = Path("build/real")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs (default: all)")
    parser.add_argument("--split", choices=("fit", "judge", "all"), default="all")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--here", action="store_true", help="lower in this process, and show what goes wrong")
    options = parser.parse_args(arguments)
    failed = []
    for name in chosen(options.names, options.split):
        path = path_of(name, options.folder)
        if path.exists():
            continue
        if options.here:
            lower(name, path)
            continue
        start = time.monotonic()
        command = [sys.executable, "-m", "benchmarks.real.lower", name, "--here", "--folder", str(options.folder)]
        child = subprocess.run(command, capture_output=True, text=True, check=False)
        last = (child.stderr.strip().splitlines() or [""])[-1]
        print(f"{name}: {'lowered' if child.returncode == 0 else last} ({time.monotonic() - start:.0f} s)", flush=True)
        if child.returncode:
            failed.append(name)
    return 1 if failed else 0


def path_of(name: str, folder: Path = FOLDER) -> Path:
    """Where a program is kept."""
    return folder / f"{name.replace(' ', '_')}.mlirbc.zst"


def lower(name: str, path: Path) -> None:
    """Lowers one program into `path`."""
    import io

    import jax
    import zstandard

    warnings.simplefilter("ignore")
    made = PROGRAMS[name].make()
    lowered = jax.jit(made.function, donate_argnums=made.donated).lower(*made.arguments)
    text = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(zstandard.ZstdCompressor(level=9).compress(text.getvalue()))
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
