"""A layer of experts by each dispatch: published times, and what toast expects of the same program.

python -m benchmarks.experts [MESH …] [--write docs/accuracy.md]

The layer is the one that marin's harness times (`bench_moe_hillclimb.py`): routed experts by a given choice beside a
shared one, forward and backward, weights and tokens in bf16, on a mesh of data x experts. Programs are written by hand
in `shard_map`, so toast only prices them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.common import Row, markdown_table, note, put_between, show, table_options
from toast_cli.dimensions import analyse
from toast_cli.frontend import load, program_pins
from toast_cli.hardware import load_spec
from toast_cli.plan.problem import make_problem
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.profiles import find_profile
from toast_cli.tactics import priced_strategy

SLACK = 1.25  # rows that a device's experts have room for, over what they get if all experts get as many
TILES = (512, 1024, 1024)  # of the kernel of grouped products: rows, contracted, columns
AXES = ("data", "expert")


@dataclass(frozen=True)
class Layer:
    """Sizes: tokens of the whole mesh; experts of width `ff`, of which a token takes `chosen`; width of the shared
    expert."""

    tokens: int = 32768
    model: int = 2048
    ff: int = 768
    experts: int = 128
    chosen: int = 8
    shared: int = 2048


@dataclass(frozen=True)
class Timed:
    """A layer that was timed.

    Attributes:
        dispatch: one of `DISPATCHES`. parallel: devices that share the experts. mesh: what toast calls the machine, of
        `devices`. without: passes of the compiler that the run did without. fitted: a figure of toast is fitted to it.
        step: the time is that of a whole step, so that only ratios compare.
    """

    dispatch: str
    parallel: int
    milliseconds: float
    mesh: str
    devices: int
    layer: Layer = Layer()
    source: str = "logbook grug-moe-ep-ring"
    without: tuple[str, ...] = ()
    fitted: bool = False
    step: bool = False


TWO = Layer(chosen=2)
FIT = ("ragged", 2, TWO)
HERO = Layer(tokens=1024 * 4096, model=6144, ff=3072, chosen=4, shared=3072)
# All of marin-community/marin: .agents/logbooks/grug-moe-ep-ring.md, and issues. On GB200 steps of 48 layers were
# timed, with a kernel of grouped products where there is no dispatch.
KERNELS = ("masked-groups",)
TIMES = (
    Timed("all-gather", 8, 17.85, "v5p-16", 8), Timed("ragged", 8, 20.57, "v5p-16", 8),
    Timed("all-gather", 4, 20.12, "v5p-16", 8), Timed("all-gather", 2, 23.44, "v5p-16", 8),
    Timed("none", 1, 24.29, "v5p-16", 8), Timed("ring", 8, 25.24, "v5p-16", 8),
    Timed("all-gather", 4, 31.58, "v5p-8", 4, fitted=True), Timed("all-gather", 2, 38.31, "v5p-8", 4),
    Timed("ragged", 4, 39.27, "v5p-8", 4), Timed("none", 1, 39.77, "v5p-8", 4), Timed("ring", 4, 40.59, "v5p-8", 4),
    *(Timed(dispatch, parallel, milliseconds, "h100:8", 8, layer, "#3633", fitted=(dispatch, parallel, layer) == FIT)
      for layer, times in (
          (Layer(), (("all-gather", 8, 34.31), ("ragged", 8, 59.65), ("all-gather", 4, 66.97), ("ragged", 4, 116.8),
                     ("all-gather", 2, 139.0), ("none", 1, 215.9), ("ragged", 2, 234.1))),
          (TWO, (("all-gather", 8, 11.04), ("ragged", 8, 16.27), ("all-gather", 4, 18.64), ("ragged", 4, 30.89),
                 ("all-gather", 2, 35.49), ("none", 1, 52.80), ("ragged", 2, 60.55))),
      )
      for dispatch, parallel, milliseconds in times),
    Timed("capacity", 64, 13253, "gb200:64", 64, HERO, "PR 7981", KERNELS, step=True),
    Timed("FSDP", 1, 17838, "gb200:64", 64, HERO, "PR 7981", KERNELS, step=True),
)  # fmt: skip
COLUMNS = {
    "machine": "{mesh}", "experts a token": "{chosen}", "measured, ms": "{measured}", "expected, ms": "{expected}",
    "error": "{error}", "pairs in order": "{ordered}",
}  # fmt: skip
START, END = "<!-- experts: written by python -m benchmarks.experts -->", "<!-- experts: end -->"


def main() -> None:
    names, page = table_options(__doc__, "MESH")
    groups: dict[tuple[str, Layer], list[tuple[Timed, float]]] = {}
    for timed in TIMES:
        if not names or timed.mesh in names:
            expected = 1e3 * expected_seconds(timed)
            groups.setdefault((timed.mesh, timed.layer), []).append((timed, expected))
            note(f"{timed.mesh} {timed.dispatch} {timed.parallel}: {timed.milliseconds:g}, expected {expected:.4g}")
    rows = [row_of(group) for group in groups.values()]
    show("layers of experts, predicted and measured", COLUMNS, rows)
    if page:
        put_between(page, START, END, markdown_table(COLUMNS, rows, words=6))


def row_of(group: list[tuple[Timed, float]]) -> Row:
    """The times of a layer on one machine, the shortest measured first. Times of steps count as ratios to the first."""
    group = sorted(group, key=lambda one: one[0].milliseconds)
    first, shortest = group[0]
    scale = shortest / first.milliseconds if first.step else 1.0
    errors = [expected / (scale * timed.milliseconds) - 1 for timed, expected in group]
    pairs = list(combinations(group, 2))
    ordered = sum((a[1] < b[1]) == (a[0].milliseconds < b[0].milliseconds) for a, b in pairs)
    names = [f"{one.dispatch} {one.parallel}{' (fit)' if one.fitted else ''}" for one, _ in group]
    return {
        "mesh": first.mesh, "chosen": first.layer.chosen,
        "measured": ", ".join(f"{name} {one.milliseconds:g}" for name, (one, _) in zip(names, group, strict=True)),
        "expected": ", ".join(f"{expected:.3g}" for _, expected in group),
        "error": f"{100 * min(errors):+.0f} to {100 * max(errors):+.0f} %", "ordered": f"{ordered} of {len(pairs)}",
    }  # fmt: skip


def expected_seconds(timed: Timed) -> float:
    """Of the layer as it is written."""
    mesh = load_spec(timed.mesh).mesh({"data": timed.devices // timed.parallel, "expert": timed.parallel})
    source = load("layer.mlir", keep_shardings=True, content=lowered(timed).encode())
    pins = program_pins(source, mesh.names, mesh.sizes)
    problem = make_problem(source.program, analyse(source.program), mesh, program_pins=pins)
    evaluator = Evaluator(problem, profile=find_profile(mesh.chip).without(*timed.without))
    return priced_strategy(evaluator, "data-parallel").cost.step_seconds


def grouped(platform: str, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """[rows, k] x [experts, k, n] -> [rows, n]: megablox' kernel on TPUs, XLA's own product elsewhere."""
    if platform != "tpu":
        return jax.lax.ragged_dot(rows, weights, sizes)
    tiles = tuple(map(min, TILES, (rows.shape[0], *weights.shape[1:])))
    return gmm(rows, weights, sizes, rows.dtype, tiles)


def network(platform: str, rows: jax.Array, up: jax.Array, down: jax.Array, sizes: jax.Array) -> jax.Array:
    """The gated networks of experts, one after another: [rows, model] -> [rows, model]."""
    gate, inner = jnp.split(grouped(platform, rows, up, sizes), 2, axis=-1)
    return grouped(platform, jax.nn.silu(gate) * inner, down, sizes)


@jax.custom_vjp
def permuted(x: jax.Array, order: jax.Array) -> jax.Array:
    """Rows in another order; its gradient is a gather as well."""
    return x[order]


permuted.defvjp(lambda x, order: (x[order], order), lambda order, g: (g[jnp.argsort(order)], None))


def counted(ids: jax.Array, bins: int) -> jax.Array:
    return jnp.sum(ids[:, None] == jnp.arange(bins), axis=0, dtype=jnp.int32)


def filled(sizes: jax.Array, rows: int) -> jax.Array:
    """The last group takes the rows that are left."""
    return sizes.at[-1].add(rows - jnp.sum(sizes))


def picked(ids: jax.Array, first: jax.Array, here: int, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(positions of `rows` tokens of experts first … first + here in their order, which are some, sizes of groups)."""
    near = (ids >= first) & (ids < first + here)
    key = jnp.where(near, (here - (ids - first)) * len(ids) - jnp.arange(len(ids)), -1)
    _, order = jax.lax.top_k(key, rows)
    sizes = counted(jnp.where(near, ids - first, here), here)
    return order, jnp.arange(rows) < jnp.sum(sizes), filled(jnp.minimum(sizes, rows), rows)


