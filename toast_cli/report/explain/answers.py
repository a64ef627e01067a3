"""Answers four questions about a plan: what is each decision worth; what does one decision do, or how are some
arguments split; what causes a collective, or all that a source line does; and what is alive at the memory peak.

Every answer has reasons in words, a list, and the cost of plans that differ in one thing.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from toast_cli.base.errors import UsageError
from toast_cli.base.files import read_whole_number
from toast_cli.frontend.places import users_frame
from toast_cli.plan.decisions import Decision, Plan, Replicate, Shard
from toast_cli.plan.loops import ACCUMULATORS, LOOP_READS
from toast_cli.plan.sharding import shards
from toast_cli.price.cost import BY_HAND, INSIDE, CollectiveUse, Cost
from toast_cli.program.names import matching, nearest_paths, shown_path, slash_path
from toast_cli.program.ops import ARGUMENT
from toast_cli.program.quantities import (
    NamedArray,
    fold,
    format_bytes,
    format_count,
    format_percent,
    format_plural,
    format_seconds,
)
from toast_cli.program.roles import views
from toast_cli.report.explain.study import Change, Explanation, Item, Study
from toast_cli.report.words import ALIVE, role_name, traffic
from toast_cli.search.incumbent import Objective
from toast_cli.search.moves import NEIGHBOURHOODS, Edit, Moves, results
from toast_cli.tactics.model import DIMENSIONS

_LISTED = 10  # items of a list, and sentences about ops
_CHANGES_LISTED = 8


def explain(
    study: Study, *, decision: str | None = None, collective: str | None = None, peak: bool = False
) -> Explanation:
    """The answer to one question; about the whole plan if none is asked.

    Args:
        decision: its number, or a pattern of arguments as for `--pin`. collective: its number in the report, or
            FILE:LINE.
    """
    if decision is not None:
        number = read_whole_number(decision)
        return _explain_arguments(study, decision) if number is None else _explain_decision(study, number)
    if collective is not None:
        number = read_whole_number(collective)
        return _explain_line(study, collective) if number is None else _explain_collective(study, number)
    return _explain_peak(study) if peak else _explain_plan(study)


# ---------------------------------------------------------------- the plan


def _explain_plan(study: Study) -> Explanation:
    """Every decision and the plan's cost without it."""
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


# ---------------------------------------------------------------- a decision, or arguments


def _explain_decision(study: Study, number: int) -> Explanation:
    """Explains what a decision splits, which collectives it adds and avoids, and what could replace it."""
    if not 1 <= number <= len(study.plan):
        raise UsageError(
            f"there is no decision {number}",
            where="--decision",
            hint=f"the plan has {len(study.plan)}, numbered from 1",
        )
    decision = study.plan[number - 1]
    objective = Objective(study.problem, study.evaluator.cost(study.problem.fixed))
    instead = _edited(study, lambda edit: edit.out == (decision,) and bool(edit.into), objective.rank)
    own = f" of {study.numbered(number)}"
    return study.explanation(
        f"decision {number}: {study.words(decision)}", _what_it_does(study, number, decision),
        listed="communication that it adds (+) and avoids (-)", items=_traffic(study, number),
        alternatives="what the plan would cost otherwise",
        changes=[
            study.change("without it", study.without(number)),
            *(replace(change, what=change.what.removesuffix(own)) for change in instead),
        ],
    )  # fmt: skip


def _what_it_does(study: Study, number: int, decision: Decision) -> list[str]:
    problem, axis = study.problem, study.problem.mesh.names[decision.axis]
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
    ways = problem.mesh.sizes[decision.axis]
    arguments: list[int] = []
    ops, blocked = 0, Counter[str]()  # ops that it splits; why it does nothing -> in how many ops with work
    why = {p: study.why_not(p, number) for p, groups in enumerate(problem.pattern_groups) if decision.group in groups}
    for op, pattern in zip(problem.program.ops, problem.op_pattern, strict=True):
        if pattern not in why:
            continue
        if why[pattern]:
            blocked[why[pattern]] += bool(op.flops)
        elif op.name == ARGUMENT:
            arguments.append(op.results[0])
        else:
            ops += 1
    are = "argument is" if len(arguments) == 1 else "arguments are"
    compute = "op computes" if ops == 1 else "ops compute"
    sizes = [problem.program.values[value].bytes for value in arguments]
    local = sum(
        size / shards(study.lowered.shardings[value], problem.mesh.sizes)
        for value, size in zip(arguments, sizes, strict=True)
    )
    return [
        f"It splits {group.name} ({format_count(group.size)}{alike}) {ways} ways over {axis}{meaning}.",
        f"With it {format_count(len(arguments))} {are} sharded over {axis} between steps "
        f"({format_bytes(sum(sizes))} in all, {format_bytes(local)} on each device), and {format_count(ops)} other "
        f"{compute} on pieces.",
        *(
            f"In {format_count(count)} op{'s' * (count != 1)} it does nothing: {reason}."
            for reason, count in blocked.most_common(3)
            if count
        ),
    ]


