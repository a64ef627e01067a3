"""Inlines constants that an MLIR file stores in its resource section.

XLA does not accept `dense_resource`. Enters: MLIR text, or a module. Leaves: the same with each resource in the file
written as `dense<"0x…">` where it is used. Names without a resource stay (see `left_out`).
"""

from __future__ import annotations

import re
from typing import Any

from toast_cli.xla import holds_resource, parse_module, walk_ops

WORD = b"dense_resource"
_NAME = rb'("(?:[^"\\]|\\.)*"|[\w.$-]+)'
_SECTION = re.compile(rb"\n?\{-#.*?#-\}", re.DOTALL)
_RESOURCE = re.compile(_NAME + rb'\s*:\s*"0x([0-9A-Fa-f]*)"')
_USE = re.compile(WORD + rb"\s*<\s*" + _NAME + rb"\s*>")
_ALIGNMENT_DIGITS = 8  # a resource begins with its alignment, four bytes


def with_dense_constants(text: bytes) -> bytes:
    """MLIR text with constants inlined."""
    section = _SECTION.search(text, max(text.rfind(b"{-#"), 0))
    if section is None or WORD not in text:
        return text
    digits = {name: value[_ALIGNMENT_DIGITS:] for name, value in _RESOURCE.findall(section[0])}

    def written(use: re.Match[bytes]) -> bytes:
        found = digits.get(use[1])
        if found is None:
            return use[0]
        return b'dense<"0x' + found + b'">' if found else b"dense<>"

    return _USE.sub(written, text[: section.start()]) + text[section.end() :]


def dense_module(module: Any) -> Any:
    """A module with constants inlined; the one given if there is nothing to do."""
    if not any(map(holds_resource, walk_ops(module, "stablehlo.constant", "mhlo.constant", "arith.constant"))):
        return module
    text = module.operation.get_asm(enable_debug_info=True, binary=True)
    return parse_module(module.context, with_dense_constants(text))
