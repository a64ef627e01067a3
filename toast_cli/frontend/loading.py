"""The frontend from end to end: bytes, module, normalised module, rules, Program."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

from toast_cli.errors import InputError
from toast_cli.frontend.annotations import meshes_of
from toast_cli.frontend.constraints import axes_on, check_manual_axes, constraints_on
from toast_cli.frontend.handover import load_module
from toast_cli.frontend.name_stack import scope_parts
from toast_cli.frontend.places import place_text
from toast_cli.frontend.source import Source, read_source
from toast_cli.inputs import TEXT_BYTES, read_file, text_of
from toast_cli.kernels.table import Table
from toast_cli.program.model import Program
from toast_cli.program.pins import NO_PINS, Pins
from toast_cli.program.roles import views


def load(
    path: str, *, keep_shardings: bool = False, content: bytes | None = None, kernels: str | None = None
) -> Source:
    """Reads a program in any known format from a file, or from `content`, which `path` then only names. kernels: a file
    that says how hand-written kernels can be split.

    Raises `InputError` with place and hint if that is not possible.
    """
    table = None if kernels is None else Table(text_of(read_file(kernels, TEXT_BYTES), kernels, InputError), kernels)
    loaded = load_module(path, keep_shardings=keep_shardings, content=content, kernels=table)
    source = read_source(path, loaded.format, loaded.module, loaded.notices, (*loaded.pins, *loaded.kept))
    source = with_first_uses(replace(source, kernels=table, own_mesh=loaded.own_mesh))
    return with_annotated_axes(source, loaded.argument_axes)


def with_first_uses(source: Source) -> Source:
    """Adds, for each argument without a name, the module and op that read it first."""
    program = source.program
    if all(argument.path for argument in program.arguments):
        return source
    found: dict[int, str] = {}
    origin = views(program, [argument.value for argument in program.arguments if not argument.path])
    for number, op in enumerate(program.ops):
        for value in op.operands:
            if value in origin and origin[value] not in found and op.results and op.results[0] not in origin:
                scopes, name = scope_parts(source.name_stack(number))
                if scopes:
                    found[origin[value]] = "/".join(filter(None, (*scopes, name)))
    count: Counter[str] = Counter()
    labels = {}
    for number, place in sorted(found.items()):
        count[place] += 1
        labels[number] = place if count[place] == 1 else f"{place}_{count[place]}"
    arguments = [replace(one, used_in=labels.get(number, "")) for number, one in enumerate(program.arguments)]
    return replace(source, program=replace(program, arguments=tuple(arguments)))


def with_annotated_axes(source: Source, axes: dict[int, tuple[str, ...]]) -> Source:
    """Adds the mesh axes that the program states for its arguments; they name dimensions that have no other name."""
    if not axes:
        return source
    arguments = tuple(
        replace(argument, annotated_axes=axes.get(number, ()))
        for number, argument in enumerate(source.program.arguments)
    )
    return replace(source, program=replace(source.program, arguments=arguments))


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
    places = _places(source)
    pins = Pins(notices=tuple(notices), manual=_manual_axes(source, axis_names, axis_sizes))
    for constraint in constraints:
        if constraint.uses:
            pins.uses.update({places[use]: constraint.axes for use in constraint.uses if use in places})
        elif constraint.value in numbers:
            pins.values.setdefault(numbers[constraint.value], constraint.axes)
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
                    where=place_text(exchange.place, source.frames, source.text_file) or source.path,
                    hint="is the file intact?",
                )
        _check_devices(source, op.region.body, devices)


def _manual_axes(source: Source, names: tuple[str, ...], sizes: tuple[int, ...]) -> dict[int, tuple[str, ...]]:
    """Manual region (op number) -> its manual axes, for regions on meshes without names."""
    found = {}
    meshes = meshes_of(source.module)
    for number, op in enumerate(source.program.ops):
        if op.region is not None and any(axis not in names for axis in op.region.axes):
            mesh = next((mesh for mesh in meshes.values() if {name for name, _ in mesh} >= {*op.region.axes}), ())
            over = axes_on((op.region.axes,), mesh, names, sizes)
            found[number] = names if over is None else over[0] or ()
    return found


def _places(source: Source) -> dict[tuple[Any, int], tuple[int, int]]:
    """(operation, operand number) in the module -> (op number, operand position) in the program."""
    places = {}
    for number, op in enumerate(source.program.ops):
        for position in range(len(op.operands)):
            use = source.use(number, position)
            places[use.operation, use.operand] = (number, position)
    return places
