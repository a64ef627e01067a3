"""Collects what `toast check` checks: options and project files go in, `CheckPoint` values come out."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toast_cli.cli import options
from toast_cli.cli.values import parse_fraction
from toast_cli.disk_cache import key_of
from toast_cli.errors import ToastError, UsageError
from toast_cli.inputs import STDIN, resolved
from toast_cli.option_values import bytes_or_none, seconds_or_none
from toast_cli.request import Ask

if TYPE_CHECKING:
    from toast_cli.pipeline import Request
    from toast_cli.report.checks import CheckLimits

DEFAULT_TOLERANCE = "5%"

FORMAT = "1"  # of what is kept
PACKAGES = ("jax", "jaxlib", "numpy", "scipy")  # on which a plan or its figures may depend
_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class CheckPoint:
    """One program on one mesh, its limits, and the stored report it is compared with (empty: none). update: write that
    report instead of comparing with it."""

    request: Request
    limits: CheckLimits
    against: str = ""
    update: bool = False


def points_of(
    programs: list[str], mesh: str, given: Mapping[str, Any], config: str | None, update: bool
) -> list[CheckPoint]:
    """The programs named on the command line, on the mesh named there."""
    if not programs:
        raise UsageError("no PROGRAM is given", hint="without --mesh, a project file says what to check")
    if "-" in programs and len(programs) > 1:
        raise UsageError("stdin is one program of several", hint="save it to a file")
    if config is not None:
        raise UsageError("both --config and --mesh are given", hint="a project file names its meshes itself")
    if "against" in given and len(programs) > 1:
        raise UsageError(
            "one stored report for several programs", where="--against", hint="list them in a project file"
        )
    if "against" not in given:
        for name in ("tolerance", "time-tolerance", "memory-tolerance", "communication-tolerance", "same-plan"):
            if name in given:
                raise UsageError(f"--{name} compares with a stored report", hint="give that report with --against FILE")
        if update:
            raise UsageError("--update writes a stored report", hint="say where with --against FILE")
    return [make_point(program, mesh, given, update) for program in programs]


def points_of_project(
    programs: list[str], given: Mapping[str, Any], config: str | None, update: bool, allow_code: bool
) -> list[CheckPoint]:
    """The points that the project file lists; only the programs named on the command line, if any are."""
    from toast_cli.cli.project import DOCUMENTATION, find_project, read_project

    if "against" in given:
        raise UsageError(
            "is for one program on one mesh", where="--against", hint="give --mesh, or write it to the project file"
        )
    path = Path(config) if config is not None else find_project(Path.cwd())
    if path is None:
        hint = f"give --mesh SPEC, or list checks in toast.yaml or [tool.toast] of pyproject.toml: {DOCUMENTATION}"
        raise UsageError("no --mesh is given and there is no project file here or above", hint=hint)
    if not path.is_file():
        raise UsageError("no such file", where=f"--config: {path}", hint=DOCUMENTATION)
    entries = read_project(path, given, allow_code=allow_code, update=update)
    if programs:
        listed = [(resolved(entry.program, entry.place, UsageError), entry) for entry in entries]
        wanted = {resolved(program, "PROGRAM", UsageError): program for program in programs}
        for file, name in wanted.items():
            if all(file != other for other, _ in listed):
                raise UsageError(f"{path} lists no check of it", where=name, hint="give --mesh SPEC, or list it there")
        entries = [entry for file, entry in listed if file in wanted]
    points = []
    for entry in entries:
        try:
            points.append(make_point(entry.program, entry.mesh, entry.options, update))
        except ToastError as error:
            where = f"{entry.place}: {error.where.removeprefix('--')}".removesuffix(": ")
            raise UsageError(error.what, where=where, hint=error.hint) from None
    return points


def make_point(program: str, mesh: str, given: Mapping[str, Any], update: bool) -> CheckPoint:
    """One point from options by name. Raises UsageError at `--name` for values that cannot be read."""
    from toast_cli.report.checks import CheckLimits

    shared = parse_fraction(given.get("tolerance", DEFAULT_TOLERANCE), "--tolerance")

    def tolerance(name: str) -> float:
        return parse_fraction(given[name], f"--{name}") if name in given else shared

    limits = CheckLimits(
        max_bytes=bytes_or_none(given.get("max-memory"), "--max-memory"),
        max_step_seconds=seconds_or_none(given.get("max-step-time"), "--max-step-time"),
        max_communication_seconds=seconds_or_none(given.get("max-communication"), "--max-communication"),
        time_tolerance=tolerance("time-tolerance"),
        memory_tolerance=tolerance("memory-tolerance"),
        communication_tolerance=tolerance("communication-tolerance"),
        same_plan=given.get("same-plan", False),
    )
    # The search optimises for the limits; a given plan is only evaluated.
    chosen = "plan" in given or "strategy" in given
    allowed = [f"peak_memory<={given['max-memory']}"] if "max-memory" in given and not chosen else []
    bounds = {"subject-to": [*(given.get("subject-to") or ()), *allowed]}
    request = options.make_request(program, mesh, {**given, **bounds})
    return CheckPoint(request, limits, given.get("against", ""), update)


def key_of_point(point: CheckPoint) -> str:
    """The cache key of a point: a hash of all that its verdict depends on. Empty if that is more than a key covers (a
    compiler, a time limit, a tactic from a file, standard input)."""
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
