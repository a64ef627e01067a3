"""Microbatches: finds the part of a step that can run once for each part of its batch, with accumulated gradients.

Ops fall into three groups. Ops *before* the loop depend on no example, or are cheap sums over the whole batch of
inputs (such as the number of tokens). Ops *inside* work on one part of the batch at a time. Ops *after* need sums over
the whole batch: the optimiser, the norm of the gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

from toast_cli.program.model import Op, Program, ValueFactors
from toast_cli.program.ops import (
    ADD,
    ARGUMENT,
    BARRIER,
    BROADCAST_IN_DIM,
    CARRY,
    CONCATENATE,
    CONSTANT,
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
    RESULT,
    RNG,
    SCATTER,
    SELECT,
    SLICE,
    TRANSPOSE,
)

# Least fraction of the flops of products of inputs, and of the flops on examples and their sums, inside the loop.
MOST = 0.8


@dataclass(frozen=True)
class Split:
    """A step divided into parts of its batch.

    Attributes:
        states: [values]. inside: statements in the loop. after: statements after it; all others are before it.
        read_cut: values computed before the loop that it reads one part at a time.
        remade: (op, operand) whose value the loop recomputes with fewer elements -> its cut. sliced: (op, operand)
        whose value the loop computes as a whole and reads one part of -> its cut. leaving: values computed inside that
        are read after the loop, or are results.
    """

    parts: int
    states: list[State]
    inside: frozenset[int]
    after: frozenset[int]
    read_cut: dict[int, Cut]
    remade: dict[tuple[int, int], Cut]
    sliced: dict[tuple[int, int], Cut]
    leaving: tuple[int, ...]


@dataclass
class Statements:
    """A program as statements of its module's entry function.

    Attributes:
        program: with all ops of the module, including unused ones.
        of_op: [ops] number of the statement, -1 for arguments.
        read_directly: whether an operand is, in the module, directly the result of an op.
        deciding: statement -> values that select its branch. inputs: values of the arguments that may have a batch.
    """

    program: Program
    of_op: Sequence[int]
    read_directly: Callable[[int, int], bool]
    deciding: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    inputs: frozenset[int] = frozenset()


def split_batch(statements: Statements, argument: int, dim: int, parts: int) -> Split:
    """The split of a step along a dimension of an argument. Raises `WholeBatchError` if an op needs all examples."""
    seeds, forced = {statements.program.arguments[argument].value: Cut(dim)}, set[int]()
    narrowed: dict[int, Cut | None] = {}
    counts = True
    for _ in range(2 * len(statements.program.ops) + 1):
        previous = (set(seeds), dict(narrowed))
        try:
            split = _Splitter(statements, seeds, narrowed, forced, parts, counts).split()
        except WholeBatchError as error:
            if (seeds.keys() - previous[0]) or narrowed != previous[1]:
                continue
            more = _cheap(statements, error.value) - forced if isinstance(error, NeedsSumError) else None
            if not more and any(narrowed.values()):  # an op may need one of these as a whole
                counts, narrowed = False, dict.fromkeys(narrowed)
            elif not more:
                raise
            forced |= more or set()
        else:
            if not (seeds.keys() - previous[0]) and narrowed == previous[1]:
                return split
    raise AssertionError("a value is asked for again and again")


def _cheap(statements: Statements, value: int) -> set[int]:
    """The ops that compute a value from arguments, if all are cheap; else empty."""
    program = statements.program
    ops, stack = set[int](), [value]
    while stack:
        number = program.producer[stack.pop()]
        op = program.ops[number]
        nested = op.loop >= 0 or op.branches or op.name in (CARRY, JOIN)
        if op.kind.heavy or nested or op.name == "stablehlo.custom_call":
            return set()
        if op.name != ARGUMENT and number not in ops:
            ops.add(number)
            stack += op.operands
    return ops


def _readers(program: Program, values: Iterable[int]) -> set[int]:
    """The ops that read these values or what is computed from them."""
    stack, readers = list(values), set[int]()
    while stack:
        for number, _ in program.users[stack.pop()]:
            if number not in readers:
                readers.add(number)
                stack += program.ops[number].results
    return readers


class _Splitter:
    """Assigns each statement of a program, in order, to before, inside or after the loop.

    Args:
        seeds: arguments, and values computed before the loop, that are read one part at a time. narrowed: see
        `CutRules`. Both grow where an op reads more values so; then the split must be found again. forced: ops to run
        before the loop. counts: whether what is computed from the numbers of examples alone, such as random bits, is
        computed in the loop.
    """

    def __init__(
        self,
        statements: Statements,
        seeds: dict[int, Cut],
        narrowed: dict[int, Cut | None],
        forced: set[int],
        parts: int,
        counts: bool,
    ) -> None:
        self._statements, self._program, self._counts = statements, statements.program, counts
        self._seeds, self._narrowed, self._forced, self._parts = seeds, narrowed, forced, parts
        self._states: list[State | None] = [None] * len(self._program.values)
        self._rules = CutRules(self._program, parts, self._states, narrowed, self._read_cut)
        self._place: dict[int, str] = {}  # statement -> "before", "inside", "after"; undecided for linear ops
        self._remade: dict[tuple[int, int], Cut] = {}
        self._sliced: dict[tuple[int, int], Cut] = {}
        self._tried = dict(narrowed)
        self._narrowing: list[int] = []  # ops of values found to be narrowed
        self._ops: dict[int, list[int]] = defaultdict(list)
        for number, statement in enumerate(statements.of_op):
            self._ops[statement].append(number)

    def split(self) -> Split:
        program = self._program
        for number in self._ops[-1]:
            value = program.ops[number].results[0]
            self._states[value] = self._seeds.get(value, WHOLE)
        self._place[-1] = "before"
        open_: list[int] = []
        for statement in sorted(self._ops.keys() - {-1}):
            if program.ops[self._ops[statement][0]].name == RESULT:
                self._place[statement] = "after"
            else:
                self._statement(statement, open_)
        self._settle(open_)
        for value, cut in self._tried.items():
            if cut is not None and self._states[value] != cut:
                self._narrowed[value] = None
        inside = frozenset(s for s, place in self._place.items() if place == "inside")
        work, most = {"inside": 0.0, "after": 0.0, "before": 0.0}, (0.0, -1)  # (flops, op) before the loop
        on_inputs = _readers(program, self._statements.inputs)
        for number, op in enumerate(program.ops):
            place, flops = self._place[self._statements.of_op[number]], op.flops * op.trips
            if place != "before" or (op.kind.matrix_unit and number in on_inputs):  # random masks are made before
                work[place] += flops
                most = max(most, (flops, number)) if place == "before" else most
        if work["before"] > (1.0 - MOST) * (work["inside"] + work["before"]):
            raise WholeBatchError(most[1], "reads inputs as a whole, and much of the work is like it")
        if work["inside"] < MOST * (work["inside"] + work["after"]):
            later = (n for n, op in enumerate(program.ops) if LATER in [self._states[v] for v in op.results])
            raise WholeBatchError(
                next(later, len(program.ops) - 1), "comes behind a sum over the batch, as much of the work does"
            )
        leaving = tuple(
            value
            for value, uses in enumerate(program.users)
            if self._made(value) in inside
            and value not in self._seeds
            and any(self._place[self._statements.of_op[user]] == "after" for user, _ in uses)
        )
        after = frozenset(s for s, place in self._place.items() if place == "after")
        states = [WHOLE if state is None else state for state in self._states]
        return Split(self._parts, states, inside, after, dict(self._seeds), self._remade, self._sliced, leaving)

    def _made(self, value: int) -> int:
        return self._statements.of_op[self._program.producer[value]]

    def _statement(self, statement: int, open_: list[int]) -> None:
        ops = self._ops[statement]
        program, states = self._program, self._states
        outside = [v for n in ops for v in program.ops[n].operands if self._made(v) != statement]
        outside += [v for v in self._statements.deciding[statement] if self._made(v) != statement]
        read = [states[v] for v in outside]
        if ops[0] in self._forced:
            self._fill(ops, WHOLE, "before")
            for value in program.ops[ops[0]].results:
                states[value] = self._seeds.get(value, WHOLE)
            return
        cut, later = any(isinstance(s, Cut) for s in read), LATER in read
        narrowed = any(self._narrowed.get(v) for n in ops for v in program.ops[n].results)
        inner = narrowed or any(
            self._place.get(self._made(v)) == "inside" and states[v] in (WHOLE, ZERO) for v in outside
        )
        if cut and later:
            reads = [(n, v) for n in ops for v in program.ops[n].operands]
            reads += [(ops[0], v) for v in self._statements.deciding[statement]]
            raise NeedsSumError(*next((n, v) for n, v in reads if states[v] == LATER))
        single = len(ops) == 1 and program.ops[ops[0]].loop < 0 and program.ops[ops[0]].results
        if single and not later:
            result_states = self._rules.result(ops[0], final=True)
            for value in program.ops[ops[0]].results:
                states[value] = result_states.get(value, WHOLE)
            new_states = set(result_states.values())
            if cut:
                self._place[statement] = "inside"
            elif SUM in new_states:
                open_.append(statement)
            else:
                self._place[statement] = "after" if LATER in new_states else "inside" if inner else "before"
        elif cut:
            self._inside(statement)
        elif later or SUM in read:
            self._fill(ops, LATER, "after")
        elif narrowed:
            self._inside(statement)
        elif inner:
            self._fill(ops, WHOLE, "inside")
        else:
            self._fill(ops, WHOLE, "before")
        for n in ops:
            for value in program.ops[n].results:
                if value in self._seeds:
                    if self._place.get(statement) == "before":
                        states[value] = self._seeds[value]
                    elif states[value] == self._seeds[value]:
                        del self._seeds[value]  # by now an array it depends on is read in parts
                    else:
                        raise WholeBatchError(n, "makes what is read in parts from what depends on the batch")

    def _fill(self, ops: list[int], state: State, place: str) -> None:
        self._place[self._statements.of_op[ops[0]]] = place
        for n in ops:
            for value in self._program.ops[n].results:
                self._states[value] = state

    def _inside(self, statement: int) -> None:
        """Computes the states within a loop, branch or barrier that reads a cut value."""
        program, states = self._program, self._states
        self._place[statement] = "inside"
        changed = True
        while changed:
            changed = False
            for n in self._ops[statement]:
                for value, state in self._rules.result(n).items():
                    if states[value] != state:
                        states[value], changed = state, True
        for n in self._ops[statement]:
            result_states = self._rules.result(n, final=True)
            for value in program.ops[n].results:
                states[value] = result_states.get(value, WHOLE)
                if states[value] == LATER:
                    wanted = next((v for v in program.ops[n].operands if states[v] in (SUM, LATER)), value)
                    raise NeedsSumError(n, wanted)
        for value in self._statements.deciding[statement]:
            if states[value] in (SUM, LATER):
                raise NeedsSumError(self._ops[statement][0], value)

    def _read_cut(self, number: int, position: int, cut: Cut) -> None:
        """Records that a whole operand is read in parts."""
        program, value = self._program, self._program.ops[number].operands[position]
        maker = program.ops[program.producer[value]]
        if self._statements.read_directly(number, position) and _can_be_made_smaller(maker, cut, program):
            self._remade[number, position] = cut
            return
        if self._place.get(self._made(value)) == "before" and not self._is_counted(value):
            if self._seeds.setdefault(value, cut) != cut:
                raise WholeBatchError(program.producer[value], "is read in two ways")
            return
        if value not in self._narrowed and can_be_narrowed(maker):
            self._narrowed[value] = cut
            self._narrowing.append(program.producer[value])
            if len(self._narrowing) == 1:
                for narrowed_op in self._narrowing:  # grows: its operands are narrowed, too, and so on
                    self._rules.result(narrowed_op, final=True)
                self._narrowing.clear()
        if self._narrowed.get(value) != cut:
            if maker.name == RNG or maker.one_device:
                raise WholeBatchError(program.producer[value], "would run again for each part")
            self._sliced[number, position] = cut

    def _is_counted(self, value: int) -> bool:
        """Whether a large array is computed from iotas and much smaller arrays, so that each part can make its own."""
        program = self._program
        most = prod(program.values[value].shape) / self._parts
        seen, stack = {value}, [value] if self._counts else []
        while stack:
            op = program.ops[program.producer[stack.pop()]]
            if op.name == ARGUMENT or not (can_be_narrowed(op) or op.detail in ("splat", "zero")):
                return False
            new = [v for v in op.operands if v not in seen and prod(program.values[v].shape) > most]
            seen.update(new)
            stack += new
        return self._counts and not seen & self._seeds.keys()

    def _settle(self, open_: list[int]) -> None:
        """Places linear ops on sums: inside if the loop needs them or if that does not enlarge its results; else after
        it."""
        program, of_op = self._program, self._statements.of_op
        for statement in open_:
            (number,) = self._ops[statement]
            op = program.ops[number]
            sums = [v for v in op.operands if self._states[v] == SUM]
            lone = all(self._place.get(self._made(v)) == "inside" and len(program.users[v]) == 1 for v in sums)
            size = program.values[op.results[0]].bytes
            smaller = op.name == CONVERT or size <= sum(program.values[v].bytes for v in sums)
            self._place[statement] = "inside" if lone and smaller else "after"
        for statement in reversed(open_):
            (number,) = self._ops[statement]
            users = {of_op[user] for v in program.ops[number].results for user, _ in program.users[v]}
            if any(self._place[user] == "inside" for user in users):
                self._place[statement] = "inside"


def _can_be_made_smaller(op: Op, cut: Cut, program: Program) -> bool:
    """Whether all parts of an op's result are equal, so that it can be computed with fewer elements."""
    if op.name == BROADCAST_IN_DIM:
        factors = {f for f in op.rule.results[0][cut.dim] if op.rule.sizes[f] > 1}
        return not factors & {f for dim_factors in op.rule.operands[0] for f in dim_factors}
    return op.name == CONSTANT and op.detail in ("splat", "zero")


