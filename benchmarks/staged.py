"""Programs of pipeline stages: do they train as the step does, and what do chips' compilers make of them?

python -m benchmarks.staged [STYLE ...] [--compile v5e-4|h100:4]

Steps of one small decoder as people write them: MaxText's (`nn.scan` with a policy of rematerialisation), Equinox's
(a scan over stacked, filtered modules), NNX's, and GPT-2 with unrolled layers. Each is cut into 2 or 4 stages with 4 or
8 microbatches, with data and tensor axes inside, and runs three steps on 8 CPU devices. With --compile, each program of
larger decoders in two stages is compiled for a stage's machine, and the schedule says what is alive beside it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import toast_cli as toast
import toast_cli.cli.app
from benchmarks.common import note
from toast_cli.ask_xla.collectives import collectives_in
from toast_cli.ask_xla.compile import Answer, compile_for, target_of
from toast_cli.candidates.stage_plans import StageOptions, best_stages
from toast_cli.frontend import load
from toast_cli.hardware import load_spec, parse_shape
from toast_cli.price.pipelines import StageRequest
from toast_cli.program.model import dtype_of
from toast_cli.rewrite.stage_files import StagedProgram
from toast_cli.rewrite.stages import StagePlan, staged_program
from toast_cli.tactics import parse_tactics

WORDS, HEADS = 64, 4
# Stages and microbatches, mesh, plan in a stage.
CASES = (
    ("2:4", "pipe=2,data=4", "data-parallel"),
    ("4:8", "pipe=4,data=2", "fsdp"),
    ("2:8", "pipe=2,data=2,model=2", "fsdp x megatron"),
    ("4:4", "pipe=4,model=2", "megatron"),
)
TOLERANCE = 1e-3  # of a difference, relative to the largest element of an array

Loss = Callable[[Any, Any], jax.Array]
Style = Callable[[int, int, int], tuple[Loss, Any]]  # layers, width, positions -> loss, weights


def cross_entropy(logits: Any, tokens: Any) -> Any:
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)


def maxtext(layers: int, width: int, seq: int) -> tuple[Loss, Any]:
    import flax.linen as nn

    def dense(size: Any, name: str, axis: Any = -1) -> Any:
        return nn.DenseGeneral(size, axis=axis, use_bias=False, name=name)

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            h = nn.RMSNorm(name="pre")(x)
            q, k, v = (dense((HEADS, width // HEADS), name)(h) for name in ("query", "key", "value"))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
            mixed = checkpoint_name(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v), "attention")
            x = x + dense(width, "out", (-2, -1))(mixed)
            h = nn.RMSNorm(name="post")(x)
            return x + dense(width, "wo")(nn.silu(dense(2 * width, "wi_0")(h)) * dense(2 * width, "wi_1")(h)), None

    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, tokens: Any) -> Any:
            x = nn.Embed(WORDS, width, name="token_embedder")(tokens)
            policy = jax.checkpoint_policies.save_only_these_names("attention")
            stack = nn.scan(
                nn.remat(Layer, prevent_cse=False, policy=policy), variable_axes={"params": 1},
                split_rngs={"params": True}, length=layers, in_axes=nn.broadcast,
            )  # fmt: skip
            x, _ = stack(name="layers")(x, None)
            return dense(WORDS, "logits_dense")(nn.RMSNorm(name="decoder_norm")(x))

    model = Decoder()
    params = model.init(jax.random.key(0), jnp.zeros((1, seq), jnp.int32))["params"]
    return lambda p, t: cross_entropy(model.apply({"params": p}, t[:, :-1]), t), params


def equinox(layers: int, width: int, seq: int) -> tuple[Loss, Any]:
    import equinox as eqx

    class Block(eqx.Module):
        norm: eqx.nn.RMSNorm
        up: eqx.nn.Linear
        down: eqx.nn.Linear
        attention: eqx.nn.MultiheadAttention

        def __init__(self, key: Any) -> None:
            keys = jax.random.split(key, 3)
            self.norm, self.attention = eqx.nn.RMSNorm(width), eqx.nn.MultiheadAttention(HEADS, width, key=keys[2])
            self.up = eqx.nn.Linear(width, 2 * width, key=keys[0])
            self.down = eqx.nn.Linear(2 * width, width, key=keys[1])

        def __call__(self, x: Any) -> Any:
            h = jax.vmap(self.norm)(x)
            x = x + self.attention(h, h, h, mask=jnp.tril(jnp.ones((x.shape[0],) * 2, bool)))
            return x + jax.vmap(lambda row: self.down(jax.nn.gelu(self.up(self.norm(row)))))(x)

    class Decoder(eqx.Module):
        embed: eqx.nn.Embedding
        blocks: Block
        head: eqx.nn.Linear

        def __call__(self, tokens: Any) -> Any:
            arrays, static = eqx.partition(self.blocks, eqx.is_array)
            layer = jax.checkpoint(lambda y, w: (eqx.combine(w, static)(y), None))
            return jax.vmap(self.head)(lax.scan(layer, jax.vmap(self.embed)(tokens), arrays)[0])

    keys = jax.random.split(jax.random.key(0), 3)
    blocks = eqx.filter_vmap(Block)(jax.random.split(keys[1], layers))
    model = Decoder(eqx.nn.Embedding(WORDS, width, key=keys[0]), blocks, eqx.nn.Linear(width, WORDS, key=keys[2]))
    params, static = eqx.partition(model, eqx.is_array)
    return lambda p, t: cross_entropy(jax.vmap(eqx.combine(p, static))(t[:, :-1]), t), params


def nnx(layers: int, width: int, seq: int) -> tuple[Loss, Any]:
    from flax import nnx

    class Layer(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.norm = nnx.LayerNorm(width, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(HEADS, width, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(width, 2 * width, rngs=rngs), nnx.Linear(2 * width, width, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(jnp.ones(x.shape[:2])))
            return x + self.down(nnx.relu(self.up(x)))

    class Decoder(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embed = nnx.Embed(WORDS, width, rngs=rngs)
            self.layers = nnx.vmap(Layer, in_axes=0)(rngs.fork(split=layers))

        def __call__(self, tokens: Any) -> Any:
            run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return self.embed.attend(run(self.embed(tokens), self.layers))

    graph, params, rest = nnx.split(Decoder(nnx.Rngs(0)), nnx.Param, ...)
    return lambda p, t: cross_entropy(nnx.merge(graph, p, rest)(t[:, :-1]), t), params


def gpt2(layers: int, width: int, seq: int) -> tuple[Loss, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 4 * layers + 2))

    def weight(*shape: int) -> Any:
        return width**-0.5 * jax.random.normal(next(keys), shape)

    def scales() -> Any:
        return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

    def norm(x: Any, p: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]

    def block(x: Any, p: Any) -> Any:
        q, k, v = (a.reshape(*x.shape[:2], HEADS, -1) for a in jnp.split(norm(x, p["ln_1"]) @ p["attn"], 3, -1))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(norm(x, p["ln_2"]) @ p["fc"]) @ p["proj"]

    def loss(p: Any, tokens: Any) -> Any:
        x = p["wte"][tokens[:, :-1]] + p["wpe"]
        for k in range(layers):
            x = jax.checkpoint(block)(x, p["h"][str(k)])
        return cross_entropy(norm(x, p["ln_f"]) @ p["wte"].T, tokens)

    shapes = {"attn": (width, 3 * width), "out": (width, width), "fc": (width, 4 * width), "proj": (4 * width, width)}
    layer = [{n: weight(*s) for n, s in shapes.items()} | {"ln_1": scales(), "ln_2": scales()} for _ in range(layers)]
    params = {"wte": weight(WORDS, width), "wpe": weight(seq, width), "ln_f": scales()}
    return loss, {**params, "h": {str(k): p for k, p in enumerate(layer)}}


def own(layers: int, width: int, seq: int) -> tuple[Loss, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 6))

    def layer(x: Any, w: Any) -> Any:
        h = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        q, k, v = (a.reshape(*x.shape[:2], HEADS, -1) for a in jnp.split(h @ w["qkv"], 3, -1))
        scores = jnp.where(jnp.tril(jnp.ones((x.shape[1],) * 2, bool)), jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2, -1e9)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    def loss(p: Any, tokens: Any) -> Any:
        x = lax.scan(jax.checkpoint(layer), p["embed"][tokens[:, :-1]], p["layers"])[0]
        return cross_entropy(x @ p["head"], tokens)

    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    stacked = {n: width**-0.5 * jax.random.normal(next(keys), (layers, *s)) for n, s in shapes.items()}
    ends = {
        "embed": jax.random.normal(next(keys), (WORDS, width)),
        "head": jax.random.normal(next(keys), (width, WORDS)),
    }
    return loss, {**ends, "layers": stacked}


STYLES: dict[str, Style] = {"own": own, "maxtext": maxtext, "equinox": equinox, "nnx": nnx, "gpt2": gpt2}


def training(loss: Loss) -> Callable[..., Any]:
    """A step of Adam with clipped gradients."""

    def step(params: Any, first: Any, second: Any, tokens: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
        gradients = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.5 / norm), gradients)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, gradients)
        params = jax.tree.map(lambda w, m, v: w - 0.01 * m / (jnp.sqrt(v) + 1e-3), params, first, second)
        return params, first, second, value

    return step


def check(name: str, style: Style) -> None:
    """Three steps of each case against the step that it is cut from."""
    loss, params = style(4, 16, 8)
    step, zeros = jax.jit(training(loss), donate_argnums=(0, 1, 2)), jax.tree.map(jnp.zeros_like, params)
    state = params, zeros, zeros
    tokens = jax.random.randint(jax.random.key(1), (32, 9), 0, WORDS)
    text = step.lower(*state, tokens).as_text(debug_info=True)
    wanted, plain = [], jax.jit(training(loss))
    before = state
    for _ in range(3):
        wanted.append(plain(*before, tokens))
        before = wanted[-1][:3]
    for pipeline, shape, inside in CASES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "step.mlir"
            path.write_text(text)
            asked = ["--mesh-shape", shape, "--pipeline", pipeline, "--strategy", inside, "-o", f"{folder}/stages/"]
            assert toast.cli.app.run(["partition", str(path), "--mesh", "v5e-8", *asked, "--quiet"]) == 0
            staged, mine, worst = toast.load(f"{folder}/stages"), jax.tree.map(jnp.copy, state), 0.0
        for right in wanted:
            found = staged(*mine, tokens)
            mine = found[:3]
            for mine_of, right_of in zip(found, right, strict=True):
                leaves = list(map(np.asarray, jax.tree.leaves(right_of)))
                # The gradient of a bias of keys is zero: what is computed of it is rounding alone.
                rounding = 1e-4 * max(np.max(np.abs(leaf)) for leaf in leaves)
                for one, other in zip(jax.tree.leaves(mine_of), leaves, strict=True):
                    worst = max(worst, float(np.max(np.abs(one - other)) / max(np.max(np.abs(other)), rounding)))
        note(f"{name} {pipeline} over {shape}, {inside}: {worst:.1e}{'' if worst < TOLERANCE else ' WRONG'}")


def compiled(name: str, style: Style, machine: str) -> None:
    """Peak memory and collectives of two stages of 8 layers on two machines of this kind, promised and compiled."""
    loss, params = style(8, 2048, 1024)
    step, devices = jax.jit(training(loss), donate_argnums=(0, 1, 2)), load_spec(machine).devices
    lowered = step.lower(params, params, params, jax.ShapeDtypeStruct((64, 1025), jnp.int32))
    source = load("step.mlir", content=lowered.as_text(debug_info=True).encode())
    number = machine.rpartition("-")[2] if "-" in machine else machine.partition(":")[2]
    mesh = load_spec(machine.replace(number, str(2 * int(number)))).mesh(parse_shape(f"pipe=2,data={devices}"))
    planned = best_stages(source, mesh, StageRequest(axis="pipe", microbatches=8, written=True),
                          StageOptions(state=parse_tactics(strategy="fsdp").state))  # fmt: skip
    assert planned is not None
    staged = staged_program(planned)
    answers: dict[str, Answer] = {}
    for program in staged.programs:
        answer = compile_for(program.text, "stablehlo", target_of(load_spec(machine)))
        assert isinstance(answer, Answer), answer
        answers[program.name] = answer
    peak, promised = peak_bytes(staged, answers), planned.priced.cost.peak_bytes
    note(f"{name} on {machine}: peak {promised / 2**20:.0f} MiB promised, {peak / 2**20:.0f} compiled")
    found: Counter[str] = Counter()
    for one in staged.steps:
        for sent in collectives_in(answers[one.program].hlo_text, *shape_of(staged)) if one.program else ():
            found[sent.kind] += round(sent.count * sent.bytes)
    for kind in sorted({*found, *(promises := promised_bytes(planned))}):
        note(f"  {kind}: {promises[kind] / 2**20:.0f} MiB promised, {found[kind] / 2**20:.0f} compiled")


def shape_of(staged: StagedProgram) -> tuple[tuple[str, ...], tuple[int, ...]]:
    return tuple(staged.stage_mesh), tuple(staged.stage_mesh.values())


def promised_bytes(planned: StagePlan) -> Counter[str]:
    found: Counter[str] = Counter()
    for use in planned.evaluator.collectives(planned.plan):
        found[use.kind] += round(use.count * use.bytes)
    return found


def peak_bytes(staged: StagedProgram, answers: dict[str, Answer]) -> float:
    """The peak of a stage: what programs need, and what waits beside them for later steps."""

    def size(name: str) -> float:
        value = staged.values[name]
        axes = [axis for names in value.sharding for axis in names]
        parts = int(np.prod([staged.stage_mesh[axis] for axis in axes], initial=1))
        return int(np.prod(value.shape, initial=1)) * dtype_of(value.dtype).itemsize / parts

    programs, last = {program.name: program for program in staged.programs}, dict[tuple[str, int, int], int]()
    for number, step in enumerate(staged.steps):
        program = programs.get(step.program)
        read = [(n, program.stage) for n in program.arguments] if program else [(step.value, step.source)]
        last.update({staged.key(name, step.microbatch, stage): number for name, stage in read})
    held = {(v, -1, k) for a in staged.arguments for v, k in zip(a.values, a.stages, strict=True)}
    peak = 0.0
    for number, step in enumerate(staged.steps):
        if program := programs.get(step.program):
            own = {staged.key(name, step.microbatch, program.stage) for name in program.arguments}
            beside = sum(size(key[0]) for key in held - own if key[2] == program.stage)
            peak = max(peak, beside + answers[step.program].device_bytes)
            held |= {staged.key(name, step.microbatch, program.stage) for name in program.results}
            donated = {staged.key(program.arguments[k], step.microbatch, program.stage) for k in program.donated}
            held -= {key for key in donated if key[0] not in program.results}
        else:
            own = {(step.value, step.microbatch, step.source)}
            held.add((step.value, step.microbatch, step.target))
        held -= {key for key in own if last.get(key) == number and key[1] >= 0}
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("styles", nargs="*", metavar="STYLE", help=f"of {', '.join(STYLES)}; default: all")
    parser.add_argument("--compile", metavar="MACHINE", help="what its compiler makes of the programs of stages")
    options = parser.parse_args()
    for name in options.styles or STYLES:
        if options.compile:
            compiled(name, STYLES[name], options.compile)
        else:
            check(name, STYLES[name])


if __name__ == "__main__":
    main()
