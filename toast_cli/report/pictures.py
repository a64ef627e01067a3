"""What only pictures show of a run: memory over the program, kernels, how the search went.

Enters: source, evaluator and search result. Leaves: `Pictures`, plain numbers that `page` draws.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.frontend.source import Source
from toast_cli.search import SearchResult

_MOMENTS = 600  # of memory over the program; more could not be told apart on a screen
_PLACES = 16  # of the source with the most time
_KERNELS = 300


@dataclass(frozen=True)
class Place:
    """Time that one place of the source takes in a step, on each device, in seconds."""

    location: str
    compute: float
    communication: float


@dataclass(frozen=True)
class KernelPoint:
    """Kernels of one kind: FLOPs, bytes and seconds of all runs together, on each device."""

    location: str
    name: str
    runs: float
    flops: float
    bytes: float
    seconds: float


@dataclass(frozen=True)
class Pictures:
    """moments: [moments] op numbers. memory: role -> [moments] bytes alive. places: the slowest, the slowest first.

    elsewhere: all other places together. trail: (evaluation, step seconds, peak bytes, fits) of each best plan so far.
    matrix_flops, memory_rate: what one device can do, per second.
    """

    moments: list[int]
    memory: dict[str, list[float]]
    places: list[Place]
    elsewhere: Place
    kernels: list[KernelPoint]
    trail: list[tuple[int, float, float, bool]]
    matrix_flops: float
    memory_rate: float


def pictures(source: Source, evaluator: Evaluator, result: SearchResult) -> Pictures:
    """The numbers behind a page's pictures."""
    chip, limit = evaluator.problem.mesh.chip, evaluator.problem.mesh.limit_bytes
    moments, memory = _memory(evaluator, result)
    places = _places(source, evaluator, result)
    kernels = [
        KernelPoint(source.location(use.op), use.name, use.runs, use.flops, use.bytes, use.seconds)
        for use in evaluator.kernels(result.plan)[:_KERNELS]
        if use.bytes and use.flops
    ]
    rest = places[_PLACES:]
    return Pictures(
        moments,
        memory,
        places[:_PLACES],
        Place("elsewhere", sum(p.compute for p in rest), sum(p.communication for p in rest)),
        kernels,
        [(found, cost.step_seconds, cost.peak_bytes, cost.peak_bytes <= limit) for found, cost in result.trail],
        chip.matrix_flops.get("bf16") or max(chip.matrix_flops.values()),
        chip.memory_bytes_per_second,
    )


def _memory(evaluator: Evaluator, result: SearchResult) -> tuple[list[int], dict[str, list[float]]]:
    """Of neighbouring moments too close to be told apart, the one with the most alive."""
    roles = evaluator.memory_by_role(result.plan)
    candidates = evaluator.timeline.candidates
    if not roles or not len(candidates):
        return [], {}
    total = np.sum(list(roles.values()), axis=0)
    parts = np.array_split(np.arange(len(candidates)), min(_MOMENTS, len(candidates)))
    chosen = [int(part[total[part].argmax()]) for part in parts]
    return (candidates[chosen] // 2).tolist(), {role: profile[chosen].tolist() for role, profile in roles.items()}


def _places(source: Source, evaluator: Evaluator, result: SearchResult) -> list[Place]:
    compute: dict[str, float] = defaultdict(float)
    communication: dict[str, float] = defaultdict(float)
    for kernel in evaluator.kernels(result.plan):
        compute[_line(source.location(kernel.op), kernel.name)] += kernel.seconds
    for use in evaluator.collectives(result.plan):
        communication[_line(source.location(use.op), use.kind)] += use.seconds
    places = [Place(where, compute[where], communication[where]) for where in {**compute, **communication}]
    return sorted(places, key=lambda place: -(place.compute + place.communication))


def _line(location: str, name: str) -> str:
    """`model.py:75`, or what runs there where the program holds no locations."""
    return location.split(" (")[0] or name.removeprefix("stablehlo.")
