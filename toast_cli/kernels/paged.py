"""Kernels of paged attention: which dimension of their arrays is what, and their bodies for local shapes.

A table says at run time which pages of the cache a sequence reads, so that a body does not tell which dimensions are
independent; `KERNELS` says it. A body depends on the sizes of its arrays in many places, so for local shapes the kernel
is lowered anew, by the package that it comes from. It is split only if the installed package, given the parameters that
the body shows, lowers it for the program's own shapes to that same body.
"""

from __future__ import annotations

import importlib
import re
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, partial
from itertools import count
from math import prod
from typing import Any

import numpy as np

from toast_cli.errors import InputError
from toast_cli.kernels import KernelError
from toast_cli.kernels.mosaic import TARGET, config_of, main_of, parse_body
from toast_cli.kernels.table import Table, UserKernel, read_table, rule_of, sizes_of
from toast_cli.program.model import PAGED, HandWritten, Rule, Value, dtype_of
from toast_cli.xla import ir, walk_ops

Parameters = Mapping[str, Any]
ASSUMED = "every sequence used all of its entries in the page table"
SOFTMAX = 8.0  # vector operations of a softmax on each score
# Numbers that no program has, in place of floating-point parameters until the body's own are known; exact in f32.
_UNLIKELY = (0.7109375, -1234.5, 37.0625)
_VALUE = re.compile(r"%(\w+)")
_SAME_SHAPE = re.compile(r'%(\w+) = "stable_mosaic\.vector\.shape_cast"\(%(\w+)\) : \((.*)\) -> \3$')
_FLOAT = re.compile(r"value = (\S+) : f32")
# The chip that kernels are lowered for: they differ for those before v4 only, which lack arithmetic on bf16.
_DEVICE = "TPU v6 lite"


@dataclass(frozen=True)
class PagedKernel:
    """A kernel of paged attention.

    Attributes:
        pattern: of the kernel's name in the call. package, function: where it comes from; no package: it is priced, and
            not lowered anew.
        text: its rule: b sequences of up to p pages, t tokens, k times u heads of keys and values, each for g of
            queries, n pages of s positions, d features; other names are unsharded. u: see `_fewest_heads`.
        arguments: [arguments of `function`] operand of the call, and names of the argument's dimensions.
        fixed: sizes that the arrays do not tell.
        parameters: grid, shapes of the scratch arrays and window of the queries -> parameters, those of `floats` aside.
        floats: names of floating-point parameters. capped: that of the cap on scores, which only bodies with a tanh
            have.
    """

    pattern: str
    package: str
    function: str
    text: str
    arguments: tuple[tuple[int, str], ...]
    parameters: Callable[[list[int], list[tuple[int, ...]], tuple[int, ...]], Parameters]
    floats: tuple[str, ...]
    capped: str
    fixed: tuple[tuple[str, int], ...] = (("u", 1),)

    @cached_property
    def rule(self) -> UserKernel:
        (entry,) = read_table(Table(f"- {{name: '{self.pattern}', rule: '{self.text}'}}", self.function))
        return entry

    def sizes(self, operands: list[Value], results: list[Value]) -> dict[str, int]:
        return sizes_of(self.rule, self.function, operands, results, dict(self.fixed))


def _of_pages(grid: list[int], scratch: list[tuple[int, ...]], _: tuple[int, ...]) -> Parameters:
    return {"pages_per_compute_block": scratch[0][1], "inline_seq_dim": len(grid) == 3}


def _of_ragged(_: list[int], scratch: list[tuple[int, ...]], window: tuple[int, ...]) -> Parameters:
    return {"num_kv_pages_per_block": scratch[0][1], "num_queries_per_block": window[0]}


_PAGES = "jax.experimental.pallas.ops.tpu.paged_attention"
_RAGGED = "jax.experimental.pallas.ops.tpu.ragged_paged_attention"
KERNELS = (
    *(
        PagedKernel(
            "paged_flash_attention_kernel*",
            _PAGES,
            "paged_attention",
            f"([b], [b*p], [_], [_], [b, k*u*g, {one}d], [k*u, n, s, d], [k*u, n, s, d])->"
            f"([b, k*u*g, {one}d], [b, k*u*g, {one}_], [b, k*u*g, {one}_]) need_replication={{u, g, p, n, s, d}}",
            ((4, "b, k*g, d"), (5, "k, n, s, d"), (6, "k, n, s, d"), (0, "b"), (1, "b, p")),
            _of_pages,
            ("mask_value",),
            "attn_logits_soft_cap",
        )
        for one in ("", "_, ")  # groups of fewer than 8 heads have a dimension more
    ),
    PagedKernel(
        "ragged_paged_attention_kernel",
        _RAGGED,
        "ragged_paged_attention",
        "([b], [b, p], [_], [_], [_], [t, k*u*g, d], [n, s, k*u*c, d])->([t, k*u*g, d]) "
        "need_replication={b, t, u, g, p, n, s, c, d}",
        ((5, "t, k*g, d"), (6, "n, s, k*c, d"), (0, "b"), (1, "b, p"), (2, ""), (4, "")),
        _of_ragged,
        ("sm_scale", "mask_value"),
        "soft_cap",
        (("u", 1), ("c", 2)),  # c: keys and values
    ),
    # That of tpu-inference, which writes new keys and values into the pages as well. Its package starts vLLM where it
    # is imported, and only knows TPUs that it runs on.
    PagedKernel(
        "RPA?-p_*",
        "",
        "ragged_paged_attention of tpu-inference",
        "([b], [b*p], [_], [_], [_], [_], [_], [k, t, g, q, d], [t, c, e, d], [n, s, c, e, d])->"
        "([k, t, g, q, d], [n, s, c, e, d])",
        (),
        _of_ragged,
        (),
        "",
    ),
)


