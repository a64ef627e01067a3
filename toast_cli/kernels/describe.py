"""Attaches a sharding rule and a cost to every hand-written kernel of a module, and rewrites kernels for local shapes.

The call of each kernel gets two attributes: Shardy's `sdy.sharding_rule`, if some dimension is independent, and
`toast.kernel`, a `HandWritten` as JSON. Both are removed once the program is read.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import asdict, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from toast_cli import xla
from toast_cli.base.errors import InputError
from toast_cli.base.units import evaluate, printable
from toast_cli.kernels import KernelError
from toast_cli.kernels.mosaic import (
    CONFIG,
    DYNAMIC,
    TARGET,
    BlockWindow,
    Integers,
    Mosaic,
    config_of,
    grid_rule,
    main_of,
    parse_body,
    read_mosaic,
)
from toast_cli.kernels.paged import ASSUMED, local_body, read_paged
from toast_cli.kernels.table import Table, UserKernel, find, read_table, rule_of, sizes_of, suggestion
from toast_cli.program.model import PAGED, HandWritten, Rule, Value, ValueFactors
from toast_cli.program.ops import BARRIER, CONSTANT, CUSTOM_CALL, MANUAL_REGION, WHILE
from toast_cli.xla import call_target, holders, ir, sdy, shape_and_element_type, string_of, terminator, walk_ops

KERNEL, RULE = "toast.kernel", "sdy.sharding_rule"
ALIASES = "output_operand_aliases"
_ALIAS = re.compile(r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)")
# A larger number of FLOPs or bytes is an error: a million chips would need a quarter of an hour.
MOST_WORK = 1e24
# Targets of kernels: Pallas for TPU, which toast can read; Pallas and Triton for GPU.
TARGETS = (TARGET, "triton_kernel_call", "__gpu$xla.gpu.triton", "mosaic_gpu_v2", "mosaic_gpu")
DEPENDENT = "its dimensions depend on each other, or on where in the array a step is"
# A kernel, its rule, the reason why it has none if it has none, and what its price assumes: "as if ..."
Description = tuple[HandWritten, Rule | None, str, tuple[str, ...]]


def describe_kernels(module: Any, table: Table | None = None) -> list[str]:
    """Adds the attributes to the calls of a module. Returns a sentence for each kernel that is computed replicated, and
    for each assumption of a kernel's price.

    Args:
        table: the user's table of kernels. Raises `InputError` if it does not match them.
    """
    entries = read_table(table) if table is not None else []
    descriptions: dict[Any, Description] = {}  # layers have equal kernels
    notices: dict[tuple[str, str], str] = {}  # by kernel, and assumption
    with module.context, ir.Location.unknown():
        for call in walk_ops(module, CUSTOM_CALL):
            if KERNEL in call.attributes:
                del call.attributes[KERNEL]
            entry = find(entries, _name(call), call_target(call))
            if entry is None and not call_target(call).startswith(PREFIX) and call_target(call) not in TARGETS:
                continue
            key = _meaning(call)
            if key not in descriptions:
                descriptions[key] = _described(call, entry)
            kernel, rule, why, assumptions = descriptions[key]
            kernel = replace(kernel, aliases=_aliases(call))
            rule = _in_place(call, rule)
            for clause in assumptions:
                notices[kernel.name, clause] = f"kernel {kernel.name} is priced as if {clause}"
            if rule is None and RULE not in call.attributes and not _in_region(call):
                notices.setdefault((kernel.name, ""), f"every device computes all of kernel {kernel.name}: {why}")
            call.attributes[KERNEL] = ir.StringAttr.get(json.dumps(asdict(kernel)))
            if rule is not None and RULE not in call.attributes:
                call.attributes[RULE] = _attribute(rule)
    return list(notices.values())


def hand_written(attributes: Any) -> HandWritten | None:
    """The `HandWritten` that `describe_kernels` has attached to an operation."""
    if KERNEL not in attributes:
        return None
    facts = json.loads(ir.StringAttr(attributes[KERNEL]).value)

    def frozen(value: Any) -> Any:
        return tuple(map(frozen, value)) if isinstance(value, list) else value

    return HandWritten(**{name: frozen(value) for name, value in facts.items()})


def drop_descriptions(module: Any) -> None:
    """Removes the attributes that `describe_kernels` has added."""
    for call in walk_ops(module, CUSTOM_CALL):
        if KERNEL in call.attributes:
            del call.attributes[KERNEL]


def _meaning(call: Any) -> tuple[Any, ...]:
    """A key that calls with equal descriptions share."""
    config = call.attributes.get("backend_config")
    types = tuple(value.type for value in (*call.operands, *call.results))
    data = tuple(map(_constant, call.operands))
    return call_target(call), config, types, tuple(_is_read(result) for result in call.results), data


def _is_read(value: Any) -> bool:
    return any(True for _ in value.uses)


def _name(call: Any) -> str:
    """The kernel's name in the call; empty if it has none."""
    stated = call.attributes.get("kernel_name")
    return printable(string_of(stated)) if isinstance(stated, ir.StringAttr) else ""


