"""Everything a plan can say, on a tiny program each: predicted, compiled and worked out by hand, the collectives are
the same.

Compiled for 8 virtual CPU devices, data=4 x model=2; read off the module as XLA's partitioner leaves it, in both
written forms.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import feature_programs
import pytest
from emitted import emit_shardy
from feature_programs import (
    CHANNELS,
    COLUMNS,
    EDGES,
    NODES,
    STEPS,
    B,
    C,
    D,
    E,
    F,
    H,
    K,
    S,
    V,
)
from programs import Case
from run_here import run_program

from toast_cli import xla
from toast_cli.ask_xla.collectives import partitioned_collectives
from toast_cli.ask_xla.compile import as_stablehlo
from toast_cli.ask_xla.numbers import input_sets, relative_error
from toast_cli.emit import emit_hlo
from toast_cli.plan.decisions import Decision, Plan
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import Sharding

DEVICES = 8
# kind, mesh axes, bytes of the result on each device, count
Expected = list[tuple[str, tuple[str, ...], float, float]]
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
ALL_TO_ALL, PERMUTE = "all-to-all", "collective-permute"
DATA, MODEL, BOTH = ("data",), ("model",), ("data", "model")
F32 = 4

# Words of a plan: `x.0=data` shards dimension 0 of argument x; `/1` takes the other side of its conflicts; `!y.1`
# leaves out operations that have dimension 1 of y, `+y.1` all others; `-weights=data` does not keep them split at rest.
FEATURES: dict[str, tuple[str, str, Expected]] = {
    # One all-reduce of each gradient, [D, F] and [F, D].
    "data parallel": ("mlp", "x.0=data", [(ALL_REDUCE, DATA, F32 * D * F, 2)]),
    "data parallel over two axes": ("mlp", "x.0=data x.0=model", [(ALL_REDUCE, BOTH, F32 * D * F, 2)]),
    # Gradients of a model shard, and the output of a data shard.
    "data parallel x megatron": (
        "mlp",
        "x.0=data p['up'].1=model",
        [(ALL_REDUCE, DATA, F32 * D * F / 2, 2), (ALL_REDUCE, MODEL, F32 * B * D / 4, 1)],
    ),
    # Each weight is gathered once for both directions, each gradient scattered.
    "fsdp": (
        "mlp",
        "x.0=data p['up'].0=data p['up'].1=data",
        [(ALL_GATHER, DATA, F32 * D * F, 2), (REDUCE_SCATTER, DATA, F32 * D * F / 4, 2)],
    ),
    # Weights are whole, their momentum is split: gradients are scattered to it, new weights gathered after the update.
    "zero-2": (
        "mlp_momentum",
        "x.0=data p['up'].0=data p['up'].1=data -weights=data",
        [(ALL_GATHER, DATA, F32 * D * F, 2), (REDUCE_SCATTER, DATA, F32 * D * F / 4, 2)],
    ),
    # Two blocks: two forward, one backward (nobody asks for the gradient of x).
    "megatron mlp": ("blocks", "p[0]['up'].1=model p[1]['up'].1=model", [(ALL_REDUCE, MODEL, F32 * B * S * D, 3)]),
    # What comes back through queries, keys and values is added to what comes back around the block, one after the
    # other: not a sum of partial results alone, so three reductions.
    "megatron attention": (
        "attention_blocks",
        "p[0]['q'].1=model p[1]['q'].1=model",
        [(ALL_REDUCE, MODEL, F32 * B * S * D, 2 + 3)],
    ),
    # With a norm in between it is: two for each direction.
    "megatron block": ("block", "p['q'].1=model p['up'].1=model", [(ALL_REDUCE, MODEL, F32 * B * S * D, 4)]),
    # Each of these becomes a scatter. What goes into a product is gathered before it: forward a block's input, backward
    # the gradient of its output, the input once for both directions.
    "sequence parallel mlp": (
        "blocks",
        "p[0]['up'].1=model p[1]['up'].1=model x.1=model",
        [(ALL_GATHER, MODEL, F32 * B * S * D, 4), (REDUCE_SCATTER, MODEL, F32 * B * S * D / 2, 3)],
    ),
    "sequence parallel attention": (
        "attention_blocks",
        "p[0]['q'].1=model p[1]['q'].1=model x.1=model",
        [(ALL_GATHER, MODEL, F32 * B * S * D, 4), (REDUCE_SCATTER, MODEL, F32 * B * S * D / 2, 2 + 3)],
    ),
    "sequence parallel block": (
        "block",
        "p['q'].1=model p['up'].1=model x.1=model",
        [(ALL_GATHER, MODEL, F32 * B * S * D, 4), (REDUCE_SCATTER, MODEL, F32 * B * S * D / 2, 4)],
    ),
    # The sequence has the axis first: weights are gathered instead, and their gradients scattered.
    "the sequence before megatron": (
        "blocks",
        "x.1=model p[0]['up'].1=model p[1]['up'].1=model",
        [(ALL_GATHER, MODEL, F32 * D * F, 4), (REDUCE_SCATTER, MODEL, F32 * D * F / 2, 4)],
    ),
    # The same on a quarter of the batch, and FSDP of the four weights' halves.
    "fsdp x megatron x sequence": (
        "blocks",
        "x.0=data p[0]['up'].1=model p[1]['up'].1=model x.1=model p[0]['up'].0=data",
        [
            (ALL_GATHER, MODEL, F32 * B * S * D / 4, 4),
            (REDUCE_SCATTER, MODEL, F32 * B * S * D / 8, 3),
            (ALL_GATHER, DATA, F32 * D * F / 2, 4),
            (REDUCE_SCATTER, DATA, F32 * D * F / 8, 4),
        ],
    ),
    # Queries stay, keys and values are gathered.
    "context parallel, queries": ("attention", "x.1=data", [(ALL_GATHER, DATA, F32 * B * S * H * K, 2)]),
    # Keys and values stay. Queries are gathered; maximum and sum of the softmax go to a quarter of the queries each and
    # from there to all; so does the outcome, but it stays there.
    "context parallel, keys": (
        "attention",
        "x.1=data/1",
        [
            (ALL_GATHER, DATA, F32 * B * S * H * K, 1),
            (REDUCE_SCATTER, DATA, F32 * B * H * S / 4, 2),
            (ALL_GATHER, DATA, F32 * B * H * S, 2),
            (REDUCE_SCATTER, DATA, F32 * B * S * H * K / 4, 1),
        ],
    ),
    # Both dimensions of each weight are split, no batch: every product is a partial sum, forward over the model
    # dimension (data) and over the hidden one (model), and so is each norm's mean. Backward: the same for the gradients
    # of both products, the second's input not being asked for in the first block, and the norm's sum in the second.
    "two-dimensional tensor parallel": (
        "blocks",
        "p[0]['up'].0=data p[0]['up'].1=model p[1]['up'].1=model",
        [
            (ALL_REDUCE, DATA, F32 * B * S * F / 2, 4),
            (ALL_REDUCE, MODEL, F32 * B * S * D / 4, 3),
            (ALL_REDUCE, DATA, F32 * B * S, 3),
        ],
    ),
    # Tokens travel to their experts and back: [batch, experts, tokens, model].
    "expert parallel": (
        "experts",
        "w['up'].0=data!x.1 x.0=data",
        [(ALL_TO_ALL, DATA, F32 * B * E * C * D / 4, 2)],
    ),
    # Rows looked up are added up (all but one device has zeros); so are maximum, sum and the target's logit of the
    # softmax.
    "vocabulary": (
        "language_model",
        "table.0=model tokens.0=data",
        [(ALL_REDUCE, MODEL, F32 * B * S * D / 4, 1), (ALL_REDUCE, MODEL, F32 * B * S / 4, 3)],
    ),
    # Every device adds its edges' messages to all nodes.
    "edge sharding": ("messages", "senders.0=data", [(ALL_REDUCE, DATA, F32 * NODES * D, 1)]),
    # Nodes rest split as well: gathered to be read, sums scattered.
    "edge and node sharding": (
        "messages",
        "senders.0=data nodes.0=data",
        [(ALL_GATHER, DATA, F32 * NODES * D, 1), (REDUCE_SCATTER, DATA, F32 * NODES * D / 4, 1)],
    ),
    # Both nodes of every edge are looked up in a split table; the sums stay where the nodes are.
    "node sharding": ("messages", "nodes.0=data", [(ALL_REDUCE, DATA, F32 * EDGES * D, 2)]),
    # A row from the neighbour above, one from below.
    "halo": ("convolution", "image.1=data", [(PERMUTE, DATA, F32 * B * COLUMNS * CHANNELS, 2)]),
    "scan, batch": ("scanned", "x.0=data", []),
    # Gathered in each step.
    "scan, fsdp": ("scanned", "x.0=data ws.1=data", [(ALL_GATHER, DATA, F32 * D * D, STEPS)]),
    # The carry is split along what each product sums over and makes.
    "scan, model": ("scanned", "x.1=model", [(REDUCE_SCATTER, MODEL, F32 * B * D / 2, STEPS)]),
    # The matrix is gathered once, the bias wherever it is broadcast; the sums over the steps are scattered once each.
    "recurrence, fsdp": (
        "unrolled",
        "x.0=data p['w'].0=data p['w'].1=data",
        [
            (ALL_GATHER, DATA, F32 * D * D, 1),
            (ALL_GATHER, DATA, F32 * D, STEPS),
            (REDUCE_SCATTER, DATA, F32 * D * D / 4, 1),
            (REDUCE_SCATTER, DATA, F32 * D / 4, 1),
        ],
    ),
    # The matrix is gathered in every step forward, and again in every step backward; each step's part of its gradient
    # is scattered.
    "a loop and its backward loop, fsdp": (
        "recurrent",
        "x.0=data p.1=data",
        [(ALL_GATHER, DATA, F32 * D * D, 2 * STEPS), (REDUCE_SCATTER, DATA, F32 * D * D / 4, STEPS)],
    ),
    # The table is gathered for the look-up; its gradient is scattered over both axes at once.
    "look-up, fsdp over two axes": (
        "look_up",
        "x.0=data x.0=model p.1=data p.1=model",
        [(ALL_GATHER, BOTH, F32 * V * D, 1), (REDUCE_SCATTER, BOTH, F32 * V * D / 8, 1)],
    ),
    "two axes on one dimension": ("product", "w.1=data w.1=model", []),
    "two axes in the other order": ("product", "w.1=model w.1=data", []),
    # The sum over both is scattered one axis after the other.
    "two axes summed over": (
        "product",
        "x.1=data x.1=model x.0=data x.0=model",
        [(REDUCE_SCATTER, DATA, F32 * B * F / 4, 1), (REDUCE_SCATTER, MODEL, F32 * B * F / 8, 1)],
    ),
    # Terms of a sum that are partial over one axis are reduced together, whichever dimensions it splits,
    "a sum over one axis": (
        "added_products",
        "x.1=data y.1=data z.1=data",
        [(ALL_REDUCE, DATA, F32 * B * D, 1)],
    ),
    # also to be scattered;
    "a sum over one axis, scattered": (
        "added_products",
        "x.1=data y.1=data z.1=data u.1=data",
        [(REDUCE_SCATTER, DATA, F32 * B * D / 4, 1)],
    ),
    # one of other axes ends the sum,
    "a sum over two axes": (
        "added_products",
        "x.1=data y.1=data z.1=model",
        [(ALL_REDUCE, DATA, F32 * B * D, 1), (ALL_REDUCE, MODEL, F32 * B * D, 1)],
    ),
    # and so the third is alone.
    "a sum with another in between": (
        "added_products",
        "x.1=data y.1=model z.1=data",
        [(ALL_REDUCE, DATA, F32 * B * D, 2), (ALL_REDUCE, MODEL, F32 * B * D, 1)],
    ),
    # A minor part of the result's dimension cannot take the axis there; but all that reads the total cuts it so, and
    # each device keeps a piece.
    "a total of which each keeps a piece": (
        "product_in_heads",
        "x.1=data c.2=data",
        [(REDUCE_SCATTER, DATA, F32 * B * D / 4, 1)],
    ),
    # Queries split over heads, keys and values over their width: those are gathered for each head, their gradients are
    # sums over heads and each device keeps its part of them. All three terms of the input's gradient are partial.
    "multi-query attention": (
        "multi_query",
        "p['q'].1=model p['k'].1=model p['v'].1=model",
        [
            (ALL_GATHER, MODEL, F32 * B * S * K, 2),
            (REDUCE_SCATTER, MODEL, F32 * B * S * K / 2, 2),
            (ALL_REDUCE, MODEL, F32 * B * S * D, 1),
        ],
    ),
    # Queries alone: gradients of keys and values are sums over heads, and one term of the input's is partial.
    "multi-query attention, queries": (
        "multi_query",
        "p['q'].1=model",
        [(ALL_REDUCE, MODEL, F32 * B * S * K, 2), (ALL_REDUCE, MODEL, F32 * B * S * D, 1)],
    ),
    # Heads are the major part of the weights' columns; the result is a sum over heads.
    "heads in a merged dimension": ("merged_heads", "p['q'].1=data", [(ALL_REDUCE, DATA, F32 * B * S * D, 1)]),
    # And a head's elements the minor part, over which the scores are a sum.
    "heads and their elements": (
        "merged_heads",
        "p['q'].1.0=data p['q'].1.1=model",
        [(ALL_REDUCE, DATA, F32 * B * S * D, 1), (ALL_REDUCE, MODEL, F32 * B * H * S * S / 4, 1)],
    ),
    # The token is written into the cache where its heads lie; the result is a sum over heads.
    "cache by heads": ("decode", "x.0=data p['q'].1=model", [(ALL_REDUCE, MODEL, F32 * B * D / 4, 1)]),
    # The token is written by the device that has its place; maximum, sum and outcome of the softmax are sums over
    # places.
    "cache by places": (
        "decode",
        "keys.1=data",
        [(ALL_REDUCE, DATA, F32 * B * H, 2), (ALL_REDUCE, DATA, F32 * B * H * K, 1)],
    ),
    # Each device has rows of the first weights, for all sequences, and attends for some of them: what products leave
    # is scattered to those. Where there are no heads nothing is split, so the result is gathered.
    "cache by sequences, weights by rows": (
        "decode",
        "x.1=data+p['q'].1 x.0=data+p['q'].1 p['q'].1=model",
        [
            (REDUCE_SCATTER, DATA, F32 * B * D / 8, 3),
            (ALL_REDUCE, MODEL, F32 * B * D / 4, 1),
            (ALL_GATHER, DATA, F32 * B * D, 1),
        ],
    ),
    # Three times in each of two trips.
    "gathered in a loop in a loop": ("loop_in_a_loop", "x.0=data w.0=data", [(ALL_GATHER, DATA, F32 * D * D, 6)]),
    # Whichever branch runs gathers the weights; each counts half of the four trips.
    "gathered in either branch": ("either_branch", "x.0=data w.0=data", [(ALL_GATHER, DATA, F32 * D * D, 4)]),
}


@cache
def case(program: str) -> Case:
    found: Case = getattr(feature_programs, program)()
    return found


def plan_of(case: Case, words: str) -> Plan:
    return tuple(decision(case, word) for word in words.split())


def decision(case: Case, word: str) -> Decision:
    place, _, rest = word.partition("=")
    if place.startswith("-"):
        return case.replicate(place[1:], rest)
    rest, _, only = rest.partition("+")
    rest, _, unless = rest.partition("!")
    axis, _, side = rest.partition("/")
    return case.shard(place, axis, int(side or 0), unless, only)


def written(case: Case, plan: Plan, form: str) -> bytes:
    lowered = case.lowered(plan)
    return as_stablehlo(emit_hlo(case.source, lowered), "hlo") if form == "hlo" else emit_shardy(case.source, lowered)


def partitioned(case: Case, program: bytes, folder: Path, *, shardy: bool) -> Expected:
    """The collectives right after partitioning, equal ones together."""
    settings: dict[str, str | bool] = {
        "xla_dump_to": str(folder),
        "xla_dump_hlo_pass_re": "^spmd-partitioning$",
        "xla_dump_hlo_as_text": True,
        "xla_dump_large_constants": True,
        "xla_backend_optimization_level": "0",
    }
    xla.compile_program(program, xla.cpu_devices(DEVICES), shardy=shardy, settings=settings)
    (path,) = folder.glob("*.after_spmd-partitioning.*")
    mesh = case.problem.mesh
    found = partitioned_collectives(path.read_text(), mesh.names, mesh.sizes)
    return together([(c.kind, c.axes, c.bytes, c.count) for c in found])


def together(collectives: Expected) -> Expected:
    found: dict[tuple[str, tuple[str, ...], float], float] = defaultdict(float)
    for kind, axes, size, count in collectives:
        found[kind, tuple(sorted(axes)), size] += count
    return sorted((*key, round(count, 9)) for key, count in found.items())


@pytest.mark.parametrize("name", FEATURES)
def test_predicted(name: str) -> None:
    program, words, expected = FEATURES[name]
    assert together(case(program).collectives(plan_of(case(program), words))) == sorted(expected)


@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
@pytest.mark.parametrize("name", FEATURES)
def test_compiled(name: str, form: str, tmp_path: Path) -> None:
    program, words, expected = FEATURES[name]
    content = written(case(program), plan_of(case(program), words), form)
    made = partitioned(case(program), content, tmp_path, shardy=form == "stablehlo")
    assert made == sorted(expected)


@pytest.mark.parametrize("name", FEATURES)
def test_numbers(name: str) -> None:
    program, words, _ = FEATURES[name]
    source = case(program).source
    inputs, shapes = input_sets(source.module, 1, 1)[0], result_shapes(source.module)
    split = written(case(program), plan_of(case(program), words), "stablehlo")
    for a, b in zip(whole_results(program), run_program(split, inputs, shapes, DEVICES, shardy=True), strict=True):
        assert relative_error(a, b) < 1e-5


# Feature -> how arguments rest, those that are whole left out.
RESTS = {
    "data parallel": "x data|-",
    "data parallel over two axes": "x data,model|-",
    "fsdp": "p['down'] data|- p['up'] data|- x data|-",
    "zero-2": "m['down'] data|- m['up'] data|- x data|-",
    "two-dimensional tensor parallel": "p[0]['down'] model|data p[0]['up'] data|model p[1]['down'] model|data "
    "p[1]['up'] data|model x -|-|data",
    "edge sharding": "senders data receivers data",
    "expert parallel": "w['down'] data|-|- w['up'] data|-|- x data|-|- route data|-|-|-",
    "scan, fsdp": "ws -|data|- x data|-",
    "scan, model": "ws -|model|- x -|model",
    "sequence parallel block": "x -|model|- p['down'] model|- p['k'] -|model|- p['o'] model|-|- p['q'] -|model|- "
    "p['up'] -|model p['v'] -|model|-",
}


@pytest.mark.parametrize("name", RESTS)
def test_at_rest(name: str) -> None:
    of, words, _ = FEATURES[name]
    rests = {a.path: case(of).rest(a.path, plan_of(case(of), words)) for a in case(of).program.arguments}
    assert " ".join(f"{path} {rest}" for path, rest in rests.items() if {*rest} - {*"|-"}) == RESTS[name]


def test_nothing_is_split_and_sent_without_decisions() -> None:
    assert case("mlp").collectives(()) == []
    assert {case("mlp").rest(a.path, ()) for a in case("mlp").program.arguments} == {"-|-"}


def test_zero_keeps_less_at_rest_the_more_it_splits() -> None:
    of, weight = case("mlp_momentum"), F32 * D * F
    stored = [
        of.evaluator.cost(plan_of(of, FEATURES[name][1] if name in FEATURES else name)).argument_bytes - F32 * B * D / 4
        for name in ("x.0=data", "zero-2", "x.0=data p['up'].0=data p['up'].1=data")
    ]
    assert stored == [4 * weight, 2 * weight + 2 * weight / 4, weight]


def test_replicate_says_nothing_of_other_axes() -> None:
    of = case("mlp_momentum")
    assert of.rest("p['up']", plan_of(of, "p['up'].0=data -weights=model")) == "data|-"


@pytest.mark.parametrize(
    ("words", "expected"),
    [("x.1=model", "-|-|model|-"), ("x.1=model/1", "-|-|-|model"), ("x.1=model x.1=data/1", "-|-|model|data")],
)
def test_sides_decide_which_dimensions_of_the_scores_are_split(words: str, expected: str) -> None:
    of = case("block")
    exponential, *_ = of.ops("exponential")  # of the scores [b, h, s, t]
    shardings = of.lowered(plan_of(of, words)).shardings
    assert of.text(shardings[of.program.ops[exponential].results[0]]) == expected


@cache
def whole_results(program: str) -> list[Any]:
    module = case(program).source.module
    inputs = input_sets(module, 1, 1)[0]
    return run_program(xla.write_bytecode(module), inputs, result_shapes(module), 1, shardy=True)


def result_shapes(module: Any) -> list[tuple[int, ...]]:
    return [tuple(kind.shape) for kind in xla.main_function(module).type.results]


def test_donated_buffers_are_taken_over() -> None:
    """Weights and momentum, a quarter of each, under FSDP."""
    momentum = case("mlp_momentum")
    content = written(momentum, plan_of(momentum, "x.0=data p['up'].0=data p['up'].1=data"), "stablehlo")
    executable = xla.compile_program(content, xla.cpu_devices(DEVICES), shardy=True)
    assert executable.get_compiled_memory_stats().alias_size_in_bytes == 4 * F32 * D * F / 4


def test_a_recurrence_needs_no_more_constraints_than_one_step() -> None:
    """One where each weight is gathered, two where each sum ends, and one in each step where a bias that is split
    meets rows that are."""
    unrolled = case("unrolled")
    lowered = unrolled.lowered(plan_of(unrolled, "x.0=data p['w'].0=data p['w'].1=data"))
    assert emit_shardy(unrolled.source, lowered).count(b"sdy.sharding_constraint") <= 10


# Shardings of [rows, columns] between which XLA gathers everything, unless the way is spelled out: from, to,
# collectives by hand (of 1024 bytes).
WAYS: list[tuple[str, str, Expected]] = [
    ("data,model|-", "-|model", [(ALL_TO_ALL, MODEL, 128, 1), (ALL_GATHER, DATA, 512, 1)]),
    ("data|-", "-|model", [(ALL_GATHER, DATA, 512, 1)]),
    ("model|-", "-|data", [(ALL_GATHER, MODEL, 256, 1)]),
    ("data|model", "-|-", [(ALL_GATHER, MODEL, 256, 1), (ALL_GATHER, DATA, 1024, 1)]),
    (
        "data|model",
        "model|data",
        [(ALL_TO_ALL, DATA, 128, 1), (ALL_TO_ALL, MODEL, 128, 1), (PERMUTE, ("data", "model"), 128, 1)],
    ),
]


@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
@pytest.mark.parametrize(("source", "target", "expected"), WAYS)
def test_the_way_between_shardings_is_the_planned_one(
    source: str, target: str, expected: Expected, form: str, tmp_path: Path
) -> None:
    two = case("two_shardings")
    have, want = (sharding_of(text) for text in (source, target))
    x, y = (two.program.results[0].value, two.program.results[1].value)
    whole = lower_by_hand(two, {two.program.arguments[0].value: have, x: have, y: want})
    content = as_stablehlo(emit_hlo(two.source, whole), "hlo") if form == "hlo" else emit_shardy(two.source, whole)
    assert partitioned(two, content, tmp_path, shardy=form == "stablehlo") == sorted(expected)


def sharding_of(text: str) -> Sharding:
    names = ["data", "model"]
    return tuple(() if dim == "-" else tuple(names.index(axis) for axis in dim.split(",")) for dim in text.split("|"))


def lower_by_hand(two: Case, shardings: dict[int, Sharding]) -> PartitionedProgram:
    """The second result is made of the first, which it needs as it lies itself."""
    ops, last = two.program.ops, two.program.results[1].value
    found = [shardings.get(value, ((),) * len(v.shape)) for value, v in enumerate(two.program.values)]
    maker = two.program.producer[last]
    position = next(k for k, v in enumerate(ops[maker].operands) if v in shardings)
    need = {(maker, position): shardings[last]} if shardings[last] != shardings[ops[maker].operands[position]] else {}
    return PartitionedProgram(("data", "model"), (4, 2), found, {}, need)
