"""Processes: work that may end its process is done in a child process, and Ctrl-C is a request.

The compiler's libraries check many of their assumptions with assertions that end the process, and a hostile file can
break them. A child calls a function, and its parent gets what the function returned or raised. A child that dies, or
that uses more processor time or memory than it may, is a `ChildError` here and nothing worse.

There are two kinds of child. A fork of this process costs some milliseconds; it is made where no other thread can hold
a lock: on the command line. `outcomes` starts a new Python process: for a compiler, which may not run in a fork; for
the points of a sweep; and in programs that have started jax, say, for all that is a fork elsewhere.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, NoReturn, TypeVar

from toast_cli.base import errors
from toast_cli.base.errors import ToastError

_PROCESS = (
    "import os, sys; sys.path[:] = sys.argv[1].split(os.pathsep); from toast_cli.base.children import serve; serve()"
)
_CUT_OFF = 6  # exit status of a child that had no room for its answer
MEMORY = 3 * 2**30  # default limit of a child's memory beyond its parent's, in bytes
Answer = TypeVar("Answer")
_ABORT_REASON = re.compile(
    r"Check failed: (.*)|LLVM ERROR: (.*)|^F\d{4} (?!.*Check failed).*\] (.*)|^ERROR: (.*)", re.MULTILINE
)
_NO_ROOM = re.compile(r"out of memory|std::bad_alloc|MemoryError")  # what libraries say that end for want of it


class ChildError(Exception):
    """A child ended without an answer.

    `reason` is a sentence; `limit` names the resource limit that was too small, if that was the reason; `of_input` is
    False if only this machine, and not the child's input, can be the cause.
    """

    def __init__(self, reason: str, limit: Literal["time", "memory"] | None = None, of_input: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.limit = limit
        self.of_input = of_input


class Limits(NamedTuple):
    """What ends a child: seconds of processor time, and bytes of memory beyond what it has at first (None: limits of
    this process); whether Ctrl-C does, which reaches every process of the terminal."""

    seconds: int | None = None
    memory: int | None = None
    interrupted: bool = True


UNLIMITED = Limits()


class ChildOutcome(NamedTuple):
    """What became of a call in a child: "value" and what it returned; "told" and the type, sentence, place and hint of
    a user's error; "raised" and the type, text and traceback of another; "died" and the exit code, or minus the signal.
    """

    kind: Literal["value", "told", "raised", "died"]
    facts: Any

    @property
    def error(self) -> ToastError:
        """The user's error."""
        name, what, where, hint = self.facts
        return getattr(errors, name, ToastError)(what, where=where, hint=hint)


def in_child(function: Callable[..., Answer], *arguments: Any, seconds: int, memory: int = MEMORY) -> Answer:
    """Calls a function of a module with these arguments (plain data) in a child process and returns its result.

    `seconds` limits the child's processor time, and on Linux `memory` limits the bytes it may allocate beyond what this
    process uses. Raises the function's own `ToastError`, `ChildError`, or RuntimeError for an internal error.
    """
    limits = Limits(seconds, memory)
    with scratch() as log:
        if may_fork():
            outcome = _forked(lambda: function(*arguments), log, limits)
        else:
            (outcome,) = outcomes(function, [arguments], limits=limits, log=log)
        answer: Answer = _value(outcome, text_in(log), limits)
        return answer


def in_fork(call: Callable[[], Answer]) -> Answer:
    """Returns the result (plain data) of `call`, called in a fork of this process if forking is safe.

    A call that raises is repeated in this process, so that its error has a traceback. Raises RuntimeError if native
    code ended the fork.
    """
    if not may_fork():
        return call()
    with scratch() as log:
        try:
            outcome = _forked(call, log)
            answer: Answer = _value(outcome, text_in(log)) if outcome.kind in ("value", "died") else call()
        except ChildError as error:
            if error.of_input:
                raise RuntimeError(f"a library of XLA ended the process: {error.reason}") from None
            return call()
        return answer


