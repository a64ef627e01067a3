"""Finds few constraints under which Shardy's propagation reproduces the plan.

In: a `Source` and a `PartitionedProgram`. Out: `ChosenAnnotations`, and the values whose sharding still differs, if
any.

A use that needs another sharding than its value's gets a constraint, unless the operation's own sharding implies it.
Values for which some constraint or op offers more axes than planned are constrained (`contested_values`), so that the
outcome does not depend on the order in which ops are visited. Then propagation runs; of each connected group of values
with a wrong sharding, the first is constrained; and this repeats. In later rounds, similar values are constrained as
well, since similar layers go wrong one after another.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

from toast_cli.emit.annotations import (
    Annotations,
    Constraint,
    Reshard,
    all_reshards,
    argument_constraints,
    barriers,
    boundary_annotations,
    constrainable_values,
    hands_on,
    is_read,
    loops,
    scattered_terms,
    sharding_finder,
    unneeded_values,
)
from toast_cli.emit.shardy import Propagated, Propagation, numbered, without_units
from toast_cli.emit.spmd.site import factor_axes
from toast_cli.frontend.source import Source
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.reshard import waypoints
from toast_cli.plan.sharding import Sharding, local_shape
from toast_cli.program.model import Program, Rule
from toast_cli.program.ops import ARGUMENT, BARRIER, CARRY, CUSTOM_CALL, JOIN, PAD, REDUCE, RESULT, RNG, SLICE, SQUARE
from toast_cli.program.values import Transposed, remade_values, transposed
from toast_cli.xla import attributes_of

MAX_ROUNDS = 10
# From this round on, values similar to a constrained one are constrained with it.
ALIKE_FROM_ROUND = 1
# From this round on, all wrong values are constrained, not only the first of each group; earlier only if at most this
# share of the operations is wrong: fixing them one by one costs a round each.
EVERYTHING_FROM_ROUND = 6
FEW = 1 / 1000

# Ops that XLA does not merge with another of their kind.
_UNEQUAL = frozenset({ARGUMENT, BARRIER, CARRY, CUSTOM_CALL, JOIN, RESULT, RNG})

Axes = tuple[int, ...]


@dataclass(frozen=True)
class ChosenAnnotations:
    """Annotations to write; `unsettled` are values whose sharding still differs after propagation; `rounds` of
    propagation run; `values` are the shardings after propagation from these annotations (empty if some differ)."""

    annotations: Annotations
    unsettled: tuple[int, ...]
    rounds: int
    values: dict[int, Sharding]


def choose_annotations(source: Source, lowered: PartitionedProgram) -> ChosenAnnotations:
    """Chooses a small sufficient set of annotations."""
    with numbered(source, lowered):
        return Chooser(source, lowered).choose()


class Chooser:
    """One choice; used once.

    `constrained` are the values constrained so far, `reshards` the constraints at uses. `_twofold` values are computed
    in one sharding and continue in another, which only a constraint can express.
    """

    def __init__(self, source: Source, lowered: PartitionedProgram) -> None:
        self._source, self._lowered = source, lowered
        self._program = source.program
        self._propagation = Propagation(source, lowered)
        self._boundary = boundary_annotations(source, lowered)
        self._barriers = barriers(source, lowered)
        self._unneeded = unneeded_values(source)
        readable = constrainable_values(source, lowered)
        self._movable = {v for v in readable if is_read(source.definitions[v], self._unneeded)}
        remade = remade_values(self._program)
        reshards = [r for r in all_reshards(source, lowered) if is_needed(r, source, lowered, remade)]
        # XLA compares the constraints at the ends of branches, so these leave no dimension open.
        ends = [any(self._program.ops[number].name == JOIN for number, _ in r.edges) for r in reshards]
        self.reshards = [r if end else opened(r) for r, end in zip(reshards, ends, strict=True)]
        self._twofold = {v for v in lowered.computed if v in self._movable and v not in lowered.found}
        # XLA removes unread loop results before it propagates: then less constrains values resharded ahead of loops.
        beside = {one.value for one in self.reshards if one.ahead}
        beside |= {*contested_values(self._program, lowered, self.reshards, self._twofold, remade)}
        beside |= {*scattered_terms(self._program, lowered), *merged_values(source, lowered, remade)}
        self.constrained = self._twofold | {v for v in beside if v in self._movable}
        # Shardy takes a fully specified constraint at one use of a loop-carried value to hold for later uses, too.
        self.constrained |= {
            one.value for one in self.reshards if not (one.open or one.ahead) and self._is_carried(one.value)
        }
        self._passed = tuple(passed_constraints(source, lowered, self.reshards, self._unneeded))
        self.rounds = 0

    def choose(self) -> ChosenAnnotations:
        wrong, values = list[int](), dict[int, Sharding]()
        for attempt in range(MAX_ROUNDS):
            found = self._propagate(self.constrained)
            wrong, wrong_reshards = self._wrong(found)
            if not wrong and not wrong_reshards:
                values = found.values
                break
            for k in wrong_reshards:
                self.reshards[k] = self._closed(self.reshards[k])
            fresh = [v for v in wrong if v not in self.constrained]
            if attempt < EVERYTHING_FROM_ROUND and len(fresh) > FEW * len(self._program.ops):
                starts = self._starts(fresh)
                fresh = starts if attempt < ALIKE_FROM_ROUND else self._alike(starts, fresh)
            self.constrained.update(map(self._behind_transpose, fresh))
        return ChosenAnnotations(self._marks(self.constrained), tuple(wrong), self.rounds, values)

    def _closed(self, reshard: Reshard) -> Reshard:
        """The reshard without open dimensions. Shardy takes that for a statement about the operand. So if the operand
        enters a loop from outside, its sharding there is stated first, or it would be resharded before the loop;
        likewise for a loop-carried operand, or all its other readers would be resharded with this use, and back."""
        program, value = self._program, reshard.value
        reader, maker = program.ops[reshard.edges[0][0]], program.ops[program.producer[value]]
        restated = (reader.loop != maker.loop or maker.name == CARRY) and not reshard.ahead
        through = reshard.through or ((reshard.start,) if restated else ())
        return replace(reshard, open=frozenset(), through=through)

    def _marks(self, constrained: Iterable[int]) -> Annotations:
        constraints = tuple(constraint for value in sorted(constrained) for constraint in self._constraints(value))
        constraints += self._passed
        return replace(self._boundary, constraints=constraints, reshards=tuple(self.reshards), barriers=self._barriers)

    def _constraints(self, value: int) -> Iterator[Constraint]:
        """A value's own constraint; a carried value has one inside the loop as well."""
        sharding, handle = self._lowered.shardings[value], self._source.definitions[value]
        if value in self._movable:
            yield Constraint(handle, self._lowered.path(value) if value in self._twofold else (sharding,))
        if self._is_carried(value):
            yield from argument_constraints(handle.owner.operation, handle.result_number, sharding, self._unneeded)

    def _is_carried(self, value: int) -> bool:
        return self._program.ops[self._program.producer[value]].name == CARRY

    def _propagate(self, constrained: Iterable[int]) -> Propagated:
        self.rounds += 1
        return self._propagation.run(self._marks(constrained))

    def _wrong(self, found: Propagated) -> tuple[list[int], list[int]]:
        """Values, and reshards, whose propagated sharding differs from the plan."""
        lowered = self._lowered

        def differs(got: Sharding, want: Sharding) -> bool:
            return got != without_units(want, lowered.axis_sizes)

        def wanted(value: int) -> Sharding:
            return lowered.path(value)[0] if value in self._twofold else lowered.shardings[value]

        values = [v for v in self._movable if v in found.values and differs(found.values[v], wanted(v))]
        return sorted(values), [k for k, got in found.reshards.items() if differs(got, self.reshards[k].sharding)]

    def _starts(self, wrong: list[int]) -> list[int]:
        """The first of each group of wrong values that operations, and not reshards, connect."""
        parents = {value: value for value in wrong}

        def root(value: int) -> int:
            while parents[value] != value:
                parents[value] = value = parents[parents[value]]
            return value

        for value in wrong:
            for neighbour in self._neighbours(value):
                if neighbour in parents:
                    low, high = sorted((root(value), root(neighbour)))
                    parents[high] = low
        return sorted({root(value) for value in wrong})

    def _alike(self, values: list[int], wrong: list[int]) -> list[int]:
        """Wrong values with the same maker, sharding and readers as one of `values`."""
        program, shardings = self._program, self._lowered.shardings

        def look(value: int) -> tuple[object, ...]:
            readers = sorted(program.ops[op].name for op, _ in program.users[value])
            return program.ops[program.producer[value]].name, program.values[value], shardings[value], tuple(readers)

        wanted = {look(value) for value in values}
        return [value for value in wrong if look(value) in wanted]

    def _behind_transpose(self, value: int) -> int:
        """The transposed value, if it is the only reader of `value` and not constrained yet: XLA then folds the
        transpose into the op that makes it."""
        behind = transposed(self._program, value)
        if behind is None or (behind.op, 0) in self._lowered.required or behind.value in self.constrained:
            return value
        same = behind.value in self._movable and keeps_sharding(self._lowered, value, behind)
        return behind.value if same else value

    def _neighbours(self, value: int) -> Iterator[int]:
        program, required = self._program, self._lowered.required
        numbers = [program.producer[value], *(op for op, k in program.users[value] if (op, k) not in required)]
        for number in numbers:
            op = program.ops[number]
            yield from op.results
            yield from (v for k, v in enumerate(op.operands) if (number, k) not in required)


