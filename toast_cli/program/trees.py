"""Trees of arrays reconstructed from the paths of arguments and results in a program file.

A path is the output of `jax.tree_util.keystr` after the parameter's name: `state.params['w'][0]`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_ROOT = re.compile(r"[A-Za-z_]\w*")
_STEP = re.compile(r"\['((?:[^'\\]|\\.)*)'\]|\[\"([^\"]*)\"\]|\[(\d+)\]|\.([A-Za-z_]\w*)|\[<flat index (\d+)>\]")


def root_of(path: str) -> str:
    """The parameter's name, or "" if the path begins otherwise."""
    found = _ROOT.match(path)
    return found.group() if found else ""


def below_root(path: str) -> str:
    """The path after the parameter's name (`result` counts as one): `['w'][0]`."""
    return path[len(root_of(path)) :]


def tree_of(paths: Sequence[str], leaves: Sequence[Any], known: dict[frozenset[str], Any]) -> Any:
    """The leaves arranged in the tree of their paths (without a root): tuples for positions, dictionaries for names.

    Args:
        known: relative paths of a tree's leaves -> its jax PyTreeDef and the order of these paths; a subtree with
            exactly these leaves gets that structure, so that a carried train state is returned in its original type.
    """
    import jax

    if len(paths) == 1 and not paths[0]:
        return leaves[0]
    if len(set(paths)) < len(paths) or not all(paths):
        return tuple(leaves)
    by_path = dict(zip(paths, leaves, strict=True))
    found = known.get(frozenset(paths))
    if found is not None:
        definition, order = found
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
    parts = {key: tree_of(*found, known) for key, found in branches.items()}
    if sorted(map(str, parts)) == sorted(map(str, range(len(parts)))):
        return tuple(parts[k] for k in range(len(parts)))
    return parts


def subtrees(tree: Any) -> dict[frozenset[str], Any]:
    """Relative leaf paths of a tree -> its PyTreeDef and the order of the paths, for `tree_of`."""
    import jax

    found = jax.tree_util.tree_flatten_with_path(tree)
    paths = [jax.tree_util.keystr(path) for path, _ in found[0]]
    return {frozenset(paths): (found[1], paths)} if paths and "" not in paths else {}
