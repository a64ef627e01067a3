"""What children do in tests: answer, raise, die. They import little, so that a new process starts fast."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from toast_cli.base.errors import SpecError


def doubled(data: bytes, times: int) -> bytes:
    return data * times


def refused(data: bytes) -> bytes:
    raise SpecError("wrong", where="a.yaml:3", hint="right")


def broken(data: bytes) -> bytes:
    raise ZeroDivisionError("oh")


def killed(data: bytes) -> bytes:
    os.write(2, b"F0000 Check failed: 1 == 2 \n")
    os.kill(os.getpid(), signal.SIGSEGV)
    return data


def left(data: bytes) -> bytes:
    os._exit(9)


def busy(data: bytes) -> bytes:
    while True:
        pass


def large(data: bytes) -> bytes:
    return bytes(4 * 2**30)


def large_in_native_code(data: bytes) -> bytes:
    import numpy as np

    return str(np.full(4 * 2**30, 1, np.uint8).sum()).encode()


def waiting(data: bytes) -> bytes:
    time.sleep(1.5)
    return b"slow"


def noisy(data: bytes) -> bytes:
    os.write(1, b"noise")
    return b"heard"


def slain(data: bytes) -> bytes:
    os.kill(os.getpid(), 9)
    return b""


def announced(path: str) -> bytes:
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)
    return b""
