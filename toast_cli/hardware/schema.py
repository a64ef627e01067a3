"""The schema of a mesh specification: YAML text in, a `Spec` out, or a SpecError at the line that is wrong.

docs/reference/mesh-spec.md describes the schema; the readers here follow it key by key.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

from toast_cli.hardware.axis_links import lay_out
from toast_cli.hardware.chips import Preset, chip_names, find_preset
from toast_cli.hardware.model import Chip
from toast_cli.hardware.spec import AXIS_NAME, RESERVED_HINT, RESERVED_NAMES, AxisRequest, Spec, shape_text
from toast_cli.hardware.topology import read_topology
from toast_cli.hardware.yamltree import YamlValue, read_yaml
from toast_cli.units import parse_bandwidth, parse_bytes, parse_flops

DEFAULT_MEMORY_FRACTION = 0.95
"""Part of the usable memory a plan may fill when the specification does not say.

It leaves 5 % for what no plan sees, such as the program itself, collective scratch and fragmentation.
"""

# More devices than any machine has: catches a typing error before every factoring of it is tried.
MOST_DEVICES = 2**20

_MATRIX_TYPES = ("f64", "f32", "bf16", "f16", "f8", "i8")


def parse_spec(text: str, source: str) -> Spec:
    """A specification from YAML text; `source` names it in errors. Raises SpecError at `source:line`."""
    top = read_yaml(text, source)
    keys = top.section("name", "description", "chip", "topology", "axes", "memory_fraction")
    if "chip" not in keys:
        raise top.error("the specification names no chip", f"add e.g. chip: v4; presets: {', '.join(chip_names())}")
    chip, preset = _read_chip(keys["chip"])
    spec = Spec(
        name=keys["name"].scalar("a name") if "name" in keys else Path(source).stem,
        description=keys["description"].scalar("one line of text") if "description" in keys else "",
        source=source,
        chip=chip,
        preset=preset,
        dimensions=read_topology(keys.get("topology"), preset),
        requests=None,
        memory_fraction=_read_fraction(keys.get("memory_fraction")),
    )
    if spec.devices > MOST_DEVICES:
        raise keys["topology"].error(f"the topology has {spec.devices:,} devices; {MOST_DEVICES:,} are the most")
    if "axes" not in keys:
        return spec
    return replace(spec, requests=_read_axes(keys["axes"], spec))


def _read_chip(entry: YamlValue) -> tuple[Chip, Preset | None]:
    """`v4`, or `{preset: v4, memory: 24GiB}`, or all figures of a chip of one's own."""
    if not entry.is_mapping:
        preset = find_preset(entry.scalar("a chip name or a mapping"), where=entry.where)
        return preset.chip, preset
    keys = entry.section(
        "preset", "name", "platform", "matrix_flops", "vector_flops", "matrix_tile", "memory", "reserved",
        "memory_bandwidth", "host_bandwidth",
    )  # fmt: skip
    if "preset" in keys:
        preset = find_preset(keys["preset"].scalar("a chip name"), where=keys["preset"].where)
        return _override(entry, preset.chip, keys), preset
    for key in ("platform", "matrix_flops", "vector_flops", "memory", "memory_bandwidth"):
        if key not in keys:
            raise entry.error(f"chip has no {key}", "give it, or start from a preset: chip: {preset: v4, …}")
    blank = Chip("custom", "tpu", {}, 0.0, (128, 128), 0, 0, 0.0, {})
    return _override(entry, blank, keys), None


