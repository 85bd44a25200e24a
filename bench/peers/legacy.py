"""The historical kernels of `pagetile.legacy`, over the same pages in the legacy layout."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from peers.peer import Call, Peer, is_plain

PARTITION = 512  # keys, of paged_attention_v2


class Legacy(Peer):
    """`paged_attention_v1` or `_v2`: one query a sequence."""

    def __init__(self, name: str, function: str, partitioned: bool) -> None:
        self.name, self.function, self.partitioned = name, function, partitioned

    def unavailable(self) -> str | None:
        try:
            getattr(importlib.import_module("pagetile.legacy"), self.function)
        except (ImportError, AttributeError) as error:
            return str(error)
        return None

    def supports(self, case: Any) -> bool:
        e4m3 = case.stored == torch.float8_e4m3fn
        shapes = max(case.q_lens) == 1 and case.page_size in (8, 16, 32) and case.head_dim <= 256
        return is_plain(case) and shapes and (case.stored == case.dtype or e4m3)

    def prepare(self, case: Any, tensors: Any) -> list[Call]:
        caches = legacy_caches(*tensors.caches)
        scales = (tensors.scales.get("k_scale"), tensors.scales.get("v_scale"))
        dtype = "auto" if case.stored == case.dtype else "fp8_e4m3"
        attend = getattr(importlib.import_module("pagetile.legacy"), self.function)
        given = [tensors.out, *self._partials(case, tensors), tensors.q, *caches]
        options = {
            "seqused_k": tensors.seqused_k,
            "max_seqlen_k": max(case.kv_lens),
            "softmax_scale": case.head_dim**-0.5,
            "kv_dtype": dtype,
            "k_scale": scales[0],
            "v_scale": scales[1],
        }
        return [
            functools.partial(attend, *given, block_table=table, **options)
            for table in tensors.tables
        ]

    def _partials(self, case: Any, tensors: Any) -> list[torch.Tensor]:
        """Sums, maxima and results of the partitions."""
        if not self.partitioned:
            return []
        shape = (len(case.q_lens), case.heads[0], -(-max(case.kv_lens) // PARTITION))
        fp32 = functools.partial(torch.empty, device=tensors.q.device)
        return [fp32(shape), fp32(shape), tensors.q.new_empty(*shape, case.head_dim)]


def legacy_caches(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[P, Hkv, D / x, S, x] and [P, Hkv, D, S] of [P, S, Hkv, D], x elements being 16 bytes."""
    pages, size, heads, dim = k.shape
    x = 16 // k.dtype.itemsize
    k = k.view(pages, size, heads, dim // x, x).permute(0, 2, 3, 1, 4).contiguous()
    return k, v.permute(0, 2, 3, 1).contiguous()


PEERS = (
    Legacy("legacy_v1", "paged_attention_v1", partitioned=False),
    Legacy("legacy_v2", "paged_attention_v2", partitioned=True),
)
