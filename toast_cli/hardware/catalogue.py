"""Where specifications come from: a path or the name of a ready one in, a `Spec` out."""

from __future__ import annotations

import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from toast_cli.errors import SpecError
from toast_cli.hardware.schema import parse_spec
from toast_cli.hardware.spec import Spec
from toast_cli.hardware.yamltree import nearest


def load_spec(name_or_path: str) -> Spec:
    """The specification in that file, or the ready one of that name (`v4-32` or `v4-32.yaml`).

    A file of that path comes first. Raises SpecError for an unknown name or an invalid file.
    """
    path = Path(name_or_path)
    if path.is_file():
        return parse_spec(_read(path), name_or_path)
    ready = _ready_files()
    name = name_or_path.removesuffix(".yaml")
    if name in ready:
        return parse_spec(ready[name].read_text(encoding="utf-8"), ready[name].name)
    if path.is_dir():
        raise SpecError("is a directory", where=name_or_path, hint="give a YAML file or a name from `toast mesh list`")
    raise SpecError(
        f'no mesh specification "{name_or_path}", neither a file nor a ready one',
        hint=f"{nearest(path.name.removesuffix('.yaml'), available_specs())}; see `toast mesh list`",
    )


def available_specs() -> list[str]:
    """Names of the ready specifications, by chip and size."""
    return sorted(_ready_files(), key=_natural)


def _ready_files() -> dict[str, Traversable]:
    """Name -> packaged file."""
    folder = files("toast_cli.hardware") / "specs"
    return {file.name.removesuffix(".yaml"): file for file in folder.iterdir() if file.name.endswith(".yaml")}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise SpecError("is not a text file", where=str(path), hint="a mesh specification is YAML") from None
    except OSError as error:
        raise SpecError(f"cannot be read: {error.strerror}", where=str(path)) from None


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key with numbers as numbers: v4-32 before v4-128."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name.lower())]
