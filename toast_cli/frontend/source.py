"""`Source`: a program read in, both as an MLIR module (for emit) and as a `Program` (for everything else)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toast_cli.program.model import Program


@dataclass(frozen=True)
class Use:
    """A place in the MLIR module where a value is used: operand number `operand` of `operation`."""

    operation: Any  # ir.Operation
    operand: int


@dataclass(frozen=True)
class Source:
    """A normalised module (one entry function `main`, calls and composites inlined) and the Program read from it.

    Attributes:
        path: as the user gave it. format: "stablehlo", "bytecode", "portable", "jax.export", "hlo-text", "hlo-proto".
        module: ir.Module. Emit annotates it in place, serialises it and takes the annotations off again.
        program: its flat view.
        definitions: [values] ir.Value that stands for each value in the module: a block argument of `main`, an op result, or,
            for a carried value, the result of the `while`; for a join the result of the `case`/`if`.
        notices: what was changed or assumed on the way in, one sentence each (dropped shardings, unknown trip counts).
    """

    path: str
    format: str
    module: Any
    program: Program
    definitions: list[Any]
    notices: tuple[str, ...] = ()

    def use(self, op: int, position: int) -> Use:
        """Where operand `position` of program op `op` is used in the module (a `while` init, a terminator's operand, …)."""
        raise NotImplementedError

    def location(self, op: int) -> str:
        """Source location of a program op, `model.py:123 (name stack)`; empty where the program holds none."""
        raise NotImplementedError
