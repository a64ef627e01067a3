"""A plan in words: its strategy over each mesh axis, "data (8): FSDP; model (2): tensor-parallel (ff)", a sentence for
each decision, and its comparison with known strategies."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from toast_cli.dimensions.model import FactorKind
from toast_cli.plan.decisions import ASIDE, LOOK_UPS, NONE, SUMMED, Decision, Plan, Replicate, Shard
from toast_cli.plan.loops import ACCUMULATORS, LOOP_READS
from toast_cli.plan.partials import ALL_REDUCE, REDUCE_SCATTER
from toast_cli.plan.partitioned import CollectiveFacts
from toast_cli.plan.problem import Problem
from toast_cli.plan.sharding import NO_ROLE, OpSharding
from toast_cli.price.cost import CollectiveUse, Cost
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.memory_fit import surely_fitting_bytes
from toast_cli.program.model import once
from toast_cli.program.names import slash_path
from toast_cli.program.quantities import NamedArray, fold, format_bytes, format_percent, format_seconds
from toast_cli.program.roles import STATE, WEIGHTS
from toast_cli.search.incumbent import SearchResult
from toast_cli.tactics import PricedStrategy
from toast_cli.tactics.strategies import NO_EFFECT

# Name in place of a group's, for a decision that excludes ops that sum over its own group.
SUMS = "sum over it"
LOOKED_UP = "look up rows of tables"
# Role of a `Replicate` -> its effect on those arguments; all others keep arguments replicated between steps.
_KEPT = {ACCUMULATORS: "kept whole", LOOP_READS: "gathered before the loop"}
# Role of an array in memory (see `price.cost.Alive`) -> its name in a sentence.
ALIVE = {
    "argument": "arguments",
    "carry": "loop state",
    "temporary": "temporaries",
    "gathered": "gathered copies",
    "partial": "partial sums",
    "inside": "in manual regions",
}
# Minimum number of dimensions of one name that are counted instead of listed.
_MANY = 4
# Names of dimensions listed over one axis before the rest is counted.
_LISTED = 5
_NUMBERED = re.compile(r"_\d+$")


def summary(problem: Problem, plan: Plan) -> str:
    """E.g. "data (8): FSDP; model (2): tensor-parallel (heads, ff)": the strategy of the partitioned program over each
    mesh axis. Decisions without effect are left out. What toast rewrote comes last.
    """
    return "; ".join([_split_text(problem, plan), *problem.program.rewritten])


def _split_text(problem: Problem, plan: Plan) -> str:
    if not plan:
        return "everything replicated"
    mesh, idle = problem.mesh, idle_axes(problem, plan)
    lowered = [problem.op_sharding(pattern, plan) for pattern in range(len(problem.patterns))]
    work = _work(problem, lowered)
    used = _used(problem, work)
    stored = {role: _stored(problem, lowered, role, used) for role in (WEIGHTS, STATE)}
    axes_of: dict[str, list[int]] = defaultdict(list)
    for axis in (axis for axis, size in enumerate(mesh.sizes) if size > 1):
        decided = [problem.dimensions.groups[d.group].name for d in plan if isinstance(d, Shard) and d.axis == axis]
        named = _axis_text(problem, work, stored, axis) or f"{_join(list(dict.fromkeys(decided)) or ['some'])} split"
        axes_of["not used" if axis in idle else named].append(axis)
    parts = [
        f"{' x '.join(mesh.names[a] for a in axes)} ({prod(mesh.sizes[a] for a in axes)}): {text}"
        for text, axes in axes_of.items()
    ]
    attention = _attention(problem, lowered) if any("tensor-parallel" in text for text in parts) else []
    return "; ".join([*attention, *parts, *_replicated_roles(problem, lowered)])


def _attention(problem: Problem, lowered: list[OpSharding]) -> list[str]:
    """`attention DP 4 × TP 2` where a decode splits the sequences of its caches: attention is then split in another way
    than the products around it."""
    for value in caches_of(problem):
        number = problem.op_pattern[problem.program.producer[value]]
        ways: dict[str, int] = defaultdict(lambda: 1)
        for group, axes in zip(problem.patterns[number].groups, lowered[number].factor_axes, strict=True):
            ways[problem.dimensions.groups[group].role] *= prod(problem.mesh.sizes[axis] for axis in axes)
        if ways["batch"] > 1:
            kinds = {"DP": ways["batch"], "TP": ways["heads"], "CP": ways["seq"]}
            return [f"attention {' × '.join(f'{kind} {number}' for kind, number in kinds.items() if number > 1)}"]
    return []


def caches_of(problem: Problem) -> dict[int, int]:
    """Arguments that hold keys and values (state over batch and sequence): value -> positions of a sequence."""
    caches = {}
    for number, argument in enumerate(problem.program.arguments):
        groups = [problem.dimensions.groups[group] for group in problem.patterns[problem.op_pattern[number]].groups]
        sizes = {group.role: group.size for group in groups}
        if problem.roles[problem.argument_role[number]] == STATE and {"batch", "seq"} <= sizes.keys():
            caches[argument.value] = sizes["seq"]
    return caches


def idle_axes(problem: Problem, plan: Plan) -> list[int]:
    """Unused mesh axes (of more than one device): no decision or pin names them."""
    pins = (pin for p in problem.patterns for pin in (*p.operand_pins, *p.result_pins) if pin is not None)
    used = {d.axis for d in plan if isinstance(d, Shard)}
    used |= {axis for pin in pins for axes in pin for axis in axes or ()}
    return [axis for axis, size in enumerate(problem.mesh.sizes) if size > 1 and axis not in used]


def _replicated_roles(problem: Problem, lowered: list[OpSharding]) -> list[str]:
    """A sentence that weights (and state) are replicated, if a plan splits none of them."""
    replicated = []
    for role in (WEIGHTS, STATE):
        number = problem.roles.index(role)
        patterns = {problem.op_pattern[k] for k, of in enumerate(problem.argument_role) if of == number}
        if patterns and not any(any(lowered[pattern].shardings[0]) for pattern in patterns):
            replicated.append(role)
    return [f"{' and '.join(replicated)} replicated"] if WEIGHTS in replicated else []


def decision_text(problem: Problem, decision: Decision) -> str:
    """One decision in words."""
    axis, size = problem.mesh.names[decision.axis], problem.mesh.sizes[decision.axis]
    if isinstance(decision, Replicate):
        role = role_name(problem, decision)
        if role == ACCUMULATORS:
            return f"keep {role} whole over {axis}, and reduce them behind the loop"
        if role == LOOP_READS:
            return f"gather {role} over {axis} once, before the loop, and hold it"
        return f"keep {role} replicated over {axis} between steps"
    group = problem.dimensions.groups[decision.group]
    mirrored = f", {len(group.classes)} alike" if len(group.classes) > 1 else ""
    scope = "".join(f", {text}" for text in scope_texts(scope_name(problem, decision), part_name(problem, decision)))
    # A decision may leave the ops of its conflicts to other decisions.
    aside_sides = sum(side == ASIDE for side in decision.sides)
    some = "some " if aside_sides < len(group.resolutions) else ""
    aside = f", except in {some}ops with it twice" if aside_sides else ""
    return f"split {group.name} ({group.size}{mirrored}) {size} ways over {axis}{scope}{aside}"


def role_name(problem: Problem, decision: Replicate) -> str:
    """`weights`, or `params/layers/0/wq and 17 alike` for a group of similar arguments."""
    return slash_path(problem.roles[decision.role])


def short_text(problem: Problem, decision: Decision, sides: str | None = None) -> str:
    """`batch over data`, `ff (only in ops with heads) over model`, `weights replicated over data`.

    Args:
        sides: what is chosen where an array has the dimension twice, as text; None: by number.
    """
    axis = problem.mesh.names[decision.axis]
    if isinstance(decision, Replicate):
        role = role_name(problem, decision)
        return f"{role} {_KEPT.get(role, 'replicated')} over {axis}"
    if sides is None:
        numbers = "/".join("-" if side == ASIDE else str(side) for side in decision.sides)
        sides = f" (side {numbers})" if any(decision.sides) else ""
    where = scope_texts(scope_name(problem, decision), part_name(problem, decision))
    scope = f" ({', '.join(where)})" if where else ""
    return f"{problem.dimensions.groups[decision.group].name}{sides}{scope} over {axis}"


def scope_texts(unless: str, only: str) -> list[str]:
    """`except in ops with ff`, `only in ops with heads`: the scope of a decision.

    Args:
        unless, only: names of groups, or `SUMS`, or empty; see `scope_name` and `part_name`.
    """
    texts = []
    if unless:
        texts.append(f"except in ops {'that' if unless in (SUMS, LOOKED_UP) else 'with'} {unless}")
    if only:
        texts.append(f"only in ops with {only}")
    return texts


def scope_name(problem: Problem, decision: Shard) -> str:
    """The group whose ops a decision excludes, or `SUMS`, by name; empty if it excludes none."""
    if decision.unless in (SUMMED, LOOK_UPS):
        return SUMS if decision.unless == SUMMED else LOOKED_UP
    return "" if decision.unless == NONE else problem.dimensions.groups[decision.unless].name


def part_name(problem: Problem, decision: Shard) -> str:
    """The group to whose ops a decision is limited, by name; empty if it is not limited."""
    return "" if decision.only == NONE else problem.dimensions.groups[decision.only].name


def path_patterns(paths: Sequence[str]) -> list[str]:
    """`params/layers/*/wq.0`: paths of arrays or of their dimensions, similar ones folded."""
    return [row.pattern for row in fold([NamedArray(slash_path(path), ()) for path in paths])]


def name_list(names: Sequence[str]) -> list[str]:
    """`channels, channels_2, …, ff` -> `33 channels, ff`: many of one name are replaced by their number, at the first
    one's place."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name in names:
        alike[_NUMBERED.sub("", name)].append(name)
    return [
        text
        for base, members in alike.items()
        for text in ([f"{len(members)} {base}"] if len(members) >= _MANY else members)
    ]


