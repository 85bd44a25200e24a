"""PyTorch operators: what `torch.compile`, `torch.export` and CUDA graphs see of pagetile.

Importing this module registers ``torch.ops.pagetile``, for CPU and CUDA tensors::

    cache_write(k, v, k_cache, v_cache, slot_mapping, ...) -> ()
    paged_attention(q, k_cache, v_cache, block_table, seqused_k, cu_seqlens_q, max_seqlen_q,
                    ...) -> out
    paged_attention_lse(the same) -> (out, softmax_lse)
    paged_attention.out(q, k_cache, v_cache, block_table, seqused_k, cu_seqlens_q, max_seqlen_q,
                        out, softmax_lse=None, workspace=None, ...) -> ()
    merge_states(out_a, lse_a, out_b, lse_b) -> (out, lse)
    merge_states.out(out_a, lse_a, out_b, lse_b, out, lse) -> ()

Arguments mean what they mean in `pagetile.cache_write`, `pagetile.paged_attention` and
`pagetile.merge_states`, go by position or by name, and have the same defaults. What differs:
``plan`` is a tensor, by `plan_tensor`; results of the caller's own go to the ``.out`` overloads,
and so does a workspace; there is no ``stream``, which is PyTorch's current one, and no
``validate``, which PAGETILE_VALIDATE=1 sets.

The schemas declare what is written: the caches, and what an ``.out`` overload fills. There are no
derivatives: while gradients are recorded, an input that requires one is refused.

It needs PyTorch >= 2.4 and links nothing of it. Before 2.10 tensors come in more slowly, and fp8
queries need a release that exports float8 through DLPack; fp8 caches do not.
"""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

try:
    import torch
    from torch.autograd import forward_ad
    from torch.library import register_fake
except ImportError as error:
    raise ImportError(f"pagetile.torch needs PyTorch >= 2.4: {error}") from error

from pagetile import _C
from pagetile.attention import attend, merge
from pagetile.block_pool import BlockPool
from pagetile.cache_write import cache_write, copy_pages

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from pagetile.plan import Plan

__all__ = ["PagedKVCache", "TensorStep", "plan_tensor"]

_untyped: Any = torch  # what has no types in PyTorch

# No argument is for keywords alone: a kernel in Python gets positional ones in two thirds of the
# time (6.1 us against 9, torch 2.13). And torch.compile of 2.4 traces no `out=`, but traces it by
# position.
_WRITE = (
    "Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
    "Tensor? k_scale=None, Tensor? v_scale=None, str kv_dtype='auto', str layout='NHD', "
    "bool pdl=False"
)
_ATTENTION = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seqused_k, "
    "Tensor cu_seqlens_q, SymInt max_seqlen_q"
)
_ATTENTION_RESULTS = "Tensor(a!) out, Tensor(b!)? softmax_lse=None, Tensor(c!)? workspace=None"
_ATTENTION_OPTIONS = (
    "SymInt? max_seqlen_k=None, float? softmax_scale=None, bool causal=True, "
    "int[2] window=[-1, -1], float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, "
    "Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, str kv_dtype='auto', "
    "str layout='NHD', int num_splits=0, bool batch_invariant=False, Tensor? plan=None, "
    "bool pdl=False, bool fp8_products=False"
)
_MERGE = "Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b"
_MERGE_RESULTS = "Tensor(a!) out, Tensor(b!) lse"

_FLOAT8 = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}

# DLPack's exchange API takes any tensor. Without it (PyTorch < 2.10) they are detached here.
_HAS_EXCHANGE_API = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


def _exports_float8() -> bool:
    try:
        torch.empty(1, dtype=torch.float8_e4m3fn).__dlpack__()
    except (BufferError, RuntimeError):
        return False
    return True


_EXPORTS_FLOAT8 = _exports_float8()


# Plans


class _Handle:
    """What can be referred to weakly in place of a Plan."""

    __slots__ = ("__weakref__", "plan")

    def __init__(self, plan: Plan) -> None:
        self.plan = plan


# By the address of the buffer, which no other tensor has while the plan lives.
_plans: weakref.WeakValueDictionary[int, _Handle] = weakref.WeakValueDictionary()


