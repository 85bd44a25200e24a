"""``attn_implementation="pagetile"`` for the models of transformers.

Importing this module registers the attention function and the mask function that goes with it:

    >>> import pagetile.integrations.transformers
    >>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="pagetile")
    >>> model.generate(**tokens)

`enable_continuous_batching` does the rest that ``model.generate_batch`` needs.

Keys and values are attended to where the model's cache holds them: a cache of shape [B, Hkv, T, D]
is a pool of pages already, and a row that starts with padding is a sequence whose pages start
behind it. What pagetile's arguments cannot express raises NotImplementedError and says what to use
instead.

Letters in shapes: B rows, Tq query and T key columns, Hq query and Hkv KV heads, D head_dim of K,
Dv of V, N sequences of a continuous batch.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import CodeType, MethodType
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import transformers
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    ContinuousBatchingConfig,
    masking_utils,
)
from transformers.generation.continuous_batching import cache as paged_cache
from transformers.generation.continuous_batching import initialization
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from pagetile.attention import paged_attention
from pagetile.cache_write import cache_write
from pagetile.compat.vllm import flash_attn_varlen_func

if not hasattr(masking_utils, "remap_positions_for_packed_sequence"):
    # What is missing is one thing; 5.17 also hands over its caches in another way.
    raise ImportError(
        "pagetile.integrations.transformers needs transformers 5.24 or newer, and this is "
        f"{transformers.__version__}"
    )

__all__ = [
    "NAME",
    "Spans",
    "attention_forward",
    "enable_continuous_batching",
    "make_mask",
    "register",
]

NAME = "pagetile"

_ELSE = 'use attn_implementation="sdpa" or "eager"'
_Function = TypeVar("_Function", bound=Callable[..., Any])


def register() -> None:
    """Register "pagetile" with transformers, as importing this module does; again is harmless."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)


def _refuse(what: str, instead: str = _ELSE) -> NoReturn:
    raise NotImplementedError(f"pagetile attention: {what}; {instead}")


def _eager(function: _Function) -> _Function:
    """Keep torch.compile out of a function: it breaks the graph there and calls it."""
    disabled: _Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


# Masks


class _Rule(NamedTuple):
    """Which keys a query sees, padding aside."""

    causal: bool = False
    left: int = -1  # keys before the query, inclusive; -1 is unlimited
    right: int = -1
    chunk: int = 0  # keys of the query's own chunk of this length alone
    sequences: torch.Tensor | None = None  # [B, Tq]: equal numbers are one sequence


def _code(function: Callable[..., Any]) -> CodeType:
    return function.__code__


# transformers describes a mask by nested closures. A closure of each kind is made here, so that
# others of the same code are recognised and their variables read.
_zero = torch.zeros(1, 1, dtype=torch.int64)
_AND = _code(masking_utils.and_masks(masking_utils.causal_mask_function))
_SLIDING = _code(masking_utils.sliding_window_overlay(1))
_SLIDING_BOTH = _code(masking_utils.sliding_window_bidirectional_overlay(1))
_CHUNKED = _code(masking_utils.chunked_overlay(1, _zero[0]))
_PACKED = _code(masking_utils.packed_sequence_mask_function(_zero))
_REMAPPED = _code(
    masking_utils.remap_positions_for_packed_sequence(masking_utils.causal_mask_function, _zero)
)


def _rules_of(mask_function: Callable[..., Any]) -> list[_Rule]:
    """Take a mask function apart into rules that all hold."""
    if mask_function is masking_utils.causal_mask_function:
        return [_Rule(causal=True)]
    if mask_function is masking_utils.bidirectional_mask_function:
        return []
    code = getattr(mask_function, "__code__", None)
    if code in (_AND, _SLIDING, _SLIDING_BOTH, _CHUNKED, _PACKED, _REMAPPED):
        variables = inspect.getclosurevars(mask_function).nonlocals
        if code is _AND:
            return [rule for part in variables["mask_functions"] for rule in _rules_of(part)]
        if code is _SLIDING:
            return [_Rule(left=variables["sliding_window"] - 1)]
        if code is _SLIDING_BOTH:
            return [_Rule(left=variables["sliding_window"], right=variables["sliding_window"])]
        if code is _CHUNKED:
            return [_Rule(chunk=variables["chunk_size"])]
        if code is _PACKED:
            return [_Rule(sequences=variables["packed_sequence_mask"])]
        # Within a sequence positions count up by one as columns do, so the rule is the same.
        return _rules_of(variables["mask_function"])
    name = getattr(mask_function, "__qualname__", repr(mask_function))
    _refuse(f"the model combines its mask with a pattern that is not supported ({name})")


