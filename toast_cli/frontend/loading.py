"""The frontend from end to end: bytes, module, normalised module, rules, `Program`.

Every file is parsed, normalised and given Shardy's rules in a child process first, because the compiler's libraries
end the process on some that are damaged or hostile. The child returns the normalised module as bytecode, and as plain
data what was removed from the module. Values and operations are numbered in the order of a walk of the entry function,
which is the same on both sides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, TypeVar

from toast_cli import xla
from toast_cli.base.children import MEMORY, ChildError, in_child
from toast_cli.base.errors import InputError
from toast_cli.base.files import TEXT_BYTES, read_file, text_of
from toast_cli.frontend.attributes import first_error
from toast_cli.frontend.constraints import check_manual_axes, constraints_on
from toast_cli.frontend.convert import strings_are_text
from toast_cli.frontend.formats import hint_for, parse_here, read_bytes, recognise, source_name
from toast_cli.frontend.normalise import Normalised, normalise
from toast_cli.frontend.places import TEXT, place_text, scope_parts
from toast_cli.frontend.shardings import AnnotatedSharding, Annotation
from toast_cli.frontend.source import TEXT_FORMATS, Source, read_source
from toast_cli.frontend.symbolic import Symbols, constraints_of, parse_dims, refuse_symbols, symbols_of, with_sizes
from toast_cli.frontend.trips import state_runs
from toast_cli.kernels.table import Table
from toast_cli.program.model import Program
from toast_cli.program.names import NO_PINS, Pins
from toast_cli.program.roles import views
from toast_cli.xla import ir


def load(
    path: str,
    *,
    keep_shardings: bool = False,
    content: bytes | None = None,
    kernels: str | None = None,
    runs: tuple[str, ...] = (),
    dims: Sequence[str] = (),
) -> Source:
    """Reads a program in any known format from a file, or from `content`, which `path` then only names.

    Args:
        kernels: a file that says how hand-written kernels can be split. runs: how often loops and branches run, see
            `state_runs`. dims: sizes of symbolic dimensions, `b=256`, that `content` already has (see `content_of`).

    Raises `InputError` with place and hint if that is not possible.
    """
    table = None if kernels is None else Table(text_of(read_file(kernels, TEXT_BYTES), kernels, InputError), kernels)
    loaded = load_module(path, keep_shardings=keep_shardings, content=content, kernels=table)
    state_runs(loaded.module, runs, path if loaded.format in TEXT_FORMATS else TEXT)
    source = read_source(path, loaded.format, loaded.module, loaded.notices, (*loaded.pins, *loaded.kept))
    # The mesh axes over which the program splits an argument name its dimensions that have no other name.
    axes, labels = loaded.argument_axes, first_uses(source)
    arguments = tuple(
        replace(argument, annotated_axes=axes.get(number, ()), used_in=labels.get(number, ""))
        for number, argument in enumerate(source.program.arguments)
    )
    program = replace(source.program, arguments=arguments)
    return replace(source, program=program, kernels=table, own_mesh=loaded.own_mesh, sizes=parse_dims(dims))


def first_uses(source: Source) -> dict[int, str]:
    """Argument (by number) without a name -> the module and op that read it first."""
    program = source.program
    if all(argument.path for argument in program.arguments):
        return {}
    readers: dict[int, str] = {}
    origin = views(program, [argument.value for argument in program.arguments if not argument.path])
    for number, op in enumerate(program.ops):
        for value in op.operands:
            if value in origin and origin[value] not in readers and op.results and op.results[0] not in origin:
                scopes, name = scope_parts(source.name_stack(number))
                if scopes:
                    readers[origin[value]] = "/".join(filter(None, (*scopes, name)))
    count: Counter[str] = Counter()
    labels = {}
    for number, place in sorted(readers.items()):
        count[place] += 1
        labels[number] = place if count[place] == 1 else f"{place}_{count[place]}"
    return labels


def program_pins(source: Source, axis_names: tuple[str, ...], axis_sizes: tuple[int, ...]) -> Pins:
    """Shardings that the program requires, in axes of the chosen mesh.

    Raises `InputError` when a manual region or a kept sharding was written for another mesh.
    """
    if not source.annotations:
        return NO_PINS
    check_manual_axes(source.module, axis_names, axis_sizes, source.path)
    _check_devices(source, source.program, prod(axis_sizes))
    constraints, notices = constraints_on(source.annotations, axis_names, axis_sizes)
    numbers = {handle: number for number, handle in enumerate(source.definitions)}
    places: dict[tuple[Any, int], tuple[int, int]] = {}  # operand in the module -> operand in the program
    for number, op in enumerate(source.program.ops):
        for position in range(len(op.operands)):
            use = source.use(number, position)
            places[use.operation, use.operand] = (number, position)
    pins = Pins(notices=tuple(notices))
    for constraint in constraints:
        axes = constraint.sharding.axes or ()
        if constraint.uses:
            pins.uses.update({places[use]: axes for use in constraint.uses if use in places})
        elif constraint.value in numbers:
            pins.values.setdefault(numbers[constraint.value], axes)
    return pins


def _check_devices(source: Source, program: Program, devices: int) -> None:
    """Raises `InputError` if something in a manual region names a device that the mesh does not have."""
    for op in program.ops:
        if op.region is None:
            continue
        for exchange in op.region.exchanges.values():
            unknown = next((n for group in exchange.groups for n in group if not 0 <= n < devices), None)
            if unknown is not None:
                raise InputError(
                    f"the groups of {exchange.kind} name device {unknown}; the mesh has {devices}",
                    where=place_text(exchange.place, source.text_file) or source.path,
                    hint="is the file intact?",
                )
        _check_devices(source, op.region.body, devices)


# ---------------------------------------------------------------- the child
# Reads a program in one child process: a file's content goes in, a module that is safe to work with comes out.

T = TypeVar("T")
Message = tuple[dict[str, Any], bytes]  # facts, as plain data, and the module as bytecode
Task = Callable[..., Message]
# An `Annotation` without handles: its value and uses by number.
SentSharding = tuple[tuple[int, int, int], AnnotatedSharding, list[tuple[int, int]], str]
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


def load_module(
    path: str, *, keep_shardings: bool = False, content: bytes | None = None, kernels: Table | None = None
) -> Normalised:
    """Reads, recognises, parses and normalises the program in a file (`-`: standard input), or in `content` if given.

    Raises `InputError` saying where and what to try, also when the child dies.
    """
    data = read_bytes(path) if content is None else content
    facts, module = _ask(normalised_here, data, source_name(path), keep_shardings, kernels)
    operations = xla.operations_in(xla.main_function(module)) if facts["kept"] or facts["pins"] else []

    def received(sent: SentSharding) -> Annotation:
        (number, region, position), sharding, uses, origin = sent
        holder = operations[number]
        values = holder.results if region < 0 else holder.regions[region].blocks[0].arguments
        return Annotation(values[position], sharding, tuple((operations[n], operand) for n, operand in uses), origin)

    kept, pins = (tuple(map(received, facts[name])) for name in ("kept", "pins"))
    return Normalised(module, kept, pins, facts["notices"], facts["argument_axes"], facts["own_mesh"], facts["format"])


def content_of(path: str, dims: Sequence[str], content: bytes | None = None) -> bytes:
    """The content of the file at `path`, or `content` if given; a program with symbolic dimensions gets the sizes that
    `dims` (`b=256`, …) states, and becomes MLIR bytecode.

    Raises `InputError` and `UsageError`, see `symbolic.with_sizes`.
    """
    parse_dims(dims)
    data = read_bytes(path) if content is None else content
    return xla.write_bytecode(_ask(sized_here, data, source_name(path), tuple(dims))[1]) if dims else data


def symbols_in(path: str, content: bytes) -> tuple[Symbols, list[str]]:
    """A program's symbolic dimensions with their places in its arguments, and the file's constraints; empty if
    it has none."""
    if recognise(content) != "jax.export":
        return {}, []
    facts = _ask(parsed_here, content, source_name(path))[0]
    return facts["symbols"], facts["constraints"]


def parse(data: bytes, where: str) -> tuple[str, Any]:
    """The format's name and the `ir.Module` (in a context of its own) of a program of any of the formats, as it is.

    Raises `InputError` at `where` (with line and column for text) with the first thing that is wrong.
    """
    facts, module = _ask(parsed_here, data, where)
    return facts["format"], module


def _ask(task: Task, data: bytes, where: str, *arguments: Any) -> tuple[dict[str, Any], Any]:
    """The facts and the module that a task returns in a child; a child's death becomes an `InputError`."""
    seconds, memory = BASE_SECONDS + len(data) // BYTES_PER_SECOND, MEMORY + len(data) * MEMORY_PER_BYTE
    try:
        facts, bytecode = in_child(task, data, where, *arguments, seconds=seconds, memory=memory)
    except ChildError as error:
        if not error.of_input:
            what = f"the program was not read, because of the process that reads programs: {error.reason}"
            raise InputError(what, where=where, hint=ROOM) from None
        damaged = ("the program is damaged", hint_for(recognise(data)))
        what, hint = {None: damaged, "time": TOO_LONG, "memory": TOO_LARGE}[error.limit]
        raise InputError(f"{what}: {error.reason}", where=where, hint=hint) from None
    return facts, xla.parse_module(xla.make_context(), bytecode)


