"""Devices in the order that was priced: of a torus, of several hosts or slices, and as `shardings.py` has them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from toast_cli import xla
from toast_cli.emit.device_mesh import device_mesh
from toast_cli.emit.specs import device_mesh_text


@dataclass(frozen=True)
class Device:
    """What JAX says of a device that is not here."""

    id: int
    platform: str
    device_kind: str
    slice_index: int = 0
    coords: tuple[int, ...] = ()
    core_on_chip: int = 0
    process_index: int = 0


def cube(edges: tuple[int, ...], slices: int = 1) -> list[Any]:
    places = product(range(slices), *(range(edge) for edge in reversed(edges)))
    return [Device(k, "tpu", "TPU v4", slice_, tuple(at[::-1])) for k, (slice_, *at) in enumerate(places)]


def hosts(count: int) -> list[Any]:
    return [Device(k, "gpu", "NVIDIA H100 80GB HBM3", k // 8) for k in range(8 * count)]


def steps(mesh: Any, axis: int) -> set[int]:
    """By how much the ids of neighbours along an axis differ."""
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    return {int(step) for step in np.diff(ids, axis=axis).ravel()}


@pytest.mark.parametrize(
    "axes", [{"data": 16, "model": 4}, {"data": 32, "model": 2}, {"data": 8, "model": 8}, {"x": 64}]
)
def test_every_shape_of_a_torus(axes: dict[str, int]) -> None:
    """`jax.make_mesh` refuses 32 x 2 and 8 x 8 on a cube of 4 x 4 x 4."""
    devices = cube((4, 4, 4))
    mesh = device_mesh(axes, devices)
    assert dict(mesh.shape) == axes and set(mesh.devices.flat) == set(devices)
    if axes in ({"data": 16, "model": 4}, {"x": 64}):
        assert (mesh.devices == jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices).devices).all()


# name -> devices, axes, steps in the ids along each axis
SLICES: dict[str, tuple[list[Any], dict[str, int], list[set[int]]]] = {
    "hosts along the first axis": (hosts(4), {"data": 4, "model": 8}, [{8}, {1}]),
    "the first axis also within a host": (hosts(4), {"data": 16, "model": 2}, [{2}, {1}]),
    "hosts along two axes": (hosts(4), {"data": 2, "model": 16}, [{16}, {1}]),
}


@pytest.mark.parametrize("name", SLICES)
def test_hosts_are_along_the_first_axes(name: str) -> None:
    devices, axes, expected = SLICES[name]
    mesh = device_mesh(axes, devices)
    assert [steps(mesh, k) for k in range(len(axes))] == expected


def test_slices_are_along_the_first_axis() -> None:
    devices = cube((4, 4, 4), slices=2)
    mesh = device_mesh({"data": 16, "model": 8}, devices)
    halves = [{device.slice_index for device in half.flat} for half in np.split(mesh.devices, 2)]
    assert halves == [{0}, {1}]


def test_one_host_and_axis_types() -> None:
    devices = xla.cpu_devices(8)
    mesh = device_mesh({"data": 4, "model": 2}, devices)
    assert list(mesh.devices.flat) == list(devices) and mesh.axis_types == (AxisType.Auto,) * 2
    assert prod(mesh.shape.values()) == 8


def test_shardings_py_has_the_whole_function() -> None:
    text = device_mesh_text()
    assert text.startswith("def device_mesh(") and text.count("\ndef ") == 0 and "return Mesh(" in text
