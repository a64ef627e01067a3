"""The step with what it saves for its backward pass computed again instead; see `recomputed_segments` and
`recomputed_scans`.

Enters: a `Source` and a policy. Leaves: another one that computes the same from the same arguments.
"""

from __future__ import annotations

from toast_cli import xla
from toast_cli.frontend.block_graph import erase_unread
from toast_cli.frontend.kept_products import keep_products
from toast_cli.frontend.recomputed_scans import recompute_scans
from toast_cli.frontend.recomputed_segments import recompute_segments
from toast_cli.frontend.rewritten import read_rewritten
from toast_cli.frontend.source import Source
from toast_cli.kernels.describe import describe_kernels
from toast_cli.request import Recompute
from toast_cli.xla import ir

_WORDS = ("what it reads of the layers", "what it reads of the layers, but products,")


def with_recompute(source: Source, policy: str) -> Source | str:
    """The program that computes again what this policy says, or why there is none."""
    if source.stated:
        return "the program states shardings of its own, which are of arrays that it saves"
    products = policy == Recompute.all_but_products
    copy = xla.parse_module(source.module.context, xla.write_bytecode(source.module))
    describe_kernels(copy, source.kernels)
    weights = {source.program.values[argument.value].shape for argument in source.program.arguments}
    with copy.context, ir.Location.unknown():
        block = xla.main_function(copy).entry_block
        found = keep_products(copy) if products else []
        found += recompute_scans(copy, products=products)
        found += recompute_segments(block, weights, products=products)
        if not found:
            return "no value is saved from a forward to a backward pass that this policy computes again"
        erase_unread(block)
    notice = f"the backward pass computes {_WORDS[products]} again: the program has it"
    return read_rewritten(source, copy, notice, recompute=str(policy))
