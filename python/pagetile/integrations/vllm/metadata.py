"""A step of vLLM's scheduler, as the arguments of pagetile's calls: made once, used by each layer.

Plans and CUDA graphs. vLLM calls the builder before each step, outside of any graph. There the
builder makes the plan that all layers of its group share: one small kernel, which reads the lengths
on the device. A captured graph reads the plan where it lay at capture. So each captured batch size
keeps a plan of its own, with the bounds of the capture, and a step of that batch size renews it in
place. Any batch can be captured that way, hence ALWAYS. In the graph itself a plan would have to be
made by each layer, or by the first one of a group, which a layer cannot know that it is.

Workspaces. Each builder has one, zeroed at the first step and as large as any step needs. The
layers of a group run one after the other and share it. vLLM makes a builder for each of the
micro-batches that may run at the same time, so theirs are apart. The library's own workspaces, one
a stream, would not be: graphs are all captured on one stream.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from vllm import envs
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
)

from pagetile.plan import Plan, make_plan, workspace_size

__all__ = ["Calls", "PagetileMetadata", "PagetileMetadataBuilder"]


class Calls(NamedTuple):
    """What a plan must know of a layer's calls, apart from the step. Equal ones share a plan."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None  # tokens that a query sees, itself included; None is unlimited
    paged: bool = True  # encoders attend to their input as it comes, without a plan

    def sides(self, causal: bool) -> tuple[int, int]:
        """Return pagetile's window; without a causal mask, it reaches as far to the right."""
        if self.window is None:
            return -1, -1
        return self.window - 1, 0 if causal else self.window - 1


