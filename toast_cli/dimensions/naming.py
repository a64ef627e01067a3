"""Roles and names of class groups: the role follows from the ops that use a group (batch, sequence, heads, experts,
vocabulary, …); the name is the user's own, else the role, else one derived from an argument. Names are for display;
roles also decide what tactics do.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from toast_cli.dimensions.classes import Classes
from toast_cli.dimensions.model import FactorKind, Form
from toast_cli.program import ops
from toast_cli.program.model import PAGED, Op, Program, Window
from toast_cli.program.ops import ARGUMENT, CARRY, RESULT
from toast_cli.program.roles import INPUTS, ROLES, STATE, WEIGHTS, argument_roles, carried_results, views

# ---------------------------------------------------------------- names
_LISTED = 6
# Fields in which frameworks wrap an array; left out of names.
_WRAPPERS = frozenset({"value", "raw_value", "get_value", "unbox", "array"})
_WORD = re.compile(r"\[(\d+)\]|[A-Za-z_][\w-]*")


class Named(NamedTuple):
    name: str
    role: str
    members: tuple[str, ...]


class _Member(NamedTuple):
    """A dimension of an argument. rank: the smaller, the better it names a group."""

    rank: int
    argument: int
    dim: int


def name_groups(
    program: Program, classes: Classes, class_group: list[int], groups: int, crowded: set[int]
) -> list[Named]:
    """[groups] names, all different. crowded: groups that own a conflict."""
    members = _members(program, classes, class_group, groups)
    roles = find_roles(program, classes, class_group, crowded)
    sizes = [0] * groups
    for number, group in enumerate(class_group):
        sizes[group] = max(sizes[group], classes.sizes[number])
    given = [_given(program, dims) for dims in members]
    places = _places(program, [None if given[g] or g in roles else dims for g, dims in enumerate(members)])
    uses: Counter[str] = Counter()
    named: list[Named] = []
    for group in range(groups):
        role = roles.get(group, "")
        name = given[group] or role or _axis(program, members[group]) or places[group]
        name = name or f"{_kind(program, members[group])}{sizes[group]}"
        uses[name] += 1
        unique = name if uses[name] == 1 else f"{name}_{uses[name]}"
        listed = tuple(f"{_path(program, m.argument)}.{m.dim}" for m in members[group][:_LISTED])
        named.append(Named(unique, role, listed))
    return named


def _members(program: Program, classes: Classes, class_group: list[int], groups: int) -> list[list[_Member]]:
    """[groups] the argument dimensions that have it, weights first."""
    roles, of = argument_roles(program)
    by_group: list[list[_Member]] = [[] for _ in range(groups)]
    for number in range(len(program.arguments)):
        form, factors = classes.forms[number], classes.factor_classes[number]
        for dim, pieces in enumerate(form.results[0]):
            for factor in pieces:
                rank = 0 if roles[of[number]] == WEIGHTS else 1
                by_group[class_group[factors[factor]]].append(_Member(rank, number, dim))
    return [sorted(members) for members in by_group]


def _path(program: Program, number: int) -> str:
    return program.arguments[number].label or f"argument {number}"


def _kind(program: Program, members: list[_Member]) -> str:
    """Prefix of the name of a dimension without a better one, followed by its size: `tokens_150`."""
    if not members:
        return "dim"
    first = members[0]
    if first.rank == 0:
        return "features_"
    return "tokens_" if program.values[program.arguments[first.argument].value].dtype[0] in "iu" else "inputs_"


def _given(program: Program, members: list[_Member]) -> str:
    """The user's most frequent name of these dimensions, or ""."""
    names = (program.arguments[m.argument].dimension_names[m.dim : m.dim + 1] for m in members)
    votes = Counter(name[0] for name in names if name and name[0])
    return votes.most_common(1)[0][0] if votes else ""


