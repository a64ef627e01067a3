"""Would a pipeline pay? Published pairs of runs with and without stages, and decoders of several sizes.

python -m benchmarks.pipelines [--write docs/explanation/pipelines.md]

Both sides take the best known strategy that fits: without stages, and inside them.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from math import nan
from pathlib import Path

import jax

from benchmarks.common import Row, markdown_table, note, put_between, show
from benchmarks.published.runs import LLAMA_8B, LLAMA_70B, Decoder, Policy, Run
from benchmarks.published.step import lowered
from toast_cli.base.errors import UsageError
from toast_cli.candidates.stage_plans import best_stages
from toast_cli.dimensions import analyse
from toast_cli.frontend import Source, load
from toast_cli.hardware import Mesh, load_spec, parse_shape
from toast_cli.hardware.topology import divisors
from toast_cli.plan.problem import make_problem
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.pipelines import PricedPipeline, StageRequest, pipelines
from toast_cli.tactics import priced_strategies, priced_strategy
from toast_cli.tactics.strategies import STRATEGIES

MARIN = "marin-community/marin"


@dataclass(frozen=True)
class Pair:
    """One model with and without stages. kept: the policies of rematerialisation that each side chooses from. gain:
    measured, step of FSDP over step of the pipeline; stages over the first axis."""

    name: str
    decoder: Decoder
    mesh: str
    axes: str
    batch: int
    seq: int
    kept: tuple[Policy, ...]
    stages: int
    microbatches: int
    gain: float
    source: str


# Where a source does not say all sizes, these have its number of parameters.
PAIRS = (
    Pair("6.1B, one host", Decoder(32, 4096, 32, 8, 11008, 50368), "h100:8", "data=8", 32, 4096, ("minimal",), 8, 8,
         1.01 / 2.20, f"{MARIN} PR 6534, 1F1B"),
    Pair("sparse 400M, one host", Decoder(8, 1024, 8, 8, 1536, 32000, experts=8, chosen=2), "v6e-8", "data=8", 64, 512,
         ("minimal",), 8, 16, 63.5 / 135.6, f"{MARIN}#6532"),
    Pair("sparse 1B, four slices", Decoder(8, 2048, 16, 16, 2048, 32000, experts=8, chosen=2), "4xv6e-8",
         "slice=4,data=8", 64, 512, ("minimal",), 4, 0, 1.22, f"{MARIN} PR 6534"),
    Pair("sparse 16B, a sequence a chip", Decoder(24, 2048, 16, 16, 1408, 102400, experts=64, chosen=6), "v6e-8",
         "data=8", 8, 2048, ("full",), 8, 8, 2.0, "AI-Hypercomputer/maxtext PR 1687"),
    Pair("GPT-3 175B, 8 nodes", Decoder(96, 12288, 96, 96, 49152, 51200, gated=False), "h100:64", "node=8,gpu=8", 128,
         2048, ("full", "minimal"), 8, 0, 10.70 / 9.53, "arXiv:2412.14374"),
)  # fmt: skip
PAIR_COLUMNS = {
    "model": "{name}", "source": "{source}", "FSDP s": "{plain:.3f}", "pipeline s": "{staged:.3f}",
    "pipeline": "{label}", "FSDP / pipeline": "{gain:.2f}", "measured": "{measured:.2f}", "order": "{order}",
}  # fmt: skip

# Sparse decoders on H100, experts over the 8 of a node: the part of a step that does not grow with the number of
# microbatches, which is the bubble and the update, in microbatches. Sizes are not published; the vocabulary here is
# small, so that stages are equal.
SPARSE_67B = Decoder(48, 2048, 16, 4, 896, 8192, experts=256, chosen=8)
SPARSE_24 = Decoder(24, 2048, 16, 4, 2048, 8192, experts=64, chosen=4)
BUBBLES = (
    ("67B, 8 stages of two parts", SPARSE_67B, "h100:64", "node=8,gpu=8", 16, "1F1B", 2, 3.9),
    ("24 layers, 4 stages", SPARSE_24, "h100:32", "node=4,gpu=8", 32, "1F1B", 1, 3.2),
)

MODELS = {
    "8B": (LLAMA_8B, "4xv5p-128", 4, "h100:64"),
    "70B": (LLAMA_70B, "4xv5p-256", 4, "h100:128"),
    "405B": (Decoder(128, 16384, 128, 8, 53248, 128256), "4xv5p-1024", 4, "h100:512"),
    "sparse 671B": (Decoder(64, 7168, 56, 56, 2048, 129280, experts=256, chosen=8), "4xv5p-1024", 4, "h100:512"),
}
SEQ = 4096
COLUMNS = {
    "model": "{name}", "machine": "{mesh}", "1 sequence a device": "{of_1}", "4": "{of_4}", "16": "{of_16}",
}  # fmt: skip
START, END = "<!-- pipelines: written by python -m benchmarks.pipelines -->", "<!-- pipelines: end -->"


@dataclass(frozen=True)
class Step:
    """A decoder's step on a machine."""

    source: Source
    mesh: Mesh

    @property
    def whole(self) -> Evaluator:
        program = self.source.program
        return Evaluator(make_problem(program, analyse(program), self.mesh))

    def staged(self, request: StageRequest) -> PricedPipeline:
        found = best_stages(self.source, self.mesh, request)
        assert found is not None
        return found.priced


