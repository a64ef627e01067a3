"""Programs of pipeline stages as plain data, and their files: StableHLO of each program, `schedule.json`, and all as
one module of Shardy's MPMD dialect (`pipeline.mpmd.mlir`), which Pathways runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from toast_cli.base.errors import InputError, UsageError
from toast_cli.base.files import PROGRAM_BYTES, read_file, read_json, typed
from toast_cli.frontend.constraints import quoted
from toast_cli.frontend.places import place_text

BEFORE, FORWARD, BACKWARD, AFTER = "before", "forward", "backward", "after"
INDEX = "microbatch"  # the argument of programs that read the microbatch's number


@dataclass(frozen=True)
class StageValue:
    """An array that programs of stages exchange. sharding: per dimension the axes of a stage's mesh, major to minor.
    each: there is one for each microbatch."""

    shape: tuple[int, ...]
    dtype: str
    sharding: tuple[tuple[str, ...], ...]
    each: bool


@dataclass(frozen=True)
class StageProgram:
    """A program of one stage: `text` is StableHLO with shardings, `function` the same of MPMD. arguments, results:
    names of values, or `INDEX`; a sum over microbatches is both. donated: arguments, by number, whose buffers results
    reuse."""

    name: str
    stage: int
    phase: str
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    donated: tuple[int, ...]
    text: bytes = b""
    function: str = ""


@dataclass(frozen=True)
class ScheduleStep:
    """One step of the schedule: `program` runs on its stage, or, where that is empty, `value` is sent from stage
    `source` to `target`. microbatch: -1 outside the loop."""

    microbatch: int
    program: str = ""
    value: str = ""
    source: int = -1
    target: int = -1


@dataclass(frozen=True)
class StagedArray:
    """An argument or a result of the step, by its path there (empty if unknown): names of values, and the stage that
    has each. Several values are equal parts along a dimension."""

    path: str
    values: tuple[str, ...]
    stages: tuple[int, ...]
    dim: int = 0
    donated: bool = False


@dataclass(frozen=True)
class StagedProgram:
    """A step in programs of stages. mesh, stage_mesh: axis -> size, in order; the stages are along `axis`. devices: of
    each stage, numbered along the mesh, the last axis first. arguments, results: those of the step, in order. steps:
    each behind those that it needs; stages run theirs at the same time."""

    name: str
    axis: str
    mesh: dict[str, int]
    stage_mesh: dict[str, int]
    devices: tuple[tuple[int, ...], ...]
    microbatches: int
    schedule: str
    values: dict[str, StageValue]
    programs: tuple[StageProgram, ...]
    arguments: tuple[StagedArray, ...]
    results: tuple[StagedArray, ...]
    steps: tuple[ScheduleStep, ...]

    def key(self, value: str, microbatch: int, stage: int) -> tuple[str, int, int]:
        """What a value is on a stage: that of a microbatch, or (-1) the only one."""
        return value, microbatch if self.values[value].each else -1, stage


def refusal(reason: str, location: Any = "", hint: str = "leave out -o for the price alone") -> UsageError:
    """The error for a program that cannot be cut. location: of the op concerned."""
    place = place_text(str(location), "")
    return UsageError(f"{reason}{f', at {place}' if place else ''}", where="--pipeline", hint=hint)


# ---------------------------------------------------------------- files

SCHEMA = "toast.stages/1"
SCHEDULE, MPMD = "schedule.json", "pipeline.mpmd.mlir"


def stage_files(staged: StagedProgram) -> dict[str, bytes]:
    """File name -> content."""
    texts = {f"{program.name}.mlir": program.text for program in staged.programs}
    facts = {"schema": SCHEMA, "files": [SCHEDULE, MPMD, *texts], **asdict(staged)}
    for program in facts["programs"]:
        del program["text"], program["function"]
    return {SCHEDULE: json.dumps(facts, indent=1).encode(), MPMD: "".join(_mpmd_lines(staged)).encode(), **texts}


def read_stages(folder: Path) -> StagedProgram:
    """The programs of a folder that `stage_files` were written to. Raises `InputError`."""
    hint = "give a folder that `toast partition --pipeline … -o FOLDER/` wrote"
    path = str(folder / SCHEDULE)
    facts = read_json(path, hint)
    try:
        if not isinstance(facts, dict) or facts.get("schema") != SCHEMA:
            raise ValueError(f"it is not of the schema {SCHEMA}")
        staged: StagedProgram = typed(StagedProgram, facts, "the schedule")
    except (ValueError, TypeError) as error:
        raise InputError(f"is no schedule of stages: {error}", where=path, hint=hint) from None
    programs = [
        replace(p, text=read_file(str(folder / f"{p.name}.mlir"), PROGRAM_BYTES, hint=hint)) for p in staged.programs
    ]
    return replace(staged, programs=tuple(programs))


def _mpmd_lines(staged: StagedProgram) -> Iterator[str]:
    """The module: `main` calls the programs in the schedule's order and sends values, functions follow. Numbers of
    microbatches are results of programs of their own."""
    axes = ", ".join(f"{quoted(name)}={size}" for name, size in staged.stage_mesh.items())
    meshes = ", ".join(f'<"stage_{stage}" : <[{axes}]>>' for stage in range(len(staged.devices)))

    def kind(name: str, stage: int) -> str:
        value = staged.values[name]
        tensor = "x".join([*map(str, value.shape), value.dtype])
        split = ", ".join("{" + ", ".join(map(quoted, names)) + "}" for names in value.sharding)
        return f'!mpmd.mesh_tensor<"stage_{stage}", tensor<{tensor}>, sharding=<@mesh, [{split}]>>'

    texts: dict[tuple[str, int, int], str] = {}  # (value, microbatch, stage) -> its name in the text
    arguments = [(*part, a.donated) for a in staged.arguments for part in zip(a.values, a.stages, strict=True)]
    left = [part for result in staged.results for part in zip(result.values, result.stages, strict=True)]
    ins = []
    for number, (value, stage, donated) in enumerate(arguments):
        texts[value, -1, stage] = f"%arg{number}"
        ins.append(f"%arg{number}: {kind(value, stage)}" + (" {jax.buffer_donor = true}" if donated else ""))
    outs = ", ".join(kind(*part) for part in left)
    topology = f"topology = #mpmd.topology<{meshes}>"
    yield f"module @{quoted(staged.name)} {{\n  sdy.mesh @mesh = <[{axes}]>\n"
    yield f"  func.func public @main({', '.join(ins)}) -> ({outs}) attributes {{{topology}}} {{\n"
    programs = {program.name: program for program in staged.programs}

    for number, step in enumerate(staged.steps):
        if not step.program:
            source = texts[step.value, step.microbatch, step.source]
            texts[step.value, step.microbatch, step.target] = f"%{number}"
            source_type, target_type = kind(step.value, step.source), kind(step.value, step.target)
            yield f"    %{number} = mpmd.transfer {source} : ({source_type}) -> {target_type}\n"
            continue
        program = programs[step.program]
        mesh, read = f'mesh="stage_{program.stage}"', []
        for name in program.arguments:
            if name == INDEX:
                read.append(f"%index{number}")
                call = f"mpmd.fragment_call<{mesh}, origin=[]> @number_{step.microbatch}()"
                yield f"    %index{number} = {call} : () -> {kind(INDEX, program.stage)}\n"
            else:
                read.append(texts[staged.key(name, step.microbatch, program.stage)])
        several = len(program.results) > 1
        for place, name in enumerate(program.results):
            texts[staged.key(name, step.microbatch, program.stage)] = f"%{number}" + (f"#{place}" if several else "")
        types = (
            ", ".join(kind(name, program.stage) for name in names) for names in (program.arguments, program.results)
        )
        origin = f'"stage_{program.stage}"' + ("(1)" if program.phase == BACKWARD else "")
        call = f"mpmd.fragment_call<{mesh}, origin=[{origin}]> @{program.name}({', '.join(read)})"
        yield f"    %{number}{f':{len(program.results)}' if several else ''} = {call} : "
        yield "({}) -> ({})\n".format(*types)
    names = ", ".join(texts[value, -1, stage] for value, stage in left)
    yield f"    return {names} : {outs}\n  }}\n"
    for microbatch in range(staged.microbatches) if INDEX in staged.values else ():
        tensor = f"tensor<{staged.values[INDEX].dtype}>"
        yield f"  func.func @number_{microbatch}() -> {tensor} attributes {{mesh_shape = #sdy.mesh<[{axes}]>}} {{\n"
        yield f"    %0 = stablehlo.constant dense<{microbatch}> : {tensor}\n    return %0 : {tensor}\n  }}\n"
    yield from (f"{program.function}\n" for program in staged.programs)
    yield "}\n"
