"""A plan's shardings in the forms that frameworks read: regular expressions over paths, MaxText's YAML, Keras' layouts,
PyTorch/XLA's `mark_sharding`.

In: shardings of named arrays. Out: data or text; no framework is imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod

from toast_cli.emit.specs import NamedSpec, entry_text, tuple_text
from toast_cli.errors import UsageError
from toast_cli.program.paths import slash_path


def slash_expression(pattern: str) -> str:
    """A pattern over paths (`*['layers'][*]['w']`) as a regular expression over them in slashes:
    `.*layers/.*/w$`."""
    parts = [re.escape(part) for part in slash_path(pattern).split("*")]
    whole = ".*".join(parts)
    return f"{'' if pattern.startswith('*') else '^'}{whole.removeprefix('.*').removeprefix('/')}$"


def maxtext_yaml(
    rules: Iterable[tuple[str, str | tuple[str, ...]]], names: Mapping[str, str | Sequence[str]] | None
) -> str:
    """`logical_axis_rules` as MaxText's YAML has them; see `Plan.maxtext_rules`."""
    lines = ["logical_axis_rules:"]
    for name, axes in rules:
        theirs = (names or {}).get(name, name)
        listed = json.dumps([axes] if isinstance(axes, str) else list(axes))
        lines += [f"  - [{json.dumps(one)}, {listed}]" for one in ([theirs] if isinstance(theirs, str) else theirs)]
    return "\n".join(lines) + "\n"


def keras_layouts(named: Iterable[NamedSpec], argument: str) -> dict[str, tuple[str | None, ...]]:
    """Path of a variable -> mesh axis of each dimension, for every sharded array of that argument.

    Raises `UsageError` if a dimension is split over two axes: a `keras.distribution.TensorLayout` names one.
    """
    layouts: dict[str, tuple[str | None, ...]] = {}
    for name, one in _below(named, argument).items():
        for axes in one.spec:
            if axes is not None and len(axes) > 1:
                raise UsageError(
                    f"Keras names one mesh axis for each dimension, and the plan splits one over {' and '.join(axes)}",
                    where=one.name,
                    hint="fix it with pins=, or plan for a mesh shape with one axis",
                )
        layouts[name] = tuple(axes[0] if axes else None for axes in one.spec)
    return layouts


def mark_sharding_lines(named: Iterable[NamedSpec], argument: str, axes: Mapping[str, int]) -> str:
    """Python for PyTorch/XLA: a mesh, and a `mark_sharding` for every split array of that argument."""
    lines = [
        "import numpy as np",
        "import torch_xla.distributed.spmd as xs",
        "",
        f"mesh = xs.Mesh(np.arange({prod(axes.values())}), {tuple(axes.values())!r}, {tuple_text(axes)})",
        "arrays = {**dict(model.named_parameters()), **dict(model.named_buffers())}",
    ]
    for name, one in _below(named, argument).items():
        spec = f"({', '.join(map(entry_text, one.spec))}{',' if len(one.spec) == 1 else ''})"
        lines.append(f"xs.mark_sharding(arrays[{json.dumps(name)}], mesh, {spec})")
    return "\n".join(lines) + "\n"


def _below(named: Iterable[NamedSpec], argument: str) -> dict[str, NamedSpec]:
    """Path below the argument, in slashes -> its spec, for arrays that are split.

    Raises `UsageError` if the program has no such argument.
    """
    roots: dict[str, None] = {}
    found: dict[str, NamedSpec] = {}
    for one in named:
        root, _, rest = slash_path(one.name).partition("/")
        roots[root] = None
        if root == argument and rest and any(one.spec):
            found[rest] = one
    if argument not in roots:
        raise UsageError(f"the program has no argument {argument!r}", hint=f"its arguments: {', '.join(roots)}")
    return found
