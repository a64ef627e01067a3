"""Names of arguments and results: their paths in the user's trees, patterns that match them, names of their
dimensions, and the shardings that a program states for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any

from toast_cli.base.errors import UsageError
from toast_cli.program.model import Program

_KEY = re.compile(r"""\[['"]([^'"]*)['"]\]|\[(\d+|\*)\]|\.([A-Za-z_]\w*)""")
# Special parts of a pattern: `*`, `{a,b}`, and number lists such as `1..17` and `0,3`.
_SPECIAL = re.compile(
    r"(?P<any>\.?\*)|\{(?P<either>[^{}]*)\}|(?P<numbers>\d+(?:\.\.\d+)?(?:,\d+(?:\.\.\d+)?)+|\d+\.\.\d+)"
)
_LAYER = re.compile(r"(?<=/)\d+(?=/|$)")
_WORD = re.compile(r"[a-z]\w*")
MOST_NUMBERS = 10_000  # in one pattern's ranges
NEAREST = 4


def matching(pattern: str, paths: Iterable[str], kind: str = "arg") -> list[int]:
    """Numbers of the arguments or results that a pattern matches: by their number (`arg3`), their path as JAX writes
    it, or their path with slashes.

    `*` (or `.*`) is any text, `{a,b}` is one of these texts, and `1..17` or `0,3` one of these numbers, so that the
    paths in reports are patterns. All other characters match themselves, including brackets and quotes.
    """
    expression = re.compile(_expression(pattern))
    return [
        k
        for k, path in enumerate(paths)
        if pattern == f"{kind}{k}"
        or (path and any(pattern == name or expression.fullmatch(name) for name in (path, slash_path(path))))
    ]


def slash_path(path: str) -> str:
    """`params['layers'][0].kernel` -> `params/layers/0/kernel`; `[*]` for any number becomes `/*`."""
    return _KEY.sub(lambda key: "/" + (key[1] or key[2] or key[3]), path)


def shown_path(path: str, index: int) -> str:
    """The name of an argument in reports: its path with slashes, or `arg3` if it has none."""
    return slash_path(path) or f"arg{index}"


def nearest_paths(pattern: str, paths: Iterable[str]) -> str:
    """The arguments whose paths are most similar to a pattern without a match: `params/layers/*/wq, params/embed`.

    Layers are one path. Words in common count first, then letters.
    """
    wanted = set(_WORD.findall(pattern.lower()))

    def likeness(name: str) -> tuple[int, float]:
        return len(wanted.intersection(_WORD.findall(name.lower()))), SequenceMatcher(None, pattern, name).ratio()

    names = dict.fromkeys(_LAYER.sub("*", shown_path(path, k)) for k, path in enumerate(paths))
    return ", ".join(sorted(names, key=likeness, reverse=True)[:NEAREST])


def _expression(pattern: str) -> str:
    """A pattern as a regular expression."""
    text, end = "", 0
    for special in _SPECIAL.finditer(pattern):
        text += re.escape(pattern[end : special.start()]) + _meaning(special)
        end = special.end()
    return text + re.escape(pattern[end:])


def _meaning(special: re.Match[str]) -> str:
    if special["any"]:
        return ".*"
    if special["either"] is not None:
        return f"(?:{'|'.join(map(_expression, special['either'].split(',')))})"
    numbers: list[int] = []
    for run in special["numbers"].split(","):
        first, _, last = run.partition("..")
        numbers += range(int(first), min(int(last or first), int(first) + MOST_NUMBERS) + 1)
    if len(numbers) > MOST_NUMBERS:
        what = f"{special['numbers']:.40} are more than {MOST_NUMBERS:,} numbers"
        raise UsageError(what, where="pattern", hint="write * for any text")
    return f"(?:{'|'.join(map(str, numbers))})"


# ---------------------------------------------------------------- names of dimensions
# User-given names of argument dimensions: logical axis names as in Flax, MaxText and others.

_OPTION = "--names"


def with_dimension_names(program: Program, options: tuple[str, ...]) -> Program:
    """The program with these names on its arguments' dimensions; a later one overrides an earlier one.

    A pattern matches the arguments that it would match in `--pin`, and all whose path ends in it
    (`params/dense/kernel`). An entry `None`, `?` or nothing leaves a dimension unnamed. Raises `UsageError` for names
    that does not parse or matches nothing.
    """
    if not options:
        return program
    arguments = list(program.arguments)
    for text in options:
        pattern, names = parse_names(text)
        labels = [a.label for a in arguments]
        ending = {k for k, label in enumerate(labels) if f"/{slash_path(label)}".endswith(f"/{pattern}")}
        numbers = sorted(ending.union(matching(pattern, labels)))
        if not numbers:
            nearest = nearest_paths(pattern, labels)
            raise UsageError(
                f"no argument matches {pattern!r}", where=_OPTION, hint=f"the nearest arguments are {nearest}"
            )
        for k in numbers:
            rank = len(program.values[arguments[k].value].shape)
            if len(names) > rank:
                name = shown_path(arguments[k].label, k)
                raise UsageError(
                    f"{text!r} names {len(names)} dimensions but matches {name} with {rank}",
                    where=_OPTION,
                    hint="match fewer arrays, or give fewer names",
                )
            arguments[k] = replace(arguments[k], dimension_names=names)
    return replace(program, arguments=tuple(arguments))


def parse_names(text: str) -> tuple[str, tuple[str, ...]]:
    """`PATTERN=embed,mlp` -> the pattern and the name of each dimension, "" for none."""
    pattern, sign, entries = text.rpartition("=")
    if not sign or not pattern:
        raise UsageError(
            f"cannot read {text!r}", where=_OPTION, hint=f"write {_OPTION} 'PATTERN=embed,mlp': one name per dimension"
        )
    names = (entry.strip() for entry in entries.split(","))
    return pattern, tuple("" if name in ("None", "?", "-") else name for name in names)


# ---------------------------------------------------------------- trees
# Trees of arrays reconstructed from the paths of arguments and results in a program file.
#
# A path is the output of `jax.tree_util.keystr` after the parameter's name: `state.params['w'][0]`.

_ROOT = re.compile(r"[A-Za-z_]\w*")
_STEP = re.compile(r"\['((?:[^'\\]|\\.)*)'\]|\[\"([^\"]*)\"\]|\[(\d+)\]|\.([A-Za-z_]\w*)|\[<flat index (\d+)>\]")


def root_of(path: str) -> str:
    """The parameter's name, or "" if the path begins otherwise."""
    match = _ROOT.match(path)
    return match.group() if match else ""


