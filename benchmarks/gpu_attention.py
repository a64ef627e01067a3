"""What cuDNN's attention reaches of a GPU's peak rate: `python benchmarks/gpu_attention.py` on a machine with one.

Prints, for each shape, forward and with gradients, milliseconds and TFLOP/s; a causal mask counts half of the products.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Batch, heads, heads of keys, sequence, width of a head.
SHAPES = [
    (8, 32, 32, 2048, 128),
    (4, 32, 8, 4096, 128),
    (2, 32, 8, 8192, 128),
    (8, 16, 16, 2048, 64),
    (16, 16, 16, 1024, 64),
]
RUNS = 20


def main() -> None:
    print(jax.devices()[0].device_kind, jax.__version__)
    for batch, heads, groups, length, width in SHAPES:
        q = jax.random.normal(jax.random.key(0), (batch, length, heads, width), jnp.bfloat16)
        k, v = (jax.random.normal(jax.random.key(n), (batch, length, groups, width), jnp.bfloat16) for n in (1, 2))
        for causal in (False, True):

            def attention(q: Any, k: Any, v: Any, causal: bool = causal) -> Any:
                return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")

            def gradients(q: Any, k: Any, v: Any, attention: Callable[..., Any] = attention) -> Any:
                return jax.grad(lambda *a: attention(*a).astype(jnp.float32).sum(), argnums=(0, 1, 2))(q, k, v)

            products = 2.0 * batch * heads * length * length * width * (0.5 if causal else 1.0)
            forward, both = (seconds(jax.jit(f), q, k, v) for f in (attention, gradients))
            row = (batch, heads, groups, length, width), causal, forward, both
            print(*row, f"{2 * products / forward / 1e12:.0f} {5 * products / (both - forward) / 1e12:.0f}", flush=True)


def seconds(function: Callable[..., Any], *arrays: Any) -> float:
    """Seconds of one run, on average."""
    jax.block_until_ready(function(*arrays))
    start = time.perf_counter()
    for _ in range(RUNS):
        result = function(*arrays)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / RUNS


if __name__ == "__main__":
    main()