def step_of(decoder: Decoder, mesh: str, axes: str, batch: int, seq: int, kept: Policy = "full") -> Step:
    run = Run("", decoder, mesh, axes, "", batch, seq, kept, nan, "")
    return Step(load("step.mlir", content=lowered(run).encode()), load_spec(mesh).mesh(parse_shape(axes)))


def with_stages(on: Step) -> PricedPipeline | None:
    """The best over the first axis, of any number of stages."""
    found = []
    for stages in divisors(on.mesh.sizes[0])[1:]:
        try:
            found.append(on.staged(StageRequest(stages)))
        except UsageError:  # the layers do not divide
            continue
    return min(found, key=lambda priced: priced.rank, default=None)


def pair_row(pair: Pair) -> Row:
    plain, staged = [], []
    for kept in pair.kept:
        on = step_of(pair.decoder, pair.mesh, pair.axes, pair.batch, pair.seq, kept)
        plain.append(priced_strategy(on.whole, "fsdp"))
        staged.append(on.staged(StageRequest(pair.stages, "", pair.microbatches)))
    first = min(plain, key=lambda priced: priced.rank).cost.step_seconds
    best = min(staged, key=lambda priced: priced.rank)
    gain = first / best.cost.step_seconds
    return {
        "name": pair.name, "source": pair.source, "plain": first, "staged": best.cost.step_seconds,
        "label": best.label, "gain": gain, "measured": pair.gain, "order": (gain > 1) == (pair.gain > 1),
    }  # fmt: skip


def bubble(decoder: Decoder, mesh: str, axes: str, microbatches: int, schedule: str, repeats: int) -> float:
    """The part of a step that does not grow with the number of microbatches, in microbatches."""
    steps = []
    stages = parse_shape(axes)["node"]
    for number in (microbatches, 2 * microbatches):
        on = step_of(decoder, mesh, axes, 8 * number, 4096)
        planned = best_stages(on.source, on.mesh, StageRequest(stages, "", number))
        assert planned is not None
        found = pipelines(planned.evaluator, planned.plan, planned.stack, on.mesh, (0, stages))
        steps += [p.cost.step_seconds for p in found if (p.schedule, p.repeats) == (schedule, repeats)]
    each = (steps[1] - steps[0]) / microbatches
    return steps[0] / each - microbatches


def seconds(name: str, mesh: str, axes: str, each: int) -> tuple[float, float]:
    """The best step that fits without stages and with them, whatever is kept for the backward pass; nan if none fits.
    each: sequences a device. Where no plan fits without stages, the batch is taken in microbatches."""
    without, within = [], []
    for kept in ("full", "minimal"):
        for parts in (1, 4, 16):
            if each % parts:
                continue
            on = step_of(MODELS[name][0], mesh, axes, each // parts * load_spec(mesh).devices, SEQ, kept)
            found = priced_strategies(on.whole, (*STRATEGIES, "hsdp", "hsdp x megatron+sequence"))[0].values()
            without += [parts * priced.cost.step_seconds for priced in found if priced.fits]
            if parts == 1:
                staged = with_stages(on)
                within += [staged.cost.step_seconds] if staged is not None and staged.fits else []
            if any(priced.fits for priced in found):
                break
    return min(without, default=nan), min(within, default=nan)


def model_row(name: str, mesh: str, axes: str) -> Row:
    row: Row = {"name": name, "mesh": mesh}
    for each in (1, 4, 16):
        without, within = seconds(name, mesh, axes, each)
        row[f"of_{each}"] = f"{without:.2f}, {within:.2f} ({100 * (without / within - 1):+.0f} %)"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="puts the table into a page of the documentation")
    parser.add_argument("--pairs", action="store_true", help="only the published pairs")
    parser.add_argument("--models", nargs="*", help=f"only these decoders of {', '.join(MODELS)}; all if none is named")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # nothing runs, and looking for TPUs takes long
    if options.models is None:
        show("published pairs", PAIR_COLUMNS, [pair_row(pair) for pair in PAIRS])
    for name, *of, measured in BUBBLES if options.models is None else ():
        note(f"{name}: bubble and update {bubble(*of):.2f} microbatches, measured {measured}")
    rows = []
    chosen = [] if options.pairs else options.models or list(MODELS)
    for name, (_, slices, model, nodes) in ((name, MODELS[name]) for name in chosen):
        chips = load_spec(slices).devices // 4
        shapes = {slices: f"slice=4,data={chips // model},model={model}", nodes: f"node={int(nodes[5:]) // 8},gpu=8"}
        for mesh, axes in shapes.items():
            rows.append(model_row(name, mesh, axes))
            note(" ".join(form.format_map(rows[-1]) for form in COLUMNS.values()))
    show("decoders with and without stages", COLUMNS, rows)
    if options.write:
        put_between(options.write, START, END, markdown_table(COLUMNS, rows, words=2))


if __name__ == "__main__":
    main()
