"""Value numbering: finds operations that compute the same from the same operands, also behind optimization barriers.

Enters: operations in their order. Leaves: for each value, the first value that is equal to it.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import prod
from typing import Any

from toast_cli.frontend.block_graph import is_pure
from toast_cli.frontend.idle import numbers
from toast_cli.program.ops import BARRIER, BROADCAST_IN_DIM, RESHAPE
from toast_cli.xla import ir


class EqualValues:
    """The first of equal values; callers may add further equalities to `first`."""

    def __init__(self) -> None:
        self.first: dict[Any, Any] = {}  # value -> the first that is equal; none where it is itself
        self._made: dict[Hashable, Any] = {}  # key of an operation -> the first operation with that key

    def of(self, value: Any) -> Any:
        """The first value equal to this one."""
        return self.first.get(value, value)

    def number(self, operation: Any, *, learn: bool = True) -> bool:
        """True if an earlier operation computes the same. learn: whether later operations may be equal to this one."""
        if operation.name == BARRIER:
            self.first.update((r, self.of(o)) for r, o in zip(operation.results, operation.operands, strict=True))
            return True
        if not is_pure(operation):
            return False
        before = self._unshaped(operation)
        if before is not None:
            self.first[operation.results[0]] = before
            return True
        key = self._key(operation, {})
        known = self._made.get(key)
        if known is not None:
            self.first.update((a, self.of(b)) for a, b in zip(operation.results, known.results, strict=True))
        elif learn:
            self._made[key] = operation
        return known is not None

    def _unshaped(self, operation: Any) -> Any | None:
        """The source of two successive reshapes that cancel; None if they do not."""
        before = before_reshape(self.of(operation.operands[0])) if operation.name == RESHAPE else None
        return self.of(before) if before is not None and before.type == operation.results[0].type else None

    def _key(self, operation: Any, inner: dict[Any, int]) -> Hashable:
        """A key that equal operations share. inner: numbers of the values of enclosing regions."""
        operands = tuple(inner[o] if o in inner else self.of(o) for o in operation.operands)
        attributes = operation.attributes
        named = tuple((name, _attribute(attributes, k, name)) for k, name in enumerate(attributes))
        regions = []
        for region in operation.regions:
            for block in region.blocks:
                _enumerate(block.arguments, inner)
                for view in block.operations:
                    regions.append(self._key(view.operation, inner))
                    _enumerate(view.operation.results, inner)
        return operation.name, operands, named, tuple(r.type for r in operation.results), tuple(regions)


def _attribute(attributes: Any, place: int, name: str) -> Hashable:
    try:
        return attributes[name]  # type: ignore[no-any-return]
    except TypeError:  # complex numbers, which Python cannot hold
        return str(attributes[place])


def _enumerate(values: Any, known: dict[Any, int]) -> None:
    """Gives each value the next number."""
    for value in values:
        known[value] = len(known)


def before_reshape(value: Any) -> Any | None:
    """The operand of a reshape or broadcast that has as many elements as the result; None for other values."""
    if isinstance(value, ir.BlockArgument) or value.owner.name not in (RESHAPE, BROADCAST_IN_DIM):
        return None
    if value.owner.name == BROADCAST_IN_DIM:
        dims = numbers(value.owner, "broadcast_dimensions")
        if dims != sorted(dims):  # it transposes too
            return None
    before = value.owner.operands[0]
    return before if prod(before.type.shape) == prod(value.type.shape) else None
