"""Reading in one child process: what enters is a file's content, what leaves is a module that this process can work with.

Every file is parsed, normalised and given Shardy's rules in a child first, because the compiler's libraries end the process on some that are damaged
or hostile. The child hands over the outcome once: the normalised module as bytecode, and beside it as JSON what was taken out of the module.
Values and operations are numbered in the order in which a walk of the entry function meets them, which is the same on both sides.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from toast_cli.child import ChildError, in_child
from toast_cli.errors import InputError
from toast_cli.frontend.diagnostics import first_error
from toast_cli.frontend.shardings import Kept
from toast_cli.frontend.statements import Sharding
from toast_cli.frontend.wire import strings_are_text
from toast_cli.xla import ir

# A child may use this many seconds of processor time, plus one for so many bytes. An intact file needs a hundredth of it.
BASE_SECONDS = 60
BYTES_PER_SECOND = 50_000
_SIZE = struct.Struct("<q")
T = TypeVar("T")


@dataclass(frozen=True)
class Received:
    """What a child made of a program; the fields are those of `LoadedModule`."""

    format: str
    module: Any
    kept: tuple[Kept, ...] = ()
    pins: tuple[Kept, ...] = ()
    notices: tuple[str, ...] = ()
    argument_axes: dict[int, tuple[str, ...]] = field(default_factory=dict)


def read_normalised(data: bytes, where: str, keep_shardings: bool) -> Received:
    """The normalised module of a program in any format. Raises `InputError` at `where`, also when the child dies."""
    facts, module = _ask("normalised_here", data, where, keep_shardings)
    operations = _operations(module) if facts["kept"] or facts["pins"] else []
    kept, pins = (tuple(_received(one, operations) for one in facts[name]) for name in ("kept", "pins"))
    axes = {int(number): tuple(names) for number, names in facts["argument_axes"].items()}
    return Received(facts["format"], module, kept, pins, tuple(facts["notices"]), axes)


def read_parsed(data: bytes, where: str) -> Received:
    """The module of a program in any format, as it is."""
    facts, module = _ask("parsed_here", data, where)
    return Received(facts["format"], module)


def _ask(task: str, data: bytes, where: str, *arguments: Any) -> tuple[dict[str, Any], Any]:
    from toast_cli import xla
    from toast_cli.frontend.formats import hint_for, recognise

    seconds = BASE_SECONDS + len(data) // BYTES_PER_SECOND
    try:
        answer = in_child(f"toast_cli.frontend.handover:{task}", data, where, *arguments, seconds=seconds)
    except ChildError as error:
        late = error.seconds is not None
        what = f"reading it takes too long: {error.reason}" if late else f"the program is damaged: {error.reason}"
        hint = "write repeated layers as a loop (`jax.lax.scan`)" if late else hint_for(recognise(data))
        raise InputError(what, where=where, hint=hint) from None
    (size,) = _SIZE.unpack_from(answer)
    facts = json.loads(answer[_SIZE.size : _SIZE.size + size])
    return facts, xla.parse_module(xla.make_context(), answer[_SIZE.size + size :])


# -- in the child -----------------------------------------------------------------------------------------------------


def parsed_here(data: bytes, where: str) -> bytes:
    """Format and bytecode of a program."""
    from toast_cli import xla
    from toast_cli.frontend.formats import parse_here

    form, module = _told(where, lambda: parse_here(data, where))
    return _message({"format": form}, xla.write_bytecode(module))


def normalised_here(data: bytes, where: str, keep_shardings: bool) -> bytes:
    """Format, notices, shardings and bytecode of a program's normalised module.

    What the parent does next is tried out here: Shardy's rules, and, where a name is no text, on which some of jaxlib's bindings end
    the process, reading the operations too.
    """
    from toast_cli import xla
    from toast_cli.frontend.formats import parse_here
    from toast_cli.frontend.loading import read_source
    from toast_cli.frontend.normalise import normalise

    form, module = _told(where, lambda: parse_here(data, where))
    outcome = _told(where, lambda: normalise(module, where, keep_shardings))
    numbers: dict[Any, int] = {}
    if outcome.kept or outcome.pins:
        numbers = {operation: number for number, operation in enumerate(_operations(outcome.module))}
    facts = {
        "format": form,
        "notices": outcome.notices,
        "kept": [_sent(one, numbers) for one in outcome.kept],
        "pins": [_sent(one, numbers) for one in outcome.pins],
        "argument_axes": outcome.argument_axes,
    }
    bytecode = xla.write_bytecode(outcome.module)
    if strings_are_text(bytecode):
        _told(where, lambda: xla.run_passes(outcome.module, "func.func(sdy-populate-op-sharding-rules)"))
    else:
        _told(where, lambda: read_source(where, form, outcome.module))
    return _message(facts, bytecode)


def _told(where: str, work: Callable[[], T]) -> T:
    """What `work` returns, with what jaxlib complains of as an `InputError`."""
    try:
        return work()
    except RecursionError:
        raise InputError("the program is nested too deeply", where=where, hint="is the file intact?") from None
    except (ir.MLIRError, RuntimeError) as error:
        raise InputError(first_error(error)[1], where=where, hint="is the file intact?") from None


def _message(facts: dict[str, Any], bytecode: bytes) -> bytes:
    head = json.dumps(facts).encode()
    return _SIZE.pack(len(head)) + head + bytecode


# -- values and operations by number ----------------------------------------------------------------------------------


def _operations(module: Any) -> list[Any]:
    """The operations of the entry function, itself included, in program order."""
    found: list[Any] = []

    def visit(operation: Any) -> Any:
        found.append(operation)
        return ir.WalkResult.ADVANCE

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


def _received(facts: dict[str, Any], operations: list[Any]) -> Kept:
    axes = facts["axes"]
    sharding = Sharding(
        None if axes is None else tuple(None if names is None else tuple(names) for names in axes),
        tuple((name, size) for name, size in facts["mesh"]),
        facts["gspmd"],
        frozenset(facts["open"]),
        facts["single"],
    )
    uses = tuple((operations[number], operand) for number, operand in facts["uses"])
    return Kept(_value(facts["value"], operations), sharding, uses, facts["origin"])


def _value_number(value: Any, numbers: dict[Any, int]) -> tuple[int, int, int]:
    """(operation, region, position) of a block argument; (operation, -1, position) of a result."""
    if not isinstance(value, ir.BlockArgument):
        return numbers[value.owner.operation], -1, value.result_number
    holder = value.owner.owner.operation
    region = next(k for k, one in enumerate(holder.regions) if one.blocks[0] == value.owner)
    return numbers[holder], region, value.arg_number


def _value(place: tuple[int, int, int], operations: list[Any]) -> Any:
    number, region, position = place
    operation = operations[number]
    return operation.results[position] if region < 0 else operation.regions[region].blocks[0].arguments[position]
