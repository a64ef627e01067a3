"""What must not be left half-way waits for its end when Ctrl-C is pressed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from toast_cli.base.children import uninterrupted

ROOT = Path(__file__).parent.parent

# Presses Ctrl-C when the native module is looked for, and says how far its loading had got when that was noticed.
PRESSED_WHILE_LOADING = """
import importlib.abc, signal, sys

class Press(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "jaxlib._jax":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Press())
try:
    import toast_cli.xla
except KeyboardInterrupt:
    print(all(name in sys.modules for name in ("jaxlib._jax", "jaxlib.mlir._mlir_libs._stablehlo")))
"""


@pytest.fixture(autouse=True)
def interrupts_raise() -> Iterator[None]:
    """What Ctrl-C does is Python's own; other tests may have left something else."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_waits_for_the_end_of_the_block() -> None:
    ended = False
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        ended = True
    assert ended
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_ctrl_c_nothing_happens() -> None:
    with uninterrupted():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_are_never_interrupted() -> None:
    done: list[bool] = []

    def work() -> None:
        with uninterrupted():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done


def test_ctrl_c_waits_until_native_modules_are_loaded() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PRESSED_WHILE_LOADING],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert ended.stdout.strip() == "True", ended.stderr
