"""`toast inspect`: what a program is made of; nothing is decided, and no hardware is needed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from toast_cli.base.files import check_targets
from toast_cli.cli import options
from toast_cli.cli.running import json_target, show


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
    targets = json_target(json)
    check_targets(targets, [program])

    from toast_cli.dimensions import analyse
    from toast_cli.frontend import content_of, load, symbols_in
    from toast_cli.frontend.formats import read_bytes
    from toast_cli.report.inspection import SCHEMA, blocks, inspect_program, symbol_facts, symbol_table

    dims, content = given["dim"] or (), read_bytes(program)
    symbols, constraints = symbols_in(program, content)
    if symbols and not dims:
        listed = symbol_facts(symbols, {})
        facts = {
            "schema": SCHEMA,
            "path": program,
            "symbols": [asdict(symbol) for symbol in listed],
            "constraints": constraints,
        }
        show(lambda _: [symbol_table(listed, constraints)], facts, targets)
    else:
        source = load(program, content=content_of(program, dims, content), dims=dims)
        inspection = inspect_program(source, analyse(source.program), symbols)
        show(lambda _: blocks(inspection, verbose), inspection.to_json(), targets)
    return 0
