"""One device's shard of an array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toast_cli.plan.sharding import Sharding, shards


@dataclass(frozen=True, slots=True)
class Piece:
    """`handle` (an ir.Value) is each device's shard of an array with `sharding`.

    If `partial` names mesh axes, it is a partial result, to be reduced over these with `reducer`.
    """

    handle: Any
    sharding: Sharding
    partial: tuple[int, ...] = ()
    reducer: str = "add"


def local_shape(shape: tuple[int, ...], sharding: Sharding, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one device's shard of an array."""
    return tuple([n // shards((axes,), sizes) for n, axes in zip(shape, sharding, strict=True)])
