"""Faults of attention that users of other kernels met in public; the id names the fault.

Elsewhere, because they need graphs, streams, a plan, a sanitizer or a clock:

| id                            | where                                              |
|-------------------------------|----------------------------------------------------|
| A28, A30, A31, A32, A48       | test_attention_gpu.py                              |
| A13                           | sanitize_attention.py, under compute-sanitizer     |
| B1, B3, B6, B8                | cases of bench/attention.py                        |
"""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pagetile
import pytest
import reference
import torch
from cases import Case
from gpu import is_long, one_kernel
from memory import huge_tensor
from problem import Problem, pasted, same_bits, to_numpy
from registry import Registry

USES = ("paged_attention", "cache_write", "merge_states")
E4M3 = {"cache_dtype": "float8_e4m3fn"}
BUGS = Registry()
bug = BUGS.bug


def attend(device, case, **changes):
    problem = Problem(case, device)
    out, lse = problem.run(**changes)
    problem.check(out, lse)
    return out, lse


def int32(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


# Attention: plain shapes


# fmt: off
cases = lambda *cases: [(case.name.partition("-")[2], case) for case in cases]  # noqa: E731

bug("A1", *cases(*(
    Case(f"A1-len{n}_page{p}", (n,), (n,), (2, 2), (192, 128), p)
    for n in (64, 128, 129, 512) for p in (16, 64, 128, 256)
)))(attend)

bug("A15", *cases(
    Case("A15-q8_kv5", (8,), (5,)),
    Case("A15-q5_kv0", (5,), (0,)),
    Case("A15-mixed", (8, 5, 1, 20), (5, 0, 0, 19)),
    Case("A15-mixed_splits7", (8, 5, 1, 20), (5, 0, 0, 19), num_splits=7),
))(attend)

bug("A19", *cases(*(
    Case(f"A19-head_dim{d}", (9, 1), (40, 33), head_dim=(d, d))
    for d in (72, 80, 96, 112, 136, 144, 160, 176)
)))(attend)

bug("A20", *cases(*(
    Case(f"A20-batch{n}", (1,) * n, (100,) * n, (32, 8), (256, 256), 32, scales="one", **E4M3)
    for n in (1, 2, 3, 4, 5)
)))(attend)

bug("A22", *cases(
    Case("A22-heads28_4", (1, 3), (256, 256), (28, 4), (128, 128)),
    *(Case(f"A22-group{g}", (1, 3), (256, 256), (g, 1), (128, 128)) for g in (*range(1, 17), 20)),
))(attend)

bug("A37", *cases(*(
    Case(f"A37-{a}_{name}", lens, (40, 33, 70), (8, 2), alibi=a)
    for a in ("heads", "batch_heads")
    for name, lens in (("decode", (1, 1, 1)), ("varlen", (5, 1, 17)))
)))(attend)

bug("A40", *cases(*(
    Case(f"A40-{s}_{d}", (1, 9), (130, 70), dtype=d, storage=s)
    for s in ("interleaved", "packed", "packed_hnd", "hnd", "layers")
    for d in ("bfloat16", "float16")
)))(attend)

bug("A43", *cases(*(
    Case(f"A43-window_page{p}", (1,) * 127 + (33,), (1000,) * 128, (2, 1), (16, 16), p,
         window=(127, 0))
    for p in (16, 1)
)))(attend)

bug("A44", *cases(*(
    Case(f"A44-page{p}_{o}", (1,) * 40, tuple(range(20, 60)), (2, 1), (32, 32), p, page_order=o)
    for p in (1, 2, 4, 8) for o in ("descending", "shuffled")
)))(attend)
# fmt: on


# Attention: what must not be read


@bug("A5-nan_tail", ("slots3", 3), ("page_of_8", 8))
def _(device, page_size):
    """Two sequences of 1 and 3 keys; the rest of each page is NaN."""
    k, v = torch.full((2, 2, page_size, 1, 64), torch.nan).half()
    for b, length in enumerate((1, 3)):
        k[b, :length] = 0.25
        v[b, :length] = torch.arange(1.0, length + 1)[:, None, None]
    out, lse = pagetile.paged_attention(
        torch.full((2, 1, 64), 0.5, device=device).half(), k.to(device), v.to(device),
        block_table=int32(device, [0], [1]), seqused_k=int32(device, 1, 3),
        cu_seqlens_q=int32(device, 0, 1, 2), max_seqlen_q=1, return_softmax_lse=True,
    )  # fmt: skip
    np.testing.assert_array_equal(to_numpy(out)[:, 0], [[1] * 64, [2] * 64])
    np.testing.assert_allclose(to_numpy(lse)[0], 1 + np.log([1, 3]), rtol=1e-6)


A7 = [
    (f"page{p}_len{n}_{name}", p, n, codes)
    for p, n in ((4, 13), (16, 13), (16, 65), (64, 100), (256, 300))
    for name, codes in (("nan", [0x7FC0]), ("inf", [0x7F80, 0xFF80]), ("ones", [0xFFFF]))
]


@bug("A7", *A7)
def _(device, page_size, length, codes):
    """The rest of the last page, and every other page, is NaN or infinity."""
    for q_len in (1, length):
        problem = Problem(Case("A7", (q_len,), (length,), page_size=page_size), device)
        problem.refill_unused(codes)
        problem.check(*problem.run())


A9 = [
    (f"{c[7:]}_{name}", c, q_lens)
    for c in reference.FP8
    for name, q_lens in (("decode", (1, 1)), ("prefill", (9, 33)))
]


@bug("A9-null_block", *A9)
def _(device, cache_dtype, q_lens):
    """fp8 NaN in all unused memory, page 0 among it, which pads the table."""
    case = Case("A9", q_lens, (20, 33), cache_dtype=cache_dtype, page_order="descending")
    problem = Problem(case, device)
    assert 0 not in problem.table[0, :2]
    problem.refill_unused([0x7F, 0xFF])
    for b, count in enumerate((2, 3)):
        problem.arguments["block_table"][b, count:] = 0
    problem.check(*problem.run())


@bug("A9-null_block_behind_the_window", ("decode", (1,)), ("prefill", (9,)))
def _(device, q_lens):
    """Pages that slid out of the window are replaced in the table by a page full of NaN."""
    case = Case("A9_window", q_lens, (200,), page_order="descending", window=(40, 0))
    problem = Problem(case, device)
    expected = problem.run()
    dead = (200 - q_lens[0] - 40) // 16
    problem.refill_unused([0x7FC0, 0xFFFF])
    assert 0 not in problem.table[0, :13]
    problem.arguments["block_table"][0, :dead] = 0
    assert all(map(same_bits, problem.run(), expected))
    problem.check(*expected)


@bug("A10-large_page", *((f"page{p}", p) for p in (128, 528, 672)))
def _(device, page_size):
    """Pages partly filled; behind them fp32 bits that read as wild bf16."""
    junk = np.random.default_rng(0).standard_normal(4096).astype(np.float32).view(np.uint16)
    for lens in ((page_size - 5, 1), (page_size + 1, 77)):
        problem = Problem(Case("A10", (1, 9), lens, page_size=page_size), device)
        problem.refill_unused(junk)
        problem.check(*problem.run())


A11 = (2**31 - 1, -1, -(2**31), "others", "beyond")


@bug("A11-dead_table_entries", *((str(x), x) for x in A11))
def _(device, entry):
    problem = Problem(Case("A11", (1, 9, 1), (33, 16, 0)), device)
    expected = problem.run()
    table = problem.arguments["block_table"]
    for b, count in enumerate((3, 1, 0)):
        page = {"others": int(table[0, 0]), "beyond": problem.caches.k_raw.shape[0]}
        table[b, count:] = page.get(entry, entry)
    assert all(map(same_bits, problem.run(), expected))
    problem.check(*expected)


@bug("A12-longer_than_the_table", ("one_more", 33), ("far_more", 2**31 - 1))
def _(device, length):
    """Clamped to what the table holds; with validate, refused, and the sequence is named."""
    problem = Problem(Case("A12", (1, 2), (32, 32)), device)
    table = problem.arguments["block_table"][:, :2]
    wrong = int32(device, 32, length)
    problem.check(*problem.run(block_table=table, seqused_k=wrong))
    with pytest.raises(ValueError, match=rf"paged_attention: seqused_k .*32.*{length}.*sequence 1"):
        problem.run(block_table=table, seqused_k=wrong, validate=True)


@bug("A13-nothing_past_the_end")
def _(device):
    """Every tensor between forbidden memory pages; batches of 1 to 256."""
    if device != "cpu":
        pytest.skip("on a GPU this is compute-sanitizer's to find")
    program = [sys.executable, str(Path(__file__).with_name("memory.py"))]
    proof = subprocess.run([*program, "--read-outside"], capture_output=True, check=False)
    assert proof.returncode == -signal.SIGSEGV
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:] or f"ended with {done.returncode}"
    assert "nothing outside was touched" in done.stdout


