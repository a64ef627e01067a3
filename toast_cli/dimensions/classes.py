"""From a `Program` to dimension classes: every op's rule, with its factors cut along the classes.

Near-linear in the number of ops; each distinct rule is processed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from toast_cli.dimensions.model import FactorKind, Form
from toast_cli.program.model import Op, Program, Rule
from toast_cli.program.values import DisjointSets

NO_NAME = -1  # the name of a dimension of size one (or zero), which nothing can split

Position = tuple[int, int]  # array number (operands first, then results), dimension


@dataclass(frozen=True)
class Classes:
    """[classes] sizes; [ops] form and factor classes; pairs of classes that a stencil or slice links."""

    sizes: tuple[int, ...]
    forms: tuple[Form, ...]
    factor_classes: tuple[tuple[int, ...], ...]
    links: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class RulePlan:
    """One rule, arranged for unification.

    alone: per factor with more than one element, the positions of dimensions that consist of this factor only.
    products: (position, factors) of dimensions that consist of several factors, without factors of size 1.
    """

    alone: tuple[tuple[int, tuple[Position, ...]], ...]
    products: tuple[tuple[Position, tuple[int, ...]], ...]


def plan_rule(rule: Rule) -> RulePlan:
    alone: dict[int, list[Position]] = {f: [] for f, size in enumerate(rule.sizes) if size > 1}
    products: list[tuple[Position, tuple[int, ...]]] = []
    for array, dims in enumerate(rule.operands + rule.results):
        for dim, factors in enumerate(dims):
            real = tuple(f for f in factors if rule.sizes[f] > 1)
            if len(real) == 1:
                alone[real[0]].append((array, dim))
            elif real:
                products.append(((array, dim), real))
    return RulePlan(tuple((f, tuple(ps)) for f, ps in alone.items()), tuple(products))


def classify(program: Program) -> Classes:
    """Names every dimension, unifies the names that rules equate, and cuts every op's factors along the classes."""
    names = Names()
    value_names = [tuple(names.new(s) if s > 1 else NO_NAME for s in value.shape) for value in program.values]
    plans: dict[Rule, RulePlan] = {}
    for op in program.ops:
        plan = plans.get(op.rule)
        if plan is None:
            plan = plans[op.rule] = plan_rule(op.rule)
        if plan.alone or plan.products:
            arrays = [value_names[v] for v in op.operands + op.results]
            _equate(names, op.rule, plan, arrays)
    _equate_aliases(names, program, value_names)
    return _Cutter(names, value_names, plans).cut(program)


def _equate(names: Names, rule: Rule, plan: RulePlan, arrays: list[tuple[int, ...]]) -> None:
    """Unifies the names that one op's rule equates, except where splits do not line up."""
    factor_names: dict[int, int] = {}
    sizes = names.sizes
    for factor, positions in plan.alone:
        size = rule.sizes[factor]
        first = NO_NAME
        for array, dim in positions:
            name = arrays[array][dim]
            if name == NO_NAME or sizes[name] != size:
                continue
            if first == NO_NAME:
                first = name
            else:
                names.unify(first, name)
        factor_names[factor] = first
    for (array, dim), factors in plan.products:
        product = arrays[array][dim]
        if product == NO_NAME or prod(rule.sizes[f] for f in factors) != sizes[product]:
            continue
        for factor in factors:
            if factor_names.get(factor, NO_NAME) == NO_NAME:
                factor_names[factor] = names.new(rule.sizes[factor])
        names.unify_product(product, [factor_names[f] for f in factors])


def _equate_aliases(names: Names, program: Program, value_names: list[tuple[int, ...]]) -> None:
    """Unifies the dimensions of a donated argument and of the result that reuses its buffer."""
    for argument in program.arguments:
        if 0 <= argument.aliased_result < len(program.results):
            result = program.results[argument.aliased_result].value
            if program.values[result].shape == program.values[argument.value].shape:
                for a, b in zip(value_names[argument.value], value_names[result], strict=True):
                    if a != NO_NAME:
                        names.unify(a, b)


