"""What every sample shares: the `Sample` record, weights, Adam, and lowering to a file next to the scripts.

Nothing here allocates a model: programs are lowered from the shapes that `jax.eval_shape` finds for `Sample.init`.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import zstandard
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

Tree = Any  # a pytree of arrays: nested dicts and lists
Loss = Callable[[Tree, Tree], jax.Array]

FOLDER = Path(__file__).resolve().parent
ENDINGS = {"bytecode": ".mlirbc.zst", "portable": ".stablehlo.zst", "text": ".mlir"}


@dataclass(frozen=True)
class Sample:
    """One program.

    Attributes:
        name: also its file's name. about: one line for the table in sample_models/README.md.
        step: the function to lower. Its first argument is the weights.
        init: random key -> example arguments of `step`, ready to run.
        donate: positions of the arguments whose buffers the results may take.
        form: "bytecode" (MLIR bytecode), "portable" (a StableHLO portable artifact), both zstd-compressed, or "text".
        platform: which one it is lowered for, where it has kernels for one.
    """

    name: str
    about: str
    step: Callable[..., Any]
    init: Callable[[jax.Array], tuple[Tree, ...]]
    donate: tuple[int, ...] = ()
    form: str = "bytecode"
    platform: str = "cpu"

    @property
    def path(self) -> Path:
        return FOLDER / (self.name + ENDINGS[self.form])

    def arguments(self) -> tuple[Tree, ...]:
        """Shapes and dtypes of the arguments; allocates nothing."""
        shapes: tuple[Tree, ...] = jax.eval_shape(self.init, jax.ShapeDtypeStruct((2,), jnp.uint32))
        return shapes

    def parameter_count(self) -> int:
        return sum(prod(leaf.shape) for leaf in jax.tree.leaves(self.arguments()[0]))


# ---------------------------------------------------------------- weights and batches


@dataclass(frozen=True)
class Weight:
    """A weight to make: normal with variance 1/fan_in, or `fill` everywhere when fan_in is 0."""

    shape: tuple[int, ...]
    fan_in: int = 0
    fill: float = 0.0


def dense(*shape: int, inputs: int = 1) -> Weight:
    """A weight whose first `inputs` dimensions are summed over when it is used."""
    return Weight(shape, fan_in=prod(shape[:inputs]))


def zeros(*shape: int) -> Weight:
    return Weight(shape)


def ones(*shape: int) -> Weight:
    return Weight(shape, fill=1.0)


def initialise(key: jax.Array, weights: Tree, dtype: Any = jnp.float32) -> Tree:
    """A tree of `Weight` -> the same tree of arrays."""
    leaves, structure = jax.tree.flatten(weights, is_leaf=lambda leaf: isinstance(leaf, Weight))
    keys = jax.random.split(key, len(leaves))
    return structure.unflatten([_weight(key, leaf, dtype) for key, leaf in zip(keys, leaves, strict=True)])


def _weight(key: jax.Array, weight: Weight, dtype: Any) -> jax.Array:
    if weight.fan_in == 0:
        return jnp.full(weight.shape, weight.fill, dtype)
    return (jax.random.normal(key, weight.shape) / sqrt(weight.fan_in)).astype(dtype)


def stacked(weights: Tree, layers: int) -> Tree:
    """The same weights with a leading dimension of `layers`, for `lax.scan` over layers."""
    return jax.tree.map(
        lambda w: Weight((layers, *w.shape), w.fan_in, w.fill), weights, is_leaf=lambda leaf: isinstance(leaf, Weight)
    )


def cast(tree: Tree, dtype: Any = jnp.bfloat16) -> Tree:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


def tokens(key: jax.Array, vocab: int, *shape: int) -> jax.Array:
    return jax.random.randint(key, shape, 0, vocab, jnp.int32)


# ---------------------------------------------------------------- training


def adam(
    params: Tree, gradients: Tree, mu: Tree, nu: Tree, count: jax.Array, rate: float | jax.Array
) -> tuple[Tree, Tree, Tree, jax.Array]:
    """One Adam update (Kingma & Ba 2015, in the order of section 2): new weights, both moments and the step count."""
    count = count + 1
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mu, gradients)
    nu = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * (g * g), nu, gradients)
    rate = rate * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    params = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), params, mu, nu)
    return params, mu, nu, count


def training_sample(
    name: str,
    about: str,
    loss: Loss,
    weights: Tree,
    batch: Callable[[jax.Array], Tree],
    *,
    rate: float = 1e-3,
    form: str = "bytecode",
    platform: str = "cpu",
) -> Sample:
    """A whole training step: loss, gradients, Adam; weights, both moments and the step count are donated."""

    def train_step(params: Tree, mu: Tree, nu: Tree, count: jax.Array, batch: Tree) -> tuple[Tree, ...]:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        params, mu, nu, count = adam(params, gradients, mu, nu, count, rate)
        return params, mu, nu, count, value

    def init(key: jax.Array) -> tuple[Tree, ...]:
        weight_key, batch_key = jax.random.split(key)
        params = initialise(weight_key, weights)
        return params, *moments(params), jnp.zeros((), jnp.int32), batch(batch_key)

    return Sample(name, about, train_step, init, donate=(0, 1, 2, 3), form=form, platform=platform)


def moments(params: Tree) -> tuple[Tree, Tree]:
    """Adam's two moments at step 0, each an array of its own (they are donated)."""
    return jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)


