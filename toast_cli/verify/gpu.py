"""The GPU-specific parts of ahead-of-time compilation.

Enters: a specification. Leaves: the topology XLA:GPU compiles for. Also rewrites the error message if CUDA's assembler,
which XLA:GPU runs, is missing or too new for the chip.
"""

from __future__ import annotations

from math import prod

from toast_cli.errors import UsageError
from toast_cli.hardware import Spec
from toast_cli.verify.child import Failure

# Without a GPU no kernels can be timed: XLA takes its default tiles.
GPU_OPTIONS = {"xla_gpu_autotune_level": "0"}
# For some shapes Triton has no default tiles (a product of 3,152 or 3,136 rows, as vision transformers have on 8 H100).
# On the real machine XLA would find the product faster without Triton, as here.
WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": "False"}
_NO_TILES = "Couldn't find output tile sizes"
_GET_ASSEMBLER = "pip install nvidia-cuda-nvcc-cu12 (part of 'toast-partitioner[gpu]')"


def gpu_topology(spec: Spec) -> str:
    """slices x hosts x GPUs of a host: `1x2x8`. Raises `UsageError` for GPUs that are not connected by a switch."""
    if any(dimension.kind not in ("switch", "network") for dimension in spec.dimensions):
        raise UsageError(
            f"XLA:GPU knows hosts of GPUs at a switch, not the torus of {spec.name}",
            where="--mesh",
            hint="use --compiler cpu",
        )
    sizes = {kind: prod(d.size for d in spec.dimensions if d.kind == kind) for kind in ("network", "switch")}
    return f"1x{sizes['network']}x{sizes['switch']}"


def lacks_tiles(failure: Failure) -> bool:
    """True if XLA:GPU failed because Triton has no tiles for a product."""
    return _NO_TILES in failure.reason


def without_tools(failure: Failure) -> Failure:
    """The failure, shortened to one line if CUDA's assembler failed."""
    if "ptxas too old" in failure.reason:
        return Failure(f"the ptxas found here is of a CUDA that does not support this chip: {_GET_ASSEMBLER}")
    if "version of ptxas" in failure.reason:
        return Failure(f"no ptxas, CUDA's assembler, was found: {_GET_ASSEMBLER}")
    return failure
