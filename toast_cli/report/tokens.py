"""Tokens of one run, if the program determines them: a problem goes in, a number comes out."""

from __future__ import annotations

from toast_cli.plan.problem import Problem
from toast_cli.program.model import Program
from toast_cli.program.ops import CARRY, DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE, GATHER, SCATTER
from toast_cli.program.roles import INPUTS, STATE

# Ops whose first operand is the array that they read a part of, or write to.
_CHANGED = frozenset({CARRY, DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE, SCATTER})


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
    of_sequences = len(value.shape) > 1 and "seq" in roles and set(roles) <= {"seq", "batch"}
    return whole_numbers and of_sequences and not _finds_pages(problem, problem.program.arguments[number].value)


def _finds_pages(problem: Problem, value: int) -> bool:
    """True if these numbers look up what one step hands to the next: the pages of a cache."""
    program, waiting, seen = problem.program, [value], {value}
    state = {a.value for n, a in enumerate(program.arguments) if problem.roles[problem.argument_role[n]] == STATE}
    while waiting:
        for number, place in program.users[waiting.pop()]:
            op = program.ops[number]
            if op.name == GATHER and place == 1 and _first_version(program, op.operands[0]) in state:
                return True
            if op.kind.elementwise or op.kind.rearranges:
                waiting += [found for found in op.results if found not in seen]
                seen.update(op.results)
    return False


def _first_version(program: Program, value: int) -> int:
    """The array that a value is a part of, or that it was before it was written to."""
    while (op := program.ops[program.producer[value]]).operands and (op.kind.view or op.name in _CHANGED):
        value = op.operands[0]
    return value
