"""Shardings: how one array, and how an op's operands and results, are split over the mesh; and shardings fixed in
advance.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

from toast_cli.base.errors import UsageError
from toast_cli.dimensions.model import FactorKind, Form, Strand
from toast_cli.hardware.model import Mesh
from toast_cli.plan.decisions import NONE
from toast_cli.program.model import Program
from toast_cli.program.names import PinnedAxes, Pins, matching, nearest_paths, shown_path, slash_path
from toast_cli.program.ops import RESULT
from toast_cli.program.roles import carried_results

# ---------------------------------------------------------------- arrays
# A `Sharding` has one entry per dimension: the mesh axes (by number) that split it, major to minor. An axis occurs at
# most once.

Sharding = tuple[tuple[int, ...], ...]


def replicated(rank: int) -> Sharding:
    """The sharding in which every device holds the whole array."""
    return ((),) * rank


@lru_cache(maxsize=200_000)
def shards(sharding: Sharding, sizes: tuple[int, ...]) -> int:
    """The number of different shards of the array; `sizes` [axes] are the mesh axis sizes."""
    count = 1
    for axes in sharding:
        for axis in axes:
            count *= sizes[axis]
    return count


def local_shape(shape: tuple[int, ...], sharding: Sharding, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one device's shard of an array."""
    return tuple([n // shards((axes,), sizes) for n, axes in zip(shape, sharding, strict=True)])


def without(sharding: Sharding, axes: Collection[int]) -> Sharding:
    """The sharding in which those axes split nothing."""
    return tuple([tuple([axis for axis in have if axis not in axes]) for have in sharding])


def refines(fine: Sharding, coarse: Sharding) -> bool:
    """Whether the array in `fine` is the one in `coarse` with some dimensions cut further."""
    return all(b[: len(a)] == a for a, b in zip(coarse, fine, strict=True))


def in_mesh_order(sharding: Sharding) -> bool:
    """Whether the axes of every dimension are in mesh order."""
    return all(list(axes) == sorted(axes) for axes in sharding)


def scattered_in(over: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """The axes of each step of a contraction's reduce-scatter, in two steps at most.

    XLA:TPU makes two reduce-scatters as they are written, each over axes that split one dimension in the mesh's order.
    A step over two dimensions, or over axes in another order, becomes an all-reduce, and so do all steps after the
    second one. Axes of one dimension that could go in one step go in two of about the same size: over the whole mesh
    at once it makes an all-reduce.

    Args:
        over: [dimensions] axes that come to split each, major to minor. sizes: [axes] of the mesh.
    """
    runs: list[tuple[int, ...]] = []
    for axes in over:
        for place, axis in enumerate(axes):
            if place and axis > axes[place - 1]:
                runs[-1] += (axis,)
            else:
                runs.append((axis,))
    if len(runs) > 1:
        return [runs[0], tuple([axis for run in runs[1:] for axis in run])]
    return [part for run in runs for part in _halves(run, sizes) if part]


def _halves(axes: tuple[int, ...], sizes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes in two parts, with as few devices as possible in the larger."""
    parts = [(axes[:count], axes[count:]) for count in range(len(axes), 0, -1)]
    return min(parts, key=lambda both: max(prod(sizes[axis] for axis in part) for part in both))


def axes_of(sharding: Sharding) -> set[int]:
    """All axes that split the array."""
    return {axis for axes in sharding for axis in axes}


def split_further(sharding: Sharding, target: Sharding, axes: Iterable[int]) -> Sharding:
    """`sharding` once `axes` split the dimensions that they split in `target`."""
    return tuple([(*have, *(a for a in want if a in axes)) for have, want in zip(sharding, target, strict=True)])


# ---------------------------------------------------------------- ops
NO_ROLE = -1
FactorAxes = tuple[tuple[int, ...], ...]  # [factors] mesh axes that split each
PinnedSharding = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class Space:
    """Factors of a windowed convolution. tiled: windowed factors of image and result. summed: windowed factors of image
    and kernel. contracted: other factors of image and kernel. kernel: factors of the kernel without windows."""

    tiled: frozenset[int]
    summed: frozenset[int]
    contracted: frozenset[int]
    kernel: frozenset[int]


@dataclass(frozen=True, slots=True)
class OpPattern:
    """All that decides an op's shardings; ops with equal patterns are split alike under every plan.

    groups: [factors] class group. strands: [factors] place in a conflict, or None; empty when no factor has one.
    role: for an argument, a view of one, or a result in its buffer: weights, state, inputs (number in `Problem.roles`).
    kind: its kind of arguments (see `Problem.roles`). loop_role: a third role, see
        `loops.weight_views`.
    result_pins, operand_pins: pinned shardings, per array, or None. space: factors of a windowed convolution.
    closed: mesh axes that cannot split it, such as those of a manual region. looked_up: factors of the indices of
        a look-up in a table, or of a scatter into one, that are no dimensions of the table.
    """

    form: Form
    groups: tuple[int, ...]
    strands: tuple[Strand | None, ...]
    role: int = NO_ROLE
    kind: int = NO_ROLE
    operand_pins: tuple[PinnedSharding | None, ...] = ()
    result_pins: tuple[PinnedSharding | None, ...] = ()
    space: Space | None = None
    closed: frozenset[int] = frozenset()
    loop_role: int = NO_ROLE
    looked_up: frozenset[int] = frozenset()
    # Memo: (group, sides, scope if that is no group) -> factors in the order in which they are tried.
    candidates: dict[tuple[int, tuple[int, ...], int], tuple[int, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )


@dataclass(frozen=True, slots=True)
class OpSharding:
    """The shardings of one op under one plan.

    Attributes:
        factor_axes: [factors] mesh axes that split each.
        operands: [operands] sharding each must have.
        computed: [results] sharding the op computes each in. reduced_to: [results] sharding once reductions are
            resolved. shardings: [results] the same with pins applied.
        reduced: axes each result was partial on and is all-reduced over. scattered: axes it is reduce-scattered over.
        number: its number in an `OpShardingMemo`; -1 if it is in none.
    """

    factor_axes: FactorAxes
    operands: tuple[Sharding, ...]
    computed: tuple[Sharding, ...]
    reduced_to: tuple[Sharding, ...]
    shardings: tuple[Sharding, ...]
    reduced: tuple[int, ...]
    scattered: tuple[tuple[int, ...], ...]
    number: int = field(default=-1, repr=False, compare=False)


# The axis assignment of an op, which determines its op sharding: [factors] the axes that split each, and per result,
# for each axis it is partial over, the factor to scatter it on (NONE: all-reduce it).
Choice = tuple[FactorAxes, tuple[tuple[int, ...], ...]]


def lay_out(pattern: OpPattern, choice: Choice) -> OpSharding:
    """The shardings that follow from a choice."""
    form = pattern.form
    factor_axes, wanted = choice

    def sharding(dims: tuple[tuple[int, ...], ...], axes_of: Sequence[tuple[int, ...]] = factor_axes) -> Sharding:
        return tuple([_along(factors, axes_of) for factors in dims])

    pinned = _pin_further if pattern.closed else _pin
    operands = tuple(map(sharding, form.operands))
    if pattern.operand_pins:
        operands = tuple(pinned(array, pin) for array, pin in zip(operands, pattern.operand_pins, strict=True))
    partial = axes_summed_over(form.kinds, factor_axes)
    computed = tuple(map(sharding, form.results))
    shardings = list(computed)
    scattered: list[tuple[int, ...]] = [()] * len(computed)
    reduced: list[int] = []
    for k, places in enumerate(wanted):
        own = list(factor_axes)
        for axis, factor in zip(partial, places, strict=True):
            if factor == NONE:
                reduced.append(axis)
            else:
                own[factor] = (*own[factor], axis)
                scattered[k] = (*scattered[k], axis)
        shardings[k] = sharding(form.results[k], own)
    reduced_to = tuple(shardings)
    if pattern.result_pins:
        shardings = [pinned(array, pin) for array, pin in zip(shardings, pattern.result_pins, strict=True)]
        if pattern.closed:  # a region's results have its boundary shardings
            computed = reduced_to = tuple(shardings)
        if not operands and not partial:  # an argument: it is stored as pinned
            computed = reduced_to = tuple(shardings)
    all_reduced = tuple(dict.fromkeys(reduced))
    return OpSharding(factor_axes, operands, computed, reduced_to, tuple(shardings), all_reduced, tuple(scattered))


def axes_summed_over(kinds: Sequence[FactorKind], factor_axes: FactorAxes) -> list[int]:
    """Axes over which an op's results are partial: those that split its reduction factors, in that order."""
    return [
        axis for kind, axes in zip(kinds, factor_axes, strict=True) if kind is FactorKind.REDUCTION for axis in axes
    ]


def _along(factors: tuple[int, ...], factor_axes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Axes that split a dimension made of these factors."""
    return (
        factor_axes[factors[0]]
        if len(factors) == 1
        else tuple([axis for factor in factors for axis in factor_axes[factor]])
    )


def _pin_further(sharding: Sharding, pin: PinnedSharding | None) -> Sharding:
    """`sharding` with the pinned axes first in each dimension: a manual region splits its shards further."""
    return sharding if pin is None else tuple((*(want or ()), *axes) for axes, want in zip(sharding, pin, strict=True))


def _pin(sharding: Sharding, pin: PinnedSharding | None) -> Sharding:
    """`sharding` with the pinned dimensions replaced; axes used by a pin are removed from the open dimensions."""
    if pin is None:
        return sharding
    pinned_axes = {axis for axes in pin if axes is not None for axis in axes}
    return tuple(
        tuple(a for a in axes if a not in pinned_axes) if want is None else want
        for axes, want in zip(sharding, pin, strict=True)
    )


# ---------------------------------------------------------------- pins
# Pins: shardings fixed in advance, by the program itself or by the user with `--pin`.


def number_pins(
    program: Program, mesh: Mesh, user_pins: tuple[str, ...], program_pins: Pins
) -> tuple[dict[int, PinnedSharding], dict[tuple[int, int], PinnedSharding]]:
    value_pins = {v: _numbered(pin, mesh, "the program") for v, pin in program_pins.values.items()}
    use_pins = {use: _numbered(pin, mesh, "the program") for use, pin in program_pins.uses.items()}
    result_ops = [n for n, op in enumerate(program.ops) if op.name == RESULT]
    carried = carried_results(program) if user_pins else ()
    donor = {result: a.value for a, result in zip(program.arguments, carried, strict=False) if result >= 0}
    for text in user_pins:
        pattern, pin = parse_pin(text)
        matched = matching(pattern, (argument.label for argument in program.arguments))
        for k in matched:
            argument = program.arguments[k]
            shape, name = program.values[argument.value].shape, shown_path(argument.label, k)
            value_pins[argument.value] = _fit(pin, shape, mesh, text, name)
            if carried[k] >= 0:
                use_pins[result_ops[carried[k]], 0] = value_pins[argument.value]
        returned = matching(pattern, (result.path for result in program.results), "result")
        for k in returned:
            result = program.results[k]
            shape, name = program.values[result.value].shape, f"result {slash_path(result.path) or k}"
            use_pins[result_ops[k], 0] = _fit(pin, shape, mesh, text, name)
            if k in donor:
                value_pins[donor[k]] = use_pins[result_ops[k], 0]
        if not matched and not returned:
            nearest = nearest_paths(pattern, (a.label for a in program.arguments))
            raise UsageError(
                f"no argument or result matches {pattern!r}", where="--pin", hint=f"the nearest arguments are {nearest}"
            )
    return value_pins, use_pins


def unused_pins(program: Program, user_pins: tuple[str, ...]) -> tuple[str, ...]:
    """A message for each pin without effect: it leaves every dimension open, or later pins override it."""
    matched = []
    for text in user_pins:
        pattern, pin = parse_pin(text)
        arguments = matching(pattern, (argument.label for argument in program.arguments))
        results = matching(pattern, (result.path for result in program.results), "result")
        matched.append((text, pin, {*(("arg", k) for k in arguments), *(("result", k) for k in results)}))
    notices = []
    for number, (text, pin, places) in enumerate(matched):
        later = set().union(*(others for _, _, others in matched[number + 1 :]))
        if pin and all(entry is None for entry in pin):
            notices.append(f"the pin {text!r} leaves every dimension open and decides nothing")
        elif places <= later:
            notices.append(f"the pin {text!r} decides nothing: later ones override it everywhere")
    return tuple(notices)


def parse_pin(text: str) -> tuple[str, PinnedAxes]:
    """`PATTERN=data,None,model+data` -> the pattern and per dimension its axes (None or ? leaves it to the search; ''
    or -: whole)."""
    pattern, sign, spec = text.rpartition("=")
    if not sign or not pattern:
        raise UsageError(
            f"cannot read {text!r}",
            where="--pin",
            hint="write --pin 'PATTERN=data,None': one entry per dimension, separated by commas",
        )
    dims: list[tuple[str, ...] | None] = []
    for entry in spec.split(","):
        text = entry.strip()
        dims.append(None if text == "?" else () if text in ("None", "-", "") else tuple(text.split("+")))
    return pattern, tuple(dims)


def _fit(pin: PinnedAxes, shape: tuple[int, ...], mesh: Mesh, text: str, name: str) -> PinnedSharding:
    if len(pin) > len(shape):
        raise UsageError(
            f"{text!r} has {_count(len(pin), 'entry', 'entries')} but matches {name} with "
            f"{_count(len(shape), 'dimension')}",
            where="--pin",
            hint="match fewer arrays, or give fewer entries: dimensions without one stay whole",
        )
    fitted = _numbered((*pin, *((),) * (len(shape) - len(pin))), mesh, "--pin")
    for dim, axes in enumerate(fitted):
        ways = prod(mesh.sizes[axis] for axis in axes or ())
        if shape[dim] % ways:
            raise UsageError(
                f"{text!r} splits {ways} ways, which does not divide dimension {dim} ({shape[dim]}) of {name}",
                where="--pin", hint="pin fewer axes there, or leave the dimension to toast with ?",
            )  # fmt: skip
    return fitted


def _count(number: int, singular: str, plural: str = "") -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def _numbered(pin: PinnedAxes, mesh: Mesh, where: str) -> PinnedSharding:
    """Axis names to axis numbers of this mesh."""
    names = mesh.names
    for axes in pin:
        for axis in axes or ():
            if axis not in names:
                raise UsageError(f"unknown mesh axis {axis!r}", where=where, hint=f"this mesh has {', '.join(names)}")
    given = [axis for axes in pin for axis in axes or ()]
    if len(set(given)) < len(given):
        axis = next(axis for axis in given if given.count(axis) > 1)
        raise UsageError(f"mesh axis {axis!r} is given twice", where=where, hint="use each axis once per array")
    return tuple(None if axes is None else tuple(names.index(a) for a in axes) for axes in pin)
