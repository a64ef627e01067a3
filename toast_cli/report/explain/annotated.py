"""Explains which of the program's own shardings make XLA communicate, at what cost, and which constraints would avoid
it.

In: a `Study` of toast's plan, the priced program under its own shardings, and its content. Out: an explanation.
The effect of a constraint is found by removing it and partitioning the rest with XLA.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from toast_cli.ask_xla.annotated import (
    Annotations,
    AsAnnotated,
    Axes,
    Mend,
    Rematerialisation,
    as_annotated,
    mend,
    priced,
)
from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.collectives import CompiledCollective
from toast_cli.ask_xla.verdict import place_of
from toast_cli.emit.stablehlo import constraint_line
from toast_cli.program.quantities import format_bytes, format_count, format_plural, format_ratio, format_seconds
from toast_cli.report.explain.study import Change, Explanation, Item, Study

# Limits: lines whose constraints are removed, and collectives and arrays listed.
_TRIED, _LISTED, _MENDED = 8, 20, 3
_DIFFERS = 0.001  # relative difference of step times that counts


def explain_annotated(study: Study, found: AsAnnotated, content: bytes, where: str) -> Explanation:
    """The program's own shardings beside toast's plan."""
    annotations = Annotations.of(content, where)
    again = priced(found.partitioned, found.mesh, annotations.helpers)
    found = found if isinstance(again, Failure) else again
    cost, plan = found.cost, study.cost
    gained = format_ratio(cost.step_seconds / plan.step_seconds) if plan.step_seconds else ""
    sentences = [
        f"With the program's own shardings a step takes {format_seconds(cost.step_seconds)}, "
        f"{format_seconds(cost.communication_seconds)} of it communication, and {format_bytes(cost.peak_bytes)} on "
        f"each device; with toast's plan {format_seconds(plan.step_seconds)} and {format_bytes(plan.peak_bytes)} "
        f"({gained}).",
        *_rematerialised(found),
    ]
    mesh, changes = study.problem.mesh, _without(study, found, annotations)
    if annotations.lines and not changes:
        sentences.append("Without the constraints of any one line XLA does the same: other shardings say as much.")
    explained = study.explanation(
        "as annotated",
        sentences,
        listed="what XLA's partitioner communicates, the dearest first",
        items=_items(found),
        alternatives="what a step would take",
        changes=[study.priced("with toast's plan", plan), *changes],
    )
    axes = dict(zip(found.mesh.names, found.mesh.sizes, strict=True))
    return replace(
        explained,
        axes=axes,
        summary="the program's own shardings",
        step_seconds=cost.step_seconds,
        peak_bytes=round(cost.peak_bytes),
        limit_bytes=mesh.limit_bytes,
    )


def _rematerialised(found: AsAnnotated) -> Iterator[str]:
    """A sentence for each array that XLA rematerialises fully, with the constraint that avoids it."""
    for one in found.rematerialised[:_MENDED]:
        yield _remedy(one, mend(one, found.mesh), found)
    if (rest := len(found.rematerialised) - _MENDED) > 0:
        yield f"{format_plural(rest, 'more array')} are gathered so."


def _remedy(one: Rematerialisation, way: Mend | None, found: AsAnnotated) -> str:
    kind = f"{one.type}[{','.join(map(str, one.shape))}]"
    times = f"{format_count(one.count)} times a step, " if one.count != 1 else ""
    sentence = (
        f"{one.place or one.name}: XLA finds no way from {_spec(one.start)} to {_spec(one.end)} and gathers all of "
        f"{kind} on every device (involuntary full rematerialisation; {times}{format_bytes(one.bytes)} each)."
    )
    if way is None:
        return f"{sentence} No sharding in between that toast tried is faster here; it goes where both say the same."
    lines = "; ".join(constraint_line(at, found.mesh.names) for at in way.through)
    return (
        f"{sentence} It takes {format_seconds(one.count * way.direct_seconds)}, and "
        f"{format_seconds(one.count * way.seconds)} with this constraint in between: {lines}"
    )


def _spec(axes: Axes | None) -> str:
    """`P("data", None)`."""
    if axes is None:
        return "a sharding that lies along no mesh axes"
    entries = [f"({', '.join(names)})" if len(names) > 1 else names[0] if names else "None" for names in axes]
    return f"P({', '.join(entries)})"


def _items(found: AsAnnotated) -> list[Item]:
    """Collectives, with equal ones of one place merged."""
    alike: dict[CompiledCollective, tuple[float, float]] = {}
    for one, seconds in found.collectives:
        key = replace(one, count=1.0)
        count, spent = alike.get(key, (0.0, 0.0))
        alike[key] = count + one.count, spent + seconds
    items = [
        Item(f"{one.kind} over {'+'.join(one.axes)}", place_of(one), count, seconds, one.bytes)
        for one, (count, seconds) in alike.items()
    ]
    return sorted(items, key=lambda item: -item.seconds)[:_LISTED]


def _without(study: Study, found: AsAnnotated, annotations: Annotations) -> list[Change]:
    """The step's cost without the constraints of each line; lines that change nothing are left out."""
    at = defaultdict[str, float](float)
    for one, seconds in found.collectives:
        at[one.location] += seconds
    places = {one.place for one in found.rematerialised}
    lines = sorted(annotations.lines, key=lambda line: (line not in places, -at[line]))[:_TRIED]
    with ThreadPoolExecutor(max(1, min(len(lines), os.cpu_count() or 1))) as pool:
        answers = pool.map(
            lambda program: as_annotated(program, found.mesh, annotations.helpers), map(annotations.without, lines)
        )
        changes = [
            study.priced(f"without the constraint at {line}", answer.cost, _what_goes(found, answer))
            for line, answer in zip(lines, list(answers), strict=True)
            if not isinstance(answer, Failure) and _differ(found, answer)
        ]
    return sorted(changes, key=lambda change: change.step_seconds)


def _differ(one: AsAnnotated, other: AsAnnotated) -> bool:
    step = one.cost.step_seconds
    return abs(other.cost.step_seconds - step) > _DIFFERS * step or one.collectives != other.collectives


def _what_goes(before: AsAnnotated, after: AsAnnotated) -> str:
    """`all-gather over data at model.py:17 goes; all-reduce over model at model.py:20 comes`: the most expensive of
    each."""
    rematerialised = len(before.rematerialised) - len(after.rematerialised)
    notes = ["no involuntary rematerialisation" if not after.rematerialised else ""] if rematerialised > 0 else []
    for word, one, other in (("goes", before, after), ("comes", after, before)):
        there = Counter(each for each, _ in other.collectives)
        for each, _ in one.collectives:
            if not there[each]:
                notes.append(f"{each.kind} over {'+'.join(each.axes)} at {each.location or each.name} {word}")
                break
            there[each] -= 1
    return "; ".join(filter(None, notes))
