"""Runs commands, and points of checks and sweeps: exit codes, the one place where exceptions become them, a process
for each point, and a line of progress.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

import typer

from toast_cli.base.children import INTERRUPTED as INTERRUPTED
from toast_cli.base.children import ChildError, Limits, interrupt_at_once, outcomes
from toast_cli.base.errors import ToastError
from toast_cli.base.files import Target, write_target
from toast_cli.base.units import printable, printable_lines

if TYPE_CHECKING:
    from rich.console import RenderableType

    from toast_cli.ask_xla.confirm import ConfirmedRow


# ---------------------------------------------------------------- exit codes
# Exit codes, and the one place where exceptions become them: a call goes in, its exit code comes out.

OK = 0
CHECK_FAILED = 1
BAD_INPUT = 2
DOES_NOT_FIT = 3
INTERNAL = 70  # EX_SOFTWARE of sysexits.h
BROKEN_PIPE = 141  # 128 + SIGPIPE

_RED, _CYAN, _RESET = "\x1b[1;31m", "\x1b[36m", "\x1b[0m"

# Public names for the parser's base exceptions do not exist; their subclass BadParameter is public.
_PARSER_ERROR: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def guarded(call: Callable[[], object], *, debug: bool) -> int:
    """Calls `call` and returns its exit code; reports exceptions on stderr in a line or two, with a traceback only for
    bugs and `debug`."""
    interrupted = _note_interrupts()
    try:
        returned = call()
        # Flushed here, and not at Python's shutdown, so that a closed pipe is noticed in time.
        sys.stdout.flush()
    except ToastError as error:
        return _explain(BAD_INPUT, f"{error.where}: {error.what}" if error.where else error.what, error.hint)
    except typer.Exit as error:
        return int(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _tell("interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left. Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        what = f"{error.filename or 'cannot write'}: {error.strerror or error}"
        return _explain(BAD_INPUT, what, "")
    except _PARSER_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            _tell(f"{printable_lines(str(error))}\n")
            return BAD_INPUT
        described = getattr(error, "format_message", None)
        what = str(error if described is None else described()).strip().rstrip(".")
        command = getattr(getattr(error, "ctx", None), "command_path", "toast") or "toast"
        return _explain(BAD_INPUT, what[:1].lower() + what[1:], f"see `{command} --help`")
    except MemoryError:
        return _explain(BAD_INPUT, "there is not enough memory", "give a smaller program, or a machine with more")
    except Exception as error:
        if interrupted:  # native code reports an exception that passes through it as its own
            _tell("interrupted\n")
            return INTERRUPTED
        return _internal(error, debug)
    return returned if isinstance(returned, int) else OK


def _note_interrupts() -> list[int]:
    """Makes Ctrl-C raise KeyboardInterrupt and append the signal's number to the returned list."""
    noted: list[int] = []

    def interrupt(number: int, _: object) -> None:
        noted.append(number)
        raise KeyboardInterrupt

    with suppress(ValueError):  # not the main thread, which alone receives signals
        if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, interrupt_at_once):
            signal.signal(signal.SIGINT, interrupt)
    return noted


def debug_wanted(arguments: list[str]) -> bool:
    """True if tracebacks are wanted: TOAST_DEBUG set to anything but 0, or --verbose given."""
    return os.environ.get("TOAST_DEBUG", "0") not in ("", "0") or "--verbose" in arguments


def say(kind: str, text: str) -> None:
    """`error: …`, `hint: …` or `note: …` on one line of stderr, the word coloured where stderr is a terminal."""
    word = f"{kind}:"
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        word = f"{_RED if kind == 'error' else _CYAN}{word}{_RESET}"
    _tell(f"{word} {' '.join(printable(text).split())}\n")


def _tell(text: str) -> None:
    """Writes to stderr; ignores errors."""
    with suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _explain(code: int, what: str, hint: str) -> int:
    say("error", what)
    if hint:
        say("hint", hint)
    return code


def _internal(error: Exception, debug: bool) -> int:
    if debug:
        _tell(printable_lines("".join(traceback.format_exception(error))))
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""  # noqa: PTH119
    again = "" if debug else "run it again with --verbose or TOAST_DEBUG=1 for the traceback and "
    return _explain(
        INTERNAL,
        f"internal error: {type(error).__name__}: {error}{place}",
        f"this is a bug in toast; {again}please report it with the program's size and the command",
    )


# ---------------------------------------------------------------- a process for each item
# Calls a function for each of several items, each in a process of its own, so that a crash, or full memory, affects no
# other item: items and a function go in, results or reasons come out.

Task = TypeVar("Task")
Result = TypeVar("Result")
# A function, or a class whose instances are called: what they remember is there for the next item.
Work = Callable[[Task], Result] | Callable[[], Callable[[Task], Result]]


@dataclass(frozen=True)
class PointFailure:
    """The reason why an item has no result, in a sentence, and a hint if there is one."""

    reason: str
    hint: str = ""


