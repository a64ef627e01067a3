"""Time of one kernel on one device: a roofline with what the matrix unit does with the *local* shape.

A kernel has three demands: products on the matrix unit, elementwise arithmetic on the vector unit, and bytes from and to memory with
the passage of arrays through the vector unit. The largest decides (Williams, Waterman, Patterson, "Roofline", 2009), and every kernel
takes a fixed time besides. Alone, a kernel takes about sqrt(product^2 + memory^2), since its first transfer and its last product have
nothing beside them; in a program the compiler loads the next kernel's operands meanwhile, and the plain roofline is nearer.

A matrix unit is a grid of `matrix_tile` cells, fed row by row (Jouppi et al., "In-Datacenter Performance Analysis of a TPU", 2017).
A product of [M, K] and [K, N] fills the grid with tiles of K x N and streams M past it, or N past tiles of K x M: what the local
shape lacks of a whole tile is wasted, a 64-wide one on a 128-wide grid half of the time. Rows are streamed 8 at a time.
"""

from __future__ import annotations

from math import ceil

from toast_cli.hardware import Chip, matrix_rate

STREAMED_ROWS = 8  # sublanes of a vector register


def kernel_seconds(
    chip: Chip, dtype: str, matrix_flops: float, vector_flops: float, memory_bytes: float, kernels: float = 1.0
) -> float:
    """Seconds of one execution.

    Args:
        dtype: of the product's operands. matrix_flops: of the product, padding included (see `padding`). vector_flops: elementwise.
        memory_bytes: read and written, passes included. kernels: how many launches this is.
    """
    attained = chip.attained
    product = matrix_flops / (matrix_rate(chip, dtype) * attained.matrix) if matrix_flops else 0.0
    memory = memory_bytes / (chip.memory_bytes_per_second * attained.memory)
    vector = vector_flops / (chip.vector_flops * attained.vector)
    return max(product, memory, vector) + kernels * attained.kernel_seconds


def padding(tile: tuple[int, int], rows: float, columns: float, depth: float) -> float:
    """By how much a product of [rows, depth] and [depth, columns] grows on a grid of that tile: 1 where everything fits."""
    high, wide = tile
    streamed = _padded(rows, min(STREAMED_ROWS, high)) * _padded(columns, wide)
    swapped = _padded(rows, wide) * _padded(columns, min(STREAMED_ROWS, high))
    return min(streamed, swapped) / (rows * columns) * _padded(depth, high) / depth


def _padded(size: float, tile: int) -> float:
    return ceil(size / tile) * tile
