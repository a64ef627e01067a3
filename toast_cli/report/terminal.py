"""A report for people: a `Report` goes in, text for a terminal (or a log) comes out, section by section.

`print_report` shows all of it, `one_line` is the output of --quiet.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from typing import TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from toast_cli.price.memory_fit import NO, UNSURE, YES, fit_of
from toast_cli.program.names import slash_path
from toast_cli.program.quantities import (
    format_bytes,
    format_count,
    format_flops,
    format_percent,
    format_plural,
    format_price,
    format_ratio,
    format_seconds,
)
from toast_cli.report import arrays, style
from toast_cli.report.arrays import collectives, constraints, kernels, live_at_peak, time_by_line
from toast_cli.report.comparison import confirmation
from toast_cli.report.model import (
    BaselineFacts,
    BoundFacts,
    GoalFacts,
    PredictedFacts,
    Report,
    strategy_label,
)
from toast_cli.report.words import path_patterns, scope_texts


def goal(report: Report) -> RenderableType | None:
    """What was minimised and which bounds hold; None for the default goal."""
    asked = report.goal
    if asked == GoalFacts():
        return None
    rows = style.table([("", "left"), ("", "fold")], [("minimised", ", then ".join(asked.minimised))])
    for bound in asked.bounds:
        rows.add_row(Text("✓ holds", style.GOOD) if bound.holds else Text("✗ broken", style.BAD), bound_text(bound))
    return style.section("goal", rows)


def sizes(report: Report) -> RenderableType | None:
    """The sizes of a symbolic dimension that were tried for the largest that surely fits; None where that was not asked
    for."""
    facts = report.sizes
    if facts is None:
        return None
    heads = [(head, "right") for head in (facts.symbol, "step time", "a second", "peak memory")]
    rows = style.table([*heads, ("", "fold")])
    for tried in facts.tried:
        fit = Text(tried.why, style.BAD) if tried.why else Text("surely fits", style.GOOD)
        figures = (format_seconds(tried.step_seconds), format_count(round(tried.rate)), format_bytes(tried.peak_bytes))
        rows.add_row(f"{tried.size:,}", *(figures if tried.step_seconds else ("",) * 3), fit)
    return style.section(f"sizes of {facts.symbol}", rows, Text(facts.text, style.LABEL))


def together(report: Report) -> RenderableType | None:
    """The steps of programs that share the sharding of some arguments; None for a program by itself."""
    facts = report.together
    if facts is None:
        return None
    columns = [("", "name"), ("runs", "right"), ("step time", "right"), ("alone", "right"), ("keeps", "right")]
    rows = style.table(columns)
    for member in facts.programs:
        seconds = format_seconds(member.step_seconds), format_seconds(member.alone_seconds)
        rows.add_row(member.program, format_count(member.runs), *seconds, format_bytes(member.kept_bytes))
    rows.add_row("in all", "", format_seconds(facts.seconds), format_seconds(facts.alone_seconds), "")
    shared = format_plural(facts.shared, "argument")
    return style.section("together", rows, Text(f"{shared} of all programs have one sharding", style.LABEL))


def bound_text(bound: BoundFacts) -> str:
    """`communication[data] 12.0 ms, at most 20.0 ms`, and by how much it is exceeded if it is."""
    value, limit = bound_figures(bound)
    excess = f": {format_ratio(bound.value / bound.limit)} as much" if not bound.holds and bound.limit else ""
    return f"{bound.figure} {value}, at most {limit}{excess}"


def bound_figures(bound: BoundFacts) -> tuple[str, str]:
    """The figure and its limit with their units: `12.0 ms`, `20.0 ms`."""
    write = format_bytes if bound.figure.endswith("memory") else format_seconds
    return write(bound.value), write(bound.limit)


def broken(report: Report) -> RenderableType | None:
    """A line for a plan that fits but breaks a bound; None for others."""
    bounds = [bound for bound in report.goal.bounds if not bound.holds]
    if not bounds or report.fit == NO:
        return None
    return Text(
        f"✗ no plan found keeps all bounds; this one exceeds them least: {'; '.join(map(bound_text, bounds))}",
        style.BAD,
    )


def print_report(report: Report, stream: TextIO, *, verbose: bool = False, width: int | None = None) -> None:
    """Write the report to `stream`, as wide as it is (60 to 200 columns) unless `width` says otherwise."""
    console = style.make_console(stream, width)
    spaced: list[RenderableType] = []
    for block in blocks(report, console.width, verbose):
        spaced += [block, Text()] if block is not None else []
    stream.write(style.render(spaced[:-1], console))
    stream.flush()


def one_line(report: Report) -> str:
    """Program, mesh, step time, memory and strategy on one line; memory by a compiler that was asked."""
    predicted, confirmed = report.predicted, report.confirmation
    words = {NO: "DOES NOT FIT, ", UNSURE: "MAY NOT FIT, "}
    verdict = words.get(report.fit, "") if report.met or report.fit == NO else "BREAKS A BOUND, "
    peak, by = float(predicted.peak_bytes), ""
    if confirmed is not None and confirmed.rejected:
        by = f" predicted, and {confirmed.compiler} refuses it"
    elif confirmed is not None and confirmed.taken is not None and confirmed.taken.peak_bytes is not None:
        peak, by = confirmed.taken.peak_bytes, f" by {confirmed.compiler}"
    return (
        f"{report.program.title} on {report.mesh.name}: {verdict}{format_seconds(predicted.step_seconds)} a step, "
        f"{format_bytes(peak)} of {format_bytes(predicted.limit_bytes)}{by}; "
        f"{report.plan.summary or 'unsharded'}"
    )


def blocks(report: Report, width: int, verbose: bool) -> list[RenderableType | None]:
    """The sections in reading order; None for an empty one."""
    fits = report.fit != NO
    return [
        header(report),
        verdict(report),
        broken(report),
        decisions(report, width),
        prediction(report, width),
        goal(report),
        sizes(report),
        together(report),
        comparison(report, width) if report.baselines else None,
        confirmation(report),
        live_at_peak(report, width, verbose) if verbose or not fits else None,
        time_by_line(report, width, verbose),
        collectives(report, width, verbose),
        arrays.arguments(report, verbose),
        arrays.results(report) if verbose else None,
        kernels(report),
        constraints(report, verbose),
        groups(report) if verbose else None,
        notes(report, verbose),
        statistics(report),
    ]


# ---------------------------------------------------------------- sections
# The sections of a terminal report: facts go in, rich renderables come out, one function per section.

# What a report shows without --verbose.
SHORT_NOTES = 6
# Why a search ended, in words.
STOPPED = {
    "budget": "its time was over",
    "iterations": "all its iterations were done",
    "plateau": "further plans gained less than 1%",
}
# Shown in place of an algorithm if nothing was searched.
UNSEARCHED = {"strategy": "none, since a strategy was given", "plan": "none, since a saved plan was given"}
# Width of the words and figures beside a bar.
BAR_COLUMNS = 70
LEAST_BAR = 8
# What overlap hides is not shown if it could hide less than this fraction of a step.
LITTLE = 0.001
# A column of words narrower than this is left out.
LEAST_WORDS = 16
# Minimum width of a decision's name; it wraps to leave room for the words behind it.
LONGEST_NAME = 24


def header(report: Report) -> RenderableType:
    """Program, mesh and strategy, a line each where they fit on one."""
    program, mesh = report.program, report.mesh
    arguments = f"{format_plural(program.arguments, 'argument')} of {format_bytes(program.parameter_bytes)}"
    limit = f"{format_bytes(report.predicted.limit_bytes)} usable per device"
    lines = _labelled()
    lines.add_row(
        "program",
        _lead(program.title, f"{format_plural(program.ops, 'op')}, {arguments}, {format_flops(program.flops)} a step"),
    )
    mesh_text = _lead(mesh.name, f"{format_plural(mesh.devices, 'device')} ({mesh.chip}), ")
    shape = style.with_axes(style.shape(mesh.axes), list(mesh.axes))
    lines.add_row("mesh", mesh_text.append_text(shape).append(f", {limit}"))
    if mesh.networks:
        axes, groups = list(mesh.networks), prod(mesh.networks.values())
        crossing = sum(c.seconds for c in report.collectives if not mesh.networks.keys().isdisjoint(c.axes))
        network = (
            f"{'axes' if len(axes) > 1 else 'axis'} {' and '.join(axes)} over the network between {groups} groups of "
        )
        cost = f"{mesh.devices // groups} devices: {format_seconds(crossing)} of collectives a step"
        lines.add_row("network", style.with_axes(network + cost, axes))
    lines.add_row("strategy", style.with_axes(report.plan.summary or "unsharded", list(mesh.axes), style.TITLE))
    if report.plan.tactics:
        lines.add_row("tactics", _tactics(report))
    return lines


def _tactics(report: Report) -> Text:
    """The decisions that come from the requested tactics."""
    fixed, plan = report.plan.fixed, report.plan
    asked = ", ".join(text for text in plan.tactics if not text.startswith("search:"))
    over = ", ".join(text.removeprefix("search:") for text in plan.tactics if text.startswith("search:"))
    searched = f"the {'others' if fixed else 'decisions'} from the search{' over ' + over if over else ''}"
    decided = f"decision{'s 1 to ' + str(fixed) if fixed > 1 else ' 1'} from {asked}" if fixed else ""
    parts = [decided, searched if len(plan.decisions) > fixed else ""]
    return style.with_axes(", ".join(filter(None, parts)) or f"{asked}: nothing to decide", list(report.mesh.axes))


def verdict(report: Report) -> RenderableType | None:
    """Whether the plan fits: the compiler's answer if available, else the prediction's uncertainty; None if it fits for
    certain."""
    predicted, confirmed = report.predicted, report.confirmation
    peak, limit = format_bytes(predicted.peak_bytes), format_bytes(predicted.limit_bytes)
    if report.fit == NO:
        plan = "plan that exceeds the bounds least" if report.goal.bounds else "smallest-memory plan found"
        by = f", and {confirmed.compiler} refuses it" if confirmed is not None and confirmed.rejected else ""
        excess = predicted.peak_bytes - predicted.limit_bytes
        more = f", {format_bytes(excess)} more than the limit of {limit}" if excess > 0 else f" of {limit}"
        return Text(f"✗ does not fit: the {plan} needs {peak} on each device{more}{by}", style.BAD)
    if report.fit == YES and predicted.fit == YES:
        return None
    if report.fit == YES and confirmed is not None and confirmed.taken is not None:
        needed = format_bytes(confirmed.taken.peak_bytes or 0)
        return Text(f"✓ fits: {confirmed.compiler} needs {needed} of {limit} (predicted {peak})", style.GOOD)
    return Text(
        f"? may not fit: the predicted peak is {format_percent(predicted.peak_bytes / predicted.limit_bytes)} of the "
        f"limit, and one program of this kind in ten needs over {format_percent(predicted.peak_error)} more than is "
        f"predicted; --confirm 1 asks the compiler",
        style.WARNING,
    )


def decisions(report: Report, width: int) -> RenderableType:
    """The plan in order, with each dimension's local size after each decision, and the arrays that have it."""
    if not report.plan.decisions:
        return style.section("decisions", Text("none: every device computes the whole program"))
    axes = list(report.mesh.axes)
    sizes = _local_sizes(report)
    rows = [
        (
            str(number),
            f"{decision.kind} {slash_path(decision.target)}",
            decision.axis,
            size,
            format_count(decision.classes),
        )
        for number, (decision, size) in enumerate(zip(report.plan.decisions, sizes, strict=True), start=1)
    ]
    # Long names wrap, so that all figures stay.
    room = style.room(width, [(number, name[:LONGEST_NAME], *rest) for number, name, *rest in rows])
    worded = room >= LEAST_WORDS
    heads = [("", "right"), ("decision", "name"), ("over", "left"), ("size", "right"), ("count", "right")]
    columns = [*heads, ("array.dimension", "fold")] if worded else heads
    cells: list[list[str | Text]] = [
        [number, name, style.with_axes(axis, axes), *figures, *([words] if worded else [])]
        for words, (number, name, axis, *figures) in zip(_whereabouts(report, room), rows, strict=True)
    ]
    return style.section("decisions", style.fitted(columns, cells, width))


