"""The share of each reduction in the collective that XLA combines it into.

In: a `Problem` and the `Compilation` of its program. Out: a share for each op, for `pricing`.
"""

from __future__ import annotations

from toast_cli.compiler.collectives import combined_shares
from toast_cli.compiler.compilation import Compilation
from toast_cli.dimensions.model import FactorKind
from toast_cli.plan.problem import Problem


def reduction_shares(problem: Problem, made: Compilation) -> list[float]:
    """[ops] see `combined_shares`. A sum is reduced as its last term."""
    program, late = problem.program, made.late
    earlier = {term for found in problem.sums for term in found.terms if term != max(found.terms)}
    groups = [
        frozenset([g for g, kind in zip(p.groups, p.form.kinds, strict=True) if kind is FactorKind.REDUCTION])
        for p in problem.patterns
    ]
    over: list[tuple[frozenset[int], str, str] | None] = [None] * len(program.ops)
    for number, (op, pattern) in enumerate(zip(program.ops, problem.op_pattern, strict=True)):
        if groups[pattern] and op.results and number not in earlier:
            how = "add" if op.kind.matrix_unit else op.detail
            over[number] = groups[pattern], how, program.values[op.results[0]].dtype
    return combined_shares(
        program, over, [all(late[value] for value in op.results) for op in program.ops], made.profile
    )