def _traffic(study: Study, number: int) -> list[Item]:
    """Kinds of collectives whose time the decision changes, by how much."""
    others = study.evaluator.collectives(study.without(number))
    changes = traffic(study.collectives, others, study.problem.mesh.names)
    return [
        Item(
            f"{'+' if with_it > without else '-'} {name}",
            f"{format_seconds(with_it)} with it, {format_seconds(without)} without",
            seconds=abs(with_it - without),
        )
        for name, with_it, without in changes[:_LISTED]
        if abs(with_it - without) > 1e-7
    ]


def _explain_arguments(study: Study, pattern: str) -> Explanation:
    """Explains how the matching arguments are split, by which decisions, and what reads them.

    Args:
        pattern: as for `--pin`: a path in which * is anything, or argN.
    """
    program, lowered, problem = study.problem.program, study.lowered, study.problem
    matched = matching(pattern, (a.label for a in program.arguments))
    if not matched:
        nearest = nearest_paths(pattern, (a.label for a in program.arguments))
        raise UsageError(
            f"no argument matches {pattern!r}", where="--decision", hint=f"the nearest arguments are {nearest}"
        )
    values = [program.arguments[k].value for k in matched]
    rows = fold(
        [
            NamedArray(shown_path(program.arguments[k].label, k), (str(program.values[v]), lowered.shardings[v]))
            for k, v in zip(matched, values, strict=True)
        ]
    )
    items = []
    for row in rows:
        value, role = values[row.members[0]], problem.roles[problem.argument_role[matched[row.members[0]]]]
        size = sum(program.values[values[member]].bytes for member in row.members)
        detail = f"{study.sharding(lowered.shardings[value])}, {role}"
        items.append(Item(f"{row.pattern} {program.values[value]}", detail, len(row.members), bytes=size))
    # The arrays that are the arguments in another form, such as converted ones, and what reads them.
    same = {value for value, argument in views(program).items() if argument in set(matched)}
    readers = {
        program.ops[op].name.partition(".")[2] for value in same for op, _ in program.users[value]
        if not any(result in same for result in program.ops[op].results)
    }  # fmt: skip
    seconds = sum(use.seconds * study.share_of_values(use, same) for use in study.collectives)
    moves = f"moving them takes {format_seconds(seconds)} a step" if seconds else "they do not move"
    splits, numbers = _splits(study, [program.producer[value] for value in values])
    return study.explanation(
        f"argument {pattern}", [*splits, f"Read by {', '.join(sorted(readers)) or 'nothing'}; {moves}."],
        listed="arguments that match", items=sorted(items, key=lambda item: -item.bytes)[:_LISTED],
        alternatives="what the whole plan would cost", changes=_without(study, numbers),
    )  # fmt: skip


def _splits(study: Study, ops: Iterable[int]) -> tuple[list[str], list[int]]:
    """(sentences on how ops are split, by which decisions, and why other decisions about their dimensions do nothing
    there; the numbers of the decisions that split them)."""
    problem, names = study.problem, study.problem.mesh.names
    sentence_counts, numbers = Counter[str](), set[int]()
    for pattern, count in Counter(problem.op_pattern[op] for op in ops).items():
        of = problem.patterns[pattern]
        for factor, axes in enumerate(study.op_shardings[pattern].factor_axes):
            for axis in axes:
                giver = study.giver(pattern, [factor], axis)
                numbers.add(giver)
                group, kind = problem.dimensions.groups[of.groups[factor]].name, of.form.kinds[factor].name
                how = ", summed over: partial results" if kind == "REDUCTION" else ""
                by = f"decision {giver}" if giver else "a pin"
                sentence_counts[f"{group} is split over {names[axis]}{how}, by {by}"] += count
        for number, decision in enumerate(study.plan, 1):
            if isinstance(decision, Shard) and decision.group in of.groups and (why := study.why_not(pattern, number)):
                sentence_counts[f"{study.numbered(number)} does nothing: {why}"] += count
    sentences = [f"{text}, in {format_plural(count, 'op')}." for text, count in sentence_counts.most_common(_LISTED)]
    return sentences or ["No decision splits them."], sorted(numbers - {0})


