"""Reads the two programs that `toast verify` compares."""

from __future__ import annotations

from toast_cli.errors import InputError
from toast_cli.frontend.formats import read_bytes
from toast_cli.frontend.left_out import refuse_left_out
from toast_cli.frontend.loaded import parse
from toast_cli.verify.compile import Dialect


def partitioned_program(path: str, axes: dict[str, int] | None) -> tuple[bytes, Dialect, dict[str, int]]:
    """Content, form and mesh of a program that `toast partition -o` wrote.

    `axes` is the mesh of its report; without it, the program's own `sdy.mesh` is used. Raises `InputError` if there is
    neither.
    """
    from toast_cli import xla
    from toast_cli.frontend.statements import meshes_of

    content = read_bytes(path)
    kind, module = parse(content, path)
    refuse_left_out(module, path)
    if kind.startswith("hlo"):
        if axes is None:
            raise InputError(
                "HLO text does not name its mesh", where=path, hint="give the report written with it: --report FILE"
            )
        return content, "hlo", axes
    if axes is None:
        meshes = [mesh for mesh in meshes_of(module).values() if mesh]
        if not meshes:
            raise InputError("the program has no sdy.mesh", where=path, hint="verify what `toast partition -o` wrote")
        axes = dict(max(meshes, key=lambda mesh: len(dict(mesh))))
    return xla.write_bytecode(module), "stablehlo", axes


def original_bytes(path: str) -> bytes:
    """The original program as MLIR bytecode, normalised as `toast partition` does."""
    from toast_cli import xla
    from toast_cli.frontend import load

    module = load(path).module
    refuse_left_out(module, path)
    return xla.write_bytecode(module)
