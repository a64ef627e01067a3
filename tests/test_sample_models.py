"""The stored sample programs are what their scripts make, and their tiny twins train and decode."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import zstandard  # noqa: E402
from sweeps import sweep  # noqa: E402

common = import_module("sample_models.common")
make = import_module("sample_models.make")

SAMPLES: dict[str, Any] = make.samples()
TINY = [name for name in SAMPLES if name.endswith("_tiny")]
FULL = [name for name in SAMPLES if name not in TINY]

FILE_LIMIT, FOLDER_LIMIT = 600_000, 6_000_000  # bytes


def twin(name: str) -> str:
    return name.removesuffix("_train") + "_tiny"


def main_of(module: Any) -> Any:
    return next(op for op in module.body.operations if op.attributes["sym_name"].value == "main")


def argument_types(module: Any) -> list[str]:
    return [str(kind) for kind in main_of(module).type.inputs]


# ---------------------------------------------------------------- what is stored


def test_the_folder_holds_the_samples_and_nothing_else() -> None:
    stored = {path for path in common.FOLDER.iterdir() if path.is_file() and path.suffix not in (".py", ".md")}
    assert stored == {sample.path for sample in SAMPLES.values()}


def test_stored_files_are_small() -> None:
    sizes = {name: sample.path.stat().st_size for name, sample in SAMPLES.items()}
    assert max(sizes.values()) < FILE_LIMIT, sizes
    assert sum(sizes.values()) < FOLDER_LIMIT


@pytest.mark.parametrize("name", SAMPLES)
def test_locations_name_the_scripts_and_no_machine(name: str) -> None:
    data = SAMPLES[name].path.read_bytes()
    plain = data if SAMPLES[name].form == "text" else zstandard.ZstdDecompressor().decompress(data)
    files = set(re.findall(rb'[^\x00-\x1f"\x7f-\xff]+\.py\b', plain))
    assert files
    assert all(re.fullmatch(rb"(sample_models|jax/experimental/pallas/ops/tpu)/\w+\.py", file) for file in files), files
    assert str(Path.home()).encode() + b"/" not in plain
    assert str(ROOT).encode() not in plain


@pytest.mark.parametrize("name", sweep(SAMPLES, *TINY))
def test_stored_arguments_are_those_of_the_script(name: str) -> None:
    """Types in order, donation, and every argument and result named after its place in the tree."""
    sample, module = SAMPLES[name], common.read(SAMPLES[name])
    arguments = sample.arguments()
    leaves, _ = jax.tree_util.tree_flatten_with_path(arguments)
    entry = main_of(module)
    shapes = [[int(size) for size in re.findall(r"(\d+)x", kind)] for kind in argument_types(module)]
    assert shapes == [list(leaf.shape) for _, leaf in leaves]
    named = [str(argument.location) for argument in entry.regions[0].blocks[0].arguments]
    assert all(jax.tree_util.keystr(path[1:]) in text for (path, _), text in zip(leaves, named, strict=True))
    assert "params['" in named[0]
    assert all("jax.result_info" in result for result in entry.attributes["res_attrs"])
    donated = ["tf.aliasing_output" in argument for argument in entry.attributes["arg_attrs"]]
    assert donated == [path[0].idx in sample.donate for path, _ in leaves]


@pytest.mark.parametrize("name", sweep(TINY, "mlp_tiny", "moe_tiny", "itx_decode_tiny"))
def test_tiny_programs_are_what_their_scripts_make_now(name: str) -> None:
    """Another JAX than that of the stored programs lowers some functions to other ops: there types alone count."""
    stored, made = common.read(SAMPLES[name]), common.lower(SAMPLES[name])
    assert argument_types(stored) == argument_types(made)
    assert jax.__version__ != common.LOWERED_WITH or common.histogram(stored) == common.histogram(made)


def test_samples_are_written_with_the_jax_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version__", "0.9.0")
    with pytest.raises(SystemExit, match=r"lowered with JAX [\d.]+, this is 0\.9\.0: install it, or set LOWERED_WITH"):
        common.write(SAMPLES["mlp_tiny"])


@pytest.mark.parametrize("name", [name for name in FULL if name != "flash_train"])  # which runs on TPUs only
def test_a_twin_uses_the_same_kinds_of_op(name: str) -> None:
    full, tiny = (common.histogram(common.read(SAMPLES[which])) for which in (name, twin(name)))
    assert set(full) == set(tiny)


def test_every_form_is_stored() -> None:
    assert {sample.form for sample in SAMPLES.values()} == set(common.ENDINGS)


def test_lowering_leaves_the_configuration_alone() -> None:
    before = {name: getattr(jax.config, name) for name in common.LOCATIONS}
    common.lower(SAMPLES["mlp_tiny"])
    assert before == {name: getattr(jax.config, name) for name in common.LOCATIONS}


# ---------------------------------------------------------------- the table and the command


@pytest.mark.thorough
def test_the_documentation_lists_every_sample_as_it_is() -> None:
    assert make.table() in (ROOT / "sample_models" / "README.md").read_text()


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match=r"no sample t3b; there are t2b_train, "):
        make.chosen(["t3b"])


# ---------------------------------------------------------------- the twins run


@pytest.mark.parametrize("name", sweep(["block_tiny", "mlp_tiny", "rnn_tiny", "ssm_tiny"], "mlp_tiny"))
def test_a_tiny_training_step_learns_its_batch(name: str) -> None:
    sample = SAMPLES[name]
    arguments = sample.init(jax.random.key(0))
    step = jax.jit(sample.step, donate_argnums=sample.donate)
    losses = []
    for _ in range(5):
        *state, loss = step(*arguments)
        arguments = (*state, *arguments[len(state) :])
        losses.append(float(loss))
    assert all(map(isfinite, losses))
    assert losses == sorted(losses, reverse=True)


def test_decoding_goes_on_from_prefill() -> None:
    """The loop's first token is what the logits of a prefill one token longer say."""
    prefill, decode = SAMPLES["itx_prefill_tiny"], SAMPLES["itx_decode_tiny"]
    params, cache, prompt = prefill.init(jax.random.key(0))
    cache, logits = jax.jit(prefill.step)(params, cache, prompt)
    token = logits.argmax(-1).astype("int32")
    _, written = jax.jit(decode.step)(params, cache, token, jax.numpy.int32(prompt.shape[1]))
    assert written.shape == (prompt.shape[0], 4)
    longer = jax.numpy.concatenate([prompt, token[:, None]], axis=1)
    again = jax.jit(prefill_of(longer.shape[1]).step)(params, prefill.init(jax.random.key(0))[1], longer)[1]
    assert (again.argmax(-1) == written[:, 0]).mean() > 0.9  # bfloat16 ties may fall either way


def prefill_of(prompt: int) -> Any:
    itx = import_module("sample_models.itx")
    return itx.prefill_sample("itx_longer", "", replace(itx.TINY, prompt=prompt))
