"""Normalises a module to one entry function without calls, tuples or shardings, and with static shapes.

Every step is linear in the number of operations after inlining.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from toast_cli.base.children import ChildError, in_child
from toast_cli.base.errors import InputError
from toast_cli.frontend import attributes as foreign
from toast_cli.frontend.attributes import EFFECTS, bind_effects, copy_splats, first_error, merge_scalars, place_of
from toast_cli.frontend.convert import left_out_notices
from toast_cli.frontend.formats import drop_declarations, is_known, refuse_foreign
from toast_cli.frontend.inline import BODIES, copy_captured_constants, inline_calls
from toast_cli.frontend.known_numbers import (
    DECIDED,
    PICKS,
    share_batches,
    take_known_branches,
)
from toast_cli.frontend.legalize import OPTIMISED, REWRITES, legalize
from toast_cli.frontend.manual_regions import (
    close_boundaries,
    collectives_outside,
    drop_lone_collectives,
    list_replica_groups,
    restore_manual_regions,
)
from toast_cli.frontend.shardings import (
    MOST_DEVICES,
    PARTITIONS,
    Annotation,
    MeshAxes,
    meshes_of,
    take_shardings,
)
from toast_cli.frontend.simplify import (
    SHIFTED,
    flatten_tuples,
    is_tuple,
    rewrite_shifts,
)
from toast_cli.kernels.describe import describe_kernels
from toast_cli.kernels.table import Table
from toast_cli.program.ops import CUSTOM_CALL, MANUAL_REGION, kind_of
from toast_cli.xla import (
    ir,
    make_context,
    operations_in,
    parse_module,
    refine_shapes,
    run_passes,
    walk_ops,
    write_bytecode,
)

ENTRY = "main"


@dataclass(frozen=True)
class Normalised:
    """A normalised module.

    Attributes:
        module: ir.Module that begins with the function `main`; after it only symbols that its operations refer to.
        kept: shardings that were removed. pins: shardings at the boundary of manual regions, which stay.
        notices: one sentence for each thing that was changed or assumed.
        argument_axes: argument (by number) -> per dimension the one mesh axis that the program splits it over, or "".
        own_mesh: the mesh for which the program states shardings, see `own_mesh`; empty if it states none.
        format: as `toast_cli.frontend.formats` names it; empty if it is not known.
    """

    module: Any
    kept: tuple[Annotation, ...]
    pins: tuple[Annotation, ...]
    notices: tuple[str, ...]
    argument_axes: dict[int, tuple[str, ...]]
    own_mesh: MeshAxes = ()
    format: str = ""


@dataclass(frozen=True)
class Contents:
    """The names of operations and types of results in a module; passes for absent ones are skipped."""

    names: frozenset[str]
    types: frozenset[Any]


def contents_of(module: Any) -> Contents:
    """Collects names and types in one walk, instead of one walk for each feature that most programs lack."""
    names: set[str] = set()
    types: set[Any] = set()

    for operation in operations_in(module):
        names.add(operation.name)
        types.update(result.type for result in operation.results)
    return Contents(frozenset(names), frozenset(types))


def normalise(
    module: Any, path: str = "<program>", keep_shardings: bool = False, kernels: Table | None = None
) -> Normalised:
    """Normalises a module in place. `kept` is empty unless `keep_shardings`. kernels: the user's table of hand-written
    kernels.

    Raises `InputError` for a module without an entry function, with dynamic shapes, recursion, control flow between
    blocks, or operations that are not StableHLO.
    """
    drop_declarations(module)
    contents = contents_of(module)
    if any(name.startswith("mhlo.") for name in contents.names):
        legalize(module, path)
        contents = contents_of(module)
    function = entry_function(module, path)
    static = contents.names.isdisjoint(GIVEN_SHAPES) and all(map(is_static, contents.types))
    if dynamic_argument(function) or not static:
        module = with_static_shapes(module, function, path)
        function, contents = entry_function(module, path), contents_of(module)
    if not contents.names.isdisjoint((*OPTIMISED, *REWRITES)):
        legalize(module, path)
    flatten_tuples(module, inside=any(map(is_tuple, contents.types)))
    restore_manual_regions(module, path)
    communicates = any(kind_of(name).per_device for name in contents.names)
    if communicates:
        list_replica_groups(module, path)
    inline_calls(module, ENTRY, path)
    if not contents.names.isdisjoint(BODIES):
        copy_captured_constants(module, path)
    if communicates:
        drop_lone_collectives(module, path)
    if CUSTOM_CALL in contents.names or any(name.startswith("mhlo.") or not is_known(name) for name in contents.names):
        refuse_foreign(module, path)
    if not contents.names.isdisjoint(DECIDED):
        take_known_branches(module)
    if not contents.names.isdisjoint(PICKS):
        share_batches(module)
    notices = left_out_notices(module)
    merge_scalars(function)
    copy_splats(function)
    if len(SHIFTED & contents.names) > 1:
        rewrite_shifts(module)
    close_boundaries(module)
    mesh = own_mesh(module, path)
    findings = take_shardings(module, function, path)
    notices += sharding_notices(findings.count, keep_shardings)
    if communicates:
        notices += collective_notices(function)
    if count := len(walk_ops(function, MANUAL_REGION)):
        what = "a manual region (shard_map) stays" if count == 1 else f"{count} manual regions (shard_map) stay"
        notices.append(f"{what} as written under every plan")
    if not contents.names.isdisjoint(EFFECTS):
        bind_effects(module)
    if CUSTOM_CALL in contents.names:
        notices += describe_kernels(module, kernels)
    notices += drop_device_attributes(module, path)
    drop_unused_symbols(module)
    function.operation.move_before(module.body.operations[0])
    kept = tuple(findings.kept) if keep_shardings else ()
    stated = mesh if findings.count or findings.pins else ()
    return Normalised(module, kept, tuple(findings.pins), tuple(notices), findings.argument_axes, stated)


def own_mesh(module: Any, path: str) -> MeshAxes:
    """The largest mesh that a module declares; without a declared mesh, its devices as one axis without a name. Empty
    for a program of one device."""
    attributes = module.operation.attributes
    partitions = foreign.integer(attributes, PARTITIONS, lambda: path, least=0, most=MOST_DEVICES) or 1
    meshes = [*meshes_of(module).values(), (("", partitions),)]
    largest = max(meshes, key=lambda mesh: prod(size for _, size in mesh))
    return largest if any(size > 1 for _, size in largest) else ()


def entry_function(module: Any, path: str) -> Any:
    """The function `main`, which is made public; else the one public function there is, which is renamed to `main`."""
    functions = [op for op in module.body.operations if op.operation.name == "func.func"]
    named = [function for function in functions if function.name.value == ENTRY]
    public = [function for function in functions if not is_private(function)]
    if named:
        if is_private(named[0]):  # a private function would be erased with unused symbols
            del named[0].operation.attributes["sym_visibility"]
        return named[0]
    if len(public) == 1:
        with module.context:
            public[0].operation.attributes["sym_name"] = ir.StringAttr.get(ENTRY)
        return public[0]
    names = ", ".join(f"@{function.name.value}" for function in public)
    what = f"no function @main among the public ones ({names})" if public else "there is no public function in it"
    raise InputError(what, where=path, hint="make the entry function the only public one, or call it main")


def is_private(function: Any) -> bool:
    attributes = function.operation.attributes
    return "sym_visibility" in attributes and ir.StringAttr(attributes["sym_visibility"]).value == "private"


def sharding_notices(count: int, keep: bool) -> list[str]:
    """A notice about the shardings in the program."""
    if not count:
        return []
    what = "1 sharding already in the program is" if count == 1 else f"{count} shardings already in the program are"
    kept = f"{what} kept where {'it lies' if count == 1 else 'they lie'} along the axes of the mesh"
    return [kept if keep else f"{what} dropped (--keep-shardings keeps them)"]


def collective_notices(function: Any) -> list[str]:
    """A notice about collectives outside manual regions: a sign that the program is already partitioned."""
    count = len(collectives_outside(function))
    if not count:
        return []
    what = "1 operation communicates" if count == 1 else f"{count} operations communicate"
    return [f"{what} between devices outside manual regions: such a program can be planned for, and not written"]


def drop_device_attributes(module: Any, path: str) -> list[str]:
    """Removes attributes of the devices that the program was lowered for. Returns notices."""
    attributes = module.operation.attributes
    replicas = foreign.integer(attributes, "mhlo.num_replicas", lambda: path, least=0, most=MOST_DEVICES) or 1
    for name in [name for name in attributes if name.startswith("mhlo.")]:  # also XLA's settings, in HLO
        del attributes[name]
    with module.context:
        single = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 1)
    for name in ("mhlo.num_partitions", "mhlo.num_replicas"):
        attributes[name] = single
    return (
        [f"the program was written for {replicas} replicas (pmap) and is read as one of them"] if replicas > 1 else []
    )


def drop_unused_symbols(module: Any) -> None:
    """Removes functions and meshes that nothing in `main` refers to."""
    symbols = [view.operation for view in module.body.operations if "sym_name" in view.operation.attributes]
    with module.context:
        private = ir.StringAttr.get("private")
    for symbol in symbols:
        if ir.StringAttr(symbol.attributes["sym_name"]).value != ENTRY:
            symbol.attributes["sym_visibility"] = private
    run_passes(module, "symbol-dce")
    for view in module.body.operations:
        if view.operation.name == "sdy.mesh":
            del view.operation.attributes["sym_visibility"]


# ---------------------------------------------------------------- static shapes
# Static shapes: every array's size must be known, because a plan divides sizes.

HINT = (
    "give every dimension a number: lower with concrete arguments, or save a file with symbolic shapes as JAX does, "
    "jax.export.export(jax.jit(f))(…).serialize(), and give sizes with --dim b=256; pad to the bound where only a run "
    "of the program knows the size"
)
# Limit on the processor time of shape refinement.
SECONDS = 60


# Operations that read the shape of their result, or slice bounds, from arrays.
GIVEN_SHAPES = frozenset(
    f"stablehlo.{name}"
    for name in (
        "dynamic_reshape", "dynamic_broadcast_in_dim", "dynamic_iota", "dynamic_pad", "dynamic_gather", "dynamic_conv",
        "real_dynamic_slice",
    )
)  # fmt: skip


# A value without a static shape: what it is, and the operation (or function) that it belongs to.
Dynamic = tuple[str, Any]


def with_static_shapes(module: Any, function: Any, path: str) -> Any:
    """The module, or a refined copy of it. Raises `InputError` naming the first value whose shape is not fixed.

    Args:
        function: the entry function of `module`.
    """
    argument = dynamic_argument(function)
    # An operation that reads its result's shape from an array gets a static one by refinement.
    shaped = ((f"the result of {op.name}", op) for op in walk_ops(module, *GIVEN_SHAPES))
    dynamic = argument or first_dynamic(module) or next(shaped, None)
    if dynamic is None:
        return module
    try:
        if argument is None:
            return parse_module(make_context(), in_child(refined, write_bytecode(module), seconds=SECONDS))
    except (InputError, ChildError):
        pass
    what, operation = dynamic
    raise InputError(f"{what} has no fixed shape", where=place_of(operation, path), hint=HINT)


def refined(bytecode: bytes) -> bytes:
    """Runs shape refinement, in a child process. Raises `InputError` if it fails."""
    try:
        return refine_shapes(bytecode)
    except (ir.MLIRError, RuntimeError) as error:
        raise InputError(first_error(error)[1]) from None


def dynamic_argument(function: Any) -> Dynamic | None:
    """The first argument of the entry function without a static shape."""
    for k, argument in enumerate(function.arguments):
        if not is_static(argument.type):
            return f"argument {k} ({argument.type})", function.operation
    return None


def first_dynamic(module: Any) -> Dynamic | None:
    """The first operation, in program order, with a result without a static shape."""
    static: dict[Any, bool] = {}
    for operation in operations_in(module):
        for kind in [result.type for result in operation.results]:
            if kind not in static:
                static[kind] = is_static(kind)
            if not static[kind]:
                return f"the result of {operation.name} ({kind})", operation
    return None


def is_static(kind: Any) -> bool:
    """True if a type (also each type in a tuple) has a static shape."""
    if isinstance(kind, ir.TupleType):
        return all(is_static(kind.get_type(k)) for k in range(kind.num_types))
    return not isinstance(kind, ir.ShapedType) or (kind.has_rank and kind.has_static_shape)
