"""Every hostile input that once did harm, as a case with what is expected of it now. Grouped by what they have in
common."""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from dataclasses import dataclass, replace

import zstandard
from fuzz.harness import Case

MESH = ("--mesh", "v4-32")
PARTITION = ("partition", "m.mlir", *MESH, "--iterations", "20", "-o", "o.mlir")
INSPECT = ("inspect", "m.mlir")
T = "tensor<8x8xf32>"


@dataclass(frozen=True)
class Known:
    """A case, the exit code that is right, and words that must stand in what is said (or, from `output`, in what
    is shown)."""

    case: Case
    code: int
    says: str = ""


def program(body: str = "", argument: str = "", result: str = "", module: str = "", before: str = "") -> bytes:
    """A function of one array with attributes on its argument, its result and the module."""
    inside = body or f"%r = stablehlo.add %a, %a : {T}"
    attributes = f"attributes {{{module}}} " if module else ""
    return (
        f"module @m {attributes}{{ {before}\nfunc.func public @main(%a: {T} {{{argument}}}) -> ({T} {{{result}}}) {{\n"
        f"{inside}\nreturn %r : {T} }} }}"
    ).encode()


def known(
    name: str, content: bytes, code: int, says: str = "", arguments: tuple[str, ...] = PARTITION, **files: bytes
) -> Known:
    return Known(
        Case(arguments, {"m.mlir": content, **{k.replace("__", "."): v for k, v in files.items()}}, name=name),
        code,
        says,
    )


def call(attributes: str) -> bytes:
    return program(f"%r = stablehlo.custom_call @foo(%a) {{{attributes}}} : ({T}) -> {T}")


def frontend(name: str, text: str) -> bytes:
    return call(f'mhlo.frontend_attributes = {{{name} = "{text}"}}')


# Bytecode with a size that no vector can have, which a library of C++ throws as `std::length_error`.
ABSURD_SIZE = zlib.decompress(
    base64.b85decode(
        "c-n1HZE71a5Y_DLSQUd1i*Q9)j4{SFCL~R2LMf$$I3&g3K*$aJv27OCYvb;cfBBbV<r=w0uh3a1`PV^@nKzH8k>+Oh_s-tTrgvY)$0x@"
        "pzw=7LPy?9+&>?A098%xyWA@X*6?eUF4tr+y{|iC}=Yk8`ar79GAAnI30nAu16$*Rmh5ClZLa7}9(P|2G5P(o{8bCX7_y8jt;81#ra4)"
        "<sc_0`{FO}R8bOk-(?M{G@1UQhIrM6PbKR5+Wsn;_pSV9SgD3aNqkl@yXjw3{wdz+$;Um|3Wx})@@O9=L3j{wzM7)P=dE!w$8aMu?GiG"
        "Vo1M2#-Ii^IKfBu0{r#824xSX+_4?S0?heLuv<{#7)sQ$%^5o{Sm6w9e#BpgI0ZhV<lc-#co0%<*Tk#<cp_45WB~rqu}QIdx2wSmT{*b"
        "F!%OqRLD4t1g%7Pc>f@*?qB5>&>bzGPTR9dRMCDrWC2H)O@v45BIq!%guT_-(~7Zt<`!i7i{ZAkuTMUk)=LZXaj_?tkDr%q4@`at3H|"
    )
)

# Texts and bytes that native code takes apart.
NATIVE = [
    known("a size that no vector can have", ABSURD_SIZE, 2, "unable to grow", INSPECT),
    known("empty sharding text", frontend("xla.sdy.sharding", ""), 2, "xla.sdy.sharding is empty"),
    known("empty rule text", frontend("xla.sdy.sharding_rule", ""), 2, "xla.sdy.sharding_rule is empty"),
    known("blank rule text", frontend("xla.sdy.sharding_rule", "  "), 2, "is empty"),
    known(
        "rule of another kind",
        frontend("xla.sdy.sharding_rule", "4 : i32"),
        2,
        "not an attribute of class OpShardingRuleAttr",
    ),
    known("sharding of another kind", frontend("xla.sdy.sharding", "unit"), 2, "xla.sdy.sharding"),
    known("half a rule", frontend("xla.sdy.sharding_rule", "#sdy.op_sharding_rule<([i"), 2, "cannot be read"),
    known("deep text", frontend("xla.sdy.sharding", "[" * 100_000), 2, "damaged"),
    known(
        "meshes of another kind",
        program(module='mhlo.frontend_attributes = {xla.sdy.meshes = "5"}'),
        2,
        "xla.sdy.meshes",
    ),
    known(
        "empty meshes", program(module='mhlo.frontend_attributes = {xla.sdy.meshes = ""}'), 2, "xla.sdy.meshes is empty"
    ),
    known(
        "rule of another rank",
        frontend("xla.sdy.sharding_rule", "#sdy.op_sharding_rule<([i])->([i]) {i=8}>"),
        2,
        "m.mlir",
    ),
]

