"""The frontend from end to end: bytes, module, normalised module, rules, Program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toast_cli import xla
from toast_cli.errors import InputError
from toast_cli.frontend.constraints import check_manual_axes, constraints_on
from toast_cli.frontend.loaded import load_module
from toast_cli.frontend.reader import read_program
from toast_cli.frontend.shardings import Kept
from toast_cli.frontend.source import Source
from toast_cli.printable import printable
from toast_cli.program.pins import NO_PINS, Pins


def load(path: str, *, keep_shardings: bool = False, content: bytes | None = None) -> Source:
    """Reads a program in any known format: the file's, or `content`, which `path` then only names.

    Raises `InputError` with place and hint when that is not possible.
    """
    loaded = load_module(path, keep_shardings=keep_shardings, content=content)
    source = read_source(path, loaded.format, loaded.module, loaded.notices, (*loaded.pins, *loaded.kept))
    return with_stated_axes(source, loaded.argument_axes)


def with_stated_axes(source: Source, axes: dict[int, tuple[str, ...]]) -> Source:
    """The source with the mesh axes that the program states for its arguments; they name dimensions that nothing else names."""
    if not axes:
        return source
    arguments = tuple(
        replace(argument, stated_axes=axes.get(number, ())) for number, argument in enumerate(source.program.arguments)
    )
    return replace(source, program=replace(source.program, arguments=arguments))


def read_source(
    path: str, form: str, module: Any, notices: tuple[str, ...] = (), stated: tuple[Kept, ...] = ()
) -> Source:
    """The Source of a normalised module; populates Shardy's rules and takes them off again."""
    xla.run_passes(module, "func.func(sdy-populate-op-sharding-rules)")
    function = next((op for op in module.body.operations if op.operation.name == "func.func"), None)
    if function is None:
        raise InputError("the module has no function", where=path, hint="save the module that jax.jit(f).lower() gives")
    try:
        program, reader = read_program(function, printable(xla.module_name(module)))
    except InputError as error:
        place = f"{path}: {error.where}" if error.where and not error.where.startswith(path) else error.where or path
        raise InputError(error.what, where=place, hint=error.hint) from None
    if not program.ops:
        raise InputError("the program computes nothing", where=path, hint="save a function that returns something")
    xla.remove_sharding_rules(module)
    return Source(
        path,
        form,
        module,
        program,
        reader.definitions,
        reader.operations,
        reader.uses,
        stated,
        notices + tuple(reader.notices),
    )


def stated_pins(source: Source, axis_names: tuple[str, ...], axis_sizes: tuple[int, ...]) -> Pins:
    """What the program insists on, in axes of the mesh chosen.

    Raises `InputError` when a manual region or a kept sharding was written for another mesh.
    """
    if not source.stated:
        return NO_PINS
    check_manual_axes(source.module, axis_names, axis_sizes, source.path)
    constraints, notices = constraints_on(source.stated, axis_names, axis_sizes)
    numbers = {handle: number for number, handle in enumerate(source.definitions)}
    places = _places(source)
    pins = Pins(notices=tuple(notices))
    for constraint in constraints:
        if constraint.uses:
            pins.uses.update({places[use]: constraint.axes for use in constraint.uses if use in places})
        elif constraint.value in numbers:
            pins.values.setdefault(numbers[constraint.value], constraint.axes)
    return pins


def _places(source: Source) -> dict[tuple[Any, int], tuple[int, int]]:
    """(operation, operand number) in the module -> (op number, operand position) in the program."""
    places = {}
    for number, op in enumerate(source.program.ops):
        for position in range(len(op.operands)):
            use = source.use(number, position)
            places[use.operation, use.operand] = (number, position)
    return places
