"""Reads project files: `toast.yaml`, or `[tool.toast]` of pyproject.toml, goes in; the checks of a bare `toast check`
come out.

Keys are the names of `toast check`'s options; those beside `checks` apply to every entry of it. Paths are relative to
the file.
"""

from __future__ import annotations

import os
import re
import reprlib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from toast_cli.base.files import TEXT_BYTES, read_file, resolved, text_of
from toast_cli.base.units import is_printable
from toast_cli.errors import UsageError
from toast_cli.request import OPTIONS, OptionKind

ALLOW_CODE = "--allow-project-code"
NAMES = ("toast.yaml", "pyproject.toml")
DOCUMENTATION = "see docs/howto/ci.md"

# How an option's value is written in a file. A number is accepted for a text.
_WRITTEN: dict[object, str] = {OptionKind.TEXTS: "texts", OptionKind.WHOLE: "whole", OptionKind.FLAG: "flag"}
# Key -> type of its value: "text" (or a number), "whole", "flag", "texts" (or one text).
KEYS = {
    **dict.fromkeys(("program", "mesh"), "texts"),
    **{option.key: _WRITTEN.get(option.kind, "text") for option in OPTIONS.values() if option.in_projects},
    **dict.fromkeys(("against", "max-memory", "max-step-time", "max-communication"), "text"),
    **dict.fromkeys(("tolerance", "time-tolerance", "memory-tolerance", "communication-tolerance"), "text"),
    "same-plan": "flag",
}
_WANTED = {
    "text": 'a text, e.g. "28GiB"',
    "whole": "a whole number",
    "flag": "true or false",
    "texts": "a text or a list of texts",
}
# File name endings of programs, removed for {program} in `against`.
_SUFFIXES = (".gz", ".zst", ".mlir", ".mlirbc", ".stablehlo", ".hlo", ".pb", ".txt", ".bin")


@dataclass(frozen=True)
class ProjectCheck:
    """One program on one mesh, with its options by name. place: its location in the file, for messages."""

    program: str
    mesh: str
    options: Mapping[str, Any]
    place: str


def find_project(folder: Path) -> Path | None:
    """The nearest project file in `folder` or above it; of pyproject.toml only one that has `[tool.toast]`."""
    for place in (folder, *folder.parents):
        for name in NAMES:
            path = place / name
            if path.is_file() and (name != "pyproject.toml" or _tool_section(path) is not None):
                return path
    return None


def read_project(
    path: Path, given: Mapping[str, Any], *, allow_code: bool = False, update: bool = False
) -> list[ProjectCheck]:
    """Every program on every mesh that the file lists; options `given` on the command line win over the file's.

    The author of the file may be somebody else than the user who runs toast. So a tactic that it names from a Python
    file is refused unless `allow_code`, and a stored report outside the file's folder is refused if `update` would
    write it. Raises UsageError, with the key's place, for errors in the file.
    """
    shown = _shown(path)
    top = _mapping(_content(path, shown), shown)
    listed = top.pop("checks", None)
    if not isinstance(listed, list) or not listed:
        raise UsageError("has no list of checks", where=shown, hint=DOCUMENTATION)
    defaults = _options(top, shown)
    entries: list[ProjectCheck] = []
    for number, item in enumerate(listed):
        place = f"{shown}: checks[{number}]"
        own = {**defaults, **_options(_mapping(item, place), place)}
        if not allow_code:
            _refuse_code(own, place)
        merged = {**_from_folder(own, path.parent), **given}
        for entry in _entries(merged, path.parent, place):
            if update and "against" not in given:
                _refuse_outside(entry, path.parent)
            entries.append(entry)
    _refuse_shared_reports(entries)
    return entries


