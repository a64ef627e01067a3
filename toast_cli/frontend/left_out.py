"""Handles constants whose values a file omits.

XLA prints large constants as `constant({...})` by default, and reads that back as values of its own choice. MLIR prints
`dense_resource<name>` and may omit the resource. Both become a `stablehlo.constant` of a missing resource: planning
does not need the values, and writing or running the program is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from toast_cli.errors import InputError
from toast_cli.frontend.diagnostics import place_of
from toast_cli.frontend.inline import replace_operation
from toast_cli.xla import holds_resource, ir, parse_module, walk_ops
from toast_cli.xla.build import Builder

CONSTANT = "stablehlo.constant"
# Custom call target that replaces a constant while HLO is converted; its line and column follow.
MARKER = "toast.left_out."
_START = "constant("
# These may have effects besides their results.
EFFECTS = frozenset({"stablehlo.custom_call", "stablehlo.outfeed", "stablehlo.send"})
HINT = (
    "give the program with its constants: StableHLO of `jax.jit(f).lower(…).as_text()`, or HLO printed with "
    "`print_large_constants` or `--xla_dump_large_constants`; `toast inspect` and `--format specs` do without them"
)

WORD = b"dense_resource"
_NAME = rb'("(?:[^"\\]|\\.)*"|[\w.$-]+)'
_SECTION = re.compile(rb"\n?\{-#.*?#-\}", re.DOTALL)
_RESOURCE = re.compile(_NAME + rb'\s*:\s*"0x([0-9A-Fa-f]*)"')
_USE = re.compile(WORD + rb"\s*<\s*" + _NAME + rb"\s*>")
_ALIGNMENT_DIGITS = 8  # a resource begins with its alignment, four bytes


def with_markers(text: str) -> str:
    """HLO text with a custom call in place of each constant whose values are omitted."""
    pieces: list[str] = []
    done, at = 0, text.find("...")
    while at >= 0:
        start = text.rfind(_START, done, at)
        end = _end_of(text, start + len(_START), at) if start >= 0 else -1
        if end >= 0:
            line, column = text.count("\n", 0, start) + 1, start - text.rfind("\n", 0, start)
            pieces += [text[done:start], f'custom-call(), custom_call_target="{MARKER}{line}.{column}"']
            done = end
        at = text.find("...", max(at + 3, end))
    return "".join([*pieces, text[done:]])


def _end_of(text: str, start: int, dots: int) -> int:
    """The end of the constant whose value begins at `start`, if the dots are part of it; else -1."""
    before = text[start:dots]
    if '"' in before or before.count("(") < before.count(")") or before.rfind("/*") > before.rfind("*/"):
        return -1
    level = 1 + before.count("(") - before.count(")")
    for at in range(dots, len(text)):
        level += (text[at] == "(") - (text[at] == ")")
        if not level:
            return at + 1
    return -1


def take_markers(module: Any) -> None:
    """Replaces the custom calls of `with_markers` by constants of a missing resource."""
    for call in walk_ops(module, "stablehlo.custom_call"):
        target = bytes(ir.StringAttr(call.attributes["call_target_name"]).value_bytes).decode("utf-8", "replace")
        if not target.startswith(MARKER):
            continue
        line, column = map(int, target.removeprefix(MARKER).split("."))
        kind = call.results[0].type
        with module.context:
            place = ir.Location.file("-", line, column)
            value = ir.Attribute.parse(f"dense_resource<left_out> : {kind}")
            constant = ir.Operation.create(
                CONSTANT, [kind], attributes={"value": value}, loc=place, ip=ir.InsertionPoint(call)
            )
        call.results[0].replace_all_uses_with(constant.results[0])
        call.erase()


def left_out(module: Any) -> list[Any]:
    """The constants with omitted values that the program needs. Those that nothing depends on are replaced by zeros."""
    missing = [operation for operation in walk_ops(module, CONSTANT) if holds_resource(operation)]
    needed = [operation for operation in missing if _is_needed(operation.results[0])]
    for operation in missing:
        if operation not in needed:
            _make_zero(operation)
    return needed


def refuse_left_out(module: Any, path: str) -> None:
    """Raises `InputError` at the first needed constant whose values are omitted."""
    needed = left_out(module)
    if needed:
        count = "" if len(needed) == 1 else f" (and of {len(needed) - 1} more)"
        what = f"the numbers of a constant {needed[0].results[0].type}{count} are left out of the file"
        raise InputError(what, where=place_of(needed[0], path), hint=HINT)


def left_out_notices(module: Any) -> list[str]:
    """Notices for a report about constants with omitted values."""
    count = len(left_out(module))
    what = "the numbers of 1 constant are" if count == 1 else f"the numbers of {count} constants are"
    return [f"{what} left out of the file: it can be planned for, and not written"] if count else []


def _is_needed(start: Any) -> bool:
    """True if a result of the program, its control flow, or an effect depends on a value."""
    waiting, seen = [start], {start}
    while waiting:
        for use in waiting.pop().uses:
            following = _following(use.owner.operation, use.operand_number)
            if following is None:
                return True
            fresh = [value for value in following if value not in seen]
            seen.update(fresh)
            waiting += fresh
    return False


def _following(user: Any, number: int) -> list[Any] | None:
    """The values that depend on an operand; None if control flow or an effect also does."""
    if user.name == "stablehlo.while":
        return [user.results[number], *_carried(user, number)]
    if user.name == "stablehlo.return":
        around = user.parent
        if around.name in ("stablehlo.case", "stablehlo.if"):
            return [around.results[number]]
        if around.name == "stablehlo.while" and user.block == around.regions[1].blocks[0]:
            return [around.results[number], *_carried(around, number)]
        return None
    if not len(user.results) or user.name in EFFECTS:
        return None
    return list(user.results)


def _carried(loop: Any, number: int) -> Iterator[Any]:
    return (region.blocks[0].arguments[number] for region in loop.regions)


def _make_zero(constant: Any) -> None:
    kind, build = constant.results[0].type, Builder.before(constant)
    zeros = build.broadcast(build.constant(0, "f32"), tuple(kind.shape))
    replace_operation(constant, [build.convert(zeros, str(kind.element_type))])


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
