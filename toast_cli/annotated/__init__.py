"""Prices a program under its own shardings: what the user has today, beside toast's plan.

XLA itself propagates and partitions the shardings (`with_sharding_constraint`, `in_shardings`, explicit mode,
`shard_map`), and the resulting program of one device is priced like any other. `price` does that; `explain` says which
constraint makes XLA communicate, and which constraint would avoid it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from toast_cli.annotated.facts import with_row as with_row
from toast_cli.frontend import Source
from toast_cli.hardware import Mesh, Spec

if TYPE_CHECKING:
    from toast_cli.annotated.price import AsAnnotated

# Time limit of XLA's partitioner beside a search, in seconds.
SECONDS = 120.0


def begin(source: Source, spec: Spec, meshes: Sequence[Mesh], content: bytes) -> Callable[[], AsAnnotated | str | None]:
    """Starts to price the program's own shardings in the background. The returned function waits for the answer: the
    costs, the reason why they are unknown, or None if the program has no shardings for such a machine."""
    if not source.own_mesh:
        return lambda: None
    from toast_cli.annotated.price import annotated_mesh, in_background  # heavy, and few programs have shardings

    mesh = next((found for mesh in meshes if (found := annotated_mesh(source, spec, mesh)) is not None), None)
    return (lambda: None) if mesh is None else in_background(content, mesh, SECONDS)
