"""Argument groups: which arguments are weights, which are other state that is carried from step to step, which are inputs.

Arguments that share the first component of their path (`params`, `mu`, `nu`) are one kind. Without paths each argument is
judged alone: what products, convolutions and gathers read is a weight, what else is carried from step to step is state. An
argument is carried when it is donated, or when some result is an update of it: an array of its type that elementwise ops
make from it.
"""

from __future__ import annotations

import re
from collections import defaultdict

from toast_cli.program.model import Program

WEIGHTS, STATE, INPUTS = "weights", "state", "inputs"
ROLES = (WEIGHTS, STATE, INPUTS)

_VIEWS = frozenset(
    [
        "stablehlo.convert",
        "stablehlo.transpose",
        "stablehlo.reshape",
        "stablehlo.copy",
        "stablehlo.optimization_barrier",
        "stablehlo.dynamic_slice",
        "stablehlo.slice",
        "stablehlo.broadcast_in_dim",
    ]
)
# Ops that read weights -> the operands that may be one: the kernel, the table, either side of a product.
_READERS = {
    "stablehlo.dot_general": slice(None),
    "stablehlo.convolution": slice(1, 2),
    "stablehlo.gather": slice(0, 1),
}
# What an update adds to an array, or scales it by.
_UPDATES = frozenset(
    [
        "stablehlo.add",
        "stablehlo.subtract",
        "stablehlo.multiply",
        "stablehlo.select",
        "stablehlo.convert",
        "stablehlo.divide",
    ]
)
_UPDATE_STEPS = 8
_ROOT = re.compile(r"[A-Za-z_]\w*")


def argument_roles(program: Program) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """(role names, [arguments] number of each argument's role)."""
    sides = _sides_of_products(program)
    carried = _carried(program, sides)
    read = _weights_of_products(sides, carried)
    members: dict[str, list[int]] = defaultdict(list)
    for number, argument in enumerate(program.arguments):
        root = _ROOT.match(argument.path)
        members[root.group() if root else f"#{number}"].append(number)
    roles = [0] * len(program.arguments)
    for numbers in members.values():
        size = {n: program.values[program.arguments[n].value].bytes for n in numbers}
        weight = sum(size[n] for n in numbers if n in read)
        kept = sum(size[n] for n in numbers if n in carried)
        total = sum(size.values())
        integers = all(program.values[program.arguments[n].value].dtype.startswith(("i", "ui")) for n in numbers)
        otherwise = STATE if kept * 2 > total else INPUTS
        role = WEIGHTS if weight * 2 > total and not integers else otherwise
        for n in numbers:
            roles[n] = ROLES.index(role)
    return ROLES, tuple(roles)


def views(program: Program) -> dict[int, int]:
    """Value -> the argument (by number) that it is a plain view of: converted, transposed, reshaped, sliced."""
    origin = {a.value: n for n, a in enumerate(program.arguments)}
    for op in program.ops:
        if op.name in _VIEWS and op.operands and op.operands[0] in origin:
            origin[op.results[0]] = origin[op.operands[0]]
    return origin


def _carried(program: Program, sides: list[tuple[int, ...]]) -> set[int]:
    """Arguments (by number) that one step hands to the next: donated, or updated by a result.

    A residual network returns an update of its input: only where some weight is updated are other updates believed.
    """
    donated = {n for n, argument in enumerate(program.arguments) if argument.donated}
    number = {argument.value: n for n, argument in enumerate(program.arguments)}
    updated: set[int] = set()
    for op in program.ops[len(program.ops) - len(program.results) :]:
        updated |= {number[v] for v in _updated(program, op.operands[0]) if v in number}
    updated -= {pair[0] for pair in sides if len(pair) == 2 and pair[1] not in updated | donated}
    return donated | updated if updated & {n for found in sides for n in found} else donated


def _updated(program: Program, result: int) -> set[int]:
    """Arrays of a result's shape that it is an update of, itself not."""
    wanted = program.values[result].shape
    frontier, seen = {result}, {result}
    for _ in range(_UPDATE_STEPS):
        makers = (program.ops[program.producer[value]] for value in frontier)
        found = {v for op in makers if op.name in _UPDATES for v in op.operands if program.values[v].shape == wanted}
        frontier = found - seen
        seen |= found
    return seen - {result}


def _sides_of_products(program: Program) -> list[tuple[int, ...]]:
    """Per contraction, convolution (its kernel) or gather (its table): the arguments it reads, directly or through a plain view."""
    origin = views(program)
    return [
        tuple(dict.fromkeys(origin[v] for v in op.operands[_READERS[op.name]] if v in origin))
        for op in program.ops
        if op.name in _READERS
    ]


def _weights_of_products(sides: list[tuple[int, ...]], carried: set[int]) -> set[int]:
    """Arguments that products read, less the data among them.

    What an argument that is carried is multiplied with, itself not carried, is data: the first layer's input beside its weight. Where
    nothing is carried (inference) it is the left one of two that meet.
    """
    read = {n for found in sides for n in found}
    data = {n for found in sides if carried.intersection(found) for n in found} - carried
    met = {found[0] for found in sides if len(found) == 2 and not carried.intersection(found)}
    return read - data - met
