"""Mesh specifications: the name of a machine (`v5p-512`, `h100:64`) or a YAML file in, a `Spec` out, which makes
logical meshes of any shape that fits. docs/reference/mesh-spec.md describes the schema, and the readers here follow it
key by key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from math import inf, isqrt, prod
from pathlib import Path

from toast_cli.base.errors import InputError, SpecError, UsageError
from toast_cli.base.files import TEXT_BYTES, read_file, read_whole_number, text_of
from toast_cli.base.units import parse_bandwidth, parse_bytes, parse_flops
from toast_cli.base.yamltree import YamlValue, nearest, read_yaml
from toast_cli.hardware.chips import Preset, chip_names, find_preset, presets
from toast_cli.hardware.model import Axis, Chip, Mesh
from toast_cli.hardware.topology import Dimension, divisors, lay_out, read_topology

# ---------------------------------------------------------------- finding one
# Finds specifications: a path or the name of a built-in one in, a `Spec` out.

PRICE_OPTION = "--price"
# Examples of names for which a specification is generated.
EXAMPLES = "e.g. v5p-512, h100:64, 2xv5e-256"


def load_spec(name_or_path: str, prices: Sequence[str] = ()) -> Spec:
    """The specification in that file, the built-in one of that name (`v4-32` or `v4-32.yaml`), or one generated from
    the name (`v5p-512`, `h100:64`, `2xv5p-512`).

    A file of that path has precedence. Raises SpecError for an unknown name or an invalid file.

    Args:
        prices: `v5p=4.2`, what a chip costs an hour; others than this machine's are passed over.
    """
    spec = _load(name_or_path)
    if not prices:
        return spec
    chip_prices = parse_prices(prices, spec.chip.name)
    return replace(spec, chip_price=chip_prices.get(spec.chip.name, spec.chip_price))


def parse_prices(texts: Sequence[str], own: str = "") -> dict[str, float]:
    """`v5p=4.2` -> {"v5p": 4.2}, the price of a chip by the hour. own: the name of a chip that is no preset.

    Raises UsageError for a chip that is not known, and for what is no price.
    """
    prices: dict[str, float] = {}
    for text in texts:
        name, _, amount = (part.strip() for part in text.partition("="))
        try:
            chip = own if name == own else find_preset(name).chip.name
            price = float(amount)
        except SpecError as error:
            raise UsageError(error.what, where=PRICE_OPTION, hint=error.hint) from None
        except ValueError:
            price = -1.0
        if not 0 < price < inf:
            hint = "write a chip and its price by the hour, e.g. v5p=4.2"
            raise UsageError(f'"{text:.60}" is not the price of a chip', where=PRICE_OPTION, hint=hint)
        prices[chip] = price
    return prices


def _load(name_or_path: str) -> Spec:
    """See `load_spec`: a file, else a packaged specification, else one that follows from the name."""
    path = Path(name_or_path)
    try:
        folder = path.is_dir()
        file = path.exists() and not folder
    except (OSError, ValueError):  # a name that no file can have
        file = folder = False
    if file:  # or a pipe
        return parse_spec(_read(name_or_path), name_or_path)
    built_in = _built_in_files()
    name = canonical(name_or_path.removesuffix(".yaml"))
    if name in built_in:
        return replace(parse_spec(built_in[name].read_text(encoding="utf-8"), built_in[name].name), named=True)
    if path.name and folder:
        raise SpecError("is a directory", where=name_or_path, hint="give a YAML file or a name from `toast mesh list`")
    text = generate(name_or_path)
    if text is not None:
        return replace(parse_spec(text, name), named=True)
    raise SpecError(
        f'no mesh specification "{name_or_path}", neither a file nor a built-in one',
        hint=f"{nearest(path.name.removesuffix('.yaml'), available_specs())}; others by chip and number, {EXAMPLES}; "
        "or a YAML file with e.g. {chip: {preset: H100, memory: 96GiB}, topology: {switch: 8}}",
    )


def available_specs() -> list[str]:
    """Names of the built-in specifications, by chip and size."""
    return sorted(_built_in_files(), key=_natural)


def needs_no_file(name: str) -> bool:
    """True if a specification of that name needs no file of the user's."""
    try:
        return name in _built_in_files() or generate(name) is not None
    except SpecError:
        return False


def _built_in_files() -> dict[str, Traversable]:
    """Name -> packaged file."""
    folder = files("toast_cli.hardware") / "specs"
    return {file.name.removesuffix(".yaml"): file for file in folder.iterdir() if file.name.endswith(".yaml")}


