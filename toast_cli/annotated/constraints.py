"""Groups a program's sharding constraints by source line, and removes those of a line.

In: a program's content. Out: `Annotations`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from toast_cli import xla
from toast_cli.frontend.handover import parse
from toast_cli.frontend.places import Frame, frames_of
from toast_cli.frontend.shardings import kind_of
from toast_cli.xla import walk_ops

# Shardy's operations, and GSPMD's custom calls, that only state a sharding.
CONSTRAINTS = ("sdy.sharding_constraint", "sdy.reshard", "Sharding")
OPERATIONS = ("sdy.sharding_constraint", "sdy.reshard", "stablehlo.custom_call")

Stack = tuple[Frame, ...]  # the user's own frames, the innermost first


@dataclass(frozen=True)
class Annotations:
    """The constraints of a module."""

    module: Any  # ir.Module

    @classmethod
    def of(cls, content: bytes, where: str) -> Annotations:
        return cls(parse(content, where)[1])

    @cached_property
    def helpers(self) -> frozenset[str]:
        """`model.py:9` of each line that states constraints for several callers and is the only such line of its
        function: a helper, whose constraints are attributed to its callers."""
        found = frozenset[str]()
        while more := _helpers([stack for _, stack in _located(self.module)], found):
            found |= more
        return found

    @property
    def lines(self) -> list[str]:
        """`model.py:14` of each source line that states constraints, in program order."""
        lines = [_line(stack, self.helpers) for _, stack in _located(self.module)]
        return list(dict.fromkeys(filter(None, lines)))

    def without(self, line: str) -> bytes:
        """The program, as MLIR bytecode, without the constraints of a line."""
        module = xla.parse_module(xla.make_context(), xla.write_bytecode(self.module))
        for operation, stack in _located(module):
            if _line(stack, self.helpers) == line:
                operation.results[0].replace_all_uses_with(operation.operands[0])
                operation.erase()
        return xla.write_bytecode(module)


def _located(module: Any) -> list[tuple[Any, Stack]]:
    """Constraints with the user's stack frames that state them."""
    found = []
    for operation in walk_ops(module, *OPERATIONS):
        if kind_of(operation) in CONSTRAINTS:
            stack = frames_of(str(operation.location))
            found.append((operation, tuple(frame for frame in stack if frame.is_users)))
    return found


def _line(stack: Stack, helpers: frozenset[str]) -> str:
    return next((frame.place for frame in stack if frame.place not in helpers), "")


def _helpers(stacks: list[Stack], known: frozenset[str]) -> frozenset[str]:
    lines: dict[tuple[str, str], set[str]] = defaultdict(set)  # of each function
    callers: dict[str, set[str]] = defaultdict(set)
    for stack in stacks:
        seen = [frame for frame in stack if frame.place not in known]
        for inner in seen[:1]:
            lines[inner.path, inner.function].add(inner.place)
            callers[inner.place].update(frame.place for frame in seen[1:2])
    return frozenset(
        place for places in lines.values() if len(places) == 1 for place in places if len(callers[place]) > 1
    )
