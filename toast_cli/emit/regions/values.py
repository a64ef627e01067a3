"""Keeps each device's piece of every value, and reshards it for its readers; finds the collectives that complete each
partial sum of a plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import product
from typing import Any

from toast_cli.emit.annotations import added_up_converted
from toast_cli.emit.regions.moves import Devices, Mover, Piece, Scopes
from toast_cli.emit.regions.rules import rule_of
from toast_cli.emit.regions.site import Site, align
from toast_cli.frontend.source import Source
from toast_cli.plan.partials import ALL_GATHER
from toast_cli.plan.partitioned import Collective, PartitionedProgram
from toast_cli.plan.reshard import SLICE, is_even, route
from toast_cli.plan.sharding import Sharding, axes_of, replicated, shards
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import ADD, CARRY, CONVERT, REDUCE
from toast_cli.program.values import is_view, read_behind, remade_values
from toast_cli.xla import ir, splat_number
from toast_cli.xla.build import Builder


class Values:
    """The values of one program while it is written.

    Attributes:
        lowered: the program, with sums sharded as they are completed (see `completions`).
        pieces: value -> each device's piece in its final sharding. scopes: pieces in other shardings, and halo ranges
            of them.
        unused: operations to erase, in program order.
    """

    def __init__(self, source: Source, lowered: PartitionedProgram, build: Builder, devices: Devices) -> None:
        self._source, self._program = source, source.program
        self.lowered, self._completions = completions(source.program, lowered)
        self._build, self._devices = build, devices
        self._mover = Mover(build, devices)
        self.pieces: dict[int, Piece] = {}
        self.scopes = Scopes()
        self.unused: dict[Any, None] = {}
        self._remade = remade_values(self._program)
        self._held = added_up_converted(self._program, lowered)
        self._before: dict[int, list[Collective]] = {}  # value -> collectives that reshard it before loops read it
        for collective in lowered.collectives:
            if collective.reason == "reshard" and collective.edge == "before":
                self._before.setdefault(collective.value, []).append(collective)
        self._moved: dict[tuple[int, int], Piece] = {}  # (op, operand position) -> the operand, resharded so
        self._sources: dict[int, tuple[Any, list[Piece | None]]] = {}  # see `_remake`
        self._made: dict[tuple[int, Sharding], Piece] = {}  # values made from constants, in each requested sharding

    def is_remade(self, value: int) -> bool:
        """True if each use gets a copy of its own."""
        return self._remade[value] and bool(self._program.values[value].shape)

    def anywhere(self, value: int) -> Piece:
        """The piece of a value in its own sharding."""
        if self.is_remade(value) and value not in self.pieces:
            return self._remake(value, self.lowered.shardings[value])
        return self._complete_late(value) if self.pieces[value].partial else self.pieces[value]

    def operand(self, number: int, position: int) -> Piece:
        """Each device's piece of an operand in the sharding that the plan requires there."""
        op = self._program.ops[number]
        value = op.operands[position]
        wanted = self.lowered.required.get((number, position), self.lowered.shardings[value])
        if self.is_remade(value) and value not in self.pieces:
            return self._remake(value, wanted)
        piece = self._moved.get((number, position), self.pieces[value])
        if piece.partial:
            if self._stays_partial(number, value):
                return piece
            piece = self._complete_late(value)
        if piece.sharding == wanted:
            return piece
        return self._mover.to(piece, wanted, self._program.values[value].shape, self.scopes)

    def complete(self, value: int, piece: Piece, operation: Any) -> None:
        """Completes a value and reshards it to its final sharding, behind the operation that made it."""
        self.pieces[value] = piece
        target, shape = self.lowered.shardings[value], self._program.values[value].shape
        if not piece.partial and piece.sharding == target and value not in self._before:
            return
        with self._behind(piece.handle, operation):
            piece = self._mover.reduce(piece, self._completions.get(value, ()))
            if not (piece.partial and self._is_added(value)):
                piece = self._mover.to(self._mover.all_reduced(piece), target, shape)
            if value in self._held:
                piece = replace(piece, handle=self._build.barrier(piece.handle))
            self.pieces[value] = piece
            self.move_ahead(value)

    def enter_resharded(
        self, value: int, piece: Piece, uses: Iterable[tuple[int, int]], by: Iterable[Collective]
    ) -> None:
        """Adds a copy of a value for some uses, which these collectives make elsewhere."""
        self._moved.update(dict.fromkeys(uses, piece))
        self._before[value] = [c for c in self._before[value] if c not in by]

    def move_ahead(self, value: int, *, within: bool = False) -> None:
        """Writes the reshards that a plan places before the loops that read a value. within:
        the loop that carries it."""
        carrier = self._program.ops[self._program.producer[value]]
        for collective in self._before.get(value, ()):
            if carrier.name == CARRY and (collective.loop == carrier.loop) != within:
                continue
            piece = next((self._moved[use] for use in collective.uses if use in self._moved), self.pieces[value])
            if collective.after is not None and not piece.partial:
                piece = self._mover.to(piece, collective.after, self._program.values[value].shape, self.scopes)
                self._moved.update(dict.fromkeys(collective.uses, piece))

    def remake_later(self, number: int, operation: Any) -> None:
        """Defers an op whose result is made from constants alone to its readers."""
        op = self._program.ops[number]
        read = [None if self.is_remade(value) else self.operand(number, k) for k, value in enumerate(op.operands)]
        self._sources[op.results[0]] = operation, read
        self.unused[operation] = None

    def computed(self, op: Op, operation: Any, operands: list[Piece], wanted: tuple[Sharding, ...]) -> list[Piece]:
        """The op's results after its local rule."""
        site = Site(
            self._program, op, operation, operands, wanted, self._build, self._devices, self._mover, self.scopes
        )
        pieces = rule_of(op.kind)(site)
        if operands and operands[0].partial:  # see `_stays_partial`
            first = operands[0]
            return [replace(piece, partial=first.partial, reducer=first.reducer) for piece in pieces]
        return pieces

    def resharded(self, value: int, piece: Piece, wanted: Sharding) -> Piece:
        """The piece of a value in another sharding."""
        return self._mover.to(piece, wanted, self._program.values[value].shape)

    def _behind(self, handle: Any, operation: Any) -> Any:
        """New operations go after the one that made `handle`."""
        return self._build.at(ir.InsertionPoint.after(handle.owner), operation.location)

    def _is_added(self, value: int) -> bool:
        """True if the readers of a partial value take it as partial, by the plan."""
        return value in self.lowered.added or value in self.lowered.summed

    def _stays_partial(self, number: int, value: int) -> bool:
        """True if an op takes a partial operand as partial: the plan has it add up equally partial values, or view
        them."""
        op = self._program.ops[number]
        if op.results and op.results[0] in self.lowered.summed:
            return True
        if not self._is_added(value):
            return False
        pieces = [self.pieces[value] for value in op.operands if value in self.pieces]
        if op.name == ADD:
            return len(pieces) == 2 and len({(frozenset(p.partial), p.sharding, p.reducer) for p in pieces}) == 1
        return op.name != REDUCE or splat_number(pieces[-1].handle) == 0

    def _complete_late(self, value: int) -> Piece:
        """Completes a partial value that no addition has consumed."""
        piece = self.pieces[value]
        with self._behind(piece.handle, piece.handle.owner):
            piece = self._mover.all_reduced(piece)
        self.pieces[value] = piece
        return piece

    def _remake(self, value: int, wanted: Sharding) -> Piece:
        """A value made from constants alone, recomputed in this sharding at its original place.

        The first time, its operation is reused; later a copy of the original.
        """
        existing = self._made.get((value, wanted))
        if existing is not None:
            return existing
        operation, read = self._sources[value]
        number = self._program.producer[value]
        op = self._program.ops[number]
        with self._build.at(ir.InsertionPoint(operation), operation.location):
            if operation in self.unused:
                del self.unused[operation]
            else:
                operation = self._source.operations[number].clone(ip=self._build.ip).operation
            operands = []
            ranks = tuple(replicated(len(dims)) for dims in op.rule.operands)
            shardings = align(op.rule, ranks, (wanted,), self.lowered.axis_sizes).operands
            for k, operand in enumerate(op.operands):
                piece = read[k]
                if piece is None and operand not in self.pieces:
                    piece = self._remake(operand, shardings[k])
                operands.append(self.resharded(operand, self.pieces[operand], shardings[k]) if piece is None else piece)
            (piece,) = self.computed(op, operation, operands, (wanted,))
        if piece.sharding != wanted:
            with self._behind(piece.handle, operation):
                piece = self.resharded(value, piece, wanted)
        self._made[value, wanted] = piece
        return piece


