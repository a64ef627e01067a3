"""Writes a loop that carries partial sums on local shapes, op by op, with every collective of the plan in its place;
finds the operations that only say how often loops run.
"""

from __future__ import annotations

from typing import Any

from toast_cli.emit.regions.moves import Devices, Piece
from toast_cli.emit.regions.values import Values
from toast_cli.frontend.source import Source
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import Sharding, local_shape, replicated
from toast_cli.program.ops import BARRIER, WHILE
from toast_cli.xla import ir, splat_number, terminator, walk_ops
from toast_cli.xla.build import Builder


class Writer:
    """Writes the loop in one block; used once. module_ops: of the same source. values: those of the block."""

    def __init__(self, source: Source, lowered: PartitionedProgram, block: Any, module_ops: ModuleOps) -> None:
        self._source, self._program = source, source.program
        self._build = Builder(block.owner.context)
        self._devices = Devices(self._build, lowered.axis_sizes, block.operations[0].operation)
        self.values = Values(source, lowered, self._build, self._devices)
        self._lowered = self.values.lowered
        self._module_ops = module_ops
        self._loose: dict[Any, Any] = {}  # a value that the program does not have -> its handle in the copy, replicated

    def enter(self, handle: Any, value: int | None, piece: Piece) -> None:
        """Maps a value of the original module to its piece in the block; value: its number, None if the program has
        none."""
        if value is None:
            self._loose[handle] = piece.handle
        else:
            self.values.pieces[value] = piece

    def write_loop(self, original: Any, operation: Any, read: list[Any]) -> list[Piece]:
        """Writes one loop, of which `operation` is a copy; returns each device's pieces of the
        results that are read."""
        self._at(operation)
        for entered in list(self.values.pieces):
            self.values.move_ahead(entered)
        self._operation(original, operation)
        self._build.ip = ir.InsertionPoint.after(operation)
        pieces = []
        for result in read:
            value = self._module_ops.value_of(result)
            everywhere = replicated(result.type.rank)
            if value is not None and not (value not in self.values.pieces and result in self._loose):
                pieces.append(self.values.anywhere(value))
            elif result in self._loose:
                pieces.append(Piece(self._loose[result], everywhere))
            else:  # it has only unneeded readers
                zero = self._build.constant(0, str(result.type.element_type))
                pieces.append(Piece(self._build.broadcast(zero, tuple(result.type.shape)), everywhere))
        for unused in reversed(self.values.unused):
            unused.erase()
        return pieces

    # -- operations -----------------------------------------------------------------------------------------------

    def _block(self, original: Any, copies: list[Any]) -> None:
        """Writes every operation of a block, of which `copies` are copies, except the terminator of an inner block,
        which the enclosing operation's method writes."""
        for old, new in zip(list(original.operations), copies, strict=True):
            self._at(new.operation)
            self._operation(old.operation, new.operation)

    def _at(self, operation: Any) -> None:
        self._build.ip, self._build.location = ir.InsertionPoint(operation), operation.location

    def _operation(self, original: Any, operation: Any) -> None:
        numbers, name = self._module_ops.ops_of(original), operation.name
        if name == "stablehlo.return":
            return
        if name == WHILE and self._module_ops.runs(original):
            self._while(original, operation, numbers)
        elif name in ("stablehlo.case", "stablehlo.if") and self._module_ops.runs(original):
            self._branches(original, operation, numbers)
        elif numbers and name == BARRIER:
            self._barrier(operation, numbers)
        elif numbers:
            self._plain(numbers[0], operation)
        elif self._module_ops.runs(original):
            # It only determines trip counts, and is replicated.
            for k, handle in enumerate(original.operands):
                operation.operands[k] = self._whole(handle)
            self._loose.update(zip(original.results, operation.results, strict=True))
        else:
            self.values.unused[operation] = None

    def _plain(self, number: int, operation: Any) -> None:
        op = self._program.ops[number]
        if len(op.results) == 1 and self.values.is_remade(op.results[0]):
            self.values.remake_later(number, operation)
            return
        operands = [self.values.operand(number, k) for k in range(len(op.operands))]
        wanted = tuple([self._lowered.computed.get(value, self._lowered.shardings[value]) for value in op.results])
        for value, piece in zip(op.results, self.values.computed(op, operation, operands, wanted), strict=True):
            self.values.complete(value, piece, operation)

    def _barrier(self, operation: Any, numbers: list[int]) -> None:
        """Writes a barrier on local arrays; unread results are left out."""
        passing = {self._source.use(number, 0).operand: number for number in numbers}
        for position, result in enumerate(operation.results):
            number = passing.get(position)
            piece = Piece(self._devices.constant(0), ()) if number is None else self.values.operand(number, 0)
            operation.operands[position] = piece.handle
            result.set_type(piece.handle.type)
            if number is not None:
                (value,) = self._program.ops[number].results
                self.values.complete(value, Piece(result, piece.sharding), operation)

    # -- regions --------------------------------------------------------------------------------------------------

    def _while(self, original: Any, operation: Any, numbers: list[int]) -> None:
        """Writes a loop with local carried values."""
        carries = {self._source.use(number, 0).operand: number for number in numbers}
        passed: dict[int, tuple[int, Piece]] = {}  # position -> a loop-invariant value
        loose: list[int] = []
        body = original.regions[1].blocks[0]
        ends = terminator(body).operands
        for k, init in enumerate(original.operands):
            value = self._module_ops.value_of(init)
            if k in carries:
                handle = self._start(carries[k], init).handle
            elif ends[k] == body.arguments[k] and value is not None:
                passed[k] = value, self.values.anywhere(value)
                handle = passed[k][1].handle
            elif (original, k) in self._module_ops.kept:
                loose.append(k)
                handle = self._whole(init)
            else:
                handle = self._devices.constant(0)
            operation.operands[k] = handle
            for local in (operation.results[k], *(region.blocks[0].arguments[k] for region in operation.regions)):
                local.set_type(handle.type)
        outside = {value: self.values.pieces[value] for value, _ in passed.values() if value in self.values.pieces}
        for old, region in zip(original.regions, operation.regions, strict=True):
            before, block = old.blocks[0], region.blocks[0]
            copies = list(block.operations)
            for k, number in carries.items():
                self.values.pieces[self._carried(number)] = self._in_loop(number, block.arguments[k])
            for k, (value, piece) in passed.items():
                if value in outside:
                    self.values.pieces[value] = Piece(block.arguments[k], piece.sharding)
            for k in range(len(block.arguments)):
                self._loose[before.arguments[k]] = block.arguments[k]
            with self.values.scopes.within(alone=True):
                if region == operation.regions[1]:
                    self._at(copies[0].operation)
                    for number in carries.values():
                        self.values.move_ahead(self._carried(number), within=True)
                self._block(before, copies)
                self._end_of_loop(before, block, carries if region == operation.regions[1] else None, loose)
        self.values.pieces.update(outside)
        for k, number in carries.items():
            self.values.complete(self._carried(number), self._in_loop(number, operation.results[k]), operation)
        for k in loose:
            self._loose[original.results[k]] = operation.results[k]

    def _end_of_loop(self, original: Any, block: Any, carries: dict[int, int] | None, loose: list[int]) -> None:
        """Writes the terminator of a loop's condition (`carries` None) or body."""
        old, last = map(terminator, (original, block))
        self._at(last)
        for k, handle in enumerate(old.operands):
            if carries is None or k in loose:
                last.operands[k] = self._whole(handle)
            else:
                last.operands[k] = self._to_own(carries[k], 1).handle if k in carries else block.arguments[k]

    def _branches(self, original: Any, operation: Any, numbers: list[int]) -> None:
        """Writes a conditional; each branch reshards its results to the conditional's shardings."""
        joins = {self._source.use(number, 0).operand: number for number in numbers}
        operation.operands[0] = self._whole(original.operands[0])
        for branch, (old, region) in enumerate(zip(original.regions, operation.regions, strict=True)):
            before, block = old.blocks[0], region.blocks[0]
            last = terminator(block)
            with self.values.scopes.within():
                self._block(before, list(block.operations))
                self._at(last)
                for k in range(len(operation.results)):
                    join = joins.get(k)
                    last.operands[k] = self._devices.constant(0) if join is None else self._to_own(join, branch).handle
        for k, result in enumerate(operation.results):
            if k not in joins:
                result.set_type(self._build.type("i32", ()))
                continue
            sharding, value = self._own(joins[k]), self._carried(joins[k])
            array = self._program.values[value]
            shape = local_shape(array.shape, sharding, self._lowered.axis_sizes)
            result.set_type(self._build.type(array.dtype, shape))
            self.values.pieces[value] = Piece(result, sharding)

    def _carried(self, number: int) -> int:
        """The value that is the result of a carry or join."""
        return self._program.ops[number].results[0]

    def _own(self, number: int) -> Sharding:
        """The sharding of a join, or of a carry in its loop."""
        value = self._carried(number)
        return self._lowered.computed.get(value, self._lowered.shardings[value])

    def _in_loop(self, number: int, handle: Any) -> Piece:
        """Each device's piece of a carry while its loop runs."""
        left = self._lowered.carried.get(number)
        return Piece(handle, self._own(number), left.axes if left else ())

    def _start(self, number: int, init: Any) -> Piece:
        """The initial value of a carry, `init` in the original. If the carry is partial, one device along those axes
        has it, and the others have zeros."""
        left = self._lowered.carried.get(number)
        if left is None:
            return self._to_own(number, 0)
        array, sharding = self._program.values[self._carried(number)], self._own(number)
        shape = local_shape(array.shape, sharding, self._lowered.axis_sizes)
        nothing = self._build.broadcast(self._build.constant(0, array.dtype), shape)
        if splat_number(init) == 0:
            return Piece(nothing, sharding)
        piece = self._to_own(number, 0)
        return Piece(self._devices.on_first(left.axes, piece.handle, nothing), sharding)

    def _to_own(self, number: int, position: int) -> Piece:
        """Operand `position` of a carry or join, in its result's sharding."""
        target = self._own(number)
        if position == 1 and number in self._lowered.carried:
            return self.values.pieces[self._program.ops[number].operands[1]]
        piece = self.values.operand(number, position)
        value = self._program.ops[number].operands[position]
        return piece if piece.sharding == target else self.values.resharded(value, piece, target)

    def _whole(self, handle: Any) -> Any:
        """The replicated value in the copy of a value of the original module."""
        value = self._module_ops.value_of(handle)
        if value is None:
            return self._loose[handle]
        rank = len(self._program.values[value].shape)
        return self.values.resharded(value, self.values.anywhere(value), replicated(rank)).handle


