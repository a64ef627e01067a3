"""Lowers a plan to the whole program: every op's sharding, every value's sharding, and every collective. The rules are
those of `sharding`, `partials`, `reshard` and `loops`; this file applies them op by op.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter

from toast_cli.plan.decisions import Plan
from toast_cli.plan.loops import held_over, left_by_loops
from toast_cli.plan.partials import (
    CollectiveStep,
    Cuts,
    Partial,
    completed,
    completion_of,
    cut_by_readers,
    found_by_partitioner,
    in_turn,
    partial_of,
    reductions_of,
    scattered_in_steps,
)
from toast_cli.plan.partitioned import Collective, Edge, PartitionedProgram
from toast_cli.plan.problem import Problem
from toast_cli.plan.reshard import (
    ShardingMove,
    copies_of,
    moves_of,
    neighbours,
    read_of,
    reshard_steps,
    rotations,
    runs_by_region,
    spread,
    windowed,
)
from toast_cli.plan.sharding import Sharding, axes_of, replicated, split_further, without
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import ARGUMENT, CARRY
from toast_cli.program.values import Sum, loop_at, readers, readings, remade_values, trips_at


def lower(problem: Problem, plan: Plan) -> PartitionedProgram:
    """The shardings and collectives of every op, value and use of the program under `plan`."""
    return _Lowering(problem, plan).program()


@dataclass(frozen=True)
class _Reduced:
    """A part of a sum that one reduction completes. value: the reduced value. op: op of the first term. inside:
    intermediate values, which stay partial. cut: axes by which uses of those split it. readers: all uses of the sum;
    none where only a part of it is reduced. separate: see `Reduction.separate`."""

    value: int
    op: int
    terms: int
    partial: Partial
    cut: Cuts
    inside: tuple[int, ...]
    readers: tuple[tuple[int, int], ...]
    separate: bool = False


class _Lowering:
    def __init__(self, problem: Problem, plan: Plan) -> None:
        self._problem, self._program, self._sizes = problem, problem.program, problem.mesh.sizes
        self._held = held_over(problem.roles, plan)
        laid_out = [problem.op_sharding(pattern, plan) for pattern in range(len(problem.patterns))]
        self._left, op_shardings = left_by_loops(
            problem.sums, problem.accumulations, [laid_out[pattern] for pattern in problem.op_pattern]
        )
        self._op_shardings = tuple(op_shardings)
        # # the end of a sum -> its deferred reduction, and the loop-carried sum it belongs to
        self._open = {
            end: (left, accumulation)
            for accumulation in problem.accumulations
            for end, left in zip(accumulation.ends, self._left.get(accumulation.carry, ()), strict=False)
        }
        self._made: list[Sharding] = [replicated(len(v.shape)) for v in problem.program.values]
        for op, op_sharding in zip(problem.program.ops, self._op_shardings, strict=True):
            for k, value in enumerate(op.results):
                self._made[value] = op_sharding.shardings[k]

    def program(self) -> PartitionedProgram:
        ops, op_shardings, shardings = self._program.ops, self._op_shardings, list(self._made)
        computed: dict[int, Sharding] = {}
        partial: dict[int, tuple[int, ...]] = {}
        by_partitioner: set[int] = set()
        for op, op_sharding in zip(ops, op_shardings, strict=True):
            for k, value in enumerate(op.results):
                if over := {*op_sharding.reduced, *op_sharding.scattered[k]}:
                    partial[value] = tuple(sorted(over))
                if op_sharding.computed[k] != op_sharding.shardings[k]:
                    computed[value] = op_sharding.computed[k]
                    if found_by_partitioner(op, op_sharding, k, self._sizes):
                        by_partitioner.add(value)
        required = {
            (number, k): op_shardings[number].operands[k]
            for number, op in enumerate(ops)
            for k, value in enumerate(op.operands)
            if op_shardings[number].operands[k] != shardings[value]
        }
        reduced = [part for each in self._problem.sums for part in self._reduced(each)]
        added: dict[int, int] = {}
        for part in reduced:
            over = axes_of(part.partial.to).difference(axes_of(part.partial.sharding))
            for value in part.inside:
                added[value] = part.value
                partial[value] = partial[ops[part.op].results[0]]
                shardings[value] = without(shardings[value], over)
                computed.pop(value, None)
            if part.inside:
                partial[part.value] = partial[ops[part.op].results[0]]
                if over:
                    computed[part.value] = part.partial.sharding
        summed = self._summed(shardings, computed, required, partial, added)
        in_steps = {value for value in computed if self._is_scattered_in_steps(value)}
        lowered = PartitionedProgram(
            self._problem.mesh.names,
            self._sizes,
            shardings,
            computed,
            required,
            frozenset(computed.keys() - in_steps),
            frozenset(v for v in computed if ops[self._program.producer[v]].kind.convolution),
            op_shardings=op_shardings,
            partial=partial,
            added=added,
            carried={carry: left[0] for carry, left in self._left.items()},
            summed=frozenset(summed),
            by_partitioner=frozenset(by_partitioner & computed.keys()),
            held=self._held,
            collectives=tuple(sorted(self._collectives(reduced), key=attrgetter("op"))),
        )
        return settled(self._program, lowered)

    def _is_scattered_in_steps(self, value: int) -> bool:
        """Whether a value that is reduced on its own is reduce-scattered in two steps."""
        number = self._program.producer[value]
        op = self._program.ops[number]
        return scattered_in_steps(op, 1, self._op_shardings[number], op.results.index(value), self._sizes)

    def _summed(
        self,
        shardings: list[Sharding],
        computed: dict[int, Sharding],
        required: dict[tuple[int, int], Sharding],
        partial: dict[int, tuple[int, ...]],
        added: dict[int, int],
    ) -> Iterator[int]:
        """Records the reductions that loops defer; yields the values that stay partial on the way to a carry."""
        ops, steps = self._program.ops, {each.end: each.steps for each in self._problem.sums}
        for end, (left, accumulation) in self._open.items():
            (carried,) = ops[accumulation.carry].results
            over = tuple(sorted({*left.axes, *axes_of(left.added_as).difference(axes_of(left.sharding))}))
            values = [ops[step.op].results[0] for step in steps[end]]
            for value in values:
                added[value], partial[value] = carried, over
                shardings[value] = without(shardings[value], over)
                computed.pop(value, None)
            shardings[end] = left.added_as
            if left.scattered is not None:
                computed[end] = left.sharding
            for use in accumulation.first:
                required.pop(use, None)
            way = [ops[use.op].results[0] for use in accumulation.path if use.op != accumulation.carry]
            for value in way:
                partial[value] = left.axes
            yield from (*values, *way)
            if carried not in added:
                self._completed_behind(carried, left.axes, shardings, computed, required)

    def _completed_behind(
        self,
        carried: int,
        over: tuple[int, ...],
        shardings: list[Sharding],
        computed: dict[int, Sharding],
        required: dict[tuple[int, int], Sharding],
    ) -> None:
        """Records the sharding of a carry that is reduced after its loop, if all its readers agree on one."""
        uses = readers(self._program, carried)
        current = self._made[carried]
        cut = cut_by_readers(over, [self._op_shardings[op].operands[k] for op, k in uses])
        if not cut:
            return
        op, position = uses[0]
        wanted = split_further(current, self._op_shardings[op].operands[position], axes_of(cut))
        computed[carried], shardings[carried] = current, wanted
        for use in self._program.users[carried]:
            sharding = self._op_shardings[use[0]].operands[use[1]]
            required.pop(use, None)
            if sharding != wanted:
                required[use] = sharding

    def _reduced(self, of: Sum) -> Iterator[_Reduced]:
        """The parts of a sum that are reduced."""
        ops = self._program.ops
        if of.end in self._open:
            scattered = self._open[of.end][0].scattered
            if scattered is not None:
                terms = sum(step.does == "term" for step in of.steps)
                yield _Reduced(of.end, of.steps[0].op, terms, scattered, (), (), ())
            return
        for part in reductions_of(of.steps, self._op_shardings.__getitem__):
            first = of.steps[part.first].op
            value = ops[of.steps[part.added].op].results[0]
            inside = (
                () if part.separate else tuple([ops[step.op].results[0] for step in of.steps[part.first : part.added]])
            )
            uses = tuple(readers(self._program, of.end)) if part.ends_sum else ()
            cut = (*part.cut_before, *part.cut)
            sharding, to, reduced = part.partial
            before = axes_of(part.cut_before)  # these axes are all-reduced instead of scattered
            uncut = Partial(sharding, without(to, before), (*before, *reduced))
            yield _Reduced(value, first, part.terms, uncut, cut, inside, uses, part.separate)

    # -- collectives ---------------------------------------------------------------------------------------------------

    def _collectives(self, reduced: list[_Reduced]) -> Iterator[Collective]:
        ops, in_sums = self._program.ops, self._problem.terms
        for part in reduced:
            yield from self._completions(part)
        for number, op in enumerate(ops):
            if op.results and op.name not in (ARGUMENT, CARRY):
                if number not in in_sums:
                    yield from self._results(number)
                yield from self._pinned(number)
                yield from self._rotations(number)
                yield from self._spread(number)
        for value, uses in enumerate(self._program.users):
            yield from self._neighbours(value)
            if self._program.values[value].shape and uses and not self._problem.free[value]:
                yield from self._reshards(value, uses)

    def _completions(self, part: _Reduced) -> Iterator[Collective]:
        """Collectives that complete a sum, or a part of one."""
        op = self._program.ops[part.op]
        wanted = [self._op_shardings[reader].operands[k] for reader, k in part.readers]
        cut = in_turn((*part.cut, *cut_by_readers(part.partial.reduced, wanted, part.partial.to)))
        how = completion_of(op, self._op_shardings[part.op], 0, self._sizes, part.terms, separate=part.separate)
        for step in completed(part.partial, self._sizes, how, cut):
            yield self._completion(step, part.op, part.value)

    def _results(self, number: int) -> Iterator[Collective]:
        """Collectives that complete an op's partial results outside sums: one of several results, or a pinned one."""
        op, op_sharding = self._program.ops[number], self._op_shardings[number]
        for k, value in enumerate(op.results):
            partial = partial_of(op_sharding, k)
            if partial is not None:
                for step in completed(partial, self._sizes, completion_of(op, op_sharding, k, self._sizes)):
                    yield self._completion(step, number, value)

    def _completion(self, step: CollectiveStep, number: int, value: int) -> Collective:
        op, size = self._program.ops[number], self._program.values[value].bytes
        local = size * step.fraction
        runs = op.trips
        edge: Edge = "inside"
        if op.name == CARRY:
            runs, edge = trips_at(self._program, number, 0), "behind"
        return Collective(
            step.kind, step.axes, value, number, step.before, step.after, local, runs, op.loop, edge, "partial"
        )

    def _pinned(self, number: int) -> Iterator[Collective]:
        """Reshards of results to their pinned shardings."""
        op, op_sharding = self._program.ops[number], self._op_shardings[number]
        for value, source, target in zip(op.results, op_sharding.reduced_to, op_sharding.shardings, strict=True):
            if source != target:
                array = self._program.values[value]
                for step in reshard_steps(source, target, self._sizes, array.shape):
                    local = array.bytes * step.fraction
                    yield Collective(
                        step.kind, step.axes, value, number, source, target, local, op.trips, op.loop, "inside", "pin"
                    )

    def _rotations(self, number: int) -> Iterator[Collective]:
        op, op_sharding = self._program.ops[number], self._op_shardings[number]
        kinds = self._problem.patterns[self._problem.op_pattern[number]].form.kinds
        value, sharding = op.results[0], op_sharding.computed[0]
        for kind, axes, local in rotations(op, self._program.values[value].bytes, kinds, op_sharding, self._sizes):
            yield Collective(
                kind, axes, value, number, sharding, sharding, local, op.trips, op.loop, "inside", "neighbours"
            )

    def _spread(self, number: int) -> Iterator[Collective]:
        """All-reduces of results that one device computes for all."""
        op, op_sharding = self._program.ops[number], self._op_shardings[number]
        unreduced = self._problem.not_reduced
        sizes = [0 if value in unreduced else self._program.values[value].bytes for value in op.results]
        for k, (kind, axes, local) in spread(op, sizes, op_sharding, self._sizes):
            sharding = op_sharding.computed[k]
            yield Collective(
                kind, axes, op.results[k], number, sharding, sharding, local, op.trips, op.loop, "inside", "one device"
            )

    def _neighbours(self, value: int) -> Iterator[Collective]:
        """Halo exchanges of a value, shared by its readers in one loop."""
        ops, size = self._program.ops, self._program.values[value].bytes
        for loop, numbers in windowed(self._program, value):
            reads = [read_of(ops[number].windows, self._op_shardings[number]) for number in numbers]
            for (kind, axes, local), places in neighbours(size, reads, self._sizes):
                served, sharding = [numbers[place] for place in places], reads[places[0]].sharding
                runs, uses = max(ops[op].trips for op in served), tuple([(op, 0) for op in served])
                yield Collective(
                    kind, axes, value, served[0], sharding, sharding, local, runs, loop, "inside", "neighbours", uses
                )

    def _reshards(self, value: int, uses: list[tuple[int, int]]) -> Iterator[Collective]:
        """Reshards between the producer of a value and its uses."""
        program = self._program
        if value in self._open:
            return
        source, array = self._made[value], program.values[value]
        needed = [self._op_shardings[op].operands[k] for op, k in uses]
        if all(sharding == source for sharding in needed):
            return
        read = readings(program, value, uses)
        wholly = [reading.whole_ahead for reading in read]
        copies = copies_of(source, needed, self._sizes, array.shape, wholly, self._held)
        for move in moves_of(source, copies):
            served = [(uses[place], read[place].ahead if move.ahead else read[place].inside) for place in move.places]
            for region, count in runs_by_region([stop for _, stop in served]).items():
                there = tuple([use for use, stop in served if stop.region == region])
                before = any(loop_at(program, *use) != region.loop for use in there)
                yield self._moved(value, move, count, region.loop, "before" if before else "inside", there)

    def _moved(
        self, value: int, move: ShardingMove, runs: float, loop: int, edge: Edge, uses: tuple[tuple[int, int], ...]
    ) -> Collective:
        step, op = move.step, uses[0][0]
        kind, axes, local = step.kind, step.axes, self._program.values[value].bytes * step.fraction
        return Collective(kind, axes, value, op, move.before, move.after, local, runs, loop, edge, "reshard", uses)


