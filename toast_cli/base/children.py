"""Processes: work that may end its process is done in a child process, and Ctrl-C is a request.

The compiler's libraries check many of their assumptions with assertions that end the process, and a hostile file can
break them. `in_child` calls a function by its name in a child and returns what the function returned. A child that
dies, or that uses more processor time or memory than it may, is a `ChildError` here and nothing worse.

The child is a fork of this process, which costs some milliseconds, where no other thread can hold a lock: on the
command line. Elsewhere (in a program that has started jax, say) the child is a fork of a helper process, which is
started once and ends with this process.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import pickle
import re
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Literal, NoReturn, TypeVar, cast

from toast_cli import errors
from toast_cli.errors import ToastError

_HELPER = "import sys; sys.path.insert(0, sys.argv[1]); from toast_cli.base.children import serve; serve()"
# Exit statuses of a child: an answer, a user's error, an internal error, no memory or file for the answer.
_ANSWER, _TOLD, _RAISED, _FULL, _CUT_OFF = 0, 3, 4, 5, 6
MEMORY = 3 * 2**30  # default limit of a child's memory beyond its parent's, in bytes
Answer = TypeVar("Answer")
_ABORT_REASON = re.compile(r"Check failed: (.*)|LLVM ERROR: (.*)|ERROR: (.*)")
_NO_ROOM = re.compile(rb"out of memory|std::bad_alloc|MemoryError")  # what libraries say that end for want of it
_HEAD = struct.Struct("<qqq")  # wait status, bytes of the answer, bytes of its stderr
_POLL_MILLISECONDS = 200


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


@dataclass(frozen=True)
class _Request:
    """A child's task and its limits: seconds of processor time, bytes of memory (None: the limits of this process).

    task: a function, or, for a helper process, its name.
    """

    task: str | Callable[..., bytes]
    arguments: tuple[Any, ...] = ()
    seconds: int | None = None
    memory: int | None = None


@dataclass(frozen=True)
class _Ended:
    """The result of a child: the status from `os.waitpid`, its answer, and its stderr."""

    status: int
    answer: bytes
    log: bytes


def in_child(task: str, *arguments: Any, seconds: int, memory: int = MEMORY) -> bytes:
    """Calls the function `task` ("package.module:function") with these arguments (plain data) in a child process and
    returns its result.

    `seconds` limits the child's processor time, and on Linux `memory` limits the bytes it may allocate beyond what this
    process uses. Raises the function's own `ToastError`, `ChildError`, or RuntimeError for an internal error.
    """
    request = _Request(task, arguments, seconds, memory)
    return _answer(_forked(request) if may_fork() else _Helper.current().run(request), seconds, memory)


def in_fork(call: Callable[[], Answer]) -> Answer:
    """Returns the result (plain data) of `call`, called in a fork of this process if forking is safe.

    A call that raises is repeated in this process, so that its error has a traceback. Raises RuntimeError if native
    code ended the fork.
    """
    if not may_fork():
        return call()

    def pickled() -> bytes:
        try:
            return pickle.dumps((call(),))
        except Exception:
            return b""

    try:
        answer = _answer(_forked(_Request(pickled)), 0, 0)
    except ChildError as error:
        if error.of_input:
            raise RuntimeError(f"a library of XLA ended the process: {error.reason}") from None
        answer = b""
    return cast("Answer", pickle.loads(answer)[0]) if answer else call()


def _answer(ended: _Ended, seconds: int, memory: int) -> bytes:
    """The child's answer; raises the error that explains a missing answer."""
    if os.WIFSIGNALED(ended.status):
        if os.WTERMSIG(ended.status) == signal.SIGXCPU:
            raise ChildError(f"it took more than {seconds} seconds of processor time", "time")
        if os.WTERMSIG(ended.status) == signal.SIGKILL:  # the system did it, or a person
            raise ChildError("another process, or the system, killed it", of_input=False)
        if _NO_ROOM.search(ended.log):
            raise _no_room(memory)
        raise ChildError(_abort_reason(ended.log))
    code = os.WEXITSTATUS(ended.status)
    if code == _ANSWER:
        return ended.answer
    if code == _TOLD:
        facts = json.loads(ended.answer)
        raise getattr(errors, facts["kind"], ToastError)(facts["what"], where=facts["where"], hint=facts["hint"])
    if code == _RAISED:
        raise RuntimeError(ended.answer.decode("utf-8", "replace"))
    if code == _CUT_OFF:
        raise ChildError("it had no room for its answer (a limit on the size of files, or a full disk)", of_input=False)
    if code == _FULL or _NO_ROOM.search(ended.log):
        raise _no_room(memory)
    raise ChildError(_abort_reason(ended.log))


