"""Rematerialisation in a step that runs its layers in a loop (`lax.scan`).

Enters: a module. Leaves: it, with stacks of residuals removed from both loops: the backward loop recomputes their
slices from the remaining stacks (the layer's input is added if it was not stacked) and from the layer's weights.
"""

from __future__ import annotations

from typing import Any

from toast_cli.frontend.block_graph import clone
from toast_cli.frontend.equal_values import before_reshape
from toast_cli.frontend.loop_pairs import LoopPair, loop_pairs
from toast_cli.program.ops import RESHAPE
from toast_cli.request import Recompute

_WORTH = 0.9  # upper bound on the fraction of the stacked bytes left


def recompute_scans(module: Any, policy: Recompute) -> list[Any]:
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
