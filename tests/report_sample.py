"""A small report made by hand, for the tests of whatever shows or compares reports."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.console import RenderableType

from toast_cli.plan.partitioned import CollectiveFacts
from toast_cli.report import style
from toast_cli.report.model import (
    AnalysisFacts,
    ArgumentFacts,
    BaselineFacts,
    DecisionFacts,
    GroupFacts,
    LineFacts,
    LiveValue,
    MeshFacts,
    PlanFacts,
    PredictedFacts,
    ProgramFacts,
    Report,
    ResultFacts,
    SearchFacts,
)

MIB, GIB = 2**20, 2**30

# From the narrowest to a usual wide screen.
WIDTHS = [60, 72, 80, 100, 140]


def nothing_cut_off(blocks: Callable[[int], Sequence[RenderableType]], width: int) -> None:
    """Lines fit the screen, and every letter that 200 columns show is there: words may wrap, columns of figures may be
    left out, nothing ends in the middle."""

    def shown(columns: int) -> str:
        return style.render(blocks(columns), style.make_console(io.StringIO(), columns))

    narrow = shown(width)
    assert max(map(len, narrow.splitlines())) <= width
    assert "…" not in narrow
    assert letters(narrow) == letters(shown(200))


def letters(text: str) -> Counter[str]:
    return Counter(filter(str.isalpha, text))


PREDICTED = PredictedFacts(
    step_seconds=0.0234,
    compute_seconds=0.0152,
    communication_seconds=0.0082,
    peak_bytes=int(12.1 * GIB),
    argument_bytes=int(3.2 * GIB),
    limit_bytes=int(30.75 * GIB),
    fits=True,
    mfu=0.512,
    step_seconds_lower=0.0161,
    step_seconds_upper=0.0234,
    peak_location="model.py:88 (fwd loss)",
    live_at_peak=[
        LiveValue("params['embed']", "f32[32000,512]", 8 * MIB, "", "argument"),
        LiveValue("dot_general", "bf16[8,1024,32000]", 500 * MIB, "model.py:88 (fwd loss/logits)", "temporary"),
    ],
)
TOO_LARGE = replace(PREDICTED, fits=False, peak_bytes=int(45.2 * GIB))


def make_report(predicted: PredictedFacts = PREDICTED) -> Report:
    """A two-layer model on sixteen chips; with TOO_LARGE, one that does not fit."""
    arguments = _arguments()
    return Report(
        program=ProgramFacts("tiny.mlirbc.zst", "tiny_train", 9205, 11873, len(arguments), 4 * GIB, 3.12e14),
        mesh=MeshFacts("v4-32", "v4", 16, {"data": 8, "model": 2}),
        plan=PlanFacts(
            [
                DecisionFacts("shard", "batch", "data", {}, 12, 64, "batch over data"),
                DecisionFacts(
                    "shard",
                    "heads",
                    "model",
                    {"conflict 0": 1},
                    2,
                    8,
                    "heads over model",
                    "",
                    "",
                    ["f32[8,8].1 (a.py:7)"],
                ),
                DecisionFacts("shard", "embed", "data", {}, 3, 512, "embed over data: weights sharded (ZeRO-3)"),
                DecisionFacts("replicate", "state", "data", {}, 14, 0, "keep state replicated over data between steps"),
            ],
            "data (8): FSDP; model (2): tensor-parallel (heads)",
        ),
        predicted=predicted,
        baselines={
            "unsharded": BaselineFacts(0.301, 98 * GIB, False, 0.301, 0.0),
            "data-parallel": BaselineFacts(0.0312, 21 * GIB, True, 0.0152, 0.016),
        },
        collectives=[
            CollectiveFacts(
                "all-gather", ["data"], 12 * MIB, 144, 0.0021, "model.py:51 ffn (fwd layer/ffn/dot_general)"
            ),
            CollectiveFacts(
                "all-reduce", ["model"], 4 * MIB, 72, 0.0034, "model.py:47 attention (bwd layer/attention/dot_general)"
            ),
            CollectiveFacts("reduce-scatter", ["data", "model"], MIB, 90, 0.0011, ""),
        ],
        arguments=arguments,
        results=[
            *(ResultFacts(one.index, one.name, one.type, one.sharding) for one in arguments[:-1]),
            ResultFacts(len(arguments) - 1, "loss", "f32[]", []),
        ],
        time_by_line=[
            LineFacts("layer_*/mlp", "model.py:51 ffn", 0.0117, 0.0021, "dot_general", 0.5),
            LineFacts("layer_*/attention", "model.py:47 attention", 0.0058, 0.0034, "all-reduce over model", 0.248),
            *(LineFacts(f"part_{k}", f"model.py:{k}", 0.001 / k, 0.0, "add", 0.04 / k) for k in range(1, 6)),
        ],
        analysis=AnalysisFacts(
            classes=76,
            groups=8,
            conflicts=648,
            components=18,
            resolution_groups=1,
            group_list=[
                GroupFacts("batch", 12, 64, ["batch['tokens'].0"]),
                GroupFacts("heads", 2, 8, ["params['layers'][0]['wq'].1", "params['layers'][1]['wq'].1"]),
                GroupFacts("embed", 3, 512, ["params['embed'].1", "params['layers'][0]['wq'].0", "mu['embed'].1"]),
            ],
            replicated_ops={"chlo.top_k": 2, "stablehlo.sort": 1},
            notes=["the trip count of the loop at model.py:12 is unknown; 1 is assumed"],
        ),
        search=SearchFacts("mcts", 0, 2.13, 12345, 8201, "plateau"),
        timings={"load": 0.41, "dimensions": 0.52, "search": 2.13, "emit": 0.21},
    )


def _arguments() -> list[ArgumentFacts]:
    """Parameters and two trees of optimizer state of the same shape, then the batch."""
    found: list[ArgumentFacts] = []

    def add(name: str, array_type: str, sharding: list[list[str]], donated: bool = True) -> None:
        found.append(ArgumentFacts(len(found), name, array_type, donated, sharding))

    for tree in ("params", "mu", "nu"):
        add(f"{tree}['embed']", "f32[32000,512]", [["data", "model"], []])
        for layer in range(2):
            add(f"{tree}['layers'][{layer}]['wq']", "f32[512,512]", [["data"], ["model"]])
            add(f"{tree}['layers'][{layer}]['norm']", "f32[512]", [[]])
    add("batch['tokens']", "i32[64,1024]", [["data"], []], donated=False)
    return found
