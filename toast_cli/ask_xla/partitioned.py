"""Extracts the module right after XLA's partitioner, before a compiler for CPUs reworks it.

XLA:CPU has no 16-bit arithmetic and no reduce-scatter, and joins and splits collectives, so its final module differs
much from the communication of a TPU or GPU. The module right after partitioning still has the program's own types, and
is mostly the same for every backend. XLA:TPU, however, simplifies a program before it propagates and partitions it,
which can change the propagation. Its own partitioner can be run as well, ahead of time, in about the same time.

In: the bytes of a StableHLO or HLO file, a mesh, and a `CompilationTarget` or none for virtual CPU devices. Out:
a `Partitioned`, or the `CompiledCollective`s in it, or the reason why there are none.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

from toast_cli.ask_xla.ahead import PROGRAM, CompilationTarget, Dialect, as_stablehlo
from toast_cli.ask_xla.child import Failure, ask
from toast_cli.ask_xla.collectives import CompiledCollective, name_and_place, partitioned_collectives
from toast_cli.ask_xla.hlo_text import array_bytes, graphs, places
from toast_cli.errors import InputError
from toast_cli.frontend.convert import refuse_left_out
from toast_cli.frontend.formats import read_bytes
from toast_cli.frontend.loading import parse
from toast_cli.frontend.shardings import mesh_axes, read_tiling

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
    added up count as one (see `collectives`). `shardy`: Shardy's propagation or GSPMD's; None: by the format.
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
    from toast_cli.frontend.shardings import meshes_of

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


def original_bytes(path: str, dims: Sequence[str] = ()) -> bytes:
    """The original program as MLIR bytecode, normalised as `toast partition` does. dims: sizes of symbolic
    dimensions."""
    from toast_cli import xla
    from toast_cli.frontend import content_of, load

    module = load(path, content=content_of(path, dims)).module
    refuse_left_out(module, path)
    return xla.write_bytecode(module)


# ---------------------------------------------------------------- involuntary rematerialisation
# Finds involuntary full rematerialisations: arrays that XLA's partitioner gathers on every device because it has no
# better way to reshard them. It warns of each ("[SPMD] Involuntary full rematerialization").

Axes = tuple[tuple[str, ...], ...]  # [dimensions] mesh axes that split each, major to minor

_WARNING = re.compile(
    r"nvoluntary full rematerialization\. The compiler cannot go from sharding (\{.*?\}) to (\{.*?\}) efficiently "
    r"for HLO operation %?\S+ = (\w+)\[([\d,]*)\](.*?)\. As the last resort"
)


@dataclass(frozen=True)
class Rematerialisation:
    """An array that is resharded from `start` to `end`; None for a sharding that no mesh axes express.

    Attributes:
        type, shape: of the whole array. bytes: of the whole, which every device holds for a moment. count: in one step,
            loops counted. name, place: the op that makes it, and its `model.py:12`.
    """

    type: str
    shape: tuple[int, ...]
    bytes: int
    start: Axes | None
    end: Axes | None
    count: float
    name: str
    place: str


def rematerialisations(
    found: Partitioned, axis_names: tuple[str, ...], axis_sizes: tuple[int, ...], through: Collection[str] = ()
) -> list[Rematerialisation]:
    """The rematerialisations that the partitioner warned of, the largest first. through: see `places`."""
    frames = places(found.text, through)
    runs: dict[tuple[str, str], float] = {}
    for graph in graphs(found.text):
        for node in graph.nodes.values():
            key = name_and_place(node.rest, frames)
            runs[key] = max(graph.runs, runs.get(key, 0.0))
    alike: Counter[Rematerialisation] = Counter()
    for warned in _WARNING.finditer(found.log):
        start, end, element, extents, rest = warned.groups()
        local = tuple(int(extent) for extent in extents.split(",") if extent)
        tiling = read_tiling(start)
        tiles = tiling.tiles if tiling and len(tiling.tiles) == len(local) else (1,) * len(local)
        lies, needed = (_axes(text, len(local), axis_names, axis_sizes) for text in (start, end))
        shape = tuple(extent * parts for extent, parts in zip(local, tiles, strict=True))
        whole = array_bytes(f"{element}[{','.join(map(str, shape))}]")
        name, place = name_and_place(rest, frames)
        one = Rematerialisation(element, shape, sum(whole), lies, needed, runs.get((name, place), 1.0), name, place)
        alike[one] += 1
    each = [replace(one, count=one.count * times) for one, times in alike.items()]
    return sorted(each, key=lambda one: -one.bytes * one.count)


def _axes(text: str, rank: int, names: tuple[str, ...], sizes: tuple[int, ...]) -> Axes | None:
    tiling = read_tiling(text)
    return mesh_axes(tiling, rank, names, sizes) if tiling else None
