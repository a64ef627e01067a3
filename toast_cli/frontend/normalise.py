"""One entry function without calls: what enters is a parsed module, what leaves is the same module, changed in place."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir.dialects import func

from toast_cli.errors import InputError
from toast_cli.xla import inline_function, ir, walk_ops


def normalise(module: Any) -> tuple[str, ...]:
    """Inlines every call into `main` and removes all other functions. Returns notices, one sentence each."""
    symbols = ir.SymbolTable(module.operation)
    done: set[str] = set()

    def inline_calls(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            raise InputError(f"function @{name} calls itself", hint="recursive programs cannot be partitioned")
        for call in walk_ops(symbols[name], func.CallOp):
            callee = call.opview.callee.value
            if callee not in done:
                inline_calls(callee, (*path, name))
            outcome = inline_function(symbols[callee], call.operands, call)
            for result, value in zip(call.results, outcome, strict=True):
                result.replace_all_uses_with(value)
            call.erase()
        done.add(name)

    inline_calls("main", ())
    for function in [op for op in module.body.operations if op.operation.name == "func.func"]:
        if function.name.value != "main":
            function.operation.erase()
    return ()
