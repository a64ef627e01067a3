"""Hand-written kernels: which dimensions are independent, what they take, and how they are written on parts."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emitted import emit
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import AbstractMesh, PartitionSpec
from programs import Case, evaluator_of, round_mesh
from sweeps import sweep

from toast_cli import xla
from toast_cli.base.errors import ToastError
from toast_cli.emit.stablehlo import kernel_lines
from toast_cli.frontend.loading import load
from toast_cli.frontend.source import Source
from toast_cli.kernels.describe import with_smaller_grid
from toast_cli.kernels.mosaic import config_of, main_of, parse_body
from toast_cli.program.model import Op
from toast_cli.rewrite import with_microbatches

S = jax.ShapeDtypeStruct


def lowered(function: Callable[..., Any], *shapes: Any) -> str:
    """The program as JAX lowers it for TPU, on any machine."""
    text = jax.jit(function).trace(*shapes).lower(lowering_platforms=("tpu",)).as_text(debug_info=True)
    return str(text)


def read(function: Callable[..., Any], *shapes: Any) -> Source:
    return load("kernels.mlir", content=lowered(function, *shapes).encode())


def kernels(source: Source) -> list[Op]:
    return [op for op in source.program.ops if op.kernel is not None]


def free(op: Op) -> list[str]:
    """What can be split of each operand and result of a kernel, a letter for each factor: `ab..`."""
    letters = {factor: chr(97 + factor) for factor in range(len(op.rule.sizes))}
    whole = op.rule.need_replication

    def text(dims: tuple[tuple[int, ...], ...]) -> str:
        return "".join("".join(letters[f] for f in dim if f not in whole) or "." for dim in dims)

    return [text(dims) for dims in (*op.rule.operands, *op.rule.results)]


def attention(q: Any, k: Any, v: Any, *, causal: bool = True) -> Any:
    return flash.flash_attention(q, k, v, causal=causal)


def splash(heads: int, mask: Any, q: Any, k: Any, v: Any) -> Any:
    return jax.vmap(splash_kernel(heads, mask))(q, k, v)


def splash_kernel(heads: int, mask: Any) -> Any:
    masks = splash_attention_mask.MultiHeadMask([mask] * heads)
    return splash_attention_kernel.make_splash_mha(masks, head_shards=1, q_seq_shards=1)


def gradient(function: Callable[..., Any], *arrays: Any) -> Any:
    return jax.grad(lambda *a: function(*a).astype(jnp.float32).sum(), argnums=tuple(range(len(arrays))))(*arrays)


HEADS = S((4, 8, 256, 128), jnp.bfloat16)
GROUPED = S((4, 2, 256, 128), jnp.bfloat16)
CAUSAL = splash_attention_mask.CausalMask((256, 256))


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (attention, (HEADS,) * 3, [["ab..", "ab..", "ab..", "ab.."]]),
        # Without a mask the body does not ask which queries it has.
        (partial(attention, causal=False), (HEADS,) * 3, [["abc.", "ab..", "ab..", "abc."]]),
        # Groups of four heads share keys and values: `b` counts the groups, `c` the heads of each.
        (partial(splash, 8, CAUSAL), (HEADS, GROUPED, GROUPED),
         [["...", "...", "abc..", "ab..", "ab..", "..", "abc.."]]),
    ],
)  # fmt: skip
def test_independent_dimensions(function: Any, shapes: Any, expected: list[list[str]]) -> None:
    """Of operands and of the last result: results before it are scratch, in JAX 0.10."""
    found = [(free(op), len(op.rule.operands)) for op in kernels(read(function, *shapes))]
    assert [[*dims[:operands], dims[-1]] for dims, operands in found] == expected


def test_gradient_of_grouped_heads() -> None:
    """The kernel for keys and values adds up over the heads of a group, so it is split into whole groups."""
    ops = {
        op.kernel.name: free(op)
        for op in kernels(read(partial(gradient, partial(splash, 8, CAUSAL)), HEADS, GROUPED, GROUPED))
        if op.kernel
    }
    assert ops["splash_mha_dq_no_residuals"][-1] == "abc.."
    assert ops["splash_mha_dkv_no_residuals"][-2:] == ["ab..", "ab.."]


def rowwise(
    index: Callable[[Any], tuple[Any, ...]], rows: int, x: Any, *, body: Any = None, semantics: str = "arbitrary"
) -> Any:
    """A kernel over an array of 64 rows, of which each step makes `rows` at the place that `index` says."""

    def plain(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * 2

    spec = pl.BlockSpec((rows, 128), index)
    return pl.pallas_call(
        body or plain,
        out_shape=S(x.shape, x.dtype),
        grid=(64 // rows,),
        in_specs=[spec],
        out_specs=spec,
        compiler_params=pltpu.CompilerParams(dimension_semantics=(semantics,)),
    )(x)


def numbered(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] + pl.program_id(0).astype(jnp.float32)


def told_first(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] + jax.lax.rem(pl.program_id(0), 2).astype(jnp.float32)


@pytest.mark.parametrize(
    ("index", "body", "expected"),
    [
        (lambda i: (i, 0), None, ["a.", "a."]),
        (lambda i: (jax.lax.div(2 * i + 1, 2), 0), None, ["a.", "a."]),
        (lambda i: (7 - i, 0), None, None),  # from the end
        (lambda i: (i, 0), numbered, None),
        (lambda i: (i, 0), told_first, ["a.", "a."]),  # pairs of windows: 4 of them
    ],
    ids=["plain", "arithmetic", "reversed", "reads its index", "reads its index modulo 2"],
)  # fmt: skip
def test_what_a_step_may_depend_on(index: Any, body: Any, expected: list[str] | None) -> None:
    (op,) = kernels(read(partial(rowwise, index, 8, body=body), S((64, 128), jnp.float32)))
    assert (None if op.opaque else free(op)) == expected
    if body is told_first:
        assert op.rule.sizes[0] == 4


def test_windows_stay_whole() -> None:
    (op,) = kernels(read(partial(rowwise, lambda i: (i, 0), 16), S((64, 128), jnp.float32)))
    assert [[op.rule.sizes[f] for f in dim] for dim in op.rule.results[0]] == [[4, 16], [128]]


# ---------------------------------------------------------------- what they take


def test_a_causal_kernel_skips_half() -> None:
    """4 products of 256 x 256 x 128 a head, of which a causal mask needs 3 blocks of 128 of 4."""
    (whole,), (half,) = (kernels(read(partial(attention, causal=causal), *(HEADS,) * 3)) for causal in (False, True))
    assert whole.kernel is not None and half.kernel is not None
    assert half.kernel.products / whole.kernel.products == pytest.approx(3 / 4, rel=0.01)


def test_products_of_a_body_are_counted() -> None:
    """A kernel without an estimate of its author's: 2 x 256 x 128 x 64, in four steps."""

    def body(x_ref: Any, w_ref: Any, o_ref: Any) -> None:
        o_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    def product(x: Any, w: Any) -> Any:
        return pl.pallas_call(
            body,
            out_shape=S((256, 128), jnp.float32),
            grid=(4,),
            in_specs=[pl.BlockSpec((64, 64), lambda i: (i, 0)), pl.BlockSpec((64, 128), lambda i: (0, 0))],
            out_specs=pl.BlockSpec((64, 128), lambda i: (i, 0)),
        )(x, w)

    source = read(product, S((256, 64), jnp.float32), S((64, 128), jnp.float32))
    (op,) = kernels(source)
    assert op.kernel is not None
    assert op.kernel.products == 2 * 256 * 128 * 64
    assert source.program.flops >= op.kernel.products


