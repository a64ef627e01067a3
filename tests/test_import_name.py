"""`import toast_partitioner as toast`: the public API under the name of the distribution."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import toast_cli
import toast_partitioner


def test_every_public_name_is_exported() -> None:
    assert toast_partitioner.__all__ == toast_cli.__all__
    assert set(toast_cli.__all__) <= set(dir(toast_partitioner))
    for name in toast_cli.__all__:
        assert getattr(toast_partitioner, name) is getattr(toast_cli, name)


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="module 'toast_partitioner' has no attribute 'pipeline'"):
        toast_partitioner.pipeline  # noqa: B018


def test_importing_it_loads_nothing_heavy() -> None:
    script = "import sys, toast_partitioner; print(*sys.modules)"
    root = Path(__file__).parents[1]
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=root)
    assert set(found.stdout.split()) & {"jax", "jaxlib", "numpy", "toast_cli.api.plan"} == set()
