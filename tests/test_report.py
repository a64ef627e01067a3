"""Reports in the terminal: quantities as text, and whole reports at fixed widths."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from report_sample import GIB, MIB, PREDICTED, TOO_LARGE, WIDTHS, make_report
from rich.cells import cell_len

from toast_cli.plan.partitioned import ConstraintFacts
from toast_cli.program import quantities as text
from toast_cli.report import style, terminal
from toast_cli.report.arrays import merged_collectives
from toast_cli.report.model import (
    AnalysisFacts,
    BaselineFacts,
    ConfirmationFacts,
    ConfirmedPlanFacts,
    LiveValue,
    PlanFacts,
    Report,
)
from toast_cli.report.terminal import one_line, print_report
from toast_cli.report.words import LOOKED_UP, SUMS, scope_texts


def shown(report: Report, width: int, *, verbose: bool = False) -> str:
    stream = io.StringIO()
    print_report(report, stream, verbose=verbose, width=width)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (text.format_bytes(0), "0 B"),
        (text.format_bytes(999), "999 B"),
        (text.format_bytes(1000), "0.98 KiB"),
        (text.format_bytes(1536), "1.50 KiB"),
        (text.format_bytes(30.75 * GIB), "30.8 GiB"),
        (text.format_bytes(-5 * GIB), "-5.00 GiB"),
        (text.format_bytes(math.inf), "n/a"),
        (text.format_seconds(0), "0 s"),
        (text.format_seconds(0.0234), "23.4 ms"),
        (text.format_seconds(0.00099999), "1.00 ms"),
        (text.format_seconds(1.2e-5), "12.0 µs"),
        (text.format_seconds(125.4), "125 s"),
        (text.format_seconds(900), "15.0 min"),
        (text.format_seconds(1e-9), "1.00 ns"),
        (text.format_seconds(-2e-8), "-20.0 ns"),
        (text.format_seconds(1e-12), "0 s"),
        (text.format_seconds(-3e-10), "0 s"),
        (text.format_seconds(math.nan), "n/a"),
        (text.format_flops(3.12e14), "312 TFLOP"),
        (text.format_flops(12), "12 FLOP"),
        (text.format_flops(999_600), "1.00 MFLOP"),
        (text.format_percent(0.512), "51.2%"),
        (text.format_percent(12.3), "1,230%"),
        (text.format_ratio(12.91), "12.9×"),
        (text.format_plural(1, "op"), "1 op"),
        (text.format_plural(9205, "op"), "9,205 ops"),
        (text.format_plural(76, "class"), "76 classes"),
        (text.format_sharding([["data", "model"], []]), "(data+model, None)"),
        (text.format_sharding([[], []]), "replicated"),
        (text.format_sharding([]), "replicated"),
    ],
)
def test_quantities(found: str, expected: str) -> None:
    assert found == expected


@pytest.mark.parametrize(
    ("array_type", "expected"),
    [("bf16[2048,2048]", 2**23), ("f32[]", 4), ("i4[3]", 2), ("f32[0,7]", 0), ("!token", 0), ("complex<f32>[2]", 16)],
)
def test_type_bytes(array_type: str, expected: int) -> None:
    assert text.type_bytes(array_type) == expected


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (50, "model.py:47 attend (bwd layer_0/attention/mul)"),
        (45, "model.py:47 attend (bwd …/attention/mul)"),
        (30, "model.py:47 attend (bwd …/mul)"),
        (29, "model.py:47 attend (bwd)"),
        (3, "model.py:47 attend (bwd)"),
    ],
)
def test_shorten_location(room: int, expected: str) -> None:
    assert text.shorten_location("model.py:47 attend (bwd layer_0/attention/mul)", room) == expected


def test_shorten_location_without_a_pass() -> None:
    assert text.shorten_location("model.py:47 (encoder/layer_0/mul)", 27) == "model.py:47 (…/layer_0/mul)"


REPORT_80 = """\
program    tiny_train: 9,205 ops, 16 arguments of 4.00 GiB, 312 TFLOP a step
mesh       v4-32: 16 devices (v4), data=8 × model=2, 30.8 GiB usable per device
strategy   data (8): FSDP; model (2): tensor-parallel (heads)

