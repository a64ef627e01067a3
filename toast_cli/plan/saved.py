"""Saved plans: writes decisions to a file with a description of their groups, and applies them to a changed program,
or to the same one with layers untied.

JSON of schema "toast.plan/1", or the plan for the other program and messages about what did not carry over. A group is
matched by its properties, never by number: the arguments that have it, its places in working ops, its role, name and
size.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from toast_cli.base.errors import InputError
from toast_cli.base.files import read_json, typed
from toast_cli.dimensions.model import Dimensions, Group
from toast_cli.plan.decision_space import decision_space
from toast_cli.plan.decisions import ASIDE, LOOK_UPS, NONE, SUMMED, Decision, Plan, Replicate, Shard
from toast_cli.plan.problem import Problem
from toast_cli.plan.sharding import OpPattern
from toast_cli.program.model import Offload, Program, Recompute
from toast_cli.program.names import slash_path
from toast_cli.program.roles import ROLES

SCHEMA = "toast.plan/1"
# Least likeness (0 to 1) of two groups that are matched.
LIKENESS = 0.5
_WEIGHTS = {"members": 3.0, "uses": 3.0, "role": 2.0, "name": 1.0, "size": 1.0}
_MAKE_ONE = "make one with `toast partition --save-plan FILE`"


@dataclass(frozen=True)
class Traits:
    """The properties by which a group of dimensions is matched.

    Attributes:
        name, role, size: as the analysis has them. members: argument dimensions that have it, numbers in their paths
            left out (`params['layers'][*]['up'].1`). uses: its places in products, convolutions, gathers and scatters
            (`stablehlo.dot_general REDUCTION 0.1 1.0`).
    """

    name: str
    role: str
    size: int
    members: tuple[str, ...]
    uses: tuple[str, ...]


@dataclass(frozen=True)
class SavedDecision:
    """A `Shard` of `group` (not where ops have `unless`, sum over it, or look up rows of tables; only where they have
    `only`), or a `Replicate` of the arguments called `arguments`; `axis` by name."""

    axis: str
    group: Traits | None = None
    sides: tuple[int, ...] = ()
    unless: Traits | None = None
    unless_summed: bool = False
    unless_look_ups: bool = False
    arguments: str = ""
    only: Traits | None = None


@dataclass(frozen=True)
class SavedPlan:
    """A plan read from a file. program: the module's name. axes: of the mesh it was made for, slowest first. parted:
    the program has its fused contractions split. microbatches: number of parts of its batch. recompute: the values it
    rematerialises in the backward pass. offload: what it keeps in host memory."""

    program: str
    axes: dict[str, int]
    decisions: tuple[SavedDecision, ...]
    path: str = ""
    parted: bool = False
    microbatches: int = 1
    recompute: str | None = None
    offload: str | None = None


def saved_plan(problem: Problem, plan: Plan) -> SavedPlan:
    """The plan in terms that also mean something for another program."""
    traits, axes = traits_of(problem), problem.mesh.names
    decisions = []
    for decision in plan:
        axis = axes[decision.axis]
        if isinstance(decision, Replicate):
            decisions.append(SavedDecision(axis, arguments=problem.roles[decision.role]))
        else:
            unless = traits[decision.unless] if decision.unless >= 0 else None
            summed, look_ups = decision.unless == SUMMED, decision.unless == LOOK_UPS
            only = traits[decision.only] if decision.only != NONE else None
            group = traits[decision.group]
            decisions.append(SavedDecision(axis, group, decision.sides, unless, summed, look_ups, only=only))
    program = problem.program
    sizes = dict(zip(axes, problem.mesh.sizes, strict=True))
    facts = (program.parted, program.microbatches, program.recompute or None, program.offload or None)
    return SavedPlan(program.name, sizes, tuple(decisions), "", *facts)


def save_plan(problem: Problem, plan: Plan) -> bytes:
    """The plan as JSON, with a final newline."""
    saved = saved_plan(problem, plan)
    given = {f.name: getattr(saved, f.name) for f in fields(saved) if getattr(saved, f.name) != f.default}
    facts = {"schema": SCHEMA, **given, "decisions": [asdict(decision) for decision in saved.decisions]}
    return (json.dumps(facts, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def read_plan(path: str) -> SavedPlan:
    """The plan in the file. Raises InputError for a file that holds none."""
    facts = read_json(path, _MAKE_ONE)
    if not isinstance(facts, dict) or facts.get("schema") != SCHEMA:
        raise InputError(f'is not a plan of schema "{SCHEMA}"', where=path, hint=_MAKE_ONE)
    try:
        saved: SavedPlan = replace(typed(SavedPlan, facts, "the plan"), path=path)
        for decision in saved.decisions:
            if decision.group is None and not decision.arguments:
                raise ValueError("a decision is about no dimension and no arguments")
            if any(side < 0 and side != ASIDE for side in decision.sides):
                raise ValueError("a side of a conflict is negative")
        for name, number in {**saved.axes, "microbatches": saved.microbatches}.items():
            if number < 1:
                raise ValueError(f"{name} is {number}")
        for kind, value in ((Recompute, saved.recompute), (Offload, saved.offload)):
            if value is not None:
                kind(value)
    except ValueError as error:
        raise InputError(f"the plan is damaged: {error}", where=path, hint=_MAKE_ONE) from None
    return saved


def apply_plan(problem: Problem, saved: SavedPlan, *, complete: bool = False) -> Problem:
    """The problem with the saved decisions fixed, and notices about those that did not carry over. complete: a search
    may add to them."""
    plan, notes = carried_over(problem, saved)
    closed = problem.closed if complete else frozenset(range(len(problem.mesh.names)))
    notices = (*(f"{saved.path}: {note}" for note in notes), *problem.notices)
    return replace(problem, fixed=plan, closed=closed, notices=notices)


def carried_over(problem: Problem, saved: SavedPlan) -> tuple[Plan, list[str]]:
    """(the saved decisions as decisions of this problem, a message for each difference)."""
    sizes = dict(zip(problem.mesh.names, problem.mesh.sizes, strict=True))
    wanted = [t for d in saved.decisions for t in (d.group, d.unless, d.only) if t is not None]
    matches = match(wanted, traits_of(problem))
    choices = decision_space(replace(problem, closed=frozenset())).choices
    useful = {(d.group, d.axis) for d in choices if isinstance(d, Shard)}
    plan: list[Decision] = []
    notes: list[str] = []
    for number, decision in enumerate(saved.decisions, 1):
        carried, why = _carry(problem, decision, matches)
        if carried is None or carried in plan:
            notes.append(f"decision {number} ({_words(decision)}) is left out: {why or 'it is there already'}")
            continue
        plan.append(carried)
        if isinstance(carried, Shard) and (carried.group, carried.axis) not in useful:
            length = f"{problem.dimensions.groups[carried.group].size:,} elements, {sizes[decision.axis]} ways"
            notes.append(f"decision {number} ({_words(decision)}) changes nothing here: {length}")
    for traits, group in matches.items():
        notes += _changes(traits, problem.dimensions.groups[group])
    for axis, size in saved.axes.items():
        if sizes.get(axis, size) != size:
            notes.append(f"mesh axis {axis} was {size} devices and is {sizes[axis]}")
    return tuple(plan), notes


def match(saved: Iterable[Traits], now: list[Traits]) -> dict[Traits, int]:
    """Saved group -> number of the group it matches; groups without a match are missing. The most alike are paired
    first, each once."""
    wanted = list(dict.fromkeys(saved))
    pairs = [(likeness(old, new), a, b) for a, old in enumerate(wanted) for b, new in enumerate(now)]
    matches: dict[Traits, int] = {}
    for score, a, b in sorted(pairs, key=lambda pair: (-pair[0], pair[1], pair[2])):
        if score >= LIKENESS and wanted[a] not in matches and b not in matches.values():
            matches[wanted[a]] = b
    return matches


def likeness(old: Traits, new: Traits) -> float:
    """Likeness from 0 to 1; properties that neither has are ignored."""
    parts = {
        "members": _overlap(old.members, new.members),
        "uses": _overlap(old.uses, new.uses),
        "role": float(old.role == new.role) if old.role or new.role else None,
        "name": float(old.name == new.name),
        "size": float(old.size == new.size),
    }
    shared = {part: value for part, value in parts.items() if value is not None}
    return sum(_WEIGHTS[part] * value for part, value in shared.items()) / sum(_WEIGHTS[part] for part in shared)


def traits_of(problem: Problem) -> list[Traits]:
    """[groups] traits of each."""
    members: dict[int, set[str]] = defaultdict(set)
    uses: dict[int, set[str]] = defaultdict(set)
    for number, argument in enumerate(problem.program.arguments):
        groups, form = _factors(problem, number)
        for dim, factors in enumerate(form.results[0] if argument.path else ()):
            for place, factor in enumerate(factors):
                part = f"/{place}" if len(factors) > 1 else ""
                members[groups[factor]].add(f"{re.sub(r'[0-9]+', '*', argument.path)}.{dim}{part}")
    for number in {pattern: k for k, pattern in enumerate(problem.op_pattern)}.values():
        op = problem.program.ops[number]
        if op.kind.heavy:
            groups, form = _factors(problem, number)
            for factor, group in enumerate(groups):
                arrays = (*form.operands, *form.results)
                places = [
                    f"{a}.{d}" for a, dims in enumerate(arrays) for d, factors in enumerate(dims) if factor in factors
                ]
                uses[group].add(" ".join([op.name, form.kinds[factor].name, *places]))
    return [
        Traits(g.name, g.role, g.size, tuple(sorted(members[k])), tuple(sorted(uses[k])))
        for k, g in enumerate(problem.dimensions.groups)
    ]


def _factors(problem: Problem, op: int) -> Any:
    pattern = problem.patterns[problem.op_pattern[op]]
    return pattern.groups, pattern.form


def _carry(problem: Problem, decision: SavedDecision, matches: Mapping[Traits, int]) -> tuple[Decision | None, str]:
    """(the decision in this problem, empty), or (None, reason). Conflicts that are new here take their first side."""
    names = problem.mesh.names
    if decision.axis not in names:
        return None, f"this mesh has {', '.join(names)}"
    axis = names.index(decision.axis)
    if decision.group is None:
        if decision.arguments not in problem.roles:
            return None, f"there are no such arguments here, but {', '.join(ROLES)}"
        return Replicate(problem.roles.index(decision.arguments), axis), ""
    for traits in (decision.group, decision.unless, decision.only):
        if traits is not None and traits not in matches:
            some = f" ({', '.join(map(slash_path, traits.members[:2]))})" if traits.members else ""
            return None, f"nothing here is like {traits.name}{some}"
    group = matches[decision.group]
    unless = NONE if decision.unless is None else matches[decision.unless]
    unless = SUMMED if decision.unless_summed else LOOK_UPS if decision.unless_look_ups else unless
    here = problem.dimensions.groups[group]
    counts = [problem.dimensions.resolutions[r].sides for r in here.resolutions]
    filled = (*decision.sides, *((0,) * len(counts)))[: len(counts)]
    sides = tuple(min(side, count - 1) for side, count in zip(filled, counts, strict=True))
    only = NONE if decision.only is None else matches[decision.only]
    return Shard(group, axis, sides, unless, only), ""


def _changes(old: Traits, new: Group) -> list[str]:
    """A message for each change of a group's name or size."""
    changes = []
    if new.name != old.name:
        changes.append(f"{old.name} is called {new.name} here")
    if new.size != old.size:
        changes.append(f"{new.name} had {old.size:,} elements and has {new.size:,}")
    return changes


