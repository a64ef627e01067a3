"""Versions of jaxlib and of compilers: those that toast knows, and what it says of others."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from toast_cli.base.errors import MissingExtraError
from toast_cli.cli import main
from toast_cli.hardware import load_spec
from toast_cli.price import profiles
from toast_cli.xla import native

MLP = "sample_models/mlp_tiny.mlir"


@pytest.mark.parametrize(
    ("installed", "word"),
    [
        ("0.10.0", "older"),
        ("0.10.1", ""),
        ("0.11.2", ""),
        ("0.12.0.1", ""),
        ("0.12.7", ""),
        ("0.13.0", "newer"),
        ("0.13.0.dev20270101", "newer"),
        ("1.0", "newer"),
    ],
)
def test_versions_that_are_not_tested_are_named(installed: str, word: str) -> None:
    assert word in native.untested(installed)
    assert bool(word) == bool(native.untested(installed))


@pytest.mark.parametrize(("flag", "said"), [((), 1), (("--quiet",), 0)])
def test_the_warning_is_given_once(
    flag: tuple[str, ...], said: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "version", lambda _: "0.13.0")
    assert main(("partition", MLP, "--mesh", "v4-32", "--iterations", "1", *flag)) == 0
    out, err = capsys.readouterr()
    assert err.count("warning: jaxlib 0.13.0 is newer than what toast knows") == said
    assert "0.13.0 is newer" not in out


@pytest.mark.parametrize(
    ("module", "names", "lacking"),
    [
        ("jaxlib.no_such_module", (), "has no jaxlib.no_such_module,"),
        ("jaxlib.mlir.ir", ("Module.parse", "Module.unheard_of"), "has no jaxlib.mlir.ir.Module.unheard_of,"),
    ],
)
def test_a_jaxlib_that_lacks_a_name(module: str, names: tuple[str, ...], lacking: str) -> None:
    with pytest.raises(MissingExtraError, match=lacking) as refused:
        native.needed(module, *names)
    assert refused.value.what.startswith(f"jaxlib {metadata.version('jaxlib')} ")
    assert "pip install 'jax<0.13'" in refused.value.hint


def test_a_name_that_is_missing_is_an_error_and_no_traceback() -> None:
    code = (
        "import jaxlib._jax as native, sys\n"
        "del native.CompileOptions\n"
        "from toast_cli.cli import main\n"
        f"sys.exit(main(['inspect', {MLP!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "has no jaxlib._jax.CompileOptions, which toast needs" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("installed", "said"), [("0.0.42.1", False), ("0.0.50.1", True), (None, False)])
def test_another_compiler_than_the_one_measured(
    installed: str | None, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        assert package == "libtpu"
        if installed is None:
            raise metadata.PackageNotFoundError(package)
        return installed

    monkeypatch.setattr(profiles, "version", version)
    note = profiles.version_note(load_spec("v4-32").chip)
    assert bool(note) == said
    assert not said or "fitted to the compiler of libtpu 0.0.42.1, and 0.0.50.1 is installed" in note


def test_jax_works_after_toast_is_imported() -> None:
    """Native modules of jaxlib 0.12 import their Python halves on the way, which lack names if that goes wrong."""
    code = """
import toast_cli.xla, sys
from jaxlib.mlir.dialects import sdy
native = sys.modules["jaxlib.mlir._mlir_libs._sdy"]
missing = [name for name in dir(native) if not name.startswith("_") and not hasattr(sdy, name)]
assert not missing, missing
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
