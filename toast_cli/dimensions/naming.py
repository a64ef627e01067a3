"""Names of class groups: the user's own, else the group's role, else one derived from an argument that has it.

Names are for display; roles (see `evidence`) also decide what tactics do. In: program, classes, groups. Out: the
name, the role and a few argument dimensions of each group.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import NamedTuple

from toast_cli.dimensions.classes import Classes
from toast_cli.dimensions.evidence import find_roles
from toast_cli.program.model import Program
from toast_cli.program.roles import WEIGHTS, argument_roles

_LISTED = 6
# Fields in which frameworks wrap an array; left out of names.
_WRAPPERS = frozenset({"value", "raw_value", "get_value", "unbox", "array"})
_WORD = re.compile(r"\[(\d+)\]|[A-Za-z_][\w-]*")


class Named(NamedTuple):
    name: str
    role: str
    members: tuple[str, ...]


class _Member(NamedTuple):
    """A dimension of an argument. rank: the smaller, the better it names a group."""

    rank: int
    argument: int
    dim: int


def name_groups(
    program: Program, classes: Classes, class_group: list[int], groups: int, crowded: set[int]
) -> list[Named]:
    """[groups] names, all different. crowded: groups that own a conflict."""
    members = _members(program, classes, class_group, groups)
    roles = find_roles(program, classes, class_group, crowded)
    sizes = [0] * groups
    for number, group in enumerate(class_group):
        sizes[group] = max(sizes[group], classes.sizes[number])
    given = [_given(program, found) for found in members]
    places = _places(program, [None if given[g] or g in roles else found for g, found in enumerate(members)])
    taken: Counter[str] = Counter()
    named: list[Named] = []
    for group in range(groups):
        role = roles.get(group, "")
        name = given[group] or role or _axis(program, members[group]) or places[group]
        name = name or f"{_kind(program, members[group])}{sizes[group]}"
        taken[name] += 1
        unique = name if taken[name] == 1 else f"{name}_{taken[name]}"
        listed = tuple(f"{_path(program, m.argument)}.{m.dim}" for m in members[group][:_LISTED])
        named.append(Named(unique, role, listed))
    return named


def _members(program: Program, classes: Classes, class_group: list[int], groups: int) -> list[list[_Member]]:
    """[groups] the argument dimensions that have it, weights first."""
    roles, of = argument_roles(program)
    found: list[list[_Member]] = [[] for _ in range(groups)]
    for number in range(len(program.arguments)):
        form, factors = classes.forms[number], classes.factor_classes[number]
        for dim, pieces in enumerate(form.results[0]):
            for factor in pieces:
                rank = 0 if roles[of[number]] == WEIGHTS else 1
                found[class_group[factors[factor]]].append(_Member(rank, number, dim))
    return [sorted(members) for members in found]


def _path(program: Program, number: int) -> str:
    return program.arguments[number].label or f"argument {number}"


def _kind(program: Program, members: list[_Member]) -> str:
    """Prefix of the name of a dimension without a better one, followed by its size: `tokens_150`."""
    if not members:
        return "dim"
    first = members[0]
    if first.rank == 0:
        return "features_"
    return "tokens_" if program.values[program.arguments[first.argument].value].dtype[0] in "iu" else "inputs_"


def _given(program: Program, members: list[_Member]) -> str:
    """The user's most frequent name of these dimensions, or ""."""
    names = (program.arguments[m.argument].dimension_names[m.dim : m.dim + 1] for m in members)
    votes = Counter(name[0] for name in names if name and name[0])
    return votes.most_common(1)[0][0] if votes else ""


def _axis(program: Program, members: list[_Member]) -> str:
    """The mesh axis that the program states for these dimensions, if it is the same for all with one; else ""."""
    stated = (program.arguments[m.argument].annotated_axes[m.dim : m.dim + 1] for m in members)
    axes = {axis[0] for axis in stated if axis and axis[0]}
    return axes.pop() if len(axes) == 1 else ""


def _places(program: Program, members: list[list[_Member] | None]) -> list[str]:
    """[groups] the last words of the first member's path, and its dimension: as many words as distinguish the groups,
    at least two."""
    words = [_words(program, found[0]) if found else () for found in members]
    lengths = [2] * len(members)
    while True:
        names = [
            ".".join((*path[-n:], str(found[0].dim))) if found and path else ""
            for path, n, found in zip(words, lengths, members, strict=True)
        ]
        alike: dict[str, list[int]] = defaultdict(list)
        for group, name in enumerate(names):
            if name:
                alike[name].append(group)
        longer = [
            g
            for same in alike.values()
            if len({words[g] for g in same}) > 1
            for g in same
            if lengths[g] < len(words[g])
        ]
        if not longer:
            return names
        for group in longer:
            lengths[group] += 1


def _words(program: Program, member: _Member) -> tuple[str, ...]:
    """`params['blocks'][0].attn['kernel'].value` -> params, blocks_0, attn, kernel."""
    words: list[str] = []
    for match in _WORD.finditer(program.arguments[member.argument].path):
        if match[1] and words:
            words[-1] += f"_{match[1]}"
        else:
            words.append(match[0])
    return tuple([word for word in words if word not in _WRAPPERS] or words)
