"""Runs the partitioned and the original program on the same random inputs and compares the results.

In: the bytes of both. Out: one `ResultError` for each result, or the reason why they could not be run. Both run
twice, with the same state and different other inputs, and the original twice more on perturbed inputs (see `errors`).
Programs on narrow floating-point numbers run on f32, since reordered sums of 16-bit numbers differ by
percents (`widened`), and products that XLA:CPU does not have as dense ones (see `dense_products`).
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from toast_cli import xla
from toast_cli.verify.ahead import Dialect, as_stablehlo
from toast_cli.verify.child import Failure, ask
from toast_cli.verify.errors import ResultError

ORIGINAL, PARTITIONED = "original", "partitioned"
RUNS = 2
# Fraction of the free memory that both programs may use.
_SHARE_OF_MEMORY = 0.8
# Part of the target name of custom calls that call back into the process that made the program.
CALLBACKS = (b"python", b"callback")
TRANSFERS = frozenset({"infeed", "outfeed", "recv", "send"})
# Rough throughput of a virtual CPU machine, for programs large enough to matter.
_FLOPS_PER_SECOND = 2e9

_NARROW = r"bf16|f16|f8E[0-9A-Z]+|f6E[0-9A-Z]+|f4E[0-9A-Z]+"
_TYPE = re.compile(rf"(tensor<(?:\d+x)*|complex<)(?:{_NARROW})(?=[>,])")
_CONSTANT = re.compile(rf'dense<("0x[0-9A-F]*"|[^">]*)>( : tensor<(?:\d+x)*)({_NARROW})>')
# A conversion that has become an identity. XLA removes it, and takes a sharding on it for that of all results of a
# barrier before it.
_NOTHING = re.compile(r'(= stablehlo\.convert %\S+) \{mhlo\.sharding = "[^"]*"\} (: \((tensor<[^>]*>)\) -> \3)')
_HEX = re.compile(r"0x[0-9A-F]+")
_BITS = "stablehlo.bitcast_convert"


def compare_numbers(
    original: bytes,
    partitioned: bytes,
    devices: int,
    seed: int = 0,
    *,
    form: Dialect = "stablehlo",
    timeout_seconds: float = 600.0,
) -> list[ResultError] | Failure:
    """Runs `original` (StableHLO) on one virtual CPU device and `partitioned` (of `form`) on `devices`, in a child
    process.

    If results differ, compares once more on other inputs: a difference at a kink of an activation depends on the
    inputs, but a wrong plan is wrong on all of them.
    """
    errors = compare_once(original, partitioned, devices, seed, form, timeout_seconds)
    if isinstance(errors, Failure) or not any(error.wrong for error in errors):
        return errors
    again = compare_once(original, partitioned, devices, seed + 1, form, timeout_seconds)
    if isinstance(again, Failure):
        return errors
    return [second if first.wrong else first for first, second in zip(errors, again, strict=True)]


def compare_once(
    original: bytes, partitioned: bytes, devices: int, seed: int, form: Dialect, timeout_seconds: float
) -> list[ResultError] | Failure:
    """Compares on one set of inputs."""
    request = {"form": form, "devices": devices, "shardy": form != "hlo", "seed": seed, "seconds": timeout_seconds}
    files = {ORIGINAL: original, PARTITIONED: partitioned}
    answer = ask("numbers", request, files, timeout_seconds=timeout_seconds)
    if isinstance(answer, Failure):
        return answer
    return [ResultError(**{**error, "looks": tuple(error["looks"])}) for error in answer.facts["errors"]]


# -- in the child -----------------------------------------------------------------------------------------------------


def numbers_task(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Runs both programs and compares."""
    from toast_cli import xla
    from toast_cli.verify.errors import Runs, narrowest_float, result_errors, shake
    from toast_cli.verify.inputs import input_sets, new_versions

    given = xla.parse_module(xla.make_context(), (folder / ORIGINAL).read_bytes())
    refuse_effects(given)
    split = xla.parse_module(given.context, as_stablehlo((folder / PARTITIONED).read_bytes(), request["form"]))
    refuse_effects(split)
    module, split = for_cpu(given, split)
    types, shapes = result_types(module), [shape for shape, _ in result_types(module)]
    original, partitioned = xla.write_bytecode(module), xla.write_bytecode(split)
    programs = [(original, own_devices(module), True), (partitioned, request["devices"], request["shardy"])]
    loaded = []
    for program, count, shardy in programs:
        devices = xla.cpu_devices(count)
        loaded.append((xla.compile_program(program, devices, shardy=shardy), devices))
    refuse_large([(executable, len(devices)) for executable, devices in loaded], request["seconds"])
    inputs = input_sets(module, request["seed"], RUNS)
    narrowest, versions = narrowest_float(xla.element_types(module)), new_versions(module)

    def run(program: int, arrays: list[list[Any]]) -> Runs:
        results = [xla.execute(*loaded[program], one, shapes) for one in arrays]
        return Runs(results, {k: [arrays[0][number] for number in numbers] for k, numbers in versions.items()})

    shaken = run(0, [shake(one, narrowest, request["seed"]) for one in inputs])
    errors = result_errors([type_name(*kind) for kind in types], narrowest, run(0, inputs), shaken, run(1, inputs))
    names = [type_name(*kind) for kind in result_types(given)]
    return {"errors": [asdict(error) | {"type": name} for error, name in zip(errors, names, strict=True)]}