def _words(decision: SavedDecision) -> str:
    if decision.group is None:
        return f"{slash_path(decision.arguments)} replicated over {decision.axis}"
    return f"{decision.group.name} over {decision.axis}"


def _overlap(old: tuple[str, ...], new: tuple[str, ...]) -> float | None:
    """Jaccard index of both; None where both are empty."""
    together = set(old) | set(new)
    return len(set(old) & set(new)) / len(together) if together else None


# ---------------------------------------------------------------- untying layers
# A group holds classes that are sharded alike, one per layer (every layer's d_ff). `unmirror` lets the first and the
# last of them be decided separately from the others.

Parts = dict[int, tuple[int, ...]]  # group -> the groups that have been split off it
_NAMED = 4  # members a group names


def mirrored_groups(problem: Problem) -> list[int]:
    """Groups that can be un-mirrored: those of several classes without conflicts that tie these together."""
    groups = problem.dimensions.groups
    return [number for number, group in enumerate(groups) if len(group.classes) > 1 and not group.resolutions]


def unmirror(problem: Problem, numbers: Iterable[int]) -> tuple[Problem, Parts]:
    """The problem with these groups un-mirrored, and the groups split off each of them."""
    dimensions = problem.dimensions
    groups, class_group = list(dimensions.groups), list(dimensions.class_group)
    parts: Parts = {}
    for number in numbers:
        group = dimensions.groups[number]
        ends = {"first": group.classes[0], **({"last": group.classes[-1]} if len(group.classes) > 2 else {})}
        parts[number] = tuple(range(len(groups), len(groups) + len(ends)))
        for name, member in ends.items():
            class_group[member] = len(groups)
            groups.append(_part(problem.program, dimensions, group, (member,), f"{group.name}:{name}"))
        others = tuple(c for c in group.classes if c not in ends.values())
        groups[number] = _part(problem.program, dimensions, group, others, group.name)
    apart_dimensions = replace(dimensions, groups=tuple(groups), class_group=tuple(class_group))
    return _with_dimensions(problem, apart_dimensions, parts), parts


