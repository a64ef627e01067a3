"""The documentation against what it speaks of: links lead somewhere, commands and options exist, code is code."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml

from toast_cli.base.errors import SpecError
from toast_cli.cli.app import app, run
from toast_cli.cli.running import _PARSER_ERROR as PARSER_ERROR
from toast_cli.hardware import parse_spec

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)\s>]+)>?\)")
TOAST: Any = typer.main.get_command(app)

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in one of these languages ("" for none), in order."""
    return [text for _, language, text in FENCE.findall(page.read_text(encoding="utf-8")) if language in languages]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ +(.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(re.sub(r"`[^`]*`", "", prose(page)) + prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{target} does not exist"
        assert ROOT in there.parents, f"{target} lies outside the repository"
        if anchor:
            assert anchor in anchors(there), f"{target}: that page has {sorted(anchors(there))}"


def commands(script: str) -> Iterator[list[str]]:
    """The arguments of every toast command in a shell script."""
    for line in script.replace("\\\n", " ").splitlines():
        if not re.search(r"(^|[|&;(] *|\$ )toast ", line):
            continue
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        while "toast" in words:
            words = words[words.index("toast") + 1 :]
            end = next((k for k, word in enumerate(words) if re.fullmatch(r"[|&;<>()]+", word)), len(words))
            yield words[:end]


def command_named(words: list[str]) -> tuple[Any, list[str]]:
    """The command that these words name, and the words that are left for it."""
    command, rest = TOAST, list(words)
    while rest and rest[0] in getattr(command, "commands", ()):
        command = command.commands[rest.pop(0)]
    return command, rest


def parse(arguments: list[str]) -> None:
    """What the command line's parser says; nothing is run. Raises PARSER_ERROR."""
    command, rest = command_named(arguments)
    with command.make_context("toast", list(rest)) as context:
        if rest and not rest[0].startswith("-") and hasattr(command, "commands"):
            command.resolve_command(context, rest)


def check_options(words: list[str]) -> None:
    """For a command that leaves something out: it is there, and has the options named."""
    command, rest = command_named(words)
    assert not hasattr(command, "commands") or not rest or not rest[0].isalpha(), f"no such command: toast {words}"
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for option in (word.split("=")[0] for word in rest if word.startswith("--")):
        assert option in known | {"--help"}, f"toast {words} has no {option}"


@pages
def test_commands_parse(page: Path) -> None:
    for script in blocks(page, "sh", ""):
        for arguments in commands(script):
            check_options(arguments) if "…" in arguments else parse(arguments)


@pytest.mark.parametrize(
    "script",
    [
        "toast partiton x",
        "toast check x --max-mem 3",
        "x || toast sweep --no-such 3 # y",
        "toast mesh shwo",
        "toast compare",
    ],
)
def test_a_command_that_is_not_there_is_noticed(script: str) -> None:
    (arguments,) = commands(script)
    with pytest.raises(PARSER_ERROR):
        parse(arguments)


@pages
def test_commands_in_the_prose_exist(page: Path) -> None:
    for span in re.findall(r"`toast ([^`]+)`", prose(page)):
        check_options(span.split())


@pages
def test_python_is_python(page: Path) -> None:
    for code in blocks(page, "python"):
        ast.parse(code)


@pytest.mark.parametrize("name", ["rent", "largest-batch"])
def test_tables_of_sizes_are_recorded(name: str) -> None:
    """With the command that printed them."""
    recorded = (ROOT / "benchmarks" / "data" / "sizes.txt").read_text(encoding="utf-8")
    page = ROOT / "docs" / "howto" / f"{name}.md"
    assert all(table in recorded for table in blocks(page, ""))
    sweeps = [words for script in blocks(page, "sh") for words in commands(script)]
    assert sweeps == [words for words in commands(recorded) if words[1] in {sweep[1] for sweep in sweeps}]


def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its files are written as the page shows them, then its commands run in order, with short searches; what is no
    command of toast's runs in a process of its own, on virtual CPU devices."""
    page = ROOT / "docs" / "tutorial.md"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for code in blocks(page, "python"):
        name = re.match(r"# (\w+\.py)\n", code)
        assert name is not None, "which file is this?"
        Path(name[1]).write_text(code)
    said = ""
    for words in (shlex.split(line) for script in blocks(page, "sh") for line in script.splitlines()):
        if words[0] == "toast":
            assert run([*words[1:], *(("--iterations", "60") if words[1] == "partition" else ())]) == 0
            said += capsys.readouterr().out
        else:
            assert words[0] == "python"
            said += subprocess.run([sys.executable, *words[1:]], capture_output=True, check=True, text=True).stdout
    for told in ("data-parallel; weights", "step 2: loss", "verdict of XLA"):
        assert told in said
    shown = blocks(page, "")[-1].splitlines()
    assert [line for line in shown if line not in said] == [], "the decisions that the page shows"


@pytest.fixture(scope="module")
def make_schema() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "docs"))
    yield importlib.import_module("make_schema")
    sys.path.remove(str(ROOT / "docs"))


