"""What XLA makes of a program on virtual CPU devices.

Enters: the bytes of a StableHLO or HLO file. Leaves: `CompiledFacts`, or the reason why there are none.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from toast_cli.frontend.donation import mark_host_memory
from toast_cli.verify.child import Failure, ask

Dialect = Literal["stablehlo", "hlo"]
PROGRAM, COMPILED = "program", "compiled.txt"


@dataclass(frozen=True)
class CompiledFacts:
    """A compiled module: its HLO text (one device's program), how long it took, and bytes per device."""

    hlo_text: str
    seconds: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int


def compile_on_cpu(
    content: bytes, form: Dialect, devices: int, *, shardy: bool = True, timeout_seconds: float = 600.0
) -> CompiledFacts | Failure:
    """Compiles for so many virtual CPU devices, with Shardy or with GSPMD propagation, in a child process."""
    request = {"form": form, "devices": devices, "shardy": shardy}
    answer = ask("compile", request, {PROGRAM: content}, timeout_seconds=timeout_seconds)
    if isinstance(answer, Failure):
        return answer
    return CompiledFacts(hlo_text=answer.files[COMPILED].decode(), **answer.facts)


# -- in the child -----------------------------------------------------------------------------------------------------


def compile_task(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Writes the compiled text into the folder; returns the other facts."""
    from toast_cli import xla

    program = for_cpu(as_stablehlo((folder / PROGRAM).read_bytes(), request["form"]))
    start = time.monotonic()
    executable = xla.compile_program(program, xla.cpu_devices(request["devices"]), shardy=request["shardy"])
    seconds = time.monotonic() - start
    (folder / COMPILED).write_text(xla.compiled_text(executable))
    memory = executable.get_compiled_memory_stats()
    return {
        "seconds": seconds,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }


def for_cpu(program: bytes) -> bytes:
    """StableHLO without products that XLA:CPU does not have."""
    from toast_cli import xla
    from toast_cli.emit.dense_products import with_dense_products
    from toast_cli.program.ops import BLOCK_SCALED_DOT

    if b"ragged_dot" not in program and BLOCK_SCALED_DOT.encode() not in program:
        return program
    return xla.write_bytecode(with_dense_products(xla.parse_module(xla.make_context(), program)))


def as_stablehlo(content: bytes, form: str) -> bytes:
    """StableHLO of either form."""
    from toast_cli import xla

    if form != "hlo":
        return content
    proto = xla.hlo_text_to_proto(content.decode())
    program = xla.hlo_proto_to_stablehlo(proto)
    if not any(map(any, xla.hlo_on_host(proto))):
        return program
    module = xla.parse_module(xla.make_context(), program)
    mark_host_memory(module, proto)
    return xla.write_bytecode(module)