# ---------------------------------------------------------------- completing sums

Completions = dict[int, list[Collective]]  # value -> the collectives that complete it, in order


def completions(
    program: Program, lowered: PartitionedProgram, alone: Collection[int] | None = None
) -> tuple[PartitionedProgram, Completions]:
    """The plan with every such sum sharded as its readers slice it, and the collectives per value.

    alone: the only values concerned; each is completed at its definition.
    """
    by_value: Completions = {}
    for collective in lowered.collectives:
        if (
            collective.reason == "partial"
            and collective.kind != ALL_GATHER
            and (alone is None or collective.value in alone)
        ):
            by_value.setdefault(collective.value, []).append(collective)
    shardings, computed, required = list(lowered.shardings), dict(lowered.computed), dict(lowered.required)
    added = dict(lowered.added)
    for value, steps in list(by_value.items()):
        place = next((k for k, step in enumerate(steps) if step.before is not None and step.after is None), None)
        cut = None if place is None else sliced_as_read(program, lowered, value, set(steps[place].axes))
        if place is None or not cut or (value not in cut and (place > 0 or alone is not None)):
            continue
        reduced = value if value in cut else min(cut)  # values are numbered in program order
        before = steps[place].before if reduced == value else lowered.shardings[reduced]
        after = cut[reduced][0]
        computed[reduced] = (steps[0].before if reduced == value else before) or after
        for seen, (sharding, uses) in cut.items():
            shardings[seen] = sharding
            for use in uses:
                results = program.ops[use[0]].results
                wanted = required.pop(use, lowered.shardings[seen])
                if wanted != sharding and not (results and results[0] in cut):  # else seen through a view
                    required[use] = wanted
        if reduced != value:
            view = value
            while view != reduced:  # each is the one user of the one before
                added[view] = reduced
                view = program.ops[users_of(program, view)[0][0]].results[0]
            del by_value[value]
        rest = [replace(step, before=after, after=after) for step in steps[place + 1 :]]
        by_value[reduced] = [*steps[:place], replace(steps[place], before=before, after=after), *rest]
    return replace(lowered, shardings=shardings, computed=computed, required=required, added=added), by_value


