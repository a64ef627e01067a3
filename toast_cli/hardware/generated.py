"""Generates specifications from names: `v5p-512`, `h100:64`, `2xv5p-512` in, the YAML of that machine out.

TPUs have Google Cloud's names and slices; GPUs come in hosts of eight.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import isqrt, prod

from toast_cli.errors import SpecError
from toast_cli.hardware.axis_links import divisors
from toast_cli.hardware.chips import Preset, presets
from toast_cli.hardware.schema import MOST_DEVICES

_NAME = re.compile(
    r"(?:(?P<slices>\d{1,7})x)?(?P<chip>[a-z]\w*(?:-[48]0)?)(?P<joint>[-:])(?P<count>\d{1,9})", re.IGNORECASE
)
# Aliases of presets: `gcloud compute tpus accelerator-types list`; NVIDIA sells most A100 with 80 GB.
_ALIASES = {"v5litepod": "v5e", "a100": "a100-80"}
# Chips of Google Cloud's slices with a 2D torus (Cloud TPU docs, "TPU v2", "v3", "v5e", "v6e").
PLANES = {
    "v2": (4, 16, 64, 128, 256),
    "v3": (4, 16, 32, 64, 128, 256, 512, 1024),
    "v5e": (1, 4, 8, 16, 32, 64, 128, 256),
    "v6e": (1, 4, 8, 16, 32, 64, 128, 256),
}
# Chips of slices with a 3D torus smaller than a cube of 4x4x4 chips; a larger slice is any number of cubes (Cloud TPU
# docs, "TPU v4", "v5p", "TPU7x").
_LESS_THAN_A_CUBE, _CUBE = (4, 8, 16, 32), 64


def canonical(name: str) -> str:
    """The name that a report shows: `H100:64` is `h100-64`, `v5litepod-16` is `v5e-16`."""
    matched = _NAME.fullmatch(name)
    if matched is None:
        return name
    chip = matched["chip"].lower()
    slices = f"{int(matched['slices'])}x" if int(matched["slices"] or 1) != 1 else ""
    return f"{slices}{'v5e' if chip == 'v5litepod' else chip}-{int(matched['count'])}"


def machine_name(kind: str, devices: int, slices: int) -> str | None:
    """The name of the machine that has these devices; None for a kind (`jax.Device.device_kind`) without a preset."""
    preset = next((preset for preset in presets() if preset.device_kind == kind), None)
    if preset is None:
        return None
    if not preset.torus_rank:
        return f"{preset.chip.name}:{devices}"
    number = devices // slices // preset.devices_per_chip * _cores(preset)
    return f"{f'{slices}x' if slices > 1 else ''}{preset.chip.name}-{number}"


def generate(name: str) -> str | None:
    """YAML of the machine; None for other names. Raises SpecError for a number of chips that no slice has."""
    matched = _NAME.fullmatch(name)
    chip = matched["chip"].lower() if matched else ""
    preset = next((one for one in presets() if one.chip.name.lower() == _ALIASES.get(chip, chip)), None)
    if matched is None or preset is None:
        return None
    count, slices = int(matched["count"]), int(matched["slices"] or 1)
    if preset.torus_rank and matched["joint"] == ":":
        raise _error(name, "TPU slices use Google Cloud's names, with a dash", f"write {chip}-{count}")
    if not slices or count * slices > MOST_DEVICES:
        raise _error(name, f"a machine has 1 to {MOST_DEVICES:,} devices", "give other numbers")
    head = f"name: {canonical(name)}\nchip: {preset.chip.name}\n"
    return head + (_tpu(name, preset, count, slices) if preset.torus_rank else _gpu(name, preset, count, slices))


def _tpu(name: str, preset: Preset, count: int, slices: int) -> str:
    """The YAML after name and chip, for slices of a TPU."""
    cores = _cores(preset)
    chips = count // cores
    sizes = _slice_chips(preset)
    if count % cores or chips not in sizes:
        near = [max((n for n in sizes if n <= chips), default=0), min((n for n in sizes if n > chips), default=0)]
        unit = "TensorCores, two a chip" if cores == 2 else "chips"
        nearest = ", ".join(f"{preset.chip.name}-{n * cores}" for n in near if n)
        raise _error(
            name, f"{preset.chip.name} has no slice of that size (the number counts {unit})", f"nearest: {nearest}"
        )
    torus = slice_torus(preset, chips)
    within = [preset.devices_per_chip, *torus]
    size = f"{chips} chip{'s' if chips > 1 else ''}"
    kind = preset.chip.name if preset.chip.name.startswith("tpu") else f"TPU {preset.chip.name}"
    about = f"{kind} slice, {size}" if slices == 1 else f"{slices} {kind} slices of {size}"
    network = f"  network: {{slices: {slices}}}\n" if slices > 1 else ""
    return f"description: {about}\ntopology:\n  torus: {list(torus)}\n{network}" + _axes(within, prod(within) * slices)


def _gpu(name: str, preset: Preset, count: int, slices: int) -> str:
    """The YAML after name and chip, for hosts of GPUs."""
    host = min(count, preset.devices_per_host)
    if not count or count % host:
        whole = count - count % preset.devices_per_host
        near = [f"{canonical(name).rpartition('-')[0]}-{n}" for n in (whole, whole + preset.devices_per_host) if n]
        raise _error(
            name, f"{count} GPUs do not fill hosts of {preset.devices_per_host}", f"nearest: {', '.join(near)}"
        )
    hosts = count // host * slices
    about = f"{host * hosts} x {preset.chip.name} in {hosts} host{'s' if hosts > 1 else ''}, NVLink inside"
    network = f"  network: {{hosts: {hosts}}}\n" if hosts > 1 else ""
    axes = f"axes: {{data: {hosts}, model: {host}}}\n" if hosts > 1 else _axes(divisors(host), host)
    head = f"description: {about}{', the network between' if hosts > 1 else ''}\ntopology:\n  switch: {host}\n{network}"
    # As in the built-in specifications: JAX takes 75 % by default, XLA_PYTHON_CLIENT_MEM_FRACTION sets it.
    return f"{head}{axes}memory_fraction: 0.9\n"


def _cores(preset: Preset) -> int:
    """TensorCores of a chip, which names of slices count: two on v2, v3, v4, v5p and TPU7x, one on v5e and v6e."""
    return 2 if preset.megacore or preset.devices_per_chip == 2 else 1


def _slice_chips(preset: Preset) -> tuple[int, ...]:
    """The numbers of chips of a preset's slices, ascending."""
    return PLANES.get(preset.chip.name) or (*_LESS_THAN_A_CUBE, *range(_CUBE, preset.pod_chips + 1, _CUBE))


