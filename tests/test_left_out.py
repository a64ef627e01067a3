"""Constants whose numbers a file leaves out, and those that it keeps behind the program."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from run_here import run_program

from toast_cli import xla
from toast_cli.base.errors import InputError
from toast_cli.cli import main
from toast_cli.frontend.convert import left_out, refuse_left_out, with_markers
from toast_cli.frontend.loading import load_module

HLO = """HloModule m
ENTRY e {{
  p = f32[32,16] parameter(0)
  c = {kind}[16,16] constant({numbers}), metadata={{op_name="w..."}}
  w = f32[16,16] convert(c)
  d = f32[32,16] dot(p, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT t = f32[32,16] tanh({root})
}}
"""
MLIR = """func.func public @main(%a: tensor<8x4xf32>) -> tensor<8x4xf32> {{
  %c = stablehlo.constant dense_resource<{name}> : tensor<4x4x{kind}>
  %w = stablehlo.convert %c : (tensor<4x4x{kind}>) -> tensor<4x4xf32>
  %0 = stablehlo.dot %a, %w : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}}
"""
SECTION = '\n{{-# dialect_resources: {{builtin: {{{name}: "0x04000000{digits}"}}}} #-}}\n'


def read(text: str) -> object:
    return load_module("given", content=text.encode()).module


@pytest.mark.parametrize("kind", ["f32", "pred", "c64", "s4"])
@pytest.mark.parametrize("numbers", ["{...}", "{ ... }", "{{1, 2}, ...}", "/*a ... b*/{...}"])
def test_hlo_without_its_constants(kind: str, numbers: str) -> None:
    convert = "real" if kind == "c64" else "convert"
    text = HLO.format(kind=kind, numbers=numbers, root="d").replace("convert", convert)
    with pytest.raises(InputError, match=r"the numbers of a constant tensor<16x16x\w+.* are left out") as refused:
        refuse_left_out(read(text), "m.hlo")
    assert refused.value.where.startswith("m.hlo:4:")
    assert "print_large_constants" in refused.value.hint


@pytest.mark.parametrize("kind", ["f32", "pred", "s4"])
def test_a_constant_that_nothing_reads_may_be_left_out(kind: str) -> None:
    module = read(HLO.format(kind=kind, numbers="{...}", root="p"))
    assert not left_out(module)
    assert "dense_resource" not in str(module)


def test_dots_elsewhere_are_no_constants() -> None:
    text = HLO.format(kind="f32", numbers="{...}", root="d").replace("constant({...})", "parameter(1)")
    assert with_markers(text) == text


@pytest.mark.parametrize("name", ["w", '"a name"', "__elided__"])
def test_a_resource_that_is_missing(name: str) -> None:
    with pytest.raises(InputError, match="left out") as refused:
        refuse_left_out(read(MLIR.format(name=name, kind="f32")), "m.mlir")
    assert refused.value.where == "m.mlir:2:8"


def test_what_needs_no_numbers_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, written = tmp_path / "m.hlo", tmp_path / "out"
    program.write_text(HLO.format(kind="f32", numbers="{...}", root="d"))
    partition = ("partition", str(program), "--mesh", "v4-32", "--iterations", "10", "-o", str(written))
    assert main(("inspect", str(program))) == 0
    assert "the numbers of 1 constant are left out of the file" in capsys.readouterr().out
    assert main((*partition, "--format", "specs")) == 0
    written.unlink()
    for form in ("stablehlo", "bytecode", "hlo", "jax_export"):
        assert main((*partition, "--format", form)) == 2
        assert not written.exists()
        assert f"{program}:4:" in capsys.readouterr().err
    for command in (("verify", str(program)), ("verify", str(program), "--against", str(program))):
        assert main(command) == 2
        assert "left out" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["w", '"a name"'])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("f32", np.float32), ("i1", np.bool_), ("i8", np.int8), ("f64", np.float64), ("ui16", np.uint16)],
)
@pytest.mark.parametrize("binary", [False, True])
def test_resources_become_constants(name: str, kind: str, dtype: type, binary: bool) -> None:
    numbers = np.arange(16).reshape(4, 4).astype(dtype)
    text = MLIR.format(name=name, kind=kind) + SECTION.format(name=name, digits=numbers.tobytes().hex())
    content = xla.write_bytecode(xla.parse_module(xla.make_context(), text)) if binary else text.encode()
    module = load_module("given", content=content).module
    assert "dense_resource" not in str(module)
    inputs = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
    (found,) = run_program(xla.write_bytecode(module), [inputs], [(8, 4)], 1, shardy=True)
    np.testing.assert_allclose(found, inputs @ numbers.astype(np.float32), rtol=1e-5)


def test_a_resource_of_another_size_is_refused() -> None:
    text = MLIR.format(name="w", kind="f32") + SECTION.format(name="w", digits="0000803f" * 3)
    with pytest.raises(InputError, match="size"):
        read(text)
