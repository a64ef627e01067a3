"""Prices: of a chip by the hour, in a specification or on the command line; of a step and of a million tokens, out."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from toast_cli.cli import main
from toast_cli.hardware import load_spec
from toast_cli.program.quantities import format_price

SAMPLES = Path(__file__).parent.parent / "sample_models"
MLP = str(SAMPLES / "mlp_tiny.mlir")
SPEC = "name: own\nchip: {chip}\nprice: {price}\ntopology: {{switch: 4}}\n"


@pytest.mark.parametrize(
    ("machine", "prices", "hour"),
    [
        ("h100-8", ("h100=2.5",), 20.0),
        ("h100-8", ("v5p=4", "H100=2.5"), 20.0),
        ("v4-32", ("v4=3",), 48.0),  # 32 TensorCores on 16 chips
        ("v3-32", ("v3=2",), 32.0),  # of two devices each
        ("2xv5e-16", ("v5e=1",), 32.0),
        ("h100-8", (), 0.0),
    ],
)
def test_the_price_of_a_machine(machine: str, prices: tuple[str, ...], hour: float) -> None:
    assert load_spec(machine, prices).hour_price == hour
    assert load_spec(machine, prices).mesh().hour_price == hour


def test_a_specification_states_a_price_which_the_command_line_replaces(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(SPEC.format(chip="H100", price=2.5))
    assert load_spec(str(path)).hour_price == 10.0
    assert load_spec(str(path), ("v4=9",)).hour_price == 10.0
    assert load_spec(str(path), ("h100=3",)).hour_price == 12.0


WRONG = (
    # command; what the error says, and what it suggests
    (f"partition {MLP} --mesh v4-8 --price v4q=3", 'unknown chip "v4q"', 'did you mean "v4"?'),
    (f"partition {MLP} --mesh v4-8 --price v4", '"v4" is not the price of a chip', "v5p=4.2"),
    (f"compare {MLP} --mesh v4-8 --price v4=-1", '"v4=-1" is not the price of a chip', "v5p=4.2"),
    (f"sweep {MLP} --mesh v4-8 --best-by price", "no chip has a price", "--price v5p=4.2"),
    (f"sweep {MLP} --mesh v4-8 --dim b=1,x", '"b=x" is not the size of a symbolic dimension', "b=256"),
    (f"sweep {MLP} --mesh v4-8 --dim b=1 --dim b=2", "b has two sizes, 1 and 2", "give one"),
    (f"partition {MLP} --mesh own.yaml", 'own.yaml:3: price is "cheap"', "4.2"),
)


@pytest.mark.parametrize(("command", "what", "hint"), WRONG)
def test_what_is_no_price(
    command: str,
    what: str,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(SPEC.format(chip="H100", price="cheap"))
    assert main(command.split()) == 2
    error, suggestion = capsys.readouterr().err.splitlines()
    assert what in error
    assert hint in suggestion


@pytest.mark.parametrize(("amount", "text"), [(0.01234, "0.0123"), (4.2, "4.20"), (1234.5, "1,230"), (99.96, "100.0")])
def test_prices_have_three_digits(amount: float, text: str) -> None:
    assert format_price(amount) == text


def token_step(embed: jax.Array, tokens: jax.Array) -> jax.Array:
    return jax.nn.softmax(embed[tokens] @ embed.T)


@pytest.mark.parametrize(("shape", "kind", "number"), [((16, 64), "tokens", 16 * 64), ((16,), "samples", 16)])
def test_a_report_prices_a_step_and_a_million_of_what_it_reads(
    shape: tuple[int, ...], kind: str, number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """8 chips at 2.5 an hour; a step has 16 sequences of 64 tokens, or 16 of one."""
    program, report = tmp_path / "step.mlir", tmp_path / "report.json"
    shapes = jax.ShapeDtypeStruct((512, 256), jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)
    program.write_text(jax.jit(token_step).lower(*shapes).as_text())
    options = ["--mesh", "h100-8", "--price", "h100=2.5", "--iterations", "20"]
    assert main(["partition", str(program), *options, "--json", str(report)]) == 0
    facts = json.loads(report.read_text())
    predicted = facts["predicted"]
    assert facts["mesh"]["hour_price"] == 20.0
    assert predicted["step_price"] == pytest.approx(20.0 / 3600 * predicted["step_seconds"])
    assert predicted["priced"] == kind
    assert predicted["million_price"] == pytest.approx(predicted["step_price"] * 1e6 / number)
    assert f"a million {kind}" in capsys.readouterr().out
    assert main(["compare", str(program), *options, "--json", "-"]) == 0
    contenders = json.loads(capsys.readouterr().out)["contenders"]
    assert contenders[0]["step_price"] == pytest.approx(20.0 / 3600 * contenders[0]["step_seconds"])
