"""Places in the user's source: an operation's location as text in; the stack of frames, the place to show, and the JAX
name stack (pass, scopes, op) out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from toast_cli.base.units import printable

TEXT = "-"  # MLIR's name for the text that it parses

_HEAD = re.compile(r'^loc\("((?:[^"\\]|\\.)*)"(?=\()')
_NAME = re.compile(r'^loc\("((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r'(?:"((?:[^"\\]|\\.)*)"\()?"((?:[^"\\]|\\.)*)":(\d+):\d+')
# Folders of installed packages and of Python's own library; their code is not the user's.
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python\d|^<")
_UNNAMED = frozenset({"", "<module>", "<lambda>"})


@dataclass(frozen=True)
class Frame:
    """One level of the call stack: `function` is its name without the enclosing functions; "" if unknown."""

    function: str
    path: str
    line: int

    @property
    def place(self) -> str:
        """`model.py:28`."""
        return f"{self.path.replace(chr(92), '/').rsplit('/', 1)[-1]}:{self.line}"

    @property
    def is_users(self) -> bool:
        """True for a frame outside installed packages."""
        return not _INSTALLED.search(self.path)

    def __str__(self) -> str:
        return f"{self.place} {self.function}" if self.function else self.place


def frames_of(location: str, file: str = TEXT) -> tuple[Frame, ...]:
    """The frames of a location, the innermost first; empty if it has no source. file: name of the program's own text,
    which locations without a source file refer to."""
    return _frames_in(_frames_text(location), file)


def _frames_text(location: str) -> str:
    """The part of a location that holds its frames. All layers of a model have the same."""
    head = _HEAD.match(location)
    return location[head.end() :] if head else location


@lru_cache(maxsize=10_000)
def _frames_in(frames: str, file: str) -> tuple[Frame, ...]:
    return tuple(
        Frame(_function(function), file if path == TEXT else path, int(line))
        for function, path, line in _FRAME.findall(frames)
    )


def place_text(location: str, file: str = TEXT) -> str:
    """`model.py:28 Block.__call__ → MultiHeadAttention (bwd layer_0/mul)`: the innermost frame outside installed
    packages; the name alone where the location holds no source. file: see `frames_of`.
    """
    where, label = _where(_frames_text(location), file), printable(op_path(name_stack_of(location)))
    return f"{where} ({label})" if where and label else where or label


@lru_cache(maxsize=10_000)
def _where(text: str, file: str) -> str:
    """The frame of a location to show. text: see `_frames_text`."""
    stack = _frames_in(text, file)
    if not stack:
        return ""
    number = users_frame(stack)
    called = stack[number - 1].function.removesuffix(".__call__") if number else ""
    return printable(f"{stack[number]} → {called}" if called else str(stack[number]))


def name_stack_of(location: str) -> str:
    """`jit(f)/layer_0/mul`: the names around an operation in a location; empty where it holds none."""
    stack = frames_of(location)
    head = _HEAD.match(location) or _NAME.match(location)
    return head[1] if head and not (stack and head[1] == stack[0].path) else ""


def users_frame(stack: tuple[Frame, ...]) -> int:
    """Index of the innermost frame outside installed packages; 0 if all are inside."""
    return next((k for k, frame in enumerate(stack) if frame.is_users), 0)


def functions_of(frames: Sequence[Frame]) -> tuple[str, ...]:
    """The user's functions on a call stack, the outermost first; the innermost file and line if none has a name."""
    users = [frame for frame in reversed(frames) if frame.is_users]
    names = [frame.function.removesuffix(".__call__") for frame in users if frame.function]
    return tuple(dict.fromkeys(names)) or tuple(frame.place for frame in users[-1:])


def _function(name: str) -> str:
    """`build.<locals>.Block.__call__` -> `Block.__call__`; "" for a module's top level and for lambdas."""
    last = name.rpartition("<locals>.")[2]
    return "" if last in _UNNAMED else last


# ---------------------------------------------------------------- name stacks
# Parses a JAX name stack: the pass (forward, backward) that an op runs in, the user's scopes, and the op's name.
#
# JAX writes `jit(step)/transpose(jvp(layer_0))/while/body/checkpoint/rematted_computation/mlp/dot_general`. Reports
# show `remat layer_0/mlp/dot_general`: the other parts are transformations and control flow, which JAX puts on the
# stack. A stack also names modules (layers), as `jax.named_scope`, Flax and Haiku leave them.