def _in_region(call: Any) -> bool:
    """True if a call is inside a manual region, where it has local shapes already."""
    return any(holder.name == MANUAL_REGION for holder in holders(call))


def _described(call: Any, entry: UserKernel | None) -> Description:
    """The description of a kernel. A kernel that cannot be read is computed replicated."""
    operands, results = ([Value(*_shape_and_type(v)) for v in side] for side in (call.operands, call.results))
    name = _name(call) or call_target(call)
    try:
        kernel, rule, why, assumptions = _read(call, name, operands, results)
    except KernelError as error:
        moved = float(sum(value.bytes for value in (*operands, *results)))
        kernel, rule, why = HandWritten(name, bytes=moved), None, str(error)
        assumptions = (f"it only moved its arrays: {error}",)
    if entry is not None:
        sizes = sizes_of(entry, name, operands, results)
        rule = _agreed(kernel, rule, rule_of(entry, sizes, operands, results)) if entry.operands is not None else rule
        numbers = {factor: float(size) for factor, size in sizes.items()}
        products = kernel.products, kernel.vector
        if entry.flops:
            products = _evaluated(entry, entry.flops, numbers), 0.0
        moved = _evaluated(entry, entry.bytes, numbers) if entry.bytes else kernel.bytes
        kernel = replace(kernel, products=products[0], vector=products[1], bytes=moved)
        why = f"{entry.where} has no rule that lets a dimension be split"
        return kernel, rule, why, () if entry.flops else assumptions
    better = f"if you know better, --kernels FILE with {suggestion(name, operands, results)}"
    return kernel, rule, f"{why}; {better}", tuple(f"{clause}; {better}" for clause in assumptions)


def _evaluated(entry: UserKernel, expression: str, sizes: dict[str, float]) -> float:
    try:
        return max(0.0, evaluate(expression, sizes))
    except ValueError as error:
        raise InputError(str(error), where=entry.where, hint="is a size 0?") from None


def _agreed(kernel: HandWritten, own: Rule | None, users: Rule | None) -> Rule | None:
    """Combines the kernel's own rule and the user's. A kernel that must be rewritten for shards is split as its grid
    allows, and only along dimensions that the user also allows; any other as the user says."""
    if not kernel.kind:
        return users if kernel.name not in TARGETS[1:] else None
    if own is None or users is None:
        return None
    split = {
        (array, dim)
        for array, dims in enumerate((*users.operands, *users.results))
        for dim, factors in enumerate(dims)
        if not users.need_replication.issuperset(factors)
    }
    kept = {
        factor
        for array, dims in enumerate((*own.operands, *own.results))
        for dim, factors in enumerate(dims)
        for factor in factors
        if (array, dim) not in split
    }
    rule = replace(own, need_replication=own.need_replication | kept)
    return rule if len(rule.need_replication) < len(rule.sizes) else None


def _in_place(call: Any, rule: Rule | None) -> Rule | None:
    """The rule of a kernel whose results alias operands: both must have the same sharding."""
    if rule is None:
        return rule
    unsharded = set(rule.need_replication)
    for result, operand in _aliases(call):
        for written, read in zip(rule.results[result], rule.operands[operand], strict=True):
            unsharded |= {*written} ^ {*read}
    return replace(rule, need_replication=frozenset(unsharded)) if len(unsharded) < len(rule.sizes) else None


def _aliases(call: Any) -> tuple[tuple[int, int], ...]:
    """(result, operand) of each result in the place of an operand."""
    return tuple(
        (int(result or 0), int(operand)) for result, operand in _ALIAS.findall(str(call.attributes.get(ALIASES)))
    )