def prediction(report: Report, width: int) -> RenderableType:
    """Step time, peak memory and MFU, each with a bar if there is room."""
    predicted = report.predicted
    bar_width = min(width - BAR_COLUMNS, 60)
    rows = style.table([("", "left"), ("", "right"), ("", "left"), ("", "fold")])

    def add(label: str, figure: str, parts: Sequence[tuple[float, str, str]], words: RenderableType) -> None:
        drawn = style.bar(parts, bar_width) if bar_width >= LEAST_BAR else Text()
        rows.add_row(label, Text(figure, style.TITLE), drawn, words)

    # Compute, and what of the step remains of communication beside it.
    computed = min(predicted.compute_seconds / predicted.step_seconds, 1.0) if predicted.step_seconds else 0.0
    compute = (computed, "█", style.COMPUTE)
    communication = (1.0 - computed if predicted.step_seconds else 0.0, "▒", style.COMMUNICATION)
    add(
        "step time",
        format_seconds(predicted.step_seconds),
        [compute, communication],
        _split(report, "  " if bar_width >= LEAST_BAR else "\n"),
    )

    if predicted.tokens_per_second:
        figure = Text(format_count(round(predicted.tokens_per_second)), style.TITLE)
        each = format_count(round(predicted.tokens_per_second / report.mesh.devices))
        rows.add_row("tokens/s", figure, "", f"of all devices together, {each} a device")

    if predicted.step_price:
        million = f"{format_price(predicted.million_price)} a million {predicted.priced}"
        figure = Text(format_price(predicted.step_price), style.TITLE)
        rows.add_row("price", figure, "", f"a step{f', {million}' if predicted.priced else ''}")

    if predicted.tokens_in_turn:
        figure = Text(format_seconds(predicted.step_seconds / predicted.tokens_in_turn), style.TITLE)
        tokens = format_plural(predicted.tokens_in_turn, "token")
        rows.add_row("a token", figure, "", f"a step makes {tokens} of each sequence, one after the other")

    filled = predicted.peak_bytes / predicted.limit_bytes if predicted.limit_bytes else 0.0
    look = "" if predicted.fits else style.BAD
    words = Text(f"{format_percent(filled)} of {format_bytes(predicted.limit_bytes)}", look)
    words.append(f", arguments {format_bytes(predicted.argument_bytes)}", "")
    if predicted.peak_error and filled > 0.5:
        words.append(f"; nine of ten programs need at most {format_percent(predicted.peak_error)} more", "")
    add("peak memory", format_bytes(predicted.peak_bytes), [(filled, "█", look or style.MEMORY)], words)

    if predicted.cache_token_bytes:
        fit = format_plural(predicted.sequences, "sequence")
        about = f"a token and device; memory is enough for about {fit}"
        rows.add_row("KV cache", format_bytes(round(predicted.cache_token_bytes)), "", about)

    if predicted.host_bytes:
        moved = f"transfers {format_seconds(predicted.transfer_seconds)}, which overlap with compute"
        add("host memory", format_bytes(predicted.host_bytes), [], moved)

    useful = (predicted.mfu, "█", style.GOOD)
    mfu, hfu = format_percent(predicted.mfu), format_percent(predicted.hfu)
    recomputed = f", {hfu} with what is recomputed (HFU)" if predicted.hfu > 0 and hfu != mfu else ""
    add("MFU", mfu, [useful], f"of the chips' peak arithmetic rate{recomputed}")
    return style.section("predicted, per device and step", rows)


