"""`toast.load`: a program that `toast partition -o` wrote goes in; a function that runs it on a mesh comes out.

    step = toast.load("sharded.mlir")
    state, loss = step(state, batch)

In: a file in any form that holds a program with shardings (StableHLO text, bytecode, a jax.export file, HLO text).
Out: a `Loaded`. StableHLO goes through `jax.export` and `jax.jit`, so it can be called inside another `jax.jit`; HLO
text is compiled as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from toast_cli.base.errors import InputError, UsageError
from toast_cli.emit.specs import (
    InterfaceArray,
    ProgramInterface,
    abstract,
    exported_program,
    partition_spec,
    wide_types,
)
from toast_cli.hardware import written_shape
from toast_cli.program.model import dtype_of
from toast_cli.program.names import below_root, root_of, subtrees, tree_of
from toast_cli.rewrite.stage_files import INDEX, StagedArray, StageProgram, read_stages

HLO_FORMATS = ("hlo-text", "hlo-proto")


def load(
    path: str | os.PathLike[str],
    *,
    mesh: Any = None,
    devices: Sequence[Any] | None = None,
    axes: Mapping[str, str] | None = None,
) -> Loaded:
    """A sharded program from a file, ready to be called.

    Args:
        path: a file written by `toast partition -o`, `plan.save` or `toast.jit(…).lower`: `.mlir`, `.mlirbc`,
            `.jax_export`, `.hlo`, also compressed; or a folder of programs of pipeline stages.
        mesh: a `jax.sharding.Mesh` with the program's axes. devices: as many as the program is for, if no mesh is
            given (None: the mesh in use, see `jax.set_mesh`, else the first of jax.devices()).
        axes: what the mesh calls axes of the program, if not the same: `{"data": "fsdp"}` for the program's `data`.

    Raises `ToastError` for a file that cannot be read, that holds no shardings, or that does not match the mesh.
    """
    if Path(path).is_dir():
        return LoadedStages(Path(path), mesh, devices, axes or {})
    boundary, artifact, shardy = read_boundary(str(Path(path)))
    return Loaded(boundary, artifact, mesh, devices, shardy, axes or {})


class Loaded:
    """A sharded program that can be called with the function's own arguments, or with their leaves in order.

    Arrays with other shardings than the program's are resharded first. Donated arguments are consumed, as with
    `jax.jit(donate_argnums=…)`.

    Attributes:
        arguments, results: places in order, with path, shape, dtype and sharding.
    """

    def __init__(
        self,
        boundary: ProgramInterface,
        artifact: bytes,
        mesh: Any,
        devices: Sequence[Any] | None,
        shardy: bool = True,
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._boundary = boundary
        self._artifact = artifact
        self._given_mesh = mesh
        self._devices = devices
        self._shardy = shardy
        self._names = names  # axis of the program -> axis of the mesh, where they differ
        unknown = sorted(names.keys() - boundary.axes.keys())
        if unknown:
            raise UsageError(
                f"the program has no mesh axis {unknown[0]!r}",
                where="axes",
                hint=f"its axes: {', '.join(boundary.axes) or 'none, HLO text names none'}",
            )
        if mesh is not None:
            _ = self.mesh  # raises for a mesh of other axes

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.axes.items()) or f"{self._boundary.devices} devices"
        return f"<{self._boundary.name} on {axes}: {len(self.arguments)} arrays in, {len(self.results)} out>"

    @property
    def arguments(self) -> tuple[InterfaceArray, ...]:
        return self._boundary.arguments

    @property
    def results(self) -> tuple[InterfaceArray, ...]:
        return self._boundary.results

    @property
    def axes(self) -> dict[str, int]:
        """The logical mesh: axis name, as the mesh has it, -> size, in order."""
        return {self._names.get(name, name): size for name, size in self._boundary.axes.items()}

    @cached_property
    def mesh(self) -> Any:
        """The `jax.sharding.Mesh` it runs on, with automatic axes."""
        return mesh_for(self._boundary, self.axes, self._given_mesh, self._devices)

    @cached_property
    def in_shardings(self) -> list[Any]:
        """One sharding per argument of the program, in order."""
        return [self._sharding(place) for place in self.arguments]

    @cached_property
    def out_shardings(self) -> list[Any]:
        """One sharding per result, in order."""
        return [self._sharding(place) for place in self.results]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        import jax

        leaves, trees = self._leaves(arguments, keywords)
        self._check_shapes(leaves)
        leaves = [jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in leaves]
        if self._shardy:
            leaves = [*map(jax.device_put, leaves, self.in_shardings)]
        results = self._run(*leaves)
        if self._names:
            results = [*map(jax.device_put, results, self.out_shardings)]
        return tree_of([below_root(place.path) for place in self.results], results, trees)

    def lower(self) -> Any:
        """The program as a `jax.stages.Lowered` over its flat arguments (not for HLO text)."""
        with wide_types(self._boundary):
            return self._jitted.lower(*map(abstract, self.arguments))

    def _sharding(self, place: InterfaceArray, *, own_names: bool = False) -> Any:
        """The sharding of an argument or result. own_names: on a mesh of the program's own axis names, as it runs."""
        import jax

        if not self._shardy:
            raise UsageError(
                "HLO text names no mesh axes", where=self._boundary.name, hint="write StableHLO: -o sharded.mlir"
            )
        if own_names and self._names:
            own = {name: mine for mine, name in self._names.items()}
            axes = tuple(own.get(name, name) for name in self.mesh.axis_names)
            mesh = jax.sharding.Mesh(self.mesh.devices, axes, axis_types=self.mesh.axis_types)
            return jax.sharding.NamedSharding(mesh, partition_spec(place.axes))
        renamed = [[self._names.get(axis, axis) for axis in axes or ()] for axes in place.axes]
        return jax.sharding.NamedSharding(self.mesh, partition_spec(renamed))

    @cached_property
    def _jitted(self) -> Any:
        import jax

        called = exported_program(self._boundary, self._artifact, self.mesh.devices.flat[0].platform)

        def flat(*leaves: Any) -> list[Any]:
            return list(called.call(*leaves))

        flat.__name__ = self._boundary.name
        donated = [k for k, place in enumerate(self.arguments) if place.donated]
        ins, outs = ([self._sharding(p, own_names=True) for p in places] for places in (self.arguments, self.results))
        return jax.jit(flat, in_shardings=ins, out_shardings=outs, donate_argnums=donated)

    @cached_property
    def _run(self) -> Callable[..., list[Any]]:
        if self._shardy:
            with wide_types(self._boundary):
                return self._jitted  # type: ignore[no-any-return]
        from toast_cli import xla

        devices = list(self.mesh.devices.flat)
        executable = xla.compile_program(self._artifact, devices, shardy=False)
        shapes = [place.shape for place in self.results]

        def run(*leaves: Any) -> list[Any]:
            return xla.run_sharded(executable, devices, list(leaves), shapes)

        return run

    def _leaves(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[list[Any], dict[Any, Any]]:
        """Flattens the function's arguments to the program's arguments, in order; also returns their trees."""
        import jax

        trees: dict[Any, Any] = {}
        for tree in (*arguments, *keywords.values()):
            trees.update(subtrees(tree))
        flat = jax.tree.leaves(arguments)
        if not keywords and len(flat) == len(self.arguments):
            return flat, trees
        for sized in (True, False):  # without sizes, arguments match whose sizes are then refused by name
            leaf_of: dict[str, Any] = {}
            for name, tree in [*self._by_name(arguments, sized), *keywords.items()]:
                for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                    leaf_of[name + jax.tree_util.keystr(path)] = leaf
            missing = [place.path for place in self.arguments if place.path not in leaf_of]
            if not missing:
                break
        if missing:
            count = len(flat) + len(jax.tree.leaves(keywords))
            raise UsageError(
                f"the program takes {len(self.arguments)} arrays and was given {count}; {missing[0]} is missing",
                where=self._boundary.name,
                hint=f"give the arguments that the program uses, by name: {', '.join(filter(None, self._roots))}",
            )
        return [leaf_of[place.path] for place in self.arguments], trees

    def _check_shapes(self, leaves: list[Any]) -> None:
        for leaf, place in zip(leaves, self.arguments, strict=True):
            shape = np.shape(leaf) if not _is_key(leaf) else place.shape
            if shape != place.shape:
                raise UsageError(
                    f"{place.path or 'an argument'} is {list(shape)}, and the program takes {list(place.shape)}",
                    where=self._boundary.name,
                    hint="a sharded program is for one size of batch: partition one lowered with yours",
                )

    @cached_property
    def _roots(self) -> dict[str, list[InterfaceArray]]:
        """The function's parameters in order, by name, with the program's arguments in each."""
        roots: dict[str, list[InterfaceArray]] = {}
        for place in self.arguments:
            roots.setdefault(root_of(place.path), []).append(place)
        return roots

    def _by_name(self, arguments: tuple[Any, ...], sized: bool) -> list[tuple[str, Any]]:
        """(parameter, tree) for positional arguments: each is matched to the next parameter whose arrays it has all of,
        in the same sizes if `sized`. Arguments that the function does not use match none."""
        import jax

        named: list[tuple[str, Any]] = []
        rest = list(arguments)
        for name, places in self._roots.items():
            wanted = {(below_root(place.path), place.shape if sized else ()) for place in places}
            for k, tree in enumerate(rest):
                leaves = jax.tree_util.tree_leaves_with_path(tree)
                if wanted <= {(jax.tree_util.keystr(path), np.shape(leaf) if sized else ()) for path, leaf in leaves}:
                    named.append((name, tree))
                    del rest[: k + 1]
                    break
        return named


def read_boundary(path: str) -> tuple[ProgramInterface, bytes, bool]:
    """The arguments and results of a file's program, its StableHLO (a portable artifact; plain bytecode for HLO), and a
    flag that is True if Shardy partitions it."""
    from toast_cli import xla
    from toast_cli.frontend.convert import refuse_left_out
    from toast_cli.frontend.formats import parse_here, read_bytes, source_name
    from toast_cli.frontend.loading import load as load_source

    content = read_bytes(path)
    source = load_source(path, keep_shardings=True, content=content)
    program = source.program
    handles = {handle: k for k, handle in enumerate(source.definitions)}
    stated: dict[str, Any] = {}
    for annotation in source.annotations:
        if not annotation.uses and handles.get(annotation.value, len(program.arguments)) < len(program.arguments):
            stated.setdefault(f"argument {handles[annotation.value]}", annotation.sharding)
        stated[annotation.origin] = annotation.sharding
    axes = next((dict(s.mesh) for s in stated.values() if s.mesh), {})
    shardy = source.format not in HLO_FORMATS
    if shardy and not axes:
        raise InputError(
            "the program states no shardings",
            where=source_name(path),
            hint="give a file that `toast partition -o` wrote",
        )

    def place(kind: str, number: int, name: str, value: int, donated: bool = False) -> InterfaceArray:
        array = program.values[value]
        sharding = stated.get(f"{kind} {number}")
        dim_axes = sharding.axes if sharding is not None and sharding.axes is not None else ((),) * len(array.shape)
        return InterfaceArray(name, dim_axes, array.shape, array.dtype, donated)

    _, module = parse_here(content, source_name(path))  # as a child did when it was loaded
    refuse_left_out(module, source_name(path))
    bytecode = xla.write_bytecode(module)
    boundary = ProgramInterface(
        program.name,
        axes,
        tuple(place("argument", k, a.path, a.value, a.donated) for k, a in enumerate(program.arguments)),
        tuple(place("result", k, r.path, r.value) for k, r in enumerate(program.results)),
        prod(axes.values()) if axes else max([1, *(xla.sharding_devices(s.gspmd) for s in stated.values() if s.gspmd)]),
    )
    return boundary, xla.write_portable_artifact(bytecode) if shardy else bytecode, shardy


def mesh_for(boundary: ProgramInterface, named: dict[str, int], given: Any, devices: Sequence[Any] | None) -> Any:
    """The mesh to run on, with these axes: the given one, else the current one (`jax.set_mesh`) if it has these axes,
    else one over the first devices.

    Its axes are automatic: the partitioner decides what the program leaves open.
    """
    import jax

    from toast_cli.emit.device_mesh import device_mesh

    axes = named or {"devices": boundary.devices}
    if given is None and devices is None:
        current = jax.sharding.get_mesh()
        given = current if current.devices.size and dict(current.shape) == axes else None
    if given is not None:
        if boundary.axes and {n: s for n, s in dict(given.shape).items() if s > 1} != {
            n: s for n, s in axes.items() if s > 1
        }:
            raise UsageError(
                f"the program is for a mesh {written_shape(axes)}; this one is {written_shape(dict(given.shape))}",
                where="mesh", hint='say axes={"data": "fsdp"} if yours has other names; or give the devices alone',
            )  # fmt: skip
        arranged = given.devices
    else:
        available = list(jax.devices() if devices is None else devices)
        if len(available) < boundary.devices:
            raise UsageError(
                f"the program is for {boundary.devices} devices, and JAX sees {len(available)}",
                where=boundary.name,
                hint="partition for as many, or XLA_FLAGS=--xla_force_host_platform_device_count on a CPU",
            )
        return device_mesh(axes, available[: boundary.devices])
    names = given.axis_names if boundary.axes else ("devices",)
    shaped = arranged if boundary.axes else arranged.reshape(-1)
    return jax.sharding.Mesh(shaped, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


def _is_key(leaf: Any) -> bool:
    import jax

    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


# ---------------------------------------------------------------- programs of pipeline stages
# Each runs on the devices of its stage, in the schedule's order, and `jax.device_put` sends what stages exchange. JAX
# does not wait for devices, so that stages work at the same time.

Key = tuple[str, int, int]  # value, microbatch (-1: none), stage


class LoadedStages(Loaded):
    """A step in programs of stages, which is called like any loaded program. Its state stays where it is: a result that
    is given as an argument again is on its stage. Arrays of which each stage has a part are split over a mesh with one
    more axis, the stages.

    Attributes:
        staged: the programs and their schedule.
    """

    def __init__(self, folder: Path, mesh: Any, devices: Sequence[Any] | None, names: Mapping[str, str]) -> None:
        self.staged = staged = read_stages(folder)
        ins, outs = (tuple(map(self._interface, places)) for places in (staged.arguments, staged.results))
        interface = ProgramInterface(staged.name, staged.mesh, ins, outs, sum(map(len, staged.devices)))
        super().__init__(interface, b"", mesh, devices, names=names)

    def lower(self) -> Any:
        """Raises UsageError: there is one lowered program for each stage and pass."""
        raise UsageError("these are several programs", where=self.staged.name, hint="see .staged.programs")

    def _interface(self, array: StagedArray) -> InterfaceArray:
        value = self.staged.values[array.values[0]]
        shape = tuple(n * len(array.values) if d == array.dim else n for d, n in enumerate(value.shape))
        return InterfaceArray(array.path, value.sharding, shape, value.dtype, array.donated)

    @cached_property
    def _meshes(self) -> list[Any]:
        """The mesh of each stage."""
        sizes, names = tuple(self.staged.stage_mesh.values()), self.mesh.axis_names
        order = [names.index(name) for name in (*self.axes, *names) if name in names]  # axes of size 1 may differ
        devices = self.mesh.devices.transpose(list(dict.fromkeys(order))).flatten()
        return [_mesh(devices[list(numbers)].reshape(sizes), self.staged.stage_mesh) for numbers in self.staged.devices]

    def _on_stage(self, value: str, stage: int) -> Any:
        import jax

        return jax.sharding.NamedSharding(self._meshes[stage], partition_spec(self.staged.values[value].sharding))

    def _placed(self, array: StagedArray) -> Any:
        """The sharding of an argument or a result of the step."""
        import jax

        if len(array.values) == 1:
            return self._on_stage(array.values[0], array.stages[0])
        axes = list(self.staged.values[array.values[0]].sharding)
        across = "_".join(["stage", *self.staged.stage_mesh])  # no axis has this name
        axes[array.dim] = (across, *axes[array.dim])
        devices = np.stack([self._meshes[stage].devices for stage in array.stages])
        return jax.sharding.NamedSharding(_mesh(devices, (across, *self.staged.stage_mesh)), partition_spec(axes))

    @cached_property
    def in_shardings(self) -> list[Any]:
        """One sharding per argument of the step, in order."""
        return [self._placed(array) for array in self.staged.arguments]

    @cached_property
    def out_shardings(self) -> list[Any]:
        """One sharding per result, in order."""
        return [self._placed(array) for array in self.staged.results]

    def _loaded(self, program: StageProgram) -> Callable[..., list[Any]]:
        """A program of one stage as a function of arrays."""
        from toast_cli import xla

        def place(name: str, donated: bool = False) -> InterfaceArray:
            value = self.staged.values[name]
            return InterfaceArray(name, value.sharding, value.shape, value.dtype, donated)

        arguments = tuple(place(name, k in program.donated) for k, name in enumerate(program.arguments))
        results, mesh = tuple(map(place, program.results)), self._meshes[program.stage]
        interface = ProgramInterface(program.name, self.staged.stage_mesh, arguments, results, mesh.size)
        return Loaded(interface, xla.write_portable_artifact(program.text), mesh, None)._run

    @cached_property
    def _run(self) -> Callable[..., list[Any]]:
        import jax

        steps, key = self.staged.steps, self.staged.key
        number_type = dtype_of(self.staged.values[INDEX].dtype) if INDEX in self.staged.values else np.int32
        programs = {program.name: (program, self._loaded(program)) for program in self.staged.programs}

        last: dict[Key, int] = {}  # array -> the last step that reads it
        for number, step in enumerate(steps):
            program = programs[step.program][0] if step.program else None
            read = [(step.value, step.source)] if program is None else [(n, program.stage) for n in program.arguments]
            last.update({key(name, step.microbatch, stage): number for name, stage in read})
        for array in self.staged.results:
            last.update({(value, -1, k): len(steps) for value, k in zip(array.values, array.stages, strict=True)})

        def run(*leaves: Any) -> list[Any]:
            arrays: dict[Key, Any] = {}
            for leaf, array in zip(leaves, self.staged.arguments, strict=True):
                for value, stage, part in zip(array.values, array.stages, self._stage_parts(leaf, array), strict=True):
                    arrays[value, -1, stage] = part
            for number, step in enumerate(steps):
                if step.program:
                    program, call = programs[step.program]
                    keys = [key(name, step.microbatch, program.stage) for name in program.arguments]
                    index = np.asarray(step.microbatch, number_type)
                    results = call(*[index if array[0] == INDEX else arrays[array] for array in keys])
                    made = [key(name, step.microbatch, program.stage) for name in program.results]
                    arrays.update(zip(made, results, strict=True))
                else:
                    keys = [(step.value, step.microbatch, step.source)]
                    sent = jax.device_put(arrays[keys[0]], self._on_stage(step.value, step.target))
                    arrays[step.value, step.microbatch, step.target] = sent
                for read in keys:
                    if last[read] == number:
                        arrays.pop(read, None)
            return [
                self._joined([arrays[value, -1, k] for value, k in zip(array.values, array.stages, strict=True)], n)
                for n, array in enumerate(self.staged.results)
            ]

        return run

    def _stage_parts(self, leaf: Any, array: StagedArray) -> list[Any]:
        """The stages' parts of an array, on the devices where they are."""
        import jax

        if len(array.values) == 1:
            return [leaf]
        pieces = {shard.device: shard.data for shard in leaf.addressable_shards}
        make = jax.make_array_from_single_device_arrays
        return [
            make(self.staged.values[value].shape, sharding, [pieces[device] for device in sharding.mesh.devices.flat])
            for value, stage in zip(array.values, array.stages, strict=True)
            for sharding in (self._on_stage(value, stage),)
        ]

    def _joined(self, parts: list[Any], number: int) -> Any:
        """A result of the step, of its parts on stages."""
        import jax

        if len(parts) == 1:
            return parts[0]
        pieces, sharding = (
            {s.device: s.data for part in parts for s in part.addressable_shards},
            self.out_shardings[number],
        )
        order = [pieces[device] for device in sharding.mesh.devices.flat]
        return jax.make_array_from_single_device_arrays(self.results[number].shape, sharding, order)


def _mesh(devices: Any, names: Iterable[str]) -> Any:
    """A mesh of automatic axes."""
    import jax

    return jax.sharding.Mesh(devices, tuple(names), axis_types=(jax.sharding.AxisType.Auto,) * devices.ndim)
