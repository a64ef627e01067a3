"""Runs every program in other projects' test suites through reading: `python -m fuzz.suites FOLDER` from the
folder `tests`.

FOLDER holds checkouts, e.g. of openxla/stablehlo, openxla/shardy and openxla/xla. Programs are whole `.mlir`, `.hlo`
and `.hlo_text` files, split where such files are split for testing (`// -----`), and HLO texts in raw strings of C++
tests. Most of them are made to be refused by somebody. What counts is that each is read, or refused with exit code 2.
Exit code: 0 if so, else 1.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from fuzz.harness import Case, Server, wrong_with

_SPLIT = re.compile(r"^// -----.*$", re.MULTILINE)
_RAW = re.compile(r'R"([a-z_]*)\((.*?)\)\1"', re.DOTALL)
_HLO = re.compile(r"\s*(?://[^\n]*\s*)*HloModule\b")
WHOLE, SOURCES = (".mlir", ".hlo", ".hlo_text", ".mlirbc", ".pb"), (".cc",)
_LARGEST = 4 << 20


def programs_in(folder: Path) -> Iterator[tuple[str, bytes]]:
    """(where it stands, the program), in the order of the files' names."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.suffix not in WHOLE + SOURCES or path.stat().st_size > _LARGEST:
            continue
        name = str(path.relative_to(folder))
        if path.suffix in (".mlirbc", ".pb"):
            yield name, path.read_bytes()
            continue
        text = path.read_text(errors="replace")
        if path.suffix in SOURCES:
            pieces = [(match.start(), match[2]) for match in _RAW.finditer(text) if _HLO.match(match[2])]
        else:
            ends = [*(match.span() for match in _SPLIT.finditer(text)), (len(text), len(text))]
            pieces = [
                (start, text[start:end]) for start, (end, _) in zip([0, *(end for _, end in ends)], ends, strict=False)
            ]
        for start, piece in pieces:
            if piece.strip():
                yield f"{name}:{text.count(chr(10), 0, start) + 1}", piece.encode()


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz.suites", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each Nth program")
    options = parser.parse_args()
    codes: Counter[int] = Counter()
    findings = 0
    with Server() as server:
        for number, (where, content) in enumerate(programs_in(options.folder)):
            if number % options.every:
                continue
            outcome = server.run(Case(("inspect", "program"), {"program": content}))
            codes[outcome.code] += 1
            wrong = wrong_with(outcome)
            if wrong:
                findings += 1
                print(f"{where}: {', '.join(wrong)}: {outcome.said.strip()[:300]}", flush=True)
    print(f"{codes.total():,} programs: {codes[0]:,} read, {codes[2]:,} refused, {findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