def settled(program: Program, lowered: PartitionedProgram) -> PartitionedProgram:
    """The program in which each value made from constants alone has the sharding that its uses require.

    Recomputing one costs nothing, so the sharding a plan gives it does not matter; but HLO, and a loop that it is
    passed through, keeps one copy of it. Where uses disagree and other such values are derived from it, it is
    replicated, and each use slices it.
    """
    remade = remade_values(program)
    shardings = list(lowered.shardings)
    required = dict(lowered.required)
    for value in reversed(range(len(program.values))):
        if not remade[value] or not shardings[value]:
            continue
        read: dict[tuple[int, int], Sharding] = {}
        derived: set[Sharding] = set()
        for number, position in program.users[value]:
            want = required.pop((number, position), shardings[value])
            op = program.ops[number]
            if op.results and all(remade[result] for result in op.results):
                derived.add(seen_from(op, position, shardings[op.results[0]]))
            else:
                read[number, position] = want
        if derived:
            agreed = derived | set(read.values())
            shardings[value] = agreed.pop() if len(agreed) == 1 else replicated(len(shardings[value]))
        elif read:
            shardings[value] = Counter(read.values()).most_common(1)[0][0]
        required.update({use: want for use, want in read.items() if want != shardings[value]})
    return replace(lowered, shardings=shardings, required=required)


def seen_from(op: Op, position: int, result: Sharding) -> Sharding:
    """The sharding of an operand that goes with the sharding of the result, dimension by dimension."""
    axes_of = {factors: axes for factors, axes in zip(op.rule.results[0], result, strict=True) if factors}
    return tuple(axes_of.get(factors, ()) for factors in op.rule.operands[position])
