"""Pairs of loops over layers (`lax.scan`): the forward loop stacks the residuals of each layer, and the backward loop
reads one layer's slice of each stack. A `LoopPair` can add stacks to both and remove some. A loop that stacks rows
for a sum of a loop around it (gradients) can add them to that sum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from toast_cli import xla
from toast_cli.frontend.trips import constant_of, step_of, trip_count
from toast_cli.program.ops import ADD, CONVERT, DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE, RESHAPE, SELECT, WHILE
from toast_cli.rewrite.block_graph import BlockGraph, before_reshape, erase_unread
from toast_cli.xla import ir
from toast_cli.xla.build import Builder


@dataclass(frozen=True)
class ResidualStack:
    """A stack of residuals.

    Attributes:
        carried: its index among the forward loop's carried values. read: its index in the backward loop.
        update: the slice that an iteration writes. index: where it is written along dimension `dim`.
        slices: operations of the backward loop that read a slice.
    """

    carried: int
    read: int
    update: Any
    dim: int
    index: Any
    slices: list[Any]


def loop_pairs(module: Any) -> Iterator[LoopPair]:
    """All pairs of loops of a module. After rewriting a pair, a caller must call this again."""
    for forward in xla.walk_ops(module, WHILE):
        for backward in _readers(forward):
            stacks = _stacks(forward, backward)
            if stacks:
                yield LoopPair(forward, backward, stacks)


class LoopPair:
    """A forward and a backward loop, which are rewritten together.

    Attributes:
        stacks: arrays that the forward loop stacks for the backward loop alone. graph: the forward body.
        index: the index at which the backward loop reads. build: writes ops where its body has that.
    """

    def __init__(self, forward: Any, backward: Any, stacks: list[ResidualStack]) -> None:
        self.forward, self.backward, self.stacks = forward, backward, stacks
        self.graph = BlockGraph(body_of(forward))
        writing = index_of(stacks[0].index, forward)
        assert writing is not None
        self.writing = writing
        body, slices = body_of(backward), {piece: stack.dim for stack in stacks for piece in stack.slices}
        first = next(view.operation for view in body.operations if view.operation in slices)
        self.index, self.build = first.operands[1 + slices[first]], Builder.before(first)
        self.build.ip = ir.InsertionPoint.after(first)
        self._passed = yielded(forward)
        handed_on = enumerate(yielded(backward))
        self._held = {backward.operands[k]: body.arguments[k] for k, value in handed_on if value == body.arguments[k]}
        self._added: list[Any] = []  # initial values added to the backward loop

    @property
    def place(self) -> Any:
        """Location of the forward loop."""
        return self.forward.location

    def cost(self, value: Any) -> int | None:
        """Bytes to keep a value that the forward body does not compute: 0 if it is loop-invariant or the loop counter;
        None if the body computes it."""
        if not isinstance(value, ir.BlockArgument):
            return None if value in self.graph.place else 0
        number = value.arg_number
        free = value.owner != self.graph.block or self._passed[number] == value or number == self.writing.counter
        return 0 if free else max(1, self.graph.size(value))

    def stack(self, residuals: Collection[Any]) -> dict[Any, Any]:
        """Makes the forward loop stack these values, if it does not yet; returns each value's slice in the backward
        body."""
        forward, index, reads = self.forward, self.stacks[0].index, body_of(self.backward).arguments
        stacked = {before_reshape(stack.update): stack for stack in self.stacks} | {s.update: s for s in self.stacks}
        ordered = sorted(residuals, key=self._order)  # sets of values have another order in each run
        slices = {v: self._row(reads[stacked[v].read], v.type, stacked[v].dim) for v in ordered if v in stacked}
        body, count, build = body_of(forward), len(forward.operands), Builder.before(forward)
        values = [value for value in ordered if value not in stacked]
        end = ir.InsertionPoint(xla.terminator(body))
        rows = forward.results[self.stacks[0].carried].type.shape[self.stacks[0].dim]
        starts, ends = [], []
        for value in values:
            shape = tuple(value.type.shape)
            starts.append(build.broadcast(build.constant(0, str(value.type.element_type)), (rows, *shape)))
            stack_type = starts[-1].type
            carried = body.add_argument(stack_type, self.place)
            forward.regions[0].blocks[0].add_argument(stack_type, self.place)
            with build.at(end):
                indices = [index, *[build.constant(0, str(index.type.element_type))] * len(shape)]
                row = build.reshape(value, (1, *shape))
                ends.append(build.one("dynamic_update_slice", [carried, row, *indices], stack_type))
        self.forward = rebuilt(forward, starts, ends, set())
        results = self.forward.results[count:]
        rows = (self._row(self._inside(result), v.type, 0) for v, result in zip(values, results, strict=True))
        return slices | dict(zip(values, rows, strict=True))

    def _order(self, value: Any) -> tuple[int, int]:
        if isinstance(value, ir.BlockArgument):
            return -1, value.arg_number
        return self.graph.place[value], value.result_number

    def twin(self, value: Any) -> Any:
        """The backward body's equivalent of a loop-invariant value or of the loop counter."""
        if not isinstance(value, ir.BlockArgument) or value.owner != self.graph.block:
            return value
        number = value.arg_number
        return self._counter(value) if number == self.writing.counter else self._inside(self.forward.operands[number])

    def _inside(self, outer: Any) -> Any:
        if outer not in self._held:
            self._added.append(outer)
            self.backward.regions[0].blocks[0].add_argument(outer.type, self.backward.location)
            self._held[outer] = body_of(self.backward).add_argument(outer.type, self.backward.location)
        return self._held[outer]

    def _counter(self, counter: Any) -> Any:
        """The forward loop's counter, computed from the index at which the backward loop reads."""
        build, dtype = self.build, str(counter.type.element_type)
        counter_value = build.convert(self.index, dtype)
        if self.writing.offset:
            counter_value = build.binary("subtract", counter_value, build.constant(self.writing.offset, dtype))
        return counter_value if self.writing.sign > 0 else build.unary("negate", counter_value)

    def _row(self, stack: Any, kind: Any, dim: int) -> Any:
        """A slice of a stack, of this type."""
        return self.build.reshape(self.build.row(stack, self.index, dim), tuple(kind.shape))

    def finish(self) -> None:
        """Rewrites both loops with the added values and without unread stacks."""
        body = body_of(self.backward)
        erase_unread(body)
        unread = {stack.read for stack in self.stacks if _uses(body.arguments[stack.read]) == 1}
        inside = [self._held[outer] for outer in self._added]
        self.backward = rebuilt(self.backward, self._added, inside, unread)
        dropped = {stack.carried for stack in self.stacks if not _uses(self.forward.results[stack.carried])}
        self.forward = rebuilt(self.forward, [], [], dropped)


