"""No pin that propagation could do without: each is taken away, over everything that a plan can say."""

from __future__ import annotations

import pytest
from test_features import FEATURES, case, plan_of

from toast_cli.emit.minimal import Chooser
from toast_cli.emit.propagate import numbered

MOST = 9  # constraints in any of these programs


@pytest.mark.parametrize("name", FEATURES)
def test_every_pin_is_needed(name: str) -> None:
    program, words, _ = FEATURES[name]
    of = case(program)
    lowered = of.lowered(plan_of(of, words))
    with numbered(of.source):
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
    with numbered(of.source):
        chooser = Chooser(of.source, lowered)
        marks = chooser.choose().marks
    values = {handle: value for value, handle in enumerate(of.source.definitions)}
    for pin in marks.pins:
        value = values.get(pin.handle)
        if value in lowered.computed and value not in lowered.found:
            assert pin.shardings == lowered.path(value)
