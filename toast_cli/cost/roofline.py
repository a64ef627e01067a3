"""Time of one kernel on one device: a roofline for its *local* shape.

A kernel has three demands: products on the matrix unit, elementwise arithmetic on the vector unit, and bytes from and
to memory with the passage of arrays through the vector unit. The largest decides (Williams, Waterman, Patterson,
"Roofline", 2009), and every kernel takes a fixed time besides. Alone, a kernel takes about sqrt(product^2 + memory^2),
since its first transfer and its last product have nothing beside them; in a program the compiler loads the next
kernel's operands meanwhile, and the plain roofline is nearer. XLA:GPU does not, so kernels there take as long as alone
(products of depth 64 to 256 whose results are large: 1.0 to 1.3 times that, on an H200).
"""

from __future__ import annotations

from math import hypot

from toast_cli.cost.model import Attained
from toast_cli.hardware import Chip, matrix_rate


def kernel_seconds(
    chip: Chip,
    attained: Attained,
    dtype: str,
    matrix_flops: float,
    vector_flops: float,
    memory_bytes: float,
    kernels: float = 1.0,
) -> float:
    """Seconds of one execution.

    Args:
        attained: fractions of the chip's peak rates that kernels reach.
        dtype: of the product's operands. matrix_flops: of the product, padding included (see `matrix_unit`).
            vector_flops: elementwise.
        memory_bytes: read and written, passes included. kernels: how many launches this is.
    """
    product = matrix_flops / (matrix_rate(chip, dtype) * attained.matrix) if matrix_flops else 0.0
    memory = memory_bytes / (chip.memory_bytes_per_second * attained.memory)
    vector = vector_flops / (chip.vector_flops * attained.vector)
    busy = hypot(product, memory) if attained.separate else max(product, memory)
    return max(busy, vector) + kernels * attained.kernel_seconds
