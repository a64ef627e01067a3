"""Caches: what a loop writes in pieces and multiplies, as decoders do with keys and values.

Enters: a program. Leaves: whether it has any.
"""

from __future__ import annotations

from toast_cli.program.model import Program, once
from toast_cli.program.ops import DYNAMIC_UPDATE_SLICE


@once
def has_caches(program: Program) -> bool:
    """Whether some loop writes into an array that a product in it reads, in the same trip or the next."""
    written = [op for op in program.ops if op.name == DYNAMIC_UPDATE_SLICE and op.loop >= 0]
    return any(_is_multiplied(program, op.results[0], op.loop) for op in written)


def _is_multiplied(program: Program, value: int, loop: int) -> bool:
    """Whether a value leads to a product in a loop."""
    waiting, seen = [value], {value}
    while waiting:
        for user, _ in program.users[waiting.pop()]:
            op = program.ops[user]
            if op.loop != loop:
                continue
            if op.kind.heavy:
                return True
            fresh = [result for result in op.results if result not in seen]
            seen.update(fresh)
            waiting += fresh
    return False
