"""Explains a source line's work, and the decisions that cause a collective. In: a study. Out: explanations."""

from __future__ import annotations

import re
from collections import Counter

from toast_cli.cost.model import BY_HAND, INSIDE, CollectiveUse
from toast_cli.errors import UsageError
from toast_cli.explain.model import Change, Explanation, Item
from toast_cli.explain.study import Study
from toast_cli.frontend.places import users_frame
from toast_cli.quantities import format_bytes, format_count, format_percent, format_plural, format_seconds

_LISTED = 10
_PLACE = re.compile(r"(.+):(\d+)")


def explain_line(study: Study, place: str) -> Explanation:
    """Explains a source line: the local shapes of its ops, its collectives, and the saving of each decision that
    affects it."""
    matched = _PLACE.fullmatch(place)
    if matched is None:
        raise UsageError(f"cannot read {place!r}", where="--line", hint="write FILE:LINE, e.g. model.py:75")
    wanted = f"{matched[1].rsplit('/', 1)[-1]}:{matched[2]}"
    program = study.problem.program
    stacks = [study.source.stack(k) for k in range(len(program.ops))]
    ops = [k for k, stack in enumerate(stacks) if stack and stack[users_frame(stack)].place == wanted]
    ops = ops or [k for k, stack in enumerate(stacks) if any(frame.place == wanted for frame in stack)]
    if not ops:
        raise UsageError(f"no operation comes from {wanted}", where="--line", hint=_nearby(study, wanted))
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
    sentences += [f"{text}, in {format_plural(count, 'op')}." for text, count in acting.most_common(_LISTED)]
    items = [*_computations(study, ops), *(study.collective_item(k, shares[k]) for k in here[:_LISTED])]
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
    return [Item(text, sharding, count) for (text, sharding), count in alike.most_common(_LISTED)]


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
        listed="other collectives on the same array", items=items[:_LISTED],
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
