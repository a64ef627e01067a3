"""Tokens of one run, if the program determines them: a problem goes in, a number comes out."""

from __future__ import annotations

from toast_cli.plan.problem import Problem
from toast_cli.program.roles import INPUTS


def tokens_of(problem: Problem) -> int:
    """Elements of the integer inputs over batch and sequence (token ids, targets); 0 if there is no such input, or they
    differ in size (encoders and decoders)."""
    found = {
        problem.program.values[argument.value].elements
        for number, argument in enumerate(problem.program.arguments)
        if problem.roles[problem.argument_role[number]] == INPUTS and _holds_tokens(problem, number)
    }
    return found.pop() if len(found) == 1 else 0


def _holds_tokens(problem: Problem, number: int) -> bool:
    """True if an argument has integers, one for each position of each sequence."""
    value = problem.program.values[problem.program.arguments[number].value]
    pattern = problem.patterns[problem.op_pattern[number]]
    roles = [problem.dimensions.groups[group].role for group in pattern.groups]
    whole_numbers = value.dtype.lstrip("su").startswith("i") and value.dtype != "i1"
    return whole_numbers and len(value.shape) > 1 and "seq" in roles and set(roles) <= {"seq", "batch"}
