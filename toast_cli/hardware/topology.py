"""Physical dimensions: the `topology` section of a specification in, the dimensions of the devices out; and the links
that logical mesh axes run over.

Dimensions come innermost (fastest) first: `core` inside a chip, `x` `y` `z` of a torus or the `switch` of a host, then
the `network` between slices or hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd, isqrt, prod

from toast_cli.base.units import parse_bandwidth, parse_seconds
from toast_cli.base.yamltree import YamlValue
from toast_cli.hardware.chips import Preset, Wire
from toast_cli.hardware.model import Link, LinkKind

_TORUS_NAMES = ("x", "y", "z", "w")


@dataclass(frozen=True, slots=True)
class Dimension:
    """One physical dimension; `bytes_per_second` and `latency_seconds` as in `model.Link`."""

    name: str
    kind: LinkKind
    size: int
    bytes_per_second: float
    latency_seconds: float


def read_topology(entry: YamlValue | None, preset: Preset | None) -> tuple[Dimension, ...]:
    """The physical dimensions of a slice or cluster, innermost first; dimensions of one device are left out.

    Figures the section does not give come from the chip preset; without a preset they are required. No section at all
    means one chip. Raises SpecError at the line.
    """
    if entry is None:
        return tuple(_core(None, preset))
    keys = entry.section("torus", "wraparound", "link", "switch", "core", "network")
    if ("torus" in keys) == ("switch" in keys) and "torus" in keys:
        raise keys["switch"].error("topology has both torus and switch", "keep the one the machine has")
    dimensions = _core(keys.get("core"), preset)
    if "torus" in keys:
        dimensions += _torus(keys, preset)
    else:
        for key in ("wraparound", "link"):
            if key in keys:
                raise keys[key].error(f"topology.{key} belongs to a torus", "add topology.torus, e.g. [4, 4]")
    if "switch" in keys:
        dimensions += _switch(keys["switch"], preset)
    if "network" in keys:
        inside = prod(dimension.size for dimension in dimensions)
        dimensions += _network(keys["network"], preset, inside)
    return tuple(dimension for dimension in dimensions if dimension.size > 1)


def wraparound(shape: tuple[int, ...], wrap_edge: int) -> tuple[bool, ...]:
    """True for each dimension of a TPU slice of that shape that is a ring (see `Preset.wrap_edge` for the rule)."""
    if wrap_edge:
        return tuple(size == wrap_edge for size in shape)
    return (len(shape) == 3 and all(size % 4 == 0 for size in shape),) * len(shape)


def _core(entry: YamlValue | None, preset: Preset | None) -> list[Dimension]:
    """The devices of one chip, when it has several."""
    if preset is None or "core" not in preset.wires:
        if entry is not None:
            raise entry.error("topology.core joins the devices of one chip, and this chip is one device")
        return []
    keys = entry.section("bandwidth", "latency") if entry is not None else {}
    wire = _wire(entry, keys, preset.wires["core"])
    return [Dimension("core", "switch", preset.devices_per_chip, wire.bytes_per_second, wire.latency_seconds)]


def _torus(keys: dict[str, YamlValue], preset: Preset | None) -> list[Dimension]:
    """Torus dimensions; `torus` counts chips, whose links all devices of a chip share."""
    sharing = preset.devices_per_chip if preset else 1
    entry = keys["torus"]
    shape = tuple(item.integer() for item in entry.items())
    _check_torus(entry, shape, preset)
    rings = _rings(keys.get("wraparound"), shape, preset)
    link = keys.get("link")
    figures = link.section("bandwidth", "latency") if link is not None else {}
    share = preset.wires["link"] if preset else None
    per_chip = Wire(share.bytes_per_second * sharing, share.latency_seconds) if share else None
    wire = _wire(link or entry, figures, per_chip)
    return [
        Dimension(name, "ring" if ring else "line", size, wire.bytes_per_second / sharing, wire.latency_seconds)
        for name, size, ring in zip(_TORUS_NAMES, shape, rings, strict=False)
    ]


def _check_torus(entry: YamlValue, shape: tuple[int, ...], preset: Preset | None) -> None:
    limit = preset.torus_rank if preset else len(_TORUS_NAMES)
    if preset and not limit:
        raise entry.error(f"{preset.chip.name} has no torus", "use topology.switch, e.g. switch: 8")
    if len(shape) > limit:
        name = preset.chip.name if preset else "a torus here"
        raise entry.error(f"topology.torus has {len(shape)} dimensions; {name} has at most {limit}")
    if preset and prod(shape) > preset.pod_chips:
        raise entry.error(
            f"topology.torus has {prod(shape)} chips; one {preset.chip.name} slice has at most {preset.pod_chips}",
            "use topology.network for several slices",
        )


def _rings(entry: YamlValue | None, shape: tuple[int, ...], preset: Preset | None) -> tuple[bool, ...]:
    """True for each torus dimension with wraparound: as written, else by the chip's rule, else none."""
    if entry is None:
        return wraparound(shape, preset.wrap_edge) if preset else (False,) * len(shape)
    flags = tuple(item.boolean() for item in entry.items())
    if not entry.is_sequence:
        return flags * len(shape)
    if len(flags) != len(shape):
        raise entry.error(f"topology.wraparound has {len(flags)} entries for {len(shape)} torus dimensions")
    return flags


