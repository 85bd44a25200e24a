"""PyTorch's scaled_dot_product_attention, over K and V that were gathered before, [B, H, L, D]."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from peers.peer import Call, Peer, is_plain


class Sdpa(Peer):
    name = "sdpa"

    def unavailable(self) -> str | None:
        return None

    def supports(self, case: Any) -> bool:
        """It has no lengths: all sequences must have the same."""
        even = len(set(case.q_lens)) == 1 and len(set(case.kv_lens)) == 1
        return is_plain(case) and even and case.stored == case.dtype

    def prepare(self, case: Any, tensors: Any) -> list[Call]:
        q_len, kv_len = case.q_lens[0], case.kv_lens[0]
        batch, heads, dim = len(case.q_lens), case.heads[0], case.head_dim
        q = tensors.q.view(batch, q_len, heads, dim).transpose(1, 2).contiguous()
        options: dict[str, Any] = {"enable_gqa": True}
        if q_len == kv_len:
            options["is_causal"] = True
        elif q_len > 1:
            options["attn_mask"] = causal_lower_right(q_len, kv_len)
        calls = []
        for table in tensors.tables:
            parts = [tensors.gathered(table, b) for b in range(batch)]
            k, v = (torch.stack(x).transpose(1, 2).contiguous() for x in zip(*parts, strict=True))
            calls.append(functools.partial(scaled_dot_product_attention, q, k, v, **options))
        return calls

    def result(self, returned: Any, tensors: Any) -> torch.Tensor:
        return returned.transpose(1, 2).reshape(tensors.q.shape)


PEERS = (Sdpa(),)
