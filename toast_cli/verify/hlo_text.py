"""A minimal parser of compiled HLO text: computations, selected instructions in them, and how often each runs.

Enters: the text of `HloModule.to_string()`. Leaves: `Instruction` records with run counts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from toast_cli.program.model import DTYPE_BITS
from toast_cli.verify.trips import trip_count

_HEADER = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{$|^(ENTRY )?%?([^\s(]+) \{$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([^\s,})]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|true_computation=%?([^\s,]+), false_computation=%?([^\s,]+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NO_ESTIMATE = 2**62

# Bits per element by HLO's type names, which differ from MLIR's: `s32`, `u8`, `c64`, `f8e4m3fn`.
BITS = {
    **{name.lower().replace("ui", "u"): bits for name, bits in DTYPE_BITS.items()},
    **{f"s{bits}": bits for bits in (2, 4, 8, 16, 32, 64)},
    "c64": 64,
    "c128": 128,
}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. `sizes`: bytes of each array of its result, on each device. `runs`: times per run of the
    program; `entered`: how often its enclosing loop starts, or its computation is called."""

    opcode: str
    sizes: tuple[int, ...]
    attributes: str
    computation: str
    runs: float
    entered: float


def instructions(text: str, opcodes: frozenset[str]) -> Iterator[Instruction]:
    """Instructions with one of `opcodes`, in every computation that runs."""
    bodies, entry = computations(text)
    runs, entered = _counts(bodies, entry)
    for name, lines in bodies.items():
        if name not in runs:
            continue
        for line in lines:
            parsed = parse_line(line)
            if parsed and parsed[1] in opcodes:
                kind, opcode, rest = parsed
                yield Instruction(opcode, array_bytes(kind), rest, name, runs[name], entered[name])


def computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Lines of each computation, and the name of the entry."""
    bodies: dict[str, list[str]] = {}
    entry = ""
    current: list[str] = []
    for line in text.splitlines():
        if line[:1] not in (" ", "}", "") and line.endswith("{"):
            header = _HEADER.match(line)
            if header:
                name = header[2] or header[4]
                current = bodies.setdefault(name, [])
                entry = name if header[1] or header[3] else entry
        elif line.startswith("  "):
            current.append(line)
    return bodies, entry


def run_counts(bodies: dict[str, list[str]], entry: str) -> dict[str, float]:
    """How often each computation runs in one run of the program; a branch out of n counts 1/n, an unknown loop once."""
    return _counts(bodies, entry)[0]


def _counts(bodies: dict[str, list[str]], entry: str) -> tuple[dict[str, float], dict[str, float]]:
    """(run counts, the same with the loop around a computation counted once)."""
    runs: dict[str, float] = defaultdict(float)
    entered: dict[str, float] = defaultdict(float)

    def visit(name: str, count: float, times: float) -> None:
        entered[name] += count
        runs[name] += count * times
        lines = bodies.get(name, [])
        for line in lines:
            for callee, around in called(line, lines, bodies):
                visit(callee, count * times, around)

    visit(entry, 1.0, 1.0)
    return dict(runs), dict(entered)


def called(line: str, around: list[str], bodies: dict[str, list[str]]) -> Iterator[tuple[str, float]]:
    """Computations that one of the instructions `around` runs, and how often. An `async-done` names the computation of
    its `async-start` again."""
    if " = " not in line or " async-done(" in line or " async-update(" in line:
        return
    times = 1.0
    if " while(" in line:
        times = float(trip_count(line, around, bodies))
    for name in _CALLED.findall(line):
        yield name, times
    branches = _BRANCHES.search(line)
    if branches:
        names = [n.strip().lstrip("%") for n in branches[1].split(",")] if branches[1] else [branches[2], branches[3]]
        for name in names:
            yield name, 1.0 / len(names)


def parse_line(line: str) -> tuple[str, str, str] | None:
    """Result type, opcode and the rest of `  %name = type opcode(operands), attributes`."""
    _, sign, right = line.partition(" = ")
    if not sign:
        return None
    end = closing(right) if right.startswith("(") else right.find(" ")
    opcode, bracket, rest = right[end + 1 :].partition("(")
    return (right[:end], opcode.strip(), rest) if bracket else None


def closing(text: str) -> int:
    """The index after the bracket that closes the one `text` starts with."""
    depth = 0
    for at, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return at + 1
    return len(text)


def array_bytes(kind: str) -> tuple[int, ...]:
    """Bytes of each array in a type: `f32[8,16]{1,0}`, or a tuple."""
    sizes = []
    for dtype, dims in _ARRAY.findall(re.sub(r"\{[^}]*\}", "", kind)):
        elements = prod(int(d) for d in dims.split(",") if d)
        sizes.append((elements * BITS.get(dtype, 32) + 7) // 8)
    return tuple(sizes)


def element_bits(kind: str) -> int:
    """Bits of one element of an array type, or of the first array of a tuple; 0 if there is none."""
    found = _ARRAY.search(kind)
    return BITS.get(found[1], 32) if found else 0


def cycles_of(line: str) -> float:
    """XLA:TPU's estimated cycles of the instruction on a line, 0 if it gives none: for some fusions it states the
    largest integer."""
    found = map(int, _CYCLES.findall(line))
    return float(sum(cycles for cycles in found if cycles < _NO_ESTIMATE))