# Attributes of another kind than their name promises.
ATTRIBUTES = [
    known("frontend attributes are a text", call('mhlo.frontend_attributes = ""'), 2, "not a dictionary"),
    known("frontend attribute is a number", call("mhlo.frontend_attributes = {xla.sdy.sharding = 5}"), 2, "not a text"),
    known(
        "module's frontend attributes are a text",
        program(module='mhlo.frontend_attributes = ""'),
        2,
        "not a dictionary",
    ),
    known("sharding is a number", program(argument="mhlo.sharding = 5"), 2, "m.mlir: argument 0: mhlo.sharding is 5"),
    known("result's sharding is a number", program(result="mhlo.sharding = 5 : i32"), 2, "result 0: mhlo.sharding"),
    known("sdy.sharding is a text", program(argument='sdy.sharding = "x"'), 2, "sharding attribute"),
    known("alias out of range", program(argument="tf.aliasing_output = 99 : i32"), 2, "a number from 0 to 0"),
    known("alias below zero", program(argument="tf.aliasing_output = -1 : i32"), 2, "a number from 0 to 0"),
    known("alias is a text", program(argument='tf.aliasing_output = "0"'), 2, "argument 0: tf.aliasing_output is"),
    known("result info is a list", program(result="jax.result_info = [1]"), 2, "result 0: jax.result_info is [1"),
    known("result info is no UTF-8", program(result='jax.result_info = "\\FF\\FE"'), 0),
    known("replicas are a text", program(module='mhlo.num_replicas = "x"'), 2, "mhlo.num_replicas is"),
    known("replicas below zero", program(module="mhlo.num_replicas = -4 : i32"), 2, "mhlo.num_replicas is"),
    known(
        "10^12 devices",
        program(argument='mhlo.sharding = "{devices=[1000000,1000000]<=[1000000000000]}"'),
        0,
        "",
        (*PARTITION, "--keep-shardings"),
    ),
    known(
        "device numbers of 5,000 digits",
        program(argument=f'mhlo.sharding = "{{devices=[{"9" * 5000},1]<=[8]}}"'),
        0,
        "",
        (*PARTITION, "--keep-shardings"),
    ),
    known(
        "several shardings for one argument",
        program(
            argument="sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{}, {}]>, <@mesh, [{}, {}]>]>",
            before='sdy.mesh @mesh = <["x"=2]>',
        ),
        2,
        "sharding",
    ),
    known("backend config is a number", call("backend_config = 5 : i32"), 2, "backend_config"),
    known(
        "target is no UTF-8",
        program(f'%r = "stablehlo.custom_call"(%a) {{call_target_name = "\\FF"}} : ({T}) -> {T}'),
        0,
    ),
    known("name is no UTF-8", program().replace(b"@main", b'@"ma\\FFin"'), 2, "not text"),
]


def nested_loops(depth: int) -> bytes:
    head = "%n{0} = stablehlo.constant dense<4> : tensor<i32>\n"
    text, close = "", ""
    for level in range(depth):
        text += (
            f"%i{level} = stablehlo.constant dense<0> : tensor<i32>\n"
            f"%w{level}:2 = stablehlo.while(%c{level} = %i{level}, %x{level} = %{'a' if level == 0 else f'x{level - 1}'}) : tensor<i32>, {T}\n"
            f"cond {{ {head.format(level)} %t{level} = stablehlo.compare LT, %c{level}, %n{level} : (tensor<i32>, tensor<i32>) -> tensor<i1>\n"
            f"stablehlo.return %t{level} : tensor<i1> }} do {{\n"
        )
        deeper = f"%w{level + 1}#1" if level + 1 < depth else f"%y{level}"
        last = "" if level + 1 < depth else f"%y{level} = stablehlo.add %x{level}, %x{level} : {T}\n"
        close = (
            f"{last}%s{level} = stablehlo.constant dense<1> : tensor<i32>\n%k{level} = stablehlo.add %c{level}, %s{level} : tensor<i32>\n"
            f"stablehlo.return %k{level}, {deeper} : tensor<i32>, {T} }}\n" + close
        )
    return program(f"{text}{close}%r = stablehlo.add %w0#1, %w0#1 : {T}")