def _without(study: Study, numbers: Iterable[int], uses: list[CollectiveUse] | None = None) -> Iterator[Change]:
    """The plan's cost without each of these decisions; a note says what becomes of `uses`, if they change."""
    seconds = sum(use.seconds for use in uses or ())
    same = {(use.op, use.value, use.kind, use.axes) for use in uses or ()}
    for number in numbers:
        plan, note = study.without(number), ""
        if uses:
            others = study.evaluator.collectives(plan)
            left = sum(o.seconds for o in others if (o.op, o.value, o.kind, o.axes) in same)
            if abs(left - seconds) >= 1e-3 * seconds:
                note = f"it takes {format_seconds(left)}" if left else "it is gone"
        yield study.change(f"without {study.numbered(number)}", plan, note)


_REMOVED = 3  # most decisions that one change removes
_PLACES = 3  # of each edit
_PLANS_TRIED = 2000


def _edited(study: Study, wanted: Callable[[Edit], bool], rank: Callable[[Plan, Cost], Any]) -> list[Change]:
    """The best of the plans that the search's edits lead to, each with what it changes; the best of equal words."""
    moves, words_of = Moves(study.problem), dict[Plan, str]()
    edits = (edit for neighbourhood in NEIGHBOURHOODS.values() for edit in neighbourhood(moves, study.plan))
    for edit in filter(wanted, edits):
        for plan in islice(results(study.problem, study.plan, edit), _PLACES):
            words_of.setdefault(plan, _edit_text(study, edit))
        if len(words_of) > _PLANS_TRIED:
            break
    words_of.pop(study.plan, None)
    quick = sorted(words_of, key=lambda plan: rank(plan, study.evaluator.cost(plan)))[: 3 * _CHANGES_LISTED]
    best = dict[str, Change]()
    for plan in sorted(quick, key=lambda plan: rank(plan, study.evaluator.exact_cost(plan))):
        best.setdefault(words_of[plan], study.change(words_of[plan], plan))
    return [*best.values()][:_CHANGES_LISTED]


def _edit_text(study: Study, edit: Edit) -> str:
    """`also seq over model`, `seq over model instead of decision 4 (ff over model)`."""
    into = ", ".join(study.words(d) for d in edit.into[:3]) + (
        f" and {len(edit.into) - 3} more" if len(edit.into) > 3 else ""
    )
    if not edit.out:
        return f"also {into}"
    out = ", ".join(study.numbered(study.plan.index(d) + 1) for d in edit.out)
    if not edit.into:
        return f"without {out}"
    return f"{out} at another priority" if edit.into == edit.out else f"{into} instead of {out}"


# ---------------------------------------------------------------- a collective, or a source line

_PLACE = re.compile(r"(.+):(\d+)")


def _explain_line(study: Study, place: str) -> Explanation:
    """Explains a source line: the local shapes of its ops, its collectives, and the saving of each decision that
    affects it."""
    matched = _PLACE.fullmatch(place)
    if matched is None:
        raise UsageError(
            f"cannot read {place!r}", where="--collective", hint="give a number or FILE:LINE (model.py:75)"
        )
    line = f"{matched[1].rsplit('/', 1)[-1]}:{matched[2]}"
    program = study.problem.program
    stacks = [study.source.stack(k) for k in range(len(program.ops))]
    ops = [k for k, stack in enumerate(stacks) if stack and stack[users_frame(stack)].place == line]
    ops = ops or [k for k, stack in enumerate(stacks) if any(frame.place == line for frame in stack)]
    if not ops:
        raise UsageError(f"no operation comes from {line}", where="--collective", hint=_nearby(study, line))
    work = sum(program.ops[k].flops * program.ops[k].trips for k in ops)
    shares = {k: study.share_of_ops(use, set(ops)) for k, use in enumerate(study.collectives)}
    numbers_here = sorted((k for k in shares if shares[k] > 0), key=lambda k: -study.collectives[k].seconds * shares[k])
    seconds = sum(study.collectives[k].seconds * shares[k] for k in numbers_here)
    splits, numbers = _splits(study, ops)
    sentences = [
        f"{format_plural(len(ops), 'op')} {'comes' if len(ops) == 1 else 'come'} from this line, with "
        f"{format_percent(work / max(program.flops, 1.0))} of the program's "
        f"arithmetic, and {format_seconds(seconds)} of communication "
        f"({format_percent(seconds / max(study.cost.communication_seconds, 1e-12))} of all).",
        *splits,
    ]
    computed: Counter[tuple[str, str]] = Counter()
    for op in (program.ops[k] for k in ops):
        if op.results and op.flops:
            text = f"{op.name.partition('.')[2]} {program.values[op.results[0]]}"
            computed[text, study.sharding(study.lowered.shardings[op.results[0]])] += 1
    items = [Item(*text, count) for text, count in computed.most_common(_LISTED)]
    return study.explanation(
        line, sentences, listed="what happens there, on each device",
        items=[*items, *(study.collective_item(k, shares[k]) for k in numbers_here[:_LISTED])],
        alternatives="what the whole plan would cost", changes=_without(study, numbers),
    )  # fmt: skip


