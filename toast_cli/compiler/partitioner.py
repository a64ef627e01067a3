"""The partitioner's bugs: which versions of jaxlib miscompile some shardings, so that plans have to avoid them.

In: a version of jaxlib. Out: the `Workarounds` that it needs. `MENDED` has the first version that fixes each
bug.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import version

from toast_cli.plan.axis_assignment import Workarounds

Version = tuple[int, ...]

# Work-around -> the first version of jaxlib that does not need it; None: no such version is known. Seen with jaxlib
# 0.10.1 and 0.10.2, by tests/test_halo.py and `python benchmarks/fidelity.py` on convolutions of which image, kernel
# and space are split.
MENDED: Mapping[str, Version | None] = {"split_space": None}


def workarounds_for(jaxlib: str, mended: Mapping[str, Version | None] = MENDED) -> Workarounds:
    """The workarounds that plans need for this version of jaxlib."""
    number = tuple(int(part) for part in re.findall(r"\d+", jaxlib)[:3])
    return Workarounds(**{name: first is None or number < first for name, first in mended.items()})


def installed_workarounds() -> Workarounds:
    """The same for the installed version, which is assumed to partition the program."""
    return workarounds_for(version("jaxlib"))
