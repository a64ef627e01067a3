"""Kernels over paged caches: which dimension of their arrays is what, and their bodies for local shapes.

A table says at run time which pages of the cache a sequence reads, so that a body does not tell which dimensions are
independent; `KERNELS` says it. The body of an attention depends on the sizes of its arrays in many places, so for local
shapes the kernel is lowered anew, by the package that it comes from. It is split only if the installed package, given
the parameters that the body shows, lowers it for the program's own shapes to that same body.
"""

from __future__ import annotations

import importlib.util
import re
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache, partial
from itertools import count
from math import prod
from typing import Any

import numpy as np

from toast_cli.base.errors import InputError
from toast_cli.kernels import KernelError
from toast_cli.kernels.mosaic import TARGET, config_of, main_of, parse_body
from toast_cli.kernels.table import Table, UserKernel, read_table, rule_of, sizes_of
from toast_cli.program.model import PAGED, HandWritten, Rule, Value, dtype_of
from toast_cli.program.ops import CUSTOM_CALL
from toast_cli.xla import call_target, ir, walk_ops

Parameters = Mapping[str, Any]
Sizes = dict[str, int]  # of the dimensions of a kernel's rule
ASSUMED = "every sequence used all of its entries in the page table"
VERSION = "version"  # that of the TPU, among a kernel's parameters
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
    """A kernel over a paged cache.

    Attributes:
        pattern: of the kernel's name in the call.
        text: its rule: b sequences of up to p pages, t tokens, k times u times v heads of keys and values, each for g
            times q of queries, n pages of s positions, d features; other names are unsharded. u: see
            `_fewest_heads`.
        package, function: where its parts are lowered; no package: they are not.
        operands: of `function`: "operand of the call: dimensions, ...; ...".
        parameters: name of the kernel, its function in the body -> parameters, those of `floats` aside.
        floats: names of floating-point parameters; the last is the cap on scores, which only bodies with a tanh have.
        fixed: sizes that the arrays do not tell.
        versions: of the TPUs for which `package` has different bodies; see `_module`.
    """

    pattern: str
    text: str
    package: str = ""
    function: str = ""
    operands: str = ""
    parameters: Callable[[str, Any], Parameters] = lambda *_: {}
    floats: tuple[str, ...] = ()
    fixed: tuple[tuple[str, int], ...] = ()
    versions: tuple[int, ...] = (0,)

    @cached_property
    def rule(self) -> UserKernel:
        (entry,) = read_table(Table(f"- {{name: '{self.pattern}', rule: '{self.text}'}}", self.function))
        return entry

    @cached_property
    def arguments(self) -> list[tuple[int, list[str]]]:
        """[arguments of `function`] operand of the call, and the names of each dimension."""
        arrays = (text.partition(":") for text in self.operands.split(";"))
        return [(int(number), [dim.strip() for dim in dims.split(",")]) for number, _, dims in arrays]


def _of_pages(_: str, main: Any) -> Parameters:
    grid = main.attributes["iteration_bounds"]
    return {"pages_per_compute_block": _scratch(main)[0][1], "inline_seq_dim": len(grid) == 3}


def _of_ragged(_: str, main: Any) -> Parameters:
    window = ir.DictAttr(next(iter(main.attributes["window_params"])))["window_bounds"]
    return {"num_kv_pages_per_block": _scratch(main)[0][1], "num_queries_per_block": int(next(iter(window)))}


def _of_tpu_inference(name: str, _: Any) -> Parameters:
    """The name tells the sizes of blocks. The limit is no part of a body; without one, the package asks the TPU."""
    match = re.match(r"RPA[dm]-p_\d+-bq_(\d+)_(\d+)-bkv_(\d+)_(\d+)(?:-sw_(\d+))?$", name)
    if match is None:
        raise KeyError(name)
    queries, queries_at_once, keys, keys_at_once, window = (int(text or 0) for text in match.groups())
    blocks = queries, keys, queries_at_once, keys_at_once
    parameters = {"d_block_sizes": blocks, "m_block_sizes": blocks, "vmem_limit_bytes": 1 << 26}
    return {**parameters, "sliding_window": window} if window else parameters


