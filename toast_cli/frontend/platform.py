"""Ops that XLA splits on TPUs and nowhere else.

Before it partitions, XLA:TPU rewrites these into what its partitioner can split; XLA:GPU (and XLA:CPU) partition them
as they are, which means that all they read is gathered, batch and all. Seen ahead of time with jaxlib 0.10.2 on v5e and
H100: `top_k` over a split batch, and convolutions in groups of several channels (a depthwise one has one channel in a
group, and is split everywhere).

Enters: a `Source`, and the platform of the chips. Leaves: the same with such ops computed whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from toast_cli.frontend.rules import whole_rule
from toast_cli.frontend.source import Source
from toast_cli.frontend.windows import convolution_dims
from toast_cli.program.model import Op, Program, Value
from toast_cli.xla import ir

TOP_K = frozenset({"chlo.top_k"})
TOP_K_CALLS = frozenset({"TopK", "mhlo.topk"})


def for_platform(source: Source, platform: Literal["tpu", "gpu"]) -> Source:
    """The source as XLA partitions it for chips of a platform."""
    if platform == "tpu":
        return source
    values = source.program.values
    ops = tuple(
        as_whole(op, values) if only_on_tpu(op, operation) else op
        for op, operation in zip(source.program.ops, source.operations, strict=True)
    )
    if all(new is old for new, old in zip(ops, source.program.ops, strict=True)):
        return source
    program = source.program
    remade = Program(program.name, ops, values, program.arguments, program.results, program.loops)
    return replace(source, program=remade)


def only_on_tpu(op: Op, operation: Any) -> bool:
    """Whether only XLA:TPU splits the op; `operation` is what it stands for."""
    if op.name == "stablehlo.convolution":
        return is_grouped(operation)
    return op.name in TOP_K or (op.name == "stablehlo.custom_call" and op.detail in TOP_K_CALLS)


def is_grouped(convolution: Any) -> bool:
    """Whether the channels come in groups of several."""
    if ir.IntegerAttr(convolution.attributes["feature_group_count"]).value == 1:
        return False
    kernel = ir.RankedTensorType(convolution.operands[1].type)
    return bool(kernel.shape[convolution_dims(convolution)[1].index("i")] > 1)


def as_whole(op: Op, values: tuple[Value, ...]) -> Op:
    """The op, computed whole on every device."""
    ranks = (tuple(len(values[v].shape) for v in numbers) for numbers in (op.operands, op.results))
    return replace(op, rule=whole_rule(*ranks), opaque=True)
