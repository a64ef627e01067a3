"""Recomputation in a step that runs its layers in a loop (`lax.scan`).

The forward loop stacks up what it saves of each layer, and the backward loop reads one layer's part of each stack.
Enters: a module. Leaves: it, with stacks left out of both loops: the backward loop computes their parts again from what
is still stacked (the layer's input, added where it was not) and from the layer's weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from toast_cli import xla
from toast_cli.frontend.block_graph import BlockGraph, clone, erase_unread
from toast_cli.frontend.counters import Index, body_of, counted, index_of, yielded
from toast_cli.program.ops import BROADCAST_IN_DIM, CONVERT, DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE, RESHAPE
from toast_cli.xla import ir

_WORTH = 0.9  # of the stacked bytes may be left at most
_CONSTANT, _WHILE = "stablehlo.constant", "stablehlo.while"


@dataclass(frozen=True)
class _Stack:
    """What the forward loop stacks up.

    Attributes:
        carried: its place among what the forward loop carries. read: the same of the backward loop.
        update: the part that an iteration writes. at: the index that it writes it at, along dimension `dim`.
        slices: operations of the backward loop that read a part.
    """

    carried: int
    read: int
    update: Any
    dim: int
    at: Any
    slices: list[Any]


def recompute_scans(module: Any, *, products: bool) -> list[Any]:
    """Leaves out stacks of every pair of loops; returns the locations of the forward loops. products: whether products
    are kept."""
    places = []
    while (place := next(_recomputed(module, products=products), None)) is not None:
        places.append(place)
    return places


def _recomputed(module: Any, *, products: bool) -> Iterator[Any]:
    for forward in xla.walk_ops(module, _WHILE):
        for backward in _readers(forward):
            stacks = _stacks(forward, backward)
            if stacks and _Pair(forward, backward, stacks).rewrite(products=products):
                yield forward_place(stacks)


def forward_place(stacks: list[_Stack]) -> Any:
    return stacks[0].at.location


def _readers(forward: Any) -> list[Any]:
    """Loops that read what a loop has carried."""
    users = [use.owner.operation for result in forward.results for use in result.uses]
    return [user for user in dict.fromkeys(users) if user.name == _WHILE and user != forward]


def _stacks(forward: Any, backward: Any) -> list[_Stack]:
    """What the one loop stacks up for the other alone, all at one index and read at one index."""
    found: list[tuple[tuple[Index, Index], _Stack]] = []
    for number, value in enumerate(yielded(forward)):
        written = _written(value, number, forward)
        reads = [(use.owner.operation, use.operand_number) for use in forward.results[number].uses]
        if written is None or len(reads) != 1 or reads[0][0] != backward:
            continue
        read, (dim, index) = reads[0][1], written
        update = value.owner.operands[1]
        slices = _slices(backward, read, dim, list(update.type.shape))
        indices = {index_of(one.operands[1 + dim], backward) for one in slices}
        reading = next(iter(indices), None)
        if len(indices) == 1 and reading is not None:
            stack = _Stack(number, read, update, dim, value.owner.operands[2 + dim], slices)
            found.append(((index, reading), stack))
    if not found:
        return []
    writing, reading = found[0][0]
    rows, wanted = counted(writing, forward), counted(reading, backward)
    if rows is None or wanted is None or not set(wanted) <= set(rows) or abs(writing.sign) != 1:
        return []
    return [
        stack
        for indices, stack in found
        if indices == found[0][0]
        and min(rows) >= 0
        and max(rows) < forward.results[stack.carried].type.shape[stack.dim]
    ]


def _written(value: Any, number: int, loop: Any) -> tuple[int, Index] | None:
    """The dimension along which a carried array is written one part at a time, and at which index."""
    if isinstance(value, ir.BlockArgument) or value.owner.name != DYNAMIC_UPDATE_SLICE:
        return None
    array, update, *starts = value.owner.operands
    held = body_of(loop).arguments[number]
    alone = array == held and _uses(held) == 1 and _uses(value) == 1
    if not alone or _uses(loop.regions[0].blocks[0].arguments[number]):
        return None
    return _along(starts, list(array.type.shape), list(update.type.shape), loop)


def _along(starts: list[Any], whole: list[int], part: list[int], loop: Any) -> tuple[int, Index] | None:
    """The one dimension of which a part is a row, and the index of that; all else of the part is whole."""
    indices = [index_of(start, loop) for start in starts]
    dims = [dim for dim, index in enumerate(indices) if index is None or index.sign or index.offset]
    if len(dims) != 1 or part[dims[0]] != 1:
        return None
    (dim,) = dims
    index = indices[dim]
    others = all(n == m for d, (n, m) in enumerate(zip(whole, part, strict=True)) if d != dim)
    return (dim, index) if index is not None and index.sign and others else None


def _slices(loop: Any, number: int, dim: int, part: list[int]) -> list[Any]:
    """The operations that read parts of a loop-invariant array; none where anything else reads it."""
    held = body_of(loop).arguments[number]
    if yielded(loop)[number] != held or _uses(loop.regions[0].blocks[0].arguments[number]):
        return []
    if _uses(loop.results[number]):
        return []
    readers = [use.owner.operation for use in held.uses if use.owner.operation.name != "stablehlo.return"]
    for reader in readers:
        if reader.name != DYNAMIC_SLICE or reader.block != body_of(loop) or list(reader.results[0].type.shape) != part:
            return []
        along = _along(list(reader.operands)[1:], list(held.type.shape), part, loop)
        if along is None or along[0] != dim:
            return []
    return readers


def _uses(value: Any) -> int:
    return sum(1 for _ in value.uses)


class _Pair:
    """A forward and a backward loop, which are written anew."""

    def __init__(self, forward: Any, backward: Any, stacks: list[_Stack]) -> None:
        self._forward, self._backward, self._stacks = forward, backward, stacks
        self._graph = BlockGraph(body_of(forward))
        self._index = index_of(stacks[0].at, forward)
        self._passed = yielded(forward)

    def rewrite(self, *, products: bool) -> bool:
        """Leaves stacks out where that saves enough."""
        graph, updates = self._graph, [stack.update for stack in self._stacks]
        kept = graph.least_kept(updates, self._cost, products=products)
        before = sum(map(graph.size, dict.fromkeys(updates)))
        if sum(map(graph.size, kept)) > _WORTH * before:
            return False
        makers = graph.makers(updates, kept)
        made = {result for n in makers for result in graph.operations[n].results}
        read = dict.fromkeys(v for n in makers for v in graph.reads[n] if v not in made and v not in kept)
        added = self._stack(sorted(kept, key=self._order))
        self._read_again(kept, added, makers, list(read))
        unread = {stack.carried for stack in self._stacks if not _uses(self._forward.results[stack.carried])}
        rebuilt(self._forward, [], [], unread)
        return True

    def _order(self, value: Any) -> tuple[int, int]:
        if isinstance(value, ir.BlockArgument):
            return -1, value.arg_number
        return self._graph.place[value], value.result_number

    def _cost(self, value: Any) -> int | None:
        """Bytes to keep a value of the forward body that it does not make: none where it is the same in each layer, or
        counts them."""
        if not isinstance(value, ir.BlockArgument):
            return None if value in self._graph.place else 0
        number = value.arg_number
        assert self._index is not None
        free = self._passed[number] == value or number == self._index.counter or value.owner != self._graph.block
        return 0 if free else max(1, self._graph.size(value))

    def _stack(self, kept: list[Any]) -> dict[Any, int]:
        """Lets the forward loop stack up values too; returns their places among its results."""
        forward, at = self._forward, self._stacks[0].at
        body, count = body_of(forward), len(forward.operands)
        front, end = ir.InsertionPoint(forward), ir.InsertionPoint(body.operations[len(body.operations) - 1])
        rows = forward.results[self._stacks[0].carried].type.shape[self._stacks[0].dim]
        starts, ends = [], []
        for value in kept:
            kind = value.type
            shape = [rows, *kind.shape]
            whole = ir.RankedTensorType.get(shape, kind.element_type)
            starts.append(_zeros(whole, front, forward.location))
            held = body.add_argument(whole, forward.location)
            forward.regions[0].blocks[0].add_argument(whole, forward.location)
            row = ir.RankedTensorType.get([1, *kind.shape], kind.element_type)
            one = _create(RESHAPE, [value], row, end)
            zero = _number(at.type, 0, end)
            ends.append(_create(DYNAMIC_UPDATE_SLICE, [held, one, at, *[zero] * kind.rank], whole, end))
        self._forward = rebuilt(forward, starts, ends, set())
        return {value: count + k for k, value in enumerate(kept)}

    def _read_again(self, kept: set[Any], added: dict[Any, int], makers: list[int], read: list[Any]) -> None:
        """Lets the backward loop compute the parts again. read: of what does not change from layer to layer."""
        forward, backward = self._forward, self._backward
        body, places = body_of(backward), backward.regions[0].blocks[0]
        first = next(
            view.operation for view in body.operations if any(view.operation in s.slices for s in self._stacks)
        )
        stack = next(stack for stack in self._stacks if first in stack.slices)
        index, at = first.operands[1 + stack.dim], _behind(first)
        extra: list[Any] = []
        passed = {outer: k for k, outer in enumerate(backward.operands) if yielded(backward)[k] == body.arguments[k]}

        def held(outer: Any) -> Any:
            """What the backward body has of a value from outside."""
            if outer in passed:
                return body.arguments[passed[outer]]
            passed[outer] = len(body.arguments)
            extra.append(outer)
            places.add_argument(outer.type, backward.location)
            return body.add_argument(outer.type, backward.location)

        twins: dict[Any, Any] = {}
        for value, place in added.items():
            twins[value] = _row(held(forward.results[place]), value.type, index, at)
        for value in read:
            if not isinstance(value, ir.BlockArgument) or value.owner != self._graph.block:
                twins[value] = value
            elif self._index is not None and value.arg_number == self._index.counter:
                twins[value] = self._counter(value, index, at)
            else:
                twins[value] = held(forward.operands[value.arg_number])
        clone((self._graph.operations[n] for n in makers), twins, at)
        for stack in self._stacks:
            for piece in stack.slices:
                piece.results[0].replace_all_uses_with(twins[stack.update])
        erase_unread(body)
        self._backward = rebuilt(
            backward, extra, list(body.arguments)[len(backward.operands) :], {s.read for s in self._stacks}
        )

    def _counter(self, counter: Any, index: Any, at: Any) -> Any:
        """The forward loop's counter, from the index at which the backward loop reads."""
        assert self._index is not None
        found = index if index.type == counter.type else _create(CONVERT, [index], counter.type, at)
        if self._index.offset:
            found = _create(
                "stablehlo.subtract", [found, _number(counter.type, self._index.offset, at)], counter.type, at
            )
        return found if self._index.sign > 0 else _create("stablehlo.negate", [found], counter.type, at)


