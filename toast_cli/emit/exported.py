"""Makes a `jax.export.Exported`, which JAX can save, load and call.

In: the arguments and results of a program, and its StableHLO with shardings. Out: an `Exported`, or the bytes of
a jax.export file. `jax.export` exports a placeholder function with these types and shardings, and the program replaces
its module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from toast_cli.emit.behind_transposes import reduced_behind_transposes
from toast_cli.emit.specs import NamedAxes, boundary_specs
from toast_cli.errors import UsageError
from toast_cli.frontend.source import Source
from toast_cli.plan.partitioned import PartitionedProgram

# MLIR's element types -> jax.numpy's, if the names differ by more than their first letter.
_DTYPES = {"i1": "bool", "bf16": "bfloat16", "pred": "bool", "complex<f32>": "complex64", "complex<f64>": "complex128"}
# The trees of a user's function: PyTreeDef of `(args, kwargs)`, [program's arguments] index of the leaf, PyTreeDef of
# the results, abstract leaves.
Trees = tuple[Any, tuple[int, ...], Any, list[Any]]


@dataclass(frozen=True)
class Place:
    """One argument or result. `path` is its name in the user's tree (empty if unknown); `axes`: per dimension the mesh
    axes, or None."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    axes: NamedAxes
    donated: bool = False


@dataclass(frozen=True)
class Boundary:
    """Arguments and results of a program, on a mesh of these axes (name -> size; empty if the program names none)."""

    name: str
    axes: dict[str, int]
    arguments: tuple[Place, ...]
    results: tuple[Place, ...]
    devices: int


def emit_export(
    source: Source, lowered: PartitionedProgram, bytecode: bytes, platform: str, trees: Trees | None
) -> bytes:
    """A jax.export file of the program that `bytecode` (MLIR, with shardings) holds. Raises `UsageError` without
    flatbuffers."""
    from toast_cli import xla

    boundary = boundary_of(source, reduced_behind_transposes(source, lowered))
    exported = exported_program(boundary, xla.write_portable_artifact(bytecode), platform)
    try:
        if trees is not None:
            try:
                return bytes(in_trees(exported, *trees).serialize())
            except ValueError:  # a tree with nodes of a class that cannot be saved: the arguments stay flat
                pass
        return bytes(exported.serialize())
    except ImportError:
        raise UsageError(
            "needs the package flatbuffers", where="--format jax_export", hint="pip install flatbuffers"
        ) from None


def boundary_of(source: Source, lowered: PartitionedProgram) -> Boundary:
    """Arguments and results of a program that is about to be written."""
    program = source.program
    specs = boundary_specs(source, lowered)
    arguments = tuple(
        Place(a.path, program.values[a.value].own_shape, program.values[a.value].dtype, named.spec, a.donated)
        for a, named in zip(program.arguments, specs.arguments, strict=True)
    )
    results = tuple(
        Place(r.path, program.values[r.value].own_shape, program.values[r.value].dtype, named.spec)
        for r, named in zip(program.results, specs.results, strict=True)
    )
    return Boundary(program.name, specs.axes, arguments, results, prod(specs.axes.values()))


def trees_of(content: bytes) -> Trees | None:
    """The trees that a jax.export file holds; None if JAX does not know the classes in them."""
    from jax import export

    try:
        found = export.deserialize(bytearray(content))
    except (ImportError, KeyError, ValueError):
        return None
    return found.in_tree, tuple(found.module_kept_var_idx), found.out_tree, list(found.in_avals)


def exported_program(boundary: Boundary, artifact: bytes, platform: str) -> Any:
    """The program as a `jax.export.Exported`: its module in an export of a placeholder with these types and shardings.

    Args:
        artifact: StableHLO as a portable artifact, with shardings. platform: "cpu", "cuda", "tpu", …; the program may
            run on others, too.
    """
    import jax
    from jax import export

    names, sizes = tuple(boundary.axes), tuple(boundary.axes.values())
    mesh = jax.sharding.AbstractMesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))

    def sharding(place: Place) -> Any:
        return jax.sharding.NamedSharding(mesh, partition_spec(place.axes))

    with wide_types(boundary):
        shapes = [abstract(place) for place in boundary.arguments]

        def hull(*_: Any) -> list[Any]:
            return [jax.numpy.zeros(place.shape, dtype_of(place.dtype)) for place in boundary.results]

        jitted = jax.jit(
            hull,
            keep_unused=True,
            in_shardings=tuple(map(sharding, boundary.arguments)),
            out_shardings=list(map(sharding, boundary.results)),
        )
        checks = [export.DisabledSafetyCheck.platform()]
        made = export.export(jitted, platforms=[{"gpu": "cuda"}.get(platform, platform)], disabled_checks=checks)(
            *shapes
        )
    return replace(made, mlir_module_serialized=artifact, fun_name=boundary.name)


def in_trees(exported: Any, arguments: Any, kept: Sequence[int], results: Any, leaves: Sequence[Any]) -> Any:
    """The same with the trees of the user's function; unused leaves are only part of the signature."""
    avals = list(leaves)
    named: list[Any] = [None] * len(avals)
    for place, aval, sharding in zip(kept, exported.in_avals, exported._in_named_shardings, strict=True):
        avals[place], named[place] = aval, sharding
    return replace(
        exported, in_tree=arguments, in_avals=tuple(avals), _in_named_shardings=tuple(named),
        in_shardings_hlo=(None,) * len(avals), module_kept_var_idx=tuple(kept), out_tree=results,
    )  # fmt: skip


def abstract(place: Place) -> Any:
    """`jax.ShapeDtypeStruct` of a place."""
    import jax

    return jax.ShapeDtypeStruct(place.shape, dtype_of(place.dtype))


def dtype_of(element: str) -> Any:
    """NumPy's type of an MLIR element type: `bf16` -> bfloat16, `ui8` -> uint8, `f8E4M3FN` -> float8_e4m3fn."""
    import jax.numpy as jnp

    name = _DTYPES.get(element)
    if name is None and element.startswith("ui"):
        name = "uint" + element[2:]
    elif name is None and element.startswith("i"):
        name = "int" + element[1:]
    elif name is None and element[1:].isdigit():
        name = "float" + element[1:]
    elif name is None:
        name = f"float{element[1:].partition('E')[0]}_e{element.partition('E')[2]}".lower()
    return jnp.dtype(name)


def partition_spec(sharding: Iterable[Sequence[str] | None]) -> Any:
    """`jax.sharding.PartitionSpec` of the axes that split each dimension, without trailing unsharded dimensions."""
    import jax

    entries = [None if not axes else axes[0] if len(axes) == 1 else tuple(axes) for axes in sharding]
    while entries and entries[-1] is None:
        entries.pop()
    return jax.sharding.PartitionSpec(*entries)


def wide_types(boundary: Boundary) -> Any:
    """A context in which JAX keeps the program's types, enabling 64-bit types if it has any."""
    import jax

    wide = any(p.dtype in ("f64", "i64", "ui64", "complex<f64>") for p in (*boundary.arguments, *boundary.results))
    return jax.enable_x64(wide or bool(jax.config.jax_enable_x64))
