"""Which part of a step can be run once for each part of its batch, with gradients added up.

Ops fall into three groups. Those *before* the loop depend on no example (or only on the inputs, where a sum over the
whole batch is cheap: how many tokens count). Those *inside* work on one part of the batch at a time. Those *after* need
sums over the whole batch: the optimiser, the norm of the gradients. Values are one of:

* whole: the same for every part;
* a `Cut`: it has the batch dimension, of which the loop works on one part at a time;
* a sum: each part makes a term of it, and nothing but linear ops are between the term and the sum;
* later: known behind the loop only.

Where an op inside needs a sum (batch norm's mean), the numbers of parts would differ from those of the batch: the op is
named and the program keeps its batch.

Enters: a program, each op with the number of the statement of the module that it belongs to (a loop is one statement).
Leaves: a `Split`, or raises `WholeBatchError`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
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
    CONVERT,
    CONVOLUTION,
    DOT_GENERAL,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    GATHER,
    JOIN,
    PAD,
    REDUCE,
    RESHAPE,
    RESULT,
    SCATTER,
    SELECT,
    SLICE,
    TRANSPOSE,
)

CONSTANT, IOTA = "stablehlo.constant", "stablehlo.iota"
WHOLE, ZERO, SUM, LATER = "whole", "zero", "sum", "later"
# The share of the arithmetic on examples and sums of them that has to be inside the loop.
MOST = 0.8
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
        "stablehlo.cholesky", "stablehlo.triangular_solve", "chlo.top_k",
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


class _NeedsSumError(WholeBatchError):
    """An op inside the loop that reads a value which is known behind it only."""

    def __init__(self, op: int, value: int) -> None:
        super().__init__(op, "reads a sum over the whole batch and examples of it")
        self.value = value


class _ReadCutError(Exception):
    """A value that is the same for every part, but read one part at a time. inside: made in the loop, not before."""

    def __init__(self, value: int, cut: Cut, *, inside: bool) -> None:
        self.value, self.cut, self.inside = value, cut, inside


@dataclass(frozen=True)
class Split:
    """How a step is run in parts.

    Attributes:
        states: [values]. inside: statements of the loop. after: statements behind it; all others are before it.
        read_cut: values made before the loop, of which it reads one part at a time.
        remade: (op, operand) that reads a value which the loop makes for itself with fewer elements, and its cut.
        leaving: values made inside that are read behind the loop, or are results.
    """

    parts: int
    states: list[State]
    inside: frozenset[int]
    after: frozenset[int]
    read_cut: dict[int, Cut]
    remade: dict[tuple[int, int], Cut]
    leaving: tuple[int, ...]


@dataclass
class Statements:
    """A program as statements of its module's entry function.

    Attributes:
        program: with all ops of the module, also those whose results nobody needs.
        of_op: [ops] number of the statement, -1 for arguments.
        read_directly: whether an operand of an op is, in the module, the very value that an op makes.
        deciding: statement -> values that say which of its branches runs.
    """

    program: Program
    of_op: Sequence[int]
    read_directly: Callable[[int, int], bool]
    deciding: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))


def split_batch(statements: Statements, argument: int, dim: int, parts: int) -> Split:
    """The split of a step along a dimension of an argument. Raises `WholeBatchError` where an op needs all examples."""
    seeds, forced = {statements.program.arguments[argument].value: Cut(dim)}, set[int]()
    narrowed: dict[int, Cut] = {}
    for _ in range(len(statements.program.ops) + 1):
        try:
            return _Splitter(statements, seeds, narrowed, forced, parts).split()
        except _ReadCutError as read:
            known = narrowed if read.inside else seeds
            if known.get(read.value, read.cut) != read.cut:
                raise WholeBatchError(statements.program.producer[read.value], "is read in two ways") from None
            known[read.value] = read.cut
        except _NeedsSumError as needed:
            more = _cheap(statements, needed.value) - forced
            if not more:
                raise
            forced |= more
    raise AssertionError("a value is asked for again and again")


def _cheap(statements: Statements, value: int) -> set[int]:
    """The ops that make a value from arguments, where they are few and light; else none."""
    program = statements.program
    found, stack = set[int](), [value]
    while stack:
        number = program.producer[stack.pop()]
        op = program.ops[number]
        nested = op.loop >= 0 or op.branches or op.name in (CARRY, JOIN)
        if op.kind.heavy or nested or op.name == "stablehlo.custom_call":
            return set()
        if op.name != ARGUMENT and number not in found:
            found.add(number)
            stack += op.operands
    return found


class _Splitter:
    """Goes through the statements of a program once, in order.

    Args:
        seeds: arguments, and values made before the loop, that are read one part at a time. narrowed: values made in
            the loop from nothing that depends on an example, which is to make one part of them. forced: ops to do
            before the loop.
    """

    def __init__(
        self, statements: Statements, seeds: dict[int, Cut], narrowed: dict[int, Cut], forced: set[int], parts: int
    ) -> None:
        self._statements, self._program = statements, statements.program
        self._seeds, self._narrowed, self._forced, self._parts = seeds, narrowed, forced, parts
        self._states: list[State | None] = [None] * len(self._program.values)
        self._place: dict[int, str] = {}  # statement -> "before", "inside", "after"; open where it is a linear op
        self._remade: dict[tuple[int, int], Cut] = {}
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
        inside = frozenset(s for s, place in self._place.items() if place == "inside")
        work = {"inside": 0.0, "after": 0.0, "before": 0.0}
        for number, op in enumerate(program.ops):
            work[self._place[self._statements.of_op[number]]] += op.flops * op.trips
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
        return Split(self._parts, states, inside, after, dict(self._seeds), self._remade, leaving)

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
        inner = any(self._place.get(self._made(v)) == "inside" and states[v] in (WHOLE, ZERO) for v in outside)
        if cut and later:
            number = next(n for n in ops if LATER in [states[v] for v in program.ops[n].operands])
            raise _NeedsSumError(number, next(v for v in program.ops[number].operands if states[v] == LATER))
        single = len(ops) == 1 and program.ops[ops[0]].loop < 0
        if single and not later:
            found = self._result(ops[0], final=True)
            for value in program.ops[ops[0]].results:
                states[value] = found.get(value, WHOLE)
            made = set(found.values())
            if cut:
                self._place[statement] = "inside"
            elif SUM in made:
                open_.append(statement)
            else:
                self._place[statement] = "after" if LATER in made else "inside" if inner else "before"
        elif cut:
            self._inside(statement)
        elif later or SUM in read:
            self._fill(ops, LATER, "after")
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
                        del self._seeds[value]  # another array that it is made from is read in parts by now
                    else:
                        raise WholeBatchError(n, "makes what is read in parts from what depends on the batch")

    def _fill(self, ops: list[int], state: State, place: str) -> None:
        self._place[self._statements.of_op[ops[0]]] = place
        for n in ops:
            for value in self._program.ops[n].results:
                self._states[value] = state

    def _inside(self, statement: int) -> None:
        """The states within a loop, a branch or a barrier that reads what is cut."""
        program, states = self._program, self._states
        self._place[statement] = "inside"
        changed = True
        while changed:
            changed = False
            for n in self._ops[statement]:
                for value, state in self._result(n).items():
                    if states[value] != state:
                        states[value], changed = state, True
        for n in self._ops[statement]:
            found = self._result(n, final=True)
            for value in program.ops[n].results:
                states[value] = found.get(value, WHOLE)
                if states[value] == LATER:
                    wanted = next((v for v in program.ops[n].operands if states[v] in (SUM, LATER)), value)
                    raise _NeedsSumError(n, wanted)
        for value in self._statements.deciding[statement]:
            if states[value] in (SUM, LATER):
                raise _NeedsSumError(self._ops[statement][0], value)

    def _result(self, number: int, final: bool = False) -> dict[int, State]:
        """What an op makes; nothing yet where it is not known what it reads. final: note what is read cut."""
        op = self._program.ops[number]
        read = [self._states[v] for v in op.operands]
        if op.name in (CARRY, JOIN):
            return self._joined(number, op, [s for s in read if s is not None], final)
        known = [s for s in read if s is not None]
        if len(known) < len(read):
            return {}
        if any(isinstance(s, Cut) for s in known):
            return self._through(number, op, known, final)
        if set(op.results) & self._narrowed.keys():
            return self._narrow(number, op, final)
        if LATER in known:
            return dict.fromkeys(op.results, LATER)
        if SUM in known:
            return dict.fromkeys(op.results, SUM if _is_linear(op, known, self._program) else LATER)
        zero = (op.name in _ONE_TO_ONE and set(known) == {ZERO}) or op.detail == "zero"
        return dict.fromkeys(op.results, ZERO if zero else WHOLE)

    def _joined(self, number: int, op: Op, known: list[State], final: bool) -> dict[int, State]:
        if not known:
            return {}
        cuts = {s for s in known if isinstance(s, Cut)}
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
        """What an op makes that reads a cut array."""
        program, rule = self._program, op.rule
        if not (op.kind.elementwise or op.name in _CUTTABLE) or op.opaque or op.one_device:
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
        ):
            raise WholeBatchError(number, "reads several examples, or some of them by number")
        factor, inner = place
        for p, state in enumerate(read):
            value = op.operands[p]
            cut = self._cut(number, rule.operands[p], rule.sizes, program.values[value].shape, factor, inner)
            if state in (SUM, LATER) and not (op.name == SCATTER and p == 0 and state == SUM and cut is None):
                raise _NeedsSumError(number, value)
            if cut is not None and not isinstance(state, Cut) and final:
                self._read_cut(number, p, cut)
        made: dict[int, State] = {}
        for r, value in enumerate(op.results):
            result = self._cut(number, rule.results[r], rule.sizes, program.values[value].shape, factor, inner)
            made[value] = result if result is not None else self._added_up(number, op, read, factor)
        return made

    def _narrow(self, number: int, op: Op, final: bool) -> dict[int, State]:
        """One part of what an op makes that reads nothing cut: it reads that part of its operands."""
        (value,) = op.results
        program, rule, cut = self._program, op.rule, self._narrowed[value]
        place = self._located(rule.results[0], rule.sizes, program.values[value].shape, cut)
        if place is None:
            raise WholeBatchError(number, "reads several examples, or some of them by number")
        for p, operand in enumerate(op.operands):
            part = self._cut(number, rule.operands[p], rule.sizes, program.values[operand].shape, *place)
            if part is not None and final:
                self._read_cut(number, p, part)
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
        """The factor that has a cut, and how far apart its steps are in it."""
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
        """Where an array has a factor."""
        dims = [dim for dim, held in enumerate(factors) if factor in held]
        if not dims:
            return None
        held = factors[dims[0]]
        if len(dims) > 1 or prod(sizes[f] for f in held) != shape[dims[0]]:
            raise WholeBatchError(number, "reads several examples, or some of them by number")
        return Cut(dims[0], inner * prod(sizes[f] for f in held[held.index(factor) + 1 :]))

    def _read_cut(self, number: int, position: int, cut: Cut) -> None:
        """Notes that an operand that is whole is read in parts."""
        program, value = self._program, self._program.ops[number].operands[position]
        maker = program.ops[program.producer[value]]
        if self._statements.read_directly(number, position) and _can_be_made_smaller(maker, cut, program):
            self._remade[number, position] = cut
        elif self._place.get(self._made(value)) == "before":
            raise _ReadCutError(value, cut, inside=False)
        elif (maker.kind.elementwise or maker.name == BROADCAST_IN_DIM) and len(maker.results) == 1:
            raise _ReadCutError(value, cut, inside=True)
        else:
            raise WholeBatchError(program.producer[value], "makes something for the whole batch in each part's loop")

    def _settle(self, open_: list[int]) -> None:
        """Places linear ops on sums: inside where the loop needs them or no more leaves it then; else behind it."""
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
    """Whether every part of an array is alike, so that the op makes it with fewer elements."""
    if op.name == BROADCAST_IN_DIM:
        factors = {f for f in op.rule.results[0][cut.dim] if op.rule.sizes[f] > 1}
        return not factors & {f for held in op.rule.operands[0] for f in held}
    return op.name == CONSTANT and op.detail in ("splat", "zero")


def _is_linear(op: Op, read: list[State], program: Program) -> bool:
    """Whether the sum over parts of an op's result is its result of the sums."""
    dtypes = [program.values[v].dtype for v in (*op.operands, *op.results)]
    result = dtypes[-1]
    sums = [s == SUM for s in read]
    terms = [s in (SUM, ZERO) for s in read]
    if len(op.results) != 1:
        return False
    if op.name == CONVERT:
        return result.startswith(("f", "bf", "complex"))
    if op.name in _ONE_TO_ONE:
        return True
    if op.name in (ADD, "stablehlo.subtract", CONCATENATE, PAD):
        return all(terms)
    if op.name in _PRODUCTS:
        return sum(sums) == 1
    if op.name == "stablehlo.divide":
        return sums == [True, False] and not result.startswith(("i", "ui"))
    if op.name == SELECT:
        return not sums[0] and all(terms[1:])
    if op.name == REDUCE:
        return op.detail == "add" and len(read) == 2 and sums[0] and read[1] == ZERO
    if op.name in (DYNAMIC_SLICE, GATHER):
        return not any(sums[1:])
    if op.name == DYNAMIC_UPDATE_SLICE:
        return all(terms[:2]) and not any(sums[2:])
    return op.name == SCATTER and op.detail == "add" and len(read) == 3 and terms[0] and terms[2] and not sums[1]