def _rule_of(mask_function: Callable[..., Any]) -> _Rule:
    rules = _rules_of(mask_function)
    sequences = [rule.sequences for rule in rules if rule.sequences is not None]
    if len(sequences) > 1:
        _refuse("the model packs sequences in two ways at once")
    return _Rule(
        causal=any(rule.causal for rule in rules),
        left=min((rule.left for rule in rules if rule.left >= 0), default=-1),
        right=min((rule.right for rule in rules if rule.right >= 0), default=-1),
        chunk=min((rule.chunk for rule in rules if rule.chunk), default=0),
        sequences=sequences[0] if sequences else None,
    )


class _Span(NamedTuple):
    """A run of queries in a row of the batch, and the run of keys in that row which it attends to.

    With a causal mask or a window, the last query stands at the last key.
    """

    row: int
    num_queries: int
    first_key: int = 0
    num_keys: int = 0


class Spans:
    """What `make_mask` finds out: made once a forward pass, used by all layers of one kind.

    The queries of each row are one span, or several: of packed sequences, or where padding follows,
    which is a span without keys. Each span is a sequence of pagetile's packed batch, so nothing is
    unpadded.
    """

    def __init__(
        self,
        spans: list[_Span],
        batch_size: int,
        q_length: int,
        kv_length: int,
        causal: bool,
        window: tuple[int, int],
        device: torch.device | str,
    ) -> None:
        """Put the spans, which cover all queries in order, on the device."""
        self.batch_size = batch_size
        self.q_length = q_length
        self.kv_length = kv_length
        self.causal = causal
        self.window = window
        self.max_seqlen_q = max((span.num_queries for span in spans), default=0)
        self.max_seqlen_k = max((span.num_keys for span in spans), default=0)
        self._is_shifted = any(span.first_key for span in spans)
        # See `pages`
        ends = [
            (span.first_key + span.num_keys, span.num_keys)
            for span in spans
            if span.row == batch_size - 1 and span.num_keys
        ]
        self._page_size = max(ends)[1] if ends else kv_length
        offsets = [0]
        for span in spans:
            offsets.append(offsets[-1] + span.num_queries)
        end = _Span(0, 0)  # as long as the offsets, so that all goes to the device in one copy
        padded = [*spans, end]
        numbers = torch.tensor(
            [
                offsets,
                [span.num_keys for span in padded],
                [span.row for span in padded],
                [span.first_key for span in padded],
            ],
            dtype=torch.int32,
            device=device,
        )
        self.cu_seqlens_q = numbers[0]
        self.seqused_k, self._rows, self._first_keys = numbers[1:, :-1]
        self._tables: dict[int, torch.Tensor] = {}  # by tokens from row to row, for all layers

    def pages(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return k_cache and v_cache in layout "HND", and the block_table of the spans.

        key [B, Hkv, T, D] and value [B, Hkv, T, Dv] are viewed, not copied, unless keys and values
        lie differently in memory.

        Without padding at the left, a row is a page. With it, pages overlap: there is one for each
        token, which begins there, and a sequence's first page begins behind its padding. Such
        pages are as long as the last row's last sequence, so that none reaches beyond the tensor;
        the pages of all other rows end within the next row's memory at the latest, and nothing of
        that is read.
        """
        if not self._is_shifted:
            return key, value, self._rows[:, None]
        stride = _tokens_per_row(key)
        if not stride or stride != _tokens_per_row(value):
            key, value = key.contiguous(), value.contiguous()
            stride = _tokens_per_row(key)
        size = self._page_size
        num_pages = (self.batch_size - 1) * stride + self.kv_length - size + 1
        table = self._tables.get(stride)
        if table is None:
            steps = torch.arange(
                0, max(self.max_seqlen_k, 1), size, dtype=torch.int32, device=self._rows.device
            )
            table = (self._rows * stride + self._first_keys)[:, None] + steps
            self._tables[stride] = table
        k_cache, v_cache = (
            x.as_strided(
                (num_pages, x.shape[1], size, x.shape[3]),
                (x.stride(2), x.stride(1), x.stride(2), 1),
            )
            for x in (key, value)
        )
        return k_cache, v_cache, table


def _tokens_per_row(x: torch.Tensor) -> int:
    """How many tokens further the next row of [B, Hkv, T, D] begins; 0 if that is no whole number.

    0 also if rows overlap or a token's elements are not dense.
    """
    row, _, token, element = x.stride()
    if element != 1 or token <= 0 or row % token or row < x.shape[2] * token:
        return 0
    return row // token


@_eager
def make_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> torch.Tensor:
    """Turn transformers' description of a mask into the spans that pagetile attends with.

    The mask function of "pagetile": called by transformers, once a forward pass and kind of layer.
    Reads a few numbers of each row of ``attention_mask`` on the host, which synchronises.

    Args:
        batch_size: B.
        q_length: Tq.
        kv_length: T.
        q_offset: position of the first query.
        kv_offset: position of the first key.
        mask_function: causal, sliding or chunked within the first chunk, packed sequences, or
            bidirectional, of transformers' own making.
        attention_mask: bool [B, up to kv_offset + T]; False is padding, at the ends of a row.
        device: where the keys are.

    Returns:
        [B, 1, Tq, T] of the meta device, the shape by which transformers knows a finished mask. It
        has no data; its attribute ``pagetile_spans`` is a `Spans`. A model that computes with it
        gets an error from torch, or from `attention_forward`.

    Raises:
        NotImplementedError: another mask function, padding between tokens, or a chunked mask beyond
            its first chunk.
    """
    rule = _rule_of(mask_function)
    q_first = int(q_offset) - int(kv_offset)  # the first query's column
    window = (rule.left, rule.right)
    is_aligned = rule.causal or window != (-1, -1) or rule.sequences is not None
    if rule.chunk and int(q_offset) + q_length > rule.chunk:
        _refuse(f"a chunked mask is supported up to its first chunk of {rule.chunk} tokens alone")
    if is_aligned and not rule.causal and (q_first != 0 or q_length != kv_length):
        _refuse("a bidirectional window needs as many queries as keys")
    num_keys = min(kv_length, q_first + q_length) if rule.causal else kv_length

    spans = []
    if rule.sequences is not None:
        for row, numbers in enumerate(rule.sequences.expand(batch_size, -1)):
            lengths = torch.unique_consecutive(numbers, return_counts=True)[1].tolist()
            first = 0
            for length in lengths:
                spans.append(_Span(row, length, first, length))
                first += length
    else:
        visible = _visible_keys(attention_mask, batch_size, int(kv_offset), num_keys)
        for row, (first, end) in enumerate(visible):
            if not is_aligned:
                spans.append(_Span(row, q_length, first, end - first))
                continue
            # Queries of padding before the first key see nothing by themselves.
            trailing = min(max(q_first + q_length - end, 0), q_length)
            spans += [_Span(row, q_length - trailing, first, end - first), _Span(row, trailing)]
    spans = [span for span in spans if span.num_queries]
    mask = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    made = Spans(spans, batch_size, q_length, kv_length, rule.causal, window, device)
    mask.pagetile_spans = made  # type: ignore[attr-defined]
    return mask


def _visible_keys(
    attention_mask: torch.Tensor | None, batch_size: int, first: int, length: int
) -> list[tuple[int, int]]:
    """Return (first, end) of the visible columns of each row."""
    if attention_mask is None:
        return [(0, length)] * batch_size
    if attention_mask.ndim != 2:
        _refuse(f"attention_mask must be [B, T], got shape {tuple(attention_mask.shape)}")
    mask = attention_mask[:, first : first + length].to(torch.int32)  # beyond its end is padding
    counts, starts, ends = mask.sum(1), mask.argmax(1), mask.shape[1] - mask.flip(1).argmax(1)
    visible = []
    for row, (count, start, end) in enumerate(torch.stack((counts, starts, ends), 1).tolist()):
        if count and end - start != count:
            _refuse(f"attention_mask has padding between the tokens of row {row}")
        visible.append((start, end) if count else (0, 0))
    return visible


# Attention


@_eager
def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend, as a layer of transformers asks for it: the attention function of "pagetile".

    Args:
        module: the layer; its ``is_causal`` counts where neither a mask nor ``is_causal`` is given.
        query: [B, Hq, Tq, D], copied if its tokens do not lie one after the other in memory.
        key: [B, Hkv, T, D]; Hq must be a multiple of Hkv.
        value: [B, Hkv, T, Dv].
        attention_mask: by `make_mask`, or None: all keys, causally or not.
        dropout: must be 0.
        scaling: softmax scale; None is D ** -0.5.
        sliding_window: without a mask, keys that a query sees, itself included. A mask knows its
            own.
        softcap: score = softcap * tanh(score / softcap); None is off.
        is_causal: see ``module``.
        s_aux: [Hq], attention sinks.
        kwargs: those of continuous batching, and others that change no result.

    Returns:
        ([B, Tq, Hq, Dv], None). Queries that are padding have 0.

    Raises:
        NotImplementedError: what pagetile does not do, with what to use instead.
        ValueError: shapes, types or devices do not fit.
    """
    if dropout:
        _refuse(f"dropout must be 0, got {dropout}", f"call model.eval(), or {_ELSE}")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        _refuse(
            "gradients are not computed",
            "call the model inside torch.no_grad() or torch.inference_mode(), "
            'or train with attn_implementation="sdpa"',
        )
    if kwargs.get("output_attentions"):
        _refuse("output_attentions=True needs the weights", 'use attn_implementation="eager"')
    for name in ("position_bias", "head_mask"):
        if kwargs.get(name) is not None:
            _refuse(f"{name} is not supported")
    spans: Spans | None = getattr(attention_mask, "pagetile_spans", None)
    if attention_mask is not None and spans is None:
        shape = tuple(getattr(attention_mask, "shape", ()))
        _refuse(
            f"attention_mask must be the padding mask [B, T] that is given to the model, got "
            f"{type(attention_mask).__name__} {shape} at a layer"
        )
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": None if s_aux is None else s_aux.detach(),  # DLPack refuses parameters
    }
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    if attention_mask is None and sliding_window is not None and not is_causal:
        _refuse("a bidirectional window without a mask is not supported")
    window = (-1 if sliding_window is None else sliding_window - 1, -1)
    batch_size, num_heads, q_length, _ = query.shape
    q = query.transpose(1, 2).flatten(0, 1)  # [B * Tq, Hq, D]

    if attention_mask is None and kwargs.get("cu_seq_lens_q") is not None:
        out = _attend_to_batch(q, key, value, is_causal, window, options, kwargs)
        return out.view(batch_size, q_length, num_heads, -1), None

    if spans is None:
        kv_length = key.shape[2]
        rows = [_Span(row, q_length, 0, kv_length) for row in range(batch_size)]
        spans = Spans(rows, batch_size, q_length, kv_length, is_causal, window, query.device)
    expected = (spans.batch_size, spans.q_length, spans.kv_length)
    if (batch_size, q_length, key.shape[2]) != expected:
        raise ValueError(
            "pagetile attention: the mask is made for (batch, queries, keys) = "
            f"{expected}, got {(batch_size, q_length, key.shape[2])}"
        )
    k_cache, v_cache, block_table = spans.pages(key, value)
    out = paged_attention(
        q,
        k_cache,
        v_cache,
        block_table=block_table,
        seqused_k=spans.seqused_k,
        cu_seqlens_q=spans.cu_seqlens_q,
        max_seqlen_q=spans.max_seqlen_q,
        max_seqlen_k=spans.max_seqlen_k,
        causal=spans.causal,
        window=spans.window,
        layout="HND",
        **options,
    )
    return out.view(batch_size, q_length, num_heads, -1), None