def comparison(report: Report, width: int) -> RenderableType:
    """This plan against the baselines."""
    plan = report.predicted
    plan_facts = BaselineFacts(
        plan.step_seconds, plan.peak_bytes, plan.fits, plan.compute_seconds, plan.communication_seconds
    )
    figures = plan_facts.step_seconds, plan_facts.peak_bytes
    others = {strategy_label(name, facts.axes, facts.mesh): facts for name, facts in report.baselines.items()}
    alike = next((k for k, facts in others.items() if (facts.step_seconds, facts.peak_bytes) == figures), "")
    strategy = alike or report.plan.strategy
    own = f"this plan ({strategy})" if strategy else "this plan"
    others.pop(alike, None)
    columns = [
        ("", "fold"), ("step time", "right"), ("", "right"), ("compute", "right"), ("communication", "right"),
        ("peak memory", "right"), ("", "left"),
    ]  # fmt: skip
    cells: list[list[str | Text]] = [
        [
            Text(name, style.TITLE if facts is plan_facts else ""),
            format_seconds(facts.step_seconds),
            format_ratio(facts.step_seconds / plan_facts.step_seconds if plan_facts.step_seconds else 1.0),
            format_seconds(facts.compute_seconds),
            format_seconds(facts.communication_seconds),
            format_bytes(facts.peak_bytes),
            style.fit_text(
                report.fit if facts is plan_facts else fit_of(facts.peak_bytes, plan.limit_bytes, plan.peak_error)
            ),
        ]
        for name, facts in {own: plan_facts, **others}.items()
    ]
    rows = style.fitted(columns, cells, width, spare=((3, 4), (2,)))
    why = style.with_axes(report.plan.why, list(report.mesh.axes))
    return style.section("compared with", rows, *([style.table([("", "fold")], [[why]])] if why else []))


