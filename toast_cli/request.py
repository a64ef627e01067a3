"""`Request`: what a user asks of a run. Every option is declared here, and only here, and read from what users write.

The command line, the Python interface and sweeps derive from these declarations: names, help texts, defaults, and how a
value is read. Nothing heavy is imported, so that `toast --help` is instant.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from enum import Enum, StrEnum
from typing import Any, TypeVar

from toast_cli.base.errors import UsageError
from toast_cli.base.files import read_whole_number as read_number
from toast_cli.base.units import parse_bytes, parse_seconds
from toast_cli.plan.decisions import parse_goal
from toast_cli.program.model import Offload as Offload
from toast_cli.program.model import Recompute as Recompute

Words = TypeVar("Words", bound=StrEnum)


class Effort(StrEnum):
    """Levels of effort: how many plans a search evaluates."""

    medium = "medium"
    high = "high"


class CompilerName(StrEnum):
    """The compilers that can check a plan."""

    cpu = "cpu"
    tpu = "tpu"
    gpu = "gpu"


# `Request.confirm`: the chip's compiler, where it is installed, checks a plan that does not surely fit.
AUTO = -1


class Fit(StrEnum):
    """When the program is rewritten: never, if no plan fits, or also if that makes it faster."""

    as_written = "as-written"
    auto = "auto"
    fastest = "fastest"


class OptionKind(Enum):
    """The types of options besides the words above."""

    TEXT = "text"
    TEXTS = "several texts"
    FLAG = "flag"
    WHOLE = "whole number"
    PLANS = "auto or a whole number"
    BYTES = "bytes"
    SECONDS = "seconds"


@dataclass(frozen=True)
class Option:
    """One option of a run.

    Attributes:
        flag: on the command line; without its dashes the option's key. help, metavar: for `--help`. also: another
            spelling of the flag. least: the smallest whole number.
    """

    flag: str
    kind: OptionKind | type[StrEnum]
    help: str
    metavar: str = ""
    least: int = 0
    also: str = ""

    @property
    def key(self) -> str:
        return self.flag.removeprefix("--")


def _option(
    default: object, flag: str, kind: OptionKind | type[StrEnum], help: str, metavar: str = "", **more: Any
) -> Any:
    return field(default=default, metadata={"option": Option(flag, kind, help, metavar, **more)})


@dataclass(frozen=True)
class Request:
    """A user's request. `content` is the program's bytes if it is not in a file; `parted`: True to split fused
    products, False not to (None: the better of both)."""

    program: str
    mesh: str
    mesh_shape: str | None = _option(
        None,
        "--mesh-shape",
        OptionKind.TEXT,
        "Mesh axes and their sizes, e.g. data=8,model=2; auto: try all shapes (default: as in SPEC, or for a machine "
        "that is named, the better of its axes and of one axis).",
        "SHAPE",
    )
    dims: tuple[str, ...] = _option(
        (),
        "--dim",
        OptionKind.TEXTS,
        "The size of a symbolic dimension, e.g. b=256, in a jax.export file with symbolic shapes (`toast inspect` "
        "lists them); b=max: the largest power of two that surely fits and keeps each --subject-to, without changes to "
        "the program; b=64..4096*2 or b=64..4096+64: the largest of these; repeatable.",
        "NAME=SIZE",
    )
    prices: tuple[str, ...] = _option(
        (),
        "--price",
        OptionKind.TEXTS,
        "What a chip costs an hour, e.g. v5p=4.2, in any currency (default: `price` in SPEC), for the price of a step "
        "and of a million tokens; repeatable.",
        "CHIP=PRICE",
    )
    budget_seconds: float | None = _option(
        None,
        "--budget",
        OptionKind.SECONDS,
        "Stop the search after this time, e.g. 10 or 500ms (default: as --effort says).",
        "SECONDS",
    )
    effort: str = _option(
        Effort.medium.value,
        "--effort",
        Effort,
        "How many plans the search looks at, at most: 2000 or 10000; fewer if little better turns up.",
    )
    iterations: int | None = _option(
        None,
        "--iterations",
        OptionKind.WHOLE,
        "Stop the search after N plans (default: as --effort says); unlike --budget, this gives the same plan on any "
        "machine.",
        "N",
        least=1,
    )
    seed: int = _option(0, "--seed", OptionKind.WHOLE, "Seed of the search's random choices.", "N")
    memory_limit: int | None = _option(
        None,
        "--memory-limit",
        OptionKind.BYTES,
        "Memory that a plan may use per device, e.g. 28GiB (default: as in SPEC).",
        "BYTES",
    )
    keep_shardings: bool = _option(
        False,
        "--keep-shardings",
        OptionKind.FLAG,
        "Keep the shardings that the program already has; without this they are dropped.",
    )
    pins: tuple[str, ...] = _option(
        (),
        "--pin",
        OptionKind.TEXTS,
        "Fix the sharding of arguments, e.g. 'params/layers/*/wq=data,None' or '*embed*=?,model'. PATTERN is a path as "
        "reports show it, * stands for any text; AXES has one entry per dimension, separated by commas: a mesh axis, "
        "a+b for two of them, None for none (replicated), ? to leave it to toast. Repeatable.",
        "PATTERN=AXES",
    )
    kernels: str | None = _option(
        None,
        "--kernels",
        OptionKind.TEXT,
        "What hand-written kernels do: a YAML file with each one's name, sharding rule and flops, where toast cannot "
        "read them itself.",
        "FILE",
    )
    runs: tuple[str, ...] = _option(
        (),
        "--runs",
        OptionKind.TEXTS,
        "How often what depends on data runs: trips of a loop, 'model.py:12*=37', or each branch of a conditional "
        "compared with the others, 'model.py:20*=9,1' (first the branch for 0 or false). PLACE is a place as reports "
        "show it, * stands for any text; repeatable.",
        "PLACE=NUMBERS",
    )
    names: tuple[str, ...] = _option(
        (),
        "--names",
        OptionKind.TEXTS,
        "Names for the dimensions of arguments, e.g. '*kernel=embed,mlp', for reports and tactics; repeatable.",
        "PATTERN=NAMES",
    )
    minimise: tuple[str, ...] = _option(
        (),
        "--minimise",
        OptionKind.TEXTS,
        "What to minimise: step_time (default), peak_memory, communication, communication[AXIS], compute or "
        "argument_memory; given twice, the second decides between plans that are equal in the first.",
        "METRIC",
        also="--minimize",
    )
    subject_to: tuple[str, ...] = _option(
        (),
        "--subject-to",
        OptionKind.TEXTS,
        "A limit that the plan must keep, e.g. 'peak_memory<=24GiB' or 'communication[data]<=20ms'; repeatable.",
        "BOUND",
    )
    tactics: tuple[str, ...] = _option(
        (),
        "--tactic",
        OptionKind.TEXTS,
        "Fix a part of the plan, e.g. fsdp:data, and search for the rest (`toast tactics` lists them; "
        "FILE:NAME:AXIS for your own; search:AXIS lets the search use that axis only); repeatable.",
        "NAME:AXIS",
    )
    strategy: str | None = _option(
        None,
        "--strategy",
        OptionKind.TEXT,
        "Do not search: take a known strategy, e.g. fsdp+megatron or fsdp:data+megatron:model.",
        "NAME",
    )
    pipeline: str | None = _option(
        None,
        "--pipeline",
        OptionKind.TEXT,
        "Also price a pipeline: a number of stages, or the mesh axis that they are on, and the microbatches after a "
        "colon, e.g. 4, 4:16 or slice:16; -o FOLDER/ writes its programs.",
        "STAGES",
    )
    stages_written: bool = False  # a pipeline of the kind that is written, whose programs follow
    content: bytes | None = field(default=None, repr=False)
    parted: bool | None = None
    best: int = 1  # plans that the caller takes from those of the search
    plan: str | None = _option(
        None,
        "--plan",
        OptionKind.TEXT,
        "Do not search: take the plan that --save-plan wrote, as far as it applies to this program.",
        "FILE",
    )
    complete: bool = _option(
        False,
        "--complete",
        OptionKind.FLAG,
        "Let the search add decisions to those of --plan.",
    )
    confirm: int = _option(
        0,
        "--confirm",
        OptionKind.PLANS,
        "Let the chip's compiler judge plans: none (0), whether the chosen one fits (1), or which of the N best "
        "distinct plans and the known strategies is best; auto: as 1, where it is installed and the plan may not fit.",
        "auto|N",
    )
    confirm_with: str | None = _option(
        None,
        "--confirm-with",
        CompilerName,
        "Which compiler --confirm asks (default: the chip's; cpu: only XLA's partitioner, in seconds).",
    )
    confirm_seconds: float | None = _option(
        None,
        "--confirm-budget",
        OptionKind.SECONDS,
        "Stop --confirm's compilations after this time, e.g. 10min.",
        "TIME",
    )
    as_written: bool = _option(
        False,
        "--as-written",
        OptionKind.FLAG,
        "Do not split fused projections, such as QKV and gate+up (--fit as-written differs).",
    )
    fit: str = _option(
        Fit.auto.value,
        "--fit",
        Fit,
        "Where no plan surely fits in memory: stop (as-written), or recompute activations, use microbatches and "
        "offload residuals (auto); fastest: also save matrix products that it recomputes, where there is room.",
    )
    microbatches: int | None = _option(
        None,
        "--microbatches",
        OptionKind.WHOLE,
        "Run the batch in N microbatches one after the other, and add up their gradients.",
        "N",
        least=1,
    )

    recompute: str | None = _option(
        None,
        "--recompute",
        Recompute,
        "What the backward pass recomputes of layers: everything, all but products, or all but products with weights.",
    )

    offload: str | None = _option(
        None,
        "--offload",
        Offload,
        "What to offload to host memory while it is not needed: residuals (saved by a scan over layers), optimizer "
        "state, or both.",
    )


# Field of `Request` -> its declaration.
OPTIONS: dict[str, Option] = {f.name: f.metadata["option"] for f in fields(Request) if "option" in f.metadata}
DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(Request) if f.name in OPTIONS}


# ---------------------------------------------------------------- values
# Makes a `Request` of options as users write them, on the command line and in Python.

WITH_OPTION = "--with"


def parse_with(text: str) -> tuple[str, int]:
    """`decode.mlir:64` -> the program and how often it runs for one run of the first; once without a number."""
    path, colon, number = text.rpartition(":")
    if not colon or not number.removeprefix("-").isdigit():
        return text, 1
    runs = read_number(number)
    if not runs or not path:
        raise UsageError(f'"{text:.60}" runs {number} times', where=WITH_OPTION, hint="write e.g. decode.mlir:64")
    return path, runs


def make_request(program: str, mesh: str, given: Mapping[str, Any]) -> Request:
    """The request that options ask for.

    Args:
        given: values by the names of options, `memory_limit` or `memory-limit`, as they were written; None where one
            was not given. Names that belong to no option of a run are passed over, so a command can hand over all of
            its parameters.

    Raises UsageError for values that cannot be read, and for options that do not go together.
    """
    written = {name.replace("_", "-"): value for name, value in given.items() if value is not None}
    request = Request(
        program,
        mesh,
        **{name: _read(option, written[option.key]) for name, option in OPTIONS.items() if option.key in written},
    )
    if request.complete and request.plan is None:
        raise UsageError("--complete adds to a saved plan", hint="give that with --plan FILE")
    if request.plan is not None and (request.tactics or request.strategy):
        raise UsageError("is a plan already", where="--plan", hint="give it without --tactic and --strategy")
    if request.confirm <= 0 and (request.confirm_with is not None or request.confirm_seconds is not None):
        raise UsageError(
            "there is nothing to confirm",
            where="--confirm-with" if request.confirm_with is not None else "--confirm-budget",
            hint="say with --confirm N how many plans to compile",
        )
    parse_goal(request.minimise, request.subject_to)  # raises for errors that do not depend on the program
    return request


def request_of_keywords(program: str, mesh: str, keywords: Mapping[str, Any]) -> Request:
    """The request that keyword arguments of `toast.partition` ask for: the fields of `Request`, with values as the
    command line takes them, or of Python's own types.

    Raises UsageError for other names, too.
    """
    for name in keywords.keys() - OPTIONS.keys():
        flags = {option.key.replace("-", "_"): field for field, option in OPTIONS.items()}
        near = [flags[name]] if name in flags else get_close_matches(name, OPTIONS, n=1)
        guess = f'did you mean "{near[0]}"? ' if near else ""
        raise UsageError(f'unknown option "{name}"', where="toast", hint=f"{guess}choose from {', '.join(OPTIONS)}")
    return make_request(program, mesh, {OPTIONS[name].key: value for name, value in keywords.items()})


def _read(option: Option, value: Any) -> Any:
    """Converts a value to the type in `Request`. Raises UsageError at the option's flag."""
    if isinstance(value, Mapping):  # in Python: mesh_shape={"data": 8}, dims={"b": 256}
        pairs = [f"{name}={size}" for name, size in value.items()]
        value = ",".join(pairs) if option.kind is OptionKind.TEXT else pairs
    others: Any = str if isinstance(option.kind, type) else object
    types: dict[Any, Any] = {OptionKind.TEXT: str | os.PathLike, OptionKind.TEXTS: Iterable, OptionKind.FLAG: bool}
    if not isinstance(value, types.get(option.kind, others)):
        raise UsageError(f"takes no {type(value).__name__}: {value!r:.60}", where=option.flag, hint="give text")
    match option.kind:
        case OptionKind.TEXT:
            return os.fspath(value)
        case OptionKind.TEXTS:
            return (value,) if isinstance(value, str) else tuple(value)
        case OptionKind.PLANS if value == "auto":
            return AUTO
        case OptionKind.WHOLE | OptionKind.PLANS:
            return whole_number(option.least, option.flag)(value)
        case OptionKind.BYTES:
            return bytes_or_none(value, option.flag)
        case OptionKind.SECONDS:
            return seconds_or_none(value, option.flag)
        case type() as kind:
            return one_of(kind, option.flag)(value).value
        case _:
            return value


