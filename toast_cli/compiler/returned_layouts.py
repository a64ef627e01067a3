"""Returned layouts: the result of a contraction is copied where the program returns it in tiles of other dimensions.

XLA:TPU returns an array in the tiles that waste least for its shape. A contraction, with its epilogue, writes tiles of
one dimension of each operand. Logits [16, 1024, 50257] are returned in tiles of the 16 and the 1,024, both of the same
operand, so that they are in memory twice; [16, 1024, 32000] are not. Seen in single contractions of three dimensions,
f32 and bf16, compiled by libtpu 0.0.42.1 for v5e. Results for donated arguments are exempt. Without this pass results
are not copied.

Enters: a program and its written values. Leaves: the returned results of contractions, with their dimensions.
"""

from __future__ import annotations

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.compiler.tiling import Dims
from toast_cli.program.model import Program
from toast_cli.program.ops import DOT_GENERAL

NAME = "returned-layouts"
Sides = tuple[Dims, Dims]


def returned_products(program: Program, stored: list[bool], profile: CompilerProfile) -> dict[int, Sides]:
    """Returned result of a contraction and its epilogue -> (dimensions of the first operand only, of the second
    only)."""
    if NAME not in profile.passes:
        return {}
    donated = {a.aliased_result for a in program.arguments}
    found = {}
    for number, result in enumerate(program.results):
        value, shape = result.value, program.values[result.value].shape
        op = program.ops[program.producer[value]]
        while op.kind.elementwise and (made := _fused_operand(program, stored, op.operands, shape)) >= 0:
            op = program.ops[program.producer[made]]
        if number not in donated and len(shape) > 2 and op.name == DOT_GENERAL and not op.multiplies_by_vector:
            first, second = ({f for dim in dims for f in dim} for dims in op.rule.operands[:2])
            dims = op.rule.results[0]
            found[value] = (
                tuple(d for d, factors in enumerate(dims) if not second.intersection(factors)),
                tuple(d for d, factors in enumerate(dims) if not first.intersection(factors)),
            )
    return found


def _fused_operand(program: Program, stored: list[bool], operands: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """An operand of that shape that is computed in the same kernel, or -1."""
    values = (v for v in operands if not stored[v] and program.values[v].shape == shape)
    return next((v for v in values if not program.ops[program.producer[v]].kind.rearranges), -1)
