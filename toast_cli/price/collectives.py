"""Time of a collective from mesh, kind, bytes and axes: an alpha-beta model of the links, and NCCL's own model between
GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, combinations
from math import inf, log2, prod

from toast_cli.hardware.chips import find_preset
from toast_cli.hardware.model import Link, Mesh, Nccl

# ---------------------------------------------------------------- links
# Every collective takes `alpha + beta * bytes`: alpha from the latency of each hop or message, beta from the link
# every byte has to cross. The formulas, for p devices that hold or end up with V bytes (W: bytes per second of one
# link, one direction; R: what a device can receive along the dimension):
#
# * **ring** (torus dimension with wraparound), R = 2 W. All-gather: each device must receive the (p-1)/p V it lacks,
#   half from each side: (p-1)/p V / 2W, in floor(p/2) hops. For large p this is the V / W_bidirectional of the scaling
#   book ("Sharded Matrices and How to Multiply Them"). Reduce-scatter is the same in reverse, all-reduce is one after
#   the other.
# * **line** (no wraparound), R = W. The device at the end has one link and receives (p-1)/p V over it, in p-1 hops:
#   twice the ring.
# * **switch, network** between TPU cores and slices, R = W. Recursive doubling: (p-1)/p V / W in ceil(log2 p) messages
#   (Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH, 2005).
# * **several torus dimensions** work at once, each on its share: (P-1)/P V / sum(R). They cannot always share evenly:
#   the slab of devices that agree on a set S of dimensions lacks (1 - 1/P_S) V, and only links of S lead out of it, so
#   no split beats V (P_S - 1) / P / sum(R_S) for any S. The largest of these bounds is taken.
# * **tiers** (chip or host, then torus, then network) follow one another: a reduce-scatter shrinks the array inside
#   before it goes outside, so the outer tier carries 1/p_inner of it; an all-gather runs the other way.
# * **all-to-all** on a ring: the p^2/4 hop-chunks a device's p chunks travel in all are spread over its two outgoing
#   links, floor(p^2/4)/2 chunks of B/p over each: B p / 8W, a quarter of the all-gather of p B, as in the book. On a
#   line the cut in the middle is crossed by floor(p^2/4) chunks each way: B p / 4W. On a torus all dimensions work at
#   once and the slowest one decides. On a switch (p-1)/p B / W. Each tier moves the array once.
# * **combined**: where a compiler combines several collectives into one, each pays a part of alpha.
# * **collective-permute**: one hop at the slowest link's rate; on a line the pair at the ends is p-1 hops apart.

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

Links = tuple[Link, ...]


def collective_seconds(
    mesh: Mesh, kind: str, result_bytes: float, axes: tuple[int, ...], *, latency_part: float = 1.0
) -> float:
    """Seconds of one collective over the devices along `axes` (numbers in `mesh.axes`).

    `kind` is one of `KINDS`. `result_bytes` are those of the result on one device: the gathered array of an all-gather,
    the shard of a reduce-scatter, the local array of the others. No time for no bytes or for a group of one.
    `latency_part`: the fraction of the latency it pays if the compiler combines it with others.
    """
    if not axes or result_bytes <= 0:
        return 0.0
    links = tuple(chain.from_iterable(mesh.axes[axis].links for axis in axes))
    if mesh.chip.platform == "gpu" and all(link.kind in ("switch", "network") for link in links):
        lines = nccl_lines(kind, links, mesh.chip.preset)
    else:
        lines = (alpha_beta(kind, links),)
    return min([alpha * latency_part + beta * result_bytes for alpha, beta in lines])


@lru_cache(maxsize=8192)
def alpha_beta(kind: str, links: Links) -> tuple[float, float]:
    """(seconds, seconds per byte of the result on one device) of a collective over all devices these links join."""
    tiers = _tiers(links)
    if kind == "all-gather":
        return _gather(tiers)
    if kind == "reduce-scatter":
        alpha, beta = _gather(tiers)
        return alpha, beta * prod(link.size for link in links)
    if kind == "all-reduce":
        alpha, beta = _gather(tiers)
        return 2 * alpha, 2 * beta
    if kind == "all-to-all":
        return sum(map(_latency, tiers)), sum(max(map(_exchange, tier)) for tier in tiers)
    crossed = list(chain.from_iterable(tiers))  # by a collective-permute
    return sum(map(_shift_latency, crossed)), max((1 / link.bytes_per_second for link in crossed), default=0.0)


def _gather(tiers: list[Links]) -> tuple[float, float]:
    """(seconds, seconds per gathered byte) of an all-gather, tier by tier; reversed it is a reduce-scatter."""
    alpha, beta, inside = 0.0, 0.0, 1
    for tier in tiers:
        alpha += _latency(tier)
        beta += _gather_tier(tier) / inside
        inside *= prod(link.size for link in tier)
    return alpha, beta


def _gather_tier(tier: Links) -> float:
    """Seconds per gathered byte inside one tier: the tightest bound over the subsets of its dimensions."""
    devices = prod(link.size for link in tier)
    subsets = chain.from_iterable(combinations(tier, count) for count in range(1, len(tier) + 1))
    return max((prod(link.size for link in some) - 1) / devices / sum(map(_receive, some)) for some in subsets)


def _receive(link: Link) -> float:
    """Bytes per second one device can receive along a link: a ring brings them from both sides."""
    return link.bytes_per_second * (2 if link.kind == "ring" else 1)


def _exchange(link: Link) -> float:
    """Seconds per byte that a device holds for an all-to-all along one dimension."""
    if link.kind in ("switch", "network"):
        return (link.size - 1) / link.size / link.bytes_per_second
    return (link.size**2 // 4) / link.size / _receive(link)


def _latency(tier: Links) -> float:
    """Seconds until the first byte has reached everyone, dimension after dimension."""
    return sum(_hops(link) * link.latency_seconds for link in tier)


def _hops(link: Link) -> int:
    if link.kind == "ring":
        return link.size // 2
    if link.kind == "line":
        return link.size - 1
    return (link.size - 1).bit_length()


def _shift_latency(link: Link) -> float:
    """Seconds for the farthest pair of a shift by one: neighbours, except the two ends of a line."""
    return link.latency_seconds * (link.size - 1 if link.kind == "line" else 1)


def _tiers(links: Links) -> list[Links]:
    """Links by the order in which a reduction passes them: switches, then the torus, then networks.

    Torus links form one tier, since they work at once, but pieces of one dimension share its wires: those that fit
    together become one piece again, and one that does not fit goes into a tier of its own.
    """
    joined = _join_pieces(links)
    tori: list[list[Link]] = []
    for link in joined:
        if link.kind in ("ring", "line"):
            # Links of one dimension share its wires.
            wires = link.dimension
            free = (tier for tier in tori if not any(wires != "" and wires == other.dimension for other in tier))
            tier = next(free, None)
            if tier is None:
                tori.append([link])
            else:
                tier.append(link)
    return [
        *((link,) for link in joined if link.kind == "switch"),
        *map(tuple, tori),
        *((link,) for link in joined if link.kind == "network"),
    ]


def _join_pieces(links: Links) -> list[Link]:
    """Pieces of one dimension that continue each other (the next starts where the last ends) made one again."""
    joined: list[Link] = []
    for link in sorted(links, key=lambda link: (link.dimension, link.stride)):
        last = joined[-1] if joined else None
        if last and link.dimension and link.dimension == last.dimension and link.stride == last.stride * last.size:
            joined[-1] = replace(last, kind=link.kind, size=last.size * link.size)
        else:
            joined.append(link)
    return joined


# ---------------------------------------------------------------- NCCL
# Time of a collective between GPUs, by NCCL's own tuning model.
#
# NCCL chooses between algorithms and protocols by the size of the array; each pair takes `latency + bytes /
# bandwidth`, and the least of these times is taken. The formulas, for p = s n GPUs, s in each of n nodes, and an array
# of V bytes (W: what a GPU sends over NVLink; N: what the s GPUs of a node send over the network together):
#
# * **ring**: every link carries (p-1)/p V for an all-gather or a reduce-scatter, twice that for an all-reduce, at the
#   slower one of W and N. An all-gather takes p-1 steps, n-1 of them between nodes.
# * **double binary tree** (all-reduce between nodes): the array goes up and down, 2 V in all; in each node it passes
#   the GPUs as a chain, between nodes it takes log2(n) steps.
# * **NVLink SHARP** (NVLS, all-reduce, more than two GPUs in a node, from Hopper on): the switch adds up, so the array
#   crosses NVLink once in each direction; between nodes a tree of the nodes. Two nodes exchange halves, which takes
#   half of the network's traffic.
# * **all-to-all, collective-permute**: each GPU sends over NVLink and the network at once, and the slower part decides.
#
# Protocols: *simple* attains the links' full rate and waits longest at each step; *LL128* sends 120 of 128 bytes as
# data and *LL* half of them, limited by the GPU's stores or, between nodes, the host's.

# (seconds, seconds per byte of the result on one device)
Line = tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Protocol:
    """Latencies in seconds. ring, tree: of starting one. inside, outside: of a step over NVLink and over the network,
    as a fraction of the simple protocol's; tree_inside, tree_outside: the same of a tree. rate, tree_rate: fraction of
    the link's bandwidth that is data.
    """

    ring: float
    tree: float
    inside: float
    outside: float
    tree_inside: float
    tree_outside: float
    rate: float
    tree_rate: float


# NVIDIA/nccl, src/graph/tuning.cc: baseLatencies, hwLatencies, factors of ncclTopoTuneModel. In those tables a step of
# the simple protocol's ring takes 3.4 us over NVLink and 14 us over the network, which are the latencies of the links.
_SIMPLE = _Protocol(8.4e-6, 8.4e-6, 1.0, 1.0, 4.0 / 3.4, 1.0, 1.0, 0.92)
_LL128 = _Protocol(14e-6, 14e-6, 1.9 / 3.4, 4.0 / 14, 1.25 / 3.4, 8.5 / 14, 0.92, 0.92 * 120 / 128)
_LL = _Protocol(6.6e-6, 6.8e-6, 0.6 / 3.4, 2.7 / 14, 0.6 / 3.4, 5.0 / 14, 0.5, 0.92 / 3.8)
_PROTOCOLS = (_SIMPLE, _LL128, _LL)
_SHARP_SECONDS, _SHARP_OUTSIDE = 25e-6, 20.9 / 14


_LIKE = "A100-80"
_LL_BETWEEN_TWO, _LL_BETWEEN_MORE = 39e9, 20.4e9  # llMaxBws, hosts with Intel CPUs, two nodes and more
# Fraction of the network's peak: 24 of 25 GB/s (nccl-tests issue 252), 46 to 48 of 50 GB/s (nccl-tests issue 290).
_NETWORK = 0.96


@lru_cache(maxsize=8192)
def nccl_lines(kind: str, links: tuple[Link, ...], chip: str) -> tuple[Line, ...]:
    """The time of a collective with each algorithm and protocol, over all devices that these links join.

    Args:
        chip: name of its preset; empty for a chip of one's own, which is taken to be like an A100.
    """
    nccl = find_preset(chip or _LIKE).nccl
    assert nccl is not None
    group = _Group.of(links, nccl)
    if kind == "all-reduce":
        return (*group.rings(2), *group.trees(), *group.sharp())
    if kind == "all-gather":
        return tuple(group.rings(1))
    if kind == "reduce-scatter":
        return tuple([(alpha, beta * group.devices) for alpha, beta in group.rings(1)])
    return tuple(group.pairs(exchange=kind == "all-to-all"))


@dataclass(frozen=True, slots=True)
class _Group:
    """The devices of one collective. size: in each node. inside, outside: bytes per second over NVLink (of one device)
    and over the network (of the node's devices together), `inf` where there is no such link. step, hop: latency of a
    step over each."""

    nccl: Nccl
    size: int
    nodes: int
    inside: float
    outside: float
    step: float
    hop: float

    @classmethod
    def of(cls, links: tuple[Link, ...], nccl: Nccl) -> _Group:
        near = [link for link in links if link.kind == "switch"]
        far = [link for link in links if link.kind == "network"]
        size = prod(link.size for link in near)
        return cls(
            nccl,
            size,
            prod(link.size for link in far),
            nccl.attained * min([link.bytes_per_second for link in near], default=inf),
            _NETWORK * size * min([link.bytes_per_second for link in far], default=inf),
            max([link.latency_seconds for link in near], default=0.0),
            max([link.latency_seconds for link in far], default=0.0),
        )

    @property
    def devices(self) -> int:
        return self.size * self.nodes

    def rings(self, passes: int) -> Iterator[Line]:
        """passes: times that the array goes around."""
        between = self.nodes - 1
        within = self.devices - 1 - between
        carried = passes * (self.devices - 1) / self.devices
        for each in _PROTOCOLS:
            once = within * each.inside * self.step + between * each.outside * self.hop
            yield each.ring + passes * once, carried / self._limited(each, each.rate * min(self.inside, self.outside))

    def trees(self) -> Iterator[Line]:
        chain, depth = self.size - 1, log2(self.nodes)
        for each in _PROTOCOLS if self.nodes > 1 else ():
            one_way = chain * each.tree_inside * self.step + depth * each.tree_outside * self.hop
            rate = self._limited(each, each.tree_rate * min(self.inside, self.outside))
            yield each.tree + 2 * one_way, 2 / rate

    def sharp(self) -> Iterator[Line]:
        """All-reduces that the switch adds up."""
        if self.nccl.sharp and self.size > 2:
            outside = self.outside * (2 if self.nodes == 2 else 1)
            rate = min(self.inside * self.nccl.sharp, outside)
            alpha = _SHARP_SECONDS + 2 * log2(self.nodes) * _SHARP_OUTSIDE * self.hop
            yield alpha, 2 * (self.devices - 1) / self.devices / rate

    def pairs(self, *, exchange: bool) -> Iterator[Line]:
        """Every device sends to every other (exchange), or to the next one."""
        near = (self.size - 1) / self.devices if exchange else 1.0
        far = (self.devices - self.size) / self.devices if exchange else 1.0
        for each in _PROTOCOLS:
            inside = near / self._limited(each, each.rate * self.inside)
            outside = far / self._limited(each, each.rate * (self.outside / self.size))
            yield each.ring + max(each.inside * self.step, each.outside * self.hop), max(inside, outside)

    def _limited(self, protocol: _Protocol, rate: float) -> float:
        """The rate, with the limit of the LL protocol."""
        if protocol is not _LL:
            return rate
        if self.nodes == 1:
            return min(rate, self.nccl.low_latency)
        return min(rate, _LL_BETWEEN_TWO if self.nodes == 2 else _LL_BETWEEN_MORE)
