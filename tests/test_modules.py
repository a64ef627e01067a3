"""The module of an op, read off name stacks and frames."""

from __future__ import annotations

import pytest

from toast_cli.frontend.places import Frame, around, common_start, folded, functions_of, op_path, scopes_of
from toast_cli.frontend.source import Source
from toast_cli.pipeline import partition
from toast_cli.request import Request

# name stack -> modules, as reports show it
STACKS = [
    ("", (), ""),
    ("jit(step)", (), ""),
    ("jit(step)/mul", (), "mul"),
    ("jit(step)/jvp()/mul", (), "fwd mul"),
    ("jit(step)/jvp(layer_0)/attention/mul", ("layer_0", "attention"), "fwd layer_0/attention/mul"),
    (
        "jit(step)/transpose(jvp(Net))/layer_3/mlp/dot_general",
        ("Net", "layer_3", "mlp"),
        "bwd Net/layer_3/mlp/dot_general",
    ),
    ("jit(step)/jvp(Net/encoder)/dense/add", ("Net", "encoder", "dense"), "fwd Net/encoder/dense/add"),
    ("jit(step)/jvp(Net)/h/3/attn/mul", ("Net", "h/3", "attn"), "fwd Net/h/3/attn/mul"),
    ("jit(step)/attention/bsd,dgk->bsgk/dot_general", ("attention",), "attention/bsd,dgk->bsgk/dot_general"),
    ("jit(step)/attention/jit(_where)/select_n", ("attention",), "attention/select_n"),
    ("jit(step)/jvp(jit(log_softmax))", (), "fwd"),
    (
        "jit(step)/jvp()/while/body/closed_call/checkpoint/rematted_computation/mlp/mul",
        ("mlp",),
        "remat mlp/mul",
    ),
    (
        "jit(step)/transpose(jvp())/while/body/closed_call/checkpoint/rematted_computation/bthk,hkd->btd/dot_general",
        (),
        "remat bthk,hkd->btd/dot_general",
    ),
    (
        "jit(step)/transpose(jvp(layer_1))/jvp(layer_1)/checkpoint/attention/split",
        ("layer_1", "attention"),
        "bwd layer_1/attention/split",
    ),
    ("jit(step)/vmap(jvp(Net))/~/linear_1/add", ("Net", "linear_1"), "fwd Net/linear_1/add"),
    ("jit(step)/vmap()/mul", (), "mul"),
    ("jit(step)/cond/branch_1_fun/gate/mul", ("gate",), "gate/mul"),
    ("jit(step)/transpose(jvp(layer_0))/while", ("layer_0",), "bwd layer_0/while"),
    ("reduce_sum", (), "reduce_sum"),
]


@pytest.mark.parametrize(("stack", "modules", "shown"), STACKS)
def test_what_a_name_stack_says(stack: str, modules: tuple[str, ...], shown: str) -> None:
    assert scopes_of(stack) == modules
    assert op_path(stack) == shown


def test_functions_where_nothing_is_named() -> None:
    installed = Frame("dot", "/env/lib/python3.11/site-packages/jax/numpy.py", 7)
    frames = [installed, Frame("attend", "/me/model.py", 3), Frame("Net.__call__", "/me/model.py", 9)]
    assert functions_of(frames) == ("Net", "attend")
    assert functions_of([Frame("", "/me/model.py", 3)]) == ("model.py:3",)
    assert functions_of([installed]) == ()


ALIKE = [
    ("layer_3", "layer_*"),
    ("h/11", "h/*"),
    ("w['layers'][2]", "w['layers'][*]"),
    ("w['h']['7']['wq']", "w['h']['*']['wq']"),
    ("conv2d", "conv2d"),
    ("bf16", "bf16"),
    ("layer_3a", "layer_3a"),
]


@pytest.mark.parametrize(("name", "expected"), ALIKE)
def test_layers_alike_have_one_name(name: str, expected: str) -> None:
    assert folded((name,)) == (expected,)


def test_what_all_paths_begin_with() -> None:
    assert common_start([("Net", "a"), ("Net", "b", "c")]) == 1
    assert common_start([("Net", "a"), ("Net",)]) == 0, "each keeps a name"
    assert common_start([("a", "b")]) == 1
    assert common_start([]) == 0


def test_the_modules_around_several_ops() -> None:
    assert around([("h/*", "mlp", "up"), ("h/*", "mlp", "down")]) == "h/*/mlp"
    assert around([("h/*", "mlp"), ("h/*", "mlp")]) == "h/*/mlp"
    assert around([("encoder", "a"), ("decoder",), ("encoder", "b")]) == "encoder, decoder"
    assert around([("encoder", "a"), ()]) == "", "one of them has none"


def test_collectives_have_the_modules_of_the_table_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request("sample_models/t2b_tiny.mlirbc.zst", "v4-8", strategy="fsdp")
    report = partition(request).report
    modules = {one.module for one in report.collectives}
    assert "layer_*/mlp" in modules & {one.module for one in report.time_by_line}
    assert not any(one.in_library for one in report.collectives)
    library = Frame("Linear.__call__", "/env/lib/python3.11/site-packages/flax/linear.py", 271)
    monkeypatch.setattr(Source, "stack", lambda *_: (library,))
    assert all(one.in_library for one in partition(request).report.collectives)
    monkeypatch.setattr(Source, "stack", lambda *_: ())
    nameless = partition(request).report.collectives
    assert not any(one.module or one.in_library for one in nameless), "names are all that places say"
