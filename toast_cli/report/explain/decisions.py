"""Explains the saving of all decisions in short, or one at length; a source line's work, and the decisions that cause
a collective.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict

from toast_cli.errors import UsageError
from toast_cli.frontend.places import users_frame
from toast_cli.plan.decisions import Decision, Plan, Replicate, Shard
from toast_cli.plan.loops import ACCUMULATORS, LOOP_READS
from toast_cli.plan.sharding import shards
from toast_cli.price.cost import BY_HAND, INSIDE, CollectiveUse
from toast_cli.program.ops import ARGUMENT
from toast_cli.program.quantities import format_bytes, format_count, format_percent, format_plural, format_seconds
from toast_cli.report.explain.study import Change, Explanation, Item, Study
from toast_cli.report.words import role_name
from toast_cli.search.incumbent import Objective
from toast_cli.search.moves import subject
from toast_cli.tactics.model import DIMENSIONS

# Limits on alternatives and collectives listed.
_DECISIONS_LISTED = 6


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
    largest = sorted((key for key in gains if abs(gains[key]) > 1e-7), key=lambda key: -abs(gains[key]))[
        :_DECISIONS_LISTED
    ]
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
    best = sorted(tried, key=lambda plan: objective.rank(plan, study.evaluator.cost(plan)))[:_DECISIONS_LISTED]
    return [study.change(tried[plan], plan) for plan in best]


# ---------------------------------------------------------------- collectives
# Explains a source line's work, and the decisions that cause a collective.

_COLLECTIVES_LISTED = 10
_PLACE = re.compile(r"(.+):(\d+)")


def explain_line(study: Study, place: str) -> Explanation:
    """Explains a source line: the local shapes of its ops, its collectives, and the saving of each decision that
    affects it."""
    matched = _PLACE.fullmatch(place)
    if matched is None:
        raise UsageError(
            f"cannot read {place!r}", where="--collective", hint="give a number or FILE:LINE (model.py:75)"
        )
    wanted = f"{matched[1].rsplit('/', 1)[-1]}:{matched[2]}"
    program = study.problem.program
    stacks = [study.source.stack(k) for k in range(len(program.ops))]
    ops = [k for k, stack in enumerate(stacks) if stack and stack[users_frame(stack)].place == wanted]
    ops = ops or [k for k, stack in enumerate(stacks) if any(frame.place == wanted for frame in stack)]
    if not ops:
        raise UsageError(f"no operation comes from {wanted}", where="--collective", hint=_nearby(study, wanted))
    acting = _acting(study, ops)
    work = sum(program.ops[k].flops * program.ops[k].trips for k in ops)
    shares = {k: study.share_of_ops(use, set(ops)) for k, use in enumerate(study.collectives)}
    here = sorted((k for k in shares if shares[k] > 0), key=lambda k: -study.collectives[k].seconds * shares[k])
    seconds = sum(study.collectives[k].seconds * shares[k] for k in here)
    sentences = [
        f"{format_plural(len(ops), 'op')} {'comes' if len(ops) == 1 else 'come'} from this line, with "
        f"{format_percent(work / max(program.flops, 1.0))} of the program's "
        f"arithmetic, and {format_seconds(seconds)} of communication "
        f"({format_percent(seconds / max(study.cost.communication_seconds, 1e-12))} of all)."
    ]
    sentences += [
        f"{text}, in {format_plural(count, 'op')}." for text, count in acting.most_common(_COLLECTIVES_LISTED)
    ]
    items = [*_computations(study, ops), *(study.collective_item(k, shares[k]) for k in here[:_COLLECTIVES_LISTED])]
    numbers = sorted({n for n, d in enumerate(study.plan, 1) if any(text.endswith(f"decision {n}") for text in acting)})
    changes = [study.change(f"without {study.numbered(n)}", study.without(n)) for n in numbers]
    return study.explanation(
        wanted, sentences, listed="what happens there, on each device", items=items,
        alternatives="what the whole plan would cost", changes=changes,
    )  # fmt: skip


def _nearby(study: Study, wanted: str) -> str:
    file, _, line = wanted.partition(":")
    lines = {
        frame.line
        for k in range(len(study.problem.program.ops))
        for frame in study.source.stack(k)
        if frame.place.rpartition(":")[0] == file
    }
    if not lines:
        return f"the program holds no lines of {file}; save it with debug_info=True for source lines"
    near = sorted(sorted(lines, key=lambda n: (abs(n - int(line)), n))[:4])
    return f"lines of {file} it has: {', '.join(map(str, near))}"


def _acting(study: Study, ops: list[int]) -> Counter[str]:
    """Sentences without their ends: which dimension is split by which decision -> in how many ops."""
    problem = study.problem
    found: Counter[str] = Counter()
    for op in ops:
        pattern = problem.op_pattern[op]
        of = problem.patterns[pattern]
        for factor, axes in enumerate(study.op_shardings[pattern].factor_axes):
            for axis in axes:
                giver = study.giver(pattern, [factor], axis)
                name, kind = problem.dimensions.groups[of.groups[factor]].name, of.form.kinds[factor].name
                how = ", summed over: partial results" if kind == "REDUCTION" else ""
                by = f"decision {giver} " if giver else "a pin "
                found[f"{name} is split over {problem.mesh.names[axis]}{how}, by {by}"] += 1
    return Counter({text.rstrip(): count for text, count in found.items()})


def _computations(study: Study, ops: list[int]) -> list[Item]:
    program = study.problem.program
    alike: Counter[tuple[str, str]] = Counter()
    for k in ops:
        op = program.ops[k]
        if op.results and op.flops:
            value = op.results[0]
            alike[
                f"{op.name.partition('.')[2]} {program.values[value]}", study.sharding(study.lowered.shardings[value])
            ] += 1
    return [Item(text, sharding, count) for (text, sharding), count in alike.most_common(_COLLECTIVES_LISTED)]


def explain_collective(study: Study, number: int) -> Explanation:
    """Explains a group of equal collectives (a row of the report, counted from 1): their cause, and their fate without
    each decision that they depend on."""
    rows = study.collective_rows
    if not 1 <= number <= len(rows):
        raise UsageError(
            f"there is no collective {number}",
            where="--collective",
            hint=f"the plan has {len(rows)}, numbered as in the report, the most expensive first"
            if rows
            else "in this plan the devices never communicate",
        )
    row = rows[number - 1]
    use, seconds = row[0], sum(one.seconds for one in row)
    names = "+".join(use.over(study.problem.mesh.names))
    sentences = [
        f"{use.kind} over {names}, {format_count(sum(one.count for one in row))} times a step, "
        f"{format_bytes(use.bytes)} on each device each time: "
        f"{format_seconds(seconds)}, "
        f"{format_percent(seconds / max(study.cost.communication_seconds, 1e-12))} of all communication.",
        *([f"It moves {len(row)} kinds of arrays; the following is about the first."] if len(row) > 1 else []),
        *_because(study, use),
    ]
    changes = []
    for k, decision in enumerate(study.plan, 1):
        if decision.axis in use.axes:
            change = _change(study, row, k)
            if change is not None:
                changes.append(change)
    items = [
        study.collective_item(k)
        for k, other in enumerate(study.collectives)
        if other.value == use.value and other is not use and BY_HAND not in (use.reason, other.reason)
    ]
    return study.explanation(
        f"collective {number}: {use.kind} over {names} at {study.place(use.op, use.place)}", sentences,
        listed="other collectives on the same array", items=items[:_COLLECTIVES_LISTED],
        alternatives="what it hangs on", changes=changes,
    )  # fmt: skip


def _because(study: Study, use: CollectiveUse) -> list[str]:
    """Sentences on how the array is made, how its reader needs it, and the decisions that cause this."""
    problem = study.problem
    program, names = problem.program, problem.mesh.names
    if use.reason == BY_HAND:
        return ["The program does it itself, in a manual region: it is there under every plan."]
    if use.reason == INSIDE:
        return ["It is in a manual region, along axes that the region leaves to the partitioner."]
    maker = program.producer[use.value]
    if use.reason == "one device":
        return [f"One device makes {program.values[use.value]} for all, at {study.place(maker)}."]
    made = problem.op_pattern[maker]
    sentences = [f"The array is {program.values[use.value]}, made at {study.place(maker)}."]
    for axis in use.axes:
        holder, name = study.holder(made, axis)
        summed = use.reason == "partial"
        by = f"decision {holder}" if holder else "a pin"
        if summed and name:
            where = (
                "each piece of the result goes to one device"
                if use.kind == "reduce-scatter"
                else "every device needs the total"
            )
            sentences.append(
                f"The op that makes it sums over {name}, which {by} splits over {names[axis]}: each device has "
                f"a part of the sum, and {where}."
            )
        elif axis in study.lowered.partial.get(use.value, ()):
            sentences.append(f"It is summed up over {names[axis]}, and each device keeps a piece of the total.")
        elif name:
            sentences.append(f"It is made split over {names[axis]} along {name} ({by}).")
        if not summed and use.op != maker:
            holder, taken = study.holder(problem.op_pattern[use.op], axis)
            if taken and taken != name:
                sentences.append(
                    f"Its reader at {study.place(use.op)} gives {names[axis]} to {taken} (decision {holder}), "
                    "so it needs other pieces."
                )
            elif not taken:
                sentences.append(
                    f"Its reader at {study.place(use.op)} has nothing to split over {names[axis]} and needs it whole."
                )
    return sentences


def _change(study: Study, uses: list[CollectiveUse], number: int) -> Change | None:
    """The effect on collectives of removing a decision; None if there is none."""
    plan = study.without(number)
    seconds = sum(use.seconds for use in uses)
    same = {(use.op, use.value, use.kind, use.axes) for use in uses}
    left = sum(o.seconds for o in study.evaluator.collectives(plan) if (o.op, o.value, o.kind, o.axes) in same)
    if abs(left - seconds) < 1e-3 * seconds:
        return None
    note = "it is gone" if left == 0 else f"it takes {format_seconds(left)}"
    return study.change(f"without {study.numbered(number)}", plan, note)