def unmirrored(plan: Plan, parts: Parts) -> Plan:
    """Translates a plan for the mirrored problem into an equivalent one for the un-mirrored problem."""
    decisions: list[Decision] = []
    for decision in plan:
        decisions.append(decision)
        if isinstance(decision, Shard):
            decisions += [decision._replace(group=part) for part in parts.get(decision.group, ())]
    return tuple(decisions)


def _part(program: Program, dimensions: Dimensions, group: Group, classes: tuple[int, ...], name: str) -> Group:
    size = max(dimensions.class_sizes[c] for c in classes)
    members: list[str] = []
    for number, argument in enumerate(program.arguments):
        for dim, factors in enumerate(dimensions.forms[number].results[0]):
            if any(dimensions.factor_classes[number][factor] in classes for factor in factors):
                members.append(f"{argument.label}.{dim}")
    return replace(group, name=name, classes=classes, size=size, members=tuple(members[:_NAMED]))


def _with_dimensions(problem: Problem, dimensions: Dimensions, parts: Parts) -> Problem:
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    patterns: list[OpPattern] = []
    op_pattern: list[int] = []
    for op, old in enumerate(problem.op_pattern):
        groups = tuple(dimensions.class_group[c] for c in dimensions.factor_classes[op])
        pattern = numbers.setdefault((old, groups), len(patterns))
        if pattern == len(patterns):
            patterns.append(replace(problem.patterns[old], groups=groups))
        op_pattern.append(pattern)
    return replace(
        problem, dimensions=dimensions, patterns=tuple(patterns), op_pattern=tuple(op_pattern),
        fixed=unmirrored(problem.fixed, parts), mirrored=(problem, parts),
    )  # fmt: skip
