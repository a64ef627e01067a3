"""Builds a `Report` from the values of one run: source, evaluator (with its problem), search result."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from math import inf, lcm, prod

from toast_cli.frontend.source import Source
from toast_cli.hardware import Chip, Mesh, matrix_rate
from toast_cli.plan.decisions import NONE, Bound, Decision, Plan, Replicate
from toast_cli.plan.loops import ACCUMULATORS, LOOP_READS, read_in_trips
from toast_cli.plan.partitioned import CollectiveFacts, PartitionedProgram
from toast_cli.plan.problem import Problem, samples_of
from toast_cli.plan.sharding import Sharding, shards
from toast_cli.price.collectives import collective_seconds
from toast_cli.price.cost import BY_HAND, Cost
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.kernel import ragged_growth
from toast_cli.price.memory_fit import peak_error, surely_fitting_bytes
from toast_cli.price.profiles import version_note
from toast_cli.price.timeline import ops_by_pattern, places_of
from toast_cli.program.model import PAGED, Program
from toast_cli.program.names import slash_path
from toast_cli.program.ops import BROADCAST_IN_DIM, CARRY, DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE, GATHER, SCATTER
from toast_cli.program.quantities import (
    format_bytes,
    format_count,
    format_percent,
    format_plural,
    format_ratio,
    format_seconds,
)
from toast_cli.program.roles import INPUTS, STATE, WEIGHTS, undonated
from toast_cli.program.values import recomputed_parts
from toast_cli.report.model import (
    AnalysisFacts,
    ArgumentFacts,
    BaselineFacts,
    BoundFacts,
    DecisionFacts,
    DimensionAxes,
    GoalFacts,
    GroupFacts,
    LiveValue,
    MeshFacts,
    PlanFacts,
    PredictedFacts,
    ProgramFacts,
    Report,
    ResultFacts,
    SearchFacts,
    strategy_label,
)
from toast_cli.report.step import Modules, step_of, time_by_line
from toast_cli.report.words import caches_of, decision_text, idle_axes, part_name, scope_name, sides_of, summary, why
from toast_cli.search.incumbent import SearchResult, reader
from toast_cli.tactics import PricedStrategy, priced_strategies
from toast_cli.tactics.strategies import MARGIN, NO_EFFECT, PAIRS, baselines, better

SECONDS_PER_HOUR, MILLION = 3600, 1_000_000
PRODUCTS = 3  # of pairs of tactics compared with, at most, if all strategies are
COPYING = 0.1  # of a step, spent on copies of caches, or more
FAR = 1.1  # times as slow as the plan found, or more
_LISTED = 400  # limit of live values listed: enough to recognise similar ones


def build_report(
    source: Source,
    evaluator: Evaluator,
    result: SearchResult,
    algorithm: str,
    seed: int,
    elsewhere: Mapping[str, PricedStrategy] | None = None,
) -> Report:
    """The facts of a run, without its timings. elsewhere: known strategies by name on the mesh shapes tried."""
    problem = evaluator.problem
    program, mesh = problem.program, problem.mesh
    strategies = _baselines(evaluator, result.cost.step_seconds, elsewhere or {})
    baselines = {
        name: baseline_facts(strategy.cost, mesh.limit_bytes, strategy.axes, other_shape(strategy.mesh, mesh))
        for name, strategy in strategies.items()
    }
    labelled = {strategy_label(k, facts.axes, facts.mesh): strategies[k] for k, facts in baselines.items()}
    parameters = sum(program.values[a.value].bytes for a in program.arguments)
    arguments, results = _shardings(problem, evaluator.lowered(result.plan))
    step = step_of(evaluator, result)
    modules = Modules(source, (interval.op for interval in step.slices))
    return Report(
        ProgramFacts(
            source.path,
            program.name,
            program.source_op_count,
            len(program.values),
            len(program.arguments),
            parameters,
            program.flops,
            program.parted,
            program.microbatches,
            program.recompute,
            program.offload,
            program.rewritten,
            source.sizes,
        ),
        MeshFacts(
            mesh.name,
            mesh.chip.name,
            mesh.devices,
            mesh.shape,
            {a.name: n for a in mesh.axes if (n := prod(k.size for k in a.links if k.kind == "network")) > 1},
            mesh.hour_price,
        ),
        PlanFacts(
            [_decision(source, problem, d) for d in result.plan],
            summary(problem, result.plan),
            fixed=len(problem.fixed),
            strategy=result.strategy,
            why=why(evaluator, result, labelled),
        ),
        _predicted(source, evaluator, result),
        baselines,
        collective_facts(source, evaluator, result.plan, modules),
        arguments,
        results,
        _analysis(source, evaluator, result, _too_small(evaluator, result, baselines)),
        SearchFacts(algorithm, seed, result.seconds, result.evaluations, result.best_found_at, result.stopped),
        {},
        goal=goal_facts(problem, result.cost),
        time_by_line=time_by_line(source, step, modules),
    )


def goal_facts(problem: Problem, cost: Cost) -> GoalFacts:
    """The goal, and whether a plan of this cost meets it."""

    def facts(bound: Bound) -> BoundFacts:
        value = reader(bound.figure, problem.mesh.names)(cost)
        return BoundFacts(str(bound.figure), bound.limit, value, value <= bound.limit)

    return GoalFacts([str(figure) for figure in problem.goal.minimise], [facts(bound) for bound in problem.goal.bounds])


def utilisation(problem: Problem, step_seconds: float) -> tuple[float, float]:
    """Model FLOPs utilisation and hardware FLOPs utilisation: a program's arithmetic divided by that of all chips at
    their peak rate in that time. The rate is that of bf16 (if listed), or of a narrower type for contractions in one.
    MFU excludes rematerialised arithmetic (see `program.values.recomputed_parts`)."""
    total, rematerialised = _peak_seconds(problem.program, problem.mesh.chip)
    available = step_seconds * problem.mesh.devices
    return ((total - rematerialised) / available, total / available) if available > 0 else (0.0, 0.0)


def _peak_seconds(program: Program, chip: Chip) -> tuple[float, float]:
    """Seconds that all arithmetic of a program takes one chip at its peak, and the rematerialised part of it."""
    peak, total, rematerialised = chip.matrix_flops.get("bf16") or max(chip.matrix_flops.values()), 0.0, 0.0
    for op, part in zip(program.ops, recomputed_parts(program), strict=True):
        if op.region is not None and op.region.body.flops:
            devices = op.flops / op.region.body.flops
            seconds = devices * _peak_seconds(op.region.body, chip)[0]
        else:
            narrow = op.kind.matrix_unit and op.flops and max(peak, matrix_rate(chip, program.multiplied_type(op)))
            seconds = op.flops / (narrow or peak)
        total += op.trips * seconds
        rematerialised += op.trips * seconds * part
    return total, rematerialised


def _predicted(source: Source, evaluator: Evaluator, result: SearchResult) -> PredictedFacts:
    problem, cost = evaluator.problem, result.cost
    mfu, hfu = utilisation(problem, cost.step_seconds)
    tokens, price = tokens_of(problem), problem.mesh.hour_price * cost.step_seconds / SECONDS_PER_HOUR
    samples = samples_of(problem)
    counted = tokens or samples
    op, alive = evaluator.alive_at_peak(result.plan)
    op = min(op, len(problem.program.ops) - 1)
    return PredictedFacts(
        cost.step_seconds,
        cost.compute_seconds,
        cost.communication_seconds,
        round(cost.peak_bytes),
        round(cost.argument_bytes),
        problem.mesh.limit_bytes,
        cost.peak_bytes <= problem.mesh.limit_bytes,
        mfu,
        cost.least_seconds,
        source.location(op) or problem.program.ops[op].name,
        [_live(source, problem, a.value, a.bytes, a.role) for a in alive[:_LISTED]],
        tokens / cost.step_seconds if cost.step_seconds > 0 else 0.0,
        round(evaluator.host_bytes(result.plan)),
        cost.transfer_seconds,
        peak_error(problem.program, problem.mesh),
        hfu,
        cost.most_seconds,
        price,
        price * MILLION / counted if counted else 0.0,
        "" if not price or not counted else "tokens" if tokens else "samples",
        samples / cost.step_seconds if cost.step_seconds > 0 else 0.0,
        *_cache_facts(evaluator, result.plan, cost),
    )


def _live(source: Source, problem: Problem, value: int, size: float, role: str) -> LiveValue:
    program = problem.program
    maker = program.producer[value]
    if role == "inside":
        return LiveValue("inside a manual region", "", round(size), source.location(maker), role)
    name = next((a.label for a in program.arguments if a.value == value and a.label), program.ops[maker].name)
    return LiveValue(
        name, str(program.values[value]), round(size), source.location(maker) if role != "argument" else "", role
    )


def _baselines(
    evaluator: Evaluator, plan_seconds: float, elsewhere: Mapping[str, PricedStrategy]
) -> dict[str, PricedStrategy]:
    """The known strategies, each on the axes and mesh shape that suit it best; if all of them are far slower than
    the plan found, also the best few of the usual pairs, if they are faster."""
    unsharded = PricedStrategy("unsharded", "", (), evaluator.exact_cost(()), evaluator.problem.mesh)
    strategies = {"unsharded": unsharded, **_best(evaluator, baselines(evaluator.problem), elsewhere)}

    def seconds(strategy: PricedStrategy) -> float:
        return strategy.cost.step_seconds if strategy.fits else inf

    best = min(map(seconds, strategies.values()))
    pairs = _best(evaluator, PAIRS, elsewhere) if best > FAR * plan_seconds else {}
    faster = [pair for name, pair in pairs.items() if name not in strategies and seconds(pair) < best]
    return strategies | {pair.name: pair for pair in sorted(faster, key=seconds)[:PRODUCTS]}


def _best(
    evaluator: Evaluator, names: tuple[str, ...], elsewhere: Mapping[str, PricedStrategy]
) -> dict[str, PricedStrategy]:
    here = priced_strategies(evaluator, names)[0]
    return better(here, {name: elsewhere[name] for name in names if name in elsewhere})


def baseline_facts(
    cost: Cost, limit_bytes: int, axes: str = "", shape: Mapping[str, int] | None = None
) -> BaselineFacts:
    """The facts of a strategy, see `BaselineFacts`."""
    fits = cost.peak_bytes <= limit_bytes
    figures = cost.step_seconds, round(cost.peak_bytes), fits, cost.compute_seconds, cost.communication_seconds
    return BaselineFacts(*figures, axes, dict(shape or {}))


def other_shape(of: Mesh, mesh: Mesh) -> dict[str, int]:
    """The axes of a mesh; empty for `mesh` itself."""
    return {} if of == mesh else of.shape


# Counts this close to an integer are rounded: sums of fractions for branches.
_NO_PART = 1e-6


def collective_facts(
    source: Source, evaluator: Evaluator, plan: Plan, modules: Modules | None = None
) -> list[CollectiveFacts]:
    """The collectives of a plan, the most expensive first. modules: of their ops, to be named if given."""
    names, ops_of_pattern = evaluator.problem.mesh.names, ops_by_pattern(evaluator.problem)
    facts = []
    for use in evaluator.collectives(plan):
        size = round(use.bytes)
        written = (use.written[0], round(use.written[1]))
        ops, frames = (place.op for place in places_of(evaluator.problem, use, ops_of_pattern)), source.stack(use.op)
        facts.append(
            CollectiveFacts(
                use.kind,
                use.over(names),
                size,
                round(use.count) if abs(use.count - round(use.count)) < _NO_PART else use.count,
                use.seconds,
                source.location(use.op, use.place),
                *(written if written != (use.kind, size) else ("", 0)),
                by_hand=use.reason == BY_HAND,
                module=modules.around(ops) if modules and frames else "",
                in_library=bool(frames) and not any(frame.is_users for frame in frames),
            )
        )
    return facts


def _shardings(problem: Problem, lowered: PartitionedProgram) -> tuple[list[ArgumentFacts], list[ResultFacts]]:
    program, names = problem.program, problem.mesh.names

    def named(sharding: Sharding) -> DimensionAxes:
        return [[names[a] for a in axes] for axes in sharding]

    arguments = [
        ArgumentFacts(k, a.label, str(program.values[a.value]), a.donated, named(lowered.shardings[a.value]))
        for k, a in enumerate(program.arguments)
    ]
    first = len(program.ops) - len(program.results)
    results = [
        ResultFacts(
            k,
            r.path,
            str(program.values[r.value]),
            named(lowered.required.get((first + k, 0), lowered.shardings[r.value])),
        )
        for k, r in enumerate(program.results)
    ]
    return arguments, results


def _decision(source: Source, problem: Problem, decision: Decision) -> DecisionFacts:
    axis = problem.mesh.names[decision.axis]
    text = decision_text(problem, decision)
    if isinstance(decision, Replicate):
        count = sum(decision.role in of for of in zip(problem.argument_role, problem.argument_kind, strict=True))
        if problem.roles[decision.role] == ACCUMULATORS:
            count = len(problem.accumulations)
        elif problem.roles[decision.role] == LOOP_READS:
            count = sum(1 for _ in read_in_trips(problem.program, problem.free))
        return DecisionFacts("replicate", problem.roles[decision.role], axis, {}, count, 0, text)
    group = problem.dimensions.groups[decision.group]
    sides = {f"conflict {r}": side for r, side in zip(group.resolutions, decision.sides, strict=False)}
    chosen = []
    for op, name in sides_of(problem, decision):
        place = (source.location(op) or problem.program.ops[op].name).split(" (")[0]
        chosen.append(f"{name} ({place})")
    return DecisionFacts(
        "shard",
        group.name,
        axis,
        sides,
        len(group.classes),
        group.size,
        text,
        scope_name(problem, decision),
        part_name(problem, decision),
        chosen,
    )


def _idle(problem: Problem, axis: int) -> str:
    size = problem.mesh.sizes[axis]
    if axis in problem.closed:
        why = "no tactic uses it, and the search was not allowed to"
    elif any(group.size % size == 0 for group in problem.dimensions.groups):
        why = "splitting over it pays nowhere"
    else:
        why = "its size divides no dimension that toast can split"
    return f"mesh axis {problem.mesh.names[axis]} ({size}) is not used: {why}"


def _undonated(problem: Problem, lowered: PartitionedProgram) -> list[str]:
    """A remark if a step donates none of its arguments to the results that replace them."""
    program, sizes = problem.program, problem.mesh.sizes
    arguments = [program.arguments[n] for n in undonated(program)]
    if not arguments:
        return []
    local = sum(program.values[a.value].bytes / shards(lowered.shardings[a.value], sizes) for a in arguments)
    roots = dict.fromkeys(a.path and slash_path(a.path).partition("/")[0] for a in arguments)
    names = ", ".join(roots) if all(roots) else format_plural(len(arguments), "argument")
    return [
        f"nothing is donated, though results replace {names}: with jax.jit(…, donate_argnums=…) they share memory, "
        f"which saves up to {format_bytes(local)} on each device"
    ]


def copied_caches(evaluator: Evaluator, result: SearchResult) -> list[str]:
    """A remark if much of a step goes into copies of donated arrays (caches) that a loop over layers carries, or stacks
    anew."""
    program, mesh, lowered = evaluator.problem.program, evaluator.problem.mesh, evaluator.lowered(result.plan)
    caches = [
        a
        for a in program.arguments
        if a.aliased_result >= 0
        and program.ops[program.producer[program.results[a.aliased_result].value]].name == CARRY
    ]
    shapes = {shape[first:] for first in (0, 1) for shape in [program.values[a.value].shape for a in caches]}
    seconds = 0.0
    for use in evaluator.kernels(result.plan):
        op = program.ops[use.op]
        if op.name in (CARRY, DYNAMIC_UPDATE_SLICE, BROADCAST_IN_DIM) and program.values[op.results[0]].shape in shapes:
            seconds += use.seconds
    if not seconds or seconds < COPYING * result.cost.step_seconds:
        return []
    local = sum(program.values[a.value].bytes / shards(lowered.shardings[a.value], mesh.sizes) for a in caches)
    return [
        f"XLA copies donated caches ({format_bytes(local)} on each device) for the loop over layers, "
        f"{format_seconds(seconds)} of a step: with the layers unrolled, and a cache for each, it updates them in place"
    ]


def _nameless(program: Program) -> list[str]:
    """A remark if JAX has lowered a program without names and source lines."""
    if any(a.path for a in program.arguments) or not any(r.path for r in program.results):
        return []
    return ["arguments have no names and ops no source lines: lowered.as_text(debug_info=True) writes them"]


def _passed_over(problem: Problem, result: SearchResult) -> list[str]:
    """The fastest plan found, if a known strategy or a shorter plan that is nearly as fast was preferred."""
    own, mesh = summary(problem, result.plan), problem.mesh
    problem, plan, cost = result.fastest or (problem, result.plan, result.cost)
    if cost.step_seconds >= (1 - NO_EFFECT) * result.cost.step_seconds:
        return []
    gain = format_percent(1 - cost.step_seconds / result.cost.step_seconds)
    is_tight = cost.peak_bytes > surely_fitting_bytes(problem.program, problem.mesh)
    why = "that one may not fit" if is_tight else f"predictions err by about {MARGIN:.0%}"
    own_count, count = (f" of {format_plural(len(decisions), 'decision')}" for decisions in (result.plan, plan))
    preferred, faster = (
        (result.strategy, "another plan") if result.strategy else ("this plan" + own_count, "a plan" + count)
    )
    other = summary(problem, plan)
    faster = strategy_label(faster, "", other_shape(problem.mesh, mesh))
    figures = f"{format_seconds(cost.step_seconds)}, {format_bytes(cost.peak_bytes)}"
    return [
        f"toast prefers {preferred} to {faster} that is predicted {gain} faster "
        f"({figures}{'' if other == own else f': {other}'}), since {why}; --minimise step_time takes the fastest"
    ]


def _grouped_products(evaluator: Evaluator, plan: Plan) -> list[str]:
    """A remark if the compiler multiplies all rows of a ragged product for each group, and what that costs."""
    seconds = grouped = 0.0
    for use in evaluator.kernels(plan):
        growth = ragged_growth(evaluator.problem.program.ops[use.op], evaluator.profile)
        if growth > 1:
            seconds, grouped = seconds + use.seconds, grouped + use.seconds / growth
    if not seconds:
        return []
    return [
        f"XLA multiplies all rows of ragged products for each group ({format_seconds(seconds)} of compute): a kernel "
        f"of grouped products, such as Pallas' megablox, would take about {format_seconds(grouped)}"
    ]


def _ragged_blocks(evaluator: Evaluator, plan: Plan) -> list[str]:
    """A remark if XLA:GPU's kernel of ragged all-to-alls takes longer than NCCL would."""
    slow = plain = 0.0
    for use in evaluator.collectives(plan) if "ragged-blocks" in evaluator.profile.passes else ():
        nccl = use.count * collective_seconds(evaluator.problem.mesh, use.kind, use.bytes, use.axes)
        if use.reason == BY_HAND and use.kind == "all-to-all" and use.seconds > 1.01 * nccl:
            slow, plain = slow + use.seconds, plain + nccl
    if not slow:
        return []
    return [
        f"ragged all-to-alls take {format_seconds(slow)} in XLA's own kernel, in which one block of threads does an "
        f"update; --xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel=false leaves them to NCCL, about "
        f"{format_seconds(plain)}"
    ]


