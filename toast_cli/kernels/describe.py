"""Says of every hand-written kernel of a module how it can be split and what it takes.

Enters: a normalised module. Leaves: the same, with two attributes on each kernel's call: Shardy's `sdy.sharding_rule`,
where some dimension is independent, and `toast.kernel`, a `HandWritten` as JSON. Both are taken off once the program is
read.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from math import prod
from typing import Any

import numpy as np

from toast_cli.errors import InputError
from toast_cli.kernels import cudnn
from toast_cli.kernels.errors import KernelError
from toast_cli.kernels.index_maps import DYNAMIC, Integers
from toast_cli.kernels.mosaic import TARGET, Mosaic, Window, config_of, read_mosaic
from toast_cli.kernels.mosaic_rules import grid_rule
from toast_cli.kernels.table import (
    Table,
    UserKernel,
    evaluate,
    find,
    read_table,
    rule_of,
    sizes_of,
    suggestion,
)
from toast_cli.printable import printable
from toast_cli.program.model import HandWritten, Rule, Value
from toast_cli.xla import ir, sdy, shape_and_element_type, walk_ops

CUSTOM_CALL = "stablehlo.custom_call"
KERNEL, RULE, REGION = "toast.kernel", "sdy.sharding_rule", "sdy.manual_computation"
ALIASES = "output_operand_aliases"
_ALIAS = re.compile(r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)")
# Larger constants are not looked into for what a kernel does.
MOST_ELEMENTS = 1_000_000
# Kernels that take more FLOPs or bytes are none: a chip would need days for one.
MOST_WORK = 1e21
# Targets of kernels: Pallas for TPU, of which this can be read; Pallas and Triton for GPU.
TARGETS = (TARGET, "triton_kernel_call", "__gpu$xla.gpu.triton", "mosaic_gpu_v2", "mosaic_gpu")
Description = tuple[HandWritten, Rule | None, str]  # and why there is no rule


def describe_kernels(module: Any, table: Table | None = None) -> list[str]:
    """Puts the attributes on the calls of a module. Returns a sentence for each kernel that is computed whole.

    Args:
        table: what the user says of kernels. Raises `InputError` where that does not fit to them.
    """
    told = read_table(table) if table is not None else []
    known: dict[Any, Description] = {}  # layers have equal kernels
    notices: dict[str, str] = {}
    with module.context, ir.Location.unknown():
        for call in walk_ops(module, CUSTOM_CALL):
            if KERNEL in call.attributes:
                del call.attributes[KERNEL]
            said = find(told, _name(call), _target(call))
            if said is None and not is_kernel(call):
                continue
            key = _meaning(call)
            if key not in known:
                known[key] = _described(call, said)
            kernel, rule, why = known[key]
            rule = _in_place(call, rule)
            if rule is None and RULE not in call.attributes and not _in_region(call):
                notices.setdefault(kernel.name, f"every device computes all of kernel {kernel.name}: {why}")
            call.attributes[KERNEL] = ir.StringAttr.get(json.dumps(asdict(kernel)))
            if rule is not None and RULE not in call.attributes:
                call.attributes[RULE] = _attribute(rule)
    return list(notices.values())


def hand_written(attributes: Any) -> HandWritten | None:
    """What `describe_kernels` has put on an operation."""
    if KERNEL not in attributes:
        return None
    facts = json.loads(ir.StringAttr(attributes[KERNEL]).value)
    return HandWritten(**{**facts, "axes": tuple(facts["axes"])})


def drop_descriptions(module: Any) -> None:
    """Takes off what `describe_kernels` has put on."""
    for call in walk_ops(module, CUSTOM_CALL):
        if KERNEL in call.attributes:
            del call.attributes[KERNEL]


def _target(call: Any) -> str:
    name = call.attributes["call_target_name"]
    return _text(name) if isinstance(name, ir.StringAttr) else ""


def _text(attribute: Any) -> str:
    """A string of a program; bytes that are no UTF-8 become replacement characters."""
    return bytes(attribute.value_bytes).decode("utf-8", "replace")


def _meaning(call: Any) -> tuple[Any, ...]:
    """What calls with equal descriptions have in common."""
    config = call.attributes.get("backend_config")
    types = tuple(value.type for value in (*call.operands, *call.results))
    data = tuple(one if one is None else (one.shape, one.tobytes()) for one in _data(call))
    return _target(call), config, types, tuple(_is_read(result) for result in call.results), data


def _is_read(value: Any) -> bool:
    return any(True for _ in value.uses)


def is_kernel(call: Any) -> bool:
    """Whether a custom call is a kernel that somebody wrote by hand, as far as its target tells."""
    return _target(call) in TARGETS or _target(call).startswith(cudnn.PREFIX)


def _name(call: Any) -> str:
    """What the author calls a kernel; empty where the call does not say."""
    stated = call.attributes.get("kernel_name")
    return printable(_text(stated)) if isinstance(stated, ir.StringAttr) else ""


def _in_region(call: Any) -> bool:
    """Whether a manual region is around a call: there it is on local shapes already."""
    owner = call.parent
    while owner is not None:
        if owner.name == REGION:
            return True
        owner = owner.operation.parent
    return False


def _described(call: Any, said: UserKernel | None) -> Description:
    """What is known of a kernel. One that cannot be read is computed whole."""
    operands, results = ([Value(*_shape_and_type(v)) for v in side] for side in (call.operands, call.results))
    name = _name(call) or _target(call)
    try:
        kernel, rule = _read(call, name, operands, results)
        why = "its dimensions depend on each other, or on where in the array a step is"
    except KernelError as error:
        moved = float(sum(value.bytes for value in (*operands, *results)))
        kernel, rule, why = HandWritten(name, bytes=moved), None, str(error)
    if said is not None:
        sizes = sizes_of(said, name, operands, results)
        rule = _agreed(kernel, rule, rule_of(said, sizes, operands, results)) if said.operands is not None else rule
        numbers = {factor: float(size) for factor, size in sizes.items()}
        products = kernel.products, kernel.vector
        if said.flops:
            products = _told(said, said.flops, numbers), 0.0
        moved = _told(said, said.bytes, numbers) if said.bytes else kernel.bytes
        kernel = replace(kernel, products=products[0], vector=products[1], bytes=moved)
        return kernel, rule, f"{said.where} says nothing else that can be done"
    return kernel, rule, f"{why}; if you know better, --kernels FILE with {suggestion(name, operands, results)}"


def _told(said: UserKernel, expression: str, sizes: dict[str, float]) -> float:
    try:
        return max(0.0, evaluate(expression, sizes))
    except ValueError as error:
        raise InputError(str(error), where=said.where, hint="is a size 0?") from None


def _agreed(kernel: HandWritten, read: Rule | None, told: Rule | None) -> Rule | None:
    """The rule that counts. A kernel that has to be rewritten for a part is split as its grid allows, and only along
    dimensions that the user does not call whole; any other as the user says."""
    if not kernel.kind:
        return told if kernel.name not in TARGETS[1:] else None
    if read is None or told is None:
        return None
    split = {
        (array, dim)
        for array, dims in enumerate((*told.operands, *told.results))
        for dim, factors in enumerate(dims)
        if not told.need_replication.issuperset(factors)
    }
    kept = {
        factor
        for array, dims in enumerate((*read.operands, *read.results))
        for dim, factors in enumerate(dims)
        for factor in factors
        if (array, dim) not in split
    }
    rule = replace(read, need_replication=read.need_replication | kept)
    return rule if len(rule.need_replication) < len(rule.sizes) else None


def _in_place(call: Any, rule: Rule | None) -> Rule | None:
    """The rule of a kernel that writes results where operands are: both are split alike."""
    if rule is None or ALIASES not in call.attributes:
        return rule
    whole = set(rule.need_replication)
    for result, operand in _ALIAS.findall(str(call.attributes[ALIASES])):
        for made, read in zip(rule.results[int(result or 0)], rule.operands[int(operand)], strict=True):
            whole |= {*made} ^ {*read}
    return replace(rule, need_replication=frozenset(whole)) if len(whole) < len(rule.sizes) else None


def _read(call: Any, name: str, operands: list[Value], results: list[Value]) -> tuple[HandWritten, Rule | None]:
    """A kernel that its configuration describes. Raises `KernelError` for any other."""
    target, text = _target(call), call.attributes.get("backend_config")
    if target != TARGET and not target.startswith(cudnn.PREFIX):
        raise KernelError("what it computes only its author knows")
    if not isinstance(text, ir.StringAttr):
        raise KernelError("it has no configuration")
    if target != TARGET:
        return cudnn.read_cudnn(target, _text(text), operands, results)
    config = config_of(_text(text))
    kernel = read_mosaic(config, _data(call))
    shapes = [value.shape for value in operands], [value.shape for value in results]
    found = grid_rule(kernel, *shapes, [_is_read(result) for result in call.results])
    free = found is not None and any(axis >= 0 for axis in found.axes)
    stated_cost = config.get("cost_estimate")
    estimate = stated_cost if isinstance(stated_cost, dict) else {}
    try:
        products, vector = _arithmetic(kernel, _number(estimate, "flops"))
        moved = _traffic(kernel, [*operands, *results], _number(estimate, "bytes_accessed"))
    except OverflowError:
        products, vector, moved = MOST_WORK, 0.0, 0.0
    if not products + vector + moved < MOST_WORK:
        raise KernelError("its grid and windows take longer than any chip can run")
    axes = found.axes if found is not None and free else ()
    facts = HandWritten(name if name != target else printable(kernel.name), "mosaic", products, vector, moved, axes)
    return facts, found.rule if found is not None and free else None


def _shape_and_type(value: Any) -> tuple[tuple[int, ...], str]:
    return shape_and_element_type(value.type) or ((), "token")


def _data(call: Any) -> tuple[Integers | None, ...]:
    """[operands] elements of those that are constants of integers."""
    return tuple(_elements(operand) for operand in call.operands)


def _elements(operand: Any) -> Integers | None:
    operand = _origin(operand)
    if isinstance(operand, ir.BlockArgument) or operand.owner.name != "stablehlo.constant":
        return None
    kind, value = operand.type, operand.owner.attributes["value"]
    if not isinstance(value, ir.DenseIntElementsAttr) or prod(kind.shape) > MOST_ELEMENTS:
        return None
    return np.array(value, dtype=np.int64).reshape(tuple(kind.shape))


def _origin(value: Any) -> Any:
    """Where a value comes from that a loop carries unchanged, a manual region gets whole, or a barrier hands on."""
    while True:
        if not isinstance(value, ir.BlockArgument):
            if value.owner.name != "stablehlo.optimization_barrier":
                return value
            value = value.owner.operands[ir.OpResult(value).result_number]
            continue
        block, number = value.owner, value.arg_number
        outside = block.owner.operation
        if outside.name == "stablehlo.while":
            body = outside.regions[1].blocks[0]
            ends = body.operations[len(body.operations) - 1].operands
            same = number < len(ends) and ends[number] == body.arguments[number]
        else:
            same = outside.name == REGION and outside.operands[number].type == value.type
        if not same:
            return value
        value = outside.operands[number]


def _number(estimate: dict[str, Any], name: str) -> float:
    """What an author says a kernel takes; 0 where that is no number that a kernel can take."""
    said: Any = estimate.get(name)
    return float(said) if type(said) in (int, float) and 0 < said < MOST_WORK else 0.0


def _arithmetic(kernel: Mosaic, stated: float) -> tuple[float, float]:
    """Operations on the matrix unit, and others: as the author states, less the part that the body skips; as counted
    where nothing is stated."""
    work = kernel.work
    if not stated:
        return work.products, work.vector
    products = work.products / work.flops if work.flops else 1.0
    done = stated * (1.0 - work.skipped)
    return done * products, done * (1.0 - products)


def _traffic(kernel: Mosaic, arrays: list[Value], stated: float) -> float:
    """Bytes that move between memory and the chip: a window moves whenever its place changes. At least what the author
    states."""
    if len(arrays) != kernel.ahead + len(kernel.windows):
        return max(stated, float(sum(array.bytes for array in arrays)))
    windows = [*[None] * kernel.ahead, *kernel.windows]
    return max(stated, sum(_moved(kernel, w, array) for w, array in zip(windows, arrays, strict=True)))


def _moved(kernel: Mosaic, window: Window | None, array: Value) -> float:
    if window is None or len(window.bounds) != len(array.shape):
        return float(array.bytes)
    inner = max(window.axes, default=-1)
    steps = prod(bound for bound in kernel.grid[: inner + 1] if bound != DYNAMIC)
    taken = 1.0 if all(index.count for index in window.index) else 1.0 - kernel.work.skipped
    return max(float(array.bytes), taken * steps * Value(window.bounds, array.dtype).bytes)


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
