"""Slice gathers: an all-gather over all devices of a large slice becomes an all-reduce of the local piece padded with
zeros.

It uses all links at once, as all-reduces over a whole slice do (see `reduce_scatter`). `python benchmarks/gathers.py`
compiles gathers by libtpu 0.0.42.1 for slices of v4, v5e, v5p and v6e: from 64 devices on, not of 32; on v4 and v5p
of every size that was tried (64 MiB), on v5e and v6e for results of up to 16 MiB before narrowing. Gathers over a part
of the devices stay. Without this pass every all-gather stays one.

Enters: the mesh, the axes and the size of the result. Leaves: whether an all-gather stays one.
"""

from __future__ import annotations

from math import prod

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.hardware.model import Mesh

NAME = "slice-gathers"


def stays_slice_gather(profile: CompilerProfile, mesh: Mesh, axes: tuple[int, ...], size: float) -> bool:
    """Whether the chip's compiler keeps an all-gather over `axes` whose result has `size` bytes on each device."""
    limits = profile.slice_gathers
    return (
        NAME not in profile.passes
        or mesh.devices < limits.devices
        or prod(mesh.sizes[axis] for axis in axes) < mesh.devices
        or size > limits.bytes
        or any(link.kind not in ("ring", "line") for axis in axes for link in mesh.axes[axis].links)
    )