def _readers(forward: Any) -> list[Any]:
    """Loops that read a result of this loop."""
    users = [use.owner.operation for result in forward.results for use in result.uses]
    return [user for user in dict.fromkeys(users) if user.name == WHILE and user != forward]


def _stacks(forward: Any, backward: Any) -> list[ResidualStack]:
    """The stacks that one loop writes for the other alone, all written at one index and read at one index."""
    indexed: list[tuple[tuple[Index, Index], ResidualStack]] = []
    for number, value in enumerate(yielded(forward)):
        written = _written(value, number, forward)
        reads = [(use.owner.operation, use.operand_number) for use in forward.results[number].uses]
        if written is None or len(reads) != 1 or reads[0][0] != backward:
            continue
        read, (dim, index) = reads[0][1], written
        update = value.owner.operands[1]
        slices = _slices(backward, read, dim, list(update.type.shape))
        indices = {index_of(piece.operands[1 + dim], backward) for piece in slices}
        reading = next(iter(indices), None)
        if len(indices) == 1 and reading is not None:
            stack = ResidualStack(number, read, update, dim, value.owner.operands[2 + dim], slices)
            indexed.append(((index, reading), stack))
    if not indexed:
        return []
    writing, reading = indexed[0][0]
    rows, wanted = counted(writing, forward), counted(reading, backward)
    if rows is None or wanted is None or not set(wanted) <= set(rows) or abs(writing.sign) != 1:
        return []
    return [
        stack
        for indices, stack in indexed
        if indices == indexed[0][0]
        and min(rows) >= 0
        and max(rows) < forward.results[stack.carried].type.shape[stack.dim]
    ]


