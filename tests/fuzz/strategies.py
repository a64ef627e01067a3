"""Hypothesis strategies: programs, specifications and options made from grammars, so that they get past the parser
more often than not."""

from __future__ import annotations

import json

from fuzz import seeds
from fuzz.harness import Case
from fuzz.mutate import ATTRIBUTES, VALUES
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st

QUICK = ("--iterations", "3")
NAMES = st.text(st.characters(blacklist_categories=()), max_size=12)
SIZES = st.sampled_from([0, 1, 2, 3, 4, 8, 16, 7, 1000, 2**31, 2**62])
ELEMENTS = st.sampled_from(["f32", "bf16", "i32", "i1", "ui8", "f64", "complex<f32>", "f8E4M3FN", "i4"])
UNARY = ("abs", "negate", "exponential", "sine", "floor", "sign", "not", "optimization_barrier")
BINARY = ("add", "multiply", "subtract", "maximum", "and", "power")
FIGURES = ("step_time", "peak_memory", "communication", "compute", "communication[data]", "communication[x]", "x")


@st.composite
def types(draw: st.DrawFn) -> str:
    """A tensor type, which may be empty or far too large."""
    shape = draw(st.lists(SIZES, max_size=4))
    return f"tensor<{''.join(f'{size}x' for size in shape)}{draw(ELEMENTS)}>"


@st.composite
def attributes(draw: st.DrawFn) -> str:
    """A dictionary of attributes as programs bring them along, of all kinds."""
    chosen = draw(st.dictionaries(st.sampled_from(ATTRIBUTES), st.sampled_from(VALUES), max_size=3))
    return ", ".join(f"{name.decode()} = {value.decode()}" for name, value in chosen.items())


@st.composite
def programs(draw: st.DrawFn) -> bytes:
    """Operations on arrays of one type, in straight lines, loops and calls, with any attributes."""
    kind = draw(types())
    lines, last = [], "%a"
    for number in range(draw(st.integers(0, 8))):
        operands = draw(st.sampled_from(["%a", "%b", last]))
        form = draw(st.integers(0, 3))
        if form == 0:
            lines.append(f"%{number} = stablehlo.{draw(st.sampled_from(UNARY))} {last} : {kind}")
        elif form == 1:
            lines.append(f"%{number} = stablehlo.{draw(st.sampled_from(BINARY))} {last}, {operands} : {kind}")
        elif form == 2:
            lines.append(
                f"%{number} = stablehlo.custom_call @{json.dumps(draw(NAMES))}({last}) {{{draw(attributes())}}} : ({kind}) -> {kind}"
            )
        else:
            lines.append(f"%{number} = func.call @f({last}) : ({kind}) -> {kind}")
        last = f"%{number}"
    body = "\n    ".join(lines)
    location = json.dumps(draw(NAMES))
    return f"""module attributes {{{draw(attributes())}}} {{
  func.func private @f(%x: {kind}) -> {kind} {{ return %x : {kind} }}
  func.func public @main(%a: {kind} {{{draw(attributes())}}} loc({location}), %b: {kind} {{{draw(attributes())}}}) -> ({kind} {{{draw(attributes())}}}) {{
    {body}
    return {last} : {kind}
  }}
}}""".encode("utf-8", "surrogatepass")


def yaml_values() -> st.SearchStrategy[object]:
    """What may stand behind a key."""
    leaves = (
        st.none()
        | st.booleans()
        | st.integers(-2, 2**70)
        | st.floats()
        | NAMES
        | st.sampled_from(["v4", "1 TB/s", "24GiB", "data", "ring", "torus"])
    )
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6
    )


@st.composite
def specs(draw: st.DrawFn) -> bytes:
    """Mesh specifications with right keys and values that are right or wrong."""
    sizes = st.lists(st.integers(0, 2**21), min_size=1, max_size=3)
    topology = draw(
        st.fixed_dictionaries({draw(st.sampled_from(["torus", "ring", "switch", "mesh", "x"])): sizes | yaml_values()})
        | yaml_values()
    )
    facts: dict[str, object] = {
        "chip": draw(st.sampled_from(["v4", "h100", "v5e", "x"]) | yaml_values()),
        "topology": topology,
    }
    for key in draw(
        st.lists(st.sampled_from(["axes", "name", "description", "memory_fraction", "x"]), unique=True, max_size=3)
    ):
        facts[key] = draw(yaml_values() | st.dictionaries(st.sampled_from(["data", "model"]), st.integers(0, 64)))
    return json.dumps(facts).encode("utf-8", "surrogatepass")  # JSON is YAML


def cases() -> st.SearchStrategy[Case]:
    """Cases of all grammars."""
    commands = st.sampled_from(
        [
            ("inspect", "m.mlir"),
            ("partition", "m.mlir", "--mesh", "v4-32", *QUICK, "-o", "o.mlir"),
            ("partition", "m.mlir", "--mesh", "h100-8", *QUICK, "-o", "o.hlo"),
            ("partition", "m.mlir", "--mesh", "v4-32", *QUICK, "--keep-shardings", "-o", "o.py"),
        ]
    )
    with_spec = st.sampled_from([("mesh", "show", "s.yaml"), ("partition", "m.mlir", "--mesh", "s.yaml", *QUICK)])
    sample = {"m.mlir": seeds.program()}
    return st.one_of(
        st.builds(lambda command, text: Case(command, {"m.mlir": text}), commands, programs()),
        st.builds(lambda command, text: Case(command, {**sample, "s.yaml": text}), with_spec, specs()),
    )


def drawn_cases(count: int, number: int) -> list[Case]:
    """So many cases, the same for the same `number`."""
    found: list[Case] = []

    @seed(number)
    @settings(
        max_examples=max(count, 1), database=None, deadline=None, phases=[Phase.generate], verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(cases())
    def draw(one: Case) -> None:
        found.append(one)

    draw()
    return found[:count]