def joined_decisions(decisions: Sequence[str]) -> str:
    """`batch, embed over data; ff over model`: decisions in words, by mesh axis."""
    split: dict[str, list[str]] = {}  # axis -> names of dimensions
    for text in decisions:
        dimension, _, axis = text.rpartition(" over ")
        split.setdefault(axis, []).append(dimension)
    parts = []
    for axis, names in split.items():
        names = name_list(names)
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        parts.append(f"{', '.join(names[:_LISTED])}{more} over {axis}")
    return "; ".join(parts)


def _join(names: list[str]) -> str:
    names = name_list(names)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


@dataclass(frozen=True)
class ConflictExample:
    """The op that shows a conflict best: one whose array has both dimensions, else one with both, else one with either;
    of these the one with the most arithmetic.

    Attributes:
        op: its number. array: type of the array that has the dimension twice; "" if no array has it twice, but the op
            sums over one of the two and keeps the other.
        names: side -> its name there: the number of the array's dimension, or what the op does with it.
    """

    op: int
    array: str
    names: dict[int, str]

    def called(self, side: int) -> str:
        """`f32[1,4,128,128].2`, or what the op does with the dimension; `neither` dimension for `ASIDE`."""
        if side == ASIDE:
            return f"neither dimension of {self.array}" if self.array else "nothing"
        name = self.names.get(side, "one of the two")
        return f"{self.array}.{name}" if self.array and side in self.names else name


