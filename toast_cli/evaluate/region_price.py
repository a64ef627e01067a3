"""What one run of a manual region takes on one device; `manual_regions` works it out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from toast_cli.cost.model import CollectiveUse, KernelUse
from toast_cli.plan.iteration import SlotAxes


@dataclass(frozen=True)
class RegionPrice:
    """One run of a region on one device, as the program around it sees it.

    Attributes:
        kernels: equal ones together. collectives: those that the user wrote. bytes: what is alive inside at the peak,
            besides operands and results.
    """

    kernels: tuple[KernelUse, ...]
    collectives: tuple[CollectiveUse, ...]
    bytes: float

    @property
    def seconds(self) -> float:
        """Of the kernels."""
        return sum(kernel.seconds for kernel in self.kernels)

    def at(self, op: int, value: int) -> RegionPrice:
        """The same for the op that is the region, and an array at its boundary that stands for it."""
        return replace(
            self,
            kernels=tuple([replace(one, ops=(op,)) for one in self.kernels]),
            collectives=tuple([replace(one, op=op, value=value) for one in self.collectives]),
        )

    def kernels_in(self, runs: float) -> Iterator[KernelUse]:
        """The kernels of so many runs."""
        for one in self.kernels:
            yield replace(
                one,
                runs=runs * one.runs,
                flops=runs * one.flops,
                bytes=runs * one.bytes,
                seconds=runs * one.seconds,
            )

    def collectives_in(self, runs: float) -> Iterator[CollectiveUse]:
        """The collectives of so many runs."""
        for one in self.collectives:
            yield replace(one, count=runs * one.count, seconds=runs * one.seconds)


class PricedRegion(Protocol):
    """An op that is a manual region."""

    def price(self, split: SlotAxes) -> RegionPrice:
        """What one run of it takes on one device when its slots are split so."""


RegionPrices = Mapping[int, PricedRegion]  # op -> its price
