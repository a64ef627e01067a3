"""Output files are written whole, in place, or not at all; what must not be left half-way waits for its end."""

from __future__ import annotations

import gzip
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from toast_cli.base import files
from toast_cli.base.children import uninterrupted
from toast_cli.base.errors import UsageError
from toast_cli.base.files import Format, Target


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("a.mlir", None, "stablehlo"),
        ("a.mlirbc", None, "bytecode"),
        ("a.mlir.zst", None, "stablehlo"),
        ("a.hlo", None, "hlo"),
        ("a.json", None, "specs"),
        ("a.py", None, "python"),
        ("a.txt", Format.hlo, "hlo"),
        ("a.mlir", Format.hlo, "hlo"),
        ("-", None, "stablehlo"),
        (None, None, "stablehlo"),
    ],
)
def test_output_format(name: str | None, given: Format | None, expected: str) -> None:
    assert files.output_format(name, given).value == expected


def test_a_file_keeps_its_mode_and_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real.mlir").write_text("old")
    (tmp_path / "real.mlir").chmod(0o640)
    (tmp_path / "link.mlir").symlink_to("real.mlir")
    files.write_target(Target("-o", str(tmp_path / "link.mlir")), b"new")
    assert (tmp_path / "link.mlir").is_symlink()
    assert (tmp_path / "real.mlir").read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "real.mlir").stat().st_mode) == 0o640


def test_a_new_file_has_the_mode_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"")
    files.write_target(Target("-o", str(tmp_path / "new")), b"new")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_compressed_outputs(tmp_path: Path) -> None:
    files.write_target(Target("-o", str(tmp_path / "a.mlir.gz")), b"text" * 100)
    files.write_target(Target("-o", str(tmp_path / "a.mlir.zst")), b"text" * 100)
    assert gzip.decompress((tmp_path / "a.mlir.gz").read_bytes()) == b"text" * 100
    assert zstandard.ZstdDecompressor().decompress((tmp_path / "a.mlir.zst").read_bytes()) == b"text" * 100


def test_devices_are_written_not_replaced() -> None:
    target = Target("-o", os.devnull)
    files.check_targets([target], [])
    files.write_target(target, b"gone")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)  # noqa: PTH116


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.mlir").write_text("old")

    def full(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UsageError, match=r"-o: cannot write .*a.mlir: No space left on device"):
        files.write_target(Target("-o", str(tmp_path / "a.mlir")), b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["a.mlir"]
    assert (tmp_path / "a.mlir").read_text() == "old"


KILLED = """
import os, signal, sys
from toast_cli.base import files
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
files.write_target(files.Target("-o", sys.argv[1]), b"new" * 1000)
"""


def test_a_writer_killed_in_the_middle_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.mlir"
    path.write_bytes(b"old")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    (leftover,) = set(tmp_path.iterdir()) - {path}
    assert leftover.name.startswith(".") and leftover.stat().st_size == 3000


# -- what must not be left half-way waits for its end when Ctrl-C is pressed


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
