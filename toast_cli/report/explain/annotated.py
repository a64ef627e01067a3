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


def explain_annotated(study: Study, annotated: AsAnnotated, content: bytes, where: str) -> Explanation:
    """The program's own shardings beside toast's plan."""
    again = priced(annotated.partitioned, annotated.mesh, helpers(content, where))
    annotated = annotated if isinstance(again, Failure) else again
    cost, plan = annotated.cost, study.cost
    gained = format_ratio(cost.step_seconds / plan.step_seconds) if plan.step_seconds else ""
    sentences = [
        f"With the program's own shardings a step takes {format_seconds(cost.step_seconds)}, "
        f"{format_seconds(cost.communication_seconds)} of it communication, and {format_bytes(cost.peak_bytes)} on "
        f"each device; with toast's plan {format_seconds(plan.step_seconds)} and {format_bytes(plan.peak_bytes)} "
        f"({gained}).",
        *_rematerialised(annotated),
    ]
    explained = study.explanation(
        "as annotated",
        sentences,
        listed="what XLA's partitioner communicates, the dearest first",
        items=_items(annotated),
        alternatives="what a step would take",
        changes=[study.priced("with toast's plan", plan)],
    )
    return replace(
        explained,
        axes=annotated.mesh.shape,
        summary="the program's own shardings",
        step_seconds=cost.step_seconds,
        peak_bytes=round(cost.peak_bytes),
        limit_bytes=study.problem.mesh.limit_bytes,
    )


def _rematerialised(annotated: AsAnnotated) -> Iterator[str]:
    """A sentence for each array that XLA rematerialises fully, with the constraint that avoids it."""
    for array in annotated.rematerialised[:_MENDED]:
        yield _remedy(array, mend(array, annotated.mesh), annotated)
    if (rest := len(annotated.rematerialised) - _MENDED) > 0:
        yield f"{format_plural(rest, 'more array')} are gathered so."


def _remedy(array: Rematerialisation, way: Mend | None, annotated: AsAnnotated) -> str:
    kind = f"{array.type}[{','.join(map(str, array.shape))}]"
    times = f"{format_count(array.count)} times a step, " if array.count != 1 else ""
    sentence = (
        f"{array.place or array.name}: XLA finds no way from {_spec(array.start)} to {_spec(array.end)} and gathers "
        f"all of {kind} on every device (involuntary full rematerialisation; {times}{format_bytes(array.bytes)} each)."
    )
    if way is None:
        return f"{sentence} No sharding in between that toast tried is faster here; it goes where both say the same."
    lines = "; ".join(constraint_line(sharding, annotated.mesh.names) for sharding in way.through)
    return (
        f"{sentence} It takes {format_seconds(array.count * way.direct_seconds)}, and "
        f"{format_seconds(array.count * way.seconds)} with this constraint in between: {lines}"
    )


def _spec(axes: Axes | None) -> str:
    """`P("data", None)`."""
    if axes is None:
        return "a sharding that lies along no mesh axes"
    entries = [f"({', '.join(names)})" if len(names) > 1 else names[0] if names else "None" for names in axes]
    return f"P({', '.join(entries)})"


def _items(annotated: AsAnnotated) -> list[Item]:
    """Collectives, with equal ones of one place merged."""
    alike: dict[CompiledCollective, tuple[float, float]] = {}
    for use, seconds in annotated.collectives:
        key = replace(use, count=1.0)
        count, spent = alike.get(key, (0.0, 0.0))
        alike[key] = count + use.count, spent + seconds
    items = [
        Item(f"{use.kind} over {'+'.join(use.axes)}", place_of(use), count, seconds, use.bytes)
        for use, (count, seconds) in alike.items()
    ]
    return sorted(items, key=lambda item: -item.seconds)[:_LISTED]