Uses = list[tuple[int, int]]


def sliced_as_read(
    program: Program, lowered: PartitionedProgram, value: int, axes: set[int]
) -> dict[int, tuple[Sharding, Uses]]:
    """Value -> its sharding once `axes` slice it as its readers do, and its uses; also for its views and conversions.
    The value itself is left out if it cannot be sliced before a view. Empty if such a view follows a conversion, which
    rounds."""
    sizes, views, last = lowered.axis_sizes, [], value
    while True:
        uses = users_of(program, last)
        wanted = {lowered.required.get(use, lowered.shardings[last]) for use in uses}
        if len(wanted) == 1 and axes <= axes_of(next(iter(wanted))):
            break
        op = program.ops[uses[0][0]] if len(uses) == 1 else None
        if op is None or len(op.results) != 1 or not (op.name == CONVERT or is_view(op, program)):
            return {}
        views.append(op)
        last = op.results[0]
    current, want = lowered.shardings[last], wanted.pop()
    sharding = cut_towards(current, want, axes - axes_of(current), program.values[last].shape, sizes)
    if sharding is None:
        return {}
    cut = {last: (sharding, uses)}
    while views:
        op = views.pop()
        ranks = tuple(replicated(len(dims)) for dims in op.rule.operands)
        seen = align(op.rule, ranks, (sharding,), sizes).operands[0]
        if shards(seen, sizes) != shards(sharding, sizes):
            return {} if any(view.name == CONVERT for view in (*views, op)) else cut
        sharding = seen
        cut[op.operands[0]] = sharding, users_of(program, op.operands[0])
    return cut


def cut_towards(
    current: Sharding, want: Sharding, axes: set[int], shape: tuple[int, ...], sizes: tuple[int, ...]
) -> Sharding | None:
    """The sharding of an array after slicing by further axes from which the reshard to `want` is cheapest; None if they
    split it unevenly."""
    best: tuple[float, int, Sharding] | None = None
    order = [axis for dims in want for axis in dims if axis in axes]
    for places in product(range(len(shape)), repeat=len(order)):
        trial = [list(have) for have in current]
        for axis, dim in zip(order, places, strict=True):
            trial[dim].append(axis)
        sharding = tuple(map(tuple, trial))
        if is_even(sharding, shape, sizes):
            way = [step.fraction for step, _ in route(sharding, want, sizes, shape) if step.kind != SLICE]
            best = min(best or (sum(way), len(way), sharding), (sum(way), len(way), sharding))
    return best[2] if best else None


def users_of(program: Program, value: int) -> Uses:
    """Uses of a value; for a loop's carried value, those after the loop."""
    loop = program.ops[program.producer[value]].name == CARRY
    return read_behind(program, value) if loop else program.users[value]
