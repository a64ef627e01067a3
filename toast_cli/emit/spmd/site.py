"""One op about to be written on local shapes: what a local rule is given, and what it may do.

The operation stands in a copy of the module and still has its unsplit types. A rule brings its operands where it
needs them, changes the operation in place (or puts others in its stead), and says what each device then has of the
results.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from toast_cli.emit.spmd.alignment import Alignment, align
from toast_cli.emit.spmd.build import Builder
from toast_cli.emit.spmd.moves import Devices, Mover
from toast_cli.emit.spmd.piece import Piece, local_shape
from toast_cli.emit.spmd.scopes import Scopes
from toast_cli.plan.sharding import Sharding, replicated
from toast_cli.program.model import Op, Program, Value
from toast_cli.xla import ir


@dataclass(slots=True)
class Site:
    """An op at its place.

    Attributes:
        op: the op. operation: what stands for it in the module that is written. operands: what each device has of them.
        wanted: [results] how the plan has the op compute them. build: makes operations in front of it. scopes: what has
            been made already that others may read as well.
    """

    program: Program
    op: Op
    operation: Any
    operands: list[Piece]
    wanted: tuple[Sharding, ...]
    build: Builder
    devices: Devices
    mover: Mover
    scopes: Scopes = field(default_factory=Scopes)
    superseded: bool = False  # whether other operations have taken the place of this one

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the mesh axes."""
        return self.devices.sizes

    def operand(self, k: int) -> Value:
        """Operand k unsplit."""
        return self.program.values[self.op.operands[k]]

    def result(self, k: int) -> Value:
        """Result k unsplit."""
        return self.program.values[self.op.results[k]]

    def alignment(self, splits: frozenset[int] = frozenset(), keeps: frozenset[int] = frozenset()) -> Alignment:
        """The split that is nearest to how operands lie and results are wanted; see `align`."""
        lying = tuple([p.sharding for p in self.operands])
        return align(self.op.rule, lying, self.wanted, self.sizes, splits, keeps)

    def bring(self, k: int, sharding: Sharding) -> Piece:
        """Operand k, in this sharding from now on."""
        piece = self.operands[k]
        if piece.sharding != sharding:
            piece = self.operands[k] = self.mover.to(piece, sharding, self.operand(k).shape)
        return piece

    def bring_all(self, shardings: tuple[Sharding, ...]) -> None:
        """All operands, and the operation reads them."""
        for k, sharding in enumerate(shardings):
            self.bring(k, sharding)
        self.read()

    def read(self) -> None:
        """The operation reads what each device has of the operands."""
        operands = self.operation.operands
        for k, piece in enumerate(self.operands):
            if operands[k] != piece.handle:
                operands[k] = piece.handle

    def localise(
        self, shardings: tuple[Sharding, ...], partial: tuple[int, ...] = (), reducer: str = "add"
    ) -> list[Piece]:
        """The operation makes its part of results that lie so; what each device then has."""
        pieces = []
        for k, (result, sharding) in enumerate(zip(self.operation.results, shardings, strict=True)):
            if any(sharding):
                value = self.result(k)
                result.set_type(self.build.type(value.dtype, local_shape(value.shape, sharding, self.sizes)))
            pieces.append(Piece(result, sharding, partial, reducer))
        return pieces

    def replaced(
        self, handles: list[Any], shardings: tuple[Sharding, ...], partial: tuple[int, ...] = (), reducer: str = "add"
    ) -> list[Piece]:
        """Other operations have made the results, and the operation goes."""
        self.superseded = True
        return [Piece(handle, sharding, partial, reducer) for handle, sharding in zip(handles, shardings, strict=True)]

    def behind(self) -> AbstractContextManager[None]:
        """New operations go behind the operation while the block runs."""
        return self.build.at(ir.InsertionPoint.after(self.operation), self.operation.location)

    def local(self, k: int) -> tuple[int, ...]:
        """The shape of what a device has of operand k."""
        return local_shape(self.operand(k).shape, self.operands[k].sharding, self.sizes)

    def whole(self, k: int) -> Sharding:
        """The sharding in which operand k is whole everywhere."""
        return replicated(len(self.operand(k).shape))


LocalRule = Callable[[Site], list[Piece]]