def chain_of_calls(depth: int, width: int) -> bytes:
    functions = [f"func.func private @f{depth}(%a: {T}) -> {T} {{ %0 = stablehlo.add %a, %a : {T}\n return %0 : {T} }}"]
    for level in range(depth - 1, 0, -1):
        calls = "".join(f"%{k + 1} = func.call @f{level + 1}(%{k}) : ({T}) -> {T}\n" for k in range(width))
        functions.append(f"func.func private @f{level}(%0: {T}) -> {T} {{ {calls} return %{width} : {T} }}")
    return program(f"%r = func.call @f1(%a) : ({T}) -> {T}", before="\n".join(functions))


QUIET = ("sweep", "m.mlir", *MESH, *("--iterations", "3"), "--quiet", "--strategy", "nonsense")
SPEC = b"chip: v4\ntopology: {torus: [2, 2, 4]}\n"
LONG = "9" * 5000

ASYNC = """
func.func @main(%a: tensor<8x2xf32>) -> !stablehlo.future<tensor<8x8xf32>> {
  %0 = "stablehlo.async_start"(%a) ({
  ^bb0(%b: tensor<8x2xf32>):
    %1 = "stablehlo.all_gather"(%b) {all_gather_dim = 1 : i64, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>}
      : (tensor<8x2xf32>) -> tensor<8x8xf32>
    "stablehlo.return"(%1) : (tensor<8x8xf32>) -> ()
  }) : (tensor<8x2xf32>) -> !stablehlo.future<tensor<8x8xf32>>
  func.return %0: !stablehlo.future<tensor<8x8xf32>>
}
"""
WINDOW = """
func.func @main(%a: tensor<4x2xf32>, %i: tensor<2xf32>) -> tensor<2x1xf32> {
  %0 = "stablehlo.reduce_window"(%a, %i) ({
    ^bb0(%x: tensor<2xf32>, %y: tensor<2xf32>):
      %2 = stablehlo.add %x, %y : tensor<2xf32>
      "stablehlo.return"(%2) : (tensor<2xf32>) -> ()
  }) {padding = dense<[[2, 2], [0, 0]]> : tensor<2x2xi64>, window_dimensions = array<i64: 4, 2>, window_strides = array<i64: 3, 1>}
    : (tensor<4x2xf32>, tensor<2xf32>) -> (tensor<2x1xf32>)
  func.return %0 : tensor<2x1xf32>
}
"""
# A region whose operand comes from a constraint, which is taken out.
PINNED = """
sdy.mesh @mesh = <["data"=16]>
func.func @main(%a: tensor<16x4xf32>) -> tensor<16x4xf32> {
  %1 = sdy.sharding_constraint %a <@mesh, [{"data"}, {}]> : tensor<16x4xf32>
  %2 = sdy.manual_computation(%1) in_shardings=[<@mesh, [{"data"}, {}]>] out_shardings=[<@mesh, [{"data"}, {}]>] manual_axes={"data"} (%x: tensor<1x4xf32>) {
    %s = stablehlo.sine %x : tensor<1x4xf32>
    sdy.return %s : tensor<1x4xf32>
  } : (tensor<16x4xf32>) -> tensor<16x4xf32>
  return %2 : tensor<16x4xf32>
}
"""

# A window's dimension whose number the parser makes a list of so many entries for.
FAR = """func.func @main(%a: tensor<2x2x8xf32>) -> tensor<2x1x2xf32> {
  %r = stablehlo.convolution(%a, %a) dim_numbers = [b, 0, f]x[1073741824, o, i]->[b, 0, f], window = {}
    {batch_group_count = 1 : i64, feature_group_count = 1 : i64}
    : (tensor<2x2x8xf32>, tensor<2x2x8xf32>) -> tensor<2x1x2xf32>
  return %r : tensor<2x1x2xf32> }"""