def _written(value: Any, number: int, loop: Any) -> tuple[int, Index] | None:
    """The dimension along which a carried array is written one slice at a time, and the index; None if it is not."""
    if isinstance(value, ir.BlockArgument) or value.owner.name != DYNAMIC_UPDATE_SLICE:
        return None
    array, update, *starts = value.owner.operands
    carried = body_of(loop).arguments[number]
    alone = array == carried and _uses(carried) == 1 and _uses(value) == 1
    if not alone or _uses(loop.regions[0].blocks[0].arguments[number]):
        return None
    return _along(starts, list(array.type.shape), list(update.type.shape), loop)


def _along(starts: list[Any], shape: list[int], part: list[int], loop: Any) -> tuple[int, Index] | None:
    """The one dimension in which `part` is a single row, and its index; None unless other dimensions are whole."""
    indices = [index_of(start, loop) for start in starts]
    dims = [dim for dim, index in enumerate(indices) if index is None or index.sign or index.offset]
    if len(dims) != 1 or part[dims[0]] != 1:
        return None
    (dim,) = dims
    index = indices[dim]
    others = all(n == m for d, (n, m) in enumerate(zip(shape, part, strict=True)) if d != dim)
    return (dim, index) if index is not None and index.sign and others else None


def _slices(loop: Any, number: int, dim: int, part: list[int]) -> list[Any]:
    """The operations that read slices of a loop-invariant array; empty if it has other users."""
    stack = body_of(loop).arguments[number]
    if yielded(loop)[number] != stack or _uses(loop.regions[0].blocks[0].arguments[number]):
        return []
    if _uses(loop.results[number]):
        return []
    readers = [use.owner.operation for use in stack.uses if use.owner.operation.name != "stablehlo.return"]
    for reader in readers:
        if reader.name != DYNAMIC_SLICE or reader.block != body_of(loop) or list(reader.results[0].type.shape) != part:
            return []
        along = _along(list(reader.operands)[1:], list(stack.type.shape), part, loop)
        if along is None or along[0] != dim:
            return []
    return readers


def _uses(value: Any) -> int:
    return sum(1 for _ in value.uses)


def rebuilt(loop: Any, starts: list[Any], ends: list[Any], dropped: set[int]) -> Any:
    """A loop with more or fewer carried values, in its place. Its blocks already have the added arguments.

    Args:
        starts: initial values of the added ones. ends: their values after an iteration. dropped: indices of carried
            values to remove.
    """
    if not starts and not dropped:
        return loop
    body = body_of(loop)
    last = xla.terminator(body)
    left = [k for k in range(len(loop.operands)) if k not in dropped]
    passed = [last.operands[k] for k in left] + ends
    last.erase()
    ir.Operation.create("stablehlo.return", operands=passed, loc=loop.location, ip=ir.InsertionPoint(body))
    erase_unread(body)
    operands = [loop.operands[k] for k in left] + starts
    new_loop = ir.Operation.create(
        WHILE, results=[value.type for value in operands], operands=operands, regions=2, loc=loop.location,
        attributes={name: loop.attributes[name] for name in loop.attributes}, ip=ir.InsertionPoint(loop),
    )  # fmt: skip
    for old, new in zip(loop.regions, new_loop.regions, strict=True):
        block = old.blocks[0]
        for k in sorted(dropped, reverse=True):
            block.erase_argument(k)
        block.append_to(new)
    for place, k in enumerate(left):
        loop.results[k].replace_all_uses_with(new_loop.results[place])
    loop.erase()
    return new_loop


# ---------------------------------------------------------------- sums of rows


def add_rows_in_place(module: Any) -> None:
    """Lets loops over layers add their rows to sums of a loop around them, such as gradients of microbatches:

        for each microbatch { stack = zeros; for each layer i { stack[i] = row }; sum += stack }
        for each microbatch { for each layer i { sum[i] += row } }

    The numbers are the same. It saves a stack in memory, and three passes over it.
    """
    for loop in xla.walk_ops(module, WHILE):
        for total, added in zip(body_of(loop).arguments, yielded(loop), strict=True):
            _add_in_place(total, added)
        erase_unread(body_of(loop))


