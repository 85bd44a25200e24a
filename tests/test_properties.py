"""Problems that nobody thought of: hypothesis over the whole argument space, and exact invariances.

PAGETILE_HYPOTHESIS_PROFILE is ci (default, the same examples every time), dev or thorough.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pagetile
import pytest
import reference
import torch
from cases import STORAGES, Case, WriteCase
from gpu import one_kernel, prefill_by
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problem import Problem, WriteProblem, pasted, same_bits, to_numpy

USES = ("paged_attention", "cache_write", "merge_states")
DTYPES = ("float32", "float16", "bfloat16")
TWO_DIMS = [s for s in STORAGES if s not in ("interleaved", "halves")]


@st.composite
def head_dims(draw, largest=64, step=8):
    """(storage, (K dim, V dim)): storages that pair K with V need one dim."""
    dim = st.integers(1, largest // step).map(lambda n: n * step)
    k_dim, v_dim = draw(dim), draw(st.none() | dim)
    if v_dim is None:
        return draw(st.sampled_from(STORAGES)), (k_dim, k_dim)
    return draw(st.sampled_from(TWO_DIMS)), (k_dim, v_dim)


@st.composite
def attention_cases(draw, **fixed) -> Case:
    """Any problem, from small integers; shrinks to one sequence of nothing."""
    pick = lambda *options: draw(st.sampled_from(options))  # noqa: E731
    batch = draw(st.integers(1, 4))
    lens = lambda most: tuple(draw(st.integers(0, most)) for _ in range(batch))  # noqa: E731
    storage, head_dim = draw(head_dims())
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    dtype = pick(*DTYPES, "bfloat16", *reference.FP8)
    cache_dtype = pick(*reference.FP8) if reference.is_fp8(dtype) else pick(None, *reference.FP8)
    fields = {
        "q_lens": lens(20),
        "kv_lens": lens(80),
        "heads": (kv_heads * group, kv_heads),
        "head_dim": head_dim,
        "page_size": pick(1, 2, 3, 7, 8, 16, 33, 64),
        "dtype": dtype,
        "cache_dtype": cache_dtype,
        "uint8": bool(cache_dtype) and draw(st.booleans()),
        "storage": storage,
        "scales": pick(None, "one", "scalar", "heads", "batch_heads", "expanded")
        if cache_dtype
        else None,
        "causal": draw(st.booleans()),
        "window": (draw(st.integers(-1, 30)), draw(st.integers(-1, 30))),
        "softcap": pick(0.0, 1.5, 30.0),
        "softmax_scale": pick(None, 0.1, 1.0),
        "alibi": pick(None, "heads", "batch_heads"),
        "sinks": pick(None, *DTYPES),
        "num_splits": draw(st.integers(0, 5)),
        "batch_invariant": draw(st.booleans()),
        "table_pad": draw(st.integers(0, 3)),
        "q_layout": pick("dense", "fused_qkv", "heads_first"),
        "out": pick("new", "given", "strided"),
        "first_row": draw(st.integers(0, 2)),
        "spare_rows": draw(st.integers(0, 2)),
        "page_order": pick("shuffled", "descending"),
        "seed": draw(st.integers(0, 2**16)),
    }
    return Case("drawn", **{**fields, **fixed})


def skip_on(device, case):
    assume(device == "cpu" or case.dtype != "float32")


@given(case=attention_cases())
@settings(max_examples=2 * settings().max_examples)
def test_any_attention(case, device):
    skip_on(device, case)
    problem = Problem(case, device)
    first = problem.run()
    problem.check(*first)
    first = problem.used(*first)
    second = problem.used(*problem.run())
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))


# Where the keys lie is no matter, to the bit


def run_bits(case, device, **changes):
    problem = Problem(case, device)
    return [x.tobytes() for x in problem.used(*problem.run(**changes))]


@given(case=attention_cases(), other=st.sampled_from(TWO_DIMS))
def test_layout_is_no_matter(case, other, device):
    """NHD, HND and every other storage of the same keys give the same bits."""
    skip_on(device, case)
    with prefill_by("portable"):  # the other one takes only what TMA does
        assert run_bits(case, device) == run_bits(replace(case, storage=other), device)


@given(case=attention_cases(), order=st.sampled_from(["shuffled", "descending"]))
def test_page_placement_is_no_matter(case, order, device):
    """Other physical pages, other poison around them, the same bits."""
    skip_on(device, case)
    other = Problem(replace(case, page_order=order), device)
    mine = Problem(case, device)
    pages = mine.arguments["k_cache"].shape[0]
    moved = torch.from_numpy(np.random.default_rng(case.seed).permutation(pages)).to(device)
    names = ("k_cache", "v_cache")
    shuffled = {n: index_pages(mine.arguments[n], moved.argsort()) for n in names}
    table = mine.arguments["block_table"].long()
    inside = (table >= 0) & (table < pages)
    table = torch.where(inside, moved[table.clamp(0, pages - 1)], table).int()
    expected = [x.tobytes() for x in mine.used(*mine.run())]
    assert [x.tobytes() for x in other.used(*other.run())] == expected
    actual = mine.used(*mine.run(block_table=table, **shuffled))
    assert [x.tobytes() for x in actual] == expected


def index_pages(cache, pages):
    return cache.contiguous().view(torch.uint8)[pages].view(cache.dtype)


@given(case=attention_cases(), page_size=st.sampled_from([1, 5, 16, 40, 128]))
def test_page_size_is_no_matter(case, page_size, device):
    """Within tolerance: each is checked against the same reference."""
    skip_on(device, case)
    for size in (case.page_size, page_size):
        problem = Problem(replace(case, page_size=size), device)
        problem.check(*problem.run())


# Batch invariance, to the bit


def alone(problem, b, rows=None, length=None):
    """Sequence b by itself; its rows and length may be cut to a chunk."""
    begin, end = int(problem.cu[b]), int(problem.cu[b + 1])
    begin, end = (begin, end) if rows is None else (begin + rows[0], begin + rows[1])
    arguments = problem.arguments
    int32 = {"dtype": torch.int32, "device": problem.device}
    length = int(problem.lens[b]) if length is None else length
    changes = {
        "q": arguments["q"][begin:end],
        "block_table": arguments["block_table"][b : b + 1],
        "seqused_k": torch.tensor([length], **int32),
        "cu_seqlens_q": torch.tensor([0, end - begin], **int32),
        "max_seqlen_q": end - begin,
    }
    for name in ("q_scale", "k_scale", "v_scale", "alibi_slopes"):
        full = arguments[name]
        if full is not None and full.ndim == 2:
            changes[name] = full[b : b + 1]
    return problem.run(**changes)


@given(case=attention_cases(batch_invariant=True, num_splits=0, out="new"))
def test_alone_and_in_a_batch(case, device):
    skip_on(device, case)
    problem = Problem(case, device)
    out, lse = problem.run()
    for b in range(len(case.q_lens)):
        rows = slice(int(problem.cu[b]), int(problem.cu[b + 1]))
        alone_out, alone_lse = alone(problem, b)
        assert same_bits(alone_out, out[rows])
        assert same_bits(alone_lse, lse[:, rows])


@given(
    case=attention_cases(batch_invariant=True, num_splits=0, out="new", causal=True),
    cuts=st.lists(st.integers(0, 20), max_size=3),
)
def test_whole_and_in_chunks(case, cuts, device):
    """A query in one piece or in several, each over the keys up to its end: the same bits.

    Where a GPU's other kernel has the chunk, it is right.
    """
    skip_on(device, case)
    lens = tuple(map(max, case.kv_lens, case.q_lens))
    problem = Problem(replace(case, kv_lens=lens), device)
    group = case.heads[0] // case.heads[1]
    out, lse = problem.run()
    for b, q_len in enumerate(case.q_lens):
        edges = sorted({0, q_len, *(cut for cut in cuts if cut < q_len)})
        for begin, end in itertools.pairwise(edges):
            length = lens[b] - q_len + end
            chunk_out, chunk_lse = alone(problem, b, (begin, end), length)
            if not one_kernel(device, group, q_len, end - begin):
                part = pasted((out, lse), (chunk_out, chunk_lse), int(problem.cu[b]) + begin)
                problem.check(*part)
                continue
            rows = slice(int(problem.cu[b]) + begin, int(problem.cu[b]) + end)
            assert same_bits(chunk_out, out[rows])
            assert same_bits(chunk_lse, lse[:, rows])


@pytest.mark.parametrize("cache_dtype", [None, *reference.FP8], ids=str)
def test_long_sequences_are_invariant_too(cache_dtype, device):
    """Long enough for splits and several tiles: alone, in a batch, and by single rows.

    On a GPU the single rows are the split-KV kernel's: right, and bits of a short chunk's.
    """
    case = Case("long_invariant", (1, 300, 4, 1), (1500, 300, 900, 2), (8, 2), (128, 128), 16,
                cache_dtype=cache_dtype, batch_invariant=True)  # fmt: skip
    problem = Problem(case, device)
    out, lse = problem.run()
    for b in range(4):
        rows = slice(int(problem.cu[b]), int(problem.cu[b + 1]))
        assert all(map(same_bits, alone(problem, b), (out[rows], lse[:, rows])))
    for row in (0, 1, 63, 64, 127, 255, 299):
        one = alone(problem, 1, (row, row + 1), row + 1)
        whole, place = (out, lse), row + 1  # after the one row of the first sequence
        if not one_kernel(device, 4, 1, 300):
            problem.check(*pasted(whole, one, place))
            begin = max(0, row - 15)
            whole, place = alone(problem, 1, (begin, row + 1), row + 1), row - begin
        rows = slice(place, place + 1)
        assert all(map(same_bits, one, (whole[0][rows], whole[1][:, rows])))


# Splits


@given(case=attention_cases(), splits=st.integers(1, 9))
def test_splits_agree(case, splits, device):
    skip_on(device, case)
    problem = Problem(replace(case, q_lens=tuple(n % 3 for n in case.q_lens)), device)
    for num_splits in (1, splits):
        problem.check(*problem.run(num_splits=num_splits))


# Writes


@st.composite
def write_cases(draw) -> WriteCase:
    pick = lambda *options: draw(st.sampled_from(options))  # noqa: E731
    storage, head_dim = draw(head_dims(largest=70, step=1))
    page_size, num_pages = draw(st.integers(1, 20)), draw(st.integers(1, 6))
    tokens = draw(st.integers(0, page_size * num_pages))
    cache_dtype = pick(None, *reference.FP8)
    return WriteCase(
        "drawn", tokens, draw(st.integers(0, tokens)), draw(st.integers(1, 5)), head_dim,
        page_size, num_pages, pick(*DTYPES), cache_dtype,
        uint8=bool(cache_dtype) and draw(st.booleans()),
        storage=storage,
        scales=pick(None, "one", "scalar", "heads") if cache_dtype else None,
        slot_dtype=pick("int32", "int64"),
        source=pick("dense", "fused_qkv", "heads_first", "offset"),
        extra_rows=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 2**16)),
    )  # fmt: skip


@given(case=write_cases())
@settings(max_examples=3 * settings().max_examples)
@pytest.mark.uses("cache_write")
def test_any_write(case, device):
    problem = WriteProblem(case, device)
    problem.run()
    problem.check()


@given(
    dtype=st.sampled_from(DTYPES),
    name=st.sampled_from(reference.FP8),
    scale=st.floats(2.0**-20, 2.0**20, width=32),
    seed=st.integers(0, 2**16),
)
@pytest.mark.uses("cache_write")
def test_any_scale(dtype, name, scale, seed, device):
    """Random bits, so all magnitudes; any scale; rounded exactly."""
    raw = reference.FORMATS[dtype].raw
    bits = np.random.default_rng(seed).integers(0, np.iinfo(raw).max, (64, 1, 32), raw, True)
    rows = torch.from_numpy(bits).view(getattr(torch, dtype)).to(device)
    caches = torch.zeros(2, 4, 16, 1, 32, dtype=torch.uint8, device=device)
    scales = torch.tensor(scale, device=device)
    pagetile.cache_write(
        rows, rows, *caches.view(getattr(torch, name)), torch.arange(64, device=device),
        k_scale=scales, v_scale=scales,
    )  # fmt: skip
    x = reference.quantised_input(bits, dtype, scale, 1)
    expected = reference.fp8_encode(x, name)
    for cache in caches.cpu().numpy():
        np.testing.assert_array_equal(cache.reshape(bits.shape), expected)


# Merge


@given(
    shape=st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(1, 70)),
    dtype=st.sampled_from(DTYPES),
    empty=st.floats(0, 1),
    seed=st.integers(0, 2**16),
)
@pytest.mark.uses("merge_states")
def test_any_merge(shape, dtype, empty, seed, device):
    rng = np.random.default_rng(seed)
    sides = []
    for _ in "ab":
        out = torch.from_numpy(rng.standard_normal(shape)).to(getattr(torch, dtype)).to(device)
        lse = 20 * rng.standard_normal((shape[1], shape[0]))
        gone = rng.random(lse.shape) < empty
        lse[gone] = rng.choice([-np.inf, np.inf], gone.sum())
        out[torch.from_numpy(gone.T.copy())] = torch.nan
        sides += [out, torch.from_numpy(lse.astype(np.float32)).to(device)]
    out, lse = reference.merge(*map(to_numpy, sides))
    actual = pagetile.merge_states(*sides)
    reference.assert_close(to_numpy(actual[0]), out, reference.round_to(out, dtype))
    reference.assert_close(to_numpy(actual[1]), lse, lse, "lse", 1e-4)


@given(case=attention_cases(causal=False, window=(-1, -1), sinks=None, alibi=None, out="new"))
def test_any_prefix_and_suffix_merge_to_the_whole(case, device):
    """Keys cut at a page: two calls and a merge are one call."""
    skip_on(device, case)
    problem = Problem(case, device)
    cut = case.page_size
    lens = problem.arguments["seqused_k"]
    prefix = problem.run(seqused_k=lens.clamp(max=cut))
    suffix = problem.run(
        block_table=problem.arguments["block_table"][:, 1:], seqused_k=(lens - cut).clamp(min=0)
    )
    problem.check_merged(*pagetile.merge_states(*prefix, *suffix), [cut] * len(case.q_lens))
