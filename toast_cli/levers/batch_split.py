"""Microbatches: finds the part of a step that can run once for each part of its batch, with accumulated gradients.

Ops fall into three groups. Ops *before* the loop depend on no example, or are cheap sums over the whole batch of inputs
(such as the number of tokens). Ops *inside* work on one part of the batch at a time. Ops *after* need sums over the
whole batch: the optimiser, the norm of the gradients. `batch_cut` locates the batch in each array.

In: a program, with the number of each op's statement in the module (a loop is one statement). Out: a `Split`, or
raises `WholeBatchError`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

from toast_cli.levers.batch_cut import (
    CONSTANT,
    LATER,
    SUM,
    WHOLE,
    ZERO,
    Cut,
    CutRules,
    NeedsSumError,
    State,
    WholeBatchError,
    can_be_narrowed,
)
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import (
    ARGUMENT,
    BROADCAST_IN_DIM,
    CARRY,
    CONVERT,
    JOIN,
    RESULT,
    RNG,
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
        known = (set(seeds), dict(narrowed))
        try:
            split = _Splitter(statements, seeds, narrowed, forced, parts, counts).split()
        except WholeBatchError as error:
            if (seeds.keys() - known[0]) or narrowed != known[1]:
                continue
            more = _cheap(statements, error.value) - forced if isinstance(error, NeedsSumError) else None
            if not more and any(narrowed.values()):  # an op may need one of these as a whole
                counts, narrowed = False, dict.fromkeys(narrowed)
            elif not more:
                raise
            forced |= more or set()
        else:
            if not (seeds.keys() - known[0]) and narrowed == known[1]:
                return split
    raise AssertionError("a value is asked for again and again")


def _cheap(statements: Statements, value: int) -> set[int]:
    """The ops that compute a value from arguments, if all are cheap; else empty."""
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


def _readers(program: Program, values: Iterable[int]) -> set[int]:
    """The ops that read these values or what is computed from them."""
    stack, found = list(values), set[int]()
    while stack:
        for number, _ in program.users[stack.pop()]:
            if number not in found:
                found.add(number)
                stack += program.ops[number].results
    return found


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
            found = self._rules.result(ops[0], final=True)
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
            found = self._rules.result(n, final=True)
            for value in program.ops[n].results:
                states[value] = found.get(value, WHOLE)
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
            self._narrow_operands(program.producer[value])
        if self._narrowed.get(value) != cut:
            if maker.name == RNG or maker.one_device:
                raise WholeBatchError(program.producer[value], "would run again for each part")
            self._sliced[number, position] = cut

    def _is_counted(self, value: int) -> bool:
        """Whether a large array is computed from iotas and much smaller arrays, so that each part can make its own."""
        program = self._program
        most = prod(program.values[value].shape) / self._parts
        found, stack = {value}, [value] if self._counts else []
        while stack:
            op = program.ops[program.producer[stack.pop()]]
            if op.name == ARGUMENT or not (can_be_narrowed(op) or op.detail in ("splat", "zero")):
                return False
            new = [v for v in op.operands if v not in found and prod(program.values[v].shape) > most]
            found.update(new)
            stack += new
        return self._counts and not found & self._seeds.keys()

    def _narrow_operands(self, number: int) -> None:
        """Lets an op whose result is narrowed read parts of its operands, and so on."""
        self._narrowing.append(number)
        if len(self._narrowing) == 1:
            for op in self._narrowing:  # grows in the loop
                self._rules.result(op, final=True)
            self._narrowing.clear()

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
        return not factors & {f for held in op.rule.operands[0] for f in held}
    return op.name == CONSTANT and op.detail in ("splat", "zero")
