"""The interface of local rules: one op that is about to be written on local shapes.

The operation is in a copy of the module and still has its unsharded types. A rule reshards its operands as needed,
changes the operation in place (or replaces it), and returns each device's pieces of the results.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

from toast_cli.emit.regions.moves import Devices, Mover, Piece, Scopes, groups
from toast_cli.plan.sharding import Sharding, local_shape, replicated
from toast_cli.program.model import Op, Program, Rule, Value, ValueFactors
from toast_cli.program.ops import REDUCERS
from toast_cli.xla import ir, splat_number
from toast_cli.xla.build import Builder, identity

# ---------------------------------------------------------------- alignment
# Chooses shardings of one op's arrays with which every device can compute its part alone.
#
# A factor of the op's rule is split by the same mesh axes in every array that has it. Splitting a factor that all
# results have needs no communication; splitting a contracted factor makes the results partial. Factors of any other
# kind can be split only if the op's own local rule supports it.

FactorAxes = dict[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Alignment:
    """operands, results: sharding of each array. axes: factor -> mesh axes that split it. partial: axes over which the
    results are partial."""

    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    axes: FactorAxes
    partial: tuple[int, ...]


@lru_cache(maxsize=20_000)
def align(
    rule: Rule,
    operands: tuple[Sharding, ...],
    results: tuple[Sharding, ...],
    sizes: tuple[int, ...],
    splits: frozenset[int] = frozenset(),
    keeps: frozenset[int] = frozenset(),
) -> Alignment:
    """The feasible split that is nearest to `operands` and `results`.

    Args:
        rule: of the op. operands: their shardings. results: their wanted shardings. sizes: of the mesh axes.
        splits: factors that the rule calls whole, or permuted, and that can be split nevertheless. keeps: others that
            must not be split.
    """
    in_results = {factor for dims in rule.results for factors in dims for factor in factors}
    alone = (
        frozenset(range(len(rule.sizes))) - in_results - rule.reduction
    )  # splitting such a factor has no defined meaning
    unsplit = (rule.need_replication | rule.permutation | keeps | alone) - splits
    axes: FactorAxes = {}
    spent: set[int] = set()
    for factors, sharding in zip((*rule.results, *rule.operands), (*results, *operands), strict=True):
        for factor, split in factor_axes(factors, sharding, rule.sizes, sizes).items():
            if split and factor not in unsplit and factor not in axes and not spent & set(split):
                axes[factor] = split
                spent |= set(split)
    arrays = (*rule.operands, *rule.results)
    while stuck := next(filter(None, (_stuck(factors, axes, rule.sizes, sizes) for factors in arrays)), None):
        for factor in stuck:
            del axes[factor]
    in_shardings = tuple(_sharding(factors, axes) for factors in rule.operands)
    out_shardings = tuple(_sharding(factors, axes) for factors in rule.results)
    partial = tuple([a for factor in sorted(rule.reduction & axes.keys() - in_results) for a in axes[factor]])
    return Alignment(in_shardings, out_shardings, axes, partial)


def factor_axes(
    dims: ValueFactors, sharding: Sharding, factor_sizes: tuple[int, ...], sizes: tuple[int, ...]
) -> FactorAxes:
    """Factor -> the axes that split it in one array, the major factor of a dimension first; factors behind one that is
    not split completely are left out. Empty for an array inside a manual region, which has no sharding."""
    split: FactorAxes = {}
    for factors, axes in zip(dims, sharding or ((),) * len(dims), strict=True):
        if len(factors) == 1:  # at any size: the rule of a pad has the operand's size
            split[factors[0]] = axes
            continue
        waiting = list(axes)
        for factor in factors:
            left, own = factor_sizes[factor], list[int]()
            while waiting and left % sizes[waiting[0]] == 0:
                left //= sizes[waiting[0]]
                own.append(waiting.pop(0))
            split[factor] = tuple(own)
            if left > 1:
                break
    return split


def _stuck(dims: ValueFactors, axes: FactorAxes, factor_sizes: tuple[int, ...], sizes: tuple[int, ...]) -> list[int]:
    """Factors that cannot be split in this array, because a major factor of their dimension is not split completely."""
    stuck = []
    for factors in dims:
        ended = False
        for factor in factors:
            own = axes.get(factor, ())
            if ended and own:
                stuck.append(factor)
            ended = ended or factor_sizes[factor] > prod(sizes[axis] for axis in own)
    return stuck


def _sharding(dims: ValueFactors, axes: FactorAxes) -> Sharding:
    """The sharding of an array with these factors."""
    return tuple(tuple(axis for factor in factors for axis in axes.get(factor, ())) for factors in dims)


@dataclass(slots=True)
class Site:
    """An op to be written.

    Attributes:
        op: the op. operation: its operation in the written module. operands: each device's pieces of them.
        wanted: [results] the shardings in which the plan computes them. build: makes operations in front of it. scopes:
            values made earlier that can be reused.
    """

    program: Program
    op: Op
    operation: Any
    operands: list[Piece]
    wanted: tuple[Sharding, ...]
    build: Builder
    devices: Devices
    mover: Mover
    scopes: Scopes = field(default_factory=Scopes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the mesh axes."""
        return self.devices.sizes

    def operand(self, k: int) -> Value:
        """Operand k unsplit."""
        return self.program.values[self.op.operands[k]]

    def result(self, k: int) -> Value:
        """Result k unsplit."""
        return self.program.values[self.op.results[k]]

    def alignment(self, splits: frozenset[int] = frozenset(), keeps: frozenset[int] = frozenset()) -> Alignment:
        """The feasible split that is nearest to the operands' shardings and the wanted ones; see `align`."""
        current = tuple([p.sharding for p in self.operands])
        return align(self.op.rule, current, self.wanted, self.sizes, splits, keeps)

    def bring(self, k: int, sharding: Sharding) -> Piece:
        """Reshards operand k."""
        piece = self.operands[k]
        if piece.sharding != sharding:
            piece = self.operands[k] = self.mover.to(piece, sharding, self.operand(k).shape)
        return piece

    def bring_all(self, shardings: tuple[Sharding, ...]) -> None:
        """Reshards all operands, and makes the operation read them."""
        for k, sharding in enumerate(shardings):
            self.bring(k, sharding)
        self.read()

    def read(self) -> None:
        """Makes the operation read each device's pieces of the operands."""
        operands = self.operation.operands
        for k, piece in enumerate(self.operands):
            if operands[k] != piece.handle:
                operands[k] = piece.handle

    def localise(
        self, shardings: tuple[Sharding, ...], partial: tuple[int, ...] = (), reducer: str = "add"
    ) -> list[Piece]:
        """Gives the operation's results the local types of these shardings; returns the pieces."""
        pieces = []
        for k, (result, sharding) in enumerate(zip(self.operation.results, shardings, strict=True)):
            if any(sharding):
                value = self.result(k)
                result.set_type(self.build.type(value.dtype, local_shape(value.shape, sharding, self.sizes)))
            pieces.append(Piece(result, sharding, partial, reducer))
        return pieces

    def behind(self) -> AbstractContextManager[None]:
        """New operations go after the operation while the block runs."""
        return self.build.at(ir.InsertionPoint.after(self.operation), self.operation.location)

    def local(self, k: int) -> tuple[int, ...]:
        """The shape of a device's piece of operand k."""
        return local_shape(self.operand(k).shape, self.operands[k].sharding, self.sizes)

    def replicated(self, k: int) -> Sharding:
        """The replicated sharding of operand k."""
        return replicated(len(self.operand(k).shape))


