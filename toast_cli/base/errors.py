"""The errors that a user may see: each has a place, a description, and a hint.

Only `toast_cli.cli` turns these into an exit code (2). A program that does not fit in memory is a result, not an error.
"""

from __future__ import annotations


class ToastError(Exception):
    """The user's input is wrong.

    Args:
        what: one sentence, no trailing full stop.
        where: file, or file:line:column, or an option's name; empty if there is no better place.
        hint: what to try instead; empty if there is no useful hint.
    """

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what = what
        self.where = where
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}; {self.hint}" if self.hint else text


class InputError(ToastError):
    """The program cannot be read: unreadable, empty, of an unknown format, or with dynamic shapes."""


class SpecError(ToastError):
    """The mesh specification is invalid, or asks for a mesh the topology does not have."""


class UsageError(ToastError):
    """Options that contradict each other, or a value outside its range."""


class MissingExtraError(ToastError):
    """A feature needs a package that is not installed, or is installed in a version that lacks what it needs."""
