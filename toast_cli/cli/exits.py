"""Exit codes, and the one place where exceptions become them: a call goes in, its exit code comes out."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable
from typing import TextIO

import typer

from toast_cli.errors import ToastError

OK = 0
CHECK_FAILED = 1
BAD_INPUT = 2
DOES_NOT_FIT = 3
INTERNAL = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 130  # 128 + SIGINT
BROKEN_PIPE = 141  # 128 + SIGPIPE

# Where stdout goes to a full or broken device: nothing toast could do better.
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EIO)

_RED, _CYAN, _RESET = "\x1b[1;31m", "\x1b[36m", "\x1b[0m"

# Public names for the parser's base exceptions do not exist; their subclass BadParameter is public.
_PARSER_ERROR: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def guarded(call: Callable[[], object], *, debug: bool) -> int:
    """Exit code of `call`; what it raises is told on stderr in a line or two, with a traceback only for bugs and `debug`."""
    try:
        returned = call()
        # Here, and not when Python shuts down, so that a reader who left is noticed in time.
        sys.stdout.flush()
    except ToastError as error:
        return _explain(BAD_INPUT, f"{error.where}: {error.what}" if error.where else error.what, error.hint)
    except typer.Exit as error:
        return int(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left. Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            return _internal(error, debug)
        return _explain(BAD_INPUT, f"cannot write: {error.strerror}", "")
    except _PARSER_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error, file=sys.stderr)
            return BAD_INPUT
        return _explain(BAD_INPUT, *_parser_message(error))
    except Exception as error:
        return _internal(error, debug)
    return returned if isinstance(returned, int) else OK


def debug_wanted(arguments: list[str]) -> bool:
    """Whether tracebacks are to be shown: TOAST_DEBUG set to anything but 0, or --verbose given."""
    return os.environ.get("TOAST_DEBUG", "0") not in ("", "0") or "--verbose" in arguments


def say(kind: str, text: str, stream: TextIO | None = None) -> None:
    """`error: …`, `hint: …` or `note: …` on one line of stderr, the word coloured where stderr is a terminal."""
    stream = stream or sys.stderr
    word = f"{kind}:"
    if stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        word = f"{_RED if kind == 'error' else _CYAN}{word}{_RESET}"
    print(word, " ".join(text.split()), file=stream)


def _explain(code: int, what: str, hint: str) -> int:
    say("error", what)
    if hint:
        say("hint", hint)
    return code


def _internal(error: Exception, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
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