# ---------------------------------------------------------------- lowering and files


LOCATIONS = {
    # Paths relative to the repository, or to JAX, so that a stored program says nothing about the machine that made it.
    "jax_hlo_source_file_canonicalization_regex": r".*/(?=sample_models/|jax/experimental/)",
    # The three innermost frames are the model's own; those further out only tell who called `lower`.
    "jax_traceback_in_locations_limit": 3,
}


def lower(sample: Sample) -> ir.Module:
    """The StableHLO module of a sample, with source locations."""
    arguments = sample.arguments()
    # Functions traced for another sample would carry that sample's source locations.
    jax.clear_caches()
    with _configured(LOCATIONS):
        step = jax.jit(sample.step, donate_argnums=sample.donate, keep_unused=True)
        return step.trace(*arguments).lower(lowering_platforms=(sample.platform,)).compiler_ir("stablehlo")


@contextmanager
def _configured(settings: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


LOWERED_WITH = "0.10.2"  # the JAX of all stored programs; others lower some functions to other ops


def write(sample: Sample) -> Path:
    """Lowers a sample and writes its file, with the JAX of the others."""
    if jax.__version__ != LOWERED_WITH:
        what = f"the samples are lowered with JAX {LOWERED_WITH}, this is {jax.__version__}"
        raise SystemExit(f"{what}: install it, or set LOWERED_WITH in common.py and write all samples again")
    sample.path.write_bytes(encode(lower(sample), sample.form))
    return sample.path


def read(sample: Sample) -> ir.Module:
    """A sample's stored program."""
    return decode(sample.path.read_bytes(), sample.form)


def encode(module: ir.Module, form: str) -> bytes:
    """A module in one of the forms that `Sample` names, debug locations included."""
    if form == "text":
        return str(module.operation.get_asm(enable_debug_info=True)).encode()
    return zstandard.ZstdCompressor(level=19).compress(_binary(module, form))


def _binary(module: ir.Module, form: str) -> bytes:
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    if form == "bytecode":
        return buffer.getvalue()
    with module.context:
        copy = ir.Module.parse(buffer.getvalue())  # which serialising uses up
        return bytes(stablehlo.serialize_portable_artifact(copy, stablehlo.get_current_version(), True))


def decode(data: bytes, form: str) -> ir.Module:
    """The inverse of `encode`, in a context of its own that knows every dialect JAX emits."""
    context = jax.jit(lambda: 0).lower().compiler_ir("stablehlo").context
    plain = data if form == "text" else zstandard.ZstdDecompressor().decompress(data)
    with context:
        return stablehlo.deserialize_portable_artifact(context, plain) if form == "portable" else ir.Module.parse(plain)


def histogram(module: ir.Module) -> Counter[str]:
    """How often each op occurs, each call counted as the ops of what it calls; terminators are left out."""
    functions = {op.attributes["sym_name"].value: op for op in module.body.operations}
    counted: dict[str, Counter[str]] = {}

    def count(name: str) -> Counter[str]:
        if name not in counted:
            counted[name] = _count(functions[name].operation, count)
        return counted[name]

    return count("main")


def _count(operation: ir.Operation, callee: Callable[[str], Counter[str]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for op in (op for region in operation.regions for block in region for op in block):
        if op.name == "func.call":
            found.update(callee(op.attributes["callee"].value))
        elif op.name not in ("func.return", "stablehlo.return"):
            found[op.name] += 1
        found.update(_count(op.operation, callee))
    return found


def main(samples: Sequence[Sample]) -> None:
    """What each script does when run: write its programs."""
    for sample in samples:
        path = write(sample)
        print(f"{path.name}: {path.stat().st_size:,} bytes")