decisions
     decision         over       size  count  array.dimension
  1  shard batch      data     64 → 8     12  batch/tokens.0
  2  shard heads      model     8 → 4      2  params/layers/*/wq.1; where it
                                              occurs twice: f32[8,8].1 (a.py:7)
  3  shard embed      data   512 → 64      3  params/layers/0/wq.0
  4  replicate state  data                14  keep state replicated over data
                                              between steps

predicted, per device and step
  step time     23.4 ms  ██████▒▒▒▒  █ compute 15.2 ms  ▒ communication 8.20 ms
                                     overlap hides none; step at best 16.1 ms
  peak memory  12.1 GiB  ████░░░░░░  39.3% of 30.8 GiB, arguments 3.20 GiB
  MFU             51.2%  █████░░░░░  of the chips' peak arithmetic rate

compared with
                 step time         peak memory
  this plan        23.4 ms  1.00×     12.1 GiB  fits
  unsharded         301 ms  12.9×     98.0 GiB  does not fit
  data-parallel    31.2 ms  1.33×     21.0 GiB  fits

where the time goes, compute and communication before overlap
            time  line                   module
  50.0%  11.7 ms  model.py:51 ffn        layer_*/mlp
  24.8%  5.80 ms  model.py:47 attention  layer_*/attention
   4.0%  1.00 ms  model.py:1             part_1
   2.0%   500 µs  model.py:2             part_2
   1.3%   333 µs  model.py:3             part_3

collectives, 306 a step
     kind            axes                 time    result  caused by
  1  all-reduce      model        ×72  3.40 ms  4.00 MiB  model.py:47 attention
                                                          (bwd)
  2  all-gather      data        ×144  2.10 ms  12.0 MiB  model.py:51 ffn (fwd)
  3  reduce-scatter  data+model   ×90  1.10 ms  1.00 MiB  (unknown)

arguments, 16 in all
  {params,mu,nu}/embed          f32[32000,512]  ×3  (data+model, None)
  {params,mu,nu}/layers/*/wq    f32[512,512]    ×6  (data, model)
  {params,mu,nu}/layers/*/norm  f32[512]        ×6  replicated
  batch/tokens                  i32[64,1024]        (data, None)

notes
  ·  3 ops that toast cannot split, so every device computes the whole of each:
     chlo.top_k ×2, stablehlo.sort ×1
  ·  the trip count of the loop at model.py:12 is unknown; 1 is assumed

search     mcts, seed 0: 12,345 plans tried, the best was number 8,201; stopped:
           further plans gained less than 1%
time       3.27 s: load 410 ms, dimensions 520 ms, search 2.13 s, emit 210 ms
"""

WORDS = [
    (", ".join(scope_texts("ff", "")), "except in ops with ff"),
    (", ".join(scope_texts(SUMS, "heads")), "except in ops that sum over it, only in ops with heads"),
    (", ".join(scope_texts(LOOKED_UP, "")), "except in ops that look up rows of tables"),
    (", ".join(scope_texts("", "")), ""),
]


@pytest.mark.parametrize(("found", "expected"), WORDS)
def test_words_of_a_plan(found: str, expected: str) -> None:
    assert found == expected


# The same program where it does not fit, down to where the two reports are alike again.
TOO_LARGE_120 = """\
program    tiny_train: 9,205 ops, 16 arguments of 4.00 GiB, 312 TFLOP a step
mesh       v4-32: 16 devices (v4), data=8 × model=2, 30.8 GiB usable per device
strategy   data (8): FSDP; model (2): tensor-parallel (heads)

