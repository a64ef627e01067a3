"""The frontend from end to end: bytes, module, normalised module, rules, Program."""

from __future__ import annotations

from typing import Any

from toast_cli import xla
from toast_cli.errors import InputError
from toast_cli.frontend.loaded import load_module
from toast_cli.frontend.reader import read_program
from toast_cli.frontend.source import Source


def load(path: str, *, keep_shardings: bool = False) -> Source:
    """Reads a program in any known format. Raises `InputError` with place and hint when that is not possible."""
    loaded = load_module(path, keep_shardings=keep_shardings)
    return read_source(path, loaded.format, loaded.module, loaded.notices)


def read_source(path: str, form: str, module: Any, notices: tuple[str, ...]) -> Source:
    """The Source of a normalised module; populates Shardy's rules and takes them off again."""
    xla.run_passes(module, "func.func(sdy-populate-op-sharding-rules)")
    function = next((op for op in module.body.operations if op.operation.name == "func.func"), None)
    if function is None:
        raise InputError("the module has no function", where=path, hint="save the module that jax.jit(f).lower() gives")
    program, reader = read_program(function, xla.module_name(module))
    xla.remove_sharding_rules(module)
    return Source(
        path, form, module, program, reader.definitions, reader.operations, reader.uses, notices + tuple(reader.notices)
    )