def sides_of(problem: Problem, decision: Shard) -> list[tuple[int, str]]:
    """[conflicts of the decision's group] an op, and the dimension that the decision splits there:
    `f32[1,4,128,128].2`; dimensions count from 0, as in `params['w'].0`."""
    examples, resolutions = conflict_examples(problem), problem.dimensions.groups[decision.group].resolutions
    chosen = zip((examples[resolution] for resolution in resolutions), decision.sides, strict=False)
    return [(example.op, example.called(side)) for example, side in chosen]


@once
def conflict_examples(problem: Problem) -> dict[int, ConflictExample]:
    """[resolutions] the op that shows the conflict best."""
    program, dimensions = problem.program, problem.dimensions
    ranked: dict[int, list[tuple[tuple[int, float, int, int], ConflictExample]]] = defaultdict(list)
    for number, strands in dimensions.strands.items():
        op, form = program.ops[number], dimensions.forms[number]
        for resolution in {strand.resolution for strand in strands if strand}:
            sides = {k: strand.side for k, strand in enumerate(strands) if strand and strand.resolution == resolution}
            for value, dims in zip(op.operands + op.results, form.operands + form.results, strict=True):
                names = {
                    sides[factor]: str(d)
                    for d, factors in reversed([*enumerate(dims)])
                    for factor in factors
                    if factor in sides
                }
                if len(names) > 1:
                    array = program.values[value]
                    rank = (1, op.flops, array.bytes, -number)
                    ranked[resolution].append((rank, ConflictExample(number, str(array), names)))
            uses = {
                side: "what is summed over" if form.kinds[factor] == FactorKind.REDUCTION else "what is kept"
                for factor, side in sides.items()
            }
            rank = (min(len(sides), 2) - 2, op.flops, 0, -number)
            ranked[resolution].append((rank, ConflictExample(number, "", uses)))
    return {resolution: max(examples, key=lambda ranked: ranked[0])[1] for resolution, examples in ranked.items()}


