"""`toast partition`: a program and a mesh in; the same program with shardings, and a report, out."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toast_cli.base.errors import UsageError
from toast_cli.base.files import (
    Format,
    Target,
    check_targets,
    extension_of,
    is_folder,
    output_format,
    program_name,
    write_folder,
    write_target,
)
from toast_cli.cli import options
from toast_cli.cli.options import Annotate
from toast_cli.cli.running import DOES_NOT_FIT, OK, progress_line, say, say_confirmed
from toast_cli.cli.verify import judge_of, verify_outcome
from toast_cli.request import WITH_OPTION, CompilerName, parse_with

if TYPE_CHECKING:
    from toast_cli.pipeline import Emitted, Outcome
    from toast_cli.report.model import Report


# What the formats without a program lack.
LEFT_OUT = (
    "shardings of arguments and results only, the compiler finds the others; -o FILE.mlir writes the whole plan instead"
)

# What each program's outputs end in, where several programs are written to folders.
ENDINGS = {"--json": ".json", "--save-plan": ".plan", "--html": ".html", "--trace": ".trace.json"}


@options.with_options(
    *options.CONFIRMING,
    *options.PLANNING,
    *options.REWRITING,
    *("strategy", "pipeline", "plan", "complete", "kernels", "names"),
    before="quiet",
    confirm="auto",
)
def partition(
    program: options.Program,
    mesh: options.MeshSpec,
    output: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--output",
            metavar="OUT",
            help="Write the sharded program here; - for stdout; a folder for the programs of --pipeline's stages.",
        ),
    ] = None,
    format: Annotated[
        Format | None,
        options.words(Format, "--format", "What to write (default: as OUT's extension says)."),
    ] = None,
    annotate: Annotated[
        Annotate | None,
        options.words(
            Annotate,
            "--annotate",
            "Which arrays between arguments and results are written with a sharding: as few as give this "
            "plan (minimal, the default), all, or none.",
        ),
    ] = None,
    json: Annotated[str | None, options.file("Write the report as JSON; - for stdout.")] = None,
    verify: Annotated[
        CompilerName | None,
        options.words(
            CompilerName,
            "--verify",
            "Then let this compiler check that the program does what the report says, as `toast verify` does.",
        ),
    ] = None,
    trace: Annotated[
        str | None,
        options.file("Write where a step's time goes, by line of your code, as a trace for ui.perfetto.dev."),
    ] = None,
    html: Annotated[
        str | None,
        options.file("Write the report as a web page with a chart of the step; it needs no network."),
    ] = None,
    save_plan: Annotated[
        str | None,
        options.file("Write only the plan, for --plan; - for stdout."),
    ] = None,
    with_programs: Annotated[
        list[str] | None,
        typer.Option(
            WITH_OPTION,
            metavar="PROGRAM:RUNS",
            help="Plan another program too, which has arguments of the same name and type and runs RUNS times for one "
            "run of PROGRAM: the shared arguments get one sharding, with which all runs together take least time; -o, "
            "--json, … then name folders; repeatable.",
        ),
    ] = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    **given: Any,
) -> int:
    """Find how to shard PROGRAM over a mesh, report what that should cost, and write the sharded program.

    Ctrl-C during the search takes the best plan found so far. Exit code 3: no plan fits in memory (or keeps every
    --subject-to), and no program is written. With --verify, exit code 1: XLA disagrees with the report, 2: it could
    not be asked.
    """
    options.refuse_both(quiet, verbose)
    programs = [(program, 1), *map(parse_with, with_programs or ())]
    wanted = {"-o": output, "--json": json, "--save-plan": save_plan, "--html": html, "--trace": trace}
    folder = len(programs) == 1 and is_folder(output)  # of programs of stages
    if folder and (format, annotate, verify) != (None, None, None):
        what = "programs of stages are StableHLO with a sharding on every value"
        raise UsageError(what, where="-o", hint="leave out --format, --annotate and --verify")
    chosen = output_format(None if folder or len(programs) > 1 else output, format)
    if annotate is not None and chosen not in (Format.stablehlo, Format.bytecode, Format.jax_export):
        raise UsageError(
            f"{chosen.value} has no constraints to choose", where="--annotate", hint="give it with --format stablehlo"
        )
    if verify is not None and chosen in (Format.specs, Format.python):
        raise UsageError(
            f"{chosen.value} is not a program that XLA can check",
            where="--verify",
            hint="give it with --format stablehlo or hlo",
        )
    judge = judge_of(mesh, verify, "--verify") if verify is not None else None
    given_targets = {option: Target(option, path) for option, path in wanted.items() if path is not None}
    if folder:
        given_targets["-o"] = Target("-o", str(output), folder_of="schedule.json")
    targets = [given_targets] if len(programs) == 1 else in_folders(given_targets, programs, chosen)
    check_targets([target for ones in targets for target in ones.values()], [*(path for path, _ in programs), mesh])
    requests = [options.make_request(path, mesh, given) for path, _ in programs]
    request = requests[0]
    if folder and request.pipeline is None:
        hint = "give the number of stages, --pipeline 4:16, or a file"
        raise UsageError("a folder is for the programs of a pipeline's stages", where="-o", hint=hint)
    if request.pipeline is not None and not folder and (output is not None or verify is not None):
        hint = "give a folder, -o stages/, or leave out --pipeline to write the plan without stages"
        raise UsageError("the programs of stages are several files", where="--pipeline", hint=hint)
    request = replace(request, stages_written=folder)

    from toast_cli import pipeline, together

    with progress_line(wanted=not quiet) as progress:
        tell = _say_asked if quiet else progress
        if len(programs) == 1:
            outcomes: Sequence[Outcome] = [pipeline.partition(request, tell, None if quiet else say_confirmed)]
        else:
            names, runs = [path for path, _ in programs], [number for _, number in programs]
            outcomes = together.partition_together(requests, names, runs, tell)
        staged = outcomes[0].pipeline if folder else None
        met = all(outcome.report.met for outcome in outcomes)
        if staged is not None:
            met = staged.fits and all(bound.holds for bound in outcomes[0].report.goal.bounds)
        emitted: list[Emitted | None] = [None] * len(outcomes)
        if met and (output is not None or verify is not None):
            for k, outcome in enumerate(outcomes):
                if progress is not None:
                    step, search = outcome.report.predicted.step_seconds, outcome.report.search
                    progress("emit", 1.0, step, search.evaluations, search.seconds)
                annotated = (annotate or Annotate.minimal).value
                emitted[k] = outcome.emit_stages() if folder else outcome.emit(chosen.value, annotated)
    exits: list[int] = []
    for outcome, written, outputs in zip(outcomes, emitted, targets, strict=True):
        piped = any(target.is_stdout for target in outputs.values())
        if exits and not quiet:
            print(file=sys.stderr if piped else sys.stdout)
        report = outcome.report if written is None else written.report
        _write(outcome, report, written, outputs)
        if quiet:  # the report has them among its notes
            for notice in outcome.notices:
                say("note", notice)
        if not (quiet and piped and met):
            _show(
                report, _written(outputs.get("-o"), chosen, report, met=met),
                to_stderr=piped, quiet=quiet, verbose=verbose,
            )  # fmt: skip
        if judge is not None and written is not None:
            exits.append(verify_outcome(outcome, written.content, chosen, judge, to_stderr=piped, quiet=quiet))
        else:
            exits.append(OK)
    return max(exits) if met else DOES_NOT_FIT


def in_folders(
    given: Mapping[str, Target], programs: Sequence[tuple[str, int]], chosen: Format
) -> list[dict[str, Target]]:
    """[programs] the outputs of each where there are several: files in the folders that the options name, called as the
    program.

    Raises UsageError for an output that is no folder, and for two programs of one name.
    """
    names = [program_name(path) for path, _ in programs]
    if given and len(set(names)) < len(names):
        raise UsageError(f"two programs are called {max(names, key=names.count)}", where=WITH_OPTION, hint="rename one")
    for option, target in given.items():
        if not Path(target.path).is_dir():
            hint = "mkdir out, and give out/: a file for each program is written there"
            raise UsageError(f"with {WITH_OPTION} this is a folder, and {target.path} is none", where=option, hint=hint)
    return [
        {
            option: Target(option, str(Path(target.path) / f"{name}{ENDINGS.get(option) or extension_of(chosen)}"))
            for option, target in given.items()
        }
        for name in names
    ]


def _write(outcome: Outcome, report: Report, emitted: Emitted | None, targets: Mapping[str, Target]) -> None:
    """Writes the outputs of one program."""
    from toast_cli.report.model import to_bytes

    if emitted is not None and emitted.files:
        write_folder(targets["-o"], emitted.files)
    elif emitted is not None and "-o" in targets:
        write_target(targets["-o"], emitted.content)
    if "--json" in targets:
        write_target(targets["--json"], to_bytes(report))
    if "--save-plan" in targets:
        write_target(targets["--save-plan"], outcome.saved_plan())
    if "--trace" in targets:
        from toast_cli.report.step import trace

        write_target(targets["--trace"], trace(outcome.source, outcome.evaluator, outcome.result))
    if "--html" in targets:
        from toast_cli.report.html.pages import run_page
        from toast_cli.report.html.pictures import pictures

        write_target(targets["--html"], run_page(report, pictures(outcome.source, outcome.evaluator, outcome.result)))


def _say_asked(stage: str, *_: object) -> None:
    """Says that a compiler is at work: the one stage that may take minutes in silence."""
    if stage == "confirm":
        say("note", "a compiler is asked about the plan; --confirm 0 asks none")


def _written(target: Target | None, chosen: Format, report: Report, *, met: bool) -> str:
    """A line on the program's output file. met: whether programs are written, since all fit and keep their bounds."""
    if target is None:
        return "nothing written; -o OUT writes the sharded program" if met else ""
    name = "stdout" if target.is_stdout else target.path
    if met:
        rewritten = "; ".join(report.program.rewritten)
        left_out = LEFT_OUT + (f", and the program {rewritten}, without which it may not fit" if rewritten else "")
        return f"wrote {name} ({chosen.value})" + (f": {left_out}" if chosen in (Format.specs, Format.python) else "")
    if target.folder_of:
        why = "the pipeline does not fit, or the plan breaks a bound"
    elif report.fit == "no":
        why = "the plan does not fit"
    else:
        why = "another plan does not fit, or breaks a bound" if report.met else "the plan breaks a bound"
    return f"{name} was not written: {why}"


def _show(report: Report, written: str, *, to_stderr: bool, quiet: bool, verbose: bool) -> None:
    from toast_cli.report.style import plain_text
    from toast_cli.report.terminal import one_line, print_report

    stream = sys.stderr if to_stderr else sys.stdout
    if quiet:
        print(plain_text(one_line(report), stream.encoding), file=stream)
        return
    print_report(report, stream, verbose=verbose)
    if written:
        print(f"\n{plain_text(written, stream.encoding)}", file=stream)
