"""HiGHS in a process of its own, so that Ctrl-C reaches a run that waits for it."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from math import isfinite
from multiprocessing.connection import Connection
from typing import Any

from toast_cli.child import may_fork
from toast_cli.process import end_with_parent

_POLL_SECONDS = 0.1


def lower_bound(problem: dict[str, Any], asked: Callable[[], bool]) -> float:
    """The lower bound that HiGHS finds for an integer program; 0 where it finds none.

    HiGHS does not look at signals, so it runs in a fork, which ends when the user asks for it. Daemon workers may have
    no children, and Ctrl-C ends them as a whole; a process that runs jax must not be forked, so there Ctrl-C waits
    until the solver's time is over.

    Args:
        problem: arguments of `scipy.optimize.milp`.
    """
    if multiprocessing.current_process().daemon or not may_fork():
        return _solve(problem)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(problem, sender), daemon=True)
    process.start()
    sender.close()
    try:
        while not receiver.poll(_POLL_SECONDS):
            if asked():
                return 0.0
        return float(receiver.recv())
    except EOFError:  # it died, of memory perhaps
        return 0.0
    finally:
        process.kill()
        process.join()
        receiver.close()


def _serve(problem: dict[str, Any], sender: Connection) -> None:
    """The main function of the solver's process. It ignores Ctrl-C, which reaches every process of the terminal; the
    parent handles it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    end_with_parent(None if parent is None else parent.pid)
    sender.send(_solve(problem))


def _solve(problem: dict[str, Any]) -> float:
    from scipy.optimize import milp

    found = milp(**problem).mip_dual_bound
    return float(found) if found is not None and isfinite(found) and found > 0.0 else 0.0
