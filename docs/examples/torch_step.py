# torch_step.py, needs torchax
import jax
import jax.numpy as jnp
import torch
import torchax

import toast_partitioner as toast


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


model = torch.nn.Sequential(*(Block(256) for _ in range(2)))
params, forward = torchax.extract_jax(model)


def train_step(params, batch):
    def loss(params):
        return jnp.mean((forward(params, (batch["x"],)) - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), value


rows = jax.ShapeDtypeStruct((512, 256), jnp.float32)
lowered = jax.jit(train_step, donate_argnums=0).lower(params, {"x": rows, "y": rows})
plan = toast.partition(lowered, "h100-8", mesh_shape="data=4,model=2", memory_limit="6MiB")
print(plan)
print(plan.mark_sharding_lines("params"))