# Empty, deep and long, and what the fuzzer found.
SHAPES = [
    known("main is private", program().replace(b"public @main", b"private @main"), 0),
    known("a dimension beyond all others", FAR.encode(), 2, "more than 3.0 GiB of memory"),
    known("a sweep that fails quietly", program(), 2, "m.mlir on v4-32: --strategy: unknown tactic", QUIET),
    known("an asynchronous operation", ASYNC.encode(), 2, "XLA has optimised this program"),
    known("a window over arrays", WINDOW.encode(), 2, "m.mlir"),
    known(
        "a manual region behind a constraint",
        PINNED.encode(),
        0,
        "",
        (*PARTITION, "--mesh-shape", "data=16", "--keep-shardings"),
    ),
    known("nothing", b"func.func @main() { return }", 2, "computes nothing"),
    known("nothing to inspect", b"func.func @main() { return }", 2, "computes nothing", INSPECT),
    known("an unused argument", f"func.func @main(%a: {T}) {{ return }}".encode(), 0),
    known("an argument returned", f"func.func @main(%a: {T}) -> {T} {{ return %a : {T} }}".encode(), 0),
    known("3,000 calls deep", chain_of_calls(3_000, 1), 0),
    known(
        "a function that calls itself",
        program(
            f"%r = func.call @f(%a) : ({T}) -> {T}",
            before=f"func.func private @f(%a: {T}) -> {T} {{ %0 = func.call @f(%a) : ({T}) -> {T}\n return %0 : {T} }}",
        ),
        2,
        "calls itself",
    ),
    known("2^40 calls", chain_of_calls(40, 2), 2, "larger than 1,000,000 operations"),
    known("990 nested loops", nested_loops(990), 2, "nested"),
    known("20 nested loops", nested_loops(20), 0),
    known(
        "brackets in a specification",
        program(),
        2,
        "nested too deeply",
        ("partition", "m.mlir", "--mesh", "s.yaml"),
        s__yaml=b"[" * 1_500,
    ),
    known(
        "brackets in a tactics file",
        program(),
        2,
        "nested too deeply",
        (*PARTITION, "--tactic", "t.yaml:x:data"),
        t__yaml=b"[" * 1_500,
    ),
    known(
        "brackets in a report", program(), 2, "nested too deeply", ("diff", "r.json", "r.json"), r__json=b"[" * 20_000
    ),
    known(
        "brackets in a plan", program(), 2, "nested too deeply", (*PARTITION, "--plan", "r.json"), r__json=b"[" * 20_000
    ),
    known(
        "brackets in promises",
        program(),
        2,
        "nested too deeply",
        ("verify", "m.mlir", "--report", "r.json"),
        r__json=b"[" * 20_000,
    ),
    known(
        "long number in a specification",
        program(),
        2,
        "not a whole number",
        ("partition", "m.mlir", "--mesh", "s.yaml"),
        s__yaml=f"chip: v4\ntopology: {{torus: [{LONG}, 2, 4]}}".encode(),
    ),
    known(
        "long number in a report",
        program(),
        2,
        "r.json",
        ("diff", "r.json", "r.json"),
        r__json=f'{{"a": {LONG}}}'.encode(),
    ),
    known("long number in a shape", program(), 2, "is not an axis", (*PARTITION, "--mesh-shape", f"data={LONG}")),
    known("long number of iterations", program(), 2, "whole number", (*PARTITION, "--seed", LONG)),
    known("long seeds", program(), 2, "neither a seed", ("sweep", "m.mlir", *MESH, "--seeds", f"0-{LONG}")),
    known("NaN in a report", program(), 2, "r.json", ("diff", "r.json", "r.json"), r__json=b'{"schema": NaN}'),
    known(
        "half a surrogate pair", program(), 2, "r.json", ("diff", "r.json", "r.json"), r__json=b'{"schema": "\\ud800"}'
    ),
    known(
        "aliases that double",
        program(),
        2,
        "s.yaml",
        ("mesh", "show", "s.yaml"),
        s__yaml=b"a: &a [x, x]\n"
        + b"".join(f"{chr(98 + k)}: &{chr(98 + k)} [*{chr(97 + k)}, *{chr(97 + k)}]\n".encode() for k in range(24))
        + b"checks: *y\n",
    ),
]


def bomb(mebibytes: int) -> bytes:
    """So many MiB of zeros as zstd frames in a zstd frame; compressing them one by one takes no memory here."""
    frame = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    return zstandard.ZstdCompressor(level=19).compress(frame * mebibytes)