def slice_torus(preset: Preset, chips: int) -> tuple[int, ...]:
    """Chips along each dimension of the standard slice, the one that is nearest to a square or cube, made of 4x4x4
    cubes if possible. Dimensions of one chip are last."""
    edge = 4 if preset.torus_rank == 3 and chips % _CUBE == 0 else 1
    box = min(_boxes(chips // edge**3, preset.torus_rank), key=sum)
    return tuple(sorted((side * edge for side in box), key=lambda side: (side == 1, side)))


def _boxes(volume: int, rank: int) -> Iterator[tuple[int, ...]]:
    """Every box of this volume."""
    if rank == 1:
        yield (volume,)
        return
    for side in divisors(volume):
        yield from ((side, *rest) for rest in _boxes(volume // side, rank - 1))


def _axes(within: list[int], devices: int) -> str:
    """Axes that divide no dimension: the model axis is the largest product of dimensions `within` a slice that is no
    larger than the data axis."""
    products = {1}
    for size in within:
        products |= {product * size for product in products}
    model = max(product for product in products if product <= isqrt(devices))
    return f"axes: {{data: {devices // model}, model: {model}}}\n" if model > 1 else f"axes: {{data: {devices}}}\n"


def _error(name: str, what: str, hint: str) -> SpecError:
    return SpecError(f'no mesh specification "{name}": {what}', hint=hint)