def read_paged(
    name: str, config: dict[str, Any], operands: list[Value], results: list[Value], *, splits: bool
) -> tuple[HandWritten, Rule | None, str] | None:
    """A kernel's cost, its rule, and if it has none, why; None for a kernel that `KERNELS` does not have.

    tpu-inference calls one kernel for sequences of one new token, and one for all others. Which sequences are of which
    kind is data: in a step of as many tokens as sequences all are of the first, in others of the second.

    Args:
        splits: False for a kernel that has local shapes already.
    """
    for kernel in KERNELS:
        if not fnmatchcase(name, kernel.pattern):
            continue
        try:
            sizes = kernel.sizes(operands, results)
        except InputError:
            continue
        b, p, k, g, n, s, d = (sizes[letter] for letter in "bpkgnsd")
        tokens, whole = sizes.get("t", b), f"{kernel.function} is split only where the program splits it, in shard_map"
        if not kernel.package and (name.startswith("RPAd") != (tokens == b) or name.startswith("RPAp")):
            return HandWritten(name, "mosaic", 0.0, 0.0, 0.0), None, whole
        scores = float(tokens * k * g * sizes.get("q", 1) * p * s)
        products, vector = 4.0 * d * scores, SOFTMAX * scores
        used = min(1.0, b * p / n)
        moved = 0.0
        for dims, value in zip(kernel.rule.operands or (), operands, strict=True):
            moved += value.bytes * (used if ("n",) in dims else 1.0)
        for dims, value in zip(kernel.rule.results, results, strict=True):
            moved += 0.0 if ("n",) in dims else value.bytes  # in pages, a row for each token
        facts = HandWritten(name, "mosaic", products, vector, moved)
        if not splits or not kernel.package:
            return facts, None, whole
        try:
            parameters = _parameters(kernel, config, sizes, operands)
            sizes["u"] = _fewest_heads(kernel, parameters, sizes, operands)
        except KernelError as error:
            return facts, None, str(error)
        sizes["k"] //= sizes["u"]
        found = tuple(sorted(parameters.items()))
        facts = HandWritten(name, PAGED, products, vector, moved, parameters=found)
        why = f"{kernel.function} lowers for no part of its heads"
        return facts, rule_of(kernel.rule, sizes, operands, results), why
    return None


def local_body(facts: HandWritten, operands: list[Value], results: list[Value]) -> str:
    """The body in base64 of a kernel with arrays of these local shapes. Raises `InputError` if the kernel's authors
    have none for them."""
    for kernel in KERNELS:
        if fnmatchcase(facts.name, kernel.pattern) and len(kernel.rule.results[0]) == len(results[0].shape):
            sizes = kernel.sizes(operands, results)
            try:
                return str(_lowered(kernel, dict(facts.parameters), sizes, operands)["body"])
            except KernelError as error:
                raise InputError(f"kernel {facts.name} cannot run on a part of its arrays: {error}") from None
    raise AssertionError(facts.name)


def operands_of_function(facts: HandWritten) -> list[int]:
    """Operands of a kernel of paged attention in the order in which its function takes them; empty for others."""
    fitting = [kernel for kernel in KERNELS if facts.kind == PAGED and fnmatchcase(facts.name, kernel.pattern)]
    return [operand for operand, _ in fitting[0].arguments] if fitting else []