def _axis(program: Program, members: list[_Member]) -> str:
    """The mesh axis that the program states for these dimensions, if it is the same for all with one; else ""."""
    stated = (program.arguments[m.argument].annotated_axes[m.dim : m.dim + 1] for m in members)
    axes = {axis[0] for axis in stated if axis and axis[0]}
    return axes.pop() if len(axes) == 1 else ""


def _places(program: Program, members: list[list[_Member] | None]) -> list[str]:
    """[groups] the last words of the first member's path, and its dimension: as many words as distinguish the groups,
    at least two."""
    words = [_words(program, dims[0]) if dims else () for dims in members]
    lengths = [2] * len(members)
    while True:
        names = [
            ".".join((*path[-n:], str(dims[0].dim))) if dims and path else ""
            for path, n, dims in zip(words, lengths, members, strict=True)
        ]
        alike: dict[str, list[int]] = defaultdict(list)
        for group, name in enumerate(names):
            if name:
                alike[name].append(group)
        longer = [
            g
            for same in alike.values()
            if len({words[g] for g in same}) > 1
            for g in same
            if lengths[g] < len(words[g])
        ]
        if not longer:
            return names
        for group in longer:
            lengths[group] += 1


def _words(program: Program, member: _Member) -> tuple[str, ...]:
    """`params['blocks'][0].attn['kernel'].value` -> params, blocks_0, attn, kernel."""
    words: list[str] = []
    for match in _WORD.finditer(program.arguments[member.argument].path):
        if match[1] and words:
            words[-1] += f"_{match[1]}"
        else:
            words.append(match[0])
    return tuple([word for word in words if word not in _WRAPPERS] or words)


# ---------------------------------------------------------------- roles
# Three passes over the heavy ops, each using the results of the last: groups that products with weights produce and
# read (features), their use in attention, and the remaining groups that no op mixes (the batch). Argument names are
# not used.

# Least number of weights with one class for that class to be the residual stream.
_STREAM = 4
_SPACE = ("height", "width", "depth")
_FIRST, _OTHERS = slice(0, 1), slice(1, None)  # dimensions
# Roles of groups whose elements have an order or neighbours, so that they are never batches.
_ORDERED = ("edges", "nodes", "seq", "layers", *_SPACE)


@dataclass(frozen=True, slots=True)
class _Look:
    """One op: its form, the group of each factor, and per operand the weight it is made of, or -1. counted: its indices
    are non-uniform constants. given: its indices are integer inputs of the program. by_position: an operand holds
    constants, or rows of a table of positions alone. single: the result has one element along its first dimension."""

    op: Op
    form: Form
    groups: tuple[int, ...]
    weights: tuple[int, ...]
    counted: bool = False
    given: bool = False
    by_position: bool = False
    single: bool = False

    def moved(self, dims: slice = slice(None)) -> set[int]:
        """The groups along which an op takes a part of its operand, or moves or mixes elements, of some dimensions."""
        windows = {window.operand_dim for window in self.op.windows}
        kinds = (FactorKind.BLOCKED, FactorKind.PERMUTATION)
        return {
            self.groups[factor]
            for dim, factors in [*enumerate(self.form.operands[0])][dims]
            for factor in factors
            if dim in windows or self.form.kinds[factor] in kinds
        }

    @property
    def of_matrices(self) -> bool:
        """Whether a look-up is one of whole matrices, not of rows."""
        _, indices, out = self.factors([*self.form.operands[:2], self.form.results[0]])
        return sum(not out.isdisjoint({*dims} - indices) for dims in self.form.operands[0]) > 1

    def factors(self, arrays: Iterable[tuple[tuple[int, ...], ...]]) -> list[set[int]]:
        return [{factor for factors in dims for factor in factors} for dims in arrays]

    def named(self, factors: Iterable[int]) -> set[int]:
        return {self.groups[factor] for factor in factors}


@dataclass(frozen=True, slots=True)
class _Product:
    """The groups of a contraction: batch dimensions, contracted ones, and those of the left or the right operand
    only."""

    batching: set[int]
    summed: set[int]
    left: set[int]
    right: set[int]

    @property
    def result(self) -> set[int]:
        return self.batching | self.left | self.right