def _entries(options: Mapping[str, Any], root: Path, place: str) -> Iterator[ProjectCheck]:
    """The programs x meshes of one item of the list."""
    for key in ("program", "mesh"):
        if key not in options:
            raise UsageError(f"names no {key}", where=place, hint=f"add a line `{key}: …`; {DOCUMENTATION}")
    rest = {key: value for key, value in options.items() if key not in ("program", "mesh")}
    for pattern in options["program"]:
        for program in _matching(root, pattern, place):
            for name in options["mesh"]:
                mesh = _shown(root / name) if (root / name).is_file() else name
                filled = {**rest, **_report_path(rest, root, program, mesh, place)}
                if "plan" in filled:
                    filled["plan"] = _shown(root / filled["plan"])
                yield ProjectCheck(_shown(program), mesh, filled, place)


def _requests(options: Mapping[str, Any]) -> list[str]:
    """The parts of the options' tactics and strategy: `FILE:NAME:AXIS` or `NAME:AXIS`."""
    from toast_cli.tactics.requests import parts_of

    return [*options.get("tactic", ()), *parts_of(str(options.get("strategy", "")))]


def _refuse_code(options: Mapping[str, Any], place: str) -> None:
    """Raises UsageError for a tactic that is Python code."""
    from toast_cli.tactics.requests import file_of

    code = next((request for request in _requests(options) if (file_of(request) or "").endswith(".py")), None)
    if code is not None:
        hint = f"{ALLOW_CODE} allows it; give that only where you trust the file, and who can change it"
        raise UsageError(
            f"the tactic {code} is Python code, which a project file cannot have run", where=place, hint=hint
        )


def _refuse_outside(entry: ProjectCheck, root: Path) -> None:
    """Raises UsageError for a stored report outside the project file's folder, links followed."""
    path = entry.options.get("against")
    if path is None:
        return
    folder = resolved(str(root), entry.place, UsageError)
    if not resolved(str(path), entry.place, UsageError).is_relative_to(folder):
        hint = (
            "--update writes reports in the project file's folder only; or name the program with --mesh and --against"
        )
        raise UsageError(f"the stored report {path} is outside {_shown(root)}", where=entry.place, hint=hint)


def _from_folder(options: dict[str, Any], root: Path) -> dict[str, Any]:
    """Makes paths of tactics and kernels files relative to the working directory."""
    from toast_cli.tactics.requests import file_of, parts_of

    def moved(request: str) -> str:
        file = file_of(request)
        return request if not file else _shown(root / file) + request.strip()[len(file) :]

    changed = dict(options)
    if "tactic" in options:
        changed["tactic"] = [moved(request) for request in options["tactic"]]
    if "strategy" in options:
        changed["strategy"] = "+".join(moved(request) for request in parts_of(options["strategy"]))
    if "kernels" in options:
        changed["kernels"] = _shown(root / options["kernels"])
    return changed


def _matching(root: Path, pattern: str, place: str) -> list[Path]:
    """The files that match a path or pattern, in order. A path without wildcards need not exist: reading it reports
    that."""
    if not any(letter in pattern for letter in "*?["):
        return [root / pattern]
    hint = f"patterns are relative to {_shown(root)}"
    if PurePath(pattern).anchor:
        raise UsageError(f'the pattern "{pattern}" is absolute', where=place, hint=hint)
    try:
        found = sorted(path for path in root.glob(pattern) if path.is_file())
    except (ValueError, RecursionError, re.error) as error:  # raised by Path.glob, depending on the Python version
        raise UsageError(f'the pattern "{pattern}" cannot be followed: {error}', where=place, hint=hint) from error
    if not found:
        raise UsageError(f'no file matches "{pattern}"', where=place, hint=hint)
    return found


