"""One layer of vLLM: writes keys and values into their pages and attends over them in place."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from vllm.v1.attention.backend import AttentionImpl

from pagetile.attention import attend, merge_states, paged_attention
from pagetile.cache_write import cache_write
from pagetile.integrations.vllm.metadata import Calls, PagetileMetadata

__all__ = ["KV_CACHE_DTYPES", "PagetileImpl"]

KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")

_ENCODERS = ("encoder", "encoder_only")  # without a cache: keys and values as they come


class PagetileImpl(AttentionImpl):  # type: ignore[misc]
    """Attention of one layer over vLLM's cache [P, Hkv, S, 2 * D], K before V, in any memory order.

    A cache of fp8 is read with 16-bit queries, on every architecture: vLLM is told not to quantise
    them.
    """

    supports_quant_query_input = False
    can_return_lse_for_decode = True
    lse_base_on_e = True
    supports_dcp = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Take the options of a layer, as vLLM gives them.

        Args:
            num_heads: Hq.
            head_size: D.
            scale: the softmax scale.
            num_kv_heads: Hkv; None is Hq.
            alibi_slopes: Hq slopes.
            sliding_window: tokens that a query sees, itself included.
            kv_cache_dtype: one of KV_CACHE_DTYPES.
            logits_soft_cap: score = cap * tanh(score / cap); None and 0 are off.
            attn_type: one of vLLM's AttentionType.
            kv_sharing_target_layer_name: the layer whose cache this one reads; vLLM then writes
                nothing.
            sinks: [Hq] fp16, bf16 or fp32.

        Raises:
            NotImplementedError: an option, or two together, that pagetile does not have.
        """
        if kv_cache_dtype not in KV_CACHE_DTYPES:
            _refuse(f"kv_cache_dtype {kv_cache_dtype!r} (allowed: {', '.join(KV_CACHE_DTYPES)})")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.alibi_slopes = (
            None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        )
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._holds_fp8 = kv_cache_dtype.startswith("fp8")
        # vLLM's __new__ sets dcp_world_size. There, each rank attends for the heads of all.
        self.calls = Calls(
            num_q_heads=num_heads * self.dcp_world_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=head_size,
            window=sliding_window,
            paged=attn_type not in _ENCODERS,
        )
        if self.dcp_world_size > 1:
            if sliding_window is not None:
                _refuse("a sliding window with decode context parallelism")
            if alibi_slopes is not None:
                _refuse("ALiBi with decode context parallelism")
            if attn_type == "encoder_decoder":
                _refuse("cross attention with decode context parallelism")
            self._combine = _dcp_combine()

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write a step's keys and values into their slots.

        Args:
            layer: vLLM's layer; its ``_k_scale`` and ``_v_scale`` count for fp8: 1 or Hkv elements.
            key: [T or more, Hkv, D] 16-bit.
            value: likewise.
            kv_cache: [P, Hkv, S, 2 * D], written.
            slot_mapping: [T] int64; below 0 is skipped.
        """
        if not self.calls.paged:
            return
        k_scale, v_scale = self._scales(layer)
        cache_write(
            key,
            value,
            *self._split(kv_cache),
            slot_mapping,
            k_scale=k_scale,
            v_scale=v_scale,
            kv_dtype=self.kv_cache_dtype,
            layout="HND",
        )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: PagetileMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend, after `do_kv_cache_update`.

        Args:
            layer: vLLM's layer, for its scales.
            query: [T or more, Hq, D] 16-bit.
            key: [T or more, Hkv, D]; read by encoders and with decode context parallelism alone.
            value: likewise.
            kv_cache: [P, Hkv, S, 2 * D].
            attn_metadata: of this step; None is a profiling run, which gives 0.
            output: [T or more, Hq, D], written up to T and returned.
            output_scale: not supported, must be None.
            output_block_scale: likewise.

        Raises:
            NotImplementedError: the output is to be quantised.
        """
        if output_scale is not None or output_block_scale is not None:
            _refuse("a quantised output")
        if attn_metadata is None:
            return output.fill_(0)
        num_tokens = attn_metadata.num_actual_tokens
        query, out = query[:num_tokens], output[:num_tokens]
        if not self.calls.paged:
            self._attend_new(query, key, value, attn_metadata, out, None, causal=False)
        elif self.dcp_world_size == 1:
            self._attend_pages(
                layer,
                query,
                kv_cache,
                attn_metadata,
                out=out,
                seqused_k=attn_metadata.seq_lens,
                max_seqlen_k=attn_metadata.max_seq_len,
                causal=attn_metadata.causal,
                sinks=self.sinks,
            )
        else:
            self._forward_dcp(layer, query, key, value, kv_cache, attn_metadata, out)
        return output

    def _attend_pages(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: PagetileMetadata,
        *,
        causal: bool,
        **options: Any,
    ) -> Any:
        k_cache, v_cache = self._split(kv_cache)
        k_scale, v_scale = self._scales(layer)
        return paged_attention(
            query,
            k_cache,
            v_cache,
            block_table=metadata.block_table,
            k_scale=k_scale,
            v_scale=v_scale,
            kv_dtype=self.kv_cache_dtype,
            layout="HND",
            plan=metadata.plans.get(self.calls),
            **self._options(metadata, causal),
            **options,
        )

    def _attend_new(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        metadata: PagetileMetadata,
        out: torch.Tensor,
        softmax_lse: torch.Tensor | None,
        *,
        causal: bool,
    ) -> None:
        """Attend to the step's own keys and values, without the cache."""
        assert key is not None and value is not None  # only cross attention comes without
        num_tokens = metadata.num_actual_tokens
        attend(
            out,
            softmax_lse,
            q=query,
            k_cache=key[:num_tokens],
            v_cache=value[:num_tokens],
            block_table=None,
            seqused_k=None,
            cu_seqlens_k=metadata.query_start_loc,
            max_seqlen_k=metadata.max_query_len,
            sinks=self.sinks,
            return_softmax_lse=softmax_lse is not None,
            **self._options(metadata, causal),
        )

    def _options(self, metadata: PagetileMetadata, causal: bool) -> dict[str, Any]:
        """What the step and the layer ask of every call."""
        return {
            "cu_seqlens_q": metadata.query_start_loc,
            "max_seqlen_q": metadata.max_query_len,
            "softmax_scale": self.scale,
            "causal": causal,
            "window": self.calls.sides(causal),
            "softcap": self.logits_soft_cap,
            "alibi_slopes": self.alibi_slopes,
            "batch_invariant": metadata.batch_invariant,
            "workspace": metadata.workspace,
        }

    def _forward_dcp(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: PagetileMetadata,
        out: torch.Tensor,
    ) -> None:
        """Decode context parallelism: the ranks hold the earlier tokens of a sequence by turns.

        Each rank has the step's new tokens and its own heads: that part is causal, and has the
        sinks. For the earlier tokens, each rank attends with the heads of all to the keys that it
        holds; vLLM combines these by their LSE and hands each rank its heads.
        """
        lse = query.new_empty((self.num_heads, query.shape[0]), dtype=torch.float32)
        self._attend_new(query, key, value, metadata, out, lse, causal=metadata.causal)
        if not metadata.has_context:
            return
        from vllm.distributed.parallel_state import get_dcp_group

        group = get_dcp_group()
        context_out, context_lse = self._attend_pages(
            layer,
            group.all_gather(query.contiguous(), dim=1),
            kv_cache,
            metadata,
            seqused_k=metadata.context_lens,
            max_seqlen_k=metadata.max_context_len,
            causal=False,
            return_softmax_lse=True,
        )
        context_out, context_lse = self._combine(
            context_out, context_lse.transpose(0, 1), group, return_lse=True
        )
        merge_states(context_out, context_lse.transpose(0, 1), out, lse, out=out, lse=lse)

    def _split(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of K and V, in layout "HND" whatever the memory order."""
        return kv_cache[..., : self.head_size], kv_cache[..., self.head_size :]

    def _scales(self, layer: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The scales of an fp8 cache; a layer has some for other caches, too."""
        return (layer._k_scale, layer._v_scale) if self._holds_fp8 else (None, None)


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(f"pagetile attention: {what} is not supported")


def _dcp_combine() -> Any:
    """Return vLLM's way to combine the ranks' parts, as it is configured."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.v1.attention.ops.common import cp_lse_ag_out_rs
    from vllm.v1.attention.ops.dcp_alltoall import dcp_a2a_lse_reduce

    config = get_current_vllm_config_or_none()
    uses_a2a = config is not None and config.parallel_config.dcp_comm_backend == "a2a"
    return dcp_a2a_lse_reduce if uses_a2a else cp_lse_ag_out_rs
