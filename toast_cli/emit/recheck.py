"""Reads the written file again and checks that Shardy's propagation reproduces the plan.

Enters: a `Source`, the `PartitionedProgram` and `Marks` it was written with, and the bytes of the StableHLO file.
Leaves: the ops whose values have another sharding than planned, or a sentence about them for the report. If propagation
is known to reproduce the plan from these marks, it suffices to check that the file holds the same module: to propagate
a program of 20,000 ops takes several times as long.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import zip_longest
from typing import Any

from toast_cli.emit.annotate import is_added_barrier
from toast_cli.emit.marks import Marks, is_read, pinnable_values, unneeded_values
from toast_cli.emit.propagate import RESHARD, VALUES, Propagation, value_numbers, without_units
from toast_cli.emit.shardy import written
from toast_cli.errors import ToastError
from toast_cli.frontend.formats import BYTECODE
from toast_cli.frontend.source import Source
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.quantities import format_count, format_plural
from toast_cli.xla import ADVANCE, ir, make_context, parse_module

# Reading and propagating a larger file takes too long for a check that mostly succeeds.
MOST_OPS = 60_000
# Operations of a written file that the program does not have.
CONSTRAINT = "sdy.sharding_constraint"
ADDED = frozenset({"sdy.mesh", CONSTRAINT})


def check_note(
    source: Source, lowered: PartitionedProgram, marks: Marks, content: bytes, *, settled: bool = False
) -> str:
    """A note on the file for the report; empty if all shardings are as planned.

    settled: True if propagation from `marks` is known to reproduce the plan, over the module from which `content` was
    written.
    """
    if settled and reads_back(content):
        return ""
    ops = len(source.program.ops)
    if ops > MOST_OPS:
        return (
            f"the written program was not propagated again: {format_count(ops)} ops, and "
            f"{format_count(MOST_OPS)} is the limit"
        )
    try:
        found = strays(source, lowered, marks, content)
    except ir.MLIRError:
        return "the written program could not be checked: Shardy's propagation refuses it"
    except ToastError as error:
        return f"the written program could not be checked: {error.what}"
    if not found:
        return ""
    first = next(filter(None, map(source.location, found)), f"op {found[0]}")
    return f"sharding in the output differs from the plan for {format_plural(len(found), 'value')}, first at {first}"


def reads_back(content: bytes) -> bool:
    """True if a file, text or bytecode, is the module that it was written from: read and written again, it has the same
    bytes."""
    try:
        module = parse_module(make_context(), content)
    except (ir.MLIRError, RuntimeError):
        return False
    return written(module, binary=content.startswith(BYTECODE)) == content


def strays(source: Source, lowered: PartitionedProgram, marks: Marks, content: bytes) -> list[int]:
    """Ops, in program order, whose result has another propagated sharding than in `lowered`, or that read an operand in
    another one than in `marks`; once for each value.

    Raises `ToastError` for a file that holds another program, `ir.MLIRError` for one that Shardy refuses.
    """
    context = make_context()
    module = parse_module(context, content)
    with context:
        put_numbers(source, lowered, marks, module)
        found = Propagation(source, lowered).propagate(module)
    producer, sizes = source.program.producer, lowered.axis_sizes
    computed = {pin.handle: pin.shardings[0] for pin in marks.pins}
    wrong, unneeded = list[int](), unneeded_values(source)
    for value in pinnable_values(source, lowered):
        handle = source.definitions[value]
        want = without_units(computed.get(handle, lowered.shardings[value]), sizes)
        if is_read(handle, unneeded) and found.values.get(value, want) != want:
            wrong.append(producer[value])
    for k, reshard in enumerate(marks.reshards):
        if found.reshards.get(k) != without_units(reshard.sharding, sizes):
            wrong.append(reshard.edges[0][0])
    return sorted(wrong)


def put_numbers(source: Source, lowered: PartitionedProgram, marks: Marks, module: Any) -> None:
    """Numbers the operations of the file, which are the program's in the same order, and the constraints before their
    uses."""
    numbers = value_numbers(source, lowered)
    uses: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for k, reshard in enumerate(marks.reshards):
        uses[reshard.uses[0].operation].append((reshard.uses[0].operand, k))
    for ours, theirs in zip_longest(operations_in(source.module), operations_in(module)):
        if ours is None or theirs is None or ours.name != theirs.name:
            raise ToastError("its operations are not those of the program")
        behind: dict[int, Any] = {}  # operand -> result of a use's constraints numbered so far
        if ours in numbers:
            theirs.attributes[VALUES] = ir.DenseI64ArrayAttr.get(numbers[ours])
        for operand, k in reversed(uses.get(ours, ())):
            handle = theirs.operands[operand] if operand not in behind else behind[operand]
            for step in range(len(marks.reshards[k].steps)):
                owner = handle.owner
                if isinstance(owner, ir.Block) or owner.name != CONSTRAINT:
                    break
                if not step:
                    owner.attributes[RESHARD] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), k)
                handle = owner.operands[0]
            behind[operand] = handle


def operations_in(module: Any) -> list[Any]:
    """Every operation except those that toast adds, in program order."""
    found: list[Any] = []

    def visit(operation: Any) -> Any:
        if operation.name not in ADDED and not is_added_barrier(operation):
            found.append(operation)
        return ADVANCE

    module.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return found
