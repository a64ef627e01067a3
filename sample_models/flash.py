"""Flash: the training step of two Megatron-shaped blocks whose attention is JAX's Pallas kernel for TPU.

Long sequences, weights and moments in float32, the arithmetic in bfloat16. The kernel runs on TPUs only, so that this
model has no tiny twin.
"""

from __future__ import annotations

from math import sqrt

import jax
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

from sample_models.block import Config, training
from sample_models.common import main


def flash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    q, k, v = (array.swapaxes(1, 2) for array in (q, k, v))
    return flash_attention(q, k, v, causal=True, sm_scale=1 / sqrt(q.shape[-1])).swapaxes(1, 2)


FLASH = Config(layers=2, model=4096, heads=32, head=128, ff=16384, seq=4096, batch=8)

ABOUT = "two blocks with Pallas flash attention, batch 8 x 4096: training step"

SAMPLES = (training("flash_train", ABOUT, FLASH, flash, "tpu"),)


if __name__ == "__main__":
    main(SAMPLES)
