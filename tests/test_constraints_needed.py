"""No pin that propagation could do without: each is taken away, over everything that a plan can say."""

from __future__ import annotations

import pytest
from programs import problem_of, sample
from test_features import FEATURES, case, plan_of

from toast_cli.emit import minimal
from toast_cli.emit.minimal import Chooser, choose_marks
from toast_cli.emit.propagate import numbered
from toast_cli.plan.lower import lower
from toast_cli.tactics.strategies import strategy

MOST = 15  # constraints in any of these programs


@pytest.mark.parametrize("name", FEATURES)
def test_every_pin_is_needed(name: str) -> None:
    program, words, _ = FEATURES[name]
    of = case(program)
    lowered = of.lowered(plan_of(of, words))
    with numbered(of.source, lowered):
        chooser = Chooser(of.source, lowered)
        chosen = chooser.choose()
        assert chosen.unsettled == ()
        assert chooser.settles(chooser.pinned)
        for value in chooser.optional():
            assert not chooser.settles(chooser.pinned - {value})
    assert len(chosen.marks.pins) + len(chosen.marks.reshards) <= MOST


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
        marks = chooser.choose().marks
    values = {handle: value for value, handle in enumerate(of.source.definitions)}
    for pin in marks.pins:
        value = values.get(pin.handle)
        if value in lowered.computed and value not in lowered.found:
            assert pin.shardings == lowered.path(value)


def test_a_few_that_are_wrong_are_pinned_in_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come one after another otherwise, each in a round of propagation of its own."""
    source, _ = sample("long_tiny")
    problem = problem_of(source, "v4-32")
    lowered = lower(problem, strategy(problem, "context"))
    monkeypatch.setattr(minimal, "PRUNING_WORK", 0)
    monkeypatch.setattr(minimal, "looked_up_pieces", lambda *_: ())  # which would leave nothing wrong
    chosen = {}
    for few in (0, 1):
        monkeypatch.setattr(minimal, "FEW", few)
        chosen[few] = choose_marks(source, lowered)
        assert chosen[few].unsettled == ()
    assert chosen[1].rounds == 2 < chosen[0].rounds
    assert len(chosen[1].marks.pins) > len(chosen[0].marks.pins)
