"""Makes a `Source` from a rewritten module of the same program."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from toast_cli import xla
from toast_cli.frontend.source import Source, read_source
from toast_cli.frontend.splats import copy_splats
from toast_cli.kernels.describe import describe_kernels
from toast_cli.xla import ir, operations_in


def read_rewritten(source: Source, operation: Any, *added: str, **facts: Any) -> Source:
    """The source with a rewritten copy of its module, whose arguments are the same.

    Args:
        added: sentences for reports about the rewriting. facts: fields of the program that record it.
    """
    module = xla.parse_module(source.module.context, xla.write_bytecode(operation))
    copy_splats(module)
    describe_kernels(module, source.kernels)
    found = read_source(source.path, source.format, module)
    arguments = tuple(
        replace(new, dimension_names=old.dimension_names, annotated_axes=old.annotated_axes)
        for new, old in zip(found.program.arguments, source.program.arguments, strict=True)
    )
    before = {name: getattr(source.program, name) for name in ("parted", "microbatches", "recompute", "offload")}
    program = replace(found.program, arguments=arguments, **(before | facts))
    notices = (*source.notices, *added)
    return replace(found, program=program, notices=notices, frames=source.frames, kernels=source.kernels)


def read_from_outside(operations: Collection[Any]) -> list[Any]:
    """Values that operations, or those in their regions, read and do not make."""
    return list(dict.fromkeys(value for _, _, value in xla.outer_operands(operations)))


def made_by(operations: Iterable[Any]) -> set[Any]:
    """Results of operations and of those in their regions, and arguments of the regions."""
    within = [inner for operation in operations for inner in operations_in(operation)]
    made = {value for inner in within for value in inner.results}
    return made | {
        value for inner in within for region in inner.regions for block in region for value in block.arguments
    }


def retyped(kind: Any, shape: tuple[int, ...]) -> Any:
    """The type of arrays of another shape."""
    return ir.RankedTensorType.get(shape, kind.element_type)
