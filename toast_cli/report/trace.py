"""A step's time as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Enters: source, evaluator and search result. Leaves: the bytes of a JSON file of two processes. In the first, a step
runs in the program's order (see `step`): compute in one thread, the collectives over each set of mesh axes in one more.
In the second, slices are nested by the call stack of the user's source and sorted by size, as in a flame graph: one
thread has the compute of a step, one its communication.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.frontend.source import Source
from toast_cli.report.step import COMPUTE, Step, step_of
from toast_cli.search.incumbent import SearchResult

_MICROSECONDS = 1e6
IN_ORDER, BY_SIZE = 1, 2  # processes


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
    """The trace of one step of a plan; times in microseconds, as the format requires."""
    names = evaluator.problem.mesh.names
    compute, communication = _Slice(), _Slice()
    for kernel in evaluator.kernels(result.plan):
        path = [*_stack(source, kernel.op), kernel.name.removeprefix("stablehlo.")]
        compute.add(path, kernel.seconds, {"runs": kernel.runs, "flops": kernel.flops, "bytes": kernel.bytes})
    for use in evaluator.collectives(result.plan):
        over = ", ".join(use.over(names))
        path = [*_stack(source, use.op), f"{use.kind} over {over}"]
        communication.add(path, use.seconds, {})
    events: list[dict[str, Any]] = []
    for process, name in ((IN_ORDER, "one step in order"), (BY_SIZE, "one step by size")):
        about = {"name": f"{source.program.name}, {name}, on each device"}
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": about})
    for thread, (name, root) in enumerate((("compute", compute), ("communication", communication)), start=1):
        events.append(_thread(BY_SIZE, thread, name))
        _write(root, 0.0, thread, events)
    _in_order(source, step_of(evaluator, result), events)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")).encode()


def _in_order(source: Source, step: Step, events: list[dict[str, Any]]) -> None:
    for lane, name in enumerate(step.lanes):
        events.append(_thread(IN_ORDER, lane + 1, name if lane == COMPUTE else f"collectives over {name}"))
    for one in step.slices:
        args = {"at": source.location(one.op), "runs": one.runs, **({"may hide": True} if one.hides else {})}
        start, length = one.start * _MICROSECONDS, one.seconds * _MICROSECONDS
        events.append(_slice(IN_ORDER, one.lane + 1, one.name, start, length) | {"args": args})


def _thread(process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": name}}


def _slice(process: int, thread: int, name: str, start: float, length: float) -> dict[str, Any]:
    return {"ph": "X", "pid": process, "tid": thread, "name": name, "ts": start, "dur": length}


def _stack(source: Source, op: int) -> list[str]:
    """The user's frames, the outermost first; without any, the op's location or a remark."""
    frames = [str(frame) for frame in reversed(source.stack(op)) if frame.is_users]
    return frames or [source.location(op) or "no place in the source"]


def _write(slice: _Slice, start: float, thread: int, events: list[dict[str, Any]]) -> None:
    for name, one in sorted(slice.below.items(), key=lambda item: (-item[1].seconds, item[0])):
        event = _slice(BY_SIZE, thread, name, start, one.seconds * _MICROSECONDS)
        events.append(event | ({"args": one.facts} if one.facts else {}))
        _write(one, start, thread, events)
        start += one.seconds * _MICROSECONDS
