"""How well the local shape of a product fills the matrix unit.

Enters: a product's form, and per slot into how many pieces it is cut. Leaves: by how much its arithmetic grows by padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from toast_cli.cost.compute import padding
from toast_cli.dimensions.model import Form
from toast_cli.hardware import Chip, matrix_rate

Slots = tuple[tuple[int, int], ...]  # slot, elements along it


@dataclass(frozen=True, slots=True)
class Grid:
    """A product of [rows, depth] and [depth, columns], batch times. window: kernel positions of a convolution, 1 for others.

    grouped: a convolution of feature groups runs as one of all features with a block-diagonal kernel.
    """

    batch: Slots
    rows: Slots
    columns: Slots
    depth: Slots
    window: float
    grouped: bool


def grid_of(form: Form, flops: float, convolution: bool) -> Grid:
    """The grid of an op with two operands; `flops` of the op as a whole."""
    left, right, out = ({s for slots in dims for s in slots} for dims in (*form.operands[:2], form.results[0]))

    def sized(slots: set[int]) -> Slots:
        return tuple((slot, form.sizes[slot]) for slot in sorted(slots))

    batch, rows, columns = left & right & out, (left & out) - right, (right & out) - left
    depth = (left | right) - out
    positions = flops / 2 / prod(form.sizes[s] for s in (*batch, *rows, *columns, *depth))
    return Grid(
        sized(batch), sized(rows), sized(columns), sized(depth), positions if convolution else 1.0,
        convolution and bool(batch),
    )  # fmt: skip


def growth(chip: Chip, dtype: str, grid: Grid, cuts: tuple[int, ...]) -> float:
    """Arithmetic done over arithmetic needed; `cuts` [slots] pieces of each slot. Where the vector unit would be quicker, as much
    as makes the matrix unit as slow as that."""
    rows, columns, depth = (_local(slots, cuts) for slots in (grid.rows, grid.columns, grid.depth))
    depth *= max(1.0, grid.window)
    if grid.grouped:
        groups = _local(grid.batch, cuts)
        found = groups * padding(chip.matrix_tile, rows, columns * groups, depth * groups)
    else:
        found = padding(chip.matrix_tile, rows, columns, depth)
    attained = chip.attained
    limit = matrix_rate(chip, dtype) * attained.matrix / (chip.vector_flops * attained.vector)
    return min(found, max(1.0, limit))


def _local(slots: Slots, cuts: tuple[int, ...]) -> float:
    return prod(size / cuts[slot] for slot, size in slots)
