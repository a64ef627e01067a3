"""Options that several commands share, and what they make together: a `Request` to the pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from toast_cli.cli.values import (
    Compiler,
    FrameChoice,
    Search,
    bytes_or_none,
    metavar,
    one_of,
    seconds_or_none,
    whole_number,
)
from toast_cli.errors import UsageError

if TYPE_CHECKING:
    from toast_cli.pipeline import Request


def complete_spec(incomplete: str) -> list[str]:
    """For shells: ready specifications, and YAML files and folders, that begin so."""
    from glob import escape
    from pathlib import Path

    from toast_cli.hardware import available_specs

    folder = incomplete[: incomplete.rfind("/") + 1]
    found = Path(folder or ".").glob(f"{escape(incomplete.removeprefix(folder))}*")
    files = [f"{folder}{path.name}{'/' * path.is_dir()}" for path in found if path.is_dir() or path.suffix == ".yaml"]
    shown = [name for name in files if not name.removeprefix(folder).startswith(".")]
    return [*(name for name in available_specs() if name.startswith(incomplete)), *sorted(shown)]


Program = Annotated[
    str, typer.Argument(metavar="PROGRAM", help="StableHLO or HLO program, also .gz or .zst; - reads it from stdin.")
]
MeshSpec = Annotated[
    str,
    typer.Option(
        "--mesh",
        metavar="SPEC",
        autocompletion=complete_spec,
        help="Hardware: a name from `toast mesh list`, or a YAML file.",
    ),
]
MeshShape = Annotated[
    str | None,
    typer.Option(
        metavar="SHAPE", help="Mesh axes and sizes, e.g. data=8,model=2; auto tries all (default: the SPEC's)."
    ),
]
SearchName = Annotated[
    Search,
    typer.Option(
        "--search", parser=one_of(Search, "--search"), metavar=metavar(Search), help="How to look for a plan."
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        metavar="SECONDS", help="Stop the search after this time, e.g. 10 or 500ms (default: by --iterations)."
    ),
]
Iterations = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole_number(1, "--iterations"),
        help="Stop the search after N plans; gives the same plan on any machine.",
    ),
]
Seed = Annotated[int, typer.Option(metavar="N", parser=whole_number(0, "--seed"), help="Seed of the search.")]
MemoryLimit = Annotated[
    str | None,
    typer.Option(metavar="BYTES", help="Memory a plan may use per device, e.g. 28GiB (default: the SPEC's)."),
]
KeepShardings = Annotated[
    bool, typer.Option("--keep-shardings", help="Keep the shardings already in the program as constraints.")
]
Pins = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="PATTERN=AXES",
        help="Fix arguments' shardings, e.g. '*wq*=data,None'; ? leaves a dimension open; repeatable.",
    ),
]
Minimise = Annotated[
    list[str] | None,
    typer.Option(
        "--minimise",
        "--minimize",
        metavar="FIGURE",
        help="What to make small: step_time (default), peak_memory, communication, communication[AXIS], compute or "
        "argument_memory; repeated, the next one decides between plans equal in the first.",
    ),
]
SubjectTo = Annotated[
    list[str] | None,
    typer.Option(
        "--subject-to",
        metavar="BOUND",
        help="What a plan must keep, e.g. 'peak_memory<=24GiB' or 'communication[data]<=20ms'; repeatable.",
    ),
]
Tactics = Annotated[
    list[str] | None,
    typer.Option(
        "--tactic",
        metavar="NAME:AXIS",
        help="Fix what a tactic decides, e.g. fsdp:data (`toast tactics` lists them; FILE:NAME:AXIS for your own); "
        "the search completes the plan, with search:AXIS on that axis only; repeatable.",
    ),
]
Strategy = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        metavar="NAME",
        help="Take a whole plan made of tactics instead of searching, e.g. fsdp+megatron or fsdp:data+megatron:model.",
    ),
]
Certify = Annotated[
    bool, typer.Option("--certify", help="Prove how much faster any plan could be, at most; takes up to 20 seconds.")
]
Jobs = Annotated[int, typer.Option(metavar="N", parser=whole_number(1, "--jobs"), help="Search processes.")]
SavedPlan = Annotated[
    str | None,
    typer.Option(
        "--plan", metavar="FILE", help="Take the plan saved with --save-plan, as far as it suits, unsearched."
    ),
]
Complete = Annotated[bool, typer.Option("--complete", help="Let the search add to --plan's decisions.")]
Frames = Annotated[
    FrameChoice,
    typer.Option(
        "--frames",
        parser=one_of(FrameChoice, "--frames"),
        metavar=metavar(FrameChoice),
        help="Places in the source: your own line (what installed packages do is shown as what it calls), "
        "or all frames.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Say it in one line.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Say all there is to say; tracebacks for internal errors.")]


Confirm = Annotated[
    int,
    typer.Option(
        "--confirm",
        parser=whole_number(0, "--confirm"),
        metavar="N",
        help="Compile the N best plans and the strategies that apply, and take the best by the compiler's figures.",
    ),
]
ConfirmWith = Annotated[
    Compiler | None,
    typer.Option(
        "--confirm-with",
        parser=one_of(Compiler, "--confirm-with"),
        metavar=metavar(Compiler),
        help="Whose compiler to ask (default: that of the chip; cpu: XLA's partitioner alone, in seconds).",
    ),
]
ConfirmBudget = Annotated[
    str | None,
    typer.Option("--confirm-budget", metavar="TIME", help="Start no compilation after so long, e.g. 10min."),
]


def make_request(
    program: str,
    mesh: str,
    *,
    mesh_shape: str | None,
    search: Search,
    budget: str | None,
    iterations: int | None,
    seed: int,
    memory_limit: str | None,
    keep_shardings: bool,
    pins: list[str] | None,
    jobs: int = 1,
    minimise: list[str] | None = None,
    subject_to: list[str] | None = None,
    certify: bool = False,
    tactics: list[str] | None = None,
    strategy: str | None = None,
    plan: str | None = None,
    complete: bool = False,
    frames: FrameChoice = FrameChoice.user,
    confirm: int = 0,
    confirm_with: Compiler | None = None,
    confirm_budget: str | None = None,
) -> Request:
    """The request these options ask for. Raises UsageError for quantities that do not parse."""
    from toast_cli.pipeline import Request
    from toast_cli.plan.goal import parse_goal

    if complete and plan is None:
        raise UsageError("--complete adds to a saved plan", hint="give that with --plan FILE")
    if plan is not None and (tactics or strategy):
        raise UsageError("is a plan already", where="--plan", hint="give it without --tactic and --strategy")
    if confirm == 0 and (confirm_with is not None or confirm_budget is not None):
        raise UsageError(
            "there is nothing to confirm",
            where="--confirm-with" if confirm_with is not None else "--confirm-budget",
            hint="say with --confirm N how many plans to compile",
        )
    parse_goal(minimise or (), subject_to or ())  # what is wrong with them is wrong with every program
    return Request(
        program=program,
        mesh=mesh,
        mesh_shape=mesh_shape,
        search=search.value,
        budget_seconds=seconds_or_none(budget, "--budget"),
        iterations=iterations,
        seed=seed,
        jobs=jobs,
        memory_limit=bytes_or_none(memory_limit, "--memory-limit"),
        keep_shardings=keep_shardings,
        pins=tuple(pins or ()),
        minimise=tuple(minimise or ()),
        subject_to=tuple(subject_to or ()),
        certify=certify,
        tactics=tuple(tactics or ()),
        strategy=strategy,
        plan=plan,
        complete=complete,
        frames=frames.value,
        confirm=confirm,
        confirm_with=confirm_with.value if confirm_with is not None else None,
        confirm_seconds=seconds_or_none(confirm_budget, "--confirm-budget"),
    )


def refuse_both(quiet: bool, verbose: bool) -> None:
    if quiet and verbose:
        raise UsageError("both --quiet and --verbose are given", hint="choose one")
