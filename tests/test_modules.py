"""The module of an op, read off name stacks and frames."""

from __future__ import annotations

import pytest

from toast_cli.frontend.modules import common_start, folded, functions_of, pass_of, scopes_of
from toast_cli.frontend.places import Frame

STACKS = [
    ("", ()),
    ("jit(step)/mul", ()),
    ("jit(step)/jvp()/mul", ()),
    ("jit(step)/jvp(layer_0)/attention/mul", ("layer_0", "attention")),
    ("jit(step)/transpose(jvp(Net))/layer_3/mlp/dot_general", ("Net", "layer_3", "mlp")),
    ("jit(step)/jvp(Net/encoder)/dense/add", ("Net", "encoder", "dense")),
    ("jit(step)/jvp(Net)/h/3/attn/mul", ("Net", "h/3", "attn")),
    ("jit(step)/attention/bsd,dgk->bsgk/dot_general", ("attention",)),
    ("jit(step)/attention/jit(_where)/select_n", ("attention",)),
    ("jit(step)/jvp(jit(log_softmax))", ()),
    ("jit(step)/jvp()/while/body/closed_call/checkpoint/rematted_computation/mlp/mul", ("mlp",)),
    ("jit(step)/vmap(jvp(Net))/~/linear_1/add", ("Net", "linear_1")),
    ("jit(step)/cond/branch_1_fun/gate/mul", ("gate",)),
]


@pytest.mark.parametrize(("stack", "expected"), STACKS)
def test_modules_of_a_name_stack(stack: str, expected: tuple[str, ...]) -> None:
    assert scopes_of(stack) == expected


def test_functions_where_nothing_is_named() -> None:
    installed = Frame("dot", "/env/lib/python3.11/site-packages/jax/numpy.py", 7)
    frames = [installed, Frame("attend", "/me/model.py", 3), Frame("Net.__call__", "/me/model.py", 9)]
    assert functions_of(frames) == ("Net", "attend")
    assert functions_of([Frame("", "/me/model.py", 3)]) == ("model.py:3",)
    assert functions_of([installed]) == ()


def test_passes() -> None:
    assert pass_of("jit(f)/jvp(a)/mul") == ""
    assert pass_of("jit(f)/transpose(jvp(a))/mul") == "backward"
    assert pass_of("jit(f)/transpose(jvp())/checkpoint/rematted_computation/mul") == "recomputed"


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