def passed_constraints(
    source: Source, lowered: PartitionedProgram, reshards: Sequence[Reshard], unneeded: set[Any]
) -> Iterator[Constraint]:
    """Constraints on arrays that a loop only passes through and reads both at a constraint and elsewhere. Shardy gives
    the whole loop the sharding of that one use, and all others would gather the array in each trip."""
    constrained = {(use.operation, use.operand) for one in reshards if not one.ahead for use in one.uses}
    sharding_of, values = sharding_finder(source, lowered), set(source.definitions)
    for loop in loops(source):
        for k, result in enumerate(loop.results):
            argument = loop.regions[1].blocks[0].arguments[k]
            if result in values or not sharding_of(result):
                continue
            uses = [(use.owner.operation, use.operand_number) for use in argument.uses]
            at_constraints = [use for use in uses if use in constrained]
            others = [use for use in uses if use not in constrained and not hands_on(argument, use[0])]
            if at_constraints and others:
                yield from argument_constraints(loop, k, sharding_of(result), unneeded)


def is_needed(reshard: Reshard, source: Source, lowered: PartitionedProgram, remade: Sequence[bool]) -> bool:
    """True if, without the reshard, some use would not get its sharding, or several uses would
    each reshard the value."""
    if remade[reshard.value]:
        return False
    if reshard.through or reshard.ahead:
        return True
    cuts = cut_dimensions(reshard.start, reshard.sharding)
    if len(reshard.edges) > 1 and cuts is None:
        return True
    return any(
        not follows(source, *edge, cuts) or is_moved_behind(source, lowered, edge[0], cuts) for edge in reshard.edges
    )