def notes(report: Report, verbose: bool) -> RenderableType | None:
    """Notes: replicated ops, assumptions, notices."""
    lines = list(_replicated(report.analysis.replicated_ops, verbose))
    lines += report.analysis.notes
    hidden = 0 if verbose else max(len(lines) - SHORT_NOTES, 0)
    if hidden:
        lines = [*lines[:-hidden], f"{format_plural(hidden, 'more note')}; --verbose lists all"]
    if not lines:
        return None
    rows = [(Text("·", style.WARNING), line) for line in lines]
    return style.section("notes", style.table([("", "left"), ("", "fold")], rows))


def groups(report: Report) -> RenderableType:
    """The dimensions by name, with the number of classes of each, and of arrays that have one twice."""
    analysis = report.analysis
    twice = (
        f"; {format_plural(analysis.conflicts, 'array')} with one of them twice, "
        f"settled by {format_plural(analysis.resolution_groups, 'choice')}"
    )
    title = f"dimensions, {format_plural(analysis.groups, 'kind')} of them{twice if analysis.conflicts else ''}"
    heads = [("dimension", "left"), ("count", "right"), ("size", "right"), ("array.dimension", "fold")]
    rows = [
        (group.name, format_count(group.classes), format_count(group.size), ", ".join(path_patterns(group.members)))
        for group in analysis.group_list
    ]
    return style.section(title, style.table(heads, rows))