def test_data_that_is_known_decides_what_is_skipped() -> None:
    """A local window of splash attention, whose mask is a constant of the program: 2 of 4 blocks a row at most."""
    q = S((1, 2, 512, 128), jnp.bfloat16)
    local = splash_attention_mask.LocalMask((512, 512), (128, 0), 0)
    (op,) = kernels(read(partial(splash, 2, local), q, q, q))
    assert op.kernel is not None
    one_block = 4 * 128 * 128 * 128
    assert op.kernel.products == pytest.approx(2 * 7 * one_block)  # 1 + 2 + 2 + 2 blocks


@pytest.mark.parametrize("function", [attention, partial(splash, 8, CAUSAL)], ids=["flash", "splash"])
def test_kernels_of_any_number_of_steps_are_read(function: Any) -> None:
    """A million sequences, 34 million steps: the dimensions of four sequences, and their work times 2**18."""
    many = S((2**20, *HEADS.shape[1:]), HEADS.dtype)
    (few,), (large,) = (kernels(source := read(function, *(shape,) * 3)) for shape in (HEADS, many))
    assert few.kernel is not None and large.kernel is not None
    assert (free(large), large.kernel.products) == (free(few), few.kernel.products * 2**18)
    assert "kernel" not in str(source.notices)


def skipping(columns: int, x: Any) -> Any:
    """A kernel of 2**13 times so many steps, which skips those below a diagonal."""

    def body(x_ref: Any, o_ref: Any) -> None:
        @pl.when(pl.program_id(0) <= pl.program_id(1))
        def _() -> None:
            o_ref[...] = jnp.sin(x_ref[...])

    spec = pl.BlockSpec((8, 128), lambda i, j: (i, j))
    return pl.pallas_call(body, out_shape=x, grid=(2**13, columns), in_specs=[spec], out_specs=spec)(x)


