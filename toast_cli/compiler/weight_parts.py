"""Weight parts: reshaping a weight into parts for a product, or its gradient back, is a copy.

On a TPU an array lies in tiles of its last two dimensions, so that splitting the last dimension into two, parts and
their width, changes the layout. XLA:TPU reads a whole weight's parts in place, but copies it where a device takes its
share of every part, and the gradient always: a gated perceptron's product with a replicated weight of 184 MB took 0.91
ms more than its share on v4, and the gradient of one of 92 MB 0.18 ms more (libtpu 0.0.42.1). A copy is counted for
both, which overstates plans that split no part; for those the program as it is written is as good. Without this pass
such reshapes cost nothing, as on GPUs.

Enters: a program with its fused products taken apart, and a value. Leaves: whether the value is such a copy.
"""

from __future__ import annotations

from toast_cli.program.model import Program
from toast_cli.program.ops import ARGUMENT, CONVERT, RESHAPE

NAME = "weight-parts"


def is_copied(program: Program, value: int) -> bool:
    """Whether a value is a weight reshaped into parts, or a weight's gradient assembled from parts."""
    maker = program.ops[program.producer[value]]
    if not program.parted or maker.name != RESHAPE:
        return False
    shapes = program.values[maker.operands[0]].shape, program.values[value].shape
    if shapes[0][-1:] == shapes[1][-1:]:
        return False
    origin = program.ops[program.producer[maker.operands[0]]]
    while origin.name == CONVERT:
        origin = program.ops[program.producer[origin.operands[0]]]
    weights = {program.values[argument.value].shape for argument in program.arguments}
    return (origin.name == ARGUMENT and shapes[0] in weights) or (origin.kind.contraction and shapes[1] in weights)