def local(of: Layer, platform: str, width: int, x: jax.Array, ids: jax.Array, gates: jax.Array, up: jax.Array,
          down: jax.Array) -> jax.Array:  # fmt: skip
    """All experts on each device: tokens are sorted by expert, and nothing is sent."""
    flat = ids.reshape(-1)
    order = jnp.argsort(flat)
    tokens, weight = order // of.chosen, gates.reshape(-1)[order]
    made = network(platform, x[tokens], up, down, jnp.bincount(flat, length=of.experts))
    return jnp.zeros_like(x).at[tokens].add(made * weight[:, None], mode="drop")


def gathered(of: Layer, platform: str, width: int, x: jax.Array, ids: jax.Array, gates: jax.Array, up: jax.Array,
             down: jax.Array) -> jax.Array:  # fmt: skip
    """Each device gathers all tokens, takes those of its experts, and a reduce-scatter adds up what they make."""
    x, ids, gates = (jax.lax.all_gather(one, "expert", tiled=True) for one in (x, ids, gates))
    flat, here = ids.reshape(-1), len(up)
    rows = int(SLACK * len(flat) / width)
    order, some, sizes = picked(flat, jax.lax.axis_index("expert") * here, here, rows)
    tokens, weight = order // of.chosen, jnp.where(some, gates.reshape(-1)[order], 0)
    made = network(platform, jnp.where(some[:, None], x[tokens], 0), up, down, sizes)
    out = jnp.zeros_like(x).at[tokens].add(made * weight[:, None], mode="drop")
    return jax.lax.psum_scatter(out, "expert", scatter_dimension=0, tiled=True)


