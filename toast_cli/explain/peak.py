"""Explains the arrays live at the memory peak, and changes that lower it. In: a study. Out: an explanation."""

from __future__ import annotations

import re
from itertools import islice

from toast_cli.cost.model import Alive
from toast_cli.explain.model import Change, Explanation, Item
from toast_cli.explain.study import Study
from toast_cli.folding import NamedArray, fold
from toast_cli.plan.decisions import Plan
from toast_cli.program.paths import slash_path
from toast_cli.quantities import format_bytes, format_percent
from toast_cli.search.edits import Edit, results
from toast_cli.search.moves import NEIGHBOURHOODS, Moves

_LISTED = 8
_NAMED = 3  # decisions that one change removes
_PLACES = 3  # of each edit
_TRIED = 2000  # plans


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
        if len(tried) > _TRIED:
            break
    tried.pop(study.plan, None)
    quick = sorted(tried, key=lambda plan: evaluator.cost(plan).peak_bytes)[: 3 * _LISTED]
    best: dict[str, Change] = {}
    for plan in quick:
        change = study.change(tried[plan], plan)
        known = best.get(change.what)
        if change.peak_bytes < study.cost.peak_bytes * 0.999 and (
            known is None or change.peak_bytes < known.peak_bytes
        ):
            best[change.what] = change
    return sorted(best.values(), key=lambda change: change.peak_bytes)[:_LISTED]


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
