"""A Python module to import beside the program's own: the mesh, and shardings for `jax.jit(in_shardings=…,
out_shardings=…)`.

Enters: a `Source` and a `PartitionedProgram`. Leaves: the bytes of a module that needs jax and numpy only. Where the
program knows what its arguments are called, their specs are looked up by path, folded by pattern; otherwise they go by
their order.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from math import prod

from toast_cli.emit.specs import BoundarySpecs, NamedSpec, Spec, boundary_specs
from toast_cli.frontend.source import Source
from toast_cli.plan.partitioned import PartitionedProgram

HEAD = '''"""Shardings of `{program}` on {devices} devices ({axes}), chosen by toast.

    step = jax.jit(
        {program},
        in_shardings=in_shardings({usage}),
        out_shardings=out_shardings({program}, {usage}),
    )
"""

import re

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()[:{devices}]).reshape({sizes}), {names})
'''

BY_PATH = '''
# Path -> how the array is split. [*] stands for any number that has no line of its own.
ARGUMENTS = {{
{arguments}}}
RESULTS = {{
{results}}}


def in_shardings(**arguments):
    """For `jax.jit`: give the function's arguments (arrays or their shapes) by name, in order."""
    return tuple(shardings(ARGUMENTS, name, tree) for name, tree in arguments.items())


def out_shardings(function, **arguments):
    """For `jax.jit`: give the function and its arguments by name."""
    return shardings(RESULTS, "result", jax.eval_shape(function, *arguments.values()))


def shardings(specs, name, tree):
    """The tree with each array replaced by its sharding; an array the program does not use is replicated."""

    def sharding(path, _):
        full = name + jax.tree_util.keystr(path)
        return NamedSharding(mesh, specs.get(full, specs.get(re.sub(r"\\[\\d+\\]", "[*]", full), P())))

    return jax.tree_util.tree_map_with_path(sharding, tree)
'''

BY_ORDER = '''

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

FLAT = """
# The same in order, flat.
ARGUMENT_SPECS = (
{arguments})
RESULT_SPECS = (
{results})
"""

_INDEX = re.compile(r"\[\d+\]")
_ROOT = re.compile(r"[A-Za-z_]\w*")


def emit_python(source: Source, lowered: PartitionedProgram) -> bytes:
    """The module's text."""
    return snippet(boundary_specs(source, lowered)).encode()


def snippet(specs: BoundarySpecs) -> str:
    """The module's text from specs alone."""
    roots = argument_names(specs)
    results = [NamedSpec("result" + named.name.removeprefix("result"), named.spec) for named in specs.results]
    program = specs.program if specs.program.isidentifier() else "function"
    head = HEAD.format(
        program=program,
        devices=prod(specs.axes.values()),
        axes=words(", ".join(f"{name}={size}" for name, size in specs.axes.items())),
        usage=", ".join(f"{name}={name}" for name in roots) if roots else "*arguments",
        sizes=tuple(specs.axes.values()),
        names=tuple_text(specs.axes),
    )
    flat = FLAT.format(arguments=flat_lines(specs.arguments), results=flat_lines(specs.results))
    if not roots:
        return head + flat.replace("The same in order, flat", "In order, flat") + BY_ORDER
    return head + BY_PATH.format(arguments=folded_lines(specs.arguments), results=folded_lines(results)) + flat


def argument_names(specs: BoundarySpecs) -> list[str]:
    """The names of the function's parameters; none when they are not known, or are not known of every array."""
    roots = [_ROOT.match(named.name) for named in specs.arguments]
    named_results = all(named.name for named in specs.results) or len(specs.results) == 1
    if not named_results or any(root is None for root in roots):
        return []
    return list(dict.fromkeys(root[0] for root in roots if root))


def folded_lines(named: tuple[NamedSpec, ...] | list[NamedSpec]) -> str:
    """One line per pattern of paths, with the spec most of them have, and one per path that has another."""
    families: dict[str, list[NamedSpec]] = defaultdict(list)
    for one in named:
        families[_INDEX.sub("[*]", one.name)].append(one)
    lines = []
    for pattern, members in families.items():
        common = Counter(member.spec for member in members).most_common(1)[0][0]
        lines.append(f"    {quoted(pattern)}: {spec_text(common)},\n")
        lines += [f"    {quoted(m.name)}: {spec_text(m.spec)},\n" for m in members if m.spec != common]
    return "".join(lines)


def flat_lines(named: tuple[NamedSpec, ...]) -> str:
    """One line per array, with its path as a comment."""
    return "".join(f"    {spec_text(one.spec)},{f'  # {words(one.name)}' if one.name else ''}\n" for one in named)


def spec_text(spec: Spec) -> str:
    """`P("data", None, ("data", "model"))`; whole dimensions at the end are left out."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return f"P({', '.join(entry_text(axes) for axes in entries)})"


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
    """A text from outside as a Python literal. All that is not plain ASCII is escaped, so that no text can end the
    literal."""
    return json.dumps(text)


def words(text: str) -> str:
    """A text from outside for a comment or a docstring: one line, without what could end either."""
    return quoted(text)[1:-1].replace('\\"', "'")