def _read(path: str) -> str:
    try:
        content = read_file(path, TEXT_BYTES)
    except InputError as error:
        raise SpecError(error.what, where=path, hint=error.hint) from None
    return text_of(content, path, SpecError, "a mesh specification is YAML")


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key with numbers as numbers: v4-32 before v4-128."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name.lower())]


# ---------------------------------------------------------------- a machine
# `Spec`: a machine as its specification describes it, which makes logical meshes of any shape that fits.

AXIS_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# In a pin, a report and a PartitionSpec this word means an unsharded dimension.
RESERVED_NAMES = frozenset({"None"})
RESERVED_HINT = "in a PartitionSpec it means a dimension that is not split; choose another name, e.g. data"
SHAPE_OPTION = "--mesh-shape"


@dataclass(frozen=True, slots=True)
class AxisRequest:
    """An axis as a specification asks for it; `over` names the physical dimensions it may use, None for any."""

    name: str
    size: int
    over: frozenset[str] | None = None


@dataclass(frozen=True)
class Spec:
    """A machine: one kind of chip on physical dimensions, and perhaps the logical axes wanted on it.

    Attributes:
        source: the file it was read from. description: one line, may be empty.
        dimensions: physical, innermost first; dimensions of one device are left out.
        requests: the axes written in the specification, None if it leaves the choice to the tool.
        memory_fraction: part of the usable memory a plan may fill. chip_price: of a chip (not a device) by the hour, in
            any currency; 0 if it is not known.
        named: the user named the machine, so that the axes are toast's choice.
    """

    name: str
    description: str
    source: str
    chip: Chip
    preset: Preset | None
    dimensions: tuple[Dimension, ...]
    requests: tuple[AxisRequest, ...] | None
    memory_fraction: float
    chip_price: float = 0.0
    named: bool = field(default=False, compare=False)

    @property
    def devices(self) -> int:
        return prod(dimension.size for dimension in self.dimensions)

    @property
    def hour_price(self) -> float:
        """Price of the whole machine by the hour; 0 if it is not known."""
        return self.chip_price * self.devices / (self.preset.devices_per_chip if self.preset else 1)

    @property
    def limit_bytes(self) -> int:
        """Bytes of one device a plan may use."""
        return int((self.chip.memory_bytes - self.chip.reserved_bytes) * self.memory_fraction)

    @cached_property
    def axes(self) -> dict[str, int] | None:
        """The shape written in the specification; None when it leaves the choice to the tool."""
        return None if self.requests is None else {request.name: request.size for request in self.requests}

    def mesh(self, shape: Mapping[str, int] | None = None, memory_limit: int | None = None) -> Mesh:
        """The logical mesh of that shape (axis name -> size, slowest first) on the physical dimensions.

        Without `shape`: the specification's axes, or, if it has none, the most balanced shape of two axes.
        `memory_limit` in bytes per device replaces the specification's. Raises SpecError if the sizes do not multiply
        to the number of devices, UsageError for a memory limit below one byte.
        """
        if memory_limit is not None and memory_limit < 1:
            raise UsageError(f"a memory limit of {memory_limit} bytes", hint="give one byte or more, e.g. 28GiB")
        requests = self._requests(shape)
        links = lay_out([request.size for request in requests], self.dimensions, [request.over for request in requests])
        if links is None:
            raise SpecError(
                f"axes {shape_text({r.name: r.size for r in requests})} cannot be mapped onto {self.dimension_text()}",
                where=self.source if shape is None else SHAPE_OPTION,
                hint="leave out `over`, and toast maps them itself" if shape is None else "choose another shape",
            )
        axes = tuple(Axis(request.name, request.size, link) for request, link in zip(requests, links, strict=True))
        limit = self.limit_bytes if memory_limit is None else memory_limit
        return Mesh(self.name, self.chip, axes, limit, self.hour_price)

    def mesh_shapes(self) -> list[dict[str, int]]:
        """The shapes that toast tries: one axis, then two of two devices or more, the smallest last axis first."""
        sizes = divisors(self.devices)[1:-1]
        return [{"data": self.devices}, *({"data": self.devices // size, "model": size} for size in sizes)]

    def _requests(self, shape: Mapping[str, int] | None) -> tuple[AxisRequest, ...]:
        """The axes of the mesh. `over` of the specification also applies to a shape equal to the specification's."""
        if shape is None and self.requests is not None:
            return self.requests
        if shape is None:  # data x model, as near to square as possible, data not smaller
            shape = [sizes for sizes in self.mesh_shapes() if sizes["data"] >= sizes.get("model", 1)][-1]
        wanted = dict(shape)
        if self.requests is not None and wanted == self.axes and list(wanted) == [r.name for r in self.requests]:
            return self.requests
        for name, size in wanted.items():
            if size < 1:
                raise SpecError(f'axis "{name}" has size {size}', where=SHAPE_OPTION, hint="sizes are one or more")
        if prod(wanted.values()) != self.devices:
            fitting = ", ".join(map(shape_text, self.mesh_shapes()))
            raise SpecError(
                f"{shape_text(wanted)} is {prod(wanted.values())} devices; {self.name} has {self.devices}",
                where=SHAPE_OPTION,
                hint=f"shapes that fit: {fitting}",
            )
        return tuple(AxisRequest(name, size) for name, size in wanted.items())

    def dimension_text(self) -> str:
        """`x=2 x y=2 x z=4`, innermost first."""
        return " x ".join(f"{dimension.name}={dimension.size}" for dimension in self.dimensions) or "one device"


def parse_shape(text: str, where: str = SHAPE_OPTION) -> dict[str, int]:
    """`data=8,model=2` -> {"data": 8, "model": 2}, in the order written. Raises UsageError at `where`."""
    shape: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        number = read_whole_number(size)
        if not equals or not AXIS_NAME.fullmatch(name) or not number:
            raise UsageError(f'"{part.strip():.60}" is not an axis', where=where, hint="write e.g. data=8,model=2")
        if name in RESERVED_NAMES:
            raise UsageError(f'"{name}" cannot name an axis', where=where, hint=RESERVED_HINT)
        if name in shape:
            raise UsageError(f'axis "{name}" is given twice', where=where, hint="name each axis once")
        shape[name] = number
    return shape


def written_shape(shape: Mapping[str, int]) -> str:
    """`data=8,model=2`, as `parse_shape` reads it."""
    return ",".join(f"{name}={size}" for name, size in shape.items())


def shape_text(shape: Mapping[str, int]) -> str:
    """`data=8 x model=2`."""
    return " x ".join(f"{name}={size}" for name, size in shape.items()) or "no axes"


# ---------------------------------------------------------------- the schema
# The schema of a mesh specification: YAML text in, a `Spec` out, or a SpecError at the line that is wrong.
#
# docs/reference/mesh-spec.md describes the schema; the readers here follow it key by key.

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
    keys = top.section("name", "description", "chip", "topology", "axes", "memory_fraction", "price")
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
        memory_fraction=_read_number(keys["memory_fraction"], 1.0, "write a number above 0 and up to 1, e.g. 0.95")
        if "memory_fraction" in keys
        else DEFAULT_MEMORY_FRACTION,
        chip_price=_read_number(keys["price"], inf, "write what a chip costs an hour, e.g. 4.2")
        if "price" in keys
        else 0.0,
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
        reserved = keys["reserved"]
        nothing = reserved.scalar("an amount of memory") == "0"
        changed["reserved_bytes"] = 0 if nothing else reserved.quantity(parse_bytes)
    if "memory_bandwidth" in keys:
        changed["memory_bytes_per_second"] = keys["memory_bandwidth"].quantity(parse_bandwidth)
    if "host_bandwidth" in keys:
        changed["host_bytes_per_second"] = keys["host_bandwidth"].quantity(parse_bandwidth)
    new = replace(chip, sources=chip.sources | dict.fromkeys(changed, entry.where), **changed)  # type: ignore[arg-type]
    if new.reserved_bytes >= new.memory_bytes:
        place = keys.get("memory") or keys.get("reserved") or entry
        memory, kept = new.memory_bytes / 2**20, new.reserved_bytes / 2**20
        what = f"of {memory:.0f} MiB of memory nothing is left when {kept:.0f} MiB are reserved"
        raise place.error(what, "set chip.reserved")
    return new


def _read_number(entry: YamlValue, most: float, hint: str) -> float:
    """A number above 0 and up to `most`."""
    text = entry.scalar("a number above 0")
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not (0 < number <= most and number < inf):
        raise entry.error(f'{entry.name} is "{text}"', hint)
    return number


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


# ---------------------------------------------------------------- machines by name
# Generates specifications from names: `v5p-512`, `h100:64`, `2xv5p-512` in, the YAML of that machine out.
#
# TPUs have Google Cloud's names and slices; GPUs come in hosts of eight, or in NVLink domains of 72.

_NAME = re.compile(
    r"(?:(?P<slices>\d{1,7})x)?(?P<chip>[a-z]\w*(?:-[48]0)?)(?P<joint>[-:])(?P<count>\d{1,9})", re.IGNORECASE
)
_LITEPOD = "v5litepod"  # Google Cloud's name of v5e: `gcloud compute tpus accelerator-types list`
_CUBE = 64  # chips: a large slice of a 3-D torus is any number of cubes of 4x4x4


def canonical(name: str) -> str:
    """The name that a report shows: `H100:64` is `h100-64`, `v5litepod-16` is `v5e-16`. After a colon comes the number
    of chips: `v5p:64` is `v5p-128`, as Google Cloud counts TensorCores."""
    matched = _NAME.fullmatch(name)
    if matched is None:
        return name
    chip = matched["chip"].lower()
    slices = f"{int(matched['slices'])}x" if int(matched["slices"] or 1) != 1 else ""
    chip = "v5e" if chip == _LITEPOD else chip
    preset = next((p for p in presets() if p.chip.name == chip and p.torus_rank), None)
    cores = _cores(preset) if preset is not None and matched["joint"] == ":" else 1
    return f"{slices}{chip}-{int(matched['count']) * cores}"


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
    matched = _NAME.fullmatch(canonical(name))
    chip = matched["chip"].lower() if matched else ""
    chip = "a100-80" if chip == "a100" else chip  # NVIDIA sells most A100 with 80 GB
    preset = next((p for p in presets() if p.chip.name.lower() == chip), None)
    if matched is None or preset is None:
        return None
    count, slices = int(matched["count"]), int(matched["slices"] or 1)
    if not slices or count * slices > MOST_DEVICES:
        raise _error(name, f"a machine has 1 to {MOST_DEVICES:,} devices", "give other numbers")
    head = f"name: {canonical(name)}\nchip: {preset.chip.name}\n"
    return head + (_tpu(name, preset, count, slices) if preset.torus_rank else _gpu(name, preset, count, slices))


def _tpu(name: str, preset: Preset, count: int, slices: int) -> str:
    """The YAML after name and chip, for slices of a TPU."""
    cores = _cores(preset)
    chips = count // cores
    cubes = range(_CUBE, preset.pod_chips + 1, _CUBE) if preset.torus_rank == 3 else ()
    sizes = (*preset.slice_chips, *cubes)  # ascending
    if count % cores or chips not in sizes:
        near = [max((n for n in sizes if n <= chips), default=0), min((n for n in sizes if n > chips), default=0)]
        joint, each = (":", 1) if ":" in name else ("-", cores)
        unit = "TensorCores, two a chip" if each == 2 else "chips"
        nearest = ", ".join(f"{preset.chip.name}{joint}{n * each}" for n in near if n)
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
    unit = preset.host_name
    if not count or count % host:
        full = count - count % preset.devices_per_host
        near = [f"{canonical(name).rpartition('-')[0]}-{n}" for n in (full, full + preset.devices_per_host) if n]
        raise _error(
            name, f"{count} GPUs do not fill {unit}s of {preset.devices_per_host}", f"nearest: {', '.join(near)}"
        )
    hosts = count // host * slices
    about = (
        f"{host * hosts} x {preset.chip.name} in {hosts} {unit}{'s' if hosts > 1 else ''}, {preset.links_name} inside"
    )
    network = f"  network: {{hosts: {hosts}}}\n" if hosts > 1 else ""
    axes = f"axes: {{data: {hosts}, model: {host}}}\n" if hosts > 1 else _axes(divisors(host), host)
    head = f"description: {about}{', the network between' if hosts > 1 else ''}\ntopology:\n  switch: {host}\n{network}"
    # As in the built-in specifications: JAX takes 75 % by default, XLA_PYTHON_CLIENT_MEM_FRACTION sets it.
    return f"{head}{axes}memory_fraction: 0.9\n"


def _cores(preset: Preset) -> int:
    """TensorCores of a chip, which names of slices count: two on v2, v3, v4, v5p and TPU7x, one on v5e and v6e."""
    return 2 if preset.megacore or preset.devices_per_chip == 2 else 1


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
