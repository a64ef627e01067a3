"""A program as its own shardings split it: what the user has today, beside what toast would do.

XLA itself propagates and partitions the shardings (`with_sharding_constraint`, `in_shardings`, explicit mode,
`shard_map`), and the program of one device that it leaves is priced like any other. `price` does that; `explain` says
which constraint makes XLA communicate, and what would mend it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from toast_cli.annotated.facts import with_row
from toast_cli.frontend import Source
from toast_cli.hardware import Mesh, Spec

if TYPE_CHECKING:
    from toast_cli.annotated.price import AsAnnotated

# So long XLA's partitioner may take beside a search.
SECONDS = 120.0


def begin(source: Source, spec: Spec, meshes: Sequence[Mesh], content: bytes) -> Callable[[], AsAnnotated | str | None]:
    """Starts to find out what the program's own shardings come to; what is called for the answer: it, why it
    is not known, or None where there are none for such a machine."""
    if not source.own_mesh:
        return lambda: None
    from toast_cli.annotated.price import annotated_mesh, in_background  # heavy, and few programs have shardings

    mesh = next((found for mesh in meshes if (found := annotated_mesh(source, spec, mesh)) is not None), None)
    return (lambda: None) if mesh is None else in_background(content, mesh, SECONDS)


__all__ = ["begin", "with_row"]
