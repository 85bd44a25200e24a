"""attn_implementation="pagetile": models of transformers give what "eager" gives."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import masking_utils  # noqa: E402

integration = pytest.importorskip(
    "pagetile.integrations.transformers", exc_type=ImportError, reason="transformers is too old"
)

USES = ("paged_attention",)

NUM_TOKENS = 64
WINDOW = 9
# Weights this large make attention sharp and every token depend on it.
SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "initializer_range": 0.2, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
CONFIGS = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2_gqa7": (transformers.Qwen2Config, {
        "hidden_size": 224, "num_attention_heads": 14, "num_hidden_layers": 2,
        "initializer_range": 0.1,
    }),
    "mistral_window": (transformers.MistralConfig, {"sliding_window": WINDOW}),
    "gemma2_window_softcap": (transformers.Gemma2Config, {
        "sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 5,
        "initializer_range": 0.3,
    }),
    "gpt_oss_window_sinks": (transformers.GptOssConfig, {
        "sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1,
    }),
}  # fmt: skip
CAUSAL_MODELS = list(CONFIGS)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Models this small only lose by more."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def make_model(name: str, device="cpu", dtype=torch.float32, **changes):
    make_config, sizes = CONFIGS[name]
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(
        make_config(**{**SIZES, **sizes, **changes}), attn_implementation="eager"
    )
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
    return model.eval().to(device, dtype)


def make_prompts(paddings=(7, 0, 13), length=20, device="cpu") -> dict[str, torch.Tensor]:
    """Prompts of uneven lengths, padded at the left."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, SIZES["vocab_size"], (len(paddings), length), generator=generator)
    mask = torch.arange(length) >= torch.tensor(paddings)[:, None]
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.long().to(device)}