def _nearby(study: Study, place: str) -> str:
    file, _, line = place.partition(":")
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


def _explain_collective(study: Study, number: int) -> Explanation:
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
    use, seconds = row[0], sum(alike.seconds for alike in row)
    names = "+".join(use.over(study.problem.mesh.names))
    sentences = [
        f"{use.kind} over {names}, {format_count(sum(alike.count for alike in row))} times a step, "
        f"{format_bytes(use.bytes)} on each device each time: "
        f"{format_seconds(seconds)}, "
        f"{format_percent(seconds / max(study.cost.communication_seconds, 1e-12))} of all communication.",
        *([f"It moves {len(row)} kinds of arrays; the following is about the first."] if len(row) > 1 else []),
        *_because(study, use),
    ]
    along = (k for k, decision in enumerate(study.plan, 1) if decision.axis in use.axes)
    items = [
        study.collective_item(k)
        for k, other in enumerate(study.collectives)
        if other.value == use.value and other is not use and BY_HAND not in (use.reason, other.reason)
    ]
    return study.explanation(
        f"collective {number}: {use.kind} over {names} at {study.place(use.op, use.place)}", sentences,
        listed="other collectives on the same array", items=items[:_LISTED],
        alternatives="what it hangs on", changes=[change for change in _without(study, along, row) if change.note],
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
    maker_pattern = problem.op_pattern[maker]
    sentences = [f"The array is {program.values[use.value]}, made at {study.place(maker)}."]
    for axis in use.axes:
        holder, name = study.holder(maker_pattern, axis)
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
            holder, reader_dim = study.holder(problem.op_pattern[use.op], axis)
            if reader_dim and reader_dim != name:
                sentences.append(
                    f"Its reader at {study.place(use.op)} gives {names[axis]} to {reader_dim} (decision {holder}), "
                    "so it needs other pieces."
                )
            elif not reader_dim:
                sentences.append(
                    f"Its reader at {study.place(use.op)} has nothing to split over {names[axis]} and needs it whole."
                )
    return sentences


# ---------------------------------------------------------------- the peak


def _explain_peak(study: Study) -> Explanation:
    """The arrays alive at the memory peak, and changes that lower it."""
    program, cost, limit = study.problem.program, study.cost, study.problem.mesh.limit_bytes
    op, alive = study.evaluator.alive_at_peak(study.plan)
    paths = {a.value: slash_path(a.path) for a in program.arguments if a.path}
    entries, sizes = [], defaultdict[str, float](float)
    for a in alive:
        sizes[a.role] += a.bytes
        of_type = "" if a.role == "inside" else str(program.values[a.value])
        place = study.place(program.producer[a.value])
        # Arrays without a path of their own are of one row if they are made at places that differ in numbers alone.
        place_key = () if a.value in paths else (re.sub(r"\d+", "*", place),)
        entries.append(NamedArray(paths.get(a.value) or place, (a.role, of_type, round(a.bytes), *place_key)))
    items = []
    for row in fold(entries):
        role, kind, size, *_ = entries[row.members[0]].kind
        items.append(Item(f"{role} {kind}", row.pattern, len(row.members), bytes=len(row.members) * int(str(size))))
    largest = sorted(sizes.items(), key=lambda share: -share[1])
    sentences = [
        f"Memory peaks at {format_bytes(cost.peak_bytes)}, {format_percent(cost.peak_bytes / limit)} of "
        f"{format_bytes(limit)}, at "
        f"{study.place(min(op, len(program.ops) - 1))}.",
        "Alive there: " + ", ".join(f"{ALIVE[role]} {format_bytes(size)}" for role, size in largest) + ".",
    ]
    if sizes["temporary"] > cost.peak_bytes / 2:
        sentences.append(
            "More than half are temporaries: to compute some of them again instead (jax.checkpoint) is for the "
            "program to say."
        )
    edited = _edited(study, lambda edit: len(edit.out) <= _REMOVED, lambda _, cost: cost.peak_bytes)
    lower = [change for change in edited if change.peak_bytes < cost.peak_bytes * 0.999]
    if not lower:
        sentences.append("No single change to the plan lowers it.")
    return study.explanation(
        "peak memory", sentences, listed="alive at the peak", items=sorted(items, key=lambda item: -item.bytes)[:20],
        alternatives="what would lower it", changes=lower,
    )  # fmt: skip
