"""Pipeline stages: what a pipeline over a mesh axis would cost, and whether it fits.

A stage holds an equal share of a program's stack of layers and runs the microbatches one after the other on the mesh
without the pipeline's axis. One plan, of the whole program in its loop over microbatches on that mesh, has all figures:
its kernels, collectives and arrays belong to the layers or to an end of the stack. They are those of one microbatch, if
they are in the loop, or occur once in a step (the optimizer).

Step of S stages and M microbatches (Huang et al., "GPipe", 2019, section 2; Narayanan et al., "Efficient Large-Scale
Language Model Training on GPU Clusters Using Megatron-LM", 2021, arXiv:2104.04473, section 2.2), where t is the time of
a microbatch on a stage, forward and backward, and each stage holds R parts of the stack: M t + (S - 1) t / R. With R
above 1, M is a multiple of S, and there are R times the transfers.

* **1F1B**: a stage starts the backward pass of a microbatch as soon as it can. Stage s of S (from 0) keeps the
  activations of S - s microbatches; with R parts (interleaved) of (2 (S - 1 - s) + (R - 1) S + 1) / R, as Megatron-LM
  warms up that many parts (Korthikanti et al., 2022, arXiv:2205.05198, has it for the first stage). A transfer runs
  beside the next microbatch, and only filling and draining the pipeline wait for the S R - 1 between its parts.
* **GPipe**, and **circular** with R above 1, are one SPMD program. Every stage keeps the activations of all M
  microbatches until the backward pass, and a transfer ends each tick.

Where stages differ, (S - 1) t is the sum over all stages but the slowest.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

import numpy as np
from numpy.typing import NDArray

from toast_cli.base.errors import UsageError
from toast_cli.hardware.model import Mesh
from toast_cli.hardware.topology import divisors
from toast_cli.plan.decisions import Plan
from toast_cli.plan.sharding import shards
from toast_cli.price.collectives import collective_seconds
from toast_cli.price.cost import Cost
from toast_cli.price.evaluator import Evaluator
from toast_cli.program.stack import FIRST, LAST, LAYERS, Stack

OPTION = "--pipeline"
ONE_F_ONE_B, GPIPE, CIRCULAR = "1F1B", "GPipe", "circular"
# Most stages that are tried where the user names no number.
MOST_STAGES = 16

Vector = NDArray[np.float64]  # seconds of compute, and those that communication adds to it; or [moments] bytes


@dataclass(frozen=True)
class StageRequest:
    """What the user asks for: a number of stages, or an axis whose size is that number; 0 and "" where it is open.
    written: a pipeline of the kind that toast writes, 1F1B with one part of the stack on each stage."""

    stages: int = 0
    axis: str = ""
    microbatches: int = 0
    written: bool = False


@dataclass(frozen=True)
class PricedPipeline:
    """One pipeline, and the cost of its slowest and of its largest stage.

    Attributes:
        axis: the one that it runs over. repeats: parts of the stack on each stage. strategy: in a stage, "" on one
        device. microbatch_seconds: of one on the slowest stage. idle_seconds: the bubble; `cost` counts it as exposed.
        spmd_seconds: the step of the best pipeline that is one SPMD program; None for none that fits.
    """

    stages: int
    microbatches: int
    schedule: str
    repeats: int
    axis: str
    strategy: str
    microbatch_seconds: float
    idle_seconds: float
    cost: Cost
    fits: bool
    spmd_seconds: float | None = None

    @property
    def label(self) -> str:
        """`4 stages over slice with 16 microbatches, 1F1B, fsdp inside`."""
        parts = f", {self.repeats} parts each" if self.repeats > 1 else ""
        schedule = f"{self.schedule}{parts}{f', {self.strategy} inside' if self.strategy else ''}"
        return f"{self.stages} stages over {self.axis} with {self.microbatches} microbatches, {schedule}"

    @property
    def row_label(self) -> str:
        return f"pipeline {self.stages}:{self.microbatches} over {self.axis}"

    @property
    def rank(self) -> tuple[bool, float]:
        """Smaller is better."""
        return not self.fits, self.cost.step_seconds


def parse_stages(text: str) -> StageRequest:
    """The request of `--pipeline`: STAGES or AXIS, and the number of microbatches after a colon."""
    matched = re.fullmatch(r"(?:(\d{1,6})|([A-Za-z_][\w-]*))(?::(\d{1,6}))?", text.strip())
    if matched is None or (matched[1] and int(matched[1]) < 2) or (matched[3] and int(matched[3]) < 2):
        hint = "give 2 stages or more, or a mesh axis, and 2 microbatches or more after a colon: 4, slice, 4:16"
        raise _error(f"cannot read {text!r}", hint)
    return StageRequest(int(matched[1] or 0), matched[2] or "", int(matched[3] or 0))


def check_request(wanted: StageRequest, meshes: Sequence[Mesh], needed: Mapping[str, str]) -> None:
    """Raises UsageError, at `--pipeline`, if no mesh has the requested axis or number of stages. See `check_needed`."""
    refused = []
    for mesh in meshes:
        try:
            check_needed(stage_places(mesh, wanted), mesh, needed)
        except UsageError as error:
            refused.append(error)
    if refused and len(refused) == len(meshes):
        raise refused[0]


def stage_places(mesh: Mesh, wanted: StageRequest) -> list[tuple[int, int]]:
    """(axis, stages) to price: the requested axis, else networks; another axis only if no network has so many parts."""
    numbered, shape = list(enumerate(mesh.axes)), ", ".join(f"{axis.name}={axis.size}" for axis in mesh.axes)
    if wanted.axis:
        named = [(number, axis.size) for number, axis in numbered if axis.name == wanted.axis and axis.size > 1]
        if not named:
            raise _error(f"no mesh axis {wanted.axis!r} to have stages on", f"this mesh has {shape}")
        return named
    networks = {number: prod(k.size for k in axis.links if k.kind == "network") for number, axis in numbered}
    if not wanted.stages:
        few = {number: [n for n in divisors(size) if 1 < n <= MOST_STAGES] for number, size in networks.items()}
        return [(number, stages) for number, sizes in few.items() for stages in {*sizes[:1], *sizes[-1:]}]
    fitting = [number for number, axis in numbered if axis.size % wanted.stages == 0]
    if not fitting:
        raise _error(f"no mesh axis has {wanted.stages} equal parts", f"this mesh has {shape}")
    over = [number for number in fitting if networks[number] % wanted.stages == 0]
    return [(number, wanted.stages) for number in over or fitting]


def check_needed(places: list[tuple[int, int]], mesh: Mesh, needed: Mapping[str, str]) -> list[tuple[int, int]]:
    """The places that leave a stage a part of needed mesh axes (name -> the option). Raises UsageError for none."""
    possible = [(axis, n) for axis, n in places if mesh.sizes[axis] > n or mesh.names[axis] not in needed]
    if places and not possible:
        name = mesh.names[places[0][0]]
        raise _error(f"the stages are over {name}, and so is {needed[name]}", "name another axis")
    return possible


def _error(what: str, hint: str) -> UsageError:
    return UsageError(what, where=OPTION, hint=hint)


def stage_mesh(mesh: Mesh, axis: int, stages: int) -> Mesh:
    """The mesh of one stage: an axis, whose size the number of stages divides, without its outermost links."""
    links, left = list(mesh.axes[axis].links), stages
    for place in reversed(range(len(links))):
        link = links[place]
        shared = gcd(link.size, left)
        kind = "line" if link.kind == "ring" and shared > 1 else link.kind
        links[place] = replace(link, kind=kind, size=link.size // shared)
        left //= shared
    axes = list(mesh.axes)
    rest = tuple(link for link in links if link.size > 1)
    axes[axis] = replace(axes[axis], size=axes[axis].size // stages, links=rest)
    return replace(mesh, axes=tuple(axes))


# ---------------------------------------------------------------- the price
# Seconds and bytes of a stage, from a plan of the whole program in microbatches on the stage's mesh.


def pipelines(
    evaluator: Evaluator, plan: Plan, stack: Stack, mesh: Mesh, place: tuple[int, int]
) -> Iterator[PricedPipeline]:
    """A pipeline at a place (axis, stages) in each schedule.

    Args:
        evaluator: of the program in its loop over microbatches, on the mesh of one stage. mesh: the whole one.
    """
    axis, stages = place
    number, costs = stack.microbatches, _StageCosts(evaluator, plan, stack)
    hop = collective_seconds(mesh, "collective-permute", costs.handed_bytes, (axis,))
    times = [costs.microbatch(end, stages) for end in (FIRST, LAST, *[""] * (stages - 2))]
    slowest, once = max(times, key=sum), costs.once(stages)
    busy = float(sum(slowest))
    for schedule, repeats in _schedules(stack.layers // stages, stages, number):
        idle = float(sum(map(sum, times)) - busy) / repeats
        waits = 2 * (number * repeats + stages - 1) * hop
        kept: tuple[float, float] = (number, number)
        if schedule == ONE_F_ONE_B:
            waits = 2 * (stages * repeats - 1) * hop + number * max(0.0, repeats * hop - busy)
            parts_ahead = (repeats - 1) * stages + 1
            kept = (2 * (stages - 1) + parts_ahead) / repeats, parts_ahead / repeats
            kept = (min(number, stages if repeats == 1 else kept[0]), min(number, kept[1]))
        compute, sent = (number * slowest + once).tolist()
        held = [costs.memory(end, stages, n) for end, n in zip((FIRST, LAST), kept, strict=True)]
        peak, arguments = map(max, zip(*held, strict=True))
        over_each = (sent + waits,) * len(mesh.axes)  # at most: not told apart by axis
        cost = Cost(compute, sent + waits, peak, arguments, over_each, exposed_seconds=sent + waits + idle)
        fits = peak <= mesh.limit_bytes
        yield PricedPipeline(stages, number, schedule, repeats, mesh.names[axis], "", busy, idle, cost, fits)


def _schedules(layers: int, stages: int, microbatches: int) -> Iterator[tuple[str, int]]:
    """(schedule, parts of the stack on each stage); layers: of one stage."""
    for repeats in divisors(layers) if microbatches % stages == 0 else [1]:
        yield ONE_F_ONE_B, repeats
        yield CIRCULAR if repeats > 1 else GPIPE, repeats


class _StageCosts:
    """Seconds and bytes of one plan, by where they are. handed_bytes: what a layer hands to the next one on a device,
    in one microbatch."""

    def __init__(self, evaluator: Evaluator, plan: Plan, stack: Stack) -> None:
        self._stack, self._program = stack, evaluator.problem.program
        cost, ops, problem = evaluator.exact_cost(plan), self._program.ops, evaluator.problem
        exposed = cost.communication_seconds if cost.exposed_seconds is None else cost.exposed_seconds
        part = exposed / cost.communication_seconds if cost.communication_seconds else 0.0
        # Place, and whether it recurs in each microbatch -> seconds in all of them.
        self._seconds: dict[tuple[str, bool], Vector] = defaultdict(lambda: np.zeros(2))
        for use in evaluator.kernels(plan):
            runs = sum(ops[number].trips for number in use.ops) or 1.0
            for number in use.ops:
                place = self._place(number, [*ops[number].operands, *ops[number].results])
                self._seconds[place, number in stack.repeated][0] += use.seconds * ops[number].trips / runs
        for sent in evaluator.collectives(plan):
            self._seconds[self._place(sent.op, [sent.value]), sent.op in stack.repeated][1] += part * sent.seconds
        self.handed_bytes = 0.0
        for value in stack.handed:
            split = problem.op_sharding(problem.op_pattern[self._program.producer[value]], plan).shardings[0]
            self.handed_bytes += self._program.values[value].bytes / shards(split, problem.mesh.sizes)
        self._alive: dict[tuple[str, ...], Vector] = defaultdict(lambda: np.zeros(len(evaluator.timeline.candidates)))
        self._alive.update({tuple(k.split()): held for k, held in evaluator.memory_by(plan, self._group).items()})

    def microbatch(self, end: str, stages: int) -> Vector:
        """Seconds of one microbatch on a stage; end: `FIRST`, `LAST`, or "" for a stage in between."""
        return (self._seconds[LAYERS, True] / stages + self._seconds[end, True]) / self._stack.microbatches

    def once(self, stages: int) -> Vector:
        """Seconds of what the slower end stage does once in a step."""
        return self._seconds[LAYERS, False] / stages + max((self._seconds[e, False] for e in (FIRST, LAST)), key=sum)

    def memory(self, end: str, stages: int, kept: float) -> tuple[float, float]:
        """(peak bytes, bytes of arguments) of an end stage that keeps the activations of so many microbatches."""
        alive = self._alive
        held, rest = alive["input",].copy(), alive["kept", LAYERS] * kept / stages
        for where, share in ((LAYERS, 1 / stages), (end, 1.0)):
            held += share * (alive["weight", where] + alive["state", where])
            rest += share * alive["gradient", where] + alive["work", where]
        return float(np.max(held + rest, initial=0.0)), float(np.max(held, initial=0.0))

    def _place(self, number: int, values: Sequence[int]) -> str:
        """Where an op is that reads or makes these arrays."""
        stack, shapes = self._stack, {self._program.values[v].shape for v in values}
        if number in stack.ops and (stack.scanned or number in stack.repeated):
            return LAYERS
        light = not self._program.ops[number].kind.heavy
        if number not in stack.repeated or (light and shapes & stack.weight_shapes):
            return stack.owner(shapes)
        return LAYERS if any(v in stack.kept for v in values) else stack.end_of(number)

    def _group(self, value: int, role: str) -> str:
        """The group of an array alive: kind and place."""
        stack, shape = self._stack, self._program.values[value].shape
        if role == "argument":
            kind = stack.kinds[value]
            return kind if kind == "input" else f"{kind} {stack.owner({shape})}"
        if role != "gathered" and shape in stack.weight_shapes:  # also copies of weights in another type
            return f"gradient {stack.owner({shape})}"
        if role != "gathered" and value in stack.kept:
            return f"kept {LAYERS}"
        maker = self._program.producer[value]
        return f"work {LAYERS if maker in stack.ops else stack.end_of(maker)}"
