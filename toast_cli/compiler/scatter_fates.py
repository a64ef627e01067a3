"""Decides for each written reduce-scatter whether the compiler keeps it, by the rules of `reduce_scatter`.

Enters: a problem, and an op with its split. Leaves: the fate of the reduce-scatter of its result.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from toast_cli.compiler import reduce_scatter
from toast_cli.compiler.profile import CompilerProfile
from toast_cli.compiler.reduce_scatter import ScatteredArray, Sides, stays_scatter
from toast_cli.plan.iteration import Iteration, SlotAxes, axes_summed_over
from toast_cli.plan.partials import in_one_step
from toast_cli.plan.problem import Problem
from toast_cli.plan.sharding import Sharding, in_mesh_order, shards, split_further
from toast_cli.program.model import DTYPE_BITS, Op
from toast_cli.program.ops import ADD, CARRY, RAGGED_DOT, TRANSPOSE
from toast_cli.program.sums import scatters_into
from toast_cli.program.transposed import transposed


class ScatterSource(NamedTuple):
    """A partial result that is reduce-scattered. updates: it is a gradient that updates stored arrays. alone: no other
    term is added before."""

    op: int
    result: int
    updates: bool = False
    alone: bool = True


class ScatterFates:
    """Memoised decisions for one problem."""

    def __init__(self, problem: Problem, profile: CompilerProfile) -> None:
        self._problem, self._profile = problem, profile
        self._program, self._mesh, self._sizes = problem.program, problem.mesh, problem.mesh.sizes
        self._seen: dict[int, tuple[tuple[int, ...], Sides]] = {}
        self._tied: dict[int, int] = {}
        self._known: dict[tuple[int, int, tuple[int, ...], Sharding, Sharding, SlotAxes, bool], bool] = {}

    def stays(self, source: ScatterSource, axes: tuple[int, ...], sharding: Sharding, iteration: Iteration) -> bool:
        """Whether the reduce-scatter over `axes` of a partial result in this sharding stays one; else it becomes an
        all-reduce and a slice."""
        k = source.result
        key = source.op, k, axes, sharding, iteration.reduced_to[k], iteration.slot_axes, source.alone
        known = self._known.get(key)
        if known is None:
            turned = source.alone and self._turned(axes, k, iteration)
            known = self._known[key] = not turned and self._fits(source, axes, sharding, iteration)
        return known

    def reduced_first(self, number: int, iteration: Iteration, axes: tuple[int, ...]) -> bool:
        """Whether a total that its readers slice along `axes`, in that order, is all-reduced first. A compiler forms a
        reduce-scatter over several axes if the slices are in the order of the reducing devices; XLA:TPU does not over
        the whole mesh."""
        if len(axes) < 2 or self._program.ops[number].name == CARRY:
            return False
        kinds = self._problem.patterns[self._problem.op_pattern[number]].form.kinds
        summed = [axis for axis in axes_summed_over(kinds, iteration.slot_axes) if axis in axes]
        whole = shards((axes,), self._sizes) == prod(self._sizes)
        return list(axes) != summed or (whole and reduce_scatter.NAME in self._profile.passes)

    def _turned(self, axes: tuple[int, ...], k: int, iteration: Iteration) -> bool:
        """Whether the axes split a dimension in another order than the partitioner scatters them in."""
        if reduce_scatter.NAME not in self._profile.passes or in_one_step(iteration, k, self._sizes):
            return False
        return not in_mesh_order(tuple(tuple(a for a in split if a in axes) for split in iteration.reduced_to[k]))

    def _fits(self, source: ScatterSource, axes: tuple[int, ...], sharding: Sharding, iteration: Iteration) -> bool:
        number, k, updates = source.op, source.result, source.updates
        sizes, target = self._sizes, iteration.reduced_to[k]
        result = self._program.ops[number].results[k]
        value = self._program.values[result]
        dims = [dim for dim, split in enumerate(target) if not set(axes).isdisjoint(split)]
        if len(dims) != 1:
            return not dims
        long, sides = self._as_read(number, result)
        arrays = self._updated_with_lookups(number, result)
        if not (updates or any(sides)):
            sides = self._sides_of_added(number, result)

        def local(sharding: Sharding) -> tuple[int, ...]:
            return tuple([value.shape[d] // shards((sharding[d],), sizes) for d in long])

        computed = iteration.computed[k]
        begun = split_further(computed, target, axes) if sharding == computed else sharding
        pieces: tuple[tuple[int, ...], ...] = ()
        if arrays or updates:
            pieces = (local(begun), local(target))
        if 0 < arrays < self._profile.scatter.tied_arrays:
            pieces = pieces[:1]
        bits = DTYPE_BITS.get(value.dtype, 32)
        array = ScatteredArray(local(sharding), long.index(dims[0]), bits, sides, pieces)
        return stays_scatter(self._profile, self._mesh, axes, array)

    def _as_read(self, number: int, result: int) -> tuple[tuple[int, ...], Sides]:
        """(dimensions of a result of op `number` in the order in which it is read, without a product's dimensions of
        size 1; the product's sides as positions in that order)."""
        found = self._seen.get(result)
        if found is None:
            sides = sides_of(self._program.ops[number])
            product = set(sides[0] + sides[1])
            read = transposed(self._program, result) if product else None
            shape = self._program.values[result].shape
            order = read.order if read else range(len(shape))
            long = tuple([d for d in order if shape[d] > 1 or d not in product])
            first, second = (tuple([long.index(d) for d in side if d in long]) for side in sides)
            found = self._seen[result] = long, (first, second)
        return found

    def _updated_with_lookups(self, number: int, result: int) -> int:
        """Number of arrays that a sum of a product and look-ups' gradients (a tied table's, outside loops) updates; 0
        for any other result."""
        program = self._program
        if not program.ops[number].kind.matrix_unit or program.ops[number].loop >= 0:
            return 0
        known = self._tied.get(result)
        if known is None:
            known = self._tied[result] = self._count_updated(result)
        return known

    def _count_updated(self, result: int) -> int:
        program = self._program
        sums = [user for user, _ in program.users[result] if scatters_into(program.ops[user], program)]
        if not sums:
            return 0
        shape, reached = program.values[result].shape, {program.ops[sums[0]].results[0]}
        for op in program.ops[sums[0] + 1 :]:
            alike = op.kind.elementwise and program.values[op.results[0]].shape == shape
            if alike and not reached.isdisjoint(op.operands):
                reached.add(op.results[0])
        return len(reached & {result.value for result in program.results})

    def _sides_of_added(self, number: int, result: int) -> Sides:
        """The sides of the product that a result is added to, since both have one layout; empty if there is none."""
        program = self._program
        if len(program.users[result]) != 1 or program.ops[program.users[result][0][0]].name != ADD:
            return (), ()
        ((op, position),) = program.users[result]
        other = program.ops[program.producer[program.ops[op].operands[1 - position]]]
        dims = list(range(len(program.values[result].shape)))  # dimension of the addend -> dimension of `other`
        while other.name == TRANSPOSE:
            (read,), (made,) = other.rule.operands, other.rule.results
            dims = [read.index(made[d]) for d in dims]
            other = program.ops[program.producer[other.operands[0]]]
        first, second = sides_of(other)
        return tuple(dims.index(d) for d in first), tuple(dims.index(d) for d in second)


def sides_of(op: Op) -> Sides:
    """(dimensions of a product's result from its first operand only, from its second only); empty for other ops and for
    ragged products, whose kernel writes rows."""
    if not op.kind.matrix_unit or op.name == RAGGED_DOT:
        return (), ()
    first, second = ({factor for factors in dims for factor in factors} for dims in op.rule.operands[:2])
    dims = [(dim, set(factors)) for dim, factors in enumerate(op.rule.results[0])]
    return tuple(d for d, f in dims if f & first - second), tuple(d for d, f in dims if f & second - first)
