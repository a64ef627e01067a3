"""The frontend's first half in one call: a path (or bytes) goes in, a normalised module comes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toast_cli.frontend.formats import read_bytes, source_name

if TYPE_CHECKING:
    from toast_cli.frontend.shardings import Kept
    from toast_cli.frontend.statements import MeshAxes
    from toast_cli.kernels.table import Table


@dataclass(frozen=True)
class LoadedModule:
    """A program read in and normalised.

    Attributes:
        path: as the user gave it. format: as `toast_cli.frontend.formats` names it.
        module: ir.Module whose one function `main` has no calls; its context is its own.
        kept: shardings the program states (empty unless requested). pins: shardings that its manual regions need.
        notices: what was changed or assumed, one sentence each.
        argument_axes: argument (by number) -> per dimension the one mesh axis that the program splits it over, or "".
        own_mesh: axes of the mesh for which it states shardings, with their sizes; one axis without a name if it names
            none; empty if it states no shardings.
    """

    path: str
    format: str
    module: Any
    kept: tuple[Kept, ...]
    pins: tuple[Kept, ...]
    notices: tuple[str, ...]
    argument_axes: dict[int, tuple[str, ...]]
    own_mesh: MeshAxes


def load_module(
    path: str, *, keep_shardings: bool = False, content: bytes | None = None, kernels: Table | None = None
) -> LoadedModule:
    """Reads, recognises, parses and normalises the program in a file (`-`: standard input), or in `content` if given.

    All of that happens in a child process, which returns the result.

    Raises `InputError` saying where and what to try.
    """
    data = read_bytes(path) if content is None else content
    from toast_cli.frontend.handover import read_normalised

    found = read_normalised(data, source_name(path), keep_shardings, kernels)
    return LoadedModule(
        path,
        found.format,
        found.module,
        found.kept,
        found.pins,
        found.notices,
        found.argument_axes,
        found.own_mesh,
    )


def parse(data: bytes, where: str) -> tuple[str, Any]:
    """The format's name and the `ir.Module` (in a context of its own) of a program of any of the formats, parsed in a
    child process first.

    Raises `InputError` at `where` (with line and column for text) with the first thing that is wrong.
    """
    from toast_cli.frontend.handover import read_parsed

    found = read_parsed(data, where)
    return found.format, found.module