def rows_of(collectives: Sequence[CollectiveFacts]) -> list[list[int]]:
    """Positions of collectives that look alike to a reader, who sees no names in brackets; the rows that take longest
    first."""
    rows = defaultdict[tuple[object, ...], list[int]](list)
    for position, use in enumerate(collectives):
        look = use.kind, *use.axes, use.bytes, use.by_hand, use.location.partition(" (")[0]
        rows[look].append(position)
    return sorted(rows.values(), key=lambda row: -sum(collectives[position].seconds for position in row))


# ---------------------------------------------------------------- why this plan
# Compares a plan with the known strategies.

_PARTS = 3  # of a step, in which two plans differ most


def why(evaluator: Evaluator, result: SearchResult, strategies: Mapping[str, PricedStrategy]) -> str:
    """Sentences that compare a plan with the fastest strategy that fits: how much faster it is, in which parts of the
    step, and which decisions differ; and whether a faster one does not fit. Empty if the plan is one of them.

    Args:
        strategies: by their names in tables.
    """
    problem, cost = evaluator.problem, result.cost
    equal = [(s.cost.step_seconds, round(s.cost.peak_bytes)) for s in strategies.values()]
    timed = {name: s for name, s in strategies.items() if s.plan and s.cost.step_seconds}
    if not timed or (cost.step_seconds, round(cost.peak_bytes)) in equal:
        return ""
    limit = surely_fitting_bytes(problem.program, problem.mesh)
    ordered = sorted(timed, key=lambda name: timed[name].cost.step_seconds)
    fitting = [name for name in ordered if timed[name].cost.peak_bytes <= limit]
    fastest, name = ordered[0], (fitting or ordered)[0]
    if name == result.strategy:  # but for decisions that change nothing
        return ""
    strategy = timed[name]
    own_uses, uses = evaluator.collectives(result.plan), list[CollectiveUse]()
    parts = [("communication", cost.communication_seconds, strategy.cost.communication_seconds)]
    if strategy.mesh == problem.mesh:
        uses = evaluator.collectives(strategy.plan)
        parts = traffic(own_uses, uses, problem.mesh.names)
    change = cost.step_seconds / strategy.cost.step_seconds - 1
    speed = f"{format_percent(abs(change))} {'faster' if change < 0 else 'slower'} than"
    sentences = [
        f"This plan{f' ({result.strategy})' if result.strategy else ''} is "
        f"{speed if abs(change) > NO_EFFECT else 'as fast as'} {name}, the fastest listed strategy "
        f"{'that fits' if fitting else '(none surely fits)'}: {', '.join(_differences(cost, strategy.cost, parts))}."
    ]
    own = [short_text(problem, decision) for decision in result.plan]
    theirs = [short_text(replace(problem, mesh=strategy.mesh), decision) for decision in strategy.plan]
    if adds := [decision for decision in own if decision not in theirs]:
        sentences.append(f"The plan adds {joined_decisions(adds)}.")
    if lacks := [decision for decision in theirs if decision not in own]:
        sentences.append(f"The plan lacks {joined_decisions(lacks)}.")
    if _unscattered_seconds(uses) - _unscattered_seconds(own_uses) > NO_EFFECT * cost.step_seconds:
        sentences.append(f"In {name}, XLA all-reduces gradients of which a device keeps a shard.")
    if fastest != name and timed[fastest].cost.step_seconds < cost.step_seconds:
        sentences.append(f"{fastest} is faster, but does not surely fit.")
    return " ".join(sentences)


