"""bf16 widening: a chip that cannot compute in bf16 gets it widened to f32.

XLA:GPU does so for P100 and V100, which doubles temporaries of that type; arguments and collectives stay narrow
(compiled by jaxlib 0.10.2 ahead of time, `python benchmarks/gpu.py --compile`). Without this pass bf16 stays as it is.

Enters: a program and which of its values are stored. Leaves: the growth of its temporaries.
"""

from __future__ import annotations

from toast_cli.program.model import Program

NAME = "bf16-widening"


def growth(program: Program, stored: list[bool]) -> float:
    """Bytes of temporaries with bf16 widened over those without. stored: [values] whether each is written to memory."""
    arguments = {argument.value for argument in program.arguments}
    written = [v for number, v in enumerate(program.values) if stored[number] and number not in arguments]
    wide = sum(value.bytes for value in written if value.dtype == "bf16")
    return 1 + wide / max(1, sum(value.bytes for value in written))