def is_moved_behind(source: Source, lowered: PartitionedProgram, number: int, cuts: list[int] | None) -> bool:
    """True if XLA reshards the result of an op instead of, as planned, its operands.

    It does for an elementwise op of several arrays that all have one sharding, other than the one it computes in. That
    matters if the reshard communicates; if each device is to keep a piece of a sum; and if the result is sliced and
    gathered again, since XLA still has the unsliced one. It also does if a reduction's operand is to be sliced further:
    each device would reduce all of it.
    """
    op, program = source.program.ops[number], source.program
    arrays = [value for value in op.operands if program.values[value].shape]
    totals = any(value in lowered.partial and value not in lowered.added for value in arrays)
    if op.name == REDUCE:
        return cuts is not None
    arrays *= 2 if op.name == SQUARE else 1  # which XLA writes as a product of the array with itself
    own = {lowered.shardings[value] for value in arrays}
    if not op.kind.elementwise or len(arrays) < 2 or len(own) > 1:
        return False
    (result,) = op.results
    return cuts is None or totals or any(lowered.required.get(use) in own for use in program.users[result])


def cut_dimensions(have: Sharding, want: Sharding) -> list[int] | None:
    """The dimensions that only have to be sliced further; None if the reshard needs communication."""
    if not all(b[: len(a)] == a for a, b in zip(have, want, strict=True)):
        return None
    return [d for d, (a, b) in enumerate(zip(have, want, strict=True)) if a != b]


