"""Writing new keys and values into a paged cache, and copying its pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagetile import _C
from pagetile._tensor import SupportsDLPack, explain_scalars

__all__ = ["cache_write", "copy_pages"]


def cache_write(
    k: SupportsDLPack,
    v: SupportsDLPack,
    k_cache: SupportsDLPack,
    v_cache: SupportsDLPack,
    slot_mapping: SupportsDLPack,
    *,
    k_scale: SupportsDLPack | None = None,
    v_scale: SupportsDLPack | None = None,
    kv_dtype: str = "auto",
    layout: str = "NHD",
    pdl: bool = False,
    stream: Any = None,
) -> None:
    """Write T rows of keys and values into their slots of a paged cache, in place.

    T tokens, Hkv KV heads, head dimension D (of V: Dv, which may differ), P pages of S tokens.

    Args:
        k: [T or more, Hkv, D], float32, float16 or bfloat16, any row and head stride, dense last
            dimension. Rows past T are ignored.
        v: [T or more, Hkv, Dv], k's dtype.
        k_cache: written; [P, S, Hkv, D] ("NHD") or [P, Hkv, S, D] ("HND"), any strides, dense last
            dimension. k's dtype, or float8_e4m3fn, float8_e5m2, or uint8 with ``kv_dtype``.
        v_cache: written; likewise with Dv, k_cache's dtype.
        slot_mapping: [T], int64 or int32: page * S + offset. A slot below 0 or at P * S and above
            is skipped. A slot that comes twice is a race.
        k_scale: float32, 1 or Hkv elements, only for fp8 caches: stored = saturate(k / k_scale),
            rounded to the nearest, ties to even; infinities saturate, NaN stays NaN. None is 1.
        v_scale: likewise for v.
        kv_dtype: "auto" (the caches' own dtype), "fp8" or "fp8_e4m3", "fp8_e5m2", "float16",
            "bfloat16", "float32".
        layout: "NHD", "HND", or "legacy": the layout of vLLM's first kernels, k_cache
            [P, Hkv, D / x, S, x] and v_cache [P, Hkv, Dv, S].
        pdl: launch as a programmatic dependent of the kernel before this one in the stream, which
            saves 0.5 to 0.8 us (H200). slot_mapping and the scales are then read early: no
            kernel of the unbroken chain of such launches before this one, nor the kernel that the
            chain follows, may write them. The CPU ignores it.
        stream: CUDA stream: an int, an object with ``__cuda_stream__``, or None for the current
            stream of k's framework.

    Raises:
        ValueError: a shape, dtype, stride, device or option does not fit; nothing has been written.
        TypeError: an argument is not a DLPack tensor.
        RuntimeError: no kernel is built for the device; the message lists what is.

    Example:
        8 pages of 16 tokens, 4 heads of 64; two tokens go to page 1, the third is skipped:

        >>> import numpy as np, pagetile
        >>> k_cache, v_cache = np.zeros((2, 8, 16, 4, 64), np.float32)
        >>> k, v = np.ones((2, 3, 4, 64), np.float32)
        >>> pagetile.cache_write(k, v, k_cache, v_cache, np.array([16, 17, -1]))
    """
    try:
        _C.cache_write(
            k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, kv_dtype, layout, pdl, stream
        )
    except TypeError as error:
        explain_scalars(
            "cache_write",
            error,
            ("kv_dtype", str, kv_dtype),
            ("layout", str, layout),
            ("pdl", bool, pdl),
        )


def copy_pages(
    src_caches: SupportsDLPack | Sequence[SupportsDLPack],
    dst_caches: SupportsDLPack | Sequence[SupportsDLPack],
    src_pages: SupportsDLPack,
    dst_pages: SupportsDLPack,
    *,
    stream: Any = None,
) -> None:
    """Copy whole pages, in all layers' caches at once: fork and copy-on-write of `BlockPool`.

    P pages a cache, n pairs of pages.

    Args:
        src_caches: a cache [P, ...] or a list or tuple of them, all of one shape, dtype and
            strides; any strides, any dtype.
        dst_caches: written; as many, of the same dtype and page shape. P may differ. They may be
            the sources themselves.
        src_pages: [n], int32 or int64, on the caches' device.
        dst_pages: [n], src_pages' dtype: page dst_pages[i] of each cache becomes page src_pages[i].
            A pair with a page outside its cache is skipped. No page may be both a source and a
            destination, nor a destination twice: the copies run in any order.
        stream: CUDA stream: an int, an object with ``__cuda_stream__``, or None for the current
            stream of the first cache's framework.

    Raises:
        ValueError: a shape, dtype, stride or device does not fit; nothing has been written.
        TypeError: an argument is not a DLPack tensor.
        RuntimeError: no kernel is built for the device; the message lists what is.

    Example:
        >>> import numpy as np, pagetile
        >>> k_cache, v_cache = np.random.rand(2, 8, 16, 4, 64).astype(np.float32)
        >>> caches = [k_cache, v_cache]
        >>> pagetile.copy_pages(caches, caches, np.array([3]), np.array([5]))  # page 5 := page 3
    """
    _C.copy_pages(src_caches, dst_caches, src_pages, dst_pages, stream)
