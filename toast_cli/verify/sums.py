"""Reads collectives off a module after partitioning, in which every reduction is still written as an all-reduce.

It applies two rewrites that XLA:TPU and XLA:GPU make later: an all-reduce of which each device slices another piece,
chosen by its partition id, is a reduce-scatter, and all-reduces over the same devices whose results are only added up
are one. In: HLO text and the mesh.
Out: one `CompiledCollective` per array communicated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from toast_cli.verify.collectives import KINDS, CompiledCollective, name_and_place, result_sizes
from toast_cli.verify.graphs import Graph, graphs
from toast_cli.verify.hlo_text import Node, places
from toast_cli.verify.replica_groups import UNKNOWN, are_axes, axes_of, groups_in, permuted_axes

# Ops that change the form of a sum but not its terms.
_VIEWS = frozenset({"reshape", "copy", "bitcast", "transpose"})
# Ops that may separate an all-reduce from the slice that a device keeps of it.
_PASSED = _VIEWS | {"convert"}


@dataclass(frozen=True)
class MeshShape:
    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def devices(self) -> int:
        return prod(self.sizes)

    def size_of(self, axes: tuple[str, ...]) -> int:
        return prod(self.sizes[self.names.index(axis)] for axis in axes if axis in self.names)


@dataclass(frozen=True)
class CompiledSumStep:
    """One operation on a partial sum: an all-reduce (over `axes`; `how`: `add` or `maximum`, and its type) or the slice
    each device keeps (`how` states which)."""

    name: str
    axes: tuple[str, ...]
    how: tuple[str, ...]

    def like(self, other: CompiledSumStep) -> bool:
        return (self.axes, self.how) == (other.axes, other.how) and are_axes(self.axes)


Chain = tuple[CompiledSumStep, ...]  # in order, the last operation last


def partitioned_collectives(
    text: str, axis_names: tuple[str, ...], axis_sizes: tuple[int, ...], through: Collection[str] = ()
) -> list[CompiledCollective]:
    """All collectives of a module right after partitioning, in the order of its text. through: see `places`."""
    mesh, frames = MeshShape(axis_names, axis_sizes), places(text, through)
    found: list[CompiledCollective] = []
    for graph in graphs(text):
        for kind, axes, size, node in [*reductions(graph, mesh), *others(graph, mesh)]:
            found.append(CompiledCollective(kind, axes, size, graph.runs, *name_and_place(node.rest, frames)))
    return found


def others(graph: Graph, mesh: MeshShape) -> Iterator[tuple[str, tuple[str, ...], int, Node]]:
    """Kind, axes and bytes of every collective except all-reduces."""
    for node in graph.nodes.values():
        kind = node.opcode.removeprefix("ragged-").removesuffix("-start")
        if kind not in KINDS or kind == "all-reduce":
            continue
        if kind == "collective-permute":
            axes = permuted_axes(node.rest, mesh.names, mesh.sizes)
        else:
            axes = group_axes(node, mesh)
        for size in result_sizes(kind, node):
            yield kind, axes, size, node


def reductions(graph: Graph, mesh: MeshShape) -> Iterator[tuple[str, tuple[str, ...], int, Node]]:
    """Kind, axes and bytes of every all-reduce after the rewrites; one over no axis moves nothing and is left out. It
    stays an all-reduce if some devices keep the same piece, or a piece of a piece."""
    chains, absorbed = chains_of(graph, mesh)
    for node in graph.nodes.values():
        if node.opcode != "all-reduce" or node.name in absorbed:
            continue
        axes, size = chains[node.name][-1].axes, sum(node.sizes)
        if not axes:
            continue
        if piece(graph, node, node.name, chains, mesh).issuperset(axes):
            yield "reduce-scatter", axes, size // mesh.size_of(axes), node
        else:
            yield "all-reduce", axes, size, node


def chains_of(graph: Graph, mesh: MeshShape) -> tuple[dict[str, Chain], set[str]]:
    """The last operations on each value that is a sum over devices, and the all-reduces that merge with those of
    another summand.

    If two values are added up and have no other users, equal last operations on both are done once, on their sum. This
    excludes operations before a conversion: XLA:TPU reduces two 16-bit products that are added up in 32 bits one by one
    (libtpu 0.0.42.1), and XLA:GPU their sum in 32 bits, which has as many bytes.
    """
    chains: dict[str, Chain] = {}
    absorbed: set[str] = set()
    for node in graph.nodes.values():
        before = [chains.get(operand, ()) if len(graph.users[operand]) == 1 else () for operand in node.operands]
        if node.opcode == "all-reduce":
            step = CompiledSumStep(
                node.name,
                group_axes(node, mesh),
                (graph.roots.get(node.called("to_apply"), ""), node.kind.partition("[")[0]),
            )
            if before[0] and (folded := further(step, before[0][-1], mesh)):
                absorbed.add(before[0][-1].name)
                chains[node.name] = (*before[0][:-1], folded)
            else:
                chains[node.name] = (*before[0], step)
        elif node.opcode == "dynamic-slice" and before[0]:
            chains[node.name] = (*before[0], CompiledSumStep(node.name, (), (node.kind, *node.operands[1:])))
        elif before and before[0] and (node.opcode in _VIEWS or is_one_by_one(graph, node)):
            chains[node.name] = before[0]
        elif node.opcode == "add" and len(before) == 2 and all(before):
            common = common_end(*before)
            if common:
                chains[node.name] = before[0][-common:]
                absorbed |= {step.name for step in before[1][-common:] if step.axes}
    return chains, absorbed


def further(step: CompiledSumStep, inner: CompiledSumStep, mesh: MeshShape) -> CompiledSumStep | None:
    """Merges reductions over one axis after the other (as the partitioner writes sums over two dimensions) into one
    over both; None if that is impossible."""
    if not inner.axes or step.how != inner.how or not (are_axes(step.axes) and are_axes(inner.axes)):
        return None
    return CompiledSumStep(step.name, tuple(name for name in mesh.names if name in step.axes + inner.axes), step.how)


def is_one_by_one(graph: Graph, node: Node) -> bool:
    """True for a reduction over dimensions of size 1."""
    operand = graph.nodes.get(node.operands[0])
    return node.opcode == "reduce" and len(node.operands) == 2 and operand is not None and operand.sizes == node.sizes


def common_end(one: Chain, other: Chain) -> int:
    """Number of equal last operations of two chains; only all-reduces by addition can be merged."""
    count = 0
    for a, b in zip(reversed(one), reversed(other), strict=False):
        if not a.like(b) or (a.axes and a.how[0] != "add"):
            break
        count += 1
    return count


def piece(graph: Graph, node: Node, source: str, chains: dict[str, Chain], mesh: MeshShape) -> set[str]:
    """The mesh axes along which devices keep different pieces of a sum; empty unless all its
    users read the same piece."""
    users = graph.users.get(node.name, [])
    if len(users) > 1:
        cuts = [cut_along(graph, node, user, mesh) for user in users]
        return cuts[0] if cuts.count(cuts[0]) == len(cuts) else set()
    for user in users:
        summed = user.opcode == "add" and any(step.name == source for step in chains.get(user.name, ()))
        if user.opcode in _PASSED or summed or is_one_by_one(graph, user):
            return piece(graph, user, source, chains, mesh)
        return cut_along(graph, node, user, mesh)
    return set()


def cut_along(graph: Graph, node: Node, user: Node, mesh: MeshShape) -> set[str]:
    """The mesh axes along which devices slice different pieces of `node`, if the user is such a slice; else empty. Also
    empty if some devices along them keep the same piece, or if several dimensions are sliced."""
    if user.opcode != "dynamic-slice" or user.operands[0] != node.name:
        return set()
    along: list[set[str]] = []  # of each sliced dimension
    for offset in user.operands[1:]:
        numbers = graph.device_numbers(offset, mesh.devices)
        if numbers is None:
            return set()
        grid = numbers[:, 0].reshape(mesh.sizes)
        if varying := {axis for k, axis in enumerate(mesh.names) if np.ptp(grid, axis=k).any()}:
            along.append(varying)
    if len(along) != 1:
        return set()
    return along[0] if sum(node.sizes) // sum(user.sizes) == mesh.size_of(tuple(along[0])) else set()


def group_axes(node: Node, mesh: MeshShape) -> tuple[str, ...]:
    groups = groups_in(node.rest, mesh.devices)
    return UNKNOWN if groups is None else axes_of(groups, mesh.names, mesh.sizes)
