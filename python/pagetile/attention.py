"""Attention over a paged KV cache, and merging of partial attentions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagetile import _C
from pagetile._C import Plan
from pagetile._tensor import SupportsDLPack, empty, explain_scalars, finish, prepare

__all__ = ["merge_states", "paged_attention"]

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def paged_attention(
    q: SupportsDLPack,
    k_cache: SupportsDLPack,
    v_cache: SupportsDLPack,
    *,
    block_table: SupportsDLPack,
    seqused_k: SupportsDLPack,
    cu_seqlens_q: SupportsDLPack,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: SupportsDLPack | None = None,
    sinks: SupportsDLPack | None = None,
    q_scale: SupportsDLPack | None = None,
    k_scale: SupportsDLPack | None = None,
    v_scale: SupportsDLPack | None = None,
    kv_dtype: str = "auto",
    layout: str = "NHD",
    num_splits: int = 0,
    batch_invariant: bool = False,
    fp8_products: bool = False,
    plan: Plan | None = None,
    workspace: SupportsDLPack | None = None,
    pdl: bool = False,
    out: SupportsDLPack | None = None,
    return_softmax_lse: bool = False,
    softmax_lse: SupportsDLPack | None = None,
    validate: bool | None = None,
    stream: Any = None,
) -> Any:
    """Attend from a packed batch of queries to the pages of each sequence, without gathering them.

    B sequences with T query tokens in all, Hq query and Hkv KV heads (Hq % Hkv == 0), head
    dimensions D of q and k and Dv of v (multiples of 8 up to 256), P pages of S tokens. Accumulates
    in float32.

    Args:
        q: [T, Hq, D], float32 (CPU), float16, bfloat16, or fp8 with ``q_scale``; dense last
            dimension.
        k_cache: [P, S, Hkv, D] ("NHD") or [P, Hkv, S, D] ("HND"), any strides, dense last
            dimension; q's dtype, float8_e4m3fn, float8_e5m2, or uint8 with ``kv_dtype``.
        v_cache: likewise with Dv; k_cache's dtype.
        block_table: int32 [B, max_pages], any row stride: physical page of each logical page.
            Entries past a sequence's last page are never read. A page outside [0, P) reads as
            zeros.
        seqused_k: int32 [B], KV tokens of each sequence, new ones included; clamped to [0,
            max_pages * S].
        cu_seqlens_q: int32 [B + 1], offsets of the sequences in q. Rows of out that no sequence
            covers are left alone.
        max_seqlen_q: longest query of the batch, or a bound.
        max_seqlen_k: longest sequence, or a bound; None is unknown.
        softmax_scale: None is D ** -0.5.
        causal: aligned bottom-right: query i of a sequence sees key j iff j <= i + seqused_k -
            q_len.
        window: (left, right) tokens around that diagonal, inclusive; -1 is unlimited.
        softcap: score = softcap * tanh(score / softcap), before bias and mask; 0 is off.
        alibi_slopes: float32 [Hq] or [B, Hq]: adds
            ``-slope * |i + seqused_k - q_len - j|``.
        sinks: float32, float16 or bfloat16 [Hq]: a logit that joins the softmax's denominator,
            unscaled.
        q_scale: float32, 1, [Hkv] or [B, Hkv] elements, only for an fp8 q: q * q_scale is what it
            stands for.
        k_scale: likewise, only for fp8 caches.
        v_scale: likewise, only for fp8 caches.
        kv_dtype: "auto" (the caches' own dtype), "fp8" or "fp8_e4m3", "fp8_e5m2", "float16",
            "bfloat16", "float32".
        layout: "NHD", "HND", or "legacy": the layout of vLLM's first kernels, k_cache
            [P, Hkv, D / x, S, x] and v_cache [P, Hkv, Dv, S].
        num_splits: cuts of each sequence that run in parallel: 0 chooses, 1 is off, n is at most n.
        batch_invariant: a sequence's bits depend on nothing but the sequence: not on the batch,
            splits or query chunks.
        fp8_products: allow products of e4m3 with e4m3, for a float8_e4m3fn q over such caches: q, k
            and v as they are, the softmax's weights rounded to e4m3. Less precise. One kernel does
            it: on compute capability 9.0, for long queries with head_dim 72 to 128, without softcap
            and ALiBi. Everything else is multiplied as without it.
        plan: the step's schedule by `make_plan`, for these sizes and options: saves a GPU the
            kernel that would plan this call. The CPU checks that it fits, and needs none.
        workspace: written; a contiguous tensor of at least `workspace_size` bytes, any dtype, 16-
            byte aligned, zeroed before its first use. A call leaves it ready for the next; calls
            that may run at the same time need one each. None: one that the library keeps for each
            stream. The CPU needs none.
        pdl: launch as a programmatic dependent of the kernel before this one in the stream. plan,
            the lengths, block_table and the scales are then read early: no kernel of the unbroken
            chain of such launches before this one, nor the kernel that the chain follows, may
            write them. Queries, keys and values wait. The CPU ignores it.
        out: written; [T, Hq, Dv], q's dtype (fp8 q: any 16- or 32-bit float). None allocates in q's
            framework (fp8 q: bfloat16).
        return_softmax_lse: also return softmax_lse.
        softmax_lse: written; float32 [Hq, T], natural logarithm, sink included.
        validate: read the metadata first and raise on what is out of range; on a GPU this
            synchronises. PAGETILE_VALIDATE=1 in the environment does it for every call.
        stream: CUDA stream: an int, an object with ``__cuda_stream__``, or None for the current
            stream of q's framework.

    Returns:
        out, or (out, softmax_lse) with ``return_softmax_lse``. A row that sees no key has out 0 and
        lse -inf (with
        sinks: the sink's logit).

    Raises:
        ValueError: a shape, dtype, stride, device or option does not fit; nothing has been written.
        TypeError: an argument is not a DLPack tensor.
        RuntimeError: no kernel is built for the device; the message lists what is.

    Example:
        8 pages of 16 tokens, 4 KV heads of 64; one new token with 8 query heads, 20 tokens on pages
        5 and 2:

        >>> import numpy as np, pagetile
        >>> k_cache, v_cache = np.random.rand(2, 8, 16, 4, 64).astype(np.float32)
        >>> out = pagetile.paged_attention(
        ...     np.random.rand(1, 8, 64).astype(np.float32), k_cache, v_cache,
        ...     block_table=np.array([[5, 2]], np.int32), seqused_k=np.array([20], np.int32),
        ...     cu_seqlens_q=np.array([0, 1], np.int32), max_seqlen_q=1,
        ... )
    """
    if block_table is None:
        raise TypeError("paged_attention: block_table must be a DLPack tensor, got None")
    if seqused_k is None:
        raise TypeError("paged_attention: seqused_k must be a DLPack tensor, got None")
    if cu_seqlens_q is None:
        raise TypeError("paged_attention: cu_seqlens_q must be a DLPack tensor, got None")
    return attend(
        out,
        softmax_lse,
        workspace,
        return_softmax_lse,
        q,
        k_cache,
        v_cache,
        block_table,
        seqused_k,
        cu_seqlens_q,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        window,
        softcap,
        alibi_slopes,
        sinks,
        q_scale,
        k_scale,
        v_scale,
        kv_dtype,
        layout,
        num_splits,
        batch_invariant,
        plan,
        pdl,
        fp8_products,
        validate,
        stream,
    )


def attend(
    out: Any,
    softmax_lse: Any,
    workspace: Any,
    return_softmax_lse: bool,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seqused_k: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_dtype: str = "auto",
    layout: str = "NHD",
    num_splits: int = 0,
    batch_invariant: bool = False,
    plan: Plan | None = None,
    pdl: bool = False,
    fp8_products: bool = False,
    validate: bool | None = None,
    stream: Any = None,
    cu_seqlens_k: Any = None,
) -> Any:
    """Allocate the results that are not given and call the extension, for every door to attention.

    Without block_table, k_cache and v_cache are packed rows [total_k, Hkv, D] with cu_seqlens_k.
    Without cu_seqlens_q, every sequence has one query.
    """
    given_out = out is not None
    given_lse = softmax_lse is not None
    if not given_out or (return_softmax_lse and not given_lse):
        total_q, num_q_heads, _ = prepare("paged_attention", "q", q, "[T, Hq, D]")
    if not given_out:
        v_shape = getattr(v_cache, "shape", ())  # the extension says what is wrong with a v_cache
        head_dim_v = v_shape[2 if layout == "legacy" else -1] if len(v_shape) > 2 else 0
        is_float8 = q.dtype.itemsize == 1 and str(q.dtype).endswith(_FLOAT8)
        out = empty(q, (total_q, num_q_heads, head_dim_v), "bfloat16" if is_float8 else None)
    if return_softmax_lse and not given_lse:
        softmax_lse = empty(q, (num_q_heads, total_q), "float32")
    window_left, window_right = window_sides("paged_attention", window)
    try:
        _C.paged_attention(
            out,
            softmax_lse,
            q,
            k_cache,
            v_cache,
            block_table,
            seqused_k,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            0 if max_seqlen_k is None else max_seqlen_k,
            softmax_scale,
            causal,
            window_left,
            window_right,
            softcap,
            alibi_slopes,
            sinks,
            q_scale,
            k_scale,
            v_scale,
            kv_dtype,
            layout,
            num_splits,
            batch_invariant,
            plan,
            workspace,
            pdl,
            fp8_products,
            validate,
            stream,
        )
    except TypeError as error:
        explain_scalars(
            "paged_attention",
            error,
            ("max_seqlen_q", int, max_seqlen_q),
            ("max_seqlen_k", int, 0 if max_seqlen_k is None else max_seqlen_k),
            ("softmax_scale", float, 0.0 if softmax_scale is None else softmax_scale),
            ("causal", bool, causal),
            ("window", int, window_left),
            ("window", int, window_right),
            ("softcap", float, softcap),
            ("kv_dtype", str, kv_dtype),
            ("layout", str, layout),
            ("num_splits", int, num_splits),
            ("batch_invariant", bool, batch_invariant),
            ("pdl", bool, pdl),
            ("fp8_products", bool, fp8_products),
            ("validate", bool, False if validate is None else validate),
        )
    if not given_out:
        out = finish(q, out)
    if not return_softmax_lse:
        return out
    return out, softmax_lse if given_lse else finish(q, softmax_lse)


def window_sides(function: str, window: Sequence[int]) -> tuple[int, int]:
    """Return (left, right), or say that the window is no pair."""
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"{function}: window must be (left, right), got {window!r}") from None
    return left, right


def merge_states(
    out_a: SupportsDLPack,
    lse_a: SupportsDLPack,
    out_b: SupportsDLPack,
    lse_b: SupportsDLPack,
    *,
    out: SupportsDLPack | None = None,
    lse: SupportsDLPack | None = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Merge two attentions of the same queries over disjoint sets of keys, exactly.

    T query tokens, Hq heads, head dimension Dv.

    Args:
        out_a: [T, Hq, Dv], float32, float16 or bfloat16, dense last dimension.
        lse_a: float32 [Hq, T], natural logarithm, any strides. Either infinity says that this side
            saw no key; its values in out_a are then ignored.
        out_b: likewise, out_a's dtype.
        lse_b: likewise.
        out: written; like out_a, and may be out_a or out_b itself. None allocates in out_a's
            framework.
        lse: written; like lse_a, and may be lse_a or lse_b itself. None allocates.
        stream: CUDA stream: an int, an object with ``__cuda_stream__``, or None for the current
            stream of out_a's framework.

    Returns:
        (out, lse). Where both sides saw no key, out is 0 and lse -inf.

    Raises:
        ValueError: a shape, dtype, stride or device does not fit; nothing has been written.
        TypeError: an argument is not a DLPack tensor.
        RuntimeError: no kernel is built for the device; the message lists what is.
    """
    return merge(out_a, lse_a, out_b, lse_b, out, lse, -1, stream)


def merge(
    out_a: Any,
    lse_a: Any,
    out_b: Any,
    lse_b: Any,
    out: Any,
    lse: Any,
    tokens_with_a: int,
    stream: Any,
) -> tuple[Any, Any]:
    """Merge the first ``tokens_with_a`` tokens (-1: all) and take b alone for the rest."""
    given_out, given_lse = out is not None, lse is not None
    if not given_out or not given_lse:
        shape = prepare("merge_states", "out_a", out_a, "[T, Hq, Dv]")
        if not given_out:
            out = empty(out_a, shape)
        if not given_lse:
            lse = empty(out_a, (shape[1], shape[0]), "float32")
    _C.merge_states(out, lse, out_a, lse_a, out_b, lse_b, tokens_with_a, stream)
    return out if given_out else finish(out_a, out), lse if given_lse else finish(out_a, lse)
