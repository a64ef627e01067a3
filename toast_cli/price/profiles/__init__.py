"""The available profiles: one file per compiler version, with one profile for each chip that it was measured on.

In: a chip. Out: the profile of its compiler. A new file in this folder is found by itself; it holds `PROFILES`,
chip preset -> `CompilerProfile`, and `RELEASE`, the version as numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pkgutil import iter_modules
from types import ModuleType

from toast_cli.hardware.model import Chip
from toast_cli.price.profile import CompilerProfile

# Platform -> the packages whose version is that of the chips' compiler.
PACKAGES = {"tpu": ("libtpu",), "gpu": ("jax-cuda12-pjrt", "jax-cuda13-pjrt")}
ANY = ""  # the preset of unmeasured chips


def find_profile(chip: Chip) -> CompilerProfile:
    """The profile of the newest measured version of the chip's compiler."""
    return (profiles_of(chip.preset) or profiles_of(ANY))[-1]


def version_note(chip: Chip) -> str:
    """A note if the installed version of the chip's compiler is unmeasured, else ""."""
    measured = [profile.version.split()[-1] for profile in profiles_of(chip.preset)]
    for package in PACKAGES[chip.platform] if measured else ():
        with suppress(PackageNotFoundError):
            installed = version(package)
            if installed not in measured:
                return (
                    f"predictions were fitted to the compiler of {package} {measured[-1]}, and {installed} is "
                    f"installed: `toast verify --compiler {chip.platform}` asks it"
                )
    return ""


def profiles_of(preset: str) -> list[CompilerProfile]:
    """All profiles for the chips of one preset, the newest last."""
    return [profile for profiles in _files() if (profile := profiles.get(preset))]


@cache
def _files() -> tuple[Mapping[str, CompilerProfile], ...]:
    """`PROFILES` of the files of this folder, the oldest release first."""
    files: list[ModuleType] = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]
    return tuple(file.PROFILES for file in sorted(files, key=lambda file: file.RELEASE))
