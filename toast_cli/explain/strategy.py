"""Derives a plan's strategy over each mesh axis: the dimensions computed sharded, and the weights that are stored
sharded along others, so that they are gathered for their use. This determines the strategy's name: "FSDP 8 × tensor 2".

In: a `Problem` and a plan. Out: a `Strategy`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from toast_cli.dimensions.model import FactorKind
from toast_cli.plan.decisions import Plan
from toast_cli.plan.op_sharding import NO_ROLE, OpSharding
from toast_cli.plan.problem import Problem
from toast_cli.program.roles import STATE, WEIGHTS

# Role of the dimension that most work is split along -> its usual name; weights' other dimensions are called tensor.
_CALLED = {
    "batch": "data-parallel", "seq": "context", "experts": "expert", "ensemble": "ensemble", "edges": "edge",
    "nodes": "node", "height": "spatial", "width": "spatial", "layers": "pipeline",
    "vocab": "tensor", "heads": "tensor", "head_dim": "tensor", "ff": "tensor", "embed": "tensor", "channels": "tensor",
}  # fmt: skip
_FSDP, _DATA = "FSDP", "data-parallel"
# Work, or bytes of weights, below this fraction of the total is not mentioned.
_SOME, _MOST = 0.2, 0.5
_FEW = 0.05  # of the elements that are computed sharded over an axis


@dataclass(frozen=True)
class Strategy:
    """Attributes:
    computed: (group, axis) of dimensions along which anything but an update of weights is computed sharded.
    stored: role ("weights" or "state") -> axes over which most of its bytes are stored sharded along dimensions that
        little is computed sharded along, so that they are gathered for their use; a cache sharded by the batch is used
        in that sharding.
    name: "data-parallel 8 × tensor 2"; empty if nothing is split.
    """

    computed: frozenset[tuple[int, int]]
    stored: dict[str, frozenset[int]]
    name: str


def strategy_of(problem: Problem, plan: Plan) -> Strategy:
    """The strategy of the program under a plan."""
    lowered = [problem.op_sharding(pattern, plan) for pattern in range(len(problem.patterns))]
    work = _work(problem, lowered)
    used = _used(problem, work)
    stored = {role: _stored(problem, lowered, role, used) for role in (WEIGHTS, STATE)}
    return Strategy(frozenset(work), stored, _name(problem, work, stored[WEIGHTS]))


def _work(problem: Problem, lowered: list[OpSharding]) -> dict[tuple[int, int], float]:
    """(group, axis) -> FLOPs of contractions and convolutions that are split so. Dimensions of activations that split
    none of these have 0, and are included if enough elements are; updates of weights and state do not count, unless the
    program does nothing else."""
    return _work_of(problem, lowered, updates=False) or _work_of(problem, lowered, updates=True)


def _work_of(problem: Problem, lowered: list[OpSharding], *, updates: bool) -> dict[tuple[int, int], float]:
    """The same with or without updates of weights and state."""
    in_weights, program = set(problem.weight_bytes), problem.program
    found: dict[tuple[int, int], float] = defaultdict(float)
    elements: dict[tuple[int, int], float] = defaultdict(float)
    for op, number in zip(program.ops, problem.op_pattern, strict=True):
        of, heavy = problem.patterns[number], op.kind.heavy
        if not (heavy or updates) and (of.role != NO_ROLE or in_weights.issuperset(of.groups)):
            continue
        made = op.trips * sum(program.values[value].elements for value in op.results)
        for group, kind, axes in zip(of.groups, of.form.kinds, lowered[number].factor_axes, strict=True):
            for axis in axes:
                elements[group, axis] += made
                if heavy and (op.flops or kind is FactorKind.REDUCTION):  # or rows of a table
                    found[group, axis] += op.flops * op.trips
    most = {axis: max(size for (_, over), size in elements.items() if over == axis) for _, axis in elements}
    others = {
        (group, axis): 0.0
        for (group, axis), size in elements.items()
        if size > _FEW * most[axis] and (updates or group not in in_weights)
    }
    return {**others, **found}


def _used(problem: Problem, work: dict[tuple[int, int], float]) -> set[tuple[int, int]]:
    """Those of `work` that split a considerable part of the FLOPs along their dimension, or need none."""
    along: dict[int, float] = defaultdict(float)
    for number, flops in problem.pattern_work.items():
        for group in set(problem.patterns[number].groups):
            along[group] += flops
    return {key for key, flops in work.items() if not flops or flops >= _SOME * along[key[0]]}


def _stored(
    problem: Problem, lowered: list[OpSharding], role: str, computed: Collection[tuple[int, int]]
) -> frozenset[int]:
    """Axes over which most bytes of a role's arguments are stored sharded, but not used so."""
    program, number, total = problem.program, problem.roles.index(role), 0
    sizes: dict[int, float] = defaultdict(float)
    for k in (k for k, of in enumerate(problem.argument_role) if of == number):
        total += program.values[program.arguments[k].value].bytes
        groups, split = problem.patterns[problem.op_pattern[k]].groups, lowered[problem.op_pattern[k]].factor_axes
        parts = ((group, axis) for group, axes in zip(groups, split, strict=True) for axis in axes)
        for axis in {axis for group, axis in parts if (group, axis) not in computed}:
            sizes[axis] += program.values[program.arguments[k].value].bytes
    return frozenset(axis for axis, size in sizes.items() if size > _MOST * total)


def _name(problem: Problem, work: dict[tuple[int, int], float], gathered: frozenset[int]) -> str:
    """The strategy's name; axes of one kind are multiplied, in the order in which the kinds first appear."""
    factors: dict[str, int] = {}
    for axis, size in enumerate(problem.mesh.sizes):
        kinds: dict[str, float] = defaultdict(float)
        for (group, over), amount in work.items():
            if over == axis and size > 1:
                kinds[_called(problem, group)] += amount
        least = _SOME * sum(kinds.values())
        called = sorted((kind for kind in kinds if kinds[kind] >= least > 0.0), key=lambda kind: -kinds[kind])
        if called:
            fully = _FSDP if axis in gathered else _DATA
            kind = " + ".join(fully if one == _DATA else one for one in called)
            factors[kind] = factors.get(kind, 1) * size
    return " × ".join(f"({kind}) {count}" if " + " in kind else f"{kind} {count}" for kind, count in factors.items())


def _called(problem: Problem, group: int) -> str:
    of = problem.dimensions.groups[group]
    if of.role in _CALLED:
        return _CALLED[of.role]
    return "tensor" if group in problem.weight_bytes else of.name