def for_cpu(one: Any, other: Any) -> tuple[Any, Any]:
    """Both modules on f32 if they compute in a narrower type and can be widened, and without products that XLA:CPU
    lacks."""
    from toast_cli import xla
    from toast_cli.emit.dense_products import with_dense_products

    one, other = map(with_dense_products, (one, other))
    if not is_narrow(xla.element_types(one) | {element for _, element in result_types(one)}):
        return one, other
    first, second = widened(one), widened(other)
    if first is None or second is None:
        return one, other
    return xla.parse_module(one.context, first), xla.parse_module(other.context, second)


def result_types(module: Any) -> list[tuple[tuple[int, ...], str]]:
    """(shape, element type) of each result of `main`."""
    from toast_cli import xla

    return [xla.shape_and_element_type(kind) or ((), str(kind)) for kind in xla.main_function(module).type.results]


def type_name(shape: tuple[int, ...], element: str) -> str:
    """`f32[8,16]`."""
    return f"{element}[{','.join(map(str, shape))}]"


def refuse_large(executables: list[tuple[Any, int]], seconds: float) -> None:
    """Raises `ValueError` if running compiled programs on so many virtual devices needs more memory or time than
    available."""
    needed = flops = 0.0
    for executable, devices in executables:
        memory = executable.get_compiled_memory_stats()
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        needed = max(needed, devices * held)
        analysis = executable.cost_analysis()
        flops += RUNS * devices * max(float(analysis.get("flops", 0.0)), 0.0)
    free = free_bytes()
    if needed > _SHARE_OF_MEMORY * free:
        raise ValueError(f"running it takes {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free here")
    if flops / _FLOPS_PER_SECOND > seconds:
        raise ValueError(
            f"running it takes {flops:.1e} operations, some {flops / _FLOPS_PER_SECOND / 60:.0f} minutes here"
        )


def free_bytes() -> int:
    """Free memory without swapping; all memory if the system does not report it."""
    try:
        found = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def refuse_effects(module: Any) -> None:
    """Raises `ValueError` for a program that communicates with its host while it runs. An infeed would wait forever,
    and a file holds only the address of a Python callback, so calling it would crash the process."""
    from toast_cli import xla

    for operation in xla.operations_in(module):
        name = operation.name.partition(".")[2]
        if name in TRANSFERS:
            raise ValueError(f"the program has {name} operations, which wait for a host")
        if name == "custom_call":
            target = bytes(xla.ir.StringAttr(operation.attributes["call_target_name"]).value_bytes).lower()
            if any(word in target for word in CALLBACKS):
                raise ValueError("the program calls back into Python, which its file does not hold")


def own_devices(module: Any) -> int:
    """Number of devices that an unpartitioned program needs: one, or the size of its manual regions' mesh."""
    from toast_cli import xla

    if not xla.walk_ops(module, "sdy.manual_computation"):
        return 1
    meshes = [str(mesh.attributes["mesh"]) for mesh in xla.walk_ops(module, "sdy.mesh")]
    return max(prod(int(size) for size in re.findall(r"=(\d+)", mesh)) for mesh in meshes)


def widened(module: Any) -> str | None:
    """Text of the module with every floating-point type below 32 bits replaced by f32; the module stays as it is. None
    if that changes the program, because it reads the bits of a narrow number."""
    for cast in xla.walk_ops(module, _BITS):
        kinds = [xla.shape_and_element_type(value.type) for value in (cast.operands[0], cast.results[0])]
        if any(kind is not None and re.fullmatch(_NARROW, kind[1]) for kind in kinds):
            return None
    text = module.operation.get_asm(enable_debug_info=False)
    return _NOTHING.sub(r"\1 \2", _TYPE.sub(r"\1f32", _CONSTANT.sub(_wide_constant, text)))


def is_narrow(elements: set[str]) -> bool:
    """True if some element type, as MLIR prints it, is widened."""
    return any(re.fullmatch(_NARROW, element) for element in elements)


def _wide_constant(found: re.Match[str]) -> str:
    """Rewrites a constant that is written as bits (a long list, infinities) to the bits of f32;
    others stay as printed."""
    numbers, shape, element = found.groups()
    narrow = _dtype(element)
    if numbers.startswith('"'):
        wide = np.frombuffer(bytes.fromhex(numbers[3:-1]), narrow).astype(np.float32)
        numbers = f'"0x{wide.tobytes().hex().upper()}"'
    else:
        numbers = _HEX.sub(lambda bits: _wide_bits(bits[0], narrow), numbers)
    return f"dense<{numbers}>{shape}f32>"


def _wide_bits(bits: str, narrow: np.dtype[Any]) -> str:
    raw = int(bits, 16).to_bytes(narrow.itemsize, "little")
    return f"0x{int(np.frombuffer(raw, narrow).astype(np.float32).view(np.uint32)[0]):08X}"


def _dtype(element: str) -> np.dtype[Any]:
    import ml_dtypes

    names = {"bf16": "bfloat16", "f16": "float16"}
    name = names.get(element) or f"float{element[1]}_{element[2:].lower()}"
    return np.dtype(getattr(ml_dtypes, name, name))
