"""Parses a program's sharding attributes into plain data.

Three notations occur: Shardy's (`sdy.sharding`), XLA's (`mhlo.sharding`), and Shardy's inside HLO's frontend attributes
(`xla.sdy.sharding`, beside a less precise `mhlo.sharding`). Shardy's is preferred if several are present.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toast_cli.errors import InputError
from toast_cli.frontend import attributes as foreign
from toast_cli.frontend.attributes import Locator
from toast_cli.frontend.gspmd import MAXIMAL, split_shardings
from toast_cli.xla import ir, sdy

SDY, GSPMD, FRONTEND = "sdy.sharding", "mhlo.sharding", "mhlo.frontend_attributes"
FRONTEND_PREFIX, FRONTEND_SDY, FRONTEND_RULE = "xla.sdy.", "xla.sdy.sharding", "xla.sdy.sharding_rule"
RULE = "sdy.sharding_rule"

_ESCAPED = re.compile(r"\\(.)")
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
        open_dims: dimensions that the XLA notation leaves open.
        single_device: the array is on one device alone.
    """

    axes: Axes | None = None
    mesh: MeshAxes = ()
    gspmd: str = ""
    open_dims: frozenset[int] = frozenset()
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


def gspmd_shardings(text: str, open_dims: frozenset[int] = frozenset()) -> list[AnnotatedSharding]:
    """The shardings in an `mhlo.sharding`."""
    return [
        AnnotatedSharding(gspmd=part, open_dims=open_dims, single_device=part.startswith("{" + MAXIMAL))
        for part in split_shardings(text)
    ]


def annotated_shardings(attributes: dict[str, Any], meshes: Meshes, place: Locator) -> list[AnnotatedSharding]:
    """The shardings in the attributes of an operation, argument or result, one per array; empty if there are none.

    Raises `InputError` at `place` for attributes that are no shardings.
    """
    texts = frontend_texts(attributes, place)

    def several(attribute: Any, name: str) -> list[AnnotatedSharding]:
        if sdy.TensorShardingPerValueAttr.isinstance(attribute):
            return value_shardings(attribute, meshes)
        return [tensor_sharding(foreign.of_kind(attribute, name, sdy.TensorShardingAttr, place), meshes)]

    def from_text() -> list[AnnotatedSharding]:
        kind = sdy.TensorShardingPerValueAttr if _SEVERAL in texts[FRONTEND_SDY] else sdy.TensorShardingAttr
        return several(foreign.parsed(texts[FRONTEND_SDY], FRONTEND_SDY, kind, place), FRONTEND_SDY)

    readers: tuple[Callable[[], list[AnnotatedSharding]], ...] = (
        lambda: several(attributes[SDY], SDY),
        from_text,
        lambda: gspmd_shardings(foreign.text(attributes, GSPMD, place) or ""),
    )
    present = (SDY in attributes, FRONTEND_SDY in texts, GSPMD in attributes)
    return next((read() for read, there in zip(readers, present, strict=True) if there), [])


def one_sharding(found: list[AnnotatedSharding], rank: int, place: Locator) -> AnnotatedSharding | None:
    """The sharding of a single array; None if it has none.

    Raises `InputError` for several shardings, or for another number of dimensions.
    """
    if not found:
        return None
    if len(found) > 1:
        what = f"there are {len(found)} shardings for one array"
        raise InputError(what, where=place(), hint="give it one, or take them out of the program")
    check_rank(found[0], rank, place)
    return found[0]


def check_rank(sharding: AnnotatedSharding, rank: int, place: Locator) -> None:
    """Raises `InputError` if a sharding has another number of dimensions than its array."""
    if sharding.axes is not None and not sharding.single_device and len(sharding.axes) != rank:
        what = f"a sharding has {len(sharding.axes)} dimensions and its array {rank}"
        raise InputError(what, where=place(), hint="is the file intact?")


def frontend_texts(attributes: dict[str, Any], place: Locator) -> dict[str, str]:
    """HLO's frontend attributes that belong to Shardy: name -> text.

    Older versions of XLA (that of JAX 0.5, say) put a backslash before every quotation mark in them.
    """
    return {
        name: _unescaped(foreign.string_value(attribute, name, place))
        for name, attribute in foreign.entries(attributes, FRONTEND, place).items()
        if name.startswith(FRONTEND_PREFIX)
    }


def _unescaped(text: str) -> str:
    first = text.find('"')
    return _ESCAPED.sub(r"\1", text) if first > 0 and text[first - 1] == "\\" else text


def without_shardings(attributes: dict[str, Any], place: Locator, keep_placement: bool = False) -> dict[str, Any]:
    """The attributes without those that `annotated_shardings` reads; a placement on one device may stay.

    An op's sharding rule, which JAX attaches to custom calls, is kept: from HLO's frontend attributes it is turned into
    the attribute that Shardy reads.
    """
    texts = frontend_texts(attributes, place)
    cleaned = {name: attr for name, attr in attributes.items() if keep_placement or name not in (SDY, GSPMD)}
    if FRONTEND in cleaned:
        cleaned.pop(FRONTEND)
        found = foreign.entries(attributes, FRONTEND, place).items()
        kept = {name: attribute for name, attribute in found if not name.startswith(FRONTEND_PREFIX)}
        if kept:
            cleaned[FRONTEND] = ir.DictAttr.get(kept)
    if FRONTEND_RULE in texts:
        cleaned[RULE] = foreign.parsed(texts[FRONTEND_RULE], FRONTEND_RULE, sdy.OpShardingRuleAttr, place)
    return cleaned
