"""Rebuilds manual regions (`shard_map`) of an HLO program, each as one operation.

HLO has no operation for them. Shardy writes a region as a custom call `xla.sdy.GlobalToLocalShape`, a call of the body,
and a custom call `xla.sdy.LocalToGlobalShape`; meshes and shardings are texts in frontend attributes. Out:
`sdy.manual_computation` around a call of the same body, and `sdy.mesh`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from toast_cli.errors import InputError
from toast_cli.frontend import attributes as foreign
from toast_cli.frontend.annotations import FRONTEND, frontend_texts
from toast_cli.frontend.diagnostics import place_of
from toast_cli.frontend.inline import callee_name
from toast_cli.frontend.shardings import kind_of
from toast_cli.xla import declare_mesh, ir, run_passes, sdy, walk_ops

BODY_PREFIXES = ("xla.sdy.manual_computation_body", "xla.sdy.inlinable_manual_computation_body")
ENTRANCE, EXIT = "xla.sdy.GlobalToLocalShape", "xla.sdy.LocalToGlobalShape"
MESHES = "xla.sdy.meshes"
REGION = "sdy.manual_computation"
BOUNDARY = ("in_shardings", "out_shardings")
# The propagation passes of Shardy's pipeline.
PROPAGATION = (
    "sdy-add-data-flow-edges,sdy-apply-sharding-constraints,sdy-user-priority-propagate,"
    "func.func(sdy-sink-data-flow-edges)"
)


def restore_manual_regions(module: Any, path: str) -> None:
    """Rebuilds every manual region, after tuples are flattened and before calls are inlined. `gspmd_regions` handles
    those in GSPMD's form."""
    with module.context, ir.Location.unknown():
        declare_meshes(module, path)
        for call in walk_ops(module, "func.call"):
            if callee_name(call).startswith(BODY_PREFIXES):
                restore_region(call, path)


def declare_meshes(module: Any, path: str) -> None:
    """Declares `sdy.mesh` operations for the meshes that a converted HLO module has as text."""
    attributes = {name: module.operation.attributes[name] for name in module.operation.attributes}

    def place() -> str:
        return path

    texts = frontend_texts(attributes, place)
    if MESHES not in texts:
        return
    declared = {op.attributes["sym_name"].value for op in module.body.operations if op.operation.name == "sdy.mesh"}
    for item in foreign.parsed(texts[MESHES], MESHES, ir.DictAttr, place):
        mesh = foreign.of_kind(item.attr, MESHES, sdy.MeshAttr, place)
        if item.name not in declared:  # jaxlib 0.12 already declares them
            declare_mesh(module, item.name, mesh)


def restore_region(call: Any, path: str) -> None:
    """Rebuilds one region from the call of its body and the custom calls around it."""
    entrance = getattr(call.operands[0].owner, "operation", None) if len(call.operands) else None
    leaving = [use.owner.operation for result in call.results for use in result.uses]
    way_out = leaving[0] if leaving else None
    boundary = [(entrance, ENTRANCE), (way_out, EXIT)]
    fits = (len(call.operands) == 0 or entrance is not None) and (
        way_out is None or len(leaving) == len(way_out.operands)
    )
    if not fits or any(custom is not None and kind_of(custom) != kind for custom, kind in boundary):
        hint = "write it out again with this version of jax"
        raise InputError("a manual region without its boundary", where=place_of(call, path), hint=hint)
    place = partial(place_of, call, path)
    texts: dict[str, str] = {}
    for part in (call, entrance, way_out):
        if part is not None and FRONTEND in part.attributes:
            texts |= frontend_texts({FRONTEND: part.attributes[FRONTEND]}, place)

    def parsed(name: str, default: str, kind: Any) -> Any:
        return foreign.parsed(texts.get(name, default), name, kind, place)

    no_shardings, several = "#sdy.sharding_per_value<[]>", sdy.TensorShardingPerValueAttr
    outside = list(entrance.operands) if entrance is not None else []
    results = list(way_out.results) if way_out is not None else []
    region = ir.Operation.create(
        REGION,
        results=[result.type for result in results],
        operands=outside,
        attributes={
            "in_shardings": parsed("xla.sdy.in_shardings", no_shardings, several),
            "out_shardings": parsed("xla.sdy.out_shardings", no_shardings, several),
            "manual_axes": parsed("xla.sdy.manual_axes", "#sdy<manual_axes{}>", sdy.ManualAxesAttr),
        },
        regions=1,
        loc=call.location,
        ip=ir.InsertionPoint(call),
    )
    inside = ir.Block.create_at_start(region.regions[0], [operand.type for operand in call.operands])
    with ir.InsertionPoint(inside), call.location:
        types = [result.type for result in call.results]
        body = ir.Operation.create(
            "func.call",
            results=types,
            operands=list(inside.arguments),
            attributes={"callee": call.attributes["callee"]},
        )
        ir.Operation.create("sdy.return", operands=list(body.results))
    for old, new in zip(results, region.results, strict=True):
        old.replace_all_uses_with(new)
    for part in (way_out, call, entrance):
        if part is not None:
            part.erase()


def close_boundaries(module: Any) -> None:
    """States how operands and results of manual regions are sharded over axes that a constraint or region in it names.
    Where the program leaves that open, Shardy propagates it out of the region. Calls must be inlined."""
    regions = [region for region in walk_ops(module, REGION) if _names_more(region)]
    if not regions:
        return
    copy = module.operation.clone()
    for function in copy.regions[0].blocks[0].operations:
        for name in ("arg_attrs", "res_attrs"):
            if name in function.operation.attributes:
                del function.operation.attributes[name]
    places = {region: k for k, region in enumerate(walk_ops(module, REGION))}
    copies = walk_ops(copy, REGION)
    settled = [copies[places[region]] for region in regions]
    run_passes(copy, PROPAGATION)
    for region, found in zip(regions, settled, strict=True):
        for name in BOUNDARY:
            text = str(found.attributes[name]).replace(", ?}", "}").replace("{?}", "{}")
            region.attributes[name] = ir.Attribute.parse(text, module.context)


def _names_more(region: Any) -> bool:
    """True if something in a region names axes that are not manual there."""
    inside = [one.attributes["sharding"] for one in walk_ops(region, "sdy.sharding_constraint")]
    regions = [one.attributes["manual_axes"] for one in walk_ops(region, REGION)[1:]]
    return any('"' in str(stated) for stated in (*inside, *regions))
