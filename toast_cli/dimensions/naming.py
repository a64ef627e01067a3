"""Names for class groups after what they are, where that can be told from the ops they meet and the arguments that have them.

A name is evidence, never an input to a decision: a wrong one costs readability only. Enters: program, classes, groups.
Leaves: per group its name and a few argument dimensions that have it.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from toast_cli.dimensions.classes import Classes
from toast_cli.dimensions.model import Form, SlotKind
from toast_cli.program.model import ARGUMENT, Op, Program

# Ops through which an argument is still recognisably that argument.
_TRANSPARENT = frozenset(
    [
        "stablehlo.convert",
        "stablehlo.transpose",
        "stablehlo.reshape",
        "stablehlo.copy",
        "stablehlo.optimization_barrier",
        "stablehlo.dynamic_slice",
        "stablehlo.slice",
        "sdy.sharding_constraint",
    ]
)
_INTEGER = re.compile(r"u?i\d+$")

# When a group has several roles the first of these it has names it: the first line whatever the others say, the second only
# with a fair share of the evidence.
_DECISIVE = ["edges", "nodes", "batch", "vocab", "embed", "experts", "seq", "heads", "head_dim"]
_PRIORITY = ["channels", "height", "width", "depth", "ff", "layers"]


def name_groups(
    program: Program, classes: Classes, class_group: list[int], groups: int
) -> list[tuple[str, tuple[str, ...]]]:
    members = _members(program, classes, class_group, groups)
    votes = _votes(program, classes, class_group, groups)
    taken: Counter[str] = Counter()
    named: list[tuple[str, tuple[str, ...]]] = []
    sizes: list[int] = [0] * groups
    for number, group in enumerate(class_group):
        sizes[group] = max(sizes[group], classes.sizes[number])
    for group in range(groups):
        name = _elect(votes[group]) or _fallback(members[group], sizes[group])
        taken[name] += 1
        named.append((name if taken[name] == 1 else f"{name}_{taken[name]}", tuple(members[group][:6])))
    return named


def _elect(votes: Counter[str]) -> str:
    """The best-supported role; a role with less than a fifth of the support of the strongest does not count."""
    for role in _DECISIVE:
        if votes[role]:
            return role
    strongest = max(votes.values(), default=0)
    for role in _PRIORITY:
        if votes[role] and votes[role] * 5 >= strongest:
            return role
    return ""


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


def _votes(program: Program, classes: Classes, class_group: list[int], groups: int) -> list[Counter[str]]:
    votes: list[Counter[str]] = [Counter() for _ in range(groups)]
    origin = _origins(program)
    used_in_contraction = _contracted_arguments(program, origin)
    for number, op in enumerate(program.ops):
        slots = classes.slot_classes[number]
        if not slots:
            continue
        if op.name == ARGUMENT:
            roles = _argument_roles(program, number, used_in_contraction)
            roles = {
                classes.forms[number].results[0][dim][0]: r
                for dim, r in roles.items()
                if classes.forms[number].results[0][dim]
            }
        else:
            look = _ROLES.get(op.name)
            roles = (
                look(_Look(program, op, classes.forms[number], origin, [class_group[c] for c in slots])) if look else {}
            )
        for slot, role in roles.items():
            votes[class_group[slots[slot]]][role] += 1
    return votes


def _origins(program: Program) -> list[int]:
    """[values] the argument a value is a plain view of, else -1. Integer arguments count as data and are left out."""
    origin = [-1] * len(program.values)
    for number, argument in enumerate(program.arguments):
        if not _INTEGER.match(program.values[argument.value].dtype):
            origin[argument.value] = number
    for op in program.ops:
        if op.name in _TRANSPARENT and op.operands and op.results:
            origin[op.results[0]] = origin[op.operands[0]]
    return origin


def _contracted_arguments(program: Program, origin: list[int]) -> set[int]:
    return {
        origin[v]
        for op in program.ops
        if op.name in ("stablehlo.dot_general", "stablehlo.convolution", "stablehlo.gather")
        for v in op.operands[1 if op.name != "stablehlo.gather" else 0 :]
        if origin[v] >= 0
    }


def _argument_roles(program: Program, number: int, contracted: set[int]) -> dict[int, str]:
    """Dimensions of an argument that is data (not donated state, not a weight) -> role."""
    argument = program.arguments[number]
    value = program.values[argument.value]
    if argument.donated or number in contracted or not value.shape:
        return {}
    if _INTEGER.match(value.dtype):
        return {0: "batch", 1: "seq"} if len(value.shape) == 2 else {0: "batch"}
    if len(value.shape) == 4:
        return {0: "batch", 1: "height", 2: "width", 3: "channels"}
    return {0: "batch"} if len(value.shape) > 1 else {}


@dataclass(frozen=True, slots=True)
class _Look:
    """One op and what surrounds it; `groups` [slots] are group numbers."""

    program: Program
    op: Op
    form: Form
    origin: list[int]
    groups: list[int]


def _dot_roles(look: _Look) -> dict[int, str]:
    form = look.form
    left, right = ({slot for slots in dims for slot in slots} for dims in form.operands)
    out = {slot for slots in form.results[0] for slot in slots}
    weights = [look.origin[v] >= 0 for v in look.op.operands]
    batching, contracting = left & right & out, (left & right) - out
    if any(weights):
        weight = left if weights[0] else right
        roles = dict.fromkeys(batching & weight, "experts")
        if len(weight) == 2 and not batching:
            wide, narrow = sorted(weight, key=lambda s: form.sizes[s], reverse=True)
            if form.sizes[wide] > form.sizes[narrow]:
                roles[wide] = "ff"
        return roles
    return _attention_roles(look, left, right, out, contracting)


def _attention_roles(
    look: _Look, left: set[int], right: set[int], out: set[int], contracting: set[int]
) -> dict[int, str]:
    """Roles around a product of two activations one of whose arrays holds a group twice: the scores."""
    crowded = {s for s in out | contracting if look.groups.count(look.groups[s]) > 1}
    if len(crowded) != 2 or not (out | contracting) - crowded - contracting or not left & right & out:
        return {}
    roles = dict.fromkeys(crowded, "seq")
    if crowded <= out:
        roles.update(dict.fromkeys(contracting, "head_dim"))
        others = sorted(out - crowded, key=lambda s: _dim_of(look.form, s))
        roles.update(dict.fromkeys(others[1:], "heads"))
    else:
        values = right if crowded <= left else left
        scores = left if values is right else right
        roles.update(dict.fromkeys((values & out) - scores, "head_dim"))
    return roles


def _dim_of(form: Form, slot: int) -> int:
    return next((d for d, slots in enumerate(form.results[0]) if slot in slots), 99)


def _gather_roles(look: _Look) -> dict[int, str]:
    form = look.form
    table, indices = ({slot for slots in dims for slot in slots} for dims in form.operands[:2])
    if table & indices:  # along each row: the loss picks the label's probability
        return {slot: "vocab" for slot in table - indices if form.kinds[slot] == SlotKind.REDUCTION}
    is_table = look.origin[look.op.operands[0]] >= 0
    roles: dict[int, str] = {}
    for slot in table:
        if form.kinds[slot] == SlotKind.REDUCTION:
            roles[slot] = "vocab" if is_table else "nodes"
        elif is_table:
            roles[slot] = "embed"
    return roles


def _scatter_roles(look: _Look) -> dict[int, str]:
    program, op, form = look.program, look.op, look.form
    target = {slot for slots in form.operands[0] for slot in slots}
    updates = {slot for slots in form.operands[-1] for slot in slots}
    if len(program.values[op.operands[-1]].shape) != 2 or target == updates:
        return {}
    roles = {slot: "edges" for slot in updates - target if form.kinds[slot] == SlotKind.REDUCTION}
    return roles | dict.fromkeys(target - updates, "nodes") if roles else {}


def _convolution_roles(look: _Look) -> dict[int, str]:
    form = look.form
    if look.origin[look.op.operands[1]] < 0:
        return {}
    image = [slots[0] for slots in form.operands[0] if slots]
    kernel = {slot for slots in form.operands[1] for slot in slots}
    out = {slot for slots in form.results[0] for slot in slots}
    roles: dict[int, str] = {}
    for slot in kernel & (out | set(image)):
        roles[slot] = "channels"
    spatial = iter(("height", "width", "depth"))
    for slot in image:
        if slot in out and form.kinds[slot] == SlotKind.PERMUTATION:
            roles[slot] = next(spatial, "space")
        elif slot in out and slot not in kernel:
            roles[slot] = "batch"
    return roles


def _slice_roles(look: _Look) -> dict[int, str]:
    form = look.form
    if look.op.loop < 0 or look.origin[look.op.operands[0]] < 0:
        return {}
    return {slots[0]: "layers" for slots in form.operands[0][:1] if slots and form.kinds[slots[0]] == SlotKind.BLOCKED}


_ROLES = {
    "stablehlo.dot_general": _dot_roles,
    "stablehlo.gather": _gather_roles,
    "stablehlo.scatter": _scatter_roles,
    "stablehlo.convolution": _convolution_roles,
    "stablehlo.dynamic_slice": _slice_roles,
}