@dataclass(slots=True)
class _Evidence:
    """Evidence about groups. weights_of: group -> weights in whose products it occurs. square: groups that one product
    with a weight both contracts and produces (a recurrence's hidden units). stacked: batch dimensions of products with
    weights; routed: those that are no batch dimension in some other product; shifted: groups along which activations
    move. sorted: tokens in the order of their experts, for which rows are gathered and summed. tokens: groups of
    look-up indices, or scanned ones; stepped: scanned groups. layer_loops: loops over stacked weights. tiled: weight
    that a loop reads in tiles -> the group they are tiles of. produced: by products with weights, and by look-ups.
    """

    roles: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    features: set[int] = field(default_factory=set)
    square: set[int] = field(default_factory=set)
    weights_of: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    stacked: set[int] = field(default_factory=set)
    routed: set[int] = field(default_factory=set)
    sorted: set[int] = field(default_factory=set)
    tokens: set[int] = field(default_factory=set)
    stepped: set[int] = field(default_factory=set)
    shifted: set[int] = field(default_factory=set)
    layer_loops: set[int] = field(default_factory=set)
    tiled: dict[int, int] = field(default_factory=dict)
    produced: set[int] = field(default_factory=set)

    def vote(self, groups: Iterable[int], role: str) -> None:
        for group in groups:
            self.roles[group][role] += 1

    def has(self, role: str) -> set[int]:
        return {group for group, votes in self.roles.items() if votes[role]}


def find_roles(program: Program, classes: Classes, class_group: list[int], crowded: set[int]) -> dict[int, str]:
    """Group -> role. crowded: groups that own a conflict."""
    sizes: dict[int, int] = defaultdict(int)
    for number, group in enumerate(class_group):
        sizes[group] = max(sizes[group], classes.sizes[number])
    evidence = _Evidence()
    weights, data = _arguments(program, classes, class_group)
    repeated = data - weights
    looks = list(_looks(program, classes, class_group, repeated))
    for look in looks:
        _with_weights(evidence, look, repeated, data)
    for look in looks:
        _beside_weights(evidence, look, weights)
    products = [look for look in looks if look.op.name == ops.DOT_GENERAL and not look.by_position]
    _attention(evidence, products, crowded)
    for number, op in enumerate(program.ops):
        if op.kernel is not None and op.kernel.kind == PAGED:
            form, own = classes.forms[number], classes.factor_classes[number]
            pages = (factor for dim in form.operands[-1] for factor in dim)  # of which only heads can be split
            evidence.vote((class_group[own[f]] for f in pages if form.kinds[f] is FactorKind.PARALLEL), "heads")
    roles = _elect(evidence)
    _features(evidence, classes, class_group, sizes, weights, roles)
    ordered = {g for g, role in roles.items() if role in _ORDERED} | evidence.stepped
    roles.update(
        dict.fromkeys(batches := find_batches(program, classes, class_group, ordered, evidence.tokens), "batch")
    )
    roles.update((g, "seq") for g in sorted((evidence.tokens & data) - weights - batches) if g not in roles)
    return roles