# Attention: splits, batches, chunks


@bug("A3-decode_loop", ("16_bit", {}), ("fp8", {"scales": "one", **E4M3}))
def _(device, more):
    """A token more at each step: never NaN, and all split counts agree."""
    steps = 260
    problem = Problem(Case("A3", (1,), (steps,), (8, 2), (64, 64), **more), device)
    for length in range(1, steps + 1):
        used = int32(device, length)
        outs = [to_numpy(problem.run(seqused_k=used, num_splits=n)[0]) for n in (0, 1, 2, 4, 8)]
        assert np.isfinite(outs).all()
        assert np.abs(np.subtract(outs, outs[1])).max() <= 2**-7 * np.abs(outs[1]).max()
        if length in (1, 15, 16, 17, 63, 64, 65, 128, 129, 255, 256, 257):
            part = Problem(replace(problem.case, kv_lens=(length,)), device)
            for splits in (0, 1, 2, 4, 8):
                part.check(*part.run(num_splits=splits))


@bug("A4-lse_of_split_decode", *((f"splits{n}", n) for n in (1, 2, 7, 0)))
def _(device, num_splits):
    """Each head's and sequence's LSE, split and grouped; prefix and suffix merge to the whole."""
    case = Case("A4", (1, 1, 1), (290, 64, 100), (32, 8), (128, 128), num_splits=num_splits)
    problem = Problem(case, device)
    problem.check(*problem.run())
    table, lens = problem.arguments["block_table"], problem.arguments["seqused_k"]
    prefix = problem.run(block_table=table[:, :3], seqused_k=lens * 0 + 48)
    suffix = problem.run(block_table=table[:, 3:], seqused_k=lens - 48)
    problem.check_merged(*pagetile.merge_states(*prefix, *suffix), (48, 48, 48))


