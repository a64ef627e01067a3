"""Asks XLA: what does it make of a written program, and do its numbers agree?

`compile_for` (`compile`) is the one question: a program and a target in, an `Answer` or why there is none out, from a
child process (`child`), so that a compiler that aborts is a verdict. `hlo_text`, `collectives` and `schedule` read the
answer. `verdict` compares it with what a report promises, `confirm` compiles the best plans, and `annotated` prices the
program under the shardings that it came with. `numbers` runs programs on virtual CPU devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from toast_cli.frontend import Source
from toast_cli.hardware import Mesh, Spec

if TYPE_CHECKING:
    from toast_cli.ask_xla.annotated import AsAnnotated


# Time limit of XLA's partitioner beside a search, in seconds.
SECONDS = 120.0


def begin(source: Source, spec: Spec, meshes: Sequence[Mesh], content: bytes) -> Callable[[], AsAnnotated | str | None]:
    """Starts to price the program's own shardings in the background. The returned function waits for the answer: the
    costs, the reason why they are unknown, or None if the program has no shardings for such a machine."""
    if not source.own_mesh:
        return lambda: None
    from toast_cli.ask_xla.annotated import annotated_mesh, in_background  # heavy, and few programs have shardings

    mesh = next((own_mesh for mesh in meshes if (own_mesh := annotated_mesh(source, spec, mesh)) is not None), None)
    return (lambda: None) if mesh is None else in_background(content, mesh, SECONDS)
