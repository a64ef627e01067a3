"""Converts JAX objects: lowered and exported functions, trees of logical names, and shardings on a mesh.

In: objects of JAX, and shardings as reports have them. Out: programs as bytes with the trees they came from, and
objects of JAX.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toast_cli.errors import UsageError
from toast_cli.hardware import machine_name
from toast_cli.program.paths import slash_path


@dataclass(frozen=True)
class Signature:
    """Maps the arrays of a program to the pytrees that the user's function takes and returns.

    Attributes:
        arguments: jax PyTreeDef of `(args, kwargs)`. kept: [the program's arguments] their index among its leaves; a
            function's unused arguments are not arguments of the program.
        results: jax PyTreeDef of what the function returns.
        leaves: [leaves of the arguments] their abstract values.
    """

    arguments: Any
    kept: tuple[int, ...]
    results: Any
    leaves: tuple[Any, ...] = ()


def read_program(program: Any) -> tuple[str, bytes | None, Signature | None]:
    """The program's name or path, its bytes if it is not in a file, and its `Signature` if that is known."""
    if isinstance(program, str | os.PathLike):
        return str(Path(program)) if program != "-" else "-", None, None
    if isinstance(program, bytes):
        return "<bytes>", program, None
    if hasattr(getattr(program, "lowered", None), "compiler_ir"):  # what Equinox' filter_jit(f).lower(…) gives
        program = program.lowered
    if hasattr(program, "mlir_module_serialized"):
        kept = tuple(program.module_kept_var_idx)
        signature = Signature(program.in_tree, kept, program.out_tree, tuple(program.in_avals))
        return f"<{program.fun_name}>", bytes(program.mlir_module_serialized), signature
    if hasattr(program, "compiler_ir") and hasattr(program, "in_tree"):
        import jax

        from toast_cli import xla

        leaves = tuple(jax.core.ShapedArray(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(program.args_info))
        signature = Signature(program.in_tree, xla.kept_arguments(program), program.out_tree, leaves)
        return "<lowered>", program.as_text(debug_info=True).encode(), signature
    raise UsageError(
        f"cannot partition a {type(program).__name__}",
        where="program",
        hint="give a path, jax.jit(f).lower(…), jax.export.export(…)(…), or the bytes of a saved program",
    )


def machine_of(mesh: Any) -> tuple[str, str]:
    """The name of the machine that a `jax.sharding.Mesh` lies on, and the mesh's shape, as `--mesh` and `--mesh-shape`
    take them.

    Raises `UsageError` for devices of a kind that no preset describes, CPUs among them, and for an abstract mesh.
    """
    import jax

    devices = [] if isinstance(mesh, jax.sharding.AbstractMesh) else list(mesh.devices.flat)
    kinds = sorted({device.device_kind for device in devices})
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    shape = ",".join(f"{axis}={size}" for axis, size in dict(mesh.shape).items())
    name = machine_name(kinds[0], len(devices), slices) if len(kinds) == 1 else None
    if name is None:
        raise UsageError(
            f"toast does not know the hardware of a mesh of {' and '.join(kinds) or 'no devices'}",
            where="mesh",
            hint=f'name it: mesh="v5e-8" or a YAML file, with mesh_shape="{shape}"',
        )
    return name, shape


def logical_names(names: Any) -> tuple[str, ...]:
    """`PATTERN=embed,mlp` for each leaf of a tree of `PartitionSpec`s of logical names; a list of such lines is
    returned as it is.

    Several names of one dimension are joined by `+`; arrays without a name have no line.
    """
    if isinstance(names, list | tuple) and all(isinstance(line, str) for line in names):
        return tuple(names)
    import jax

    spec = jax.sharding.PartitionSpec
    lines = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(names, is_leaf=lambda node: isinstance(node, spec)):
        if isinstance(leaf, spec) and any(leaf):
            entries = ("+".join(e) if isinstance(e, tuple) else e or "" for e in leaf)
            lines.append(f"{slash_path(jax.tree_util.keystr(path)).lstrip('/')}={','.join(map(str, entries))}")
    return tuple(lines)


def automatic(mesh: Any) -> Any:
    """The same mesh with automatic axes. With `AxisType.Explicit` axes, JAX's default, JAX's types would fix the
    shardings of intermediate arrays."""
    import jax

    auto = jax.sharding.AxisType.Auto
    if all(kind == auto for kind in mesh.axis_types):
        return mesh
    kinds = (auto,) * len(mesh.axis_names)
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return jax.sharding.AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=kinds)
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def unflatten(tree: Any, leaves: list[Any]) -> Any:
    import jax

    return jax.tree.unflatten(tree, leaves)


def positional(arguments: Any) -> Any:
    """jit's `in_shardings` are for positional arguments only; keyword arguments' shardings come from the arrays
    given."""
    positional, _ = arguments
    return positional
