"""Collectives between GPUs: against published results of nccl-tests, arithmetic done by hand, and laws."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toast_cli.hardware import Mesh, load_spec, parse_spec
from toast_cli.hardware.model import Link
from toast_cli.price.collectives import KINDS, collective_seconds, nccl_lines

GIB, US = 2**30, 1e-6
# Bytes through each device's links over the bytes of the array, by which nccl-tests defines its bus bandwidth.
PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
# Two hosts of 8 A100 with 4 adapters of 200 Gb/s each.
HALF_RAILS = "chip: A100-80\ntopology:\n  switch: 8\n  network: {hosts: 2, bandwidth: 12.5e9}\naxes:\n  data: 16\n"


def machine(name: str) -> Mesh:
    spec = load_spec(name) if "\n" not in name else parse_spec(name, "machine.yaml")
    return spec.mesh()


def bus_bandwidth(name: str, kind: str, array: float) -> float:
    """GB/s, as nccl-tests prints it; array: bytes of the whole array."""
    mesh = machine(name)
    size = array / mesh.devices if kind == "reduce-scatter" else array
    seconds = collective_seconds(mesh, kind, size, tuple(range(len(mesh.axes))))
    return PASSES[kind] * (mesh.devices - 1) / mesh.devices * array / seconds / 1e9


# machine, kind, bytes, measured bus bandwidth in GB/s, source on github.com/NVIDIA
PUBLISHED = [
    ("a100:8", "all-reduce", 4 * GIB, 232.5, "nccl, issue 1048"),
    (HALF_RAILS, "all-reduce", 8 * GIB, 95.1, "nccl-tests, issue 252, in rings"),
    ("h100:8", "all-gather", 16 * GIB, 360, "nccl-tests, issue 326"),
    ("h100:8", "reduce-scatter", 16 * GIB, 370, "nccl-tests, issue 212: other than all-reduce"),
    ("h100:8", "all-reduce", 4 * GIB, 476, "nccl-tests, issue 290, with NVLink SHARP"),
    ("h100:16", "all-reduce", 8 * GIB, 470, "nccl, issue 2409: expected of two hosts with 8 x 400 Gb/s"),
    ("h200:1984", "all-reduce", GIB / 2, 350, "nccl-tests, issue 283: typical of 248 hosts"),
]


@pytest.mark.parametrize(("name", "kind", "array", "measured", "source"), PUBLISHED, ids=[r[-1] for r in PUBLISHED])
def test_published_bus_bandwidths(name: str, kind: str, array: float, measured: float, source: str) -> None:
    assert bus_bandwidth(name, kind, array) == pytest.approx(measured, rel=0.05), source


# All-reduces of 8 H20, which have an H100's NVLink, in rings (kvcache-ai/Mooncake, pull request 3484).
@pytest.mark.parametrize(("array", "measured"), [(2**20, 27.8), (2**24, 121.3), (2**25, 195.4), (2**30, 5252.6)])
def test_published_times_of_rings(array: float, measured: float) -> None:
    nvlink = Link("switch", 8, 450e9, 3.4 * US)
    rings = nccl_lines("all-reduce", (nvlink,), "H100")[:3]
    assert min(alpha + beta * array for alpha, beta in rings) == pytest.approx(measured * US, rel=0.1)


def test_a_small_array_takes_the_protocol_of_least_latency() -> None:
    # LL: 6.6 us to start, 14 steps of 0.6 us.
    assert seconds("all-reduce", "H100", (8, 1), 8.0) == pytest.approx(15 * US, rel=0.001)


def test_a_ring_over_hosts_uses_the_adapters_of_all_its_devices() -> None:
    # 64 GPUs: 8 x 50 GB/s x 0.96 leave each host, more than the 370.8 GB/s of NVLink. 8 GPUs in 8 hosts: 48 GB/s.
    mesh = load_spec("h100-64").mesh()
    assert collective_seconds(mesh, "all-gather", 64e9, (0, 1)) == pytest.approx(63e9 / 370.8e9, rel=0.01)
    assert collective_seconds(mesh, "all-gather", 64e9, (0,)) == pytest.approx(56e9 / 48e9, rel=0.01)


def test_an_all_to_all_sends_over_both_at_once() -> None:
    # Each of 64 GPUs sends 7/64 over NVLink and 56/64 over its adapter.
    mesh = load_spec("h100-64").mesh()
    assert collective_seconds(mesh, "all-to-all", 64e9, (0, 1)) == pytest.approx(56e9 / 48e9, rel=0.01)


chips = st.sampled_from(["P100", "V100", "A100-80", "H100", "B200", ""])
sizes = st.tuples(st.integers(1, 16), st.integers(1, 64)).filter(lambda both: both != (1, 1))


def seconds(kind: str, chip: str, size: tuple[int, int], count: float, faster: float = 1.0) -> float:
    inside = [Link("switch", size[0], 450e9 * faster, 3.4 * US / faster)] if size[0] > 1 else []
    outside = [Link("network", size[1], 50e9 * faster, 14 * US / faster)] if size[1] > 1 else []
    return min(alpha + beta * count for alpha, beta in nccl_lines(kind, (*inside, *outside), chip))


@given(st.sampled_from(KINDS), chips, sizes, st.floats(1, 1e10), st.floats(1, 10))
def test_more_bytes_are_never_faster_and_faster_links_never_slower(
    kind: str, chip: str, size: tuple[int, int], count: float, factor: float
) -> None:
    assert seconds(kind, chip, size, count * factor) >= seconds(kind, chip, size, count) > 0.0
    assert seconds(kind, chip, size, count, factor) <= seconds(kind, chip, size, count) * (1 + 1e-12)


@given(chips, sizes, st.floats(1, 1e10))
def test_an_all_reduce_is_never_slower_than_its_halves(chip: str, size: tuple[int, int], count: float) -> None:
    part = count / (size[0] * size[1])
    halves = seconds("reduce-scatter", chip, size, part) + seconds("all-gather", chip, size, count)
    assert seconds("all-reduce", chip, size, count) <= halves * (1 + 1e-12)
