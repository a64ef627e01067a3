"""Written programs, run on virtual devices of this process, beside the unsplit program."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

from toast_cli import xla
from toast_cli.ask_xla.compile import Dialect
from toast_cli.ask_xla.numbers import compare_here, input_sets, relative_error, result_types
from toast_cli.frontend import Source

Key = TypeVar("Key", bound=Hashable)
_MOST = 1e-4  # relative error: sums in another order, in f32


def run_program(
    program: bytes, inputs: list[Any], shapes: list[tuple[int, ...]], devices: int, *, shardy: bool
) -> list[Any]:
    """The results, of these shapes, of a program on whole inputs."""
    chosen = xla.cpu_devices(devices)
    return xla.execute(xla.compile_program(program, chosen, shardy=shardy), chosen, inputs, shapes)


def wrong_in(source: Source, written: bytes, devices: int, form: Dialect = "stablehlo") -> list[int]:
    """Numbers of the results of a written program that are not those of the program itself."""
    errors = compare_here(xla.write_bytecode(source.module), written, devices, 0, form, 600.0)
    return [k for k, error in enumerate(errors) if error.wrong]


def differing(source: Source, programs: dict[Key, bytes], devices: int) -> dict[Key, list[int]]:
    """Of programs that are all meant to do what `source` does: the numbers of the results that differ, where any do."""
    module = source.module
    (inputs,) = input_sets(module, 0, 1)
    shapes = [shape for shape, _ in result_types(module)]
    expected = run_program(xla.write_bytecode(module), inputs, shapes, 1, shardy=True)
    found = {key: run_program(program, inputs, shapes, devices, shardy=True) for key, program in programs.items()}
    return {
        key: wrong
        for key, results in found.items()
        if (
            wrong := [k for k, (a, b) in enumerate(zip(expected, results, strict=True)) if relative_error(a, b) > _MOST]
        )
    }
