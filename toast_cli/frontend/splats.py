"""Makes splat constants, and duplicates them: one copy for each op that reads one.

In: a module, or its entry function. Out: it, with a copy of every such constant in front of each op that reads
it, also inside loops (XLA makes it there, too). All uses of an array share its dimension classes. A splat should not
tie its users together, and JAX writes a new one for each op. XLA merges equal splats, so in a program that was read
from HLO the zeros of an activation and those of a weight's gradient are one array, which would tie batch and channels
together.
"""

from __future__ import annotations

from typing import Any

from toast_cli import xla
from toast_cli.program.ops import BROADCAST_IN_DIM
from toast_cli.xla import ir

_CONSTANT = "stablehlo.constant"


def copy_splats(function: Any) -> None:
    """Gives each op that reads a splat constant a copy in front of it."""
    makers = xla.walk_ops(function, BROADCAST_IN_DIM, _CONSTANT, inner_first=True)
    for operation in [maker for maker in makers if maker.results[0].type.rank and is_splat(maker)]:
        readers = list(dict.fromkeys(use.owner.operation for use in operation.results[0].uses))
        if readers and readers[0].block != operation.block:
            operation.move_before(readers[0])
        for reader in readers[1:]:
            copy = operation.clone(ip=ir.InsertionPoint(reader))
            for place, operand in enumerate(reader.operands):
                if operand == operation.results[0]:
                    reader.operands[place] = copy.results[0]


def is_splat(operation: Any) -> bool:
    """True if an operation makes an array with one constant value."""
    if operation.name == BROADCAST_IN_DIM:
        scalar = operation.operands[0]
        return not scalar.type.rank and not isinstance(scalar, ir.BlockArgument) and scalar.owner.name == _CONSTANT
    return operation.name == _CONSTANT and xla.constant_number(operation) is not None


def splat_of(number: str, kind: Any, at: Any) -> Any:
    """A constant at an insertion point; every element is one number, given as text (see `xla.constant_number`)."""
    made = ir.Operation.parse(f'"{_CONSTANT}"() {{value = dense<{number}> : {kind}}} : () -> {kind}')
    at.insert(made)
    return made.results[0]