def test_schemas_are_up_to_date(make_schema: Any) -> None:
    for path, content in make_schema.contents().items():
        assert path.read_text(encoding="utf-8") == content, "run docs/make_schema.py"


def mesh_validator() -> Any:
    return jsonschema.Draft202012Validator(
        json.loads((ROOT / "docs" / "schema" / "mesh-spec.schema.json").read_bytes())
    )


def mesh_specs() -> list[str]:
    ready = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "toast_cli/hardware/specs").glob("*.yaml"))]
    shown = [text for page in PAGES for text in blocks(page, "yaml") if re.search("^chip:", text, re.MULTILINE)]
    return [*ready, *shown]


@pytest.mark.parametrize("text", mesh_specs())
def test_specifications_are_read_and_as_the_schema_says(text: str) -> None:
    assert parse_spec(text, "page.yaml").devices
    mesh_validator().validate(yaml.safe_load(text))


# One unknown key in every section; the reader's hint names the keys that there are.
UNKNOWN = [
    ("chip: v4\nx_y: 1\n", ()),
    ("chip: {preset: v4, x_y: 1}\n", ("chip",)),
    ("chip: {preset: v4, matrix_flops: {x_y: 1}}\n", ("chip", "matrix_flops")),
    ("chip: v4\ntopology: {torus: [2], x_y: 1}\n", ("topology",)),
    ("chip: v3\ntopology: {torus: [2], core: {x_y: 1}}\n", ("topology", "core")),
    ("chip: v4\ntopology: {torus: [2], link: {x_y: 1}}\n", ("topology", "link")),
    ("chip: H100\ntopology: {switch: {size: 8, x_y: 1}}\n", ("topology", "switch")),
    ("chip: H100\ntopology: {switch: 8, network: {hosts: 2, x_y: 1}}\n", ("topology", "network")),
    ("chip: v4\ntopology: {torus: [2]}\naxes: {data: {size: 2, x_y: 1}}\n", ("axes", "data")),
]


@pytest.mark.parametrize(("text", "section"), UNKNOWN, ids=[".".join(section) for _, section in UNKNOWN])
def test_the_schema_and_the_reader_know_the_same_keys(text: str, section: tuple[str, ...]) -> None:
    validator = mesh_validator()
    part = validator.schema
    for key in section:
        part = part.get("properties", {}).get(key) or part["additionalProperties"]
        part = next((option for option in part.get("anyOf", ()) if option["type"] == "object"), part)
    with pytest.raises(SpecError, match="x_y") as caught:
        parse_spec(text, "page.yaml")
    assert set(caught.value.hint.split("allowed: ")[1].split(", ")) == set(part["properties"])
    assert not validator.is_valid(yaml.safe_load(text))
    assert validator.is_valid(yaml.safe_load(re.sub(r"(, |\n|)x_y: 1", "", text)))


def test_reports_are_as_the_schema_says(tmp_path: Path) -> None:
    schema = json.loads((ROOT / "docs" / "schema" / "report.schema.json").read_bytes())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    target = tmp_path / "report.json"
    program = str(ROOT / "sample_models" / "mlp_tiny.mlir")
    limits = ("--subject-to", "peak_memory<=1GiB", "--strategy", "fsdp")
    code = run(["partition", program, "--mesh", "v4-32", "--quiet", "--json", str(target), *limits])
    assert code == 0
    report = json.loads(target.read_bytes())
    validator.validate(report)
    assert report["plan"]["decisions"] and report["goal"]["bounds"] and report["arguments"]
    for place, wrong in (("schema", "toast.report/2"), ("plan", []), ("arguments", [{"index": "first"}])):
        with pytest.raises(jsonschema.ValidationError):
            validator.validate({**report, place: wrong})
    del report["predicted"]["peak_bytes"]
    with pytest.raises(jsonschema.ValidationError, match="peak_bytes"):
        validator.validate(report)


def test_the_schema_has_the_fields_that_the_page_describes() -> None:
    schema = json.loads((ROOT / "docs" / "schema" / "report.schema.json").read_bytes())
    page = (ROOT / "docs" / "reference" / "json.md").read_text(encoding="utf-8")
    described = set(re.findall(r"`(\w+)`", page.split("# The JSON of a check")[0]))
    kinds = [schema, *schema["$defs"].values()]
    assert {name for kind in kinds for name in kind["properties"]} - described == set()


@pytest.fixture(scope="module")
def site_hooks() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "docs"))
    yield importlib.import_module("site_hooks")
    sys.path.remove(str(ROOT / "docs"))


def test_every_page_is_in_the_sites_navigation() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]

    def listed(part: Any) -> Iterator[str]:
        if isinstance(part, str):
            yield part
        else:
            for entry in part.values() if isinstance(part, dict) else part:
                yield from listed(entry)

    found = sorted(listed(nav))
    written = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert found == sorted([*written, "reference/options.md"]), "list new pages in mkdocs.yml"


