"""The child process's side of reading: a file's content goes in, a message for `handover` comes out.

A damaged or hostile file may end the process that this runs in.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any, TypeVar

from toast_cli import xla
from toast_cli.errors import InputError
from toast_cli.frontend.diagnostics import first_error
from toast_cli.frontend.formats import parse_here
from toast_cli.frontend.normalise import normalise
from toast_cli.frontend.reading import read_source
from toast_cli.frontend.shardings import Kept
from toast_cli.frontend.wire import strings_are_text
from toast_cli.kernels.table import Table
from toast_cli.xla import ADVANCE, ir

SIZE = struct.Struct("<q")  # of the JSON at the head of a message
T = TypeVar("T")


def parsed_here(data: bytes, where: str) -> bytes:
    """A program's format and bytecode, serialised."""
    form, module = _told(where, lambda: parse_here(data, where))
    return _message({"format": form}, xla.write_bytecode(module))


def normalised_here(data: bytes, where: str, keep_shardings: bool, kernels: Table | None) -> bytes:
    """A normalised program, serialised: format, notices, shardings and bytecode.

    This also tries the parent's next steps, in which jaxlib may end the process: populating Shardy's rules, and reading
    operations if a name is not valid UTF-8.
    """
    form, module = _told(where, lambda: parse_here(data, where))
    if b"reduce_window" in data:
        _refuse_windows_of_arrays(module, where)
    outcome = _told(where, lambda: normalise(module, where, keep_shardings, kernels))
    numbers: dict[Any, int] = {}
    if outcome.kept or outcome.pins:
        numbers = {operation: number for number, operation in enumerate(operations_of(outcome.module))}
    facts = {
        "format": form,
        "notices": outcome.notices,
        "kept": [_sent(one, numbers) for one in outcome.kept],
        "pins": [_sent(one, numbers) for one in outcome.pins],
        "argument_axes": outcome.argument_axes,
        "own_mesh": outcome.own_mesh,
    }
    bytecode = xla.write_bytecode(outcome.module)
    if strings_are_text(bytecode):
        _told(where, lambda: xla.run_passes(outcome.module, "func.func(sdy-populate-op-sharding-rules)"))
    else:
        _told(where, lambda: read_source(where, form, outcome.module))
    return _message(facts, bytecode)


def _told(where: str, work: Callable[[], T]) -> T:
    """Calls `work` and turns jaxlib's errors into `InputError`s."""
    try:
        return work()
    except RecursionError:
        raise InputError("the program is nested too deeply", where=where, hint="is the file intact?") from None
    except (ir.MLIRError, RuntimeError) as error:
        raise InputError(first_error(error)[1], where=where, hint="is the file intact?") from None


def _refuse_windows_of_arrays(module: Any, where: str) -> None:
    """Raises `InputError` for a `reduce_window` whose initial value is not a scalar: StableHLO's verifier reads out of
    bounds there, and may end the process."""
    found: list[Any] = []

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.reduce_window":
            starts = list(operation.operands)[len(operation.operands) // 2 :]
            found.extend(start for start in starts if start.type.rank)
        return ADVANCE

    module.operation.walk(visit)
    if found:  # an exception must not be raised within a walk
        raise InputError("a reduce_window starts at an array, not a scalar", where=where, hint="is the file intact?")


def _message(facts: dict[str, Any], bytecode: bytes) -> bytes:
    head = json.dumps(facts).encode()
    return SIZE.pack(len(head)) + head + bytecode


def operations_of(module: Any) -> list[Any]:
    """The operations of the entry function, itself included, in program order."""
    found: list[Any] = []

    def visit(operation: Any) -> Any:
        found.append(operation)
        return ADVANCE

    function = next(op for op in module.body.operations if op.operation.name == "func.func")
    function.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return found


def _sent(kept: Kept, numbers: dict[Any, int]) -> dict[str, Any]:
    sharding = kept.sharding
    return {
        "value": _value_number(kept.value, numbers),
        "uses": [(numbers[operation], operand) for operation, operand in kept.uses],
        "origin": kept.origin,
        "axes": sharding.axes,
        "mesh": sharding.mesh,
        "gspmd": sharding.gspmd,
        "open": sorted(sharding.open_dims),
        "single": sharding.single_device,
    }


def _value_number(value: Any, numbers: dict[Any, int]) -> tuple[int, int, int]:
    """(operation, region, position) of a block argument; (operation, -1, position) of a result."""
    if not isinstance(value, ir.BlockArgument):
        return numbers[value.owner.operation], -1, value.result_number
    holder = value.owner.owner.operation
    region = next(k for k, one in enumerate(holder.regions) if one.blocks[0] == value.owner)
    return numbers[holder], region, value.arg_number
