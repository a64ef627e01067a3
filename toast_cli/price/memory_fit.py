"""Whether a plan fits in memory, which only this module decides: a predicted peak, the limit and the error of such
predictions go in; "yes", "unsure" or "no" comes out.

A plan surely fits if it does even where the compiler needs more than is predicted, by the error. It may not fit if the
limit is within that error, and it does not fit if the predicted peak exceeds the limit.
"""

from __future__ import annotations

from collections.abc import Callable

from toast_cli.hardware import Mesh
from toast_cli.program.model import Op, Program, once
from toast_cli.program.ops import FFT

YES, UNSURE, NO = "yes", "unsure", "no"
# A plan that may not fit is taken only if every plan and rewrite that surely fits has a longer step by this fraction.
RISK = 0.10

# Kinds of programs, the first that applies counts: by which fraction the compiler needs at most more than is predicted,
# in nine of ten plans of programs that no rule was read from (benchmarks/data: real.jsonl, memory.jsonl, gpu.jsonl).
# A plan near the limit has a peak of about the limit, which therefore stands for the size of the program.
PEAK_ERRORS: tuple[tuple[str, Callable[[Program, Mesh], bool], float], ...] = (
    ("unmeasured", lambda program, mesh: not mesh.chip.preset or any(map(_unmeasured, program.ops)), 0.25),
    (
        "convolutions: 81 plans of 8 programs",
        lambda program, mesh: any(op.kind.convolution for op in program.ops),
        0.25,
    ),
    ("small: 217 plans of 30 programs", lambda program, mesh: mesh.limit_bytes < 2 * 2**30, 0.20),
    ("on GPUs: 48 plans of 21 programs", lambda program, mesh: mesh.chip.platform == "gpu", 0.12),
    ("on TPUs: 93 plans of 19 programs", lambda program, mesh: True, 0.07),
)


@once
def peak_error(program: Program, mesh: Mesh) -> float:
    """The relative error of predicted peaks of this kind of program."""
    return next(error for _, applies, error in PEAK_ERRORS if applies(program, mesh))


def _unmeasured(op: Op) -> bool:
    return op.name == FFT or (op.opaque and op.kernel is None)


def surely_fitting_bytes(program: Program, mesh: Mesh) -> float:
    """The largest predicted peak that surely fits."""
    return mesh.limit_bytes / (1.0 + peak_error(program, mesh))


def fit_of(peak_bytes: float, limit_bytes: float, error: float) -> str:
    """The fit of a predicted peak with a relative `error`: "yes", "unsure" or "no"."""
    if peak_bytes > limit_bytes:
        return NO
    return YES if peak_bytes * (1.0 + error) <= limit_bytes else UNSURE
