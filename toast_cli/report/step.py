"""One step of a plan in program order: one device's kernels and collectives, one after another.

Nothing overlaps here, as in the predicted step time. A loop appears once, with the time of all its trips. Equal
collectives that the cost model counts together are distributed over the ops that they belong to.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toast_cli.base.units import printable
from toast_cli.frontend.places import around, common_start, folded, functions_of, scopes_of
from toast_cli.frontend.source import Source
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.timeline import ops_by_pattern, places_of
from toast_cli.report.model import LineFacts
from toast_cli.search.incumbent import SearchResult

NOWHERE = "no place in the source"
_LOWERED = re.compile(r"jit\((\w+)\)")
COMPUTE = 0
# Order within an op: collectives that it waits for, its kernel, collectives that complete its results.
_BEFORE, _KERNEL, _AFTER = 0, 1, 2

_MICROSECONDS = 1e6
_PROCESS = 1


@dataclass(frozen=True)
class Slice:
    """An interval from `start` for `seconds` on `lane`.

    Attributes:
        op: number of the program op. name: `dot_general`, `all-reduce over data`. runs: how often, loops counted.
        hides: a collective that no op waits for, so that a scheduler may overlap it with compute.
    """

    start: float
    seconds: float
    lane: int
    op: int
    name: str
    runs: float
    hides: bool = False


@dataclass(frozen=True)
class Step:
    """A step of one device, kernel after kernel.

    Attributes:
        lanes: "compute", then one for each set of mesh axes that collectives run over. slices: in order. elapsed:
            [ticks] seconds before each tick (see `liveness`).
    """

    lanes: tuple[str, ...]
    slices: tuple[Slice, ...]
    elapsed: NDArray[np.float64]

    @property
    def seconds(self) -> float:
        return self.slices[-1].start + self.slices[-1].seconds if self.slices else 0.0


def step_of(evaluator: Evaluator, result: SearchResult) -> Step:
    """One step of the plan found."""
    problem, lives = evaluator.problem, evaluator.items.lives
    names = problem.mesh.names
    uses = evaluator.collectives(result.plan)
    ops_of_pattern = ops_by_pattern(problem)
    over = sorted({use.axes for use in uses}, key=lambda axes: (len(axes), axes))
    lane_of = {axes: number for number, axes in enumerate(over, start=1)}
    # (tick, before or after, op, seconds, lane, name, runs, hides)
    events: list[tuple[int, int, int, float, int, str, float, bool]] = []
    for kernel in evaluator.kernels(result.plan):
        trips = [problem.program.ops[op].trips for op in kernel.ops]
        name = kernel.name.removeprefix("stablehlo.")
        for op, count in zip(kernel.ops, trips, strict=True):
            share = count / sum(trips)
            events.append((lives.times[op], _KERNEL, op, kernel.seconds * share, COMPUTE, name, count, False))
    for use in uses:
        name = f"{use.kind} over {', '.join(use.over(names))}"
        when = _BEFORE if use.reason in ("reshard", "neighbours") else _AFTER
        for place in places_of(problem, use, ops_of_pattern):
            runs, seconds = use.count * place.share, use.seconds * place.share
            lane = lane_of[use.axes]
            events.append((lives.times[place.op], when, place.op, seconds, lane, name, runs, not use.waited_for))
    events.sort(key=lambda event: event[:3])
    slices: list[Slice] = []
    now = 0.0
    begins = np.zeros(lives.end + 2)
    for tick, _, op, seconds, lane, name, runs, hides in events:
        slices.append(Slice(now, seconds, lane, op, name, runs, hides))
        now += seconds
        begins[tick + 1] = now
    lanes = ("compute", *(", ".join(names[axis] for axis in axes) for axes in over))
    return Step(lanes, tuple(slices), np.maximum.accumulate(begins))


class Modules:
    """Paths of the given ops of a program."""

    def __init__(self, source: Source, ops: Iterable[int]) -> None:
        numbers = sorted(set(ops))
        stacks = {op: source.name_stack(op) for op in numbers}
        scopes = {op: scopes_of(stack) for op, stack in stacks.items()}
        first = common_start(path for path in scopes.values() if path)
        self._scopes = {op: folded(path[first:]) for op, path in scopes.items()}
        self._paths = {op: scopes[op][first:] or _functions(source, op, stacks[op]) for op in numbers}

    def of(self, op: int) -> tuple[str, ...]:
        """The modules around an op, the outermost first."""
        return self._paths[op]

    def around(self, ops: Iterable[int]) -> str:
        """The innermost modules around these ops, see `around`; empty if the program names none."""
        return around(self._scopes[op] for op in ops)


def _functions(source: Source, op: int, stack: str) -> tuple[str, ...]:
    path = tuple(map(printable, functions_of(source.stack(op))))
    lowered = _LOWERED.match(stack)
    inside = path[path.index(lowered[1]) + 1 :] if lowered and lowered[1] in path else path
    return inside or path[-1:] or (NOWHERE,)


# Slices below this fraction of the step are not attributed to a line, and this many lines are listed.
_LEAST, _LINES = 1e-4, 20


def time_by_line(source: Source, step: Step, modules: Modules) -> list[LineFacts]:
    """The modules and lines that take longest, kernels and collectives together."""
    slices = [interval for interval in step.slices if interval.seconds > _LEAST * step.seconds]
    places = {interval.op: source.location(interval.op).partition(" (")[0] for interval in slices}
    seconds: dict[tuple[str, str], Counter[tuple[str, bool]]] = defaultdict(Counter)
    for interval in slices:
        row = "/".join(folded(modules.of(interval.op))), places[interval.op]
        seconds[row][interval.name, interval.lane == COMPUTE] += interval.seconds  # type: ignore[assignment]
    rows = sorted(seconds.items(), key=lambda row: -sum(row[1].values()))[:_LINES]
    return [
        LineFacts(
            module,
            place,
            sum(names.values()),
            sum(amount for (_, computed), amount in names.items() if not computed),
            names.most_common(1)[0][0][0],
            sum(names.values()) / step.seconds,
        )
        for (module, place), names in rows
    ]


@dataclass
class _Slice:
    """One level of the stack: `seconds` of all below it."""

    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    below: dict[str, _Slice] = field(default_factory=dict)

    def add(self, path: list[str], seconds: float, facts: dict[str, Any]) -> None:
        self.seconds += seconds
        if not path:
            for name, value in facts.items():
                self.facts[name] = self.facts.get(name, 0) + value
            return
        self.below.setdefault(path[0], _Slice()).add(path[1:], seconds, facts)


def trace(source: Source, evaluator: Evaluator, result: SearchResult) -> bytes:
    """The trace of one step of a plan, by lines of the source, the longest first; times in microseconds, as the format
    requires."""
    names = evaluator.problem.mesh.names
    compute, communication = _Slice(), _Slice()
    for kernel in evaluator.kernels(result.plan):
        path = [*_stack(source, kernel.op), kernel.name.removeprefix("stablehlo.")]
        compute.add(path, kernel.seconds, {"runs": kernel.runs, "flops": kernel.flops, "bytes": kernel.bytes})
    for use in evaluator.collectives(result.plan):
        over = ", ".join(use.over(names))
        path = [*_stack(source, use.op), f"{use.kind} over {over}"]
        communication.add(path, use.seconds, {})
    about = {"name": f"{source.program.name}, one step by size, on each device"}
    events: list[dict[str, Any]] = [{"ph": "M", "pid": _PROCESS, "name": "process_name", "args": about}]
    for thread, (name, root) in enumerate((("compute", compute), ("communication", communication)), start=1):
        events.append({"ph": "M", "pid": _PROCESS, "tid": thread, "name": "thread_name", "args": {"name": name}})
        _write(root, 0.0, thread, events)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")).encode()


def _stack(source: Source, op: int) -> list[str]:
    """The user's frames, the outermost first; without any, the op's location or a remark."""
    frames = [str(frame) for frame in reversed(source.stack(op)) if frame.is_users]
    return frames or [source.location(op) or NOWHERE]


def _write(slice: _Slice, start: float, thread: int, events: list[dict[str, Any]]) -> None:
    for name, child in sorted(slice.below.items(), key=lambda item: (-item[1].seconds, item[0])):
        event = {"ph": "X", "pid": _PROCESS, "tid": thread, "name": name, "ts": start}
        events.append({**event, "dur": child.seconds * _MICROSECONDS, **({"args": child.facts} if child.facts else {})})
        _write(child, start, thread, events)
        start += child.seconds * _MICROSECONDS
