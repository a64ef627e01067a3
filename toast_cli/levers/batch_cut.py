"""Locates the batch dimension in each array of a step, and the arrays that are sums over it. Values are one of:

* whole: the same for every part;
* a `Cut`: it has the batch dimension, of which the loop works on one part at a time;
* a sum: each part computes a term of it, with only linear ops between the term and the sum;
* later: known only after the loop.

If an op inside the loop needs a sum (batch norm's mean), microbatches would change the result: an error names the op,
and the program keeps its batch.

In: an op and the states of its operands. Out: the states of its results, or raises `WholeBatchError`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from toast_cli.program.model import Op, Program, ValueFactors
from toast_cli.program.ops import (
    ADD,
    BARRIER,
    BROADCAST_IN_DIM,
    CARRY,
    CONCATENATE,
    CONVERT,
    CONVOLUTION,
    DOT_GENERAL,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    GATHER,
    IOTA,
    JOIN,
    PAD,
    REDUCE,
    RESHAPE,
    SCATTER,
    SELECT,
    SLICE,
    TRANSPOSE,
)

CONSTANT = "stablehlo.constant"
_BY_NUMBER = "reads several examples, or some of them by number"
WHOLE, ZERO, SUM, LATER = "whole", "zero", "sum", "later"
_ONE_TO_ONE = frozenset(
    [
        RESHAPE, TRANSPOSE, BROADCAST_IN_DIM, SLICE, CONVERT, BARRIER, "stablehlo.negate", "stablehlo.reverse",
        "stablehlo.real", "stablehlo.imag", "sdy.sharding_constraint",
    ]
)  # fmt: skip
_PRODUCTS = frozenset(["stablehlo.multiply", DOT_GENERAL, CONVOLUTION])
_CUTTABLE = frozenset(
    [
        *_ONE_TO_ONE, DOT_GENERAL, CONVOLUTION, REDUCE, GATHER, SCATTER, DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE, PAD,
        CONCATENATE, SELECT, "stablehlo.sort", "stablehlo.reduce_window", "stablehlo.select_and_scatter",
        "stablehlo.cholesky", "stablehlo.triangular_solve", "stablehlo.fft", "chlo.top_k",
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cut:
    """A dimension of which the loop works on the elements i with i // inner % parts equal to the part's number."""

    dim: int
    inner: int = 1


State = str | Cut


class WholeBatchError(Exception):
    """An op that needs the whole batch. op: its number."""

    def __init__(self, op: int, why: str) -> None:
        super().__init__(why)
        self.op, self.why = op, why


class NeedsSumError(WholeBatchError):
    """An op inside the loop that reads a value known only after it."""

    def __init__(self, op: int, value: int) -> None:
        super().__init__(op, "reads a sum over the whole batch and examples of it")
        self.value = value


