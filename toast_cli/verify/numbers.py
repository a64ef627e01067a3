"""The partitioned program against the original: same random inputs, equal results.

Enters: the bytes of both. Leaves: the largest error of each result, relative to the largest number in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toast_cli.verify.child import Failure, ask
from toast_cli.verify.compile import Form, as_stablehlo

ORIGINAL, PARTITIONED = "original", "partitioned"
# Relative error that reordering sums may cause, by the narrowest floating-point type a program computes in.
TOLERANCES = {"f64": 1e-9, "f32": 2e-4, "bf16": 4e-2, "f16": 1e-2}


@dataclass(frozen=True)
class ResultError:
    """One result: its type (`f32[8,16]`), and the largest difference over the largest absolute value in it (0: equal, inf: NaN in one only)."""

    index: int
    type: str
    error: float


def compare_numbers(
    original: bytes,
    partitioned: bytes,
    devices: int,
    seed: int = 0,
    *,
    form: Form = "stablehlo",
    shardy: bool = True,
    timeout_seconds: float = 600.0,
) -> list[ResultError] | Failure:
    """Runs `original` (StableHLO) on one virtual CPU device and `partitioned` (of `form`) on `devices`, in a child process."""
    request = {"form": form, "devices": devices, "shardy": shardy, "seed": seed}
    files = {ORIGINAL: original, PARTITIONED: partitioned}
    answer = ask("numbers", request, files, timeout_seconds=timeout_seconds)
    if isinstance(answer, Failure):
        return answer
    return [ResultError(**error) for error in answer.facts["errors"]]


# -- in the child -----------------------------------------------------------------------------------------------------


def numbers_task(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Runs both programs and compares."""
    from toast_cli import xla
    from toast_cli.verify.inputs import random_inputs

    original = (folder / ORIGINAL).read_bytes()
    module = xla.parse_module(xla.make_context(), original)
    refuse_callbacks(module)
    inputs = random_inputs(module, request["seed"])
    kinds = list(xla.main_function(module).type.results)
    types = [xla.shape_and_element_type(kind) or ((), str(kind)) for kind in kinds]
    shapes = [shape for shape, _ in types]
    whole = xla.run_program(original, inputs, shapes, own_devices(module), shardy=True)
    partitioned = as_stablehlo((folder / PARTITIONED).read_bytes(), request["form"])
    split = xla.run_program(partitioned, inputs, shapes, request["devices"], shardy=request["shardy"])
    errors = [
        {"index": k, "type": f"{element}[{','.join(map(str, shape))}]", "error": relative_error(a, b)}
        for k, ((shape, element), a, b) in enumerate(zip(types, whole, split, strict=True))
    ]
    return {"errors": errors}


def refuse_callbacks(module: Any) -> None:
    """A file holds the address of a Python callback, not the callback; calling it ends the process. Raises `ValueError`."""
    from toast_cli import xla

    for call in xla.walk_ops(module, "stablehlo.custom_call"):
        if "python" in call.attributes["call_target_name"].value:
            raise ValueError("the program calls back into Python, which its file does not hold")


def own_devices(module: Any) -> int:
    """How many devices a program needs as it stands: one, or as many as its manual regions were written for."""
    from toast_cli import xla

    if not xla.walk_ops(module, "sdy.manual_computation"):
        return 1
    meshes = [str(mesh.attributes["mesh"]) for mesh in xla.walk_ops(module, "sdy.mesh")]
    return max(prod(int(size) for size in re.findall(r"=(\d+)", mesh)) for mesh in meshes)


def relative_error(expected: NDArray[Any], found: NDArray[Any]) -> float:
    """Largest difference over the largest finite absolute value; what is not finite must be so in both."""
    wide = np.complex128 if np.iscomplexobj(expected) else np.float64
    a, b = expected.astype(wide), found.astype(wide)
    finite = np.isfinite(a)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(b[finite]).all():
        return float("inf")
    if not finite.any():
        return 0.0
    scale = float(np.abs(a[finite]).max())
    return float(np.abs(a[finite] - b[finite]).max()) / (scale or 1.0)