# ---------------------------------------------------------------- the batch dimension of each array
# Locates the batch dimension in each array of a step, and the arrays that are sums over it. Values are one of:
#
# * whole: the same for every part;
# * a `Cut`: it has the batch dimension, of which the loop works on one part at a time;
# * a sum: each part computes a term of it, with only linear ops between the term and the sum;
# * later: known only after the loop.
#
# If an op inside the loop needs a sum (batch norm's mean), microbatches would change the result: an error names the
# op, and the program keeps its batch.

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
    """A dimension of which the loop works on the elements i with i // inner % parts equal to the part's number: of 8
    elements in 2 parts, part 0 has 0, 2, 4, 6, with `inner` 2 it has 0, 1, 4, 5."""

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
        states = [s for s in read if s is not None]
        if len(states) < len(read):
            return {}
        if any(isinstance(s, Cut) for s in states):
            return self._through(number, op, states, final)
        if not op.results:  # a host callback
            sums = [v for v, state in zip(op.operands, states, strict=True) if state in (SUM, LATER)]
            if sums:
                raise NeedsSumError(number, sums[0])
            return {}
        cut = self._narrowed.get(op.results[0])
        if cut is not None and (narrowed := self._narrow(number, op, cut, final)):
            return narrowed
        if LATER in states:
            return dict.fromkeys(op.results, LATER)
        if SUM in states:
            return dict.fromkeys(op.results, SUM if _is_linear(op, states, self._program, SUM) else LATER)
        zero = op.detail == "zero" or (ZERO in states and _is_linear(op, states, self._program, ZERO))
        return dict.fromkeys(op.results, ZERO if zero else WHOLE)

    def _joined(self, number: int, op: Op, states: list[State], final: bool) -> dict[int, State]:
        if not states:
            return {}
        cuts = {s for s in states if isinstance(s, Cut)} | {*filter(None, map(self._narrowed.get, op.results))}
        if len(cuts) > 1 or (cuts and (SUM in states or LATER in states)):
            raise WholeBatchError(number, "carries the batch in two ways")
        if cuts:
            (cut,) = cuts
            for position, value in enumerate(op.operands):
                if final and not isinstance(self._states[value], Cut):
                    self._read_cut(number, position, cut)
            return dict.fromkeys(op.results, cut)
        if LATER in states or (SUM in states and WHOLE in states):
            return dict.fromkeys(op.results, LATER)
        return dict.fromkeys(op.results, SUM if SUM in states else WHOLE if WHOLE in states else ZERO)

    def _through(self, number: int, op: Op, read: list[State], final: bool) -> dict[int, State]:
        """States of the results of an op that reads a cut array."""
        program, rule = self._program, op.rule
        if not can_be_cut(op):
            raise WholeBatchError(number, "is written for the whole batch")
        places = {
            located(rule.operands[p], rule.sizes, program.values[op.operands[p]].shape, state, self._parts)
            for p, state in enumerate(read)
            if isinstance(state, Cut)
        }
        if len(places) > 1:
            raise WholeBatchError(number, "makes something of each two examples")
        place = places.pop()
        windows = [s.dim for s in read[:1] if isinstance(s, Cut)]
        if (
            place is None
            or place[0] in rule.need_replication | rule.permutation
            or any(w.operand_dim in windows for w in op.windows)
            or _is_numbered(op, place[0])
        ):
            raise WholeBatchError(number, _BY_NUMBER)
        for p, state in enumerate(read):
            value = op.operands[p]
            cut = self._cut(number, rule.operands[p], value, *place)
            if state in (SUM, LATER) and not (op.name == SCATTER and p == 0 and state == SUM and cut is None):
                raise NeedsSumError(number, value)
            if cut is not None and not isinstance(state, Cut) and final:
                self._read_cut(number, p, cut)
        result_states: dict[int, State] = {}
        for r, value in enumerate(op.results):
            result = self._cut(number, rule.results[r], value, *place)
            empty = not program.values[value].elements  # the workspace of a kernel
            result_states[value] = result or (WHOLE if empty else self._added_up(number, op, read, place[0]))
        return result_states

    def _narrow(self, number: int, op: Op, cut: Cut, final: bool) -> dict[int, State]:
        """State of a narrowed result: the op reads only the corresponding part of its operands. Empty where it cannot;
        then the loop computes the whole result."""
        (value,) = op.results
        program, rule = self._program, op.rule
        place = located(rule.results[0], rule.sizes, program.values[value].shape, cut, self._parts)
        try:
            if place is None or place[0] in rule.need_replication | rule.permutation or _is_numbered(op, place[0]):
                raise WholeBatchError(number, _BY_NUMBER)
            parts = [self._cut(number, rule.operands[p], operand, *place) for p, operand in enumerate(op.operands)]
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

    def _cut(self, number: int, factors: ValueFactors, value: int, factor: int, inner: int) -> Cut | None:
        """The cut of an operand or result of an op along a factor; None if it lacks the factor."""
        sizes, shape = self._program.ops[number].rule.sizes, self._program.values[value].shape
        dims = [dim for dim, dim_factors in enumerate(factors) if factor in dim_factors]
        if not dims:
            return None
        dim_factors = factors[dims[0]]
        if len(dims) > 1 or prod(sizes[f] for f in dim_factors) != shape[dims[0]]:
            raise WholeBatchError(number, _BY_NUMBER)
        return Cut(dims[0], inner * prod(sizes[f] for f in dim_factors[dim_factors.index(factor) + 1 :]))


