"""Reads cuDNN's attention, `custom_call @__cudnn$fmha…`: batch and heads are independent.

Its configuration has the shape of the scores: batch, heads, queries, keys. Operands are queries, keys and values, whose
heads are their second or third dimension; the gradient's are those, the softmax statistics of the forward pass, the
gradient of the result, and the result. Results have heads second. With grouped-query attention, several heads of
queries share one of keys and values.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from toast_cli.kernels.errors import KernelError
from toast_cli.program.model import HandWritten, Rule, Value, ValueFactors

PREFIX = "__cudnn$fmha"
CONFIG, SCORES = "cudnn_fmha_backend_config", "intermediate_tensor_shape"
# Factors of the rule, before the unsharded ones. A group has several heads of queries for one of keys and values.
BATCH, GROUPS, HEADS_OF_GROUP = range(3)
# Products of queries, keys, values and their gradients: two forward; five backward, which recomputes the scores.
FORWARD, BACKWARD = 2, 5


class Attention(NamedTuple):
    """Sizes of an attention. heads_at: the dimension of queries, keys and values that is their heads."""

    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    heads_at: int


def read_cudnn(target: str, text: str, operands: list[Value], results: list[Value]) -> tuple[HandWritten, Rule | None]:
    """A call's cost, and its rule; None for packed sequences, paged keys, and fp8, whose scales span the batch.

    Raises `KernelError` for other configurations than JAX's.
    """
    try:
        config = json.loads(text)[CONFIG]
        scores = [int(n) for n in config[SCORES]["dimensions"]]
        mask, window = str(config.get("mask_type", "")), int(config.get("sliding_window_length", 0))
        apart = int(config.get("max_seg_per_batch", 1)) == 1 and not config.get("is_paged_attention")
        if len(scores) != 4 or min(scores) < 1:
            raise KernelError("its scores have not four dimensions")
        found = _attention(config, scores, [value.shape for value in operands])
    except (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError):
        raise KernelError("its configuration is not that of an attention of cuDNN") from None
    backward = "Backward" in target
    pairs = found.queries * found.keys * (0.5 if "CAUSAL" in mask else 1.0)
    if 0 < window < found.keys:
        pairs = min(pairs, found.queries * float(window))
    width = operands[0].shape[-1]
    products = 2.0 * (BACKWARD if backward else FORWARD) * found.batch * found.heads * pairs * width
    moved = float(sum(value.bytes for value in (*operands, *results)))
    rule = _rule(found, backward, operands, results) if apart and not target.endswith("F8") else None
    axes = (0, 1, 1)[: _own_factors(found)] if rule else ()
    return HandWritten(target, "cudnn", products, 0.0, moved, axes), rule


def _attention(config: dict[str, Any], scores: list[int], shapes: list[tuple[int, ...]]) -> Attention:
    batch, heads, queries, keys = scores
    query, key = shapes[0], shapes[1]
    if len(query) != 4 or len(key) != 4:
        raise KernelError("its queries or keys have not four dimensions")
    stated = config.get("bmm1_dot_dimension_numbers", {}).get("lhs_batch_dimensions") or (
        config.get("bmm1_grad_gemm1_dot_dimension_numbers", {}).get("rhs_batch_dimensions", [0, 1])
    )
    at = int(stated[1])
    if at not in (1, 2) or query[0] != batch or query[at] != heads or query[3 - at] != queries:
        raise KernelError("its queries are not those of its scores")
    groups = key[at]
    if key[0] != batch or key[3 - at] != keys or not groups or heads % groups:
        raise KernelError("its keys are not those of its scores")
    return Attention(batch, heads, groups, queries, keys, at)


def _own_factors(found: Attention) -> int:
    """Number of the attention's own factors; one less for groups of one head."""
    return HEADS_OF_GROUP if found.groups == found.heads else HEADS_OF_GROUP + 1


def _rule(found: Attention, backward: bool, operands: list[Value], results: list[Value]) -> Rule | None:
    own_factors = {*range(_own_factors(found))}
    sizes = [found.batch, found.groups, found.heads // found.groups][: len(own_factors)]
    whole: set[int] = set()
    heads = {found.heads: tuple(sorted(own_factors - {BATCH})), found.groups: (GROUPS,)}

    def factors(value: Value, known: dict[int, tuple[int, ...]]) -> ValueFactors:
        dims = []
        for d, size in enumerate(value.shape):
            own = known.get(d)
            if own is None:
                own = (len(sizes),)
                sizes.append(size)
                whole.add(own[0])
            dims.append(own)
        return tuple(dims)

    def array(value: Value, at: int) -> ValueFactors:
        """Factors of queries, keys, values and the like, and of arrays with a number for each query."""
        shape = value.shape
        known = len(shape) > at and shape[0] == found.batch and shape[at] in heads
        return factors(value, {0: (BATCH,), at: heads[shape[at]]} if known else {})

    def bias(value: Value) -> ValueFactors:
        said = {0: (found.batch, (BATCH,)), 1: (found.heads, heads[found.heads])}
        return factors(value, {d: own for d, (size, own) in said.items() if value.shape[d] == size})

    def operand(k: int, value: Value) -> ValueFactors:
        rank = len(value.shape)
        if rank == 4:
            like_queries = k < 3 or (backward and value.shape == operands[0].shape)
            return array(value, found.heads_at) if like_queries else bias(value)
        if rank == 3:
            return array(value, 1)
        return factors(value, {0: (BATCH,)} if rank == 1 and value.shape[0] == found.batch else {})

    def result(k: int, value: Value) -> ValueFactors:
        if not value.elements:  # workspace
            return factors(value, {})
        return bias(value) if backward and k == 3 else array(value, 1)

    read = tuple(operand(k, value) for k, value in enumerate(operands))
    made = tuple(result(k, value) for k, value in enumerate(results))
    for value, dims in zip(results, made, strict=True):  # factors that a result lacks are reduced in it
        if value.elements:
            whole |= own_factors - {f for own in dims for f in own}
    if whole >= own_factors:
        return None
    return Rule(tuple(sizes), read, made, frozenset(), frozenset(whole))
