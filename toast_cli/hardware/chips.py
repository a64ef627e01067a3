"""Chip presets: a name in, the published figures of one device and of the wires between devices out.

`chips.toml` has the figures, each beside its source: a new chip is a new table there.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from toast_cli.errors import SpecError
from toast_cli.hardware.model import Chip, GpuDeviceInfo


@dataclass(frozen=True, slots=True)
class Wire:
    """One kind of connection: bandwidth per device in one direction, latency of one hop or message."""

    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, slots=True)
class Preset:
    """A chip with the known properties of its machines.

    Attributes:
        chip: figures of one device.
        devices_per_host, devices_per_chip: how XLA's devices are packed.
        wires: the kinds of connections, innermost first: "core" (between the devices of one chip, if it has several),
            "link" (a device's share of one torus link, or its link to the switch) and "network" (a device's share of
            its host's or slice's network).
        sources: wire -> where its figures were published.
        torus_rank: torus dimensions of the interconnect, 0 if a switch connects the devices.
        pod_chips: largest slice on one torus, in chips; 0 without a torus.
        wrap_edge: a torus dimension of exactly this many chips has wraparound; 0: every dimension has it when all are
            multiples of 4 (slices made of whole 4x4x4 cubes), none otherwise.
        megacore: XLA counts the two cores of a TPU as one device. device_info: properties of a GPU for its compiler.
        device_kind: what `jax.Device.device_kind` says.
    """

    chip: Chip
    devices_per_host: int
    wires: dict[str, Wire]
    sources: dict[str, str]
    devices_per_chip: int = 1
    torus_rank: int = 0
    pod_chips: int = 0
    wrap_edge: int = 0
    megacore: bool = False
    device_info: GpuDeviceInfo | None = None
    device_kind: str = ""


def presets() -> list[Preset]:
    """All presets, oldest first."""
    return list(_PRESETS.values())


def chip_names() -> list[str]:
    """Names of all presets, oldest first."""
    return list(_PRESETS)


def find_preset(name: str, *, where: str = "") -> Preset:
    """The preset of that name, in any case. Raises SpecError that lists the valid names and the nearest."""
    for known, preset in _PRESETS.items():
        if known.lower() == name.lower():
            return preset
    near = difflib.get_close_matches(name.lower(), [known.lower() for known in _PRESETS], n=1)
    guess = f'did you mean "{next(k for k in _PRESETS if k.lower() == near[0])}"? ' if near else ""
    raise SpecError(f'unknown chip "{name}"', where=where, hint=f"{guess}known: {', '.join(_PRESETS)}")


def matrix_rate(chip: Chip, dtype: str) -> float:
    """Peak FLOP/s of the matrix unit for operands of an MLIR element type (`bf16`, `f8E4M3FN`, `ui8`, `complex<f32>`).

    A type the chip does not list runs at the rate of the next wider one it does; one wider than all of them, at the
    rate of the widest times the ratio of the widths.
    """
    kind = _kind(dtype)
    if kind in chip.matrix_flops:
        return chip.matrix_flops[kind]
    bits = _bits(kind)
    wider = [known for known in chip.matrix_flops if _bits(known) > bits]
    if wider:
        narrowest = min(_bits(known) for known in wider)
        return max(chip.matrix_flops[known] for known in wider if _bits(known) == narrowest)
    widest = max(chip.matrix_flops, key=_bits)
    return chip.matrix_flops[widest] * _bits(widest) / bits


def _kind(dtype: str) -> str:
    """The key of `Chip.matrix_flops` an MLIR element type belongs to."""
    text = dtype.removeprefix("complex<").rstrip(">")
    if text.startswith("f8"):
        return "f8"
    return "i8" if text in ("ui8", "i1", "pred", "i4", "ui4", "i2", "ui2") else text.removeprefix("u")


def _bits(kind: str) -> int:
    digits = re.search(r"\d+", kind)
    return int(digits[0]) if digits else 32


def _read_presets() -> dict[str, Preset]:
    text = (files("toast_cli.hardware") / "chips.toml").read_text("utf-8")
    return {name: _preset(name, keys) for name, keys in tomllib.loads(text).items()}


def _preset(name: str, keys: dict[str, Any]) -> Preset:
    """The preset of one table: figures are [value, source], wires [bytes per second, latency, source]."""
    figures = {key: value for key, value in keys.items() if isinstance(value, list) and len(value) == 2}
    wires = {key: value for key, value in keys.items() if isinstance(value, list) and len(value) == 3}
    packing: dict[str, Any] = {key: keys[key] for key in keys.keys() - {*figures, *wires, "platform", "device_info"}}
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, (value, _) in figures.items()
    }
    sources = {key: source for key, (_, source) in figures.items()}
    chip = Chip(name, keys["platform"], sources=sources, preset=name, **values)
    device_info = keys.get("device_info")
    return Preset(
        chip,
        wires={key: Wire(rate, latency) for key, (rate, latency, _) in wires.items()},
        sources={key: source for key, (_, _, source) in wires.items()},
        device_info=GpuDeviceInfo(**{**device_info, "capability": tuple(device_info["capability"])})
        if device_info
        else None,
        **packing,
    )


_PRESETS = _read_presets()