def _too_small(evaluator: Evaluator, result: SearchResult, baselines: Mapping[str, BaselineFacts]) -> list[str]:
    """A remark if everything is replicated since known strategies take longer: how to see one, and how much more work
    is needed at least. More work takes the time of its arithmetic and memory traffic, of which devices save all but
    their share; what kernels take to start, and gradients to be reduced, stays."""
    replicated, *strategies = baselines.items()
    if result.plan or not strategies:
        return []
    mesh = evaluator.problem.mesh
    name, best = min(strategies, key=lambda item: item[1].step_seconds)
    flops, bytes_per_second = max(mesh.chip.matrix_flops.values()), mesh.chip.memory_bytes_per_second
    work = sum(max(kernel.flops / flops, kernel.bytes / bytes_per_second) for kernel in evaluator.kernels(()))
    saved = work * (1.0 - 1.0 / mesh.devices)
    more = 1.0 + (best.step_seconds - replicated[1].step_seconds) / saved if saved else inf
    return [
        f"too small to gain from {mesh.devices} devices: {name} takes {format_seconds(best.step_seconds)}, everything "
        f"replicated {format_seconds(replicated[1].step_seconds)}; it takes at least "
        f"{format_ratio(more)} the work a step (a larger batch) to gain; --strategy {name} shows it all the same"
    ]


