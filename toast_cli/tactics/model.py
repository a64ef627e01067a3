"""Tactics: named values that turn a look at a program into decisions over some mesh axes.

A tactic refers to roles of dimensions and arguments ("batch", "heads", "weights"), never to names in the program; it
makes decisions, or says why it does not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from math import prod

from toast_cli.base.errors import UsageError
from toast_cli.base.yamltree import nearest
from toast_cli.plan.axis_assignment import START, assigned_order, claim_of
from toast_cli.plan.decision_space import decision_space
from toast_cli.plan.decisions import NONE, Decision, Plan, Replicate, Shard
from toast_cli.plan.problem import Problem
from toast_cli.program.roles import ROLES, STATE, WEIGHTS

# ---------------------------------------------------------------- what a tactic is
# Role of a dimension -> its meaning; the analysis finds roles (see `dimensions.naming`).
DIMENSIONS = {
    "batch": "inputs have it and weights do not; its elements are computed independently",
    "seq": "the positions that attention weighs, or that tokens have besides the batch; the time of a convolution",
    "embed": "the model width: what blocks hand on to the next",
    "ff": "a hidden width between two products with weights",
    "heads": "what attention's scores have besides batch and sequence",
    "head_dim": "what attention's scores are summed over",
    "vocab": "the rows of a table that tokens look up, or logits over as many",
    "positions": "the rows of a table that are counted off: positions, or the distances between them",
    "labels": "what the loss picks one of",
    "experts": "weights have one of each, and a router chooses among them",
    "ensemble": "weights have one of each, and all are used",
    "edges": "what a graph's sums over neighbours run over",
    "nodes": "what edges look up and add to",
    "channels": "a convolution's features",
    "height": "the first of several dimensions a convolution slides along",
    "width": "the second dimension a convolution slides along",
    "layers": "what a loop over stacked weights steps through; stages of a pipeline",
}
# Of the dimensions of weights: those that tensor parallelism splits, and those that it leaves alone. To split the width
# of a head, attention's scores are summed over devices; to split layers, a loop sends each layer to all devices.
WIDTHS = ("heads", "ff", "vocab", "labels", "channels", "experts", "ensemble")
NOT_WIDTHS = ("embed", "head_dim", "layers", "positions", "seq")
# Words for several dimensions at once.
WORDS = {
    "weights": "all dimensions of the weights",
    "inner": "the widths of the weights but the model width (embed): heads, ff, vocab, labels, channels, experts, "
    "ensemble; in a program without any of these, all dimensions of the weights but embed",
    "data": "the batch; in a program without one, the dimension outside the weights that splits most of the arithmetic",
}


class DoesNotApply(Exception):  # noqa: N818 - often no error at all: most tactics suit some programs only
    """The reason why a tactic does not apply to a program on a mesh."""


@dataclass(frozen=True)
class Look:
    """A program as a tactic sees it, with the `axes` (mesh axis numbers) that the tactic decides over."""

    problem: Problem
    axes: tuple[int, ...]
    # Axes that other tactics of the same request split the batch over.
    busy: frozenset[int] = frozenset()

    def groups(self, name: str) -> list[int]:
        """Class groups with this role, word of `WORDS`, or name in the report; those with most weight bytes first."""
        problem = self.problem
        if name == "weights":
            return weight_groups(problem)
        if name == "inner":
            others = [g for g in weight_groups(problem) if g != self.stream]
            return [g for g in others if problem.dimensions.groups[g].role in WIDTHS] or [
                g for g in others if problem.dimensions.groups[g].role not in NOT_WIDTHS
            ]
        if name == "data":
            group = data_group(problem, self.axes)
            return self.groups("batch") or ([group] if group is not None else [])
        weights = problem.weight_bytes
        groups = list(enumerate(problem.dimensions.groups))
        found_groups = [k for k, g in groups if g.role == name] or [k for k, g in groups if g.name == name]
        if not found_groups and name not in DIMENSIONS:
            names = [*DIMENSIONS, *WORDS, *(g.name for _, g in groups)]
            raise UsageError(f"unknown dimension {name!r}", where="tactic", hint=nearest(name, dict.fromkeys(names)))
        return sorted(found_groups, key=lambda g: (-weights.get(g, 0), g))

    @property
    def stream(self) -> int:
        """The group of the residual stream: the one with role "embed", else the one most weights have; -1 without
        weights.
        """
        weights = weight_groups(self.problem)
        return next(
            (g for g in weights if self.problem.dimensions.groups[g].role == "embed"), weights[0] if weights else -1
        )

    def split(self, *names: str) -> list[Decision]:
        """Decisions that split each of these dimensions over the axes, in this order. Raises DoesNotApply if the
        program lacks one of them, or no axis divides it.
        """
        decisions: list[Decision] = []
        for name in names:
            groups = self.groups(name)
            if not groups:
                meaning = DIMENSIONS.get(name) or WORDS.get(name, "")
                raise DoesNotApply(f"no dimension of the program looks like {name} ({meaning})")
            sides = {g: (0,) * len(self.problem.dimensions.groups[g].resolutions) for g in groups}
            shards = [Shard(g, axis, sides[g]) for g in groups for axis in self.axes if self.divides(g, axis)]
            if not shards and self.axes:
                sizes = sorted({self.problem.dimensions.groups[g].size for g in groups})
                ways = " or ".join(str(self.problem.mesh.sizes[axis]) for axis in self.axes)
                over = " or ".join(self.problem.mesh.names[axis] for axis in self.axes)
                extents = ", ".join(f"{size:,}" for size in sizes)
                raise DoesNotApply(f"{name} ({extents}) cannot be split {ways} ways over {over}")
            decisions += shards
        return decisions

    def keep(self, *roles: str) -> list[Decision]:
        """Decisions that store these arguments ("weights", "state") replicated over the axes.

        Raises DoesNotApply where the program has none.
        """
        decisions: list[Decision] = []
        for role in roles:
            if role not in ROLES[:2]:
                raise UsageError(f"unknown arguments {role!r}", where="tactic", hint=nearest(role, ROLES[:2]))
            if self.problem.roles.index(role) not in self.problem.argument_role:
                words = {STATE: "optimizer state or cache", WEIGHTS: "weights"}
                raise DoesNotApply(f"no argument of the program looks like {words[role]}")
            decisions += [Replicate(self.problem.roles.index(role), axis) for axis in self.axes]
        return decisions

    def experts(self) -> list[Decision]:
        """Decisions that split experts over the axes. If the batch uses an axis too, experts precede it, except in ops
        whose tokens are still in sequence: an all-to-all then brings tokens to their experts.
        """
        splits = self.split("experts")
        elsewhere = decision_space(self.problem).met_elsewhere
        decisions: list[Decision] = []
        for decision in splits:
            if isinstance(decision, Shard) and decision.axis in self.busy:
                dims = self.problem.dimensions.groups
                still = sorted(elsewhere.get(decision.group, ()), key=lambda g: (dims[g].role != "seq", -dims[g].size))
                decision = decision._replace(unless=still[0] if still else NONE)
            decisions.append(decision)
        return decisions

    def use(self, *names: str) -> list[Decision]:
        """The decisions of other named tactics."""
        return [decision for name in names for decision in find_tactic(name).decide(self)]

    def divides(self, group: int, axis: int) -> bool:
        """Whether some dimension of the group can be split over the axis."""
        dimensions = self.problem.dimensions
        size = self.problem.mesh.sizes[axis]
        return any(dimensions.class_sizes[c] % size == 0 for c in dimensions.groups[group].classes)


Decide = Callable[[Look], Iterable[Decision]]


@dataclass(frozen=True)
class Tactic:
    """A named tactic, defined by its decisions.

    Attributes:
        about: one line, for lists. decide: the decisions over the axes of a look; may raise DoesNotApply.
        place: relative to other tactics of one request: -1 before them, 0 in the order given, 1 after them.
        companion: without an axis of its own, it takes that of the preceding tactic.
        source: file it was read from; empty for those that come with toast.
    """

    name: str
    about: str
    decide: Decide = field(compare=False)
    place: int = 0
    companion: bool = False
    source: str = ""


def effective(problem: Problem, plan: Plan) -> Plan:
    """The plan without decisions that have no effect, and without a second one for the same group and axis."""
    kept: Plan = ()
    seen: set[tuple[int, int]] = set()
    first = [decision for decision in assigned_order(plan) if not isinstance(decision, Shard)]
    states: dict[int, int] = {}  # pattern -> state of its axis assignment after the decisions kept

    def after(pattern: int, state: int, decision: Decision) -> int:
        claim = claim_of(problem.patterns[pattern], decision, problem.resolution_place)
        return state if claim is None else problem.assigners[pattern].after(state, claim)

    for decision in plan:
        if isinstance(decision, Shard):
            if decision[:2] in seen:
                continue
            seen.add(decision[:2])
            changes, reached = False, dict[int, int]()
            for pattern in problem.unlike_patterns[decision.group]:
                state = states[pattern] if pattern in states else reduce(partial(after, pattern), first, START)
                reached[pattern] = after(pattern, state, decision)
                choice = problem.assigners[pattern].choice
                changes = changes or choice(state) != choice(reached[pattern])
            if not changes:
                continue
            states |= reached
        kept = (*kept, decision)
    return kept


def weight_groups(problem: Problem) -> list[int]:
    """Groups that weights have, the most widespread (in bytes of weights) first."""
    return sorted(problem.weight_bytes, key=lambda g: (-problem.weight_bytes[g], g))


def data_group(problem: Problem, axes: Iterable[int]) -> int | None:
    """The group that no weight has along which most flops can be split over `axes`.

    Of groups within 1 % of each other, the first without a conflict: batch rather than sequence.
    """
    ways = prod(problem.mesh.sizes[a] for a in axes)
    work = problem.work_along(ways)
    for group in problem.weight_bytes:
        work.pop(group, None)
    most = max(work.values(), default=0.0)
    best = [g for g in sorted(work) if work[g] >= 0.99 * most > 0.0]
    return min(best, key=lambda g: len(problem.dimensions.groups[g].resolutions), default=None)


# ---------------------------------------------------------------- the built-in tactics
SEARCH = "search"


def _fsdp(look: Look) -> list[Decision]:
    return [*look.split("data"), *look.split("weights")]


def _hsdp(look: Look) -> list[Decision]:
    """Stores weights whole over the networks; on a mesh without any, over all axes but the last."""
    inside = [a for a in look.axes if all(link.kind != "network" for link in look.problem.mesh.axes[a].links)]
    within = tuple(inside) if 0 < len(inside) < len(look.axes) else look.axes[-1:]
    return [*look.split("data"), *replace(look, axes=within).split("weights")]


def _zero2(look: Look) -> list[Decision]:
    return [*_fsdp(look), *_kept(look)]


def _kept(look: Look) -> list[Decision]:
    """Stores weights replicated, in a program that also has state to split."""
    look.keep("state")
    return look.keep("weights")


_ALL = (
    Tactic("data-parallel", "the batch", lambda look: look.split("batch")),
    Tactic(
        "fsdp",
        "the batch; weights and optimizer state are sharded too (ZeRO-3)",
        _fsdp,
    ),
    Tactic("zero3", "the same as fsdp", _fsdp),
    Tactic(
        "hsdp",
        "the batch; weights and optimizer state are stored split inside a slice or host (else over the last axis) only",
        _hsdp,
    ),
    Tactic(
        "zero2",
        "the batch; optimizer state is sharded, weights are replicated; gradients are reduce-scattered",
        _zero2,
    ),
    Tactic("zero1", "within one step the same as zero2", _zero2),
    Tactic(
        "megatron",
        "widths of the weights but the model width (embed): heads, hidden widths, vocabulary",
        lambda look: look.split("inner"),
    ),
    Tactic(
        "sequence",
        "the sequence, where nothing else uses the axis: between the blocks that megatron splits",
        lambda look: look.split("seq"),
        place=1,
        companion=True,
    ),
    Tactic(
        "context", "the sequence, in attention too: devices exchange keys and values", lambda look: look.split("seq")
    ),
    Tactic(
        "expert",
        "experts; where the batch is split over the same axis, all-to-alls bring tokens to their experts",
        lambda look: look.experts(),
        place=-1,
        companion=True,
    ),
    Tactic(
        "edge",
        "the edges of a graph; what edges send to a node is summed over devices",
        lambda look: look.split("edges"),
    ),
    Tactic("vocabulary", "rows of embedding tables, and logits", lambda look: look.split("vocab"), companion=True),
    Tactic(
        "spatial",
        "the height of images; devices exchange the rows next to their own",
        lambda look: look.split("height"),
    ),
)
TACTICS = {tactic.name: tactic for tactic in _ALL}
# Common short name -> name.
ALIASES = {"dp": "data-parallel", "ddp": "data-parallel", "tp": "megatron", "ep": "expert", "cp": "context"}


def find_tactic(name: str, where: str = "tactic") -> Tactic:
    """The tactic of that name or alias. Raises UsageError that lists the known ones."""
    full_name = ALIASES.get(name, name)
    if full_name not in TACTICS:
        raise UsageError(f"unknown tactic {name!r}", where=where, hint=nearest(name, [*TACTICS, *ALIASES, SEARCH]))
    return TACTICS[full_name]


# ---------------------------------------------------------------- what each would do
# Surveys the effect of each tactic on a program on a mesh, axis by axis, or the reason why it has none.


@dataclass(frozen=True)
class Applies:
    """The effect of a tactic. axes: names of those it applies to. decides: what it splits or replicates there. reason:
    why it does not apply, if axes is empty.
    """

    name: str
    about: str
    axes: list[str]
    decides: list[str]
    reason: str


def survey(problem: Problem, tactics: Iterable[Tactic]) -> list[Applies]:
    return [_survey(problem, tactic) for tactic in tactics]


def _survey(problem: Problem, tactic: Tactic) -> Applies:
    axes: list[str] = []
    decides: dict[str, None] = {}
    reason = "the mesh has one device"
    for axis, size in enumerate(problem.mesh.sizes):
        if size == 1:
            continue
        try:
            plan = effective(problem, tuple(tactic.decide(Look(problem, (axis,)))))
        except DoesNotApply as why:
            reason = str(why)
            continue
        axes.append(problem.mesh.names[axis])
        for decision in plan:
            if isinstance(decision, Replicate):
                decides[f"{problem.roles[decision.role]} whole"] = None
            elif isinstance(decision, Shard):
                decides[problem.dimensions.groups[decision.group].name] = None
    return Applies(tactic.name, tactic.about, axes, list(decides), "" if axes else reason)
