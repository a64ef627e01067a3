"""A cache of verdicts for `toast check`: points go in, cached verdicts come out.

The key is a hash of everything that a verdict depends on: the program's file, the stored report, the mesh, all options,
toast's own code and the versions of its dependencies. Verdicts that depend on more than that (a compiler, a time limit,
a tactic from a file, standard input) are not cached, and neither are errors.
"""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toast_cli.errors import ToastError
from toast_cli.inputs import STDIN
from toast_cli.kept import Kept, key_of, users_folder
from toast_cli.request import Ask

if TYPE_CHECKING:
    from toast_cli.cli.check_points import CheckPoint
    from toast_cli.report.checks import CheckVerdict

FORMAT = "1"  # of what is kept
PACKAGES = ("jax", "jaxlib", "numpy", "scipy")  # on which a plan or its figures may depend
_PACKAGE = Path(__file__).resolve().parents[1]


class KnownChecks:
    """Verdicts in the user's cache folder, by the key of a point."""

    def __init__(self) -> None:
        self._kept = Kept(users_folder("checked"))

    def find(self, key: str) -> CheckVerdict | None:
        """The cached verdict of a key; None if there is none, or the key is empty."""
        from toast_cli.report.checks import Check, CheckVerdict

        facts = self._kept.find(key) if key else None
        if facts is None:
            return None
        try:
            verdict = CheckVerdict(**{**facts, "checks": [Check(**one) for one in facts["checks"]]})
        except (TypeError, KeyError):
            return None
        return verdict

    def keep(self, key: str, verdict: CheckVerdict) -> None:
        """Stores a verdict, unless the key is empty or the verdict is an error."""
        if key and not verdict.error:
            self._kept.keep(key, {**asdict(verdict), "seconds": 0.0})


def key_of_point(point: CheckPoint) -> str:
    """The cache key of a point; empty if its verdict depends on more than a key covers."""
    request = point.request
    timed = request.confirm > 0 or request.ask != Ask.never or request.budget_seconds is not None
    from_files = any("." in text or "/" in text for text in (*request.tactics, request.strategy or ""))
    if point.update or timed or request.program == STDIN or from_files:
        return ""
    try:
        from toast_cli.hardware import load_spec

        spec = load_spec(request.mesh)
        contents = [
            hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""
            for path in (request.program, point.against, request.plan)
        ]
    except (OSError, ValueError, ToastError):  # reported when the point is checked
        return ""
    settings = sorted((name, value) for name, value in os.environ.items() if name.startswith("TOAST_"))
    return key_of(code_digest(), FORMAT, contents, spec, request, point.limits, point.against, settings, *_versions())


@cache
def code_digest() -> bytes:
    """A hash of toast's own code and data."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(f"{path.relative_to(_PACKAGE)} {path.stat().st_size} ".encode())
            digest.update(path.read_bytes())
    return digest.digest()


@cache
def _versions() -> tuple[Any, ...]:
    from importlib.metadata import PackageNotFoundError, version

    found: list[Any] = [platform.python_version(), platform.machine()]
    for package in PACKAGES:
        try:
            found.append(version(package))
        except PackageNotFoundError:
            found.append(None)
    return tuple(found)
