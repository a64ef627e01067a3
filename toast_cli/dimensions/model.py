"""The results of the analysis: frozen values that plan, cost and search read."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class FactorKind(IntEnum):
    """The effect of splitting a factor on its op."""

    PARALLEL = 0  # every result has it: no communication
    REDUCTION = 1  # summed over: the results become partial
    PERMUTATION = 2  # elements of other shards are needed: halo exchange or permute
    BLOCKED = 3  # must be whole in this op
    SUMMED_LATER = 4  # the op lacks it, but is split like the product that reads it and contracts over it


@dataclass(frozen=True, slots=True)
class Form:
    """An op's sharding rule, with its factors cut so that each belongs to one dimension class (Shardy's sub-factors).
    Forms are dictionary keys for every op, so the hash is stored.

    Attributes:
        sizes: [factors] elements along each.
        kinds: [factors] effect of splitting each.
        extents: [factors] sizes that the number of shards must all divide (more than one where a stencil or a slice
            links dimensions of different sizes).
        operands, results: per array, per dimension, the factors it is made of, major to minor.
        majors: [factors] factors that must be fully split before this one may be (it is minor to them in some
            dimension).
    """

    sizes: tuple[int, ...]
    kinds: tuple[FactorKind, ...]
    extents: tuple[tuple[int, ...], ...]
    operands: tuple[tuple[tuple[int, ...], ...], ...]
    results: tuple[tuple[tuple[int, ...], ...], ...]
    majors: tuple[tuple[int, ...], ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self,
            "_hash",
            hash((self.sizes, self.kinds, self.extents, self.operands, self.results, self.majors)),
        )

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, slots=True)
class Strand:
    """One factor's place in a conflict: it is on side `side` of resolution group `resolution`."""

    resolution: int
    side: int


@dataclass(frozen=True, slots=True)
class Group:
    """Classes that are decided together: mirror images of each other (every layer's d_ff), or one stencil apart.

    `name` is shown in reports ("batch", "heads"); `size` the largest class's elements; `resolutions` the resolution
    groups it owns; `members` a few argument dimensions that have it ("params['w'].0"); `role` its role in the program
    ("batch", "heads", "experts"; see `naming`), or "".
    """

    name: str
    classes: tuple[int, ...]
    size: int
    resolutions: tuple[int, ...]
    members: tuple[str, ...]
    role: str = ""


@dataclass(frozen=True, slots=True)
class Resolution:
    """Equal conflict components, which take the same side. `sides` is the number of sides."""

    group: int
    components: int
    values: int
    sides: int


@dataclass(frozen=True)
class Dimensions:
    """The analysis of one program.

    Attributes:
        class_sizes: [classes] elements.
        class_group: [classes] group of each.
        forms: [ops]; factor_classes: [ops] class of each factor of the op's form.
        strands: op number -> per factor its place in a conflict, or None; only for ops that take part in one.
    """

    class_sizes: tuple[int, ...]
    class_group: tuple[int, ...]
    forms: tuple[Form, ...]
    factor_classes: tuple[tuple[int, ...], ...]
    groups: tuple[Group, ...]
    resolutions: tuple[Resolution, ...]
    strands: dict[int, tuple[Strand | None, ...]]
    conflicts: int
    components: int