✗ does not fit: the smallest-memory plan found needs 45.2 GiB on each device, 14.4 GiB more than the limit of 30.8 GiB

decisions
     decision         over       size  count  array.dimension
  1  shard batch      data     64 → 8     12  batch/tokens.0
  2  shard heads      model     8 → 4      2  params/layers/*/wq.1; where it occurs twice: f32[8,8].1 (a.py:7)
  3  shard embed      data   512 → 64      3  params/layers/0/wq.0
  4  replicate state  data                14  keep state replicated over data between steps

predicted, per device and step
  step time     23.4 ms  ████████████████████████████████▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒  █ compute 15.2 ms  ▒ communication 8.20 ms
                                                                             overlap hides none; step at best 16.1 ms
  peak memory  45.2 GiB  ██████████████████████████████████████████████████  147.0% of 30.8 GiB, arguments 3.20 GiB
  MFU             51.2%  ██████████████████████████░░░░░░░░░░░░░░░░░░░░░░░░  of the chips' peak arithmetic rate

compared with
                 step time         compute  communication  peak memory
  this plan        23.4 ms  1.00×  15.2 ms        8.20 ms     45.2 GiB  does not fit
  unsharded         301 ms  12.9×   301 ms            0 s     98.0 GiB  does not fit
  data-parallel    31.2 ms  1.33×  15.2 ms        16.0 ms     21.0 GiB  fits

alive at the peak (model.py:88 (fwd loss))
     bytes          role       type                array         from
   500 MiB  1.1%    temporary  bf16[8,1024,32000]  dot_general   model.py:88 (fwd loss/logits)
  8.00 MiB  0.0%    argument   f32[32000,512]      params/embed

where the time goes, compute and communication before overlap
            time  line                   module             mostly
  50.0%  11.7 ms  model.py:51 ffn        layer_*/mlp        dot_general
  24.8%  5.80 ms  model.py:47 attention  layer_*/attention  all-reduce over model
   4.0%  1.00 ms  model.py:1             part_1             add
   2.0%   500 µs  model.py:2             part_2             add
   1.3%   333 µs  model.py:3             part_3             add

collectives, 306 a step
     kind            axes                 time    result  caused by
  1  all-reduce      model        ×72  3.40 ms  4.00 MiB  model.py:47 attention (bwd layer/attention/dot_general)
"""

VERBOSE_100 = """\
results, 16 in all
  {params,mu,nu}/embed          f32[32000,512]  ×3  (data+model, None)
  {params,mu,nu}/layers/*/wq    f32[512,512]    ×6  (data, model)
  {params,mu,nu}/layers/*/norm  f32[512]        ×6  replicated
  loss                          f32[]               replicated