def rebuilt(loop: Any, starts: list[Any], ends: list[Any], dropped: set[int]) -> Any:
    """A loop that carries more, or less, in its place. Its blocks have the arguments of what is added already.

    Args:
        starts: what is added begins with these. ends: and an iteration passes on these. dropped: places of what it does
            not carry any more.
    """
    if not starts and not dropped:
        return loop
    body = body_of(loop)
    last = body.operations[len(body.operations) - 1].operation
    left = [k for k in range(len(loop.operands)) if k not in dropped]
    passed = [last.operands[k] for k in left] + ends
    last.erase()
    ir.Operation.create("stablehlo.return", operands=passed, loc=loop.location, ip=ir.InsertionPoint(body))
    erase_unread(body)
    operands = [loop.operands[k] for k in left] + starts
    made = ir.Operation.create(
        _WHILE, results=[value.type for value in operands], operands=operands, regions=2, loc=loop.location,
        attributes={name: loop.attributes[name] for name in loop.attributes}, ip=ir.InsertionPoint(loop),
    )  # fmt: skip
    for old, new in zip(loop.regions, made.regions, strict=True):
        block = old.blocks[0]
        for k in sorted(dropped, reverse=True):
            block.erase_argument(k)
        block.append_to(new)
    for place, k in enumerate(left):
        loop.results[k].replace_all_uses_with(made.results[place])
    loop.erase()
    return made


