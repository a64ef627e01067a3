"""Few constraints say everything that a plan can say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from programs import arg, case_of, problem_of, sample
from test_features import FEATURES, case, plan_of

from toast_cli.emit import minimal
from toast_cli.emit.minimal import Chooser, choose_annotations
from toast_cli.emit.shardy import numbered
from toast_cli.plan.decisions import Shard
from toast_cli.plan.lower import lower
from toast_cli.program.ops import CARRY
from toast_cli.program.values import remade_values
from toast_cli.tactics.strategies import strategy

MOST = 15  # constraints in any of these programs


@pytest.mark.parametrize("name", FEATURES)
def test_few_constraints_suffice(name: str) -> None:
    program, words, _ = FEATURES[name]
    of = case(program)
    chosen = choose_annotations(of.source, of.lowered(plan_of(of, words)))
    assert chosen.unsettled == ()
    assert len(chosen.annotations.constraints) + len(chosen.annotations.reshards) <= MOST


@pytest.mark.parametrize("name", FEATURES)
def test_what_is_scattered_says_all_its_shardings(name: str) -> None:
    """Also the last one, which its reader may bring about anyway: without it XLA:TPU reduces the whole array and cuts
    it (MLP, ViT under FSDP).
    """
    program, words, _ = FEATURES[name]
    of = case(program)
    lowered = of.lowered(plan_of(of, words))
    with numbered(of.source, lowered):
        chooser = Chooser(of.source, lowered)
        annotations = chooser.choose().annotations
    values = {handle: value for value, handle in enumerate(of.source.definitions)}
    for pin in annotations.constraints:
        value = values.get(pin.handle)
        if value in lowered.computed and value not in lowered.found:
            assert pin.shardings == lowered.path(value)


def test_a_few_that_are_wrong_are_pinned_in_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come one after another otherwise, each in a round of propagation of its own."""
    source, _ = sample("long_tiny")
    problem = problem_of(source, "v4-32")
    lowered = lower(problem, strategy(problem, "context"))
    monkeypatch.setattr(minimal, "contested_values", lambda *_: ())  # which would leave nothing wrong
    chosen = {}
    for few in (0, 1):
        monkeypatch.setattr(minimal, "FEW", few)
        chosen[few] = choose_annotations(source, lowered)
        assert chosen[few].unsettled == ()
    assert chosen[1].rounds < chosen[0].rounds
    assert len(chosen[1].annotations.constraints) > len(chosen[0].annotations.constraints)


def test_what_a_loop_carries_is_said_before_a_use_is_closed() -> None:
    """A closed constraint on a loop's argument moves all that the body reads of it, and the rest is cut from there: a
    Newton iteration gathered its matrix in f32, though all but one product read their own rows of it."""

    def newton(m: jax.Array, h: jax.Array) -> jax.Array:
        def step(carried: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], None]:
            m, h = carried
            t = jnp.eye(8) - m / 4
            return (t @ t @ m, h @ t), None

        return jax.lax.scan(step, (m, h), None, length=3)[0][1]

    of = case_of(newton, arg(8, 8), arg(8, 8))
    lowered = of.lowered((Shard(0, 0, (0, 0)),))
    with numbered(of.source, lowered):
        chooser = Chooser(of.source, lowered)
        carried = [r for r in chooser.reshards if of.program.ops[of.program.producer[r.value]].name == CARRY]
        closed = [chooser._closed(reshard) for reshard in carried]
    assert closed
    assert [(one.through, one.open) for one in closed] == [((one.start,), frozenset()) for one in carried]


def scaled_twice(n: jax.Array, a: jax.Array, b: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    return a * jax.lax.rsqrt(n)[:, None], (b * jax.lax.rsqrt(n)[:, None]) @ w


def test_values_that_xla_merges_get_a_pin_each() -> None:
    """Where layers of a graph network scale by the same degrees, but split features in another order, XLA:TPU made one
    array of the scales, and gathered the updates of scatters whole: 15 % of the bytes were as promised."""
    of = case_of(scaled_twice, arg(8), arg(8, 16), arg(8, 16), arg(16, 4))
    a, b = of.group("a.1"), of.group("b.1")
    lowered = of.lowered((Shard(a, 0), Shard(b, 1)))
    remade = remade_values(of.program)
    merged = [of.program.values[v].shape for v in minimal.merged_values(of.source, lowered, remade)]
    assert merged == [(8, 16), (8, 16)]
    pinned = [pin.shardings[0] for pin in choose_annotations(of.source, lowered).annotations.constraints]
    assert ((), (0,)) in pinned
    assert ((), (1,)) in pinned
    assert not list(minimal.merged_values(of.source, of.lowered((Shard(a, 0), Shard(b, 0))), remade))