dimensions, 8 kinds of them; 648 arrays with one of them twice, settled by 1 choice
  dimension  count  size  array.dimension
  batch         12    64  batch/tokens.0
  heads          2     8  params/layers/*/wq.1
  embed          3   512  {params,mu}/embed.1, params/layers/0/wq.0

notes
  ·  3 ops that toast cannot split, so every device computes the whole of each: chlo.top_k ×2,
     stablehlo.sort ×1
  ·  the trip count of the loop at model.py:12 is unknown; 1 is assumed

search     mcts, seed 0: 12,345 plans tried, the best was number 8,201; stopped: further plans
           gained less than 1%
time       3.27 s: load 410 ms, dimensions 520 ms, search 2.13 s, emit 210 ms
"""


def test_a_report_80_columns_wide() -> None:
    assert shown(make_report(), 80) == REPORT_80


def test_the_bar_of_a_step_has_what_overlap_leaves_of_communication() -> None:
    """15.2 ms of 16.9 are nine of ten cells."""
    report = make_report(predicted=replace(PREDICTED, step_seconds=0.0169))
    line = next(line for line in shown(report, 80).splitlines() if line.startswith("  step time"))
    assert (line.count("█") - 1, line.count("▒") - 1) == (9, 1)  # less one each before the words


def test_a_report_of_what_does_not_fit_120_columns_wide() -> None:
    assert shown(make_report(TOO_LARGE), 120).startswith(TOO_LARGE_120)


def test_verbose_shows_every_argument_and_the_analysis() -> None:
    report = shown(make_report(), 100, verbose=True)
    assert report.endswith(VERBOSE_100)
    assert "   2  params/layers/0/norm  f32[512]        donated  replicated\n" in report
    assert "alive at the peak" in report


def test_what_occurs_twice_is_said_once_for_all_choices_and_once_for_a_dimension() -> None:
    report = make_report()
    heads = replace(report.plan.decisions[1], choices=["f32[8,8].1 (a.py:7)", "f32[4,4].0 (b.py:9)"])
    again = replace(heads, axis="data", size=4)
    other = replace(again, choices=["f32[8,8].0 (a.py:7)"])
    plan = replace(report.plan, decisions=[heads, again, other])
    text = shown(replace(report, plan=plan), 200)
    assert text.count("where it occurs twice: ") == 2
    assert "where it occurs twice: f32[8,8].1 (a.py:7), f32[4,4].0 (b.py:9)\n" in text
    assert "where it occurs twice: f32[8,8].0 (a.py:7)\n" in text


@pytest.mark.parametrize("width", [60, 72, 80, 99, 100, 140, 200])
@pytest.mark.parametrize("verbose", [False, True])
def test_no_line_is_too_long_or_ends_in_spaces(width: int, verbose: bool) -> None:
    lines = shown(make_report(TOO_LARGE), width, verbose=verbose).splitlines()
    assert [line for line in lines if len(line) > width or line != line.rstrip()] == []


def constrained() -> Report:
    """Seven different constraints, the last of them three times."""
    line = 'x = jax.lax.with_sharding_constraint(x, P("data", None))'
    found = [
        ConstraintFacts("definition", f"model.py:{k} (f/layer)", "bf16[8,1024]", "", 2, line)
        for k in (1, 2, 3, 4, 5, 6, 7, 7, 7)
    ]
    return replace(make_report(), constraints=found)


def test_constraints_are_counted_and_with_verbose_listed() -> None:
    counted = "9 sharding constraints inside the written program, nothing to do by hand; --verbose lists them\n"
    assert counted in shown(constrained(), 100)
    verbose = shown(constrained(), 100, verbose=True)
    assert verbose.index("model.py:1, bf16") < verbose.index("×3  model.py:7, bf16"), "in the order of the program"
    assert all(len(line) <= 60 for line in shown(constrained(), 60).splitlines())
    assert "constraints" not in shown(make_report(), 100)


@pytest.mark.parametrize("width", [60, 72, 80, 100, 120])
def test_long_names_fold_and_numbers_stay(width: int) -> None:
    report = make_report()
    batch, heads, *_ = report.plan.decisions
    long = replace(heads, target="attention_query_heads_of_the_decoder", size=256_128, only="vocabulary_of_the_decoder")
    kind = replace(batch, kind="replicate", target="params['layers'][0]['attention']['query_norm'] and 17 alike")
    text = shown(replace(report, plan=replace(report.plan, decisions=[batch, long, kind])), width)
    table = text[text.index("decisions") : text.index("predicted")]
    assert max(map(len, table.splitlines())) <= width
    heads_of = table.splitlines()[1].split()
    assert heads_of[:4] == ["decision", "over", "size", "count"]
    figures = [line.split()[-2:] if width == 60 else line.split() for line in table.splitlines()]
    assert any("128,064" in words and "2" in words for words in figures)
    assert "256,128 → 128,064" in table
    letters = "".join(char for char in table if char.isalnum() or char == "_")
    assert "and17alike" in letters and "…" not in table.replace(", …", "")
    if width == 80:
        assert "layers/0/attention/\n" in table, "paths wrap behind separators"


@pytest.mark.parametrize("width", WIDTHS)
def test_places_in_the_source_are_whole_at_every_width(width: int) -> None:
    report = make_report(TOO_LARGE)
    place = "model.py:115 attend (bwd)"
    sent = [replace(one, kind="reduce-scatter", location=place) for one in report.collectives]
    live = [replace(one, location=place, type="bf16[64,1024,32000]") for one in TOO_LARGE.live_at_peak]
    text = shown(replace(report, collectives=sent, predicted=replace(TOO_LARGE, live_at_peak=live)), width)
    peak, caused = (text[text.index(start) :].partition("\n\n")[0] for start in ("alive at", "collectives, "))
    assert "model.py:115" in caused and "params/embed" in peak.replace("\n", "") and "dot_general" in peak
    assert ("model.py:115" in peak) == ("from" in peak), "a column that has no room is left out"


@pytest.mark.parametrize(
    "word", ["x" * 70, "漢" * 70, "wide/" * 20, "a/b " + "漢" * 40 + "b, c" + " " * 60, "TFLOP/s " * 9]
)
def test_what_wraps_loses_no_letter_and_gains_no_line(word: str) -> None:
    console = style.make_console(io.StringIO(), 60)
    lines = style.render([style.table([("", "left"), ("", "fold")], [("1", word)])], console).splitlines()
    assert all(lines) and not any(line.endswith("FLOP/") for line in lines) and max(map(cell_len, lines)) <= 60
    assert "".join("".join(lines).split()) == "1" + word.replace(" ", "")


def test_words_too_long_for_a_line_end_at_hyphens_and_capitals() -> None:
    console = style.make_console(io.StringIO(), 60)
    word = "data-parallel+megatron FlaxPreTrainedModel"
    rows = style.table([("", "left"), ("", "fold")], [("x" * 46, word)])
    lines = [line.lstrip("x ") for line in style.render([rows], console).splitlines()]
    assert lines == ["data-", "parallel+", "megatron", "FlaxPre", "TrainedModel"]


def test_what_does_not_fit_a_short_report_is_counted() -> None:
    many = [replace(make_report().arguments[0], index=n, name=f"tree{'abcdefghijklmnopqrst'[n]}") for n in range(20)]
    notes = [f"note {n}" for n in range(9)]
    report = replace(make_report(), arguments=many, analysis=replace(make_report().analysis, notes=notes))
    found = shown(report, 80)
    assert "and 8 smaller patterns; --verbose lists all" in found
    assert "4 more notes; --verbose lists all" in found


def test_an_empty_plan_has_a_report() -> None:
    report = replace(
        make_report(),
        plan=PlanFacts([], ""),
        collectives=[],
        baselines={},
        analysis=AnalysisFacts(0, 0, 0, 0, 0),
        arguments=[],
        timings={},
        predicted=replace(PREDICTED, step_seconds=0.0, compute_seconds=0.0, communication_seconds=0.0, limit_bytes=0),
    )
    found = shown(report, 80)
    assert "none: every device computes the whole program" in found
    assert "none: the devices never communicate" in found
    assert "notes" not in found


def test_colours_only_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b" not in shown(make_report(), 80)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[36mdata\x1b[0m" in shown(make_report(), 80)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[36m" not in shown(make_report(), 80)


def test_ascii_where_the_stream_holds_no_more() -> None:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding="ascii") as stream:
        print_report(make_report(TOO_LARGE), stream, verbose=True, width=80)
        found = raw.getvalue().decode("ascii")
    assert "data=8 x model=2" in found
    assert "#######" in found and "64 > 8" in found


def test_calls_of_libraries_say_what_to_give_toast_instead() -> None:
    report = make_report()
    assert "before_optimizations" not in shown(report, 200)
    calls = replace(report.analysis, replicated_ops={"stablehlo.custom_call @__cublas$gemm": 8})
    text = shown(replace(report, analysis=calls), 300)
    assert "custom_call @__cublas$gemm ×8" in text and "before_optimizations" in text


def test_names_that_look_like_markup_are_shown_as_they_are() -> None:
    strange = replace(make_report().arguments[0], name="[bold]x[/bold] :smile: \\[y]")
    assert "[bold]x[/bold] :smile: \\[y]" in shown(replace(make_report(), arguments=[strange]), 80)


def answered(peak: int | None) -> ConfirmationFacts:
    """A compiler's word on a plan. peak: what the plan needs; None if it is refused."""
    outcome = "compiled" if peak else "out of memory"
    row = ConfirmedPlanFacts("search", 0.02, 2**34, outcome, "", 0.02, 0.01, 0.01, peak, bool(peak))
    return ConfirmationFacts("XLA:TPU", "search" if peak else None, [row], 1.0, rejected=not peak)


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (
            make_report(),
            "tiny_train on v4-32: 23.4 ms a step, 12.1 GiB of 30.8 GiB; "
            "data (8): FSDP; model (2): tensor-parallel (heads)",
        ),
        (
            replace(make_report(TOO_LARGE), plan=PlanFacts([], "")),
            "tiny_train on v4-32: DOES NOT FIT, 23.4 ms a step, 45.2 GiB of 30.8 GiB; unsharded",
        ),
        (
            replace(make_report(TOO_LARGE), plan=PlanFacts([], ""), confirmation=answered(29 * 2**30)),
            "tiny_train on v4-32: 23.4 ms a step, 29.0 GiB of 30.8 GiB by XLA:TPU; unsharded",
        ),
        (
            replace(make_report(TOO_LARGE), plan=PlanFacts([], ""), confirmation=answered(None)),
            "tiny_train on v4-32: DOES NOT FIT, 23.4 ms a step, 45.2 GiB of 30.8 GiB predicted, and XLA:TPU refuses "
            "it; unsharded",
        ),
    ],
)
def test_one_line(report: Report, expected: str) -> None:
    assert one_line(report) == expected


def test_what_is_alike_at_the_peak_is_one_row() -> None:
    layers = [
        LiveValue(
            "stablehlo.dot_general", "bf16[8,8]", MIB, f"model.py:47 (jit(step)/layer_{k}/dot_general)", "temporary"
        )
        for k in range(18)
    ]
    other = LiveValue(
        "stablehlo.dot_general", "bf16[8,8]", MIB, "model.py:90 (jit(step)/loss/dot_general)", "temporary"
    )
    table = shown(make_report(replace(TOO_LARGE, live_at_peak=[*layers, other])), 120)
    rows = [line.split() for line in table.splitlines() if "stablehlo.dot_general" in line]
    assert [row[:2] + [word for word in row if word.startswith("×")] for row in rows] == [
        ["18.0", "MiB", "×18"],
        ["1.00", "MiB"],
    ]


def test_a_row_of_collectives_says_all_passes_and_what_paths_share() -> None:
    report = make_report()
    facts = [
        replace(report.collectives[0], location=f"model.py:51 ffn ({label})")
        for label in ("fwd layer_0/mlp/dot_general", "bwd layer_17/mlp/dot_general", "fwd layer_3/mlp/dot_general")
    ]
    assert merged_collectives(facts)[0].location == "model.py:51 ffn (fwd+bwd layer_*/mlp/dot_general)"
    facts[1] = replace(facts[1], location="model.py:51 ffn (remat add)")
    assert merged_collectives(facts)[0].location == "model.py:51 ffn (fwd+remat)"
    assert merged_collectives(facts[:1])[0].location == facts[0].location


