"""All-gathers over a whole slice, as `python benchmarks/gathers.py` saw them compiled, and of broadcasts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from programs import Case, arg, evaluator_of, round_mesh, source_of

from toast_cli.hardware import load_spec, parse_shape
from toast_cli.price.compiled_collectives import gathered_part, stays_slice_gather
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


def columns(x: jax.Array) -> jax.Array:
    """Eight equal columns of each row."""
    return jnp.broadcast_to(x[:, None, :], (x.shape[0], 8, x.shape[1]))


@pytest.mark.parametrize(
    ("function", "plan", "size"),
    [
        (lambda x: jnp.sort(columns(jnp.sin(x)), 0), "x.0", 64 * 16 * 4),
        (lambda x: jnp.sort(jnp.exp(columns(jnp.sin(x))), 0), "x.0", 64 * 16 * 4),
        (lambda x: jnp.sort(columns(jnp.sin(x)).transpose(1, 0, 2), 1), "x.0", 8 * 64 * 16 * 4),
        (lambda x: jnp.sort(jnp.sin(x), 0), "x.0", 64 * 16 * 4),
    ],
)
def test_what_is_gathered_of_a_broadcast_is_what_it_reads(function: Any, plan: str, size: int) -> None:
    source = source_of(function, arg(64, 16))
    profile = find_profile(load_spec("v5e-16").mesh().chip)
    case = Case(source, evaluator_of(source, round_mesh(data=4), profile=profile))
    (gather,) = case.evaluator.collectives((case.shard(plan, "data"),))
    assert (gather.kind, gather.bytes) == ("all-gather", size)
    plain = Case(source, evaluator_of(source, round_mesh(data=4), profile=profile.without("broadcast-gathers")))
    (gather,) = plain.evaluator.collectives((plain.shard(plan, "data"),))
    (whole,) = [op for op in source.program.ops if op.name == "stablehlo.sort"]
    assert gather.bytes == source.program.values[whole.operands[0]].bytes


def test_a_gathered_broadcast_may_be_empty() -> None:
    program = source_of(lambda x: jnp.broadcast_to(x[:0, :, None], (0, 16, 4)), arg(64, 16)).program
    profile = find_profile(load_spec("v5e-16").mesh().chip)
    empty = [op.results[0] for op in program.ops if op.name == "stablehlo.broadcast_in_dim"][-1]
    assert gathered_part(profile, program, empty, {1}) == 0.0
