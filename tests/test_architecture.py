"""How the source hangs together: what its files may hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from toast_cli.plan.decisions import NOWHERE, Replicate, Shard
from toast_cli.search.cluster import decided

PACKAGE = Path(__file__).parents[1] / "toast_cli"
MUTABLE = ("dict", "list", "set", "defaultdict", "Counter", "OrderedDict", "WeakKeyDictionary", "WeakValueDictionary")


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Name of each module with its syntax tree."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts), ast.parse(path.read_text())


def called(node: ast.AST) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def test_no_key_is_the_identity_of_an_object() -> None:
    found = [f"{name}:{node.lineno}" for name, tree in sources() for node in ast.walk(tree) if called(node) == "id"]
    assert found == []


def is_empty_and_mutable(value: ast.expr | None) -> bool:
    empty = (isinstance(value, ast.Dict) and not value.keys) or (isinstance(value, ast.List) and not value.elts)
    return empty or (value is not None and called(value) in MUTABLE and not getattr(value, "args", ()))


def test_no_module_owns_a_cache() -> None:
    """An empty dictionary or list of a module could only be there to be filled."""
    found = [
        f"{name}:{node.lineno}"
        for name, tree in sources()
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_empty_and_mutable(node.value)
    ]
    assert found == []


def test_what_functions_remember_is_bounded() -> None:
    """`functools.cache` of a function of a module grows without end, unless the function takes nothing."""
    found = [
        f"{name}:{node.name}"
        for name, tree in sources()
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(d, ast.Name) and d.id == "cache" for d in node.decorator_list)
        and (node.args.args or node.args.kwonlyargs)
    ]
    assert found == []


def test_decisions_of_different_kinds_are_never_equal() -> None:
    numbers = (NOWHERE, 0, 1, 2)
    shards = [Shard(a, b, *rest) for a, b in product(numbers, numbers) for rest in ((), ((),), ((0,), 1))]
    replicates = [Replicate(a, b) for a, b in product(numbers, numbers)]
    assert not set(shards) & set(replicates)
    for shard, replicate in product(shards, replicates):
        assert decided((shard,)) != decided((replicate,))
        assert len(decided((shard, replicate))) == 2