def streamed(of: Layer, platform: str, width: int, x: jax.Array, ids: jax.Array, gates: jax.Array, up: jax.Array,
             down: jax.Array) -> jax.Array:  # fmt: skip
    """Tokens go round the ring of devices, each of which adds what its experts make of them."""
    here = len(up)
    rows, first = int(SLACK * ids.size / width), jax.lax.axis_index("expert") * here
    ring = [(k, (k + 1) % width) for k in range(width)]
    out = jnp.zeros_like(x)
    for _ in range(width):
        order, some, sizes = picked(ids.reshape(-1), first, here, rows)
        tokens, weight = order // of.chosen, jnp.where(some, gates.reshape(-1)[order], 0)
        made = network(platform, jnp.where(some[:, None], x[tokens], 0), up, down, sizes)
        out = out.at[tokens].add(made * weight[:, None], mode="drop")
        x, ids, gates, out = (jax.lax.ppermute(one, "expert", ring) for one in (x, ids, gates, out))
    return out


def ragged(of: Layer, platform: str, width: int, x: jax.Array, ids: jax.Array, gates: jax.Array, up: jax.Array,
           down: jax.Array) -> jax.Array:  # fmt: skip
    """Tokens sorted by expert go to their devices and back by ragged all-to-alls (as in MaxText)."""
    flat, here, me = ids.reshape(-1), len(up), jax.lax.axis_index("expert")
    rows, order = int(SLACK * flat.size), jnp.argsort(flat)
    sizes = jax.lax.all_gather(counted(flat, of.experts), "expert")  # [sender, expert]
    sent = sizes.reshape(width, width, here).sum(-1)  # [sender, receiver]
    there = exchanged(permuted(jnp.repeat(x, of.chosen, axis=0), order), rows, sent, me)
    mine = jax.lax.dynamic_slice_in_dim(sizes, me * here, here, axis=1)  # [sender, expert here]
    ends = jnp.cumsum(mine.reshape(-1))
    segment = jnp.searchsorted(ends, jnp.arange(rows), side="right")
    local_order = jnp.argsort(jnp.where(jnp.arange(rows) < ends[-1], segment % here, here))
    some = (jnp.arange(rows) < ends[-1])[:, None]
    given = jnp.where(some, permuted(there, local_order), 0)
    made = network(platform, given, up, down, filled(mine.sum(0), rows))
    back = exchanged(permuted(made, jnp.argsort(local_order)), flat.size, sent.T, me)
    back = permuted(back, jnp.argsort(order))
    return jnp.einsum("tkd,tk->td", back.reshape(*ids.shape, -1), gates)


