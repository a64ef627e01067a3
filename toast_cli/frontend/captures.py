"""Copies constants into the bodies of reductions, sorts and scatters that capture them.

Enters: a module without calls. Leaves: the same, with a copy of each captured constant in the body. `jax.export` writes
such captures; a sharding or another location of the outer constant would be wrong inside.
"""

from __future__ import annotations

from typing import Any

from toast_cli.errors import InputError
from toast_cli.frontend.diagnostics import place_of
from toast_cli.program.ops import kind_of
from toast_cli.xla import ADVANCE, ir, walk_ops

# Operations with bodies that XLA compiles as functions. Loops and branches may capture values.
BODIES = frozenset(
    f"stablehlo.{name}"
    for name in (
        "reduce", "reduce_window", "select_and_scatter", "scatter", "sort", "map", "all_reduce", "reduce_scatter",
        "collective_reduce",
    )
)  # fmt: skip


def copy_captured_constants(module: Any, path: str) -> None:
    """Gives each body a copy of the constants, and of expressions of constants, that it captures.

    Raises `InputError` for a body that captures anything else, which XLA refuses.
    """
    for operation in walk_ops(module, *BODIES):
        for region in operation.regions:
            _close(operation, region.blocks[0], path)


def _close(operation: Any, block: Any, path: str) -> None:
    inside = set(block.arguments)
    copies: dict[Any, Any] = {}
    captures: list[tuple[Any, int]] = []
    operations = [view.operation for view in block.operations]
    first = operations[0]

    def copied(value: Any) -> Any:
        """The copy of a value in the body."""
        if value not in copies:
            maker = None if isinstance(value, ir.BlockArgument) else value.owner
            if maker is None or not _is_pure(maker.name):
                raise InputError(
                    f"the body of {operation.name} reads a value that is computed outside it",
                    where=place_of(operation, path),
                    hint="XLA takes constants only there: compute the value in the body, or apply it before or after",
                )
            operands = [copied(operand) for operand in maker.operands]
            copy = maker.clone(ip=ir.InsertionPoint(first))
            for place, operand in enumerate(operands):
                copy.operands[place] = operand
            copies.update(zip(maker.results, copy.results, strict=True))
        return copies[value]

    def visit(one: Any) -> Any:
        for nested in one.regions:
            inside.update(argument for inner in nested.blocks for argument in inner.arguments)
        captures.extend((one, place) for place, operand in enumerate(one.operands) if operand not in inside)
        inside.update(one.results)
        return ADVANCE

    for one in operations:
        one.walk(visit, ir.WalkOrder.PRE_ORDER)
    for one, place in captures:
        one.operands[place] = copied(one.operands[place])


def _is_pure(name: str) -> bool:
    kind = kind_of(name)
    return kind.source or kind.elementwise or kind.rearranges
