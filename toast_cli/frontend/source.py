"""`Source`: a program read in, both as an MLIR module (for emit) and as a `Program` (for everything else)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toast_cli.printable import printable
from toast_cli.program.model import Program

if TYPE_CHECKING:
    from toast_cli.frontend.shardings import Kept


@dataclass(frozen=True)
class Use:
    """A place in the MLIR module where a value is used: operand number `operand` of `operation`."""

    operation: Any  # ir.Operation
    operand: int


@dataclass(frozen=True)
class Source:
    """A normalised module (one entry function, calls and composites inlined) and the Program read from it.

    Attributes:
        path: as the user gave it. format: "stablehlo", "bytecode", "portable", "jax.export", "hlo-text", "hlo-proto".
        module: ir.Module. Emit annotates it in place, serialises it and takes the annotations off again.
        program: its flat view.
        definitions: [values] ir.Value that stands for each value in the module: a block argument of `main`, an op result, or,
            for a carried value, the result of the `while`; for a join the result of the `case`/`if`.
        operations: [ops] ir.Operation that each op stands for (the `while` of a carry, the terminator of a result).
        uses: (op, operand position) -> where in the module, for the ops of our own kinds.
        stated: shardings the program states and we keep: its manual regions' always, the rest on request.
        notices: what was changed or assumed on the way in, one sentence each (dropped shardings, unknown trip counts).
    """

    path: str
    format: str
    module: Any
    program: Program
    definitions: list[Any]
    operations: list[Any]
    uses: dict[tuple[int, int], tuple[Any, int]]
    stated: tuple[Kept, ...] = ()
    notices: tuple[str, ...] = ()

    def use(self, op: int, position: int) -> Use:
        """Where operand `position` of program op `op` is used in the module (a `while` init, a terminator's operand, …)."""
        operation, operand = self.uses.get((op, position), (self.operations[op], position))
        return Use(operation, operand)

    def location(self, op: int) -> str:
        """Source location of a program op, `model.py:123 (name stack)`; empty where the program holds none."""
        return describe_location(str(self.operations[op].location))


_FRAME = re.compile(r'"([^"]*?)":(\d+):\d+')
_NAME = re.compile(r'^loc\("([^"]+)"')


def describe_location(text: str) -> str:
    """`loc("jit(f)/mul"(callsite("g"("/a/model.py":12:4) …)))` -> `model.py:12 (jit(f)/mul)`."""
    frame = _FRAME.search(text)
    name = _NAME.match(text)
    where = f"{frame[1].rsplit('/', 1)[-1]}:{frame[2]}" if frame else ""
    label = name[1] if name and (frame is None or name[1] != frame[1]) else ""
    return printable(f"{where} ({label})" if where and label else where or label)
