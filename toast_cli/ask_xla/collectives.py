"""Reads the collectives of a compiled or partitioned module: kind, mesh axes, bytes, count, one record per array
communicated.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from toast_cli.ask_xla.hlo_text import Graph, Node, array_bytes, graphs, place_of, places
from toast_cli.hardware.model import Groups, along, as_groups, axes_of_groups, crossed_axes, groups_name, is_groups_name
from toast_cli.price.collectives import KINDS

# ---------------------------------------------------------------- compiled modules
# Combined collectives count array by array. XLA:TPU hides reduce-scatters in fusions that call `%all-reduce-scatter…`.
# It repeats an asynchronous collective, with one channel, in each computation that overlaps with it (JAX gives all
# collectives of a `shard_map` one channel; their source locations tell them apart). It pads the operand of a
# reduce-scatter; padding is not counted here. And it turns a gather before a contraction, or a scatter after one, into
# a loop (`%…windowed_dot_general_body_ag…`, `…_rs…`) that permutes one shard around the devices while it multiplies;
# with permutes in both directions, one more permute sends a scatter's sum to its device, or the first shard of a
# gather. For four devices the loop of a scatter is unrolled. Between slices it sends and receives through the host
# (`recv`).

HIDDEN_REDUCE_SCATTER = "all-reduce-scatter"
BETWEEN_SLICES = "recv"  # opcode of an asynchronous collective between slices
OPCODES = frozenset((*KINDS, *(f"{kind}-start" for kind in KINDS), "ragged-all-to-all", "fusion", BETWEEN_SLICES))

_WINDOWED = re.compile(r"windowed_dot_general_body_(ag|rs)")
_WINDOWED_KINDS = {"ag": "all-gather", "rs": "reduce-scatter"}
_PRODUCT = "dot_general"
# An unrolled scatter sends zeros in both directions, which scatters of one shape share; then one sum in each direction,
# and one of the sums to its device.
_ZEROS = re.compile(r"\(?%broadcast[.\d]*\)")
_UNROLLED_PERMUTES = 3
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_PAD = re.compile(r" = (\w+\[[\d,]+\])\S* pad\([^)]*\), padding=([\dx_]+)")
CHANNEL = re.compile(r"channel_id=(\d+)")
_BETWEEN_SLICES_KIND = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_PAIRWISE = "one-to-one"  # between slices: a collective-permute


@dataclass(frozen=True)
class MeshShape:
    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def devices(self) -> int:
        return prod(self.sizes)

    def size_of(self, axes: tuple[str, ...]) -> int:
        return prod(self.sizes[self.names.index(axis)] for axis in axes if axis in self.names)


@dataclass(frozen=True, slots=True)
class CompiledCollective:
    """`bytes` of the result on each device, one run; `count` runs, loops counted; `name` of the op it comes from,
    `location` its `file.py:12`."""

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: float
    name: str = ""
    location: str = ""


def collectives_in(text: str, axis_names: tuple[str, ...], axis_sizes: tuple[int, ...]) -> list[CompiledCollective]:
    """All collectives of a compiled module, in the order of its text."""
    by_key: dict[tuple[object, ...], list[CompiledCollective]] = {}
    passed_around: set[tuple[object, ...]] = set()  # axes, shard bytes and op of windowed contractions
    zeros: dict[
        tuple[object, ...], CompiledCollective
    ] = {}  # what unrolled scatters begin with, unless it is something else
    repeated: Counter[tuple[object, ...]] = Counter()  # computation and identity of a collective in it
    mesh, frames = MeshShape(axis_names, axis_sizes), places(text)
    for graph, node in ((each, node) for each in graphs(text) for node in each.nodes.values()):
        sent = collective_of(node, graph.name, text, mesh)
        if sent is None:
            continue
        kind, axes, sizes = sent
        channel = CHANNEL.search(node.rest)
        sent_by = channel[1] if channel else node.name
        name, location = name_and_place(node.rest, frames)
        if kind == "collective-permute" and _ZEROS.match(node.rest):
            zeros.setdefault((sent_by, axes), CompiledCollective(kind, axes, sizes[0], graph.runs, name, location))
            continue
        windowed = _WINDOWED.search(graph.name) if kind == "collective-permute" else None
        if windowed:
            size = sizes[0]
            kind = _WINDOWED_KINDS[windowed[1]]
            result_bytes = size * mesh.size_of(axes) if kind == "all-gather" else size
            collective = CompiledCollective(kind, axes, result_bytes, graph.entered, name, location)
            by_key.setdefault((kind, graph.name), [collective])
            if name:
                passed_around.add((axes, size, name))
            continue
        alike = (kind, sent_by, node.sizes, axes)
        repeated[graph.name, alike] += 1
        key: tuple[object, ...] = (*alike, repeated[graph.name, alike])
        earlier = by_key[key][0] if key in by_key else None
        if earlier and name and earlier.name and (earlier.name, earlier.location) != (name, location):
            key = (*key, name, location)
        if key not in by_key or (name and not by_key[key][0].name):
            by_key[key] = [CompiledCollective(kind, axes, size, graph.runs, name, location) for size in sizes]
    collectives = [collective for alike in by_key.values() for collective in alike]
    collectives = [
        c for c in collectives if c.kind != "collective-permute" or (c.axes, c.bytes, c.name) not in passed_around
    ]
    return _with_unrolled(collectives, list(zeros.values()))


def _with_unrolled(collectives: list[CompiledCollective], zeros: list[CompiledCollective]) -> list[CompiledCollective]:
    """Replaces the permutes of each unrolled scatter, which have the axes and bytes of those in `zeros`, by the
    equivalent reduce-scatter."""
    begun = {(c.axes, c.bytes) for c in zeros}
    alike = Counter(c for c in collectives if c.kind == "collective-permute" and c.name.endswith(_PRODUCT))
    unrolled = {c for c, number in alike.items() if (c.axes, c.bytes) in begun and number % _UNROLLED_PERMUTES == 0}
    ended = {(c.axes, c.bytes) for c in unrolled}
    merged, passed = [], Counter[CompiledCollective]()
    for collective in collectives:
        passed[collective] += 1
        if collective not in unrolled:
            merged.append(collective)
        elif passed[collective] % _UNROLLED_PERMUTES == 0:
            merged.append(replace(collective, kind="reduce-scatter"))
    return merged + [c for c in zeros if (c.axes, c.bytes) not in ended]


def name_and_place(attributes: str, frames: dict[int, str]) -> tuple[str, str]:
    """The op that an instruction comes from, and its `file.py:12`; empty if its metadata does not state them."""
    name = _OP_NAME.search(attributes)
    return (name[1] if name else "", place_of(attributes, frames))


# Kind, axes by name, bytes of each array in the result on one device.
Sent = tuple[str, tuple[str, ...], tuple[int, ...]]


def collective_of(node: Node, computation: str, text: str, mesh: MeshShape) -> Sent | None:
    """The collective that an instruction of a computation is; None for others, see `kind_of`."""
    kind = kind_of(node, computation)
    if kind is None:
        return None
    axes, sizes = axes_over(node, text, mesh), result_sizes(kind, node)
    if node.opcode == "fusion":
        sizes = without_padding(sizes, callee(node, text), mesh.size_of(axes))
    return kind, axes, sizes


def kind_of(node: Node, computation: str) -> str | None:
    """The kind of a collective; None for other instructions and for the parts of a hidden reduce-scatter."""
    if node.opcode not in OPCODES or computation.startswith(HIDDEN_REDUCE_SCATTER):
        return None
    if node.opcode == "fusion":
        return "reduce-scatter" if f"calls=%{HIDDEN_REDUCE_SCATTER}" in node.rest else None
    if node.opcode == BETWEEN_SLICES:
        match = _BETWEEN_SLICES_KIND.search(node.rest)
        kind = match[1].lower().replace("_", "-") if match else None
        return "collective-permute" if kind == _PAIRWISE else kind
    return node.opcode.removeprefix("ragged-").removesuffix("-start")


def axes_over(node: Node, text: str, mesh: MeshShape) -> tuple[str, ...]:
    """The mesh axes it runs over."""
    if kind_of(node, "") == "collective-permute":
        return permuted_axes(node.rest, mesh.names, mesh.sizes)
    groups = groups_in(callee(node, text) if node.opcode == "fusion" else node.rest, mesh.devices)
    return UNKNOWN if groups is None else axes_of(groups, mesh.names, mesh.sizes)


def callee(node: Node, text: str) -> str:
    """The text of the computation that a fusion calls."""
    start = text.index(f"\n%{node.called('calls')} ")
    return text[start : text.index("\n}", start)]


def without_padding(sizes: tuple[int, ...], body: str, devices: int) -> tuple[int, ...]:
    """Bytes of the pieces of a hidden reduce-scatter, without the padding that makes them equal."""
    true: dict[int, int] = {}  # bytes of the whole, padded -> not padded
    for kind, padding in _PAD.findall(body):
        dims = [int(d) for d in kind.partition("[")[2].rstrip("]").split(",")]
        less = [sum(int(n) for n in dim.split("_")) for dim in padding.split("x")]
        (padded,) = array_bytes(kind)
        true[padded] = padded * prod(d - n for d, n in zip(dims, less, strict=True)) // prod(dims)
    return tuple(true.get(size * devices, size * devices) // devices for size in sizes)


def result_sizes(kind: str, node: Node) -> tuple[int, ...]:
    """Bytes of each array communicated; an asynchronous start lists its operands first, an all-to-all its pieces."""
    sizes = node.sizes if node.opcode != BETWEEN_SLICES else node.sizes[:1]
    if node.opcode.endswith("-start") and kind != "all-reduce":
        data = [size for size in sizes if size > 4] or list(sizes)
        sizes = tuple(data[len(data) // 2 :])
    return (sum(sizes),) if kind == "all-to-all" else sizes


# ---------------------------------------------------------------- replica groups
# Groups are written `{{0,1},{2,3}}`, `[2,4]<=[4,2]T(1,0)`, or `mesh['axis_0'=4,'axis_1'=2] {'axis_0'}` with an
# optional `device_ids=([4,2]T(1,0))`. A program for several TPU slices names the devices of one slice, and all slices
# do alike; transfers between slices have a `_xla_megascale_target`: `"{1,2}x{0:15}"` (slices, devices of each), or
# `{{100000,200000},…}`, where 200003 is device 3 of the second slice.

UNKNOWN = ("?",)

_LISTS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, ?device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{([^}]*)\}")
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_BRACED = re.compile(r"\{([\d,]+)\}")
_BETWEEN_SLICES = re.compile(r"_xla_megascale_target=(.*?),_xla_megascale")
_ALL_OF_SLICES = re.compile(r'"(.*)x\{0:(\d+)\}"')
_SLICE = 100_000  # the number of a device in its slice, plus this much for each slice, counted from 1


def groups_in(attributes: str, devices: int) -> Groups | None:
    """Groups of device numbers that communicate; an empty list means all devices. None if none can be read."""
    groups = _groups_written(attributes, devices)
    named = 1 + max((max(group) for group in groups or ()), default=0)
    if groups is None or devices % named:
        return groups
    return tuple(tuple(start + device for device in group) for start in range(0, devices, named) for group in groups)


def _groups_written(attributes: str, devices: int) -> Groups | None:
    between = _BETWEEN_SLICES.search(attributes)
    if between:
        return _between_slices(between[1], devices)
    listed = _LISTS.search(attributes)
    if listed:
        groups = tuple(tuple(numbers(group)) for group in _BRACED.findall(listed[1]))
        return groups or (tuple(range(devices)),)
    iota = _IOTA.search(attributes)
    if iota:
        return as_groups(device_order(iota[2], iota[3]).reshape(numbers(iota[1])))
    mesh = _MESH.search(attributes)
    if mesh:
        axes = _MESH_AXIS.findall(mesh[1])
        sizes = [int(size) for _, size in axes]
        order = device_order(mesh[2], mesh[3]) if mesh[2] else np.arange(prod(sizes))
        chosen = [k for k, (name, _) in enumerate(axes) if f"'{name}'" in mesh[4]]
        return along(order.reshape(sizes), chosen)
    return None


def _between_slices(target: str, devices: int) -> Groups:
    """The groups of a transfer between slices."""
    all_devices = _ALL_OF_SLICES.search(target)
    groups = [numbers(group) for group in _BRACED.findall(all_devices[1] if all_devices else target.replace("->", ","))]
    if all_devices:
        inside = 1 + int(all_devices[2])
        return tuple(tuple((s - 1) * inside + device for s in group) for group in groups for device in range(inside))
    inside = devices // max(number // _SLICE for group in groups for number in group)
    return tuple(tuple((n // _SLICE - 1) * inside + n % _SLICE for n in group) for group in groups)


def axes_of(groups: Groups, axis_names: tuple[str, ...], axis_sizes: tuple[int, ...]) -> tuple[str, ...]:
    """The fewest mesh axes that make these groups, in mesh order. If no set of axes does, the size of the groups, or
    `UNKNOWN` if their sizes differ."""
    chosen = axes_of_groups(groups, axis_sizes)
    if chosen is not None:
        return tuple(axis_names[axis] for axis in chosen)
    counts = {len(group) for group in groups}
    return (groups_name(counts.pop()),) if len(counts) == 1 else UNKNOWN


def are_axes(axes: tuple[str, ...]) -> bool:
    """True if these are mesh axes, and not a group size: groups of one size need not have the same devices."""
    return axes != UNKNOWN and not any(is_groups_name(name) for name in axes)


def permuted_axes(attributes: str, axis_names: tuple[str, ...], axis_sizes: tuple[int, ...]) -> tuple[str, ...]:
    """The mesh axes along which a collective-permute moves data."""
    between, match = _BETWEEN_SLICES.search(attributes), _PAIRS.search(attributes)
    pairs = [tuple(numbers(pair)) for pair in _BRACED.findall(match[1])] if match else []
    if between:
        pairs = list(_between_slices(between[1], prod(axis_sizes)))
    return tuple(axis_names[axis] for axis in crossed_axes(pairs, axis_sizes))


def device_order(dimensions: str, order: str | None) -> NDArray[np.int64]:
    """`[4,2]T(1,0)`: devices 0 to 7 counted through a 4 x 2 grid column by column."""
    shape = numbers(dimensions)
    grid = np.arange(prod(shape)).reshape(shape)
    return (grid.transpose(numbers(order)) if order else grid).reshape(-1)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


# ---------------------------------------------------------------- partitioned modules
# Reads collectives off a module after partitioning, in which every reduction is still written as an all-reduce.
#
# It applies two rewrites that XLA:TPU and XLA:GPU make later: an all-reduce of which each device slices another piece,
# chosen by its partition id, is a reduce-scatter, and all-reduces over the same devices whose results are only added
# up are one.

# Ops that change the form of a sum but not its terms.
_VIEWS = frozenset({"reshape", "copy", "bitcast", "transpose"})
# Ops that may separate an all-reduce from the slice that a device keeps of it.
_PASSED = _VIEWS | {"convert"}


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
    collectives: list[CompiledCollective] = []
    for graph in graphs(text):
        for kind, axes, size, node in [*reductions(graph, mesh), *others(graph, text, mesh)]:
            collectives.append(CompiledCollective(kind, axes, size, graph.runs, *name_and_place(node.rest, frames)))
    return collectives


def others(graph: Graph, text: str, mesh: MeshShape) -> Iterator[tuple[str, tuple[str, ...], int, Node]]:
    """Kind, axes and bytes of every collective except all-reduces."""
    for node in graph.nodes.values():
        kind = node.opcode.removeprefix("ragged-").removesuffix("-start")
        if kind in KINDS and kind != "all-reduce":
            axes = axes_over(node, text, mesh)
            yield from ((kind, axes, size, node) for size in result_sizes(kind, node))


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
        if axes_of_pieces(graph, node, node.name, chains, mesh).issuperset(axes):
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
                axes_over(node, "", mesh),
                (graph.roots.get(node.called("to_apply"), ""), node.kind.partition("[")[0]),
            )
            if before[0] and (folded := merged_step(step, before[0][-1], mesh)):
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


def merged_step(step: CompiledSumStep, inner: CompiledSumStep, mesh: MeshShape) -> CompiledSumStep | None:
    """Merges reductions over one axis after the other (as the partitioner writes sums over two dimensions) into one
    over both; None if that is impossible."""
    if not inner.axes or step.how != inner.how or not (are_axes(step.axes) and are_axes(inner.axes)):
        return None
    return CompiledSumStep(step.name, tuple(name for name in mesh.names if name in step.axes + inner.axes), step.how)


def is_one_by_one(graph: Graph, node: Node) -> bool:
    """True for a reduction over dimensions of size 1."""
    operand = graph.nodes.get(node.operands[0])
    return node.opcode == "reduce" and len(node.operands) == 2 and operand is not None and operand.sizes == node.sizes


def common_end(left: Chain, right: Chain) -> int:
    """Number of equal last operations of two chains; only all-reduces by addition can be merged."""
    count = 0
    for a, b in zip(reversed(left), reversed(right), strict=False):
        if not a.like(b) or (a.axes and a.how[0] != "add"):
            break
        count += 1
    return count


def axes_of_pieces(graph: Graph, node: Node, source: str, chains: dict[str, Chain], mesh: MeshShape) -> set[str]:
    """The mesh axes along which devices keep different pieces of a sum; empty unless all its
    users read the same piece."""
    users = graph.users.get(node.name, [])
    if len(users) > 1:
        cuts = [cut_along(graph, node, user, mesh) for user in users]
        return cuts[0] if cuts.count(cuts[0]) == len(cuts) else set()
    for user in users:
        summed = user.opcode == "add" and any(step.name == source for step in chains.get(user.name, ()))
        if user.opcode in _PASSED or summed or is_one_by_one(graph, user):
            return axes_of_pieces(graph, user, source, chains, mesh)
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