# More than fits.
SIZES = [
    known("nested zstd of 8 GiB", bomb(8 << 10), 2, "more than 512 MiB once it is unpacked"),
    known("gzip of 600 MiB", gzip.compress(b" " * (1 << 20)) * 600, 2, "more than 16 MiB once it is unpacked"),
    Known(Case(("inspect", "/dev/zero"), name="/dev/zero"), 2, "more than 512 MiB"),
    Known(Case(("partition", "-", "--mesh", "/dev/zero"), name="/dev/zero as a specification"), 2, "more than 256 KiB"),
    Known(Case(("diff", "/dev/zero", "/dev/zero"), name="/dev/zero as a report"), 2, "more than 64 MiB"),
    known("/dev/zero as a plan", program(), 2, "more than 64 MiB", (*PARTITION, "--plan", "/dev/zero")),
    known("a limit of one's own", program(), 2, "more than 100 bytes", INSPECT),
    known("white space before HLO", b" \n" * 4_000_000 + b"HloModule", 2, "m.mlir", INSPECT),
    known("comments before HLO", b"// x\n" * 400_000 + b"HloModule", 2, "m.mlir", INSPECT),
    known("brackets in 8 MB of strings", b'"(' * 4_000_000, 2, "m.mlir", INSPECT),
    known(
        "200,000 keys",
        program(),
        2,
        "more than 256 KiB",
        ("partition", "m.mlir", "--mesh", "s.yaml"),
        s__yaml=b"a: 1\n" * 200_000,
    ),
    known(
        "20,000 equal keys",
        program(),
        2,
        "given twice",
        ("partition", "m.mlir", "--mesh", "s.yaml"),
        s__yaml=b"a: 1\n" * 4_000,
    ),
]
for number, limit in ((1, "16MiB"), (6, "100")):
    limited = replace(SIZES[number].case, environment={"TOAST_MAX_INPUT": limit})
    SIZES[number] = replace(SIZES[number], case=limited)

EVIL = 'x")\nimport os; os.system("touch pwned")\n#'


# Code that nobody asked to run, and files that nobody asked to write.
UNASKED = [
    known(
        "a result's name ends its comment",
        program(result=f"jax.result_info = {json.dumps(EVIL)}"),
        0,
        "",
        (*PARTITION[:-1], "shardings.py"),
    ),
    known(
        "an argument's name ends its comment",
        program().replace(f"%a: {T} {{}}".encode(), f"%a: {T} loc({json.dumps(EVIL)})".encode()),
        0,
        "",
        (*PARTITION[:-1], "shardings.py"),
    ),
    known("escapes in a name", program().replace(b"@m ", b'@"\\1B[31mred\\07" '), 0),
    known("escapes in a result", program(result='jax.result_info = "\\1B]0;title\\07"'), 0),
    known("escapes in a target", program(f'%r = stablehlo.custom_call @"\\1B[2J"(%a) : ({T}) -> {T}'), 0, "", INSPECT),
    known(
        "escapes in a location",
        program(f'%r = stablehlo.custom_call @x(%a) : ({T}) -> {T} loc("\\1B[2J\\0A::error::x")'),
        0,
        "",
        INSPECT,
    ),
    known("escapes in an error", b"func.func @main() -> \x1b[31m", 2, "m.mlir"),
    known(
        "escapes in a report",
        program(),
        2,
        "r.json",
        ("diff", "r.json", "r.json"),
        r__json=b'{"schema": "\\u001b[31m"}',
    ),
    known(
        "escapes in a specification", program(), 2, "s.yaml", ("mesh", "show", "s.yaml"), s__yaml=b'chip: "\\e[31m"\n'
    ),
    known(
        "a description with escapes",
        program(),
        0,
        "",
        ("mesh", "show", "s.yaml"),
        s__yaml=SPEC + b'description: "\\e[31m \\u202E \\u009b31m"\n',
    ),
]


def paths() -> list[Known]:
    long = "a" * 5000
    return [
        Known(Case(("inspect", long), name="a long path"), 2, "name too long"),
        known("a long output", program(), 2, "name too long", (*PARTITION[:-1], f"{long}.mlir")),
        known("a long specification", program(), 2, "", ("partition", "m.mlir", "--mesh", long)),
        known("a long report", program(), 2, "name too long", ("diff", long, long)),
        known("a long log", program(), 2, "name too long", ("sweep", "m.mlir", *MESH, "--jsonl", long)),
    ]


CLASSES = {
    "native": NATIVE,
    "attributes": ATTRIBUTES,
    "shapes": SHAPES,
    "sizes": SIZES,
    "unasked": UNASKED,
    "paths": paths(),
}
CORPUS = [one for cases in CLASSES.values() for one in cases]
