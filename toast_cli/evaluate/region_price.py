"""Time and memory of one run of a manual region on one device; `manual_regions` computes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from toast_cli.cost.model import CollectiveUse, KernelUse
from toast_cli.evaluate.expected_step import InRegion
from toast_cli.plan.op_sharding import FactorAxes


@dataclass(frozen=True)
class RegionPrice:
    """One run of a region on one device, as the program around it sees it.

    Attributes:
        kernels: equal ones merged. collectives: all that run inside. bytes: peak inside, without operands and results.
        inside: when the kernels and collectives run.
    """

    kernels: tuple[KernelUse, ...]
    collectives: tuple[CollectiveUse, ...]
    bytes: float
    inside: InRegion

    @property
    def seconds(self) -> float:
        """Seconds of the kernels."""
        return sum(kernel.seconds for kernel in self.kernels)

    def at(self, op: int, value: int) -> RegionPrice:
        """The same price, with kernels and collectives reported for that op and that array at its boundary."""
        return replace(
            self,
            kernels=tuple([replace(one, ops=(op,), inside=True) for one in self.kernels]),
            collectives=tuple([replace(one, op=op, value=value) for one in self.collectives]),
        )

    def kernels_in(self, runs: float) -> Iterator[KernelUse]:
        """The kernels of `runs` runs."""
        for one in self.kernels:
            yield replace(
                one,
                runs=runs * one.runs,
                flops=runs * one.flops,
                bytes=runs * one.bytes,
                seconds=runs * one.seconds,
            )

    def collectives_in(self, runs: float) -> Iterator[CollectiveUse]:
        """The collectives of `runs` runs."""
        for one in self.collectives:
            yield replace(one, count=runs * one.count, seconds=runs * one.seconds)


class PricedRegion(Protocol):
    """An op that is a manual region."""

    def price(self, split: FactorAxes) -> RegionPrice:
        """The price of one run on one device when these axes split its factors."""

    @property
    def moments(self) -> int:
        """The number of moments of a run, see `expected_step`."""


RegionPrices = Mapping[int, PricedRegion]  # op -> its price


def most_moments(prices: RegionPrices) -> int:
    """The number of moments of the longest region."""
    return max([region.moments for region in prices.values()], default=0)
