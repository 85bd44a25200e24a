"""What the backend is and what it supports: the questions that vLLM asks before it chooses one.

The class answers vLLM 0.26, where a backend shapes the cache, and the releases after its change of
cache layouts (vLLM's PR 51718), where vLLM does and a backend names the layouts it can read. Each
ignores what only the other asks.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from pagetile import _C
from pagetile.integrations.vllm.impl import KV_CACHE_DTYPES, PagetileImpl
from pagetile.integrations.vllm.metadata import PagetileMetadataBuilder

__all__ = ["PagetileBackend", "PagetileFlashAttnBackend"]

_ATTENTION_TYPES = ("decoder", "encoder", "encoder_only", "encoder_decoder")


class PagetileBackend(AttentionBackend):  # type: ignore[misc]
    """pagetile as vLLM's backend CUSTOM."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(KV_CACHE_DTYPES)
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """Return the member of AttentionBackendEnum under which it is registered."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PagetileImpl]:
        """Return the class of a layer's attention."""
        return PagetileImpl

    @staticmethod
    def get_builder_cls() -> type[PagetileMetadataBuilder]:
        """Return the class that makes a step's metadata."""
        return PagetileMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(*_: Any) -> list[Any]:
        """Return the page sizes.

        Any size would do. Pages of a multiple of 16 are the fastest, and vLLM makes the pages of
        sliding windows as small as it is allowed to.
        """
        return [MultipleOf(16)]

    # The cache, vLLM 0.26

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Return [P, Hkv, S, 2 * D]: keys, then values, in one row."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(
        include_num_layers_dimension: bool = False,
    ) -> tuple[int, ...]:
        """Return the order in memory of that shape's dimensions, as vLLM is set to.

        Pages come first even where all layers share one tensor, so that a page of all layers can be
        moved at once.
        """
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        layout = get_kv_cache_layout()
        if layout not in ("NHD", "HND"):
            raise ValueError(f"pagetile attention: unknown KV cache layout {layout!r}")
        if include_num_layers_dimension:
            return (1, 0, 3, 2, 4) if layout == "NHD" else (1, 2, 0, 3, 4)
        return (0, 2, 1, 3) if layout == "NHD" else (0, 1, 2, 3)

    # The cache, later releases

    @classmethod
    def supported_kv_cache_layouts(cls) -> None:
        """Return None, vLLM's word for any layout: all strides but the last are free."""
        return None

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return a layer's cache spec as it is: K and V in one row are what is expected."""
        return spec

    # What is supported. What is not named here is not: MLA, sparse attention, square-root ALiBi,
    # bidirectional ranges in a prefix, prefill context parallelism.

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Multiples of 8 up to 256."""
        return head_size % 8 == 0 and 0 < head_size <= 256

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Every one that vLLM has."""
        return attn_type in _ATTENTION_TYPES

    @classmethod
    def supports_sink(cls) -> bool:
        """On every architecture."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """On every architecture."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """For whole batches. A mask of each sequence's own raises when the step is built."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Scales of K and V may be per KV head."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """With VLLM_BATCH_INVARIANT=1."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Whether the host's longest query may be too short: no, it bounds the schedule."""
        return False

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Where this build of pagetile has kernels.

        Read from the build, not from the devices: vLLM may ask before it forks.
        """
        families: Any = _C.build_info()["families"]
        return any(
            _runs_on(target, (capability.major, capability.minor))
            for name, family in families.items()
            if name != "cpu"
            for target in family["targets"]
        )

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Return why options do not go together: a 16-bit cache has the model's own type."""
        if kv_cache_dtype in ("float16", "bfloat16") and getattr(torch, kv_cache_dtype) != dtype:
            return f"a {kv_cache_dtype} cache of a {dtype} model"
        return None


class PagetileFlashAttnBackend(PagetileBackend):
    """The same in FLASH_ATTN's place."""

    @staticmethod
    def get_name() -> str:
        """Return the member of AttentionBackendEnum under which it is registered."""
        return "FLASH_ATTN"


def _runs_on(target: str, capability: tuple[int, int]) -> bool:
    """Whether code built for "80", "90a-real" and the like runs there: the rule of device.cpp."""
    match = re.fullmatch(r"(\d+)(a?)(-real|-virtual|)", target)
    assert match is not None, target
    built = divmod(int(match[1]), 10)
    if match[2]:
        return built == capability
    has_machine_code = match[3] != "-virtual" and built[0] == capability[0]
    has_ptx = match[3] != "-real"
    return built <= capability and (has_machine_code or has_ptx)
