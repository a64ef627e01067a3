"""Decode steps of an 8B decoder: predicted, beside the steps that XLA compiles ahead of time.

`python -m benchmarks.decoding [MESH ...]` plans and compiles one step for each machine, number of sequences and form,
and prints a table. Forms: `unrolled`, of 4 layers that each have a cache of 4,096 positions, and `scan`, a loop over
all 32 layers and their stacked caches. XLA:GPU estimates no cycles: there the prediction stands beside the time that
reading the arguments once takes, which no step can beat.
"""

from __future__ import annotations

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
LAYERS = {"unrolled": 4, "scan": 32}
WIDTH, KV, GROUP, HEAD, HIDDEN, WORDS, LENGTH = 4096, 8, 4, 128, 14336, 128256, 4096
COLUMNS = {
    "form": "{form}", "mesh": "{mesh}", "sequences": "{batch}", "predicted ms": "{predicted:.2f}",
    "beside ms": "{beside:.2f}", "of": "{of}", "predicted over it": "{error:+.0%}",
    "predicted peak": "{peak:.2f} GiB", "compiled peak": "{compiled_peak:.2f} GiB",
}  # fmt: skip


def main(meshes: list[str]) -> int:
    rows = [
        row for mesh in meshes or MESHES for form in LAYERS for batch in BATCHES for row in measured(form, mesh, batch)
    ]
    show("decode steps of an 8B decoder", COLUMNS, rows)
    return 0


def measured(form: str, mesh_name: str, batch: int) -> Iterator[Row]:
    """The figures of one point; none if XLA refuses it."""
    spec = load_spec(mesh_name)
    outcome = partition(Request("decode.mlir", mesh_name, iterations=200, content=lowered(form, batch)))
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
        walked = scheduled_time(answer.hlo_text, mesh.names, mesh.sizes, *rates, partial(seconds_on, mesh))
        seconds = walked.step_seconds
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
