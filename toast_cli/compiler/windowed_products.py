"""Windowed products: a contraction whose result is reduce-scattered is made piece by piece while the pieces go around.

XLA:TPU does that where the contraction of one device takes at least as long as passing on one device's piece, at the
rates of the matrix unit in bf16 and of one link, around more than two devices that are no square of four. (On slices of
v4, v5e, v5p and v6e the change comes within 20 % of that, libtpu 0.0.42.1.) Its reduce-scatter then stays, whatever its
tiles, and hides behind the contraction. Without this pass no contraction is made piece by piece.

Enters: a mesh, and a contraction with what each device keeps of it. Leaves: whether it is made piece by piece.
"""

from __future__ import annotations

from math import prod

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.compiler.reduce_scatter import is_square
from toast_cli.hardware.model import Mesh

NAME = "windowed-products"


def passed_around(profile: CompilerProfile, mesh: Mesh, axes: tuple[int, ...], flops: float, size: float) -> bool:
    """Whether a product of so many flops, of which every device keeps `size` bytes, is made piece by piece as these go
    around `axes`."""
    count = prod(mesh.sizes[axis] for axis in axes)
    if NAME not in profile.passes or count <= 2 or is_square(mesh, axes, count):
        return False
    # The rate is that of a whole link, not of one that several rings share.
    hop = size / max(link.bytes_per_second for axis in mesh.axes for link in axis.links)
    return flops / mesh.chip.matrix_flops["bf16"] >= hop
