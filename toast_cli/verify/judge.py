"""Chooses the XLA compiler that checks a program: the chips' own if the user asks for it, or if it is installed and can
compile for them; else the partitioner on virtual CPU devices, with a note on how to use the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from toast_cli.errors import MissingExtraError, UsageError
from toast_cli.hardware import Spec
from toast_cli.verify.ahead import CompilationTarget, target_of


@dataclass(frozen=True)
class Judge:
    """target: the machine to compile for; None for virtual CPU devices. unasked: for those, how to use the chips' own
    compiler, or why it cannot be used; empty if the chips are unknown. by_name: the user chose this compiler."""

    target: CompilationTarget | None = None
    unasked: str = ""
    by_name: bool = False


def choose_judge(spec: Spec | None, asked: str | None, option: str) -> Judge:
    """The compiler that checks a program for this machine.

    Args:
        spec: None if the machine is unknown. asked: "cpu" or the platform of `spec`; None for the default.
        option: the command-line option that selects a compiler.

    Raises `MissingExtraError` or `UsageError` if the user asks for the chips' own compiler and it cannot be used.
    """
    if spec is None:
        return Judge(by_name=asked is not None)
    platform = spec.chip.platform
    try:
        target = target_of(spec)
    except (MissingExtraError, UsageError) as error:
        if asked == platform:
            raise
        missing = isinstance(error, MissingExtraError)
        return Judge(None, f"{option} {platform} asks the real one" if missing else error.what, asked is not None)
    if asked == "cpu":
        return Judge(None, f"{option} {platform} asks the real one", True)
    return Judge(target, "", asked is not None)
