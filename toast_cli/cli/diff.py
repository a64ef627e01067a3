"""`toast diff`: two reports in; what changed between them out."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from toast_cli.base.files import Target, check_targets, write_target

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
    targets = [Target("--json", json)] if json is not None else []
    check_targets(targets, [before, now])

    from toast_cli.report import style
    from toast_cli.report.checks import blocks, difference
    from toast_cli.report.model import read_report, write_json

    found = difference(read_report(before), read_report(now), (before, now))
    for target in targets:
        write_target(target, write_json(found.to_json()))
    stream = sys.stderr if any(target.is_stdout for target in targets) else sys.stdout
    stream.write(style.render(blocks(found), style.make_console(stream)))
    return 0 if found.same else DIFFERENT