def statistics(report: Report) -> RenderableType:
    """Statistics of the search, and the time of each stage."""
    search = report.search
    ended = f"; stopped: {STOPPED.get(search.stopped, search.stopped)}" if search.stopped else ""
    rows = _labelled()
    words = (
        f"{search.algorithm}, seed {search.seed}: {format_plural(search.evaluations, 'plan')} tried, the best was "
        f"number {format_count(search.best_found_at)}{ended}"
    )
    rows.add_row("search", UNSEARCHED.get(search.algorithm, words))
    total = sum(report.timings.values())
    stages = ", ".join(f"{stage} {format_seconds(seconds)}" for stage, seconds in report.timings.items())
    rows.add_row("time", f"{format_seconds(total)}: {stages}" if stages else format_seconds(total))
    return rows


# XLA's names for calls of matrix libraries: `__onednn$matmul`, `__cublas$gemm`, `__cudnn$convForward`. JAX itself
# writes `__cudnn$fmha…` for attention and `__op$block_scaled_dot` for products of MX numbers.
_LIBRARY_CALL = re.compile(r"custom_call @__(?!cudnn\$(?:fmha|norm)|op\$)")


def _replicated(ops: dict[str, int], verbose: bool) -> Iterator[str]:
    """The ops that every device computes replicated, most frequent first."""
    ordered = sorted(ops.items(), key=lambda item: (-item[1], item[0]))
    if not ordered:
        return
    shown = ordered if verbose else ordered[:4]
    named = ", ".join(f"{name} ×{format_count(count)}" for name, count in shown)
    rest = f" and {len(ordered) - len(shown)} more kinds" if len(shown) < len(ordered) else ""
    count = format_plural(sum(ops.values()), "op")
    yield f"{count} that toast cannot split, so every device computes the whole of each: {named}{rest}"
    if any(_LIBRARY_CALL.search(name) for name, _ in ordered):
        yield (
            "XLA has compiled this program for one platform, whose libraries it calls: give toast what XLA got "
            "(lower(…).as_text(), or the file *before_optimizations* of --xla_dump_to)"
        )


