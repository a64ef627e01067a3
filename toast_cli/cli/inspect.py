"""`toast inspect`: what a program is made of; nothing is decided, and no hardware is needed."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated, Any

from toast_cli.base.files import Target, check_targets, write_target
from toast_cli.cli import options


@options.with_options("dims", before="json")
def inspect(
    program: options.Program,
    json: Annotated[str | None, options.file("Write the facts as JSON; - for stdout.")] = None,
    verbose: options.Verbose = False,
    **given: Any,
) -> int:
    """Show what PROGRAM is made of: ops, loops, the dimensions that toast can split, conflicts, the largest arrays.

    Of a program with symbolic dimensions that have no size yet, only these: which there are, and where they stand.
    """
    targets = [Target("--json", json)] if json is not None else []
    check_targets(targets, [program])

    from toast_cli.dimensions import analyse
    from toast_cli.frontend import content_of, load, symbols_in
    from toast_cli.frontend.formats import read_bytes
    from toast_cli.report import style
    from toast_cli.report.inspection import SCHEMA, blocks, inspect_program, symbol_facts, symbol_table
    from toast_cli.report.model import write_json

    dims, content = given["dim"] or (), read_bytes(program)
    symbols, constraints = symbols_in(program, content)
    if symbols and not dims:
        listed = symbol_facts(symbols, {})
        facts = {
            "schema": SCHEMA,
            "path": program,
            "symbols": [asdict(one) for one in listed],
            "constraints": constraints,
        }
        shown = [symbol_table(listed, constraints)]
    else:
        source = load(program, content=content_of(program, dims, content), dims=dims)
        found = inspect_program(source, analyse(source.program), symbols)
        facts = found.to_json()
        shown = blocks(found, style.make_console(sys.stdout).width, verbose)
    for target in targets:
        write_target(target, write_json(facts))
    stream = sys.stderr if any(target.is_stdout for target in targets) else sys.stdout
    console = style.make_console(stream)
    stream.write(style.render(shown, console))
    return 0
