"""What XLA splits on TPUs only is computed whole for other chips."""

from __future__ import annotations

from typing import Any, Literal

import jax
import pytest
from jax import lax
from programs import arg, source_of

from toast_cli.frontend import for_platform


def convolution(groups: int) -> Any:
    return lambda x, k: lax.conv_general_dilated(
        x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


IMAGE = arg(8, 4, 4, 16)
# what, function, arguments, whether only XLA:TPU splits it
CASES: list[tuple[str, Any, tuple[Any, ...], bool]] = [
    ("top_k", lambda x: lax.top_k(x, 2), (arg(16, 8),), True),
    ("sort", lambda x: lax.sort(x, dimension=1), (arg(16, 8),), False),
    ("convolution", convolution(1), (IMAGE, arg(3, 3, 16, 32)), False),
    ("grouped convolution", convolution(4), (IMAGE, arg(3, 3, 4, 32)), True),
    ("depthwise convolution", convolution(16), (IMAGE, arg(3, 3, 1, 32)), False),
    (
        "gradient of a depthwise one with more channels out",
        jax.grad(lambda x, k: convolution(16)(x, k).sum()),
        (IMAGE, arg(3, 3, 1, 32)),
        True,
    ),
]


@pytest.mark.parametrize(
    ("run", "arguments", "only_tpu"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_whole_where_xla_gathers(
    run: Any, arguments: tuple[Any, ...], only_tpu: bool, platform: Literal["tpu", "gpu"]
) -> None:
    source = source_of(run, *arguments)
    found = for_platform(source, platform)
    whole = [op for op in found.program.ops if op.opaque]
    assert bool(whole) == (only_tpu and platform == "gpu")
    assert all(not op.rule.sizes for op in whole)
    assert whole or found is source