def _switch(entry: YamlValue, preset: Preset | None) -> list[Dimension]:
    """Devices connected by one switch: `switch: 8` or `switch: {size: 8, bandwidth: 450GB/s}`."""
    if preset and preset.torus_rank:
        raise entry.error(f"{preset.chip.name} devices are joined by a torus", "use topology.torus, e.g. [4, 4]")
    keys = entry.section("size", "bandwidth", "latency") if entry.is_mapping else {"size": entry}
    if "size" not in keys:
        raise entry.error("topology.switch has no size", "add size: the number of devices at one switch")
    wire = _wire(entry, keys, preset.wires["link"] if preset else None)
    return [Dimension("switch", "switch", keys["size"].integer(), wire.bytes_per_second, wire.latency_seconds)]


def _network(entry: YamlValue, preset: Preset | None, inside: int) -> list[Dimension]:
    """Hosts or slices joined by a network: `network: 2` or `network: {hosts: 2, bandwidth: 400Gb/s, per: host}`.

    `inside` is the number of devices of one slice or host.
    """
    counts = ("hosts", "slices")
    keys = entry.section(*counts, "bandwidth", "per", "latency") if entry.is_mapping else {"hosts": entry}
    named = [key for key in counts if key in keys]
    if len(named) != 1:
        raise entry.error("topology.network needs one of hosts and slices", "e.g. hosts: 2")
    wire = _wire(entry, keys, preset.wires["network"] if preset else None)
    sharing = 1
    if "bandwidth" in keys:
        per = keys["per"].choice(("device", "chip", "host")) if "per" in keys else "device"
        on_host = preset.devices_per_host if preset and preset.torus_rank else inside
        on_chip = preset.devices_per_chip if preset else 1
        sharing = {"device": 1, "chip": on_chip, "host": min(on_host, inside)}[per]
    elif "per" in keys:
        raise keys["per"].error("topology.network.per says whose the bandwidth is", "add bandwidth, e.g. 400Gb/s")
    size = keys[named[0]].integer()
    return [Dimension("network", "network", size, wire.bytes_per_second / sharing, wire.latency_seconds)]


def _wire(entry: YamlValue | None, keys: dict[str, YamlValue], default: Wire | None) -> Wire:
    """Bandwidth and latency as written in `keys`, else the preset's."""
    bandwidth = keys["bandwidth"].quantity(parse_bandwidth) if "bandwidth" in keys else None
    latency = keys["latency"].quantity(parse_seconds) if "latency" in keys else None
    if bandwidth is None and default is None and entry is not None:
        name = entry.name if entry.name != "topology.torus" else "topology.link"
        raise entry.error(
            f"{name} needs a bandwidth", "a chip preset would bring one; else write e.g. bandwidth: 45GB/s"
        )
    base = default or Wire(bandwidth or 0.0, 1e-6)
    return Wire(
        base.bytes_per_second if bandwidth is None else bandwidth,
        base.latency_seconds if latency is None else latency,
    )


# ---------------------------------------------------------------- links of mesh axes
# Maps logical axes to physical dimensions: axis sizes and dimensions in, the links each axis runs over out.
#
# A dimension may be divided between several axes: the later (faster) axis gets the inner, contiguous piece, which is a
# line; the outer piece is strided, so its hops cross as many links as the stride and share them with as many groups.

