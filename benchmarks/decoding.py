"""Decode steps of an 8B decoder: predicted, beside the steps that XLA compiles ahead of time.

`python -m benchmarks.decoding [MESH | FORM | SEQUENCES ...]` plans and compiles one step for each machine, number of
sequences and form, and prints a table. Forms: `unrolled`, of 4 layers that each have a cache of 4,096 positions;
`scan`, a loop over all 32 layers and their stacked caches; `paged` and `ragged`, 4 layers with JAX's kernels of paged
attention; `prefill`, the ragged one for 128 tokens of each sequence. XLA:TPU estimates no cycles of kernels by hand:
they count as long as reading their pages at the memory's full rate, or as their products at the peak rate. XLA:GPU
estimates none at all: there the prediction stands beside the time that reading the arguments once takes, which no step
can beat.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.common import Row, show
from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.compile import compile_for, target_of
from toast_cli.ask_xla.confirm import seconds_on
from toast_cli.ask_xla.schedule import scheduled_time
from toast_cli.hardware import load_spec
from toast_cli.pipeline import Request, partition

MESHES = ("v5e-8", "v6e-8", "h100-8")
BATCHES = (16, 32, 64)
LAYERS = {"unrolled": 4, "scan": 32, "paged": 4, "ragged": 4, "prefill": 4}
WIDTH, KV, GROUP, HEAD, HIDDEN, WORDS, LENGTH = 4096, 8, 4, 128, 14336, 128256, 4096
PAGE, CHUNK = 64, 128  # positions of a page; tokens of a sequence that a prefill step processes
KERNEL = 'custom_call_target="tpu_custom_call"'
COLUMNS = {
    "form": "{form}", "mesh": "{mesh}", "sequences": "{batch}", "predicted ms": "{predicted:.2f}",
    "beside ms": "{beside:.2f}", "of": "{of}", "predicted over it": "{error:+.0%}",
    "predicted peak": "{peak:.2f} GiB", "compiled peak": "{compiled_peak:.2f} GiB",
}  # fmt: skip


def main(wanted: list[str]) -> int:
    forms, batches = [one for one in LAYERS if one in wanted], [int(one) for one in wanted if one.isdigit()]
    meshes = [one for one in wanted if one not in LAYERS and not one.isdigit()]
    rows = [
        row
        for mesh in meshes or MESHES
        for form in forms or LAYERS
        for batch in batches or BATCHES
        if form in ("unrolled", "scan") or not mesh.startswith("h100")  # the kernels are for TPUs
        for row in measured(form, mesh, batch)
    ]
    show("decode steps of an 8B decoder", COLUMNS, rows)
    return 0


def measured(form: str, mesh_name: str, batch: int) -> Iterator[Row]:
    """The figures of one point; none if XLA refuses it."""
    spec = load_spec(mesh_name)
    content = lowered(form, batch) if form in ("unrolled", "scan") else with_kernels(form, batch)
    outcome = partition(Request("decode.mlir", mesh_name, iterations=200, content=content))
    mesh, cost = outcome.problem.mesh, outcome.evaluator.exact_cost(outcome.result.plan)
    answer = compile_for(outcome.emit("bytecode").content, "stablehlo", target_of(spec))
    if isinstance(answer, Failure):
        print(f"{form} {mesh_name} {batch}: {answer.reason[:200]}")
        return
    rate = mesh.chip.memory_bytes_per_second
    of = "compiled step"
    if spec.chip.platform == "gpu":
        of, seconds = "reading arguments", answer.argument_bytes / rate
    else:
        rates = mesh.chip.clock_hertz, rate
        ops, uses = outcome.source.program.ops, outcome.evaluator.kernels(outcome.result.plan)
        uses = [use for use in uses if ops[use.op].kernel]
        peak = mesh.chip.matrix_flops["bf16"]
        each = sum(max(use.bytes / rate, use.flops / peak) for use in uses) / max(1.0, sum(use.runs for use in uses))
        cycles = f'{KERNEL}, "estimated_cycles":"{round(each * rates[0])}"'
        text = re.sub(KERNEL, cycles, answer.hlo_text)
        seconds = scheduled_time(text, mesh.names, mesh.sizes, *rates, partial(seconds_on, mesh)).step_seconds
    yield {
        "form": form, "mesh": mesh_name, "batch": batch, "predicted": 1e3 * cost.step_seconds,
        "beside": 1e3 * seconds, "of": of, "error": cost.step_seconds / seconds - 1, "peak": cost.peak_bytes / 2**30,
        "compiled_peak": answer.device_bytes / 2**30,
    }  # fmt: skip


def lowered(form: str, batch: int) -> bytes:
    """The program of one step, for TPUs and GPUs."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    count = LAYERS[form]

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def norm(x: Any) -> Any:
        y = x.astype(jnp.float32)
        return (y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)).astype(x.dtype)

    def layer(position: Any, x: Any, given: Any) -> Any:
        w, caches = given
        h = norm(x)
        query, *new = (jnp.einsum("bd,d...->b...", h, w[name]) for name in ("query", "key", "value"))
        keys, values = (
            lax.dynamic_update_slice(cache, n[:, None], (0, position, 0, 0))
            for cache, n in zip(caches, new, strict=True)
        )
        scores = jnp.einsum("bngk,bsnk->bngs", query, keys, preferred_element_type=jnp.float32) * HEAD**-0.5
        scores = jax.nn.softmax(jnp.where(jnp.arange(LENGTH) <= position, scores, -1e30)).astype(x.dtype)
        x = x + jnp.einsum("bngk,ngkd->bd", jnp.einsum("bngs,bsnk->bngk", scores, values), w["out"])
        h = norm(x)
        return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], (keys, values)

    def decode(params: Any, caches: Any, tokens: Any, position: Any) -> Any:
        x, step = params["embed"][tokens], partial(layer, position)
        if form == "scan":
            x, new = lax.scan(step, x, (params["layers"], caches))
        else:
            new = []
            for given in zip(params["layers"], caches, strict=True):
                x, made = step(x, given)
                new.append(made)
        return jnp.argmax(norm(x) @ params["head"], -1), new

    shapes = {
        "query": (WIDTH, KV, GROUP, HEAD), "key": (WIDTH, KV, HEAD), "value": (WIDTH, KV, HEAD),
        "out": (KV, GROUP, HEAD, WIDTH), "gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH),
    }  # fmt: skip
    cache = batch, LENGTH, KV, HEAD
    layers: Any = [{name: array(*shape) for name, shape in shapes.items()}] * count
    caches: Any = [(array(*cache), array(*cache))] * count
    if form == "scan":
        layers = {name: array(count, *shape) for name, shape in shapes.items()}
        caches = (array(count, *cache), array(count, *cache))
    params = {"embed": array(WORDS, WIDTH), "head": array(WIDTH, WORDS), "layers": layers}
    arguments = params, caches, array(batch, dtype=jnp.int32), array(dtype=jnp.int32)
    program = jax.export.export(jax.jit(decode, donate_argnums=1), platforms=["tpu", "cuda"])(*arguments)
    return bytes(program.serialize())


