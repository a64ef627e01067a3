"""Times programs on the GPU of this machine. Needs jax with CUDA and numpy; nothing of this project is installed.

    python -m benchmarks.gpu_timer FOLDER --out FILE [--ops] [--compile-for SECONDS]

FOLDER holds `NAME.mlirbc`, StableHLO portable artifacts as `gpu_times.py --export` writes them; `--ops` times the
single ops of `op_cases.py` as well. Each program is compiled with what XLA does by default on the machine, autotuning
included, and runs on random numbers; integers are less than `INDICES`, scalars 0. Compiling is done by several threads
before anything is timed (XLA has executables wait while it autotunes). One JSON line each:

* `program`, `chip`, `jax`; `seconds`: of one run, the median of `ROUNDS` rounds; `spread`: of the rounds,
  (most - least) / median; `compile_seconds`; `temp_bytes`, `argument_bytes`, `output_bytes`: as XLA assigned buffers;
  or `error`.
* where a profiler sees the GPU: `device_seconds` in which it computed or copied in one run, whatever the host took to
  start kernels; `kernels`: so many; `longest`: [name without numbers, seconds, how many] of the kinds of kernels that
  took most.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROUNDS = 5
# A round takes about so long; its runs are started one after the other, so that starting one hides behind another.
ROUND_SECONDS = 0.05
MOST_RUNS = 200
INDICES = 1000
POOL = 2**22
LONGEST = 12
# MLIR's bindings load their parts on first use, which two threads cannot do at once.
ONE_AT_A_TIME = threading.Lock()


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    deadline = time.monotonic() + options.compile_for
    nothing = _nothing()
    waiting: list[tuple[str, Callable[[], Any]]] = [("nothing", lambda: nothing)]
    if options.folder:
        paths = sorted(options.folder.glob("*.mlirbc"), key=lambda path: path.stat().st_size)
        waiting += [(path.stem, lambda path=path: _executable(path.read_bytes())) for path in paths]
    if options.ops:
        waiting += list(_op_cases())
    with options.out.open("a") as file, ThreadPoolExecutor(options.threads) as pool:
        compiling = [(name, pool.submit(_timed, make, deadline)) for name, make in waiting]
        compiled = [(name, job.result()) for name, job in compiling]
        print(f"{sum(found is not None for _, found in compiled)} of {len(compiled)} compiled", flush=True)
        for name, found in compiled:
            if found is None:
                continue
            file.write(json.dumps(measured(name, *found)) + "\n")
            file.flush()
    return 0


def _timed(make: Callable[[], Any], deadline: float) -> tuple[Any, float] | None:
    """What `make` compiles, or the error, with the seconds it took; None where its turn came too late."""
    start = time.monotonic()
    if start > deadline:
        return None
    try:
        made = make()
    except Exception as error:
        made = error
    return made, time.monotonic() - start


def measured(name: str, compiled: Any, compile_seconds: float) -> dict[str, Any]:
    """The line of one program."""
    import jax

    row = {"program": name, "chip": jax.devices()[0].device_kind, "jax": jax.__version__}
    try:
        if isinstance(compiled, Exception):
            raise compiled
        arguments = _arguments(compiled)
        seconds, spread = run_seconds(compiled, arguments)
        stats = compiled.get_compiled_memory_stats()
        return row | {
            "seconds": seconds, "spread": round(spread, 3), "compile_seconds": round(compile_seconds, 1),
            "temp_bytes": stats.temp_size_in_bytes, "argument_bytes": stats.argument_size_in_bytes,
            "output_bytes": stats.output_size_in_bytes,
        } | profiled(compiled, arguments)  # fmt: skip
    except Exception as error:
        return row | {"error": (str(error) or repr(error)).splitlines()[0][:200]}


def run_seconds(executable: Any, arguments: list[Any]) -> tuple[float, float]:
    """(Seconds of a run, spread of the rounds)."""

    def run(times: int) -> float:
        start = time.perf_counter()
        _run(executable, arguments, times)
        return (time.perf_counter() - start) / times

    run(1)
    once = run(1)
    times = int(min(MOST_RUNS, max(1, ROUND_SECONDS / once)))
    rounds = sorted(run(times) for _ in range(ROUNDS))
    return median(rounds), (rounds[-1] - rounds[0]) / median(rounds)


def profiled(executable: Any, arguments: list[Any]) -> dict[str, Any]:
    """What the profiler saw the GPU do in one run."""
    import jax
    from jax.profiler import ProfileData

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            _run(executable, arguments, 1)
        data = ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
    streams = [line for plane in data.planes if "/device:GPU" in plane.name for line in plane.lines]
    events = [event for line in streams if line.name.startswith("Stream") for event in line.events]
    if not events:
        return {}
    kinds: dict[str, list[float]] = defaultdict(list)
    for event in events:
        kinds[re.sub(r"[\d_.]+$", "", event.name)[:60]].append(event.duration_ns / 1e9)
    longest = sorted(([name, sum(all_of), len(all_of)] for name, all_of in kinds.items()), key=lambda kind: -kind[1])
    spans = ((event.start_ns, event.start_ns + event.duration_ns) for event in events)
    return {"device_seconds": covered(spans) / 1e9, "kernels": len(events), "longest": longest[:LONGEST]}


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much spans (begin, end) cover together."""
    until, total = float("-inf"), 0.0
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _run(executable: Any, arguments: list[Any], times: int) -> None:
    for _ in range(times):
        results = executable.execute_sharded(arguments)
    for array in results.consume_with_handlers([lambda shards: shards[0]] * _results(executable)):
        array.block_until_ready()