def test_the_site_has_every_commands_help(site_hooks: Any) -> None:
    page = site_hooks.options_page()
    for words in ("toast", "toast partition", "toast check", "toast mesh", "toast mesh show"):
        assert f"\n## {words}\n" in page
    assert "| `--max-step-time SECONDS` | Longest step time allowed" in page
    assert "\ntoast mesh show NAME [OPTIONS]\n" in page


def quick_commands() -> list[tuple[str, ...]]:
    """Of all pages, the commands that only look, at the built-in specifications or at a small sample model."""
    found = {tuple(words) for page in PAGES for script in blocks(page, "sh", "") for words in commands(script)}
    looking = [words for words in found if words[:1] in {("mesh",), ("tactics",), ("inspect",)} and "…" not in words]
    return sorted(
        w for w in looking if all("." not in word or ("_tiny" in word and (ROOT / word).exists()) for word in w)
    )


def test_there_are_quick_commands() -> None:
    assert len(quick_commands()) >= 4


@pytest.mark.parametrize("words", quick_commands(), ids=" ".join)
def test_quick_commands_run(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert run(list(words)) == 0


def test_contributing_lists_every_folder() -> None:
    listed = set(re.findall(r"`(\w+)/`", prose(ROOT / "CONTRIBUTING.md").split("House rules")[0]))
    there = {path.parent.name for path in (ROOT / "toast_cli").glob("*/__init__.py")}
    assert there - listed == set()


def test_files_that_contributing_names_are_there() -> None:
    named = re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", prose(ROOT / "CONTRIBUTING.md"))
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists() and not (ROOT / "toast_cli" / name).exists()] == []


# What the pages below take as given.
GIVEN = """
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 16)
from toast_cli.search import run
run.PLANS.update({effort: plans // 10 for effort, plans in run.PLANS.items()})  # as in conftest.py

def train_step(params, opt_state, batch):
    def loss(p):
        return jnp.mean((jnp.tanh(batch @ p["up"]) @ p["down"]) ** 2)
    value, gradients = jax.value_and_grad(loss)(params)
    opt_state = jax.tree.map(lambda m, g: 0.9 * m + g, opt_state, gradients)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, opt_state), opt_state, value

params = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))}
opt_state = jax.tree.map(jnp.zeros_like, params)
batch = jnp.ones((32, 64))
"""
# What the commands between them write.
PARTITIONED = """
import toast_partitioner as toast
toast.partition("model.mlir", "v4-32", iterations=100).save("sharded.mlir")
"""
# Arrays of the kind that the pages begin with: nobody has said where they lie.
AFRESH = "params, opt_state, batch = jax.tree.map(lambda a: jnp.asarray(jax.device_get(a)), (params, opt_state, batch))"


def test_python_on_the_pages_runs(tmp_path: Path) -> None:
    """The README's and python.md's, in order, with a training step of the kind that they speak of, on 16 virtual CPU
    devices.
    """
    readme, page = (blocks(path, "python") for path in (ROOT / "README.md", ROOT / "docs" / "howto" / "python.md"))
    assert (len(readme), len(page)) == (2, 3)
    code = [readme[0], PARTITIONED, readme[1], AFRESH, *page[:2], AFRESH, page[2]]
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join([GIVEN, *code, "assert fast.plan and plan.fits and jnp.isfinite(loss)"])],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        encoding="utf-8",
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "model.mlir").stat().st_size > 0


@pages
def test_lists_are_lists_on_the_site_too(page: Path) -> None:
    """GitHub lets a list follow a line of text; the site's Markdown wants an empty line between."""
    for before, line in pairwise(prose(page).splitlines()):
        if re.match(r"([-*]|\d+\.) ", line):
            assert not before or re.match(r"([-*]|\d+\.) |  ", before), f"an empty line is missing before {line!r}"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


HOW_TO = [ROOT / "docs" / "howto" / f"{name}.md" for name in ("another-platform", "kernels", "several-hosts")]


@pytest.mark.thorough
@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.stem)
def test_the_how_to_pages_run(page: Path, tmp_path: Path) -> None:
    """With the tutorial's model, saved as it says; on 8 virtual CPU devices."""
    tutorial = blocks(ROOT / "docs" / "tutorial.md", "python")[:2]
    for code in (*tutorial, *blocks(page, "python")):
        name = re.match(r"# (\w+\.py)\n", code)
        assert name is not None, "which file is this?"
        (tmp_path / name[1]).write_text(code.replace("localhost:8476", f"localhost:{free_port()}"))
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, arguments in (("python", ""), ("toast", "-m toast_cli")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    ran = subprocess.run(
        ["sh", "-ec", "\n".join(["python save.py", *blocks(page, "sh")])],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": os.pathsep.join((str(programs), os.environ["PATH"])),
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        },
        capture_output=True,
        encoding="utf-8",
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_readme_names_the_two_commands_of_a_fresh_clone() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "`make demo`" in text and "`make test`" in text
