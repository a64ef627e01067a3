"""Trains the tiny twin of T2B (sample_models/t2b.py) on 8 virtual devices with the plan that toast finds, beside one
device without it.

python docs/examples/train.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp

import toast_partitioner as toast
from sample_models.t2b import SAMPLES

STEPS = 5


def main() -> None:
    sample = next(sample for sample in SAMPLES if sample.name == "t2b_tiny")
    *start, batch = sample.init(jax.random.key_data(jax.random.key(0)))
    alone = jax.jit(sample.step)
    # So small a model is best left whole; with 4 MiB on each device it has to be split.
    sharded = toast.jit(sample.step, mesh="h100-8", mesh_shape={"data": 4, "model": 2}, memory_limit="4MiB")
    print(sharded.plan(*start, batch))

    one, eight = start, start
    print("step   1 device  8 devices")
    for step in range(STEPS):
        *one, loss = alone(*one, batch)
        *eight, sharded_loss = sharded(*eight, batch)
        print(f"{step:4}  {loss:9.5f}  {sharded_loss:9.5f}")
        assert jnp.allclose(loss, sharded_loss, rtol=1e-3), "the two should agree but for rounding"
    example = jax.tree.leaves(eight)[0]
    print(f"the first weight lies as {example.sharding.spec} on {len(example.sharding.device_set)} devices")


if __name__ == "__main__":
    main()