def looping(_: int, x: Any) -> Any:
    """A kernel with a loop whose length is data."""

    def body(x_ref: Any, o_ref: Any) -> None:
        times = x_ref[0, 0].astype(jnp.int32)
        o_ref[...] = jax.lax.fori_loop(0, times, lambda _, y: jnp.sin(y), x_ref[...])

    return pl.pallas_call(body, out_shape=x)(x)


def nested(_: int, x: Any) -> Any:
    """A kernel without a grid, which is all of its array: sines, four times for each element."""

    def body(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = jax.lax.fori_loop(0, 4, lambda _, y: jnp.sin(y), x_ref[...])

    return pl.pallas_call(body, out_shape=x)(x)


def unread(_: int, x: Any) -> Any:
    """A kernel for GPUs, which toast cannot read, in the user's own region."""
    mesh = AbstractMesh((2,), ("data",))
    call = jax.ffi.ffi_call("mosaic_gpu_v2", x)
    return jax.shard_map(call, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)(x)


@pytest.mark.parametrize(
    ("function", "columns", "said"),
    [
        (skipping, 8, []),
        (skipping, 2**13, ["as if it skipped no step: its grid is too large to look at each"]),
        (nested, 1, []),
        (looping, 1, ["as if its loops of unknown length ran once"]),
        (unread, 1, ["as if it only moved its arrays: what it computes only its author knows"]),
    ],
)
def test_what_the_price_of_a_kernel_assumes_is_said(function: Any, columns: int, said: list[str]) -> None:
    notices = read(partial(function, columns), S((2**16, 128 * columns), jnp.float32)).notices
    found = [notice.partition("priced ")[2].partition(";")[0] for notice in notices if "priced" in notice]
    assert found == said


# ---------------------------------------------------------------- on parts


def bodies(text: str) -> list[str]:
    """The kernels of a program, printed."""
    module = xla.parse_module(xla.make_context(), text)
    calls = xla.walk_ops(module, "stablehlo.custom_call")
    return [str(parse_body(config_of(call.attributes["backend_config"].value))) for call in calls]


@pytest.mark.parametrize("kind", ["flash", "splash"])
def test_a_rewritten_kernel_is_the_one_that_jax_makes_for_the_part(kind: str) -> None:
    function: Any = attention if kind == "flash" else None
    whole = [HEADS] * 3 if function else [HEADS, GROUPED, GROUPED]
    part = [S((x.shape[0] // 2, x.shape[1] // 2, *x.shape[2:]), x.dtype) for x in whole]
    forms = [function or partial(splash, heads, CAUSAL) for heads in (8, 4)]
    forms = [partial(gradient, form) for form in forms]  # which has the kernel of the forward pass too
    program = lowered(forms[0], *whole)
    module = xla.parse_module(xla.make_context(), program)
    ops = kernels(load("kernels.mlir", content=program.encode()))
    rewritten = []
    for call, op in zip(xla.walk_ops(module, "stablehlo.custom_call"), ops, strict=True):
        config = config_of(call.attributes["backend_config"].value)
        assert op.kernel is not None
        axes = [op.kernel.axes[number] for number in (0, 1)]  # batch, heads or groups of them
        body = with_smaller_grid(config, dict.fromkeys(axes, 2))
        rewritten.append(str(parse_body({"body": body})))
    assert rewritten == bodies(lowered(forms[1], *part))


def test_kernels_of_a_microbatch_are_those_that_jax_makes_for_it() -> None:
    function, shapes = partial(gradient, partial(splash, 8, CAUSAL)), (HEADS, GROUPED, GROUPED)
    found = with_microbatches(read(function, *shapes), 2)
    assert isinstance(found, Source), found
    part = lowered(function, *(S((x.shape[0] // 2, *x.shape[1:]), x.dtype) for x in shapes))
    assert bodies(str(found.module)) == bodies(part)


def on_mesh(function: Callable[..., Any], *shapes: Any) -> Case:
    source = read(function, *shapes)
    return Case(source, evaluator_of(source, round_mesh(data=2, model=4)))


def grids(text: str) -> list[list[int]]:
    """The grids of the kernels of a program, in either language."""
    found = re.findall(r'body(?:\\22|\\?"): ?(?:\\22|\\?")([A-Za-z0-9+/=]+)', text)
    return [[int(n) for n in main_of(parse_body({"body": body})).attributes["iteration_bounds"]] for body in found]


@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
def test_written_with_smaller_grids(form: str) -> None:
    """Batch over data, heads over model: 4 x 8 x 2 x 2 steps become 2 x 2 x 2 x 2."""
    case = on_mesh(attention, *(HEADS,) * 3)
    lowered = case.lowered((case.shard("q.0", "data"), case.shard("q.1", "model")))
    assert grids(emit(case.source, lowered, form).decode()) == [[2, 2, 2, 2]]
    assert "toast.kernel" not in emit(case.source, lowered, "stablehlo").decode()


def test_what_is_whole_stays_as_it_is() -> None:
    case = on_mesh(attention, *(HEADS,) * 3)
    text = emit(case.source, case.lowered((case.shard("q.3", "data"),)), "stablehlo").decode()
    assert grids(text) == [[4, 8, 2, 2]]
    assert "manual_computation" not in text


def one_sequence(q: Any, k: Any, v: Any) -> Any:
    return splash_kernel(len(q), splash_attention_mask.CausalMask((q.shape[1], k.shape[1])))(q, k, v)


def columns(x: Any, w: Any, sizes: Any) -> Any:
    return gmm(x, w, sizes, preferred_element_type=jnp.float32)


def test_kernels_that_only_multiply_are_faster_than_attention() -> None:
    """0.67 of the 459 TFLOP/s of v5p, and 3.8 us to start; products of groups are fitted to a published profile."""
    grouped = partial(gmm, tiling=(512, 1024, 1024))
    arrays = S((8192, 2048), jnp.bfloat16), S((2, 2048, 1024), jnp.bfloat16), S((2,), jnp.int32)
    evaluator = evaluator_of(read(grouped, *arrays), "v5p-8")
    (use,) = (one for one in evaluator.kernels(()) if evaluator.problem.program.ops[one.op].kernel)
    kernel = evaluator.problem.program.ops[use.op].kernel
    assert kernel is not None and kernel.only_multiplies
    assert use.seconds == pytest.approx(kernel.products / (0.67 * 459e12) + 3.8e-6, rel=0.01)
    (softmax,) = kernels(read(attention, *(HEADS,) * 3))
    assert softmax.kernel is not None and not softmax.kernel.only_multiplies


WHOLE, MANY, FEW = (2, 2, 256, 128), (4, 128, 128), (2, 128, 128)
# Function, shapes, the kernel's operand that is the function's first argument, letters of the first kernel's rule.
NUMBERED: dict[str, tuple[Any, tuple[tuple[int, ...], ...], int, str]] = {
    "attention": (attention, (WHOLE,) * 3, 0, "ab"),
    "without a mask": (partial(attention, causal=False), (WHOLE,) * 3, 0, "abc"),
    "gradient": (partial(gradient, attention), (WHOLE,) * 3, 0, "ab"),
    "grouped heads": (one_sequence, (MANY, FEW, FEW), 2, "a"),
    "gradient of grouped heads": (partial(gradient, one_sequence), (MANY, FEW, FEW), 2, "a"),
    "columns of experts": (columns, ((128, 128), (2, 128, 256)), 5, "a"),
}


@pytest.mark.parametrize("kind", sweep(NUMBERED, "grouped heads", "columns of experts"))
def test_parts_have_the_numbers_of_the_whole(kind: str) -> None:
    """The kernels in interpreted mode, on a CPU: on the halves that the rule says, and on everything."""
    function, shapes, first, letters = NUMBERED[kind]
    arrays = [np.asarray(jax.random.normal(jax.random.key(k), x), np.float32) for k, x in enumerate(shapes)]
    others = [np.array([50, 78], np.int32)] if function is columns else []
    op = kernels(read(function, *(S(a.shape, a.dtype) for a in (*arrays, *others))))[0]
    made = free(op)[-1] if function is columns else free(op)[first]  # attention lies as the queries
    with pltpu.force_tpu_interpret_mode():
        whole = jax.tree.leaves(function(*arrays, *others))
        for letter in letters:
            dims = [place(operand, letter) for operand in op.rule.operands[first : first + len(arrays)]]
            halves = [
                jax.tree.leaves(
                    function(
                        *(a if d is None else np.split(a, 2, d)[k] for a, d in zip(arrays, dims, strict=True)), *others
                    )
                )
                for k in range(2)
            ]
            for k, array in enumerate(whole):  # gradients lie as what they are of
                dim = dims[k] if len(whole) > 1 else made.index(letter)
                assert dim is not None
                np.testing.assert_allclose(np.concatenate([h[k] for h in halves], dim), array, rtol=1e-4, atol=1e-4)


def place(dims: tuple[tuple[int, ...], ...], letter: str) -> int | None:
    """The dimension of an array that a factor of `free` splits."""
    return next((d for d, factors in enumerate(dims) if ord(letter) - 97 in factors), None)


# ---------------------------------------------------------------- cuDNN, and what users say


def attention_of_cudnn(config: str = "", target: str = "__cudnn$fmhaSoftmax") -> str:
    """Batch 8, 16 heads of queries and 4 of keys, 64 queries and keys, as JAX writes it, batch and heads apart."""
    stated = (
        '{"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"dimensions": ["8", "16", "64", "64"]}, '
        '"mask_type": "CAUSAL", "bmm1_dot_dimension_numbers": {"lhs_batch_dimensions": ["0", "2"]}}}'
    )
    text = (config or stated).replace('"', "\\22")
    q, k = "tensor<8x64x16x32xbf16>", "tensor<8x64x4x32xbf16>"
    return f"""
module @jit_f {{
  func.func public @main(%q: {q} loc("q"), %k: {k} loc("k"), %v: {k} loc("v")) -> tensor<8x16x64x32xbf16> {{
    %0:2 = stablehlo.custom_call @{target}(%q, %k, %v) {{api_version = 2 : i32, backend_config = "{text}"}}
      : ({q}, {k}, {k}) -> (tensor<8x16x64x32xbf16>, tensor<0xui8>)
    return %0#0 : tensor<8x16x64x32xbf16>
  }}
}}
"""


def test_attention_of_cudnn() -> None:
    source = load("c.mlir", content=attention_of_cudnn().encode())
    (op,) = kernels(source)
    assert free(op) == ["a.bc.", "a.b.", "a.b.", "abc..", "."]
    assert op.flops == 2 * 2 * 8 * 16 * 64 * 64 * 32 / 2  # half of two products
    case = Case(source, evaluator_of(source, round_mesh(data=2, model=4)))
    lowered = case.lowered((case.shard("q.0", "data"), case.shard("k.2", "model")))
    text = emit(source, lowered, "stablehlo").decode()
    assert r"dimensions\22: [\224\22, \224\22, \2264\22, \2264\22]" in text
    assert "(tensor<4x64x4x32xbf16>, tensor<4x64x1x32xbf16>, tensor<4x64x1x32xbf16>) -> (tensor<4x4x64x32xbf16>" in text


@pytest.mark.parametrize("config", ["{}", "[", '{"cudnn_fmha_backend_config": {"intermediate_tensor_shape": 3}}'])
def test_other_attention_is_computed_whole(config: str) -> None:
    (op,) = kernels(load("c.mlir", content=attention_of_cudnn(config).encode()))
    assert op.opaque


FOREIGN = """
module @jit_f {
  func.func public @main(%q: tensor<16x8x64xf32> loc("q"), %k: tensor<16x8x64xf32> loc("k")) -> tensor<16x8x64xf32> {
    %0 = stablehlo.custom_call @my_attention_ffi(%q, %k)
      : (tensor<16x8x64xf32>, tensor<16x8x64xf32>) -> tensor<16x8x64xf32>
    return %0 : tensor<16x8x64xf32>
  }
}
"""


def told(tmp_path: Path, text: str) -> Source:
    file = tmp_path / "kernels.yaml"
    file.write_text(text)
    return load("f.mlir", content=FOREIGN.encode(), kernels=str(file))


def test_what_users_say(tmp_path: Path) -> None:
    source = load("f.mlir", content=FOREIGN.encode())
    assert any("my_attention_ffi, rule: '([a, b, c], [a, b, c])->([a, b, c])" in one for one in source.notices)
    rule = "([b, h, d], [b, h, e])->([b, h, d]) need_replication={d}"
    source = told(tmp_path, f"kernels:\n- name: my_*\n  rule: {rule}\n  flops: 2*b*h*d*min(d, e)\n")
    (op,) = kernels(source)
    assert free(op) == ["ab.", "ab.", "ab."]
    assert op.flops == 2 * 16 * 8 * 64 * 64
    case = Case(source, evaluator_of(source, round_mesh(data=2, model=4)))
    text = emit(source, case.lowered((case.shard("q.0", "data"), case.shard("q.1", "model"))), "stablehlo").decode()
    assert "custom_call @my_attention_ffi" in text and "(tensor<8x2x64xf32>, tensor<8x2x64xf32>)" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kernels:\n- name: my_*\n  rule: ([b], [b])->([b])\n", "kernels.yaml:2: kernel my_attention_ffi has an array"),
        ("kernels:\n- name: my_*\n  rule: ([b, h, d])->([b, h, d])\n", "has 2 operands and 1 results"),
        ("kernels:\n- name: my_*\n  rule: b->b\n", "kernels.yaml:3: the rule cannot be read"),
        ("kernels:\n- name: my_*\n  flops: 2 << 9\n", "kernels.yaml:3: flops:"),
        ("kernels:\n- name: my_*\n  flops: __import__('os')\n", "is not known here"),
        ("kernel: 3\n", 'unknown key "kernel"'),
        ("- rule: ([b])->([b])\n", "a kernel needs a name"),
    ],
)
def test_what_users_say_wrong(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ToastError) as error:
        told(tmp_path, text)
    assert said in str(error.value)


def test_the_line_to_paste() -> None:
    case = on_mesh(attention, *(HEADS,) * 3)
    lowered = case.lowered((case.shard("q.0", "data"), case.shard("q.1", "model")))
    (line,) = kernel_lines(case.source, lowered)
    specs = ", ".join(['P("data", "model")'] * 3)
    assert f'in_specs=({specs}), out_specs=P("data", "model")' in line.line
    assert emit(case.source, lowered, "python").decode().count("# XLA runs these kernels whole") == 1
