"""`toast inspect`: what a program is made of; nothing is decided, and no hardware is needed."""

from __future__ import annotations

import sys
from typing import Annotated

from toast_cli.base.files import Target, check_targets, write_target
from toast_cli.cli import options


def inspect(
    program: options.Program,
    json: Annotated[str | None, options.file("Write the facts as JSON; - for stdout.")] = None,
    verbose: options.Verbose = False,
) -> int:
    """Show what PROGRAM is made of: ops, loops, the dimensions that toast can split, conflicts, the largest arrays."""
    targets = [Target("--json", json)] if json is not None else []
    check_targets(targets, [program])

    from toast_cli.dimensions import analyse
    from toast_cli.frontend import load
    from toast_cli.report import style
    from toast_cli.report.inspection import blocks, inspect_program
    from toast_cli.report.model import write_json

    source = load(program)
    found = inspect_program(source, analyse(source.program))
    for target in targets:
        write_target(target, write_json(found.to_json()))
    stream = sys.stderr if any(target.is_stdout for target in targets) else sys.stdout
    console = style.make_console(stream)
    stream.write(style.render(blocks(found, console.width, verbose), console))
    return 0