class _Cutter:
    """Turns final names into class numbers and cuts every op's factors along the classes."""

    def __init__(self, names: Names, value_names: list[tuple[int, ...]], plans: dict[Rule, RulePlan]) -> None:
        self._names = names
        self._value_names = value_names
        self._plans = plans
        self._class_of: dict[int, int] = {}  # root name -> class number
        self._sizes: list[int] = []
        self._leaves: dict[int, tuple[int, ...]] = {NO_NAME: ()}  # name -> classes, major to minor
        self._forms: dict[tuple[object, ...], Form] = {}
        self._links: set[tuple[int, int]] = set()
        self._arrays: list[tuple[tuple[int, ...], ...] | None] = [None] * len(value_names)
        self._ops: dict[tuple[object, ...], tuple[Form, tuple[int, ...]]] = {}

    def cut(self, program: Program) -> Classes:
        cuts = [self._op(op) for op in program.ops]
        forms, factor_classes = tuple(form for form, _ in cuts), tuple(classes for _, classes in cuts)
        return Classes(tuple(self._sizes), forms, factor_classes, tuple(sorted(self._links)))

    def _classes(self, name: int) -> tuple[int, ...]:
        classes = self._leaves.get(name)
        if classes is None:
            numbers = []
            for root in self._names.leaves(name):
                if root not in self._class_of:
                    self._class_of[root] = len(self._sizes)
                    self._sizes.append(self._names.sizes[root])
                numbers.append(self._class_of[root])
            classes = self._leaves[name] = tuple(numbers)
        return classes

    def _op(self, op: Op) -> tuple[Form, tuple[int, ...]]:
        """The op's form, and the class of each of its factors."""
        arrays = tuple(self._array(v) for v in op.operands + op.results)
        key = (op.rule, arrays, op.region is not None)
        cut = self._ops.get(key)
        if cut is None:
            cut = self._ops[key] = self._cut_op(op, arrays)
        return cut

    def _array(self, value: int) -> tuple[tuple[int, ...], ...]:
        """Classes of each dimension of a value."""
        classes = self._arrays[value]
        if classes is None:
            classes = self._arrays[value] = tuple(map(self._classes, self._value_names[value]))
        return classes

    def _cut_op(self, op: Op, arrays: tuple[tuple[tuple[int, ...], ...], ...]) -> tuple[Form, tuple[int, ...]]:
        plan = self._plans[op.rule]
        pieces: dict[int, list[int]] = {}  # factor -> its classes
        extents: dict[int, list[int]] = {}  # factor -> sizes of the dimensions that are this factor but of another size
        # A manual region sums inside over factors that no result has.
        blocked: set[int] = {*op.rule.need_replication, *(() if op.region is not None else lost_factors(op.rule))}
        for factor, positions in plan.alone:
            size = op.rule.sizes[factor]
            dimensions = [arrays[a][d] for a, d in positions if arrays[a][d]]
            same = [c for c in dimensions if prod(self._sizes[x] for x in c) == size]
            if len(dimensions) < len(positions):
                blocked.add(factor)  # some dimension of it has one element
            if same:
                pieces[factor] = list(same[0])
            elif dimensions and not any(factor in factors for _, factors in plan.products):
                pieces[factor] = list(max(dimensions, key=lambda c: prod(self._sizes[x] for x in c)))
            if any(c != same[0] for c in same):
                blocked.add(factor)
            if len(same) < len(dimensions):
                # A manual region splits a dimension manually if it is larger outside than the factor.
                linked = factor in op.rule.permutation or op.region is not None
                if not linked or factor not in pieces:
                    blocked.add(factor)
                elif factor not in blocked:
                    self._link(dimensions)
                    pieces[factor] = pieces[factor][:1]
                    extents[factor] = sorted({self._sizes[c[0]] for c in dimensions})
        for (array, dim), factors in plan.products:
            if not self._cut_product(arrays[array][dim], factors, op.rule, pieces):
                blocked.update(factors)
        return self._form(op.rule, pieces, extents, blocked)

    def _link(self, dimensions: list[tuple[int, ...]]) -> None:
        """Links dimensions of different sizes with one factor (a stencil, a slice): they are decided together, but
        split separately."""
        for classes in dimensions[1:]:
            pair = (min(dimensions[0][0], classes[0]), max(dimensions[0][0], classes[0]))
            if pair[0] != pair[1]:
                self._links.add(pair)

    def _cut_product(
        self, classes: tuple[int, ...], factors: tuple[int, ...], rule: Rule, pieces: dict[int, list[int]]
    ) -> bool:
        """Distributes a dimension's classes over its factors, major to minor; False where they do not fit."""
        rest = list(classes)
        for factor in factors:
            own: list[int] = []
            size = 1
            while size < rule.sizes[factor] and rest:
                own.append(rest.pop(0))
                size *= self._sizes[own[-1]]
            if size != rule.sizes[factor] or pieces.setdefault(factor, own) != own:
                return False
        return not rest

    def _form(
        self,
        rule: Rule,
        pieces: dict[int, list[int]],
        extents: dict[int, list[int]],
        blocked: set[int],
    ) -> tuple[Form, tuple[int, ...]]:
        classes = tuple(c for f in sorted(pieces) for c in pieces[f])
        key = (
            rule,
            tuple((f, tuple(self._sizes[c] for c in pieces[f])) for f in sorted(pieces)),
            tuple(sorted((f, tuple(e)) for f, e in extents.items())),
            tuple(sorted(blocked)),
        )
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = _make_form(
                rule, {f: [self._sizes[c] for c in p] for f, p in pieces.items()}, extents, blocked
            )
        return form, classes


