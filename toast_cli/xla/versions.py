"""The versions of jaxlib that toast is tested with, and warnings about others.

The names of jaxlib and jax that toast uses are not all public: a new version may lack one.
"""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from typing import Any

from toast_cli.errors import MissingExtraError

OLDEST, NEWEST = "0.10.1", "0.12"
_TESTED = f"toast is tested with jaxlib {OLDEST} to {NEWEST}"


def needed(module: str, *names: str) -> Any:
    """A module of jaxlib or jax, after checking that it has these names (`mlir.hlo_to_stablehlo`).

    Raises `MissingExtraError` at the first that it lacks.
    """
    name = ""
    try:
        found = import_module(module)
        for name in names:
            attrgetter(name)(found)
    except (ImportError, AttributeError) as error:
        package = module.partition(".")[0]
        hint = f"{_TESTED}: pip install 'jax<{_after(NEWEST)}'"
        try:
            installed = f"{package} {version(package)}"
        except PackageNotFoundError:
            raise MissingExtraError(f"{package} is not installed", hint=hint) from None
        lacking = f"has no {module}" + (f".{name}" if name else "")
        raise MissingExtraError(f"{installed} {lacking}, which toast needs ({error})", hint=hint) from None
    return found


def untested(installed: str) -> str:
    """A warning about a version of jaxlib that toast is not tested with; empty if it is."""
    if _numbers(installed) < _numbers(OLDEST):
        return f"jaxlib {installed} is older than what toast needs; {_TESTED}"
    if _numbers(installed)[:2] > _numbers(NEWEST):
        return f"jaxlib {installed} is newer than what toast knows; {_TESTED}"
    return ""


def untested_here() -> str:
    """The same for the installed jaxlib."""
    return untested(version("jaxlib"))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _after(text: str) -> str:
    """The next minor version."""
    major, minor = _numbers(text)
    return f"{major}.{minor + 1}"
