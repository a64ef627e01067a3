"""Time of a collective from mesh, kind, bytes and axes, by an alpha-beta model of the links. For GPUs: `nccl`.

Every collective takes `alpha + beta * bytes`: alpha from the latency of each hop or message, beta from the link every
byte has to cross. The formulas, for p devices that hold or end up with V bytes (W: bytes per second of one link, one
direction; R: what a device can receive along the dimension):

* **ring** (torus dimension with wraparound), R = 2 W. All-gather: each device must receive the (p-1)/p V it lacks, half
  from each side: (p-1)/p V / 2W, in floor(p/2) hops. For large p this is the V / W_bidirectional of the scaling book
  ("Sharded Matrices and How to Multiply Them"). Reduce-scatter is the same in reverse, all-reduce is one after the
  other.
* **line** (no wraparound), R = W. The device at the end has one link and receives (p-1)/p V over it, in p-1 hops: twice
  the ring.
* **switch, network** between TPU cores and slices, R = W. Recursive doubling: (p-1)/p V / W in ceil(log2 p) messages
  (Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH, 2005).
* **several torus dimensions** work at once, each on its share: (P-1)/P V / sum(R). They cannot always share evenly: the
  slab of devices that agree on a set S of dimensions lacks (1 - 1/P_S) V, and only links of S lead out of it, so no
  split beats V (P_S - 1) / P / sum(R_S) for any S. The largest of these bounds is taken.
* **tiers** (chip or host, then torus, then network) follow one another: a reduce-scatter shrinks the array inside
  before it goes outside, so the outer tier carries 1/p_inner of it; an all-gather runs the other way.
* **all-to-all** on a ring: the p^2/4 hop-chunks a device's p chunks travel in all are spread over its two outgoing
  links, floor(p^2/4)/2 chunks of B/p over each: B p / 8W, a quarter of the all-gather of p B, as in the book. On a line
  the cut in the middle is crossed by floor(p^2/4) chunks each way: B p / 4W. On a torus all dimensions work at once and
  the slowest one decides. On a switch (p-1)/p B / W. Each tier moves the array once.
* **combined**: where a compiler combines several collectives into one, each pays a part of alpha.
* **collective-permute**: one hop at the slowest link's rate; on a line the pair at the ends is p-1 hops apart.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import chain, combinations
from math import prod

from toast_cli.cost.nccl import nccl_lines
from toast_cli.hardware.model import Link, Mesh

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
    if kind == "collective-permute":
        crossed = list(chain.from_iterable(tiers))
        return sum(map(_shift_latency, crossed)), max((1 / link.bytes_per_second for link in crossed), default=0.0)
    raise ValueError(f"{kind} is none of {', '.join(KINDS)}")


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
            free = (tier for tier in tori if not any(_same_wires(link, other) for other in tier))
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


def _same_wires(one: Link, other: Link) -> bool:
    return one.dimension != "" and one.dimension == other.dimension
