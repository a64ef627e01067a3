"""No pin that propagation could do without: each is taken away, over everything that a plan can say."""

from __future__ import annotations

import pytest
from test_features import FEATURES, case, plan_of

from toast_cli.emit.minimal import Chooser
from toast_cli.emit.propagate import numbered
from toast_cli.emit.settle import settled
from toast_cli.plan.layout import shards

MOST = 9  # constraints in any of these programs


@pytest.mark.parametrize("name", FEATURES)
def test_every_pin_is_needed(name: str) -> None:
    program, words, _ = FEATURES[name]
    of = case(program)
    lowered = settled(of.program, of.lowered(plan_of(of, words)))
    with numbered(of.source):
        chooser = Chooser(of.source, lowered)
        chosen = chooser.choose()
        assert chosen.unsettled == ()
        assert chooser.settles(chooser.pinned)
        for value in chooser.optional():
            assert not chooser.settles(chooser.pinned - {value})
    assert len(chosen.marks.pins) + len(chosen.marks.reshards) <= MOST


@pytest.mark.parametrize("name", FEATURES)
def test_no_pin_says_again_what_the_next_operation_does(name: str) -> None:
    """The last layout of a value on its way to its only reader is left out where that reader cuts the value so."""
    program, words, _ = FEATURES[name]
    of = case(program)
    lowered = settled(of.program, of.lowered(plan_of(of, words)))
    with numbered(of.source):
        marks = Chooser(of.source, lowered).choose().marks
    values = {handle: value for value, handle in enumerate(of.source.definitions)}
    for pin in marks.pins:
        value = values.get(pin.handle)
        if value is None or value not in lowered.computed or len(of.program.users[value]) > 1:
            continue
        cut = shards(lowered.layouts[value], lowered.axis_sizes) > shards(lowered.path(value)[-2], lowered.axis_sizes)
        ((reader, position),) = of.program.users[value]
        elementwise = of.program.ops[reader].name in ("stablehlo.multiply", "stablehlo.convert", "stablehlo.transpose")
        if cut and elementwise and (reader, position) not in lowered.required:
            assert pin.layouts[-1] != lowered.layouts[value]
