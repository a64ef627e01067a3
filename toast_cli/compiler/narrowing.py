"""Narrowing: a collective moves an array in the narrowest type that its readers need.

XLA:TPU puts a conversion to a narrower type before the collective it follows, and looks through ops that only move
data; a product of f32, which it computes in one bf16 pass unless told otherwise, counts as such a conversion, but not
one with a vector, which it computes as a multiplication and a sum, in f32. (libtpu 0.0.42.1 does so with all-gathers,
all-to-alls, permutes and all-reduces, and not with reduce-scatters.)

Enters: a program. Leaves: for every value and every reader, the fraction of an element's bits that is needed. Without
this pass that is all of them.
"""

from __future__ import annotations

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import DTYPE_BITS, Program
from toast_cli.program.ops import CONVERT, SELECT

NAME = "narrowing"


class Narrowing:
    """The bits of a program's floating-point elements that are needed; all of them without this pass."""

    def __init__(self, program: Program, profile: CompilerProfile) -> None:
        self._program, self._narrows, self._product_bits = program, NAME in profile.passes, profile.product_bits
        self._bits = [DTYPE_BITS.get(value.dtype, 32) for value in program.values]
        self._floating = [value.dtype.startswith(("f", "bf")) for value in program.values]
        self._needed = list(self._bits)
        for value in reversed(range(len(program.values))):
            if program.users[value]:
                self._needed[value] = max(self._read(value, op) for op, _ in program.users[value])

    def of_value(self, value: int) -> float:
        """Fraction of a value's bits that its readers need, at most 1."""
        return self._needed[value] / self._bits[value] if self._bits[value] else 1.0

    def of_use(self, value: int, op: int) -> float:
        """Fraction of a value's bits that one reader needs, at most 1."""
        return self._read(value, op) / self._bits[value] if self._bits[value] else 1.0

    def _read(self, value: int, number: int) -> int:
        op, whole = self._program.ops[number], self._bits[value]
        if not (self._narrows and self._floating[value]):
            return whole
        if op.kind.matrix_unit:
            narrows = self._program.values[value].dtype == "f32" and not op.multiplies_by_vector
            return self._product_bits if narrows else whole
        results = [v for v in op.results if self._floating[v]]
        if op.name == CONVERT and results:
            return min(whole, *(self._needed[v] for v in results))
        if op.kind.rearranges or op.name == SELECT:
            return max((self._needed[v] for v in results), default=whole)
        return whole