def _read(call: Any, name: str, operands: list[Value], results: list[Value]) -> Description:
    """Describes a kernel by its configuration. Raises `KernelError` if it cannot be read."""
    target, text = call_target(call), call.attributes.get("backend_config")
    if target != TARGET and not target.startswith(PREFIX):
        raise KernelError("what it computes only its author knows")
    if not isinstance(text, ir.StringAttr):
        raise KernelError("it has no configuration")
    if target != TARGET:
        return *read_cudnn(target, string_of(text), operands, results), DEPENDENT, ()
    config = config_of(string_of(text))
    paged = read_paged(name, config, operands, results, splits=not _in_region(call))
    if paged is not None:
        return *paged, (ASSUMED,) if paged[0].flops else ()
    kernel = read_mosaic(config, lambda operand: _integers(_constant(call.operands[operand])))
    shapes = [value.shape for value in operands], [value.shape for value in results]
    rule, axes = grid_rule(kernel, *shapes, [_is_read(result) for result in call.results]) or (None, ())
    stated_cost = config.get("cost_estimate")
    estimate = stated_cost if isinstance(stated_cost, dict) else {}
    try:
        products, vector = _arithmetic(kernel, _number(estimate, "flops"))
        moved = _traffic(kernel, [*operands, *results], _number(estimate, "bytes_accessed"))
    except OverflowError:
        products, vector, moved = MOST_WORK, 0.0, 0.0
    if not products + vector + moved < MOST_WORK:
        raise KernelError("its grid and windows take longer than any chip can run")
    facts = HandWritten(name if name != target else printable(kernel.name), "mosaic", products, vector, moved, axes)
    return facts, rule, DEPENDENT, kernel.work.assumed


def _shape_and_type(value: Any) -> tuple[tuple[int, ...], str]:
    return shape_and_element_type(value.type) or ((), "token")


def _constant(operand: Any) -> Any:
    """The attribute of a constant operand; None for any other."""
    operand = _origin(operand)
    if isinstance(operand, ir.BlockArgument) or operand.owner.name != CONSTANT:
        return None
    return operand.owner.attributes["value"]


def _integers(value: Any) -> Integers | None:
    """The elements of a constant of integers."""
    if not isinstance(value, ir.DenseIntElementsAttr):
        return None
    shape = tuple(ir.ShapedType(value.type).shape)
    if value.is_splat:
        return np.broadcast_to(np.int64(ir.IntegerAttr(value.get_splat_value()).value), shape)
    return np.array(value, dtype=np.int64).reshape(shape)


def _origin(value: Any) -> Any:
    """The origin of a value behind loops that carry it unchanged, manual regions that get it
    replicated, and barriers."""
    while True:
        if not isinstance(value, ir.BlockArgument):
            if value.owner.name != BARRIER:
                return value
            value = value.owner.operands[ir.OpResult(value).result_number]
            continue
        block, number = value.owner, value.arg_number
        outside = block.owner.operation
        if outside.name == WHILE:
            body = outside.regions[1].blocks[0]
            ends = terminator(body).operands
            same = number < len(ends) and ends[number] == body.arguments[number]
        else:
            same = outside.name == MANUAL_REGION and outside.operands[number].type == value.type
        if not same:
            return value
        value = outside.operands[number]


def _number(estimate: dict[str, Any], name: str) -> float:
    """A figure of the author's cost estimate; 0 if it is missing or not plausible."""
    figure: Any = estimate.get(name)
    return float(figure) if type(figure) in (int, float) and 0 < figure < MOST_WORK else 0.0


def _arithmetic(kernel: Mosaic, stated: float) -> tuple[float, float]:
    """Operations on the matrix unit, and others: the author's estimate less the part that branches skip; the counted
    ones without an estimate."""
    work = kernel.work
    if not stated:
        return work.products, work.vector
    products = work.products / work.flops if work.flops else 1.0
    done = stated * (1.0 - work.skipped)
    return done * products, done * (1.0 - products)


def _traffic(kernel: Mosaic, arrays: list[Value], stated: float) -> float:
    """Bytes moved between memory and the chip: a window moves whenever its index changes. At least the author's
    estimate."""
    if len(arrays) != kernel.ahead + len(kernel.windows):
        return max(stated, float(sum(array.bytes for array in arrays)))
    windows = [*[None] * kernel.ahead, *kernel.windows]
    return max(stated, sum(_moved(kernel, w, array) for w, array in zip(windows, arrays, strict=True)))


