"""How the source hangs together: who may import whom, and what files may hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from conftest import SLOW

import toast_cli
import toast_partitioner
from benchmarks.mutants import TESTS
from toast_cli.plan.decisions import NONE, Replicate, Shard

# Low to high: each imports from those before it only. The pipeline's order, with what everybody needs in front and the
# ways in at the end.
ORDER = [
    "base",
    "program",
    "xla",
    "hardware",
    "kernels",
    "frontend",
    "dimensions",
    "plan",
    "request",
    "price",
    "search",
    "tactics",
    "emit",
    "rewrite",
    "ask_xla",
    "report",
    "candidates",
    "pipeline",
    "together",
    "api",
    "toast_cli",
    "cli",
    "__main__",
]
# Steps that see plain data alone: nothing of MLIR or jaxlib.
WITHOUT_MLIR = ["program", "hardware", "dimensions", "plan", "price", "search", "tactics", "report"]
PACKAGE = Path(__file__).parents[1] / "toast_cli"
MUTABLE = ("dict", "list", "set", "defaultdict", "Counter", "OrderedDict", "WeakKeyDictionary", "WeakValueDictionary")


@cache
def sources() -> list[tuple[str, ast.Module, list[ast.AST]]]:
    """Name of each module with its syntax tree and all nodes of that."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        found.append((".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts), tree, list(ast.walk(tree))))
    return found


def called(node: ast.AST) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


@cache
def imports() -> dict[str, set[str]]:
    """Module -> modules of the package that it imports, at its top or in a function, also for types alone."""
    trees = {name.removesuffix(".__init__"): nodes for name, _, nodes in sources()}
    found: dict[str, set[str]] = {}
    for name, nodes in trees.items():
        named: set[str] = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                parts = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= {part if part in trees else node.module for part in parts}
        found[name] = {other for other in named if other in trees and other != name}
    return found


def step(module: str) -> str:
    """The folder, or the file beside the folders, that a module belongs to."""
    return module.split(".")[1] if "." in module else module


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Nodes of which each points to the next and the last to the first; none where there is no such way."""
    done: set[str] = set()
    for start in graph:
        way = [start]
        waiting = [iter(sorted(graph[start]))]
        while waiting:
            node = next((n for n in waiting[-1] if n not in done), None)
            if node is None:
                done.add(way.pop())
                waiting.pop()
            elif node in way:
                return way[way.index(node) :]
            else:
                way.append(node)
                waiting.append(iter(sorted(graph[node])))
    return []


def test_cycles_are_found() -> None:
    assert cycle({"a": {"b", "d"}, "b": {"c"}, "c": {"a"}, "d": set()}) == ["a", "b", "c"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_files_import_each_other() -> None:
    assert cycle(imports()) == []


def test_imports_follow_the_pipeline() -> None:
    place = {name: number for number, name in enumerate(ORDER)}
    graph = imports()
    assert {step(module) for module in graph} == set(ORDER)
    wrong = [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in sorted(others)
        if step(module) != step(other) and place[step(module)] < place[step(other)]
    ]
    assert wrong == []


def test_only_the_ends_of_the_pipeline_touch_jaxlib() -> None:
    graph = imports()
    assert [
        module
        for module, others in graph.items()
        if step(module) in WITHOUT_MLIR and any(step(other) == "xla" for other in others)
    ] == []
    named = {
        name
        for name, _, nodes in sources()
        for node in nodes
        for module in modules_named(node)
        if module.startswith(("jaxlib", "jax._src"))
    }
    assert {step(module) for module in named} == {"xla"}


def modules_named(node: ast.AST) -> list[str]:
    """The modules that a statement imports, or that a text names as `toast_cli.xla.native.needed` takes it."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    text = node.value if isinstance(node, ast.Constant) else None
    return [text] if isinstance(text, str) and re.fullmatch(r"(jaxlib|jax)(\.\w+)+", text) else []


def test_no_key_is_the_identity_of_an_object() -> None:
    found = [f"{name}:{node.lineno}" for name, _, nodes in sources() for node in nodes if called(node) == "id"]
    assert found == []


def is_empty_and_mutable(value: ast.expr | None) -> bool:
    empty = (isinstance(value, ast.Dict) and not value.keys) or (isinstance(value, ast.List) and not value.elts)
    return empty or (value is not None and called(value) in MUTABLE and not getattr(value, "args", ()))


def test_no_module_owns_a_cache() -> None:
    """An empty dictionary or list of a module could only be there to be filled."""
    found = [
        f"{name}:{node.lineno}"
        for name, tree, _ in sources()
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_empty_and_mutable(node.value)
    ]
    assert found == []


def test_what_functions_remember_is_bounded() -> None:
    """`functools.cache` of a function of a module grows without end, unless the function takes nothing."""
    found = [
        f"{name}:{node.name}"
        for name, tree, _ in sources()
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(d, ast.Name) and d.id == "cache" for d in node.decorator_list)
        and (node.args.args or node.args.kwonlyargs)
    ]
    assert found == []


def test_decisions_of_different_kinds_are_never_equal() -> None:
    numbers = (NONE, 0, 1, 2)
    shards = [Shard(a, b, *rest) for a, b in product(numbers, numbers) for rest in ((), ((),), ((0,), 1))]
    replicates = [Replicate(a, b) for a, b in product(numbers, numbers)]
    assert not set(shards) & set(replicates)


# Options of users, rows of a table, and functions that still have to be taken apart.
MANY_PARAMETERS = {
    "toast_cli.api.jit:jit",
    "toast_cli.price.cost:kernel_seconds",
}


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in given)


def test_functions_take_at_most_six_parameters() -> None:
    found = {
        f"{name}:{node.name}"
        for name, _, nodes in sources()
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and parameters(node) > 6
        if step(name) != "cli"
    }
    assert found == MANY_PARAMETERS


def test_modules_of_which_mutants_are_made_exist() -> None:
    for module, tests in TESTS.items():
        assert (PACKAGE / f"{module.replace('.', '/')}.py").is_file(), module
        for name in tests.split():
            assert (PACKAGE.parent / "tests" / f"test_{name}.py").is_file(), name


# -- what `make quick` leaves out exists


@pytest.mark.parametrize("name", sorted(SLOW))
def test_what_is_slow_exists(name: str) -> None:
    file, _, test = name.partition("::")
    text = Path(__file__).with_name(f"{file}.py").read_text(encoding="utf-8")
    assert f"\ndef {test}" in text, "tests/conftest.py names a test that is no more"


# -- `import toast_partitioner as toast`: the public API under the name of the distribution


def test_every_public_name_is_exported() -> None:
    assert toast_partitioner.__all__ == toast_cli.__all__
    assert set(toast_cli.__all__) <= set(dir(toast_partitioner))
    for name in toast_cli.__all__:
        assert getattr(toast_partitioner, name) is getattr(toast_cli, name)


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="module 'toast_partitioner' has no attribute 'pipeline'"):
        toast_partitioner.pipeline  # noqa: B018


def test_importing_it_loads_nothing_heavy() -> None:
    script = "import sys, toast_partitioner; print(*sys.modules)"
    root = Path(__file__).parents[1]
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=root)
    assert set(found.stdout.split()) & {"jax", "jaxlib", "numpy", "toast_cli.api.plan"} == set()
