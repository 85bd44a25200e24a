"""Paged attention as it began: the kernels of vLLM's first releases, written anew for comparison.

``paged_attention_v1`` scans a whole sequence with one thread block for each query head.
``paged_attention_v2`` gives 512 keys to each, and a second kernel sums the partitions. Both read
caches of the legacy layout. `pagetile.paged_attention` does the same in less time: docs/legacy.md
shows how much, and why. ``pagetile.compat.vllm`` calls these for old callers. On the CPU,
pagetile's one kernel serves both.
"""

from __future__ import annotations

from typing import Any

from pagetile import _C
from pagetile._errors import renamed
from pagetile._tensor import SupportsDLPack

__all__ = ["paged_attention_v1", "paged_attention_v2"]


def paged_attention_v1(
    out: SupportsDLPack,
    q: SupportsDLPack,
    k_cache: SupportsDLPack,
    v_cache: SupportsDLPack,
    *,
    block_table: SupportsDLPack,
    seqused_k: SupportsDLPack,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    alibi_slopes: SupportsDLPack | None = None,
    kv_dtype: str = "auto",
    k_scale: SupportsDLPack | None = None,
    v_scale: SupportsDLPack | None = None,
    stream: Any = None,
) -> None:
    """Attend with one query of each sequence; a thread block scans a sequence for a query head.

    B sequences, Hq query heads, Hkv KV heads, head dimension D, P pages of S tokens, x elements of
    a cache being 16 bytes.

    Args:
        out: written; [B, Hq, D], q's dtype, any row and head stride.
        q: [B, Hq, D], float16, bfloat16 or float32 (CPU), any row and head stride, dense last
            dimension.
        k_cache: [P, Hkv, D / x, S, x], q's dtype, float8_e4m3fn, float8_e5m2, or uint8 with
            ``kv_dtype``. S is 8, 16 or 32; a page's heads are dense, at multiples of 16 bytes.
        v_cache: [P, Hkv, D, S], likewise.
        block_table: [B, max_pages] int32, any row stride. A page outside the pool reads as zeros.
        seqused_k: [B] int32, keys of each sequence; 0 gives 0.
        max_seqlen_k: the longest sequence, or more: its scores are in shared memory, 57,000 of
            them on an H200. Keys behind it are left out.
        softmax_scale: None is 1 / sqrt(D).
        alibi_slopes: [Hq] or [B, Hq] float32, or None.
        kv_dtype: as in `pagetile.cache_write`.
        k_scale: float32, 1, [Hkv] or [B, Hkv] elements, only for fp8 caches: multiplied in.
        v_scale: likewise.
        stream: as in `pagetile.cache_write`.

    Raises:
        NotImplementedError: this kernel does not take the call, and `pagetile.paged_attention` may.
        ValueError, TypeError: shapes, dtypes, strides or devices do not fit; nothing is written.
        RuntimeError: no kernel is built for the device; the message lists what is.

    Example:
        >>> from pagetile.legacy import paged_attention_v1
        >>> paged_attention_v1(
        ...     out, q, k_cache, v_cache, block_table=table, seqused_k=lengths, max_seqlen_k=4096
        ... )
    """
    _require(
        "paged_attention_v1",
        attend(
            "paged_attention_v1", out, None, None, None, q, k_cache, v_cache, block_table,
            seqused_k, max_seqlen_k, softmax_scale, alibi_slopes, kv_dtype, k_scale, v_scale,
            stream,
        ),
    )  # fmt: skip


def paged_attention_v2(
    out: SupportsDLPack,
    exp_sums: SupportsDLPack,
    max_logits: SupportsDLPack,
    tmp_out: SupportsDLPack,
    q: SupportsDLPack,
    k_cache: SupportsDLPack,
    v_cache: SupportsDLPack,
    *,
    block_table: SupportsDLPack,
    seqused_k: SupportsDLPack,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    alibi_slopes: SupportsDLPack | None = None,
    kv_dtype: str = "auto",
    k_scale: SupportsDLPack | None = None,
    v_scale: SupportsDLPack | None = None,
    stream: Any = None,
) -> None:
    """Attend with one query of each sequence, in partitions of 512 keys that a second kernel sums.

    ``max_seqlen_k``, or what a row of ``block_table`` holds if that is less, decides how many
    partitions there are.

    Args:
        out: written; [B, Hq, D], q's dtype, any row and head stride.
        exp_sums: written; [B, Hq, partitions or more] float32, dense: the sums of weights.
        max_logits: written; likewise: the largest scores.
        tmp_out: written; [B, Hq, partitions or more, D], q's dtype, dense: the partitions' results.
        q: this and the rest as in ``paged_attention_v1``; [B, Hq, D].
        k_cache: [P, Hkv, D / x, S, x].
        v_cache: [P, Hkv, D, S].
        block_table: [B, max_pages] int32.
        seqused_k: [B] int32.
        max_seqlen_k: the longest sequence, or more.
        softmax_scale: None is 1 / sqrt(D).
        alibi_slopes: [Hq] or [B, Hq] float32, or None.
        kv_dtype: as in `pagetile.cache_write`.
        k_scale: float32, 1, [Hkv] or [B, Hkv] elements.
        v_scale: likewise.
        stream: as in `pagetile.cache_write`.

    Raises:
        NotImplementedError: these kernels do not take the call, and `pagetile.paged_attention` may.
        ValueError, TypeError: shapes, dtypes, strides or devices do not fit; nothing is written.
        RuntimeError: no kernel is built for the device; the message lists what is.

    Example:
        >>> from pagetile.legacy import paged_attention_v2
        >>> paged_attention_v2(
        ...     out, exp_sums, max_logits, tmp_out, q, k_cache, v_cache, block_table=table,
        ...     seqused_k=lengths, max_seqlen_k=65536,
        ... )
    """
    given = {"exp_sums": exp_sums, "max_logits": max_logits, "tmp_out": tmp_out}
    for name, scratch in given.items():
        if scratch is None:
            raise TypeError(f"paged_attention_v2: {name} must be a DLPack tensor, got None")
    _require(
        "paged_attention_v2",
        attend(
            "paged_attention_v2", out, exp_sums, max_logits, tmp_out, q, k_cache, v_cache,
            block_table, seqused_k, max_seqlen_k, softmax_scale, alibi_slopes, kv_dtype, k_scale,
            v_scale, stream,
        ),
    )  # fmt: skip


def attend(function: str, *args: Any) -> str:
    """Call the extension in the name of a function; return what its kernels want, or ""."""
    with renamed(function, {}):
        return _C.legacy_attention(*args)


def _require(function: str, wants: str) -> None:
    if wants:
        raise NotImplementedError(f"{function}: these kernels take {wants}")
