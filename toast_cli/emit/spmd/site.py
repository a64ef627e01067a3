"""The interface of local rules: one op that is about to be written on local shapes.

The operation is in a copy of the module and still has its unsharded types. A rule reshards its operands as needed,
changes the operation in place (or replaces it), and returns each device's pieces of the results.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from toast_cli.emit.spmd.alignment import Alignment, align
from toast_cli.emit.spmd.devices import Piece
from toast_cli.emit.spmd.moves import Devices, Mover, Scopes
from toast_cli.plan.sharding import Sharding, local_shape, replicated
from toast_cli.program.model import Op, Program, Value
from toast_cli.xla import ir
from toast_cli.xla.build import Builder


@dataclass(slots=True)
class Site:
    """An op to be written.

    Attributes:
        op: the op. operation: its operation in the written module. operands: each device's pieces of them.
        wanted: [results] the shardings in which the plan computes them. build: makes operations in front of it. scopes:
            values made earlier that can be reused.
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
    superseded: bool = False  # True if other operations have replaced this one

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the mesh axes."""
        return self.devices.sizes

    def operand(self, k: int) -> Value:
        """Operand k unsplit."""
        return self.program.values[self.op.operands[k]]

    def result(self, k: int) -> Value:
        """Result k unsplit."""
        return self.program.values[self.op.results[k]]

    def alignment(self, splits: frozenset[int] = frozenset(), keeps: frozenset[int] = frozenset()) -> Alignment:
        """The feasible split that is nearest to the operands' shardings and the wanted ones; see `align`."""
        current = tuple([p.sharding for p in self.operands])
        return align(self.op.rule, current, self.wanted, self.sizes, splits, keeps)

    def bring(self, k: int, sharding: Sharding) -> Piece:
        """Reshards operand k."""
        piece = self.operands[k]
        if piece.sharding != sharding:
            piece = self.operands[k] = self.mover.to(piece, sharding, self.operand(k).shape)
        return piece

    def bring_all(self, shardings: tuple[Sharding, ...]) -> None:
        """Reshards all operands, and makes the operation read them."""
        for k, sharding in enumerate(shardings):
            self.bring(k, sharding)
        self.read()

    def read(self) -> None:
        """Makes the operation read each device's pieces of the operands."""
        operands = self.operation.operands
        for k, piece in enumerate(self.operands):
            if operands[k] != piece.handle:
                operands[k] = piece.handle

    def localise(
        self, shardings: tuple[Sharding, ...], partial: tuple[int, ...] = (), reducer: str = "add"
    ) -> list[Piece]:
        """Gives the operation's results the local types of these shardings; returns the pieces."""
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
        """Returns results that other operations have made, and marks the operation as superseded."""
        self.superseded = True
        return [Piece(handle, sharding, partial, reducer) for handle, sharding in zip(handles, shardings, strict=True)]

    def behind(self) -> AbstractContextManager[None]:
        """New operations go after the operation while the block runs."""
        return self.build.at(ir.InsertionPoint.after(self.operation), self.operation.location)

    def local(self, k: int) -> tuple[int, ...]:
        """The shape of a device's piece of operand k."""
        return local_shape(self.operand(k).shape, self.operands[k].sharding, self.sizes)

    def replicated(self, k: int) -> Sharding:
        """The replicated sharding of operand k."""
        return replicated(len(self.operand(k).shape))


LocalRule = Callable[[Site], list[Piece]]