def _looks(program: Program, classes: Classes, class_group: list[int], repeated: set[int]) -> Iterable[_Look]:
    """Yields every heavy op, with the operands that are made of weights.

    repeated: groups that a weight can have only where it is repeated for each element of a batch.
    """
    roles, of = argument_roles(program)
    origin = {value: k for value, k in views(program, trained=True).items() if roles[of[k]] == WEIGHTS}
    constant: dict[int, bool] = {}
    positions: set[int] = set()  # values made of constants and of rows that constant indices pick from a table
    given = {a.value for k, a in enumerate(program.arguments) if ROLES[of[k]] == INPUTS and _counts(program, a.value)}
    for number, op in enumerate(program.ops):
        weights = tuple([origin.get(v, -1) for v in op.operands])
        if op.kind.heavy or op.name in (ops.DYNAMIC_SLICE, ops.CONCATENATE, ops.PAD, ops.FFT):
            groups = tuple(class_group[c] for c in classes.factor_classes[number])
            counted = len(op.operands) > 1 and constant.get(op.operands[1], False)
            by_input = len(op.operands) > 1 and op.operands[1] in given
            by_position = any(v in positions or v in constant for v in op.operands)
            single = program.values[op.results[0]].shape[:1] == (1,)
            look = _Look(op, classes.forms[number], groups, weights, counted, by_input, by_position, single)
            look = _without_latents(look, repeated)
            weights = look.weights
            yield look
        picked = op.name == ops.GATHER and weights[0] >= 0 and op.operands[1] in constant and not look.of_matrices
        passed_on = (op.kind.elementwise or op.kind.rearranges) and not positions.isdisjoint(op.operands)
        if picked or (passed_on and all(v in positions or v in constant for v in op.operands)):
            positions.update(op.results)
        if not picked:
            _make_of_weights(op, weights, origin, constant, program)
        # An iota next to given indices picks one element of each row.
        allowed = [v in given or (v in constant and op.name != ops.CONCATENATE) for v in op.operands]
        if (op.kind.elementwise or op.kind.rearranges) and all(allowed) and given.intersection(op.operands):
            given.update(op.results)


def _counts(program: Program, value: int) -> bool:
    return program.values[value].dtype in ("i32", "i64", "ui32", "ui64") and bool(program.values[value].shape)


def _make_of_weights(
    op: Op, weights: tuple[int, ...], origin: dict[int, int], constant: dict[int, bool], program: Program
) -> None:
    """Records the results that an op computes only from weights and constants as weights. origin: value -> weight
    (argument number) that it is made of. weights: that of each operand, or -1. constant: constant -> whether its
    elements may differ.

    Concatenated gates, quantised weights with their scales and normalised weights are weights of the products that read
    them. Rows that constant indices pick from a table (a decoder's start token, positions) are activations.
    """
    if op.name == ops.CARRY and op.operands[0] in constant:
        step = program.ops[program.producer[op.operands[1]]]
        if step.name == ops.ADD and op.results[0] in step.operands and not program.values[op.results[0]].shape:
            constant[op.results[0]] = True  # the number of the trip
    if op.name in (ops.ARGUMENT, ops.CARRY, ops.JOIN) or all(value in origin for value in op.results):
        return
    if all(value in constant for value in op.operands):
        counts = op.kind.source and program.values[op.results[0]].elements > 1
        constant.update(dict.fromkeys(op.results, counts or any(constant[value] for value in op.operands)))
    elif all(w >= 0 or value in constant for w, value in zip(weights, op.operands, strict=True)):
        weight = next(w for w in weights if w >= 0)
        origin.update((value, weight) for value in op.results)


def _arguments(program: Program, classes: Classes, class_group: list[int]) -> tuple[set[int], set[int]]:
    """(groups that weights have, groups that other arguments have)."""
    _, of = argument_roles(program)
    groups: tuple[set[int], set[int]] = (set(), set())
    for number in range(len(program.arguments)):
        groups[ROLES[of[number]] != WEIGHTS].update(class_group[c] for c in classes.factor_classes[number])
    return groups


# ---------------------------------------------------------------- products with weights, tables, kernels


