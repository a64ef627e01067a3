"""Compiled HLO text: its computations and instructions, their places in the source, graphs with run counts, integers
that depend on the partition id alone.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from toast_cli.frontend.places import Frame
from toast_cli.frontend.trips import RUNS, numbers_of
from toast_cli.program.model import DTYPE_BITS

# ---------------------------------------------------------------- parsing

_HEADER = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{$|^(ENTRY )?%?([^\s(]+) \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([^\s=]+) = ")
_OPERAND = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_SCALAR = re.compile(r"[su]\d+\[\]")
_INTEGER = re.compile(r"-?\d+")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NO_ESTIMATE = 2**62

# Bits per element by HLO's type names, which differ from MLIR's: `s32`, `u8`, `c64`, `f8e4m3fn`.
BITS = {
    **{name.lower().replace("ui", "u"): bits for name, bits in DTYPE_BITS.items()},
    **{f"s{bits}": bits for bits in (2, 4, 8, 16, 32, 64)},
    "c64": 64,
    "c128": 128,
}

_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_ENTRY = re.compile(r"^(\d+) (.*)$")
_FIELD = re.compile(r"(\w+)=(\d+)")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_OWN = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')


@dataclass(frozen=True)
class Node:
    """One instruction.

    Attributes:
        kind: type of its result. rest: its line after the opening bracket. is_root: its value is the computation's.
    """

    name: str
    kind: str
    opcode: str
    rest: str
    is_root: bool = False

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each array of its result, on each device."""
        return array_bytes(self.kind)

    @property
    def inside(self) -> str:
        """What is between the brackets: operands, or the value of a constant."""
        return self.rest[: _closing("(" + self.rest) - 2]

    @property
    def integer(self) -> int | None:
        """The value of an integer constant."""
        constant = self.opcode == "constant" and _SCALAR.match(self.kind) and _INTEGER.fullmatch(self.inside)
        return int(self.inside) if constant else None

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of what it reads."""
        return tuple(_OPERAND.findall(self.inside))

    def called(self, role: str) -> str:
        """Name of the computation that it calls as its `role` (`body`, `calls`, `to_apply`); empty if it calls none."""
        match = re.search(rf"\b{role}=%?([^\s,}})]+)", self.rest)
        return match[1] if match else ""


Nodes = dict[str, Node]  # the instructions of one computation by name, in order


def computations(text: str) -> tuple[dict[str, Nodes], str]:
    """The instructions of each computation, and the name of the entry."""
    bodies: dict[str, Nodes] = {}
    entry = ""
    current: Nodes = {}
    for line in text.splitlines():
        if line[:1] not in (" ", "}", "") and line.endswith("{"):
            header = _HEADER.match(line)
            if header:
                name = header[2] or header[4]
                current = bodies.setdefault(name, {})
                entry = name if header[1] or header[3] else entry
        elif line.startswith("  ") and (node := _node_of(line)):
            current[node.name] = node
    return bodies, entry


def _node_of(line: str) -> Node | None:
    """The instruction of `  %name = type opcode(operands), attributes`; None for other lines."""
    start = _INSTRUCTION.match(line)
    if start is None:
        return None
    right = line[start.end() :]
    end = _closing(right) if right.startswith("(") else right.find(" ")
    opcode, bracket, rest = right[end + 1 :].partition("(")
    return Node(start[2], right[:end], opcode.strip(), rest, start[1] is not None) if bracket else None


def root_of(nodes: Nodes) -> Node | None:
    """The instruction whose value is the computation's."""
    return next((node for node in reversed(nodes.values()) if node.is_root), None)


