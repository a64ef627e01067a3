"""Roofline time of one op on one device: the larger of arithmetic over the unit's rate and bytes over memory bandwidth.

Williams, Waterman, Patterson, "Roofline: an insightful visual performance model" (2009).
"""

from __future__ import annotations

from toast_cli.cost.fusion import PRODUCTS
from toast_cli.hardware.model import Chip

# The order in which a chip that does not list a type falls back on the next wider one it does.
_WIDER = {"f8": "f16", "i8": "bf16", "f16": "bf16", "bf16": "f16", "f64": "f32"}


def matrix_rate(chip: Chip, dtype: str) -> float:
    """FLOP/s of the matrix unit for products of `dtype` operands."""
    key = "f8" if dtype.startswith("f8") else "i8" if dtype in ("i8", "ui8", "i4", "ui4") else dtype
    for name in (key, _WIDER.get(key, "f32"), "f32", "bf16", "f16"):
        if name in chip.matrix_flops:
            return chip.matrix_flops[name]
    return max(chip.matrix_flops.values())


def op_seconds(chip: Chip, name: str, dtype: str, flops: float, memory_bytes: float) -> float:
    """Seconds of one execution. `flops`, `memory_bytes`: on local shapes; `dtype`: of the operands."""
    rate = matrix_rate(chip, dtype) if name in PRODUCTS else chip.vector_flops
    return max(flops / rate, memory_bytes / chip.memory_bytes_per_second)
