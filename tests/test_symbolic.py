"""Sizes for symbolic dimensions: a file with them, given sizes, is the program lowered with these sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import toast_cli as toast
from toast_cli import pipeline
from toast_cli.base.errors import InputError
from toast_cli.candidates.largest_size import chosen_sizes, sizes_in, split_dims, try_sizes
from toast_cli.cli import main
from toast_cli.frontend import content_of, load, symbols_in
from toast_cli.report.model import TriedSizeFacts

ITERATIONS = ("--iterations", "10")
MESH = ("--mesh", "v4-8")


def step(params: Any, batch: Any) -> Any:
    """A scanned, rematerialised step with its gradient; the mean divides by sizes, the scan slices by them."""

    def loss(p: Any) -> jax.Array:
        hidden, _ = jax.lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None)), batch["x"], p["layers"])
        out = hidden.reshape(-1, hidden.shape[-1]) @ p["out"]
        return ((out.reshape(batch["y"].shape) - batch["y"]) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def array(*shape: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = {"layers": array(4, 256, 256), "out": array(256, 512)}


def batch_of(b: Any, s: Any) -> Any:
    return {"x": array(b, s, 256), "y": array(b, s, 512)}


@pytest.fixture(scope="module")
def exported() -> Any:
    sizes = jax.export.symbolic_shape("b, s", constraints=["b >= 8", "mod(s, 128) == 0"])
    return jax.export.export(jax.jit(step))(PARAMS, batch_of(*sizes))


@pytest.fixture(scope="module")
def symbolic(exported: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("symbolic") / "step.jax_export"
    path.write_bytes(exported.serialize())
    return str(path)


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("static") / "step.jax_export"
    path.write_bytes(jax.export.export(jax.jit(step))(PARAMS, batch_of(128, 256)).serialize())
    return str(path)


def report_of(program: str, path: Path, *arguments: str) -> Any:
    assert main(["partition", program, *MESH, *ITERATIONS, *arguments, "--quiet", "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_a_file_with_sizes_gets_the_plan_of_the_program_lowered_with_them(
    symbolic: str, static: str, tmp_path: Path
) -> None:
    sized = report_of(symbolic, tmp_path / "sized.json", "--dim", "b=128", "--dim", "s=256")
    lowered = report_of(static, tmp_path / "lowered.json")
    assert sized["program"].pop("dims") == {"b": 128, "s": 256}
    assert sized["plan"] == lowered["plan"]
    for part in ("predicted", "arguments", "results", "collectives", "baselines"):
        assert sized[part] == lowered[part], part


IGNORED = ("stablehlo.constant", "toast.result")  # JAX exports one constant for equal ones; no results' places


def test_names_places_and_ops_are_those_of_the_program_lowered_with_the_sizes(symbolic: str, static: str) -> None:
    dims = ("b=128", "s=256")
    sized, lowered = load(symbolic, content=content_of(symbolic, dims), dims=dims), load(static)
    assert [one.path for one in sized.program.arguments] == [one.path for one in lowered.program.arguments]
    assert [one.path for one in sized.program.results] == [one.path for one in lowered.program.results]

    def computing(source: Any) -> list[tuple[str, str]]:
        ops = enumerate(source.program.ops)
        return [(op.name, source.location(number).partition(" (")[0]) for number, op in ops if op.name not in IGNORED]

    assert computing(sized) == computing(lowered)
    assert sized.sizes == {"b": 128, "s": 256}


SIZES = (
    # shape of an argument, sizes, the shape that it gets
    ("b, 4", "b=8", (8, 4)),
    ("2*b + 1, 4", "b=8", (17, 4)),
    ("b^2, b", "b=3", (9, 3)),
    ("floordiv(b, 2), mod(b, 4), max(b, 5), b", "b=10", (5, 2, 10, 10)),
    ("a, b", "a=2 b=3", (2, 3)),
)


@pytest.mark.parametrize(("shape", "sizes", "expected"), SIZES)
def test_sizes_of_expressions(shape: str, sizes: str, expected: tuple[int, ...]) -> None:
    symbolic = jax.export.symbolic_shape(shape)
    content = jax.export.export(jax.jit(lambda x: x + 1))(array(*symbolic)).serialize()
    dims = sizes.split()
    source = load("x", content=content_of("x", dims, bytes(content)), dims=dims)
    assert source.program.values[source.program.arguments[0].value].shape == expected


def test_arguments_that_the_function_does_not_use_and_several_platforms() -> None:
    """The module then lacks arguments of the file, or has one more."""
    (b,) = jax.export.symbolic_shape("b")
    made = jax.export.export(jax.jit(lambda unused, x: x * 2), platforms=["cpu", "tpu"])
    content = bytes(made(array(3), array(4, b)).serialize())
    assert symbols_in("x", content) == ({"b": ["x[1]"]}, [])
    source = load("x", content=content_of("x", ("b=6",), content))
    assert [source.program.values[one.value].shape for one in source.program.arguments][-1] == (4, 6)


WRONG = (
    # --dim's values; what the error says, and what it suggests
    ("", "symbolic dimensions without a size: b (batch['x'][0], …), s", "--dim b=SIZE --dim s=SIZE"),
    ("b=8", "no size for symbolic dimensions of the program: s", "--dim s=SIZE"),
    ("b=8 s=128 c=4", 'no symbolic dimension "c"', "allowed: b, s"),
    ("b=4 s=128", "b=4, s=128 breaks constraints that the file states: b >= 8", "other sizes"),
    ("b=8 s=100", "mod(s, 128) == 0", "other sizes"),
    ("b=0 s=128", '"b=0" is not the size', "b=256"),
    ("b", '"b" is not the size', "b=256"),
    ("b=x s=1", '"b=x" is not the size', "b=256"),
    ("b=8 b=16", "b has two sizes, 8 and 16", "give one"),
    ("b=3000000000 s=128", "too large: programs with symbolic shapes compute sizes in 32 bits", "2147483647"),
    ("b=2000000000 s=1280", "shapes do not fit together", "small enough"),
)


@pytest.mark.parametrize(("dims", "what", "hint"), WRONG)
def test_sizes_that_the_program_cannot_have(
    symbolic: str, dims: str, what: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word for size in dims.split() for word in ("--dim", size)]
    assert main(["partition", symbolic, *MESH, *given]) == 2
    error, suggestion = capsys.readouterr().err.splitlines()
    assert what in error
    assert hint in suggestion


OTHERS = (
    # text of a program, options; what the error says, and what it suggests
    ("tensor<8x4xf32>", ("--dim", "b=8"), "no symbolic dimensions for b=8", "leave --dim out"),
    ("tensor<8x4xf32>", ("--dim", "b=max"), "no symbolic dimensions for b=max", "leave --dim out"),
    ("tensor<?x4xf32>", ("--dim", "b=8"), "no symbolic dimensions for b=8", ".serialize()"),
    ("tensor<?x4xf32>", (), "argument 0 (tensor<?x4xf32>) has no fixed shape", ".serialize(), and give sizes with"),
    ("tensor<4000000000x4000000000x4xf32>", (), "larger than any machine's memory", "is a size wrong?"),
)


@pytest.mark.parametrize(("kind", "given", "what", "hint"), OTHERS)
def test_programs_without_symbols(
    kind: str, given: tuple[str, ...], what: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.mlir"
    path.write_text(
        f"module {{ func.func @main(%a: {kind}) -> {kind} {{\n %0 = stablehlo.add %a, %a : {kind}\n"
        f" return %0 : {kind} }} }}"
    )
    assert main(["partition", str(path), *MESH, *given]) == 2
    error, suggestion = capsys.readouterr().err.splitlines()
    assert what in error
    assert hint in suggestion


def test_inspect_shows_symbols_and_where_they_stand(symbolic: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", symbolic]) == 0
    shown = capsys.readouterr().out
    assert "b     -  batch/x/0, batch/y/0" in shown
    assert "--dim b=SIZE --dim s=SIZE" in shown
    assert main(["inspect", symbolic, "--dim", "b=8", "--dim", "s=128"]) == 0
    assert "s   128  batch/x/1, batch/y/1" in capsys.readouterr().out


def test_commands_that_read_programs_take_sizes(symbolic: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--dim", "b=128", "--dim", "s=256")
    for command in ("compare", "explain", "check"):
        more = ("--max-memory", "1TiB") if command == "check" else ()
        assert main([command, symbolic, *MESH, "--iterations", "10", *sizes, *more, "--quiet"]) == 0, command
    assert main(["tactics", symbolic, *MESH, *sizes]) == 0
    assert "batch" in capsys.readouterr().out


RANGES = (
    # --dim's values, constraints, devices; the first and the last size to try, and their number
    ("b=max", (), 8, (1, 2**30), 31),
    ("b=max", ("b >= 8", "b <= 4096"), 8, (8, 4096), 10),
    ("b=max", (), 24, (3, 3 * 2**29), 30),
    ("b=max", ("mod(b, 48) == 0",), 8, (48, 48 * 2**25), 26),
    ("b=max s=4", ("s^2 <= b",), 8, (16, 2**30), 27),
    ("b=64..4096*2", (), 8, (64, 4096), 7),
    ("b=64..100", (), 8, (64, 64), 1),
    ("b=64..4096+64", ("mod(b, 128) == 0", "f(b) == 3"), 8, (128, 4096), 32),
)


@pytest.mark.parametrize(("dims", "constraints", "devices", "ends", "count"), RANGES)
def test_sizes_to_try(dims: str, constraints: tuple[str, ...], devices: int, ends: tuple[int, int], count: int) -> None:
    given, wanted = split_dims(dims.split())
    assert wanted is not None
    sizes = sizes_in(wanted, given, constraints, devices)
    assert ((sizes[0], sizes[-1]), len(sizes)) == (ends, count)


NO_RANGES = (
    # --dim's values; what the error says, and what it suggests
    ("b=max s=max", "the largest size of both b and s", "all but one"),
    ("b=max b=8", "both b=8 and b=max are given", "give one"),
    ("b=8..4*2 s=128", '"b=8..4*2" is not a range of sizes', "b=64..4096*2"),
    ("b=8..64*1 s=128", "is not a range of sizes", "b=64..4096+64"),
    (f"b=1..{'9' * 5000} s=128", "is not the size of a symbolic dimension", "b="),
    ("b=1..2000000000+1 s=128", "is not a range of sizes", "b=64..4096*2"),
    ("b=1..7*2 s=128", "no size of b=1..7*2 keeps the constraints that the file states: b >= 8", "b=96..9600+96"),
    ("b=max", "no size for symbolic dimensions of the program: s", "--dim s=SIZE"),
    ("c=max b=8 s=128", 'no symbolic dimension "c"', "allowed: b, s"),
    ("b=max s=2147483648", "too large", "2147483647"),
)


@pytest.mark.parametrize(("dims", "what", "hint"), NO_RANGES)
def test_no_sizes_to_try(symbolic: str, dims: str, what: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [word for size in dims.split() for word in ("--dim", size)]
    assert main(["partition", symbolic, *MESH, *given]) == 2
    error, suggestion = capsys.readouterr().err.splitlines()
    assert what in error
    assert hint in suggestion


def rate_of(size: int) -> float:
    return float(min(size, 100))


TRIALS = (
    # sizes, the largest that fits and the largest that the program can have; the sizes that are tried
    ([1, 2, 4, 8, 16, 32, 64], 10, 99, [4, 8, 16, 32]),
    ([1, 2, 4, 8, 16, 32, 64], 99, 99, [8, 32, 64]),
    ([1, 2, 4, 8, 16, 32, 64], 0, 99, [1, 2, 8]),
    ([1, 2, 4, 8, 16, 32, 64], 4, 6, [2, 4, 8]),
    ([1, 2, 4, 8, 16, 32, 64], 40, 99, [8, 16, 32, 64]),
)


@pytest.mark.parametrize(("sizes", "largest", "possible", "expected"), TRIALS)
def test_sizes_are_tried_by_bisection(sizes: list[int], largest: int, possible: int, expected: list[int]) -> None:
    def attempt(size: int) -> TriedSizeFacts:
        if size > possible:
            raise InputError("shapes do not fit together")
        return TriedSizeFacts(size, rate=rate_of(size), why="" if size <= largest else "needs more")

    tried = try_sizes(sizes, attempt)
    assert [one.size for one in tried] == expected
    _, wanted = split_dims(["b=max"])
    assert wanted is not None
    assert chosen_sizes(wanted, tried).size == max((n for n in sizes if n <= largest), default=1)


def test_a_program_that_cannot_have_the_smallest_size() -> None:
    def attempt(size: int) -> TriedSizeFacts:
        raise InputError("is damaged")

    with pytest.raises(InputError, match="is damaged"):
        try_sizes([1, 2, 4], attempt)


def test_an_interrupt_says_that_larger_sizes_are_untried() -> None:
    _, wanted = split_dims(["b= max "])
    assert wanted is not None
    found = [TriedSizeFacts(8, rate=8.0), TriedSizeFacts(64, why="needs more")]
    text = "b=8 surely fits; the search for a larger size was interrupted"
    assert chosen_sizes(wanted, found, interrupted=True).text == text
    with pytest.raises(KeyboardInterrupt):
        try_sizes([1, 2, 4], lambda size: TriedSizeFacts(size, why="needs more") if size == 2 else None)


def test_the_fastest_size_is_told_beside_the_largest() -> None:
    rates = {1: 10.0, 2: 40.0, 4: 30.0, 8: 20.0, 16: 50.0}
    tried = try_sizes([*rates], lambda size: TriedSizeFacts(size, rate=rates[size], why="is large" * (size > 8)))
    _, wanted = split_dims(["b=1..16*2"])
    assert wanted is not None
    assert [one.size for one in tried] == [1, 2, 4, 8, 16]
    assert chosen_sizes(wanted, tried).text == (
        "b=8 is the largest of b=1..16*2 that surely fits: b=16 is large; with b=2, 40 a second are 100.0% more"
    )


def test_the_largest_size_of_a_program(
    symbolic: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is the one for that size, of which alone XLA prices the program's own shardings; the next one breaks the
    limit, or the bound."""
    asked: list[int] = []
    begin = pipeline.begin
    monkeypatch.setattr(pipeline, "begin", lambda *given: asked.append(len(given[2])) or begin(*given))
    options = ("--dim", "b=max", "--dim", "s=128", "--memory-limit", "16MiB", "--mesh-shape", "data=2,model=2")
    found = report_of(symbolic, tmp_path / "max.json", *options)
    size = found["program"]["dims"]["b"]
    assert sum(map(bool, asked)) == 1 < len(asked)
    assert found["sizes"]["size"] == size and found["predicted"]["fit"] == "yes"
    assert f"b={2 * size} needs" in found["sizes"]["beyond"]
    alone = report_of(symbolic, tmp_path / "alone.json", "--dim", f"b={size}", *options[2:])
    assert found["predicted"]["step_seconds"] <= alone["predicted"]["step_seconds"]
    seconds = next(one["step_seconds"] for one in found["sizes"]["tried"] if one["size"] == size)
    bound = ("--subject-to", f"step_time<={0.9 * seconds * 1e6:.0f}us")
    assert main(["partition", symbolic, *MESH, *ITERATIONS, *options, *bound]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"b={size // 2} is the largest size that surely fits: b={size} has step_time" in shown
    assert main(["sweep", symbolic, *MESH, *ITERATIONS, *options, "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["points"]
    assert [row["beyond"].partition(" ")[0] for row in rows] == [f"b={2 * int(row['dims'][2:-6])}" for row in rows]


def test_from_python(exported: Any) -> None:
    plan = toast.partition(exported, "v4-8", dims={"b": 128, "s": 256}, iterations=20)
    assert plan.report.program.dims == {"b": 128, "s": 256}
    (params, batch) = plan.in_specs()
    assert params.keys() == {"layers", "out"}
    assert any(batch["x"]), "the batch is split"
    with pytest.raises(toast.ToastError, match="in Python, dims="):
        toast.partition(exported, "v4-8")
