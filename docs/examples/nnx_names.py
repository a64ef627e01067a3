# nnx_names.py, needs flax
import jax
import jax.numpy as jnp
from flax import nnx

import toast_partitioner as toast


class Perceptron(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(256, 1024, kernel_init=nnx.with_partitioning(init, ("embed", "mlp")), rngs=rngs)
        self.down = nnx.Linear(1024, 256, kernel_init=nnx.with_partitioning(init, ("mlp", "embed")), rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


with nnx.use_eager_sharding(False):  # there is no mesh yet
    definition, params = nnx.split(Perceptron(nnx.Rngs(0)))


def train_step(params, batch):
    def loss(params):
        return jnp.mean((nnx.merge(definition, params)(batch["x"]) - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), value


batch = {"x": jnp.ones((512, 256)), "y": jnp.zeros((512, 256))}
lowered = jax.jit(train_step, donate_argnums=0).lower(params, batch)
names = nnx.get_partition_spec(params)
plan = toast.partition(lowered, "h100-8", mesh_shape="data=4,model=2", strategy="fsdp+megatron", names=names)
print(plan.summary)
rules = plan.maxtext_rules({"embed": ["embed", "activation_embed"]})
print(rules)

ins, outs = plan.in_shardings(), plan.out_shardings()
step = jax.jit(train_step, donate_argnums=0, in_shardings=ins, out_shardings=outs)
params, batch = jax.device_put((params, batch), ins)
for _ in range(3):
    params, loss = step(params, batch)
assert '"mlp"' in rules and not params["up"]["kernel"][...].is_fully_replicated
