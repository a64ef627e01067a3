"""Shardings that a program already holds: removes them from the module, and returns them as plain data.

Two kinds stay in the module: manual regions (`sdy.manual_computation`), whose boundary is always returned as pins, and
the placement of an operation on one single device, as host callbacks have it. Notations: Shardy's (`sdy.sharding`),
XLA's (`mhlo.sharding`, GSPMD), and Shardy's inside HLO's frontend attributes (`xla.sdy.sharding`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toast_cli.base.errors import InputError
from toast_cli.base.files import read_whole_number
from toast_cli.frontend import attributes as foreign
from toast_cli.frontend.attributes import Locator, place_of
from toast_cli.program.ops import CUSTOM_CALL, MANUAL_REGION
from toast_cli.xla import attributes_of, call_target, ir, operations_in, sdy, terminator

# Operations and custom calls that only state a sharding or placement; each returns its first operand.
MOVES = frozenset(
    {
        "sdy.sharding_constraint",
        "sdy.reshard",
        "sdy.propagation_barrier",
        "sdy.data_flow_edge",
        "sdy.all_gather",
        "sdy.all_slice",
        "sdy.all_to_all",
        "sdy.collective_permute",
        "sdy.all_reduce",
        "sdy.reduce_scatter",
        "sdy.replicated_to_unreduced",
        "sdy.sharded_to_unreduced",
        "Sharding",
        "xla.sdy.FuncResultSharding",
        "xla.sdy.PropagationBarrier",
    }
)
# Operations that group values for sharding and have no result.
GROUPINGS = frozenset({"sdy.sharding_group", "xla.sdy.ShardingGroup"})

PARTITIONS = "mhlo.num_partitions"
OperandOfOp = tuple[Any, int]
# A value, the uses of it that are concerned, and its name in messages.
Subject = tuple[Any, tuple[OperandOfOp, ...], str]


@dataclass(frozen=True)
class Annotation:
    """One sharding that the program states.

    Attributes:
        value: the ir.Value that has the sharding.
        sharding: in the program's own terms; `toast_cli.frontend.constraints` translates to a mesh.
        uses: (operation, operand number) of the uses it is limited to; empty when it holds for the value itself.
        origin: who states it: `argument 3`, `result 0`, `model.py:12:4`.
    """

    value: Any
    sharding: AnnotatedSharding
    uses: tuple[OperandOfOp, ...]
    origin: str


@dataclass
class Findings:
    """The removed statements: constraints, pins of manual regions, and their number.

    argument_axes: argument (by number) -> per dimension the one mesh axis that splits it, or "".
    """

    kept: list[Annotation] = field(default_factory=list)
    pins: list[Annotation] = field(default_factory=list)
    count: int = 0
    argument_axes: dict[int, tuple[str, ...]] = field(default_factory=dict)


def take_shardings(module: Any, function: Any, path: str) -> Findings:
    """Removes the shardings from the function and returns them."""
    with module.context, ir.Location.unknown():
        taker = _Taker(meshes_of(module), path)
        taker.boundary(function)
        taker.body(function)
    findings = taker.findings
    return replace(
        findings, kept=list(map(_on_used_value, findings.kept)), pins=list(map(_on_used_value, findings.pins))
    )


def _on_used_value(kept: Annotation) -> Annotation:
    """The record with the value that its uses read now: the constraint between them, and its result, is erased."""
    if not kept.uses:
        return kept
    operation, operand = kept.uses[0]
    return replace(kept, value=operation.operands[operand])


class _Taker:
    """Walks one function; used once."""

    def __init__(self, meshes: Meshes, path: str) -> None:
        self.findings = Findings()
        self._meshes = meshes
        self._path = path
        self._records: dict[Any, list[int]] = defaultdict(list)  # value -> places in `findings.kept`
        self._annotated: dict[Any, AnnotatedSharding] = {}  # value -> the first sharding stated for it as a whole

    def _record(self, value: Any, sharding: AnnotatedSharding, uses: tuple[OperandOfOp, ...], origin: str) -> None:
        self.findings.count += 1
        if sharding.single_device:
            return
        if not uses:
            self._annotated.setdefault(value, sharding)
        self._records[value].append(len(self.findings.kept))
        self.findings.kept.append(Annotation(value, sharding, uses, origin))

    def boundary(self, function: Any) -> None:
        """Takes the shardings of the function's arguments and results. A result is a use of the returned value."""
        block = function.entry_block
        end = terminator(block)
        arguments: list[Subject] = [(value, (), f"argument {k}") for k, value in enumerate(block.arguments)]
        results: list[Subject] = [(value, ((end, k),), f"result {k}") for k, value in enumerate(end.operands)]
        self._boundary_attributes(function.operation, "arg_attrs", arguments)
        numbers = {value: k for k, value in enumerate(block.arguments)}
        for kept in self.findings.kept:
            if kept.sharding.axes is not None:
                axes = tuple(split[0] if split and len(split) == 1 else "" for split in kept.sharding.axes)
                self.findings.argument_axes[numbers[kept.value]] = axes
        self._boundary_attributes(function.operation, "res_attrs", results)

    def _boundary_attributes(self, function: Any, name: str, subjects: list[Subject]) -> None:
        if name not in function.attributes:
            return
        cleaned = []
        for entry, (value, uses, origin) in zip(function.attributes[name], subjects, strict=True):
            attributes = {item.name: item.attr for item in entry}
            place = partial("{}: {}".format, self._path, origin)
            sharding = single_sharding(annotated_shardings(attributes, self._meshes, place), _rank(value), place)
            if sharding is not None:
                self._record(value, sharding, uses, origin)
            cleaned.append(ir.DictAttr.get(without_shardings(attributes, place)))
        function.attributes[name] = ir.ArrayAttr.get(cleaned)

    def body(self, function: Any) -> None:
        """Takes attributes of operations first, then sharding constraints, in program order."""
        moves: list[Any] = []
        for operation in operations_in(function, outside=MANUAL_REGION):
            kind, attributes = called_name(operation), operation.attributes
            if kind == MANUAL_REGION:
                self._manual_region(operation)
            elif kind in MOVES or kind in GROUPINGS:
                moves.append(operation)
            elif SDY in attributes or GSPMD in attributes or FRONTEND in attributes:
                self._stating(operation)
        for operation in moves:
            self._move(operation)

    def _stating(self, operation: Any) -> None:
        """Takes the shardings in an operation's attributes, which are those of its results."""
        attributes, place = attributes_of(operation), partial(place_of, operation, self._path)
        shardings = annotated_shardings(attributes, self._meshes, place)
        placed = any(sharding.single_device for sharding in shardings)
        if not placed:
            for result, sharding in zip(operation.results, shardings, strict=False):
                check_rank(sharding, _rank(result), place)
                self._record(result, sharding, (), place())
        cleaned = without_shardings(attributes, place, keep_placement=placed)
        for name in (SDY, GSPMD, FRONTEND, RULE):
            if name in cleaned:
                operation.attributes[name] = cleaned[name]
            elif name in attributes:
                del operation.attributes[name]

    def _move(self, operation: Any) -> None:
        """Erases a constraint: records its sharding, and replaces its result by its operand."""
        if called_name(operation) in GROUPINGS:
            self.findings.count += 1
            operation.erase()
            return
        value, result = operation.operands[0], operation.results[0]
        sharding = self._annotated_by(operation)
        if sharding is None:
            self.findings.count += 1
        else:
            uses: tuple[OperandOfOp, ...] = ()
            if value in self._annotated and self._annotated[value] != sharding:
                read = ((use.owner.operation, int(use.operand_number)) for use in result.uses)
                uses = tuple(use for use in read if called_name(use[0]) not in MOVES | GROUPINGS)  # others are erased
            self._record(value, sharding, uses, place_of(operation, self._path))
        for number in self._records.pop(result, ()):  # the result's shardings move to its replacement
            self.findings.kept[number] = replace(self.findings.kept[number], value=value)
            self._records[value].append(number)
        result.replace_all_uses_with(value)
        operation.erase()

    def _annotated_by(self, operation: Any) -> AnnotatedSharding | None:
        """The sharding that a constraint states; None if it states none."""
        attributes, place = attributes_of(operation), partial(place_of, operation, self._path)
        name = next((name for name in ("sharding", "out_sharding") if name in attributes), None)
        if name is None:
            shardings = annotated_shardings(attributes, self._meshes, place)
        else:
            attribute = foreign.of_kind(attributes[name], name, sdy.TensorShardingAttr, place)
            shardings = [tensor_sharding(attribute, self._meshes)]
        return single_sharding(shardings, _rank(operation.results[0]), place)

    def _manual_region(self, operation: Any) -> None:
        """Records the boundary of a manual region: the shardings of its operands and results."""
        origin = f"the manual region at {place_of(operation, self._path)}"
        operand_shardings = value_shardings(operation.attributes["in_shardings"], self._meshes)
        for k, (value, sharding) in enumerate(zip(operation.operands, operand_shardings, strict=True)):
            self.findings.pins.append(Annotation(value, sharding, ((operation, k),), origin))
        result_shardings = value_shardings(operation.attributes["out_shardings"], self._meshes)
        for value, sharding in zip(operation.results, result_shardings, strict=True):
            self.findings.pins.append(Annotation(value, sharding, (), origin))


