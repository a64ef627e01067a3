"""Lowers a plan over the whole program: the sharding of every value and of every use. See `iteration` for the semantics, `accumulate` for
sums of partial results."""

from __future__ import annotations

from toast_cli.plan.accumulate import accumulated
from toast_cli.plan.decisions import Plan
from toast_cli.plan.iteration import Iteration
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.problem import Problem
from toast_cli.plan.sharding import Sharding, replicated


def lower(problem: Problem, plan: Plan) -> PartitionedProgram:
    """Shardings of all values and uses under `plan`."""
    program = problem.program
    iterated: list[Iteration] = [problem.iterate(p, plan) for p in range(len(problem.patterns))]
    iterations = tuple([iterated[pattern] for pattern in problem.op_pattern])
    shardings: list[Sharding] = [replicated(len(v.shape)) for v in program.values]
    computed: dict[int, Sharding] = {}
    reduced: dict[int, tuple[int, ...]] = {}
    partial: dict[int, tuple[int, ...]] = {}
    for number, op in enumerate(program.ops):
        iteration = iterations[number]
        for k, value in enumerate(op.results):
            shardings[value] = iteration.shardings[k]
            if over := (*iteration.reduced, *iteration.scattered[k]):
                partial[value] = over
            if iteration.computed[k] != iteration.shardings[k]:
                computed[value] = iteration.computed[k]
                reduced[value] = iteration.reduced
    required: dict[tuple[int, int], Sharding] = {}
    for number, op in enumerate(program.ops):
        iteration = iterations[number]
        for k, value in enumerate(op.operands):
            if iteration.operands[k] != shardings[value]:
                required[number, k] = iteration.operands[k]
    shardings, computed, sums = accumulated(program, shardings, computed, reduced, required)
    makers = {value: program.ops[program.producer[value]].kind for value in computed}
    at_once = sums | {value for value, kind in makers.items() if not kind.matrix_unit}
    convolved = frozenset(value for value, kind in makers.items() if kind.convolution)
    return PartitionedProgram(
        problem.mesh.names,
        problem.mesh.sizes,
        shardings,
        computed,
        required,
        at_once,
        convolved,
        iterations=iterations,
        partial=partial,
    )
