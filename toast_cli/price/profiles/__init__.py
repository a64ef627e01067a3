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
from toast_cli.price.profile import CompilerProfile, FusionLimits

# Platform -> the packages whose version is that of the chips' compiler.
PACKAGES = {"tpu": ("libtpu",), "gpu": ("jax-cuda12-pjrt", "jax-cuda13-pjrt")}

# Any XLA on an unmeasured chip: the passes that XLA has on every platform, and the chip's peak rates.
_PASSES = frozenset(
    {
        "fusion", "output-fusion", "recomputation", "polynomials", "shared-exponentials", "narrow-stores",
        "multi-output-fusion", "reduction-fusion", "early-results", "loops-first", "in-place-updates", "loop-copies",
        "scan-unification", "overlap", "reduction-combining", "common-subexpressions",
    }
)  # fmt: skip

# erf and erfc as libtpu 0.0.42.1 estimates arrays of 4096^2 on v4 (15, 52) and v6e (15, 48); the others are taken for
# as long as erfc.
POLYNOMIALS = {"chlo.erf": 15.0} | {
    f"chlo.{name}": 50.0 for name in ("erfc", "erf_inv", "lgamma", "digamma", "polygamma", "zeta", "bessel_i1e")
}
PLAIN = CompilerProfile(
    "XLA", "any", "", _PASSES, fusion=FusionLimits(polynomials=POLYNOMIALS), sources={
        "passes": "what XLA:TPU and XLA:GPU have in common",
        "attained": "the peak rates",
        "memory_tile": "unknown, arrays are not padded",
        "fusion": "polynomials: `python benchmarks/calibrate_ops.py --compile`, libtpu 0.0.42.1",
        "temporary_growth": "1: nothing is known",
    },
)  # fmt: skip


def find_profile(chip: Chip) -> CompilerProfile:
    """The profile of the newest measured version of the chip's compiler."""
    return (profiles_of(chip.preset) or [PLAIN])[-1]


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