def called_name(operation: Any) -> str:
    """The operation's name, or a custom call's target."""
    return call_target(operation) if operation.name == CUSTOM_CALL else str(operation.name)


def _rank(value: Any) -> int:
    return int(value.type.rank) if isinstance(value.type, ir.RankedTensorType) else 0


# ---------------------------------------------------------------- attributes
# Parses a program's sharding attributes into plain data.
#
# Three notations occur: Shardy's (`sdy.sharding`), XLA's (`mhlo.sharding`), and Shardy's inside HLO's frontend
# attributes (`xla.sdy.sharding`, beside a less precise `mhlo.sharding`). Shardy's is preferred if several are present.

SDY, GSPMD, FRONTEND = "sdy.sharding", "mhlo.sharding", "mhlo.frontend_attributes"
FRONTEND_PREFIX, FRONTEND_SDY, FRONTEND_RULE = "xla.sdy.", "xla.sdy.sharding", "xla.sdy.sharding_rule"
RULE = "sdy.sharding_rule"

# The beginning of a list of shardings in MLIR's syntax, after its `#`.
_SEVERAL = "sdy.sharding_per_value"

# Per dimension: the axes that split it, major to minor; () for unsharded, None for open.
Axes = tuple[tuple[str, ...] | None, ...]
MeshAxes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class AnnotatedSharding:
    """One array's sharding as a program states it.

    Attributes:
        axes: per dimension, by name; None if `gspmd` is given.
        mesh: axes of the program's mesh with their sizes, in order; empty if the program does not declare it.
        gspmd: XLA's notation, which names no axes.
        single_device: the array is on one device alone.
    """

    axes: Axes | None = None
    mesh: MeshAxes = ()
    gspmd: str = ""
    single_device: bool = False


