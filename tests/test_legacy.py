"""pagetile.legacy: the kernels of vLLM's first releases, against the reference."""

from __future__ import annotations

import re

import numpy as np
import pytest
import reference
import torch
from gpu import needs_gpus
from pagetile import legacy
from problem import same_bits, to_numpy

USES = ("paged_attention",)
PARTITION = 512
NEVER_SEEN = torch.nan
LENGTHS = (1, 511, 0, 512, 513, 1024, 1500)
FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class Call:
    """One query of each sequence, over pages of the legacy layout, with NaN behind every end."""

    def __init__(self, device, lengths=LENGTHS, heads=(4, 2), dim=64, page_size=16,
                 dtype=torch.bfloat16, kv_dtype="auto", alibi=False, seed=3):  # fmt: skip
        self.device, self.lengths, self.kv_dtype = device, lengths, kv_dtype
        self.stored = FP8.get(kv_dtype, dtype)
        random = torch.Generator().manual_seed(seed)

        def normal(*shape, size=1.0):
            return torch.randn(*shape, generator=random) * size

        counts = [-(-n // page_size) for n in lengths]
        pages = torch.randperm(sum(counts) + 1, generator=random, dtype=torch.int32)
        self.table = torch.full((len(lengths), max(counts)), int(pages[-1]), dtype=torch.int32)
        for row, ids in zip(self.table, pages[:-1].split(counts), strict=True):
            row[: len(ids)] = ids
        # Rows by page and token; what no sequence has is NaN.
        shape = (len(pages), page_size, heads[1], dim)
        self.k, self.v = (normal(*shape).to(self.stored) for _ in range(2))
        seen = torch.zeros(shape[:2], dtype=torch.bool)
        for row, length in zip(self.table, lengths, strict=True):
            for token in range(length):
                seen[row[token // page_size], token % page_size] = True
        for cache in (self.k, self.v):
            cache.view(torch.uint8 if cache.itemsize == 1 else torch.int16)[~seen] = (
                0x7F if cache.itemsize == 1 else 0x7FFF
            )
        self.q = normal(len(lengths), heads[0], dim, size=1.5).to(dtype)
        self.scales = (torch.tensor(0.37), torch.tensor([0.5, 2.5])[: heads[1]])
        self.slopes = normal(len(lengths), heads[0]) * 0.02 if alibi else None

    def caches(self):
        x = 16 // self.k.itemsize
        pages, size, heads, dim = self.k.shape
        k = self.k.view(pages, size, heads, dim // x, x).permute(0, 2, 3, 1, 4).contiguous()
        return k.to(self.device), self.v.permute(0, 2, 3, 1).contiguous().to(self.device)

    def options(self):
        scales = self.scales if self.kv_dtype != "auto" else (None, None)
        tensors = {
            "block_table": self.table,
            "seqused_k": torch.tensor(self.lengths, dtype=torch.int32),
            "alibi_slopes": self.slopes,
            "k_scale": scales[0],
            "v_scale": scales[1],
        }
        tensors = {name: x if x is None else x.to(self.device) for name, x in tensors.items()}
        return {**tensors, "max_seqlen_k": max(self.lengths), "kv_dtype": self.kv_dtype}

    def scratch(self, more=0):
        partitions = -(-max(self.lengths) // PARTITION) + more
        sums = torch.full((*self.q.shape[:2], partitions), NEVER_SEEN, device=self.device)
        parts = torch.full((*sums.shape, self.q.shape[2]), NEVER_SEEN, dtype=self.q.dtype)
        return sums, sums.clone(), parts.to(self.device)

    def run(self, version, more=0, **changes):
        out = torch.full_like(self.q, NEVER_SEEN, device=self.device)
        scratch = self.scratch(more) if version == 2 else ()
        attend = legacy.paged_attention_v2 if version == 2 else legacy.paged_attention_v1
        operands = (self.q.to(self.device), *self.caches())
        assert attend(out, *scratch, *operands, **{**self.options(), **changes}) is None
        return out

    def check(self, out):
        k, v = (x.float() for x in (self.k, self.v))
        if self.kv_dtype != "auto":
            k, v = k * self.scales[0], v * self.scales[1][:, None]
        low_and_exact = [
            reference.attention(
                to_numpy(self.q), to_numpy(k), to_numpy(v), block_table=self.table.numpy(),
                seqused_k=self.lengths, cu_seqlens_q=range(len(self.lengths) + 1),
                alibi_slopes=None if self.slopes is None else self.slopes.double().numpy(),
                round_dtype=low,
            )[0]
            for low in (None, str(self.q.dtype).removeprefix("torch."))
        ]  # fmt: skip
        reference.assert_close(to_numpy(out), *low_and_exact)


VERSIONS = pytest.mark.parametrize("version", [1, 2], ids="v{}".format)


@VERSIONS
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 112, 120, 128, 192, 256])
def test_head_dim(dim, version, device):
    call = Call(device, dim=dim)
    call.check(call.run(version))


@VERSIONS
@pytest.mark.parametrize("page_size", [8, 16, 32])
@pytest.mark.parametrize("kv_dtype", ["auto", *FP8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_pages_and_types(dtype, kv_dtype, page_size, version, device):
    call = Call(device, page_size=page_size, dtype=dtype, kv_dtype=kv_dtype)
    call.check(call.run(version))


@VERSIONS
@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (5, 5), (14, 2), (32, 8)], ids=str)
@pytest.mark.parametrize("alibi", [False, True], ids=["", "alibi"])
def test_heads(alibi, heads, version, device):
    call = Call(device, heads=heads, alibi=alibi)
    call.check(call.run(version))


@VERSIONS
def test_long_sequences(version, device):
    call = Call(device, lengths=(4097, 20_000), heads=(2, 1))
    call.check(call.run(version))


@VERSIONS
def test_same_bits_each_time(version, device):
    call = Call(device)
    assert same_bits(call.run(version), call.run(version))


@VERSIONS
def test_bound_and_scratch_may_be_larger(version, device):
    call = Call(device)
    assert same_bits(call.run(version), call.run(version, more=3, max_seqlen_k=10**6))


@VERSIONS
def test_keys_behind_the_bound_are_left_out(version, device):
    """As nothing behind the scores of a sequence may be written, whatever the metadata say."""
    call = Call(device, lengths=(700, 90))
    if device == "cpu":
        pytest.skip("the CPU needs no bound, and takes all keys")
    out = call.run(version, max_seqlen_k=600)
    call.lengths = (600, 90)
    call.check(out)


@VERSIONS
def test_page_outside_the_pool_reads_as_zeros(version, device):
    call = Call(device, lengths=(40, 600))
    table = call.table.clone()
    table[0, 1], table[1, 3] = -1, 10**6
    out = call.run(version, block_table=table.to(device))
    pages = len(call.k)
    for name in ("k", "v"):
        cache = getattr(call, name)
        setattr(call, name, torch.cat([cache, torch.zeros_like(cache[:1])]))
    table[0, 1] = table[1, 3] = pages
    call.table = table
    call.check(out)


@VERSIONS
def test_rows_of_queries_and_results_may_be_apart(version, device):
    call = Call(device)
    wide = torch.full((len(call.lengths), 6, 80), NEVER_SEEN, dtype=call.q.dtype)
    wide[:, 1:5, 8:72] = call.q
    expected = call.run(version)
    call.q = wide[:, 1:5, 8:72]
    assert same_bits(call.run(version), expected)


def test_no_sequence(device):
    call = Call(device, lengths=(5,))
    options = call.options()
    options["block_table"], options["seqused_k"] = (
        options["block_table"][:0],
        options["seqused_k"][:0],
    )
    q = call.q[:0].to(device)
    legacy.paged_attention_v1(torch.empty_like(q), q, *call.caches(), **options)


@needs_gpus(1)
@VERSIONS
def test_replayed_graph(version):
    call = Call("cuda")
    q, caches, options = call.q.cuda(), call.caches(), call.options()
    out, scratch = torch.empty_like(q), call.scratch() if version == 2 else ()
    attend = legacy.paged_attention_v2 if version == 2 else legacy.paged_attention_v1
    expected = call.run(version)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(out, *scratch, q, *caches, **options)
    for length in (300, 1024):
        options["seqused_k"].fill_(length)
        options["block_table"].clamp_(min=0)
        graph.replay()
    options["seqused_k"].copy_(torch.tensor(call.lengths))
    graph.replay()
    assert same_bits(out, expected)


@needs_gpus(1)
def test_what_the_kernels_do_not_take():
    """An error that says so, before anything is launched."""

    def refused(pattern, call, version=1, **changes):
        with pytest.raises(NotImplementedError, match=pattern):
            call.run(version, **changes)

    refused("paged_attention_v1: these kernels take pages of 8, 16 or 32 tokens, got 64",
            Call("cuda", page_size=64))  # fmt: skip
    long = Call("cuda", lengths=(70_000,), heads=(1, 1), dim=32)
    refused(r"take max_seqlen_k up to \d+ on this GPU.*paged_attention_v2 takes longer ones", long)
    long.check(long.run(2))
    with pytest.raises(NotImplementedError) as error:
        long.run(1)
    most = int(re.search(r"up to (\d+) on", str(error.value))[1])
    at_its_limit = Call("cuda", lengths=(most,), heads=(1, 1), dim=32)
    at_its_limit.check(at_its_limit.run(1, max_seqlen_k=most))
    call = Call("cuda")
    k, v = call.caches()
    call.caches = lambda: (k, v.transpose(2, 3).contiguous().transpose(2, 3))
    refused(r"dense pages of k_cache \[P, Hkv, D / 8, S, 8\]", call)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_seqlen_k": -1}, "max_seqlen_k must be from 0"),
        ({"softmax_scale": float("nan")}, "softmax_scale must be finite"),
        ({"seqused_k": torch.zeros(3, dtype=torch.int32)}, "seqused_k must have shape"),
        ({"kv_dtype": "int4"}, "kv_dtype must be"),
        ({"k_scale": torch.ones(1)}, "k_scale needs fp8 caches"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_arguments(changes, message):
    with pytest.raises(ValueError, match=f"paged_attention_v1: {message}"):
        Call("cpu").run(1, **changes)


def test_wrong_scratch():
    call = Call("cpu")
    sums, maxima, parts = call.scratch()
    out = torch.full_like(call.q, NEVER_SEEN)

    def refused(pattern, *scratch, error=ValueError):
        with pytest.raises(error, match=f"paged_attention_v2: {pattern}"):
            legacy.paged_attention_v2(
                out, *scratch, call.q, *call.caches(), **call.options()
            )  # fmt: skip

    refused(
        r"max_logits must have the 3 partitions of 512 keys .* got 2", sums, maxima[..., :2], parts
    )
    refused("exp_sums must have shape", sums[..., :2], maxima, parts)
    refused(
        "tmp_out must be contiguous",
        sums,
        maxima,
        parts.transpose(0, 1).contiguous().transpose(0, 1),
    )
    refused("tmp_out must be bfloat16", sums, maxima, parts.float())
    refused("exp_sums must be float32", sums.half(), maxima, parts)
    refused("tmp_out must be a DLPack tensor, got None", sums, maxima, None, error=TypeError)
    assert out.isnan().all()
    assert np.isnan(to_numpy(parts)).all()
