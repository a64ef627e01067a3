"""What a chip's compiler makes of a program whatever the plan: all that can be said before any sharding is known.

Enters: a program and a chip. Leaves: a `Compilation`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toast_cli.compiler.fusion import materialised
from toast_cli.compiler.kernels import Kernel, kernels
from toast_cli.compiler.liveness import Lives, find_lives
from toast_cli.compiler.memory_space_assignment import elapsed_seconds
from toast_cli.compiler.narrowing import Narrowing
from toast_cli.compiler.overlap import late_values
from toast_cli.compiler.space_to_batch import SpaceToBatch, space_to_batch
from toast_cli.compiler.tiling import Tiling, paddings, tilings
from toast_cli.hardware.model import Chip
from toast_cli.program.model import Program


@dataclass(frozen=True)
class Compilation:
    """What a chip's compiler makes of a program whatever the plan. stored, tiled, late: [values] whether each is written to memory, how it
    can lie there, whether nothing waits for it. kernels: [ops]. elapsed: [half steps] see `memory_space_assignment`."""

    stored: list[bool]
    tiled: list[Tiling]
    late: list[bool]
    few: list[SpaceToBatch | None]
    needs: Narrowing
    kernels: list[Kernel | None]
    lives: Lives
    elapsed: NDArray[np.float64]


def compile_program(program: Program, free: tuple[bool, ...], chip: Chip) -> Compilation:
    """free: [values] derived from constants alone."""
    tile = chip.memory_tile
    stored, tiled = materialised(program, free), tilings(program, tile)
    done = kernels(program, materialised(program, free, most=False), free, paddings(program, tiled, tile))
    needs = Narrowing(program, narrows=chip.rewrites.narrows)
    lives = find_lives(program, stored, free)
    elapsed = elapsed_seconds(program, chip, done, lives.times)
    few = space_to_batch(program, stored, tile)
    return Compilation(stored, tiled, late_values(program), few, needs, done, lives, elapsed)
