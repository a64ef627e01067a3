"""Brings pieces from one sharding to another, and completes partial ones: slices and collectives, spelled out.

The way is the one that `plan.reshard` lists, so that what is written is what was promised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from toast_cli.emit.spmd.build import INDEX, Builder
from toast_cli.emit.spmd.devices import groups, places, senders
from toast_cli.emit.spmd.piece import Piece
from toast_cli.plan.reshard import EXCHANGE, GATHER, SLICE, route
from toast_cli.plan.sharding import Sharding, shards
from toast_cli.xla import ir


@dataclass
class Devices:
    """Who a device is, as numbers that it works out once, at the start of the program.

    Attributes:
        build: makes operations. sizes: of the mesh axes. start: the operation in front of which the numbers are
            worked out.
    """

    build: Builder
    sizes: tuple[int, ...]
    start: Any
    _numbers: dict[object, Any] = field(default_factory=dict)

    def once(self, key: object, make: Callable[[], Any]) -> Any:
        """A value that is made at the start of the program, the first time it is asked for."""
        if key not in self._numbers:
            with self.build.at(ir.InsertionPoint(self.start)):
                self._numbers[key] = make()
        return self._numbers[key]

    def constant(self, value: float, dtype: str = INDEX) -> Any:
        return self.once((dtype, value), lambda: self.build.constant(value, dtype))

    def own(self) -> Any:
        """The device's number."""
        return self.once(
            "own", lambda: self.build.convert(self.build.one("partition_id", [], self.build.type("ui32", ())), INDEX)
        )

    def lookup(self, table: tuple[int, ...]) -> Any:
        """The entry of this device in a table with one entry for each."""
        if len(set(table)) == 1:
            return self.constant(table[0])

        def make() -> Any:
            row = self.build.dynamic_slice(self.build.numbers(table), [self.own()], (1,))
            return self.build.reshape(row, ())

        return self.once(table, make)

    def offset(self, axes: tuple[int, ...], length: int) -> Any:
        """Where this device's piece begins along a dimension that `axes` split into pieces of `length`."""
        return self.lookup(tuple(int(place) * length for place in places(axes, self.sizes)))

    def on_first(self, axes: tuple[int, ...], value: Any, otherwise: Any) -> Any:
        """`value` on the first device along `axes`, `otherwise` on the others."""
        first = self.build.compare("EQ", self.offset(axes, 1), self.constant(0))
        return self.build.select(first, value, otherwise)


class Mover:
    """Writes moves at the builder's place."""

    def __init__(self, build: Builder, devices: Devices) -> None:
        self.build, self.devices, self._sizes = build, devices, devices.sizes

    def to(self, piece: Piece, target: Sharding, shape: tuple[int, ...]) -> Piece:
        """A complete piece, of an array of `shape`, as `target` says."""
        handle, at = piece.handle, piece.sharding
        found = route(at, target, self._sizes, shape)
        for k, (step, to) in enumerate(found):
            if step.kind == SLICE:
                if k + 1 == len(found) or found[k + 1][0].kind != SLICE:
                    handle, at = self._slice(handle, at, to), to
                continue
            handle = self._move(handle, step.kind, step.axes, at, to)
            at = to
        return Piece(handle, at)

    def complete(self, piece: Piece, path: Sequence[Sharding], shape: tuple[int, ...]) -> Piece:
        """The same for a partial piece, on `path` (see `PartitionedProgram.path`), which ends where it is to lie.

        What a step of the path splits further by axes that the piece is partial over is reduce-scattered; the rest is
        all-reduced.
        """
        piece = self.scatter(piece, path)
        handle = piece.handle
        if piece.partial:
            handle = self.build.all_reduce(handle, piece.reducer, groups(tuple(sorted(piece.partial)), self._sizes))
        return self.to(Piece(handle, piece.sharding), path[-1], shape)

    def scatter(self, piece: Piece, path: Sequence[Sharding]) -> Piece:
        """A partial piece reduce-scattered over axes that split it further on `path`; partial over all others still."""
        handle, at, left = piece.handle, piece.sharding, piece.partial
        for target in path:
            for dim, axes in enumerate(target):
                have = at[dim]
                more = axes[len(have) :]
                over = tuple(axis for axis in more if axis in left)
                if axes[: len(have)] == have and over and more == over:
                    handle = self.build.reduce_scatter(handle, piece.reducer, dim, groups(over, self._sizes))
                    at = (*at[:dim], axes, *at[dim + 1 :])
                    left = tuple([axis for axis in left if axis not in over])
        return Piece(handle, at, left, piece.reducer)

    def _slice(self, handle: Any, source: Sharding, target: Sharding) -> Any:
        """This device's part of what it has."""
        starts, shape = [], list(handle.type.shape)
        for dim, (have, want) in enumerate(zip(source, target, strict=True)):
            more = want[len(have) :]
            shape[dim] //= shards((more,), self._sizes)
            starts.append(self.devices.offset(more, shape[dim]) if more else self.devices.constant(0))
        return self.build.dynamic_slice(handle, starts, tuple(shape))

    def _move(self, handle: Any, kind: str, axes: tuple[int, ...], source: Sharding, target: Sharding) -> Any:
        if kind == GATHER:
            (dim,) = (d for d, (a, b) in enumerate(zip(source, target, strict=True)) if a != b)
            return self.build.all_gather(handle, dim, groups(axes, self._sizes))
        if kind == EXCHANGE:
            longer = [len(b) > len(a) for a, b in zip(source, target, strict=True)]
            shorter = [len(b) < len(a) for a, b in zip(source, target, strict=True)]
            return self.build.all_to_all(handle, longer.index(True), shorter.index(True), groups(axes, self._sizes))
        return self._permute(handle, source, target)

    def _permute(self, handle: Any, source: Sharding, target: Sharding) -> Any:
        """Everybody is sent the piece it needs, by one that has it or something around it."""
        pairs = senders(source, target, self._sizes)
        receiver = dict(pairs)
        shape, starts = list(handle.type.shape), []
        for dim, (have, want) in enumerate(zip(source, target, strict=True)):
            parts = shards((want,), self._sizes) // shards((have,), self._sizes)
            shape[dim] //= parts
            place = places(want, self._sizes)
            table = tuple(int(place[receiver[device]]) % parts * shape[dim] for device in range(len(place)))
            starts.append(self.devices.lookup(table))
        if tuple(shape) != tuple(handle.type.shape):
            handle = self.build.dynamic_slice(handle, starts, tuple(shape))
        return self.build.permute(handle, pairs)
