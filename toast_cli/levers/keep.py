"""Keeps matrix products that a step recomputes in its backward pass (`jax.checkpoint` around a layer).

In: a module. Out: it, with the backward pass reading products, and all else that is not cheap, from the forward
pass. Cheap operations are still recomputed: among all sufficient sets of values, the one with the fewest bytes is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from toast_cli import xla
from toast_cli.frontend.idle import NEUTRAL
from toast_cli.levers.block_graph import BlockGraph, before_reshape, erase_unread, is_pure
from toast_cli.levers.loop_indices import body_of, index_of, yielded
from toast_cli.levers.loop_pairs import LoopPair, loop_pairs
from toast_cli.program.ops import BARRIER, BROADCAST_IN_DIM, DYNAMIC_SLICE, RESHAPE
from toast_cli.request import Recompute
from toast_cli.xla import ir


def keep_products(module: Any, policy: Recompute) -> list[Any]:
    """Keeps values that are computed twice; returns locations of forward loops and of the first operations kept."""
    places = []
    while (pair := next((it for it in loop_pairs(module) if _keep_in_scan(it, policy)), None)) is not None:
        places.append(pair.place)
    blocks = dict.fromkeys(operation.block for operation in xla.walk_ops(module, BARRIER))
    for block in blocks:
        places += _keep_in_block(block, policy)
    return places


def _keep_in_block(block: Any, policy: Recompute) -> list[Any]:
    """The same for layers outside a loop: recomputed operations are those that read results of
    an optimization barrier."""
    graph, equal = BlockGraph(block), EqualValues()
    behind: set[Any] = set()
    again: set[int] = set()
    for number, operation in enumerate(graph.operations[: graph.end]):
        barred = operation.name == BARRIER or not behind.isdisjoint(graph.reads[number])
        if equal.number(operation, learn=not barred) and barred and operation.name != BARRIER:
            again.add(number)
        if barred:
            behind.update(operation.results)
    start = min(again, default=graph.end)
    held = {
        value
        for value, readers in graph.readers.items()
        if graph.place.get(value, -1) < start and any(n >= start and n not in again for n in readers)
    }

    def cost(value: Any) -> int | None:
        return 0 if value in held or value not in graph.place else None

    kept = _to_keep(graph, graph, equal, again, cost, policy)
    for value, first in kept.items():
        value.replace_all_uses_with(first)
    erase_unread(block)
    return [first.owner.location for first in kept.values()][:1]


def _keep_in_scan(pair: LoopPair, policy: Recompute) -> bool:
    equal, backward = EqualValues(), pair.backward
    for view in pair.forward.block.operations:
        if view.operation == pair.forward:
            break
        equal.number(view.operation)
    for loop in (pair.forward, backward):
        body, passed = body_of(loop), yielded(loop)
        same = (k for k, argument in enumerate(body.arguments) if passed[k] == argument)
        equal.first.update((body.arguments[k], equal.of(loop.operands[k])) for k in same)
    for operation in pair.graph.operations[: pair.graph.end]:
        _same_index(operation, pair.forward, pair.writing, pair.stacks[0].at, equal)
        equal.number(operation)
    for stack in pair.stacks:
        for piece in stack.slices:
            equal.first[piece.results[0]] = equal.of(stack.update)
    graph = BlockGraph(body_of(backward))
    again = set()
    reading = index_of(pair.index, backward)
    for number, operation in enumerate(graph.operations[: graph.end]):
        _same_index(operation, backward, reading, pair.stacks[0].at, equal)
        known = any(result in equal.first for result in operation.results)
        if (known or equal.number(operation, learn=False)) and operation.name != BARRIER:
            again.add(number)
    stacked = {value for stack in pair.stacks for value in (equal.of(stack.update), before_reshape(stack.update))}

    def cost(value: Any) -> int | None:
        return 0 if value in stacked else pair.cost(value)

    kept = _to_keep(graph, pair.graph, equal, again, cost, policy)
    if not kept:
        return False
    rows = pair.stack(set(kept.values()))
    for value, first in kept.items():
        value.replace_all_uses_with(rows[first])
    pair.finish()
    return True


def _same_index(operation: Any, loop: Any, index: Any, at: Any, equal: EqualValues) -> None:
    """Marks the loop indices of a layer as equal in both loops."""
    if operation.name == DYNAMIC_SLICE:
        for start in list(operation.operands)[1:]:
            found = index_of(start, loop)
            if found is not None and found == index:
                equal.first[start] = at


def _to_keep(
    backward: BlockGraph, forward: BlockGraph, equal: EqualValues, again: set[int],
    cost: Callable[[Any], int | None], policy: Recompute,
) -> dict[Any, Any]:  # fmt: skip
    """Recomputed value -> the forward value to read in its place. again: operations of the backward block that
    recompute."""
    made = [result for n in sorted(again) for result in backward.operations[n].results]
    read = [value for value in made if not again.issuperset(backward.readers.get(value, ()))]
    kept = forward.least_kept([equal.of(value) for value in read], cost, policy)
    dear = {value for value in kept if cost(value) != 0}
    return {value: equal.of(value) for value in made if equal.of(value) in dear}


class EqualValues:
    """Value numbering: for each value, the first one that is equal to it, also behind optimization barriers. Operations
    are numbered in their order. Callers may add further equalities to `first`."""

    def __init__(self) -> None:
        self.first: dict[Any, Any] = {}  # value -> the first that is equal; none where it is itself
        self._made: dict[Hashable, Any] = {}  # key of an operation -> the first operation with that key

    def of(self, value: Any) -> Any:
        """The first value equal to this one."""
        return self.first.get(value, value)

    def number(self, operation: Any, *, learn: bool = True) -> bool:
        """True if an earlier operation computes the same. learn: whether later operations may be equal to this one."""
        if operation.name == BARRIER:
            self.first.update((r, self.of(o)) for r, o in zip(operation.results, operation.operands, strict=True))
            return True
        if not is_pure(operation):
            return False
        before = self._unshaped(operation) or self._other_than_neutral(operation)
        if before is not None:
            self.first[operation.results[0]] = before
            return True
        key = self._key(operation, {})
        known = self._made.get(key)
        if known is not None:
            self.first.update((a, self.of(b)) for a, b in zip(operation.results, known.results, strict=True))
        elif learn:
            self._made[key] = operation
        return known is not None

    def _unshaped(self, operation: Any) -> Any | None:
        """The source of two successive reshapes that cancel; None if they do not."""
        before = before_reshape(self.of(operation.operands[0])) if operation.name == RESHAPE else None
        return self.of(before) if before is not None and before.type == operation.results[0].type else None

    def _other_than_neutral(self, operation: Any) -> Any | None:
        """The operand that an operation returns unchanged because all numbers of the other are neutral, such as zeros
        that a loop carries: the reader of programs removes the operation only where it sees the zeros."""
        element, sides = NEUTRAL.get(operation.name, (0, ()))
        for side in sides:
            value = self.of(operation.operands[side])
            while not isinstance(value, ir.BlockArgument) and value.owner.name == BROADCAST_IN_DIM:
                value = self.of(value.owner.operands[0])
            if xla.splat_number(value) == element:
                return self.of(operation.operands[1 - side])
        return None

    def _key(self, operation: Any, inner: dict[Any, int]) -> Hashable:
        """A key that equal operations share. inner: numbers of the values of enclosing regions."""
        operands = tuple(inner[o] if o in inner else self.of(o) for o in operation.operands)
        attributes = operation.attributes
        named = tuple((name, _attribute(attributes, k, name)) for k, name in enumerate(attributes))
        regions = []
        for region in operation.regions:
            for block in region.blocks:
                _enumerate(block.arguments, inner)
                for view in block.operations:
                    regions.append(self._key(view.operation, inner))
                    _enumerate(view.operation.results, inner)
        return operation.name, operands, named, tuple(r.type for r in operation.results), tuple(regions)


def _attribute(attributes: Any, place: int, name: str) -> Hashable:
    try:
        return attributes[name]  # type: ignore[no-any-return]
    except TypeError:  # complex numbers, which Python cannot hold
        return str(attributes[place])


def _enumerate(values: Any, known: dict[Any, int]) -> None:
    """Gives each value the next number."""
    for value in values:
        known[value] = len(known)
