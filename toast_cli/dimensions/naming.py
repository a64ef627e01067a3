"""Names for class groups: the role each plays, where that is known, else after an argument that has it.

A name is for reading; what `evidence` finds out is also what tactics go by. Enters: program, classes, groups. Leaves: per group its
name, its role and a few argument dimensions that have it.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from toast_cli.dimensions.classes import Classes
from toast_cli.dimensions.evidence import find_roles
from toast_cli.program.model import Program

_LISTED = 6


class Named(NamedTuple):
    name: str
    role: str
    members: tuple[str, ...]


def name_groups(
    program: Program, classes: Classes, class_group: list[int], groups: int, crowded: set[int]
) -> list[Named]:
    """[groups] names, all different. crowded: groups that own a conflict."""
    members = _members(program, classes, class_group, groups)
    roles = find_roles(program, classes, class_group, crowded)
    sizes = [0] * groups
    for number, group in enumerate(class_group):
        sizes[group] = max(sizes[group], classes.sizes[number])
    taken: Counter[str] = Counter()
    named: list[Named] = []
    for group in range(groups):
        role = roles.get(group, "")
        name = role or _fallback(members[group], sizes[group])
        taken[name] += 1
        unique = name if taken[name] == 1 else f"{name}_{taken[name]}"
        named.append(Named(unique, role, tuple(members[group][:_LISTED])))
    return named


def _fallback(members: list[str], size: int) -> str:
    if members:
        path, _, dim = members[0].rpartition(".")
        words: list[str] = re.findall(r"[A-Za-z_]\w*", path)
        if words:
            return f"{words[-1]}.{dim}"
    return f"dim{size}"


def _members(program: Program, classes: Classes, class_group: list[int], groups: int) -> list[list[str]]:
    found: list[list[str]] = [[] for _ in range(groups)]
    for number, argument in enumerate(program.arguments):
        form, slots = classes.forms[number], classes.slot_classes[number]
        for dim, pieces in enumerate(form.results[0]):
            for slot in pieces:
                found[class_group[slots[slot]]].append(f"{argument.path or f'argument {number}'}.{dim}")
    return found