def _behind(operation: Any) -> Any:
    return ir.InsertionPoint.after(operation)


def _row(stack: Any, kind: Any, index: Any, at: Any) -> Any:
    """A part of a stack, without the dimension of size 1."""
    zero = _number(index.type, 0, at)
    row = ir.RankedTensorType.get([1, *kind.shape], kind.element_type)
    sizes = {"slice_sizes": ir.DenseI64ArrayAttr.get(list(row.shape))}
    piece = _create(DYNAMIC_SLICE, [stack, index, *[zero] * kind.rank], row, at, sizes)
    return _create(RESHAPE, [piece], kind, at)


def _zeros(kind: Any, at: Any, place: Any) -> Any:
    scalar = ir.RankedTensorType.get([], kind.element_type)
    zero = _number(scalar, 0, at)
    return _create(BROADCAST_IN_DIM, [zero], kind, at, {"broadcast_dimensions": ir.DenseI64ArrayAttr.get([])})


def _number(kind: Any, number: int, at: Any) -> Any:
    element = kind.element_type
    if isinstance(element, ir.ComplexType):
        value = ir.Attribute.parse(f"dense<({float(number)},{float(number)})> : {kind}")
    else:
        attribute = ir.IntegerAttr.get if isinstance(element, ir.IntegerType) else ir.FloatAttr.get
        value = ir.DenseElementsAttr.get_splat(kind, attribute(element, number))
    return _create(_CONSTANT, [], kind, at, {"value": value})


def _create(name: str, operands: list[Any], kind: Any, at: Any, attributes: dict[str, Any] | None = None) -> Any:
    return ir.Operation.create(name, results=[kind], operands=operands, attributes=attributes or {}, ip=at).results[0]
