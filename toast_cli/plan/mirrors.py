"""Untying layers: lets the first and the last class of a group be decided separately from the others.

A group holds classes that are sharded alike, one per layer (every layer's d_ff).

In: a problem and the groups to untie. Out: the same problem with the first class, and the last where there are
three or more, as groups of their own; the others keep their group's number, so a plan for the one problem is easily
made one for the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from toast_cli.dimensions.model import Dimensions, Group
from toast_cli.plan.decisions import Decision, Plan, Shard
from toast_cli.plan.op_sharding import OpPattern
from toast_cli.plan.problem import Problem
from toast_cli.program.model import Program

Parts = dict[int, tuple[int, ...]]  # group -> the groups that have been split off it
_NAMED = 4  # members a group names


def mirrored_groups(problem: Problem) -> list[int]:
    """Groups that can be un-mirrored: those of several classes without conflicts that tie these together."""
    groups = problem.dimensions.groups
    return [number for number, group in enumerate(groups) if len(group.classes) > 1 and not group.resolutions]


def unmirror(problem: Problem, apart: Iterable[int]) -> tuple[Problem, Parts]:
    """The problem with these groups un-mirrored, and the groups split off each of them."""
    dimensions = problem.dimensions
    groups, class_group = list(dimensions.groups), list(dimensions.class_group)
    parts: Parts = {}
    for number in apart:
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


def taken_apart(plan: Plan, parts: Parts) -> Plan:
    """Translates a plan for the mirrored problem into an equivalent one for the un-mirrored problem."""
    found: list[Decision] = []
    for decision in plan:
        found.append(decision)
        if isinstance(decision, Shard):
            found += [decision._replace(group=part) for part in parts.get(decision.group, ())]
    return tuple(found)


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
        at = numbers.setdefault((old, groups), len(patterns))
        if at == len(patterns):
            patterns.append(replace(problem.patterns[old], groups=groups))
        op_pattern.append(at)
    return replace(
        problem, dimensions=dimensions, patterns=tuple(patterns), op_pattern=tuple(op_pattern),
        fixed=taken_apart(problem.fixed, parts), mirrored=(problem, parts),
    )  # fmt: skip
