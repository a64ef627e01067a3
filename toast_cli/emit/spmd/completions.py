"""Finds the collectives that complete each partial sum of a plan.

In: a program and a `PartitionedProgram`. Out: the same plan, where a sum that all readers slice alike is
reduce-scattered to that sharding, and the collectives that complete each value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import product

from toast_cli.emit.spmd.alignment import align
from toast_cli.plan.partials import ALL_GATHER
from toast_cli.plan.partitioned import Collective, PartitionedProgram
from toast_cli.plan.reshard import SLICE, is_even, route
from toast_cli.plan.sharding import Sharding, axes_of, replicated, shards
from toast_cli.program.model import Program
from toast_cli.program.ops import CARRY, CONVERT
from toast_cli.program.sums import is_view, read_behind

Completions = dict[int, list[Collective]]  # value -> the collectives that complete it, in order


def completions(
    program: Program, lowered: PartitionedProgram, alone: Collection[int] | None = None
) -> tuple[PartitionedProgram, Completions]:
    """The plan with every such sum sharded as its readers slice it, and the collectives per value.

    alone: the only values concerned; each is completed at its definition.
    """
    found: Completions = {}
    for one in lowered.collectives:
        if one.reason == "partial" and one.kind != ALL_GATHER and (alone is None or one.value in alone):
            found.setdefault(one.value, []).append(one)
    shardings, computed, required = list(lowered.shardings), dict(lowered.computed), dict(lowered.required)
    added = dict(lowered.added)
    for value, steps in list(found.items()):
        place = next((k for k, step in enumerate(steps) if step.before is not None and step.after is None), None)
        cut = None if place is None else lies_as_cut(program, lowered, value, set(steps[place].axes))
        if place is None or not cut or (value not in cut and (place > 0 or alone is not None)):
            continue
        reduced = value if value in cut else min(cut)  # values are numbered in program order
        before = steps[place].before if reduced == value else lowered.shardings[reduced]
        after = cut[reduced][0]
        computed[reduced] = (steps[0].before if reduced == value else before) or after
        for seen, (sharding, uses) in cut.items():
            shardings[seen] = sharding
            for use in uses:
                results = program.ops[use[0]].results
                wanted = required.pop(use, lowered.shardings[seen])
                if wanted != sharding and not (results and results[0] in cut):  # else seen through a view
                    required[use] = wanted
        if reduced != value:
            added.update(dict.fromkeys(views_between(program, value, reduced), reduced))
            del found[value]
        rest = [replace(step, before=after, after=after) for step in steps[place + 1 :]]
        found[reduced] = [*steps[:place], replace(steps[place], before=before, after=after), *rest]
    return replace(lowered, shardings=shardings, computed=computed, required=required, added=added), found


def views_between(program: Program, value: int, last: int) -> Iterator[int]:
    """Values from one on to before the last, each a view of the one before."""
    while value != last:
        yield value
        ((op, _),) = users_of(program, value)
        value = program.ops[op].results[0]


Uses = list[tuple[int, int]]


def lies_as_cut(
    program: Program, lowered: PartitionedProgram, value: int, axes: set[int]
) -> dict[int, tuple[Sharding, Uses]]:
    """Value -> its sharding once `axes` slice it as its readers do, and its uses; also for its views and conversions.
    The value itself is left out if it cannot be sliced before a view. Empty if such a view follows a conversion, which
    rounds."""
    sizes, views, at = lowered.axis_sizes, [], value
    while True:
        uses = users_of(program, at)
        wanted = {lowered.required.get(use, lowered.shardings[at]) for use in uses}
        if len(wanted) == 1 and axes <= axes_of(next(iter(wanted))):
            break
        op = program.ops[uses[0][0]] if len(uses) == 1 else None
        if op is None or len(op.results) != 1 or not (op.name == CONVERT or is_view(op, program)):
            return {}
        views.append(op)
        at = op.results[0]
    current, want = lowered.shardings[at], wanted.pop()
    sharding = cut_towards(current, want, axes - axes_of(current), program.values[at].shape, sizes)
    if sharding is None:
        return {}
    found = {at: (sharding, uses)}
    while views:
        op = views.pop()
        ranks = tuple(replicated(len(dims)) for dims in op.rule.operands)
        seen = align(op.rule, ranks, (sharding,), sizes).operands[0]
        if shards(seen, sizes) != shards(sharding, sizes):
            return {} if any(view.name == CONVERT for view in (*views, op)) else found
        sharding = seen
        found[op.operands[0]] = sharding, users_of(program, op.operands[0])
    return found


def cut_towards(
    current: Sharding, want: Sharding, axes: set[int], shape: tuple[int, ...], sizes: tuple[int, ...]
) -> Sharding | None:
    """The sharding of an array after slicing by further axes from which the reshard to `want` is cheapest; None if they
    split it unevenly."""
    best: tuple[float, int, Sharding] | None = None
    order = [axis for dims in want for axis in dims if axis in axes]
    for places in product(range(len(shape)), repeat=len(order)):
        at = [list(have) for have in current]
        for axis, dim in zip(order, places, strict=True):
            at[dim].append(axis)
        sharding = tuple(map(tuple, at))
        if is_even(sharding, shape, sizes):
            way = [step.fraction for step, _ in route(sharding, want, sizes, shape) if step.kind != SLICE]
            best = min(best or (sum(way), len(way), sharding), (sum(way), len(way), sharding))
    return best[2] if best else None


def users_of(program: Program, value: int) -> Uses:
    """Uses of a value; for a loop's carried value, those after the loop."""
    loop = program.ops[program.producer[value]].name == CARRY
    return read_behind(program, value) if loop else program.users[value]
