"""FlashAttention 3 as vLLM builds it: out of an installed vLLM, or of two files of its wheel.

The metadata that its scheduler reads are made ahead, as a plan is.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from typing import Any

import torch

from peers.peer import Call, Peer, is_plain, peers_folder

LIBRARY = "_vllm_fa3_C.abi3.so"
INTERFACE = "flash_attn_interface"


@functools.cache
def load() -> Any:
    """The module with its calls. Raises ImportError."""
    folder = peers_folder()
    places = [folder / "vllm_fa", folder, folder.parent]
    if any((place / LIBRARY).is_file() for place in places):
        # The interface imports the library relatively, and that is all it needs of vLLM.
        package = sys.modules.setdefault("vllm_fa", types.ModuleType("vllm_fa"))
        package.__path__ = [str(place) for place in places]
        interface = importlib.import_module(f"vllm_fa.{INTERFACE}")
    elif importlib.util.find_spec("vllm"):
        interface = importlib.import_module(f"vllm.vllm_flash_attn.{INTERFACE}")
    else:
        raise ImportError(f"no {LIBRARY} in PEERS_DIR, and no vLLM")
    if not interface.FA3_AVAILABLE:
        raise ImportError(interface.FA3_UNAVAILABLE_REASON)
    return interface


class Fa3(Peer):
    """Over the pages."""

    name = "fa3"

    def unavailable(self) -> str | None:
        try:
            load()
        except (ImportError, OSError) as error:
            return str(error)
        return None

    def supports(self, case: Any) -> bool:
        e4m3 = case.stored == torch.float8_e4m3fn and case.dtype == torch.bfloat16
        return is_plain(case) and (case.stored == case.dtype or e4m3)

    def prepare(self, case: Any, tensors: Any) -> list[Call]:
        fa3 = load()
        q, options = tensors.q, self._options(case, tensors)
        if case.stored != case.dtype:  # it takes fp8 queries over fp8 caches
            q = q.to(case.stored)
            one = torch.ones(len(case.q_lens), case.heads[1], device=q.device)
            options |= {"q_descale": one, "k_descale": one, "v_descale": one}
        metadata = fa3.get_scheduler_metadata(
            len(case.q_lens), max(case.q_lens), max(case.kv_lens), *case.heads, case.head_dim,
            tensors.seqused_k, qkv_dtype=q.dtype, cu_seqlens_q=tensors.cu_seqlens_q,
            page_size=case.page_size, causal=True, num_splits=0,
        )  # fmt: skip
        options |= {"seqused_k": tensors.seqused_k, "scheduler_metadata": metadata}
        attend = functools.partial(fa3.flash_attn_varlen_func, q, *tensors.caches, **options)
        return [functools.partial(attend, block_table=table) for table in tensors.tables]

    @staticmethod
    def _options(case: Any, tensors: Any) -> dict[str, Any]:
        return {
            "max_seqlen_q": max(case.q_lens),
            "cu_seqlens_q": tensors.cu_seqlens_q,
            "max_seqlen_k": max(case.kv_lens),
            "softmax_scale": case.head_dim**-0.5,
            "causal": True,
            "out": tensors.out,
            "fa_version": 3,
        }


class Fa3Contiguous(Fa3):
    """Over K and V that were gathered before: what paging costs it is the difference."""

    name = "fa3_contiguous"

    def supports(self, case: Any) -> bool:
        return is_plain(case) and case.stored == case.dtype

    def prepare(self, case: Any, tensors: Any) -> list[Call]:
        attend, options = load().flash_attn_varlen_func, self._options(case, tensors)
        offsets = torch.tensor([0, *case.kv_lens]).cumsum(0)
        options["cu_seqlens_k"] = offsets.int().to(tensors.q.device)
        calls = []
        for table in tensors.tables:
            parts = [tensors.gathered(table, b) for b in range(len(case.kv_lens))]
            k, v = (torch.cat(x) for x in zip(*parts, strict=True))
            calls.append(functools.partial(attend, tensors.q, k, v, **options))
        return calls


PEERS = (Fa3(), Fa3Contiguous())
