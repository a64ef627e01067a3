"""toast: decides how to split a large array program over a mesh of accelerators.

    import toast_partitioner as toast

    plan = toast.partition(jax.jit(step).lower(params, batch), mesh="v4-32")
    fast = toast.jit(step, mesh="v4-32")
    step = toast.load("sharded.mlir")

The pipeline, top to bottom, is `toast_cli.pipeline`; `toast_cli.api` has the calls above, `toast_cli.cli` the command
line. Nothing is imported before it is used. `toast_partitioner` has the same names; it is the one that users import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toast_cli.api.jit import jit as jit
    from toast_cli.api.load import Loaded as Loaded
    from toast_cli.api.load import load as load
    from toast_cli.api.plan import Plan as Plan
    from toast_cli.api.plan import partition as partition
    from toast_cli.api.plan import partition_together as partition_together
    from toast_cli.base.errors import ToastError as ToastError


__version__ = "0.1.0"
__all__ = ["Loaded", "Plan", "ToastError", "__version__", "jit", "load", "partition", "partition_together"]

_HOMES = {
    "Plan": "toast_cli.api.plan",
    "partition": "toast_cli.api.plan",
    "partition_together": "toast_cli.api.plan",
    "jit": "toast_cli.api.jit",
    "load": "toast_cli.api.load",
    "Loaded": "toast_cli.api.load",
    "ToastError": "toast_cli.base.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