def _moved(kernel: Mosaic, window: BlockWindow | None, array: Value) -> float:
    if window is None or len(window.bounds) != len(array.shape):
        return float(array.bytes)
    inner = max(window.axes, default=-1)
    steps = prod(bound for bound in kernel.grid[: inner + 1] if bound != DYNAMIC)
    fraction = 1.0 if all(index.count for index in window.index) else 1.0 - kernel.work.skipped
    return max(float(array.bytes), fraction * steps * Value(window.bounds, array.dtype).bytes)


def _attribute(rule: Rule) -> Any:
    """A rule as Shardy's attribute."""

    def mapping(dims: tuple[tuple[int, ...], ...]) -> Any:
        return sdy.TensorMappingAttr.get([sdy.DimMappingAttr.get(list(factors)) for factors in dims])

    return sdy.OpShardingRuleAttr.get(
        list(rule.sizes),
        [mapping(dims) for dims in rule.operands],
        [mapping(dims) for dims in rule.results],
        sorted(rule.reduction),
        sorted(rule.need_replication),
    )


# ---------------------------------------------------------------- cuDNN's attention
# Reads cuDNN's attention, `custom_call @__cudnn$fmha…`: batch and heads are independent.
#
# Its configuration has the shape of the scores: batch, heads, queries, keys. Operands are queries, keys and values,
# whose heads are their second or third dimension; the gradient's are those, the softmax statistics of the forward
# pass, the gradient of the result, and the result. Results have heads second. With grouped-query attention, several
# heads of queries share one of keys and values.

PREFIX = "__cudnn$fmha"
CUDNN_CONFIG, SCORES = "cudnn_fmha_backend_config", "intermediate_tensor_shape"
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
        config = json.loads(text)[CUDNN_CONFIG]
        scores = [int(n) for n in config[SCORES]["dimensions"]]
        mask, window = str(config.get("mask_type", "")), int(config.get("sliding_window_length", 0))
        separate = int(config.get("max_seg_per_batch", 1)) == 1 and not config.get("is_paged_attention")
        if len(scores) != 4 or min(scores) < 1:
            raise KernelError("its scores have not four dimensions")
        attention = _attention(config, scores, [value.shape for value in operands])
    except (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError):
        raise KernelError("its configuration is not that of an attention of cuDNN") from None
    backward = "Backward" in target
    pairs = attention.queries * attention.keys * (0.5 if "CAUSAL" in mask else 1.0)
    if 0 < window < attention.keys:
        pairs = min(pairs, attention.queries * float(window))
    width = operands[0].shape[-1]
    products = 2.0 * (BACKWARD if backward else FORWARD) * attention.batch * attention.heads * pairs * width
    moved = float(sum(value.bytes for value in (*operands, *results)))
    rule = _rule(attention, backward, operands, results) if separate and not target.endswith("F8") else None
    axes = (0, 1, 1)[: _own_factors(attention)] if rule else ()
    return HandWritten(target, "cudnn", products, 0.0, moved, axes), rule


def _attention(config: dict[str, Any], scores: list[int], shapes: list[tuple[int, ...]]) -> Attention:
    batch, heads, queries, keys = scores
    query, key = shapes[0], shapes[1]
    if len(query) != 4 or len(key) != 4:
        raise KernelError("its queries or keys have not four dimensions")
    stated = config.get("bmm1_dot_dimension_numbers", {}).get("lhs_batch_dimensions") or (
        config.get("bmm1_grad_gemm1_dot_dimension_numbers", {}).get("rhs_batch_dimensions", [0, 1])
    )
    heads_at = int(stated[1])
    if heads_at not in (1, 2) or query[0] != batch or query[heads_at] != heads or query[3 - heads_at] != queries:
        raise KernelError("its queries are not those of its scores")
    groups = key[heads_at]
    if key[0] != batch or key[3 - heads_at] != keys or not groups or heads % groups:
        raise KernelError("its keys are not those of its scores")
    return Attention(batch, heads, groups, queries, keys, heads_at)


def _own_factors(attention: Attention) -> int:
    """Number of the attention's own factors; one less for groups of one head."""
    return HEADS_OF_GROUP if attention.groups == attention.heads else HEADS_OF_GROUP + 1


