# eqx_step.py, needs equinox
import equinox as eqx
import jax
import jax.numpy as jnp

import toast_partitioner as toast

model = eqx.nn.MLP(256, 256, 1024, 2, key=jax.random.key(0))


@eqx.filter_jit
def train_step(model, x):
    loss, gradients = eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients)), loss


x = jnp.ones((512, 256))
plan = toast.partition(train_step.lower(model, x), "h100-8", mesh_shape="data=4,model=2", memory_limit="6MiB")
arrays, rest = eqx.partition((model, x), eqx.is_array)
leaves, tree = jax.tree.flatten(arrays)
shardings = jax.tree.unflatten(tree, plan.flat_in_shardings())  # one for each array of the arguments, in order
model, x = eqx.combine(jax.device_put(arrays, shardings), rest)
for _ in range(3):
    model, loss = train_step(model, x)
print(plan.summary, loss)
assert any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
