"""Minimum cut: the values to keep, with the fewest bytes, so that all needed ones can be recomputed (as in the min-cut
partitioner of PyTorch's AOTAutograd).

In: the operands of each value. Out: the values to keep.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

_TOTAL = 1 << 28  # scale of the total bytes: scipy's capacities have 32 bits
_UNLIMITED = 1 << 30


def least_kept(
    made_from: Sequence[Sequence[int] | None], sizes: Sequence[int], needed: Collection[int]
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

    reached, stack = set(needed), list(needed)
    while stack:
        for value in made_from[stack.pop()] or ():
            if value not in reached:
                reached.add(value)
                stack.append(value)
    order = sorted(reached)
    place = {value: 2 * k for k, value in enumerate(order)}
    source, sink = 2 * len(order), 2 * len(order) + 1
    unit = max(1, sum(sizes[value] for value in order) // _TOTAL)
    edges: list[tuple[int, int, int]] = []
    for value in order:
        at, makers = place[value], made_from[value]
        edges.append((at, at + 1, -(-sizes[value] // unit)))
        if makers is None:
            edges.append((source, at, _UNLIMITED))
        edges += [(place[maker] + 1, at, _UNLIMITED) for maker in dict.fromkeys(makers or ())]
        if value in needed:
            edges.append((at + 1, sink, _UNLIMITED))
    rows, columns, capacities = (np.array(column, dtype=np.int32) for column in zip(*edges, strict=True))
    graph = coo_array((capacities, (rows, columns)), shape=(sink + 1, sink + 1)).tocsr()
    left = graph - maximum_flow(graph, source, sink).flow
    left.data = np.where(left.data > 0, left.data, 0)
    left.eliminate_zeros()
    behind = set(breadth_first_order(left.T.tocsr(), sink, return_predecessors=False).tolist())
    return frozenset(value for value in order if place[value] not in behind and place[value] + 1 in behind)
