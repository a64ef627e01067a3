"""Explains the saving of all decisions in short, or one at length. In: a study. Out: an explanation."""

from __future__ import annotations

from collections import Counter, defaultdict

from toast_cli.cost.model import CollectiveUse
from toast_cli.errors import UsageError
from toast_cli.explain.model import Change, Explanation, Item
from toast_cli.explain.study import Study
from toast_cli.explain.words import role_name
from toast_cli.plan.accumulation import ACCUMULATORS
from toast_cli.plan.decisions import Decision, Plan, Replicate, Shard
from toast_cli.plan.loop_reads import LOOP_READS
from toast_cli.plan.sharding import shards
from toast_cli.program.ops import ARGUMENT
from toast_cli.quantities import format_bytes, format_count, format_seconds
from toast_cli.search.edits import subject
from toast_cli.search.objective import Objective
from toast_cli.tactics.model import DIMENSIONS

# Limits on alternatives and collectives listed.
_LISTED = 6


def explain_plan(study: Study) -> Explanation:
    """Every decision and the plan's cost without it, the most important decisions first."""
    unsharded = study.evaluator.exact_cost(())
    sentences = [
        f"The step takes {format_seconds(study.cost.step_seconds)} and {format_bytes(study.cost.peak_bytes)} "
        "on each device; unsharded it "
        f"would take {format_seconds(unsharded.step_seconds)} and {format_bytes(unsharded.peak_bytes)}."
    ]
    if not study.plan:
        sentences.append("The plan splits nothing: every device computes the whole program.")
    changes = [
        study.change(f"{number}  {study.words(decision)}", study.without(number))
        for number, decision in enumerate(study.plan, 1)
    ]
    return study.explanation(
        "plan", sentences, alternatives="what the plan would cost without this decision", changes=changes
    )


def explain_decision(study: Study, number: int) -> Explanation:
    """Explains what a decision splits, which collectives it adds and avoids, and what could replace it."""
    if not 1 <= number <= len(study.plan):
        raise UsageError(
            f"there is no decision {number}",
            where="--decision",
            hint=f"the plan has {len(study.plan)}, numbered from 1",
        )
    decision = study.plan[number - 1]
    changes = [study.change("without it", study.without(number)), *_instead(study, number, decision)]
    return study.explanation(
        f"decision {number}: {study.words(decision)}", _what_it_does(study, number, decision),
        listed="communication that it adds (+) and avoids (-)", items=_traffic(study, number),
        alternatives="what the plan would cost otherwise", changes=changes,
    )  # fmt: skip


def _what_it_does(study: Study, number: int, decision: Decision) -> list[str]:
    problem, axis = study.problem, study.problem.mesh.names[decision.axis]
    ways = problem.mesh.sizes[decision.axis]
    if isinstance(decision, Replicate):
        role = role_name(problem, decision)
        if role == ACCUMULATORS:
            return [
                f"Each device along {axis} adds up {role} whole, and they are reduced once, behind the loop. "
                "That takes fewer reductions, and more memory."
            ]
        if role == LOOP_READS:
            return [
                f"Devices along {axis} gather {role} and do not make once, before the loop, and hold it while it runs. "
                "That takes fewer gathers, and more memory."
            ]
        return [
            f"It keeps {role} replicated over {axis} between steps, whatever other decisions say. "
            "That takes no gathers, and more memory."
        ]
    group = problem.dimensions.groups[decision.group]
    meaning = f": {DIMENSIONS[group.role]}" if group.role in DIMENSIONS else ""
    alike = f", {format_count(len(group.classes))} alike" if len(group.classes) > 1 else ""
    sentences = [f"It splits {group.name} ({format_count(group.size)}{alike}) {ways} ways over {axis}{meaning}."]
    arguments, ops, blocked = _reach(study, number, decision)
    are = "argument is" if len(arguments) == 1 else "arguments are"
    compute = "op computes" if ops == 1 else "ops compute"
    sentences.append(
        f"With it {format_count(len(arguments))} {are} sharded over {axis} between steps "
        f"({_rest(study, arguments)}), and {format_count(ops)} other {compute} on pieces."
    )
    sentences += [
        f"In {format_count(count)} op{'s' * (count != 1)} it does nothing: {why}."
        for why, count in blocked.most_common(3)
    ]
    return sentences


