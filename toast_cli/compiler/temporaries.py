"""By how much a compiler's temporaries exceed those that the model counts: a program and a chip in, one factor out.

XLA:GPU does not keep temporaries as few as XLA:TPU does: gradients wait for the one all-reduce they are joined in, kernels of
products and of softmax write beside what they read, and its scheduler looks for overlap first. One fitted factor of the chip stands
for that (`Chip.temporary_growth`). A chip that cannot compute in bf16 (it lists no such rate: P100, V100) gets it widened to f32,
which doubles what lies in memory in that type.
"""

from __future__ import annotations

from toast_cli.hardware import Chip
from toast_cli.program.model import Program


def temporary_growth(program: Program, stored: list[bool], chip: Chip) -> float:
    """Bytes of temporaries on the chip over those the model counts. `stored`: [values] whether each is written to memory."""
    if chip.platform != "gpu" or "bf16" in chip.matrix_flops:
        return chip.temporary_growth
    arguments = {argument.value for argument in program.arguments}
    written = [v for number, v in enumerate(program.values) if stored[number] and number not in arguments]
    wide = sum(value.bytes for value in written if value.dtype == "bf16")
    return chip.temporary_growth * (1 + wide / max(1, sum(value.bytes for value in written)))