def follows(source: Source, number: int, position: int, cuts: list[int] | None) -> bool:
    """True if a use gets the sharding it requires without a constraint.

    Elementwise operations reshard their operands to the sharding of the result. So does every operation but a gather if
    the operand only needs slicing, along dimensions that the results have too. XLA stops at a pad between elements with
    a replicated operand and a sharded result (jaxlib 0.10.2). XLA refuses branches that end in constraints to different
    shardings.
    """
    op = source.program.ops[number]
    if op.name == JOIN:
        return False
    if op.kind.elementwise or (op.kind.view and op.name != SLICE):
        return True
    if cuts is None or not op.results or op.kind.lookup:
        return False
    if op.name == PAD and any(window.dilation > 1 and window.operand_dim in cuts for window in op.windows):
        return False
    factors = op.rule.operands[position]
    kept = {factor for result in op.rule.results for dimension in result for factor in dimension}
    return all(kept.issuperset(factors[d]) for d in cuts)


def opened(reshard: Reshard) -> Reshard:
    """The reshard with its unchanged dimensions left open.

    Shardy does not take such a constraint for a statement about its operand.
    """
    have = reshard.through[-1] if reshard.through else reshard.start
    same = frozenset(d for d, (a, b) in enumerate(zip(have, reshard.sharding, strict=True)) if a == b)
    return replace(reshard, open=same)


def contested_values(
    program: Program,
    lowered: PartitionedProgram,
    reshards: Sequence[Reshard],
    constrained: set[int],
    remade: Sequence[bool],
) -> Iterator[int]:
    """Values that some neighbour offers more axes, or others, than planned.

    Two shardings compete for such a value, and the first to reach it wins; XLA:TPU also simplifies the program before
    it propagates. So each of them needs a constraint. constrained: values that are computed in one sharding and
    continue in another, for which a constraint exists already. remade: see `remade_values`."""
    at_use = {edge: reshard.sharding for reshard in reshards for edge in reshard.edges}
    for reshard in reshards:
        if declines(reshard.start, reshard.steps[0][0]):
            yield reshard.value
    found: dict[tuple[Rule, tuple[Sharding, ...], tuple[bool, ...]], tuple[bool, ...]] = {}
    for number, op in enumerate(program.ops):
        values = (*op.operands, *op.results)
        have = [at_use.get((number, k), lowered.shardings[value]) for k, value in enumerate(op.operands)]
        have += [lowered.path(v)[0] if v in constrained else lowered.shardings[v] for v in op.results]
        key = op.rule, tuple(have), tuple([remade[value] for value in values])
        if key not in found:
            found[key] = declining(*key, lowered.axis_sizes)
        for k, value in enumerate(values):
            if found[key][k] and (number, k) not in at_use:
                yield value


def merged_values(source: Source, lowered: PartitionedProgram, remade: Sequence[bool]) -> Iterator[int]:
    """Values that are computed alike, but not sharded alike: XLA:TPU merges them before it propagates, so that the
    sharding of one reaches the uses of the others unless each has a constraint.

    Of attributes, only those of operations without operands are compared: a constraint too many does no harm."""
    program = source.program
    first = list(range(len(program.values)))  # value -> the first that is equal to it
    known: dict[Hashable, tuple[int, ...]] = {}
    alike: dict[int, list[int]] = {}
    for number, op in enumerate(program.ops):
        if op.name in _UNEQUAL or op.kind.per_device or op.region is not None:
            continue
        facts = () if op.operands else _attributes(source.operations[number])
        shapes = tuple((program.values[v].shape, program.values[v].dtype) for v in op.results)
        operands = tuple(first[v] for v in op.operands)
        before = known.setdefault((op.name, op.detail, operands, shapes, op.loop, op.branches, facts), op.results)
        for value, equal in zip(op.results, before, strict=True):
            first[value] = equal
            if not remade[value]:
                alike.setdefault(equal, []).append(value)
    for values in alike.values():
        if len({lowered.shardings[value] for value in values}) > 1:
            yield from values


