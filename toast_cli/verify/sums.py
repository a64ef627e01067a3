"""Reads collectives off a module as the partitioner leaves it, where every reduction is still written as an all-reduce.

Two rewritings that XLA:TPU and XLA:GPU make later are read into it: an all-reduce of which each device keeps only the piece its own number
says is a reduce-scatter, and all-reduces over the same devices whose results are only added up are one. Enters: HLO text and the mesh.
Leaves: one `Collective` per array communicated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from toast_cli.verify.collectives import KINDS, Collective, name_and_place, result_sizes
from toast_cli.verify.graph import Graph, Node, graphs
from toast_cli.verify.replica_groups import UNKNOWN, axes_of, groups_in, permuted_axes
from toast_cli.verify.stack_frames import places

_CALLEE = re.compile(r"to_apply=%?([^\s,]+)")
# What changes the form of a sum and nothing about what is added up.
_PASSED = frozenset({"convert", "reshape", "copy", "bitcast", "transpose"})


@dataclass(frozen=True)
class Mesh:
    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def devices(self) -> int:
        return prod(self.sizes)

    def size_of(self, axes: tuple[str, ...]) -> int:
        return prod(self.sizes[self.names.index(axis)] for axis in axes if axis in self.names)


@dataclass(frozen=True)
class Sum:
    """A value that is all-reduced: which all-reduce stands for it, over which axes, and by which computation."""

    source: Node
    axes: tuple[str, ...]
    combiner: str


def partitioned_collectives(text: str, axis_names: tuple[str, ...], axis_sizes: tuple[int, ...]) -> list[Collective]:
    """All collectives of a module right after partitioning, in the order of its text."""
    mesh, frames = Mesh(axis_names, axis_sizes), places(text)
    found: list[Collective] = []
    for graph in graphs(text):
        for kind, axes, size, node in [*reductions(graph, mesh), *others(graph, mesh)]:
            found.append(Collective(kind, axes, size, graph.runs, *name_and_place(node.rest, frames)))
    return found


def others(graph: Graph, mesh: Mesh) -> Iterator[tuple[str, tuple[str, ...], int, Node]]:
    """Kind, axes and bytes of every collective but all-reduces."""
    for node in graph.nodes.values():
        kind = node.opcode.removeprefix("ragged-").removesuffix("-start")
        if kind not in KINDS or kind == "all-reduce":
            continue
        if kind == "collective-permute":
            axes = permuted_axes(node.rest, mesh.names, mesh.sizes)
        else:
            axes = group_axes(node, mesh)
        for size in result_sizes(kind, node.opcode, node.sizes):
            yield kind, axes, size, node


def reductions(graph: Graph, mesh: Mesh) -> Iterator[tuple[str, tuple[str, ...], int, Node]]:
    """Kind, axes and bytes of what becomes of every all-reduce; one over no axis at all moves nothing."""
    sums = summed(graph, mesh)
    absorbed = {operand for name, total in sums.items() for operand in taken_in(graph.nodes[name], total, sums)}
    for name, total in sums.items():
        if name in absorbed or not total.axes:
            continue
        size = sum(total.source.sizes)
        kept = pieces(graph, graph.nodes[name], mesh)
        scattered = tuple(axis for axis in total.axes if axis in kept)
        rest = tuple(axis for axis in total.axes if axis not in kept)
        if scattered:
            size //= mesh.size_of(scattered)
            yield "reduce-scatter", scattered, size, total.source
        if rest:
            yield "all-reduce", rest, size, total.source


def summed(graph: Graph, mesh: Mesh) -> dict[str, Sum]:
    """Names of values that are all-reduced results, or sums of such with no other reader, and what stands for each."""
    sums: dict[str, Sum] = {}
    for node in graph.nodes.values():
        read = [sums[operand] for operand in node.operands if operand in sums and len(graph.users[operand]) == 1]
        if node.opcode == "all-reduce":
            total = Sum(node, group_axes(node, mesh), combiner(graph, node))
            sums[node.name] = further(total, read[0], mesh) if read else total
        elif node.opcode == "add" and len(read) == 2:
            if same(*read):
                sums[node.name] = read[0]
        elif read and (node.opcode in _PASSED or is_one_by_one(graph, node)):
            sums[node.name] = read[0]
    return sums


def taken_in(node: Node, total: Sum, sums: dict[str, Sum]) -> Iterator[str]:
    """Of what an instruction reads, the sums that its own stands for."""
    for operand in node.operands:
        if operand in sums and (node.opcode == "add" or sums[operand].source is total.source):
            yield operand


def further(total: Sum, inner: Sum, mesh: Mesh) -> Sum:
    """What is reduced over one axis after the other (as the partitioner writes sums over two dimensions) is reduced over both."""
    if total.combiner != inner.combiner or UNKNOWN in (total.axes, inner.axes):
        return total
    return Sum(inner.source, tuple(name for name in mesh.names if name in total.axes + inner.axes), total.combiner)


def is_one_by_one(graph: Graph, node: Node) -> bool:
    """Whether a reduction has nothing to add up: it goes over dimensions of size 1."""
    return node.opcode == "reduce" and len(node.operands) == 2 and graph.nodes[node.operands[0]].sizes == node.sizes


def same(one: Sum, other: Sum) -> bool:
    """Whether two sums can be taken in one go."""
    return one.axes == other.axes and one.axes != UNKNOWN and one.combiner == other.combiner == "add"


def combiner(graph: Graph, node: Node) -> str:
    """The operation an all-reduce combines with: "add", "maximum"."""
    callee = _CALLEE.search(node.rest)
    return graph.roots.get(callee[1], "") if callee else ""


def pieces(graph: Graph, node: Node, mesh: Mesh) -> frozenset[str]:
    """The mesh axes along which devices keep different pieces of a value; none unless all they read of it is one such piece."""
    users = graph.users.get(node.name, [])
    if len(users) != 1:
        return frozenset()
    if users[0].opcode in _PASSED:
        return pieces(graph, users[0], mesh)
    if users[0].opcode != "dynamic-slice" or users[0].operands[0] != node.name:
        return frozenset()
    varying: set[str] = set()
    for offset in users[0].operands[1:]:
        numbers = graph.device_numbers(offset, mesh.devices)
        if numbers is None:
            return frozenset()
        grid = numbers[:, 0].reshape(mesh.sizes)
        varying.update(axis for k, axis in enumerate(mesh.names) if np.ptp(grid, axis=k).any())
    return pieces(graph, users[0], mesh) | varying


def group_axes(node: Node, mesh: Mesh) -> tuple[str, ...]:
    groups = groups_in(node.rest, mesh.devices)
    return UNKNOWN if groups is None else axes_of(groups, mesh.names, mesh.sizes)
