"""Argument groups: which arguments are weights, which are other state that is carried from step to step, which are inputs.

Arguments that share the first component of their path (`params`, `mu`, `nu`) are one kind. Without paths each argument is
judged alone: what products, convolutions and gathers read is a weight, what else is donated is state.
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
_ROOT = re.compile(r"[A-Za-z_]\w*")


def argument_roles(program: Program) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """(role names, [arguments] number of each argument's role)."""
    read = _read_by_products(program)
    members: dict[str, list[int]] = defaultdict(list)
    for number, argument in enumerate(program.arguments):
        root = _ROOT.match(argument.path)
        members[root.group() if root else f"#{number}"].append(number)
    roles = [0] * len(program.arguments)
    for numbers in members.values():
        size = {n: program.values[program.arguments[n].value].bytes for n in numbers}
        weight = sum(size[n] for n in numbers if n in read)
        donated = sum(size[n] for n in numbers if program.arguments[n].donated)
        total = sum(size.values())
        integers = all(program.values[program.arguments[n].value].dtype.startswith(("i", "ui")) for n in numbers)
        otherwise = STATE if donated * 2 > total else INPUTS
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


def _read_by_products(program: Program) -> set[int]:
    """Arguments that a contraction, convolution (its kernel) or gather (its table) reads, directly or through a plain view.

    What a donated argument is multiplied with, itself not donated, is data: the first layer's input beside its weight.
    """
    origin = views(program)
    read: set[int] = set()
    data: set[int] = set()
    for op in program.ops:
        if op.name in _READERS:
            found = {origin[v] for v in op.operands[_READERS[op.name]] if v in origin}
            donated = {k for k in found if program.arguments[k].donated}
            read |= found
            data |= found - donated if donated else set()
    return read - data
