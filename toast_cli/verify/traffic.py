"""Compares the collectives that a plan predicts with the compiled ones.

In: both lists and the mesh. Out: a `TrafficComparison`: sums by kind and axes, the difference in bytes that each
device sends, and the single collectives that cause the difference, with the lines they come from.

An all-gather or reduce-scatter over several axes is compared as one after the other over single axes. A promised
all-reduce of which each device keeps a piece may be compiled as a reduce-scatter: it sends less, and counts as
promised.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from toast_cli.frontend.name_stack import op_path
from toast_cli.hardware.device_groups import group_size
from toast_cli.promised import CollectiveFacts
from toast_cli.verify.collectives import CompiledCollective

Key = tuple[str, tuple[str, ...]]  # kind, axes
Counts = dict[tuple[int, str], float]  # (bytes, line) -> runs
OnlyIn = Literal["extra", "missing"]
# Sums closer than this are equal: padding and combined scalars cause such differences.
_SAME = 0.01


@dataclass(frozen=True)
class Flow:
    """One collective: `bytes` of the result on each device, `count` runs a step. `place`: its source location,
    `model.py:12 (bwd mlp/dot)`."""

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: float
    place: str

    @property
    def line(self) -> str:
        """`model.py:12`."""
        return self.place.partition(" ")[0]


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over the same axes: bytes of results per device and how many, promised and compiled."""

    axes: tuple[str, ...]
    kind: str
    promised_bytes: float
    promised_count: float
    compiled_bytes: float
    compiled_count: float


@dataclass(frozen=True)
class TrafficDifference:
    """Equal collectives that are on one side only. `sent_bytes`: the bytes that each device sends in all of them."""

    side: OnlyIn
    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: float
    place: str
    sent_bytes: float


@dataclass(frozen=True)
class TrafficComparison:
    """`rows` and `differences`, the largest first. Bytes are what each device sends in one step."""

    rows: list[Traffic]
    differences: list[TrafficDifference]
    promised_bytes: float
    compiled_bytes: float
    extra_bytes: float
    missing_bytes: float

    @property
    def share(self) -> float:
        """Fraction of the larger of promised and compiled bytes that agrees in kind and axes."""
        whole = max(self.promised_bytes, self.compiled_bytes)
        return 1.0 - max(self.extra_bytes, self.missing_bytes) / whole if whole else 1.0


def compare_traffic(
    promised: Iterable[CollectiveFacts], found: Iterable[CompiledCollective], mesh: dict[str, int]
) -> TrafficComparison:
    """Compares promised and compiled collectives on a mesh (axis -> size)."""
    order = list(mesh)
    sides: tuple[dict[Key, list[Flow]], dict[Key, list[Flow]]] = (defaultdict(list), defaultdict(list))
    flows = (
        [Flow(p.kind, tuple(p.axes), p.bytes, p.count, p.location) for p in promised],
        [Flow(c.kind, c.axes, c.bytes, c.count, place_of(c)) for c in found],
    )
    for side, given in zip(sides, flows, strict=True):
        for flow in given:
            axes = tuple(sorted(flow.axes, key=lambda axis: order.index(axis) if axis in order else len(order)))
            for step in one_axis_steps(replace(flow, axes=axes), mesh):
                side[key_of(step)].append(step)
    scatter_as_compiled(*sides, mesh)
    rows, differences = [], []
    totals = dict.fromkeys(("promised", "compiled", "extra", "missing"), 0.0)
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        if not sides[0][key] and not sides[1][key]:
            continue
        one, other = sides[0][key], sides[1][key]
        sums = [(sum(f.bytes * f.count for f in flows), sum(f.count for f in flows)) for flows in (one, other)]
        rows.append(Traffic((one or other)[0].axes, key[0], *sums[0], *sums[1]))
        sent = [sum(sent_bytes(f, mesh) for f in flows) for flows in (one, other)]
        totals["promised"] += sent[0]
        totals["compiled"] += sent[1]
        totals["extra"] += max(0.0, sent[1] - sent[0])
        totals["missing"] += max(0.0, sent[0] - sent[1])
        if abs(sent[0] - sent[1]) > _SAME * max(sent):
            differences += unmatched(one, other, mesh)
    return TrafficComparison(
        sorted(rows, key=lambda row: -max(row.promised_bytes, row.compiled_bytes)),
        sorted(differences, key=lambda difference: -difference.sent_bytes),
        totals["promised"], totals["compiled"], totals["extra"], totals["missing"],
    )  # fmt: skip


