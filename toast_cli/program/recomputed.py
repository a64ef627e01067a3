"""Detects rematerialisation: the flops that `jax.checkpoint` recomputes in the backward pass.

Every value gets a number, and equal computations on equal operands get the same one (value numbering). An optimization
barrier and a move to the host's memory or back
do not change the number. An array that one loop stacks and another loop reads trip by trip is numbered like the stacked
array, and so is a layer's slice of stacked weights in every loop. An op whose results are numbered already is
recomputed, unless it is in the loop of the first and without a barrier before it. (Outside loops XLA:TPU merges equal
ops without a barrier, `prevent_cse=False`; the predicted step and memory have both.)

In: a program. Out: the fraction of each op's flops that is recomputed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from toast_cli.program.host_memory import is_transfer
from toast_cli.program.model import Op, Program, once
from toast_cli.program.ops import (
    ARGUMENT,
    BARRIER,
    BROADCAST_IN_DIM,
    CARRY,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    RESHAPE,
)

_Place = tuple[int, ...]  # numbers of the manual regions around an op, then of its loop


@once
def recomputed_parts(program: Program) -> tuple[float, ...]:
    """[ops] fraction of each op's flops that repeats an earlier op."""
    return _Numbering().parts(program, (), ())[0]


class _Numbering:
    """The numbers of the values of a program and of the manual regions in it."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._first: dict[Hashable, _Place] = {}  # key of an op -> place of its first computation
        # Number -> (number, type) before reshapes, of the array that a loop stacks, and of a value inside a region.
        self._before: dict[int, tuple[int, str]] = {}
        self._stacked: dict[int, tuple[int, str]] = {}
        self._inside: dict[int, tuple[int, str]] = {}

    def parts(
        self, program: Program, regions: _Place, arguments: Sequence[int]
    ) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """([ops] recomputed fraction, [results] numbers). arguments: numbers of a region's arguments."""
        number = [-1] * len(program.values)
        types = [str(value) for value in program.values]
        behind = [False] * len(program.values)  # a barrier
        for argument, known in zip(program.arguments, arguments, strict=False):
            number[argument.value] = known
        parts = [0.0] * len(program.ops)
        for place, op in enumerate(program.ops):
            barrier = op.name == BARRIER or any(behind[v] for v in op.operands)
            if op.name == BARRIER or is_transfer(op):
                found = tuple(number[v] for v in op.operands)
            elif op.region is not None:
                parts[place], found = self._region(op, number, types, (*regions, place))
            elif op.name in (ARGUMENT, CARRY):
                found = tuple(number[v] if number[v] >= 0 else self._number(("new", regions, v)) for v in op.results)
            else:
                key = self._key(op, number, types)
                here = (*regions, op.loop)
                again = (
                    barrier or op.loop < 0
                ) and key in self._numbers  # in a loop, keys leave out which slice is read
                if op.flops and (self._first.setdefault(key, here) != here or again):
                    parts[place] = 1.0
                found = self._results(program, op, key, number, types)
            for value, one in zip(op.results, found, strict=True):
                number[value], behind[value] = one, barrier
            if op.name == DYNAMIC_UPDATE_SLICE:
                self._stacked[number[op.operands[0]]] = number[op.operands[1]], types[op.operands[1]]
        return tuple(parts), tuple(number[result.value] for result in program.results)

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _key(self, op: Op, number: Sequence[int], types: Sequence[str]) -> Hashable:
        """The key of an op: equal for ops that compute the same results."""
        operands = tuple(number[v] for v in op.operands)
        results = tuple(types[v] for v in op.results)
        if op.kernel is not None:  # the same kernel has more results when run for the backward pass
            return op.kernel.products, results[:1], operands
        if op.name == DYNAMIC_SLICE and op.loop >= 0:
            operands = operands[:1]  # each trip reads its own slice
        return op.name, op.detail, op.rule, op.windows, results, operands

    def _results(
        self, program: Program, op: Op, key: Hashable, number: Sequence[int], types: Sequence[str]
    ) -> tuple[int, ...]:
        """The numbers of an op's results; marks `key` as computed."""
        self._number(key)
        if op.name == DYNAMIC_SLICE:
            stacked = self._stacked.get(number[op.operands[0]])
            if stacked is not None and stacked[1] == types[op.results[0]]:
                return (stacked[0],)
        if op.name in (RESHAPE, BROADCAST_IN_DIM):
            source, result = op.operands[0], op.results[0]
            if program.values[source].elements == program.values[result].elements:
                base = self._before.get(number[source], (number[source], types[source]))
                if base[1] == types[result]:
                    return (base[0],)
                found = self._number((RESHAPE, base[0], types[result]))
                self._before[found] = base
                return (found,)
        return tuple(self._number((key, k)) for k in range(len(op.results)))

    def _region(
        self, op: Op, number: Sequence[int], types: Sequence[str], regions: _Place
    ) -> tuple[float, tuple[int, ...]]:
        """(recomputed fraction of a manual region's flops, numbers of its results)."""
        assert op.region is not None
        body = op.region.body
        given = []
        for argument, value in zip(body.arguments, op.operands, strict=False):
            type_ = str(body.values[argument.value])
            known = self._inside.get(number[value], (-1, ""))
            given.append(known[0] if known[1] == type_ else self._number(("in", number[value], type_)))
        parts, results = self.parts(body, regions, given)
        again = sum(part * inner.flops * inner.trips for part, inner in zip(parts, body.ops, strict=True))
        found = []
        for k, value in enumerate(op.results):
            inner = results[k] if k < len(results) else self._number(("new", regions, -1 - k))
            outer = self._number(("out", inner, types[value]))
            if k < len(results):
                self._inside[outer] = inner, str(body.values[body.results[k].value])
            found.append(outer)
        return (again / body.flops if body.flops else 0.0), tuple(found)
