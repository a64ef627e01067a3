"""A situation of the corpus."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from programs import arg, source_of_text

from toast_cli import xla
from toast_cli.frontend import Source

X, Y = arg(64, 32), arg(32, 64)
SQUARE = arg(32, 32)
ROWS = arg(16, dtype="int32")
ONE = arg(dtype="int32")


@dataclass(frozen=True)
class Situation:
    """program: a JAX function of `arguments`, or MLIR text. refused: form -> what its error says. mesh: the only
    one that it is for. large: takes long, and is left to
    `make check-all`. runs: whether virtual CPU devices can run it; compiles: whether XLA:CPU compiles it."""

    program: Callable[..., Any] | str
    arguments: tuple[Any, ...] = ()
    donate: tuple[int, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    mesh: str = ""
    large: bool = False
    runs: bool = True
    compiles: bool = True

    def source(self) -> Source:
        return source_of_text(self.text)

    @cached_property
    def text(self) -> str:
        return str(self.module().operation.get_asm(enable_debug_info=True))

    def module(self) -> Any:
        """As the user has it."""
        if isinstance(self.program, str):
            return xla.parse_module(xla.make_context(), self.program)
        jitted = jax.jit(self.program, donate_argnums=self.donate, keep_unused=True)
        return jitted.lower(*self.arguments).compiler_ir("stablehlo")


def case(program: Callable[..., Any] | str, *arguments: Any, **more: Any) -> Situation:
    return Situation(program, arguments, **more)
