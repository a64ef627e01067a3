"""All-gathers over a whole slice, as `python -m benchmarks.singles` saw them compiled."""

from __future__ import annotations

import pytest

from toast_cli.hardware import load_spec, parse_shape
from toast_cli.price.compiled_collectives import stays_slice_gather
from toast_cli.price.profiles import find_profile

MIB = 2**20


@pytest.mark.parametrize(
    ("named", "axes", "mib", "stays"),
    [
        ("v5e-256:data=16,model=16", (0, 1), 16, False),
        ("v5e-256:data=16,model=16", (0, 1), 18, True),
        ("v5e-256:data=16,model=16", (0,), 2, True),
        ("v5e-256:data=256", (0,), 2, False),
        ("v5e-256:data=16,a=4,b=4", (0, 1), 2, True),
        ("v5e-16:data=4,model=4", (0, 1), 2, True),
        ("v4-128:data=8,model=8", (1, 0), 64, False),
        ("v4-128:data=8,model=8", (1,), 64, True),
        ("v5p-64:data=8,model=4", (0, 1), 2, True),
        ("v6e-64:data=8,model=8", (0, 1), 16, False),
        ("v6e-64:data=8,model=8", (0, 1), 64, True),
        ("h100-64:data=64", (0,), 2, True),
    ],
)
def test_gathers_over_all_of_a_large_slice_become_all_reduces(
    named: str, axes: tuple[int, ...], mib: int, stays: bool
) -> None:
    spec, _, shape = named.partition(":")
    mesh = load_spec(spec).mesh(parse_shape(shape))
    profile = find_profile(mesh.chip)
    assert stays_slice_gather(profile, mesh, axes, mib * MIB) is stays
    if not stays:
        assert stays_slice_gather(profile.without("slice-gathers"), mesh, axes, mib * MIB)
