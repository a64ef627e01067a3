"""Why arguments are split as they are, and what other shardings of them would cost. In: a study, a pattern.
Out: an explanation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from toast_cli.errors import UsageError
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.explain.model import Change, Explanation, Item
from toast_cli.explain.study import Study
from toast_cli.folding import NamedArray, fold
from toast_cli.frontend import program_pins
from toast_cli.plan.decisions import Shard
from toast_cli.plan.patterns import make_problem
from toast_cli.program.paths import matches, nearest_paths, shown_path
from toast_cli.program.roles import views
from toast_cli.quantities import format_bytes, format_count, format_seconds

_LISTED = 6  # patterns of arguments
_TRIED = 8  # other shardings


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
            f"no argument matches {pattern!r}", where="--argument", hint=f"the nearest arguments are {nearest}"
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
        f"argument {pattern}", sentences, listed="arguments that match", items=items[:_LISTED],
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
        size = problem.program.values[value].own_shape[dim]
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
    shape, now = program.values[value].own_shape, study.sharding(study.lowered.shardings[value])
    stated = program_pins(source, mesh.names, mesh.sizes)
    changes = []
    for spec in _specs(shape, mesh.names, mesh.sizes):
        if f"({', '.join(spec)})" == now:
            continue
        more = tuple(f"{program.arguments[k].label or f'arg{k}'}={','.join(spec)}" for k in members)
        other = make_problem(program, problem.dimensions, mesh, (*pins, *more), stated, problem.workarounds)
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
    yield from found[:_TRIED]