def _attributes(operation: Any) -> Hashable:
    try:
        return tuple(attributes_of(operation).items())
    except TypeError:  # complex numbers, which Python cannot hold
        return str(operation)


def declining(
    rule: Rule, shardings: Sequence[Sharding], silent: Sequence[bool], axis_sizes: tuple[int, ...]
) -> tuple[bool, ...]:
    """[operands and results of an op] True for those that another one would shard further. silent: those that make no
    offer: they are recomputed for each use, in the sharding of the others."""
    split = [
        factor_axes(factors, sharding, rule.sizes, axis_sizes)
        for factors, sharding in zip((*rule.operands, *rule.results), shardings, strict=True)
    ]
    offers: dict[int, set[Axes]] = {}
    for axes_of, quiet in zip(split, silent, strict=True):
        for factor, axes in axes_of.items():
            if axes and not quiet and factor not in rule.need_replication:
                offers.setdefault(factor, set()).add(axes)
    return tuple(
        any(axes != have[: len(axes)] for factor, have in axes_of.items() for axes in offers.get(factor, ()))
        for axes_of in split
    )


def declines(have: Sharding, offered: Sharding) -> bool:
    """True if a value in one sharding would need further, or different, axes to match the offered one."""
    return any(axes != own[: len(axes)] for own, axes in zip(have, offered, strict=True))


# ---------------------------------------------------------------- sums behind transposes
# Reduces sums of partial products behind the transposes that are their only readers.

_TILE = (8, 128)  # rows and columns of the tiles of 32 bits that a TPU's memory is divided into (public TPU docs)


def reduced_behind_transposes(
    source: Source, lowered: PartitionedProgram, *, narrow_too: bool = False
) -> PartitionedProgram:
    """The same plan, with the reductions of products, and the reshards after them, moved behind a transpose that is the
    product's only reader.

    XLA folds a transpose into the product before it unless a constraint is between them. XLA:TPU then gives a gradient
    the layout of the array that it updates; otherwise it copies weight and moments of an FSDP step to another layout
    and back (a block of 2 layers on v4: 11.8 ms of compute instead of 9.7). If a shard has fewer memory tiles in the
    product's own layout, the updated array has that layout too, and the product is reduced before the transpose: behind
    it XLA:TPU leaves all-reduces instead of reduce-scatters.

    narrow_too: also those of narrow shards (in HLO, where GSPMD all-reduces such a product on XLA:CPU).
    """
    remade = remade_values(source.program)
    shardings, computed, paths = list(lowered.shardings), dict(lowered.computed), dict(lowered.paths)
    required = dict(lowered.required)
    for value in lowered.computed:
        of = transposed(source.program, value)
        if of is None or remade[of.value] or of.value in lowered.computed or not keeps_sharding(lowered, value, of):
            continue
        path = lowered.path(value)
        piece = local_shape(source.program.values[value].shape, path[-1], lowered.axis_sizes)
        if not narrow_too and tiles(piece) < tiles(tuple(piece[dim] for dim in of.order)):
            continue
        del computed[value]
        if value in lowered.found:
            path = path[-1:]
        shardings[value] = path[0]
        want = required.pop((of.op, 0), None)
        if want:
            path = (*path, *waypoints(path[-1], want, lowered.axis_sizes, source.program.values[value].shape), want)
        if len(path) > 1:
            paths[of.value] = tuple(turned(sharding, of) for sharding in path)
            computed[of.value] = paths[of.value][0]
    return replace(lowered, shardings=shardings, computed=computed, required=required, paths=paths)


def tiles(shape: tuple[int, ...]) -> int:
    """Number of memory tiles of an array in row-major order."""
    *outer, rows, columns = (1, 1, *shape)
    return prod(outer) * ceil(rows / _TILE[0]) * ceil(columns / _TILE[1])


def keeps_sharding(lowered: PartitionedProgram, value: int, of: Transposed) -> bool:
    """True if the transposed value has the transposed sharding of the value."""
    return lowered.shardings[of.value] == turned(lowered.required.get((of.op, 0), lowered.shardings[value]), of)


def turned(sharding: Sharding, of: Transposed) -> Sharding:
    """The sharding of the transpose's result, given its operand's."""
    return tuple(sharding[dim] for dim in of.order)
