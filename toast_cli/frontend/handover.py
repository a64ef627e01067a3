"""Reads a program in one child process: a file's content goes in, a module that is safe to work with comes out.

Every file is parsed, normalised and given Shardy's rules in a child first, because the compiler's libraries end the
process on some that are damaged or hostile. The child returns the normalised module as bytecode, and as JSON what was
removed from the module. Values and operations are numbered in the order of a walk of the entry function, which is the
same on both sides.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from toast_cli import xla
from toast_cli.child import MEMORY, ChildError, in_child
from toast_cli.errors import InputError
from toast_cli.frontend.formats import hint_for, recognise
from toast_cli.frontend.in_child import SIZE, operations_of
from toast_cli.frontend.shardings import Kept
from toast_cli.frontend.statements import MeshAxes, StatedSharding
from toast_cli.kernels.table import Table

# A child's limits: seconds of processor time, plus one for so many bytes of the program; and bytes of memory for each
# byte of the program, besides `MEMORY`. An intact file needs a hundredth of the time.
BASE_SECONDS = 60
BYTES_PER_SECOND = 50_000
MEMORY_PER_BYTE = 200
ROOM = "is there memory for one more Python process, and do `ulimit -u` and `ulimit -f` allow it and its answer?"
# Message and hint for a program whose child ended without an answer.
TOO_LONG = ("reading it takes too long", "write repeated layers as a loop (`jax.lax.scan`)")
TOO_LARGE = (
    "reading it takes too much memory",
    "is the file intact? Sizes of windows and constants are the likeliest to be wrong",
)


@dataclass(frozen=True)
class Received:
    """The child's result for a program; the fields are those of `LoadedModule`."""

    format: str
    module: Any
    kept: tuple[Kept, ...] = ()
    pins: tuple[Kept, ...] = ()
    notices: tuple[str, ...] = ()
    argument_axes: dict[int, tuple[str, ...]] = field(default_factory=dict)
    own_mesh: MeshAxes = ()


def read_normalised(data: bytes, where: str, keep_shardings: bool, kernels: Table | None) -> Received:
    """The normalised module of a program in any format. Raises `InputError` at `where`, also when the child dies."""
    facts, module = _ask("normalised_here", data, where, keep_shardings, kernels)
    operations = operations_of(module) if facts["kept"] or facts["pins"] else []
    kept, pins = (tuple(_received(one, operations) for one in facts[name]) for name in ("kept", "pins"))
    axes = {int(number): tuple(names) for number, names in facts["argument_axes"].items()}
    mesh = tuple((name, size) for name, size in facts["own_mesh"])
    return Received(facts["format"], module, kept, pins, tuple(facts["notices"]), axes, mesh)


def read_parsed(data: bytes, where: str) -> Received:
    """The module of a program in any format, as it is."""
    facts, module = _ask("parsed_here", data, where)
    return Received(facts["format"], module)


def _ask(task: str, data: bytes, where: str, *arguments: Any) -> tuple[dict[str, Any], Any]:
    seconds, memory = BASE_SECONDS + len(data) // BYTES_PER_SECOND, MEMORY + len(data) * MEMORY_PER_BYTE
    try:
        answer = in_child(
            f"toast_cli.frontend.in_child:{task}", data, where, *arguments, seconds=seconds, memory=memory
        )
    except ChildError as error:
        if not error.of_input:
            what = f"the program was not read, because of the process that reads programs: {error.reason}"
            raise InputError(what, where=where, hint=ROOM) from None
        damaged = ("the program is damaged", hint_for(recognise(data)))
        what, hint = {None: damaged, "time": TOO_LONG, "memory": TOO_LARGE}[error.limit]
        raise InputError(f"{what}: {error.reason}", where=where, hint=hint) from None
    (size,) = SIZE.unpack_from(answer)
    facts = json.loads(answer[SIZE.size : SIZE.size + size])
    return facts, xla.parse_module(xla.make_context(), answer[SIZE.size + size :])


def _received(facts: dict[str, Any], operations: list[Any]) -> Kept:
    axes = facts["axes"]
    sharding = StatedSharding(
        None if axes is None else tuple(None if names is None else tuple(names) for names in axes),
        tuple((name, size) for name, size in facts["mesh"]),
        facts["gspmd"],
        frozenset(facts["open"]),
        facts["single"],
    )
    uses = tuple((operations[number], operand) for number, operand in facts["uses"])
    return Kept(_value(facts["value"], operations), sharding, uses, facts["origin"])


def _value(place: tuple[int, int, int], operations: list[Any]) -> Any:
    number, region, position = place
    operation = operations[number]
    return operation.results[position] if region < 0 else operation.regions[region].blocks[0].arguments[position]
