"""Writes the whole program on local shapes, op after op.

Enters: a `Source`, a `PartitionedProgram` and a copy of the module whose entry block has been put into a manual
region. Leaves: that block, every operation on local shapes, with every collective the plan has, where it has it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toast_cli.emit.spmd.alignment import align
from toast_cli.emit.spmd.build import Builder
from toast_cli.emit.spmd.completions import completions
from toast_cli.emit.spmd.deciding import Deciding
from toast_cli.emit.spmd.moves import Devices, Mover
from toast_cli.emit.spmd.piece import Piece, local_shape
from toast_cli.emit.spmd.rules.reducing import is_constant
from toast_cli.emit.spmd.rules.table import rule_of
from toast_cli.emit.spmd.scopes import Scopes
from toast_cli.emit.spmd.site import Site
from toast_cli.frontend.source import Source
from toast_cli.plan.partitioned import Collective, PartitionedProgram
from toast_cli.plan.sharding import Sharding, replicated
from toast_cli.program.model import Op
from toast_cli.program.ops import ADD, ARGUMENT, CARRY, REDUCE
from toast_cli.program.rematerialised import remade_values
from toast_cli.xla import ir

BARRIER = "stablehlo.optimization_barrier"
Copies = dict[tuple[int, Sharding], Piece]


class Writer:
    """Used once, on one block. deciding: of the same source, where it is there already."""

    def __init__(
        self, source: Source, lowered: PartitionedProgram, block: Any, deciding: Deciding | None = None
    ) -> None:
        self._source, self._program = source, source.program
        self._lowered, self._completions = completions(source.program, lowered)
        self._build = Builder(block.owner.context)
        self._devices = Devices(self._build, lowered.axis_sizes, block.operations[0].operation)
        self._mover = Mover(self._build, self._devices)
        self._deciding = deciding or Deciding(source)
        self._remade = remade_values(self._program)
        self._before: dict[int, list[Collective]] = {}  # value -> what moves it before loops read it
        for one in lowered.collectives:
            if one.reason == "reshard" and one.edge == "before":
                self._before.setdefault(one.value, []).append(one)
        self._moved: dict[tuple[int, int], Piece] = {}  # (op, operand position) -> the operand, moved so
        self._pieces: dict[int, Piece] = {}
        self._scopes = Scopes()  # pieces in other shardings than their values', and stretches of them
        self._sources: dict[int, tuple[Any, list[Piece | None]]] = {}  # see `_remake`
        self._made: Copies = {}  # values made from constants, in each sharding asked for
        self._loose: dict[Any, Any] = {}  # a value that is none of the program's -> its handle in the copy, whole
        self._unused: dict[Any, None] = {}  # operations to go, in program order
        self._ways_out: tuple[Sharding, ...] = ()

    def write(self, original: Any, block: Any) -> tuple[Sharding, ...]:
        """Everything in the block, which is a copy of `original`. Returns how the results lie; the block's last
        operation reads them."""
        arguments = [op for op in self._program.ops if op.name == ARGUMENT]
        operations = list(block.operations)
        self._at(self._devices.start)
        for op, handle in zip(arguments, block.arguments, strict=True):
            (value,) = op.results
            sharding = self._lowered.shardings[value]
            handle.set_type(self._type(value, sharding))
            self._pieces[value] = Piece(handle, sharding)
            self._move_ahead(value)
        self._block(original, operations)
        self._clear()
        return self._ways_out

    def enter(self, handle: Any, value: int | None, piece: Piece) -> None:
        """What a value of the original module is in the block; value: its number, None where the program has none."""
        if value is None:
            self._loose[handle] = piece.handle
        else:
            self._pieces[value] = piece

    def write_loop(self, original: Any, operation: Any, read: list[Any]) -> list[Piece]:
        """One loop, of which `operation` is a copy; what each device has of those of its results that are read."""
        self._at(operation)
        for entered in list(self._pieces):
            self._move_ahead(entered)
        self._operation(original, operation)
        self._build.ip = ir.InsertionPoint.after(operation)
        pieces = []
        for result in read:
            value = self._deciding.value_of(result)
            whole = replicated(result.type.rank)
            if value is not None and not (value not in self._pieces and result in self._loose):
                pieces.append(self._anywhere(value))
            elif result in self._loose:
                pieces.append(Piece(self._loose[result], whole))
            else:  # only what nobody needs reads it
                zero = self._build.constant(0, str(result.type.element_type))
                pieces.append(Piece(self._build.broadcast(zero, tuple(result.type.shape)), whole))
        self._clear()
        return pieces

    def _clear(self) -> None:
        for operation in reversed(self._unused):
            operation.erase()

    # -- operations -----------------------------------------------------------------------------------------------

    def _block(self, original: Any, copies: list[Any]) -> None:
        """Every operation of a block, of which `copies` are copies, but the last of an inner one, which belongs to
        whatever the block is in."""
        for old, new in zip(list(original.operations), copies, strict=True):
            self._at(new.operation)
            self._operation(old.operation, new.operation)

    def _at(self, operation: Any) -> None:
        self._build.ip, self._build.location = ir.InsertionPoint(operation), operation.location

    def _operation(self, original: Any, operation: Any) -> None:
        numbers, name = self._deciding.ops_of(original), operation.name
        if name == "stablehlo.return":
            return
        if name == "func.return":
            self._return(operation, numbers)
        elif name == "stablehlo.while" and self._deciding.runs(original):
            self._while(original, operation, numbers)
        elif name in ("stablehlo.case", "stablehlo.if") and self._deciding.runs(original):
            self._branches(original, operation, numbers)
        elif numbers and name == BARRIER:
            self._barrier(operation, numbers)
        elif numbers:
            self._plain(numbers[0], operation)
        elif self._deciding.runs(original):
            self._keep_whole(original, operation)
        else:
            self._unused[operation] = None

    def _plain(self, number: int, operation: Any) -> None:
        op = self._program.ops[number]
        if len(op.results) == 1 and self._remade[op.results[0]] and self._program.values[op.results[0]].shape:
            read = [None if self._is_remade(value) else self._operand(number, k) for k, value in enumerate(op.operands)]
            self._sources[op.results[0]] = operation, read
            self._unused[operation] = None
            return
        operands = [self._operand(number, k) for k in range(len(op.operands))]
        wanted = tuple([self._lowered.computed.get(value, self._lowered.shardings[value]) for value in op.results])
        for value, piece in zip(op.results, self._written(op, operation, operands, wanted), strict=True):
            self._settle(value, piece, operation)

    def _written(self, op: Op, operation: Any, operands: list[Piece], wanted: tuple[Sharding, ...]) -> list[Piece]:
        """The op's results once it is on local shapes."""
        site = Site(
            self._program, op, operation, operands, wanted, self._build, self._devices, self._mover, self._scopes
        )
        pieces = rule_of(op.kind)(site)
        if site.superseded:
            self._unused[operation] = None
        if operands and operands[0].partial:  # see `_goes_on`
            first = operands[0]
            return [replace(piece, partial=first.partial, reducer=first.reducer) for piece in pieces]
        return pieces

    def _keep_whole(self, original: Any, operation: Any) -> None:
        """What only says how long a loop runs is the same on all devices."""
        for k, handle in enumerate(original.operands):
            operation.operands[k] = self._whole(handle)
        for old, new in zip(original.results, operation.results, strict=True):
            self._loose[old] = new

    def _barrier(self, operation: Any, numbers: list[int]) -> None:
        """Each array passes as it lies; what nobody reads behind it is left out."""
        passing = {self._source.use(number, 0).operand: number for number in numbers}
        for position, result in enumerate(operation.results):
            number = passing.get(position)
            piece = Piece(self._devices.constant(0), ()) if number is None else self._operand(number, 0)
            operation.operands[position] = piece.handle
            result.set_type(piece.handle.type)
            if number is not None:
                (value,) = self._program.ops[number].results
                self._settle(value, Piece(result, piece.sharding), operation)

    def _return(self, operation: Any, numbers: list[int]) -> None:
        """The end of the program."""
        pieces = [self._operand(number, 0) for number in numbers]
        for number, piece in zip(numbers, pieces, strict=True):
            operation.operands[self._source.use(number, 0).operand] = piece.handle
        self._ways_out = tuple(piece.sharding for piece in pieces)

    # -- regions --------------------------------------------------------------------------------------------------

    def _while(self, original: Any, operation: Any, numbers: list[int]) -> None:
        """A loop on what each device has of what it carries."""
        carries = {self._source.use(number, 0).operand: number for number in numbers}
        passed: dict[int, tuple[int, Piece]] = {}  # position -> a value that is the same inside and outside
        loose: list[int] = []
        for k, init in enumerate(original.operands):
            value = self._deciding.value_of(init)
            if k in carries:
                handle = self._start(carries[k], init).handle
            elif self._deciding.is_passed(original, k) and value is not None:
                passed[k] = value, self._anywhere(value)
                handle = passed[k][1].handle
            elif self._deciding.is_kept(original, k):
                loose.append(k)
                handle = self._whole(init)
            else:
                handle = self._devices.constant(0)
            operation.operands[k] = handle
            for one in (operation.results[k], *(region.blocks[0].arguments[k] for region in operation.regions)):
                one.set_type(handle.type)
        outside = {value: self._pieces[value] for value, _ in passed.values() if value in self._pieces}
        for old, region in zip(original.regions, operation.regions, strict=True):
            before, block = old.blocks[0], region.blocks[0]
            for k, number in carries.items():
                self._pieces[self._carried(number)] = self._in_loop(number, block.arguments[k])
            for k, (value, piece) in passed.items():
                if value in outside:
                    self._pieces[value] = Piece(block.arguments[k], piece.sharding)
            for k in range(len(block.arguments)):
                self._loose[before.arguments[k]] = block.arguments[k]
            if region == operation.regions[1]:
                self._at(block.operations[0].operation)
                for number in carries.values():
                    self._move_ahead(self._carried(number), within=True)
            with self._scopes.within(alone=True):
                self._block(before, list(block.operations))
                self._end_of_loop(before, block, carries if region == operation.regions[1] else None, loose)
        self._pieces.update(outside)
        for k, number in carries.items():
            self._settle(self._carried(number), self._in_loop(number, operation.results[k]), operation)
        for k in loose:
            self._loose[original.results[k]] = operation.results[k]

    def _end_of_loop(self, original: Any, block: Any, carries: dict[int, int] | None, loose: list[int]) -> None:
        """What the condition (`carries` None) or the body of a loop leaves behind."""
        old, last = (b.operations[len(b.operations) - 1].operation for b in (original, block))
        self._at(last)
        for k, handle in enumerate(old.operands):
            if carries is None or k in loose:
                last.operands[k] = self._whole(handle)
            else:
                last.operands[k] = self._to_own(carries[k], 1).handle if k in carries else block.arguments[k]

    def _branches(self, original: Any, operation: Any, numbers: list[int]) -> None:
        """Each branch leaves its results as the one value that they become lies."""
        joins = {self._source.use(number, 0).operand: number for number in numbers}
        operation.operands[0] = self._whole(original.operands[0])
        for branch, (old, region) in enumerate(zip(original.regions, operation.regions, strict=True)):
            before, block = old.blocks[0], region.blocks[0]
            last = block.operations[len(block.operations) - 1].operation
            with self._scopes.within():
                self._block(before, list(block.operations))
                self._at(last)
                for k in range(len(operation.results)):
                    join = joins.get(k)
                    last.operands[k] = self._devices.constant(0) if join is None else self._to_own(join, branch).handle
        for k, result in enumerate(operation.results):
            if k not in joins:
                result.set_type(self._build.type("i32", ()))
                continue
            sharding = self._own(joins[k])
            value = self._carried(joins[k])
            result.set_type(self._type(value, sharding))
            self._pieces[value] = Piece(result, sharding)

    def _carried(self, number: int) -> int:
        """The value that a carry or join results in."""
        return self._program.ops[number].results[0]

    def _own(self, number: int) -> Sharding:
        """How a join lies, or a carry in its loop."""
        value = self._carried(number)
        return self._lowered.computed.get(value, self._lowered.shardings[value])

    def _in_loop(self, number: int, handle: Any) -> Piece:
        """What each device has of a carry while its loop runs."""
        left = self._lowered.carried.get(number)
        return Piece(handle, self._own(number), left.axes if left else ())

    def _start(self, number: int, init: Any) -> Piece:
        """What a loop starts with, `init` in the original. Where the carry is partial, one device along those axes has
        it, the others have nothing."""
        left = self._lowered.carried.get(number)
        if left is None:
            return self._to_own(number, 0)
        array, sharding = self._program.values[self._carried(number)], self._own(number)
        shape = local_shape(array.shape, sharding, self._lowered.axis_sizes)
        nothing = self._build.broadcast(self._build.constant(0, array.dtype), shape)
        if is_constant(init, 0):
            return Piece(nothing, sharding)
        piece = self._to_own(number, 0)
        return Piece(self._devices.on_first(left.axes, piece.handle, nothing), sharding)

    def _to_own(self, number: int, position: int) -> Piece:
        """Operand `position` of a carry or join, as its result lies."""
        target = self._own(number)
        if position == 1 and number in self._lowered.carried:
            return self._pieces[self._program.ops[number].operands[1]]
        piece = self._operand(number, position)
        value = self._program.ops[number].operands[position]
        return piece if piece.sharding == target else self._mover.to(piece, target, self._program.values[value].shape)

    def _whole(self, handle: Any) -> Any:
        """What a value of the original module is in the copy, whole."""
        value = self._deciding.value_of(handle)
        if value is None:
            return self._loose[handle]
        shape = self._program.values[value].shape
        return self._mover.to(self._anywhere(value), replicated(len(shape)), shape).handle

    # -- values ---------------------------------------------------------------------------------------------------

    def _type(self, value: int, sharding: Sharding) -> Any:
        array = self._program.values[value]
        return self._build.type(array.dtype, local_shape(array.shape, sharding, self._lowered.axis_sizes))

    def _is_remade(self, value: int) -> bool:
        """Whether each use gets a copy of its own."""
        return self._remade[value] and bool(self._program.values[value].shape)

    def _anywhere(self, value: int) -> Piece:
        """A value as it lies."""
        if self._is_remade(value) and value not in self._pieces:
            return self._remake(value, self._lowered.shardings[value])
        return self._complete_late(value) if self._pieces[value].partial else self._pieces[value]

    def _operand(self, number: int, position: int) -> Piece:
        """What each device has of an operand, as the plan wants it there."""
        op = self._program.ops[number]
        value = op.operands[position]
        wanted = self._lowered.required.get((number, position), self._lowered.shardings[value])
        if self._is_remade(value) and value not in self._pieces:
            return self._remake(value, wanted)
        piece = self._moved.get((number, position), self._pieces[value])
        if piece.partial:
            if self._goes_on(number, value):
                return piece
            piece = self._complete_late(value)
        return piece if piece.sharding == wanted else self._copy(value, piece, wanted)

    def _copy(self, value: int, piece: Piece, wanted: Sharding) -> Piece:
        """The piece in another sharding; one copy serves all who want it."""
        return self._mover.to(piece, wanted, self._program.values[value].shape, self._scopes)

    def _settle(self, value: int, piece: Piece, operation: Any) -> None:
        """Where the value goes on, behind the operation that made it."""
        self._pieces[value] = piece
        target, shape = self._lowered.shardings[value], self._program.values[value].shape
        if not piece.partial and piece.sharding == target and value not in self._before:
            return
        with self._behind(piece.handle, operation):
            piece = self._mover.reduce(piece, self._completions.get(value, ()))
            if not (piece.partial and self._is_added(value)):
                piece = self._mover.to(self._mover.whole(piece), target, shape)
            self._pieces[value] = piece
            self._move_ahead(value)

    def _move_ahead(self, value: int, *, within: bool = False) -> None:
        """Reshards that a plan has before the loops that read a value. within: the loop that carries it."""
        carrier = self._program.ops[self._program.producer[value]]
        for one in self._before.get(value, ()):
            if carrier.name == CARRY and (one.loop == carrier.loop) != within:
                continue
            piece = self._moved.get(one.uses[0], self._pieces[value])
            if one.after is not None and not piece.partial:
                piece = self._mover.to(piece, one.after, self._program.values[value].shape, self._scopes)
                self._moved.update(dict.fromkeys(one.uses, piece))

    def _behind(self, handle: Any, operation: Any) -> Any:
        """New operations go behind the one that made `handle`."""
        return self._build.at(ir.InsertionPoint.after(handle.owner), operation.location)

    # -- sums -----------------------------------------------------------------------------------------------------

    def _is_added(self, value: int) -> bool:
        """Whether the plan has what reads a partial value go on with it as it is."""
        return value in self._lowered.added or value in self._lowered.summed

    def _goes_on(self, number: int, value: int) -> bool:
        """Whether an op goes on with a partial operand as it is: the plan has it add up what is partial alike, or view
        it."""
        op = self._program.ops[number]
        if op.results and op.results[0] in self._lowered.summed:
            return True
        if not self._is_added(value):
            return False
        pieces = [self._pieces[value] for value in op.operands if value in self._pieces]
        if op.name == ADD:
            return len(pieces) == 2 and len({(frozenset(p.partial), p.sharding, p.reducer) for p in pieces}) == 1
        return op.name != REDUCE or is_constant(pieces[-1].handle, 0)

    def _complete_late(self, value: int) -> Piece:
        """A value that waited in vain for another to be added to it."""
        piece = self._pieces[value]
        with self._behind(piece.handle, piece.handle.owner):
            piece = self._mover.whole(piece)
        self._pieces[value] = piece
        return piece

    # -- values made from constants -------------------------------------------------------------------------------

    def _remake(self, value: int, wanted: Sharding) -> Piece:
        """A value made from constants alone, made in this sharding where it was made before.

        The first time, the operation that stands there is used; from then on a copy of the original.
        """
        found = self._made.get((value, wanted))
        if found is not None:
            return found
        operation, read = self._sources[value]
        number = self._program.producer[value]
        op = self._program.ops[number]
        with self._build.at(ir.InsertionPoint(operation), operation.location):
            if operation in self._unused:
                del self._unused[operation]
            else:
                operation = self._source.operations[number].clone(ip=self._build.ip).operation
            operands = []
            at = remade_operands(op, wanted, self._lowered.axis_sizes)
            for k, one in enumerate(op.operands):
                piece = read[k]
                operands.append(self._remade_operand(one, at[k]) if piece is None else piece)
            (piece,) = self._written(op, operation, operands, (wanted,))
        if piece.sharding != wanted:
            with self._behind(piece.handle, operation):
                piece = self._mover.to(piece, wanted, self._program.values[value].shape)
        self._made[value, wanted] = piece
        return piece

    def _remade_operand(self, value: int, wanted: Sharding) -> Piece:
        if value not in self._pieces:
            return self._remake(value, wanted)
        return self._mover.to(self._pieces[value], wanted, self._program.values[value].shape)


def remade_operands(op: Op, wanted: Sharding, sizes: tuple[int, ...]) -> tuple[Sharding, ...]:
    """How the operands of an op best lie for a result that is to lie so."""
    ranks = tuple(replicated(len(dims)) for dims in op.rule.operands)
    return align(op.rule, ranks, (wanted,), sizes).operands