def with_kernels(form: str, batch: int) -> bytes:
    """The program of one step with a kernel of paged attention, for TPUs."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    each = CHUNK if form == "prefill" else 1
    tokens, pages = batch * each, LENGTH // PAGE

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def norm(x: Any) -> Any:
        y = x.astype(jnp.float32)
        return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)).astype(x.dtype)

    def layer(x: Any, w: Any, cache: Any, lengths: Any, table: Any) -> Any:
        h = norm(x)
        query, key, value = (jnp.einsum("td,dhk->thk", h, w[name]) for name in ("query", "key", "value"))
        positions = (lengths[:, None] - each + jnp.arange(each)).reshape(-1)
        page, slot = jnp.repeat(table, each, 0)[jnp.arange(tokens), positions // PAGE], positions % PAGE
        if form == "paged":
            cache = tuple(
                pages.at[:, page, slot].set(new.swapaxes(0, 1)) for pages, new in zip(cache, (key, value), strict=True)
            )
            heads = paged_attention(query * HEAD**-0.5, *cache, lengths, table, pages_per_compute_block=8)
        else:
            cache = cache.at[page, slot].set(jnp.stack([key, value], 2).reshape(tokens, 2 * KV, HEAD))
            starts, count = jnp.arange(0, tokens + 1, each, dtype=jnp.int32), jnp.array([batch], jnp.int32)
            heads = ragged_paged_attention(
                query, cache, lengths, table, starts, count,
                sm_scale=HEAD**-0.5, num_kv_pages_per_block=8, num_queries_per_block=min(each, 32) if each > 1 else 8,
            )  # fmt: skip
        x = x + jnp.einsum("thk,hkd->td", heads, w["out"])
        h = norm(x)
        return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], cache

    def step(params: Any, caches: Any, ids: Any, lengths: Any, table: Any) -> Any:
        x, new = params["embed"][ids], []
        for w, cache in zip(params["layers"], caches, strict=True):
            x, made = layer(x, w, cache, lengths, table)
            new.append(made)
        return jnp.argmax(norm(x[each - 1 :: each]) @ params["head"], -1), new

    heads = KV * GROUP
    shapes = {
        "query": (WIDTH, heads, HEAD), "key": (WIDTH, KV, HEAD), "value": (WIDTH, KV, HEAD),
        "out": (heads, HEAD, WIDTH), "gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH),
    }  # fmt: skip
    layers = [{name: array(*shape) for name, shape in shapes.items()}] * LAYERS[form]
    kv = [array(KV, batch * pages, PAGE, HEAD)] * 2 if form == "paged" else array(batch * pages, PAGE, 2 * KV, HEAD)
    params = {"embed": array(WORDS, WIDTH), "head": array(WIDTH, WORDS), "layers": layers}
    ids = [array(tokens, dtype=jnp.int32), array(batch, dtype=jnp.int32), array(batch, pages, dtype=jnp.int32)]
    device = AbstractDevice("TPU v6 lite", 1, "tpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(step, donate_argnums=1).trace(params, [kv] * LAYERS[form], *ids)
        return traced.lower(lowering_platforms=("tpu",)).as_text(debug_info=True).encode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
