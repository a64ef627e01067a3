"""Which of XLA's compilers judges a program: the chips' own where it is asked for, or is installed and can compile for
them; else the partitioner on virtual CPU devices, and what that leaves unasked.
"""

from __future__ import annotations

from dataclasses import dataclass

from toast_cli.errors import MissingExtraError, UsageError
from toast_cli.hardware import Spec
from toast_cli.verify.ahead import CompilationTarget, target_of


@dataclass(frozen=True)
class Judge:
    """target: the machine to compile for; None for virtual CPU devices. unasked: of those, how the chips' own compiler
    is asked, or why it cannot be; empty where the chips are not known. by_name: the user chose this compiler."""

    target: CompilationTarget | None = None
    unasked: str = ""
    by_name: bool = False


def choose_judge(spec: Spec | None, asked: str | None, option: str) -> Judge:
    """The judge of a program for this machine.

    Args:
        spec: None where the machine is not known. asked: "cpu" or the platform of `spec`; None for the default.
        option: with which a compiler is asked for.

    Raises `MissingExtraError` or `UsageError` where the chips' own compiler is asked for, and cannot compile for them.
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
