"""Late reductions: the result of a collective reduction lives until its readers in program order, because reductions
are combined and scheduled late.

A gradient's all-reduce is combined with others, so that its buffer lives until the last reader in program order, even
if the scheduler could run that earlier (seen in schedules of libtpu 0.0.42.1, fitted to the fit programs of
benchmarks/data/memory.jsonl). Without this pass it lives until its readers run as scheduled.

Enters: the lives of values, and the readers of a reduced value. Leaves: when the value is last needed.
"""

from __future__ import annotations

from toast_cli.compiler.liveness import Lives
from toast_cli.compiler.profile import CompilerProfile

NAME = "late-reductions"


def deaths(lives: Lives, profile: CompilerProfile) -> list[int]:
    """[ops] last half step at which an op needs operands that are results of collective reductions."""
    return lives.program_deaths if NAME in profile.passes else lives.deaths