def one_of(kind: type[Words], option: str) -> Callable[[str], Words]:
    """A parser of words of `kind`; other words are a UsageError at `option`.

    It avoids the option parser's own messages, which vary between its versions.
    """

    def read(text: str) -> Words:
        words = [member.value for member in kind]
        if text in words:
            return kind(text)
        near = get_close_matches(text.lower(), words, n=1)
        guess = f'did you mean "{near[0]}"? ' if near else ""
        raise UsageError(f'unknown word "{text}"', where=option, hint=f"{guess}choose from {', '.join(words)}")

    return read


def whole_number(least: int, option: str) -> Callable[[str | int], int]:
    """A parser of integers of at least `least`; anything else is a UsageError at `option`."""

    def read(text: str | int) -> int:
        written = str(text).strip()
        number = read_number(written.removeprefix("-"))
        if number is None:
            raise UsageError(f'"{written:.40}" is not a whole number', where=option, hint=f"give {least} or more")
        number = -number if written.startswith("-") else number
        if number < least:
            raise UsageError(f"{number} is too small", where=option, hint=f"give {least} or more")
        return number

    return read


def bytes_or_none(text: str | int | None, option: str) -> int | None:
    """Bytes from `28GiB`; None for an option that was not given."""
    return None if text is None else parse_bytes(text, where=option)


def seconds_or_none(text: str | float | None, option: str) -> float | None:
    """Positive seconds from `120ms`, `1.5s` or a bare number; None for an option that was not given."""
    if text is None:
        return None
    seconds = parse_seconds(text, where=option)
    if seconds <= 0:
        raise UsageError(f"{text} is not a time above 0", where=option, hint="give more than 0 seconds, e.g. 120ms")
    return seconds