# ---------------------------------------------------------------- operations for trip counts
# A `Program` knows trip counts and omits values that nothing else needs, such as a loop's counter; a written program
# needs them.


class ModuleOps:
    """Answers questions about the operations and values of the module in `source`, as long as its operands do not
    change. kept: (loop, position) of the values that a loop must carry though the program does not have them."""

    def __init__(self, source: Source) -> None:
        producer = source.program.producer
        self._numbers: dict[Any, list[int]] = {}
        for number, operation in enumerate(source.operations):
            self._numbers.setdefault(operation, []).append(number)
        self._values = {handle: value for handle, value in source.numbers.items() if producer[value] >= 0}
        self.kept: set[tuple[Any, int]] = set()
        self._running: set[Any] = set()
        self._loops = walk_ops(source.module.operation, WHILE)
        self._find(source)

    def ops_of(self, operation: Any) -> list[int]:
        """Numbers of the program's ops that an operation stands for."""
        return self._numbers.get(operation, [])

    def value_of(self, handle: Any) -> int | None:
        """The program's value number of a value of the module; None if it only determines trip counts, or nothing needs
        it."""
        return self._values.get(handle)

    def runs(self, operation: Any) -> bool:
        """True if a written program has the operation."""
        return operation in self._numbers or operation in self._running

    def _find(self, source: Source) -> None:
        """Finds everything that the conditions of needed loops depend on."""
        waiting = [terminator(loop.regions[0].blocks[0]).operands[0] for loop in self._loops if loop in self._numbers]
        seen: set[Any] = set()
        while waiting:
            handle = waiting.pop()
            if handle in seen or handle in self._values:
                continue
            seen.add(handle)
            owner = handle.owner
            if isinstance(handle, ir.BlockArgument):
                waiting += self._carried(owner.owner.operation, handle.arg_number)
                continue
            operation = owner.operation
            if operation.name == WHILE:
                waiting += self._carried(operation, handle.result_number)
            else:
                self._running.add(operation)
                waiting += list(operation.operands)

    def _carried(self, loop: Any, position: int) -> list[Any]:
        """The values that a loop's carried value depends on; marks the loop as needed."""
        self._running.add(loop)
        self.kept.add((loop, position))
        condition, body = (region.blocks[0] for region in loop.regions)
        return [
            loop.operands[position],
            terminator(body).operands[position],
            terminator(condition).operands[0],
        ]
