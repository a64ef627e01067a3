"""`toast compare`: all known strategies that apply to a program, and what the search finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from toast_cli.base.files import check_targets
from toast_cli.cli import options
from toast_cli.cli.running import DOES_NOT_FIT, OK, json_target, progress_line, say, say_confirmed, show


@options.with_options(*options.PLANNING, "pipeline", *options.CONFIRMING, before="quiet")
def compare(
    program: options.Program,
    mesh: options.MeshSpec,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy", metavar="NAME", help="Compare this strategy too, e.g. fsdp:data+megatron:model; repeatable."
        ),
    ] = None,
    json: Annotated[str | None, options.file("Write the comparison as JSON; - for stdout.")] = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    **given: Any,
) -> int:
    """Compare the known strategies that apply to PROGRAM on a mesh with the plan that the search finds.

    With --confirm N all of them are compiled, and the best is the best by the compiler's figures. Exit code 0: at least
    one plan fits in memory and keeps every --subject-to; 3: none does.
    """
    options.refuse_both(quiet, verbose)
    targets = json_target(json)
    check_targets(targets, [program, mesh])
    request = options.make_request(program, mesh, given)

    from toast_cli import pipeline
    from toast_cli.candidates.ask_compiler import compile_plans, compiler_for
    from toast_cli.hardware import load_spec
    from toast_cli.report.comparison import STRATEGY, comparison_blocks, comparison_line, with_compiled, with_contender
    from toast_cli.report.comparison import compare as tabulate
    from toast_cli.search.alternatives import best_plans

    if request.confirm > 0:
        compiler_for(load_spec(mesh), request.confirm_with)  # whether it can be asked, before the search
    with progress_line(wanted=not quiet) as progress:
        outcome = pipeline.partition(replace(request, confirm=0, best=request.confirm), progress)
        plans = best_plans(outcome.evaluator, outcome.result, request.confirm)
        comparison = tabulate(outcome.evaluator, outcome.report, plans, strategy or (), outcome.strategies)
        comparison = with_contender(comparison, outcome.annotated, outcome.pipeline, outcome.evaluator)
        if request.confirm > 0:
            named = {c.name: c.plan for c in comparison.contenders if c.kind == STRATEGY and not c.mesh}
            tell = None if quiet else say_confirmed
            compiled = compile_plans(outcome.source, outcome.evaluator, plans, named, request, tell)
            comparison = with_compiled(outcome.evaluator, comparison, compiled)
    line = comparison_line(comparison) if quiet else None
    show(lambda width: comparison_blocks(comparison, width, verbose), comparison.to_json(), targets, line)
    if line and comparison.best is None and any(target.is_stdout for target in targets):
        say("note", line)
    return OK if comparison.best is not None else DOES_NOT_FIT