def _closing(text: str) -> int:
    """The index after the bracket that closes the one `text` starts with."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index + 1
    return len(text)


def array_bytes(kind: str) -> tuple[int, ...]:
    """Bytes of each array in a type: `f32[8,16]{1,0}`, or a tuple."""
    sizes = []
    for dtype, dims in _ARRAY.findall(re.sub(r"\{[^}]*\}", "", kind)):
        elements = prod(int(d) for d in dims.split(",") if d)
        sizes.append((elements * BITS.get(dtype, 32) + 7) // 8)
    return tuple(sizes)


def cycles_of(rest: str) -> float:
    """XLA:TPU's estimated cycles of an instruction, 0 if it gives none: for some fusions it states the
    largest integer."""
    estimates = map(int, _CYCLES.findall(rest))
    return float(sum(cycles for cycles in estimates if cycles < _NO_ESTIMATE))


def places(text: str, through: Collection[str] = ()) -> dict[int, str]:
    """Frame number -> `file.py:12`, the innermost place outside installed packages; empty if the text has no tables.

    Args:
        through: places to skip in favour of their caller (a helper around `with_sharding_constraint`).
    """
    head = head_tables(text)
    tables = {name: {n: dict(_FIELD.findall(entry)) for n, entry in table.items()} for name, table in head.items()}
    files = {number: entry.strip('"') for number, entry in head["FileNames"].items()}
    frames = {}
    for number in tables["StackFrames"]:
        stack = list(_stack(number, tables, files))
        users = [frame.place for frame in stack if frame.is_users and frame.place not in through]
        if stack:
            frames[number] = next(iter(users), stack[0].place)
    return frames


def _stack(number: int, tables: dict[str, dict[int, dict[str, str]]], files: dict[int, str]) -> Iterator[Frame]:
    """A frame and its callers."""
    seen = set[int]()
    while number in tables["StackFrames"] and number not in seen:
        seen.add(number)
        entry = tables["StackFrames"][number]
        place = tables["FileLocations"].get(int(entry.get("file_location_id", 0)))
        if place is not None:
            yield Frame("", files.get(int(place.get("file_name_id", 0)), "?"), int(place.get("line", 0)))
        number = int(entry.get("parent_frame_id", 0)) - 1  # one more than it is, so that 0 can be left out


def head_tables(text: str) -> dict[str, dict[int, str]]:
    """The numbered entries of each table before the first computation."""
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    current: dict[int, str] | None = None
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")):
            break
        if line in tables:
            current = tables[line]
        entry = _ENTRY.match(line)
        if entry and current is not None:
            current[int(entry[1])] = entry[2]
    return tables


def place_of(attributes: str, frames: dict[int, str]) -> str:
    """`file.py:12` of one instruction, or an empty string."""
    frame = _FRAME.search(attributes)
    if frame:
        return frames.get(int(frame[1]), "")
    own = _OWN.search(attributes)
    if own:
        return f"{own[1].rsplit('/', 1)[-1]}:{own[2]}" if own[2] else own[1].rsplit("/", 1)[-1]
    return ""


# ---------------------------------------------------------------- graphs
# From integers of the partition id alone, a partitioned program computes the offset of a device's shard.

_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([^\s,})]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|true_computation=%?([^\s,]+), false_computation=%?([^\s,]+)")
_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_STATED = re.compile(rf'{re.escape(RUNS)}="([^"]*)"')  # see `frontend.trips.state_trips`
_WHOLE = re.compile(r"-?\d+")
# A table indexed by partition id has as many entries as there are devices; longer ones are data.
_LONGEST_TABLE = 1 << 20
_BINARY = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.floor_divide,
    "remainder": np.remainder,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.bitwise_and,
    "shift-right-logical": np.right_shift,
}
_UNCHANGED = frozenset({"reshape", "convert", "copy", "bitcast", "bitcast-convert", "broadcast"})

ElementNumbers = NDArray[np.int64]  # [devices, elements]


def run_counts(bodies: dict[str, Nodes], entry: str) -> tuple[dict[str, float], dict[str, float]]:
    """(run counts, the same with the loop around a computation counted once)."""
    runs: dict[str, float] = defaultdict(float)
    entered: dict[str, float] = defaultdict(float)

    def visit(name: str, count: float, times: float) -> None:
        entered[name] += count
        runs[name] += count * times
        nodes = bodies.get(name, {})
        for node in nodes.values():
            for callee, around in called(node, nodes, bodies):
                visit(callee, count * times, around)

    visit(entry, 1.0, 1.0)
    return dict(runs), dict(entered)


def called(node: Node, around: Nodes, bodies: dict[str, Nodes]) -> Iterator[tuple[str, float]]:
    """Computations that one of the instructions `around` runs, and how often. An `async-done` names the computation of
    its `async-start` again."""
    if node.opcode in ("async-done", "async-update"):
        return
    stated = _STATED.search(node.rest)
    numbers = numbers_of(stated[1]) if stated else None
    times = trip_count(node, numbers, bodies) if node.opcode == "while" else 1.0
    for name in _CALLED.findall(node.rest):
        yield name, times
    branches = _BRANCHES.search(node.rest)
    if branches:
        names = [n.strip().lstrip("%") for n in branches[1].split(",")] if branches[1] else [branches[2], branches[3]]
        weights = numbers if numbers and len(numbers) == len(names) else [1.0] * len(names)
        selector = around.get(node.operands[0])
        if branches[2] or (selector is not None and selector.kind.startswith("pred")):
            weights = weights[::-1]  # the branch for true is the first
        for name, weight in zip(names, weights, strict=True):
            yield name, weight / sum(weights)


def trip_count(loop: Node, stated: list[float] | None, bodies: dict[str, Nodes]) -> float:
    """Trips of a `while`: as the compiler says, as the program stated before it was compiled (`state_trips`), or for
    loops that XLA itself wrote, the one constant of its condition."""
    if match := _KNOWN.search(loop.rest):
        return float(match[1])
    if stated:
        return stated[0]
    condition = bodies.get(loop.called("condition"), {})
    # Some constants are repeated to arrays, such as the size that uneven shards are masked with.
    repeated = {node.operands[-1] for node in condition.values() if node.opcode == "broadcast" and node.operands}
    constants = [
        node.integer
        for name, node in condition.items()
        if node.kind.startswith("s") and node.integer is not None and node.integer >= 0 and name not in repeated
    ]
    return float(constants[0]) if len(constants) == 1 else 1.0


@dataclass(frozen=True)
class Graph:
    """One computation.

    Attributes:
        runs: times per run of the program. entered: how often its enclosing loop starts, or it is called. roots: the
            root opcode of every computation, which for a reduction's is its operation.
    """

    name: str
    nodes: Nodes
    runs: float
    entered: float
    roots: dict[str, str]

    @cached_property
    def users(self) -> dict[str, list[Node]]:
        """The instructions that read each."""
        readers: dict[str, list[Node]] = defaultdict(list)
        for node in self.nodes.values():
            for operand in dict.fromkeys(node.operands):
                readers[operand].append(node)
        return dict(readers)

    def device_numbers(self, name: str, devices: int) -> ElementNumbers | None:
        """The value of an integer instruction on each device, if it depends only on constants and the partition id."""
        return self._numbers(name, devices, {})

    def _numbers(self, name: str, devices: int, cache: dict[str, ElementNumbers | None]) -> ElementNumbers | None:
        if name not in cache:
            cache[name] = None  # guards against cycles in malformed text
            node = self.nodes.get(name)
            cache[name] = self._computed(node, devices, cache) if node else None
        return cache[name]

    def _computed(self, node: Node, devices: int, cache: dict[str, ElementNumbers | None]) -> ElementNumbers | None:
        if node.opcode == "partition-id":
            return np.arange(devices, dtype=np.int64)[:, None]
        if node.opcode == "constant":
            table = _constant_elements(node)
            return None if table is None else np.broadcast_to(table, (devices, table.size))
        read = [self._numbers(operand, devices, cache) for operand in node.operands]
        if not read or any(numbers is None for numbers in read):
            return None
        numbers = [n for n in read if n is not None]
        if node.opcode in _UNCHANGED:
            return numbers[0]
        if node.opcode in _BINARY and (node.opcode not in ("divide", "remainder") or numbers[1].all()):
            return np.asarray(_BINARY[node.opcode](numbers[0], numbers[1]), dtype=np.int64)
        if node.opcode == "dynamic-slice" and len(numbers) == 2:
            index = np.clip(numbers[1][:, 0], 0, numbers[0].shape[1] - 1)
            return numbers[0][np.arange(devices), index][:, None]
        return None


def graphs(text: str) -> Iterator[Graph]:
    """Every computation that runs, in the order of the text."""
    bodies, entry = computations(text)
    runs, entered = run_counts(bodies, entry)
    roots = {name: root.opcode for name, nodes in bodies.items() if (root := root_of(nodes))}
    for name, nodes in bodies.items():
        if name in runs:
            yield Graph(name, nodes, runs[name], entered[name], roots)


def _constant_elements(node: Node) -> ElementNumbers | None:
    """Elements of an integer constant; None for others and for one whose elements the text omits."""
    inside = node.inside
    if node.kind[:1] not in "su" or "..." in inside or len(inside) > _LONGEST_TABLE:
        return None
    return np.array([int(number) for number in _WHOLE.findall(inside)], dtype=np.int64)