def below_root(path: str) -> str:
    """The path after the parameter's name (`result` counts as one): `['w'][0]`."""
    return path[len(root_of(path)) :]


def tree_of(paths: Sequence[str], leaves: Sequence[Any], definitions: dict[frozenset[str], Any]) -> Any:
    """The leaves arranged in the tree of their paths (without a root): tuples for positions, dictionaries for names.

    Args:
        definitions: relative paths of a tree's leaves -> its jax PyTreeDef and the order of these paths; a subtree with
            exactly these leaves gets that structure, so that a carried train state is returned in its original type.
    """
    import jax

    if len(paths) == 1 and not paths[0]:
        return leaves[0]
    if len(set(paths)) < len(paths) or not all(paths):
        return tuple(leaves)
    by_path = dict(zip(paths, leaves, strict=True))
    structure = definitions.get(frozenset(paths))
    if structure is not None:
        definition, order = structure
        return jax.tree.unflatten(definition, [by_path[path] for path in order])
    branches: dict[str | int, tuple[list[str], list[Any]]] = {}
    for path, leaf in by_path.items():
        step = _STEP.match(path)
        if step is None:
            return tuple(leaves)
        key: str | int = int(step[3] or step[5]) if step[3] or step[5] else step[1] or step[2] or step[4] or ""
        branches.setdefault(key, ([], []))
        branches[key][0].append(path[step.end() :])
        branches[key][1].append(leaf)
    parts = {key: tree_of(*branch, definitions) for key, branch in branches.items()}
    if sorted(map(str, parts)) == sorted(map(str, range(len(parts)))):
        return tuple(parts[k] for k in range(len(parts)))
    return parts


def subtrees(tree: Any) -> dict[frozenset[str], Any]:
    """Relative leaf paths of a tree -> its PyTreeDef and the order of the paths, for `tree_of`."""
    import jax

    flattened = jax.tree_util.tree_flatten_with_path(tree)
    paths = [jax.tree_util.keystr(path) for path, _ in flattened[0]]
    return {frozenset(paths): (flattened[1], paths)} if paths and "" not in paths else {}


# ---------------------------------------------------------------- pins
# `Pins`: shardings that a program itself fixes, in axis names of the chosen mesh.

# Per dimension the mesh axis names, or None for a dimension left open.
PinnedAxes = tuple[tuple[str, ...] | None, ...]


@dataclass(frozen=True)
class Pins:
    """`values` [value number], `uses` [(op number, operand position)]; `notices`: messages about shardings that could
    not be kept."""

    values: dict[int, PinnedAxes] = field(default_factory=dict)
    uses: dict[tuple[int, int], PinnedAxes] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


NO_PINS = Pins()
