"""Finds the arrays of a program that are in host memory.

These are arguments that the program places there, arrays moved there, and updates, loop carries, slices and views of
such arrays, until a part is moved to the device. XLA moves nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from toast_cli.program.model import Op, Program, once
from toast_cli.program.ops import BARRIER, CARRY, DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE, JOIN, SLICE

# Custom calls; `annotate_device_placement` is read as one of them.
TO_HOST, TO_DEVICE = "MoveToHost", "MoveToDevice"


def is_transfer(op: Op) -> bool:
    """Whether an op moves an array between the memories of host and device."""
    return op.detail in (TO_HOST, TO_DEVICE)


def only_moves(program: Program) -> Program:
    """The program with transfers of an array to the memory that it is in already replaced by identities."""
    there = on_host(program)
    ops = tuple(
        replace(op, name=BARRIER, detail="") if is_transfer(op) and _lies_there(op, there) else op for op in program.ops
    )
    return replace(program, ops=ops) if ops != program.ops else program


def _lies_there(op: Op, there: frozenset[int]) -> bool:
    return (op.detail == TO_HOST) == (op.operands[0] in there)


def replacing(program: Program, results: Iterable[int]) -> frozenset[int]:
    """Values that these `toast.result` ops return, directly or through identities."""
    found: set[int] = set()
    for number in results:
        value = program.ops[number].operands[0]
        found.add(value)
        while (maker := program.ops[program.producer[value]]).kind.identity:
            value = maker.operands[0]
            found.add(value)
    return frozenset(found)


@once
def moved(program: Program) -> frozenset[int]:
    """Values in device memory that are transferred from or to host memory."""
    transfers = [op for op in program.ops if is_transfer(op)]
    return frozenset((op.operands if op.detail == TO_HOST else op.results)[0] for op in transfers)


@once
def on_host(program: Program) -> frozenset[int]:
    """Values in host memory."""
    found = {argument.value for argument in program.arguments if argument.on_host}
    found |= {op.results[0] for op in program.ops if op.detail == TO_HOST}
    waiting = list(found)

    def add(value: int) -> None:
        if value not in found:
            found.add(value)
            waiting.append(value)

    while waiting:
        value = waiting.pop()
        for number, position in program.users[value]:
            op = program.ops[number]
            if _stays(op, position):
                add(op.results[0])
        maker = program.ops[program.producer[value]]
        # The initial value of an array that a loop updates there is there, too.
        if maker.name == CARRY or maker.kind.updates:
            start = maker.operands[0]
            if all(use[0] == program.producer[value] for use in program.users[start]) and not _given(program, start):
                add(start)
    return frozenset(found)


@once
def in_transit(program: Program) -> frozenset[int]:
    """Values in host memory that need no memory there: slices that are transferred straight into or from an array."""
    there, found = on_host(program), set[int]()

    def passes(value: int) -> bool:
        users = [(program.ops[number], position) for number, position in program.users[value]]
        return all(
            op.detail == TO_DEVICE
            or (op.name == DYNAMIC_UPDATE_SLICE and position == 1)
            or ((op.kind.view or op.kind.identity) and op.results[0] in found)
            for op, position in users
        )

    for op in reversed(program.ops):
        sliced = op.name in (DYNAMIC_SLICE, SLICE) or op.kind.view or op.kind.identity or op.detail == TO_HOST
        if sliced and op.results[0] in there and passes(op.results[0]):
            found.add(op.results[0])
    return frozenset(found)


def _stays(op: Op, position: int) -> bool:
    """Whether an op's result is in host memory if this operand is."""
    if op.name == DYNAMIC_UPDATE_SLICE:
        return position < 2
    if op.name in (DYNAMIC_SLICE, SLICE):
        return position == 0
    return op.name in (CARRY, JOIN) or op.kind.view or op.kind.identity


def _given(program: Program, value: int) -> bool:
    return any(argument.value == value for argument in program.arguments)
