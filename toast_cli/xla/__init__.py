"""The only interface to jaxlib. Every private jaxlib name the project uses is in this folder.

Importing this loads `jaxlib.mlir` (about 0.15 s) but not jax; import it lazily from anything the command line loads at
start. `ir` and the classes of attributes (`sdy`, `stablehlo`) are re-exported so that only this folder imports jaxlib.
"""

from toast_cli.xla.modules import PickedDimensions as PickedDimensions
from toast_cli.xla.modules import attribute_key as attribute_key
from toast_cli.xla.modules import attributes_of as attributes_of
from toast_cli.xla.modules import call_target as call_target
from toast_cli.xla.modules import constant_number as constant_number
from toast_cli.xla.modules import create as create
from toast_cli.xla.modules import declare_mesh as declare_mesh
from toast_cli.xla.modules import dot_dimension_numbers as dot_dimension_numbers
from toast_cli.xla.modules import dot_dimensions as dot_dimensions
from toast_cli.xla.modules import element_types as element_types
from toast_cli.xla.modules import free_symbol as free_symbol
from toast_cli.xla.modules import holders as holders
from toast_cli.xla.modules import holds_resource as holds_resource
from toast_cli.xla.modules import inline_function as inline_function
from toast_cli.xla.modules import is_custom_rule as is_custom_rule
from toast_cli.xla.modules import like as like
from toast_cli.xla.modules import location_name as location_name
from toast_cli.xla.modules import main_function as main_function
from toast_cli.xla.modules import make_context as make_context
from toast_cli.xla.modules import module_name as module_name
from toast_cli.xla.modules import operations_in as operations_in
from toast_cli.xla.modules import outer_operands as outer_operands
from toast_cli.xla.modules import parse_kernel as parse_kernel
from toast_cli.xla.modules import parse_module as parse_module
from toast_cli.xla.modules import parse_portable_artifact as parse_portable_artifact
from toast_cli.xla.modules import picked_dimensions as picked_dimensions
from toast_cli.xla.modules import printed as printed
from toast_cli.xla.modules import remove_sharding_rules as remove_sharding_rules
from toast_cli.xla.modules import run_passes as run_passes
from toast_cli.xla.modules import shape_and_element_type as shape_and_element_type
from toast_cli.xla.modules import sharding_rule as sharding_rule
from toast_cli.xla.modules import splat_number as splat_number
from toast_cli.xla.modules import stablehlo_version as stablehlo_version
from toast_cli.xla.modules import string_of as string_of
from toast_cli.xla.modules import terminator as terminator
from toast_cli.xla.modules import walk_ops as walk_ops
from toast_cli.xla.modules import with_picked_dimensions as with_picked_dimensions
from toast_cli.xla.modules import write_bytecode as write_bytecode
from toast_cli.xla.modules import write_portable_artifact as write_portable_artifact
from toast_cli.xla.native import ADVANCE as ADVANCE
from toast_cli.xla.native import SKIP as SKIP
from toast_cli.xla.native import ir as ir
from toast_cli.xla.native import sdy as sdy
from toast_cli.xla.native import stablehlo as stablehlo
from toast_cli.xla.native import untested_here as untested_here
from toast_cli.xla.running import compile_ahead as compile_ahead
from toast_cli.xla.running import compile_program as compile_program
from toast_cli.xla.running import compiled_text as compiled_text
from toast_cli.xla.running import cpu_devices as cpu_devices
from toast_cli.xla.running import execute as execute
from toast_cli.xla.running import gpu_devices as gpu_devices
from toast_cli.xla.running import hlo_boundary as hlo_boundary
from toast_cli.xla.running import hlo_proto_to_stablehlo as hlo_proto_to_stablehlo
from toast_cli.xla.running import hlo_text_to_proto as hlo_text_to_proto
from toast_cli.xla.running import kept_arguments as kept_arguments
from toast_cli.xla.running import mesh_sharding as mesh_sharding
from toast_cli.xla.running import refine_shapes as refine_shapes
from toast_cli.xla.running import run_sharded as run_sharded
from toast_cli.xla.running import sharding_devices as sharding_devices
from toast_cli.xla.running import stablehlo_to_hlo_text as stablehlo_to_hlo_text
from toast_cli.xla.running import tpu_devices as tpu_devices
