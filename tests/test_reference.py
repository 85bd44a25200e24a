"""The reference against itself: exact rational rounding, and dense attention by torch."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import reference
import torch


def nearest_code(x: Fraction, name: str) -> int:
    """By comparing exact distances to all finite values; a tie takes the even code."""
    table = reference.FP8_TABLES[name]
    codes = [c for c in range(0x80) if np.isfinite(table[c])]
    best = min(codes, key=lambda c: (abs(Fraction(float(table[c])) - abs(x)), c % 2))
    return best | (0x80 if x < 0 else 0)


@pytest.mark.parametrize("name", reference.FP8)
def test_fp8_encode_is_the_exact_nearest(name):
    table = reference.FP8_TABLES[name]
    values = np.sort(table[np.isfinite(table)])
    middles = (values[1:] + values[:-1]) / 2
    inputs = [*values, *middles, *np.nextafter(middles, -np.inf), *np.nextafter(middles, np.inf)]
    inputs += [*np.random.default_rng(0).standard_normal(200), 1e30, -1e30]
    inputs = np.array([x for x in inputs if x != 0])
    expected = [nearest_code(Fraction(float(x)), name) for x in inputs]
    np.testing.assert_array_equal(reference.fp8_encode(inputs, name), expected)


@pytest.mark.parametrize("name", reference.FP8)
def test_fp8_encode_special_values(name):
    top = {"float8_e4m3fn": 0x7E, "float8_e5m2": 0x7B}[name]
    inputs = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-30, -1e-30]
    expected = [0x7F, 0x7F, top, top | 0x80, 0, 0x80, 0, 0x80]
    np.testing.assert_array_equal(reference.fp8_encode(inputs, name), expected)


@pytest.mark.parametrize("name", reference.FP8)
def test_fp8_table_is_torchs(name):
    codes = torch.arange(256).to(torch.uint8).view(getattr(torch, name))
    np.testing.assert_array_equal(reference.FP8_TABLES[name], codes.double().numpy())


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_round_to_is_torchs(name):
    rng = np.random.default_rng(1)
    x = rng.standard_normal(4000) * np.exp2(rng.integers(-150, 140, 4000))
    x = np.concatenate([x, [0.0, -0.0, np.inf, -np.inf, 65519.9, 65520.0, 2.0**-25, 2.0**-24]])
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)  # so that torch rounds once
    expected = torch.from_numpy(x).to(getattr(torch, name)).double().numpy()
    np.testing.assert_array_equal(reference.round_to(x, name), expected)
    raw = torch.from_numpy(x).to(getattr(torch, name))
    bits = raw.view(torch.int32 if name == "float32" else torch.int16).numpy()
    np.testing.assert_array_equal(reference.encode(x, name), bits.view(reference.FORMATS[name].raw))
    np.testing.assert_array_equal(reference.decode(reference.encode(x, name), name), expected)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "noncausal"])
@pytest.mark.parametrize("window", [(-1, -1), (5, 0), (3, 2)], ids=str)
def test_attention_is_torchs(causal, window):
    """Paged, two sequences, against scaled_dot_product_attention with an explicit mask."""
    rng = np.random.default_rng(2)
    q_lens, kv_lens, page_size = (3, 6), (9, 6), 4
    table = np.array([[4, 1, 6], [0, 5, 7]])
    k_cache, v_cache = rng.standard_normal((2, 8, page_size, 2, 16))
    q = rng.standard_normal((9, 6, 16))
    out, lse = reference.attention(
        q, k_cache, v_cache, block_table=table, seqused_k=kv_lens, cu_seqlens_q=[0, 3, 9],
        causal=causal, window=window,
    )  # fmt: skip
    for b, begin in enumerate((0, 3)):
        k, v = (x[table[b]].reshape(-1, 2, 16)[: kv_lens[b]] for x in (k_cache, v_cache))
        i = np.arange(q_lens[b])[:, None] + kv_lens[b] - q_lens[b]
        j = np.arange(kv_lens[b])[None]
        mask = (j <= i) if causal else np.ones((q_lens[b], kv_lens[b]), bool)
        mask &= (window[0] < 0) | (j >= i - window[0])
        mask &= (window[1] < 0) | (j <= i + window[1])
        args = [torch.from_numpy(np.ascontiguousarray(x.transpose(1, 0, 2)))
                for x in (q[begin : begin + q_lens[b]], k, v)]  # fmt: skip
        dense = torch.nn.functional.scaled_dot_product_attention(
            *args, attn_mask=torch.from_numpy(mask), enable_gqa=True
        )
        rows = slice(begin, begin + q_lens[b])
        np.testing.assert_allclose(out[rows], dense.numpy().transpose(1, 0, 2), atol=1e-12)
        scores = args[0] @ args[1].repeat_interleave(3, 0).mT / 4
        scores = scores.masked_fill(~torch.from_numpy(mask), -torch.inf)
        np.testing.assert_allclose(lse[:, rows], scores.logsumexp(-1).numpy(), atol=1e-12)


def test_attention_bias_terms():
    """Softcap, ALiBi and a sink, written out for one row of three keys."""
    q = np.array([[[2.0]]])
    k = np.array([1.0, -1.0, 0.5]).reshape(1, 3, 1, 1)
    v = np.array([10.0, 20.0, 30.0]).reshape(1, 3, 1, 1)
    out, lse = reference.attention(
        q, k, v, block_table=[[0]], seqused_k=[3], cu_seqlens_q=[0, 1], softmax_scale=0.5,
        softcap=2.0, alibi_slopes=[[0.25]], sinks=[0.75],
    )  # fmt: skip
    scores = 2 * np.tanh(np.array([1.0, -1.0, 0.5]) / 2) - 0.25 * np.array([2, 1, 0])
    total = np.exp(scores).sum() + np.exp(0.75)
    np.testing.assert_allclose(out.item(), np.exp(scores) @ [10, 20, 30] / total)
    np.testing.assert_allclose(lse.item(), np.log(total))


def test_attention_empty_rows():
    q, cache = np.ones((2, 1, 4)), np.ones((1, 4, 1, 4))
    common = {"block_table": [[0]], "seqused_k": [1], "cu_seqlens_q": [0, 2]}
    out, lse = reference.attention(q, cache, cache, **common)
    np.testing.assert_array_equal(out[:, 0, 0], [0, 1])
    assert lse[0, 0] == -np.inf
    out, lse = reference.attention(q, cache, cache, sinks=[0.5], **common)
    assert out[0, 0, 0] == 0
    assert lse[0, 0] == 0.5


def test_merge_is_attention_over_the_union():
    rng = np.random.default_rng(3)
    q = rng.standard_normal((2, 3, 8))
    cache = rng.standard_normal((3, 4, 3, 8))
    common = {"cu_seqlens_q": [0, 2], "causal": False}
    whole = reference.attention(q, cache, cache, block_table=[[0, 1, 2]], seqused_k=[12], **common)
    a = reference.attention(q, cache, cache, block_table=[[0]], seqused_k=[4], **common)
    b = reference.attention(q, cache, cache, block_table=[[1, 2]], seqused_k=[8], **common)
    for actual, expected in zip(reference.merge(*a, *b), whole, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-12)


def test_assert_close_can_fail():
    expected, low = np.zeros(4), np.full(4, 1e-3)
    reference.assert_close(np.full(4, 1.9e-3), expected, low)
    for wrong in (np.full(4, 2.1e-3), np.array([0, np.nan, 0, 0]), np.array([0, np.inf, 0, 0])):
        with pytest.raises(AssertionError, match="out"):
            reference.assert_close(wrong, expected, low)
    with pytest.raises(AssertionError):
        reference.assert_close(np.zeros(1), np.array([-np.inf]), np.array([-np.inf]))
