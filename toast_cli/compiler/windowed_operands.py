"""Windowed operands: what a product takes apart that is made piece by piece lies in memory as it is.

Each step of a windowed product (see `windowed_products`) reads another slice of the operand that has the scattered
dimension, and XLA:TPU cuts it from an array, not from what it would have computed on the way in. The array lies in the
type that products multiply, and is made as soon as what it is made of is there, since the scheduler has time to fill
while collectives run: a layer norm's result, which the forward product computes as it reads, is kept until the
gradient of the weight is made. The other operand is read whole in every step, and may be computed there. Seen in
training steps of transformers compiled by libtpu 0.0.42.1 for v5e. Without this pass nothing is written for it.

Enters: a program and which values are written. Leaves: which values are an operand of such a product and lie nowhere
else, and of which products.
"""

from __future__ import annotations

from collections import defaultdict
from math import prod
from typing import NamedTuple

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Program

NAME = "windowed-operands"


class Operand(NamedTuple):
    """A value that lies nowhere. source: what it is a view of, with the same elements. uses: (op, position) of the
    products that read it and could be windowed."""

    source: int
    uses: tuple[tuple[int, int], ...]


def operands(
    program: Program, stored: list[bool], free: tuple[bool, ...], profile: CompilerProfile
) -> dict[int, Operand]:
    """Value -> how products read it.

    Of views of one value that are contracted alike (queries, keys and values are made of one array) the one that is
    read last stands for all.
    """
    if NAME not in profile.passes:
        return {}
    sources: dict[int, int] = {}
    uses: dict[int, list[tuple[int, int]]] = defaultdict(list)
    last: dict[tuple[int, int], int] = {}  # (source, elements that are summed) -> value
    for number, op in enumerate(program.ops):
        if not op.kind.contraction or not op.rule.results:
            continue
        for position, value in enumerate(op.operands):
            source = sources[value] = _source(program, stored, value)
            if source < 0 or free[source]:
                continue
            uses[value].append((number, position))
            factors = {f for dim in op.rule.operands[position] for f in dim}
            summed = factors.difference(*op.rule.results[0])
            last[source, prod(op.rule.sizes[f] for f in summed)] = value
    return {value: Operand(sources[value], tuple(uses[value])) for value in dict.fromkeys(last.values())}


def _source(program: Program, stored: list[bool], value: int) -> int:
    """What a value is a view of, up to a kernel's end; -1 where that lies in memory."""
    while not stored[value]:
        op = program.ops[program.producer[value]]
        if not op.kind.view_or_convert or len(op.operands) != 1:
            return value
        value = op.operands[0]
    return -1