def _analysis(source: Source, evaluator: Evaluator, result: SearchResult, remarks: list[str]) -> AnalysisFacts:
    problem, lowered = evaluator.problem, evaluator.lowered(result.plan)
    dimensions = problem.dimensions
    groups = [GroupFacts(g.name, len(g.classes), g.size, list(g.members)) for g in dimensions.groups]
    opaque = Counter(
        (op.detail and f"{op.name} @{op.detail}") or op.name
        for op in problem.program.ops
        if op.opaque and op.kernel is None  # notices cover kernels
    )
    notes = [
        *remarks,
        *_passed_over(problem, result),
        *(_idle(problem, axis) for axis in idle_axes(problem, result.plan) if not remarks),
        *padding_advice(problem),
        *_undonated(problem, lowered),
        *_grouped_products(evaluator, result.plan),
        *_ragged_blocks(evaluator, result.plan),
        *copied_caches(evaluator, result),
        *_nameless(problem.program),
        *source.notices,
        *problem.notices,
        *filter(None, [version_note(problem.mesh.chip)]),
    ]
    return AnalysisFacts(
        len(dimensions.class_sizes), len(dimensions.groups), dimensions.conflicts, dimensions.components,
        len(dimensions.resolutions), groups, dict(opaque.most_common()), notes,
    )  # fmt: skip