@dataclass
class PagetileMetadata(AttentionMetadata):  # type: ignore[misc]
    """What the layers of one group need for one step.

    vLLM subclasses it, sets ``slot_mapping`` anew and adds attributes, so it is neither frozen nor
    slotted. With a full CUDA graph, num_actual_tokens counts padding, too.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int  # or a bound
    query_start_loc: torch.Tensor  # [B + 1] int32
    seq_lens: torch.Tensor  # [B] int32, new tokens included
    block_table: torch.Tensor  # [B, max_pages] int32
    slot_mapping: torch.Tensor  # [T] int64
    causal: bool
    batch_invariant: bool
    plans: dict[Calls, Plan]  # without one, a call makes its own
    workspace: torch.Tensor | None  # None: the library's
    # With decode context parallelism: what this rank holds of the tokens before this step.
    context_lens: torch.Tensor | None = None  # [B] int32
    max_context_len: int = 0
    has_context: bool = False  # whether any rank may hold some


class PagetileMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Makes the metadata of the layers of one group: see the module's text."""

    _cudagraph_support = AttentionCGSupport.ALWAYS
    # It would hand this builder's layers the plans of another builder's, while their graphs go on
    # reading the plans of this one.
    supports_update_block_table = False

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        """Called by vLLM: a group's spec, with the page size of the kernels, and its layers."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        # By calls, causal, B and T; the smallest bound first.
        self._captured: dict[tuple[Calls, bool, int, int], list[Plan]] = {}
        self._is_capturing = False
        self._ranks, self._rank = dcp_world()
        if self._ranks > 1:
            self._interleave: int = vllm_config.parallel_config.cp_kv_cache_interleave_size
            # Where captured graphs find it; no step has more sequences.
            self._context_lens = torch.zeros(
                vllm_config.scheduler_config.max_num_seqs, dtype=torch.int32, device=device
            )

    # At the first step all layers are there.

    @functools.cached_property
    def _calls(self) -> tuple[Calls, ...]:
        """The different calls of the group's layers; none for layers that vLLM does not list."""
        layers = self.vllm_config.compilation_config.static_forward_context
        impls = (getattr(layers.get(name), "impl", None) for name in self.layer_names)
        calls = (getattr(impl, "calls", None) for impl in impls)
        return tuple(dict.fromkeys(c for c in calls if isinstance(c, Calls)))

    @functools.cached_property
    def _workspace(self) -> torch.Tensor | None:
        sizes = [
            workspace_size(
                max_seqlen_q=0,
                max_seqlen_k=self._max_model_len,
                num_q_heads=calls.num_q_heads,
                num_kv_heads=calls.num_kv_heads,
                head_dim=calls.head_dim,
                batch_invariant=self._batch_invariant,
                device=self.device,
            )
            for calls in self._calls
        ]
        if not sizes:
            return None
        return torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> PagetileMetadata:
        """Make the metadata of a step, and its plan. Synchronises nothing.

        Args:
            common_prefix_len: 0, as there is no cascade attention.
            common_attn_metadata: vLLM's CommonAttentionMetadata.
            fast_build: do without a plan, as one layer alone would use it (draft models).

        Raises:
            NotImplementedError: a mask that pagetile does not have.
        """
        common = common_attn_metadata
        if isinstance(common.causal, torch.Tensor):
            raise NotImplementedError(
                "pagetile attention: causal sequences and others in one batch are not supported"
            )
        if getattr(common, "rswa_prefix_lens", None) is not None:
            raise NotImplementedError(
                "pagetile attention: reference sliding windows (R-SWA) are not supported"
            )
        metadata = PagetileMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
            batch_invariant=self._batch_invariant,
            plans={},
            # An encoder's text may be longer than the model's, and then its workspace larger.
            workspace=self._workspace if common.max_seq_len <= self._max_model_len else None,
        )
        if self._is_capturing:
            self._widen(metadata)
        if self._ranks > 1:
            self._add_context(metadata, common)
        if not fast_build:
            metadata.plans = {c: self._plan(c, metadata) for c in self._calls if c.paged}
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> PagetileMetadata:
        """Make metadata for a capture: its bounds hold for each replay, and its plan is kept."""
        self._is_capturing = True
        try:
            return self.build(0, common_attn_metadata)  # what vLLM makes of it in a subclass, too
        finally:
            self._is_capturing = False

    def _widen(self, metadata: PagetileMetadata) -> None:
        """Replace the dummy batch's bounds by those of all batches that may replay the graph."""
        metadata.max_seq_len = max(metadata.max_seq_len, self._max_model_len)
        mode = self.vllm_config.compilation_config.cudagraph_mode
        if mode.mixed_mode().has_full_cudagraphs():
            # vLLM's newer model runner deals the tokens out evenly; a replay may have one long
            # query and short ones. Graphs for decoding alone are captured with their query length.
            metadata.max_query_len = metadata.num_actual_tokens

    def _add_context(self, metadata: PagetileMetadata, common: Any) -> None:
        """Find this rank's share, even of nothing: a graph that is replayed reads it."""
        from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

        num_seqs = common.seq_lens.shape[0]
        query_lens = common.query_start_loc[1:] - common.query_start_loc[:-1]
        metadata.context_lens = self._context_lens[:num_seqs]
        metadata.context_lens.copy_(
            get_dcp_local_seq_lens(
                common.seq_lens - query_lens, self._ranks, self._rank, self._interleave
            )
        )
        runs = -(-metadata.max_seq_len // (self._ranks * self._interleave))
        metadata.max_context_len = runs * self._interleave
        metadata.has_context = self._is_capturing or _has_context(common)

    def _plan(self, calls: Calls, metadata: PagetileMetadata) -> Plan:
        causal, seqused_k, max_seqlen_k = metadata.causal, metadata.seq_lens, metadata.max_seq_len
        if metadata.context_lens is not None:
            causal, seqused_k = False, metadata.context_lens
            max_seqlen_k = metadata.max_context_len
        make = functools.partial(
            make_plan,
            seqused_k=seqused_k,
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=max_seqlen_k,
            num_q_heads=calls.num_q_heads,
            num_kv_heads=calls.num_kv_heads,
            head_dim=calls.head_dim,
            page_size=self.kv_cache_spec.block_size,
            causal=causal,
            window=calls.sides(causal),
            batch_invariant=self._batch_invariant,
        )
        key = (calls, causal, seqused_k.shape[0], metadata.num_actual_tokens)
        captured = self._captured.get(key, [])
        if self._is_capturing and all(
            plan.max_seqlen_q != metadata.max_query_len for plan in captured
        ):
            plan = make()
            self._captured[key] = sorted([*captured, plan], key=lambda p: p.max_seqlen_q)
            return plan
        # Which graph will run, if any, is not known here: all that this step may run.
        fitting = [plan for plan in captured if plan.max_seqlen_q >= metadata.max_query_len]
        for plan in fitting:
            make(out=plan)
        return fitting[0] if fitting else make()


def dcp_world() -> tuple[int, int]:
    """Return the size of vLLM's group of decode context parallelism, and the rank in it."""
    from vllm.distributed.parallel_state import get_dcp_group

    try:
        group = get_dcp_group()
    except AssertionError:  # no groups have been made
        return 1, 0
    return group.world_size, group.rank_in_group


def _has_context(common: Any) -> bool:
    """Whether any rank may hold keys from before this step: the same answer on every rank."""
    if common.seq_lens_cpu_upper_bound is None:
        return True
    starts = common.query_start_loc_cpu
    context_lens = common.seq_lens_cpu_upper_bound - (starts[1:] - starts[:-1])
    return bool((context_lens > 0).any())
