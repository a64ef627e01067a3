"""PartitionSpecs of arguments and results as plain data, as JSON (schema "toast.specs/1"), as a Python module, and in
a `jax.export.Exported`.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import groupby
from math import prod
from typing import Any

from toast_cli import xla
from toast_cli.base.errors import UsageError
from toast_cli.emit.annotations import result_shardings
from toast_cli.emit.minimal import reduced_behind_transposes
from toast_cli.frontend.source import Source
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import Sharding
from toast_cli.program.model import dtype_of

SCHEMA = "toast.specs/1"

# Per dimension the mesh axes that split it, major to minor, or None.
NamedAxes = tuple[tuple[str, ...] | None, ...]

HEAD = '''"""Shardings of `{program}` on {devices} devices ({axes}), chosen by toast.

    step = jax.jit(
        {program},
        in_shardings=in_shardings({usage}),
        out_shardings=out_shardings({program}, {usage}),
    )

These are the shardings of arguments and results. What lies in between is up to the compiler, which follows them;
`toast.jit`, and the program that `toast partition -o sharded.mlir` writes, hold the whole plan.
"""

{imports}from math import gcd

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P


{device_mesh}

mesh = device_mesh({sizes}, jax.devices()[:{devices}])
'''

BY_PATH = '''
# Pattern of paths -> how the arrays are split, arguments and results alike. * stands for anything, the first pattern
# that fits counts, and an array that none fits is whole on every device.
SPECS = [
{rules}]


def in_shardings(**arguments):
    """For `jax.jit`: give the function's arguments (arrays or their shapes) by name, in order."""
    if missing := [name for name in {roots} if name not in arguments]:
        raise TypeError(f"the function's argument {{missing[0]!r}} is not among {{sorted(arguments)}}")
    return tuple(shardings(name, tree) for name, tree in arguments.items())


def out_shardings(function, **arguments):
    """For `jax.jit`: give the function and its arguments by name."""
    return shardings("result", jax.eval_shape(function, *arguments.values()))


def shardings(name, tree):
    """The tree with each array replaced by its sharding; `name` is what it is called in the patterns."""

    def sharding(path, leaf):
        spec = spec_of(name + jax.tree_util.keystr(path))
        return NamedSharding(mesh, spec if len(spec) <= getattr(leaf, "ndim", 0) else P())

    return jax.tree_util.tree_map_with_path(sharding, tree)


def spec_of(path):
    """How the array at a path (`params['layers'][0]['w']`) is split."""
    for pattern, spec in SPECS:
        if re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), path, re.DOTALL):
            return spec
    return P()
'''

BY_ORDER = '''
# The program does not say what its arrays are called: these are in the order of the leaves.
ARGUMENT_SPECS = [
{arguments}]
RESULT_SPECS = [
{results}]


def in_shardings(*arguments):
    """For `jax.jit`: give the function's arguments (arrays or their shapes) in order."""
    return shardings(ARGUMENT_SPECS, arguments)


def out_shardings(function, *arguments):
    """For `jax.jit`: give the function and its arguments."""
    return shardings(RESULT_SPECS, jax.eval_shape(function, *arguments))


def shardings(specs, tree):
    """The tree with each array replaced by its sharding."""
    return jax.tree.unflatten(jax.tree.structure(tree), [NamedSharding(mesh, spec) for spec in specs])