def _value(outcome: ChildOutcome, log: str, limits: Limits = UNLIMITED) -> Any:
    """What the call returned; raises the error that explains why there is nothing."""
    if outcome.kind == "value":
        return outcome.facts
    if outcome.kind == "told":
        raise outcome.error
    room = ChildError(f"it took more than {(limits.memory or 0) / 2**30:,.1f} GiB of memory", "memory")
    if outcome.kind == "raised":
        if outcome.facts[0] == "MemoryError":
            raise room
        raise RuntimeError("{}: {}\n{}".format(*outcome.facts))
    if outcome.facts == -signal.SIGXCPU:
        raise ChildError(f"it took more than {limits.seconds} seconds of processor time", "time")
    if outcome.facts == -signal.SIGKILL:  # the system did it, or a person
        raise ChildError("another process, or the system, killed it", of_input=False)
    if outcome.facts == _CUT_OFF:
        raise ChildError("it had no room for its answer (a limit on the size of files, or a full disk)", of_input=False)
    raise room if _NO_ROOM.search(log) else ChildError(abort_reason(log) or "the compiler's libraries crashed on it")


def abort_reason(log: str) -> str:
    """The reason in a dead child's stderr, such as the message of a failed assertion; empty if it says none."""
    match = _ABORT_REASON.search(log)
    return next(text for text in match.groups() if text is not None).strip().rstrip(".") if match else ""


def scratch() -> IO[bytes]:
    """A file without a name, in memory where the system can do that."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("toast"), "w+b")
    from tempfile import TemporaryFile

    return TemporaryFile()


def text_in(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


# -- a child that is a fork of this process ---------------------------------------------------------------------------


def may_fork() -> bool:
    """True if no other thread can hold a lock that a forked child would wait for.

    The waiting threads of numpy's and MLIR's thread pools hold no locks.
    """
    return "jax" not in sys.modules and threading.active_count() == 1 and hasattr(os, "fork")


def _forked(call: Callable[[], Any], log: IO[bytes], limits: Limits = UNLIMITED) -> ChildOutcome:
    """Calls in a fork, whose stderr goes to `log`."""
    with scratch() as answer:
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        child = 0
        try:
            with uninterrupted(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there are other threads: see `may_fork`
                try:
                    child = os.fork()
                except OSError as error:
                    raise _not_started(error) from None
                if child == 0:
                    _be_child(call, parent, answer, log, limits)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        except BaseException:
            if child:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            raise
        answer.seek(0)
        return pickle.load(answer) if code == 0 else ChildOutcome("died", code)


def _be_child(call: Callable[[], Any], parent: int, answer: IO[bytes], log: IO[bytes], limits: Limits) -> NoReturn:
    """Calls in the fork and exits. It never returns, so the parent's cleanup is not run twice."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        faulthandler.disable()  # whoever switched it on expects a crash of the parent, not of this process
        end_with_parent(parent)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        os.dup2(log.fileno(), 2)
        _limit(limits)
        try:
            answer.write(_outcome_of(call))
            answer.flush()
            code = 0
        except OSError:
            code = _CUT_OFF
    finally:
        os._exit(code)


def _outcome_of(call: Callable[[], Any]) -> bytes:
    """The pickled `ChildOutcome` of a call in this process."""
    try:
        return pickle.dumps(ChildOutcome("value", call()))
    except ToastError as error:
        return pickle.dumps(ChildOutcome("told", (type(error).__name__, error.what, error.where, error.hint)))
    except Exception as error:
        return pickle.dumps(
            ChildOutcome("raised", (type(error).__name__, _plain(str(error)), _plain(traceback.format_exc())))
        )


def _plain(text: str) -> str:
    """The text without lone surrogates, which no file could hold."""
    return text.encode("utf-8", "backslashreplace").decode()


def _limit(limits: Limits) -> None:
    """Ends this process with SIGXCPU, and without a core file, once it has used so many more seconds of processor time;
    on Linux, lets allocations fail beyond so many more bytes."""
    if limits.seconds is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        wanted = int(used.ru_utime + used.ru_stime) + max(limits.seconds, 1)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        resource.setrlimit(resource.RLIMIT_CPU, (_least(wanted, hard), hard))
    if limits.memory is not None and sys.platform.startswith("linux"):
        status = Path("/proc/self/status").read_text()
        allocated = int(next(line for line in status.splitlines() if line.startswith("VmData:")).split()[1]) * 1024
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (_least(allocated + limits.memory, hard), hard))


def _least(wanted: int, hard: int) -> int:
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


def _not_started(error: OSError) -> ChildError:
    return ChildError(f"it could not be started ({error.strerror})", of_input=False)


# -- a child that is a new process ------------------------------------------------------------------------------------


