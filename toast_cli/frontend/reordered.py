"""Changes the order in which dimensions are merged: `[65, 256] -> 16640` becomes `[256, 65] -> 16640`, if that can be
split and the other cannot; see `toast_cli.dimensions.merged`.

In: a `Source`, and the merges to reorder. Out: another source that computes the same from the same arguments.
Ops along the merged dimension are unchanged, since each row is computed by itself. A transpose is added to each reshape
that merges or splits the parts, and wherever another op needs or makes the rows in their original order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from toast_cli.frontend.rewritten import read_rewritten
from toast_cli.frontend.source import Source
from toast_cli.frontend.splats import is_splat
from toast_cli.program.model import Op
from toast_cli.program.ops import RESHAPE
from toast_cli.xla import ir, operations_in, terminator, walk_ops
from toast_cli.xla.build import Builder

Place = tuple[int, int]  # value, dimension
Position = tuple[int, int]  # of an op: array number (operands first, then results), dimension


class NewOrder(NamedTuple):
    """The new order of one merged dimension. sizes: of its parts, in the program's order. first: the new major part."""

    sizes: tuple[int, ...]
    first: int

    @property
    def order(self) -> list[int]:
        return [self.first, *(k for k in range(len(self.sizes)) if k != self.first)]


def with_order(source: Source, orders: dict[Place, NewOrder], by_rows: Callable[[Op], Collection[Position]]) -> Source:
    """The program with merged dimensions reordered.

    Args:
        orders: every dimension that is to be merged in another order. by_rows: the dimensions of an op's operands and
            results along which it computes each row by itself.
    """
    program = source.program
    copy = source.module.operation.clone().operation
    twins = dict(zip(operations_in(source.module.operation), operations_in(copy), strict=True))
    dims: dict[int, list[int]] = defaultdict(list)
    for value, dim in sorted(orders):
        dims[value].append(dim)
    rows = {number: by_rows(op) for number, op in enumerate(program.ops) if dims.keys() & {*op.operands, *op.results}}

    def new(value: int, number: int, array: int) -> set[int]:
        """Dimensions of a value that are in the new order at an op's operand or result."""
        return {dim for dim in dims[value] if (array, dim) in rows[number]}

    made: dict[int, set[int]] = {}  # value -> its dimensions that are made in the new order
    for value in list(dims):
        number = program.producer[value]
        op = program.ops[number]
        made[value] = new(value, number, len(op.operands) + op.results.index(value))
    with copy.context, ir.Location.unknown():
        writer = _Writer(orders)
        for loop, place, value in _passing(source, dims):
            inside = [new(value, *use) for use in program.users[value] if program.ops[use[0]].loop >= 0]
            writer.reorder_in_loop(twins[loop], place, value, made[value], set().union(*inside))
        for number in rows:
            for place, value in enumerate(program.ops[number].operands):
                if value in dims:
                    use = source.use(number, place)
                    writer.reorder(twins[use.operation], use.operand, value, made[value], new(value, number, place))
        writer.clean()
    return read_rewritten(source, copy, _notice(orders), parted=True)


def _notice(orders: dict[Place, NewOrder]) -> str:
    new = next(iter(orders.values()))
    sizes = [new.sizes[k] for k in new.order]
    return (
        f"dimensions are merged in another order, {list(new.sizes)} as {sizes}, for the first to be split: "
        "the program written has it so, others need a transposition there (--as-written: no such plan)"
    )


def _passing(source: Source, dims: Collection[int]) -> Iterator[tuple[Any, int, int]]:
    """(loop, operand, value) for these values that pass through a loop unchanged, outer loops first."""
    for loop in walk_ops(source.module, "stablehlo.while"):
        body = loop.regions[1].blocks[0]
        for place, yielded in enumerate(terminator(body).operands):
            value = source.numbers.get(loop.operands[place], -1)
            if yielded == body.arguments[place] and value in dims:
                yield loop, place, value


class _Writer:
    """Rewrites a module in place. orders: as of `with_order`."""

    def __init__(self, orders: dict[Place, NewOrder]) -> None:
        self._orders = orders
        self._inside: dict[Any, set[int]] = {}  # value that passes through a loop -> its dimensions in the new order
        self._known: dict[object, Any] = {}  # (value, reordering) -> the reordered value
        self._passed: list[Any] = []  # reshapes that lost a user

    def reorder_in_loop(self, loop: Any, place: int, value: int, made: set[int], wanted: set[int]) -> None:
        """Makes an array pass through a loop in the order in which the loop reads it."""
        self.reorder(loop, place, value, made, wanted)
        blocks = [region.blocks[0] for region in loop.regions]
        for handle in (loop.results[place], *(block.arguments[place] for block in blocks)):
            self._inside[handle] = wanted

    def reorder(self, user: Any, place: int, value: int, made: set[int], wanted: set[int]) -> None:
        """Makes an operation read an operand with some dimensions in another order. made, wanted: dimensions in the new
        order where the value is made, and where the operation reads it."""
        handle = user.operands[place]
        maker = None if isinstance(handle.owner, ir.Block) else handle.owner
        if maker is not None and is_splat(maker):
            return
        differ = sorted(self._inside.get(handle, made) ^ wanted)
        change = {dim: (self._orders[value, dim], dim in wanted) for dim in differ}
        merged, parted = maker is not None and maker.name == RESHAPE, user.name == RESHAPE
        if not change and not (merged and parted):
            return
        key = handle, parted, tuple((dim, dim in wanted) for dim in differ)
        if key not in self._known:
            self._known[key] = self._reordered(handle, maker if merged else None, parted, change)
        user.operands[place] = self._known[key]
        if merged:
            self._passed.append(maker)

    def clean(self) -> None:
        """Erases reshapes that nothing reads."""
        for reshape in reversed(list(dict.fromkeys(self._passed))):
            if not list(reshape.results[0].uses):
                reshape.erase()

    def _reordered(self, handle: Any, merge: Any, parted: bool, change: dict[int, tuple[NewOrder, bool]]) -> Any:
        """merge: the reshape that makes the array. parted: True if a reshape that splits the dimensions reads it."""
        shape: list[int] = []
        order: list[int] = []
        for dim, size in enumerate(handle.type.shape):
            if dim not in change:
                order.append(len(shape))
                shape.append(size)
                continue
            new, wanted = change[dim]
            before, after = (range(len(new.sizes)), new.order) if wanted else (new.order, range(len(new.sizes)))
            order += [len(shape) + list(before).index(part) for part in after]
            shape += [new.sizes[part] for part in before]
        at = ir.InsertionPoint.at_block_begin(handle.owner) if isinstance(handle.owner, ir.Block) else None
        read = handle if merge is None else merge.operands[0]
        build = Builder(handle.context)
        with build.at(at or ir.InsertionPoint.after(handle.owner), handle.location):
            turned = build.transpose(build.reshape(read, tuple(shape)), order)
            return turned if parted else build.reshape(turned, tuple(handle.type.shape))