def _report_path(options: Mapping[str, Any], root: Path, program: Path, mesh: str, place: str) -> dict[str, str]:
    """`against` with {program}, {mesh} and {shape} filled in."""
    if "against" not in options:
        return {}
    names = {
        "program": program_name(program),
        "mesh": Path(mesh).name.removesuffix(".yaml"),
        "shape": str(options.get("mesh-shape", "default")).replace(",", "-").replace("=", ""),
    }
    try:
        filled = options["against"].format_map(names)
    except (KeyError, ValueError, IndexError, AttributeError):
        hint = "use {program}, {mesh} and {shape}"
        raise UsageError(f'against: cannot fill in "{options["against"]}"', where=place, hint=hint) from None
    return {"against": _shown(root / filled)}


def program_name(path: Path) -> str:
    """`models/train.mlirbc.zst` -> `train`."""
    name = path.name
    while (suffix := Path(name).suffix) in _SUFFIXES and suffix:
        name = name.removesuffix(suffix)
    return name


def _refuse_shared_reports(entries: list[ProjectCheck]) -> None:
    seen: dict[str, ProjectCheck] = {}
    for entry in entries:
        path = entry.options.get("against")
        if path is not None and seen.setdefault(path, entry) is not entry:
            raise UsageError(
                f"two checks have the stored report {path}",
                where=entry.place,
                hint="put {program}, {mesh} or {shape} into `against`",
            )


def _options(facts: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The keys with their values as on the command line; strings for text, lists for repeatable options."""
    found: dict[str, Any] = {}
    for key, value in facts.items():
        name = key.replace("_", "-")
        if name not in KEYS:
            from toast_cli.base.yamltree import nearest

            raise UsageError(f'unknown key "{key}"', where=place, hint=nearest(name, KEYS))
        kind = KEYS[name]
        read = _read(kind, value)
        if read is None:
            raise UsageError(
                f"{key} is {reprlib.repr(value):.40}, not {_WANTED[kind]}", where=place, hint=DOCUMENTATION
            )
        for text in read if isinstance(read, list) else [read]:
            if isinstance(text, str) and not is_printable(text):
                raise UsageError(f"{key} holds control characters", where=place, hint=DOCUMENTATION)
        found[name] = read
    return found


def _read(kind: str, value: Any) -> Any:
    """The value converted to its kind; None if it is of another kind."""
    if kind == "flag":
        return value if isinstance(value, bool) else None
    if isinstance(value, bool):
        return None
    if kind == "whole":
        return value if isinstance(value, int) else None
    if kind == "text":
        return str(value) if isinstance(value, str | int | float) else None
    texts = [value] if isinstance(value, str) else value
    return texts if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts) else None


def _mapping(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UsageError("is not a mapping of keys to values", where=place, hint=DOCUMENTATION)
    return dict(value)


def _content(path: Path, shown: str) -> Any:
    if path.suffix == ".toml":
        section = _tool_section(path)
        if section is None:
            raise UsageError("has no [tool.toast]", where=shown, hint=DOCUMENTATION)
        return section
    import yaml

    try:
        return yaml.safe_load(text_of(read_file(str(path), TEXT_BYTES), shown, UsageError))
    except RecursionError:
        raise UsageError("not valid YAML: nested too deeply", where=shown) from None
    except ValueError as error:
        raise UsageError(f"not valid YAML: {error}", where=shown) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{shown}:{mark.line + 1}:{mark.column + 1}" if mark else shown
        raise UsageError(f"not valid YAML: {getattr(error, 'problem', None) or error}", where=where) from None


def _tool_section(path: Path) -> Any:
    """`[tool.toast]` of a pyproject.toml (or the file's top, for another name); None where there is none."""
    try:
        facts = tomllib.loads(text_of(read_file(str(path), TEXT_BYTES), _shown(path), UsageError))
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UsageError(f"not valid TOML: {why}", where=_shown(path)) from None
    tool = facts.get("tool")
    return tool.get("toast") if isinstance(tool, dict) else None


def _shown(path: Path) -> str:
    """The path relative to the working directory, or the absolute one if that is shorter."""
    return min(os.path.relpath(path), os.path.abspath(path), key=len)  # noqa: PTH100 (links stay as they are written)