def plan_tensor(plan: Plan) -> Tensor:
    """Return a plan as the tensor that ``plan`` of the operators takes.

    It is the plan's buffer, not a copy: ``make_plan(..., out=plan)`` renews it in place, outside of
    compiled code or in it. It keeps the plan alive, and must itself live as long as calls use it.

    Args:
        plan: by `pagetile.make_plan`, from PyTorch tensors.

    Returns:
        int32, one dimension, on the plan's device.

    Raises:
        TypeError: ``plan`` is no Plan, or its buffer is not PyTorch's.
    """
    if not isinstance(plan, _C.Plan):
        raise TypeError(f"plan_tensor: plan must be a Plan, got {type(plan).__name__}")
    buffer = plan.buffer
    if not isinstance(buffer, torch.Tensor):
        raise TypeError(
            "plan_tensor: plan must have been made from PyTorch tensors, its buffer is a "
            f"{type(buffer).__module__}.{type(buffer).__name__}"
        )
    address = buffer.data_ptr()
    handle = _plans.get(address)
    if handle is None or handle.plan is not plan:
        handle = _plans[address] = _Handle(plan)
    tensor = buffer.view(-1)  # of its own, so that buffer, plan and handle are no cycle
    tensor._pagetile_plan = handle  # type: ignore[attr-defined]
    return tensor


def _plan_of(function: str, tensor: Tensor) -> Plan:
    handle = _plans.get(tensor.data_ptr())
    if handle is None:
        raise ValueError(
            f"{function}: plan must be a tensor by pagetile.torch.plan_tensor that still lives, "
            f"got another of shape {tuple(tensor.shape)}"
        )
    return handle.plan


# Kernels


def _kernel_cache_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_dtype: str = "auto",
    layout: str = "NHD",
    pdl: bool = False,
) -> None:
    written = k_cache, v_cache
    if not _EXPORTS_FLOAT8:
        k_cache, v_cache, kv_dtype = _as_bytes("cache_write", k_cache, v_cache, kv_dtype)
    cache_write(
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_dtype=kv_dtype,
        layout=layout,
        pdl=pdl,
    )
    _note_write(*written)


# Inputs stand as in the schema, whose order is that of `attend`. PyTorch leaves out those at the
# end that have their default.
_ATTENTION_NAMES = tuple(inspect.signature(attend).parameters)[4:]
_PLAN = _ATTENTION_NAMES.index("plan")


def _attend(
    out: Tensor | None,
    softmax_lse: Tensor | None,
    workspace: Tensor | None,
    return_softmax_lse: bool,
    *inputs: Any,
) -> Any:
    if len(inputs) > _PLAN and inputs[_PLAN] is not None:
        plan = _plan_of("paged_attention", inputs[_PLAN])
        inputs = (*inputs[:_PLAN], plan, *inputs[_PLAN + 1 :])
    if _EXPORTS_FLOAT8:
        return attend(out, softmax_lse, workspace, return_softmax_lse, *inputs)
    given = dict(zip(_ATTENTION_NAMES, inputs, strict=False))
    k_cache, v_cache, kv_dtype = _as_bytes(
        "paged_attention", inputs[1], inputs[2], given.get("kv_dtype", "auto")
    )
    given |= {"k_cache": k_cache, "v_cache": v_cache, "kv_dtype": kv_dtype}
    return attend(out, softmax_lse, workspace, return_softmax_lse, **given)


_kernel_attention = functools.partial(_attend, None, None, None, False)
_kernel_attention_lse = functools.partial(_attend, None, None, None, True)


def _kernel_attention_out(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seqused_k: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    out: Tensor,
    softmax_lse: Tensor | None = None,
    workspace: Tensor | None = None,
    *options: Any,
) -> None:
    call = (q, k_cache, v_cache, block_table, seqused_k, cu_seqlens_q, max_seqlen_q, *options)
    _attend(out, softmax_lse, workspace, False, *call)
    _note_write(*(x for x in (out, softmax_lse, workspace) if x is not None))


def _kernel_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Any:
    return merge(out_a, lse_a, out_b, lse_b, None, None, -1, None)


def _kernel_merge_out(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor
) -> None:
    merge(out_a, lse_a, out_b, lse_b, out, lse, -1, None)
    _note_write(out, lse)


def _note_write(*written: Tensor) -> None:
    """Raise the version counters, so that autograd sees writes to what it has saved."""
    for tensor in written:
        if not tensor.is_inference():  # which have no counter; PyTorch 2.4 refuses them
            torch.autograd.graph.increment_version(tensor)