def _with_weights(evidence: _Evidence, look: _Look, repeated: set[int], data: set[int]) -> None:
    """Collects evidence from an op with weights. repeated: groups that a weight has only where it is repeated for each
    element of a batch (as PyTorch/XLA writes `x @ w` for x with more than two dimensions)."""
    match look.op.name:
        case ops.DOT_GENERAL if any(w >= 0 for w in look.weights):
            product = _product(look)
            own = product.left if look.weights[0] >= 0 else product.right
            arrays = [dims for weight, dims in zip(look.weights, look.form.operands, strict=True) if weight >= 0]
            of_weight = look.named(factor for factors in look.factors(arrays) for factor in factors)
            evidence.stacked |= product.batching & of_weight - repeated
            evidence.features |= product.summed | own
            evidence.produced |= own
            # A product may also contract a dimension of its own that no op has produced: a one-hot selection of
            # weights.
            alone = look.named(dims[0] for side in look.form.operands for dims in side if len(dims) == 1)
            produced = evidence.produced | data
            masks = (product.summed & alone) - produced if product.summed & produced else set()
            evidence.stacked |= masks
            evidence.routed |= masks
            evidence.square |= product.summed & own
            for weight, dims in zip(look.weights, look.form.operands, strict=True):
                if weight >= 0:
                    for group in look.named(factor for factors in dims for factor in factors) - repeated:
                        evidence.weights_of[group].add(weight)
        case ops.CONVOLUTION if look.weights[1] >= 0:
            _kernel(evidence, look)
        case ops.RAGGED_DOT if look.weights[1] >= 0:
            rows, matrices, _ = look.factors(look.form.operands)
            (out,) = look.factors(look.form.results)
            experts = look.named(matrices - rows - out)
            evidence.stacked |= experts
            evidence.routed |= experts
            evidence.sorted |= look.named(rows & out - matrices)
            evidence.features |= look.named(matrices) - experts
            for group in look.named(matrices):
                evidence.weights_of[group].add(look.weights[1])
        case ops.GATHER if look.weights[0] >= 0:
            table, indices = look.factors(look.form.operands[:2])
            rows = {s for s in table - indices if look.form.kinds[s] is FactorKind.REDUCTION}
            picked = look.named(table - indices - rows)
            evidence.produced |= picked
            if look.of_matrices and look.counted:  # whole matrices: those of the layer that a loop has come to
                evidence.vote(look.named(rows), "layers")
                return
            if look.of_matrices and not look.given:  # chosen by computed indices
                evidence.stacked |= look.named(rows)
                evidence.routed |= look.named(rows)
                return
            evidence.vote(look.named(rows), "positions" if look.counted else "vocab")
            evidence.vote(picked, "embed")
            evidence.tokens |= look.named(indices)
        case ops.DYNAMIC_SLICE if look.weights[0] >= 0 and look.op.loop >= 0:
            if look.single:
                evidence.vote(look.moved(_FIRST), "layers")
                evidence.layer_loops.add(look.op.loop)
            elif look.moved():
                evidence.tiled[look.weights[0]] = min(look.moved())


def _without_latents(look: _Look, repeated: set[int]) -> _Look:
    """The look without weights that act as activations: learnt queries, repeated for each element of a batch that the
    other operand lacks."""
    if look.op.name != ops.DOT_GENERAL or not any(w >= 0 for w in look.weights):
        return look
    product = _product(look)
    own = (product.left | product.summed, product.right | product.summed)
    weights = [-1 if groups & repeated else w for w, groups in zip(look.weights, own, strict=True)]
    return replace(look, weights=tuple(weights))


def _kernel(evidence: _Evidence, look: _Look) -> None:
    form = look.form
    image = [factors[0] for factors in form.operands[0] if factors]
    (kernel,) = look.factors(form.operands[1:2])
    (out,) = look.factors(form.results[:1])
    evidence.vote(look.named(kernel & (out | set(image))), "channels")
    space = iter(_SPACE if len(form.operands[0]) > 3 else ["seq"])
    for factor in image:
        if factor in out and form.kinds[factor] is FactorKind.PERMUTATION:
            evidence.vote([look.groups[factor]], next(space, "space"))


# ---------------------------------------------------------------- products, look-ups and sums of activations


