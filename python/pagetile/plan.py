"""The schedule of a step's attention, made once and used by every layer."""

from __future__ import annotations

import re
from typing import Any

from pagetile import _C
from pagetile._C import Plan
from pagetile._tensor import SupportsDLPack, explain_scalars, find_allocator
from pagetile.attention import window_sides

__all__ = ["Plan", "make_plan", "workspace_size"]

Plan.__module__ = "pagetile"  # the name under which callers know it

_CPU, _CUDA, _CUDA_HOST = 1, 2, 3  # DLPack's numbers


def make_plan(
    *,
    seqused_k: SupportsDLPack,
    cu_seqlens_q: SupportsDLPack | None,
    max_seqlen_q: int,
    max_seqlen_k: int | None,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    head_dim_v: int | None = None,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    num_splits: int = 0,
    batch_invariant: bool = False,
    fp8_products: bool = False,
    out: Plan | None = None,
    stream: Any = None,
) -> Plan:
    """Schedule the attention of a step on the device, for the ``plan`` of `paged_attention`.

    One small kernel, once a step, instead of one in each layer. It reads the lengths on the device
    and synchronises nothing. B sequences; Hq query and Hkv KV heads (Hq % Hkv == 0), head
    dimensions D of q and k and Dv of v.

    The plan holds for every `paged_attention` with the sizes and options given here and with the
    same query lengths. The KV lengths may differ: results stay right, only the balance suffers.

    Args:
        seqused_k: int32 [B], KV tokens of each sequence, new ones included.
        cu_seqlens_q: int32 [B + 1], offsets of the sequences' queries; None: one query a sequence.
        max_seqlen_q: longest query of the calls, or a bound; 0 is unknown.
        max_seqlen_k: longest sequence of the calls, or a bound; None is unknown, which
            ``batch_invariant`` does not allow.
        num_q_heads: Hq.
        num_kv_heads: Hkv.
        head_dim: D, a multiple of 8 up to 256.
        page_size: S, tokens of a page.
        head_dim_v: Dv, likewise; None is D.
        causal: as in `paged_attention`.
        window: likewise.
        num_splits: likewise.
        batch_invariant: likewise.
        fp8_products: likewise.
        out: written and returned; an earlier plan for the same sizes and options and for bounds no
            smaller than these, which it keeps. Its memory stays where it is, so a captured graph
            finds the new schedule. None allocates in seqused_k's framework.
        stream: CUDA stream: an int, an object with ``__cuda_stream__``, or None for the current
            stream of seqused_k's framework.

    Returns:
        The plan. On CPU tensors it is the schedule that an H200 would get.

    Raises:
        ValueError: a shape, dtype, stride, device or option does not fit; nothing has been written.
        TypeError: an argument is not a DLPack tensor, or ``out`` is not a plan.
        RuntimeError: no kernel is built for the device; the message lists what is.

    Example:
        Two sequences, one new token each, 8 query heads and 4 KV heads of 64, pages of 16 tokens:

        >>> import numpy as np, pagetile
        >>> seqused_k, cu_seqlens_q = np.array([20, 300], np.int32), np.array([0, 1, 2], np.int32)
        >>> plan = pagetile.make_plan(
        ...     seqused_k=seqused_k, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=1, max_seqlen_k=512,
        ...     num_q_heads=8, num_kv_heads=4, head_dim=64, page_size=16,
        ... )
        >>> seqused_k += 1  # the next step
        >>> plan = pagetile.make_plan(
        ...     seqused_k=seqused_k, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=1, max_seqlen_k=512,
        ...     num_q_heads=8, num_kv_heads=4, head_dim=64, page_size=16, out=plan,
        ... )
    """

    def allocate(num_elements: int) -> Any:
        allocator = find_allocator("make_plan", "seqused_k", seqused_k, takes_out=False)
        return allocator(seqused_k, (num_elements,), "int32")

    window_left, window_right = window_sides("make_plan", window)
    known_k = 0 if max_seqlen_k is None else max_seqlen_k
    dim_v = head_dim if head_dim_v is None else head_dim_v
    try:
        return _C.make_plan(
            seqused_k,
            cu_seqlens_q,
            max_seqlen_q,
            known_k,
            num_q_heads,
            num_kv_heads,
            head_dim,
            dim_v,
            page_size,
            causal,
            window_left,
            window_right,
            num_splits,
            batch_invariant,
            fp8_products,
            out,
            allocate,
            stream,
        )
    except TypeError as error:
        explain_scalars(
            "make_plan",
            error,
            ("max_seqlen_q", int, max_seqlen_q),
            ("max_seqlen_k", int, known_k),
            ("num_q_heads", int, num_q_heads),
            ("num_kv_heads", int, num_kv_heads),
            ("head_dim", int, head_dim),
            ("head_dim_v", int, dim_v),
            ("page_size", int, page_size),
            ("causal", bool, causal),
            ("window", int, window_left),
            ("window", int, window_right),
            ("num_splits", int, num_splits),
            ("batch_invariant", bool, batch_invariant),
            ("fp8_products", bool, fp8_products),
        )