def _rule(attention: Attention, backward: bool, operands: list[Value], results: list[Value]) -> Rule | None:
    """The rule: batch, groups and heads of a group are factors; every other dimension is one that is not split."""
    own_factors = {*range(_own_factors(attention))}
    sizes = [attention.batch, attention.groups, attention.heads // attention.groups][: len(own_factors)]
    unsharded: set[int] = set()
    heads = {attention.heads: tuple(sorted(own_factors - {BATCH})), attention.groups: (GROUPS,)}

    def factors(value: Value, stated: dict[int, tuple[int, ...]]) -> ValueFactors:
        dims = []
        for d, size in enumerate(value.shape):
            own = stated.get(d)
            if own is None:
                own = (len(sizes),)
                sizes.append(size)
                unsharded.add(own[0])
            dims.append(own)
        return tuple(dims)

    def array(value: Value, heads_at: int) -> ValueFactors:
        """Factors of queries, keys, values and the like, and of arrays with a number for each query."""
        shape = value.shape
        has_heads = len(shape) > heads_at and shape[0] == attention.batch and shape[heads_at] in heads
        return factors(value, {0: (BATCH,), heads_at: heads[shape[heads_at]]} if has_heads else {})

    def bias(value: Value) -> ValueFactors:
        shared = {0: (attention.batch, (BATCH,)), 1: (attention.heads, heads[attention.heads])}
        return factors(value, {d: own for d, (size, own) in shared.items() if value.shape[d] == size})

    def operand(k: int, value: Value) -> ValueFactors:
        rank = len(value.shape)
        if rank == 4:
            like_queries = k < 3 or (backward and value.shape == operands[0].shape)
            return array(value, attention.heads_at) if like_queries else bias(value)
        if rank == 3:
            return array(value, 1)
        return factors(value, {0: (BATCH,)} if rank == 1 and value.shape[0] == attention.batch else {})

    def result(k: int, value: Value) -> ValueFactors:
        if not value.elements:  # workspace
            return factors(value, {})
        return bias(value) if backward and k == 3 else array(value, 1)

    operand_factors = tuple(operand(k, value) for k, value in enumerate(operands))
    result_factors = tuple(result(k, value) for k, value in enumerate(results))
    for value, dims in zip(results, result_factors, strict=True):  # factors that a result lacks are reduced in it
        if value.elements:
            unsharded |= own_factors - {f for own in dims for f in own}
    if unsharded >= own_factors:
        return None
    return Rule(tuple(sizes), operand_factors, result_factors, frozenset(), frozenset(unsharded))


# ---------------------------------------------------------------- kernels on local shapes
# Rewrites a hand-written kernel for local shapes.


def run_on_part(call: Any, kernel: HandWritten, pieces: dict[int, int]) -> None:
    """Rewrites the kernel of a call in place; pieces: factor -> its number of shards."""
    if prod(pieces.values()) == 1 or not kernel.kind:
        return
    cuts: dict[int, int] = {}  # axis of the grid, or dimension of an attention's scores
    for factor, count in pieces.items() if kernel.axes else ():
        cuts[kernel.axes[factor]] = cuts.get(kernel.axes[factor], 1) * count
    text = json.loads(call.attributes["backend_config"].value)
    if kernel.kind == PAGED:
        sides = (tuple(Value(*_shape_and_type(v)) for v in side) for side in (call.operands, call.results))
        text[CONFIG]["body"] = local_body(kernel, *sides)
    elif kernel.kind == "cudnn":
        shape = text[CUDNN_CONFIG][SCORES]
        shape["dimensions"] = [str(int(n) // cuts.get(d, 1)) for d, n in enumerate(shape["dimensions"])]
    else:
        text[CONFIG]["body"] = with_smaller_grid(text[CONFIG], cuts)
        estimate = text[CONFIG].get("cost_estimate")
        if isinstance(estimate, dict):
            shards = prod(cuts.values())
            text[CONFIG]["cost_estimate"] = {
                name: figure // shards if isinstance(figure, int) else figure for name, figure in estimate.items()
            }
    call.attributes["backend_config"] = ir.StringAttr.get(json.dumps(text), call.context)


def with_smaller_grid(config: dict[str, Any], cuts: dict[int, int]) -> str:
    """The body in base64, with each axis of its grid divided by these numbers."""
    module = parse_body(config)
    main = main_of(module)
    bounds = [int(n) for n in main.attributes["iteration_bounds"]]
    local = [n if n == DYNAMIC else n // cuts.get(axis, 1) for axis, n in enumerate(bounds)]
    main.attributes["iteration_bounds"] = ir.DenseI64ArrayAttr.get(local, module.context)
    return base64.b64encode(xla.write_bytecode(module)).decode()
