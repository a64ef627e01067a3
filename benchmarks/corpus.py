"""The programs, slices and plans that the cost model is compared with XLA:TPU on.

Programs are the sample models in middling sizes: few layers, arrays large enough that device memory decides. Every
program belongs to one `split`: the model's rules were made looking at compiled programs of `fit`; nobody has looked
into what became of those of `test`, and they are what judges.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from sample_models import block, decoder, gns, itx, mlp, moe, resnet50, rnn, scan, ssm, unet, vit
from sample_models.common import Sample, encode, lower
from toast_cli.dimensions import analyse
from toast_cli.frontend import Source, load
from toast_cli.hardware import Spec
from toast_cli.hardware.spec import parse_spec
from toast_cli.plan.decision_space import decision_space
from toast_cli.plan.decisions import NONE, Plan, Replicate, Shard
from toast_cli.plan.lower import lower as lower_plan
from toast_cli.plan.problem import Problem, make_problem
from toast_cli.program.ops import ARGUMENT, RESULT
from toast_cli.search.run import Settings, run_search
from toast_cli.tactics import strategies

Split = Literal["fit", "test"]


@dataclass(frozen=True)
class Case:
    """A program of the corpus; `make` gives the sample to lower."""

    split: Split
    make: Callable[[], Sample]


def _decoder(name: str, **sizes: int) -> Callable[[], Sample]:
    return lambda: decoder.training(name, "", decoder.Config(**sizes))


# What the tables call it -> the program.
PROGRAMS: dict[str, Case] = {
    "mlp": Case("test", lambda: mlp.training("mlp", "", mlp.Config(batch=8192, sizes=(2048, 8192, 8192, 8192, 1024)))),
    "block": Case("test", lambda: block.training("block", "", block.Config(2, 4096, 32, 128, 16384, 1024, 4))),
    "t2b_1": Case("fit", _decoder(
        "t2b_1", layers=1, model=2048, heads=8, kv_heads=1, head=256, ff=16384, vocab=64000, batch=16, seq=1024)),
    "t2b_2": Case("fit", _decoder(
        "t2b_2", layers=2, model=2048, heads=8, kv_heads=1, head=256, ff=8192, vocab=32000, batch=16, seq=1024)),
    "scan": Case("test", lambda: scan.training("scan", "", scan.Config(8, 2048, 16, 128, 5632, 32000, 32, 1024))),
    "gns": Case("fit", lambda: gns.training("gns", "", gns.Config(16384, 131072, 30, 4, 3, 512, 512, 2))),
    "ssm": Case("test", lambda: ssm.training("ssm", "", ssm.Config(2, 2048, 2048, 32000, 16, 1024))),
    "ssm_small": Case("fit", lambda: ssm.training("ssm_small", "", ssm.Config(2, 1024, 1024, 16000, 16, 512))),
    "resnet": Case("fit", lambda: resnet50.training(
        "resnet", "", resnet50.Config(batch=256, image=224, stem=64, stages=(1, 1, 1, 1), classes=1000))),
    "itx_decode": Case("fit", lambda: itx.decode_sample("itx_decode", "", itx.Config(
        layers=2, model=4096, heads=32, kv_heads=8, head=128, ff=14336, vocab=32000, batch=64, cache=2048,
        prompt=1024, new_tokens=64))),
    "t7b": Case("fit", _decoder(
        "t7b", layers=1, model=4096, heads=32, kv_heads=32, head=128, ff=11008, vocab=32000, batch=8, seq=1024)),
    "vit": Case("test", lambda: vit.training("vit", "", vit.Config(2, 1024, 16, 64, 4096, 1000, 256, 224, 16))),
    "scan_small": Case("fit", lambda: scan.training(
        "scan_small", "", scan.Config(6, 1024, 8, 128, 2816, 16000, 16, 1024))),
    "vit_small": Case("fit", lambda: vit.training(
        "vit_small", "", vit.Config(2, 512, 8, 64, 2048, 1000, 256, 176, 16))),
    "moe": Case("test", lambda: moe.training("moe", "", moe.Config(
        layers=2, model=1024, heads=16, head=64, ff=4096, experts=16, groups=32, capacity=96, vocab=32000,
        batch=32, seq=1024))),
    "long": Case("fit", _decoder(
        "long", layers=2, model=1024, heads=4, kv_heads=4, head=256, ff=4096, vocab=32000, batch=1, seq=8192,
        remat=True)),
    "rnn": Case("fit", lambda: rnn.training("rnn", "", rnn.Config(2, 1024, 2048, 16000, 256, 64))),
    "unet": Case("test", lambda: unet.training("unet", "", unet.Config(
        batch=32, image=64, colours=3, base=128, multiples=(1, 2), blocks=1, attention_levels=(1,),
        heads=4, groups=32, time=512))),
    "unet_small": Case("fit", lambda: unet.training("unet_small", "", unet.Config(
        batch=32, image=32, colours=3, base=64, multiples=(1, 2), blocks=1, attention_levels=(1,),
        heads=2, groups=16, time=256))),
    "itx_prefill": Case("fit", lambda: itx.prefill_sample("itx_prefill", "", itx.Config(
        layers=2, model=4096, heads=32, kv_heads=8, head=128, ff=14336, vocab=32000, batch=16, cache=2048,
        prompt=1024, new_tokens=64))),
}  # fmt: skip

# Slice -> (chip, torus, mesh axes); libtpu's name of the slice is `chip:torus`.
SLICES: dict[str, tuple[str, tuple[int, ...], dict[str, int]]] = {
    "v4-8": ("v4", (2, 2, 2), {"data": 4, "model": 2}),
    "v4-16": ("v4", (2, 2, 4), {"data": 8, "model": 2}),
    "v5e-4": ("v5e", (2, 2), {"data": 2, "model": 2}),
    "v5e-16": ("v5e", (4, 4), {"data": 4, "model": 4}),
    "v5p-8": ("v5p", (2, 2, 2), {"data": 4, "model": 2}),
    "v6e-8": ("v6e", (2, 4), {"data": 4, "model": 2}),
    "v6e-4": ("v6e", (2, 2), {"data": 4}),
}

# From bad to good: nothing split, the experts', those with the sequence split over the last axis as well, random ones,
# the search's.
PLANS = (
    "replicated", "data-parallel", "fsdp", "megatron", "data-parallel x megatron", "fsdp x megatron",
    "megatron + sequence", "data-parallel x megatron + sequence", "fsdp x megatron + sequence", "random 0", "random 1",
    "search",
)  # fmt: skip

# A decision as the tables hold it: group, axis, sides, `unless`; for a Replicate the role and the axis alone.
Stored = list[list[int | list[int]]]


@dataclass(frozen=True)
class Loaded:
    """A program of the corpus on a slice."""

    source: Source
    spec: Spec
    problem: Problem


def spec_of(slice_name: str) -> Spec:
    """The specification of a slice of `SLICES`."""
    chip, torus, axes = SLICES[slice_name]
    lines = [f"name: {slice_name}", f"chip: {chip}", f"topology: {{torus: {list(torus)}}}", "axes:"]
    return parse_spec("\n".join(lines + [f"  {name}: {size}" for name, size in axes.items()]) + "\n", slice_name)


def load_case(program: str, slice_name: str, folder: Path) -> Loaded:
    """A program on a slice; the lowered program is kept in `folder` and taken from there."""
    source = source_of(program, folder)
    spec = spec_of(slice_name)
    return Loaded(source, spec, make_problem(source.program, analyse(source.program), spec.mesh()))


@cache
def source_of(program: str, folder: Path) -> Source:
    """A lowered program of the corpus, kept in `folder`."""
    path = folder / f"{program}.mlirbc.zst"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(lower(PROGRAMS[program].make()), "bytecode"))
    return load(str(path))


def plan_of(problem: Problem, label: str) -> Plan | None:
    """The plan that `label` of `PLANS` names; None where the program has none such."""
    known = strategies(problem)
    if label == "replicated":
        return ()
    if label == "search":
        return searched(problem)
    if label.startswith("random "):
        return random_plan(problem, int(label.removeprefix("random ")))
    name, _, sequence = label.partition(" + ")
    if name not in known or not sequence:
        return known.get(name)
    group = _sequence_group(problem, known[name])
    return (
        None
        if group is None
        else problem.canonical((*known[name], sequence_shard(problem, group, len(problem.mesh.sizes) - 1)))
    )


def sequence_shard(problem: Problem, group: int, axis: int) -> Shard:
    """`group` over `axis`, on the first side of each of its conflicts."""
    return Shard(group, axis, (0,) * len(problem.dimensions.groups[group].resolutions))


def _sequence_group(problem: Problem, plan: Plan) -> int | None:
    """Of the groups that no weight has, the one in most activations that `plan` does not split."""
    taken = {d.group for d in plan if isinstance(d, Shard)} | set(problem.weight_bytes)
    elements: dict[int, int] = {}
    for op, number in zip(problem.program.ops, problem.op_pattern, strict=True):
        if op.results and op.name != ARGUMENT:
            for group in set(problem.patterns[number].groups) - taken:
                elements[group] = elements.get(group, 0) + problem.program.values[op.results[0]].elements
    return max(elements, key=lambda g: (elements[g], -g), default=None)


def random_plan(problem: Problem, seed: int) -> Plan:
    """Two to five of the problem's decisions, in canonical order."""
    rng = random.Random(seed)
    choices = decision_space(problem).choices
    return problem.canonical(tuple(rng.sample(choices, min(len(choices), rng.randint(2, 5)))))