# [axes] devices of one dimension that each axis covers.
Cut = tuple[int, ...]


def lay_out(
    sizes: Sequence[int], dimensions: Sequence[Dimension], allowed: Sequence[frozenset[str] | None]
) -> list[tuple[Link, ...]] | None:
    """[axes] links of each axis, innermost first; None if no assignment exists.

    `sizes` [axes], first axis slowest; `dimensions` innermost first; `allowed` [axes] the dimension names an axis may
    use, None for any. Of all assignments the best one, in this order, keeps the network on the earliest axes, divides
    the fewest dimensions, and needs the least time to gather one byte along every axis in turn.
    """
    best: list[tuple[Link, ...]] | None = None
    best_rank: tuple[object, ...] = ()
    for cuts in _assignments(tuple(sizes), dimensions, allowed):
        links = _links(cuts, dimensions, len(sizes))
        rank = _rank(links)
        if best is None or rank < best_rank:
            best, best_rank = links, rank
    return best


def divisors(count: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    small = [factor for factor in range(1, isqrt(count) + 1) if count % factor == 0]
    return sorted({*small, *(count // factor for factor in small)})


def _assignments(
    sizes: tuple[int, ...], dimensions: Sequence[Dimension], allowed: Sequence[frozenset[str] | None]
) -> Iterator[list[Cut]]:
    """Every assignment of each dimension's devices to the axes that yields all sizes; [dimensions] cuts."""
    if not dimensions:
        if all(size == 1 for size in sizes):
            yield []
        return
    usable = [names is None or dimensions[0].name in names for names in allowed]
    for cut in _cuts(dimensions[0].size, sizes, usable):
        rest = tuple(size // part for size, part in zip(sizes, cut, strict=True))
        for others in _assignments(rest, dimensions[1:], allowed):
            yield [cut, *others]


def _cuts(size: int, wanted: tuple[int, ...], usable: list[bool]) -> Iterator[Cut]:
    """Every factorisation of `size` over the axes, each factor dividing the remaining size of its axis."""
    if not wanted:
        if size == 1:
            yield ()
        return
    for factor in divisors(gcd(size, wanted[0])) if usable[0] else [1]:
        for rest in _cuts(size // factor, wanted[1:], usable[1:]):
            yield (factor, *rest)


def _links(cuts: list[Cut], dimensions: Sequence[Dimension], axes: int) -> list[tuple[Link, ...]]:
    """[axes] links, innermost dimension first."""
    links: list[list[Link]] = [[] for _ in range(axes)]
    for cut, dimension in zip(cuts, dimensions, strict=True):
        stride = 1
        for axis in reversed(range(axes)):
            if cut[axis] > 1:
                links[axis].append(_piece(dimension, cut[axis], stride))
                stride *= cut[axis]
    return [tuple(axis_links) for axis_links in links]


def _piece(dimension: Dimension, size: int, stride: int) -> Link:
    """A link over `size` devices of a dimension, `stride` apart."""
    if dimension.kind in ("switch", "network"):
        return Link(dimension.kind, size, dimension.bytes_per_second, dimension.latency_seconds, dimension.name, stride)
    closes = dimension.kind == "ring" and size * stride == dimension.size
    return Link(
        kind="ring" if closes else "line",
        size=size,
        bytes_per_second=dimension.bytes_per_second / stride,
        latency_seconds=dimension.latency_seconds * stride,
        dimension=dimension.name,
        stride=stride,
    )


def _rank(links: list[tuple[Link, ...]]) -> tuple[object, ...]:
    """Sort key of an assignment, smaller is better (see `lay_out`); ties go to the fastest last axis."""
    network = [prod(link.size for link in axis if link.kind == "network") for axis in links]
    gather = [_gather_seconds(axis) for axis in links]
    return network[::-1], sum(map(len, links)), sum(gather), gather[::-1]


def _gather_seconds(links: tuple[Link, ...]) -> float:
    """Rough seconds to gather one byte along an axis: torus links share the load, other tiers follow one another."""
    torus = [link for link in links if link.kind in ("ring", "line")]
    seconds = sum(1 / link.bytes_per_second for link in links if link not in torus)
    if torus:
        seconds += 1 / sum(link.bytes_per_second * (2 if link.kind == "ring" else 1) for link in torus)
    return seconds
