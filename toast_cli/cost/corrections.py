"""Correction factors of the cost model for one program, measured by compiling it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Corrections:
    """Factors by which predictions are multiplied; 1 where nothing is known.

    Attributes:
        compute, memory: of compute seconds, and of peak bytes. collectives: kind of collective -> factor of its
            seconds.
    """

    compute: float = 1.0
    memory: float = 1.0
    collectives: dict[str, float] = field(default_factory=dict)

    @property
    def nothing(self) -> bool:
        """Whether the model was right."""
        return self.compute == self.memory == 1.0 and all(factor == 1.0 for factor in self.collectives.values())


NO_CORRECTIONS = Corrections()