def _parameters(
    kernel: PagedKernel, config: dict[str, Any], sizes: dict[str, int], operands: list[Value]
) -> Parameters:
    """The parameters with which the installed package lowers the kernel to the program's body. Raises `KernelError` if
    it knows none."""
    body = parse_body(config)
    main, lines = main_of(body), _lines(body)
    arguments = [tuple(a.type.shape) for a in main.regions[0].blocks[0].arguments if isinstance(a.type, ir.ShapedType)]
    names = (*kernel.floats, kernel.capped) if any("math.tanh" in line for line in lines) else kernel.floats
    unlikely = dict(zip(names, _UNLIKELY, strict=False))
    try:
        grid = [int(bound) for bound in main.attributes["iteration_bounds"]]
        first = ir.DictAttr(next(iter(main.attributes["window_params"])))
        window = tuple(int(n) for n in first["window_bounds"])
        scratch = arguments[-int(ir.IntegerAttr(main.attributes["scratch_operands"]).value) :]
        parameters = {**kernel.parameters(grid, scratch, window), **unlikely}
    except (KeyError, IndexError):
        raise KernelError(f"it is called as {kernel.function} of {kernel.package}, and has another grid") from None
    trial = _lines(parse_body(_lowered(kernel, parameters, sizes, operands)))
    for ours, theirs in zip(trial, lines, strict=False):
        said, number = _FLOAT.search(ours), _FLOAT.search(theirs)
        for name, value in unlikely.items():
            if said and number and _number(said[1]) == value:
                parameters[name] = _number(number[1])
    if _lines(parse_body(_lowered(kernel, parameters, sizes, operands))) != lines:
        raise KernelError(f"the installed {kernel.package} does not lower {kernel.function} to this body")
    return parameters


def _fewest_heads(kernel: PagedKernel, parameters: Parameters, sizes: dict[str, int], operands: list[Value]) -> int:
    """The fewest heads of keys and values on a device such that the package has the kernel for each number of them that
    is a multiple and divides them all: of 24 heads, 8 for the ragged kernel, which has none for 3, 6 and 12."""
    heads = sizes["k"]
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]

    def is_refused(count: int) -> bool:
        try:
            _lowered(kernel, parameters, {**sizes, "k": count}, operands, trial=True)
        except KernelError:
            return True
        return False

    refused = [count for count in divisors[:-1] if is_refused(count)]
    return next(least for least in divisors if all(count % least for count in refused))


def _lowered(
    kernel: PagedKernel, parameters: Parameters, sizes: dict[str, int], operands: list[Value], *, trial: bool = False
) -> dict[str, Any]:
    """The configuration of the kernel's call, as its package lowers it; none for a trial, which only traces it: the
    package checks shapes then. Raises `KernelError` if it does not."""
    users_own = "jax" in sys.modules
    import jax  # heavy, and few programs have such kernels

    if not users_own:
        jax.config.update("jax_platforms", "cpu")  # no device is needed, and none is to be claimed
    shapes = []
    for number, names in kernel.arguments:
        dims = [prod(sizes[one] for one in dim.split("*")) for dim in names.split(", ") if dim]
        value = operands[number]
        shapes.append(jax.ShapeDtypeStruct(tuple(dims) or value.shape, dtype_of(value.dtype)))
    device = jax.sharding.AbstractDevice(_DEVICE, 1, "tpu")
    try:
        function = getattr(importlib.import_module(kernel.package), kernel.function)
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
            traced = jax.jit(partial(function, **parameters)).trace(*shapes)
            if trial:
                return {}
            lowered = traced.lower(lowering_platforms=("tpu",))
    except (
        ImportError, AttributeError,  # the package, or its kernel, is not installed in this form
        NotImplementedError,  # JAX raises it for shapes that its kernels have no form for: the call is not split so
        TypeError, ValueError, AssertionError,  # raised by them for parameters and shapes that do not go together
    ) as error:  # fmt: skip
        raise KernelError(str(error).partition("\n")[0] or type(error).__name__) from None
    for call in walk_ops(lowered.compiler_ir(), "stablehlo.custom_call"):
        if ir.StringAttr(call.attributes["call_target_name"]).value == TARGET:
            return config_of(ir.StringAttr(call.attributes["backend_config"]).value)
    raise KernelError("it has no call of a kernel")


def _lines(body: Any) -> list[str]:
    """A body's text without locations; values are numbered in order, and a cast of a shape to itself, which JAX writes
    or leaves out, is left out."""
    names: dict[str, int] = {}
    numbers, lines = count(), []

    def number(name: str) -> int:
        if name not in names:
            names[name] = next(numbers)
        return names[name]

    for line in str(body.operation.get_asm(enable_debug_info=False)).splitlines():
        if cast := _SAME_SHAPE.search(line):
            names[cast[1]] = number(cast[2])
        else:
            lines.append(_VALUE.sub(lambda value: f"%{number(value[1])}", line))
    return lines


def _number(text: str) -> float:
    """A number of 32 bits as MLIR prints it: in digits, or as its bits."""
    return struct.unpack(">f", bytes.fromhex(text[2:]))[0] if text.startswith("0x") else float(np.float32(text))
