"""Reshards shards and completes partial ones, with explicit slices and collectives.

The steps are those that `plan.reshard` lists, so the written program matches the plan's cost.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from toast_cli.emit.spmd.devices import Piece, groups, places, senders
from toast_cli.plan.partials import ALL_REDUCE, REDUCE_SCATTER
from toast_cli.plan.partitioned import Collective
from toast_cli.plan.reshard import EXCHANGE, GATHER, SLICE, route, ways_of
from toast_cli.plan.sharding import Sharding, refines, shards
from toast_cli.xla import ir
from toast_cli.xla.build import INDEX, Builder


class Scopes:
    """Values that are made once and reused later in the same block, or in blocks within it."""

    def __init__(self) -> None:
        self._blocks: list[dict[Hashable, Any]] = [{}]

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of a key; `make` makes it in this block if it does not exist yet."""
        for block in self._blocks:
            if key in block:
                return block[key]
        made = self._blocks[-1][key] = make()
        return made

    @contextmanager
    def within(self, *, alone: bool = False) -> Iterator[None]:
        """Opens an inner block while the `with` block runs; `alone`: it cannot reuse outer values."""
        before = self._blocks
        self._blocks = [{}] if alone else [*before, {}]
        try:
            yield
        finally:
            self._blocks = before


@dataclass
class Devices:
    """Values that depend on the partition id, computed once at the start of the program.

    Attributes:
        build: makes operations. sizes: of the mesh axes. start: the operation in front of which the values are
            computed.
    """

    build: Builder
    sizes: tuple[int, ...]
    start: Any
    _numbers: dict[object, Any] = field(default_factory=dict)

    def once(self, key: object, make: Callable[[], Any]) -> Any:
        """A value that is computed at the start of the program, on the first request."""
        if key not in self._numbers:
            with self.build.at(ir.InsertionPoint(self.start)):
                self._numbers[key] = make()
        return self._numbers[key]

    def constant(self, value: float, dtype: str = INDEX) -> Any:
        return self.once((dtype, value), lambda: self.build.constant(value, dtype))

    def own(self) -> Any:
        """The partition id."""
        return self.once(
            "own", lambda: self.build.convert(self.build.one("partition_id", [], self.build.type("ui32", ())), INDEX)
        )

    def lookup(self, table: tuple[int, ...]) -> Any:
        """The entry of this device in a table with one entry per device."""
        if len(set(table)) == 1:
            return self.constant(table[0])

        def make() -> Any:
            row = self.build.dynamic_slice(self.build.numbers(table), [self.own()], (1,))
            return self.build.reshape(row, ())

        return self.once(table, make)

    def offset(self, axes: tuple[int, ...], length: int) -> Any:
        """Start of this device's piece along a dimension that `axes` split into pieces of `length`."""
        return self.lookup(tuple(int(place) * length for place in places(axes, self.sizes)))

    def on_first(self, axes: tuple[int, ...], value: Any, otherwise: Any) -> Any:
        """`value` on the first device along `axes`, `otherwise` on the others."""
        first = self.build.compare("EQ", self.offset(axes, 1), self.constant(0))
        return self.build.select(first, value, otherwise)


class Mover:
    """Writes reshards and reductions at the builder's insertion point."""

    def __init__(self, build: Builder, devices: Devices) -> None:
        self.build, self.devices, self._sizes = build, devices, devices.sizes

    def to(self, piece: Piece, target: Sharding, shape: tuple[int, ...], scopes: Scopes | None = None) -> Piece:
        """Reshards a complete piece, of an array of `shape`, to `target`. scopes: reshards with a common prefix share
        it, up to a sharding that both go through, as in `plan.reshard`."""
        handle, at = piece.handle, piece.sharding
        found = route(at, target, self._sizes, shape)
        shared = scopes or Scopes()
        for k, ((step, to), way) in enumerate(zip(found, ways_of(found), strict=True)):
            if step.kind == SLICE:
                if k + 1 == len(found) or found[k + 1][0].kind != SLICE:
                    handle, at = shared.get((piece.handle, way), partial(self._slice, handle, at, to)), to
                continue
            handle = shared.get((piece.handle, way), partial(self._move, handle, step.kind, step.axes, at, to))
            at = to
        return Piece(handle, at)

    def complete(self, piece: Piece, path: Sequence[Sharding], shape: tuple[int, ...]) -> Piece:
        """Completes a partial piece along `path` (see `PartitionedProgram.path`), which ends in the wanted sharding.

        Steps of the path that split further by all partial axes are reduce-scatters; otherwise the piece is all-reduced
        and sliced, as in plans (see `partials.completed`).
        """
        scattered = self.scatter(piece, path)
        if scattered.partial:
            over = groups(tuple(sorted(piece.partial)), self._sizes)
            scattered = Piece(self.build.all_reduce(piece.handle, piece.reducer, over), piece.sharding)
        return self.to(scattered, path[-1], shape)

    def scatter(self, piece: Piece, path: Sequence[Sharding]) -> Piece:
        """Reduce-scatters a partial piece over axes that split it further on `path`; it stays
        partial over all others."""
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

    def reduce(self, piece: Piece, steps: Iterable[Collective]) -> Piece:
        """Applies a plan's collectives to a partial piece; it stays partial over all other axes."""
        for step in steps:
            if not set(step.axes) <= set(piece.partial):
                continue
            at, to = piece.sharding, step.after
            left = tuple([axis for axis in piece.partial if axis not in step.axes])
            scattered = step.kind == REDUCE_SCATTER and to is not None and step.before == at and refines(to, at)
            if scattered and to is not None:
                more = [axes[len(have) :] for have, axes in zip(at, to, strict=True)]
                handle = self._scatter(piece, more)
                piece = Piece(handle, to, left, piece.reducer)
            elif step.kind == ALL_REDUCE:
                piece = Piece(self._all_reduce(piece, step.axes), at, left, piece.reducer)
        return piece

    def all_reduced(self, piece: Piece) -> Piece:
        """All-reduces a partial piece over all its axes."""
        return Piece(self._all_reduce(piece, piece.partial), piece.sharding) if piece.partial else piece

    def _all_reduce(self, piece: Piece, axes: tuple[int, ...]) -> Any:
        return self.build.all_reduce(piece.handle, piece.reducer, groups(tuple(sorted(axes)), self._sizes))

    def _scatter(self, piece: Piece, more: list[tuple[int, ...]]) -> Any:
        """One reduce-scatter; more: [dimensions] the further axes that split each.

        For several dimensions, the pieces are first stacked along one.
        """
        build, handle, over = self.build, piece.handle, groups(sum(more, ()), self._sizes)
        dims = [dim for dim, axes in enumerate(more) if axes]
        if len(dims) == 1:
            return build.reduce_scatter(handle, piece.reducer, dims[0], over)
        parted: list[int] = []  # each dimension as (number of pieces, their length)
        for dim, length in enumerate(handle.type.shape):
            parts = shards((more[dim],), self._sizes)
            parted += [parts, length // parts]
        apart = build.reshape(handle, tuple(parted))
        rank = len(more)
        order = [*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]
        lengths = tuple(parted[1::2])
        row = build.reshape(build.transpose(apart, order), (len(over[0]), *lengths))
        return build.reshape(build.reduce_scatter(row, piece.reducer, 0, over), lengths)

    def _slice(self, handle: Any, source: Sharding, target: Sharding) -> Any:
        """Slices this device's part of its piece."""
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
        """A collective-permute: each device receives its piece from one that has it, or has a
        larger piece around it."""
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
