"""Small programs for tests of the core: a JAX function in, its `Source`, analysis and evaluator out.

A function is lowered in this process, serialised, and read back through the frontend's public `load`, as a user's file
would be.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from toast_cli.dimensions import Dimensions, analyse
from toast_cli.frontend import Source, load, program_pins
from toast_cli.hardware import Axis, Chip, Link, Mesh, load_spec
from toast_cli.plan.decisions import LOOK_UPS, NONE, Plan, Replicate, Shard
from toast_cli.plan.lower import lower
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.problem import Problem, make_problem
from toast_cli.plan.sharding import Sharding
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.profile import CompilerProfile
from toast_cli.price.profiles import find_profile
from toast_cli.program.model import Program
from toast_cli.program.roles import ROLES

SAMPLES = Path(__file__).resolve().parents[1] / "sample_models"

# Round figures, so that expected seconds can be worked out in the head.
ROUND_CHIP = Chip(
    name="round",
    platform="tpu",
    matrix_flops={"bf16": 2e12, "f32": 1e12},
    vector_flops=1e10,
    matrix_tile=(1, 1),
    memory_bytes=2**40,
    reserved_bytes=0,
    memory_bytes_per_second=1e9,
    sources={},
)
LINK_BYTES_PER_SECOND = 1e8
_SCOPES = {"": NONE, "look-ups": LOOK_UPS}  # of `Case.shard`, that are no dimensions
# Its compiler: what all of XLA does, at the rates above.
PLAIN = find_profile(ROUND_CHIP)


def arg(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An abstract array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def source_of(fn: Callable[..., Any], *shapes: Any, donate: tuple[int, ...] = (), runs: tuple[str, ...] = ()) -> Source:
    """The `Source` of a JAX function of abstract arguments (arrays, or trees of them). donate: argument numbers. runs:
    see `--runs`."""
    module = jax.jit(fn, donate_argnums=donate, keep_unused=True).lower(*shapes).compiler_ir("stablehlo")
    return source_of_text(module.operation.get_asm(enable_debug_info=True), runs=runs)


def source_of_text(text: str, *, keep_shardings: bool = False, runs: tuple[str, ...] = ()) -> Source:
    """The `Source` of a StableHLO module given as text."""
    return load("program.mlir", keep_shardings=keep_shardings, content=text.encode(), runs=runs)


def program_of(fn: Callable[..., Any], *shapes: Any, donate: tuple[int, ...] = ()) -> Program:
    return source_of(fn, *shapes, donate=donate).program


@cache
def sample(name: str) -> tuple[Source, Dimensions]:
    """A stored sample program and its analysis."""
    (path,) = (p for p in SAMPLES.iterdir() if p.name.split(".")[0] == name and p.suffix != ".py")
    source = load(str(path))
    return source, analyse(source.program)


def round_mesh(limit_bytes: int = 2**40, **sizes: int) -> Mesh:
    """A mesh of `ROUND_CHIP`s; every axis is a switch of its own without latency: V bytes gather in (p-1)/p V / rate
    seconds.
    """
    axes = tuple(
        Axis(name, size, (Link("switch", size, LINK_BYTES_PER_SECOND, 0.0, name),)) for name, size in sizes.items()
    )
    return Mesh("round", ROUND_CHIP, axes, limit_bytes)


def mesh_of(mesh: str | Mesh, shape: dict[str, int] | None = None, limit_bytes: int | None = None) -> Mesh:
    return mesh if isinstance(mesh, Mesh) else load_spec(mesh).mesh(shape, limit_bytes)


def problem_of(
    source: Source, mesh: str | Mesh = "v4-32", shape: dict[str, int] | None = None, pins: tuple[str, ...] = ()
) -> Problem:
    on = mesh_of(mesh, shape)
    return make_problem(source.program, analyse(source.program), on, pins, program_pins(source, on.names, on.sizes))


def evaluator_of(
    source: Source,
    mesh: str | Mesh = "v4-32",
    shape: dict[str, int] | None = None,
    pins: tuple[str, ...] = (),
    profile: CompilerProfile | None = None,
) -> Evaluator:
    return Evaluator(problem_of(source, mesh, shape, pins), profile=profile)


def groups_of(program: Program, dimensions: Dimensions, path: str) -> tuple[tuple[int, ...], ...]:
    """Per dimension of the argument called `path`, its class groups, major to minor."""
    classes = classes_of(program, dimensions, path)
    return tuple(tuple(dimensions.class_group[c] for c in dim) for dim in classes)


def classes_of(program: Program, dimensions: Dimensions, path: str) -> tuple[tuple[int, ...], ...]:
    """Per dimension of the argument called `path`, its classes, major to minor."""
    number = argument(program, path)
    form, classes = dimensions.forms[number], dimensions.factor_classes[number]
    return tuple(tuple(classes[factor] for factor in factors) for factors in form.results[0])


def value_classes(program: Program, dimensions: Dimensions, value: int) -> tuple[tuple[int, ...], ...]:
    """The same for any value, as its producer sees it."""
    number = program.producer[value]
    form, classes = dimensions.forms[number], dimensions.factor_classes[number]
    dims = form.results[program.ops[number].results.index(value)]
    return tuple(tuple(classes[factor] for factor in factors) for factors in dims)


def argument(program: Program, path: str) -> int:
    return [a.path for a in program.arguments].index(path)


@dataclass(frozen=True)
class Case:
    """A program on a mesh, with words for its decisions: `case.shard("x.0", "data")`, `case.replicate("weights",
    "data")`.
    """

    source: Source
    evaluator: Evaluator

    def __repr__(self) -> str:
        """The program op by op, so that a failure of a random one can be read."""
        values = self.program.values
        return "\n".join(
            f"{n}: {op.name.partition('.')[2]}{op.operands} -> {', '.join(f'{v}: {values[v]}' for v in op.results)}"
            for n, op in enumerate(self.program.ops)
        )

    @property
    def problem(self) -> Problem:
        return self.evaluator.problem

    @property
    def program(self) -> Program:
        return self.source.program

    def group(self, place: str) -> int:
        """The group of dimension `path.dim` (its major part where it has several; `path.dim.part` for another)."""
        path, _, rest = place.partition(".")
        dim, _, part = rest.partition(".")
        return groups_of(self.program, self.problem.dimensions, path)[int(dim)][int(part or 0)]

    def shard(self, place: str, axis: str, side: int = 0, unless: str = "", only: str = "") -> Shard:
        group = self.group(place)
        sides = tuple(side for _ in self.problem.dimensions.groups[group].resolutions)
        without, within = (_SCOPES[scope] if scope in _SCOPES else self.group(scope) for scope in (unless, only))
        return Shard(group, self.problem.mesh.names.index(axis), sides, without, within)

    def replicate(self, role: str, axis: str) -> Replicate:
        return Replicate(ROLES.index(role), self.problem.mesh.names.index(axis))

    def collectives(self, plan: Plan) -> list[tuple[str, tuple[str, ...], float, float]]:
        """(kind, axis names, bytes of the result per device, count) of all collectives, equal ones together, sorted."""
        found: dict[tuple[str, tuple[str, ...], float], float] = {}
        for use in self.evaluator.collectives(plan):
            key = (use.kind, tuple(self.problem.mesh.names[a] for a in use.axes), use.bytes)
            found[key] = found.get(key, 0.0) + use.count
        return sorted((*key, round(count, 9)) for key, count in found.items())

    def lowered(self, plan: Plan) -> PartitionedProgram:
        return lower(self.problem, plan)

    def rest(self, path: str, plan: Plan) -> str:
        """How an argument rests, as text: `data,model|-` (one entry a dimension)."""
        return self.text(self.lowered(plan).shardings[self.program.arguments[argument(self.program, path)].value])

    def text(self, sharding: tuple[tuple[int, ...], ...]) -> str:
        names = self.problem.mesh.names
        return "|".join(",".join(names[a] for a in axes) or "-" for axes in sharding)

    def ops(self, name: str) -> Iterator[int]:
        return (number for number, op in enumerate(self.program.ops) if op.name == f"stablehlo.{name}")


def case_of(
    fn: Callable[..., Any],
    *shapes: Any,
    donate: tuple[int, ...] = (),
    mesh: str | Mesh | None = None,
    pins: tuple[str, ...] = (),
    profile: CompilerProfile | None = None,
    runs: tuple[str, ...] = (),
) -> Case:
    """A JAX function on a mesh (default: data=4, model=2 of round figures); profile: of another compiler than the
    chip's; runs: see `--runs`.
    """
    return case_on(source_of(fn, *shapes, donate=donate, runs=runs), mesh, pins, profile)


def case_on(
    source: Source,
    mesh: str | Mesh | None = None,
    pins: tuple[str, ...] = (),
    profile: CompilerProfile | None = None,
) -> Case:
    return Case(source, evaluator_of(source, mesh or round_mesh(data=4, model=2), pins=pins, profile=profile))


def result_shardings(program: Program, lowered: PartitionedProgram) -> list[Sharding]:
    """How each result of the program leaves it."""
    first = len(program.ops) - len(program.results)
    return [lowered.required.get((first + k, 0), lowered.shardings[r.value]) for k, r in enumerate(program.results)]