@lru_cache(maxsize=10_000)
def lost_factors(rule: Rule) -> frozenset[int]:
    """Factors that no result has and the op does not sum over: each device needs its operands whole along them, as for
    a dynamic update of many rows, despite Shardy's rule for it."""

    def factors(arrays: tuple[tuple[tuple[int, ...], ...], ...]) -> set[int]:
        return {factor for dims in arrays for of in dims for factor in of}

    if not rule.results:
        return frozenset()
    return frozenset(factors(rule.operands) - factors(rule.results) - rule.reduction - rule.permutation)


def _make_form(rule: Rule, pieces: dict[int, list[int]], extents: dict[int, list[int]], blocked: set[int]) -> Form:
    parts_of: dict[int, tuple[int, ...]] = {}
    sizes: list[int] = []
    kinds: list[FactorKind] = []
    divisors: list[tuple[int, ...]] = []
    for factor in sorted(pieces):
        parts_of[factor] = tuple(range(len(sizes), len(sizes) + len(pieces[factor])))
        for size in pieces[factor]:
            sizes.append(size)
            kinds.append(_kind(rule, factor, blocked))
            divisors.append(tuple(extents.get(factor, [size])))

    def place(dims: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(part for f in factors for part in parts_of.get(f, ())) for factors in dims)

    operands = tuple(map(place, rule.operands))
    results = tuple(map(place, rule.results))
    majors: list[set[int]] = [set() for _ in sizes]
    for dims in operands + results:
        for parts in dims:
            for k, part in enumerate(parts):
                majors[part].update(parts[:k])
    sorted_majors = tuple(tuple(sorted(m)) for m in majors)
    return Form(tuple(sizes), tuple(kinds), tuple(divisors), operands, results, sorted_majors)


def _kind(rule: Rule, factor: int, blocked: set[int]) -> FactorKind:
    if factor in blocked:
        return FactorKind.BLOCKED
    if factor in rule.reduction:
        return FactorKind.REDUCTION
    if factor in rule.permutation:
        return FactorKind.PERMUTATION
    return FactorKind.PARALLEL


# ---------------------------------------------------------------- names and their products
# Disjoint sets of dimension names, in which a name may be an ordered product of others.
#
# Every dimension starts as one name. `unify` makes two names one; `unify_product` declares a name the product of
# others, major to minor. Splitting a name splits its whole class, and two different splits of one class meet in their
# common refinement. Where the cut points do not form a divisibility chain, the rest is not unified.


class Names:
    """The dimension names of one analysis; mutable.

    A name is an int; `sizes[name]` its number of elements. `find` returns the representative of all equal names.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._same: DisjointSets[int] = DisjointSets()
        self.find = self._same.find
        self._parts: dict[int, list[int]] = {}  # root -> names it is the product of, major to minor

    def new(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def leaves(self, name: int) -> list[int]:
        """The unsplit names (roots) whose ordered product this name is, major to minor; itself where it is not
        split.
        """
        root = self.find(name)
        parts = self._parts.get(root)
        if parts is None:
            return [root]
        return [leaf for part in parts for leaf in self.leaves(part)]

    def unify(self, left: int, right: int) -> bool:
        """Makes two names of equal size one; False where their splits do not line up all the way."""
        left, right = self.find(left), self.find(right)
        if left == right:
            return True
        if right in self._parts:
            if left in self._parts:
                aligned = self._align(self.leaves(left), self.leaves(right))
                if aligned:
                    self._same.union(left, right)
                return aligned
            left, right = right, left
        self._same.union(left, right)  # `right` is not split; whatever `left` is, it becomes that
        return True

    def unify_product(self, product: int, parts: list[int]) -> bool:
        """Declares `product` the ordered product of `parts`; False where that does not line up all the way."""
        root = self.find(product)
        if len(parts) == 1:
            return self.unify(root, parts[0])
        leaves = [leaf for part in parts for leaf in self.leaves(part)]
        if root in self._parts:
            return self._align(self.leaves(root), leaves)
        if root in leaves:
            return False
        self._parts[root] = list(parts)
        return True

    def _align(self, left: list[int], right: list[int]) -> bool:
        """Unifies two ordered products leaf by leaf, splitting the larger leaf where one divides the other."""
        left, right = left[::-1], right[::-1]  # so that the major ends can be popped
        while left and right:
            a, b = left.pop(), right.pop()
            leaves_a, leaves_b = self.leaves(a), self.leaves(b)
            if len(leaves_a) > 1 or len(leaves_b) > 1:  # split meanwhile
                left.extend(reversed(leaves_a))
                right.extend(reversed(leaves_b))
                continue
            size_a, size_b = self.sizes[a], self.sizes[b]
            if size_a == size_b:
                self.unify(a, b)
            elif size_b % size_a == 0:
                left.append(a)
                right.extend(reversed(self._split(b, size_a)))
            elif size_a % size_b == 0:
                left.extend(reversed(self._split(a, size_b)))
                right.append(b)
            else:
                return False
        return True

    def _split(self, leaf: int, major: int) -> list[int]:
        """Cuts an unsplit name into `major` times the rest."""
        root = self.find(leaf)
        parts = [self.new(major), self.new(self.sizes[root] // major)]
        self._parts[root] = parts
        return parts
