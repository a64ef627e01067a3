"""Conversions that may abort the process, each run in a child process of its own.

XLA and MLIR check many of their assumptions with assertions that end the process, and a damaged file can break them. So
`convert` hands the bytes to a child that runs `main` here, which reads them on stdin and writes MLIR bytecode on stdout, or one line
of JSON with the error and exit code 3. A child that dies or does not end is an error like any other.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from subprocess import PIPE

from toast_cli.errors import InputError
from toast_cli.frontend.diagnostics import first_error
from toast_cli.frontend.wire import strings_are_text

CHILD = "import sys; from toast_cli.frontend.convert import main; sys.exit(main(sys.argv[1:]))"
FAILED = 3
# A child may use this many seconds of processor time, plus one for so many bytes. An intact file needs a hundredth of it.
# Waiting does not count, so a busy machine changes nothing.
BASE_SECONDS = 120
BYTES_PER_SECOND = 50_000

_ABORT_REASON = re.compile(r"Check failed: (.*)|LLVM ERROR: (.*)|ERROR: (.*)")


def convert(kind: str, data: bytes, where: str, hint: str) -> bytes:
    """MLIR bytecode of a program that is `data`, of one of the kinds in `conversions`.

    Raises `InputError` at `where` with the first error and `hint`, also when the child process dies or hangs.
    """
    limit = BASE_SECONDS + len(data) // BYTES_PER_SECOND
    command = [sys.executable, "-P", "-c", CHILD, kind, str(limit)]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE) as child:
        import toast_cli.xla  # noqa: F401  (while the child does the same)

        answer, complaint = child.communicate(data)
    if child.returncode == 0:
        return answer
    if child.returncode == FAILED:
        place, message = json.loads(answer)
        raise InputError(message, where=f"{where}:{place}" if place else where, hint=hint)
    if child.returncode == -signal.SIGXCPU:
        raise InputError(f"reading it took more than {limit} seconds of processor time", where=where, hint=hint)
    raise InputError(f"the program is damaged: {_abort_reason(complaint)}", where=where, hint=hint)


def _abort_reason(stderr: bytes) -> str:
    """What a child that died had to say."""
    for line in stderr.decode("utf-8", "replace").splitlines():
        found = _ABORT_REASON.search(line)
        if found:
            return next(text for text in found.groups() if text).strip().rstrip(".")
    return "the compiler's reader gave up on it"


# -- in the child -----------------------------------------------------------------------------------------------------


def conversions() -> dict[str, Callable[[bytes], bytes]]:
    """What the child can do, by kind. Loads jaxlib."""
    from toast_cli import xla
    from toast_cli.frontend.donation import mark_donations

    def from_bytecode(data: bytes) -> bytes:
        """Reading it is the test; the parent can then read the very same bytes."""
        xla.parse_module(xla.make_context(), data)
        return rehearsed(data)

    def from_portable(data: bytes) -> bytes:
        return rehearsed(xla.write_bytecode(xla.parse_portable_artifact(xla.make_context(), data)))

    def from_hlo_text(data: bytes) -> bytes:
        return from_hlo_proto(xla.hlo_text_to_proto(data.decode("utf-8")))

    def from_hlo_proto(proto: bytes) -> bytes:
        module = xla.parse_module(xla.make_context(), xla.hlo_proto_to_stablehlo(proto))
        mark_donations(module, proto)
        return rehearsed(xla.write_bytecode(module))

    return {
        "bytecode": from_bytecode,
        "portable": from_portable,
        "hlo-text": from_hlo_text,
        "hlo-proto": from_hlo_proto,
        "refine": xla.refine_shapes,
    }


def rehearsed(bytecode: bytes) -> bytes:
    """The bytecode, once it is known that the parent can work with it.

    Some of jaxlib's bindings end the process on a name that is not UTF-8. A string may hold anything (a compiled kernel, say), so
    where one does, the parent's next step is tried out here.
    """
    if not strings_are_text(bytecode):
        from toast_cli import xla
        from toast_cli.frontend.normalise import normalise

        with suppress(InputError):  # the parent says it better
            normalise(xla.parse_module(xla.make_context(), bytecode), keep_shardings=True)
    return bytecode


def limit_processor_time(seconds: int) -> None:
    """Ends this process with SIGXCPU, and without a core file, once it has used so much processor time."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = max(seconds, 1) if hard == resource.RLIM_INFINITY else min(max(seconds, 1), hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def main(arguments: list[str]) -> int:
    """KIND SECONDS: converts stdin to stdout; any exception is an answer for the parent to show."""
    limit_processor_time(int(arguments[1]))
    run = conversions()[arguments[0]]
    try:
        answer = run(sys.stdin.buffer.read())
    except Exception as error:
        sys.stdout.write(json.dumps(first_error(error)))
        return FAILED
    sys.stdout.buffer.write(answer)
    return 0