def generate(model, prompts, **options):
    """Tokens [B, 64] and their logits [B, 64, vocabulary], greedy."""
    result = model.generate(
        **prompts, max_new_tokens=NUM_TOKENS, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    return result.sequences[:, -NUM_TOKENS:], torch.stack(result.logits, 1)


@torch.no_grad()
def decode(model, prompts, tokens) -> torch.Tensor:
    """Logits [B, 64, vocabulary] of a model that is given each next token."""
    cache = transformers.DynamicCache(config=model.config)
    ids, mask, logits = prompts["input_ids"], prompts["attention_mask"], []
    for i in range(tokens.shape[1]):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = model(ids, attention_mask=mask, position_ids=positions, cache=cache)
        logits.append(out.logits[:, -1].float())
        ids = tokens[:, i : i + 1]
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
    return torch.stack(logits, 1)


def assert_close(out, expected, tolerance=1e-4):
    """Relative to the spread of what is expected."""
    assert torch.isfinite(out).all()
    error = (out - expected).abs().max() / expected.std()
    assert error <= tolerance, f"largest error {error:.1e} of the standard deviation"


# Generation


@pytest.mark.parametrize("name", CAUSAL_MODELS)
def test_same_tokens_as_eager(name):
    model, prompts = make_model(name), make_prompts()
    expected, expected_logits = generate(model, prompts)
    assert min(len(set(row)) for row in expected.tolist()) > 10  # no model that repeats itself
    model.set_attn_implementation("pagetile")
    tokens, logits = generate(model, prompts)
    assert_close(logits, expected_logits)
    assert tokens.tolist() == expected.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs 1 CUDA device")
@pytest.mark.parametrize("name", CAUSAL_MODELS)
def test_same_tokens_as_eager_on_a_gpu(name):
    """In 16 bits, a token may differ where its logit leads by less than the logits' error."""
    prompts = make_prompts(device="cuda")
    model = make_model(name, "cuda", torch.float16)
    expected, eager = generate(model, prompts)
    precise = decode(make_model(name, "cuda"), prompts, expected)
    model.set_attn_implementation("pagetile")
    logits = decode(model, prompts, expected)
    tokens, _ = generate(model, prompts)
    eager_error = (eager.float() - precise).abs().max()
    error = (logits - precise).abs().max()
    assert error <= 2 * eager_error + 1e-5
    first, second = eager.float().topk(2).values.unbind(-1)
    is_clear = first - second > error + eager_error
    assert is_clear.float().mean() > 0.5
    assert (logits.argmax(-1) == expected)[is_clear].all()
    is_same_text = is_clear.cumprod(1).bool()  # until the first token that may differ
    assert is_same_text[:, 0].any()
    assert (tokens == expected)[is_same_text].all()


@pytest.mark.parametrize("paddings", [(0, 0, 0), (0, 19, 3), (5,), (3, 0), (0, 3)], ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral_window"])
def test_paddings(name, paddings):
    model, prompts = make_model(name), make_prompts(paddings)
    expected, _ = generate(model, prompts)
    model.set_attn_implementation("pagetile")
    assert generate(model, prompts)[0].tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["llama", "mistral_window", "gemma2_window_softcap"])
def test_static_cache(name):
    model, prompts = make_model(name), make_prompts()
    expected, _ = generate(model, prompts)
    model.set_attn_implementation("pagetile")
    tokens, _ = generate(model, prompts, cache_implementation="static", disable_compile=True)
    assert tokens.tolist() == expected.tolist()


def test_beams():
    model, prompts = make_model("llama"), make_prompts()
    options = {"num_beams": 3, "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**prompts, **options)
    model.set_attn_implementation("pagetile")
    assert model.generate(**prompts, **options).tolist() == expected.tolist()


# Forward passes


def forward(model, **inputs) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits


def both(model, **inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits by pagetile and by eager."""
    expected = forward(model, **inputs)
    model.set_attn_implementation("pagetile")
    return forward(model, **inputs), expected


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral_window"])
def test_padding_at_either_end(name, use_cache, side):
    prompts = make_prompts()
    mask = prompts["attention_mask"]
    both_ends = torch.cat([mask[:, 7:], mask.flip(1)[:, :7]], 1)
    both_ends[0, -3:] = 0
    mask = {"left": mask, "right": mask.flip(1), "both": both_ends}[side]
    out, expected = both(
        make_model(name), input_ids=prompts["input_ids"].clamp(min=1), attention_mask=mask,
        use_cache=use_cache,
    )  # fmt: skip
    assert_close(out[mask.bool()], expected[mask.bool()])
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("name", ["llama", "mistral_window"])
def test_several_tokens_after_a_cache(name):
    model, prompts = make_model(name), make_prompts()
    new = torch.randint(1, 256, (3, 5), generator=torch.Generator().manual_seed(3))
    results = []
    for implementation in ("eager", "pagetile"):
        model.set_attn_implementation(implementation)
        cache = transformers.DynamicCache(config=model.config)
        mask, logits = prompts["attention_mask"], []
        for ids in (prompts["input_ids"], new):
            if logits:
                mask = torch.cat([mask, torch.ones_like(ids)], 1)
            logits.append(forward(model, input_ids=ids, attention_mask=mask, cache=cache))
        results.append(logits[1])
    assert_close(results[1], results[0])


@pytest.mark.parametrize("name", ["llama", "mistral_window"])
def test_packed_sequences(name):
    """Sequences that follow one another in a row, told by their positions."""
    ids = torch.randint(1, 256, (2, 30), generator=torch.Generator().manual_seed(4))
    positions = [[*range(14), *range(4), *range(12)], [*range(1), *range(27), *range(2)]]
    out, expected = both(
        make_model(name), input_ids=ids, position_ids=torch.tensor(positions), use_cache=False
    )
    assert_close(out, expected)


@pytest.mark.parametrize("padding", [False, True])
def test_encoder(padding):
    sizes = {**SIZES, "max_position_embeddings": 64}
    torch.manual_seed(1)
    model = transformers.BertForMaskedLM(
        transformers.BertConfig(**sizes, attn_implementation="eager")
    ).eval()
    mask = make_prompts()["attention_mask"].flip(1) if padding else torch.ones(3, 20).long()
    out, expected = both(
        model, input_ids=make_prompts()["input_ids"].clamp(min=1), attention_mask=mask
    )
    assert_close(out[mask.bool()], expected[mask.bool()])


def test_encoder_and_decoder():
    """Cross-attention: fewer queries than keys, padding among the keys."""
    torch.manual_seed(1)
    model = transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=256, d_model=64, encoder_layers=1, decoder_layers=2, init_std=0.2,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96,
            decoder_ffn_dim=96, max_position_embeddings=64, attn_implementation="eager",
        )
    ).eval()  # fmt: skip
    prompts = make_prompts()
    out, expected = both(
        model, input_ids=prompts["input_ids"].clamp(min=1),
        attention_mask=prompts["attention_mask"].flip(1),
        decoder_input_ids=prompts["input_ids"][:, -6:].clamp(min=1),
    )  # fmt: skip
    assert_close(out, expected)


def test_torch_compile_breaks_the_graph_and_goes_on():
    model, prompts = make_model("mistral_window"), make_prompts()
    expected = forward(model, **prompts, use_cache=False)
    model.set_attn_implementation("pagetile")
    compiled = torch.compile(model, backend="eager")
    real = prompts["attention_mask"].bool()
    assert_close(forward(compiled, **prompts, use_cache=False)[real], expected[real])


# Masks: what each query sees, against transformers' own dense mask


def seen(mask, batch_size, q_length, kv_length) -> torch.Tensor:
    """[B, Tq, T]: whether a query has weight on a key. Weights are all the same, and V is 1."""
    width = -(-kv_length // 8) * 8
    value = torch.eye(kv_length, width).expand(batch_size, 1, -1, -1).contiguous()
    key, query = torch.zeros(batch_size, 1, kv_length, 8), torch.zeros(batch_size, 1, q_length, 8)
    out, weights = integration.attention_forward(torch.nn.Identity(), query, key, value, mask)
    assert weights is None
    return out[:, :, 0, :kv_length] > 0


KINDS = {
    "causal": masking_utils.causal_mask_function,
    "sliding": masking_utils.sliding_window_causal_mask_function(4),
    "sliding_1": masking_utils.sliding_window_causal_mask_function(1),
    "chunked": masking_utils.chunked_causal_mask_function(64, torch.zeros(4, dtype=torch.int64)),
    "bidirectional": masking_utils.bidirectional_mask_function,
    "bidirectional_sliding": masking_utils.sliding_window_bidirectional_mask_function(3),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [
    {"q_length": 11, "kv_length": 11},
    {"q_length": 1, "kv_length": 11, "q_offset": 10},
    {"q_length": 3, "kv_length": 11, "q_offset": 8},
    {"q_length": 3, "kv_length": 8, "q_offset": 15, "kv_offset": 10},
    {"q_length": 3, "kv_length": 16, "q_offset": torch.tensor(8)},
    {"q_length": 1, "kv_length": 1},
], ids=lambda x: ",".join(str(int(y)) for y in x.values()))  # fmt: skip
@pytest.mark.parametrize("padding", [None, "none", "left", "right", "both", "last"])
def test_masks(kind, sizes, padding):
    total = int(sizes.get("q_offset", 0)) + sizes["q_length"]
    generator = torch.Generator().manual_seed(total)
    starts, ends = torch.zeros(4, dtype=torch.int64), torch.full((4,), total)
    if padding in ("left", "both", "last"):
        starts = torch.randint(0, total, (4,), generator=generator)
    if padding in ("right", "both"):
        lengths = torch.randint(1, total + 1, (4,), generator=generator)
        ends = starts + lengths.minimum(ends - starts)
    if padding == "last":  # a row without any key
        starts[-1] = total
    columns = torch.arange(total)
    mask = (columns >= starts[:, None]) & (columns < ends[:, None])
    arguments = {
        "batch_size": 4, **sizes, "mask_function": KINDS[kind],
        "attention_mask": None if padding is None else mask,
    }  # fmt: skip
    if kind == "bidirectional_sliding" and sizes["q_length"] != sizes["kv_length"]:
        with pytest.raises(NotImplementedError, match="a bidirectional window needs as many"):
            integration.make_mask(**arguments)
        return
    dense = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)[:, 0]
    made = integration.make_mask(**arguments, allow_is_causal_skip=True)
    got = seen(made, 4, sizes["q_length"], sizes["kv_length"])
    if kind != "bidirectional":  # queries of padding that follows see nothing
        dense = dense & (columns[-sizes["q_length"] :] < ends[:, None])[:, :, None]
    assert torch.equal(got, dense)


def test_masks_of_packed_sequences():
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 0, 1, 2], [5, 6, 7, 0, 1, 2, 3, 4, 5, 0]])
    packed = masking_utils.find_packed_sequence_indices(positions)
    for kind in ("causal", "sliding", "sliding_1"):
        arguments = {
            "batch_size": 2, "q_length": 10, "kv_length": 10,
            "mask_function": masking_utils.and_masks(
                masking_utils.remap_positions_for_packed_sequence(KINDS[kind], positions),
                masking_utils.packed_sequence_mask_function(packed),
            ),
        }  # fmt: skip
        dense = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)[:, 0]
        assert torch.equal(seen(integration.make_mask(**arguments), 2, 10, 10), dense)


# Tensors


def rows(paddings, length, q_length, dtype=torch.float32, device="cpu"):
    """query [B, 6, q_length, 16], key and value [B, 2, length, ..], [B, length] and its mask."""
    generator = torch.Generator().manual_seed(5)
    batch_size = len(paddings)
    query, key, value = (
        torch.randn(batch_size, *shape, generator=generator).to(device, dtype)
        for shape in ((6, q_length, 16), (2, length, 16), (2, length, 24))
    )
    mask = torch.arange(length, device=device) >= torch.tensor(paddings, device=device)[:, None]
    made = integration.make_mask(
        batch_size=batch_size, q_length=q_length, kv_length=length, q_offset=length - q_length,
        attention_mask=mask, device=device,
    )  # fmt: skip
    return query, key, value, mask, made


def attend(query, key, value, mask, **options):
    return integration.attention_forward(torch.nn.Identity(), query, key, value, mask, **options)[0]


def reference(query, key, value, mask) -> torch.Tensor:
    """[B, Tq, Hq, Dv]; 0 for queries that are padding."""
    q_length, length = query.shape[2], key.shape[2]
    queries = torch.arange(length - q_length, length, device=key.device)
    visible = mask[:, None] & (torch.arange(length, device=key.device) <= queries[:, None])
    out = torch.nn.functional.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), attn_mask=visible[:, None], enable_gqa=True
    )
    is_real = mask[:, -q_length:, None, None]
    return torch.where(is_real, out.transpose(1, 2), 0)


@pytest.mark.parametrize("q_length", [1, 5, 40])
@pytest.mark.parametrize("paddings", [(0, 0), (3, 17), (39, 0, 1), (0, 8, 39), (24,)], ids=str)
def test_stale_padding_is_never_seen(paddings, q_length, device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    query, key, value, mask, made = rows(paddings, 40, q_length, dtype, device)
    expected = reference(query, key, value, mask)
    hidden = ~mask[:, None, :, None]
    out = attend(
        query, key.masked_fill(hidden, torch.nan), value.masked_fill(hidden, torch.inf), made
    )
    tolerance = 1e-5 if device == "cpu" else 2e-2
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)


def interleaved(x: torch.Tensor) -> torch.Tensor:
    """The same in another order of memory: [B, T, H, D], as a projection makes it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


LAYOUTS = {
    "contiguous": lambda x: x,
    "interleaved": interleaved,
    "with_slack": lambda x: torch.cat([x, x, x], 2)[:, :, 40:80],
    "rows_apart": lambda x: torch.stack([x, x], 1)[:, 1],
    "row_stride_no_multiple": lambda x: torch.nn.functional.pad(x.flatten(1), (0, 3))[
        :, : x[0].numel()
    ].unflatten(1, x.shape[1:]),
}


@pytest.mark.parametrize("v_layout", LAYOUTS)
@pytest.mark.parametrize("k_layout", LAYOUTS)
def test_layouts(k_layout, v_layout):
    query, key, value, mask, made = rows((3, 39, 21), 40, 40)
    expected = reference(query, key, value, mask)
    key, value = LAYOUTS[k_layout](key), LAYOUTS[v_layout](value)
    out = attend(interleaved(query), key, value, made)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_one_mask_serves_layers_of_any_layout():
    query, key, value, mask, made = rows((3, 39, 21), 40, 40)
    expected = reference(query, key, value, mask)
    tables = []
    for layout in LAYOUTS.values():
        k, v = layout(key), layout(value)
        torch.testing.assert_close(attend(query, k, v, made), expected, rtol=1e-5, atol=1e-5)
        tables.append(made.pagetile_spans.pages(k, v)[2])
        assert made.pagetile_spans.pages(k, v)[2] is tables[-1]
    assert not torch.equal(tables[0], tables[1])


@pytest.mark.parametrize("row_stride", [0, 160, 480])
def test_rows_that_share_memory(row_stride):
    query, key, value, mask, made = rows((3, 39, 0), 40, 1)
    key, value = (
        torch.cat([x.flatten(), x.flatten()]).as_strided(x.shape, (row_stride, *x.stride()[1:]))
        for x in (key, value[..., :16].contiguous())
    )
    expected = reference(query, key, value, mask)
    torch.testing.assert_close(attend(query, key, value, made), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("paddings", [(0, 0, 0), (3, 39, 21)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "interleaved", "with_slack", "rows_apart"])
def test_caches_are_not_copied(layout, paddings):
    _, key, value, _, made = rows(paddings, 40, 1)
    key, value = LAYOUTS[layout](key), LAYOUTS[layout](value)
    k_cache, v_cache, block_table = made.pagetile_spans.pages(key, value)
    assert k_cache.data_ptr() == key.data_ptr()
    assert v_cache.data_ptr() == value.data_ptr()
    assert block_table.dtype == torch.int32


def test_models_hand_over_views(monkeypatch):
    """Neither queries nor caches of a usual model are copied on their way, padded or not."""
    calls = []
    kernel = integration.paged_attention

    def spy(q, k_cache, v_cache, **options):
        calls.append([x.untyped_storage().data_ptr() for x in (q, k_cache, v_cache)])
        return kernel(q, k_cache, v_cache, **options)

    forward_of_layer = integration.attention_forward

    def outer(module, query, key, value, *args, **kwargs):
        given = [x.untyped_storage().data_ptr() for x in (query, key, value)]
        result = forward_of_layer(module, query, key, value, *args, **kwargs)
        assert calls.pop() == given
        outer.count += 1
        return result

    outer.count = 0
    monkeypatch.setattr(integration, "paged_attention", spy)
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "pagetile", outer)
    model = make_model("llama")
    model.set_attn_implementation("pagetile")
    model.generate(**make_prompts(), max_new_tokens=3, do_sample=False)
    assert outer.count == 3 * model.config.num_hidden_layers


# Continuous batching


def packed(lengths, q_lengths, device):
    """query [1, 6, T, 16] and the keys and values [1, 2, total, ..] of all sequences, offsets."""
    generator = torch.Generator().manual_seed(6)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tensors = [
        torch.randn(1, *shape, generator=generator).to(device, dtype)
        for shape in ((6, sum(q_lengths), 16), (2, sum(lengths), 16), (2, sum(lengths), 16))
    ]
    offsets = [
        torch.tensor([0, *x], device=device).cumsum(0, dtype=torch.int32)
        for x in (q_lengths, lengths)
    ]
    return *tensors, *offsets


def sequences_one_by_one(query, key, value, q_offsets, offsets, window=None):
    out = []
    for i in range(len(offsets) - 1):
        q = query[:, :, q_offsets[i] : q_offsets[i + 1]]
        k, v = (x[:, :, offsets[i] : offsets[i + 1]] for x in (key, value))
        if q.shape[2]:
            out.append(attend(q, k, v, None, sliding_window=window))
    return torch.cat(out, 1)


@pytest.mark.parametrize("window", [None, 4])
def test_gathered_keys(window, device):
    query, key, value, q_offsets, offsets = packed((7, 1, 12), (7, 1, 3), device)
    out = attend(
        query, key, value, None, cu_seq_lens_q=q_offsets, cu_seq_lens_k=offsets, max_length_q=7,
        max_length_k=12, sliding_window=window,
    )  # fmt: skip
    expected = sequences_one_by_one(query, key, value, q_offsets, offsets, window)
    torch.testing.assert_close(out, expected)


@pytest.mark.uses("paged_attention", "cache_write")
def test_block_tables(device):
    """The newest token of each sequence is written into its page, and seen; padding is neither."""
    lengths = (7, 1, 12, 8, 0)
    query, key, value, q_offsets, offsets = packed((*lengths, 1), (1, 1, 1, 1, 1), device)
    q_offsets[5], offsets = 4, offsets[:6]  # the fifth fills the batch up: no query, no key
    table = torch.tensor([[5, 9], [2, 9], [0, 3], [7, 9], [4, 9]], device=device).int()
    caches, new = [], []
    for x in (key, value):
        cache = x.new_full((8, 8, 2, 16), torch.nan)
        for i, length in enumerate(lengths):
            for j in range(length - 1):
                cache[table[i, j // 8], j % 8] = x[0, :, offsets[i] + j]
        caches.append(cache)
        new.append(x[:, :, offsets[1:].clamp(max=sum(lengths)) - 1])
    expected = sequences_one_by_one(query, key, value, q_offsets, offsets)
    out = attend(
        query, *new, None, cu_seq_lens_q=q_offsets, cu_seq_lens_k=offsets, max_length_q=1,
        max_length_k=1, block_table=table, k_cache=caches[0], v_cache=caches[1],
    )  # fmt: skip
    torch.testing.assert_close(out[:, :4], expected)
    for x, cache in zip((key, value), caches, strict=True):
        for i, length in enumerate(lengths):
            for j in range(length):
                assert torch.equal(cache[table[i, j // 8], j % 8], x[0, :, offsets[i] + j])
        assert cache.isfinite().all(-1).all(-1).sum() == sum(lengths)


def batch_tokens(model, prompts) -> list[list[int]]:
    """64 tokens for each prompt, in steps of at most 32 tokens over pages of 8."""
    config = transformers.GenerationConfig(
        max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=-1
    )
    sizes = transformers.ContinuousBatchingConfig(
        page_size=8, num_blocks=64, max_batch_tokens=32, auto_switch_to_flash=False
    )
    results = model.generate_batch(
        prompts, generation_config=config, continuous_batching_config=sizes
    )
    assert [result.error for result in results.values()] == [None] * len(prompts)
    return [result.generated_tokens for result in results.values()]


@pytest.mark.uses("paged_attention", "cache_write")
@pytest.mark.parametrize("name", ["llama", "qwen2_gqa7", "mistral_window"])
def test_continuous_batching(name, monkeypatch):
    prompts = make_prompts()
    model = make_model(name)
    expected = generate(model, prompts)[0].tolist()
    model.set_attn_implementation("pagetile")
    writes = []
    kernel = integration.cache_write

    def spy(*args, **options):
        writes.append(args)
        kernel(*args, **options)

    monkeypatch.setattr(integration, "cache_write", spy)
    assert integration.enable_continuous_batching(model) is model
    lists = [
        row[mask.bool()].tolist()
        for row, mask in zip(*prompts.values(), strict=True)
    ]  # fmt: skip
    for _ in range(2):
        assert batch_tokens(model, lists) == expected
        assert model.config._attn_implementation == "pagetile"
    # Pages are written in place where all layers have full attention
    assert len(writes) == 0 if name == "mistral_window" else len(writes) >= 4 * (NUM_TOKENS - 4)


@pytest.mark.uses("paged_attention", "cache_write")
def test_a_manager_that_persists():
    model, prompts = make_model("llama"), make_prompts((0, 0))
    expected = generate(model, prompts)[0][:, :9].tolist()
    model.set_attn_implementation("pagetile")
    integration.enable_continuous_batching(model)
    options = {
        "continuous_batching_config": transformers.ContinuousBatchingConfig(
            page_size=8, num_blocks=64, max_batch_tokens=64
        ),
        "max_new_tokens": 9, "persistent_manager": True,
    }  # fmt: skip
    managers = []
    for _ in range(2):
        results = model.generate_batch(prompts["input_ids"].tolist(), **options)
        assert [result.generated_tokens for result in results.values()] == expected
        managers.append(model.init_continuous_batching())
    assert managers[0] is managers[1]
    model.destroy_cached_continuous_batching_manager()
    assert model.init_continuous_batching() is not managers[0]


def test_continuous_batching_of_another_implementation():
    """A model that is enabled still does what transformers does with other names."""
    model = integration.enable_continuous_batching(make_model("llama"))
    prompts = make_prompts((0,))
    expected = generate(model, prompts)[0].tolist()
    assert batch_tokens(model, prompts["input_ids"].tolist()) == expected
    model.set_attn_implementation("flex_attention")
    config = transformers.ContinuousBatchingConfig(auto_switch_to_flash=False)
    with pytest.raises(ValueError, match="flex_attention is not supported for continuous"):
        model.init_continuous_batching(continuous_batching_config=config)


def test_continuous_batching_needs_packed_sequences():
    class Model:
        _supports_flash_attn = False

    with pytest.raises(NotImplementedError, match="Model has no continuous batching over packed"):
        integration.enable_continuous_batching(Model())


# What is refused


@pytest.mark.parametrize(("options", "match"), [
    ({"dropout": 0.1}, r"dropout must be 0, got 0\.1"),
    ({"output_attentions": True}, "output_attentions=True needs the weights"),
    ({"position_bias": torch.zeros(1)}, "position_bias is not supported"),
    ({"head_mask": torch.zeros(1)}, "head_mask is not supported"),
    ({"sliding_window": 4, "is_causal": False, "mask": None}, "a bidirectional window"),
    ({"mask": torch.zeros(2, 1, 5, 40)},
     r"attention_mask must be the padding mask .*got Tensor \(2, 1, 5, 40\) at a layer"),
    ({"mask": torch.ones(2, 40)}, r".*got Tensor \(2, 40\) at a layer"),
], ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
def test_refused_options(options, match):
    query, key, value, _, made = rows((0, 0), 40, 5)
    options = {"mask": made, **options}
    with pytest.raises(NotImplementedError, match=f"^pagetile attention: {match}.*; .*eager"):
        attend(query, key, value, **options)


def test_masks_hold_no_data_that_a_model_could_change():
    query, key, value, _, made = rows((0, 3), 40, 5)
    assert made.shape == (2, 1, 5, 40)
    for changed in (made[:, :, :, :40], ~made, made.clone()):
        with pytest.raises(NotImplementedError, match=r"got Tensor \(2, 1, 5, 40\) at a layer"):
            attend(query, key, value, changed)


def test_no_mask_is_causal_or_not():
    query, key, value, mask, _ = rows((0, 0), 40, 5)
    expected = reference(query, key, value, mask)
    torch.testing.assert_close(attend(query, key, value, None), expected)
    module = torch.nn.Identity()
    module.is_causal = False
    out, _ = integration.attention_forward(module, query, key, value, None)
    full = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(out, full.transpose(1, 2))
    windowed = attend(query, key, value, None, sliding_window=3)
    window = torch.arange(40) > torch.arange(35, 40)[:, None] - 3
    mask = window & (torch.arange(40) <= torch.arange(35, 40)[:, None])
    local = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(windowed, local.transpose(1, 2))


def test_a_mask_of_other_sizes():
    query, key, value, _, made = rows((0, 3), 40, 5)
    with pytest.raises(ValueError, match=r"made for .*\(2, 5, 40\), got \(2, 5, 39\)"):
        attend(query, key[:, :, 1:], value[:, :, 1:], made)
    with pytest.raises(ValueError, match=r"made for .*\(2, 5, 40\), got \(1, 5, 40\)"):
        attend(query[:1], key[:1], value[:1], made)


def pagetile_model(name="llama", **changes):
    model = make_model(name, **changes)
    model.set_attn_implementation("pagetile")
    return model


def test_gradients_are_refused():
    model, prompts = pagetile_model(), make_prompts()
    with pytest.raises(NotImplementedError, match=r"gradients are not computed; .*no_grad\(\)"):
        model(**prompts)
    with torch.inference_mode():
        assert torch.isfinite(model(**prompts).logits).all()


def test_dropout_in_training_is_refused():
    model = pagetile_model(attention_dropout=0.25).train()
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"dropout .*got 0\.25; call mo"):
        model(**make_prompts())


def test_dense_masks_are_refused():
    dense = torch.zeros(3, 1, 20, 20)
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"got Tensor .* at a layer"):
        pagetile_model()(input_ids=make_prompts()["input_ids"], attention_mask=dense)


def test_gaps_are_refused():
    prompts = make_prompts((0, 2, 5))
    prompts["attention_mask"][1, 9] = 0
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"padding between .* of row 1;"):
        pagetile_model()(**prompts)


def test_foreign_masks_are_refused():
    def function(batch_idx, head_idx, q_idx, kv_idx):
        return kv_idx >= q_idx

    model = pagetile_model()
    arguments = {
        "config": model.config, "inputs_embeds": torch.zeros(2, 5, 64), "attention_mask": None,
        "cache": None,
    }  # fmt: skip
    match = r"a pattern that is not supported \(.*{}.*\); use attn_implementation"
    with pytest.raises(NotImplementedError, match=match.format("or_mask")):
        masking_utils.create_causal_mask(**arguments, or_mask_function=function)
    with pytest.raises(NotImplementedError, match=match.format("function")):
        masking_utils.create_causal_mask(**arguments, and_mask_function=function)
    with pytest.raises(NotImplementedError, match=match.format("or_mask")):
        masking_utils.create_causal_mask(
            **arguments, block_sequence_ids=torch.zeros(2, 5, dtype=torch.int64)
        )
    packed_twice = masking_utils.and_masks(
        *2 * [masking_utils.packed_sequence_mask_function(torch.zeros(1, 5).long())]
    )
    with pytest.raises(NotImplementedError, match="packs sequences in two ways at once"):
        integration.make_mask(batch_size=1, q_length=5, kv_length=5, mask_function=packed_twice)
    with pytest.raises(NotImplementedError, match=r"up to its first chunk of 4 tokens alone"):
        integration.make_mask(
            batch_size=1, q_length=5, kv_length=5,
            mask_function=masking_utils.chunked_causal_mask_function(4, torch.zeros(1).long()),
        )  # fmt: skip


def test_an_old_release_is_refused():
    """It would give wrong results: 5.17 did, after a cache."""
    code = (
        "from transformers import masking_utils\n"
        "del masking_utils.remap_positions_for_packed_sequence\n"
        "import pagetile.integrations.transformers\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "needs transformers 5.24 or newer, and this is " in done.stderr