Meshes = dict[str, MeshAxes]


def meshes_of(module: Any) -> Meshes:
    """Symbol -> axes of every mesh that the module declares; a mesh of one single device has no axes."""
    operations = (view.operation for view in module.body.operations)
    return {
        foreign.string_value(op.attributes["sym_name"], "sym_name", lambda: "sdy.mesh"): mesh_axes_of(
            op.attributes["mesh"]
        )
        for op in operations
        if op.name == "sdy.mesh"
    }


def mesh_axes_of(attribute: Any) -> MeshAxes:
    """Names and sizes of an `#sdy.mesh`."""
    return tuple((str(axis.name), int(axis.size)) for axis in map(sdy.MeshAxisAttr, sdy.MeshAttr(attribute).axes))


def tensor_sharding(attribute: Any, meshes: Meshes) -> AnnotatedSharding:
    """Parses one `#sdy.sharding`. A dimension split over a sub-axis counts as open: sub-axes have no name."""
    sharding = sdy.TensorShardingAttr(attribute)
    reference = sharding.mesh_or_ref
    mesh: MeshAxes | None
    if sdy.MeshAttr.isinstance(reference):
        mesh = mesh_axes_of(reference)
    else:
        mesh = meshes.get(str(ir.FlatSymbolRefAttr(reference).value))
    axes = tuple(_dimension(sdy.DimensionShardingAttr(d)) for d in sharding.dimension_shardings)
    return AnnotatedSharding(axes, mesh or (), single_device=mesh == ())


def _dimension(dimension: Any) -> tuple[str, ...] | None:
    axes = [sdy.AxisRefAttr(axis) for axis in dimension.axes]
    if any(axis.sub_axis_info is not None for axis in axes):
        return None
    return tuple(str(axis.name) for axis in axes) if axes or dimension.is_closed else None


