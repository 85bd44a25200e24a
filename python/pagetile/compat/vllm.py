"""vLLM's cache-write and attention calls, on pagetile's kernels.

Names, order and defaults of arguments are those of vLLM 0.26 (``paged_attention_v1`` and
``paged_attention_v2``: of the last release that had them on CUDA). The tensors' device decides the
backend. An argument that changes the result and that pagetile does not support raises
``NotImplementedError`` with its name and what is allowed; nothing is written then. Wrong values
raise ``ValueError``, wrong types ``TypeError``.

Letters in shapes: B sequences, T tokens, Hq query heads, Hkv KV heads, D head_dim of K, Dv of V,
P pages of S tokens.

Example:
    >>> from pagetile.compat.vllm import flash_attn_varlen_func, reshape_and_cache_flash
    >>> reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, "auto", one, one)
    >>> out = flash_attn_varlen_func(
    ...     q, key_cache, value_cache, max_seqlen_q, cu_seqlens_q, max_seqlen_k,
    ...     seqused_k=seq_lens, causal=True, block_table=block_table,
    ... )
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from pagetile import _C
from pagetile._errors import renamed
from pagetile._tensor import SupportsDLPack as Tensor
from pagetile._tensor import shape_of
from pagetile.attention import attend
from pagetile.cache_write import cache_write

__all__ = [
    "flash_attn_varlen_func",
    "merge_attn_states",
    "paged_attention_v1",
    "paged_attention_v2",
    "reshape_and_cache",
    "reshape_and_cache_flash",
]

_KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")

# pagetile's name of an argument -> the caller's, where they differ.
_WRITE_NAMES = {
    "k": "key",
    "v": "value",
    "k_cache": "key_cache",
    "v_cache": "value_cache",
    "kv_dtype": "kv_cache_dtype",
}
_VARLEN_NAMES = {
    "k_cache": "k",
    "v_cache": "v",
    "sinks": "s_aux",
    "window": "window_size",
    "window_right": "window_size",
    "q_scale": "q_descale",
    "k_scale": "k_descale",
    "v_scale": "v_descale",
}
_DECODE_NAMES = {
    "q": "query",
    "k_cache": "key_cache",
    "v_cache": "value_cache",
    "block_table": "block_tables",
    "seqused_k": "seq_lens",
    "max_seqlen_k": "max_seq_len",
    "softmax_scale": "scale",
    "kv_dtype": "kv_cache_dtype",
    "exp_sums": "exp_sum",
}
_MERGE_NAMES = {
    "out": "output",
    "lse": "output_lse",
    "out_a": "prefix_output",
    "lse_a": "prefix_lse",
    "out_b": "suffix_output",
    "lse_b": "suffix_lse",
    "tokens_with_a": "prefill_tokens_with_context",
}


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Write new K and V rows into their slots of a paged cache.

    Args:
        key: [>= T, Hkv, D] fp32, fp16 or bf16, any row and head stride. Rows beyond T are padding.
        value: [>= T, Hkv, Dv], as ``key``; Dv may differ from D.
        key_cache: [P, S, Hkv, D], a logical view of any strides, last dimension dense; written.
        value_cache: [P, S, Hkv, Dv], likewise, with strides of its own; written.
        slot_mapping: [T] int64 or int32, page * S + offset. Any slot outside the cache is skipped.
        kv_cache_dtype: "auto", "float16" or "bfloat16" (the cache has the rows' type), "fp8" or
            "fp8_e4m3", "fp8_e5m2" (float8 or uint8 storage).
        k_scale: fp32, 1 or Hkv elements; stored = saturate(x / scale). Only fp8 caches use it.
        v_scale: likewise.

    Raises:
        NotImplementedError: another ``kv_cache_dtype``.
        ValueError, TypeError: shapes, types or devices do not fit; nothing is written.
    """
    _write(
        "reshape_and_cache_flash", key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype,
        k_scale, v_scale, "NHD",
    )  # fmt: skip


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Write new K and V rows into a cache of the legacy layout.

    Args:
        key: [>= T, Hkv, D] fp32, fp16 or bf16, any row and head stride. Rows beyond T are padding.
        value: [>= T, Hkv, D], as ``key``.
        key_cache: [P, Hkv, D / x, S, x], x elements being 16 bytes; written.
        value_cache: [P, Hkv, D, S]; written.
        slot_mapping: [T] int64 or int32, page * S + offset. Any slot outside the cache is skipped.
        kv_cache_dtype: as in ``reshape_and_cache_flash``.
        k_scale: fp32, 1 or Hkv elements; stored = saturate(x / scale). Only fp8 caches use it.
        v_scale: likewise.

    Raises:
        NotImplementedError: another ``kv_cache_dtype``.
        ValueError, TypeError: shapes, types or devices do not fit; nothing is written.
    """
    _write(
        "reshape_and_cache", key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype,
        k_scale, v_scale, "legacy",
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_v: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    output_scale: Tensor | None = None,
    fa_version: int = 2,
    s_aux: Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Tensor | None = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    dynamic_causal: Tensor | None = None,
) -> Any:
    """Attend over a paged cache, or over packed K and V, with a packed batch of queries.

    Either ``block_table`` and ``seqused_k`` are given (paged) or ``cu_seqlens_k`` is (packed).
    Masks are aligned at the bottom right. A row that sees no key gives 0 and, in the LSE, -inf
    (the sink's logit where ``s_aux`` is given).

    Features combine freely: no version of the kernel has to be chosen, so ``alibi_slopes``,
    ``s_aux``, windows, fp8 caches and ``num_splits`` may come together.

    Args:
        q: [T, Hq, D] fp16, bf16, fp32 (CPU), e4m3 or e5m2; a dense last dimension.
        k: [P, S, Hkv, D] logical view with any strides, or packed rows [total_k, Hkv, D]. The type
            of q, or float8. A uint8 cache must be viewed as float8: no argument here says which.
        v: [P, S, Hkv, Dv] or [total_k, Hkv, Dv], likewise.
        max_seqlen_q: the longest query, or more.
        cu_seqlens_q: [B+1] int32, offsets of the sequences' queries.
        max_seqlen_k: the longest sequence, or more.
        cu_seqlens_k: [B+1] int32, offsets of packed K and V; without ``block_table``.
        seqused_k: [B] int32, length of each sequence, new tokens included; with ``block_table``.
        q_v: not supported, must be None.
        dropout_p: not supported, must be 0.
        softmax_scale: None for D ** -0.5.
        causal: query i sees key j if j <= i + seqused_k - q_len.
        window_size: (left, right), inclusive, -1 unlimited; None for (-1, -1).
        softcap: score = softcap * tanh(score / softcap) before the mask; 0 is off.
        alibi_slopes: [Hq] or [B, Hq] fp32.
        deterministic: ignored; results are always the same from run to run.
        return_attn_probs: not supported, must be False.
        block_table: [B, max_pages] int32, any row stride.
        return_softmax_lse: also return the LSE, fp32 [Hq, T], natural log.
        out: [T, Hq, Dv], written and returned; None allocates q's type (bf16 for an fp8 q).
        scheduler_metadata: ignored; it is a hint of schedule and changes no result.
        q_descale: fp32, () or (1,) or [Hkv] or [B, Hkv], any strides; ignored unless q is float8.
        k_descale: likewise, ignored unless k is float8.
        v_descale: likewise.
        num_splits: splits of the keys, at most; 0 chooses, 1 is off.
        output_scale: not supported, must be None.
        fa_version: ignored; the device and the shapes choose the kernel.
        s_aux: sinks, [Hq] bf16, fp16 or fp32: a logit added to the denominator, unscaled.
        cp_world_size: context parallelism is not supported, must be 1.
        cp_rank: ignored with one rank.
        cp_tot_seqused_k: ignored with one rank.
        mask_mod: not supported, must be None.
        aux_tensors: not supported, must be None.
        dynamic_causal: not supported, must be None.

    Returns:
        out, or (out, softmax_lse) with ``return_softmax_lse``.

    Raises:
        NotImplementedError: an argument that is not supported, by name.
        ValueError, TypeError: shapes, types, devices or values do not fit; nothing is written.
    """
    function = "flash_attn_varlen_func"
    if q_v is not None:
        _refuse(function, "q_v", "a tensor", "None")
    if dropout_p != 0:
        _refuse(function, "dropout_p", dropout_p, "0")
    if return_attn_probs:
        _refuse(function, "return_attn_probs", return_attn_probs, "False")
    if output_scale is not None:
        _refuse(function, "output_scale", "a tensor", "None")
    if cp_world_size != 1:
        _refuse(function, "cp_world_size", cp_world_size, "1")
    if mask_mod is not None:
        _refuse(function, "mask_mod", "a function", "None")
    if aux_tensors is not None:
        _refuse(function, "aux_tensors", "tensors", "None")
    if dynamic_causal is not None:
        _refuse(function, "dynamic_causal", "a tensor", "None")
    if cu_seqlens_q is None:
        raise TypeError(f"{function}: cu_seqlens_q must be a DLPack tensor, got None")
    if (cu_seqlens_k is None) == (seqused_k is None):
        given = "neither" if seqused_k is None else "both"
        raise ValueError(f"{function}: either cu_seqlens_k or seqused_k must be given, got {given}")
    if block_table is not None and cu_seqlens_k is not None:
        raise ValueError(f"{function}: cu_seqlens_k must be None with block_table; give seqused_k")
    if block_table is None and seqused_k is not None:
        allowed = "a table, or cu_seqlens_k for packed K and V"
        _refuse(function, "block_table", "None with seqused_k", allowed)
    k_dtype = _dtype_name(k)
    if k_dtype == "uint8":
        raise TypeError(
            f"{function}: k and v must be viewed as float8_e4m3fn or float8_e5m2, got uint8"
        )
    if not k_dtype.startswith("float8"):
        k_descale = v_descale = None
    if q_descale is not None and not _dtype_name(q).startswith("float8"):
        q_descale = None
    window = (-1, -1) if window_size is None else window_size
    return _call(
        attend, function, _VARLEN_NAMES,
        out, None, None, return_softmax_lse,
        q, k, v, block_table, seqused_k, cu_seqlens_q, max_seqlen_q, max_seqlen_k,
        softmax_scale, causal, window, softcap, alibi_slopes, s_aux,
        q_descale, k_descale, v_descale, num_splits=num_splits, cu_seqlens_k=cu_seqlens_k,
    )  # fmt: skip


def merge_attn_states(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: Tensor | None = None,
) -> None:
    """Merge two partial attentions of the same queries over disjoint keys, exactly.

    A side whose LSE is -inf or +inf saw no key: its values are ignored, NaN included. Two such
    sides give 0 and -inf.

    Args:
        output: [T, Hq, D] fp32, fp16 or bf16; written. It may be one of the inputs.
        prefix_output: [T, Hq, D], the type of ``output``, any row and head stride.
        prefix_lse: [Hq, T] fp32, natural log, any strides.
        suffix_output: [T, Hq, D], likewise, with strides of its own.
        suffix_lse: [Hq, T] fp32.
        output_lse: [Hq, T] fp32, written; None to do without.
        prefill_tokens_with_context: tokens from this index on take the suffix alone; None: none do.
        output_scale: not supported, must be None.

    Raises:
        NotImplementedError: ``output_scale`` is given.
        ValueError, TypeError: shapes, types or devices do not fit; nothing is written.
    """
    function = "merge_attn_states"
    if output_scale is not None:
        _refuse(function, "output_scale", "a tensor", "None")
    if prefill_tokens_with_context is None:
        tokens_with_prefix = -1
    elif prefill_tokens_with_context >= 0:
        tokens_with_prefix = prefill_tokens_with_context
    else:
        raise ValueError(
            f"{function}: prefill_tokens_with_context must be >= 0 or None, "
            f"got {prefill_tokens_with_context}"
        )
    _call(
        _C.merge_states, function, _MERGE_NAMES,
        output, output_lse, prefix_output, prefix_lse, suffix_output, suffix_lse,
        tokens_with_prefix, None,
    )  # fmt: skip


def paged_attention_v1(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """Attend with one query of each sequence over a cache of the legacy layout.

    The kernel of `pagetile.legacy` serves the call if it takes it, else those of
    `pagetile.paged_attention`.

    Args:
        out: [B, Hq, D], the type of ``query``; written.
        query: [B, Hq, D] fp16, bf16 or fp32 (CPU), any row and head stride.
        key_cache: [P, Hkv, D / x, S, x], x elements being 16 bytes.
        value_cache: [P, Hkv, D, S].
        num_kv_heads: Hkv, checked against ``key_cache``.
        scale: the softmax scale.
        block_tables: [B, max_pages] int32, any row stride.
        seq_lens: [B] int32, length of each sequence; 0 gives 0.
        block_size: S, checked against ``key_cache``.
        max_seq_len: the longest sequence, or more.
        alibi_slopes: [Hq] or [B, Hq] fp32, or None.
        kv_cache_dtype: as in ``reshape_and_cache_flash``.
        k_scale: fp32, 1 or Hkv elements, or [B, Hkv]; multiplied in. Only fp8 caches use it.
        v_scale: likewise.
        tp_rank: ignored; only block-sparse attention reads it.
        blocksparse_local_blocks: ignored, likewise.
        blocksparse_vert_stride: block-sparse attention is not supported, must be <= 1.
        blocksparse_block_size: ignored.
        blocksparse_head_sliding_step: ignored.

    Raises:
        NotImplementedError: another ``kv_cache_dtype``, or block-sparse attention.
        ValueError, TypeError: shapes, types or devices do not fit; nothing is written.
    """
    _decode(
        "paged_attention_v1", (None, None, None), out, query, key_cache, value_cache, num_kv_heads,
        scale, block_tables, seq_lens, block_size, max_seq_len, alibi_slopes, kv_cache_dtype,
        k_scale, v_scale, blocksparse_vert_stride,
    )  # fmt: skip


def paged_attention_v2(
    out: Tensor,
    exp_sum: Tensor | None,
    max_logits: Tensor | None,
    tmp_out: Tensor | None,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """Do what ``paged_attention_v1`` does, in partitions of 512 keys.

    The kernels of `pagetile.legacy` serve the call if they take it and there is scratch, else
    those of `pagetile.paged_attention`.

    Args:
        out: [B, Hq, D], the type of ``query``; written.
        exp_sum: [B, Hq, partitions or more] fp32, scratch; may be None.
        max_logits: likewise.
        tmp_out: [B, Hq, partitions or more, D], the type of ``query``; likewise.
        query: this and the rest as in ``paged_attention_v1``.
        key_cache: [P, Hkv, D / x, S, x].
        value_cache: [P, Hkv, D, S].
        num_kv_heads: Hkv.
        scale: the softmax scale.
        block_tables: [B, max_pages] int32.
        seq_lens: [B] int32.
        block_size: S.
        max_seq_len: the longest sequence, or more.
        alibi_slopes: [Hq] or [B, Hq] fp32, or None.
        kv_cache_dtype: as in ``reshape_and_cache_flash``.
        k_scale: fp32, 1 or Hkv elements, or [B, Hkv].
        v_scale: likewise.
        tp_rank: ignored.
        blocksparse_local_blocks: ignored.
        blocksparse_vert_stride: must be <= 1.
        blocksparse_block_size: ignored.
        blocksparse_head_sliding_step: ignored.

    Raises:
        NotImplementedError: another ``kv_cache_dtype``, or block-sparse attention.
        ValueError, TypeError: shapes, types or devices do not fit; nothing is written.
    """
    _decode(
        "paged_attention_v2", (exp_sum, max_logits, tmp_out), out, query, key_cache, value_cache,
        num_kv_heads, scale, block_tables, seq_lens, block_size, max_seq_len, alibi_slopes,
        kv_cache_dtype, k_scale, v_scale, blocksparse_vert_stride,
    )  # fmt: skip


def _write(
    function: str,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    layout: str,
) -> None:
    if not _holds_fp8(function, kv_cache_dtype, key_cache):
        k_scale = v_scale = None  # vLLM passes its scales to every cache
    _call(
        cache_write, function, _WRITE_NAMES,
        key, value, key_cache, value_cache, slot_mapping,
        k_scale=k_scale, v_scale=v_scale, kv_dtype=kv_cache_dtype, layout=layout,
    )  # fmt: skip


def _decode(
    function: str,
    scratch: tuple[Tensor | None, Tensor | None, Tensor | None],
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    blocksparse_vert_stride: int,
) -> None:
    if blocksparse_vert_stride > 1:
        _refuse(function, "blocksparse_vert_stride", blocksparse_vert_stride, "0 or 1")
    if not _holds_fp8(function, kv_cache_dtype, key_cache):
        k_scale = v_scale = None  # vLLM passes its scales to every cache
    _, cache_heads, _, cache_block_size, _ = shape_of(
        function, "key_cache", key_cache, 5, "[P, Hkv, D / x, S, x]"
    )
    if num_kv_heads != cache_heads:
        raise ValueError(
            f"{function}: num_kv_heads must be key_cache's {cache_heads}, got {num_kv_heads}"
        )
    if block_size != cache_block_size:
        raise ValueError(
            f"{function}: block_size must be key_cache's {cache_block_size}, got {block_size}"
        )
    # The kernels of those days, where they take the call and paged_attention_v2 has its scratch.
    if function == "paged_attention_v1" or None not in scratch:
        lacks = _call(
            _C.legacy_attention, function, _DECODE_NAMES,
            out, *scratch, query, key_cache, value_cache, block_tables, seq_lens, max_seq_len,
            scale, alibi_slopes, kv_cache_dtype, k_scale, v_scale, None,
        )  # fmt: skip
        if not lacks:
            return
    _call(
        attend, function, _DECODE_NAMES,
        out, None, None, False,
        query, key_cache, value_cache, block_tables, seq_lens, None, 1, max_seq_len, scale, False,
        alibi_slopes=alibi_slopes, k_scale=k_scale, v_scale=v_scale,
        kv_dtype=kv_cache_dtype, layout="legacy",
    )  # fmt: skip


def _call(
    kernel: Callable[..., Any], function: str, names: Mapping[str, str], *args: Any, **kwargs: Any
) -> Any:
    """Call a kernel; its errors name this function and its arguments as the caller wrote them."""
    with renamed(function, names):
        return kernel(*args, **kwargs)


def _refuse(function: str, name: str, value: object, allowed: str) -> NoReturn:
    raise NotImplementedError(
        f"{function}: {name} is not supported by pagetile, got {value} (allowed: {allowed})"
    )


def _holds_fp8(function: str, kv_cache_dtype: str, key_cache: Tensor) -> bool:
    if kv_cache_dtype not in _KV_CACHE_DTYPES:
        _refuse(function, "kv_cache_dtype", repr(kv_cache_dtype), ", ".join(_KV_CACHE_DTYPES))
    return kv_cache_dtype.startswith("fp8") or _dtype_name(key_cache).startswith("float8")


def _dtype_name(tensor: Any) -> str:
    """Return the dtype's own name: "uint8" of torch.uint8, of dtype("uint8") and the like."""
    return str(getattr(tensor, "dtype", None)).rpartition(".")[2]