def _beside_weights(evidence: _Evidence, look: _Look, weights: set[int]) -> None:
    form, kinds = look.form, look.form.kinds
    match look.op.name:
        case ops.DOT_GENERAL:
            product = _product(look)
            if not any(w >= 0 for w in look.weights):
                if not product.result <= evidence.features | evidence.stacked:  # otherwise a weight's gradient
                    evidence.routed |= evidence.stacked & (product.left | product.right | product.summed)
            else:  # a router's scores only have experts; the first layer of an ensemble produces features
                own = product.left if look.weights[0] >= 0 else product.right
                evidence.routed |= own & evidence.stacked if len(own) == 1 else set()
        case ops.GATHER if look.weights[0] < 0:
            table, indices = look.factors(form.operands[:2])
            evidence.routed |= look.named(indices) & evidence.stacked  # experts that pick their tokens
            if look.named(indices) & (evidence.sorted | evidence.routed):
                return
            rows = {s for s in table - indices if kinds[s] is FactorKind.REDUCTION}
            # Picks along each row are the loss picking the label's probability. Otherwise whole rows are picked: nodes
            # at the ends of edges.
            if table & indices or look.given:
                evidence.vote(look.named(rows), "labels" if table & indices else "nodes")
            evidence.tokens |= look.named(table & indices)
        case ops.DYNAMIC_SLICE if look.weights[0] < 0 and look.op.loop >= 0:
            stacked = look.single and look.op.loop in evidence.layer_loops  # caches of layers
            evidence.vote(look.moved(_FIRST) if stacked else (), "layers")
            evidence.stepped |= look.moved(_OTHERS) if stacked else look.moved()
            evidence.tokens |= evidence.stepped
        case ops.CONCATENATE | ops.PAD if max(look.weights) < 0:  # a pipeline hands activations from stage to stage
            evidence.shifted |= look.moved()
        case ops.FFT:  # frequencies have weights of their own, and are no ensemble
            evidence.stacked -= look.moved()
        case ops.SCATTER:
            target, updates = look.factors([form.operands[0], form.operands[-1]])
            summed = {s for s in updates - target if kinds[s] is FactorKind.REDUCTION}
            rows = target - updates
            evidence.routed |= look.named(rows) & evidence.stacked  # rows are written to computed places: dispatch
            of_table = look.named(rows) & weights or look.named(summed) & evidence.sorted  # it is the gradient of one
            if not of_table and len(form.operands[-1]) == 2 and summed and look.given:
                evidence.vote(look.named(summed), "edges")
                evidence.vote(look.named(rows), "nodes")


def _product(look: _Look) -> _Product:
    (left, right), (out,) = look.factors(look.form.operands), look.factors(look.form.results)
    return _Product(
        look.named(left & right & out),
        look.named((left & right) - out),
        look.named(left - right),
        look.named(right - left),
    )


def _attention(evidence: _Evidence, looks: list[_Look], crowded: set[int]) -> None:
    """Collects evidence from attention. Scores contract features of queries and keys, and keys have a dimension of
    their own that is no feature: a sequence. The dimension that the second product contracts is one too, and the
    features of its other operand are a head's width.
    """
    experts = evidence.routed
    products = [_product(look) for look in looks if not any(w >= 0 for w in look.weights)]
    products = [p for p in products if p.batching and not (p.result | p.summed) & experts]
    for p in products:
        for queries, keys in ((p.left, p.right), (p.right, p.left)):
            if p.summed and not p.summed & crowded and keys and not keys & evidence.features:
                evidence.vote(p.summed, "head_dim")
                evidence.vote((queries | keys) - evidence.features, "seq")
                evidence.vote((queries | p.batching) & evidence.features, "heads")
                break
    sequences = evidence.has("seq")
    for p in products:
        if p.summed and p.summed <= sequences:
            for side in (p.left, p.right):
                if side and side <= evidence.features:
                    evidence.vote(side, "head_dim")


# ---------------------------------------------------------------- election of roles

# A group gets the first of these roles that it has any evidence for.
_DECISIVE = (
    "edges", "nodes", "vocab", "embed", *_SPACE, "seq", "heads", "head_dim", "layers", "channels", "positions", "labels"
)  # fmt: skip


