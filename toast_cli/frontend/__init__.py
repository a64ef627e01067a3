"""The frontend: reads a program file.

Enters: a path, or `-`. Leaves: a `Source`: one normalised MLIR module and the `Program` read from it.
"""

from toast_cli.frontend.loading import load, stated_pins
from toast_cli.frontend.parted import with_parts
from toast_cli.frontend.reordered import NewOrder, with_order
from toast_cli.frontend.source import Source, Use

__all__ = [
    "NewOrder",
    "Source",
    "Use",
    "load",
    "stated_pins",
    "with_order",
    "with_parts",
]
