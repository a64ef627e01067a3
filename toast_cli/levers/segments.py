"""Rematerialisation in a step whose layers are not in a loop.

In: a block that holds a forward and a backward pass. The forward pass is divided into segments, see
`toast_cli.levers.segment_cuts`. The values of a segment that the backward pass reads are recomputed from the kept
values in front of their first reader, behind an optimization barrier, as `jax.checkpoint` writes it. The barrier has a
gradient among its operands, so that no compiler computes the segment earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from toast_cli.levers.block_graph import BlockGraph, clone, is_remade, replace_operands
from toast_cli.levers.segment_cuts import Lifetimes, checkpoints
from toast_cli.program.ops import BARRIER
from toast_cli.request import Recompute
from toast_cli.xla import ir

Shape = tuple[int, ...]
_WORTH = 0.9  # upper bound on the fraction of the saved bytes left
_LARGE = 0.5  # a segment that saves a larger fraction is not recomputed
_FEW = 4
_WHILE = "stablehlo.while"
_EVERYWHERE = 2  # a value read by more segments is always kept


@dataclass(frozen=True)
class _Segment:
    """Operations [first, last) of the forward pass. needed: their results that the backward pass reads."""

    first: int
    last: int
    needed: list[Any]


def recompute_segments(block: Any, weights: set[Shape], policy: Recompute) -> list[Any]:
    """Recomputes residuals in the backward pass of a block; returns the location of the first operation of each
    segment.

    Args:
        weights: shapes of arrays that the forward pass neither makes nor saves, although a step passes such along.
    """
    graph = BlockGraph(block)
    turn = _turn(graph, weights)
    segments = _segments(graph, turn)
    held = _held(graph, segments, turn)
    found = []
    for segment in reversed([one for one in segments[:-1] if one.needed]):
        first = segment.first

        def cost(value: Any, first: int = first) -> int | None:
            if value in held or value not in graph.place:
                return 0
            return None if graph.place[value] >= first or is_remade(value) else graph.size(value)

        kept = graph.least_kept(segment.needed, cost, policy)
        if sum(map(graph.size, kept)) > _WORTH * sum(map(graph.size, segment.needed)):
            continue
        early = {value for value, at in graph.place.items() if at < first and not is_remade(value)}
        if _recompute(graph, segment, kept | held | early, turn):
            found.append(graph.operations[first].location)
    return found


def _held(graph: BlockGraph, segments: list[_Segment], turn: int) -> set[Any]:
    """Values that stay live until the backward pass in any case: results of the step, values that it reads and must not
    recompute, and values that many segments read."""
    needed = {value for segment in segments[:-1] for value in segment.needed}
    ends = np.array([segment.last for segment in segments])
    held = set[Any]()
    for value, readers in graph.readers.items():
        many = len(set(np.searchsorted(ends, [n for n in readers if n < turn], side="right").tolist())) > _EVERYWHERE
        if value not in needed and not is_remade(value) and (readers[-1] >= turn or many):
            held.add(value)
    return held


def _turn(graph: BlockGraph, weights: set[Shape]) -> int:
    """The first operation of the backward pass: where values with earlier and later readers take the most bytes."""
    change = np.zeros(len(graph.operations) + 1, dtype=np.int64)
    for value in graph.place:
        readers = [n for n in graph.readers.get(value, ()) if n < graph.end]
        shape = tuple(getattr(value.type, "shape", ()))
        if len(readers) > 1 and shape not in weights and not is_remade(value):
            change[readers[0] + 1] += graph.size(value)
            change[readers[-1] + 1] -= graph.size(value)
    return int(np.argmax(np.cumsum(change)))


def _segments(graph: BlockGraph, turn: int) -> list[_Segment]:
    """The segments of the forward pass; empty if recomputation would save little."""
    values, rows = [], []
    for value, made in graph.place.items():
        readers = graph.readers.get(value, ())
        if made < turn and readers and not is_remade(value):
            last = max((reader for reader in readers if reader < turn), default=-1)
            values.append(value)
            rows.append((made, last, turn <= readers[-1] < graph.end, graph.size(value)))
    if not rows:
        return []
    lives = Lifetimes(*(np.array(column) for column in zip(*rows, strict=True)))
    found = checkpoints(lives, turn)
    total, loops = int(lives.bytes[lives.saved].sum()), _layer_loops(graph, turn)
    if found.kept + found.largest > _WORTH * total:
        return []
    segments = []
    for first, end in pairwise((0, *found.cuts, turn)):
        inside = np.flatnonzero(lives.saved & (lives.made >= first) & (lives.made < end) & (lives.last < end))
        again = lives.bytes[inside].sum() <= _LARGE * total and loops.isdisjoint(range(first, end))
        segments.append(_Segment(first, end, [values[k] for k in inside] if again else []))
    return segments


def _layer_loops(graph: BlockGraph, turn: int) -> set[int]:
    """The loops that run a step's layers: few, and each read by another loop. `recompute` handles them."""
    loops = {n for n, operation in enumerate(graph.operations[:turn]) if operation.name == _WHILE}
    read = {
        graph.place.get(v) for n in range(turn, graph.end) if graph.operations[n].name == _WHILE for v in graph.reads[n]
    }
    return loops & read if len(loops & read) <= _FEW else set()


def _recompute(graph: BlockGraph, segment: _Segment, known: set[Any], turn: int) -> bool:
    """Recomputes a segment from known values, and makes the backward pass read the recomputed ones."""
    again = [value for value in segment.needed if value not in known]
    readers = sorted({reader for value in again for reader in graph.readers[value] if reader >= turn})
    makers = graph.makers(again, known)
    if not makers or not readers:
        return False
    made = {result for n in makers for result in graph.operations[n].results}
    inputs = list(dict.fromkeys(v for n in makers for v in graph.reads[n] if v not in made))
    gate = _gate(graph, readers, turn)
    inputs += [gate] if gate is not None and gate not in inputs else []
    front = graph.operations[readers[0]]
    at, types = ir.InsertionPoint(front), [value.type for value in inputs]
    barrier = ir.Operation.create(BARRIER, results=types, operands=inputs, loc=front.location, ip=at)
    twins = dict(zip(inputs, barrier.results, strict=True))
    later = {} if gate is None else {gate: twins[gate]}
    clone((graph.operations[n] for n in makers), twins, at)
    later |= {value: twins[value] for value in again}
    for number in {n for value in later for n in graph.readers[value] if n >= readers[0]}:
        replace_operands(graph.operations[number], later)
    return True


def _gate(graph: BlockGraph, readers: list[int], turn: int) -> Any | None:
    """The last backward value that is computed before the segment's first reader and that its readers need."""
    first = readers[0]
    read = [value for reader in readers for value in graph.reads[reader]]
    gradients = [value for value in read if turn <= graph.place.get(value, -1) < first and graph.size(value)]
    return max(gradients, key=lambda value: graph.place[value], default=None)
