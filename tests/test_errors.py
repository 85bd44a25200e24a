"""Wrong calls: the error names function, argument, value and what is allowed; nothing is written.

The patterns follow "function: ".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pagetile
import pytest
import torch
from problem import same_bits

USES = ("paged_attention", "cache_write", "merge_states")


@dataclass(frozen=True)
class Bad:
    """One wrong argument (or a few that do not fit each other), and what must be said about it."""

    name: str
    change: Callable[[dict], dict]
    match: str
    error: type[Exception] | tuple[type[Exception], ...] = ValueError


def bad(name, match, error=ValueError, **values) -> Bad:
    """Values may be functions of the argument that they replace."""

    def change(arguments):
        return {n: x(arguments[n]) if callable(x) else x for n, x in values.items()}

    return Bad(name, change, match, error)


def ids(case: Bad) -> str:
    return case.name


def said(x) -> str:
    return "None" if x is None else type(x).__name__


META = (TypeError, ValueError)
int64 = lambda x: x.long()  # noqa: E731
one_more_dim = lambda x: x[None]  # noqa: E731
longer = lambda x: torch.cat([x, x[:1]])  # noqa: E731
wider = lambda x: torch.cat([x, x[:, :1]], 1)  # noqa: E731
deeper = lambda x: torch.cat([x, x[..., :8]], -1)  # noqa: E731
sparse_last = lambda x: torch.stack([x, x], -1)[..., 0]  # noqa: E731
to_meta = lambda x: x.to("meta")  # noqa: E731


# cache_write


def write_arguments(device) -> dict:
    caches = [torch.full((3, 4, 2, 16), 7.0, device=device).bfloat16() for _ in "kv"]
    rows = [torch.ones(5, 2, 16, device=device).bfloat16() for _ in "kv"]
    return {
        "k": rows[0],
        "v": rows[1],
        "k_cache": caches[0],
        "v_cache": caches[1],
        "slot_mapping": torch.arange(5, device=device),
        "k_scale": None,
        "v_scale": None,
        "kv_dtype": "auto",
        "layout": "NHD",
    }


fp8 = lambda x: x.to(torch.float8_e4m3fn)  # noqa: E731
e5m2 = lambda x: x.to(torch.float8_e5m2)  # noqa: E731
as_it_is = lambda x: x.clone()  # noqa: E731
as_uint8 = lambda x: x.to(torch.uint8)  # noqa: E731
scale_of = lambda n: torch.ones(n)  # noqa: E731

# fmt: off
WRITES = [
    *(bad(f"{n}_rank", rf"{n} must have 3 dimensions \[T, Hkv, D\], got shape \(1, 5, 2, 16\)",
          **{n: one_more_dim}) for n in "kv"),
    *(bad(f"{n}_float64", rf"{n} must be .*float(16|32).*got float64", **{n: lambda x: x.double()})
      for n in "kv"),
    *(bad(f"{n}_int32", rf"{n} must be .*float.*int32", **{n: lambda x: x.int()})
      for n in "kv"),
    bad("v_other_dtype", r"v must be bfloat16, got float16", v=lambda x: x.half()),
    *(bad(f"{n}_too_few_rows", rf"{n} .*5 slots, got shape \(4, 2, 16\)",
          **{n: lambda x: x[:4]}) for n in "kv"),
    *(bad(f"{n}_heads", rf"{n} .*2 heads.*got shape \(5, 3, 16\)", **{n: wider})
      for n in "kv"),
    *(bad(f"{n}_head_dim", rf"{n} .*16.*got shape \(5, 2, 24\)", **{n: deeper})
      for n in "kv"),
    *(bad(f"{n}_last_dim_strided", rf"{n} must be dense in its last dimension .*stride 2",
          **{n: sparse_last}) for n in "kv"),
    *(bad(f"{n}_rank", rf"{n} must have 4 dimensions \[P, S, Hkv, D\], got shape",
          **{n: one_more_dim}) for n in ("k_cache", "v_cache")),
    *(bad(f"{n}_last_dim_strided", rf"{n} must be dense .*stride 2", **{n: sparse_last})
      for n in ("k_cache", "v_cache")),
    bad("caches_of_other_dtype", "k_cache .*bfloat16.*float16",
        k_cache=lambda x: x.half(), v_cache=lambda x: x.half()),
    bad("caches_differ_in_dtype", "v_cache must be bfloat16, got float16",
        v_cache=lambda x: x.half()),
    bad("caches_differ_in_pages", "v_cache .*3 pages.*got 4 pages", v_cache=longer),
    bad("caches_differ_in_page_size", "v_cache .*4 tokens.*got .*5 tokens", v_cache=wider),
    bad("caches_differ_in_heads", "v_cache .*2 heads.*got .*1 heads",
        v_cache=lambda x: x[:, :, :1]),
    bad("caches_int8", "k_cache must be .*int8", k_cache=lambda x: x.to(torch.int8)),
    bad("page_size_0", "page_size must be > 0, got 0",
        k_cache=lambda x: x[:, :0], v_cache=lambda x: x[:, :0]),
    bad("slots_int16", "slot_mapping must be .*int16", slot_mapping=lambda x: x.short()),
    bad("slots_float", "slot_mapping must be int64 or int32, got float32",
        slot_mapping=lambda x: x.float()),
    bad("slots_rank", r"slot_mapping must have 1 dimensions \[T\], got shape \(1, 5\)",
        slot_mapping=one_more_dim),
    bad("slots_strided", "slot_mapping must be dense .*stride 2", slot_mapping=sparse_last),
    *(bad(f"{n}_count", rf"{n} .*\(Hkv,\).*2.*got \(3,\)",
          k_cache=fp8, v_cache=fp8, **{n: scale_of(3)}) for n in ("k_scale", "v_scale")),
    *(bad(f"{n}_rank", rf"{n} .*got \(1, 2\)",
          k_cache=fp8, v_cache=fp8, **{n: scale_of(2)[None]}) for n in ("k_scale", "v_scale")),
    *(bad(f"{n}_dtype", rf"{n} must be float32, got float16",
          k_cache=fp8, v_cache=fp8, **{n: scale_of(1).half()}) for n in ("k_scale", "v_scale")),
    *(bad(f"{n}_without_fp8", rf"{n} needs an fp8 cache, got bfloat16", **{n: scale_of(1)})
      for n in ("k_scale", "v_scale")),
    *(bad(f"{n}_number", rf"{n} must be a DLPack tensor, got float", TypeError,
          k_cache=fp8, v_cache=fp8, **{n: 0.5}) for n in ("k_scale", "v_scale")),
    bad("kv_dtype_unknown", "kv_dtype must be 'auto', .*'fp8_e4m3'.*got 'int8'",
        kv_dtype="int8"),
    bad("kv_dtype_does_not_fit", "kv_dtype 'float16' .*k_cache.*bfloat16",
        kv_dtype="float16"),
    bad("kv_dtype_other_fp8", "kv_dtype 'fp8_e5m2' .*k_cache.*float8_e4m3fn",
        kv_dtype="fp8_e5m2", k_cache=fp8, v_cache=fp8),
    bad("uint8_without_kv_dtype", "kv_dtype must be 'fp8_e4m3' or 'fp8_e5m2' .*'auto'",
        k_cache=as_uint8, v_cache=as_uint8),
    bad("uint8_as_bf16", "kv_dtype 'bfloat16' .*uint8", kv_dtype="bfloat16",
        k_cache=as_uint8, v_cache=as_uint8),
    bad("kv_dtype_no_string", "kv_dtype must be str, got", TypeError, kv_dtype=8),
    bad("layout_unknown", "layout must be 'NHD', 'HND' or 'legacy', got 'nhd'", layout="nhd"),
    bad("layout_no_string", "layout must be str, got NoneType", TypeError, layout=None),
    *(bad(f"{n}_{type(x).__name__}", rf"{n} must be a DLPack tensor, got .*{said(x)}",
          TypeError, **{n: x})
      for n in ("k", "v", "k_cache", "v_cache", "slot_mapping") for x in (None, [1.0], "cache")),
    *(bad(f"{n}_on_meta", rf"{n} ", META, **{n: to_meta})
      for n in ("k", "v", "k_cache", "v_cache", "slot_mapping")),
]
# fmt: on


@pytest.mark.parametrize("case", WRITES, ids=ids)
@pytest.mark.uses("cache_write")
def test_cache_write(case, device):
    refused(pagetile.cache_write, write_arguments(device), case, ("k_cache", "v_cache"))


def refused(function, arguments, case, written) -> None:
    """Raises what it should, with all that could have been written as it was, bit for bit."""
    changed = {n: to(x, arguments[written[0]].device) for n, x in case.change(arguments).items()}
    arguments = {**arguments, **changed}
    tensors = [arguments[n] for n in written if isinstance(arguments[n], torch.Tensor)]
    tensors = [x for x in tensors if x.device.type != "meta"]
    before = [x.clone() for x in tensors]
    with pytest.raises(case.error, match=f"^{function.__name__}: {case.match}"):
        function(**arguments)
    assert all(map(same_bits, tensors, before))


def to(value, device):
    """Strides and the place in memory are kept."""
    if not isinstance(value, torch.Tensor) or value.device.type == "meta":
        return value
    if value._base is None:
        return value.to(device)
    memory = value._base.to(device)
    return memory.as_strided(value.size(), value.stride(), value.storage_offset())


# paged_attention


def attention_arguments(device) -> dict:
    int32 = {"dtype": torch.int32, "device": device}
    floats = lambda *shape: torch.ones(shape, device=device).bfloat16()  # noqa: E731
    return {
        "q": floats(5, 4, 16),
        "k_cache": floats(6, 4, 2, 16),
        "v_cache": floats(6, 4, 2, 24),
        "block_table": torch.tensor([[3, 0], [1, 4]], **int32),
        "seqused_k": torch.tensor([5, 8], **int32),
        "cu_seqlens_q": torch.tensor([0, 2, 5], **int32),
        "max_seqlen_q": 3,
        "max_seqlen_k": None,
        "softmax_scale": None,
        "causal": True,
        "window": (-1, -1),
        "softcap": 0.0,
        "alibi_slopes": None,
        "sinks": None,
        "q_scale": None,
        "k_scale": None,
        "v_scale": None,
        "kv_dtype": "auto",
        "layout": "NHD",
        "num_splits": 0,
        "batch_invariant": False,
        "fp8_products": False,
        "plan": None,
        "workspace": None,
        "pdl": False,
        "out": torch.full((5, 4, 24), 7.0, device=device).bfloat16(),
        "softmax_lse": torch.full((4, 5), 7.0, device=device),
        "validate": False,
        "stream": None,
    }


SMALL = ("block_table", "seqused_k", "cu_seqlens_q")
TENSORS = ("q", "k_cache", "v_cache", *SMALL, "out", "softmax_lse")
SCALES = ("k_scale", "v_scale")

# fmt: off
ATTENTION = [
    # q and the caches
    bad("q_rank", r"q must have 3 dimensions \[T, Hq, D\], got shape \(1, 5, 4, 16\)",
        q=one_more_dim),
    bad("q_float64", "q must be float32 or .*, got float64", q=lambda x: x.double()),
    bad("q_int32", "q must be float32.*got int32", q=lambda x: x.int()),
    bad("q_last_dim_strided", "q must be dense .*stride 2", q=sparse_last),
    bad("q_head_dim", "k_cache must have q's head_dim 24, got 16", q=deeper),
    bad("q_heads", r"num_q_heads must be a multiple of num_kv_heads \(2\), got 5",
        q=wider, out=wider, softmax_lse=longer),
    bad("head_dim_12", "head_dim must be a multiple of 8 from 8 to 256, got 12",
        q=lambda x: x[..., :12], k_cache=lambda x: x[..., :12]),
    bad("head_dim_264", "head_dim must be a multiple of 8 from 8 to 256, got 264",
        q=lambda x: x[..., :1].expand(5, 4, 264).contiguous(),
        k_cache=lambda x: x[..., :1].expand(6, 4, 2, 264).contiguous()),
    bad("head_dim_v_20", "head_dim of v_cache must be a multiple of 8 .*got 20",
        v_cache=lambda x: x[..., :20], out=lambda x: x[..., :20]),
    *(bad(f"{n}_rank", rf"{n} must have 4 dimensions \[P, S, Hkv, D\], got shape",
          **{n: one_more_dim}) for n in ("k_cache", "v_cache")),
    *(bad(f"{n}_last_dim_strided", rf"{n} must be dense .*stride 2", **{n: sparse_last})
      for n in ("k_cache", "v_cache")),
    bad("caches_of_other_dtype", "k_cache .*bfloat16.*float16",
        k_cache=lambda x: x.half(), v_cache=lambda x: x.half()),
    bad("caches_differ_in_dtype", "v_cache must be bfloat16, got float16",
        v_cache=lambda x: x.half()),
    bad("caches_differ_in_pages", "v_cache .*6 pages.*got 7 pages", v_cache=longer),
    bad("caches_differ_in_page_size", "v_cache .*4 tokens.*got .*5 tokens", v_cache=wider),
    bad("caches_differ_in_heads", "v_cache .*2 heads.*got .*1 heads",
        v_cache=lambda x: x[:, :, :1]),
    bad("page_size_0", "page_size must be > 0, got 0",
        k_cache=lambda x: x[:, :0], v_cache=lambda x: x[:, :0]),
    # Metadata
    *(bad(f"{n}_int64", rf"{n} must be int32, got int64", **{n: int64}) for n in SMALL),
    *(bad(f"{n}_float", rf"{n} must be int32, got float32", **{n: lambda x: x.float()})
      for n in SMALL),
    *(bad(f"{n}_rank", rf"{n} must have .*got (shape )?\(1, ", **{n: one_more_dim})
      for n in SMALL),
    *(bad(f"{n}_strided", rf"{n} must be dense .*stride 2", **{n: sparse_last})
      for n in SMALL),
    bad("block_table_batch", r"block_table must have shape .*\(2, 2\), got \(3, 2\)",
        block_table=longer),
    bad("seqused_k_batch", r"seqused_k must have shape \(B,\) = \(2,\), got \(3,\)",
        seqused_k=longer),
    bad("cu_seqlens_q_batch", r"\w+ must have shape .*\(3.*got \(2",
        cu_seqlens_q=longer),
    bad("cu_seqlens_q_empty", r"cu_seqlens_q must have B \+ 1 elements, got shape \(0,\)",
        cu_seqlens_q=lambda x: x[:0]),
    # Options
    *(bad(f"window_{w[0]}_{w[1]}", rf"window must be >= 0, or -1 for unlimited, got \w+ {min(w)}",
          window=w) for w in ((-2, -1), (-1, -2), (-100, 5))),
    *(bad(f"window_{n}", r"window must be \(left, right\), got", window=w)
      for n, w in (("of_one", (1,)), ("of_three", (1, 2, 3)), ("int", 4), ("None", None))),
    bad("window_floats", "window must be int, got float", TypeError, window=(1.5, 0)),
    *(bad(f"softcap_{x}", "softcap must be >= 0 .*got", softcap=x)
      for x in (-1.0, -1e-9, float("nan"), float("inf"))),
    *(bad(f"softmax_scale_{x}", "softmax_scale must be finite, got", softmax_scale=x)
      for x in (float("nan"), float("inf"))),
    *(bad(f"num_splits_{x}", rf"num_splits must be >= 0 .*got {x}", num_splits=x)
      for x in (-1, -100)),
    *(bad(f"{n}_-1", rf"{n} must be .*got -1", **{n: -1})
      for n in ("max_seqlen_q", "max_seqlen_k")),
    bad("max_seqlen_k_2_31", "max_seqlen_k must be .*got 2147483648", max_seqlen_k=2**31),
    *(bad(f"{n}_{type(x).__name__}", rf"{n} must be {t}, got {type(x).__name__}", TypeError,
          **{n: x})
      for n, t, x in (("max_seqlen_q", "int", 3.0), ("max_seqlen_q", "int", "3"),
                      ("max_seqlen_q", "int", None), ("max_seqlen_k", "int", 8.5),
                      ("num_splits", "int", "auto"), ("softcap", "float", "off"),
                      ("softcap", "float", None), ("softmax_scale", "float", "1"),
                      ("causal", "bool", "yes"), ("batch_invariant", "bool", None),
                      ("pdl", "bool", 1), ("fp8_products", "bool", 1), ("kv_dtype", "str", 8),
                      ("layout", "str", None))),
    *(bad(f"{n}_2_64", f"{n} must be", (TypeError, ValueError), **{n: x})
      for n, x in (("max_seqlen_q", 2**64), ("num_splits", 2**64), ("window", (2**64, 0)))),
    bad("kv_dtype_unknown", "kv_dtype must be 'auto', .*'fp8_e4m3'.*got 'int8'", kv_dtype="int8"),
    bad("kv_dtype_does_not_fit", "kv_dtype 'fp8' .*k_cache.*bfloat16", kv_dtype="fp8"),
    bad("uint8_without_kv_dtype", "kv_dtype must be 'fp8_e4m3' or 'fp8_e5m2' .*'auto'",
        k_cache=as_uint8, v_cache=as_uint8),
    bad("layout_unknown", "layout must be 'NHD', 'HND' or 'legacy', got 'NHDC'", layout="NHDC"),
    *(bad(f"plan_{type(x).__name__}",
          rf"plan must be a pagetile.Plan or None, got .*{type(x).__name__}", TypeError, plan=x)
      for x in (torch.ones(1), "plan", 3)),
    bad("workspace_strided",
        r"workspace must be contiguous, got stride 8 in dimension 0 .*\(9, 4\)",
        workspace=torch.zeros(9, 8)[:, :4]),
    bad("workspace_aligned_to_4", "workspace must begin at a multiple of 16 bytes, got 4 bytes",
        workspace=torch.zeros(8)[1:]),
    *(bad(f"workspace_{type(x).__name__}", "workspace must be a DLPack tensor, got", TypeError,
          workspace=x) for x in (1 << 20, [0.0])),
    bad("workspace_on_meta", "workspace ", META, workspace=torch.empty(1 << 20, device="meta")),
    # Optional tensors
    bad("alibi_float16", "alibi_slopes must be float32, got float16",
        alibi_slopes=torch.ones(4).half()),
    bad("alibi_heads", r"alibi_slopes must have shape \(Hq,\) = \(4,\), got \(2,\)",
        alibi_slopes=torch.ones(2)),
    bad("alibi_batch", r"alibi_slopes must have shape \(B, Hq\) = \(2, 4\), got \(3, 4\)",
        alibi_slopes=torch.ones(3, 4)),
    bad("sinks_int", "sinks must be float32 or float16 or bfloat16, got int32",
        sinks=torch.ones(4).int()),
    bad("sinks_heads", r"sinks must have shape \(Hq,\) = \(4,\), got \(2,\)",
        sinks=torch.ones(2)),
    bad("q_scale_without_fp8", "q_scale needs an fp8 q, got bfloat16", q_scale=torch.ones(1)),
    *(bad(f"{n}_without_fp8", rf"{n} needs fp8 caches, got bfloat16", **{n: torch.ones(1)})
      for n in SCALES),
    *(bad(f"fp8_products_of_{q}", rf"fp8_products needs a float8_e4m3fn q, got {q}", q=as_q,
          k_cache=as_cache, v_cache=as_cache, fp8_products=True)
      for q, as_q, as_cache in (("bfloat16", as_it_is, as_it_is), ("bfloat16", as_it_is, fp8),
                                ("float8_e5m2", e5m2, e5m2), ("float8_e5m2", e5m2, fp8))),
    bad("fp8_products_over_e5m2", "fp8_products needs float8_e4m3fn caches, got float8_e5m2",
        q=fp8, k_cache=e5m2, v_cache=e5m2, fp8_products=True),
    bad("fp8_products_over_uint8", "fp8_products needs float8_e4m3fn caches, got float8_e5m2",
        q=fp8, k_cache=as_uint8, v_cache=as_uint8, kv_dtype="fp8_e5m2", fp8_products=True),
    *(bad(f"{n}_count", rf"{n} .*\(Hkv,\).*2.*got \(4,\)", k_cache=fp8, v_cache=fp8,
          **{n: torch.ones(4)}) for n in SCALES),
    *(bad(f"{n}_batch", rf"{n} .*\(B, Hkv\) = \(2, 2\), got \(3, 2\)", k_cache=fp8, v_cache=fp8,
          **{n: torch.ones(3, 2)}) for n in SCALES),
    *(bad(f"{n}_dtype", rf"{n} must be float32, got bfloat16", k_cache=fp8, v_cache=fp8,
          **{n: torch.ones(1).bfloat16()}) for n in SCALES),
    # Results
    bad("out_shape", r"out must have shape \(T, Hq, Dv\) = \(5, 4, 24\), got \(6, 4, 24\)",
        out=longer),
    bad("out_dtype", "out must be bfloat16 for a bfloat16 q, got float32", out=lambda x: x.float()),
    bad("out_strided", "out must be dense .*stride 2", out=sparse_last),
    bad("out_fp8", "out must be .*got float8_e4m3fn", q=fp8, k_cache=fp8, v_cache=fp8, out=fp8),
    bad("lse_shape", r"softmax_lse must have shape \(Hq, T\) = \(4, 5\), got \(5, 5\)",
        softmax_lse=longer),
    bad("lse_dtype", "softmax_lse must be float32, got float16", softmax_lse=lambda x: x.half()),
    # No tensors, or tensors of nowhere
    *(bad(f"{n}_{type(x).__name__}", rf"{n} must be a DLPack tensor, got .*{type(x).__name__}",
          TypeError, **{n: x}) for n in TENSORS for x in ([1.0], "tensor", 3)),
    *(bad(f"{n}_None", rf"{n} must be a DLPack tensor, got None", TypeError, **{n: None})
      for n in ("q", "k_cache", "v_cache", *SMALL)),
    *(bad(f"{n}_{type(x).__name__}", rf"{n} must be a DLPack tensor, got", TypeError, **{n: x})
      for n in ("alibi_slopes", "sinks", "k_scale") for x in (1.0, [1.0])),
    *(bad(f"{n}_on_meta", rf"{n} ", META, **{n: to_meta}) for n in TENSORS),
]
# fmt: on


@pytest.mark.parametrize("case", ATTENTION, ids=ids)
@pytest.mark.uses("paged_attention")
def test_paged_attention(case, device):
    refused(pagetile.paged_attention, attention_arguments(device), case, ("out", "softmax_lse"))


def without_results(arguments: dict) -> dict:
    return {n: x for n, x in arguments.items() if n not in ("out", "softmax_lse")}


@pytest.mark.parametrize(
    "case",
    [c for c in ATTENTION if not c.name.startswith(("out_", "lse_", "softmax_lse"))],
    ids=ids,
)
@pytest.mark.uses("paged_attention")
def test_paged_attention_that_allocates(case, device):
    """The same errors where out is not given."""
    arguments = attention_arguments(device)
    changed = without_results(case.change(arguments))
    changed = {n: to(x, device) for n, x in changed.items()}
    with pytest.raises(case.error, match=f"^paged_attention: {case.match}"):
        pagetile.paged_attention(**{**without_results(arguments), **changed})


# merge_states


def merge_arguments(device) -> dict:
    outs = [torch.ones(5, 4, 16, device=device).bfloat16() for _ in "abo"]
    lse = [torch.zeros(4, 5, device=device) for _ in "abo"]
    sides = {"out_a": outs[0], "lse_a": lse[0], "out_b": outs[1], "lse_b": lse[1]}
    return {**sides, "out": outs[2] * 7, "lse": lse[2] + 7}


# fmt: off
MERGES = [
    bad("out_a_rank", r"out_a must have 3 dimensions \[T, Hq, Dv\], got shape \(1, 5, 4, 16\)",
        out_a=one_more_dim),
    bad("out_a_int", "out_a must be float32 or float16 or bfloat16, got int32",
        out_a=lambda x: x.int()),
    *(bad(f"{n}_dtype", rf"{n} must be bfloat16, got float16", **{n: lambda x: x.half()})
      for n in ("out_b", "out")),
    *(bad(f"{n}_shape", rf"{n} must have shape \(T, Hq, Dv\) = \(5, 4, 16\), got \(6, 4, 16\)",
          **{n: longer}) for n in ("out_b", "out")),
    *(bad(f"{n}_strided", rf"{n} must be dense .*stride 2", **{n: sparse_last})
      for n in ("out_a", "out_b", "out")),
    *(bad(f"{n}_dtype", rf"{n} must be float32, got float16", **{n: lambda x: x.half()})
      for n in ("lse_a", "lse_b", "lse")),
    *(bad(f"{n}_shape", rf"{n} must have shape \(Hq, T\) = \(4, 5\), got \(5, 4\)",
          **{n: lambda x: x.T}) for n in ("lse_a", "lse_b", "lse")),
    *(bad(f"{n}_{type(x).__name__}", rf"{n} must be a DLPack tensor, got", TypeError, **{n: x})
      for n in ("out_a", "lse_a", "out_b", "lse_b") for x in (None, [1.0], "tensor")),
    *(bad(f"{n}_on_meta", rf"{n} ", META, **{n: to_meta})
      for n in ("out_a", "lse_a", "out_b", "lse_b", "out", "lse")),
]
# fmt: on


@pytest.mark.parametrize("case", MERGES, ids=ids)
@pytest.mark.uses("merge_states")
def test_merge_states(case, device):
    refused(pagetile.merge_states, merge_arguments(device), case, ("out", "lse"))


# Read-only memory


def frozen(tensor):
    array = tensor.float().cpu().numpy().copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_read_only_caches_are_refused(name):
    arguments = {n: x for n, x in write_arguments("cpu").items() if isinstance(x, torch.Tensor)}
    arguments = {n: x if n == "slot_mapping" else x.float() for n, x in arguments.items()}
    arguments[name] = frozen(arguments[name])
    with pytest.raises((TypeError, ValueError), match=f"cache_write: {name} .*read-only"):
        pagetile.cache_write(**arguments)
    assert (np.asarray(arguments["k_cache"]) == 7).all()
    assert (np.asarray(arguments["v_cache"]) == 7).all()


@pytest.mark.parametrize("name", ["out", "softmax_lse"])
def test_read_only_results_are_refused(name):
    arguments = attention_arguments("cpu")
    for n in ("q", "k_cache", "v_cache", "out"):
        arguments[n] = arguments[n].float()
    arguments[name] = frozen(arguments[name])
    with pytest.raises((TypeError, ValueError), match=f"paged_attention: {name} .*read-only"):
        pagetile.paged_attention(**arguments)
    for n in ("out", "softmax_lse"):
        assert (np.asarray(arguments[n]) == 7).all()


@pytest.mark.parametrize("name", ["out", "lse"])
def test_read_only_merge_results_are_refused(name):
    arguments = {n: x.float() for n, x in merge_arguments("cpu").items()}
    arguments[name] = frozen(arguments[name])
    with pytest.raises((TypeError, ValueError), match=f"merge_states: {name} .*read-only"):
        pagetile.merge_states(**arguments)
    for n in ("out", "lse"):
        assert (np.asarray(arguments[n]) == 7).all()


# validate


# fmt: off
WRONG_METADATA = [
    bad("negative_length", r"seqused_k .*from 0 .*got -3 for sequence 1",
        seqused_k=torch.tensor([5, -3])),
    bad("longer_than_the_table", r"seqused_k .*8.*got 9 for sequence 1",
        seqused_k=torch.tensor([5, 9])),
    bad("longer_than_max_seqlen_k", r"max_seqlen_k is 7.*sequence 1 is 8", max_seqlen_k=7),
    bad("longer_than_max_seqlen_q", r"max_seqlen_q is 2.*sequence 1 .*3 queries", max_seqlen_q=2),
    bad("page_beyond_the_cache", r"block_table .*0 to 5, got 6 at page 1 of sequence 0",
        block_table=torch.tensor([[3, 6], [1, 4]])),
    bad("page_negative", r"block_table .*0 to 5, got -1 at page 0 of sequence 1",
        block_table=torch.tensor([[3, 0], [-1, 4]])),
    bad("offsets_fall", r"cu_seqlens_q .*sequence 1 .*5 to 4", cu_seqlens_q=torch.tensor([0, 5, 4]),
        max_seqlen_q=5),
    bad("offsets_pass_the_end", r"cu_seqlens_q .*5 packed rows: sequence 1 .*2 to 6",
        cu_seqlens_q=torch.tensor([0, 2, 6]), max_seqlen_q=4),
    bad("offsets_start_below_0", r"cu_seqlens_q\[0\] must be >= 0, got -1",
        cu_seqlens_q=torch.tensor([-1, 2, 5])),
]
# fmt: on


def with_int32(case) -> Bad:
    def change(arguments):
        changed = case.change(arguments)
        return {n: x.int() if isinstance(x, torch.Tensor) else x for n, x in changed.items()}

    return Bad(case.name, change, case.match)


@pytest.mark.parametrize("by", ["argument", "environment"])
@pytest.mark.parametrize("case", list(map(with_int32, WRONG_METADATA)), ids=ids)
def test_validate(case, by, device, monkeypatch):
    """Wrong metadata raises with validate=True or PAGETILE_VALIDATE=1, and is survived without."""
    arguments = attention_arguments(device)
    if by == "environment":
        monkeypatch.setenv("PAGETILE_VALIDATE", "1")
    else:
        arguments["validate"] = True
    refused(pagetile.paged_attention, arguments, case, ("out", "softmax_lse"))
    monkeypatch.setenv("PAGETILE_VALIDATE", "0")
    changed = {n: to(x, device) for n, x in case.change(arguments).items()}
    out = pagetile.paged_attention(**{**attention_arguments(device), **changed})
    assert torch.isfinite(out).all()


def test_unused_table_entries_are_valid(device):
    """validate looks at the entries in use alone."""
    arguments = attention_arguments(device)
    table = torch.tensor([[3, 0, -1], [1, 4, 2**31 - 1]], dtype=torch.int32, device=device)
    arguments["block_table"] = table
    out = pagetile.paged_attention(**{**arguments, "validate": True})
    assert torch.isfinite(out).all()


# More, and less, than the arguments there are


@pytest.mark.parametrize("name", ["block_table", "seqused_k", "cu_seqlens_q", "max_seqlen_q"])
def test_required_keywords(name):
    arguments = attention_arguments("cpu")
    del arguments[name]
    with pytest.raises(TypeError, match=name):
        pagetile.paged_attention(**arguments)


def test_unknown_keyword():
    with pytest.raises(TypeError, match="page_table"):
        pagetile.paged_attention(**attention_arguments("cpu"), page_table=None)


def test_options_are_keywords():
    """Only the tensors that every call has are positional."""
    a = attention_arguments("cpu")
    with pytest.raises(TypeError, match="positional"):
        pagetile.paged_attention(a["q"], a["k_cache"], a["v_cache"], a["block_table"])
    with pytest.raises(TypeError, match="positional"):
        pagetile.cache_write(*list(write_arguments("cpu").values())[:6])
