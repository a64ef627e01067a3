"""Intact inputs of every kind, small ones, for the mutations to start from."""

from __future__ import annotations

from functools import cache

from fuzz.corpus import chain_of_calls, nested_loops, program
from fuzz.harness import ROOT, Case, Server

SHARDED = """
module @sharded attributes {mhlo.num_partitions = 4 : i32, mhlo.frontend_attributes = {note = "x"}} {
  sdy.mesh @mesh = <["x"=4]>
  func.func public @main(%a: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>, tf.aliasing_output = 0 : i32} loc("params['w']"),
                         %b: tensor<16x16xf32> {mhlo.sharding = "{devices=[2,2]<=[4]}", jax.buffer_donor = true})
      -> (tensor<8x16xf32> {jax.result_info = "result['x']", sdy.sharding = #sdy.sharding<@mesh, [{?}, {"x"}]>}) {
    %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<8x16xf32>, tensor<16x16xf32>) -> tensor<8x16xf32>
    %1 = sdy.sharding_constraint %0 <@mesh, [{"x"}, {}]> : tensor<8x16xf32>
    %2 = sdy.manual_computation(%1) in_shardings=[<@mesh, [{"x"}, {}]>] out_shardings=[<@mesh, [{"x"}, {}]>] manual_axes={"x"} (%arg: tensor<2x16xf32>) {
      %s = "stablehlo.all_reduce"(%arg) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids}> ({
        ^bb0(%p: tensor<f32>, %q: tensor<f32>):
          %r = stablehlo.add %p, %q : tensor<f32>
          stablehlo.return %r : tensor<f32>
      }) : (tensor<2x16xf32>) -> tensor<2x16xf32>
      sdy.return %s : tensor<2x16xf32>
    } : (tensor<8x16xf32>) -> tensor<8x16xf32>
    %3 = stablehlo.custom_call @foo(%2) {mhlo.frontend_attributes = {xla.sdy.sharding_rule = "#sdy.op_sharding_rule<([i, j])->([i, j]) {i=8, j=16}, custom>"}} : (tensor<8x16xf32>) -> tensor<8x16xf32>
    return %3 : tensor<8x16xf32>
  }
}
"""

OPS = """
module @ops {
  func.func private @act(%x: tensor<4x8xf32>) -> tensor<4x8xf32> { %0 = chlo.erf %x : tensor<4x8xf32> -> tensor<4x8xf32>
    return %0 : tensor<4x8xf32> }
  func.func public @main(%x: tensor<4x8xf32>, %table: tensor<32x8xf32>, %ids: tensor<4x1xi32>, %p: tensor<i1>) -> (tensor<4x8xf32>, tensor<32x8xf32>) {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %0 = stablehlo.composite "my.act" %x {composite_attributes = {k = 1 : i64}, decomposition = @act} : (tensor<4x8xf32>) -> tensor<4x8xf32>
    %1 = "stablehlo.gather"(%table, %ids) <{dimension_numbers = #stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1, 8>}> : (tensor<32x8xf32>, tensor<4x1xi32>) -> tensor<4x8xf32>
    %2 = "stablehlo.case"(%ids_0) ({ %c = stablehlo.add %0, %1 : tensor<4x8xf32>
      stablehlo.return %c : tensor<4x8xf32> }, { %c = stablehlo.multiply %0, %1 : tensor<4x8xf32>
      stablehlo.return %c : tensor<4x8xf32> }) : (tensor<i32>) -> tensor<4x8xf32>
    %3 = stablehlo.reduce(%2 init: %zero) applies stablehlo.add across dimensions = [1] : (tensor<4x8xf32>, tensor<f32>) -> tensor<4xf32>
    %4 = stablehlo.broadcast_in_dim %3, dims = [0] : (tensor<4xf32>) -> tensor<4x8xf32>
    %5:2 = "stablehlo.sort"(%4, %2) <{dimension = 1 : i64, is_stable = true}> ({
      ^bb0(%a: tensor<f32>, %b: tensor<f32>, %c: tensor<f32>, %d: tensor<f32>):
        %t = stablehlo.compare LT, %a, %b, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
        stablehlo.return %t : tensor<i1>
    }) : (tensor<4x8xf32>, tensor<4x8xf32>) -> (tensor<4x8xf32>, tensor<4x8xf32>)
    %6 = "stablehlo.scatter"(%table, %ids, %5#0) <{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}> ({
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %t = stablehlo.add %a, %b : tensor<f32>
        stablehlo.return %t : tensor<f32>
    }) : (tensor<32x8xf32>, tensor<4x1xi32>, tensor<4x8xf32>) -> tensor<32x8xf32>
    %7 = stablehlo.select %p, %5#1, %2 : tensor<i1>, tensor<4x8xf32>
    %8 = stablehlo.reshape %7 : (tensor<4x8xf32>) -> tensor<2x2x8xf32>
    %9 = stablehlo.transpose %8, dims = [1, 0, 2] : (tensor<2x2x8xf32>) -> tensor<2x2x8xf32>
    %10 = stablehlo.convolution(%9, %9) dim_numbers = [b, 0, f]x[0, o, i]->[b, 0, f], window = {pad = [[0, 0]]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64} : (tensor<2x2x8xf32>, tensor<2x2x8xf32>) -> tensor<2x1x2xf32>
    %11 = stablehlo.dynamic_slice %7, %i, %i, sizes = [2, 8] : (tensor<4x8xf32>, tensor<i32>, tensor<i32>) -> tensor<2x8xf32>
    %12 = stablehlo.concatenate %11, %11, dim = 0 : (tensor<2x8xf32>, tensor<2x8xf32>) -> tensor<4x8xf32>
    return %12, %6 : tensor<4x8xf32>, tensor<32x8xf32>
  }
}
""".replace(
    '    %2 = "stablehlo.case"(%ids_0)',
    '    %i = stablehlo.constant dense<1> : tensor<i32>\n    %2 = "stablehlo.case"(%i)',
)

