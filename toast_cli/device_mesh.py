"""Devices in the order that a plan is priced for. `emit.snippet` writes the function below into `shardings.py`, which
needs JAX alone.
"""

from math import gcd

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh


def device_mesh(axes: dict[str, int], devices: list[jax.Device]) -> Mesh:
    """`jax.make_mesh`, also where an axis has a part of a torus dimension, and where devices are in several slices or
    hosts: those are along the first axes. The compiler decides what the program leaves open (`AxisType.Auto`)."""
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
