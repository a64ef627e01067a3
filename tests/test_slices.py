"""Several TPU slices: what libtpu writes for collectives between them is read as collectives of the mesh."""

from __future__ import annotations

import pytest

from toast_cli.ask_xla import confirm
from toast_cli.ask_xla.collectives import CompiledCollective, collectives_in
from toast_cli.hardware import load_spec

NAMES, SIZES = ("slice", "data", "model"), (2, 2, 2)
ALL = "{1,2}x{0:3}"
EACH = "{{100000,200000},{100001,200001},{100002,200002},{100003,200003}}"
ROWS = "{{100000,100002,200000,200002},{100001,100003,200001,200003}}"
PAIRS = "{{100000->200000},{200000->100000},{100001->200001},{200001->100001}}"

# an instruction as libtpu 0.0.42.1 writes it -> the collective
WRITTEN = [
    (f'"{ALL}"', "ALL_REDUCE", "all-reduce", ("slice",)),
    (f'"{ALL}"', "REDUCE_SCATTER", "reduce-scatter", ("slice",)),
    (EACH, "ALL_TO_ALL", "all-to-all", ("slice",)),
    (ROWS, "ALL_TO_ALL", "all-to-all", ("slice", "data")),
    (PAIRS, "ONE_TO_ONE", "collective-permute", ("slice",)),
]


def module(line: str) -> str:
    return f"HloModule m, is_scheduled=true, num_partitions=4\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n  {line}\n}}\n"


@pytest.mark.parametrize(("target", "sent", "kind", "axes"), WRITTEN)
def test_between_slices(target: str, sent: str, kind: str, axes: tuple[str, ...]) -> None:
    line = (
        "%recv = (f32[4,128]{1,0:T(4,128)}, u32[], token[]) recv(%after-all), channel_id=1, is_host_transfer=true, "
        f'frontend_attributes={{_xla_host_transfer_rendezvous="x_0",_xla_megascale_target={target},'
        f'_xla_megascale_transfer_type="{sent}"}}'
    )
    assert collectives_in(module(line), NAMES, SIZES) == [CompiledCollective(kind, axes, 2048, 1.0)]


def test_inside_each_slice() -> None:
    line = "%sum = f32[4,128]{1,0} all-reduce(%p), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add"
    assert collectives_in(module(line), NAMES, SIZES) == [CompiledCollective("all-reduce", ("model",), 2048, 1.0)]


def test_a_receipt_that_is_no_collective() -> None:
    line = "%recv = (f32[4]{0}, u32[], token[]) recv(%after-all), channel_id=1, is_host_transfer=true"
    assert collectives_in(module(line), NAMES, SIZES) == []


def test_an_axis_that_a_network_divides_is_two_for_the_schedule() -> None:
    """XLA:TPU runs a gather over it inside each slice and between slices, one after the other."""
    split = confirm._split_at_networks(load_spec("2xv5e-16").mesh({"data": 8, "model": 4}))
    assert (split.names, split.sizes) == (("data over network", "data over line", "model"), (2, 4, 4))
    whole = load_spec("2xv5e-16").mesh({"slice": 2, "data": 16})
    assert confirm._split_at_networks(whole) == whole
