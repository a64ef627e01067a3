"""Values made from constants alone, which Shardy recomputes for each of their uses.

In: a program. Out: its values of this kind, and the program in which sums over only such values need them whole.
They have no sharding of their own: each use gets a copy in its sharding, so a reshard of one costs nothing and a
sharding on one would only bind its uses together. `OpKind.rematerialised` follows Shardy's pass
`sdy-constant-or-scalar-splitter`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from toast_cli.program.model import Op, Program, Rule, once
from toast_cli.program.ops import BROADCAST_IN_DIM


@once
def remade_values(program: Program) -> tuple[bool, ...]:
    """[values] True where every use gets a copy of its own."""
    remade = [False] * len(program.values)
    for op in program.ops:
        preserved = op.kind.rematerialised and all(remade[v] for v in op.operands)
        if op.kind.source or preserved or expands_scalar(op, program):
            for value in op.results:
                remade[value] = True
    return tuple(remade)


def expands_scalar(op: Op, program: Program) -> bool:
    """Whether an op is a broadcast of a scalar, constant or not."""
    return op.name == BROADCAST_IN_DIM and not program.values[op.operands[0]].shape


def with_sums_whole(program: Program) -> Program:
    """The program in which ops that sum over dimensions of such values alone need these whole. Their operands adapt to
    any sharding, so nothing would propagate a split to them, and each device can compute them itself."""
    remade = remade_values(program)
    ops = list(program.ops)
    for number, op in enumerate(ops):
        if op.rule.reduction and any(remade[value] for value in op.operands):
            dims = [
                d for value, dims in zip(op.operands, op.rule.operands, strict=True) if not remade[value] for d in dims
            ]
            alone = op.rule.reduction.difference(*dims)
            if alone:
                ops[number] = replace(op, rule=_needed_whole(op.rule, alone))
    return replace(program, ops=tuple(ops))


@lru_cache(maxsize=4096)
def _needed_whole(rule: Rule, factors: frozenset[int]) -> Rule:
    return replace(rule, need_replication=rule.need_replication | factors, reduction=rule.reduction - factors)