# -- in the child -----------------------------------------------------------------------------------------------------


def parsed_here(data: bytes, where: str) -> Message:
    """A program's format, symbols and bytecode."""
    form, module = _located(where, lambda: parse_here(data, where))
    symbols = _located(where, lambda: symbols_of(data, module))
    facts = {"format": form, "symbols": symbols, "constraints": constraints_of(module) if symbols else []}
    return facts, xla.write_bytecode(module)


def sized_here(data: bytes, where: str, dims: tuple[str, ...]) -> Message:
    """A program with static shapes in place of symbolic ones."""
    _, module = _located(where, lambda: parse_here(data, where))
    return {}, _located(where, lambda: with_sizes(data, module, parse_dims(dims), where))


def normalised_here(data: bytes, where: str, keep_shardings: bool, kernels: Table | None) -> Message:
    """A normalised program: format, notices, shardings and bytecode.

    This also tries the parent's next steps, in which jaxlib may end the process: populating Shardy's rules, and reading
    operations if a name is not valid UTF-8.
    """
    form, module = _located(where, lambda: parse_here(data, where))
    _located(where, lambda: refuse_symbols(data, module, where))
    if b"reduce_window" in data:
        _refuse_windows_of_arrays(module, where)
    normalised = _located(where, lambda: normalise(module, where, keep_shardings, kernels))
    stated = normalised.kept or normalised.pins
    operations = xla.operations_in(xla.main_function(normalised.module)) if stated else []
    numbers = {operation: number for number, operation in enumerate(operations)}

    def sent(kept: Annotation) -> SentSharding:
        value = kept.value
        uses = [(numbers[operation], operand) for operation, operand in kept.uses]
        if not isinstance(value, ir.BlockArgument):
            return (numbers[value.owner.operation], -1, value.result_number), kept.sharding, uses, kept.origin
        holder = value.owner.owner.operation
        region = next(k for k, region in enumerate(holder.regions) if region.blocks[0] == value.owner)
        return (numbers[holder], region, value.arg_number), kept.sharding, uses, kept.origin

    facts = {
        "format": form,
        "notices": normalised.notices,
        "kept": list(map(sent, normalised.kept)),
        "pins": list(map(sent, normalised.pins)),
        "argument_axes": normalised.argument_axes,
        "own_mesh": normalised.own_mesh,
    }
    bytecode = xla.write_bytecode(normalised.module)
    if strings_are_text(bytecode):
        _located(where, lambda: xla.run_passes(normalised.module, "func.func(sdy-populate-op-sharding-rules)"))
    else:
        _located(where, lambda: read_source(where, form, normalised.module))
    return facts, bytecode


def _located(where: str, work: Callable[[], T]) -> T:
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
    for operation in xla.walk_ops(module, "stablehlo.reduce_window"):
        if any(start.type.rank for start in list(operation.operands)[len(operation.operands) // 2 :]):
            what = "a reduce_window starts at an array, not a scalar"
            raise InputError(what, where=where, hint="is the file intact?")