@pytest.mark.parametrize(
    ("width", "in_library", "cause"),
    [
        (140, False, ["layer_*/mlp (bwd dot_general), model.py:51 ffn"]),
        (90, False, ["layer_*/mlp (bwd dot_general)", "model.py:51 ffn"]),  # on two lines
        (60, False, ["layer_*/mlp", "(bwd dot_", "general)"]),  # no room for the line
        (140, True, ["layer_*/mlp (bwd dot_general)"]),
    ],
)
def test_a_collective_is_caused_by_its_module(width: int, in_library: bool, cause: list[str]) -> None:
    place = "model.py:51 ffn → Linear (bwd Net/layer_0/mlp/dot_general)"
    one = replace(make_report().collectives[0], location=place, module="layer_*/mlp", in_library=in_library)
    text = shown(replace(make_report(), collectives=[one]), width)
    table = text[text.index("collectives, ") :].partition("\n\n")[0].splitlines()
    column = table[1].index("caused by")
    assert [line[column:] for line in table[2:]] == cause


def test_collectives_of_one_row_in_several_modules() -> None:
    facts = [replace(make_report().collectives[0], module=module) for module in ("net/h/*/up", "net/h/*/down", "out")]
    assert merged_collectives(facts)[0].module == "net/h/*, out"
    assert merged_collectives(facts[:2])[0].module == "net/h/*"