def _unscattered_seconds(uses: Sequence[CollectiveUse]) -> float:
    """Seconds of the all-reduces that the partitioner writes as reduce-scatters."""
    return sum(use.seconds for use in uses if (use.kind, use.written[0]) == (ALL_REDUCE, REDUCE_SCATTER))


def _differences(cost: Cost, other: Cost, communication: list[tuple[str, float, float]]) -> list[str]:
    """`compute -3.71 ms`, `peak memory +60.0 MiB`: where a plan's cost differs most from a strategy's.

    Args:
        communication: its parts, as `traffic` returns them.
    """
    hidden = cost.most_seconds - cost.step_seconds - (other.most_seconds - other.step_seconds)
    parts = [("compute", cost.compute_seconds, other.compute_seconds), *communication]
    changes = {name: seconds - other_seconds for name, seconds, other_seconds in parts}
    changes["more overlap" if hidden > 0 else "less overlap"] = -hidden
    notable = [name for name in changes if abs(changes[name]) > NO_EFFECT * other.step_seconds]
    largest = sorted(notable, key=lambda name: -abs(changes[name]))
    texts = [(name, format_seconds(changes[name])) for name in largest[:_PARTS]]
    texts.append(("peak memory", format_bytes(cost.peak_bytes - other.peak_bytes)))
    return [f"{name} {'' if amount.startswith('-') else '+'}{amount}" for name, amount in texts]


def traffic(
    uses: Sequence[CollectiveUse], others: Sequence[CollectiveUse], names: tuple[str, ...]
) -> list[tuple[str, float, float]]:
    """(`all-gather over data`, its seconds a step in a plan, and in another one), the largest difference first.

    Args:
        uses, others: the collectives of the two plans. names: of the mesh axes.
    """
    times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for number, collectives in enumerate((uses, others)):
        for use in collectives:
            times[f"{use.kind} over {'+'.join(use.over(names))}"][number] += use.seconds
    return sorted(((name, a, b) for name, (a, b) in times.items()), key=lambda row: -abs(row[1] - row[2]))


# ---------------------------------------------------------------- strategies
# Names a plan's strategy over each mesh axis: by the dimensions that most work is split along, and by the weights that
# are stored sharded along others, so that they are gathered for their use.

# Role of the dimension that work is split along -> its usual name; weights' other dimensions are called tensor.
_CALLED = {
    "batch": "data", "seq": "context", "experts": "expert", "ensemble": "ensemble", "edges": "edge",
    "nodes": "node", "height": "spatial", "width": "spatial", "layers": "pipeline",
    "vocab": "tensor", "heads": "tensor", "head_dim": "tensor", "ff": "tensor", "embed": "tensor", "channels": "tensor",
}  # fmt: skip
_DATA = "data"
# Work, or bytes of weights, below this fraction of the total is hardly mentioned.
_SOME, _MOST = 0.2, 0.5
_FEW = 0.05  # of the elements that are computed sharded over an axis, or of the bytes of weights


