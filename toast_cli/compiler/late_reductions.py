"""Late reductions: what a reduction leaves waits for its readers where the program has them, because reductions are
combined and not hurried.

A gradient's all-reduce is joined with others, so that its buffer is there until the last reader in program order,
whenever the scheduler could have had that run (seen in schedules of libtpu 0.0.42.1, fitted to the fit programs of
benchmarks/data/memory.jsonl). Without this pass it is there until its readers run as they are scheduled.

Enters: what is known of lives, and the readers of a reduced value. Leaves: until when the value is needed.
"""

from __future__ import annotations

from toast_cli.compiler.liveness import Lives
from toast_cli.compiler.profile import CompilerProfile

NAME = "late-reductions"


def deaths(lives: Lives, profile: CompilerProfile) -> list[int]:
    """[ops] last half step at which an op needs operands that are results of collective reductions."""
    return lives.program_deaths if NAME in profile.passes else lives.deaths