def test_a_known_strategy_that_is_the_plan_has_no_row_of_its_own() -> None:
    report = make_report()
    same = BaselineFacts(report.predicted.step_seconds, report.predicted.peak_bytes, True)
    text = shown(replace(report, baselines={**report.baselines, "fsdp": same, "zero2": same}), 100)
    assert text.count("this plan (fsdp)") == text.count("fsdp") == 1
    assert text.count("zero2") == 1


def test_the_words_on_the_plan_stand_beneath_the_known_strategies() -> None:
    plan = replace(make_report().plan, why="This plan is 3.0% faster than fsdp. It adds batch over data.")
    table = shown(replace(make_report(), plan=plan), 60).partition("compared with\n")[2].partition("\n\n")[0]
    assert table.splitlines()[-2:] == ["  This plan is 3.0% faster than fsdp. It adds batch over", "  data."]


def test_a_decode_loop_has_the_time_of_a_token() -> None:
    text = shown(make_report(replace(PREDICTED, tokens_in_turn=256, step_seconds=1.28)), 100)
    assert "a token       5.00 ms  " in text
    assert "a step makes 256 tokens of each sequence, one after the other" in " ".join(text.split())


def test_collectives_that_look_alike_are_one_row() -> None:
    report = make_report()
    twin = replace(report.collectives[0], count=56, seconds=0.0019)
    rows = shown(replace(report, collectives=[*report.collectives, twin]), 100).splitlines()
    gathers = [row for row in rows if "  all-gather  " in row]
    assert len(gathers) == 1
    assert "×200" in gathers[0]
    assert "4.00 ms" in gathers[0]


@pytest.mark.parametrize(
    ("target", "compiled"),
    [
        ("__cublas$gemm", True),
        ("__onednn$matmul", True),
        ("__cudnn$convForward", True),
        ("__cudnn$fmhaSoftmax", False),
        ("__op$block_scaled_dot", False),
    ],
)
def test_a_compiled_program_is_told_by_the_libraries_it_calls(target: str, compiled: bool) -> None:
    found = list(terminal._replicated({f"stablehlo.custom_call @{target}": 1}, verbose=False))
    assert any("XLA has compiled this program" in line for line in found) == compiled


def test_an_axis_across_slices_is_said_with_the_time_of_its_collectives() -> None:
    report = make_report()
    crossing = sum(c.seconds for c in report.collectives if "data" in c.axes)
    assert 0 < crossing < sum(c.seconds for c in report.collectives)
    told = shown(replace(report, mesh=replace(report.mesh, networks={"data": 2})), 120)
    seconds = text.format_seconds(crossing)
    line = f"axis data over the network between 2 groups of 8 devices: {seconds} of collectives a step"
    assert line in told and "network" not in shown(report, 120)
