"""Chooses few constraints under which Shardy's propagation reproduces the plan.

One pass decides where constraints stand. A use that needs another sharding than its value's gets one, unless the
operation's own sharding implies it. Values for which some constraint or op offers more axes than planned get one
(`contested_values`), so that the outcome does not depend on the order in which ops are visited; so do values whose
sharding no neighbour offers, and those at the edges of loops. Then Shardy's propagation runs. Values to which it gives
another sharding than planned get a constraint, too. If it then still does so, every value gets one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from math import ceil, prod
from typing import Any, NamedTuple

from toast_cli.emit.annotations import (
    Annotations,
    Constraint,
    Reshard,
    all_reshards,
    argument_constraints,
    barriers,
    boundary_annotations,
    constrainable_values,
    full_annotations,
    hands_on,
    is_read,
    loops,
    scattered_terms,
    unneeded_values,
)
from toast_cli.emit.regions.site import factor_axes
from toast_cli.emit.shardy import propagate, without_units
from toast_cli.frontend.source import Source
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.reshard import waypoints
from toast_cli.plan.sharding import Sharding, local_shape
from toast_cli.program.model import Program, Rule
from toast_cli.program.ops import ARGUMENT, BARRIER, CARRY, CUSTOM_CALL, JOIN, PAD, REDUCE, RESULT, RNG, SLICE, SQUARE
from toast_cli.program.values import Transposed, remade_values, transposed
from toast_cli.xla import attribute_key

# Ops that XLA does not merge with another of their kind.
_UNEQUAL = frozenset({ARGUMENT, BARRIER, CARRY, CUSTOM_CALL, JOIN, RESULT, RNG})

Axes = tuple[int, ...]


class ChosenAnnotations(NamedTuple):
    """Annotations to write: few, or one on every value if `astray` is not empty: ops that few leave with another
    sharding than planned (see `ops_astray`)."""

    annotations: Annotations
    astray: list[int]


def choose_annotations(source: Source, lowered: PartitionedProgram) -> ChosenAnnotations:
    """Chooses annotations. Raises `ir.MLIRError` if Shardy's passes refuse the program."""
    few = few_annotations(source, lowered)
    astray = ops_astray(source, lowered, few)
    if not astray:
        return ChosenAnnotations(few, astray)
    full, constrained = full_annotations(source, lowered), {each.handle for each in few.constraints}
    strays = {source.definitions[v] for number in astray for v in source.program.ops[number].results} - constrained
    more = replace(few, constraints=(*few.constraints, *(c for c in full.constraints if c.handle in strays)))
    astray = ops_astray(source, lowered, more)
    return ChosenAnnotations(full if astray else more, astray)


def ops_astray(source: Source, lowered: PartitionedProgram, annotations: Annotations) -> list[int]:
    """Ops, in program order, whose result has another sharding after propagation than in `lowered`, or that read an
    operand in another one than in `annotations`; once for each value."""
    propagated = propagate(source, lowered, annotations)
    producer, sizes = source.program.producer, lowered.axis_sizes
    computed = {constraint.handle: constraint.shardings[0] for constraint in annotations.constraints}
    astray, unneeded = list[int](), unneeded_values(source)
    for value in constrainable_values(source, lowered):
        handle = source.definitions[value]
        want = without_units(computed.get(handle, lowered.shardings[value]), sizes)
        if propagated.values.get(value, want) != want and is_read(handle, unneeded):
            astray.append(producer[value])
    for k, reshard in enumerate(annotations.reshards):
        if propagated.reshards.get(k) != without_units(reshard.sharding, sizes):
            astray.append(reshard.edges[0][0])
    return sorted(astray)


def few_annotations(source: Source, lowered: PartitionedProgram) -> Annotations:
    """Constraints where propagation would not find the plan by itself."""
    program, remade, unneeded = source.program, remade_values(source.program), unneeded_values(source)
    movable = {v for v in constrainable_values(source, lowered) if is_read(source.definitions[v], unneeded)}
    all_of_them = list(all_reshards(source, lowered))
    reshards = [r for r in all_of_them if is_needed(r, source, lowered, remade)]
    implied = {edge for r in all_of_them for edge in r.edges}.difference(*(r.edges for r in reshards))
    # XLA compares the constraints at the ends of branches, so these leave no dimension open.
    ends = [any(program.ops[number].name == JOIN for number, _ in r.edges) for r in reshards]
    reshards = [r if end else opened(r) for r, end in zip(reshards, ends, strict=True)]

    # Values that are computed in one sharding and continue in another.
    twofold = {v for v in lowered.computed if v in movable and v not in lowered.by_partitioner}
    constrained = {
        *twofold,
        *contested_values(program, lowered, reshards, twofold, remade),
        *unoffered_values(program, lowered, implied),
        *scattered_terms(program, lowered),
        *merged_values(source, lowered, remade),
        # XLA removes unread loop results before it propagates: then less constrains values resharded ahead of loops.
        *(r.value for r in reshards if r.ahead),
    } & movable
    # Shardy takes a fully specified constraint at one use for a statement about the value, and so about other uses.
    constrained |= {r.value for r in reshards if not (r.steps[0][1] or r.ahead)}
    constraints: list[Constraint] = []
    for value in sorted(constrained):
        sharding, handle = lowered.shardings[value], source.definitions[value]
        if value in movable:
            constraints.append(Constraint(handle, lowered.path(value) if value in twofold else (sharding,)))
        if program.ops[program.producer[value]].name == CARRY:  # it has one inside the loop as well
            constraints += argument_constraints(handle.owner.operation, handle.result_number, sharding, unneeded)
    constraints += passed_constraints(source, lowered, reshards, unneeded)
    boundary = boundary_annotations(source, lowered)
    return replace(
        boundary, constraints=tuple(constraints), reshards=tuple(reshards), barriers=barriers(source, lowered)
    )