LocalRule = Callable[[Site], list[Piece]]


# ---------------------------------------------------------------- reductions
# Along a sharded dimension each device reduces its shard, and the results are partial. This suffices if the body is one
# operation that collectives support. Any other body (an argmax) then reduces the gathered results of all devices.


def reduce(site: Site) -> list[Piece]:
    """A reduction of one or several arrays."""
    aligned = site.alignment()
    if not aligned.partial:
        site.bring_all(aligned.operands)
        return site.localise(aligned.results)
    for k, sharding in enumerate(aligned.operands):
        site.bring(k, sharding)
    count = len(site.op.results)
    reducer = body_reducer(site.operation.regions[0])
    if reducer is not None and count == 1 and identity(reducer, site.result(0).dtype) is not None:
        start_once(site, count, reducer, aligned.partial)
        site.read()
        return site.localise(aligned.results, aligned.partial, reducer)
    site.read()
    return reduce_again(site, site.localise(aligned.results), aligned.partial)


def body_reducer(region: Any) -> str | None:
    """The op that a body consists of, if it is one op of its two arguments (`add`); None for any other body."""
    block = region.blocks[0]
    operations = [op.operation for op in block.operations]
    if len(operations) != 2 or len(block.arguments) != 2:
        return None
    name = operations[0].name.removeprefix("stablehlo.")
    reads = list(operations[0].operands)
    both = reads in ([block.arguments[0], block.arguments[1]], [block.arguments[1], block.arguments[0]])
    return name if name in REDUCERS and both and operations[1].operands[0] == operations[0].results[0] else None


def starts_neutral(reduction: Any) -> bool:
    """True if a reduction of one array starts at the neutral element of its body, an op that collectives support."""
    reducer, start = body_reducer(reduction.regions[0]), reduction.operands[1]
    neutral = None if reducer is None else identity(reducer, str(start.type.element_type))
    return neutral is not None and splat_number(start) == neutral


def start_once(site: Site, k: int, reducer: str, axes: tuple[int, ...]) -> None:
    """Replaces initial value k by the neutral element on all devices along `axes` but one."""
    neutral = identity(reducer, site.operand(k).dtype)
    if neutral is None or splat_number(site.operands[k].handle) == neutral:
        return
    piece = site.operands[k]
    nothing = site.build.constant(neutral, site.operand(k).dtype, site.local(k))
    site.operands[k] = Piece(site.devices.on_first(axes, piece.handle, nothing), piece.sharding)


def reduce_again(site: Site, pieces: list[Piece], axes: tuple[int, ...]) -> list[Piece]:
    """Gathers the results of all devices along `axes` and reduces them with the same body."""
    build, operation = site.build, site.operation
    with site.behind():
        gathered = []
        for piece in pieces:
            shape = tuple(piece.handle.type.shape)
            row = build.reshape(piece.handle, (1, *shape))
            gathered.append(build.all_gather(row, 0, groups(axes, site.sizes)))
        second = operation.clone(ip=build.ip).operation
        for k, handle in enumerate(gathered):
            second.operands[k] = handle
        second.attributes["dimensions"] = build.i64s([0])
    return [Piece(result, piece.sharding) for result, piece in zip(second.results, pieces, strict=True)]