def _whereabouts(report: Report, room: int) -> list[str]:
    """[decisions] the arrays that have the dimension, at its first decision, as many as fit (those that are split so,
    if any is); the dimension chosen where an array has it twice, unless an earlier decision chose the same; and the
    decision's scope."""
    members = {group.name: group.members for group in report.analysis.group_list}
    stored = {f"{a.name}.{dim}": axes for a in report.arguments for dim, axes in enumerate(a.sharding)}
    seen: dict[str, int] = {}
    listed: set[tuple[str, str]] = set()
    texts = []
    for number, decision in enumerate(report.plan.decisions, start=1):
        words = []
        if decision.target not in seen and decision.kind == "shard":
            having = members.get(decision.target, [])
            split = [member for member in having if decision.axis in stored.get(member, [])]
            words.append(_as_many(path_patterns(split or having), room) if having else "no argument")
            words += [] if split else ["only inside the program"]
        elif decision.kind != "shard":
            words.append(decision.text)
        else:
            words.append(f"as decision {seen[decision.target]}")
        choices = [choice for choice in dict.fromkeys(decision.choices) if (decision.target, choice) not in listed]
        words += [f"where it occurs twice: {', '.join(choices)}"] if choices else []
        listed.update((decision.target, choice) for choice in choices)
        words += scope_texts(decision.unless, decision.only)
        seen.setdefault(decision.target, number)
        texts.append("; ".join(words))
    return texts


def _as_many(patterns: Sequence[str], room: int) -> str:
    """The first pattern, and more of them while they fit on the line."""
    text = patterns[0]
    for number, pattern in enumerate(patterns[1:], start=1):
        if len(f"{text}, {pattern}, …") > room and number < len(patterns):
            return f"{text}, …"
        text = f"{text}, {pattern}"
    return text


def _local_sizes(report: Report) -> list[str]:
    """[decisions] elements along the dimension before and after each decision: `2,048 → 256`; empty for a replicate."""
    over: dict[str, set[str]] = defaultdict(set)  # dimension -> axes of the decisions so far
    texts = []
    for decision in report.plan.decisions:
        if decision.kind != "shard":
            texts.append("")
            continue
        others = over[decision.target] - {decision.axis}
        over[decision.target].add(decision.axis)
        before = -(-decision.size // prod(report.mesh.axes.get(axis, 1) for axis in others))
        after = -(-before // report.mesh.axes.get(decision.axis, 1))
        texts.append(f"{format_count(before)} → {format_count(after)}")
    return texts


def _split(report: Report, between: str) -> Text:
    predicted = report.predicted
    words = Text.assemble(
        ("█", style.COMPUTE),
        f" compute {format_seconds(predicted.compute_seconds)}{between}",
        ("▒", style.COMMUNICATION),
        f" communication {format_seconds(predicted.communication_seconds)}",
    )
    overlapped = overlap_text(predicted)
    return words.append(f"\n{overlapped}") if overlapped else words


def overlap_text(predicted: PredictedFacts) -> str:
    """How much of the communication runs beside compute, and how much could; empty if none can."""
    most = predicted.step_seconds_upper
    if not 0 < predicted.step_seconds_lower < (1 - LITTLE) * most:
        return ""
    hidden, hideable = most - predicted.step_seconds, most - predicted.step_seconds_lower
    if hidden > 0.99 * hideable:
        return f"overlap hides {format_seconds(hideable)}, all that it can"
    part = format_seconds(hidden) if hidden > 0.01 * hideable else "none"
    return f"overlap hides {part}; step at best {format_seconds(predicted.step_seconds_lower)}"


def _lead(name: str, rest: str) -> Text:
    return Text.assemble((name, style.TITLE), f": {rest}")


def _labelled() -> Table:
    """Lines of (label, text)."""
    rows = style.table([("", "left"), ("", "fold")])
    rows.columns[0].style = style.LABEL
    rows.columns[0].width = len("strategy") + 1
    return rows