def _reach(study: Study, number: int, decision: Shard) -> tuple[list[int], int, Counter[str]]:
    """(values of the arguments it splits, other ops it splits, why it does nothing -> in how many ops with work)."""
    problem = study.problem
    arguments: list[int] = []
    ops = 0
    blocked: Counter[str] = Counter()
    why: dict[int, str] = {}
    for op, pattern in zip(problem.program.ops, problem.op_pattern, strict=True):
        if decision.group not in problem.pattern_groups[pattern]:
            continue
        if pattern not in why:
            why[pattern] = study.why_not(pattern, number)
        if why[pattern]:
            blocked[why[pattern]] += bool(op.flops)
        elif op.name == ARGUMENT:
            arguments.append(op.results[0])
        else:
            ops += 1
    return arguments, ops, Counter({reason: count for reason, count in blocked.items() if count})


def _rest(study: Study, values: list[int]) -> str:
    sizes, program = study.problem.mesh.sizes, study.problem.program
    whole = sum(program.values[v].bytes for v in values)
    local = sum(program.values[v].bytes / shards(study.lowered.shardings[v], sizes) for v in values)
    return f"{format_bytes(whole)} in all, {format_bytes(local)} on each device"


def _traffic(study: Study, number: int) -> list[Item]:
    """Kinds of collectives whose time the decision changes, by how much."""
    with_it, without = (
        _times(study, study.collectives),
        _times(study, study.evaluator.collectives(study.without(number))),
    )
    gains = {key: with_it.get(key, 0.0) - without.get(key, 0.0) for key in {**with_it, **without}}
    largest = sorted((key for key in gains if abs(gains[key]) > 1e-7), key=lambda key: -abs(gains[key]))[:_LISTED]
    return [
        Item(
            f"{'+' if gains[key] > 0 else '-'} {key}",
            f"{format_seconds(with_it.get(key, 0.0))} with it, {format_seconds(without.get(key, 0.0))} without",
            seconds=abs(gains[key]),
        )
        for key in largest
    ]


def _times(study: Study, uses: list[CollectiveUse]) -> dict[str, float]:
    """Kind and axes -> seconds a step."""
    names = study.problem.mesh.names
    found: dict[str, float] = defaultdict(float)
    for use in uses:
        found[f"{use.kind} over {'+'.join(use.over(names))}"] += use.seconds
    return found


def _instead(study: Study, number: int, decision: Decision) -> list[Change]:
    """The best plans that have another decision in its place, or have it at another place."""
    problem = study.problem
    rest = (*study.plan[: number - 1], *study.plan[number:])
    held = {subject(d) for d in rest if isinstance(d, Shard)}
    tried: dict[Plan, str] = {}

    def offer(plan: Plan, what: str) -> None:
        plan = problem.canonical(plan)
        if plan != study.plan:
            tried.setdefault(plan, what)

    for other in problem.decisions.choices:
        if type(other) is not type(decision):
            continue
        same_axis, same_group = other.axis == decision.axis, other[0] == decision[0]
        fresh = other not in study.plan and not (isinstance(other, Shard) and subject(other) in held)
        if fresh and (same_axis or same_group):
            what = study.words(other)
            offer((*study.plan[: number - 1], other, *study.plan[number:]), f"{what} instead")
    if isinstance(decision, Shard):
        offer((decision, *rest), "the same, ahead of all others")
        offer((*rest, decision), "the same, after all others")
    objective = Objective(problem, study.evaluator.cost(problem.fixed))
    best = sorted(tried, key=lambda plan: objective.rank(plan, study.evaluator.cost(plan)))[:_LISTED]
    return [study.change(tried[plan], plan) for plan in best]