class CutRules:
    """Propagation rules of each op for a batch that is cut into parts.

    Attributes:
        states: [values] None where nothing is known yet; filled in by the caller.
        narrowed: values computed in the loop that depend on no example, of which the loop computes one part at a time;
            None where it computes them as a whole, although it reads one part at a time. The rules find out which.
        read_cut: called for each operand (op, position) that is whole but read one part at a time.
    """

    def __init__(
        self,
        program: Program,
        parts: int,
        states: list[State | None],
        narrowed: dict[int, Cut | None],
        read_cut: Callable[[int, int, Cut], None],
    ) -> None:
        self._program, self._parts, self._states = program, parts, states
        self._narrowed, self._read_cut = narrowed, read_cut

    def result(self, number: int, final: bool = False) -> dict[int, State]:
        """States of an op's results; empty while those of its operands are unknown. final: also call `read_cut`."""
        op = self._program.ops[number]
        read = [self._states[v] for v in op.operands]
        if op.name in (CARRY, JOIN):
            return self._joined(number, op, [s for s in read if s is not None], final)
        known = [s for s in read if s is not None]
        if len(known) < len(read):
            return {}
        if any(isinstance(s, Cut) for s in known):
            return self._through(number, op, known, final)
        if not op.results:  # a host callback
            sums = [v for v, state in zip(op.operands, known, strict=True) if state in (SUM, LATER)]
            if sums:
                raise NeedsSumError(number, sums[0])
            return {}
        cut = self._narrowed.get(op.results[0])
        if cut is not None and (made := self._narrow(number, op, cut, final)):
            return made
        if LATER in known:
            return dict.fromkeys(op.results, LATER)
        if SUM in known:
            return dict.fromkeys(op.results, SUM if _is_linear(op, known, self._program, SUM) else LATER)
        zero = op.detail == "zero" or (ZERO in known and _is_linear(op, known, self._program, ZERO))
        return dict.fromkeys(op.results, ZERO if zero else WHOLE)

    def _joined(self, number: int, op: Op, known: list[State], final: bool) -> dict[int, State]:
        if not known:
            return {}
        cuts = {s for s in known if isinstance(s, Cut)} | {it for it in map(self._narrowed.get, op.results) if it}
        if len(cuts) > 1 or (cuts and (SUM in known or LATER in known)):
            raise WholeBatchError(number, "carries the batch in two ways")
        if cuts:
            (cut,) = cuts
            for position, value in enumerate(op.operands):
                if final and not isinstance(self._states[value], Cut):
                    self._read_cut(number, position, cut)
            return dict.fromkeys(op.results, cut)
        if LATER in known or (SUM in known and WHOLE in known):
            return dict.fromkeys(op.results, LATER)
        return dict.fromkeys(op.results, SUM if SUM in known else WHOLE if WHOLE in known else ZERO)

    def _through(self, number: int, op: Op, read: list[State], final: bool) -> dict[int, State]:
        """States of the results of an op that reads a cut array."""
        program, rule = self._program, op.rule
        if not can_be_cut(op):
            raise WholeBatchError(number, "is written for the whole batch")
        found = {
            self._located(rule.operands[p], rule.sizes, program.values[op.operands[p]].shape, state)
            for p, state in enumerate(read)
            if isinstance(state, Cut)
        }
        if len(found) > 1:
            raise WholeBatchError(number, "makes something of each two examples")
        place = found.pop()
        windows = [s.dim for s in read[:1] if isinstance(s, Cut)]
        if (
            place is None
            or place[0] in rule.need_replication | rule.permutation
            or any(w.operand_dim in windows for w in op.windows)
            or _is_numbered(op, place[0])
        ):
            raise WholeBatchError(number, _BY_NUMBER)
        factor, inner = place
        for p, state in enumerate(read):
            value = op.operands[p]
            cut = self._cut(number, rule.operands[p], rule.sizes, program.values[value].shape, factor, inner)
            if state in (SUM, LATER) and not (op.name == SCATTER and p == 0 and state == SUM and cut is None):
                raise NeedsSumError(number, value)
            if cut is not None and not isinstance(state, Cut) and final:
                self._read_cut(number, p, cut)
        made: dict[int, State] = {}
        for r, value in enumerate(op.results):
            result = self._cut(number, rule.results[r], rule.sizes, program.values[value].shape, factor, inner)
            made[value] = result if result is not None else self._added_up(number, op, read, factor)
        return made

    def _narrow(self, number: int, op: Op, cut: Cut, final: bool) -> dict[int, State]:
        """State of a narrowed result: the op reads only the corresponding part of its operands. Empty where it cannot;
        then the loop computes the whole result."""
        (value,) = op.results
        program, rule = self._program, op.rule
        place = self._located(rule.results[0], rule.sizes, program.values[value].shape, cut)
        try:
            if place is None or place[0] in rule.need_replication | rule.permutation or _is_numbered(op, place[0]):
                raise WholeBatchError(number, _BY_NUMBER)
            parts = [
                self._cut(number, rule.operands[p], rule.sizes, program.values[operand].shape, *place)
                for p, operand in enumerate(op.operands)
            ]
            if any(part is not None and w.operand_dim == part.dim for part in parts[:1] for w in op.windows):
                raise WholeBatchError(number, _BY_NUMBER)
        except WholeBatchError:
            self._narrowed[value] = None
            return {}
        for position, part in enumerate(parts):
            if part is not None and final:
                self._read_cut(number, position, part)
        return {value: cut}

    def _added_up(self, number: int, op: Op, read: list[State], factor: int) -> State:
        dtype = self._program.values[op.results[0]].dtype
        if factor in op.rule.reduction and dtype not in ("i1", "pred"):
            if op.name in (DOT_GENERAL, CONVOLUTION):
                return SUM
            if op.name == REDUCE and op.detail == "add" and len(op.results) == 1 and read[1] == ZERO:
                return SUM
            if op.name == SCATTER and op.detail == "add" and read[0] in (ZERO, SUM):
                return SUM
        raise WholeBatchError(number, "sees the whole batch and is no sum over it")

    def _located(
        self, factors: ValueFactors, sizes: tuple[int, ...], shape: tuple[int, ...], cut: Cut
    ) -> tuple[int, int] | None:
        """(factor that contains a cut, stride of the cut within it), or None."""
        if not factors or prod(sizes[f] for f in factors[cut.dim]) != shape[cut.dim]:
            return None
        behind = 1
        for factor in reversed(factors[cut.dim]):
            step = cut.inner // behind
            if step and cut.inner % behind == 0 and sizes[factor] % (step * self._parts) == 0:
                return factor, step
            behind *= sizes[factor]
        return None

    def _cut(
        self,
        number: int,
        factors: ValueFactors,
        sizes: tuple[int, ...],
        shape: tuple[int, ...],
        factor: int,
        inner: int,
    ) -> Cut | None:
        """The cut of an array along a factor; None if it lacks the factor."""
        dims = [dim for dim, held in enumerate(factors) if factor in held]
        if not dims:
            return None
        held = factors[dims[0]]
        if len(dims) > 1 or prod(sizes[f] for f in held) != shape[dims[0]]:
            raise WholeBatchError(number, _BY_NUMBER)
        return Cut(dims[0], inner * prod(sizes[f] for f in held[held.index(factor) + 1 :]))


