"""Finds specifications: a path or the name of a built-in one in, a `Spec` out."""

from __future__ import annotations

import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from toast_cli.errors import InputError, SpecError
from toast_cli.hardware.generated import canonical, generate
from toast_cli.hardware.schema import parse_spec
from toast_cli.hardware.spec import Spec
from toast_cli.hardware.yamltree import nearest
from toast_cli.inputs import TEXT_BYTES, read_file, text_of

# Examples of names for which a specification is generated.
EXAMPLES = "e.g. v5p-512, h100:64, 2xv5e-256"


def load_spec(name_or_path: str) -> Spec:
    """The specification in that file, the built-in one of that name (`v4-32` or `v4-32.yaml`), or one generated from
    the name (`v5p-512`, `h100:64`, `2xv5p-512`).

    A file of that path has precedence. Raises SpecError for an unknown name or an invalid file.
    """
    path = Path(name_or_path)
    if _is_a_file(path):
        return parse_spec(_read(name_or_path), name_or_path)
    built_in = _built_in_files()
    name = canonical(name_or_path.removesuffix(".yaml"))
    if name in built_in:
        return parse_spec(built_in[name].read_text(encoding="utf-8"), built_in[name].name)
    if path.name and _is_a_folder(path):
        raise SpecError("is a directory", where=name_or_path, hint="give a YAML file or a name from `toast mesh list`")
    text = generate(name_or_path)
    if text is not None:
        return parse_spec(text, name)
    raise SpecError(
        f'no mesh specification "{name_or_path}", neither a file nor a built-in one',
        hint=f"{nearest(path.name.removesuffix('.yaml'), available_specs())}; others by chip and number, {EXAMPLES}; "
        "see `toast mesh list`",
    )


def _is_a_file(path: Path) -> bool:
    """True if a file or pipe exists there; False for a name that no file can have."""
    try:
        return path.exists() and not path.is_dir()
    except (OSError, ValueError):
        return False


def _is_a_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def available_specs() -> list[str]:
    """Names of the built-in specifications, by chip and size."""
    return sorted(_built_in_files(), key=_natural)


def needs_no_file(name: str) -> bool:
    """True if a specification of that name needs no file of the user's."""
    try:
        return name in _built_in_files() or generate(name) is not None
    except SpecError:
        return False


def _built_in_files() -> dict[str, Traversable]:
    """Name -> packaged file."""
    folder = files("toast_cli.hardware") / "specs"
    return {file.name.removesuffix(".yaml"): file for file in folder.iterdir() if file.name.endswith(".yaml")}


def _read(path: str) -> str:
    try:
        content = read_file(path, TEXT_BYTES)
    except InputError as error:
        raise SpecError(error.what, where=path, hint=error.hint) from None
    return text_of(content, path, SpecError, "a mesh specification is YAML")


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key with numbers as numbers: v4-32 before v4-128."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name.lower())]
