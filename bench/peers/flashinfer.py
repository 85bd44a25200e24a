"""FlashInfer: its paged prefill wrapper by two backends, planned ahead, and XQA for decode."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

from peers.peer import Call, Peer, is_plain

WORKSPACE_BYTES = 512 << 20


class FlashInfer(Peer):
    def __init__(self, name: str, backend: str) -> None:
        self.name, self.backend = name, backend

    def unavailable(self) -> str | None:
        return None if importlib.util.find_spec("flashinfer") else "not installed"

    def supports(self, case: Any) -> bool:
        plain = is_plain(case) and case.stored in (case.dtype, torch.float8_e4m3fn)
        return plain and (self.backend != "fa3" or case.stored == case.dtype)

    def prepare(self, case: Any, tensors: Any) -> list[Call]:
        import flashinfer

        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=tensors.q.device)
        pages_of = torch.tensor(tensors.pages_of)
        offsets = torch.tensor([0, *tensors.pages_of]).cumsum(0).int()
        last = torch.tensor([(n - 1) % case.page_size + 1 for n in case.kv_lens]).int()
        calls = []
        for table in tensors.tables:
            used = torch.arange(table.shape[1]) < pages_of[:, None]
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace, "NHD", backend=self.backend
            )
            wrapper.plan(
                tensors.cu_seqlens_q.cpu(), offsets, table[used.to(table.device)], last,
                *case.heads, case.head_dim, case.page_size, causal=True,
                q_data_type=case.dtype, kv_data_type=case.stored,
            )  # fmt: skip
            calls.append(functools.partial(wrapper.run, tensors.q, tensors.caches, out=tensors.out))
        return calls


class Xqa(FlashInfer):
    def supports(self, case: Any) -> bool:
        return super().supports(case) and max(case.q_lens) == 1 and case.page_size >= 16

    def prepare(self, case: Any, tensors: Any) -> list[Call]:
        import flashinfer

        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=tensors.q.device)
        attend = flashinfer.decode.trtllm_batch_decode_with_kv_cache
        scales = {"bmm1_scale": case.head_dim**-0.5, "bmm2_scale": 1.0}
        options = {"out": tensors.out, "kv_layout": "NHD", "backend": "xqa", **scales}
        first, last = (tensors.q, tensors.caches, workspace), (tensors.seqused_k, max(case.kv_lens))
        return [
            functools.partial(attend, *first, table, *last, **options) for table in tensors.tables
        ]


PEERS = (
    FlashInfer("flashinfer", "fa2"),
    FlashInfer("flashinfer_fa3", "fa3"),
    Xqa("flashinfer_xqa", "xqa"),
)
