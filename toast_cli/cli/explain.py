"""`toast explain`: why a plan is as it is, and what else there would be."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toast_cli.base.errors import UsageError
from toast_cli.base.files import check_targets
from toast_cli.cli import options
from toast_cli.cli.running import OK, json_target, progress_line, say, show

if TYPE_CHECKING:
    from toast_cli.pipeline import Outcome
    from toast_cli.report.explain.study import Explanation, Study
    from toast_cli.request import Request


@options.with_options(*options.PLANNING, "strategy", "plan", "kernels", "names", before="quiet")
def explain(
    program: options.Program,
    mesh: options.MeshSpec,
    decision: Annotated[
        str | None,
        typer.Option(metavar="N|PATTERN", help="Explain decision N, or how arguments are split, e.g. '*wq*'."),
    ] = None,
    collective: Annotated[
        str | None,
        typer.Option(
            metavar="K|FILE:LINE",
            help="Explain collective K of the report (1 takes longest), or all that a line of the source does.",
        ),
    ] = None,
    peak: Annotated[bool, typer.Option("--peak", help="Explain the memory peak, and what would lower it.")] = False,
    as_annotated: Annotated[
        bool,
        typer.Option(
            "--as-annotated",
            help="Explain the program's own shardings: what makes XLA communicate, and what would mend it.",
        ),
    ] = False,
    report: Annotated[
        str | None,
        options.file("Explain the plan of a report stored with --json instead of searching."),
    ] = None,
    json: Annotated[str | None, options.file("Write the explanation as JSON; - for stdout.")] = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    **given: Any,
) -> int:
    """Explain the plan for PROGRAM on a mesh: what each decision saves, or one thing about it in detail.

    The plan is the one `toast partition` finds with the same options, or that of --report or --plan.
    """
    options.refuse_both(quiet, verbose)
    if sum([decision is not None, collective is not None, peak, as_annotated]) > 1:
        raise UsageError(
            "one thing is explained at a time",
            where="--decision, --collective, --peak, --as-annotated",
            hint="give one",
        )
    if report is not None and (given["tactic"] or given["strategy"]):
        raise UsageError(
            "the plan of the report is explained", where="--report", hint="leave --tactic and --strategy out"
        )
    targets = json_target(json)
    check_targets(targets, [name for name in (program, mesh, report) if name is not None])
    request = options.make_request(program, mesh, given)
    if report is not None:
        from toast_cli.report.explain.study import stored_request

        stored = stored_request(report)
        shape = request.mesh_shape or stored["mesh_shape"]
        request = replace(request, **{**stored, "mesh_shape": shape, "iterations": 1})
    if as_annotated:
        from toast_cli.frontend import content_of

        request = replace(request, content=content_of(program, request.dims), dims=())

    from toast_cli import pipeline
    from toast_cli.price.evaluator import Evaluator
    from toast_cli.report.command_tables import explanation_blocks, explanation_line
    from toast_cli.report.explain.answers import explain as answer
    from toast_cli.report.explain.study import Study, stored_plan

    with progress_line(wanted=not quiet) as progress:
        outcome = pipeline.partition(request, progress)
        evaluator, chosen = outcome.evaluator, outcome.result.plan
        if report is not None:
            problem, chosen = stored_plan(report, outcome.problem)
            evaluator = evaluator if problem is outcome.problem else Evaluator(problem, [chosen])
        study = Study(outcome.source, evaluator, chosen)
        if as_annotated:
            explanation = _annotated(study, outcome, request)
        else:
            explanation = answer(study, decision=decision, collective=collective, peak=peak)
    for notice in outcome.notices:
        say("note", notice)
    line = explanation_line(explanation) if quiet else None
    show(lambda width: explanation_blocks(explanation, width, verbose), explanation.to_json(), targets, line)
    return OK


def _annotated(study: Study, outcome: Outcome, request: Request) -> Explanation:
    from toast_cli.ask_xla.annotated import AsAnnotated
    from toast_cli.report.explain.annotated import explain_annotated

    own, mesh = outcome.annotated, outcome.source.own_mesh
    if not isinstance(own, AsAnnotated):
        shape = ",".join(f"{name or 'devices'}={size}" for name, size in mesh)
        what = f"they are for {shape}, the mesh is {study.problem.mesh}" if mesh else "it has none"
        why = f"XLA's partitioner says: {own}" if own is not None else what
        raise UsageError(
            f"the program's own shardings cannot be explained: {why}",
            where="--as-annotated",
            hint="save the program with its with_sharding_constraint and in_shardings, for as many devices as the mesh",
        )
    return explain_annotated(study, own, request.content or b"", request.program)
