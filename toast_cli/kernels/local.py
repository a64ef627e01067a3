"""Rewrites a hand-written kernel for local shapes.

In: the call of a kernel whose operands and results have local types already, and the number of shards of each
factor of its rule. Out: the call with a kernel whose grid has as many steps as the local arrays have windows.
"""

from __future__ import annotations

import base64
import json
from math import prod
from typing import Any

from toast_cli import xla
from toast_cli.kernels import cudnn
from toast_cli.kernels.index_maps import DYNAMIC
from toast_cli.kernels.mosaic import CONFIG, main_of, parse_body
from toast_cli.program.model import HandWritten
from toast_cli.xla import ir


def run_on_part(call: Any, kernel: HandWritten, pieces: dict[int, int]) -> None:
    """Rewrites the kernel of a call in place; pieces: factor -> its number of shards."""
    if prod(pieces.values()) == 1 or not kernel.kind:
        return
    cuts: dict[int, int] = {}  # axis of the grid, or dimension of an attention's scores
    for factor, count in pieces.items():
        cuts[kernel.axes[factor]] = cuts.get(kernel.axes[factor], 1) * count
    text = json.loads(call.attributes["backend_config"].value)
    if kernel.kind == "cudnn":
        shape = text[cudnn.CONFIG][cudnn.SCORES]
        shape["dimensions"] = [str(int(n) // cuts.get(d, 1)) for d, n in enumerate(shape["dimensions"])]
    else:
        text[CONFIG]["body"] = with_smaller_grid(text[CONFIG], cuts)
        estimate = text[CONFIG].get("cost_estimate")
        if isinstance(estimate, dict):
            text[CONFIG]["cost_estimate"] = {n: _divided(said, prod(cuts.values())) for n, said in estimate.items()}
    call.attributes["backend_config"] = ir.StringAttr.get(json.dumps(text), call.context)


def with_smaller_grid(config: dict[str, Any], cuts: dict[int, int]) -> str:
    """The body in base64, with each axis of its grid divided by these numbers."""
    module = parse_body(config)
    main = main_of(module)
    bounds = [int(n) for n in main.attributes["iteration_bounds"]]
    local = [n if n == DYNAMIC else n // cuts.get(axis, 1) for axis, n in enumerate(bounds)]
    main.attributes["iteration_bounds"] = ir.DenseI64ArrayAttr.get(local, module.context)
    return base64.b64encode(xla.write_bytecode(module)).decode()


def _divided(said: Any, pieces: int) -> Any:
    return said // pieces if isinstance(said, int) else said
