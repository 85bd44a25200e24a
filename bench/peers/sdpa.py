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
        q, options = self._queries(case, tensors)
        calls = []
        for table in tensors.tables:
            parts = [tensors.gathered(table, b) for b in range(len(case.kv_lens))]
            k, v = (torch.stack(x).transpose(1, 2).contiguous() for x in zip(*parts, strict=True))
            calls.append(functools.partial(scaled_dot_product_attention, q, k, v, **options))
        return calls

    @staticmethod
    def _queries(case: Any, tensors: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        batch, q_len, kv_len = len(case.q_lens), case.q_lens[0], case.kv_lens[0]
        if q_len == 1:  # the heads of a group as rows of one matrix: its fastest form
            return tensors.q.view(batch, case.heads[1], -1, case.head_dim), {}
        q = tensors.q.view(batch, q_len, *tensors.q.shape[1:]).transpose(1, 2).contiguous()
        if q_len == kv_len:
            return q, {"is_causal": True, "enable_gqa": True}
        return q, {"attn_mask": causal_lower_right(q_len, kv_len), "enable_gqa": True}

    def result(self, returned: Any, tensors: Any) -> torch.Tensor:
        one = max(tensors.case.q_lens) == 1
        return (returned if one else returned.transpose(1, 2)).reshape(tensors.q.shape)


PEERS = (Sdpa(),)