# ---------------------------------------------------------------- advice on padding
# Advice on padding dimensions that no mesh axis divides: a problem goes in, sentences come out.

# Minimum fraction of all weights' bytes in weights with a dimension, for advice about it.
SHARE = 0.05
# Maximum padding, as a fraction of the dimension: six heads do not become eight.
MOST_PADDING = 1 / 8
# Long dimensions are padded to whole tiles: 128 is the edge of a TPU's matrix unit.
LONG, TILE = 1024, 128


def padding_advice(problem: Problem) -> list[str]:
    """A sentence for the batch and each widespread dimension of the weights that is not sharded because of its size."""
    axes = [size for size in problem.mesh.sizes if size > 1]
    program, sizes = problem.program, problem.dimensions.class_sizes
    weights = sum(
        program.values[argument.value].bytes
        for argument, role in zip(program.arguments, problem.argument_role, strict=True)
        if problem.roles[role] == WEIGHTS
    )
    advice = []
    for number, group in enumerate(problem.dimensions.groups):
        worth_it = group.role == "batch" or problem.weight_bytes.get(number, 0) > SHARE * weights
        if (
            group.role == "layers"
            or not worth_it
            or not axes
            or any(sizes[c] % axis == 0 for c in group.classes for axis in axes)
        ):
            continue
        padded = padded_size(group.size, axes)
        if padded - group.size <= MOST_PADDING * group.size:
            advice.append(
                f"{group.name} ({format_count(group.size)}) divides by no mesh axis and stays whole; pad it to "
                f"{format_count(padded)} to shard it"
            )
    return advice


