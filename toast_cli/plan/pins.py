"""Pins: shardings fixed in advance, by the program itself or by the user with `--pin`.

In: pins by axis name. Out: the same by axis number of one mesh, per value and per use.
"""

from __future__ import annotations

from math import prod

from toast_cli.errors import UsageError
from toast_cli.hardware.model import Mesh
from toast_cli.plan.op_sharding import PinnedSharding
from toast_cli.program.model import Program
from toast_cli.program.ops import RESULT
from toast_cli.program.paths import matches, nearest_paths, shown_path, slash_path
from toast_cli.program.pins import PinnedAxes, Pins
from toast_cli.program.roles import carried_results


def number_pins(
    program: Program, mesh: Mesh, user_pins: tuple[str, ...], program_pins: Pins
) -> tuple[dict[int, PinnedSharding], dict[tuple[int, int], PinnedSharding]]:
    value_pins = {v: _numbered(pin, mesh, "the program") for v, pin in program_pins.values.items()}
    use_pins = {use: _numbered(pin, mesh, "the program") for use, pin in program_pins.uses.items()}
    result_ops = [n for n, op in enumerate(program.ops) if op.name == RESULT]
    carried = carried_results(program) if user_pins else ()
    donor = {result: a.value for a, result in zip(program.arguments, carried, strict=False) if result >= 0}
    for text in user_pins:
        pattern, pin = parse_pin(text)
        matched = False
        for k, argument in enumerate(program.arguments):
            if matches(pattern, argument.label, k):
                matched = True
                name = shown_path(argument.label, k)
                value_pins[argument.value] = _fit(pin, program.values[argument.value].own_shape, mesh, text, name)
                if carried[k] >= 0:
                    use_pins[result_ops[carried[k]], 0] = value_pins[argument.value]
        for k, result in enumerate(program.results):
            if matches(pattern, result.path, k, "result"):
                matched = True
                name = f"result {slash_path(result.path) or k}"
                use_pins[result_ops[k], 0] = _fit(pin, program.values[result.value].own_shape, mesh, text, name)
                if k in donor:
                    value_pins[donor[k]] = use_pins[result_ops[k], 0]
        if not matched:
            nearest = nearest_paths(pattern, (a.label for a in program.arguments))
            raise UsageError(
                f"no argument or result matches {pattern!r}", where="--pin", hint=f"the nearest arguments are {nearest}"
            )
    return value_pins, use_pins


def unused_pins(program: Program, user_pins: tuple[str, ...]) -> tuple[str, ...]:
    """A message for each pin without effect: it leaves every dimension open, or later pins override it."""
    matched = []
    for text in user_pins:
        pattern, pin = parse_pin(text)
        arguments = {("arg", k) for k, one in enumerate(program.arguments) if matches(pattern, one.label, k)}
        results = {("result", k) for k, one in enumerate(program.results) if matches(pattern, one.path, k, "result")}
        matched.append((text, pin, arguments | results))
    notices = []
    for number, (text, pin, places) in enumerate(matched):
        later = set().union(*(others for _, _, others in matched[number + 1 :]))
        if pin and all(entry is None for entry in pin):
            notices.append(f"the pin {text!r} leaves every dimension open and decides nothing")
        elif places <= later:
            notices.append(f"the pin {text!r} decides nothing: later ones override it everywhere")
    return tuple(notices)


def parse_pin(text: str) -> tuple[str, PinnedAxes]:
    """`PATTERN=data,None,model+data` -> the pattern and per dimension its axes (None or ? leaves it to the search; ''
    or -: whole)."""
    pattern, sign, spec = text.rpartition("=")
    if not sign or not pattern:
        raise UsageError(
            f"cannot read {text!r}",
            where="--pin",
            hint="write --pin 'PATTERN=data,None': one entry per dimension, separated by commas",
        )
    dims: list[tuple[str, ...] | None] = []
    for entry in spec.split(","):
        text = entry.strip()
        dims.append(None if text == "?" else () if text in ("None", "-", "") else tuple(text.split("+")))
    return pattern, tuple(dims)


def _fit(pin: PinnedAxes, shape: tuple[int, ...], mesh: Mesh, text: str, name: str) -> PinnedSharding:
    if len(pin) > len(shape):
        raise UsageError(
            f"{text!r} has {_count(len(pin), 'entry', 'entries')} but matches {name} with "
            f"{_count(len(shape), 'dimension')}",
            where="--pin",
            hint="match fewer arrays, or give fewer entries: dimensions without one stay whole",
        )
    fitted = _numbered((*pin, *((),) * (len(shape) - len(pin))), mesh, "--pin")
    for dim, axes in enumerate(fitted):
        ways = prod(mesh.sizes[axis] for axis in axes or ())
        if shape[dim] % ways:
            raise UsageError(
                f"{text!r} splits {ways} ways, which does not divide dimension {dim} ({shape[dim]}) of {name}",
                where="--pin", hint="pin fewer axes there, or leave the dimension to toast with ?",
            )  # fmt: skip
    return fitted


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _numbered(pin: PinnedAxes, mesh: Mesh, where: str) -> PinnedSharding:
    """Axis names to axis numbers of this mesh."""
    names = mesh.names
    for axes in pin:
        for axis in axes or ():
            if axis not in names:
                raise UsageError(f"unknown mesh axis {axis!r}", where=where, hint=f"this mesh has {', '.join(names)}")
    taken = [axis for axes in pin for axis in axes or ()]
    if len(set(taken)) < len(taken):
        axis = next(axis for axis in taken if taken.count(axis) > 1)
        raise UsageError(f"mesh axis {axis!r} is given twice", where=where, hint="use each axis once per array")
    return tuple(None if axes is None else tuple(names.index(a) for a in axes) for axes in pin)
