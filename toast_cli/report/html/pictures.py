"""The data that only charts show: one step in order, and its memory by module."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toast_cli.base.units import printable
from toast_cli.frontend.places import folded
from toast_cli.frontend.source import Source
from toast_cli.price.evaluator import Evaluator
from toast_cli.report.step import Modules, Step, step_of
from toast_cli.report.words import ALIVE
from toast_cli.search.incumbent import SearchResult

_MOMENTS = 600  # of memory in a step; more could not be told apart on a screen
_BANDS = 8  # most modules with their own band in memory over the step
_SEEN = 0.01  # of the peak: smaller ones get no band
OTHERS = "others"


@dataclass(frozen=True)
class Memory:
    """Bytes alive on a device. moments: [moments] seconds into the step.

    by_role, by_module: name -> [moments]; either adds up to all that is alive.
    """

    moments: list[float]
    by_role: dict[str, list[float]]
    by_module: dict[str, list[float]]


@dataclass(frozen=True)
class Pictures:
    """modules, places: of the ops in the step."""

    step: Step
    modules: Modules
    places: dict[int, str]
    memory: Memory


def pictures(source: Source, evaluator: Evaluator, result: SearchResult) -> Pictures:
    """The data of a page's charts."""
    step = step_of(evaluator, result)
    producer = evaluator.problem.program.producer
    makers = {producer[value] for item in evaluator.items.arrays if item.costs for value in item.values}
    modules = Modules(source, makers | {interval.op for interval in step.slices})
    places = {op: source.location(op).partition(" (")[0] for op in {interval.op for interval in step.slices}}
    return Pictures(step, modules, places, _memory(evaluator, result, step, modules))


def _memory(evaluator: Evaluator, result: SearchResult, step: Step, modules: Modules) -> Memory:
    """Memory at up to `_MOMENTS` moments: of indistinguishable neighbouring ones, the one with the most live bytes."""
    problem = evaluator.problem
    arguments = {
        argument.value: problem.roles[role]
        for argument, role in zip(problem.program.arguments, problem.argument_role, strict=True)
    }

    def owner(value: int) -> tuple[str, ...]:
        """The path of the module that makes a value; for an argument, the role of its tree (`weights`)."""
        if value in arguments:
            return ("arguments", printable(arguments[value]))
        return folded(modules.of(problem.program.producer[value]))

    candidates = evaluator.timeline.candidates
    profiles = evaluator.memory_by(result.plan, lambda value, role: "\0".join((role, *owner(value))))
    if not profiles or not len(candidates):
        return Memory([], {}, {})
    total = np.sum(list(profiles.values()), axis=0)
    parts = np.array_split(np.arange(len(candidates)), min(_MOMENTS, len(candidates)))
    chosen = [int(part[total[part].argmax()]) for part in parts]
    profiles = {name: profile[chosen] for name, profile in profiles.items()}
    by_role: dict[str, NDArray[np.float64]] = defaultdict(lambda: np.zeros(len(chosen)))
    by_path: dict[tuple[str, ...], NDArray[np.float64]] = defaultdict(lambda: np.zeros(len(chosen)))
    for name, profile in profiles.items():
        role, *path = name.split("\0")
        by_role[ALIVE[role]] += profile
        by_path[tuple(path)] += profile
    roles = {name: by_role[name].tolist() for name in ALIVE.values() if name in by_role}
    return Memory(step.elapsed[candidates[chosen]].tolist(), roles, memory_bands(by_path))


def memory_bands(profiles: dict[tuple[str, ...], NDArray[np.float64]]) -> dict[str, list[float]]:
    """A band for each of the modules that hold most at the peak, and one for all others."""
    total = np.sum(list(profiles.values()), axis=0)
    peak = int(total.argmax())
    seen = [path for path, profile in profiles.items() if profile[peak] >= _SEEN * total[peak]]
    largest = sorted(seen, key=lambda path: -profiles[path][peak])[:_BANDS]
    nothing = np.zeros_like(next(iter(profiles.values())))
    bands = dict.fromkeys([*map("/".join, largest), OTHERS], nothing)
    for path, profile in profiles.items():
        name = "/".join(path) if path in largest else OTHERS
        bands[name] = bands[name] + profile
    return {name: profile.tolist() for name, profile in bands.items() if profile.any()}
