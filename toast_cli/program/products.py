"""Tells weights from data by the products and look-ups that read them.

In: a `Program`, and which arguments are known to be weights or data. Out: both sets, extended by what products
imply.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from toast_cli.program.model import Program
from toast_cli.program.ops import CARRY, GATHER

# Ops that read weights -> the operands that may be one: the kernel, the table, either side of a product.
READERS = {
    "stablehlo.dot_general": slice(None),
    "stablehlo.convolution": slice(1, 2),
    "stablehlo.gather": slice(0, 1),
    "chlo.ragged_dot": slice(0, 2),
}
_KEY = "ui32"  # of random numbers
COMPONENT = re.compile(r"[A-Za-z_]\w*|\[(?:'[^']*'|\"[^\"]*\"|[^\]]*)\]")


def weights_and_data(program: Program, trained: set[int], data: set[int]) -> tuple[set[int], set[int]]:
    """(weights, data): arguments classified by the products and look-ups that read them, including the given ones.

    A factor of data is a weight (a frozen one, if others are trained). A factor of weights only is data, and so is an
    array whose rows random numbers pick. A look-up by indices that the table itself determines (nearest neighbours)
    says nothing, and in a program that trains, neither does one by constants. Of two otherwise unknown factors, the
    right one is the weight, unless the left one is in a subtree of other weights.

    Args:
        trained, data: arguments that are known to be weights, and to be data (tokens, caches).
    """
    carried: dict[int, int] = {}
    for _ in range(2):  # the second time with what loops make of their carries
        weights, found, pairs, carried = _swept(program, trained, data, carried)
    roots = {argument_path(program, n)[0] for n in weights}
    for one, other in pairs:
        left, right = (_numbers(bits) - weights - found for bits in (one, other))
        swapped = any(argument_path(program, n)[0] in roots for n in left) and not any(
            argument_path(program, n)[0] in roots for n in right
        )
        found |= right if swapped else left
        weights |= left if swapped else right
    return weights, found - weights


def _swept(
    program: Program, trained: set[int], data: set[int], carried: dict[int, int]
) -> tuple[set[int], set[int], list[tuple[int, int]], dict[int, int]]:
    """One pass over the program: weights, data, pairs of otherwise unknown factors (bit sets), and what each carry's
    next value is made of (a bit set). carried: the last, from the pass before, for carries that begin with constants
    (what a scan stacks, sums)."""
    activation, noise = (1 << len(program.arguments) + k for k in range(2))
    given = is_weight = _bits(trained)
    is_data = _bits(data) | activation
    made_of = [0] * len(program.values)  # [values] bit set of the arguments each depends on, or of the two above
    for n, argument in enumerate(program.arguments):
        made_of[argument.value] = noise if program.values[argument.value].dtype == _KEY else 1 << n
    determined_by = list(made_of)  # [values] bit set of the arguments, also those behind products
    pairs: list[tuple[int, int]] = []
    paired = 0  # bit set of all arguments in `pairs`
    for op in program.ops:
        sides = [made_of[v] for v in op.operands]
        made = carried[op.results[0]] if op.name == CARRY and op.results[0] in carried and not sides[0] else 0
        determined = 0
        for bits, value in zip(sides, op.operands, strict=True):
            made |= bits
            determined |= determined_by[value]
        if op.name in READERS and not (op.name == GATHER and determined_by[op.operands[1]] & sides[0]):
            picked_at_random = op.name == GATHER and sides[1] == noise
            for mine, other in ((0, 1), (1, 0)) * 2:
                unknown = sides[mine] & ~(is_weight | is_data | noise)
                if sides[0] == sides[1]:
                    continue
                of_weights, of_data = sides[other] & is_weight, sides[other] & is_data
                only_weights = of_weights and not sides[other] & ~(is_weight | noise)
                if sides[mine] & is_data:
                    continue
                if picked_at_random or only_weights or (of_weights and not of_data and not sides[mine] & is_weight):
                    one = unknown.bit_count() == 1 or sides[other] & given
                    is_data |= unknown if one else 0
                elif of_data or not (sides[other] & ~noise or (op.name == GATHER and given)):
                    is_weight |= unknown & ~paired  # a gradient is a product with data, too
            unknowns = [0 if bits & is_data else bits & ~(is_weight | noise) for bits in sides[:2]]
            if sides[0] != sides[1] and all(bits.bit_count() == 1 for bits in unknowns):
                pairs.append((unknowns[0], unknowns[1]))
                paired |= unknowns[0] | unknowns[1]
            if op.name != GATHER and not all(bits & is_weight and not bits & ~(is_weight | noise) for bits in sides):
                made = activation
        for value in op.results:
            made_of[value] |= made
            determined_by[value] |= determined
    everything = activation - 1
    carried = {op.results[0]: made_of[op.operands[1]] for op in program.ops if op.name == CARRY}
    return _numbers(is_weight & everything), _numbers(is_data & everything), pairs, carried


def _bits(numbers: Iterable[int]) -> int:
    return sum(1 << n for n in numbers)


def _numbers(bits: int) -> set[int]:
    return {n for n in range(bits.bit_length()) if bits >> n & 1}


def argument_path(program: Program, number: int) -> list[str]:
    """The components of an argument's path; a unique one if it has no path."""
    return COMPONENT.findall(program.arguments[number].path) or [f"#{number}"]
