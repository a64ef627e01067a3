"""HLO text as a graph: instructions by name, with their operands and users.

Enters: the text of a module. Leaves: one `Graph` for each computation that runs. Also evaluates integers that depend
only on the partition id, from which a partitioned program computes the offset of a device's shard.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toast_cli.verify.hlo_text import array_bytes, closing, computations, parse_line, run_counts

_NAME = re.compile(r"^\s+(?:ROOT )?%?([^\s=]+) = ")
_OPERAND = re.compile(r"%([\w.\-]+)")
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


@dataclass(frozen=True, slots=True)
class Node:
    """One instruction. `sizes`: bytes of each array of its result. `operands`: names. `rest`: its line after the
    opening bracket."""

    name: str
    kind: str
    opcode: str
    operands: tuple[str, ...]
    rest: str

    @property
    def sizes(self) -> tuple[int, ...]:
        return array_bytes(self.kind)


@dataclass(frozen=True)
class Graph:
    """One computation: its instructions in order and by name, the users of each, and its run count.

    `roots`: the root opcode of every computation, which for a reduction's is its operation.
    """

    name: str
    nodes: dict[str, Node]
    users: dict[str, list[Node]]
    runs: float
    roots: dict[str, str]

    def device_numbers(self, name: str, devices: int) -> ElementNumbers | None:
        """The value of an integer instruction on each device, if it depends only on constants and the partition id."""
        return self._numbers(name, devices, {})

    def _numbers(self, name: str, devices: int, known: dict[str, ElementNumbers | None]) -> ElementNumbers | None:
        if name not in known:
            known[name] = None  # guards against cycles in malformed text
            node = self.nodes.get(name)
            known[name] = self._computed(node, devices, known) if node else None
        return known[name]

    def _computed(self, node: Node, devices: int, known: dict[str, ElementNumbers | None]) -> ElementNumbers | None:
        if node.opcode == "partition-id":
            return np.arange(devices, dtype=np.int64)[:, None]
        if node.opcode == "constant":
            table = _constant(node)
            return None if table is None else np.broadcast_to(table, (devices, table.size))
        read = [self._numbers(operand, devices, known) for operand in node.operands]
        if not read or any(numbers is None for numbers in read):
            return None
        numbers = [n for n in read if n is not None]
        if node.opcode in _UNCHANGED:
            return numbers[0]
        if node.opcode in _BINARY and (node.opcode not in ("divide", "remainder") or numbers[1].all()):
            return np.asarray(_BINARY[node.opcode](numbers[0], numbers[1]), dtype=np.int64)
        if node.opcode == "dynamic-slice" and len(numbers) == 2:
            at = np.clip(numbers[1][:, 0], 0, numbers[0].shape[1] - 1)
            return numbers[0][np.arange(devices), at][:, None]
        return None


def graphs(text: str) -> Iterator[Graph]:
    """Every computation that runs, as a graph."""
    bodies, entry = computations(text)
    runs = run_counts(bodies, entry)
    roots = {name: root_opcode(lines) for name, lines in bodies.items()}
    for name, lines in bodies.items():
        if name in runs:
            yield graph_of(name, lines, runs[name], roots)


def root_opcode(lines: list[str]) -> str:
    """Opcode of a computation's root."""
    found = (parse_line(line) for line in reversed(lines) if line.startswith("  ROOT "))
    return next((parsed[1] for parsed in found if parsed), "")


def graph_of(name: str, lines: list[str], runs: float, roots: dict[str, str]) -> Graph:
    """Parses one computation from its lines."""
    nodes = {node.name: node for node in map(node_of, lines) if node}
    users: dict[str, list[Node]] = defaultdict(list)
    for node in nodes.values():
        for operand in dict.fromkeys(node.operands):
            users[operand].append(node)
    return Graph(name, nodes, dict(users), runs, roots)


def node_of(line: str) -> Node | None:
    """The instruction in a line, if there is one."""
    name, parsed = _NAME.match(line), parse_line(line)
    if name is None or parsed is None:
        return None
    kind, opcode, rest = parsed
    inside = rest[: closing("(" + rest) - 2]
    return Node(name[1], kind, opcode, tuple(_OPERAND.findall(inside)), rest)


def _constant(node: Node) -> ElementNumbers | None:
    """Elements of an integer constant; None for others and for one whose elements the text omits."""
    inside = node.rest[: closing("(" + node.rest) - 2]
    if node.kind[:1] not in "su" or "..." in inside or len(inside) > _LONGEST_TABLE:
        return None
    return np.array([int(number) for number in _WHOLE.findall(inside)], dtype=np.int64)
