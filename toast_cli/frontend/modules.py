"""The module that an operation belongs to, from what its location says.

A name stack, as `jax.named_scope`, Flax and Haiku leave it, names modules: `jit(step)/transpose(jvp(Net))/layer_3/mul`
is `Net`, `layer_3`. Where it names none, the user's functions do: `train_step`, `loss`, `attention`.

Enters: a name stack and frames. Leaves: a path, the outermost module first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from toast_cli.frontend.places import Frame

_WRAPPED = re.compile(r"(\w*)\((.*)\)", re.DOTALL)
_FUNCTIONS = frozenset({"jit", "pjit", "xla_call", "core_call"})  # jit(silu): a function, not a module
# What JAX itself puts on the stack.
_STRUCTURE = frozenset(
    {"", "~", "while", "body", "cond", "scan", "closed_call", "checkpoint", "remat", "remat2", "pjit", "jit",
     "rematted_computation", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "shard_map"}
)  # fmt: skip
_BRANCH = re.compile(r"branch_\d+_fun")
_NUMBER = re.compile(r"\d+")
# Of a layer: the 3 of `layer_3`, of `layers.3`, of `layers[3]`, of `h['3']`, of `h/3`.
_LAYER = re.compile(r"(?<=[\[_./'])\d+(?![A-Za-z\d])")

BACKWARD, RECOMPUTED = "backward", "recomputed"


def scopes_of(stack: str) -> tuple[str, ...]:
    """Names of modules on a name stack, the outermost first; the op at its end is none of them.

    A number is part of the name before it: `h/3`.
    """
    parts = _split(stack)
    if parts and not _WRAPPED.fullmatch(parts[-1]):
        parts.pop()
    found: list[str] = []
    for name in _unwrapped(parts):
        if name in _STRUCTURE or "->" in name or _BRANCH.fullmatch(name):
            continue
        if found and _NUMBER.fullmatch(name):
            found[-1] = f"{found[-1]}/{name}"
        else:
            found.append(name)
    return tuple(found)


def functions_of(frames: Sequence[Frame]) -> tuple[str, ...]:
    """The user's functions on a call stack, the outermost first; the innermost place where none has a name."""
    users = [frame for frame in reversed(frames) if frame.is_users]
    names = [frame.function.removesuffix(".__call__") for frame in users if frame.function]
    return tuple(dict.fromkeys(names)) or tuple(frame.place for frame in users[-1:])


def pass_of(stack: str) -> str:
    """`backward` for what differentiation added, `recomputed` for what is computed again for it, else nothing."""
    if "rematted_computation" in stack:
        return RECOMPUTED
    return BACKWARD if "transpose(" in stack else ""


def folded(path: Iterable[str]) -> tuple[str, ...]:
    """The path of all layers alike: `layer_3` -> `layer_*`."""
    return tuple(_LAYER.sub("*", name) for name in path)


def common_start(paths: Iterable[tuple[str, ...]]) -> int:
    """How many names all paths begin with, leaving each at least one."""
    every = list(paths)
    if not every:
        return 0
    least, most = min(every), max(every)
    shortest = min(len(least), len(most), min(map(len, every)) - 1)
    return next((k for k in range(max(shortest, 0)) if least[k] != most[k]), max(shortest, 0))


def _split(stack: str) -> list[str]:
    """The parts between slashes that stand in no parentheses."""
    parts, depth = [""], 0
    for character in stack:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "/" and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _unwrapped(parts: Iterable[str]) -> Iterable[str]:
    """`transpose(jvp(Net/layer))` -> `Net`, `layer`; nothing of `jit(f)`."""
    for part in parts:
        wrapped = _WRAPPED.fullmatch(part)
        if wrapped is None:
            yield part
        elif wrapped[1] not in _FUNCTIONS:
            yield from _unwrapped(_split(wrapped[2]))
