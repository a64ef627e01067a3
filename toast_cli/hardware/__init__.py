"""Hardware: a specification's name or file in; chips, physical dimensions and logical meshes (`model.Mesh`) out.

`load_spec` reads a `Spec`; `Spec.mesh` maps logical axes to its physical links. Figures come from the presets in
`chips`.
"""

from toast_cli.hardware.catalogue import available_specs, is_ready, load_spec
from toast_cli.hardware.chips import chip_names, find_preset, matrix_rate
from toast_cli.hardware.gpu_target import gpu_target_text
from toast_cli.hardware.model import Axis, Chip, Link, Mesh
from toast_cli.hardware.schema import parse_spec
from toast_cli.hardware.spec import AxisRequest, Spec, parse_shape
from toast_cli.units import parse_bytes

__all__ = [
    "Axis",
    "AxisRequest",
    "Chip",
    "Link",
    "Mesh",
    "Spec",
    "available_specs",
    "chip_names",
    "find_preset",
    "gpu_target_text",
    "is_ready",
    "load_spec",
    "matrix_rate",
    "parse_bytes",
    "parse_shape",
    "parse_spec",
]
