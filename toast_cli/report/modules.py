"""Finds the module of the user's program that each op belongs to. Enters: a source. Leaves: a path for each op.

Uninformative names are left out: modules that all paths begin with (`Net`), and the lowered function (`train_step`)
with its callers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from toast_cli.frontend.modules import common_start, functions_of, scopes_of
from toast_cli.frontend.name_stack import pass_of
from toast_cli.frontend.source import Source
from toast_cli.printable import printable

NOWHERE = "no place in the source"
_LOWERED = re.compile(r"jit\((\w+)\)")


class Modules:
    """Paths of the given ops of a program."""

    def __init__(self, source: Source, ops: Iterable[int]) -> None:
        numbers = sorted(set(ops))
        stacks = {op: source.name_stack(op) for op in numbers}
        scopes = {op: scopes_of(stack) for op, stack in stacks.items()}
        first = common_start(path for path in scopes.values() if path)
        self._passes = {op: pass_of(stack) for op, stack in stacks.items()}
        self._paths = {op: scopes[op][first:] or _functions(source, op, stacks[op]) for op in numbers}

    def of(self, op: int) -> tuple[str, ...]:
        """The modules around an op, the outermost first."""
        return self._paths[op]

    def pass_of(self, op: int) -> str:
        """`fwd`, `bwd`, `remat` or nothing."""
        return self._passes[op]


def _functions(source: Source, op: int, stack: str) -> tuple[str, ...]:
    path = tuple(map(printable, functions_of(source.stack(op))))
    lowered = _LOWERED.match(stack)
    inside = path[path.index(lowered[1]) + 1 :] if lowered and lowered[1] in path else path
    return inside or path[-1:] or (NOWHERE,)