# Continuous batching


def _attend_to_batch(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    window: tuple[int, int],
    options: dict[str, Any],
    batch: dict[str, Any],
) -> torch.Tensor:
    """Attend in a continuous batch: q [T, Hq, D], key and value [1, Hkv, ..] and its arguments.

    A step of single queries comes with a block table: new keys and values are written into their
    pages here. Otherwise transformers has written them, and has gathered all of each sequence.
    """
    cu_seqlens_q, cu_seqlens_k = batch["cu_seq_lens_q"], batch["cu_seq_lens_k"]
    k, v = key[0].transpose(0, 1), value[0].transpose(0, 1)
    block_table = batch.get("block_table")
    if block_table is None:
        out: torch.Tensor = flash_attn_varlen_func(
            q,
            k,
            v,
            batch["max_length_q"],
            cu_seqlens_q,
            batch["max_length_k"],
            cu_seqlens_k=cu_seqlens_k,
            softmax_scale=options["softmax_scale"],
            softcap=options["softcap"],
            s_aux=options["sinks"],
            causal=causal,
            window_size=window,
        )
        return out
    k_cache, v_cache = batch["k_cache"], batch["v_cache"]  # [P, S, Hkv, D]
    page_size = k_cache.shape[1]
    seqused_k = cu_seqlens_k.diff()
    last = (seqused_k - 1).clamp(min=0).to(torch.int64)
    pages = block_table.gather(1, (last // page_size)[:, None])[:, 0].to(torch.int64)
    slots = torch.where(seqused_k > 0, pages * page_size + last % page_size, -1)
    cache_write(k, v, k_cache, v_cache, slots)
    attended: torch.Tensor = paged_attention(
        q,
        k_cache,
        v_cache,
        block_table=block_table,
        seqused_k=seqused_k,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=batch["max_length_q"],
        max_seqlen_k=block_table.shape[1] * page_size,
        causal=causal,
        window=window,
        **options,
    )
    return attended


class _Manager(ContinuousBatchingManager):  # type: ignore[misc, unused-ignore]
    """A manager that knows "pagetile": the release's own asks for a name with "flash" in it."""

    def __init__(
        self,
        model: Any,
        generation_config: Any,
        continuous_batching_config: Any,
        workload_hints: Any = None,
    ) -> None:
        # Block tables are turned off for other names, so they are turned on afterwards.
        config = copy.deepcopy(continuous_batching_config)
        initialization.resolve_using_hints(config, workload_hints)
        initialization.resolve_without_hints(config)
        max_blocks = config.max_blocks_per_request
        config = copy.deepcopy(continuous_batching_config)
        config.max_blocks_per_request = 0
        super().__init__(model, generation_config, config, workload_hints)
        kinds = paged_cache.group_layers_by_attn_type(model.config.get_text_config())
        if all(paged_cache.ATTN_TYPE_TO_ALLOCATOR[kind].supports_block_table for kind in kinds):
            self.continuous_batching_config.max_blocks_per_request = max_blocks

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        if model.config._attn_implementation != NAME:
            super().switch_to_cb_friendly_attn(model, auto_switch_to_flash)


def _init_continuous_batching(
    model: Any,
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    workload_hints: Any = None,
) -> ContinuousBatchingManager:
    """Do what the model's own method does, with a manager that knows "pagetile"."""
    manager = getattr(model, "_cached_continuous_batching_manager", None)
    if model.config._attn_implementation != NAME or manager is not None:
        unchanged: ContinuousBatchingManager = type(model).init_continuous_batching(
            model, generation_config, continuous_batching_config, workload_hints
        )
        return unchanged
    if generation_config is None:
        generation_config = model.generation_config
    if continuous_batching_config is None:
        continuous_batching_config = ContinuousBatchingConfig()
    return _Manager(model, generation_config, continuous_batching_config, workload_hints)


_Model = TypeVar("_Model")


def enable_continuous_batching(model: _Model) -> _Model:
    """Let a model's continuous batching run on pagetile: ``generate_batch`` and its relatives.

    transformers 5 offers continuous batching to attention functions of its own alone, so this one
    model gets an ``init_continuous_batching`` that also takes "pagetile". Nothing else changes, and
    the model follows transformers' way whenever it has another attention implementation.

    Steps that decode read and write the pages in place, by block table, where all layers have full
    attention. Prompts, and models with sliding windows, attend to keys that transformers gathers.

    Args:
        model: a model for generation that supports FlashAttention, as its attention is handed the
            same arguments.

    Returns:
        model.

    Raises:
        NotImplementedError: the model does not support FlashAttention.
    """
    if not getattr(model, "_supports_flash_attn", False):
        _refuse(f"{type(model).__name__} has no continuous batching over packed sequences")
    model.init_continuous_batching = MethodType(  # type: ignore[attr-defined]
        _init_continuous_batching, model
    )
    return model


register()