def _add_in_place(total: Any, added: Any) -> None:
    """Does so for a sum that a loop carries, if it is one. added: what an iteration passes on."""

    def made_by(name: str, value: Any) -> bool:
        return not isinstance(value, ir.BlockArgument) and value.owner.name == name and _uses(value) == 1

    if not made_by(ADD, added) or _uses(total) != 1 or total not in list(added.owner.operands):
        return
    (stack,) = [operand for operand in added.owner.operands if operand != total]
    stack = stack.owner.operands[0] if made_by(CONVERT, stack) else stack
    if not made_by(WHILE, stack) or xla.splat_number(stack.owner.operands[stack.result_number]) != 0:
        return
    loop, number = stack.owner, stack.result_number
    if loop.operation.block != total.owner:  # it is made once, and added in each iteration
        return
    updated, inside = yielded(loop)[number], body_of(loop).arguments[number]
    written = _written(updated, number, loop)
    rows = None if written is None else counted(written[1], loop)
    if written is None or rows is None or min(rows) < 0 or max(rows) >= stack.type.shape[written[0]]:
        return
    for value in (stack, updated, inside, loop.regions[0].blocks[0].arguments[number]):
        value.set_type(total.type)
    loop.operands[number] = total
    _, row, *starts = updated.owner.operands
    build = Builder.before(updated.owner)
    before = build.dynamic_slice(inside, starts, tuple(row.type.shape))
    row = build.convert(row, str(before.type.element_type))
    updated.owner.operands[1] = build.binary("add", before, row)
    added.replace_all_uses_with(stack)


# ---------------------------------------------------------------- indices of loops
# Recognises loop indices that are linear in a loop counter: `sign * counter + offset`, with a constant step per trip.


@dataclass(frozen=True)
class Index:
    """`sign * counter + offset`. counter: number of a carried value, -1 for a constant (`sign` is 0)."""

    counter: int
    sign: int
    offset: int


def body_of(loop: Any) -> Any:
    return loop.regions[1].blocks[0]


def yielded(loop: Any) -> list[Any]:
    """The values that an iteration passes on to the next."""
    return list(xla.terminator(body_of(loop)).operands)


def index_of(value: Any, loop: Any) -> Index | None:
    """An integer of a loop's body as a linear function of a counter; None if it is not one."""
    number = constant_of(value)
    if number is not None:
        return Index(-1, 0, number)
    if isinstance(value, ir.BlockArgument):
        changes = value.owner == body_of(loop) and yielded(loop)[value.arg_number] != value
        return Index(value.arg_number, 1, 0) if changes else None
    maker = value.owner
    if maker.name in (CONVERT, RESHAPE):
        return index_of(maker.operands[0], loop)
    if maker.name == SELECT:  # JAX's `i < 0 ? i + n : i`
        asks = maker.operands[0].owner
        is_less = getattr(asks, "name", "") == "stablehlo.compare" and "LT" in str(
            asks.attributes["comparison_direction"]
        )
        negative = is_less and asks.operands[0] == maker.operands[2] and constant_of(asks.operands[1]) == 0
        return index_of(maker.operands[2], loop) if negative else None
    if maker.name not in (ADD, "stablehlo.subtract"):
        return None
    left, right = (index_of(operand, loop) for operand in maker.operands)
    if left is None or right is None or (left.sign and right.sign):
        return None
    way = 1 if maker.name == ADD else -1
    return Index(max(left.counter, right.counter), left.sign + way * right.sign, left.offset + way * right.offset)


def counted(index: Index, loop: Any) -> range | None:
    """The values that an index takes, in order; None if they are not known."""
    trips = trip_count(loop)
    if index.sign == 0 or trips is None:
        return None
    step = step_of(index.counter, loop)
    first = constant_of(loop.operands[index.counter]) if step else None
    if first is None or not step:
        return None
    begin, by = index.sign * first + index.offset, index.sign * step
    return range(begin, begin + by * trips, by)