def _override(entry: YamlValue, chip: Chip, keys: dict[str, YamlValue]) -> Chip:
    """`chip` with the figures written in the specification, which becomes their source."""
    changed: dict[str, object] = {}
    if "name" in keys:
        changed["name"] = keys["name"].scalar("a name")
    if "platform" in keys:
        changed["platform"] = keys["platform"].choice(("tpu", "gpu"))
    if "matrix_flops" in keys:
        rates = keys["matrix_flops"].section(*_MATRIX_TYPES)
        if not rates:
            raise keys["matrix_flops"].error("chip.matrix_flops is empty", "give e.g. {bf16: 275 TFLOP/s}")
        changed["matrix_flops"] = chip.matrix_flops | {k: v.quantity(parse_flops) for k, v in rates.items()}
    if "vector_flops" in keys:
        changed["vector_flops"] = keys["vector_flops"].quantity(parse_flops)
    if "matrix_tile" in keys:
        tile = tuple(item.integer() for item in keys["matrix_tile"].items())
        if len(tile) != 2:
            raise keys["matrix_tile"].error("chip.matrix_tile needs two numbers", "write e.g. [128, 128]")
        changed["matrix_tile"] = tile
    if "memory" in keys:
        changed["memory_bytes"] = keys["memory"].quantity(parse_bytes)
    if "reserved" in keys:
        entry = keys["reserved"]
        changed["reserved_bytes"] = 0 if entry.scalar("an amount of memory") == "0" else entry.quantity(parse_bytes)
    if "memory_bandwidth" in keys:
        changed["memory_bytes_per_second"] = keys["memory_bandwidth"].quantity(parse_bandwidth)
    if "host_bandwidth" in keys:
        changed["host_bytes_per_second"] = keys["host_bandwidth"].quantity(parse_bandwidth)
    new = replace(chip, sources=chip.sources | dict.fromkeys(changed, entry.where), **changed)  # type: ignore[arg-type]
    if new.reserved_bytes >= new.memory_bytes:
        at = keys.get("memory") or keys.get("reserved") or entry
        memory, reserved = new.memory_bytes / 2**20, new.reserved_bytes / 2**20
        raise at.error(
            f"of {memory:.0f} MiB of memory nothing is left when {reserved:.0f} MiB are reserved", "set chip.reserved"
        )
    return new


def _read_fraction(entry: YamlValue | None) -> float:
    if entry is None:
        return DEFAULT_MEMORY_FRACTION
    text = entry.scalar("a number between 0 and 1")
    try:
        fraction = float(text)
    except ValueError:
        fraction = -1.0
    if not 0 < fraction <= 1:
        raise entry.error(f'memory_fraction is "{text}"', "write a number above 0 and up to 1, e.g. 0.95")
    return fraction


def _read_axes(entry: YamlValue, spec: Spec) -> tuple[AxisRequest, ...]:
    """The axes in the order written; they must multiply to the devices and fit the dimensions they name."""
    entries = entry.mapping()
    if not entries:
        raise entry.error("axes is empty", "name them, e.g. {data: 8, model: 2}, or leave axes out")
    requests = tuple(_read_axis(name, value, spec) for name, value in entries.items())
    count = prod(request.size for request in requests)
    text = shape_text({request.name: request.size for request in requests})
    if count != spec.devices:
        hint = f"{spec.name} is {spec.dimension_text()}"
        if spec.preset and spec.preset.devices_per_chip > 1:
            hint += f" ({spec.chip.name} counts {spec.preset.devices_per_chip} devices a chip)"
        raise entry.error(f"axes {text} are {count} devices; the topology has {spec.devices}", hint)
    if lay_out([r.size for r in requests], spec.dimensions, [r.over for r in requests]) is None:
        raise entry.error(
            f"axes {text} cannot be mapped onto {spec.dimension_text()} as `over` says",
            "the sizes of the axes over a dimension multiply to its size; or leave out `over`",
        )
    return requests


def _read_axis(name: str, entry: YamlValue, spec: Spec) -> AxisRequest:
    """`data: 8`, or `data: {size: 8, over: [x, y]}`; without size the axis covers the named dimensions whole."""
    if not AXIS_NAME.fullmatch(name):
        raise entry.error(f'"{name}" is no axis name', "use letters, digits and _")
    if name in RESERVED_NAMES:
        raise entry.error(f'"{name}" cannot name an axis', RESERVED_HINT)
    if not entry.is_mapping:
        return AxisRequest(name, entry.integer())
    keys = entry.section("size", "over")
    if not keys:
        raise entry.error(f"{entry.name} has neither size nor over", "write e.g. {size: 8, over: [x, y]}")
    over = None
    if "over" in keys:
        names = [dimension.name for dimension in spec.dimensions]
        if not names:
            raise keys["over"].error(f"{keys['over'].name} names a physical dimension, but the machine is one device")
        over = frozenset(item.choice(names) for item in keys["over"].items())
    if "size" in keys:
        return AxisRequest(name, keys["size"].integer(), over)
    return AxisRequest(name, prod(d.size for d in spec.dimensions if over and d.name in over), over)
