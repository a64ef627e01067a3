"""Pieces that a gather brings together: as they lie, or copied."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from programs import PLAIN, arg, case_of, round_mesh

from toast_cli.price.buffers import PutTogether
from toast_cli.price.layouts import pieces_are_copied

TILED = replace(PLAIN, memory_tile=(8, 128), passes=PLAIN.passes | {"gathered-pieces"})


@pytest.mark.parametrize(
    ("piece", "dim", "looked_up", "copied"),
    [
        ((3752, 768), 0, True, False),  # whole rows of tiles
        ((3750, 768), 0, True, True),
        ((3750, 768), 0, False, True),
        ((50257, 96), 1, False, False),  # for a product the features may be the rows of tiles
        ((50257, 96), 1, True, True),
        ((50257, 128), 1, True, False),
        ((50257, 97), 1, False, True),
        ((3, 3750, 768), 1, False, False),  # something else is innermost
    ],
)
def test_pieces_that_are_whole_tiles_stay_as_they_are(
    piece: tuple[int, ...], dim: int, looked_up: bool, copied: bool
) -> None:
    assert pieces_are_copied(TILED, piece, dim, looked_up=looked_up) is copied


@pytest.mark.parametrize(("rows", "moments"), [(4 * 9, 1), (4 * 8, 0)])
def test_both_are_there_when_the_copy_is_made(rows: int, moments: int) -> None:
    """Weights that rest split along what is added up, and are gathered for a product split along the batch."""

    def run(x: Any, w: Any) -> Any:
        return x @ w

    case = case_of(run, arg(64, rows), arg(rows, 16), mesh=round_mesh(data=4), profile=TILED)
    plan = (case.shard("x.0", "data"), case.shard("w.0", "data"))
    lowered = {number: case.problem.op_sharding(number, plan) for number in range(len(case.problem.patterns))}
    holdings, found = case.evaluator._holdings, []
    for item in case.evaluator.items.arrays:
        for kind, size in case.evaluator._sharing.held(item, lowered):
            if isinstance(kind, PutTogether):
                (interval,) = holdings.intervals(item, kind)
                assert interval[0] == interval[1]
                assert size == rows * 16 * 4
                found.append(interval)
    assert len(found) == moments
