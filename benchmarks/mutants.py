"""How many small faults the tests find: changes one operator or number of a module at a time, and runs its tests.

    python -m benchmarks.mutants [--each 10] [MODULE …]

Prints a line for each module: how many mutants its tests found, and those that they did not. A mutant's process is a
fork of this one, which has imported what takes long, and ends at the first test that fails.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.util
import os
import random
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 120  # of processor time: a fault that keeps tests from ending is found
# module of toast_cli -> the test files that are about it
TESTS = {
    "price.timeline": "overlap cost",
    "dimensions.merged": "merged_dimensions",
    "emit.minimal": "constraints_needed emit_constraints",
    "emit.regions.moves": "halo",
    "price.buffers": "cost tight_memory decoding_memory memory_space_assignment",
    "frontend.simplify": "shifts normalise",
    "rewrite.recompute": "recompute offload",
    "plan.partials": "reduce_scatter emit_reductions loop_sums",
    "search.mcts": "search moves",
    "ask_xla.collectives": "compiled_text verify_partitioned emit_reductions",
}
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def faults(tree: ast.Module) -> Iterator[tuple[ast.AST, str, Any]]:
    """A node, one of its fields, and another value for it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPPED:
            yield node, "op", SWAPPED[type(node.op)]()
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
            yield node, "ops", [SWAPPED[type(node.ops[0])](), *node.ops[1:]]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, "operand", ast.UnaryOp(ast.Not(), node.operand)
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            yield node, "value", not node.value if node.value in (True, False) else node.value + 1
        elif isinstance(node, ast.If | ast.IfExp):
            yield node, "test", ast.Constant(True)


def mutants(source: str, each: int) -> Iterator[tuple[int, str, str]]:
    """Line, what is there, and the module's text with the fault: as many of a module as are asked for."""
    found = list(faults(ast.parse(source)))
    for number in sorted(random.Random(0).sample(range(len(found)), min(each, len(found)))):
        tree = ast.parse(source)
        node, field, value = list(faults(tree))[number]
        line = getattr(node, "lineno", 0)
        before = ast.unparse(node)
        setattr(node, field, copy.deepcopy(value))
        yield line, f"{before} -> {ast.unparse(node)}", ast.unparse(ast.fix_missing_locations(tree))


class Instead:
    """An import hook: the module's source is another."""

    def __init__(self, module: str, text: str) -> None:
        self.module, self.text = module, text

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name == self.module else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        exec(compile(self.text, f"{self.module} (mutant)", "exec"), module.__dict__)


def survives(module: str, text: str, files: list[str]) -> bool:
    """True if the tests pass with this text of the module."""
    child = os.fork()
    if child == 0:
        sys.stdout.flush()
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        sys.meta_path.insert(0, Instead(module, text))
        import pytest

        code = 1
        try:
            code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *files]))
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", default=list(TESTS), metavar="MODULE", help=", ".join(TESTS))
    parser.add_argument("--each", type=int, default=10, help="mutants of a module")
    options = parser.parse_args()
    import jax  # noqa: F401

    for module in options.modules:
        path = ROOT.joinpath("toast_cli", *module.split(".")).with_suffix(".py")
        files = [str(ROOT / "tests" / f"test_{name}.py") for name in TESTS[module].split()]
        source = path.read_text(encoding="utf-8")
        if not survives(f"toast_cli.{module}", source, files):
            raise SystemExit(f"the tests of {module} fail as it is")
        all_of_them = list(mutants(source, options.each))
        left = [(n, what) for n, what, text in all_of_them if survives(f"toast_cli.{module}", text, files)]
        print(f"{module}: {len(all_of_them) - len(left)} of {len(all_of_them)} mutants found", flush=True)
        for line, what in left:
            print(f"    line {line}: {what}", flush=True)


if __name__ == "__main__":
    main()