def exchanged(x: jax.Array, rows: int, sent: jax.Array, me: jax.Array) -> jax.Array:
    """A ragged all-to-all into `rows` rows; sent: [sender, receiver] rows."""
    starts = jnp.cumsum(sent[me]) - sent[me]
    lands = (jnp.cumsum(sent, axis=0) - sent)[me]
    into = jnp.zeros((rows, x.shape[1]), x.dtype)
    return jax.lax.ragged_all_to_all(x, into, starts, sent[me], lands, sent[:, me], axis_name="expert")


def capacity(of: Layer, platform: str, width: int, x: jax.Array, ids: jax.Array, gates: jax.Array, up: jax.Array,
             down: jax.Array) -> jax.Array:  # fmt: skip
    """Each device sends each expert as many places, by an all-to-all (GShard's dispatch, with gathers)."""
    flat, here = ids.reshape(-1), len(up)
    places = flat.size // of.experts
    order = jnp.argsort(flat)
    starts = jnp.searchsorted(flat[order], jnp.arange(of.experts))
    place = jnp.arange(flat.size) - starts[flat[order]]
    slot = jnp.where(place < places, flat[order] * places + place, of.experts * places)
    given = jnp.full(of.experts * places, flat.size).at[slot].set(order, mode="drop")  # of each place
    taken = jnp.zeros(flat.size, jnp.int32).at[order].set(slot)  # of each chosen expert
    rows = looked_up(jnp.repeat(x, of.chosen, axis=0), given, taken).reshape(width, here, places, -1)
    rows = jax.lax.all_to_all(rows, "expert", 0, 0).swapaxes(0, 1).reshape(here, width * places, -1)
    gate, inner = jnp.split(jnp.einsum("erd,edf->erf", rows, up), 2, axis=-1)
    made = jnp.einsum("erf,efd->erd", jax.nn.silu(gate) * inner, down)
    back = jax.lax.all_to_all(made.reshape(here, width, places, -1).swapaxes(0, 1), "expert", 0, 0)
    back = looked_up(back.reshape(of.experts * places, -1), taken, given)
    return jnp.einsum("tkd,tk->td", back.reshape(*ids.shape, -1), gates)


@jax.custom_vjp
def looked_up(x: jax.Array, index: jax.Array, back: jax.Array) -> jax.Array:
    """Rows by index, zeros beyond the end; back: the index that undoes it, by which the gradient is looked up."""
    return x.at[index].get(mode="fill", fill_value=0)


looked_up.defvjp(
    lambda x, index, back: (looked_up(x, index, back), back),
    lambda back, g: (g.at[back].get(mode="fill", fill_value=0), None, None),
)


DISPATCHES: dict[str, Callable[..., jax.Array]] = {
    "none": local, "FSDP": local, "all-gather": gathered, "ring": streamed, "ragged": ragged, "capacity": capacity,
}  # fmt: skip


def lowered(timed: Timed) -> str:
    """Loss and gradients of the layer in StableHLO."""
    of, platform = timed.layer, "cuda" if ":" in timed.mesh else "tpu"
    mesh = AbstractMesh((timed.devices // timed.parallel, timed.parallel), AXES)
    body = partial(DISPATCHES[timed.dispatch], of, platform, timed.parallel)
    tokens, experts = P(AXES), P("expert" if timed.parallel > 1 else None)
    stored = P(None, AXES) if timed.dispatch == "FSDP" else experts
    routed = jax.shard_map(
        body, mesh=mesh, in_specs=(tokens, tokens, tokens, experts, experts), out_specs=tokens, check_vma=False
    )

    def loss(weights: list[jax.Array], ids: jax.Array, gates: jax.Array) -> jax.Array:
        x, up, down, shared_up, shared_down = weights
        gate, inner = jnp.split(x @ shared_up, 2, axis=-1)
        y = routed(x, ids, gates, up, down) + (jax.nn.silu(gate) * inner) @ shared_down
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    def array(spec: P, *shape: int, dtype: type = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    weights = [
        array(tokens, of.tokens, of.model),
        array(stored, of.experts, of.model, 2 * of.ff), array(stored, of.experts, of.ff, of.model),
        array(P(), of.model, 2 * of.shared), array(P(), of.shared, of.model),
    ]  # fmt: skip
    chosen = [array(tokens, of.tokens, of.chosen, dtype=jnp.int32), array(tokens, of.tokens, of.chosen)]
    made = (NamedSharding(mesh, P()), [one.sharding for one in weights])
    step = jax.jit(jax.value_and_grad(loss), out_shardings=made)
    text: str = step.trace(weights, *chosen).lower(lowering_platforms=(platform,)).as_text(debug_info=True)
    return text


if __name__ == "__main__":
    main()