def scatter_as_compiled(promised: dict[Key, list[Flow]], found: dict[Key, list[Flow]], mesh: dict[str, int]) -> None:
    """Turns promised all-reduces that were compiled as reduce-scatters into reduce-scatters."""
    runs: dict[tuple[Key, int], float] = defaultdict(float)  # compiled and not promised
    for side, sign in ((found, 1), (promised, -1)):
        for key, flows in side.items():
            for flow in flows:
                runs[key, flow.bytes] += sign * flow.count
    for key in [key for key in promised if key[0] == "all-reduce"]:
        for flow in [flow for flow in promised[key] if runs[key, flow.bytes] <= -flow.count]:
            scattered = replace(flow, kind="reduce-scatter", bytes=flow.bytes // group_size(flow.axes, mesh))
            steps = [(key_of(step), step) for step in one_axis_steps(scattered, mesh)]
            if all(runs[place, step.bytes] >= flow.count for place, step in steps):
                promised[key].remove(flow)
                runs[key, flow.bytes] += flow.count
                for place, step in steps:
                    promised[place].append(step)
                    runs[place, step.bytes] -= step.count


def key_of(flow: Flow) -> Key:
    """Collectives with equal keys, kind and axes, are compared together."""
    return flow.kind, flow.axes


def place_of(found: CompiledCollective) -> str:
    """The source location in a report's notation."""
    path = op_path(found.name)
    return f"{found.location} ({path})" if found.location and path else found.location or path


def one_axis_steps(flow: Flow, mesh: dict[str, int]) -> Iterator[Flow]:
    """An all-gather or reduce-scatter over several axes as one step per axis; other collectives as they are."""
    if flow.kind not in ("all-gather", "reduce-scatter") or len(flow.axes) < 2:
        yield flow
        return
    rest = prod(mesh.get(axis, 1) for axis in flow.axes)
    for axis in flow.axes:
        inner = rest // mesh.get(axis, 1)
        # In a reduce-scatter the first axis' step has the largest result; an all-gather ends with the first axis.
        size = (
            flow.bytes * inner
            if flow.kind == "reduce-scatter"
            else flow.bytes * rest // prod(mesh.get(a, 1) for a in flow.axes)
        )
        yield replace(flow, axes=(axis,), bytes=size)
        rest = inner


def sent_bytes(flow: Flow, mesh: dict[str, int]) -> float:
    """Bytes that each device sends in all runs of a collective over n devices, in rings.

    An all-reduce of b bytes sends 2b(n-1)/n, a reduce-scatter to b bytes b(n-1), an all-gather or all-to-all to b bytes
    b(n-1)/n.
    """
    n = group_size(flow.axes, mesh)
    factor = {
        "all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1.0, "all-gather": (n - 1) / n, "all-to-all": (n - 1) / n,
    }.get(flow.kind, 1.0)  # fmt: skip
    return flow.bytes * flow.count * factor


def unmatched(promised: list[Flow], found: list[Flow], mesh: dict[str, int]) -> list[TrafficDifference]:
    """The collectives of one kind and axes that remain when equal ones are removed from both lists: first those of one
    source line, then those of one size."""
    left: tuple[Counts, Counts] = (defaultdict(float), defaultdict(float))
    places: dict[tuple[int, str], str] = {}
    for side, flows in zip(left, (promised, found), strict=True):
        for flow in flows:
            side[flow.bytes, flow.line] += flow.count
            places.setdefault((flow.bytes, flow.line), flow.place)
    for key in list(left[0]):
        strike(left[0], left[1], key, key)
    for key in list(left[0]):
        for other in [k for k in left[1] if k[0] == key[0]]:
            strike(left[0], left[1], key, other)
    example = (promised or found)[0]
    sides: tuple[tuple[OnlyIn, Counts], ...] = (("missing", left[0]), ("extra", left[1]))
    return [
        TrafficDifference(side, example.kind, example.axes, size, count, places[size, line],
                   sent_bytes(replace(example, bytes=size, count=count), mesh))
        for side, counts in sides
        for (size, line), count in counts.items()
        if count > 1e-6
    ]  # fmt: skip


def strike(one: Counts, other: Counts, key: tuple[int, str], match: tuple[int, str]) -> None:
    """Removes the common count from both sides."""
    common = min(one[key], other[match])
    one[key] -= common
    other[match] -= common
