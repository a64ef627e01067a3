"""Pipeline stages: what a pipeline over a mesh axis would cost, and whether it fits.

A stage holds an equal share of a program's stack of layers and runs the microbatches one after the other on the mesh
without the pipeline's axis, with a known strategy there. One plan of the whole program on that mesh has all figures:
its kernels, collectives and arrays belong to the layers or to an end of the stack, and they grow with the microbatch,
recur in each microbatch (gathered weights) or occur once in a step (the optimizer, reduced gradients).

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
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import gcd, prod

import numpy as np
from numpy.typing import NDArray

from toast_cli.errors import UsageError
from toast_cli.hardware.model import Mesh
from toast_cli.hardware.topology import divisors
from toast_cli.plan.axis_assignment import AxisAssigners
from toast_cli.plan.decisions import Plan, Shard
from toast_cli.plan.problem import Problem, samples_of
from toast_cli.plan.sharding import shards
from toast_cli.price.collectives import collective_seconds
from toast_cli.price.cost import CollectiveUse, Cost
from toast_cli.price.evaluator import Evaluator
from toast_cli.program.model import Program, once
from toast_cli.program.ops import BARRIER, CARRY, DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE
from toast_cli.program.roles import INPUTS, WEIGHTS, argument_roles
from toast_cli.tactics.strategies import BASELINES, STRATEGIES, priced_strategies

OPTION = "--pipeline"
ONE_F_ONE_B, GPIPE, CIRCULAR = "1F1B", "GPipe", "circular"
# Most stages that are tried where the user names no number.
MOST_STAGES = 16
# Each microbatch's gradient is added to a sum: two arrays are read and one is written.
_ACCUMULATION_PASSES = 3

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


def best_pipeline(evaluator: Evaluator, request: StageRequest | None) -> PricedPipeline | None:
    """The pipeline with the shortest step of those that fit in memory.

    Args:
        request: the user's; None to try the networks of the mesh, and to return None where no pipeline is possible.

    Raises UsageError, at `--pipeline`, if the requested pipeline is impossible.
    """
    problem = evaluator.problem.mirrored[0] if evaluator.problem.mirrored else evaluator.problem
    wanted = request or StageRequest()
    try:
        places = _places(problem.mesh, wanted)
        if not places:
            return None
        stack = find_stack(problem.program)
        places = _possible(places, stack, samples_of(problem), wanted)
    except UsageError:
        if request is None:
            return None
        raise
    possible = [priced for place in places for priced in pipelines(evaluator, problem, stack, place, request)]
    if wanted.written:
        possible = [priced for priced in possible if (priced.schedule, priced.repeats) == (ONE_F_ONE_B, 1)]
    if not possible and request is not None:
        raise _error(f"no known strategy gives a stage {wanted.microbatches} microbatches", "try fewer")
    best = min(possible, key=lambda priced: priced.rank, default=None)
    spmd = [priced.cost.step_seconds for priced in possible if priced.schedule != ONE_F_ONE_B and priced.fits]
    return None if best is None else replace(best, spmd_seconds=min(spmd, default=None))


def check_request(wanted: StageRequest, meshes: Sequence[Mesh]) -> None:
    """Raises UsageError, at `--pipeline`, if no mesh has the requested axis or number of stages."""
    refused = []
    for mesh in meshes:
        try:
            _places(mesh, wanted)
        except UsageError as error:
            refused.append(error)
    if refused and len(refused) == len(meshes):
        raise refused[0]


def _places(mesh: Mesh, wanted: StageRequest) -> list[tuple[int, int]]:
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


def _possible(places: list[tuple[int, int]], stack: Stack, batch: int, wanted: StageRequest) -> list[tuple[int, int]]:
    """The places with stages of equally many layers. Raises UsageError if there are none, or no such microbatches."""
    if not batch:
        raise _error("no input has a batch to divide into microbatches", "leave it out")
    if wanted.microbatches and batch % wanted.microbatches:
        numbers = ", ".join(map(str, divisors(batch)[1:12]))
        raise _error(f"a batch of {batch} has no {wanted.microbatches} equal microbatches", f"give one of {numbers}")
    possible = [(axis, stages) for axis, stages in places if stack.layers % stages == 0]
    if places and not possible:
        numbers = ", ".join(map(str, divisors(stack.layers)[1:]))
        raise _error(f"{stack.layers} layers have no {places[0][1]} equal parts", f"give {numbers} stages")
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
# Seconds and bytes of a stage, from plans of the whole program on the stage's mesh.

LAYERS, FIRST, LAST = "layers", "first", "last"  # the stack, and what its two ends add to the stages there
BATCH, EACH, ONCE = "batch", "each", "once"  # grows with the microbatch; recurs in each; occurs once in a step


def pipelines(
    evaluator: Evaluator, problem: Problem, stack: Stack, place: tuple[int, int], request: StageRequest | None
) -> Iterator[PricedPipeline]:
    """Every pipeline at a place (axis, stages): strategies in a stage x microbatches (all, or the requested number) x
    schedules. The strategies are all known ones for a request, else the few that a report shows."""
    axis, stages = place
    whole, mesh, batch = problem.mesh, stage_mesh(problem.mesh, axis, stages), samples_of(problem)
    # A stage has 1/S of the layers, so that a plan of all of them may need S times the memory.
    large = replace(mesh, limit_bytes=stages * mesh.limit_bytes)
    problem = replace(problem, mesh=large, fixed=(), closed=frozenset(), axis_assigners=AxisAssigners())
    there = Evaluator(problem)
    names = BASELINES if request is None else STRATEGIES
    priced = {} if mesh.devices == 1 else priced_strategies(there, names)[0]
    named = {strategy.label: strategy.plan for strategy in priced.values()} or {"": ()}
    wanted, groups = request.microbatches if request else 0, problem.dimensions.groups
    for strategy, plan in named.items():
        over = {d.axis for d in plan if isinstance(d, Shard) and groups[d.group].role == "batch"}
        local = batch // prod(mesh.sizes[axis] for axis in over)
        breakdown = _Breakdown(there, plan, stack, written=bool(request and request.written))
        for number in [wanted] if wanted else divisors(local)[1:]:
            if local % number:
                continue
            hop = collective_seconds(whole, "collective-permute", breakdown.handed_bytes / number, (axis,))
            times = [breakdown.microbatch(end, stages, number) for end in (FIRST, LAST, *[""] * (stages - 2))]
            slowest, once = max(times, key=sum), breakdown.once(stages)
            for schedule, repeats in _schedules(stack.layers // stages, stages, number):
                busy, idle = float(sum(slowest)), float(sum(map(sum, times)) - sum(slowest)) / repeats
                waits = 2 * (number * repeats + stages - 1) * hop
                kept: tuple[float, float] = (number, number)
                if schedule == ONE_F_ONE_B:
                    waits = 2 * (stages * repeats - 1) * hop + number * max(0.0, repeats * hop - busy)
                    parts_ahead = (repeats - 1) * stages + 1
                    kept = (2 * (stages - 1) + parts_ahead) / repeats, parts_ahead / repeats
                    kept = (min(number, stages if repeats == 1 else kept[0]), min(number, kept[1]))
                compute, sent = (number * slowest + once).tolist()
                held = [breakdown.memory(end, stages, number, n) for end, n in zip((FIRST, LAST), kept, strict=True)]
                peak, arguments = map(max, zip(*held, strict=True))
                over_each = (sent + waits,) * len(mesh.axes)  # at most: not told apart by axis
                cost = Cost(compute, sent + waits, peak, arguments, over_each, exposed_seconds=sent + waits + idle)
                fits = peak <= mesh.limit_bytes
                yield PricedPipeline(
                    stages, number, schedule, repeats, whole.names[axis], strategy, busy, idle, cost, fits
                )


def _schedules(layers: int, stages: int, microbatches: int) -> Iterator[tuple[str, int]]:
    """(schedule, parts of the stack on each stage); layers: of one stage."""
    for repeats in divisors(layers) if microbatches % stages == 0 else [1]:
        yield ONE_F_ONE_B, repeats
        yield CIRCULAR if repeats > 1 else GPIPE, repeats


class _Breakdown:
    """Seconds and bytes of one plan, by where they are and what they grow with. handed_bytes: what a layer hands to the
    next one on a device, in all microbatches. written: gradients are reduced in each microbatch, as the programs of
    stages do that toast writes."""

    def __init__(self, evaluator: Evaluator, plan: Plan, stack: Stack, *, written: bool) -> None:
        self._written = written
        self._stack, self._problem, self._program = stack, evaluator.problem, evaluator.problem.program
        self._dependent = _dependent(self._program)
        cost, ops = evaluator.exact_cost(plan), self._program.ops
        exposed = cost.communication_seconds if cost.exposed_seconds is None else cost.exposed_seconds
        part = exposed / cost.communication_seconds if cost.communication_seconds else 0.0
        self._seconds: dict[tuple[str, str], Vector] = defaultdict(lambda: np.zeros(2))
        for use in evaluator.kernels(plan):
            runs = sum(ops[number].trips for number in use.ops) or 1.0
            for number in use.ops:
                place = self._place(number, [*ops[number].operands, *ops[number].results])
                self._seconds[place][0] += use.seconds * ops[number].trips / runs
        for sent in evaluator.collectives(plan):
            self._seconds[self._place_sent(sent)][1] += part * sent.seconds
        self.handed_bytes = 0.0
        for value in stack.handed:
            pattern = self._problem.op_pattern[self._program.producer[value]]
            split = self._problem.op_sharding(pattern, plan).shardings[0]
            local = self._program.values[value].bytes / shards(split, self._problem.mesh.sizes)
            self.handed_bytes += stack.microbatches * local
        self._alive: dict[tuple[str, ...], Vector] = defaultdict(lambda: np.zeros(len(evaluator.timeline.candidates)))
        self._alive.update({tuple(k.split()): held for k, held in evaluator.memory_by(plan, self._group).items()})

    def microbatch(self, end: str, stages: int, number: int) -> Vector:
        """Seconds of one of `number` microbatches on a stage; end: `FIRST`, `LAST`, or "" for a stage in between."""
        seconds = np.zeros(2)
        for where, share in ((LAYERS, 1 / stages), (end, 1.0)):
            weights = float(np.max(self._alive["weight", where], initial=0.0))
            added = _ACCUMULATION_PASSES * weights / self._problem.mesh.chip.memory_bytes_per_second
            recurring = self._seconds[where, EACH] / self._stack.microbatches + [added, 0.0]
            seconds += share * (self._seconds[where, BATCH] / number + recurring)
        return seconds

    def once(self, stages: int) -> Vector:
        """Seconds of what the slower end stage does once in a step."""
        return self._seconds[LAYERS, ONCE] / stages + max((self._seconds[e, ONCE] for e in (FIRST, LAST)), key=sum)

    def memory(self, end: str, stages: int, number: int, kept: float) -> tuple[float, float]:
        """(peak bytes, bytes of arguments) of an end stage that keeps the activations of `kept` of `number`
        microbatches."""
        alive = self._alive
        held, rest = alive["input",].copy(), np.zeros(len(alive["input",]))
        for where, share in ((LAYERS, 1 / stages), (end, 1.0)):
            held += share * (alive["weight", where] + alive["state", where])
            # The sums of gradients are there from the first microbatch on.
            rest += share * np.maximum(alive["gradient", where], alive["weight", where]) + alive["gathered", where]
            rest += alive["work", where] * self._stack.microbatches / number
        rest += alive["kept", LAYERS] * kept / stages * self._stack.microbatches / number
        return float(np.max(held + rest, initial=0.0)), float(np.max(held, initial=0.0))

    def _place(self, number: int, values: Sequence[int]) -> tuple[str, str]:
        """Where an op is that reads or makes these arrays, and what it grows with."""
        stack, op, shapes = self._stack, self._program.ops[number], {self._program.values[v].shape for v in values}
        of_examples = any(v in self._dependent or v in stack.kept for v in values)
        of_weights = not op.kind.heavy and (not of_examples or bool(shapes & stack.weight_shapes))
        if of_weights and not (stack.scanned and number in stack.ops):  # the optimizer, zeros for sums of gradients
            return stack.owner(shapes), ONCE
        return self._where(number, values), BATCH if of_examples else EACH

    def _where(self, number: int, values: Sequence[int]) -> str:
        stack = self._stack
        if number in stack.ops or any(v in stack.kept for v in values):
            return LAYERS
        return LAST if stack.ends[0] < number < stack.ends[1] else FIRST

    def _place_sent(self, use: CollectiveUse) -> tuple[str, str]:
        """An all-reduce of gradients can wait for the last microbatch; shards of their sums are made for each."""
        dimensions = self._problem.dimensions
        factors = {f for dims in dimensions.forms[use.op].results for dim in dims for f in dim}
        groups = [dimensions.groups[dimensions.class_group[dimensions.factor_classes[use.op][f]]] for f in factors]
        of_examples = any(group.role == "batch" for group in groups)
        is_weight = self._program.values[use.value].elements in self._stack.weight_sizes
        where = self._where(use.op, [use.value])
        if use.value not in self._dependent:
            return where, EACH
        if use.reason == "partial" and is_weight and not of_examples:
            return where, ONCE if use.kind == "all-reduce" and not self._written else EACH
        return self._place(use.op, [use.value])

    def _group(self, value: int, role: str) -> str:
        """The group of an array alive: kind and place."""
        stack, shape = self._stack, self._program.values[value].shape
        if role == "argument":
            kind = stack.kinds[value]
            return kind if kind == "input" else f"{kind} {stack.owner({shape})}"
        if role != "gathered" and shape in stack.weight_shapes:
            return f"gradient {stack.owner({shape})}"
        if value in stack.kept and role != "gathered":
            return f"kept {LAYERS}"
        kind = "work" if value in self._dependent else "gathered"
        return f"{kind} {self._where(self._program.producer[value], [value])}"


# ---------------------------------------------------------------- the stack
# Finds a program's stack of equal layers: scanned, or unrolled.


@dataclass(frozen=True)
class Stack:
    """A stack of equal layers with its backward pass.

    Attributes:
        ops: those of the layers. scanned: they are in loops, else there are equal ops for each layer.
        weights: the layers', each with the number of its layer; -1 if it holds all. shapes: of arrays of them, their
        gradients and moments.
        handed: values that a layer hands to the next one. kept: values that wait for the backward pass.
        microbatches: trips of the program's own loop around the stack, 1 without one.
    """

    program: Program
    layers: int
    ops: frozenset[int]
    scanned: bool
    weights: Mapping[int, int]
    shapes: frozenset[tuple[int, ...]]
    handed: tuple[int, ...]
    kept: frozenset[int]
    microbatches: float = 1.0

    def owner(self, shapes: set[tuple[int, ...]]) -> str:
        """The place of the weights that have one of these shapes."""
        return LAYERS if shapes & self.shapes else LAST if shapes & self.last_shapes else FIRST

    @cached_property
    def ends(self) -> tuple[int, int]:
        """The first and the last of the layers' products."""
        products = [n for n in self.ops if self.program.ops[n].kind.heavy]
        return min(products), max(products)

    @cached_property
    def kinds(self) -> dict[int, str]:
        """Value of an argument -> "weight", "state" or "input"."""
        return dict(_arguments(self.program))

    @cached_property
    def _others(self) -> list[int]:
        """Weights that are not the layers'."""
        return [v for v, kind in self.kinds.items() if kind == "weight" and v not in self.weights]

    @cached_property
    def weight_shapes(self) -> frozenset[tuple[int, ...]]:
        return self.shapes.union(self.program.values[v].shape for v in self._others)

    @cached_property
    def last_shapes(self) -> frozenset[tuple[int, ...]]:
        """Shapes of weights that are first read behind the first layers: of the head."""
        firsts = {v: min((n for _, n in _readers(self.program, v)), default=-1) for v in self._others}
        return frozenset(self.program.values[v].shape for v, reader in firsts.items() if reader > self.ends[0])

    @cached_property
    def weight_sizes(self) -> frozenset[int]:
        """Elements of weights, of one layer or of an end."""
        rows = self.layers if self.scanned else 1
        sizes = {v: self.program.values[v].elements for v in (*self.weights, *self._others)}
        return frozenset({*sizes.values(), *(sizes[v] // rows for v in self.weights)})


def find_stack(program: Program) -> Stack:
    """The stack with the most weights. Raises UsageError if there is none with a backward pass."""
    stacks = [stack for stack in (_scanned(program), _unrolled(program)) if stack is not None]
    if not stacks:
        hint = "stages need a training step that scans over layers, or whose weights' paths number the layers"
        raise _error("the program has no stack of equal layers with a backward pass", hint)
    return max(stacks, key=lambda stack: sum(program.values[v].bytes for v in stack.weights))


def _scanned(program: Program) -> Stack | None:
    """The stack of loops that read a row of stacked weights in each trip."""
    shapes_of: dict[int, set[tuple[int, ...]]] = {}  # weight -> shapes in which it is stacked
    loops_of: dict[int, set[int]] = defaultdict(set)
    for weight, kind in _arguments(program):
        for value, number in _readers(program, weight) if kind == "weight" else ():
            op, shape = program.ops[number], program.values[value].shape
            if op.name == DYNAMIC_SLICE and op.loop >= 0:
                row, trips = program.values[op.results[0]].shape, program.loops[op.loop].trips
                if trips > 1 and [n for n, m in zip(shape, row, strict=True) if n != m] == [trips]:
                    loops_of[weight].add(op.loop)
                    shapes_of.setdefault(weight, {program.values[weight].shape}).add(shape)
    weights_of: dict[int, set[int]] = defaultdict(set)  # the forward loop -> weights
    for weight, readers in loops_of.items():
        weights_of[min(readers, key=lambda loop: program.loops[loop].first)].add(weight)
    if not weights_of:
        return None
    weights = max(weights_of.values(), key=lambda stack: sum(program.values[v].bytes for v in stack))
    loops = sorted(
        {loop for weight in weights for loop in loops_of[weight]}, key=lambda loop: program.loops[loop].first
    )
    shapes = frozenset(shape for weight in weights for shape in shapes_of[weight])
    ops = frozenset(n for loop in loops for n in range(program.loops[loop].first, program.loops[loop].last))
    if len(loops) < 2 or not any(program.ops[n].kind.heavy for n in ops):  # no backward pass, or no products
        return None
    carries = [n for n in ops if program.ops[n].name == CARRY and program.ops[n].loop == loops[0]]
    written = {n: program.ops[program.producer[program.ops[n].operands[1]]].name for n in carries}
    values = {n: program.values[program.ops[n].results[0]] for n in carries}
    stacks = {values[n].shape for n in carries if written[n] == DYNAMIC_UPDATE_SLICE} - shapes
    handed = tuple(
        program.ops[n].results[0] for n in carries if written[n] != DYNAMIC_UPDATE_SLICE and len(values[n].shape) > 1
    )
    kept = frozenset(n for n, value in enumerate(program.values) if value.shape in stacks)
    outer, layers = _trips(program, program.loops[loops[0]].parent), int(program.loops[loops[0]].trips)
    return Stack(program, layers, ops, True, dict.fromkeys(weights, -1), shapes, handed, kept, outer)


def _unrolled(program: Program) -> Stack | None:
    """The stack of ops that occur for each layer, where paths of weights number the layers."""
    families: dict[tuple[str, object], dict[int, int]] = defaultdict(dict)  # path without a number, type -> weights
    paths = {argument.value: argument.path for argument in program.arguments}
    for weight, kind in _arguments(program):
        for matched in re.finditer(r"\d+", paths[weight]) if kind == "weight" else ():
            path = f"{paths[weight][: matched.start()]}*{paths[weight][matched.end() :]}"
            families[path, program.values[weight]][int(matched[0])] = weight
    sizes: Counter[int] = Counter()
    for family in families.values():
        sizes[len(family)] += sum(program.values[v].bytes for v in family.values())
    layers = max((n for n in sizes if n > 1), key=lambda n: sizes[n], default=0)
    rows = [family for family in families.values() if sorted(family) == list(range(layers))]
    if not rows:
        return None
    signatures = [(op.name, op.rule, op.detail, tuple(program.values[v] for v in op.results)) for op in program.ops]
    counts = Counter(signatures)
    ops = frozenset(n for n, signature in enumerate(signatures) if counts[signature] >= layers)
    reads = [[min((n for _, n in _readers(program, f[k])), default=-1) for f in rows] for k in range(layers)]
    in_order = all(max(numbers) < min(following) for numbers, following in pairwise(reads))
    if not in_order or not any(program.ops[n].kind.heavy for n in ops):
        return None
    starts = [min(numbers) for numbers in reads]
    dependent, begin = _dependent(program), starts[layers // 2]
    length = begin - starts[layers // 2 - 1]
    crossing = [
        v
        for n in range(begin - length, begin)
        for v in program.ops[n].results
        if v in dependent and any(begin <= user < begin + length for user, _ in program.users[v])
    ]
    handed = sorted(crossing, key=lambda v: program.values[v].bytes)[-1:]
    # What is read long after the ops of its layer waits for the backward pass.
    waiting = (v for n in ops for v in program.ops[n].results if any(u > n + 2 * length for u, _ in program.users[v]))
    weights = {v: layer for family in rows for layer, v in family.items()}
    shapes = frozenset(program.values[v].shape for v in weights)
    outer, kept = _trips(program, program.ops[begin].loop), dependent.intersection(waiting)
    return Stack(program, layers, ops, False, weights, shapes, tuple(handed), kept, outer)


def _trips(program: Program, loop: int) -> float:
    """How often what is in a loop, and in those around it, runs; 1 outside."""
    return program.loops[loop].trips * _trips(program, program.loops[loop].parent) if loop >= 0 else 1.0


def _arguments(program: Program) -> Iterator[tuple[int, str]]:
    """(value, "weight", "state" or "input") of each argument."""
    words = {WEIGHTS: "weight", INPUTS: "input"}
    names, roles = argument_roles(program)
    for argument, role in zip(program.arguments, roles, strict=True):
        yield argument.value, words.get(names[role], "state")


def _readers(program: Program, value: int) -> Iterator[tuple[int, int]]:
    """(value, op) for each op that reads an array, or its views and conversions, which are left out."""
    waiting, seen = [value], {value}
    while waiting:
        version = waiting.pop()
        for number, place in program.users[version]:
            op = program.ops[number]
            if op.kind.view_or_convert or op.name == BARRIER:
                result = op.results[min(place, len(op.results) - 1)]
                waiting += [] if result in seen else [result]
                seen.add(result)
            else:
                yield version, number


@once
def _dependent(program: Program) -> frozenset[int]:
    """The values that depend on an input."""
    waiting = [value for value, kind in _arguments(program) if kind == "input"]
    dependent = set(waiting)
    while waiting:
        for number, _ in program.users[waiting.pop()]:
            new = [v for v in program.ops[number].results if v not in dependent]
            dependent.update(new)
            waiting += new
    return frozenset(dependent)
