"""Rematerialises values that a step saves for its backward pass; see `recomputed_segments` and `recomputed_scans`.

Enters: a `Source` and a policy. Leaves: another one that computes the same from the same arguments.
"""

from __future__ import annotations

from collections import Counter

from toast_cli import xla
from toast_cli.frontend.block_graph import erase_unread
from toast_cli.frontend.kept_products import keep_products
from toast_cli.frontend.places import place_text
from toast_cli.frontend.recomputed_scans import recompute_scans
from toast_cli.frontend.recomputed_segments import recompute_segments
from toast_cli.frontend.rewritten import read_rewritten
from toast_cli.frontend.source import Source
from toast_cli.kernels.describe import describe_kernels
from toast_cli.request import Recompute
from toast_cli.xla import ir

_IN_WORDS = {
    Recompute.all: "",
    Recompute.all_but_weight_products: ", except products with weights",
    Recompute.all_but_products: ", except products",
}
_IN_JAX = {
    Recompute.all: "",
    Recompute.all_but_weight_products: ", policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable",
    Recompute.all_but_products: ", policy=jax.checkpoint_policies.dots_saveable",
}


def with_recompute(source: Source, policy: Recompute) -> Source | str:
    """The program with rematerialisation under this policy, or the reason why there is none."""
    if source.stated:
        return "the program states shardings of its own, which are of arrays that it saves"
    copy = xla.parse_module(source.module.context, xla.write_bytecode(source.module))
    describe_kernels(copy, source.kernels)
    weights = {source.program.values[argument.value].shape for argument in source.program.arguments}
    with copy.context, ir.Location.unknown():
        block = xla.main_function(copy).entry_block
        found = [] if policy is Recompute.all else keep_products(copy, policy)
        found += recompute_scans(copy, policy)
        found += recompute_segments(block, weights, policy)
        if not found:
            return "the program saves nothing from a forward to a backward pass that this policy computes again"
        erase_unread(block)
    places = Counter(place_text(str(location), source.frames, source.text_file) for location in found)
    place = next((f" at {text}" for text, _ in places.most_common() if text), "")
    notice = (
        f"the backward pass computes again what it reads of the forward pass{_IN_WORDS[policy]}: the program written "
        f"has it; in JAX it is jax.checkpoint(layer{_IN_JAX[policy]}) for the layers{place}"
    )
    return read_rewritten(source, copy, notice, recompute=policy.value)