def located(
    factors: ValueFactors, sizes: tuple[int, ...], shape: tuple[int, ...], cut: Cut, parts: int
) -> tuple[int, int] | None:
    """(factor that contains a cut into parts, stride of the cut within it), or None: of a dimension of batch x heads,
    a cut whose `inner` is the number of heads is in the batch, with stride 1."""
    if not factors or prod(sizes[f] for f in factors[cut.dim]) != shape[cut.dim]:
        return None
    behind = 1
    for factor in reversed(factors[cut.dim]):
        step = cut.inner // behind
        if step and cut.inner % behind == 0 and sizes[factor] % (step * parts) == 0:
            return factor, step
        behind *= sizes[factor]
    return None


def _is_numbered(op: Op, factor: int) -> bool:
    """Whether an op overwrites elements along a factor of its operand at indices that count all of them."""
    if op.name not in (SCATTER, DYNAMIC_UPDATE_SLICE):
        return False
    operand, update = (op.rule.operands[k] for k in (0, -1 if op.name == SCATTER else 1))
    in_operand, in_update = ({f for factors in side for f in factors} for side in (operand, update))
    return factor in in_operand - in_update


def can_be_cut(op: Op) -> bool:
    """Whether an op's rule says which part of its operands a part of its results needs. A hand-written kernel must be
    one that `run_on_part` rewrites."""
    cuttable = op.kind.elementwise or op.name in _CUTTABLE or (op.kernel is not None and op.kernel.kind != "")
    return cuttable and not op.opaque and not op.one_device


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
