"""Extracts the module right after XLA's partitioner, before a compiler for CPUs reworks it.

XLA:CPU has no 16-bit arithmetic and no reduce-scatter, and joins and splits collectives, so its final module differs
much from the communication of a TPU or GPU. The module right after partitioning still has the program's own types, and
is mostly the same for every backend. XLA:TPU, however, simplifies a program before it propagates and partitions it,
which can change the propagation. Its own partitioner can be run as well, ahead of time, in about the same time.

In: the bytes of a StableHLO or HLO file, a mesh, and a `CompilationTarget` or none for virtual CPU devices. Out:
a `Partitioned`, or the `CompiledCollective`s in it, or the reason why there are none.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

from toast_cli.errors import InputError
from toast_cli.frontend.formats import read_bytes
from toast_cli.frontend.handover import parse
from toast_cli.frontend.left_out import refuse_left_out
from toast_cli.verify.ahead import PROGRAM, CompilationTarget, Dialect, as_stablehlo
from toast_cli.verify.child import Failure, ask
from toast_cli.verify.collectives import CompiledCollective
from toast_cli.verify.sums import partitioned_collectives

PARTITIONED = "partitioned.txt"
_PASS, _TPU_PASS, _NEXT = "spmd-partitioning", "tpu-spmd-partitioning", "pipeline-start"
_POLL_SECONDS = 0.02


def collectives_after_partitioning(
    content: bytes,
    form: Dialect,
    axes: dict[str, int],
    *,
    shardy: bool | None = None,
    target: CompilationTarget | None = None,
    timeout_seconds: float = 600.0,
) -> list[CompiledCollective] | Failure:
    """The collectives XLA's partitioner adds to a program for a mesh, by kind, axes and bytes, loops counted.

    target: the machine whose compiler's partitioner runs; virtual CPU devices if None.

    An all-reduce of which every device keeps a piece counts as a reduce-scatter, and all-reduces whose results are only
    added up count as one (see `sums`). `shardy`: Shardy's propagation or GSPMD's; None: by the format.
    """
    found = after_partitioning(
        content, form, prod(axes.values()), shardy=shardy, target=target, timeout_seconds=timeout_seconds
    )
    return (
        found if isinstance(found, Failure) else partitioned_collectives(found.text, tuple(axes), tuple(axes.values()))
    )


@dataclass(frozen=True)
class Partitioned:
    """HLO text of one device's program right after partitioning, and the warnings of the compiler."""

    text: str
    log: str


def after_partitioning(
    content: bytes,
    form: Dialect | Literal["any"],
    devices: int,
    *,
    shardy: bool | None = None,
    target: CompilationTarget | None = None,
    timeout_seconds: float = 600.0,
) -> Partitioned | Failure:
    """One device's program right after partitioning for so many virtual CPU devices, or for a target, from a child
    process. form: "any" is a program in any of the formats that toast reads.
    """
    request = {
        "form": form, "devices": devices, "shardy": form != "hlo" if shardy is None else shardy,
        "target": None if target is None else asdict(target),
    }  # fmt: skip
    answer = ask("partitioned", request, {PROGRAM: content}, timeout_seconds=timeout_seconds)
    return answer if isinstance(answer, Failure) else Partitioned(answer.files[PARTITIONED].decode(), answer.log)


# -- in the child -----------------------------------------------------------------------------------------------------


def partitioned_task(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Writes the partitioned module's text into the folder. The rest of the compilation is abandoned with the
    process."""
    from toast_cli import xla
    from toast_cli.frontend.formats import parse_here

    program, shardy = as_stablehlo((folder / PROGRAM).read_bytes(), request["form"]), request["shardy"]
    if request["form"] == "any":
        form, module = parse_here(program, "the program")
        shardy = not form.startswith("hlo") or b"xla.sdy.meshes" in program  # HLO that Shardy is to propagate says so
        program = xla.write_bytecode(module)
    target = None if request["target"] is None else CompilationTarget(**request["target"])
    done = _TPU_PASS if target and target.platform == "tpu" else _PASS
    dumps = folder / "dumps"
    settings: dict[str, str | bool] = {
        "xla_dump_to": str(dumps), "xla_dump_hlo_as_text": True, "xla_dump_large_constants": True,
        "xla_dump_hlo_pass_re": f"^({done}|{_NEXT})$",
    }  # fmt: skip
    raised: list[Exception] = []

    def compile_it() -> None:
        try:
            if target is None:
                xla.compile_program(program, xla.cpu_devices(request["devices"]), shardy=shardy, settings=settings)
            else:
                xla.compile_ahead(program, target.find_devices(), shardy=shardy, options=settings)
        except Exception as error:  # passed to the waiting thread
            raised.append(error)

    worker = threading.Thread(target=compile_it, daemon=True)
    worker.start()
    (folder / PARTITIONED).write_text(wait_for_dump(dumps, worker, raised, done))
    return {}


def wait_for_dump(dumps: Path, worker: threading.Thread, raised: list[Exception], done: str = _PASS) -> str:
    """The text after partitioning, as soon as a later pass has begun. Raises what the compiler raised before that."""
    while True:
        ended = not worker.is_alive()
        numbered = sorted(dumps.glob("module_*.*.*.after_*.txt"))
        for place, path in enumerate(numbered):
            if f".after_{done}." in path.name and (ended or place + 1 < len(numbered)):
                return path.read_text()
        if raised:
            raise raised[0]
        if ended:
            raise RuntimeError("this jaxlib does not show the program after partitioning")
        time.sleep(_POLL_SECONDS)


def partitioned_program(path: str, axes: dict[str, int] | None) -> tuple[bytes, Dialect, dict[str, int]]:
    """Content, form and mesh of a program that `toast partition -o` wrote.

    `axes` is the mesh of its report; without it, the program's own `sdy.mesh` is used. Raises `InputError` if there is
    neither.
    """
    from toast_cli import xla
    from toast_cli.frontend.annotations import meshes_of

    content = read_bytes(path)
    kind, module = parse(content, path)
    refuse_left_out(module, path)
    if kind.startswith("hlo"):
        if axes is None:
            raise InputError(
                "HLO text does not name its mesh", where=path, hint="give the report written with it: --report FILE"
            )
        return content, "hlo", axes
    if axes is None:
        meshes = [mesh for mesh in meshes_of(module).values() if mesh]
        if not meshes:
            raise InputError("the program has no sdy.mesh", where=path, hint="verify what `toast partition -o` wrote")
        axes = dict(max(meshes, key=lambda mesh: len(dict(mesh))))
    return xla.write_bytecode(module), "stablehlo", axes


def original_bytes(path: str) -> bytes:
    """The original program as MLIR bytecode, normalised as `toast partition` does."""
    from toast_cli import xla
    from toast_cli.frontend import load

    module = load(path).module
    refuse_left_out(module, path)
    return xla.write_bytecode(module)
