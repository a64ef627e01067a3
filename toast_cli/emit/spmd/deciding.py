"""Finds operations for trip counts only: a `Program` omits them, a written program needs them.

The Program knows trip counts and drops values that nothing else needs, such as a loop's counter. In: a `Source`.
Out: the operations of the module to keep although they correspond to no op of the program.
"""

from __future__ import annotations

from typing import Any

from toast_cli.frontend.source import Source
from toast_cli.xla import ir, terminator, walk_ops

LOOP = "stablehlo.while"


class Deciding:
    """Answers questions about the operations and values of the module in `source`, as long as its operands do not
    change.
    """

    def __init__(self, source: Source) -> None:
        producer = source.program.producer
        self._numbers: dict[Any, list[int]] = {}
        for number, operation in enumerate(source.operations):
            self._numbers.setdefault(operation, []).append(number)
        self._values = {handle: value for handle, value in source.numbers.items() if producer[value] >= 0}
        self._kept: set[tuple[Any, int]] = set()
        self._running: set[Any] = set()
        self._loops = walk_ops(source.module.operation, LOOP)
        self._find(source)

    def ops_of(self, operation: Any) -> list[int]:
        """Numbers of the program's ops that an operation stands for."""
        return self._numbers.get(operation, [])

    def value_of(self, handle: Any) -> int | None:
        """The program's value number of a value of the module; None if it only determines trip counts, or nothing needs
        it."""
        return self._values.get(handle)

    def runs(self, operation: Any) -> bool:
        """True if a written program has the operation."""
        return operation in self._numbers or operation in self._running

    def is_passed(self, loop: Any, position: int) -> bool:
        """True if a loop passes a value through unchanged."""
        body = loop.regions[1].blocks[0]
        return bool(terminator(body).operands[position] == body.arguments[position])

    def is_kept(self, loop: Any, position: int) -> bool:
        """True if a loop must carry a value that the program does not have."""
        return (loop, position) in self._kept

    def _find(self, source: Source) -> None:
        """Finds everything that the conditions of needed loops depend on."""
        waiting = [terminator(loop.regions[0].blocks[0]).operands[0] for loop in self._loops if loop in self._numbers]
        seen: set[Any] = set()
        while waiting:
            handle = waiting.pop()
            if handle in seen or handle in self._values:
                continue
            seen.add(handle)
            owner = handle.owner
            if isinstance(handle, ir.BlockArgument):
                waiting += self._carried(owner.owner.operation, handle.arg_number)
                continue
            operation = owner.operation
            if operation.name == LOOP:
                waiting += self._carried(operation, handle.result_number)
            else:
                self._running.add(operation)
                waiting += list(operation.operands)

    def _carried(self, loop: Any, position: int) -> list[Any]:
        """The values that a loop's carried value depends on; marks the loop as needed."""
        self._running.add(loop)
        self._kept.add((loop, position))
        condition, body = (region.blocks[0] for region in loop.regions)
        return [
            loop.operands[position],
            terminator(body).operands[position],
            terminator(condition).operands[0],
        ]