def _no_room(memory: int) -> ChildError:
    return ChildError(f"it took more than {memory / 2**30:,.1f} GiB of memory", "memory")


def _abort_reason(log: bytes) -> str:
    """The reason in a dead child's stderr, such as the message of a failed assertion."""
    for line in log.decode("utf-8", "replace").splitlines():
        found = _ABORT_REASON.search(line)
        if found:
            return next((text for text in found.groups() if text), "").strip().rstrip(".")
    return "the compiler's libraries crashed on it"


# -- a child that is a fork of this process ---------------------------------------------------------------------------


def may_fork() -> bool:
    """True if no other thread can hold a lock that a forked child would wait for.

    The waiting threads of numpy's and MLIR's thread pools hold no locks.
    """
    return "jax" not in sys.modules and threading.active_count() == 1 and hasattr(os, "fork")


def _forked(request: _Request, watched: int | None = None) -> _Ended:
    """Runs the task in a fork.

    If the process that reads the pipe `watched` is gone, this kills the fork and ends this process.
    """
    # Imports what the function needs here, so that forks need not.
    function = function_named(request.task) if isinstance(request.task, str) else request.task
    with _scratch() as answer, _scratch() as log:
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
                    raise ChildError(f"it could not be started ({error.strerror})", of_input=False) from None
                if child == 0:
                    _be_child(function, request, parent, answer, log)
            status = _wait(child, watched)
        except BaseException:
            if child:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            raise
        return _Ended(status, _content(answer), _content(log))


def _wait(child: int, watched: int | None) -> int:
    if watched is None:
        return os.waitpid(child, 0)[1]
    poll = select.poll()
    poll.register(watched, 0)  # of interest is only that the other end is closed
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        if _wait_for_exit(child, poll):
            os.kill(child, signal.SIGKILL)
            os._exit(1)


def _wait_for_exit(child: int, poll: Any) -> bool:
    """Waits for a short time until the child ends. Returns True if the other end of the watched pipe was closed."""
    try:
        handle = os.pidfd_open(child)
    except (AttributeError, OSError):  # not on Linux
        return bool(poll.poll(5))
    try:
        poll.register(handle, select.POLLIN)
        found = poll.poll(_POLL_MILLISECONDS)
        poll.unregister(handle)
        return any(descriptor != handle for descriptor, _ in found)
    finally:
        os.close(handle)


def _be_child(function: Callable[..., bytes], request: _Request, parent: int, answer: Any, log: Any) -> NoReturn:
    """Runs the task in the fork and exits. It never returns, so the parent's cleanup is not run twice."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        faulthandler.disable()  # whoever switched it on expects a crash of the parent, not of this process
        end_with_parent(parent)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        os.dup2(log.fileno(), 2)
        if request.seconds is not None:
            limit_processor_time(request.seconds)
        if request.memory is not None:
            limit_memory(request.memory)
        try:
            content, code = function(*request.arguments), _ANSWER
        except ToastError as error:
            facts = {"kind": type(error).__name__, "what": error.what, "where": error.where, "hint": error.hint}
            content, code = json.dumps(facts).encode(), _TOLD
        except MemoryError:
            content, code = b"", _FULL
        except Exception as error:
            text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            content, code = text.encode("utf-8", "backslashreplace"), _RAISED
        try:
            answer.write(content)
            answer.flush()
        except OSError:
            code = _CUT_OFF
    finally:
        os._exit(code)


def limit_processor_time(seconds: int) -> None:
    """Ends this process with SIGXCPU, and without a core file, once it has used so many more seconds of processor
    time.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    wanted = int(used.ru_utime + used.ru_stime) + max(seconds, 1)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def limit_memory(memory: int) -> None:
    """Limits how many more bytes this process may allocate; an allocation beyond the limit fails. Linux only."""
    if not sys.platform.startswith("linux"):
        return
    status = Path("/proc/self/status").read_text()
    held = int(next(line for line in status.splitlines() if line.startswith("VmData:")).split()[1]) * 1024
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    wanted = held + memory
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def function_named(task: str) -> Callable[..., Any]:
    """The function "package.module:function"."""
    module, _, name = task.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


