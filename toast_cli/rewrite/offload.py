"""Keeps arrays in host memory while they are not needed: residuals from the forward to the backward pass, optimizer
state from step to step.

In: a `Source` and what to offload. Out: another one that computes the same from the same arguments, with the
transfers as JAX writes them (`annotate_device_placement`) and the memory of offloaded arguments and results. Residuals
are those that a loop over layers (`lax.scan`) stacks for the backward loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from toast_cli import xla
from toast_cli.emit.annotations import ancestor_in, around
from toast_cli.frontend.convert import mark_host_memory
from toast_cli.frontend.places import place_text
from toast_cli.frontend.reader import transfer_of
from toast_cli.frontend.source import Source, read_rewritten
from toast_cli.program.model import Program
from toast_cli.program.names import slash_path
from toast_cli.program.ops import CUSTOM_CALL, MANUAL_REGION
from toast_cli.program.roles import carried_results, optimizer_state
from toast_cli.program.values import TO_HOST
from toast_cli.request import Offload
from toast_cli.rewrite.block_graph import before_reshape, copied_module
from toast_cli.rewrite.loop_pairs import ResidualStack, loop_pairs, yielded
from toast_cli.xla import ir

T = TypeVar("T")
# The smallest arrays stay in device memory, with at most this fraction of the bytes: a transfer takes time to start.
_SMALLEST = 0.01
_NAMED = 3
_DEVICE, _HOST = "device", "pinned_host"  # JAX's memory kinds
_RESIDUALS_IN_JAX = (
    'jax.ad_checkpoint.checkpoint_name(x, "offloaded") for {values}, and jax.checkpoint(layer, policy='
    "jax.checkpoint_policies.save_and_offload_only_these_names(names_which_can_be_saved=[], "
    'names_which_can_be_offloaded=["offloaded"], offload_src="device", offload_dst="pinned_host"))'
)
_STATE_IN_JAX = (
    'sharding.with_memory_kind("pinned_host") in in_shardings and out_shardings for {values}, and '
    "jax.device_put(x, sharding) of each inside the step"
)


def with_offload(source: Source, offload: Offload) -> Source | str:
    """The program with these arrays in host memory, or the reason why there are none."""
    if source.annotations:
        return "the program states shardings of its own, which toast does not carry over to a rewritten program"
    copy = copied_module(source)
    notices, whys = [], []
    with copy.context, ir.Location.unknown():
        if offload is not Offload.optimizer_state:
            makers = _offload_residuals(copy)
            if makers:
                values = _listed(
                    "the layer's input" if maker is None else place_text(str(maker.location), source.text_file)
                    for maker in makers
                )
                notices.append(
                    "residuals are in host memory from the forward to the backward pass: the program written has it; "
                    f"in JAX it is {_RESIDUALS_IN_JAX.format(values=values or 'the residuals')}"
                )
            else:
                whys.append("no loop over layers (lax.scan) saves arrays in device memory for a backward loop")
        if offload is not Offload.residuals:
            pairs = _state(source.program)
            if pairs:
                _offload_arguments(copy, pairs)
                values = _listed(slash_path(source.program.arguments[n].path) or f"argument {n}" for n in pairs)
                notices.append(
                    "optimizer state is in host memory from step to step: the program written has it; in JAX it is "
                    f"{_STATE_IN_JAX.format(values=values)}"
                )
            else:
                whys.append("no argument in device memory is recognised as optimizer state")
    if not notices:
        return "; ".join(whys)
    return read_rewritten(source, copy, *notices, offload=offload.value)


def _state(program: Program) -> dict[int, int]:
    """Large arguments that are optimizer state in device memory -> the results that replace them."""
    sizes = {n: program.values[program.arguments[n].value].bytes for n in optimizer_state(program)}
    replaced = carried_results(program)
    chosen = set(_large(sizes))
    pairs = {n: replaced[n] for n in sizes if n in chosen and not program.arguments[n].on_host}
    return {n: k for n, k in pairs.items() if program.results[k].value != program.arguments[n].value}


def _large(sizes: dict[T, int]) -> list[T]:
    """The keys of the largest sizes, the largest first, without the smallest ones."""
    ordered, spared = sorted(sizes, key=lambda key: -sizes[key]), _SMALLEST * sum(sizes.values())
    while ordered and sizes[ordered[-1]] <= spared:
        spared -= sizes[ordered.pop()]
    return ordered


def _listed(names: Iterator[str]) -> str:
    distinct = list(dict.fromkeys(name for name in names if name))
    more = f" and {len(distinct) - _NAMED} more" if len(distinct) > _NAMED else ""
    return ", ".join(distinct[:_NAMED]) + more


def _offload_residuals(module: Any) -> list[Any]:
    """Moves each layer's slice of every large stack to the host where it is stacked, and back where it is read.

    Returns the operations that compute the slices, the largest first; None for a layer's input.
    """
    stacks = [
        (pair.graph.size(pair.forward.results[stack.carried]), yielded(pair.forward)[stack.carried].owner, stack.slices)
        for pair in loop_pairs(module)
        for stack in pair.stacks
        if _may_be_moved(stack)
    ]
    large = [stacks[k][1:] for k in _large({k: size for k, (size, *_) in enumerate(stacks)})]
    makers = [_maker(write.operands[1]) for write, _ in large]
    for write, slices in large:
        write.operands[1] = _moved(write.operands[1], _HOST, ir.InsertionPoint(write))
        for piece in slices:
            _replace_uses(piece.results[0], _DEVICE)
    return makers


def _may_be_moved(stack: ResidualStack) -> bool:
    """False for slices that are not contiguous or complex, inside manual regions, where toast does not count host
    memory, and for what the program moves to the host itself."""
    maker = _maker(stack.update)
    call = maker if maker is not None and maker.name == CUSTOM_CALL else None
    if call is not None and (transfer_of(call) or ir.StringAttr(call.attributes["call_target_name"]).value == TO_HOST):
        return False
    owner, is_complex = stack.update.owner, isinstance(stack.update.type.element_type, ir.ComplexType)
    holders = around(owner.owner if isinstance(owner, ir.Block) else owner)
    return stack.dim == 0 and not is_complex and all(holder.name != MANUAL_REGION for holder in holders)


def _maker(update: Any) -> Any | None:
    """The operation that computes a slice, before it is reshaped to be stacked; None if the loop carries the value."""
    source = before_reshape(update) or update
    return None if isinstance(source, ir.BlockArgument) else source.owner


def _offload_arguments(module: Any, pairs: dict[int, int]) -> None:
    """Puts arguments and the results that replace them in host memory."""
    function = xla.main_function(module)
    block = function.entry_block
    last = xla.terminator(block)
    for argument, result in pairs.items():
        _replace_uses(block.arguments[argument], _DEVICE)
        new = last.operands[result]
        maker = None if isinstance(new, ir.BlockArgument) else new.owner
        last.operands[result] = _moved(new, _HOST, ir.InsertionPoint.after(maker) if maker else ir.InsertionPoint(last))
    mark_host_memory(
        module,
        [n in pairs for n in range(len(block.arguments))],
        [k in pairs.values() for k in range(len(last.operands))],
    )


def _replace_uses(value: Any, memory: str) -> None:
    """Lets all users of a value read it after a transfer in front of the first of them."""
    users = [(use.owner.operation, use.operand_number) for use in value.uses]
    if not users:
        return
    block = value.owner if isinstance(value, ir.BlockArgument) else value.owner.operation.block
    readers = {ancestor_in(user, block) for user, _ in users}
    first = next(view.operation for view in block.operations if view.operation in readers)
    moved = _moved(value, memory, ir.InsertionPoint(first))
    for user, position in users:
        user.operands[position] = moved


def _moved(value: Any, memory: str, point: Any) -> Any:
    attributes = {
        "call_target_name": ir.StringAttr.get("annotate_device_placement"),
        "has_side_effect": ir.BoolAttr.get(True),
        "backend_config": ir.StringAttr.get(""),
        "mhlo.frontend_attributes": ir.DictAttr.get({"_xla_buffer_placement": ir.StringAttr.get(memory)}),
    }
    call = ir.Operation.create(CUSTOM_CALL, results=[value.type], operands=[value], attributes=attributes, ip=point)
    return call.results[0]
