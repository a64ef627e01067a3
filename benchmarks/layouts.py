"""Servers of language models by layout: published tokens a second, and what toast expects of the same decode steps.

python -m benchmarks.layouts [CHIP …] [--write docs/accuracy.md]

Engines were run with all requests at once, on 1 to 8 GPUs of a host. A step is rebuilt in plain JAX: as many sequences
as fit in 95 % of the memory beside the weights, of those that were sent and of the sizes of TensorRT-LLM's CUDA graphs,
each with the mean of its positions in its cache. A sequence also takes the products of its prompt. Layers are alike, so
that steps of one and of two layers say what all take. Nothing is fitted: what engines lose between steps is left out,
and the order is what counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, groupby
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import Row, markdown_table, note, put_between, show, table_options
from toast_cli.dimensions import analyse
from toast_cli.frontend import load
from toast_cli.hardware import load_spec, matrix_rate
from toast_cli.plan.problem import make_problem
from toast_cli.price.evaluator import Evaluator
from toast_cli.tactics import priced_strategy

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 1024, 2048)
FILLED = 0.95
F8, F4, BF16 = jnp.float8_e4m3fn, jnp.float4_e2m1fn, jnp.bfloat16
BITS = {F8: 8, F4: 4, BF16: 16}


@dataclass(frozen=True)
class Model:
    """A decoder. weights, cache: their types. experts, chosen: 1 where layers are dense."""

    name: str
    layers: int
    model: int
    heads: int
    kv: int
    head: int
    hidden: int
    words: int
    weights: Any
    cache: Any = BF16
    experts: int = 1
    chosen: int = 1

    @property
    def layer_weights(self) -> float:
        attention = 2 * self.model * self.head * (self.heads + self.kv)
        return float(attention + 3 * self.experts * self.model * self.hidden)

    @property
    def active_weights(self) -> float:
        """Those that one token is multiplied with."""
        spared = 3 * (self.experts - self.chosen) * self.model * self.hidden
        return self.layers * (self.layer_weights - spared) + self.model * self.words

    @property
    def weight_bytes(self) -> float:
        return (self.layers * self.layer_weights * BITS[self.weights] + 2 * self.model * self.words * 16) / 8


@dataclass(frozen=True)
class Served:
    """A layout: tokens a second that all devices together wrote. sent: sequences at once."""

    model: Model
    chip: str
    devices: int
    tokens_per_second: float
    prompt: int
    written: int
    source: str
    sent: int = 2048


LLAMA8, LLAMA4 = (Model("Llama 3.1 70B", 80, 8192, 64, 8, 128, 28672, 128256, weights, F8) for weights in (F8, F4))
QWEN = Model("Qwen3 235B-A22B", 94, 4096, 64, 4, 128, 1536, 151936, F8, BF16, 128, 8)
OSS = Model("gpt-oss 120B", 36, 2880, 64, 8, 64, 2880, 201088, F4, BF16, 128, 4)
# TensorRT-LLM: docs/source/performance/perf-overview.md of v0.20, 128 tokens in and 2,048 out. gpustack/gpustack:
# docs/performance-lab, vLLM 0.11 with 1,000 ShareGPT requests; output tokens.
TENSORRT, GPUSTACK = "TensorRT-LLM perf-overview", "gpustack performance-lab"
SERVED = (
    *(Served(model, chip, devices, tokens, 128, 2048, TENSORRT) for model, chip, measured in (
        (LLAMA8, "h100", (745.19, 5822.02, 11442.01, 17463.99)),
        (LLAMA8, "h200", (4351.07, 8450.31, 13438.71, 20750.58)),
        (LLAMA4, "b200", (9925.00, 15459.71, 23608.58, 30742.86)),
    ) for devices, tokens in zip((1, 2, 4, 8), measured, strict=True)),
    *(Served(QWEN, "h100", devices, tokens, 216, 198, GPUSTACK, 984)
      for devices, tokens in ((4, 3376.99), (8, 3856.59))),
    *(Served(OSS, "h100", devices, tokens, 219, 199, GPUSTACK, 984)
      for devices, tokens in ((1, 3016), (2, 7648.67), (4, 11327.22))),
)  # fmt: skip
COLUMNS = {
    "model": "{model}", "GPUs": "{chip}", "measured": "{measured}", "expected": "{expected}",
    "sequences": "{sequences}", "pairs in order": "{ordered}",
}  # fmt: skip
START, END = "<!-- layouts: written by python -m benchmarks.layouts -->", "<!-- layouts: end -->"


def main() -> None:
    names, page = table_options(__doc__, "CHIP")
    chosen = [one for one in SERVED if not names or one.chip in names]
    rows = [row_of(list(group)) for _, group in groupby(chosen, lambda one: (one.model, one.chip))]
    show("tokens a second of a GPU, by tensor parallelism", COLUMNS, rows)
    if page:
        put_between(page, START, END, markdown_table(COLUMNS, rows, words=2))


def row_of(group: list[Served]) -> Row:
    """The layouts of one model on one kind of GPU, in tokens a second of a GPU."""
    sequences = [most_sequences(one) for one in group]
    expected = [expected_tokens(one, count) / one.devices for one, count in zip(group, sequences, strict=True)]
    measured = [one.tokens_per_second / one.devices for one in group]
    pairs = list(combinations(zip(measured, expected, strict=True), 2))
    names = [f"TP {one.devices}" if one.model.experts == 1 else f"TP {one.devices} EP {one.devices}" for one in group]
    return {
        "model": group[0].model.name, "chip": group[0].chip,
        "measured": ", ".join(f"{name} {round(one):,}" for name, one in zip(names, measured, strict=True)),
        "expected": ", ".join(f"{round(one):,}" for one in expected),
        "sequences": ", ".join(map(str, sequences)),
        "ordered": f"{sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)} of {len(pairs)}",
    }  # fmt: skip


def most_sequences(one: Served) -> int:
    """The most sequences whose caches, half full of what they write, fit beside the weights."""
    model, chip = one.model, load_spec(f"{one.chip}:{one.devices}").chip
    position = 2 * model.layers * model.kv * model.head * BITS[model.cache] / 8 / min(one.devices, model.kv)
    free = FILLED * chip.memory_bytes - model.weight_bytes / one.devices
    fitting = int(min(one.sent, free / position / (one.prompt + one.written / 2)))
    return max(size for size in SIZES if size <= fitting) if one.source == TENSORRT else fitting


def expected_tokens(one: Served, sequences: int) -> float:
    """Tokens a second of all devices together."""
    first, second = (step_seconds(one, sequences, layers) for layers in (1, 2))
    step = first + (one.model.layers - 1) * (second - first)
    evaluator = evaluator_of(one, sequences, 1)
    chip, attained = evaluator.problem.mesh.chip, evaluator.profile.attained
    rate = one.devices * chip.sustained * attained.matrix * matrix_rate(chip, "f8E4M3FN")
    reading = 2.0 * one.model.active_weights * one.prompt / rate
    note(f"{one.model.name} {one.chip}:{one.devices}: {sequences} sequences, step {1e3 * step:.1f} ms")
    return sequences * one.written / (one.written * step + sequences * reading)


def step_seconds(one: Served, sequences: int, layers: int) -> float:
    """Of a decode step of a model of so many layers."""
    evaluator = evaluator_of(one, sequences, layers)
    if one.devices == 1:
        return evaluator.exact_cost(()).step_seconds
    return priced_strategy(evaluator, "megatron").cost.step_seconds


def evaluator_of(one: Served, sequences: int, layers: int) -> Evaluator:
    mesh = load_spec(f"{one.chip}:{one.devices}").mesh({"model": one.devices})
    source = load("decode.mlir", content=lowered(one, sequences, layers).encode())
    return Evaluator(make_problem(source.program, analyse(source.program), mesh))


def lowered(one: Served, sequences: int, layers: int) -> str:
    """The decode step of `layers` layers, as text."""
    m, length = one.model, one.prompt + one.written // 2

    def array(*shape: int, dtype: Any = BF16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def product(form: str, x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum(form, x.astype(F8), w.astype(F8), preferred_element_type=BF16)

    def norm(x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)).astype(x.dtype)

    def layer(x: jax.Array, w: Any, caches: Any, places: jax.Array) -> Any:
        h = norm(x)
        query, *new = (product("bd,dnk->bnk", h, w[name]) for name in ("query", "key", "value"))
        keys, values = (
            jax.lax.dynamic_update_slice(cache, part.astype(cache.dtype)[:, None], (0, length - 1, 0, 0))
            for cache, part in zip(caches, new, strict=True)
        )
        grouped = query.reshape(sequences, m.kv, m.heads // m.kv, m.head)
        scores = jnp.einsum("bngk,bsnk->bngs", grouped, keys.astype(BF16), preferred_element_type=jnp.float32)
        mixed = jnp.einsum("bngs,bsnk->bngk", jax.nn.softmax(scores).astype(BF16), values.astype(BF16))
        x = x + product("bnk,nkd->bd", mixed.reshape(sequences, m.heads, m.head), w["out"])
        h = norm(x)
        if m.experts == 1:
            inner = jax.nn.silu(product("bd,df->bf", h, w["gate"])) * product("bd,df->bf", h, w["up"])
            return x + product("bf,fd->bd", inner, w["down"]), (keys, values)
        rows = h[places]  # of each expert
        inner = jax.nn.silu(product("ecd,edf->ecf", rows, w["gate"])) * product("ecd,edf->ecf", rows, w["up"])
        return x.at[places].add(product("ecf,efd->ecd", inner, w["down"])), (keys, values)

    def decode(params: Any, caches: Any, ids: jax.Array, places: jax.Array) -> Any:
        x, new = params["embed"][ids], []
        for w, given in zip(params["layers"], caches, strict=True):
            x, made = layer(x, w, given, places)
            new.append(made)
        return jnp.argmax(norm(x) @ params["head"], -1), new

    shapes = {"query": (m.model, m.heads, m.head), "out": (m.heads, m.head, m.model)}
    shapes |= dict.fromkeys(("key", "value"), (m.model, m.kv, m.head))
    experts = (m.experts,) if m.experts > 1 else ()
    shapes |= dict.fromkeys(("gate", "up"), (*experts, m.model, m.hidden))
    shapes["down"] = (*experts, m.hidden, m.model)
    weights = [{name: array(*shape, dtype=m.weights) for name, shape in shapes.items()}] * layers
    caches = [[array(sequences, length, m.kv, m.head, dtype=m.cache)] * 2] * layers
    params = {"embed": array(m.words, m.model), "head": array(m.model, m.words), "layers": weights}
    places = array(m.experts, max(1, sequences * m.chosen // m.experts), dtype=jnp.int32)
    return jax.jit(decode, donate_argnums=1).lower(params, caches, array(sequences, dtype=jnp.int32), places).as_text()


if __name__ == "__main__":
    main()