def unoffered_values(program: Program, lowered: PartitionedProgram, implied: set[tuple[int, int]]) -> Iterator[int]:
    """Results of scatters, and of ops that an operand follows (a use in `implied`, which has no constraint), where
    every reader needs another sharding: nobody offers them their own."""
    scatters = (number for number, op in enumerate(program.ops) if op.kind.lookup and op.kind.updates)
    for number in {*scatters, *(number for number, _ in implied)}:
        for value in program.ops[number].results:
            if all(use in lowered.required for use in program.users[value]):
                yield value


def passed_constraints(
    source: Source, lowered: PartitionedProgram, reshards: Sequence[Reshard], unneeded: set[Any]
) -> Iterator[Constraint]:
    """Constraints on arrays that a loop only passes through and reads both at a constraint and elsewhere. Shardy gives
    the whole loop the sharding of that one use, and all others would gather the array in each trip."""
    constrained = {(use.operation, use.operand) for r in reshards if not r.ahead for use in r.uses}
    values = set(source.definitions)
    for loop in loops(source):
        for k, result in enumerate(loop.results):
            argument = loop.regions[1].blocks[0].arguments[k]
            sharding = lowered.shardings[source.numbers[result]]
            if result in values or not sharding:
                continue
            uses = [(use.owner.operation, use.operand_number) for use in argument.uses]
            at_constraints = [use for use in uses if use in constrained]
            others = [use for use in uses if use not in constrained and not hands_on(argument, use[0])]
            if at_constraints and others:
                yield from argument_constraints(loop, k, sharding, unneeded)


def is_needed(reshard: Reshard, source: Source, lowered: PartitionedProgram, remade: Sequence[bool]) -> bool:
    """True if, without the reshard, some use would not get its sharding, or several uses would
    each reshard the value."""
    if remade[reshard.value]:
        return False
    if reshard.through or reshard.ahead:
        return True
    # The dimensions that only have to be sliced further; None if the reshard needs communication.
    pairs = list(zip(reshard.start, reshard.sharding, strict=True))
    sliced = all(want[: len(have)] == have for have, want in pairs)
    cuts = [d for d, (have, want) in enumerate(pairs) if have != want] if sliced else None
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
    in_results = {factor for result in op.rule.results for dimension in result for factor in dimension}
    return all(in_results.issuperset(factors[d]) for d in cuts)


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
        # It would need further, or different, axes to match the sharding that its first reader offers.
        if any(axes != own[: len(axes)] for own, axes in zip(reshard.start, reshard.steps[0][0], strict=True)):
            yield reshard.value
    declines: dict[tuple[Rule, tuple[Sharding, ...], tuple[bool, ...]], tuple[bool, ...]] = {}
    for number, op in enumerate(program.ops):
        values = (*op.operands, *op.results)
        have = [at_use.get((number, k), lowered.shardings[value]) for k, value in enumerate(op.operands)]
        have += [lowered.path(v)[0] if v in constrained else lowered.shardings[v] for v in op.results]
        key = op.rule, tuple(have), tuple([remade[value] for value in values])
        if key not in declines:
            declines[key] = declining(*key, lowered.axis_sizes)
        for k, value in enumerate(values):
            if declines[key][k] and (number, k) not in at_use:
                yield value


def merged_values(source: Source, lowered: PartitionedProgram, remade: Sequence[bool]) -> Iterator[int]:
    """Values that are computed alike, but not sharded alike: XLA:TPU merges them before it propagates, so that the
    sharding of one reaches the uses of the others unless each has a constraint.

    Of attributes, only those of operations without operands are compared: a constraint too many does no harm."""
    program = source.program
    first = list(range(len(program.values)))  # value -> the first that is equal to it
    results_by_key: dict[Hashable, tuple[int, ...]] = {}
    alike: dict[int, list[int]] = {}
    for number, op in enumerate(program.ops):
        if op.name in _UNEQUAL or op.kind.per_device or op.region is not None:
            continue
        facts = () if op.operands else attribute_key(source.operations[number])
        shapes = tuple((program.values[v].shape, program.values[v].dtype) for v in op.results)
        operands = tuple(first[v] for v in op.operands)
        before = results_by_key.setdefault(
            (op.name, op.detail, operands, shapes, op.loop, op.branches, facts), op.results
        )
        for value, equal in zip(op.results, before, strict=True):
            first[value] = equal
            if not remade[value]:
                alike.setdefault(equal, []).append(value)
    for values in alike.values():
        if len({lowered.shardings[value] for value in values}) > 1:
            yield from values


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


# ---------------------------------------------------------------- sums behind transposes

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
        if of is None or remade[of.value] or of.value in lowered.computed:
            continue
        if lowered.shardings[of.value] != turned(lowered.required.get((of.op, 0), lowered.shardings[value]), of):
            continue
        path = lowered.path(value)
        piece = local_shape(source.program.values[value].shape, path[-1], lowered.axis_sizes)
        if not narrow_too and tiles(piece) < tiles(tuple(piece[dim] for dim in of.order)):
            continue
        del computed[value]
        if value in lowered.by_partitioner:
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


def turned(sharding: Sharding, of: Transposed) -> Sharding:
    """The sharding of the transpose's result, given its operand's."""
    return tuple(sharding[dim] for dim in of.order)
