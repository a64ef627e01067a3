"""One plan, three ways to XLA: StableHLO under Shardy, HLO under GSPMD propagation, PartitionSpecs through a real
`jax.jit`. Same partition.

The plans here are those that need no constraint inside the program, since PartitionSpecs have no place for one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from sweeps import sweep

from toast_cli import xla
from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.collectives import CompiledCollective, partitioned_collectives
from toast_cli.ask_xla.compile import collectives_after_partitioning
from toast_cli.ask_xla.numbers import compare_numbers
from toast_cli.pipeline import Outcome, partition
from toast_cli.request import Request

ROOT = Path(__file__).parents[1]
CASES = [("mlp_tiny", "data-parallel"), ("block_tiny", "megatron")]
MESH = {"data": 4, "model": 2}

# Runs in a process with 8 virtual devices: a sample's own function under the shardings that toast wrote, and without
# them.
JIT = """
import json, pathlib, sys
import jax, numpy as np
from sample_models.make import samples
name, folder = sys.argv[1], pathlib.Path(sys.argv[2])
sample, scope = samples()[name], {}
exec((folder / "shardings.py").read_text(), scope)
arguments = sample.init(jax.random.key(0))
named = dict(zip(("params", "mu", "nu", "count", "batch"), arguments, strict=True))
whole = jax.jit(sample.step, keep_unused=True)(*arguments)
split = jax.jit(
    sample.step, keep_unused=True, in_shardings=scope["in_shardings"](**named),
    out_shardings=scope["out_shardings"](sample.step, **named),
).lower(*arguments).compile(compiler_options={
    "xla_dump_to": str(folder / "dumps"), "xla_dump_hlo_as_text": True, "xla_dump_large_constants": True,
    "xla_dump_hlo_pass_re": "^spmd-partitioning$",
})(*jax.device_put(arguments, scope["in_shardings"](**named)))
# The third result is the second moment: the gradient's square, with nothing of the parameters in it.
pairs = zip(jax.tree.leaves(whole[2]), jax.tree.leaves(split[2]), strict=True)
print(json.dumps(float(np.median([np.abs(a - b).max() / np.abs(a).max() for a, b in pairs]))))
"""


def counted(found: list[CompiledCollective] | Failure) -> Counter[tuple[str, tuple[str, ...], int]]:
    """How often there is what: kind, axes, bytes."""
    assert not isinstance(found, Failure), found
    counts: Counter[tuple[str, tuple[str, ...], int]] = Counter()
    for one in found:
        counts[one.kind, one.axes, one.bytes] += round(one.count)
    return counts


def jitted(outcome: Outcome, name: str, folder: Path) -> tuple[list[CompiledCollective], float]:
    """Collectives of the jitted function after partitioning, and the median error of its second moments."""
    (folder / "shardings.py").write_bytes(outcome.emit("python").content)
    eight = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    flags = {"XLA_FLAGS": eight, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", JIT, name, str(folder)]
    child = subprocess.run(command, env={**os.environ, **flags}, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    (dump,) = (folder / "dumps").glob("*step*after_spmd-partitioning*")
    return partitioned_collectives(dump.read_text(), tuple(MESH), tuple(MESH.values())), json.loads(child.stdout)


@pytest.mark.parametrize(("name", "strategy"), sweep(CASES, CASES[0]))
def test_three_forms_are_one_partition(name: str, strategy: str, tmp_path: Path) -> None:
    (path,) = (ROOT / "sample_models").glob(f"{name}.*")
    outcome = partition(Request(str(path), "h100-8", strategy=strategy, iterations=1))
    shardy, hlo = outcome.emit("stablehlo").content, outcome.emit("hlo").content
    assert not outcome.report.constraints
    promised = Counter[tuple[str, tuple[str, ...], int]]()
    for use in outcome.report.collectives:
        promised[use.kind, tuple(use.axes), use.bytes] += use.count
    from_jit, error = jitted(outcome, name, tmp_path)
    assert promised
    assert counted(collectives_after_partitioning(shardy, "stablehlo", MESH)) == promised
    assert counted(collectives_after_partitioning(hlo, "hlo", MESH)) == promised
    assert counted(from_jit) == promised
    assert error < 0.1  # squares of bf16 sums; a lost shard of eight is off by a fifth


def test_both_programs_give_the_numbers() -> None:
    outcome = partition(Request(str(ROOT / "sample_models" / "mlp_tiny.mlir"), "h100-8", strategy="fsdp"))
    original = xla.write_bytecode(outcome.source.module)
    errors = compare_numbers(original, outcome.emit("hlo").content, 8, form="hlo")
    assert not isinstance(errors, Failure), errors
    assert not [error for error in errors if error.wrong]