def padded_size(size: int, axes: list[int]) -> int:
    """The next divisible size: for a long dimension by all axes, in whole tiles; else by the smallest axis."""
    step = lcm(TILE, *axes) if size >= LONG else min(axes)
    return -(-size // step) * step


# ---------------------------------------------------------------- tokens
# Tokens of one run, if the program determines them: a problem goes in, a number comes out.

# Ops whose first operand is the array that they read a part of, or write to.
_CHANGED = frozenset({CARRY, DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE, SCATTER})


def tokens_of(problem: Problem) -> int:
    """Elements of the integer inputs over batch and sequence (token ids, targets); without them, the positions of its
    caches that a decode writes; 0 if there is neither, or inputs differ in size (encoders and decoders). A kernel of
    paged attention has a row of queries for each token."""
    for op in problem.program.ops:
        if op.kernel is not None and op.kernel.kind == PAGED:
            return op.kernel.tokens
    token_counts = {
        problem.program.values[argument.value].elements
        for number, argument in enumerate(problem.program.arguments)
        if problem.roles[problem.argument_role[number]] == INPUTS and _holds_tokens(problem, number)
    }
    caches = caches_of(problem)
    if not token_counts and caches:
        return round(samples_of(problem) * max(1.0, _positions_written(problem.program, caches)[0]))
    return token_counts.pop() if len(token_counts) == 1 else 0


def _positions_written(program: Program, caches: Mapping[int, int]) -> tuple[float, bool]:
    """How many positions of each sequence a run writes to the cache that it writes most to, and whether it writes them
    one by one, as far as the program says so; caches: see `caches_of`. What has all positions, such as a layer's cache
    on its way into a stack, is a copy."""
    written, several = defaultdict[int, float](float), set[int]()
    for op in program.ops:
        if op.name in (DYNAMIC_UPDATE_SLICE, SCATTER):
            cache, update = (
                _first_version(program, op.operands[0]),
                program.values[op.operands[-1 if op.name == SCATTER else 1]],
            )
            if cache in caches and caches[cache] not in update.shape:
                written[cache] += op.trips * update.elements * caches[cache] / program.values[cache].elements
                sizes = zip(program.values[op.operands[0]].shape, update.shape, strict=True)
                if op.name == SCATTER or any(size > 1 for of, size in sizes if of == caches[cache]):
                    several.add(cache)
    most = max(written, key=lambda cache: written[cache], default=NONE)
    return written[most], most not in several


def _cache_facts(evaluator: Evaluator, plan: Plan, cost: Cost) -> tuple[float, int, int]:
    """(bytes of caches on a device for each token of all sequences, number of sequences that about fit, tokens of each
    sequence that a loop makes one after the other); zeros without caches. All but other arguments is taken to grow with
    the number of sequences."""
    problem, caches, sequences = evaluator.problem, caches_of(evaluator.problem), samples_of(evaluator.problem)
    if not caches or not sequences:
        return 0.0, 0, 0
    program, mesh, shardings = problem.program, problem.mesh, evaluator.lowered(plan).shardings
    local = sum(program.values[value].bytes / shards(shardings[value], mesh.sizes) for value in caches)
    others = cost.argument_bytes - local
    room = (surely_fitting_bytes(program, mesh) - others) / (cost.peak_bytes - others)
    positions, one_by_one = _positions_written(program, caches)
    in_turn = round(positions) if one_by_one and positions > 1 else 0
    return local / (sequences * max(caches.values())), max(0, int(sequences * room)), in_turn


def _holds_tokens(problem: Problem, number: int) -> bool:
    """True if an argument has integers, one for each position of each sequence."""
    value = problem.program.values[problem.program.arguments[number].value]
    pattern = problem.patterns[problem.op_pattern[number]]
    roles = [problem.dimensions.groups[group].role for group in pattern.groups]
    whole_numbers = value.dtype.lstrip("su").startswith("i") and value.dtype != "i1"
    of_sequences = len(value.shape) > 1 and "seq" in roles and set(roles) <= {"seq", "batch"}
    return whole_numbers and of_sequences and not _finds_pages(problem, problem.program.arguments[number].value)


def _finds_pages(problem: Problem, value: int) -> bool:
    """True if these numbers look up what one step hands to the next: the pages of a cache."""
    program, waiting, seen = problem.program, [value], {value}
    state = {a.value for n, a in enumerate(program.arguments) if problem.roles[problem.argument_role[n]] == STATE}
    while waiting:
        for number, place in program.users[waiting.pop()]:
            op = program.ops[number]
            if op.name == GATHER and place == 1 and _first_version(program, op.operands[0]) in state:
                return True
            if op.kind.elementwise or op.kind.rearranges:
                waiting += [result for result in op.results if result not in seen]
                seen.update(op.results)
    return False


def _first_version(program: Program, value: int) -> int:
    """The array that a value is a part of, or that it was before it was written to."""
    while (op := program.ops[program.producer[value]]).operands and (op.kind.view or op.name in _CHANGED):
        value = op.operands[0]
    return value
