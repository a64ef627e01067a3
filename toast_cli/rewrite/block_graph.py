"""A block as a graph: the values that each operation reads (also in its regions), and the readers of each value; and
the minimum cut of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from math import prod
from typing import Any

import numpy as np

from toast_cli import xla
from toast_cli.frontend.attributes import is_placed, is_splat
from toast_cli.frontend.inline import numbers
from toast_cli.frontend.source import Source, read_from_outside
from toast_cli.kernels.describe import describe_kernels
from toast_cli.program.model import Value
from toast_cli.program.ops import (
    BARRIER,
    BROADCAST_IN_DIM,
    CUSTOM_CALL,
    DOT_GENERAL,
    DYNAMIC_SLICE,
    RESHAPE,
    RNG,
    kind_of,
)
from toast_cli.request import Recompute
from toast_cli.xla import ADVANCE, ir

_UNREPEATABLE = (RNG, "stablehlo.rng_bit_generator", "stablehlo.infeed", "stablehlo.outfeed", "stablehlo.recv",
                 "stablehlo.send", "stablehlo.create_token", "stablehlo.after_all")  # fmt: skip


def copied_module(source: Source) -> Any:
    """A copy of a program's module to rewrite."""
    copy = xla.parse_module(source.module.context, xla.write_bytecode(source.module))
    describe_kernels(copy, source.kernels)
    return copy


class BlockGraph:
    """A block; its operations are numbered in order, the terminator has the last number.

    Attributes:
        operations: all of them. reads: [operations] values from outside the operation that it or its regions read.
        place: value -> the operation that makes it; arguments of the block have none. readers: value -> operations.
    """

    def __init__(self, block: Any) -> None:
        self.block = block
        self.operations = [view.operation for view in block.operations]
        self.reads = [read_from_outside([operation]) for operation in self.operations]
        self.place = {result: n for n, operation in enumerate(self.operations) for result in operation.results}
        self._sizes: dict[Any, int] = {}
        self._cuts: dict[tuple[Any, ...], frozenset[int]] = {}
        self.readers: dict[Any, list[int]] = defaultdict(list)
        for number, read in enumerate(self.reads):
            for value in read:
                self.readers[value].append(number)

    @property
    def end(self) -> int:
        """Number of the terminator."""
        return len(self.operations) - 1

    def size(self, value: Any) -> int:
        """Bytes of an array; 0 of a token."""
        kind = value.type
        if kind not in self._sizes:
            shaped = xla.shape_and_element_type(kind)
            self._sizes[kind] = 0 if shaped is None else Value(*shaped).bytes
        return self._sizes[kind]

    def least_kept(self, needed: Iterable[Any], cost: Callable[[Any], int | None], policy: Recompute) -> set[Any]:
        """The values to keep so that the needed values can be recomputed, with the fewest bytes.

        Args:
            cost: bytes to keep a value that must not be recomputed, 0 if it is live in any case; None for one that
                may be recomputed.
            policy: which operations may be run again.
        """
        handles = list(dict.fromkeys(needed))
        numbers = {value: number for number, value in enumerate(handles)}
        wanted, sizes = tuple(range(len(handles))), []
        made_from: list[tuple[int, ...] | None] = []
        for value in handles:  # `handles` grows in the loop
            keep_bytes, maker = cost(value), self.place.get(value)
            read: list[Any] | None = None
            if keep_bytes == 0:
                read = []
            elif keep_bytes is None and maker is not None and REPEATED[policy](self.operations[maker]):
                read = self.reads[maker]
            for other in read or ():
                if other not in numbers:
                    numbers[other] = len(handles)
                    handles.append(other)
            sizes.append(keep_bytes or self.size(value))
            made_from.append(None if read is None else tuple([numbers[other] for other in read]))
        cut = (tuple(made_from), tuple(sizes), wanted)
        if cut not in self._cuts:  # equal layers have equal cuts
            self._cuts[cut] = least_kept(*cut)
        return {handles[k] for k in self._cuts[cut]}

    def makers(self, needed: Iterable[Any], available: Collection[Any]) -> list[int]:
        """The operations needed to compute values from known ones, in program order."""
        numbers: set[int] = set()
        stack = [value for value in needed if value not in available]
        while stack:
            number = self.place.get(stack.pop())
            if number is not None and number not in numbers:
                numbers.add(number)
                stack += [value for value in self.reads[number] if value not in available]
        return sorted(numbers)


def is_pure(operation: Any) -> bool:
    """True if an operation may be run a second time with the same results."""
    allowed = True

    def visit(inner: Any) -> Any:
        nonlocal allowed
        stated = inner.name == CUSTOM_CALL and "has_side_effect" in inner.attributes
        effect = stated and ir.BoolAttr(inner.attributes["has_side_effect"]).value
        allowed = allowed and not (effect or inner.name in _UNREPEATABLE or is_placed(inner))
        return ADVANCE

    operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return allowed


def is_cheap(operation: Any) -> bool:
    """True unless an operation is a contraction, convolution, gather, loop, sort or call."""
    kind = kind_of(operation.name)
    return kind.fusible or kind.reduction or kind.identity


