"""Exit codes, and the one place where exceptions become them: a call goes in, its exit code comes out."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

import typer

from toast_cli.errors import ToastError
from toast_cli.printable import printable, printable_lines
from toast_cli.process import interrupt_at_once

OK = 0
CHECK_FAILED = 1
BAD_INPUT = 2
DOES_NOT_FIT = 3
INTERNAL = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 130  # 128 + SIGINT
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
        return _explain(BAD_INPUT, *_system_message(error))
    except _PARSER_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            _tell(f"{printable_lines(str(error))}\n")
            return BAD_INPUT
        return _explain(BAD_INPUT, *_parser_message(error))
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


def _system_message(error: OSError) -> tuple[str, str]:
    """(what, hint) of an error of the operating system."""
    try:
        os.getcwd()  # noqa: PTH109
    except OSError:
        return "the working directory does not exist any more", "change to another one"
    if error.filename is None:
        return f"cannot write: {error.strerror or error}", ""
    return f"{error.filename}: {error.strerror or error}", ""


def debug_wanted(arguments: list[str]) -> bool:
    """True if tracebacks are wanted: TOAST_DEBUG set to anything but 0, or --verbose given."""
    return os.environ.get("TOAST_DEBUG", "0") not in ("", "0") or "--verbose" in arguments


def say(kind: str, text: str, stream: TextIO | None = None) -> None:
    """`error: …`, `hint: …` or `note: …` on one line of stderr, the word coloured where stderr is a terminal."""
    stream = stream or sys.stderr
    word = f"{kind}:"
    if stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        word = f"{_RED if kind == 'error' else _CYAN}{word}{_RESET}"
    _tell(f"{word} {' '.join(printable(text).split())}\n", stream)


def _tell(text: str, stream: TextIO | None = None) -> None:
    """Writes to stderr; ignores errors."""
    with suppress(OSError, ValueError):
        stream = stream or sys.stderr
        stream.write(text)
        stream.flush()


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


def _parser_message(error: Exception) -> tuple[str, str]:
    """(what, hint) of an error the option parser found."""
    what = str(getattr(error, "format_message", lambda: error)()).strip().rstrip(".")
    context = getattr(error, "ctx", None)
    command = getattr(context, "command_path", "toast") or "toast"
    return what[:1].lower() + what[1:], f"see `{command} --help`"
