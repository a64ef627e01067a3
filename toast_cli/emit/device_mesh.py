"""Arranges devices in the order that a plan is priced for. `emit.specs` copies the function below into
`shardings.py`, which must depend on JAX alone.
"""

from math import gcd

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh


def device_mesh(axes: dict[str, int], devices: list[jax.Device]) -> Mesh:
    """Like `jax.make_mesh`, but it also accepts axes that use part of a torus dimension, and devices in several slices
    or hosts; the first axes then run across slices. Axes are `AxisType.Auto`: the compiler decides what the program
    leaves open."""
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    left, across = slices, []
    for size in axes.values():
        across.append(gcd(size, left))
        left //= across[-1]
    within = [size // part for size, part in zip(axes.values(), across, strict=True)]
    if slices == 1:
        arranged = mesh_utils.create_device_mesh(within, devices, allow_split_physical_axes=True)
    else:
        arranged = mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)
    return Mesh(arranged, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