def is_cheap_or_batched(operation: Any) -> bool:
    """True if an operation is cheap, or a contraction with a batch dimension and without weights, as in attention."""
    if is_cheap(operation):
        return True
    if operation.name != DOT_GENERAL or not xla.dot_dimensions(operation.attributes["dot_dimension_numbers"])[0]:
        return False
    return not any(map(_is_weight, operation.operands))


# Rematerialisation policy -> which operations it recomputes.
REPEATED: dict[Recompute, Callable[[Any], bool]] = {
    Recompute.all: is_pure,
    Recompute.all_but_weight_products: is_cheap_or_batched,
    Recompute.all_but_products: is_cheap,
}


def _is_weight(value: Any) -> bool:
    """True if a value is an argument or a loop-invariant value, also behind reshapes, conversions and slices."""
    while not isinstance(value, ir.BlockArgument):
        maker = value.owner
        if not (kind_of(maker.name).view_or_convert or maker.name in (BARRIER, DYNAMIC_SLICE)):
            return False
        value = maker.operands[value.result_number if maker.name == BARRIER else 0]
    loop = value.owner.owner
    if loop.name != "stablehlo.while":
        return True
    body = loop.regions[1].blocks[0]
    return bool(xla.terminator(body).operands[value.arg_number] == body.arguments[value.arg_number])


def is_remade(value: Any) -> bool:
    """True if a value is made from nothing (a constant, an iota) or is a splat."""
    return not isinstance(value, ir.BlockArgument) and (kind_of(value.owner.name).source or is_splat(value.owner))


def clone(operations: Iterable[Any], twins: dict[Any, Any], point: Any) -> None:
    """Copies operations to a place. `twins` maps originals to copies: operands are replaced by
    it, results added to it."""
    for operation in operations:
        copy = operation.clone(ip=point)
        replace_operands(copy, twins)
        twins.update(zip(operation.results, copy.results, strict=True))


def replace_operands(operation: Any, twins: dict[Any, Any]) -> None:
    """Replaces the operands of an operation and of all operations in its regions."""

    def visit(inner: Any) -> Any:
        for k, operand in enumerate(inner.operands):
            if operand in twins:
                inner.operands[k] = twins[operand]
        return ADVANCE

    operation.walk(visit, ir.WalkOrder.PRE_ORDER)


def erase_unread(block: Any) -> None:
    """Erases operations without effects and without users."""
    for view in reversed(list(block.operations)[:-1]):
        operation = view.operation
        unread = not any(True for result in operation.results for _ in result.uses)
        if operation.results and unread and is_pure(operation):
            operation.erase()


def before_reshape(value: Any) -> Any | None:
    """The operand of a reshape or broadcast that has as many elements as the result; None for other values."""
    if isinstance(value, ir.BlockArgument) or value.owner.name not in (RESHAPE, BROADCAST_IN_DIM):
        return None
    if value.owner.name == BROADCAST_IN_DIM:
        dims = numbers(value.owner, "broadcast_dimensions")
        if dims != sorted(dims):  # it transposes too
            return None
    before = value.owner.operands[0]
    return before if prod(before.type.shape) == prod(value.type.shape) else None


# ---------------------------------------------------------------- minimum cut
# Minimum cut: the values to keep, with the fewest bytes, so that all needed ones can be recomputed (as in the min-cut
# partitioner of PyTorch's AOTAutograd).

_TOTAL = 1 << 28  # scale of the total bytes: scipy's capacities have 32 bits
_UNLIMITED = 1 << 30


def least_kept(
    made_from: tuple[tuple[int, ...] | None, ...], sizes: tuple[int, ...], needed: tuple[int, ...]
) -> frozenset[int]:
    """The values to keep, with the fewest bytes; of equal cuts the one with least recomputation.

    Args:
        made_from: [values] operands of each; empty if it is always available, None if it cannot be recomputed.
        sizes: [values] bytes.
    """
    if not needed:
        return frozenset()
    from scipy.sparse import coo_array  # heavy, and rarely needed
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    # Value k enters at node 2k and leaves at node 2k + 1; the edge between them has its bytes.
    source, sink = 2 * len(sizes), 2 * len(sizes) + 1
    unit = max(1, sum(sizes) // _TOTAL)
    edges: list[tuple[int, int, int]] = []
    for value, (size, makers) in enumerate(zip(sizes, made_from, strict=True)):
        edges.append((2 * value, 2 * value + 1, -(-size // unit)))
        if makers is None:
            edges.append((source, 2 * value, _UNLIMITED))
        edges += [(2 * maker + 1, 2 * value, _UNLIMITED) for maker in dict.fromkeys(makers or ())]
        if value in needed:
            edges.append((2 * value + 1, sink, _UNLIMITED))
    rows, columns, capacities = (np.array(column, dtype=np.int32) for column in zip(*edges, strict=True))
    graph = coo_array((capacities, (rows, columns)), shape=(sink + 1, sink + 1)).tocsr()
    left = graph - maximum_flow(graph, source, sink).flow
    left.data = np.where(left.data > 0, left.data, 0)
    left.eliminate_zeros()
    behind = set(breadth_first_order(left.T.tocsr(), sink, return_predecessors=False).tolist())
    return frozenset(value for value in range(len(sizes)) if 2 * value not in behind and 2 * value + 1 in behind)