# Passes: forward, backward, and rematerialisation.
FORWARD, BACKWARD, REMATERIALISED = "fwd", "bwd", "remat"

_WRAPPED = re.compile(r"(\w*)\((.*)\)", re.DOTALL)
_FUNCTIONS = frozenset({"jit", "pjit", "xla_call", "core_call"})  # jit(silu): a function, not a module
# Names that JAX itself puts on the stack.
_STRUCTURE = frozenset(
    {"", "~", "while", "body", "cond", "scan", "closed_call", "checkpoint", "remat", "remat2", "pjit", "jit",
     "rematted_computation", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "shard_map"}
)  # fmt: skip
_BRANCH = re.compile(r"branch_\d+_fun")

_NUMBER = re.compile(r"\d+")
# The number of a layer: the 3 of `layer_3`, of `layers.3`, of `layers[3]`, of `h['3']`, of `h/3`.
_LAYER = re.compile(r"(?<=[\[_./'])\d+(?![A-Za-z\d])")


@lru_cache(maxsize=10_000)
def op_path(stack: str) -> str:
    """`jit(step)/transpose(jvp(layer_0))/mlp/dot_general` -> `bwd layer_0/mlp/dot_general`.

    All reports show name stacks in this form. Empty if the stack names only the lowered function.
    """
    scopes, op = scope_parts(stack)
    path = "/".join([*scopes, *([op] if op else [])])
    return " ".join(filter(None, (pass_of(stack), path)))


def pass_of(stack: str) -> str:
    """`fwd`, `bwd` or `remat`; empty for an op outside differentiation."""
    if "rematted_computation" in stack:
        return REMATERIALISED
    if "transpose(" in stack:
        return BACKWARD
    return FORWARD if "jvp(" in stack else ""


def scope_parts(stack: str) -> tuple[list[str], str]:
    """The user's names on a stack, the outermost first, and the op at its end; the op is empty if the stack ends in a
    function."""
    parts = _split(stack)
    op = "" if _WRAPPED.fullmatch(parts[-1]) else parts.pop()
    return [name for name in _unwrapped(parts) if name not in _STRUCTURE and not _BRANCH.fullmatch(name)], op


def _split(stack: str) -> list[str]:
    """Splits a stack at slashes outside parentheses."""
    parts, depth = list[str](), 0
    for piece in stack.split("/"):
        if depth > 0:
            parts[-1] += f"/{piece}"
        else:
            parts.append(piece)
        depth += piece.count("(") - piece.count(")")
    return parts


def _unwrapped(parts: Iterable[str]) -> Iterator[str]:
    """`transpose(jvp(Net/layer))` -> `Net`, `layer`; empty for `jit(f)`.

    `jax.checkpoint` names a scope twice, as `transpose(jvp(Net))/jvp(Net)`: the second one is left out.
    """
    before: list[str] = []
    for part in parts:
        wrapped = _WRAPPED.fullmatch(part)
        if wrapped is None:
            before = []
            yield part
        elif wrapped[1] not in _FUNCTIONS:
            inside = list(_unwrapped(_split(wrapped[2])))
            yield from inside if inside != before else ()
            before = inside


def scopes_of(stack: str) -> tuple[str, ...]:
    """Names of modules on a name stack, the outermost first, without the op at its end.

    A number is joined to the name before it: `h/3`.
    """
    scopes: list[str] = []
    for name in scope_parts(stack)[0]:
        if "->" in name:
            continue
        if scopes and _NUMBER.fullmatch(name):
            scopes[-1] = f"{scopes[-1]}/{name}"
        else:
            scopes.append(name)
    return tuple(scopes)


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


def around(paths: Iterable[Sequence[str]]) -> str:
    """`decoder/block/*, encoder`: the innermost module around all paths, for each outermost one; empty if a path is."""
    families = defaultdict[str, list[tuple[str, ...]]](list)  # outermost module -> paths in it
    for path in paths:
        families["".join(path[:1])].append((*path, ""))  # `common_start` leaves the last one
    if "" in families:
        return ""
    return ", ".join("/".join(family[0][: common_start(family)]) for family in families.values())