'''

_NUMBER = re.compile(r"\d+")
_ROOT = re.compile(r"[A-Za-z_]\w*")
_STEP = re.compile(r"\[(?:'(?:[^'\\]|\\.)*'|\"[^\"]*\"|[^\]]*)\]|\.?\w+|.", re.DOTALL)
REPLICATED: NamedAxes = ()
RESULT = "result"  # what stands for the parameter's name in front of a result's path


@dataclass(frozen=True)
class InterfaceArray:
    """One argument or result. `path` is its name in the user's tree (`params['w']`), empty if unknown; `axes`: per
    dimension the mesh axes, or None."""

    path: str
    axes: NamedAxes
    shape: tuple[int, ...] = ()
    dtype: str = ""
    donated: bool = False


@dataclass(frozen=True)
class ProgramInterface:
    """Arguments and results of a program in order, on a mesh of these axes (name -> size; empty if the program names
    none)."""

    name: str
    axes: dict[str, int]
    arguments: tuple[InterfaceArray, ...]
    results: tuple[InterfaceArray, ...]
    devices: int


def emit_specs(source: Source, lowered: PartitionedProgram) -> bytes:
    """The specs as JSON, one array a line."""
    specs = boundary_specs(source, lowered)
    head = {"schema": SCHEMA, "program": specs.name, "mesh": {"axes": specs.axes}}
    head |= {"rewritten": source.program.rewritten} if source.program.rewritten else {}
    lists = {"arguments": specs.arguments, "results": specs.results}
    fields = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for key, named in lists.items():
        lines = ",\n  ".join(json.dumps(entry(k, array)) for k, array in enumerate(named))
        fields.append(f"{json.dumps(key)}: [\n  {lines}\n ]" if named else f"{json.dumps(key)}: []")
    return ("{\n " + ",\n ".join(fields) + "\n}\n").encode()


def entry(index: int, named: InterfaceArray) -> dict[str, Any]:
    """One argument or result in JSON."""
    spec = [None if axes is None else list(axes) for axes in named.axes]
    return {"index": index, "name": named.path, "spec": spec}


def boundary_specs(source: Source, lowered: PartitionedProgram) -> ProgramInterface:
    """The arguments and results of a lowered plan."""
    program = source.program

    def array(path: str, value: int, sharding: Sharding, donated: bool = False) -> InterfaceArray:
        axes = named_axes(sharding, lowered.axis_names)
        return InterfaceArray(path, axes, program.values[value].shape, program.values[value].dtype, donated)

    results = zip(program.results, result_shardings(source, lowered), strict=True)
    return ProgramInterface(
        program.name,
        dict(zip(lowered.axis_names, lowered.axis_sizes, strict=True)),
        tuple(array(a.path, a.value, lowered.shardings[a.value], a.donated) for a in program.arguments),
        tuple(array(r.path, r.value, sharding) for r, sharding in results),
        prod(lowered.axis_sizes),
    )


def named_axes(sharding: Sharding, axis_names: tuple[str, ...]) -> NamedAxes:
    """A sharding by names of axes."""
    return tuple(tuple(axis_names[axis] for axis in axes) or None for axes in sharding)


def snippet(specs: ProgramInterface) -> str:
    """The module's text from specs alone."""
    roots = argument_names(specs)
    results = [InterfaceArray(RESULT + named.path.removeprefix(RESULT), named.axes) for named in specs.results]
    program = specs.name if specs.name.isidentifier() else "function"
    head = HEAD.format(
        program=program,
        devices=specs.devices,
        axes=", ".join(f"{words(name)}={size}" for name, size in specs.axes.items()),
        usage=", ".join(f"{name}={name}" for name in roots) if roots else "*arguments",
        imports="import re\n" if roots else "",
        device_mesh=device_mesh_text(),
        sizes=json.dumps(specs.axes),
    )
    if not roots:
        return head + BY_ORDER.format(arguments=flat_lines(specs.arguments), results=flat_lines(specs.results))
    rules = "".join(f"    ({quoted(p)}, {spec_text(s)}),\n" for p, s in rules_of((*specs.arguments, *results)))
    return head + BY_PATH.format(rules=rules, roots=tuple_text(roots))


def device_mesh_text() -> str:
    """The source text of the function that arranges devices, which toast itself also runs."""
    module = (files("toast_cli.emit") / "device_mesh.py").read_text(encoding="utf-8")
    return module[module.index("def device_mesh(") :]


def argument_names(specs: ProgramInterface) -> list[str]:
    """The names of the function's parameters; empty unless they are known for every array."""
    roots = [_ROOT.match(named.path) for named in specs.arguments]
    named_results = all(named.path for named in specs.results) or len(specs.results) == 1
    if not named_results or any(root is None for root in roots):
        return []
    return list(dict.fromkeys(root[0] for root in roots if root))


# ---------------------------------------------------------------- patterns


def rules_of(named: Sequence[InterfaceArray]) -> list[tuple[str, NamedAxes]]:
    """(pattern, spec) such that the first pattern that matches a path gives its spec; no pattern matches only
    replicated arrays.

    Paths that differ in numbers alone (layers) are one family; families with a common ending and equal specs (a weight
    and its moments, as argument and result) are one rule, whose pattern is the common ending. Paths for which no such
    rule is right get their own line.
    """
    wanted = {array.path: trimmed(array.axes) for array in named}
    families: dict[str, list[str]] = defaultdict(list)
    for path in wanted:
        families[_NUMBER.sub("*", path)].append(path)
    common = {p: Counter(wanted[path] for path in paths).most_common(1)[0][0] for p, paths in families.items()}
    tails = {pattern: tails_of(pattern) for pattern in families}
    ending: dict[str, list[str]] = defaultdict(list)
    for pattern in families:
        for tail in tails[pattern]:
            ending[tail].append(pattern)
    rules: dict[str, NamedAxes] = {}
    for pattern in families:
        rules[best_tail(tails[pattern], ending, common)] = common[pattern]
    ordered = sorted(rules.items(), key=lambda rule: -len(rule[0]))
    compiled = [(matcher(pattern), pattern, spec) for pattern, spec in ordered]

    def rule_for(path: str) -> tuple[str, NamedAxes]:
        return next(((pattern, spec) for fits, pattern, spec in compiled if fits.fullmatch(path)), ("", REPLICATED))

    exact = [(path, spec) for path, spec in wanted.items() if rule_for(path)[1] != spec]
    used = {rule_for(path)[0] for path in wanted}
    used_rules = [(pattern, spec) for pattern, spec in ordered if pattern in used]
    for rule in [rule for rule in used_rules if rule[1] == REPLICATED]:  # unmatched arrays are replicated anyway
        others = [(matcher(pattern), spec) for pattern, spec in used_rules if (pattern, spec) != rule]
        fits = matcher(rule[0])
        mine = [path for path in wanted if fits.fullmatch(path)]
        if all(next((s for f, s in others if f.fullmatch(path)), REPLICATED) == rule_for(path)[1] for path in mine):
            used_rules.remove(rule)
    return [*in_few_lines(exact, wanted), *used_rules]


def in_few_lines(exact: list[tuple[str, NamedAxes]], wanted: dict[str, NamedAxes]) -> Iterable[tuple[str, NamedAxes]]:
    """Shortens rules for single paths: the ending that most of them share and whose paths all have one spec (one
    layer's weight and its moments, as argument and result)."""
    alike: dict[str, set[NamedAxes]] = defaultdict(set)
    for path, spec in wanted.items():
        steps = _STEP.findall(path)
        for tail in (path, *(f"*{''.join(steps[k:])}" for k in range(1, len(steps)))):
            alike[tail].add(spec)
    shared = Counter(tail for path, _ in exact for tail in tails_of(path) if len(alike[tail]) == 1)
    rules = {}
    for path, spec in exact:
        tails = [tail for tail in tails_of(path) if len(alike[tail]) == 1 and "*" not in tail[1:]]
        rules[max(tails, key=lambda tail: (shared[tail], len(tail)), default=path)] = spec
    return rules.items()


def best_tail(tails: list[str], ending: dict[str, list[str]], common: dict[str, NamedAxes]) -> str:
    """Of a family's tails (the longest first) the one that most families share, all with one spec; the longest of
    those.

    For an array that is only a result, because nothing reads the argument of its name, the tail without the result's
    prefix is used: the next step receives it as argument.
    """
    best = (
        tails[0]
        if not tails[0].startswith(RESULT)
        else next((t for t in tails[1:] if not t.startswith("*[*]")), tails[0])
    )
    for tail in tails[1:]:
        alike = {common[pattern] for pattern in ending[tail]}
        if len(alike) == 1 and len(ending[tail]) > len(ending[best]):
            best = tail
    return best


def tails_of(pattern: str) -> list[str]:
    """The pattern and its endings, prefixed by `*`: down to two steps, or one if that is a name and there are no more;
    the parameter's name stays whole."""
    steps = _STEP.findall(pattern)
    shortest = 1 if (pattern.startswith(RESULT) or len(steps) == 2) and steps[-1] != "[*]" else 2
    return [pattern, *(f"*{''.join(steps[k:])}" for k in range(1, len(steps) - shortest + 1))]


def matcher(pattern: str) -> re.Pattern[str]:
    """The regular expression that the written module applies to a path."""
    return re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)


# ---------------------------------------------------------------- text


def flat_lines(named: tuple[InterfaceArray, ...]) -> str:
    """One line per run of equal specs, with the paths of the first as a comment."""
    lines = []
    for spec, run in groupby(named, key=lambda array: trimmed(array.axes)):
        members = list(run)
        text = spec_text(spec) if len(members) == 1 else f"*[{spec_text(spec)}] * {len(members)}"
        comment = words(members[0].path)
        lines.append(
            f"    {text},{f'  # {comment}' if comment else ''}{' …' if comment and len(members) > 1 else ''}\n"
        )
    return "".join(lines)


def trimmed(spec: Iterable[Any]) -> tuple[Any, ...]:
    """The spec without trailing unsharded dimensions."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


def spec_text(spec: NamedAxes) -> str:
    """`P("data", None, ("data", "model"))`; trailing unsharded dimensions are left out."""
    return f"P({', '.join(entry_text(axes) for axes in trimmed(spec))})"


def entry_text(axes: tuple[str, ...] | None) -> str:
    """`None`, `"data"` or `("data", "model")`."""
    if axes is None:
        return "None"
    return quoted(axes[0]) if len(axes) == 1 else tuple_text(axes)


def tuple_text(names: Iterable[str]) -> str:
    """`("data", "model")`, `("data",)`."""
    texts = [quoted(name) for name in names]
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


def quoted(text: str) -> str:
    """A text from outside as a Python literal. All characters but plain ASCII are escaped, so that no text can end the
    literal."""
    return json.dumps(text)


def words(text: str) -> str:
    """A text from outside for a comment or a docstring: one line, without characters that could end either."""
    return quoted(text)[1:-1].replace('\\"', "'")


# ---------------------------------------------------------------- jax.export
# `jax.export` exports a placeholder function with these types and shardings, and the program replaces its module.

# The trees of a user's function: PyTreeDef of `(args, kwargs)`, [program's arguments] index of the leaf, PyTreeDef of
# the results, abstract leaves.
Trees = tuple[Any, tuple[int, ...], Any, list[Any]]


def emit_export(
    source: Source, lowered: PartitionedProgram, bytecode: bytes, platform: str, trees: Trees | None
) -> bytes:
    """A jax.export file of the program that `bytecode` (MLIR, with shardings) holds. Raises `UsageError` without
    flatbuffers."""
    boundary = boundary_specs(source, reduced_behind_transposes(source, lowered))
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


def trees_of(content: bytes) -> Trees | None:
    """The trees that a jax.export file holds; None if JAX does not know the classes in them."""
    from jax import export

    try:
        exported = export.deserialize(bytearray(content))
    except (ImportError, KeyError, ValueError):
        return None
    return exported.in_tree, tuple(exported.module_kept_var_idx), exported.out_tree, list(exported.in_avals)


def exported_program(boundary: ProgramInterface, artifact: bytes, platform: str) -> Any:
    """The program as a `jax.export.Exported`: its module in an export of a placeholder with these types and shardings.

    Args:
        artifact: StableHLO as a portable artifact, with shardings. platform: "cpu", "cuda", "tpu", …; the program may
            run on others, too.
    """
    import jax
    from jax import export

    names, sizes = tuple(boundary.axes), tuple(boundary.axes.values())
    mesh = jax.sharding.AbstractMesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))

    def sharding(place: InterfaceArray) -> Any:
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
        exported = export.export(jitted, platforms=[{"gpu": "cuda"}.get(platform, platform)], disabled_checks=checks)(
            *shapes
        )
    return replace(exported, mlir_module_serialized=artifact, fun_name=boundary.name)


def in_trees(exported: Any, arguments: Any, numbers: Sequence[int], results: Any, leaves: Sequence[Any]) -> Any:
    """The same with the trees of the user's function; unused leaves are only part of the signature."""
    avals = list(leaves)
    named: list[Any] = [None] * len(avals)
    for place, aval, sharding in zip(numbers, exported.in_avals, exported._in_named_shardings, strict=True):
        avals[place], named[place] = aval, sharding
    return replace(
        exported, in_tree=arguments, in_avals=tuple(avals), _in_named_shardings=tuple(named),
        in_shardings_hlo=(None,) * len(avals), module_kept_var_idx=tuple(numbers), out_tree=results,
    )  # fmt: skip


def abstract(place: InterfaceArray) -> Any:
    """`jax.ShapeDtypeStruct` of a place."""
    import jax

    return jax.ShapeDtypeStruct(place.shape, dtype_of(place.dtype))


def partition_spec(sharding: Iterable[Sequence[str] | None]) -> Any:
    """`jax.sharding.PartitionSpec` of the axes that split each dimension, without trailing unsharded dimensions."""
    import jax

    entries = [None if not axes else axes[0] if len(axes) == 1 else tuple(axes) for axes in sharding]
    return jax.sharding.PartitionSpec(*trimmed(entries))


def wide_types(boundary: ProgramInterface) -> Any:
    """A context in which JAX keeps the program's types, enabling 64-bit types if it has any."""
    import jax

    wide = any(p.dtype in ("f64", "i64", "ui64", "complex<f64>") for p in (*boundary.arguments, *boundary.results))
    return jax.enable_x64(wide or bool(jax.config.jax_enable_x64))
