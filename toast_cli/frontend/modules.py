"""Finds the module (layer) that an operation belongs to, from its location.

A name stack, as `jax.named_scope`, Flax and Haiku leave it, names modules: `jit(step)/transpose(jvp(Net))/layer_3/mul`
is `Net`, `layer_3`. Without such names, the user's functions serve: `train_step`, `loss`, `attention`.

Enters: a name stack and frames. Leaves: a path, the outermost module first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from toast_cli.frontend.name_stack import scope_parts
from toast_cli.frontend.places import Frame

_NUMBER = re.compile(r"\d+")
# The number of a layer: the 3 of `layer_3`, of `layers.3`, of `layers[3]`, of `h['3']`, of `h/3`.
_LAYER = re.compile(r"(?<=[\[_./'])\d+(?![A-Za-z\d])")


def scopes_of(stack: str) -> tuple[str, ...]:
    """Names of modules on a name stack, the outermost first, without the op at its end.

    A number is joined to the name before it: `h/3`.
    """
    found: list[str] = []
    for name in scope_parts(stack)[0]:
        if "->" in name:
            continue
        if found and _NUMBER.fullmatch(name):
            found[-1] = f"{found[-1]}/{name}"
        else:
            found.append(name)
    return tuple(found)


def functions_of(frames: Sequence[Frame]) -> tuple[str, ...]:
    """The user's functions on a call stack, the outermost first; the innermost file and line if none has a name."""
    users = [frame for frame in reversed(frames) if frame.is_users]
    names = [frame.function.removesuffix(".__call__") for frame in users if frame.function]
    return tuple(dict.fromkeys(names)) or tuple(frame.place for frame in users[-1:])


def folded(path: Iterable[str]) -> tuple[str, ...]:
    """The path with layer numbers replaced: `layer_3` -> `layer_*`."""
    return tuple(_LAYER.sub("*", name) for name in path)


def common_start(paths: Iterable[tuple[str, ...]]) -> int:
    """Length of the common prefix of all paths, which leaves each at least one name."""
    every = list(paths)
    if not every:
        return 0
    least, most = min(every), max(every)
    shortest = min(len(least), len(most), min(map(len, every)) - 1)
    return next((k for k in range(max(shortest, 0)) if least[k] != most[k]), max(shortest, 0))