@bug("A16-merge_of_nothing", ("minus", -np.inf), ("plus", np.inf))
def _(device, empty):
    x, l = torch.randn(3, 2, 64, device=device), torch.randn(2, 3, device=device)  # noqa: E741
    zero, none = torch.zeros_like(x), torch.full_like(l, empty)
    out, lse = pagetile.merge_states(zero, none, zero, none)
    assert not out.any()
    assert (lse == -torch.inf).all()
    for sides in ((x, l, zero, none), (zero, none, x, l)):
        assert all(map(torch.equal, pagetile.merge_states(*sides), (x, l)))


@bug("A16-first_chunk_without_context")
def _(device):
    """Prompts in chunks: context and new tokens apart, some sequences have no context yet."""
    case = Case("A16_chunks", (13, 1, 7, 16), (13, 40, 71, 16), heads=(4, 1))
    problem = Problem(case, device)
    table, lens = problem.arguments["block_table"], problem.arguments["seqused_k"]
    cut = int32(device, 0, 32, 64, 0)  # in whole pages, all of it before the new tokens
    context = problem.run(seqused_k=cut, causal=False)
    assert (context[1][:, :13] == -torch.inf).all()
    rest = torch.stack([table[b].roll(-int(n) // 16) for b, n in enumerate(cut)])
    new = problem.run(block_table=rest, seqused_k=lens - cut)
    problem.check_merged(*pagetile.merge_states(*context, *new), cut.tolist())


@bug("A18-page_sizes", ("decode", (1, 1)), ("prefill", (40, 9)))
def _(device, q_lens):
    """The same keys in pages of any size: the same result.

    On a GPU, long queries over pages of a multiple of 8 tokens are another kernel's.
    """
    group, outs = 4, {}
    for page_size in (16, 1, 128, 256, 512, 544, 100):
        case = Case(
            "A18", q_lens, (600, 530), (2 * group, 2), page_size=page_size, batch_invariant=True
        )
        for i, out in enumerate(attend(device, case)[0].split(q_lens)):
            apart = device != "cpu" and is_long(q_lens[i], group) and page_size % 8 == 0
            assert same_bits(out, outs.setdefault((i, apart), out)), (page_size, i)


@bug("A23-page_index_of_a_million")
def _(device):
    """Offsets beyond 2^32 elements, by the page number alone."""
    pages, page_size = 1_000_003, 32
    k_cache, v_cache = (
        huge_tensor((pages, page_size, 4, 128), torch.bfloat16, device) for _ in "kv"
    )
    problem = Problem(Case("A23", (1, 2), (40, 33), (8, 4), (128, 128), page_size), device)
    table = problem.arguments["block_table"].clone()
    far = [pages - 1, 1_000_000, 262_144, 524_289]
    places = [(b, i) for b in range(2) for i in range(2)]
    for page, (b, i) in zip(far, places, strict=True):
        near = int(table[b, i])
        k_cache[page] = problem.arguments["k_cache"][near]
        v_cache[page] = problem.arguments["v_cache"][near]
        table[b, i] = page
    problem.check(*problem.run(k_cache=k_cache, v_cache=v_cache, block_table=table))


@bug("A26-page_stride_2_30")
def _(device):
    """Five pages 2^30 elements apart: rows 1 to 4 are written and read, row 0 is not touched."""
    stride = 2**30
    caches = [huge_tensor((5 * stride,), torch.float16, device) for _ in "kv"]
    views = [x.as_strided((5, 16, 2, 64), (stride, 128, 64, 1)) for x in caches]
    problem = Problem(Case("A26", (1, 1, 1, 1), (16,) * 4, (4, 2), dtype="float16"), device)
    rows = [
        torch.cat([problem.arguments[name][int(problem.table[b, 0])] for b in range(4)])
        for name in ("k_cache", "v_cache")
    ]
    pagetile.cache_write(*rows, *views, torch.arange(16, 80, device=device))
    for view, source in zip(views, rows, strict=True):
        assert torch.equal(view[1:].reshape(64, 2, 64), source)
        assert not view[0].any()
    table = int32(device, [1], [2], [3], [4])
    problem.check(*problem.run(k_cache=views[0], v_cache=views[1], block_table=table))


@bug("A27", *((f"batch{b}_heads{h}", b, h) for b, h in ((65_535, 1), (65_536, 1), (2050, 32))))
def _(device, batch, heads):
    """One key each: every row of a sentinel-filled out becomes that key's V."""
    v = torch.randn(50, 1, heads, 8, device=device).half()
    page = torch.arange(batch, dtype=torch.int32, device=device) % 50
    out = torch.full((batch, heads, 8), 77.0, device=device).half()
    pagetile.paged_attention(
        torch.ones_like(out), v, v, block_table=page[:, None], seqused_k=torch.ones_like(page),
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=device), max_seqlen_q=1,
        out=out,
    )  # fmt: skip
    assert torch.equal(out, v[page.long(), 0])


@bug("A28-loose_bounds", *((f"window{w[0]}", w) for w in ((-1, -1), (30, 0))))
def _(device, window):
    """max_seqlen_k of another batch: each sequence's own length sets its mask."""
    problem = Problem(Case("A28", (1, 9), (40, 33), window=window), device)
    for bound in (40, 4096, 131_072):
        problem.check(*problem.run(max_seqlen_k=bound))


@bug("A30-padded_batch", *((f"q_len{n}", n) for n in (1, 4)))
def _(device, q_len):
    """Sequences of no query and no key at the end, rows behind them: all untouched."""
    case = Case("A30", (q_len,) * 3 + (0,) * 5, (40, 33, 7) + (0,) * 5, spare_rows=9, out="given")
    attend(device, case)


A33 = [
    (f"{c}_len{n}", c, n)
    for c in ("bf16", "e4m3", "e5m2")
    for n in (88, 96, 97, 128, 129, 192, 256)
]


@bug("A33-last_row_of_a_prefill", *A33)
def _(device, cache, length):
    """A row of a causal prefill and the same row as a decode, over one cache: the same bits.

    On a GPU the prefill is another kernel's than the decode: the row is right; and it has the bits
    of the last row of a shorter prefill.
    """
    dtype = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}.get(cache)
    scales = "one" if dtype else None
    case = Case("A33", (length,), (length,), (8, 2), (128, 128), cache_dtype=dtype, scales=scales,
                batch_invariant=True)  # fmt: skip
    problem = Problem(case, device)
    out, lse = problem.run()
    one = {"cu_seqlens_q": int32(device, 0, 1), "max_seqlen_q": 1}
    last = problem.run(q=problem.arguments["q"][-1:], **one)
    if not one_kernel(device, 4, 1, length):
        problem.check(*pasted((out, lse), last, length - 1))
        some = {"cu_seqlens_q": int32(device, 0, 17), "max_seqlen_q": 17}
        shorter = problem.run(q=problem.arguments["q"][-17:], **some)
        last = shorter[0][-1:], shorter[1][:, -1:]
    assert same_bits(last[0], out[-1:])
    assert same_bits(last[1], lse[:, -1:])


@bug("A35-window_edge", *((f"head_dim{d}_at{a:+}", d, a) for d in (32, 128) for a in (-1, 0, 1)))
def _(device, head_dim, away):
    """Window 512, a key that takes all weight at distance 511, 512, 513; beyond it, huge junk."""
    window, length = 512, 700
    case = Case("A35", (1,), (length,), (2, 1), (head_dim, head_dim), window=(window, 0))
    problem = Problem(case, device)
    pages, slots = problem.places_of(0)
    spike = length - 1 - (window + away)
    huge = reference.encode(np.float64(3e30), "bfloat16")
    for raw in (problem.caches.k_raw, problem.caches.v_raw):
        raw[pages[: length - 1 - window], slots[: length - 1 - window]] = huge
    problem.q_raw[:] = reference.encode(np.ones(problem.q_shape), "bfloat16")
    problem.caches.k_raw[pages[spike], slots[spike]] = reference.encode(np.float64(40), "bfloat16")
    problem.caches.v_raw[pages[spike], slots[spike]] = reference.encode(np.float64(99), "bfloat16")
    problem.send()
    out, lse = problem.run()
    problem.check(out, lse)
    assert ((out == 99).all().item()) == (away <= 0)


@bug("A45-wrong_lengths")
def _(device):
    """Lengths below 0 or beyond the pages, offsets that fall: defined, and refused by validate."""
    problem = Problem(Case("A45", (1, 2), (0, 32)), device)
    table = problem.arguments["block_table"][:, :2]
    for used in ((-1, 32), (-(2**31), 33), (0, 2**31 - 1)):
        wrong = {"block_table": table, "seqused_k": int32(device, *used)}
        problem.check(*problem.run(**wrong))
        with pytest.raises(ValueError, match=r"paged_attention: seqused_k .*sequence"):
            problem.run(validate=True, **wrong)
    with pytest.raises(ValueError, match=r"paged_attention: cu_seqlens_q .*sequence 1"):
        problem.run(cu_seqlens_q=int32(device, 0, 3, 1), validate=True)


@bug("A49-alone_and_in_batches", *((f"heads{q}_{k}", q, k) for q, k in ((4, 4), (8, 2), (8, 1))))
def _(device, q_heads, kv_heads):
    """One sequence in batches of other sizes: the same bits, splits or not."""
    kv_lens = (900, 1, 333, 17, 64, 2048)
    case = Case("A49", (1,) * 6, kv_lens, (q_heads, kv_heads), batch_invariant=True)
    problem = Problem(case, device)
    table, lens, q = (problem.arguments[n] for n in ("block_table", "seqused_k", "q"))
    first = problem.run()
    for count in (1, 2, 5):
        cu = int32(device, *range(count + 1))
        part = {"block_table": table[:count], "seqused_k": lens[:count], "cu_seqlens_q": cu}
        out, lse = problem.run(q=q[:count], **part)
        assert same_bits(out, first[0][:count])
        assert same_bits(lse, first[1][:, :count])


@pytest.mark.parametrize("name", BUGS)
def test_bug(name, device):
    BUGS[name](device)
