"""The command line: arguments go in; files, a report and an exit code come out. One file per command, each thin.

Nothing here is imported before it is needed: `toast --help` loads neither jax nor numpy nor rich.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Sequence
from typing import NoReturn

from toast_cli.base.children import interrupt_at_once, leave, open_standard_streams

__all__ = ["command", "main"]


def command() -> NoReturn:
    """Entry point of the `toast` process."""
    signal.signal(signal.SIGINT, interrupt_at_once)
    open_standard_streams()
    gc.disable()  # nearly all objects live to the end, and the process then ends without freeing them
    leave(main())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `toast` with these arguments (the process's own when None).

    Returns the exit code; docs/reference/exit-codes.md lists them.
    """
    from toast_cli.cli.app import run

    return run(arguments)
