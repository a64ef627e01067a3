"""Prints, for each program in `benchmarks/data/understanding.txt`, where toast disagrees with a person about the batch,
the experts, the weights and the state.

    python -m benchmarks.understanding [WORD ...]                  programs whose name has one of the words
    python -m benchmarks.understanding --write docs/accuracy.md    all, and the figures into the page

Programs called `built` are lowered from `benchmarks.understanding.programs`, `sample` come from `sample_models`, and
`real` from `build/real` (made by `python -m benchmarks.real.lower`; left out where it is missing).
"""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import Row, markdown_table, put_between
from toast_cli.dimensions import analyse
from toast_cli.dimensions.model import Group
from toast_cli.frontend import load
from toast_cli.program.model import Program
from toast_cli.program.roles import INPUTS, STATE, WEIGHTS, argument_roles

ROOT = Path(__file__).parents[2]
_TABLE = ROOT / "benchmarks" / "data" / "understanding.txt"
START, END = "<!-- understanding: written by benchmarks.understanding -->", "<!-- understanding: end -->"
_WORD = re.compile(r"(\(?)([^(),]+)\)?,?")


@dataclass(frozen=True)
class Expected:
    """What must be called something, and what may be."""

    must: frozenset[str]
    may: frozenset[str]

    def wrong(self, found: set[str]) -> bool:
        """Whether something is missing or too much. Where nothing must be found, one of what may be has to."""
        missing = not self.must <= found or bool(not self.must and self.may and not found)
        return missing or not found <= self.must | self.may


def _expected(text: str) -> Expected:
    words = [] if text == "-" else _WORD.findall(text)
    return Expected(frozenset(w for b, w in words if not b), frozenset(w for b, w in words if b))


def _path(where: str, name: str) -> Path:
    if where == "built":
        path = ROOT / "build" / "understanding" / f"{name}.mlir"
        if not path.exists():
            from benchmarks.understanding.programs import text

            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text(name))
        return path
    folder = ROOT / "sample_models" if where == "sample" else ROOT / "build" / "real"
    return folder / f"{name}.mlirbc.zst"


def _called(groups: Iterable[Group], role: str) -> set[str]:
    return {str(group.size) for group in groups if group.role == role}


def _arguments_wrong(program: Program, weights: Expected, state: Expected) -> list[str]:
    """Arguments (not single numbers or keys) that have another role than a person gave them."""
    roles, of = argument_roles(program)
    said_of = [(WEIGHTS, tuple(weights.must)), (STATE, tuple(state.must))]
    either = tuple(weights.may | state.may)
    found = []
    for argument, number in zip(program.arguments, of, strict=True):
        value = program.values[argument.value]
        if not value.shape or value.dtype == "ui32" or argument.path.startswith(either):
            continue
        said = [role for role, paths in said_of if argument.path.startswith(paths)] or [INPUTS]
        if roles[number] not in said:
            found.append(f"{argument.path} {roles[number]}")
    return found


def disagreements(program: Program, batch: str, experts: str, weights: str, state: str) -> list[str]:
    """What toast says otherwise than a person."""
    groups = analyse(program).groups
    wrong = []
    for role, text in (("batch", batch), ("experts", experts)):
        found = _called(groups, role)
        if _expected(text).wrong(found):
            wrong.append(f"{role} is {','.join(sorted(found)) or '-'} (a person: {text})")
    arguments = _arguments_wrong(program, _expected(weights), _expected(state))
    if arguments:
        wrong.append(f"{len(arguments)} arguments, such as {arguments[0]}")
    return wrong


def main(arguments: list[str]) -> None:
    parser = ArgumentParser(prog="python -m benchmarks.understanding")
    parser.add_argument("words", nargs="*", metavar="WORD", help="programs whose name has one of the words")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the figures into this page: docs/accuracy.md")
    options = parser.parse_args(arguments)
    asked, rows = Counter[str](), list[Row]()
    for line in _TABLE.read_text().splitlines():
        if line.startswith("#"):
            continue
        where, name, *said = line.split()
        path = _path(where, name)
        if (options.words and not any(word in name for word in options.words)) or not path.exists():
            continue
        wrong = disagreements(load(str(path)).program, *said)
        asked[where] += 1
        if wrong:
            rows.append({"program": name, "from": where, "says": "; ".join(wrong)})
        print(f"{where:7}{name:25}{'; '.join(wrong) or 'right'}", flush=True)
    right = f"Right in {asked.total() - len(rows)} of {asked.total()} programs"
    counts = ", ".join(f"{count} {where}" for where, count in asked.items())
    print(f"{right} ({counts})")
    if options.write:
        columns = {"program": "{program}", "from": "{from}", "toast says": "{says}"}
        table = markdown_table(columns, rows, words=3)
        put_between(options.write, START, END, [f"{right} ({counts}). The others:", "", *table])


if __name__ == "__main__":
    main(sys.argv[1:])