def outcomes(
    work: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    *,
    limits: Limits = UNLIMITED,
    environment: Mapping[str, str] | None = None,
    log: IO[bytes] | None = None,
    running: set[subprocess.Popen[bytes]] | None = None,
) -> Generator[ChildOutcome, None, None]:
    """Yields the outcome of each call in one new process, up to the one in which it dies. The process ends with the
    iteration; what it prints goes to its stderr.

    Args:
        work: a function of a module, which the process imports by name, or a class, of which it makes one that it
            calls. calls: arguments of each call, plain data. log: where its stderr goes; None: to this process's.
        running: holds the process while it runs, to be killed from another thread.
    """
    command = [sys.executable, "-P", "-c", _PROCESS, os.pathsep.join(sys.path), str(os.getpid())]
    try:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment)
    except OSError as error:
        raise _not_started(error) from None
    running = set() if running is None else running
    running.add(child)
    try:
        assert child.stdin is not None and child.stdout is not None
        with suppress(BrokenPipeError), child.stdin as tasks:
            pickle.dump((work, list(calls), limits), tasks)
        for _ in calls:
            try:
                yield pickle.load(child.stdout)
            except (EOFError, pickle.UnpicklingError):
                yield ChildOutcome("died", child.wait())
                return
    finally:
        with child:
            child.kill()
        running.discard(child)


def serve() -> None:
    """In the new process: reads the calls from stdin and writes their outcomes to stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the calls say what Ctrl-C means
    end_with_parent(int(sys.argv[2]))
    request, answers = sys.stdin.buffer.read(), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    work, calls, limits = pickle.loads(request)
    signal.signal(signal.SIGINT, signal.SIG_DFL if limits.interrupted else signal.SIG_IGN)
    _limit(limits)
    work = work() if isinstance(work, type) else work
    for arguments in calls:
        content = _outcome_of(lambda arguments=arguments: work(*arguments))  # type: ignore[misc]
        sys.stderr.flush()
        answers.write(content)
        answers.flush()
    os._exit(0)  # a compiler may still be at work in another thread


# ---------------------------------------------------------------- this process
# Settings of the process itself: garbage collection, how it ends, and what happens when its parent ends.

INTERRUPTED = 130  # 128 + SIGINT
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextmanager
def without_cycle_collection() -> Iterator[None]:
    """Disables Python's cyclic garbage collector while the block runs.

    A run makes millions of small objects that all live to its end. Searching them for cycles makes big programs
    superlinear.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def leave(code: int) -> NoReturn:
    """Ends the process at once, without freeing its objects one by one."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, never there, or nobody reads it any more
            stream.flush()
    os._exit(code)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays Ctrl-C until the block is over. It protects operations that must not be left half-way: a fork, whose hooks
    print exceptions and go on, and loading native modules, which end the process if one of their imports fails.

    This replaces the signal handler instead of masking the signal: with a mask, another thread would receive the
    signal, and Python would run the handler in this thread all the same.
    """
    handler = signal.getsignal(signal.SIGINT)
    pressed: list[int] = []
    try:
        signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    except ValueError:  # not the main thread, which alone is interrupted
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pressed:
            signal.raise_signal(signal.SIGINT)


def interrupt_at_once(*_: object) -> NoReturn:
    """Ctrl-C handler while the command is being loaded, when there is no state to clean up."""
    with suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def open_standard_streams() -> None:
    """Opens the descriptors 0, 1 and 2 if the parent process has closed them.

    Otherwise the next file that is opened would get one of these numbers and be written to as if it were the terminal.
    Reading from a closed stdin and writing to a closed stdout fail, as they should; output to a closed stderr is
    discarded.
    """
    for descriptor, flags in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, flags)  # gets the lowest number that is free
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def end_with_parent(parent: int | None = None) -> None:
    """Asks the system to kill this process when the thread that started it ends.

    `parent` is the parent's process id, if it is known; if the parent has changed already, this process ends at once.
    It does nothing outside Linux.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:  # it ended before the line above
        os._exit(1)


# ---------------------------------------------------------------- interrupts
# Ctrl-C as a request: the first asks the search to end with its best plan, the second ends the program.


class InterruptRequest:
    """A signal handler.

    `asked`: whether Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, *_: object) -> None:
        if self.asked:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def interruptible() -> Iterator[InterruptRequest]:
    """Makes Ctrl-C set `InterruptRequest.asked` while the block runs. Nested blocks share the outer request. Outside
    the main thread, which alone receives signals, the flag is never set."""
    before = signal.getsignal(signal.SIGINT)
    if isinstance(before, InterruptRequest):
        yield before
        return
    stop = InterruptRequest()
    try:
        signal.signal(signal.SIGINT, stop)
    except ValueError:  # not the main thread
        yield stop
        return
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
