"""User-given names of argument dimensions: logical axis names as in Flax, MaxText and others.

In: a `Program`, and names as users give them (`PATTERN=embed,mlp`). Out: the program with these names on its
arguments.
"""

from __future__ import annotations

from dataclasses import replace

from toast_cli.errors import UsageError
from toast_cli.program.model import Program
from toast_cli.program.paths import matches, nearest_paths, shown_path, slash_path

_OPTION = "--names"


def with_dimension_names(program: Program, given: tuple[str, ...]) -> Program:
    """The program with these names on its arguments' dimensions; a later one overrides an earlier one.

    A pattern matches the arguments that it would match in `--pin`, and all whose path ends in it
    (`params/dense/kernel`). An entry `None`, `?` or nothing leaves a dimension unnamed. Raises `UsageError` for names
    that does not parse or matches nothing.
    """
    if not given:
        return program
    arguments = list(program.arguments)
    for text in given:
        pattern, names = parse_names(text)
        found = [
            k
            for k, a in enumerate(arguments)
            if matches(pattern, a.label, k) or f"/{slash_path(a.label)}".endswith(f"/{pattern}")
        ]
        if not found:
            nearest = nearest_paths(pattern, (a.label for a in arguments))
            raise UsageError(
                f"no argument matches {pattern!r}", where=_OPTION, hint=f"the nearest arguments are {nearest}"
            )
        for k in found:
            rank = len(program.values[arguments[k].value].shape)
            if len(names) > rank:
                name = shown_path(arguments[k].label, k)
                raise UsageError(
                    f"{text!r} names {len(names)} dimensions but matches {name} with {rank}",
                    where=_OPTION,
                    hint="match fewer arrays, or give fewer names",
                )
            arguments[k] = replace(arguments[k], dimension_names=names)
    return replace(program, arguments=tuple(arguments))


def parse_names(text: str) -> tuple[str, tuple[str, ...]]:
    """`PATTERN=embed,mlp` -> the pattern and the name of each dimension, "" for none."""
    pattern, sign, entries = text.rpartition("=")
    if not sign or not pattern:
        raise UsageError(
            f"cannot read {text!r}", where=_OPTION, hint=f"write {_OPTION} 'PATTERN=embed,mlp': one name per dimension"
        )
    names = (entry.strip() for entry in entries.split(","))
    return pattern, tuple("" if name in ("None", "?", "-") else name for name in names)
