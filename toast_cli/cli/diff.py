"""`toast diff`: two reports in; what changed between them out."""

from __future__ import annotations

from typing import Annotated

import typer

from toast_cli.base.files import check_targets
from toast_cli.cli.running import json_target, show

DIFFERENT = 1


def diff(
    before: Annotated[str, typer.Argument(metavar="A.json", help="A report: `toast partition --json`.")],
    now: Annotated[str, typer.Argument(metavar="B.json", help="Another report.")],
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the difference as JSON; - for stdout.")
    ] = None,
) -> int:
    """Show what changed from one report to another: figures, decisions, shardings.

    Exit code 0: nothing changed; 1: something did.
    """
    targets = json_target(json)
    check_targets(targets, [before, now])

    from toast_cli.report.checks import blocks, difference
    from toast_cli.report.model import read_report

    changes = difference(read_report(before), read_report(now), (before, now))
    show(lambda _: blocks(changes), changes.to_json(), targets)
    return 0 if changes.same else DIFFERENT
