"""Vector products: a matrix-vector product is computed elementwise, with a sum.

Where one side of a product has one row on a device, XLA:TPU multiplies element by element and adds up: the attention of
the one new query of a decoding step, or any product of a batch that is split into single rows. This processes the
larger operand like elementwise work, and takes about twenty times the cycles of the matrix unit for two rows. Seen in
single products of one row, with a batch and without (64 to 4,096 added up, f32 and bf16), compiled by libtpu 0.0.42.1
for v4, v5e, v5p and v6e (`python -m benchmarks.singles`): 14 to 20 % less than what elementwise work of as many
elements is predicted to take. Without this pass they run on the matrix unit.

Enters: a product's grid and shards. Leaves: the number of elements that the vector unit processes.
"""

from __future__ import annotations

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.cost.matrix_unit import Grid, least_rows, local_size

NAME = "vector-products"


def elements_walked(profile: CompilerProfile, grid: Grid, cuts: tuple[int, ...]) -> float:
    """Elements of the larger operand on one device, 0 where the matrix unit multiplies. cuts: [slots] shards of
    each."""
    if NAME not in profile.passes or grid.window > 1.0 or least_rows(grid, cuts) > 1.0:
        return 0.0
    sizes = [local_size(slots, cuts) for slots in (grid.batch, grid.depth, grid.rows, grid.columns)]
    return sizes[0] * sizes[1] * max(sizes[2:])
