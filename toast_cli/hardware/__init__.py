"""Hardware: a specification's name or file in; chips, physical dimensions and logical meshes (`hardware.model.Mesh`)
out.

`load_spec` reads a `Spec`; `Spec.mesh` maps logical axes to its physical links. Figures come from the presets in
`hardware.chips`.
"""

from toast_cli.hardware.chips import chip_names as chip_names
from toast_cli.hardware.chips import export_platform as export_platform
from toast_cli.hardware.chips import find_preset as find_preset
from toast_cli.hardware.chips import gpu_target_text as gpu_target_text
from toast_cli.hardware.chips import matrix_rate as matrix_rate
from toast_cli.hardware.chips import presets as presets
from toast_cli.hardware.model import Axis as Axis
from toast_cli.hardware.model import Chip as Chip
from toast_cli.hardware.model import Link as Link
from toast_cli.hardware.model import Mesh as Mesh
from toast_cli.hardware.spec import Spec as Spec
from toast_cli.hardware.spec import available_specs as available_specs
from toast_cli.hardware.spec import load_spec as load_spec
from toast_cli.hardware.spec import machine_name as machine_name
from toast_cli.hardware.spec import needs_no_file as needs_no_file
from toast_cli.hardware.spec import parse_shape as parse_shape
from toast_cli.hardware.spec import parse_spec as parse_spec
from toast_cli.hardware.spec import written_shape as written_shape
