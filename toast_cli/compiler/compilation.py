"""What the compiler rules of this package say of a program before any sharding: which values are written to memory,
which ops form kernels, when values are alive. Nothing is compiled.

In: a program and a chip. Out: a `Compilation`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toast_cli.compiler.collectives import Narrowing, early_values, late_values
from toast_cli.compiler.convolutions import ConvolvedArgument, convolved_arguments
from toast_cli.compiler.fusion import materialised
from toast_cli.compiler.fusion_rules import written_parts
from toast_cli.compiler.gpu_libraries import ScatterStart, scatter_starts
from toast_cli.compiler.kernel import Kernel
from toast_cli.compiler.kernels import MemoryForm, kernels
from toast_cli.compiler.layouts import (
    RowCopy,
    Sides,
    Tiling,
    dims_of_rows,
    paddings,
    returned_products,
    row_copies,
    tile_of,
    tilings,
)
from toast_cli.compiler.liveness import Lives, find_lives
from toast_cli.compiler.on_chip import elapsed_seconds
from toast_cli.compiler.profile import CompilerProfile
from toast_cli.compiler.short_tiles import default_layouts
from toast_cli.compiler.space_to_batch import Images, space_to_batch
from toast_cli.hardware.model import Chip
from toast_cli.program.model import Program


@dataclass(frozen=True)
class Compilation:
    """What is known of a program before any sharding.

    Attributes:
        stored, tiled: [values] whether each is written to memory, and its possible tilings. parts: [values] fraction of
            its bits that is written, see `written_parts`.
        early, late: [values] see `early_values`. images: [values] see `space_to_batch`. started: by value, see
            `scatter_starts`. returned: by value, see `returned_products`. convolved: by value, see
            `convolved_arguments`. row_copies: by value, see there.
        needs: see `Narrowing`.
        kernels: [ops] None for ops inside another's kernel. elapsed: [ticks] see `on_chip`.
    """

    profile: CompilerProfile
    stored: list[bool]
    parts: list[float]
    tiled: list[Tiling]
    early: list[bool]
    late: list[bool]
    images: list[Images | None]
    started: dict[int, ScatterStart]
    returned: dict[int, Sides]
    convolved: dict[int, ConvolvedArgument]
    row_copies: dict[int, tuple[RowCopy, ...]]
    needs: Narrowing
    kernels: list[Kernel | None]
    lives: Lives
    elapsed: NDArray[np.float64]


def compile_program(program: Program, free: tuple[bool, ...], chip: Chip, profile: CompilerProfile) -> Compilation:
    """The plan-independent result of compiling a program by that profile. free: [values] derived from constants
    alone."""
    tile = tile_of(profile)
    rows = dims_of_rows(program, profile)
    copied = row_copies(program, profile)
    gathered = {value: copy.rows for value, (copy, *_) in copied.items() if copy.gathered}
    tiled = tilings(program, tile, chosen="tile-dimensions" in profile.passes, rows=rows, gathered=gathered)
    stored = materialised(program, free, profile)
    written = materialised(program, free, profile, most=False)
    tiled_rows = default_layouts(program, tile) if "tile-dimensions" in profile.passes else {}
    tiled_rows |= {value: tiled[value] for value in {**rows, **gathered} if not tiled[value].copies}
    form = MemoryForm(paddings(program, tiled, tile), written_parts(program, written, profile), tiled_rows)
    done = kernels(program, written, free, profile, form)
    parts = written_parts(program, stored, profile)
    lives = find_lives(program, stored, free, profile, parts)
    return Compilation(
        profile=profile,
        stored=stored,
        parts=parts,
        tiled=tiled,
        early=early_values(program, free, profile),
        late=late_values(program, profile),
        images=space_to_batch(program, stored, profile),
        started=scatter_starts(program, free, lives, profile),
        returned=returned_products(program, stored, profile),
        convolved=convolved_arguments(program, stored, lives, profile),
        row_copies=copied,
        needs=Narrowing(program, profile),
        kernels=done,
        lives=lives,
        elapsed=elapsed_seconds(program, chip, profile, done, lives.times),
    )