SPEC = b"""name: mine
description: a machine
chip: {preset: v4, memory: 24GiB, memory_bandwidth: 1 TB/s, matrix_flops: {bf16: 275 TFLOP/s}}
topology:
  torus: [4, 4]
axes: {data: 8, model: {size: 2}}
memory_fraction: 0.9
"""
TACTICS = b"""tactics:
  mine:
    about: my own
    place: first
    steps:
      - split: [batch]
      - keep: [params]
  other:
    - use: fsdp
"""  # Bodies that read constants from outside, a loop, tokens, scopes in scopes.
BODIES = """
module @bodies {
  func.func public @main(%x: tensor<16x8xf32>, %n: tensor<i32>) -> (tensor<16xf32>, tensor<16x8xf32>) {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %bound = stablehlo.constant dense<0.5> : tensor<f32>
    %token = stablehlo.create_token : !stablehlo.token
    %0 = stablehlo.reduce(%x init: %zero) across dimensions = [1] : (tensor<16x8xf32>, tensor<f32>) -> tensor<16xf32>
     reducer(%a: tensor<f32>, %b: tensor<f32>) {
      %m = stablehlo.maximum %b, %bound : tensor<f32>
      %s = stablehlo.add %a, %m : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }
    %1 = "stablehlo.sort"(%x) <{dimension = 1 : i64}> ({
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %m = stablehlo.maximum %a, %bound : tensor<f32>
        %c = stablehlo.compare LT, %m, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
        stablehlo.return %c : tensor<i1>
    }) : (tensor<16x8xf32>) -> tensor<16x8xf32> loc("jit(f)/g/sort")
    %i = stablehlo.constant dense<0> : tensor<i32>
    %2:3 = stablehlo.while(%k = %i, %acc = %1, %t = %token) : tensor<i32>, tensor<16x8xf32>, !stablehlo.token cond {
      %c = stablehlo.compare LT, %k, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %one = stablehlo.constant dense<1> : tensor<i32>
      %u = "stablehlo.outfeed"(%acc, %t) <{outfeed_config = ""}> : (tensor<16x8xf32>, !stablehlo.token) -> !stablehlo.token
      %d = stablehlo.dynamic_update_slice %acc, %acc, %k, %i
        : (tensor<16x8xf32>, tensor<16x8xf32>, tensor<i32>, tensor<i32>) -> tensor<16x8xf32> loc("jit(f)/g/h/update")
      %j = stablehlo.add %k, %one : tensor<i32>
      stablehlo.return %j, %d, %u : tensor<i32>, tensor<16x8xf32>, !stablehlo.token
    }
    %3 = stablehlo.sine %2#1 : tensor<16x8xf32> loc("jit(f)/sin")
    return %0, %3 : tensor<16xf32>, tensor<16x8xf32>
  }
}
"""


@cache
def texts() -> list[bytes]:
    """StableHLO as text."""
    sample = (ROOT / "sample_models" / "mlp_tiny.mlir").read_bytes()
    made = [SHARDED.encode(), OPS.encode(), program(), sample, nested_loops(2), chain_of_calls(3, 2)]
    return [*made, BODIES.encode()]


@cache
def binaries() -> dict[str, list[bytes]]:
    """The same programs as bytecode, portable artifacts, HLO text and HLO protos."""
    from toast_cli import xla

    found: dict[str, list[bytes]] = {"bytecode": [], "portable": [], "hlo": [], "proto": []}
    for text in texts():
        bytecode = xla.write_bytecode(xla.parse_module(xla.make_context(), text))
        found["bytecode"].append(bytecode)
        for form, make in (("portable", xla.write_portable_artifact), ("hlo", xla.stablehlo_to_hlo_text)):
            try:
                made = make(bytecode)
            except (RuntimeError, xla.ir.MLIRError):
                continue
            found[form].append(made if isinstance(made, bytes) else made.encode())
    found["proto"] = [xla.hlo_text_to_proto(text.decode()) for text in found["hlo"]]
    return found


@cache
def written() -> dict[str, bytes]:
    """What toast itself writes and reads again: a sharded program, its report, a saved plan, a sweep's log."""
    line = "partition m.mlir --mesh v4-32 --iterations 20 -o o.mlir --json r.json --save-plan p.json"
    sweep = "sweep m.mlir --mesh v4-32 --iterations 3 --jsonl l.jsonl"
    with Server() as server:
        made = server.run(Case(tuple(line.split()), {"m.mlir": texts()[3]})).files
        made |= server.run(Case(tuple(sweep.split()), {"m.mlir": program()})).files
    return made
