"""`toast tactics`: lists tactics; with a program and a mesh, which of them apply and what they would split."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from toast_cli.base.errors import UsageError
from toast_cli.base.files import check_targets
from toast_cli.cli import options
from toast_cli.cli.running import json_target, show


@options.with_options("mesh_shape", "dims", before="file")
def tactics(
    program: Annotated[
        str | None,
        typer.Argument(metavar="PROGRAM", help="StableHLO or HLO program: show which tactics apply to it."),
    ] = None,
    mesh: Annotated[
        str | None,
        options.spec("Hardware, as for `toast partition`; needed with PROGRAM."),
    ] = None,
    file: Annotated[
        str | None,
        options.file("Tactics of your own, YAML or Python, instead of toast's."),
    ] = None,
    json: Annotated[str | None, options.file("Write the list as JSON; - for stdout.")] = None,
    **given: Any,
) -> int:
    """List the known ways to shard, for --tactic and --strategy.

    With PROGRAM and --mesh: what each would split there, or why it does not apply.
    """
    if (program is None) != (mesh is None):
        raise UsageError(
            "what applies depends on both",
            where="PROGRAM and --mesh",
            hint="give both, or neither to list what there is",
        )
    targets = json_target(json)
    check_targets(targets, [name for name in (program, mesh, file) if name is not None])

    from toast_cli.report import command_tables
    from toast_cli.tactics import ALIASES, TACTICS, applicable
    from toast_cli.tactics.model import survey
    from toast_cli.tactics.requests import read_tactics
    from toast_cli.tactics.strategies import STRATEGIES

    own = TACTICS if file is None else read_tactics(file)
    if program is None or mesh is None:
        drawn = command_tables.all_tactics(own.values(), STRATEGIES)
        facts: object = {
            "tactics": [{"name": t.name, "about": t.about} for t in own.values()], "strategies": list(STRATEGIES),
            "aliases": ALIASES,
        }  # fmt: skip
    else:
        from toast_cli.pipeline import problem_of

        problem = problem_of(program, mesh, given["mesh_shape"], dims=given["dim"] or ())
        surveyed = survey(problem, own.values())
        plans, reasons = applicable(problem)
        drawn = command_tables.applicable_tactics(surveyed, problem.mesh.names, reasons, list(plans))
        facts = {"tactics": [*map(asdict, surveyed)], "strategies": list(plans), "not_applicable": reasons}
    show(lambda _: drawn, facts, targets)
    return 0