def _elect(evidence: _Evidence) -> dict[int, str]:
    stage = dict.fromkeys(evidence.shifted, "layers")
    roles = {g: "experts" if g in evidence.routed else stage.get(g, "ensemble") for g in evidence.stacked}
    for group, votes in evidence.roles.items():
        role = next((r for r in _DECISIVE if votes[r]), "")
        if role in _SPACE and group in evidence.tokens:  # a convolution over time
            role = "seq"
        if role and not (
            group in roles and (group in evidence.routed or (role == "heads" and roles.pop(group) == "experts"))
        ):
            roles[group] = role
    return roles


def _features(
    evidence: _Evidence,
    classes: Classes,
    class_group: list[int],
    sizes: dict[int, int],
    of_weights: set[int],
    roles: dict[int, str],
) -> None:
    """Enters the residual stream, the vocabulary of an untied output head, hidden widths and tiles into `roles`."""
    count: Counter[int] = Counter()
    per_class = Counter(class_group)
    for group, weights in evidence.weights_of.items():
        count[group] = -(-len(weights) // per_class[group])
    stream = max(count, key=lambda g: (count[g], -g), default=-1)
    if "embed" not in roles.values() and stream >= 0 and count[stream] >= _STREAM and stream not in roles:
        roles[stream] = "embed"
    vocabularies = {sizes[g] for g, role in roles.items() if role == "vocab"}
    for group in evidence.weights_of.keys() | evidence.tiled.values():
        if roles.get(group, "labels") == "labels" and sizes[group] in vocabularies:
            roles[group] = "vocab"
        elif group not in roles and (count[group] > 1 or group in evidence.square):
            roles[group] = "ff"
    for group in evidence.weights_of.keys() - of_weights:  # a tile
        tiled = next((evidence.tiled[w] for w in evidence.weights_of[group] if w in evidence.tiled), group)
        if tiled in roles:
            roles[group] = roles[tiled]


# ---------------------------------------------------------------- the batch
# Finds batch dimensions: those that no weight has and along which most of the work can be split with no communication
# but gradient sums.
#
# Names and shapes are not used.

# Least fraction of the work that can be split along a batch, and largest fraction of its work that a second batch may
# share with the first.
_LEAST_WORK, _MOST_SHARED = 0.3, 0.5


def find_batches(
    program: Program, classes: Classes, class_group: list[int], ordered: set[int], tokens: set[int]
) -> set[int]:
    """Groups that are batches: one, and others along which elements do not interact either.

    Independent inputs (real and generated images, two towers) each have a batch of their own, along which most of the
    remaining work can be split. Candidates are, in this order: carried dimensions without interaction (chains of a
    sampler), groups of inputs, of results (samples made from noise), the leading dimension of all results (gradients
    with respect to an attention's inputs), and all groups. Without weights, interacting inputs (particles) and results
    made from random numbers alone (initial weights) have none.

    Args:
        ordered: groups that are no batches: sequences, space, nodes. tokens: groups of look-up indices, of which at
            most one is a batch.
    """
    splits = _Splits(program, classes, class_group)
    excluded = splits.weights | ordered
    all_work = splits.free(set())
    batches: set[int] = set()
    leading = splits.leading - splits.mixed - ordered
    candidates = [splits.alone, splits.data - excluded, splits.results - excluded, leading, splits.groups - excluded]
    if not splits.weights and splits.data <= splits.mixed:
        candidates = [splits.groups - splits.results - splits.mixed - ordered]
    for among in candidates:
        while True:
            free, most = splits.free(batches), splits.most(batches)
            likely = [
                g for g in sorted(among - batches) if free[g] > max(_LEAST_WORK * most, _MOST_SHARED * all_work[g])
            ]
            if not likely:
                break
            batch = max(likely, key=lambda g: (round(free[g] / most, 3), g not in splits.mixed, -g))
            batches.update([batch], (g for g in likely if g not in splits.mixed | tokens))
        if batches:
            break
    return batches


class _Splits:
    """For each group, the work of the ops that can be split along it without communication.

    Attributes:
        groups: all groups. weights, data, results: groups of weights, of other arguments and of results.
        alone: the first dimension of all carried arguments, if all results have it and elements do not interact along
            it (chains of a sampler).
        leading: the first dimension of all results, if it is the same group.
        mixed: groups along which elements interact in some op, other than in sums over all of them.
    """

    def __init__(self, program: Program, classes: Classes, class_group: list[int]) -> None:
        _, of = argument_roles(program)
        roles = [ROLES[number] for number in of]
        arguments = [{class_group[c] for c in factors} for factors in classes.factor_classes[: len(roles)]]
        results = [
            {class_group[c] for c in factors}
            for op, factors in zip(program.ops, classes.factor_classes, strict=True)
            if op.name == RESULT
        ]
        self.groups, self.results = set(class_group), set[int]().union(*results)
        of_role = {role: [groups for r, groups in zip(roles, arguments, strict=True) if r == role] for role in ROLES}
        self.weights = set[int]().union(*of_role[WEIGHTS])
        self.data = set[int]().union(*of_role[STATE], *of_role[INPUTS])
        kept = [
            {class_group[classes.factor_classes[k][0]]}
            for k, result in enumerate(carried_results(program))
            if result >= 0 and arguments[k]
        ]
        self.alone = set.intersection(*kept, *filter(None, results)) if kept else set()
        first = [
            {class_group[factors[0]]} if factors else set[int]()
            for op, factors in zip(program.ops, classes.factor_classes, strict=True)
            if op.name == RESULT
        ]
        self.leading = set.intersection(*first) if first else set[int]()
        self.mixed: set[int] = set()
        # # (groups of an op, those it can be split along) -> work
        self._work: dict[tuple[frozenset[int], frozenset[int]], float] = defaultdict(float)
        splits_of: dict[object, tuple[frozenset[int], frozenset[int]]] = {}
        for number, op in enumerate(program.ops):
            key = form, factor_classes, _ = classes.forms[number], classes.factor_classes[number], op.windows
            if key not in splits_of:
                groups = [class_group[c] for c in factor_classes]
                splits_of[key] = frozenset(groups), self._free(form, groups, op.windows)
            elements = sum(program.values[v].elements for v in op.results)
            if op.name not in (ARGUMENT, RESULT, CARRY):
                self._work[splits_of[key]] += (op.flops + elements) * op.trips

    def _free(self, form: Form, groups: list[int], windows: tuple[Window, ...]) -> frozenset[int]:
        """Groups along which one op can be split: all its results have them, element by element, or it sums over them
        and its result only has groups of weights, or none."""
        results = {groups[factor] for dims in form.results for factors in dims for factor in factors}
        kinds: dict[int, list[FactorKind]] = defaultdict(list)
        for group, kind in zip(groups, form.kinds, strict=True):
            kinds[group].append(kind)
        for window in windows:
            for factor in form.operands[0][window.operand_dim]:
                kinds[groups[factor]].append(FactorKind.PERMUTATION)
        free = {
            group
            for group, own in kinds.items()
            if own == [FactorKind.PARALLEL] or (own == [FactorKind.REDUCTION] and results <= self.weights)
        }
        self.mixed.update(kinds.keys() - free)
        self.alone -= {group for group, own in kinds.items() if own != [FactorKind.PARALLEL]}
        return frozenset(free)

    def free(self, without: set[int]) -> dict[int, float]:
        """Group -> work of the ops that can be split along it and not along any in `without`."""
        left: dict[int, float] = defaultdict(float)
        for (groups, free), work in self._work.items():
            if groups.isdisjoint(without):
                for group in free:
                    left[group] += work
        return left

    def most(self, without: set[int]) -> float:
        """The most work of the ops with any one group, over ops that have no group in `without`."""
        left: dict[int, float] = defaultdict(float)
        for (groups, _), work in self._work.items():
            if groups.isdisjoint(without):
                for group in groups:
                    left[group] += work
        return max(left.values(), default=0.0)
