"""Roofline time of one op on one device: the larger of arithmetic over the unit's rate and bytes over memory bandwidth.

Williams, Waterman, Patterson, "Roofline: an insightful visual performance model" (2009).
"""

from __future__ import annotations

from toast_cli.cost.fusion import PRODUCTS
from toast_cli.hardware import Chip, matrix_rate


def op_seconds(chip: Chip, name: str, dtype: str, flops: float, memory_bytes: float) -> float:
    """Seconds of one execution. `flops`, `memory_bytes`: on local shapes; `dtype`: of the operands."""
    rate = matrix_rate(chip, dtype) if name in PRODUCTS else chip.vector_flops
    return max(flops / rate, memory_bytes / chip.memory_bytes_per_second)
