# keras_layouts.py, needs keras
# ruff: noqa: B905
import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np

import toast_partitioner as toast

MESH = {"data": 4, "model": 2}


def make_model(distribution=None):
    keras.utils.clear_session()  # the same names every time; this forgets the distribution, too
    keras.utils.set_random_seed(0)
    keras.distribution.set_distribution(distribution)
    wide = keras.layers.Dense(1024, activation="relu", name="up")
    model = keras.Sequential([keras.Input((256,)), wide, keras.layers.Dense(256, name="down")])
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="mse")
    model.optimizer.build(model.trainable_variables)
    return model


def plan_for(model):
    paths = [v.path for v in model.trainable_variables]

    def in_order(tree):
        return [tree[path] for path in paths]  # JAX sorts the keys of a dictionary

    def train_step(weights, state, x, y):
        def loss(weights):
            out, _ = model.stateless_call(in_order(weights), [], x, training=True)
            return ((out - y) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        after, state = model.optimizer.stateless_apply(state, in_order(gradients), in_order(weights))
        return dict(zip(paths, after)), state, value

    weights = {v.path: v.value for v in model.trainable_variables}
    state = [v.value for v in model.optimizer.variables]
    rows = jax.ShapeDtypeStruct((512, 256), "float32")
    lowered = jax.jit(train_step, donate_argnums=(0, 1)).lower(weights, state, rows, rows)
    pins = ["x=data,None", "y=data,None"]
    return toast.partition(lowered, "h100-8", mesh_shape=MESH, memory_limit="7MiB", pins=pins)


alone = make_model()
plan = plan_for(alone)
print(plan, plan.keras_layouts("weights"))

devices = keras.distribution.DeviceMesh(tuple(MESH.values()), tuple(MESH), keras.distribution.list_devices())
layouts = keras.distribution.LayoutMap(devices)
for path, axes in plan.keras_layouts("weights").items():
    layouts[path] = axes
x = np.random.default_rng(0).normal(size=(512, 256)).astype("float32")
expected = alone.fit(x, np.sin(x), batch_size=512, epochs=3, shuffle=False, verbose=0).history["loss"]
split = make_model(keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="data"))
found = split.fit(x, np.sin(x), batch_size=512, epochs=3, shuffle=False, verbose=0).history["loss"]
np.testing.assert_allclose(found, expected, rtol=1e-3)
kernel = next(v for v in split.variables if v.path.endswith("up/kernel"))
assert not kernel.value.is_fully_replicated