def searched(problem: Problem) -> Plan:
    """What a short search finds."""
    from toast_cli.price.evaluator import Evaluator

    return run_search(Evaluator(problem, strategies(problem).values()), Settings(evaluations=300)).plan


def store(plan: Plan) -> Stored:
    """A plan as JSON."""
    return [
        [d.group, d.axis, list(d.sides), d.unless, *([d.only] if d.only != NONE else [])]
        if isinstance(d, Shard) else [d.role, d.axis] for d in plan
    ]  # fmt: skip


def restore(stored: Stored) -> Plan:
    """The inverse of `store`."""
    found: list[Shard | Replicate] = []
    for entry in stored:
        numbers = [number for number in entry if isinstance(number, int)]
        sides = [number for number in entry if isinstance(number, list)]
        found.append(
            Shard(numbers[0], numbers[1], tuple(sides[0]), *numbers[2:]) if sides else Replicate(numbers[0], numbers[1])
        )
    return tuple(found)


def fingerprint(problem: Problem, plan: Plan) -> str:
    """Tells whether stored decisions still mean what they meant: of the layouts of arguments, results and products."""
    lowered = lower_plan(problem, plan)
    told: list[object] = []
    for number, op in enumerate(problem.program.ops):
        if op.name in (ARGUMENT, RESULT, "stablehlo.dot_general", "stablehlo.convolution"):
            told.append([lowered.shardings[v] for v in (*op.operands, *op.results)])
            told.append([lowered.required.get((number, k)) for k in range(len(op.operands))])
    return hashlib.sha256(repr(told).encode()).hexdigest()[:12]
