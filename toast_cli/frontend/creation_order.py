"""Sorts the operations of a program read from HLO into the order in which they were created.

In: a module as it comes from HLO. Out: it, with the operations of each block sorted. XLA prints instructions in
depth-first order of its results: all that the first result needs first, which for a training step is the forward pass
and the gradient of one weight through all layers, and every other gradient after that. Liveness along that order
overestimated peak memory by up to a factor of two. XLA numbers the instructions of each name as it creates them
(`add.17`, `add.18`): this sorts those of one name by number, each after its operands.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any

from toast_cli import xla
from toast_cli.xla import ir, operations_in

_NUMBERED = re.compile(r"(.*)\.(\d+)")


def in_creation_order(module: Any) -> None:
    """Sorts the operations of every block of every function."""
    functions = [function for function in module.body.operations if function.operation.name == "func.func"]
    operations = [one for function in functions for one in operations_in(function)]
    for block in [block for one in operations for region in one.regions for block in region.blocks]:
        sort_block(block)


def sort_block(block: Any, *, by_number: bool = True) -> None:
    """Sorts the operations of one block, each after those whose results it reads; the last one ends it and stays there.
    by_number: also by the numbers in their names."""
    *operations, last = [view.operation for view in block.operations]
    if len(operations) < 2:
        return
    places = {operation: place for place, operation in enumerate(operations)}
    needed = [[places[one] for one in read_by(operation) if one in places] for operation in operations]
    made_before: list[list[int]] = [[] for _ in operations]
    for earlier, later in pairs_of_one_name(operations) if by_number else ():
        made_before[later].append(earlier)
    order = sorted_after(range(len(needed)), [made + read for made, read in zip(made_before, needed, strict=True)])
    order = sorted_after(order, needed)  # ignores numbers that contradict the data dependences
    if order != list(range(len(order))):
        for place in order:
            operations[place].move_before(last)


def read_by(operation: Any) -> list[Any]:
    """Operations whose results an operation, or its regions, read."""
    inside = operations_in(operation) if len(operation.regions) else [operation]
    read = (operand for inner in inside for operand in inner.operands)
    return [operand.owner.operation for operand in read if not isinstance(operand, ir.BlockArgument)]


def pairs_of_one_name(operations: list[Any]) -> list[tuple[int, int]]:
    """Pairs of positions of successively created operations, for each name."""
    named: dict[str, list[tuple[int, int]]] = {}
    for place, operation in enumerate(operations):
        found = _NUMBERED.fullmatch(xla.location_name(operation.location))
        if found:
            named.setdefault(found[1], []).append((int(found[2]), place))
    ordered = [[place for _, place in sorted(numbered)] for numbered in named.values()]
    return [pair for places in ordered for pair in itertools.pairwise(places)]


def sorted_after(places: Iterable[int], before: list[list[int]]) -> list[int]:
    """Depth-first topological order of the places, each after those in its `before`. Cycles are broken somewhere."""
    order: list[int] = []
    begun = [False] * len(before)
    for first in places:
        stack = [] if begun[first] else [(first, iter(before[first]))]
        begun[first] = True
        while stack:
            place, left = stack[-1]
            nearest = next((one for one in left if not begun[one]), None)
            if nearest is None:
                order.append(place)
                stack.pop()
            else:
                begun[nearest] = True
                stack.append((nearest, iter(before[nearest])))
    return order