def _scratch() -> IO[bytes]:
    """A file without a name, in memory where the system can do that."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("toast"), "w+b")
    from tempfile import TemporaryFile

    return TemporaryFile()


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


# -- a helper process whose forks are the children --------------------------------------------------------------------


class _Helper:
    """A process that imports the modules of the tasks and forks itself for each task."""

    _ours: _Helper | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-c", _HELPER, str(Path(__file__).resolve().parents[2])]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            raise ChildError(f"it could not be started ({error.strerror})", of_input=False) from None
        self._owner = os.getpid()

    @classmethod
    def current(cls) -> _Helper:
        """This process's helper. A fork of this process gets one of its own."""
        with cls._lock:
            ours = cls._ours
            if ours is None or ours._owner != os.getpid() or ours._process.poll() is not None:
                ours = cls._ours = _Helper()
                atexit.register(ours.close)
            return ours

    def run(self, request: _Request) -> _Ended:
        """Runs a task in a fork of the helper. An interrupt ends the helper, and the fork with it."""
        content = pickle.dumps(request)
        with self._lock:
            try:
                assert self._process.stdin is not None and self._process.stdout is not None
                self._process.stdin.write(struct.pack("<q", len(content)) + content)
                self._process.stdin.flush()
                status, answered, log = _HEAD.unpack(_exactly(self._process.stdout, _HEAD.size))
                return _Ended(status, _exactly(self._process.stdout, answered), _exactly(self._process.stdout, log))
            except (OSError, EOFError):
                self.close()
                raise ChildError("it could not be started, or was ended", of_input=False) from None
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Ends the helper."""
        if self._owner != os.getpid():
            return
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


def serve() -> None:
    """The main loop of a helper process: reads requests from stdin and writes answers to stdout until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; our parent decides
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    while True:
        try:
            (size,) = struct.unpack("<q", _exactly(requests, 8))
            request = pickle.loads(_exactly(requests, size))
        except EOFError:
            os._exit(0)
        ended = _forked(request, watched=requests.fileno())
        answers.write(_HEAD.pack(ended.status, len(ended.answer), len(ended.log)) + ended.answer + ended.log)
        answers.flush()


def _exactly(stream: IO[bytes], size: int) -> bytes:
    content = stream.read(size)
    if len(content) != size:
        raise EOFError
    return content


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
            opened = os.open(os.devnull, flags)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
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


class Stop:
    """A signal handler.

    `asked`: whether Ctrl-C was pressed. patient: whether a second Ctrl-C is to raise KeyboardInterrupt.
    """

    def __init__(self, *, patient: bool = False) -> None:
        self.asked = False
        self._patient = patient

    def __call__(self, *_: object) -> None:
        if self.asked and not self._patient:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def interruptible() -> Iterator[Stop]:
    """Makes Ctrl-C set `Stop.asked` while the block runs. Nested blocks share the outer `Stop`. Outside the main
    thread, which alone receives signals, the flag is never set."""
    before = signal.getsignal(signal.SIGINT)
    if isinstance(before, Stop):
        yield before
        return
    stop = Stop()
    try:
        signal.signal(signal.SIGINT, stop)
    except ValueError:  # not the main thread
        yield stop
        return
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