def _axis_text(
    problem: Problem, work: dict[tuple[int, int], float], stored: dict[str, frozenset[int]], axis: int
) -> str:
    """`FSDP and tensor-parallel (vocab)`: the kinds of parallelism over an axis, by work, and what is only stored
    sharded over it; empty if there is nothing."""
    amounts: dict[str, float] = defaultdict(float)
    members: dict[str, list[str]] = defaultdict(list)
    for (group, over), amount in sorted(work.items(), key=lambda item: -item[1]):
        if over == axis:
            called = _called(problem, group)
            amounts[called] += amount
            members[called].append(problem.dimensions.groups[group].name)
    total = sum(amounts.values())
    gathered, state = axis in stored[WEIGHTS], axis in stored[STATE]
    texts = []
    for kind in sorted((kind for kind in amounts if amounts[kind] or not total), key=lambda kind: -amounts[kind]):
        text = f"{kind}-parallel ({', '.join(name_list(members[kind]))})"
        if kind == _DATA:
            text = "FSDP" if gathered else "data-parallel"
        elif members[kind] == [kind]:  # a dimension without a role
            text = f"{kind} split"
        texts.append(f"partly {text}" if amounts[kind] < _SOME * total else text)
    if state and not gathered:
        texts[-1:] = [f"{texts[-1]} with sharded state (ZeRO-2)" if texts else "state sharded (ZeRO-2)"]
    elif gathered and _DATA not in amounts:
        texts.append("weights sharded at rest")
    return " and ".join(texts) if len(texts) < 3 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def _work(problem: Problem, lowered: list[OpSharding]) -> dict[tuple[int, int], float]:
    """(group, axis) -> FLOPs of contractions and convolutions that are split so. Dimensions of activations that split
    none of these have 0, and are included if enough elements are; updates of weights and state do not count, unless the
    program does nothing else."""
    return _work_of(problem, lowered, updates=False) or _work_of(problem, lowered, updates=True)


def _work_of(problem: Problem, lowered: list[OpSharding], *, updates: bool) -> dict[tuple[int, int], float]:
    """`_work` with or without updates of weights and state."""
    in_weights, program = set(problem.weight_bytes), problem.program
    layers = {k for k, group in enumerate(problem.dimensions.groups) if group.role == "layers"}
    flops: dict[tuple[int, int], float] = defaultdict(float)
    elements: dict[tuple[int, int], float] = defaultdict(float)
    for op, number in zip(program.ops, problem.op_pattern, strict=True):
        pattern, heavy = problem.patterns[number], op.kind.heavy
        if not (heavy or updates) and (pattern.role != NO_ROLE or in_weights.issuperset(pattern.groups)):
            continue
        computed = op.trips * sum(program.values[value].elements for value in op.results)
        # Products of each layer's weights or gradients alone, as in an optimizer such as Muon, make no pipeline.
        excluded = layers if in_weights.issuperset(pattern.groups) else set[int]()
        for group, kind, axes in zip(pattern.groups, pattern.form.kinds, lowered[number].factor_axes, strict=True):
            for axis in axes:
                elements[group, axis] += computed
                if heavy and group not in excluded and (op.flops or kind is FactorKind.REDUCTION):  # or rows of a table
                    flops[group, axis] += op.flops * op.trips
    most = {axis: max(size for (_, over), size in elements.items() if over == axis) for _, axis in elements}
    elements_only = {
        (group, axis): 0.0
        for (group, axis), size in elements.items()
        if size > _FEW * most[axis] and (updates or group not in in_weights)
    }
    return {**elements_only, **flops}


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
    """Axes over which arguments of a role are stored sharded, but not used so: most bytes of those that are not used
    sharded over the axis, such as experts. Caches of each sequence are no such state."""
    program, number, total = problem.program, problem.roles.index(role), 0
    sequences = {k for k, of in enumerate(problem.dimensions.groups) if of.role == "batch"}
    sizes: dict[int, float] = defaultdict(float)
    used: dict[int, float] = defaultdict(float)
    for k in (k for k, of in enumerate(problem.argument_role) if of == number):
        total += program.values[program.arguments[k].value].bytes
        groups, sharding = problem.patterns[problem.op_pattern[k]].groups, lowered[problem.op_pattern[k]]
        split = {axis: group for group, axes in zip(groups, sharding.factor_axes, strict=True) for axis in axes}
        pinned = {axis: NONE for axes in sharding.shardings[0] for axis in axes if axis not in split}
        for axis, group in {**split, **pinned}.items():
            if group not in sequences:
                amounts = used if (group, axis) in computed else sizes
                amounts[axis] += program.values[program.arguments[k].value].bytes
    return frozenset(axis for axis, size in sizes.items() if size > max(_MOST * (total - used[axis]), _FEW * total))


def _called(problem: Problem, group: int) -> str:
    dimension = problem.dimensions.groups[group]
    if dimension.role in _CALLED:
        return _CALLED[dimension.role]
    return "tensor" if group in problem.weight_bytes else dimension.name
