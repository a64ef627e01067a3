"""Collective times: each formula against arithmetic done by hand, and the laws they keep."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toast_cli.hardware import Axis, Link, Mesh, available_specs, find_preset, load_spec, parse_shape, parse_spec
from toast_cli.hardware.model import LinkKind
from toast_cli.price.collectives import KINDS, alpha_beta, collective_seconds, nccl_lines

US = 1e-6
GATHER_LIKE = ("all-reduce", "all-gather", "reduce-scatter")


def ring(size: int, rate: float = 45e9, dimension: str = "") -> Link:
    return Link("ring", size, rate, 1 * US, dimension)


def line(size: int, rate: float = 45e9, dimension: str = "") -> Link:
    return Link("line", size, rate, 1 * US, dimension)


def switch(size: int, rate: float = 450e9) -> Link:
    return Link("switch", size, rate, 3 * US)


def network(size: int, rate: float = 50e9) -> Link:
    return Link("network", size, rate, 10 * US)


def mesh_of(*links: tuple[Link, ...]) -> Mesh:
    """One axis for each tuple of links."""
    sizes = []
    for of_axis in links:
        size = 1
        for link in of_axis:
            size *= link.size
        sizes.append(size)
    axes = tuple(Axis(f"a{n}", size, of_axis) for n, (size, of_axis) in enumerate(zip(sizes, links, strict=True)))
    return Mesh("test", find_preset("v4").chip, axes, 1)


# kind, links of one axis, bytes of the result on one device, seconds: hops * latency + bytes over the tightest link
BY_HAND: list[tuple[str, tuple[Link, ...], float, float]] = [
    # Ring of 4, 45 GB/s a link: 3/4 of 90 MB arrive from two sides at 90 GB/s together: 67.5 MB / 90 GB/s = 750 us; 2
    # hops.
    ("all-gather", (ring(4),), 90e6, 750 * US + 2 * US),
    # The shard is 90 MB, the array 360 MB: four times the time.
    ("reduce-scatter", (ring(4),), 90e6, 3000 * US + 2 * US),
    # Reduce-scatter and all-gather of the 90 MB array.
    ("all-reduce", (ring(4),), 90e6, 2 * (750 * US + 2 * US)),
    # Chunks of 90/4 = 22.5 MB; of them go 1 one hop left, 1 one hop right, 1 two hops: 4 hop-chunks on 2 links:
    # 2 * 22.5 MB / 45 GB/s = 1000 us; the farthest is 2 hops away.
    ("all-to-all", (ring(4),), 90e6, 1000 * US + 2 * US),
    # One hop over one link: 90 MB / 45 GB/s.
    ("collective-permute", (ring(4),), 90e6, 2000 * US + 1 * US),
    # Line of 4: the end receives 67.5 MB over its only link, over 3 hops.
    ("all-gather", (line(4),), 90e6, 1500 * US + 3 * US),
    ("all-reduce", (line(4),), 90e6, 2 * (1500 * US + 3 * US)),
    # The middle link carries 2 x 2 chunks of 22.5 MB each way.
    ("all-to-all", (line(4),), 90e6, 2000 * US + 3 * US),
    # The last device sends to the first over 3 hops, against the stream of the others.
    ("collective-permute", (line(4),), 90e6, 2000 * US + 3 * US),
    # Two devices: half of 90 MB over one link.
    ("all-gather", (line(2),), 90e6, 1000 * US + 1 * US),
    # Odd ring of 5: 4/5 of 90 MB at 90 GB/s, 2 hops.
    ("all-gather", (ring(5),), 90e6, 800 * US + 2 * US),
    # Odd ring of 3, all-to-all: one chunk of 30 MB each way over one hop.
    ("all-to-all", (ring(3),), 90e6, 30e6 / 45e9 + 1 * US),
    # 2-D torus 4 x 4: 15/16 of 96 MB over 180 GB/s = 500 us; 2 + 2 hops.
    ("all-gather", (ring(4), ring(4)), 96e6, 500 * US + 4 * US),
    # A ring beside a line: 15/16 of 144 MB over 90 + 45 GB/s = 1000 us; 2 + 3 hops.
    ("all-gather", (ring(4), line(4)), 144e6, 1000 * US + 5 * US),
    # Lines of 2 and 4: 7/8 of 720 MB over 45 + 45 GB/s = 7 ms; 1 + 3 hops.
    ("all-gather", (line(2), line(4)), 720e6, 7000 * US + 4 * US),
    # A very fast line of 2 cannot take its share: the slab of a ring lacks 3/4 of 80 MB, 30 MB on each of its 2
    # devices, and gets them over the ring alone: 30 MB / 90 GB/s = 333 us. (All links at work: 70 MB / 1090 GB/s.)
    ("all-gather", (line(2, 1000e9), ring(4)), 80e6, 30e6 / 90e9 + 3 * US),
    # 2-D all-to-all: both dimensions work at once, the longer one decides: 8 * 90 MB / (8 * 45 GB/s) = 2000 us; 2 + 4
    # hops.
    ("all-to-all", (ring(4), ring(8)), 90e6, 2000 * US + 6 * US),
    # Switch of 8: 7/8 of 360 MB at 450 GB/s = 700 us in log2 8 = 3 messages.
    ("all-gather", (switch(8),), 360e6, 700 * US + 9 * US),
    ("all-to-all", (switch(8),), 360e6, 700 * US + 9 * US),
    ("all-reduce", (switch(8),), 360e6, 2 * (700 * US + 9 * US)),
    ("collective-permute", (switch(8),), 360e6, 800 * US + 3 * US),
    # 6 devices need 3 rounds.
    ("all-gather", (switch(6),), 0.001, 0.001 * 5 / 6 / 450e9 + 9 * US),
    # 2 hosts of 8: the network joins eighths of 360 MB: half of 45 MB at 50 GB/s = 450 us, one message; then the
    # switch.
    ("all-gather", (switch(8), network(2)), 360e6, 450 * US + 10 * US + 700 * US + 9 * US),
    ("all-reduce", (switch(8), network(2)), 360e6, 2 * (450 * US + 10 * US + 700 * US + 9 * US)),
    # All-to-all moves half of the array over the network and 7/8 of it inside: 3600 + 700 us.
    ("all-to-all", (switch(8), network(2)), 360e6, 3600 * US + 10 * US + 700 * US + 9 * US),
    # At the network's rate.
    ("collective-permute", (switch(8), network(2)), 50e6, 1000 * US + 13 * US),
    # Two cores a chip, then a ring of 4: the ring works on halves: 750 us of 180 MB, then half of 180 MB at 225 GB/s.
    ("all-gather", (Link("switch", 2, 225e9, 1 * US), ring(4)), 180e6, 750 * US + 2 * US + 400 * US + 1 * US),
]


@pytest.mark.parametrize(
    ("kind", "links", "count", "seconds"),
    BY_HAND,
    ids=[f"{r[0]} {'x'.join(f'{k.kind}{k.size}' for k in r[1])}" for r in BY_HAND],
)
def test_by_hand(kind: str, links: tuple[Link, ...], count: float, seconds: float) -> None:
    assert collective_seconds(mesh_of(links), kind, count, (0,)) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_do_takes_no_time(kind: str) -> None:
    mesh = mesh_of((ring(4),), ())
    assert collective_seconds(mesh, kind, 0, (0,)) == 0
    assert collective_seconds(mesh, kind, 1e6, ()) == 0
    assert collective_seconds(mesh, kind, 1e6, (1,)) == 0


def test_small_arrays_cost_their_hops() -> None:
    # Scaling book, "Sharded Matrices", question 3: 256 bytes gathered on a v4 ring of 4 take 2 hops, about 2 us.
    mesh = load_spec("v4-128").mesh(parse_shape("x=4,y=4,z=4"))
    assert collective_seconds(mesh, "all-gather", 256, (0,)) == pytest.approx(2 * US, rel=0.01)


def test_the_scaling_books_worked_examples() -> None:
    # Question 2: bf16[1024, 4096] on v4 4x4x4, gathered over one axis of a Y-sharded array: 2BD/4 / 90 GB/s = 23 us in
    # the limit of a long ring; a ring of 4 already holds a quarter. Over two axes: 2BD / 180 GB/s = 46 us, less a
    # sixteenth.
    # sixteenth.
    mesh = load_spec("v4-128").mesh(parse_shape("x=4,y=4,z=4"))
    array = 2 * 1024 * 4096
    one = collective_seconds(mesh, "all-gather", array / 4, (0,)) - 2 * US
    both = collective_seconds(mesh, "all-gather", array, (0, 1)) - 4 * US
    assert one == pytest.approx(23.3 * US * 3 / 4, rel=0.01)
    assert both == pytest.approx(46.6 * US * 15 / 16, rel=0.01)
    # Part 3 ("AllGather" pop quiz): 34 MB over a v5e line of 4, three hops of 8.4 MB at 45 GB/s: 560 us.
    v5e = load_spec("v5e-16").mesh()
    assert collective_seconds(v5e, "all-gather", 4 * 8.4e6, (0,)) - 3 * US == pytest.approx(560 * US, rel=0.001)


def load_of_busiest_link(size: int, wraps: bool) -> float:
    """Chunks over the busiest one-way link when every device sends one chunk to every other the shortest way."""
    loads: dict[tuple[int, int], float] = {}
    for start, end in product(range(size), repeat=2):
        right, left = (end - start) % size, (start - end) % size
        ways = (
            [1]
            if not wraps and end > start
            else [-1]
            if not wraps
            else [w for w, d in ((1, right), (-1, left)) if d <= size / 2]
        )
        for way in ways:
            at = start
            while at != end:
                loads[at, way] = loads.get((at, way), 0.0) + 1 / len(ways)
                at = (at + way) % size
    return max(loads.values())


@pytest.mark.parametrize("size", range(2, 18))
@pytest.mark.parametrize("wraps", [True, False])
def test_all_to_all_is_the_load_of_the_busiest_link(size: int, wraps: bool) -> None:
    _, beta = alpha_beta("all-to-all", ((ring if wraps else line)(size, 1.0),))
    assert beta * size == pytest.approx(load_of_busiest_link(size, wraps))


# Axes that share a physical dimension


def test_pieces_of_one_dimension_work_as_the_whole_again() -> None:
    spec = load_spec("v5e-256")
    whole = spec.mesh(parse_shape("data=16,model=16"))
    cut = spec.mesh(parse_shape("a=16,b=4,c=4"))
    for kind in KINDS:
        assert collective_seconds(cut, kind, 1e6, (1, 2)) == pytest.approx(collective_seconds(whole, kind, 1e6, (1,)))


def test_an_outer_piece_shares_its_links() -> None:
    # Ring of 16 cut in 4 (outer) x 4 (inner): the outer pieces close rings of 4 whose hops cross 4 links and share each
    # with 3 other rings: 3/4 of 90 MB / (2 * 45/4 GB/s) = 3 ms and 2 * 4 us.
    mesh = load_spec("v5e-256").mesh(parse_shape("a=16,b=4,c=4"))
    assert collective_seconds(mesh, "all-gather", 90e6, (1,)) == pytest.approx(3000 * US + 8 * US)


def test_pieces_that_do_not_touch_take_turns() -> None:
    # Ring of 16 cut in 2 x 4 x 2; the first and last together cannot be one piece, nor work at the same time: the inner
    # pair gathers half of 90 MB over one link (1 ms, 1 hop); the outer one, 8 links apart, joins halves of the array
    # before: 1/2 * 45 MB / (2 * 45/8 GB/s) = 2 ms and 8 us.
    mesh = load_spec("v5e-256").mesh(parse_shape("a=16,b=2,c=4,d=2"))
    assert [axis.links[0].stride for axis in mesh.axes] == [1, 8, 2, 1]
    assert collective_seconds(mesh, "all-gather", 90e6, (1, 3)) == pytest.approx(3000 * US + 9 * US)


# Laws

kinds = st.sampled_from(KINDS)
bytes_ = st.floats(1, 1e10)
link_kinds: st.SearchStrategy[LinkKind] = st.sampled_from(["ring", "line", "switch", "network"])
links_ = st.lists(
    st.builds(
        Link, link_kinds, st.integers(2, 32), st.floats(1e9, 1e12), st.floats(0, 1e-4), st.sampled_from(["", "x", "y"]),
        st.sampled_from([1, 2, 4]),
    ),
    min_size=1,
    max_size=4,
)  # fmt: skip


def seconds(kind: str, links: list[Link], count: float) -> float:
    return collective_seconds(mesh_of(tuple(links)), kind, count, (0,))


@given(kinds, links_, bytes_, st.floats(1, 10))
def test_more_bytes_are_never_faster(kind: str, links: list[Link], count: float, factor: float) -> None:
    assert seconds(kind, links, count * factor) >= seconds(kind, links, count)


@given(kinds, links_, bytes_, st.floats(1, 10), st.integers(0, 3))
def test_a_faster_link_is_never_slower(kind: str, links: list[Link], count: float, factor: float, which: int) -> None:
    which %= len(links)
    faster = replace(
        links[which],
        bytes_per_second=links[which].bytes_per_second * factor,
        latency_seconds=links[which].latency_seconds / factor,
    )
    before = seconds(kind, links, count)
    assert seconds(kind, [*links[:which], faster, *links[which + 1 :]], count) <= before * (1 + 1e-12)


@given(kinds, st.lists(st.integers(2, 16), min_size=1, max_size=3), bytes_)
def test_wraparound_is_never_slower(kind: str, sizes: list[int], count: float) -> None:
    assert seconds(kind, [ring(size) for size in sizes], count) <= seconds(kind, [line(size) for size in sizes], count)


@given(links_, bytes_)
def test_all_reduce_is_reduce_scatter_and_all_gather(links: list[Link], count: float) -> None:
    mesh = mesh_of(tuple(links))
    scatter = collective_seconds(mesh, "reduce-scatter", count / mesh.devices, (0,))
    gather = collective_seconds(mesh, "all-gather", count, (0,))
    assert collective_seconds(mesh, "all-reduce", count, (0,)) == pytest.approx(scatter + gather)


@pytest.mark.parametrize("name", available_specs())
def test_both_axes_at_once_are_never_slower_than_one_after_the_other(name: str) -> None:
    spec = load_spec(name)
    for shape in spec.mesh_shapes():
        if len(shape) < 2:
            continue
        mesh = spec.mesh(shape)
        for kind in KINDS:
            assert collective_seconds(mesh, kind, 1e9, (0, 1)) == collective_seconds(mesh, kind, 1e9, (1, 0))
        for first, second in ((0, 1), (1, 0)):
            gathered = collective_seconds(mesh, "all-gather", 1e9 / mesh.sizes[second], (first,))
            gathered += collective_seconds(mesh, "all-gather", 1e9, (second,))
            # NCCL's ring of p devices takes p - 1 steps.
            steps = mesh.devices * 3.4 * US if mesh.chip.platform == "gpu" else 0.0
            assert collective_seconds(mesh, "all-gather", 1e9, (0, 1)) <= gathered * (1 + 1e-9) + steps


@pytest.mark.parametrize("name", available_specs())
def test_no_collective_beats_the_bytes_that_must_cross(name: str) -> None:
    # A device cannot receive faster than over all its links at once.
    mesh = load_spec(name).mesh()
    for number, axis in enumerate(mesh.axes):
        into = sum(link.bytes_per_second * (2 if link.kind == "ring" else 1) for link in axis.links)
        assert collective_seconds(mesh, "all-gather", 1e9, (number,)) >= 1e9 * (axis.size - 1) / axis.size / into


# -- collectives between GPUs: against published results of nccl-tests, arithmetic done by hand, and laws


GIB, MICROSECONDS = 2**30, 1e-6
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
    seconds_of = collective_seconds(mesh, kind, size, tuple(range(len(mesh.axes))))
    return PASSES[kind] * (mesh.devices - 1) / mesh.devices * array / seconds_of / 1e9


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
    nvlink = Link("switch", 8, 450e9, 3.4 * MICROSECONDS)
    rings = nccl_lines("all-reduce", (nvlink,), "H100")[:3]
    assert min(alpha + beta * array for alpha, beta in rings) == pytest.approx(measured * MICROSECONDS, rel=0.1)


def test_a_small_array_takes_the_protocol_of_least_latency() -> None:
    # LL: 6.6 us to start, 14 steps of 0.6 us.
    assert seconds_of("all-reduce", "H100", (8, 1), 8.0) == pytest.approx(15 * MICROSECONDS, rel=0.001)


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


def seconds_of(kind: str, chip: str, size: tuple[int, int], count: float, faster: float = 1.0) -> float:
    inside = [Link("switch", size[0], 450e9 * faster, 3.4 * MICROSECONDS / faster)] if size[0] > 1 else []
    outside = [Link("network", size[1], 50e9 * faster, 14 * MICROSECONDS / faster)] if size[1] > 1 else []
    return min(alpha + beta * count for alpha, beta in nccl_lines(kind, (*inside, *outside), chip))


@given(st.sampled_from(KINDS), chips, sizes, st.floats(1, 1e10), st.floats(1, 10))
def test_more_bytes_are_never_faster_and_faster_links_never_slower(
    kind: str, chip: str, size: tuple[int, int], count: float, factor: float
) -> None:
    assert seconds_of(kind, chip, size, count * factor) >= seconds_of(kind, chip, size, count) > 0.0
    assert seconds_of(kind, chip, size, count, factor) <= seconds_of(kind, chip, size, count) * (1 + 1e-12)


@given(chips, sizes, st.floats(1, 1e10))
def test_an_all_reduce_is_never_slower_than_its_halves(chip: str, size: tuple[int, int], count: float) -> None:
    part = count / (size[0] * size[1])
    halves = seconds_of("reduce-scatter", chip, size, part) + seconds_of("all-gather", chip, size, count)
    assert seconds_of("all-reduce", chip, size, count) <= halves * (1 + 1e-12)
