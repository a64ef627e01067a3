"""Rematerialises values that a step saves for its backward pass.

In: a `Source` and a policy. Out: another one that computes the same from the same arguments. Where layers stand
in a loop (`lax.scan`), stacks of residuals are removed from both loops: the backward loop recomputes their slices from
the remaining stacks (the layer's input is added if it was not stacked) and from the layer's weights. See `segments` for
layers that are not in a loop.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from toast_cli import xla
from toast_cli.frontend.places import place_text
from toast_cli.frontend.rewritten import read_rewritten
from toast_cli.frontend.source import Source
from toast_cli.kernels.describe import describe_kernels
from toast_cli.levers.block_graph import before_reshape, clone, erase_unread
from toast_cli.levers.keep import keep_products
from toast_cli.levers.loop_pairs import LoopPair, loop_pairs
from toast_cli.levers.segments import recompute_segments
from toast_cli.program.ops import RESHAPE
from toast_cli.request import Recompute
from toast_cli.xla import ir

_WORTH = 0.9  # upper bound on the fraction of the stacked bytes left
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
    if source.annotations:
        return "the program states shardings of its own, which are of arrays that it saves"
    copy = xla.parse_module(source.module.context, xla.write_bytecode(source.module))
    describe_kernels(copy, source.kernels)
    weights = {source.program.values[argument.value].shape for argument in source.program.arguments}
    with copy.context, ir.Location.unknown():
        block = xla.main_function(copy).entry_block
        found = [] if policy is Recompute.all else keep_products(copy, policy)
        found += _recompute_scans(copy, policy)
        found += recompute_segments(block, weights, policy)
        if not found:
            return "the program saves nothing from a forward to a backward pass that this policy recomputes"
        erase_unread(block)
    places = Counter(place_text(str(location), source.frames, source.text_file) for location in found)
    place = next((f" at {text}" for text, _ in places.most_common() if text), "")
    notice = (
        f"the backward pass recomputes what it needs of the forward pass{_IN_WORDS[policy]}: the program written "
        f"has it; in JAX it is jax.checkpoint(layer{_IN_JAX[policy]}) for the layers{place}"
    )
    return read_rewritten(source, copy, notice, recompute=policy.value)


def _recompute_scans(module: Any, policy: Recompute) -> list[Any]:
    """Removes stacks of every pair of loops; returns the locations of the forward loops."""
    places = []
    while (pair := next((it for it in loop_pairs(module) if _recompute(it, policy)), None)) is not None:
        places.append(pair.place)
    return places


def _recompute(pair: LoopPair, policy: Recompute) -> bool:
    """Removes stacks of one pair if that saves enough memory."""
    graph, updates = pair.graph, [stack.update for stack in pair.stacks]
    kept = graph.least_kept(updates, pair.cost, policy)
    if sum(map(graph.size, kept)) > _WORTH * sum(map(graph.size, dict.fromkeys(updates))):
        return False
    makers = graph.makers(updates, kept)
    made = {result for n in makers for result in graph.operations[n].results} | kept
    twins = pair.stack(kept)
    read = dict.fromkeys(value for n in makers for value in graph.reads[n] if value not in made)
    twins |= {value: pair.twin(value) for value in read}
    clone((graph.operations[n] for n in makers), twins, pair.at)
    for stack in pair.stacks:
        for piece in stack.slices:
            _read_instead(piece.results[0], twins[stack.update])
    pair.finish()
    return True


def _read_instead(piece: Any, twin: Any) -> None:
    """Lets all that reads a part of a stack read the same, made again. What is reshaped to be stacked, and back when it
    is read, is the array itself."""
    before = before_reshape(twin)
    for reader in [use.owner for use in piece.uses]:
        if before is not None and reader.name == RESHAPE and reader.results[0].type == before.type:
            reader.results[0].replace_all_uses_with(before)
    piece.replace_all_uses_with(twin)
