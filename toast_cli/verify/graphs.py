"""Compiled HLO text as graphs: users, run counts, and integers that depend on the partition id alone.

In: the text of a module. Out: a `Graph` for each computation that runs. From integers of the partition id, a
partitioned program computes the offset of a device's shard.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from toast_cli.verify.hlo_text import Node, Nodes, computations, root_of
from toast_cli.verify.trips import trip_count

_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([^\s,})]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|true_computation=%?([^\s,]+), false_computation=%?([^\s,]+)")
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
    times = float(trip_count(node, around, bodies)) if node.opcode == "while" else 1.0
    for name in _CALLED.findall(node.rest):
        yield name, times
    branches = _BRANCHES.search(node.rest)
    if branches:
        names = [n.strip().lstrip("%") for n in branches[1].split(",")] if branches[1] else [branches[2], branches[3]]
        for name in names:
            yield name, 1.0 / len(names)


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
        found: dict[str, list[Node]] = defaultdict(list)
        for node in self.nodes.values():
            for operand in dict.fromkeys(node.operands):
                found[operand].append(node)
        return dict(found)

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
    """Every computation that runs, in the order of the text."""
    bodies, entry = computations(text)
    runs, entered = run_counts(bodies, entry)
    roots = {name: root.opcode for name, nodes in bodies.items() if (root := root_of(nodes))}
    for name, nodes in bodies.items():
        if name in runs:
            yield Graph(name, nodes, runs[name], entered[name], roots)


def _constant(node: Node) -> ElementNumbers | None:
    """Elements of an integer constant; None for others and for one whose elements the text omits."""
    inside = node.inside
    if node.kind[:1] not in "su" or "..." in inside or len(inside) > _LONGEST_TABLE:
        return None
    return np.array([int(number) for number in _WHOLE.findall(inside)], dtype=np.int64)
