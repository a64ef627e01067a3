"""The passes: the effects of the compiler on a partitioned program, as named rules in the order in which they matter.

Each pass is one file of this folder, whose docstring says what the compiler does, on what evidence, and what holds
without the pass. A `CompilerProfile` names those that its compiler has; `CompilerProfile.without` switches some of them
off, and a rule that is switched off affects no prediction. `benchmarks/ablation.py` measures the effect of each.

Enters: nothing. Leaves: the list `PASSES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from toast_cli.compiler import (
    accumulator_windows,
    atomic_scatters,
    bf16_widening,
    broadcast_gathers,
    convolution_tiles,
    fourier_transforms,
    fused_lookups,
    fusion,
    gathered_pieces,
    image_copies,
    in_place_updates,
    late_reductions,
    library_convolutions,
    library_products,
    lookup_rows,
    loop_copies,
    loop_gathers,
    loop_residency,
    loops_first,
    masked_groups,
    memory_space_assignment,
    multi_output_fusion,
    narrow_stores,
    narrowing,
    normalization_fusion,
    on_chip_reuse,
    one_hot_scatters,
    output_fusion,
    overlap,
    padded_operands,
    polynomials,
    prefetched_arguments,
    product_operands,
    ragged_gradients,
    recomputation,
    reduce_scatter,
    reduction_combining,
    reduction_fusion,
    reduction_motion,
    resident_kernels,
    returned_layouts,
    scan_unification,
    scatter_starts,
    schedule,
    shared_exponentials,
    slice_gathers,
    sliced_products,
    small_gathers,
    space_to_batch,
    swapped_convolutions,
    temporaries,
    tile_dimensions,
    tiling,
    unsliced_fusions,
    vector_products,
    weight_parts,
)


@dataclass(frozen=True, slots=True)
class Pass:
    """One rule. name: by which profiles have it. description: the docstring of its file."""

    name: str
    description: str

    @property
    def title(self) -> str:
        """What the compiler does, in a sentence."""
        return self.description.partition("\n\n")[0].partition(": ")[2].replace("\n", " ")


def _listed(*files: ModuleType) -> tuple[Pass, ...]:
    return tuple(Pass(file.NAME, file.__doc__ or "") for file in files)


PASSES = _listed(
    # # Collectives: their kinds and bytes.
    narrowing, broadcast_gathers, small_gathers, slice_gathers, reduce_scatter, reduction_combining,
    reduction_motion, overlap,
    # # Fusion: kernels, and which values are materialised.
    fusion, output_fusion, multi_output_fusion, reduction_fusion, normalization_fusion, unsliced_fusions,
    recomputation, shared_exponentials, polynomials, narrow_stores, product_operands, one_hot_scatters,
    sliced_products, weight_parts, padded_operands, library_convolutions, library_products,
    fused_lookups, atomic_scatters, vector_products, fourier_transforms, ragged_gradients, masked_groups,
    # # Layouts of arrays.
    tiling, tile_dimensions, lookup_rows, space_to_batch, convolution_tiles, swapped_convolutions,
    image_copies, returned_layouts, gathered_pieces, loop_copies, scan_unification, bf16_widening,
    # # Schedule and liveness.
    schedule, loops_first, loop_gathers, late_reductions, in_place_updates, scatter_starts,
    # # Memory spaces.
    memory_space_assignment, on_chip_reuse, prefetched_arguments, loop_residency, resident_kernels, accumulator_windows,
    temporaries,
)  # fmt: skip
