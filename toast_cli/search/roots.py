"""The roots of a search, one after the other or each in a process of its own.

Enters: what one root does. Leaves: the result of each. What they find is the same either way; so is what is told of
their progress, but for the order.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

from toast_cli.process import end_with_parent
from toast_cli.search.interrupts import Stop
from toast_cli.search.model import SearchProgress, SearchResult

# Number of the root, whether it is to stop, whom to tell of its progress.
Root = Callable[[int, Stop, SearchProgress | None], SearchResult]
_Told = tuple[float, int, float, float]  # what `SearchProgress` takes

_POLL_SECONDS = 0.1


def one_by_one(one: Root, roots: int, stop: Stop, progress: SearchProgress | None) -> list[SearchResult]:
    """Results of the roots, in order; after a request to stop, of those that had begun."""
    results: list[SearchResult] = []
    for root in range(roots):

        def tell(best: float, evaluations: int, seconds: float, fraction: float, root: int = root) -> None:
            if progress:
                progress(best, evaluations, seconds, (root + fraction) / roots)

        results.append(one(root, stop, tell))
        if results[-1].stopped == "interrupted":
            break
    return results


def in_processes(one: Root, roots: int, stop: Stop, progress: SearchProgress | None) -> list[SearchResult]:
    """The same, each root in a forked process. A request to stop reaches them all, and each then returns its best so
    far.

    Raises RuntimeError where a process ends without a result.
    """
    context = multiprocessing.get_context("fork")  # `one` is a closure: it can be inherited, not pickled
    running: dict[Connection, tuple[int, ForkProcess]] = {}
    processes: list[ForkProcess] = []
    results: dict[int, SearchResult] = {}
    told: dict[int, _Told] = {}
    try:
        for root in range(roots):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_serve, args=(one, root, sender))
            process.start()
            sender.close()
            processes.append(process)
            running[receiver] = root, process
        while running:
            if stop.asked:
                for _, process in running.values():
                    if process.is_alive() and process.pid is not None:
                        os.kill(process.pid, signal.SIGINT)
            ready = wait(list(running), _POLL_SECONDS)
            for receiver in [it for it in running if it in ready]:
                root, process = running[receiver]
                said = _received(receiver, process)
                if isinstance(said, SearchResult):
                    results[root] = said
                    del running[receiver]
                else:
                    told[root] = said
                    _tell(progress, told, roots)
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return [results[root] for root in range(roots)]


def _received(receiver: Connection, process: ForkProcess) -> SearchResult | _Told:
    try:
        said: SearchResult | _Told = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"a search process ended with exit code {process.exitcode}") from None
    return said


def _tell(progress: SearchProgress | None, told: dict[int, _Told], roots: int) -> None:
    """Tells of all roots together."""
    if progress:
        best, evaluations, seconds, fractions = zip(*told.values(), strict=True)
        progress(min(best), sum(evaluations), max(seconds), sum(fractions) / roots)


def _serve(one: Root, root: int, sender: Connection) -> None:
    """The life of a forked process: one root, which may be asked to stop any number of times."""
    parent = multiprocessing.parent_process()
    end_with_parent(None if parent is None else parent.pid)
    stop = Stop(patient=True)
    signal.signal(signal.SIGINT, stop)

    def tell(best: float, evaluations: int, seconds: float, fraction: float) -> None:
        sender.send((best, evaluations, seconds, fraction))

    sender.send(one(root, stop, tell))