def workspace_size(
    *,
    max_seqlen_q: int,
    max_seqlen_k: int | None,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    batch_invariant: bool = False,
    device: Any = None,
) -> int:
    """Return the bytes that the ``workspace`` of `paged_attention` must have.

    They are enough for every call with these sizes, or with smaller bounds: whatever its batch, its
    lengths, mask and splits. With a plan, the plan's bounds count. Zero the workspace once, before
    its first use. Hq query and Hkv KV heads (Hq % Hkv == 0), head dimensions D of q and k and Dv
    of v.

    Args:
        max_seqlen_q: longest query of the calls, or a bound; 0 is unknown.
        max_seqlen_k: longest sequence of the calls, or a bound; None is unknown, which
            ``batch_invariant`` does not allow.
        num_q_heads: Hq.
        num_kv_heads: Hkv.
        head_dim: D, a multiple of 8 up to 256.
        head_dim_v: Dv, likewise; None is D.
        batch_invariant: as in `paged_attention`.
        device: where the calls will run: a tensor that lies there, "cpu", "cuda", "cuda:1", an
            object that prints like these (``torch.device``), or the index of a GPU. None is GPU 0,
            or the CPU where there is no GPU.

    Returns:
        Bytes. 0 for the CPU, which needs no workspace.

    Raises:
        ValueError: a size or the device does not fit.
        TypeError: a size is not an int.
        RuntimeError: CUDA cannot tell about the device.

    Example:
        >>> import pagetile
        >>> pagetile.workspace_size(
        ...     max_seqlen_q=1, max_seqlen_k=8192, num_q_heads=32, num_kv_heads=8, head_dim=128,
        ...     device="cpu",
        ... )
        0
    """
    kind, index = _device_of(device)
    known_k = 0 if max_seqlen_k is None else max_seqlen_k
    dim_v = head_dim if head_dim_v is None else head_dim_v
    try:
        return _C.workspace_size(
            max_seqlen_q,
            known_k,
            num_q_heads,
            num_kv_heads,
            head_dim,
            dim_v,
            batch_invariant,
            kind != _CPU,
            index,
        )
    except TypeError as error:
        explain_scalars(
            "workspace_size",
            error,
            ("max_seqlen_q", int, max_seqlen_q),
            ("max_seqlen_k", int, known_k),
            ("num_q_heads", int, num_q_heads),
            ("num_kv_heads", int, num_kv_heads),
            ("head_dim", int, head_dim),
            ("head_dim_v", int, dim_v),
            ("batch_invariant", bool, batch_invariant),
        )


def _device_of(device: Any) -> tuple[int, int]:
    """Return DLPack's device type and index of what a caller may call a device."""
    if device is None:
        return (_CUDA if _C.devices() else _CPU), 0
    if hasattr(device, "__dlpack_device__"):
        kind, index = device.__dlpack_device__()
        return (_CPU if int(kind) in (_CPU, _CUDA_HOST) else _CUDA), int(index)
    if isinstance(device, int) and device >= 0:
        return _CUDA, device
    found = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", str(device))
    if found is None:
        raise ValueError(
            "workspace_size: device must be a tensor, 'cpu', 'cuda', 'cuda:<index>' or the index "
            f"of a GPU, got {device!r}"
        )
    return (_CPU if found[1] == "cpu" else _CUDA), int(found[2] or 0)
