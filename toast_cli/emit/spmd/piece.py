"""What one device holds of an array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toast_cli.plan.sharding import Sharding, shards


@dataclass(frozen=True, slots=True)
class Piece:
    """`handle` (an ir.Value) is what each device has of an array that lies in `sharding`.

    Where `partial` names mesh axes, it is that only once the devices along them have been reduced with `reducer`.
    """

    handle: Any
    sharding: Sharding
    partial: tuple[int, ...] = ()
    reducer: str = "add"


def local_shape(shape: tuple[int, ...], sharding: Sharding, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one device's piece of an array."""
    return tuple([n // shards((axes,), sizes) for n, axes in zip(shape, sharding, strict=True)])
