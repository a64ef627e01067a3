"""The public API of toast under the name of its distribution.

    import toast_partitioner as toast

    plan = toast.partition(jax.jit(step).lower(params, batch), mesh="v4-32")
    fast = toast.jit(step, mesh="v4-32")
    step = toast.load("sharded.mlir")

The names are those of `toast_cli`, and each is imported when it is first used. The package is not called `toast`,
because the distribution of that name on PyPI (astrophysics) installs a package `toast`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import toast_cli

if TYPE_CHECKING:
    from toast_cli import Loaded as Loaded
    from toast_cli import Plan as Plan
    from toast_cli import ToastError as ToastError
    from toast_cli import __version__ as __version__
    from toast_cli import jit as jit
    from toast_cli import load as load
    from toast_cli import partition as partition
    from toast_cli import partition_together as partition_together

__all__ = ["Loaded", "Plan", "ToastError", "__version__", "jit", "load", "partition", "partition_together"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(toast_cli, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