def _arguments(executable: Any) -> list[Any]:
    return [_argument(number, shape) for number, shape in enumerate(_program_shape(executable).parameter_shapes())]


def _program_shape(executable: Any) -> Any:
    from jaxlib import xla_client

    module = executable.hlo_modules()[0]
    return xla_client.XlaComputation(module.as_serialized_hlo_module_proto()).program_shape()


def _results(executable: Any) -> int:
    shape = _program_shape(executable).result_shape()
    return len(shape.tuple_shapes()) if shape.is_tuple() else 1


def _argument(number: int, shape: Any) -> Any:
    """A random array on the device: of one pool of numbers, begun elsewhere for each argument."""
    import jax

    dims, dtype = shape.dimensions(), np.dtype(shape.numpy_dtype())
    count = int(np.prod(dims))
    rng = np.random.default_rng(number)
    if dtype.kind == "b":
        pool = rng.integers(0, 2, min(count, POOL)).astype(bool)
    elif np.issubdtype(dtype, np.integer):
        pool = rng.integers(0, min(INDICES, np.iinfo(dtype).max) if dims else 1, min(count, POOL)).astype(dtype)
    else:
        pool = (rng.standard_normal(min(count, POOL), dtype=np.float32) * 0.02).astype(dtype)
    return jax.device_put(np.resize(pool, count).reshape(dims))


def _executable(artifact: bytes) -> Any:
    """StableHLO, compiled for this machine's first device."""
    import jax
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax
    from jaxlib.mlir.dialects import stablehlo

    device = jax.devices()[0]
    options = compiler.get_compile_options(1, 1, device_assignment=np.zeros((1, 1), int), backend=device.client)
    with ONE_AT_A_TIME, mlir.make_ir_context() as context:
        module = stablehlo.deserialize_portable_artifact(context, artifact)
        text = mlir.module_to_bytecode(module)
    return device.client.compile_and_load(text, _jax.DeviceList((device,)), options)


def _nothing() -> Any:
    """A program that does next to nothing: what starting one takes."""
    import jax

    return jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((8,), "float32")).compile().runtime_executable()


def _op_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    import jax

    from benchmarks import gpu_cases
    from benchmarks.op_cases import Case, cases

    def make(case: Case) -> Any:
        shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in case.arguments]
        with ONE_AT_A_TIME:
            lowered = jax.jit(case.function).lower(*shapes)
        return lowered.compile().runtime_executable()

    found = list((cases() | gpu_cases.cases()).items())
    random.Random(0).shuffle(found)  # whatever time allows is of all families
    for name, case in found:
        yield name, lambda case=case: make(case)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="of programs to time")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are added to this file")
    parser.add_argument("--ops", action="store_true", help="time single ops too")
    parser.add_argument("--compile-for", type=float, default=1e9, metavar="SECONDS", help="begin no compilation later")
    parser.add_argument("--threads", type=int, default=6, help="that compile at once")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
