"""`toast.jit`: returns a function that partitions itself on its first call and runs sharded.

    fast = toast.jit(step, mesh="v4-32", donate_argnums=0)
    params, loss = fast(params, batch)

Each new combination of argument shapes is exported (`jax.export`), partitioned, and called with the plan's shardings on
arguments, results and intermediate values, so the compiler gets exactly the program that `toast partition` would write.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toast_cli.api.plan import Plan, partition, request_for

_CUSTOM_CALL = re.compile(r"stablehlo\.custom_call @([\w.$]+)")


def jit(
    function: Callable[..., Any],
    *,
    mesh: Any,
    devices: Sequence[Any] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    **options: Any,
) -> Jitted:
    """Like `jax.jit`, with shardings that toast chooses for `mesh`: a specification's name or path, or a
    `jax.sharding.Mesh` over accelerators.

    Give it a whole training or serving step: the result can be called, also inside another `jax.jit` over the same
    devices, but not differentiated. Arrays with other shardings than the plan's are resharded first.

    Args:
        devices: as many as the mesh has; None: those of the `jax.sharding.Mesh`, else jax.devices().
        options: of `toast.partition`: `mesh_shape`, `strategy`, `pins`, `memory_limit`, …

    Raises `ToastError` for options that are wrong whatever the function is. When called, the function raises the errors
    of `jax.jit`, and `ToastError` for programs that toast cannot read or place.
    """
    chosen = {
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
    }
    request_for(mesh, options)
    if devices is None and hasattr(mesh, "axis_names"):
        devices = list(mesh.devices.flat)
    return Jitted(function, mesh, devices, {k: v for k, v in chosen.items() if v is not None}, options)


class Jitted:
    """A function that partitions itself. `plan(*arguments)` says how; `lower(*arguments)` is `jax.jit`'s."""

    def __init__(
        self,
        function: Callable[..., Any],
        mesh: Any,
        devices: Sequence[Any] | None,
        jit_options: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        self._function = function
        self._mesh = mesh
        self._devices = devices
        self._jit_options = jit_options
        self._options = options
        self._statics = static_places(
            function, jit_options.get("static_argnums", ()), jit_options.get("static_argnames", ())
        )
        self._known: dict[Any, _Sharded] = {}
        functools.update_wrapper(self, function)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        import jax

        leaves, sharded = self._sharded(arguments, keywords)
        placed = [jax.device_put(leaf, sharding) for leaf, sharding in zip(leaves, sharded.in_shardings, strict=True)]
        return jax.tree.unflatten(sharded.results, sharded.call(*placed))

    def plan(self, *arguments: Any, **keywords: Any) -> Plan:
        """The plan for arguments like these (arrays or `jax.ShapeDtypeStruct`)."""
        return self._sharded(arguments, keywords)[1].plan

    def lower(self, *arguments: Any, **keywords: Any) -> Any:
        """The sharded function as a `jax.stages.Lowered` over its flat arguments."""
        leaves, sharded = self._sharded(arguments, keywords)
        return sharded.call.lower(*leaves)

    def _sharded(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[list[Any], _Sharded]:
        import jax

        positions, names = self._statics
        count = len(arguments)
        fixed = {place % count for place in positions if -count <= place < count}
        dynamic = tuple(a for k, a in enumerate(arguments) if k not in fixed)
        named = {name: value for name, value in keywords.items() if name not in names}
        statics = (
            tuple((k, arguments[k]) for k in sorted(fixed)),
            tuple((name, value) for name, value in sorted(keywords.items()) if name in names),
        )
        leaves, tree = jax.tree.flatten((dynamic, named))
        types = [jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in leaves]
        key = statics, tree, tuple((t.shape, t.dtype, getattr(t, "weak_type", False)) for t in types)
        if key not in self._known:
            self._known[key] = self._partitioned(arguments, keywords, tree)
        return leaves, self._known[key]

    def _partitioned(self, arguments: tuple[Any, ...], keywords: dict[str, Any], tree: Any) -> _Sharded:
        import jax

        from toast_cli import xla

        jitted = jax.jit(self._function, **self._jit_options)
        exported = export(jitted, arguments, keywords, self._devices)
        plan = partition(exported, self._mesh, **self._options)
        mesh = plan.mesh(self._devices)
        artifact = xla.write_portable_artifact(plan.program("bytecode"))
        sharded = replace(exported, mlir_module_serialized=artifact, nr_devices=mesh.size)

        def flat(*leaves: Any) -> list[Any]:
            args, kwargs = jax.tree.unflatten(tree, leaves)
            results: list[Any] = jax.tree.leaves(sharded.call(*args, **kwargs))
            return results

        flat.__name__ = plan.report.program.name
        in_shardings = plan.flat_leaf_shardings(mesh)
        kept = zip(exported.module_kept_var_idx, plan.report.arguments, strict=True)
        donated = [place for place, argument in kept if argument.donated]
        call = jax.jit(
            flat, in_shardings=in_shardings, out_shardings=plan.flat_out_shardings(mesh), donate_argnums=donated
        )
        return _Sharded(plan, call, in_shardings, exported.out_tree)


@dataclass(frozen=True)
class _Sharded:
    """One function for one combination of argument types: `call` takes and returns leaves."""

    plan: Plan
    call: Any
    in_shardings: list[Any]
    results: Any


def export(jitted: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], devices: Sequence[Any] | None) -> Any:
    """`jax.export` for the platform of these devices. It allows every custom call, because the exported program runs on
    this machine at once."""
    import jax
    from jax import export as jax_export

    platform = (jax.devices() if devices is None else list(devices))[0].platform
    targets = set(_CUSTOM_CALL.findall(jitted.lower(*arguments, **keywords).as_text()))
    allowed = [jax_export.DisabledSafetyCheck.custom_call(target) for target in sorted(targets)]
    platform = {"gpu": "cuda"}.get(platform, platform)
    return jax_export.export(jitted, platforms=[platform], disabled_checks=allowed)(*arguments, **keywords)


def static_places(
    function: Callable[..., Any], argnums: int | Sequence[int], argnames: str | Sequence[str]
) -> tuple[set[int], set[str]]:
    """Positions and names of the static arguments; as in `jax.jit`, one is inferred from the other where only it is
    given."""
    positions = {argnums} if isinstance(argnums, int) else set(argnums)
    names = {argnames} if isinstance(argnames, str) else set(argnames)
    parameters = list(inspect.signature(function).parameters) if positions or names else []
    if names and not positions:
        positions = {parameters.index(name) for name in names if name in parameters}
    elif positions and not names:
        names = {parameters[place] for place in positions if -len(parameters) <= place < len(parameters)}
    return positions, names
