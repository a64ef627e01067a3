"""Explains memory: the arrays live at the peak, and changes that lower it; why arguments are split as they are, and
what other shardings of them would cost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from toast_cli.errors import UsageError
from toast_cli.frontend import program_pins
from toast_cli.plan.decisions import Plan, Shard
from toast_cli.plan.problem import make_problem
from toast_cli.price.cost import Alive
from toast_cli.price.evaluator import Evaluator
from toast_cli.program.names import matches, nearest_paths, shown_path, slash_path
from toast_cli.program.quantities import NamedArray, fold, format_bytes, format_count, format_percent, format_seconds
from toast_cli.program.roles import views
from toast_cli.report.explain.study import Change, Explanation, Item, Study
from toast_cli.search.moves import NEIGHBOURHOODS, Edit, Moves, results

# ---------------------------------------------------------------- the peak
# Explains the arrays live at the memory peak, and changes that lower it.

_CHANGES_LISTED = 8
_NAMED = 3  # decisions that one change removes
_PLACES = 3  # of each edit
_PLANS_TRIED = 2000  # plans


def explain_peak(study: Study) -> Explanation:
    program, cost = study.problem.program, study.cost
    op, alive = study.evaluator.alive_at_peak(study.plan)
    op = min(op, len(program.ops) - 1)
    paths = {a.value: slash_path(a.path) for a in program.arguments if a.path}
    entries = [
        NamedArray(
            paths.get(a.value) or study.place(program.producer[a.value]),
            (a.role, _type(study, a), round(a.bytes), *_place(study, a.value, paths)),
        )
        for a in alive
    ]
    rows = [(row, entries[row.members[0]].kind) for row in fold(entries)]
    items = [
        Item(f"{kind[0]} {kind[1]}", row.pattern, len(row.members), bytes=len(row.members) * int(str(kind[2])))
        for row, kind in rows
    ]
    items.sort(key=lambda item: -item.bytes)
    limit = study.problem.mesh.limit_bytes
    shares = {role: sum(a.bytes for a in alive if a.role == role) for role in dict.fromkeys(a.role for a in alive)}
    largest = sorted(shares.items(), key=lambda share: -share[1])
    sentences = [
        f"Memory peaks at {format_bytes(cost.peak_bytes)}, {format_percent(cost.peak_bytes / limit)} of "
        f"{format_bytes(limit)}, at "
        f"{study.place(op)}.",
        "Alive there: " + ", ".join(f"{_words(role)} {format_bytes(size)}" for role, size in largest) + ".",
    ]
    if shares.get("temporary", 0.0) > cost.peak_bytes / 2:
        sentences.append(
            "More than half are temporaries: to compute some of them again instead (jax.checkpoint) is for the "
            "program to say."
        )
    changes = _lower(study)
    if not changes:
        sentences.append("No single change to the plan lowers it.")
    return study.explanation(
        "peak memory",
        sentences,
        listed="alive at the peak",
        items=items[:20],
        alternatives="what would lower it",
        changes=changes,
    )


def _type(study: Study, alive: Alive) -> str:
    return "" if alive.role == "inside" else str(study.problem.program.values[alive.value])


def _place(study: Study, value: int, paths: dict[int, str]) -> tuple[str, ...]:
    """A further key for arrays of one row: the place where they are made, with its numbers replaced."""
    return () if value in paths else (re.sub(r"\d+", "*", study.place(study.problem.program.producer[value])),)


def _words(role: str) -> str:
    plurals = {
        "argument": "arguments",
        "temporary": "temporaries",
        "carry": "loop carries",
        "gathered": "gathered or moved copies",
        "partial": "results being reduced",
        "inside": "what manual regions hold inside",
    }
    return plurals.get(role, role)


def _lower(study: Study) -> list[Change]:
    """The changes that lower the peak most: an added, removed, moved or replaced decision."""
    problem, evaluator = study.problem, study.evaluator
    tried: dict[Plan, str] = {}
    moves = Moves(problem)
    edits = (edit for neighbourhood in NEIGHBOURHOODS.values() for edit in neighbourhood(moves, study.plan))
    for edit in (e for e in edits if len(e.out) <= _NAMED):
        for plan in islice(results(problem, study.plan, edit), _PLACES):
            tried.setdefault(plan, _what(study, edit))
        if len(tried) > _PLANS_TRIED:
            break
    tried.pop(study.plan, None)
    quick = sorted(tried, key=lambda plan: evaluator.cost(plan).peak_bytes)[: 3 * _CHANGES_LISTED]
    best: dict[str, Change] = {}
    for plan in quick:
        change = study.change(tried[plan], plan)
        known = best.get(change.what)
        if change.peak_bytes < study.cost.peak_bytes * 0.999 and (
            known is None or change.peak_bytes < known.peak_bytes
        ):
            best[change.what] = change
    return sorted(best.values(), key=lambda change: change.peak_bytes)[:_CHANGES_LISTED]


def _what(study: Study, edit: Edit) -> str:
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


# ---------------------------------------------------------------- arguments
# Why arguments are split as they are, and what other shardings of them would cost.

_PATTERNS_LISTED = 6  # patterns of arguments
_SHARDINGS_TRIED = 8  # other shardings


def explain_argument(study: Study, pattern: str, pins: tuple[str, ...] = ()) -> Explanation:
    """Explains the decisions that split the matching arguments, those that do not and why, and the cost of other
    shardings.

    Args:
        pattern: as for `--pin`: a path in which * is anything, or argN. pins: those the plan was made with.
    """
    program = study.problem.program
    found = [k for k, a in enumerate(program.arguments) if matches(pattern, a.label, k)]
    if not found:
        nearest = nearest_paths(pattern, (a.label for a in program.arguments))
        raise UsageError(
            f"no argument matches {pattern!r}", where="--decision", hint=f"the nearest arguments are {nearest}"
        )
    rows = _rows(study, found)
    items = [_item(study, name, members) for name, members in rows]
    largest = max(rows, key=lambda row: sum(program.values[program.arguments[k].value].bytes for k in row[1]))
    sentences = [*_why(study, largest[1][0]), _use(study, _of_one_role(study, largest[1]), largest[0])]
    if len(rows) > 1:
        sentences.insert(
            0,
            f"{format_count(len(found))} arguments match, split in {len(rows)} ways; this is about the "
            f"largest, {largest[0]}.",
        )
    return study.explanation(
        f"argument {pattern}", sentences, listed="arguments that match", items=items[:_PATTERNS_LISTED],
        alternatives=f"what {largest[0]} would cost, pinned to", changes=_pinned(study, largest[1], pins),
    )  # fmt: skip


def _rows(study: Study, arguments: list[int]) -> list[tuple[str, list[int]]]:
    program, lowered = study.problem.program, study.lowered
    entries = [
        NamedArray(
            shown_path(program.arguments[k].label, k),
            (str(program.values[program.arguments[k].value]), lowered.shardings[program.arguments[k].value]),
        )
        for k in arguments
    ]
    return [(row.pattern, [arguments[m] for m in row.members]) for row in fold(entries)]


def _item(study: Study, name: str, members: list[int]) -> Item:
    program = study.problem.program
    value = program.arguments[members[0]].value
    role = study.problem.roles[study.problem.argument_role[members[0]]]
    size = sum(program.values[program.arguments[k].value].bytes for k in members)
    return Item(
        f"{name} {program.values[value]}",
        f"{study.sharding(study.lowered.shardings[value])}, {role}",
        len(members),
        bytes=size,
    )


def _why(study: Study, argument: int) -> Iterator[str]:
    """A sentence for each dimension, and for each decision about it that does nothing here."""
    problem = study.problem
    value = problem.program.arguments[argument].value
    pattern = problem.op_pattern[argument]
    of, names = problem.patterns[pattern], problem.mesh.names
    for dim, (factors, axes) in enumerate(zip(of.form.results[0], study.lowered.shardings[value], strict=True)):
        size = problem.program.values[value].shape[dim]
        called = (
            " x ".join(problem.dimensions.groups[of.groups[factor]].name for factor in factors)
            or "a dimension of its own"
        )
        reasons = []
        for axis in axes:
            giver = study.giver(pattern, factors, axis)
            reasons.append(f"{names[axis]} by {study.numbered(giver)}" if giver else f"{names[axis]} by a pin")
        for number, decision in enumerate(study.plan, 1):
            if (
                isinstance(decision, Shard)
                and decision.group in {of.groups[factor] for factor in factors}
                and decision.axis not in axes
            ):
                reasons.append(
                    f"not {names[decision.axis]} ({study.numbered(number)}): {study.why_not(pattern, number)}"
                )
        split = "; ".join(reasons) or "whole: no decision splits it"
        yield f"Dimension {dim} ({format_count(size)}) is {called}: {split}."


def _of_one_role(study: Study, members: list[int]) -> list[int]:
    """The arguments with the role of the first: of weights and their moments, the weights."""
    role = study.problem.argument_role[members[0]]
    return [k for k in members if study.problem.argument_role[k] == role]


def _use(study: Study, members: list[int], name: str) -> str:
    """The readers of the arguments, and the time for resharding them (or their converted forms)."""
    program, problem = study.problem.program, study.problem
    origin = views(program)
    same = {value for value, argument in origin.items() if argument in set(members)}
    readers = {
        program.ops[op].name.partition(".")[2] for value in same for op, _ in program.users[value]
        if not any(result in same for result in program.ops[op].results)
    }  # fmt: skip
    seconds = sum(use.seconds * study.share_of_values(use, same) for use in study.collectives)
    role = problem.roles[problem.argument_role[members[0]]]
    moves = f"moving them takes {format_seconds(seconds)} a step" if seconds else "they do not move"
    return f"{name}: {role}, read by {', '.join(sorted(readers)) or 'nothing'}; {moves}."


def _pinned(study: Study, members: list[int], pins: tuple[str, ...]) -> list[Change]:
    """Costs of the plan with these arguments pinned to other shardings; each needs a problem of its own."""
    problem, source = study.problem, study.source
    program, mesh = problem.program, problem.mesh
    value = program.arguments[members[0]].value
    shape, now = program.values[value].shape, study.sharding(study.lowered.shardings[value])
    stated = program_pins(source, mesh.names, mesh.sizes)
    changes = []
    for spec in _specs(shape, mesh.names, mesh.sizes):
        if f"({', '.join(spec)})" == now:
            continue
        more = tuple(f"{program.arguments[k].label or f'arg{k}'}={','.join(spec)}" for k in members)
        other = make_problem(program, problem.dimensions, mesh, (*pins, *more), stated)
        other = replace(other, goal=problem.goal)
        cost = Evaluator(other).exact_cost(study.plan)
        note = f"arguments {format_bytes(cost.argument_bytes)}"
        changes.append(study.priced(f"({', '.join(spec)})", cost, note))
    return sorted(changes, key=lambda change: change.step_seconds)


def _specs(shape: tuple[int, ...], names: tuple[str, ...], sizes: tuple[int, ...]) -> Iterator[tuple[str, ...]]:
    """Shardings to try: replicated; each axis on each dimension it divides; all axes on one dimension."""
    used = [k for k, size in enumerate(sizes) if size > 1]
    choices: list[tuple[str, int]] = [(names[k], sizes[k]) for k in used]
    if len(used) > 1:
        parts = 1
        for k in used:
            parts *= sizes[k]
        choices.append(("+".join(names[k] for k in used), parts))
    found = [("None",) * len(shape)]
    for text, parts in choices:
        found += [
            tuple(text if d == dim else "None" for d in range(len(shape)))
            for dim, size in enumerate(shape)
            if size % parts == 0
        ]
    yield from found[:_SHARDINGS_TRIED]
