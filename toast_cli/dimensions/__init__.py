"""The named-dimension analysis (TOAST, arXiv:2508.15010): which dimensions must be split alike, and which conflict.

In: a `Program`. Out: `Dimensions`: every dimension of every value as an ordered product of *classes*, mirrored
classes joined into *groups*, and for every group the *components* of its conflicts with their sides.
"""

from __future__ import annotations

from toast_cli.dimensions.classes import classify
from toast_cli.dimensions.conflicts import find_conflicts, mirrored_groups
from toast_cli.dimensions.model import Dimensions as Dimensions
from toast_cli.dimensions.model import Form as Form
from toast_cli.dimensions.model import Group as Group
from toast_cli.dimensions.model import Resolution as Resolution
from toast_cli.dimensions.model import Strand as Strand
from toast_cli.dimensions.naming import name_groups
from toast_cli.program.model import Program, once


@once
def analyse(program: Program) -> Dimensions:
    """Named-dimension analysis of a whole program (TOAST, section 3)."""
    classes = classify(program)
    members = mirrored_groups(program, classes)
    class_group = [0] * len(classes.sizes)
    for number, group in enumerate(members):
        for member in group:
            class_group[member] = number
    conflicts = find_conflicts(program, classes, class_group)
    owned: list[list[int]] = [[] for _ in members]
    for number, resolution in enumerate(conflicts.resolutions):
        owned[resolution.group].append(number)
    crowded = {resolution.group for resolution in conflicts.resolutions}
    named = name_groups(program, classes, class_group, len(members), crowded)
    sizes = [max(classes.sizes[c] for c in group) for group in members]
    groups = tuple(
        Group(label.name, tuple(group), sizes[k], tuple(owned[k]), label.members, label.role)
        for k, (group, label) in enumerate(zip(members, named, strict=True))
    )
    return Dimensions(
        classes.sizes, tuple(class_group), classes.forms, classes.factor_classes, groups, conflicts.resolutions,
        conflicts.strands, conflicts.values, conflicts.components,
    )  # fmt: skip