_PALLAS = "jax.experimental.pallas.ops.tpu"
KERNELS = (
    *(
        PagedKernel(
            "paged_flash_attention_kernel*",
            f"([b], [b*p], [_], [_], [b, k*u*g, {ones}d], [k*u, n, s, d], [k*u, n, s, d])->"
            f"([b, k*u*g, {ones}d], [b, k*u*g, {ones}_], [b, k*u*g, {ones}_]) need_replication={{u, g, p, n, s, d}}",
            f"{_PALLAS}.paged_attention",
            "paged_attention",
            "4: b, k*g, d; 5: k, n, s, d; 6: k, n, s, d; 0: b; 1: b, p",
            _of_pages,
            ("mask_value", "attn_logits_soft_cap"),
        )
        for ones in ("", "_, ")  # groups of fewer than 8 heads have a dimension of size 1 more
    ),
    PagedKernel(
        "ragged_paged_attention_kernel",
        "([b], [b, p], [_], [_], [_], [t, k*u*g, d], [n, s, k*u*c, d])->([t, k*u*g, d]) "
        "need_replication={b, t, u, g, p, n, s, c, d}",
        f"{_PALLAS}.ragged_paged_attention",
        "ragged_paged_attention",
        "5: t, k*g, d; 6: n, s, k*c, d; 0: b; 1: b, p; 2:; 4:",
        _of_ragged,
        ("sm_scale", "mask_value", "soft_cap"),
        (("c", 2),),  # keys and values
    ),
    # That of tpu-inference, which also writes new keys and values into the pages. e of them are in a word of 32 bits,
    # keys and values of a head side by side: of v heads, or each in w words.
    *(
        PagedKernel(
            "RPA?-p_*",
            "([b], [b*p], [_], [_], [_], [_], [_], [k*u*v, t, g, q, d], [t, k*u*w, e, d], [n, s, k*u*w, e, d])->"
            "([k*u*v, t, g, q, d], [n, s, k*u*w, e, d]) need_replication={b, t, u, v, w, g, q, p, n, s, e, d}",
            "tpu_inference.kernels.ragged_paged_attention.v3.kernel",
            "ragged_paged_attention",
            "7: t, k*v*g*q, d; 8: t, k*v, d; 8: t, k*v, d; 9: n, s, k*w, e, d; 0: b; 1: b*p; 2:; 3:",
            _of_tpu_inference,
            ("sm_scale", *(["v_scale"] if e == 4 else []), "soft_cap"),
            (("v", max(1, e // 2)), ("w", max(1, 2 // e)), ("e", e)),
            (6, 5),
        )
        for e in (2, 4, 1)
    ),
    PagedKernel(  # that of sglang-jax, which has two more tables of sequences, and a mask
        "RPA?-p_*",
        "([b], [b*p], [_], [_], [_], [_], [_], [_], [_], [k, t, g, q, d], [t, c, e, d], [n, s, c, e, d], [_, _])->"
        "([k, t, g, q, d], [n, s, c, e, d])",
    ),
    # Those of sglang-jax and tpu-inference that only write new keys and values into pages, here of one position, from a
    # table of slices, and perhaps their number.
    PagedKernel("*kv_cache_update_kernel", "([], [_, _], [t, c, d], [n, c, d])->([n, c, d])"),
    PagedKernel("*kv_cache_update_kernel", "([], [_, _], [_], [t, c, d], [n, c, d])->([n, c, d])"),
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
    for kernel, sizes in _fitting(name, operands, results):
        b, p, k, v, g, q, s, d = (sizes.get(letter, int(letter in "vq")) for letter in "bpkvgqsd")
        tokens, result_dims = sizes.get("t", b), kernel.rule.results
        scores = float(tokens * k * v * g * q * p * s)
        used, moved = min(1.0, b * p / sizes["n"]), 0.0
        for dims, value in zip(kernel.rule.operands or (), operands, strict=True):
            moved += value.bytes * (used if ("n",) in dims else 1.0)
        for dims, value in zip(result_dims, results, strict=True):
            moved += 0.0 if ("n",) in dims else value.bytes  # in pages, a row for each token
        if name.startswith("RPA") and (name.startswith("RPAd") != (tokens == b) or name.startswith("RPAp")):
            scores = moved = 0.0
        moved *= 1.0 if p else 2.0  # a kernel that only writes rows reads them
        facts = HandWritten(name, "mosaic", 4.0 * d * scores, SOFTMAX * scores, moved, tokens=tokens)
        if not splits or not kernel.package:
            return facts, None, "it is split only where the program splits it, in shard_map"
        try:
            parameters = _parameters(kernel, name, config, sizes, operands)
            sizes["u"] = _fewest_heads(kernel, name, parameters, sizes, operands)
        except KernelError as error:
            return facts, None, str(error)
        sizes["k"] //= sizes["u"]
        facts = replace(facts, kind=PAGED, parameters=tuple(sorted(parameters.items())))
        why = f"{kernel.function} lowers for no part of its heads"
        return facts, rule_of(kernel.rule, sizes, operands, results), why
    return None


def _fitting(name: str, operands: list[Value], results: list[Value]) -> Iterator[tuple[PagedKernel, Sizes]]:
    """The kernels that fit a name and arrays, with the sizes of the dimensions."""
    for kernel in KERNELS:
        if fnmatchcase(name, kernel.pattern):
            try:
                yield kernel, sizes_of(kernel.rule, kernel.function, operands, results, {"u": 1, **dict(kernel.fixed)})
            except InputError:
                continue


@lru_cache(maxsize=100)
def local_body(facts: HandWritten, operands: tuple[Value, ...], results: tuple[Value, ...]) -> str:
    """The body in base64 of a kernel with arrays of these local shapes. Raises `InputError` if the kernel's authors
    have none for them."""
    kernel, sizes = next(_fitting(facts.name, [*operands], [*results]))
    try:
        return str(_lowered(kernel, facts.name, dict(facts.parameters), sizes, [*operands])["body"])
    except KernelError as error:
        raise InputError(f"kernel {facts.name} cannot run on a part of its arrays: {error}") from None


def operands_of_function(facts: HandWritten) -> list[int]:
    """Operands of a kernel of paged attention in the order in which its function takes them; empty for others, and for
    a function that takes them in other shapes."""
    fitting = [kernel for kernel in KERNELS if facts.kind == PAGED and fnmatchcase(facts.name, kernel.pattern)]
    return [operand for operand, _ in fitting[0].arguments] if fitting and fitting[0].versions == (0,) else []


def _scratch(main: Any) -> list[tuple[int, ...]]:
    """Shapes of the scratch arrays."""
    shapes = [tuple(a.type.shape) for a in main.regions[0].blocks[0].arguments if isinstance(a.type, ir.ShapedType)]
    return shapes[-int(ir.IntegerAttr(main.attributes["scratch_operands"]).value) :]


def _parameters(kernel: PagedKernel, name: str, config: Any, sizes: Sizes, operands: list[Value]) -> Parameters:
    """The parameters with which the installed package lowers the kernel to the program's body. Raises `KernelError` if
    it knows none."""
    body = parse_body(config)
    main, lines = main_of(body), _lines(body)
    names = kernel.floats if any("math.tanh" in line for line in lines) else kernel.floats[:-1]
    unlikely = dict(zip(names, _UNLIKELY, strict=False))
    try:
        shown = kernel.parameters(name, main)
    except (KeyError, IndexError):
        raise KernelError(f"it is called as {kernel.function} of {kernel.package}, and has another grid") from None
    for version in kernel.versions:
        parameters = {**shown, **unlikely, VERSION: version}
        trial = _lines(parse_body(_lowered(kernel, name, parameters, sizes, operands)))
        for k, (ours, theirs) in enumerate(zip(trial, lines, strict=False)):
            match, number = _FLOAT.search(ours), _FLOAT.search(theirs)
            for parameter, value in unlikely.items():
                if match and number and _number(match[1]) == value:
                    parameters[parameter] = _number(number[1])
                    trial[k] = ours.replace(match[1], number[1])
        if trial == lines:
            return parameters
    raise KernelError(f"the installed {kernel.package} does not lower {kernel.function} to this body")


def _fewest_heads(kernel: PagedKernel, name: str, parameters: Parameters, sizes: Sizes, operands: list[Value]) -> int:
    """The fewest heads of keys and values on a device such that the package has the kernel for each number of them that
    is a multiple and divides them all: of 24 heads, 8 for the ragged kernel, which has none for 3, 6 and 12."""
    heads = sizes["k"]
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]

    def is_refused(count: int) -> bool:
        try:
            _lowered(kernel, name, parameters, {**sizes, "k": count}, operands, trial=True)
        except KernelError:
            return True
        return False

    refused = [count for count in divisors[:-1] if is_refused(count)]
    return next(least for least in divisors if all(count % least for count in refused))


def _lowered(
    kernel: PagedKernel, name: str, parameters: Parameters, sizes: Sizes, operands: list[Value], *, trial: bool = False
) -> dict[str, Any]:
    """The configuration of the kernel's call, as its package lowers it; none for a trial, which only traces it: the
    package checks shapes then. Raises `KernelError` if it does not."""
    users_own = "jax" in sys.modules
    import jax  # heavy, and few programs have such kernels

    if not users_own:
        jax.config.update("jax_platforms", "cpu")  # no device is needed, and none is to be claimed
    shapes = []
    for number, dims in kernel.arguments:
        shape = tuple(prod(sizes[n] for n in dim.split("*")) for dim in dims if dim) or operands[number].shape
        shapes.append(jax.ShapeDtypeStruct(shape, dtype_of(operands[number].dtype)))
    remaining, top = dict(parameters), kernel.package.partition(".")[0]
    device = jax.sharding.AbstractDevice(_DEVICE, 1, "tpu")
    try:
        function = partial(getattr(_module(kernel.package, remaining.pop(VERSION)), kernel.function), **remaining)
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
            traced = jax.jit(function).trace(*shapes)
            if trial:
                return {}
            call = next((call for call in _calls(traced.jaxpr) if call.params.get("name") in (name, None)), None)
            if call is None:
                raise KernelError(f"{kernel.function} of {kernel.package} does not call it")
            alone = jax.jit(partial(call.primitive.bind, **call.params))
            arrays = (jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in call.invars)
            lowered = alone.trace(*arrays).lower(lowering_platforms=("tpu",))
    except ModuleNotFoundError as error:
        install = f"pip install --no-deps {top}, or call it in shard_map"
        raise KernelError(f"{top} lowers it for parts, and is not installed ({error}): {install}") from None
    except (
        ImportError, AttributeError,  # the package is installed, and its kernel is not, or in another form
        NotImplementedError,  # raised by the package's kernels, not by toast, for shapes that they have no form for
        TypeError, ValueError, AssertionError,  # raised by them for parameters and shapes that do not go together
    ) as error:  # fmt: skip
        raise KernelError(str(error).partition("\n")[0] or type(error).__name__) from None
    calls = walk_ops(lowered.compiler_ir(), CUSTOM_CALL)
    kernels = (call for call in calls if call_target(call) == TARGET)
    return config_of(ir.StringAttr(next(kernels).attributes["backend_config"]).value)


def _calls(jaxpr: Any) -> Iterator[Any]:
    """The calls of kernels in a program of JAX, and in the functions that it calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
            continue
        for function in equation.params.values():
            yield from _calls(function) if hasattr(function, "eqns") else ()


@lru_cache(maxsize=8)
def _module(name: str, version: int) -> Any:
    """A module; for a version of TPU other than 0, a copy of it that takes this TPU for the one that it runs on.

    The copy's package is not initialised: that of tpu-inference starts vLLM then.
    """
    if not version:
        return importlib.import_module(name)
    top = name.partition(".")[0]

    def taken_out() -> dict[str, Any]:
        """The package's modules, which are removed from those that are imported."""
        return {module: sys.modules.pop(module) for module in [*sys.modules] if module.partition(".")[0] == top}

    users_own = taken_out()
    try:
        if spec := importlib.util.find_spec(top):
            sys.modules[top] = importlib.util.module_from_spec(spec)
        module: Any = importlib.import_module(name)
    finally:
        taken_out()
        sys.modules.update(users_own)
    module.get_tpu_version = lambda: version
    return module


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
