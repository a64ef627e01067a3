"""Explains what XLA communicates under the program's own shardings, at what cost, and which constraints would avoid its
involuntary rematerialisations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from toast_cli.ask_xla.annotated import AsAnnotated, Axes, Mend, Rematerialisation, helpers, mend, priced
from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.collectives import CompiledCollective
from toast_cli.ask_xla.verdict import place_of
from toast_cli.emit.stablehlo import constraint_line
from toast_cli.program.quantities import format_bytes, format_count, format_plural, format_ratio, format_seconds
from toast_cli.report.explain.study import Explanation, Item, Study

_LISTED, _MENDED = 20, 3  # collectives and arrays listed


def explain_annotated(study: Study, found: AsAnnotated, content: bytes, where: str) -> Explanation:
    """The program's own shardings beside toast's plan."""
    again = priced(found.partitioned, found.mesh, helpers(content, where))
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
    explained = study.explanation(
        "as annotated",
        sentences,
        listed="what XLA's partitioner communicates, the dearest first",
        items=_items(found),
        alternatives="what a step would take",
        changes=[study.priced("with toast's plan", plan)],
    )
    axes = dict(zip(found.mesh.names, found.mesh.sizes, strict=True))
    return replace(
        explained,
        axes=axes,
        summary="the program's own shardings",
        step_seconds=cost.step_seconds,
        peak_bytes=round(cost.peak_bytes),
        limit_bytes=study.problem.mesh.limit_bytes,
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