def _is_numbered(op: Op, factor: int) -> bool:
    """Whether an op overwrites elements along a factor of its operand at indices that count all of them."""
    if op.name not in (SCATTER, DYNAMIC_UPDATE_SLICE):
        return False
    operand, update = (op.rule.operands[k] for k in (0, -1 if op.name == SCATTER else 1))
    has, given = ({f for factors in it for f in factors} for it in (operand, update))
    return factor in has - given


def can_be_cut(op: Op) -> bool:
    """Whether an op's rule says which part of its operands a part of its results needs."""
    return (op.kind.elementwise or op.name in _CUTTABLE) and not op.opaque and not op.one_device


def can_be_narrowed(op: Op) -> bool:
    """Whether a part of an op's result can be computed by itself, where it depends on no example."""
    return (can_be_cut(op) or op.name in (CARRY, JOIN, IOTA)) and len(op.results) == 1


def _is_linear(op: Op, read: list[State], program: Program, of: State) -> bool:
    """Whether an op is linear in the operands with this state, so that its result has that state too. SUM: the sum of
    its results over all parts equals its result for the summed operands. ZERO: its result is zero. A loop's sum starts
    as zero, so each op that keeps sums must keep zeros as well."""
    result = program.values[op.results[-1]].dtype
    sums = [s == of for s in read]
    terms = [s in (of, ZERO) for s in read]
    if len(op.results) != 1:
        return False
    if op.name == CONVERT:
        return result.startswith(("f", "bf", "complex")) or of == ZERO
    if op.name in _ONE_TO_ONE or op.name in (ADD, "stablehlo.subtract", CONCATENATE, PAD):
        return all(terms)
    if op.name in _PRODUCTS:
        return sum(sums) == 1 or of == ZERO
    if op.name == "stablehlo.divide":
        return sums == [True, False] and not result.startswith(("i", "ui"))
    if op.name == SELECT:
        return read[0] != SUM and all(terms[1:])
    if op.name == REDUCE:
        return op.detail == "add" and len(read) == 2 and sums[0] and read[1] == ZERO
    if op.name in (DYNAMIC_SLICE, GATHER):
        return sums[0] and SUM not in read[1:]
    if op.name == DYNAMIC_UPDATE_SLICE:
        return all(terms[:2]) and SUM not in read[2:]
    return op.name == SCATTER and op.detail == "add" and len(read) == 3 and terms[0] and terms[2] and read[1] != SUM