def value_shardings(attribute: Any, meshes: Meshes) -> list[AnnotatedSharding]:
    """The shardings in an `#sdy.sharding` (one) or an `#sdy.sharding_per_value` (one per result)."""
    if sdy.TensorShardingPerValueAttr.isinstance(attribute):
        return [tensor_sharding(entry, meshes) for entry in sdy.TensorShardingPerValueAttr(attribute).shardings]
    return [tensor_sharding(attribute, meshes)]


def annotated_shardings(attributes: dict[str, Any], meshes: Meshes, place: Locator) -> list[AnnotatedSharding]:
    """The shardings in the attributes of an operation, argument or result, one per array; empty if there are none.

    Raises `InputError` at `place` for attributes that are no shardings.
    """
    texts = frontend_texts(attributes, place)

    def several(attribute: Any, name: str) -> list[AnnotatedSharding]:
        if sdy.TensorShardingPerValueAttr.isinstance(attribute):
            return value_shardings(attribute, meshes)
        return [tensor_sharding(foreign.of_kind(attribute, name, sdy.TensorShardingAttr, place), meshes)]

    if SDY in attributes:
        return several(attributes[SDY], SDY)
    if FRONTEND_SDY in texts:
        kind = sdy.TensorShardingPerValueAttr if _SEVERAL in texts[FRONTEND_SDY] else sdy.TensorShardingAttr
        return several(foreign.parsed(texts[FRONTEND_SDY], FRONTEND_SDY, kind, place), FRONTEND_SDY)
    parts = split_shardings(foreign.text(attributes, GSPMD, place) or "") if GSPMD in attributes else []
    return [AnnotatedSharding(gspmd=part, single_device=part.startswith("{" + MAXIMAL)) for part in parts]


def single_sharding(shardings: list[AnnotatedSharding], rank: int, place: Locator) -> AnnotatedSharding | None:
    """The sharding of a single array; None if it has none.

    Raises `InputError` for several shardings, or for another number of dimensions.
    """
    if not shardings:
        return None
    if len(shardings) > 1:
        what = f"there are {len(shardings)} shardings for one array"
        raise InputError(what, where=place(), hint="give it one, or take them out of the program")
    check_rank(shardings[0], rank, place)
    return shardings[0]


def check_rank(sharding: AnnotatedSharding, rank: int, place: Locator) -> None:
    """Raises `InputError` if a sharding has another number of dimensions than its array."""
    if sharding.axes is not None and not sharding.single_device and len(sharding.axes) != rank:
        what = f"a sharding has {len(sharding.axes)} dimensions and its array {rank}"
        raise InputError(what, where=place(), hint="is the file intact?")


def frontend_texts(attributes: dict[str, Any], place: Locator) -> dict[str, str]:
    """HLO's frontend attributes that belong to Shardy: name -> text."""
    return {
        name: foreign.string_value(attribute, name, place)
        for name, attribute in foreign.entries(attributes, FRONTEND, place).items()
        if name.startswith(FRONTEND_PREFIX)
    }


def without_shardings(attributes: dict[str, Any], place: Locator, keep_placement: bool = False) -> dict[str, Any]:
    """The attributes without those that `annotated_shardings` reads; a placement on one device may stay.

    An op's sharding rule, which JAX attaches to custom calls, is kept: from HLO's frontend attributes it is turned into
    the attribute that Shardy reads.
    """
    texts = frontend_texts(attributes, place)
    cleaned = {name: attr for name, attr in attributes.items() if keep_placement or name not in (SDY, GSPMD)}
    if FRONTEND in cleaned:
        cleaned.pop(FRONTEND)
        entries = foreign.entries(attributes, FRONTEND, place).items()
        kept = {name: attribute for name, attribute in entries if not name.startswith(FRONTEND_PREFIX)}
        if kept:
            cleaned[FRONTEND] = ir.DictAttr.get(kept)
    if FRONTEND_RULE in texts:
        cleaned[RULE] = foreign.parsed(texts[FRONTEND_RULE], FRONTEND_RULE, sdy.OpShardingRuleAttr, place)
    return cleaned


# ---------------------------------------------------------------- GSPMD's notation
# GSPMD shardings in XLA's notation, read and translated to mesh axes.
#
# `{devices=[4,1,2]<=[8] last_tile_dim_replicate}` says: dimension 0 in four parts, dimension 1 whole, each part on two
# devices, devices 0 to 7 dealt out in that order (`<=[4,2]T(1,0)`: counted through a 4 x 2 grid column by column).
# Notation: openxla.org/xla and xla/hlo/ir/hlo_sharding.cc.

