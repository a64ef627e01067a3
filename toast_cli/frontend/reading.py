"""Turns a normalised module into a `Source`:
Shardy states how every op may be split, and the reader numbers ops and values.
"""

from __future__ import annotations

from typing import Any

from toast_cli import xla
from toast_cli.errors import InputError
from toast_cli.frontend.reader import read_program
from toast_cli.frontend.shardings import Kept
from toast_cli.frontend.source import Source
from toast_cli.kernels.describe import drop_descriptions
from toast_cli.printable import printable


def read_source(
    path: str, form: str, module: Any, notices: tuple[str, ...] = (), stated: tuple[Kept, ...] = ()
) -> Source:
    """The Source of a normalised module. Populates Shardy's rules, reads them and removes them again."""
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
    drop_descriptions(module)
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
