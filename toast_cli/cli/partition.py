"""`toast partition`: a program and a mesh in; the same program with shardings, and a report, out."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toast_cli.base.children import without_cycle_collection
from toast_cli.base.files import Format, Target, check_targets, output_format, write_target
from toast_cli.cli import options
from toast_cli.cli.options import Annotate
from toast_cli.cli.running import DOES_NOT_FIT, OK, progress_line, say, say_confirmed
from toast_cli.cli.verify import judge_of, verify_outcome
from toast_cli.errors import UsageError
from toast_cli.request import CompilerName

if TYPE_CHECKING:
    from toast_cli.report.model import Report


# What the formats without a program lack.
LEFT_OUT = (
    "shardings of arguments and results only, the compiler finds the others; -o FILE.mlir writes the whole plan instead"
)


@options.with_options(
    *("top", *options.CONFIRMING, *options.PLANNING, *options.REWRITING),
    *("strategy", "pipeline", "plan", "complete", "kernels", "names", "frames"),
    before="quiet",
    confirm="auto",
)
@without_cycle_collection()
def partition(
    program: options.Program,
    mesh: options.MeshSpec,
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="OUT", help="Write the sharded program here; - for stdout.")
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
        options.file("Write the report as a web page with plots; it needs no network."),
    ] = None,
    save_plan: Annotated[
        str | None,
        options.file("Write only the plan, for --plan; - for stdout."),
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
    chosen = output_format(output, format)
    if annotate is not None and chosen not in (Format.stablehlo, Format.bytecode, Format.jax_export):
        raise UsageError(
            f"{chosen.value} has no constraints to choose", where="--annotate", hint="give it with --format stablehlo"
        )
    if verify is not None and chosen in (Format.specs, Format.python):
        raise UsageError(
            f"{chosen.value} is not a program that XLA can check",
            where="--verify",
            hint="give it with --format stablehlo, hlo or spmd",
        )
    judge = judge_of(mesh, verify, "--verify") if verify is not None else None
    program_target = Target("-o", output) if output is not None else None
    report_target = Target("--json", json) if json is not None else None
    plan_target = Target("--save-plan", save_plan) if save_plan is not None else None
    page_target = Target("--html", html) if html is not None else None
    trace_target = Target("--trace", trace) if trace is not None else None
    outputs = (program_target, report_target, plan_target, page_target, trace_target)
    targets = [target for target in outputs if target is not None]
    check_targets(targets, [program, mesh])
    request = options.make_request(program, mesh, given)
    if request.pipeline is not None and (output is not None or verify is not None):
        raise UsageError(
            "toast prices pipelines, and does not write the programs of their stages",
            where="--pipeline",
            hint="leave out -o and --verify for the price, or leave out --pipeline to write the plan without stages",
        )

    from toast_cli import pipeline
    from toast_cli.report.model import to_bytes

    with progress_line(wanted=not quiet) as progress:
        outcome = pipeline.partition(request, _say_asked if quiet else progress, None if quiet else say_confirmed)
        report = outcome.report
        fits = report.met
        content = b""
        if fits and (program_target is not None or verify is not None):
            if progress is not None:
                progress("emit", 1.0, report.predicted.step_seconds, report.search.evaluations, report.search.seconds)
            emitted = outcome.emit(chosen.value, (annotate or Annotate.minimal).value)
            content, report = emitted.content, emitted.report
            if program_target is not None:
                write_target(program_target, content)
    if report_target is not None:
        write_target(report_target, to_bytes(report))
    if plan_target is not None:
        write_target(plan_target, outcome.saved_plan())
    if trace_target is not None:
        from toast_cli.report.step import trace as trace_of

        write_target(trace_target, trace_of(outcome.source, outcome.evaluator, outcome.result))
    if page_target is not None:
        from toast_cli.report.html.pages import run_page
        from toast_cli.report.html.pictures import pictures

        write_target(page_target, run_page(report, pictures(outcome.source, outcome.evaluator, outcome.result)))

    taken = any(target.is_stdout for target in targets)
    if quiet:  # the report has them among its notes
        for notice in outcome.notices:
            say("note", notice)
    if not (quiet and taken and fits):
        _show(report, _written(program_target, chosen, report), to_stderr=taken, quiet=quiet, verbose=verbose)
    if not fits:
        return DOES_NOT_FIT
    return OK if judge is None else verify_outcome(outcome, content, chosen, judge, to_stderr=taken, quiet=quiet)


def _say_asked(stage: str, *_: object) -> None:
    """Says that a compiler is at work, which is the one stage that may take minutes without a word."""
    if stage == "confirm":
        say("note", "a compiler is asked about the plan; --confirm 0 asks none")


def _written(target: Target | None, chosen: Format, report: Report) -> str:
    """A line on the program's output file."""
    if target is None:
        return "nothing written; -o OUT writes the sharded program" if report.met else ""
    name = "stdout" if target.is_stdout else target.path
    if report.met:
        rewritten = "; ".join(report.program.rewritten)
        left_out = LEFT_OUT + (f", and the program {rewritten}, without which it may not fit" if rewritten else "")
        return f"wrote {name} ({chosen.value})" + (f": {left_out}" if chosen in (Format.specs, Format.python) else "")
    return f"{name} was not written: the plan {'does not fit' if report.fit == 'no' else 'breaks a bound'}"


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
