"""The Python interface: a program goes in (a file, or the result of `jax.jit(f).lower(…)`); a `Plan` comes out.

    plan = toast.partition(jax.jit(step, donate_argnums=0).lower(params, batch), mesh="v4-32")
    mesh = plan.mesh()
    fast = jax.jit(step, donate_argnums=0, in_shardings=plan.in_shardings(mesh), out_shardings=plan.out_shardings(mesh))

Shardings of arguments and results leave the rest to the compiler's propagation; `plan.constraints` lists the
`with_sharding_constraint`s that the program needs for the compiler to follow the plan. `toast_cli.jit` does all of
that by itself. Objects of JAX are converted here, and shardings are given in the forms that other frameworks read.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from toast_cli.base.errors import UsageError
from toast_cli.base.files import Target, check_targets, output_format, write_target
from toast_cli.emit.specs import InterfaceArray, entry_text, partition_spec, rules_of, tuple_text
from toast_cli.hardware import load_spec, machine_name, needs_no_file, written_shape
from toast_cli.pipeline import Outcome
from toast_cli.pipeline import partition as run_pipeline
from toast_cli.plan.partitioned import ConstraintFacts
from toast_cli.program.names import slash_path
from toast_cli.report.model import DimensionAxes, Report
from toast_cli.request import DEFAULTS, Request, request_of_keywords
from toast_cli.tactics import parse_tactics
from toast_cli.together import partition_together as run_together

# ---------------------------------------------------------------- frameworks
# A plan's shardings in the forms that frameworks read.


def slash_expression(pattern: str) -> str:
    """A pattern over paths (`*['layers'][*]['w']`) as a regular expression over them in slashes:
    `.*layers/.*/w$`."""
    parts = [re.escape(part) for part in slash_path(pattern).split("*")]
    expression = ".*".join(parts)
    return f"{'' if pattern.startswith('*') else '^'}{expression.removeprefix('.*').removeprefix('/')}$"


# ---------------------------------------------------------------- objects of JAX
# Converts JAX objects: lowered and exported functions, trees of logical names, and shardings on a mesh.


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
        return f"<{program.fun_name}>", _exported_bytes(program), signature
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


def _exported_bytes(exported: Any) -> bytes:
    """The module of a `jax.export.Exported`; for one with symbolic shapes a file, which states them."""
    import jax

    if not any(jax.export.is_symbolic_dim(size) for aval in exported.in_avals for size in aval.shape):
        return bytes(exported.mlir_module_serialized)
    # Without the user's trees, whose classes JAX may be unable to save.
    arguments, results = (tuple(range(len(avals))) for avals in (exported.in_avals, exported.out_avals))
    trees = {"in_tree": jax.tree.structure((arguments, {})), "out_tree": jax.tree.structure(results)}
    return bytes(replace(exported, **trees).serialize())


def machine_of(mesh: Any) -> tuple[str, str]:
    """The name of the machine that a `jax.sharding.Mesh` lies on, and the mesh's shape, as `--mesh` and `--mesh-shape`
    take them.

    Raises `UsageError` for devices of a kind that no preset describes (CPUs, too), part of a machine, and an abstract
    mesh.
    """
    import jax

    devices = [] if isinstance(mesh, jax.sharding.AbstractMesh) else list(mesh.devices.flat)
    kinds = sorted({device.device_kind for device in devices})
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    shape = written_shape(dict(mesh.shape))
    name = machine_name(kinds[0], len(devices), slices) if len(kinds) == 1 else None
    if name is None or not needs_no_file(name):
        raise UsageError(
            f"toast knows no machine of {len(devices)} {' and '.join(kinds) or 'devices'}",
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


class Plan:
    """A chosen plan, its predicted cost, and its shardings as objects of JAX.

    Attributes:
        report: all facts, as in `toast partition --json`.
    """

    def __init__(self, outcome: Outcome, signature: Signature | None = None) -> None:
        self._outcome = outcome
        self._signature = signature

    def __repr__(self) -> str:
        predicted = self.report.predicted
        fits = {"yes": "fits", "unsure": "may not fit", "no": "does not fit"}[self.fit]
        cost = f"{predicted.step_seconds * 1e3:.4g} ms a step, peak {predicted.peak_bytes / 2**30:.4g} GiB, {fits}"
        return f"<Plan of {self.report.program.name} on {self.report.mesh.name}: {self.summary}; {cost}>"

    @property
    def report(self) -> Report:
        return self._outcome.report

    def _repr_html_(self) -> str:
        """HTML for a notebook: the plan in a sentence, its figures, and the shardings of arguments, grouped by
        pattern."""
        from toast_cli.report import arrays, terminal
        from toast_cli.report.html.pages import WIDE, from_terminal

        report = self.report
        parts = terminal.header(report), terminal.verdict(report), terminal.prediction(report, WIDE)
        return "".join(map(from_terminal, (*parts, arrays.arguments(report))))

    def partition_rules(self) -> list[tuple[str, Any]]:
        """(regular expression over an array's path, PartitionSpec); the first rule that matches applies.

        This is the form of EasyLM's `match_partition_rules` and of big_vision; paths are written
        `state/params/layers/0/w`. The last rule is for all replicated arrays.
        """
        results = [_named_spec(result.name, result.sharding) for result in self.report.results if result.name]
        rules = rules_of([*self._argument_specs(), *results])
        by_path = [(slash_expression(pattern), partition_spec(spec)) for pattern, spec in rules]
        return [*by_path, (".*", partition_spec([]))]

    def maxtext_rules(self, names: Mapping[str, str | Sequence[str]] | None = None) -> str:
        """`logical_axis_rules` as MaxText's YAML has them.

        Args:
            names: what MaxText calls each of the plan's dimensions, one name or several (`{"batch":
                ["activation_batch", "activation_embed_and_logits_batch"]}`); a dimension without an entry keeps its
                own.
        """
        lines = ["logical_axis_rules:"]
        for name, axes in self.logical_axis_rules():
            theirs = (names or {}).get(name, name)
            listed = json.dumps([axes] if isinstance(axes, str) else list(axes))
            own_names = [theirs] if isinstance(theirs, str) else theirs
            lines += [f"  - [{json.dumps(own_name)}, {listed}]" for own_name in own_names]
        return "\n".join(lines) + "\n"

    def keras_layouts(self, argument: str) -> dict[str, tuple[str | None, ...]]:
        """For a `keras.distribution.LayoutMap`: the path of a variable -> a mesh axis or None for each dimension.

        Args:
            argument: the function's argument that holds the variables by their paths: `{v.path: v.value for v in
                model.trainable_variables}`. Variables that are whole on every device are left out.

        Raises `UsageError` where the plan splits a dimension over two mesh axes, which Keras cannot say.
        """
        layouts: dict[str, tuple[str | None, ...]] = {}
        for name, array in self._below(argument).items():
            for axes in array.axes:
                if axes is not None and len(axes) > 1:
                    raise UsageError(
                        f"Keras names one axis for each dimension, and the plan splits one over {' and '.join(axes)}",
                        where=array.path,
                        hint="fix it with pins=, or plan for a mesh shape with one axis",
                    )
            layouts[name] = tuple(axes[0] if axes else None for axes in array.axes)
        return layouts

    def mark_sharding_lines(self, argument: str) -> str:
        """Python lines for PyTorch/XLA: a mesh, and `xs.mark_sharding(…)` for each parameter and buffer of `model` that
        is split.

        Args:
            argument: the function's argument that holds them by name, as `torchax.extract_jax(model)` gives them.
        """
        axes = self.axes
        lines = [
            "import numpy as np",
            "import torch_xla.distributed.spmd as xs",
            "",
            f"mesh = xs.Mesh(np.arange({prod(axes.values())}), {tuple(axes.values())!r}, {tuple_text(axes)})",
            "arrays = {**dict(model.named_parameters()), **dict(model.named_buffers())}",
        ]
        for name, array in self._below(argument).items():
            spec = f"({', '.join(map(entry_text, array.axes))}{',' if len(array.axes) == 1 else ''})"
            lines.append(f"xs.mark_sharding(arrays[{json.dumps(name)}], mesh, {spec})")
        return "\n".join(lines) + "\n"

    def _below(self, argument: str) -> dict[str, InterfaceArray]:
        """Path below the argument, in slashes -> its spec, for arrays that are split.

        Raises `UsageError` if the program has no such argument.
        """
        roots: dict[str, None] = {}
        arrays: dict[str, InterfaceArray] = {}
        for array in self._argument_specs():
            root, _, rest = slash_path(array.path).partition("/")
            roots[root] = None
            if root == argument and rest and any(array.axes):
                arrays[rest] = array
        if argument not in roots:
            raise UsageError(f"the program has no argument {argument!r}", hint=f"its arguments: {', '.join(roots)}")
        return arrays

    def _argument_specs(self) -> list[InterfaceArray]:
        return [_named_spec(argument.name, argument.sharding) for argument in self.report.arguments if argument.name]

    @property
    def summary(self) -> str:
        """The plan in a sentence."""
        return self.report.plan.summary

    @property
    def fits(self) -> bool:
        """True unless the predicted peak exceeds the memory limit, or a compiler refuses the plan; see `fit`."""
        return self.fit != "no"

    @property
    def fit(self) -> str:
        """Whether it fits: "yes", "unsure" where that is within the prediction's measured error, or "no"."""
        return self.report.fit

    @property
    def axes(self) -> dict[str, int]:
        """The logical mesh: axis name -> size, in order."""
        return self.report.mesh.axes

    @cached_property
    def constraints(self) -> list[ConstraintFacts]:
        """The `with_sharding_constraint` lines under which propagation reproduces the plan, with source locations."""
        return self._outcome.emit("bytecode").report.constraints

    def mesh(self, devices: Sequence[Any] | None = None) -> Any:
        """A `jax.sharding.Mesh` of the plan's axes over these devices (jax.devices() when None).

        Raises `UsageError` when there are not enough of them.
        """
        import jax

        from toast_cli.emit.device_mesh import device_mesh

        available = list(jax.devices() if devices is None else devices)
        count = prod(self.axes.values())
        if len(available) < count:
            raise UsageError(
                f"the plan is for {count} devices, and JAX sees {len(available)}",
                where=self.report.mesh.name,
                hint="give a mesh of their number, or XLA_FLAGS=--xla_force_host_platform_device_count on a CPU",
            )
        return device_mesh(self.axes, available[:count])

    def in_specs(self) -> Any:
        """PartitionSpecs of the arguments: a tuple with one tree per positional argument.

        A program from a file has no trees: one spec per argument of the program, in order.
        """
        import jax

        specs = [partition_spec(argument.sharding) for argument in self.report.arguments]
        if self._signature is None:
            return tuple(specs)
        # jit's in_shardings are for positional arguments; those of keyword arguments come from the arrays given.
        return jax.tree.unflatten(self._signature.arguments, self._leaf_specs(specs))[0]

    def out_specs(self) -> Any:
        """PartitionSpecs of the results, as the tree that the function returns (flat for a program from a file)."""
        import jax

        specs = [partition_spec(result.sharding) for result in self.report.results]
        return tuple(specs) if self._signature is None else jax.tree.unflatten(self._signature.results, specs)

    def in_shardings(self, mesh: Any = None) -> Any:
        """For `jax.jit(in_shardings=…)`, on this mesh (`self.mesh()` when None); see `in_specs`.

        Raises `UsageError` for a mesh that lacks one of the plan's axes, or has it in another size.
        """
        return self._on(mesh, self.in_specs())

    def out_shardings(self, mesh: Any = None) -> Any:
        """For `jax.jit(out_shardings=…)`; see `in_shardings`."""
        return self._on(mesh, self.out_specs())

    def flat_in_shardings(self, mesh: Any = None) -> list[Any]:
        """One sharding per argument of the program, in order."""
        return list(self._on(mesh, [partition_spec(argument.sharding) for argument in self.report.arguments]))

    def flat_out_shardings(self, mesh: Any = None) -> list[Any]:
        """One sharding per result, in order."""
        return list(self._on(mesh, [partition_spec(result.sharding) for result in self.report.results]))

    def logical_axis_rules(self) -> list[tuple[str, str | tuple[str, ...]]]:
        """Names of the sharded dimensions with their mesh axes, the most important first.

        The form is that of Flax's logical axis rules (`flax.linen.logical_axis_rules`), also used by MaxText: if two
        rules want one mesh axis in the same array, the earlier rule gets it, as in a plan. Such rules cannot express
        conflicting dimensions, nor arrays that are stored with another sharding than the one they are used with.
        """
        axes: dict[str, list[str]] = {}
        for decision in self.report.plan.decisions:
            if decision.kind == "shard" and decision.axis not in axes.setdefault(decision.target, []):
                axes[decision.target].append(decision.axis)
        return [(name, mesh_axes[0] if len(mesh_axes) == 1 else tuple(mesh_axes)) for name, mesh_axes in axes.items()]

    def program(self, format: str = "stablehlo", annotate: str = "minimal") -> bytes:
        """The program with its shardings ("stablehlo", "bytecode", "jax_export", "hlo"), or the shardings alone
        ("specs", "python").

        Raises `UsageError` for another format, or for a program that it cannot hold.
        """
        of = self._signature
        trees = None if of is None else (of.arguments, of.kept, of.results, list(of.leaves))
        return self._outcome.emit(format, annotate, trees).content

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the sharded program as `toast partition -o` does: the extension determines the format; an existing
        file is replaced atomically.

        Raises `UsageError` if it cannot be written.
        """
        target = Target("path", os.fspath(path))
        check_targets([target], [])
        write_target(target, self.program(output_format(target.path, None).value))

    def save_plan(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan alone, for `toast.partition(…, plan=path)`, as `toast partition --save-plan` does.

        Raises `UsageError` if it cannot be written.
        """
        target = Target("path", os.fspath(path))
        check_targets([target], [])
        write_target(target, self._outcome.saved_plan())

    def flat_leaf_shardings(self, mesh: Any = None) -> list[Any]:
        """One sharding per leaf of the function's arguments, in order; those that the program does not use are among
        them."""
        specs = [partition_spec(argument.sharding) for argument in self.report.arguments]
        return list(self._on(mesh, specs if self._signature is None else self._leaf_specs(specs)))

    def _leaf_specs(self, kept: list[Any]) -> list[Any]:
        """[leaves of the arguments] spec. A leaf that the program does not use gets the spec of the result of the same
        name, since the next step receives that result. Without such a result it is replicated."""
        import jax

        assert self._signature is not None
        signature = self._signature
        specs = [partition_spec([])] * signature.arguments.num_leaves
        used = dict(zip(signature.kept, kept, strict=True))
        results = jax.tree.unflatten(signature.results, list(range(signature.results.num_leaves)))
        by_tail: dict[tuple[str, str], Any] = {}
        for path, number in jax.tree_util.tree_leaves_with_path(results):
            fact = self.report.results[number]
            for start in (0, 1):
                shape = fact.type[fact.type.index("[") + 1 : fact.type.rindex("]")]  # `2,3` of `f32[2,3]`
                by_tail[jax.tree_util.keystr(path[start:]), shape] = partition_spec(fact.sharding)
        leaves = jax.tree.unflatten(signature.arguments, list(range(signature.arguments.num_leaves)))
        for path, number in jax.tree_util.tree_leaves_with_path(leaves):
            tail = jax.tree_util.keystr(path[2:])  # from behind (args, kwargs) and the parameter on
            if number in used:
                specs[number] = used[number]
            elif tail and signature.leaves:
                shape = ",".join(map(str, signature.leaves[number].shape))
                specs[number] = by_tail.get((tail, shape), specs[number])
        return specs

    def _on(self, mesh: Any, specs: Any) -> Any:
        import jax

        chosen = self.mesh() if mesh is None else mesh
        sizes = dict(chosen.shape)
        for axis, size in self.axes.items():
            if sizes.get(axis) != size:
                stated = f"has it in size {sizes[axis]}" if axis in sizes else f"has {', '.join(sizes)}"
                raise UsageError(
                    f"the plan needs a mesh axis {axis!r} of size {size}; this mesh {stated}",
                    where="mesh",
                    hint="use plan.mesh(), or partition for the mesh you have",
                )
        spec = jax.sharding.PartitionSpec
        placed = automatic(chosen)
        return jax.tree.map(
            lambda leaf: jax.sharding.NamedSharding(placed, leaf), specs, is_leaf=lambda x: isinstance(x, spec)
        )


def partition(program: Any, mesh: Any, **options: Any) -> Plan:
    """Chooses how to split a program over a mesh. The same as `toast partition`.

    Args:
        program: a path, the bytes of a file, a `jax.stages.Lowered`, or a `jax.export.Exported`.
        mesh: a specification's name or path, or a `jax.sharding.Mesh` over accelerators: their machine, in that shape.
        options: those of `toast partition`, by the names of the fields of `Request` (`strategy`, `tactics`,
            `memory_limit`, `plan`, `fit`, `microbatches`, `confirm`, …), with the same values. Options that may be
            given several times take a list. `mesh_shape` and `dims` (`{"b": 256}`, sizes of symbolic dimensions) may be
            dicts. `names` may be a tree of `PartitionSpec`s of logical names, as `nn.get_partition_spec(variables)`
            returns.

    Raises `ToastError` (where, what, what to try). A program that does not fit is a result: see `Plan.fits`.
    """
    path, content, signature = read_program(program)
    request = replace(request_for(mesh, options), program=path, content=content)
    return Plan(run_pipeline(request), signature)


def partition_together(
    programs: Mapping[str, Any], mesh: Any, runs: Mapping[str, int] | None = None, **options: Any
) -> dict[str, Plan]:
    """Plans for several programs on the same devices, under one sharding of the arguments that they share (those of the
    same path, shape and type in all), with which all runs together take least time. The same as `toast partition
    --with`.

    Args:
        programs: name -> program, as `partition` takes it. runs: name -> how often it runs for one run of the first;
            once where it is not named. mesh, options: as for `partition`.

    Raises `ToastError`, also if the programs share no argument.
    """
    unknown = sorted(set(runs or {}) - set(programs))
    if unknown or len(programs) < 2:
        what = f"there is no program {unknown[0]!r}" if unknown else "one program is planned by partition"
        raise UsageError(what, where="runs" if unknown else "programs", hint=f"the programs: {', '.join(programs)}")
    times = [(runs or {}).get(name, 1) for name in programs]
    if not all(isinstance(number, int) and number > 0 for number in times):
        raise UsageError(f"{times} are not all whole numbers of runs", where="runs", hint="give 1 or more for each")
    base = request_for(mesh, options)
    read = [read_program(program) for program in programs.values()]
    requests = [replace(base, program=path, content=content) for path, content, _ in read]
    outcomes = run_together(requests, list(programs), times)
    plans = (Plan(outcome, signature) for outcome, (_, _, signature) in zip(outcomes, read, strict=True))
    return dict(zip(programs, plans, strict=True))


def request_for(mesh: Any, options: dict[str, Any]) -> Request:
    """The request that the options of `partition` make, for a program that is filled in later.

    Raises `UsageError` for options that are wrong whatever the program is.
    """
    given = dict(options)
    if hasattr(mesh, "axis_names"):
        mesh, own_shape = machine_of(mesh)
        given["mesh_shape"] = own_shape if given.get("mesh_shape") is None else given["mesh_shape"]
    if "names" in given:
        given["names"] = logical_names(given["names"])
    request = request_of_keywords("", os.fspath(mesh), given)
    load_spec(request.mesh, request.prices)
    parse_tactics(request.tactics, request.strategy)
    return request


# What `help(toast.partition)` shows: every option with its default.
partition.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        *(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("program", "mesh")),
        *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS[name]) for name in DEFAULTS),
    ]
)


def _named_spec(name: str, sharding: DimensionAxes) -> InterfaceArray:
    return InterfaceArray(name, tuple(tuple(axes) or None for axes in sharding))