def run_all(
    items: Sequence[Task], work: Work[Task, Result], jobs: int, chains: Sequence[Hashable] | None = None
) -> Iterator[tuple[int, Result | PointFailure]]:
    """Runs `work` on every item, in `jobs` processes at a time; yields (number of the item, its result) as each is
    done. If the caller stops early, the workers are ended. See `_answers`.

    Args:
        chains: one process works on the items of equal entries, one after the other; None: one for each item.
    """
    batches: dict[Hashable, list[int]] = {}
    for number, chain in enumerate(range(len(items)) if chains is None else chains):
        batches.setdefault(chain, []).append(number)
    children: set[subprocess.Popen[bytes]] = set()
    done: SimpleQueue[tuple[int, Result | PointFailure]] = SimpleQueue()

    def finish(numbers: list[int]) -> None:
        while numbers:  # a process that dies leaves items for the next one
            results = _answers([items[number] for number in numbers], work, children)
            for answered, result in enumerate(results, 1):
                done.put((numbers[answered - 1], result))
            numbers = numbers[answered:]

    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(finish, numbers) for numbers in batches.values()]
        try:
            for _ in items:
                yield done.get()
        finally:
            for waiting in running:
                waiting.cancel()
            while wait(running, timeout=0.05).not_done:  # a process may begin just now
                for child in list(children):
                    child.kill()


def _answers(
    items: Sequence[Task], work: Work[Task, Result], running: set[subprocess.Popen[bytes]]
) -> Iterator[Result | PointFailure]:
    """The results of `work` on items, in one new process, up to the item on which it dies. See `children.outcomes`."""
    environment = {"JAX_PLATFORMS": "cpu", **os.environ}
    calls = [(item,) for item in items]
    limits = Limits(interrupted=False)  # the parent decides what Ctrl-C means
    try:
        for outcome in outcomes(work, calls, limits=limits, environment=environment, running=running):
            if outcome.kind == "value":
                yield outcome.facts
            elif outcome.kind == "told":
                yield failure_of(outcome.error)
            elif outcome.kind == "raised":
                name, text, trace = outcome.facts
                if debug_wanted([]):
                    _tell(printable_lines(trace))
                yield PointFailure(f"internal error: {name}: {text}")
            else:
                code = outcome.facts
                cause = f"exit code {code}" if code >= 0 else signal.strsignal(-code)
                yield PointFailure(f"the process died ({cause})")
    except ChildError as error:  # there is no process
        yield PointFailure(f"its process did not run: {error.reason}")


def failure_of(error: ToastError) -> PointFailure:
    return PointFailure(f"{error.where}: {error.what}" if error.where else error.what, error.hint)


# ---------------------------------------------------------------- progress
# A progress line on stderr while the pipeline works: stage, best cost so far, evaluations, time.

# Stage, fraction done (0 to 1), best cost so far in seconds (inf: none), evaluations, seconds since the search began.
Progress = Callable[[str, float, float, int, float], None]

_SECONDS_BETWEEN_UPDATES = 0.1


@contextmanager
def progress_line(*, wanted: bool) -> Iterator[Progress | None]:
    """The callback that updates the line; None, and no line, if it is not wanted or stderr is not a terminal."""
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Line

    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    columns = [SpinnerColumn("line"), TextColumn("{task.description}"), BarColumn(20)]
    columns += [TextColumn("{task.fields[facts]}"), TimeElapsedColumn()]
    with Line(*columns, console=console, transient=True) as line:
        task = line.add_task("load", total=1.0, facts="")
        stage, shown_at, owner = "", -math.inf, os.getpid()

        def update(name: str, fraction: float, best_seconds: float, evaluations: int, elapsed_seconds: float) -> None:
            nonlocal stage, shown_at
            if os.getpid() != owner:  # a search process forked from this one must not draw the line
                return
            now = time.monotonic()
            if name == stage and now - shown_at < _SECONDS_BETWEEN_UPDATES:
                return
            stage, shown_at = name, now
            line.update(task, description=name, completed=fraction, facts=search_facts(best_seconds, evaluations))

        yield update


def search_facts(best_seconds: float, evaluations: int) -> str:
    """`best 23.4 ms, 12,345 evaluations`; empty before the first evaluation."""
    from toast_cli.program.quantities import format_count, format_seconds

    if evaluations == 0:
        return ""
    best = f"best {format_seconds(best_seconds)}, " if math.isfinite(best_seconds) else ""
    return f"{best}{format_count(evaluations)} evaluations"


def counted(results: Iterable[Result], total: int, noun: str, *, wanted: bool) -> Iterator[Result]:
    """The results, `total` in all, with a progress line while they come: `2 of 8 points`."""
    with progress_line(wanted=wanted) as progress:

        def tell(number: int) -> None:
            if progress is not None:
                progress(f"{number} of {total} {noun}", number / max(total, 1), math.inf, 0, 0.0)

        tell(0)
        for number, result in enumerate(results, 1):
            yield result
            tell(number)


def say_confirmed(place: int, number: int, row: ConfirmedRow) -> None:
    """A line on stderr for each plan that a compiler has answered about."""
    from toast_cli.report.comparison import confirmation_line

    print(f"confirm {place} of {number}: {confirmation_line(row)}", file=sys.stderr)


# ---------------------------------------------------------------- output


def json_target(path: str | None) -> list[Target]:
    """The target of `--json`, if it is given."""
    return [Target("--json", path)] if path is not None else []


def show(
    drawn: Callable[[int], Iterable[RenderableType]],
    facts: object = None,
    targets: Sequence[Target] = (),
    line: str | None = None,
) -> None:
    """Writes facts as JSON to the targets, and sections to the terminal, to stderr where stdout has the JSON.

    Args:
        drawn: the sections for a number of columns. line: what stands in their place with --quiet, on stdout alone.
    """
    from toast_cli.report.model import write_json
    from toast_cli.report.style import make_console, plain_text, render

    for target in targets:
        write_target(target, write_json(facts))
    stream = sys.stderr if any(target.is_stdout for target in targets) else sys.stdout
    if line is None:
        console = make_console(stream)
        stream.write(render(drawn(console.width), console))
    elif stream is sys.stdout:
        print(plain_text(line, stream.encoding))
