"""Converts the files that are given to compilers to StableHLO."""

from __future__ import annotations

from typing import Literal

from toast_cli.frontend.donation import mark_host_memory

Dialect = Literal["stablehlo", "hlo"]
PROGRAM, COMPILED = "program", "compiled.txt"


def as_stablehlo(content: bytes, form: str) -> bytes:
    """StableHLO of a program in StableHLO or HLO."""
    from toast_cli import xla

    if form != "hlo":
        return content
    proto = xla.hlo_text_to_proto(content.decode())
    program = xla.hlo_proto_to_stablehlo(proto)
    on_host = xla.hlo_on_host(proto)
    if not any(map(any, on_host)):
        return program
    module = xla.parse_module(xla.make_context(), program)
    mark_host_memory(module, *on_host)
    return xla.write_bytecode(module)