# More devices than any machine has. A sharding over more counts as unreadable.
MOST_DEVICES = 1 << 20
REPLICATED, MAXIMAL, MANUAL = "replicated", "maximal", "manual"

_TILES = re.compile(r"devices=\[([\d,]+)\]")
_IOTA = re.compile(r"<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LIST = re.compile(r"devices=\[[\d,]+\]([\d,]+)")
# A sharding among several; the kinds of its last tiles have braces of their own.
_BRACED = re.compile(r"\{(?:[^{}]|\{[^{}]*\})*\}")
_LAST_TILES = re.compile(r"last_tile_dims=\{([^}]*)\}")


def split_shardings(text: str) -> list[str]:
    """The shardings in one attribute: `{{replicated}, {maximal device=0}}` has two, anything else is one."""
    inner = text.strip()[1:-1].strip()
    return _BRACED.findall(inner) if inner.startswith("{") else [text.strip()]


def read_tiling(text: str) -> NDArray[np.int64] | None:
    """[parts of each dimension, copies] the device numbers of a tiled sharding; None for another one, and for a
    notation that is not known here."""
    shape = _TILES.search(text)
    sizes = _numbers(shape[1]) if shape else (0,)
    if not 0 < prod(sizes) <= MOST_DEVICES:
        return None
    devices = _devices(text, prod(sizes))
    last = _LAST_TILES.search(text)
    kinds = [kind.strip() for kind in last[1].split(",")] if last else []
    extra = len(kinds) or int("last_tile_dim_replicate" in text)
    if devices is None or extra > len(sizes) or any(kind not in (REPLICATED, MANUAL) for kind in kinds):
        return None
    return devices.reshape((*sizes[: len(sizes) - extra], -1))


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers in a comma-separated list; 0, which is invalid, for a number with too many digits."""
    return tuple(read_whole_number(number) or 0 for number in text.split(",") if number)


def _devices(body: str, count: int) -> NDArray[np.int64] | None:
    """Device numbers in the order of the tiles; None when there are not exactly `count`."""
    iota = _IOTA.search(body)
    if iota:
        grid = _numbers(iota[1])
        order = _numbers(iota[2]) if iota[2] else tuple(range(len(grid)))
        if prod(grid) != count or sorted(order) != list(range(len(grid))):
            return None
        return np.arange(count, dtype=np.int64).reshape(grid).transpose(order).reshape(-1)
    listed = _LIST.search(body)
    numbers = np.array(_numbers(listed[1]) if listed else (), dtype=np.int64)
    return numbers if len(numbers) == count else None


def mesh_axes(
    text: str, rank: int, names: tuple[str, ...], sizes: tuple[int, ...]
) -> tuple[tuple[str, ...], ...] | None:
    """The axes of a mesh in row-major device order that split each dimension of a sharding, major to minor; None where
    no axes do.

    Where several choices put every part on the same devices, the first in mesh order is taken.
    """
    if text.startswith("{" + REPLICATED):
        return ((),) * rank
    devices = read_tiling(text)
    if devices is None or devices.ndim != rank + 1 or devices.size != prod(sizes):
        return None
    wanted = np.sort(devices, axis=-1)
    grid = np.arange(prod(sizes), dtype=np.int64).reshape(sizes)
    for choice in _choices(devices.shape[:-1], sizes, tuple(axis for axis, size in enumerate(sizes) if size > 1)):
        used = [axis for axes in choice for axis in axes]
        order = used + [axis for axis in range(len(sizes)) if axis not in used]
        dealt = np.sort(grid.transpose(order).reshape(wanted.shape), axis=-1)
        if np.array_equal(dealt, wanted):
            return tuple(tuple(names[axis] for axis in axes) for axes in choice)
    return None


def _choices(
    tiles: tuple[int, ...], sizes: tuple[int, ...], free: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every assignment of mesh axes to dimensions whose sizes multiply to the dimensions' numbers of parts."""
    if not tiles:
        yield ()
        return
    for length in range(len(free) + 1):
        for axes in permutations(free, length):
            if prod(sizes[axis] for axis in axes) == tiles[0]:
                rest = tuple(axis for axis in free if axis not in axes)
                for others in _choices(tiles[1:], sizes, rest):
                    yield (axes, *others)