def _as_bytes(
    function: str, k_cache: Tensor, v_cache: Tensor, kv_dtype: str
) -> tuple[Tensor, Tensor, str]:
    """Pass float8 caches as uint8, where PyTorch does not export float8."""
    stored = _FLOAT8.get(k_cache.dtype)
    if stored is None or v_cache.dtype != k_cache.dtype:
        return k_cache, v_cache, kv_dtype
    if kv_dtype not in ("auto", stored) and (kv_dtype, stored) != ("fp8", "fp8_e4m3"):
        dtype = str(k_cache.dtype).removeprefix("torch.")
        raise ValueError(
            f"{function}: kv_dtype {kv_dtype!r} does not fit k_cache, which is {dtype}"
        )
    return k_cache.view(torch.uint8), v_cache.view(torch.uint8), stored


def _without_grad(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Hand over detached tensors: ``__dlpack__`` refuses those that require a gradient."""

    def run(*inputs: Any) -> Any:
        return kernel(
            *(x.detach() if isinstance(x, torch.Tensor) and x.requires_grad else x for x in inputs)
        )

    return run


# Fake kernels: results without numbers, and the errors that shapes and dtypes alone can tell


def _require(
    function: str,
    name: str,
    tensor: Tensor,
    ndim: int,
    meaning: str,
    dtypes: tuple[torch.dtype, ...] = (),
) -> None:
    if tensor.dim() != ndim:
        raise ValueError(
            f"{function}: {name} must have {ndim} dimensions {meaning}, "
            f"got shape {tuple(tensor.shape)}"
        )
    if dtypes and tensor.dtype not in dtypes:
        *names, got = (str(dtype).removeprefix("torch.") for dtype in (*dtypes, tensor.dtype))
        raise ValueError(f"{function}: {name} must be {' or '.join(names)}, got {got}")


def _require_caches(function: str, k_cache: Tensor, v_cache: Tensor, layout: str) -> None:
    if layout not in ("NHD", "HND", "legacy"):
        raise ValueError(f"{function}: layout must be 'NHD', 'HND' or 'legacy', got {layout!r}")
    if layout == "legacy":
        _require(function, "k_cache", k_cache, 5, "[P, Hkv, D / x, S, x]")
        _require(function, "v_cache", v_cache, 4, "[P, Hkv, D, S]")
    else:
        meaning = "[P, S, Hkv, D]" if layout == "NHD" else "[P, Hkv, S, D]"
        _require(function, "k_cache", k_cache, 4, meaning)
        _require(function, "v_cache", v_cache, 4, meaning)
    _require(function, "v_cache", v_cache, 4, "", (k_cache.dtype,))


def _fake_cache_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_dtype: str = "auto",
    layout: str = "NHD",
    pdl: bool = False,
) -> None:
    _require("cache_write", "k", k, 3, "[T, Hkv, D]")
    _require("cache_write", "v", v, 3, "[T, Hkv, D]", (k.dtype,))
    _require_caches("cache_write", k_cache, v_cache, layout)
    _require("cache_write", "slot_mapping", slot_mapping, 1, "[T]", (torch.int64, torch.int32))


def _fake_attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seqused_k: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_dtype: str = "auto",
    layout: str = "NHD",
    num_splits: int = 0,
    batch_invariant: bool = False,
    plan: Tensor | None = None,
    pdl: bool = False,
    fp8_products: bool = False,
) -> tuple[Tensor, Tensor]:
    function, int32 = "paged_attention", (torch.int32,)
    _require(function, "q", q, 3, "[T, Hq, D]")
    _require_caches(function, k_cache, v_cache, layout)
    legacy = layout == "legacy"
    head_dim = k_cache.shape[2] * k_cache.shape[4] if legacy else k_cache.shape[3]
    if head_dim != q.shape[2]:
        raise ValueError(f"{function}: k_cache must have q's head_dim {q.shape[2]}, got {head_dim}")
    _require(function, "cu_seqlens_q", cu_seqlens_q, 1, "[B + 1]", int32)
    _require(function, "block_table", block_table, 2, "[B, max_pages]", int32)
    _require(function, "seqused_k", seqused_k, 1, "[B]", int32)
    total_q, num_q_heads, _ = q.shape
    dtype = torch.bfloat16 if q.dtype in _FLOAT8 else q.dtype
    out = q.new_empty((total_q, num_q_heads, v_cache.shape[2 if legacy else 3]), dtype=dtype)
    return out, q.new_empty((num_q_heads, total_q), dtype=torch.float32)


def _fake_attention(*inputs: Any) -> Tensor:
    return _fake_attend(*inputs)[0]


def _fake_attention_out(*inputs: Any) -> None:
    out, softmax_lse = inputs[7], inputs[8] if len(inputs) > 8 else None
    wanted, wanted_lse = _fake_attend(*inputs[:7], *inputs[10:])
    _require_shape("paged_attention", "out", out, wanted, "(T, Hq, Dv)")
    if softmax_lse is not None:
        _require_shape("paged_attention", "softmax_lse", softmax_lse, wanted_lse, "(Hq, T)")


def _fake_merge(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    _require("merge_states", "out_a", out_a, 3, "[T, Hq, Dv]")
    num_tokens, num_heads, _ = out_a.shape
    out = out_a.new_empty(out_a.shape)
    lse = out_a.new_empty((num_heads, num_tokens), dtype=torch.float32)
    _require_shape("merge_states", "out_b", out_b, out, "(T, Hq, Dv)")
    _require_shape("merge_states", "lse_a", lse_a, lse, "(Hq, T)")
    _require_shape("merge_states", "lse_b", lse_b, lse, "(Hq, T)")
    return out, lse


def _fake_merge_out(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor
) -> None:
    wanted, wanted_lse = _fake_merge(out_a, lse_a, out_b, lse_b)
    _require_shape("merge_states", "out", out, wanted, "(T, Hq, Dv)")
    _require_shape("merge_states", "lse", lse, wanted_lse, "(Hq, T)")


def _require_shape(function: str, name: str, tensor: Tensor, like: Tensor, meaning: str) -> None:
    if tensor.dim() != like.dim() or tensor.shape != like.shape:
        raise ValueError(
            f"{function}: {name} must have shape {meaning} = {tuple(like.shape)}, "
            f"got {tuple(tensor.shape)}"
        )


# Registration

# Integers require no gradient: these tensors are not asked.
_INTEGERS = ("block_table", "seqused_k", "cu_seqlens_q", "slot_mapping", "plan")


def _make_is_plain() -> Callable[[Any], bool]:
    """Tells from an autograd kernel's keys whether nobody but a backend is to see the call.

    That is: no fake tensor, no functionalisation, no mode. One look at the keys' bits where PyTorch
    shows them (>= 2.5) saves 0.8 us.
    """
    key, key_set = torch._C.DispatchKey, torch._C.DispatchKeySet
    if hasattr(key_set, "raw_repr"):
        pairs = (key.CPU, key.AutogradCPU), (key.CUDA, key.AutogradCUDA)
        plain = frozenset((key_set(a) | key_set(b)).raw_repr() for a, b in pairs)
        return lambda keys: keys.raw_repr() in plain
    after_autograd, backends = torch._C._after_autograd_keyset, (key.CPU, key.CUDA)
    return lambda keys: (keys & after_autograd).highestPriorityTypeId() in backends


_is_plain = _make_is_plain()


_requires_grad = operator.attrgetter("requires_grad")


def _has_tangent(tensor: Tensor) -> bool:
    return _untyped.autograd.forward_ad.unpack_dual(tensor).tangent is not None


def _autograd_kernel(overload: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse inputs that need a backward pass; go on below autograd otherwise."""
    function = overload._schema.name.replace("::", ".")
    tensors = [
        (place, argument.name)
        for place, argument in enumerate(overload._schema.arguments)
        if "Tensor" in str(argument.type) and argument.name not in _INTEGERS
    ]

    def refuse(needs: Callable[[Tensor], bool], inputs: tuple[Any, ...]) -> None:
        count = len(inputs)
        for place, name in tensors:
            if place >= count:
                break
            x = inputs[place]
            if x is not None and needs(x):
                raise RuntimeError(
                    f"torch.ops.{function}: {name} requires grad, but there are no derivatives: "
                    "call it under torch.no_grad() or torch.inference_mode(), or give "
                    f"{name}.detach()"
                )

    def run(keys: Any, *inputs: Any) -> Any:
        if torch.is_grad_enabled():
            refuse(_requires_grad, inputs)
        if forward_ad._current_level >= 0:
            refuse(_has_tangent, inputs)
        if _is_plain(keys):
            return kernel(*inputs)
        return overload.redispatch(keys & torch._C._after_autograd_keyset, *inputs)

    return run


_library = _untyped.library.Library("pagetile", "DEF")


def _register(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    _library.define(name + schema)
    packet_name, _, overload_name = name.partition(".")
    overload = getattr(getattr(torch.ops.pagetile, packet_name), overload_name or "default")
    if not _HAS_EXCHANGE_API:
        kernel = _without_grad(kernel)
    for key in ("CPU", "CUDA"):
        _library.impl(name, kernel, key)
    _library.impl(name, _autograd_kernel(overload, kernel), "Autograd", with_keyset=True)
    register_fake(f"pagetile::{name}", fake, lib=_library)


_register("cache_write", f"({_WRITE}) -> ()", _kernel_cache_write, _fake_cache_write)
_register(
    "paged_attention",
    f"({_ATTENTION}, {_ATTENTION_OPTIONS}) -> Tensor",
    _kernel_attention,
    _fake_attention,
)
_register(
    "paged_attention.out",
    f"({_ATTENTION}, {_ATTENTION_RESULTS}, {_ATTENTION_OPTIONS}) -> ()",
    _kernel_attention_out,
    _fake_attention_out,
)
_register(
    "paged_attention_lse",
    f"({_ATTENTION}, {_ATTENTION_OPTIONS}) -> (Tensor, Tensor)",
    _kernel_attention_lse,
    _fake_attend,
)
_register("merge_states", f"({_MERGE}) -> (Tensor, Tensor)", _kernel_merge, _fake_merge)
_register(
    "merge_states.out", f"({_MERGE}, {_MERGE_RESULTS}) -> ()", _kernel_merge_out, _fake_merge_out
)


# A cache of all layers


@dataclass(frozen=True, eq=False)
class TensorStep:
    """`pagetile.Step` as tensors on the cache's device: B sequences, T new tokens."""

    slot_mapping: Tensor
    """int64 [T]."""
    block_table: Tensor
    """int32 [B, max_pages]; a copy, which later steps do not change."""
    seqused_k: Tensor
    """int32 [B]."""
    cu_seqlens_q: Tensor
    """int32 [B + 1]."""
    total_q: int
    """T."""
    max_seqlen_q: int
    """The most new tokens of a sequence."""
    max_seqlen_k: int
    """The longest sequence, new tokens included."""


class PagedKVCache:
    """The pages of all layers of a model, and the `pagetile.BlockPool` that counts them.

    All layers share one block table: a page id means that page in each of them. ``k_caches`` and
    ``v_caches`` are the layers' pools, L tensors each, [P, S, Hkv, D or Dv] ("NHD") or
    [P, Hkv, S, D or Dv] ("HND"); ``pool`` is the BlockPool. All three are for direct use, too.
    Pages are not zeroed: what no sequence has written is never read.

    Args:
        num_layers: L.
        num_pages: P, of each layer.
        page_size: S, tokens a page holds.
        num_kv_heads: Hkv.
        head_dim: D of keys.
        head_dim_v: Dv of values; None is D.
        dtype: of keys, values and, with ``kv_dtype="auto"``, the pools.
        kv_dtype: "auto", or "fp8" ("fp8_e4m3") or "fp8_e5m2": pools of float8.
        layout: "NHD" or "HND".
        device: as PyTorch takes it; None is its default device.

    Raises:
        ValueError: a size, ``kv_dtype`` or ``layout`` is out of range.

    Example:
        Two layers, a prompt of 5 tokens, then one token:

        >>> import torch, pagetile.torch
        >>> cache = pagetile.torch.PagedKVCache(
        ...     num_layers=2, num_pages=8, page_size=16, num_kv_heads=2, head_dim=64)
        >>> sequence = cache.allocate()
        >>> for num_tokens in (5, 1):
        ...     step = cache.append([sequence], num_tokens)
        ...     for layer in range(2):
        ...         q = torch.randn(num_tokens, 8, 64).bfloat16()
        ...         k, v = torch.randn(2, num_tokens, 2, 64).bfloat16()
        ...         cache.write(layer, k, v, step)
        ...         out = cache.attend(layer, q, step)
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: str = "auto",
        layout: str = "NHD",
        device: torch.device | str | int | None = None,
    ) -> None:
        """Allocate the pools; every page is free."""
        stored = {"auto": dtype, "fp8": torch.float8_e4m3fn, **{n: t for t, n in _FLOAT8.items()}}
        if kv_dtype not in stored:
            raise ValueError(
                "PagedKVCache: kv_dtype must be 'auto', 'fp8', 'fp8_e4m3' or 'fp8_e5m2', "
                f"got {kv_dtype!r}"
            )
        if layout not in ("NHD", "HND"):
            raise ValueError(f"PagedKVCache: layout must be 'NHD' or 'HND', got {layout!r}")
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        for name, size in (("num_layers", num_layers), ("num_kv_heads", num_kv_heads),
                           ("head_dim", head_dim), ("head_dim_v", head_dim_v)):  # fmt: skip
            if size < 1:
                raise ValueError(f"PagedKVCache: {name} must be > 0, got {size}")
        self.pool = BlockPool(num_pages, page_size)
        self.layout = layout
        page = (page_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, page_size)
        self.k_caches, self.v_caches = (
            [
                torch.empty(num_pages, *page, dim, dtype=stored[kv_dtype], device=device)
                for _ in range(num_layers)
            ]
            for dim in (head_dim, head_dim_v)
        )

    def allocate(self) -> int:
        """Start an empty sequence and return its id."""
        return self.pool.allocate()

    def fork(self, sequence: int) -> int:
        """Start a sequence with the tokens of ``sequence``, on the same pages; return its id.

        The first of the two to append to a shared, partly filled page gets a copy: see `append`.
        """
        return self.pool.fork(sequence)

    def free(self, sequence: int) -> None:
        """End a sequence and release its pages."""
        self.pool.free(sequence)

    def append(
        self,
        sequences: Iterable[int] | npt.NDArray[np.int64],
        num_tokens: int | Iterable[int] | npt.NDArray[np.int64],
    ) -> TensorStep:
        """Make room for new tokens; return the step's metadata on the device. One call a step.

        As `pagetile.BlockPool.append`. Pages that a fork must no longer share are copied here, in
        all layers, so the call belongs outside of compiled code and captured graphs.
        """
        step = self.pool.append(sequences, num_tokens)
        device = self.k_caches[0].device

        def send(array: npt.NDArray[Any], copy: bool = False) -> Tensor:
            return torch.from_numpy(array).to(device, copy=copy)

        if step.copy_src.size:
            caches = [_raw(cache) for cache in (*self.k_caches, *self.v_caches)]
            src, dst = send(step.copy_src), send(step.copy_dst)
            for same_shape in (caches[: len(caches) // 2], caches[len(caches) // 2 :]):
                copy_pages(same_shape, same_shape, src, dst)
        return TensorStep(
            slot_mapping=send(step.slot_mapping),
            block_table=send(step.block_table, copy=True),  # the next append may change the pool's
            seqused_k=send(step.seqused_k),
            cu_seqlens_q=send(step.cu_seqlens_q),
            total_q=step.total_q,
            max_seqlen_q=step.max_seqlen_q,
            max_seqlen_k=step.max_seqlen_k,
        )

    def write(self, layer: int, k: Tensor, v: Tensor, step: TensorStep, **options: Any) -> None:
        """Write the step's keys [T, Hkv, D] and values [T, Hkv, Dv] into a layer's pages.

        ``options`` are further arguments of ``torch.ops.pagetile.cache_write``: k_scale, v_scale.
        """
        torch.ops.pagetile.cache_write.default(
            k,
            v,
            self.k_caches[layer],
            self.v_caches[layer],
            step.slot_mapping,
            layout=self.layout,
            **options,
        )

    def attend(self, layer: int, q: Tensor, step: TensorStep, **options: Any) -> Tensor:
        """Attend from the step's queries [T, Hq, D] to a layer's pages; return [T, Hq, Dv].

        ``options`` are further arguments of ``torch.ops.pagetile.paged_attention``: windows,
        scales, ``plan`` and so on.
        """
        out: Tensor = torch.ops.pagetile.paged_attention.default(
            q,
            self.k_caches[layer],
            self.v_caches[layer],
            step.block_table,
            step.seqused_k,
            step.cu_seqlens_q,
            step.max_seqlen_q,
            step.max_seqlen_k,
            layout=self.layout,
            **options,
        )
        return out


def _raw(cache: Tensor) -> Tensor:
    """A cache that DLPack takes: of bytes, where PyTorch does not export float8."""
    return cache.view(torch.uint8) if cache.dtype in _FLOAT8 and not _EXPORTS_FLOAT8 else cache
