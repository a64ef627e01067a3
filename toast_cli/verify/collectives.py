"""Reads the collectives of a compiled module.

In: its HLO text and the mesh. Out: one record per array communicated: kind, mesh axes, bytes, count. Combined
collectives count array by array. XLA:TPU hides reduce-scatters in fusions that call `%all-reduce-scatter…`. It repeats
an asynchronous collective, with one channel, in each computation that overlaps with it (JAX gives all collectives of a
`shard_map` one channel; their source locations tell them apart). It pads the operand of a reduce-scatter; padding is
not counted here. And it turns a gather before a contraction, or a scatter after one, into a loop
(`%…windowed_dot_general_body_ag…`, `…_rs…`) that permutes one shard around the devices while it multiplies; with
permutes in both directions, one more permute sends a scatter's sum to its device, or the first shard of a gather. For
four devices the loop of a scatter is unrolled. Between slices it sends and receives through the host (`recv`).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from math import prod

from toast_cli.verify.graphs import graphs
from toast_cli.verify.hlo_text import Node, array_bytes, place_of, places
from toast_cli.verify.replica_groups import UNKNOWN, axes_of, groups_in, permuted_axes

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
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
_CHANNEL = re.compile(r"channel_id=(\d+)")
_BETWEEN_SLICES_KIND = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_PAIRWISE = "one-to-one"  # between slices: a collective-permute


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
    found: dict[tuple[object, ...], list[CompiledCollective]] = {}
    passed_around: set[tuple[object, ...]] = set()  # axes, shard bytes and op of windowed contractions
    zeros: dict[
        tuple[object, ...], CompiledCollective
    ] = {}  # what unrolled scatters begin with, unless it is something else
    repeated: Counter[tuple[object, ...]] = Counter()  # computation and identity of a collective in it
    devices, frames = prod(axis_sizes), places(text)
    for graph, node in ((each, node) for each in graphs(text) for node in each.nodes.values()):
        kind = kind_of(node, graph.name)
        if kind is None:
            continue
        axes = mesh_axes(node, text, axis_names, axis_sizes, devices)
        channel = _CHANNEL.search(node.rest)
        sent_by = channel[1] if channel else node.name
        name, location = name_and_place(node.rest, frames)
        sizes = result_sizes(kind, node)
        if kind == "collective-permute" and _ZEROS.match(node.rest):
            zeros.setdefault((sent_by, axes), CompiledCollective(kind, axes, sizes[0], graph.runs, name, location))
            continue
        windowed = _WINDOWED.search(graph.name) if kind == "collective-permute" else None
        if windowed:
            size = sizes[0]
            devices_around = prod(n for axis, n in zip(axis_names, axis_sizes, strict=True) if axis in axes)
            kind = _WINDOWED_KINDS[windowed[1]]
            whole = size * devices_around if kind == "all-gather" else size
            one = CompiledCollective(kind, axes, whole, graph.entered, name, location)
            found.setdefault((kind, graph.name), [one])
            if name:
                passed_around.add((axes, size, name))
            continue
        alike = (kind, sent_by, node.sizes, axes)
        repeated[graph.name, alike] += 1
        key: tuple[object, ...] = (*alike, repeated[graph.name, alike])
        known = found[key][0] if key in found else None
        if known and name and known.name and (known.name, known.location) != (name, location):
            key = (*key, name, location)
        if key not in found or (name and not found[key][0].name):
            if node.opcode == "fusion":
                devices_around = prod(n for axis, n in zip(axis_names, axis_sizes, strict=True) if axis in axes)
                sizes = without_padding(sizes, callee(node, text), devices_around)
            found[key] = [CompiledCollective(kind, axes, size, graph.runs, name, location) for size in sizes]
    collectives = [one for alike in found.values() for one in alike]
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
    kept, passed = [], Counter[CompiledCollective]()
    for one in collectives:
        passed[one] += 1
        if one not in unrolled:
            kept.append(one)
        elif passed[one] % _UNROLLED_PERMUTES == 0:
            kept.append(replace(one, kind="reduce-scatter"))
    return kept + [c for c in zeros if (c.axes, c.bytes) not in ended]


def name_and_place(attributes: str, frames: dict[int, str]) -> tuple[str, str]:
    """The op that an instruction comes from, and its `file.py:12`; empty if its metadata does not state them."""
    name = _OP_NAME.search(attributes)
    return (name[1] if name else "", place_of(attributes, frames))


def kind_of(node: Node, computation: str) -> str | None:
    """The kind of a collective; None for other instructions and for the parts of a hidden reduce-scatter."""
    if node.opcode not in OPCODES or computation.startswith(HIDDEN_REDUCE_SCATTER):
        return None
    if node.opcode == "fusion":
        return "reduce-scatter" if f"calls=%{HIDDEN_REDUCE_SCATTER}" in node.rest else None
    if node.opcode == BETWEEN_SLICES:
        found = _BETWEEN_SLICES_KIND.search(node.rest)
        kind = found[1].lower().replace("_", "-") if found else None
        return "collective-permute" if kind == _PAIRWISE else kind
    return node.opcode.removeprefix("ragged-").removesuffix("-start")


def mesh_axes(
    node: Node, text: str, axis_names: tuple[str, ...], axis_sizes: tuple[int, ...], devices: int
) -> tuple[str, ...]:
    """The mesh axes it runs over."""
    if kind_of(node, "") == "collective-permute":
        return permuted_axes(node.rest, axis_names, axis_sizes)
    groups = groups_in(callee(node, text) if node.opcode == "fusion" else node.rest, devices)
    return UNKNOWN if groups is None else axes_of(groups, axis_names, axis_sizes)


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
