"""The frontend's first half in one call: what enters is a path (or bytes), what leaves is a normalised module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toast_cli.errors import InputError
from toast_cli.frontend.diagnostics import first_error
from toast_cli.frontend.formats import parse, read_bytes, source_name

if TYPE_CHECKING:
    from toast_cli.frontend.shardings import Kept


@dataclass(frozen=True)
class LoadedModule:
    """A program read in and normalised.

    Attributes:
        path: as the user gave it. format: as `toast_cli.frontend.formats` names it.
        module: ir.Module whose one function `main` has no calls; its context is its own.
        kept: shardings the program stated (empty unless they were asked for). pins: what its manual regions need.
        notices: what was changed or assumed, one sentence each.
    """

    path: str
    format: str
    module: Any
    kept: tuple[Kept, ...]
    pins: tuple[Kept, ...]
    notices: tuple[str, ...]


def load_module(path: str, *, keep_shardings: bool = False, content: bytes | None = None) -> LoadedModule:
    """Reads, recognises, parses and normalises the program in a file (`-`: standard input), or `content` where it is at hand.

    Raises `InputError` saying where and what to try.
    """
    data = read_bytes(path) if content is None else content
    kind, module = parse(data, source_name(path))
    from toast_cli.frontend.normalise import normalise
    from toast_cli.xla import ir

    try:
        outcome = normalise(module, source_name(path), keep_shardings)
    except (ir.MLIRError, RuntimeError) as error:  # a string that only looks like an attribute
        raise InputError(first_error(error)[1], where=source_name(path), hint="is the file intact?") from None
    return LoadedModule(path, kind, outcome.module, outcome.kept, outcome.pins, outcome.notices)
