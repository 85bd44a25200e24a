"""pagetile.compat.vllm: vLLM's signatures, its cache shapes, and the values of the reference."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import reference
import torch
from pagetile.compat import vllm
from problem import check_pair, same_bits, to_numpy

USES = ("cache_write", "paged_attention", "merge_states")
NEEDED = inspect.Parameter.empty
FP8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


# Signatures

WRITE = [(name, NEEDED) for name in ("key", "value", "key_cache", "value_cache", "slot_mapping",
                                     "kv_cache_dtype", "k_scale", "v_scale")]  # fmt: skip
DECODE = [
    *((name, NEEDED) for name in (
        "query", "key_cache", "value_cache", "num_kv_heads", "scale", "block_tables", "seq_lens",
        "block_size", "max_seq_len", "alibi_slopes", "kv_cache_dtype", "k_scale", "v_scale",
    )),
    ("tp_rank", 0),
    ("blocksparse_local_blocks", 0),
    ("blocksparse_vert_stride", 0),
    ("blocksparse_block_size", 64),
    ("blocksparse_head_sliding_step", 0),
]  # fmt: skip
SIGNATURES = {
    "reshape_and_cache_flash": WRITE,
    "reshape_and_cache": WRITE,
    "flash_attn_varlen_func": [
        *((name, NEEDED) for name in (
            "q", "k", "v", "max_seqlen_q", "cu_seqlens_q", "max_seqlen_k",
        )),
        ("cu_seqlens_k", None),
        ("seqused_k", None),
        ("q_v", None),
        ("dropout_p", 0.0),
        ("softmax_scale", None),
        ("causal", False),
        ("window_size", None),
        ("softcap", 0.0),
        ("alibi_slopes", None),
        ("deterministic", False),
        ("return_attn_probs", False),
        ("block_table", None),
        ("return_softmax_lse", False),
        ("out", None),
        ("scheduler_metadata", None),
        ("q_descale", None),
        ("k_descale", None),
        ("v_descale", None),
        ("num_splits", 0),
        ("output_scale", None),
        ("fa_version", 2),
        ("s_aux", None),
        ("cp_world_size", 1),
        ("cp_rank", 0),
        ("cp_tot_seqused_k", None),
        ("mask_mod", None),
        ("aux_tensors", None),
        ("dynamic_causal", None),
    ],
    "merge_attn_states": [
        *((name, NEEDED) for name in (
            "output", "prefix_output", "prefix_lse", "suffix_output", "suffix_lse",
        )),
        ("output_lse", None),
        ("prefill_tokens_with_context", None),
        ("output_scale", None),
    ],
    "paged_attention_v1": [("out", NEEDED), *DECODE],
    "paged_attention_v2": [
        *((name, NEEDED) for name in ("out", "exp_sum", "max_logits", "tmp_out")), *DECODE,
    ],
}  # fmt: skip


def test_every_function_has_a_signature_here():
    assert sorted(vllm.__all__) == sorted(SIGNATURES)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_vllms(name):
    parameters = inspect.signature(getattr(vllm, name)).parameters.values()
    assert [(p.name, p.default) for p in parameters] == SIGNATURES[name]
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


# Caches as the versions of vLLM lay them out: what is allocated, and K and V as [P, S, Hkv, D]

MEMORIES = {
    "halves": lambda p, s, h, d: (2, p, s, h, d),  # 0.9
    "interleaved_nhd": lambda p, s, h, d: (p, 2, s, h, d),  # later
    "interleaved_hnd": lambda p, s, h, d: (p, 2, h, s, d),
    "packed_nhd": lambda p, s, h, d: (p, s, h, 2 * d),  # 0.26, logical (p, h, s, 2 * d)
    "packed_hnd": lambda p, s, h, d: (p, h, s, 2 * d),
}


def views(memory, storage):
    if memory == "halves":
        return storage.unbind(0)
    if memory.startswith("interleaved"):
        pair = storage.unbind(1)
    else:
        pair = storage.split(storage.shape[-1] // 2, dim=-1)
    return pair if memory.endswith("nhd") else [x.transpose(1, 2) for x in pair]


def poisoned(shape, dtype: str, device) -> torch.Tensor:
    """NaN everywhere; an fp8 name gives uint8 storage, as vLLM allocates it."""
    if dtype.startswith("float8"):
        return torch.full(shape, 0x7F, dtype=torch.uint8, device=device)
    return torch.full(shape, torch.nan, dtype=getattr(torch, dtype), device=device)


def raw(tensor) -> np.ndarray:
    """The bits, as a view."""
    number = {1: "uint8", 2: "int16", 4: "int32"}[tensor.element_size()]
    return tensor.view(getattr(torch, number)).numpy().view(f"u{tensor.element_size()}")


def normal(shape, dtype, device, seed=0, size=1.0):
    rng = np.random.default_rng(seed)
    values = torch.from_numpy(size * rng.standard_normal(shape))
    return values.to(getattr(torch, dtype)).to(device)


def ints(values, device, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=device)


def ones(device):
    return torch.ones((), device=device)


# Writes


def written_as_expected(memory, storage, rows, slots, dtype, cache_dtype, scales, before):
    """The whole memory, bit for bit."""
    for view, row, scale in zip(views(memory, before), rows, scales, strict=True):
        reference.cache_write(
            raw(view), raw(row.cpu()), slots, dtype=dtype, cache_dtype=cache_dtype, scale=scale
        )
    return np.array_equal(raw(storage.cpu()), raw(before))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.uses("cache_write")
def test_write(memory, kv_cache_dtype, device):
    """K and V are slices of a fused row; 3 rows are padding; slots of -1 are skipped."""
    heads, dim, cache_dtype = 3, 64, FP8.get(kv_cache_dtype, "bfloat16")
    fused = normal((14, 9, dim), "bfloat16", device, size=9)
    rows = fused[:, 3:6], fused[:, 6:9]
    slots = [5, -1, 17, 79, 0, 33, -1, 64, 16, 15, -1]
    storage = poisoned(MEMORIES[memory](5, 16, heads, dim), cache_dtype, device)
    before = storage.cpu().clone()
    scales = [torch.tensor(x, device=device) for x in (0.37, 2.5)]
    result = vllm.reshape_and_cache_flash(
        *rows, *views(memory, storage), ints(slots, device, torch.int64), kv_cache_dtype, *scales
    )
    assert result is None
    assert written_as_expected(
        memory, storage, rows, slots, "bfloat16", cache_dtype, (0.37, 2.5), before
    )


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.uses("cache_write")
def test_write_with_a_scale_of_each_head(dtype, device):
    heads, dim = 4, 80
    rows = [normal((6, heads, dim), dtype, device, seed, size=5) for seed in (1, 2)]
    slots = [0, 7, 8, 15, 3, 1]
    storage = poisoned(MEMORIES["packed_hnd"](2, 8, heads, dim), "float8_e4m3fn", device)
    before = storage.cpu().clone()
    scales = [np.float32([0.1, 1, 3, 0.02]), np.float32([2, 0.5, 0.3, 7])]
    vllm.reshape_and_cache_flash(
        *rows, *views("packed_hnd", storage), ints(slots, device, torch.int64), "fp8",
        *(torch.from_numpy(x).to(device) for x in scales),
    )  # fmt: skip
    assert written_as_expected(
        "packed_hnd", storage, rows, slots, dtype, "float8_e4m3fn", scales, before
    )


@pytest.mark.uses("cache_write")
def test_write_into_a_float8_view_with_auto_uses_the_scales(device):
    rows = [normal((4, 2, 32), "bfloat16", device, seed) for seed in (1, 2)]
    scales = [torch.tensor(x, device=device) for x in (0.37, 2.5)]
    slots = ints(range(4), device, torch.int64)
    caches = {}
    for name in ("auto", "fp8"):
        storage = poisoned((2, 1, 16, 2, 32), "float8_e4m3fn", device)
        pair = [x.view(torch.float8_e4m3fn) if name == "auto" else x for x in storage.unbind(0)]
        vllm.reshape_and_cache_flash(*rows, *pair, slots, name, *scales)
        caches[name] = storage
    assert torch.equal(caches["auto"], caches["fp8"])


# Reads


class Batch:
    """Sequences over a poisoned, shuffled cache of one of vLLM's shapes."""

    def __init__(
        self,
        device,
        memory="packed_nhd",
        dtype="bfloat16",
        q_lens=(1, 5, 0, 17, 1),
        kv_lens=(17, 40, 8, 33, 64),
        heads=(4, 2),
        dim=64,
        page_size=16,
        kv_cache_dtype="auto",
        scales=(0.37, 2.5),
    ):
        self.device, self.dtype = device, dtype
        self.cu, self.lens = [0, *np.cumsum(q_lens).tolist()], list(kv_lens)
        self.bounds = max(q_lens), max(kv_lens)
        self.q = normal((self.cu[-1], heads[0], dim), dtype, device, seed=1, size=1.5)
        self.rng = np.random.default_rng(2)
        counts = [-(-n // page_size) for n in kv_lens]
        pages = self.rng.permutation(sum(counts) + 2).astype(np.int32)
        shape = len(counts), max(counts) + 3
        self.table = self.rng.integers(0, len(pages), shape, np.int32)  # other pages past the end
        for b, ids in enumerate(np.split(pages[: sum(counts)], np.cumsum(counts)[:-1])):
            self.table[b, : len(ids)] = ids

        cache_dtype = FP8.get(kv_cache_dtype, dtype)
        shape = MEMORIES[memory](len(pages), page_size, heads[1], dim)
        storage = poisoned(shape, cache_dtype, device)
        self.k, self.v = views(memory, storage)
        slots = [
            int(self.table[b, j // page_size]) * page_size + j % page_size
            for b, n in enumerate(kv_lens)
            for j in range(n)
        ]
        rows = [normal((len(slots), heads[1], dim), dtype, device, seed) for seed in (3, 4)]
        self.scales = [torch.tensor(x, device=device) for x in scales]
        vllm.reshape_and_cache_flash(
            *rows, self.k, self.v, ints(slots, device, torch.int64), kv_cache_dtype, *self.scales
        )
        if kv_cache_dtype != "auto":
            self.k, self.v = (x.view(getattr(torch, cache_dtype)) for x in (self.k, self.v))
        self.applied = [np.ones(1) if kv_cache_dtype == "auto" else np.float32(x) for x in scales]

    def arguments(self, **changes):
        table = torch.from_numpy(self.table).to(self.device)
        return {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "max_seqlen_q": self.bounds[0],
            "cu_seqlens_q": ints(self.cu, self.device),
            "max_seqlen_k": self.bounds[1],
            "seqused_k": ints(self.lens, self.device),
            "block_table": table[:, :-1],  # the row stride is not the width
            "return_softmax_lse": True,
            **changes,
        }

    def run(self, **changes):
        return vllm.flash_attn_varlen_func(**self.arguments(**changes))

    def expected(self, round_dtype=None, q=None, **semantics):
        k, v = (
            to_numpy(cache.float()) * np.reshape(scale, (-1, 1))
            for cache, scale in zip((self.k, self.v), self.applied, strict=True)
        )
        return reference.attention(
            to_numpy(self.q) if q is None else q, k, v,
            block_table=self.table, seqused_k=self.lens, cu_seqlens_q=self.cu,
            round_dtype=round_dtype, **{"causal": False, **semantics},
        )  # fmt: skip

    def check(self, out, lse, **semantics):
        exact, low = (self.expected(dtype, **semantics) for dtype in (None, self.dtype))
        check_pair(to_numpy(out), to_numpy(lse), exact, low)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("memory", MEMORIES)
def test_read(memory, dtype, device):
    batch = Batch(device, memory, dtype)
    batch.check(*batch.run(causal=True), causal=True)


SLOPES = np.float32(2.0) ** -np.arange(1, 21, dtype=np.float32).reshape(5, 4)
SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.bfloat16)
OPTIONS = {  # flash_attn_varlen_func's argument, the reference's
    "noncausal_by_default": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window_list": ({"causal": True, "window_size": [9, 0]}, {"causal": True, "window": (9, 0)}),
    "window_tuple_noncausal": ({"window_size": (9, 4)}, {"window": (9, 4)}),
    "window_none": ({"window_size": [-1, -1]}, {}),
    "softcap": ({"softcap": 5.0}, {"softcap": 5.0}),
    "softmax_scale": ({"softmax_scale": 0.3}, {"softmax_scale": 0.3}),
    "alibi_heads": ({"alibi_slopes": SLOPES[0]}, {"alibi_slopes": SLOPES[:1].repeat(5, 0)}),
    "alibi_batch_heads": ({"alibi_slopes": SLOPES}, {"alibi_slopes": SLOPES}),
    "sinks": ({"s_aux": SINKS}, {"sinks": SINKS.double().numpy()}),
    "splits_1": ({"num_splits": 1}, {}),
    "splits_32": ({"num_splits": 32}, {}),
    "all_versions_at_once": (
        {"causal": True, "s_aux": SINKS, "alibi_slopes": SLOPES, "num_splits": 3, "softcap": 9.0},
        {"causal": True, "sinks": SINKS.double().numpy(), "alibi_slopes": SLOPES, "softcap": 9.0},
    ),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_option(option, device):
    given, semantics = OPTIONS[option]
    given = {
        name: torch.as_tensor(x).to(device) if isinstance(x, np.ndarray | torch.Tensor) else x
        for name, x in given.items()
    }
    batch = Batch(device)
    batch.check(*batch.run(**given), **semantics)


IGNORED = {
    "deterministic": lambda device: True,
    "scheduler_metadata": lambda device: ints([7, -1, 3], device),
    "fa_version": lambda device: 3,
    "cp_rank": lambda device: 2,
    "cp_tot_seqused_k": lambda device: ints([9], device),
    "q_descale": lambda device: torch.full((), 3.0, device=device).expand(5, 2),
    "k_descale": lambda device: torch.full((), 3.0, device=device).expand(5, 2),
    "v_descale": lambda device: torch.full((), 3.0, device=device).expand(5, 2),
    "max_seqlen_k": lambda device: 100_000,
}


@pytest.mark.parametrize("name", IGNORED)
def test_argument_changes_no_bit(name, device):
    """vLLM passes its scales to kernels of 16-bit caches too."""
    batch = Batch(device)
    changed = batch.run(causal=True, **{name: IGNORED[name](device)})
    assert all(map(same_bits, changed, batch.run(causal=True)))


def test_bound_of_queries_may_be_too_large(device):
    """On a GPU it chooses the kernel, and another kernel sums in another order."""
    batch = Batch(device)
    results = batch.run(causal=True, max_seqlen_q=1000)
    batch.check(*results, causal=True)
    if device == "cpu":
        assert all(map(same_bits, results, batch.run(causal=True)))


def test_out_is_written_and_returned(device):
    batch = Batch(device)
    out = torch.full_like(batch.q, torch.nan)
    assert batch.run(out=out, return_softmax_lse=False) is out
    assert same_bits(out, batch.run()[0])
    assert batch.run(out=out)[0] is out


def test_padding_of_a_captured_step(device):
    """Rows beyond the batch: offsets repeat, lengths and tables are 0; nothing is written there."""
    batch = Batch(device)
    q = torch.cat([batch.q, torch.full_like(batch.q[:3], torch.nan)])
    out = torch.full_like(q, 7)
    table = batch.arguments()["block_table"]
    _, lse = batch.run(
        q=q,
        out=out,
        causal=True,
        seqused_k=ints([*batch.lens, 0, 0], device),
        cu_seqlens_q=ints([*batch.cu, batch.cu[-1], batch.cu[-1]], device),
        block_table=torch.cat([table, torch.zeros_like(table[:2])]),
    )
    batch.check(out[:-3], lse[:, :-3], causal=True)
    assert (out[-3:] == 7).all()


# fp8


@pytest.mark.parametrize("expand", [False, True], ids=["as_stored", "expanded"])
@pytest.mark.parametrize(
    "scales", [(0.37, 2.5), ([0.37, 1.5], [2.5, 0.2])], ids=["one_scale", "scale_of_each_head"]
)
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
def test_fp8_cache(kv_cache_dtype, scales, expand, device):
    """Written as uint8, viewed as float8, read with 16-bit queries."""
    batch = Batch(device, kv_cache_dtype=kv_cache_dtype, scales=scales)
    k_descale, v_descale = (x.expand(5, 2) if expand else x for x in batch.scales)
    actual = batch.run(causal=True, k_descale=k_descale, v_descale=v_descale)
    batch.check(*actual, causal=True)


def test_fp8_cache_and_query(device):
    batch = Batch(device, kv_cache_dtype="fp8")
    q_descale = torch.tensor(0.25, device=device).expand(5, 2)
    q = (batch.q.float() / 0.25).to(torch.float8_e4m3fn)
    k_descale, v_descale = (x.expand(5, 2) for x in batch.scales)
    out, lse = batch.run(q=q, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    assert out.dtype == torch.bfloat16
    batch.check(out, lse, q=to_numpy(q.float()) * 0.25)


def test_uint8_cache_must_be_viewed(device):
    batch = Batch(device, kv_cache_dtype="fp8")
    out = torch.full_like(batch.q, 7)
    message = "flash_attn_varlen_func: k and v must be viewed as float8_e4m3fn or float8_e5m2"
    with pytest.raises(TypeError, match=message):
        batch.run(out=out, k=batch.k.view(torch.uint8), v=batch.v.view(torch.uint8))
    message = "flash_attn_varlen_func: v must be float8_e4m3fn, got uint8"
    with pytest.raises(ValueError, match=message):
        batch.run(out=out, v=batch.v.view(torch.uint8))
    assert (out == 7).all()


# Packed K and V


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "noncausal"])
@pytest.mark.parametrize("dims", [(64, 64), (192, 128)], ids=str)
def test_packed(dims, causal, device):
    """No pages: K and V are rows of a fused projection, found by cu_seqlens_k."""
    q_lens, kv_lens, heads = (5, 1, 0, 20), (5, 9, 3, 31), (6, 3)
    q = normal((sum(q_lens), heads[0], dims[0]), "bfloat16", device, 1)
    fused = normal((sum(kv_lens), heads[1], sum(dims)), "bfloat16", device, 2)
    k, v = fused.split(dims, dim=-1)
    cu_q, cu_k = ([0, *np.cumsum(x).tolist()] for x in (q_lens, kv_lens))
    out, lse = vllm.flash_attn_varlen_func(
        q, k, v, max(q_lens), ints(cu_q, device), max(kv_lens), ints(cu_k, device),
        causal=causal, return_softmax_lse=True,
    )  # fmt: skip
    assert tuple(out.shape) == (sum(q_lens), heads[0], dims[1])
    pages = [np.arange(a, a + max(kv_lens)) for a in cu_k[:-1]]  # rows as pages of one token
    full = [
        reference.attention(
            to_numpy(q), to_numpy(k)[:, None], to_numpy(v)[:, None],
            block_table=pages, seqused_k=kv_lens, cu_seqlens_q=cu_q, causal=causal, round_dtype=low,
        )
        for low in (None, "bfloat16")
    ]  # fmt: skip
    check_pair(to_numpy(out), to_numpy(lse), *full)


# Merging


def test_cascade_of_a_shared_prefix_is_full_attention(device):
    """Two shared pages, as one sequence without a mask; then each one's own; then the merge."""
    batch = Batch(device, q_lens=(1, 5, 3, 17, 1), kv_lens=(33, 40, 35, 49, 64))
    batch.table[:, :2] = batch.table[0, :2]
    whole = batch.run(causal=True)
    total_q = batch.cu[-1]
    arguments = batch.arguments()
    table, lens = arguments["block_table"], arguments["seqused_k"]
    prefix = batch.run(
        cu_seqlens_q=ints([0, total_q], device), seqused_k=ints([32], device), max_seqlen_q=total_q,
        max_seqlen_k=32, block_table=table[:1],
    )  # fmt: skip
    suffix = batch.run(seqused_k=lens - 32, block_table=table[:, 2:], max_seqlen_k=32, causal=True)
    output, output_lse = torch.empty_like(whole[0]), torch.empty_like(whole[1])
    assert vllm.merge_attn_states(output, *prefix, *suffix, output_lse) is None
    for actual in (whole, (output, output_lse)):
        batch.check(*actual, causal=True)


def states(device, tokens=7, heads=3, dim=40, dtype="bfloat16"):
    """prefix and suffix, out and lse each."""
    sides = []
    for seed in (1, 2):
        sides.append(normal((tokens, heads, dim), dtype, device, seed))
        sides.append(normal((heads, tokens), "float32", device, seed + 10, size=3))
    return sides


def check_merge(output, output_lse, sides, from_token=None):
    out, lse = reference.merge(*map(to_numpy, sides))
    if from_token is not None:
        out[from_token:] = to_numpy(sides[2])[from_token:]
        lse[:, from_token:] = to_numpy(sides[3])[:, from_token:]
    reference.assert_close(to_numpy(output), out, reference.round_to(out, "bfloat16"))
    if output_lse is not None:
        reference.assert_close(to_numpy(output_lse), lse, lse, "output_lse")


@pytest.mark.parametrize("context", [None, 0, 3, 7, 100], ids=str)
@pytest.mark.parametrize("with_lse", [True, False], ids=["lse", "no_lse"])
def test_merge(with_lse, context, device):
    sides = states(device)
    output = torch.full_like(sides[0], torch.nan)
    output_lse = torch.full_like(sides[1], torch.nan) if with_lse else None
    vllm.merge_attn_states(output, *sides, output_lse, context)
    check_merge(output, output_lse, sides, context)


def test_merge_reads_no_prefix_where_there_is_none(device):
    sides = states(device)
    sides[0][3:], sides[1][:, 3:] = torch.nan, torch.nan
    output, output_lse = torch.empty_like(sides[0]), torch.empty_like(sides[1])
    vllm.merge_attn_states(output, *sides, output_lse, 3)
    assert torch.equal(output[3:], sides[2][3:])
    assert torch.equal(output_lse[:, 3:], sides[3][:, 3:])
    firsts = [sides[0][:3], sides[1][:, :3], sides[2][:3], sides[3][:, :3]]
    check_merge(output[:3], output_lse[:, :3], firsts)


@pytest.mark.parametrize("empty", [-torch.inf, torch.inf], ids=["minus_inf", "plus_inf"])
def test_merge_takes_either_infinity_as_empty(empty, device):
    sides = states(device)
    sides[1][:, 0] = empty
    sides[3][:, 1] = empty
    sides[1][:, 2], sides[3][:, 2] = empty, -torch.inf
    output, output_lse = torch.empty_like(sides[0]), torch.empty_like(sides[1])
    vllm.merge_attn_states(output, *sides, output_lse)
    check_merge(output, output_lse, sides)


def test_merge_with_strides_of_its_own_and_in_place(device):
    sides = states(device)
    wide = torch.full((7, 3, 64), torch.nan, dtype=torch.bfloat16, device=device)
    wide[..., :40] = sides[0]
    expected = [wide[..., :40].clone(), *sides[1:]]
    prefix_lse = sides[1].t().contiguous().t()  # [Hq, T], as decode context parallelism has it
    vllm.merge_attn_states(wide[..., :40], wide[..., :40], prefix_lse, *sides[2:])
    check_merge(wide[..., :40], None, expected)
    assert wide[..., 40:].isnan().all()


# The legacy layout


def legacy_caches(pages, page_size, heads, dim, dtype, device):
    x = 16 // (1 if dtype.startswith("float8") else getattr(torch, dtype).itemsize)
    return (
        poisoned((pages, heads, dim // x, page_size, x), dtype, device),
        poisoned((pages, heads, dim, page_size), dtype, device),
    )


def logical(key_cache, value_cache):
    """[P, S, Hkv, D] views or copies of the legacy caches, on the host."""
    k = key_cache.cpu().permute(0, 3, 1, 2, 4).flatten(3)
    return k, value_cache.cpu().permute(0, 3, 1, 2)


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"),
    [("bfloat16", "auto"), ("float32", "auto"), ("float16", "fp8"), ("bfloat16", "fp8_e5m2")],
    ids=str,
)
@pytest.mark.parametrize("heads", [2, 40], ids="{}_heads".format)
@pytest.mark.uses("cache_write")
def test_legacy_write(heads, dtype, kv_cache_dtype, device):
    """40 heads of 128 are more 16-byte chunks a row than a CTA has threads."""
    dim, cache_dtype, scales = 128, FP8.get(kv_cache_dtype, dtype), (0.37, 2.5)
    rows = [normal((6, heads, dim), dtype, device, seed, size=5) for seed in (1, 2)]
    slots = [3, -1, 23, 8, 7, 16]
    caches = legacy_caches(3, 8, heads, dim, cache_dtype, device)
    expected = [x.contiguous().clone() for x in logical(*caches)]
    vllm.reshape_and_cache(
        *rows, *caches, ints(slots, device, torch.int64), kv_cache_dtype,
        *(torch.tensor(x, device=device) for x in scales),
    )  # fmt: skip
    for actual, cache, row, scale in zip(logical(*caches), expected, rows, scales, strict=True):
        reference.cache_write(
            raw(cache), raw(row.cpu()), slots, dtype=dtype, cache_dtype=cache_dtype, scale=scale
        )
        assert np.array_equal(raw(actual.contiguous()), raw(cache))


class LegacyBatch:
    """One query of each sequence over a cache that reshape_and_cache wrote."""

    def __init__(self, device, heads=(4, 2), dim=64, page_size=16, kv_cache_dtype="auto",
                 lens=(1, 16, 0, 45, 33), dtype="bfloat16"):  # fmt: skip
        self.device, self.dtype, self.kv_cache_dtype = device, dtype, kv_cache_dtype
        self.heads, self.page_size, self.lens = heads, page_size, lens
        self.cache_dtype = FP8.get(kv_cache_dtype, dtype)
        counts = [-(-n // page_size) for n in lens]
        pages = np.random.default_rng(5).permutation(sum(counts) + 1).astype(np.int32)
        self.table = np.full((len(lens), max(counts)), pages[-1], np.int32)
        for b, ids in enumerate(np.split(pages[:-1], np.cumsum(counts)[:-1])):
            self.table[b, : len(ids)] = ids
        self.q = normal((len(lens), heads[0], dim), dtype, device, 1, size=1.5)
        self.caches = legacy_caches(len(pages), page_size, heads[1], dim, self.cache_dtype, device)
        slots = [
            int(self.table[b, j // page_size]) * page_size + j % page_size
            for b, n in enumerate(lens)
            for j in range(n)
        ]
        rows = [normal((len(slots), heads[1], dim), dtype, device, seed) for seed in (2, 3)]
        self.scales = [torch.tensor(x, device=device) for x in (0.37, 2.5)]
        slots = ints(slots, device, torch.int64)
        vllm.reshape_and_cache(*rows, *self.caches, slots, kv_cache_dtype, *self.scales)

    def arguments(self, **changes):
        dim = self.q.shape[-1]
        return {
            "out": torch.full_like(self.q, torch.nan),
            "query": self.q,
            "key_cache": self.caches[0],
            "value_cache": self.caches[1],
            "num_kv_heads": self.heads[1],
            "scale": dim**-0.5,
            "block_tables": torch.from_numpy(self.table).to(self.device),
            "seq_lens": ints(self.lens, self.device),
            "block_size": self.page_size,
            "max_seq_len": max(self.lens),
            "alibi_slopes": None,
            "kv_cache_dtype": self.kv_cache_dtype,
            "k_scale": self.scales[0],
            "v_scale": self.scales[1],
            **changes,
        }

    def scratch(self):
        partitions = max(1, -(-max(self.lens) // 512))
        sums = torch.full((*self.q.shape[:2], partitions), 7.0, device=self.device)
        return {
            "exp_sum": sums,
            "max_logits": sums.clone(),
            "tmp_out": torch.full_like(self.q, 7)[:, :, None].repeat(1, 1, partitions, 1),
        }

    def run(self, version, **changes):
        arguments = self.arguments(**changes)
        if version == 2:
            scratch = self.scratch()
            assert vllm.paged_attention_v2(**scratch, **arguments) is None
            untouched = [bool((x == 7).all()) for x in scratch.values()]
            assert all(untouched) or self.device == "cuda"  # there they are used
        else:
            assert vllm.paged_attention_v1(**arguments) is None
        return arguments["out"]

    def check(self, out, alibi_slopes=None):
        k, v = logical(*self.caches)
        if self.kv_cache_dtype != "auto":
            k, v = (x.view(getattr(torch, self.cache_dtype)).float() for x in (k, v))
            k, v = (x * scale.cpu() for x, scale in zip((k, v), self.scales, strict=True))
        low_and_exact = [
            reference.attention(
                to_numpy(self.q), to_numpy(k), to_numpy(v), block_table=self.table,
                seqused_k=self.lens, cu_seqlens_q=range(len(self.lens) + 1),
                alibi_slopes=alibi_slopes, round_dtype=low,
            )[0]
            for low in (None, self.dtype)
        ]  # fmt: skip
        reference.assert_close(to_numpy(out), *low_and_exact)


LEGACY = {
    "gqa": {},
    "mha_40x128": {"heads": (40, 40), "dim": 128},
    "gqa_40x128": {"heads": (40, 8), "dim": 128, "dtype": "float16"},
    "page8_head_dim120": {"page_size": 8, "dim": 120},
    "page32": {"page_size": 32},
    "long": {"lens": (1500, 1)},
    "e4m3": {"kv_cache_dtype": "fp8"},
    "e5m2": {"kv_cache_dtype": "fp8_e5m2", "dtype": "float16"},
}


@pytest.mark.parametrize("version", [1, 2], ids="v{}".format)
@pytest.mark.parametrize("case", LEGACY)
def test_legacy_read(case, version, device):
    batch = LegacyBatch(device, **LEGACY[case])
    batch.check(batch.run(version))


@pytest.mark.parametrize("version", [1, 2], ids="v{}".format)
def test_legacy_read_with_alibi(version, device):
    batch = LegacyBatch(device)
    slopes = torch.from_numpy(SLOPES[0]).to(device)
    batch.check(batch.run(version, alibi_slopes=slopes), SLOPES[:1].repeat(5, 0))


@pytest.mark.parametrize("version", [1, 2], ids="v{}".format)
@pytest.mark.parametrize(("name", "value"), [("num_kv_heads", 4), ("block_size", 8)], ids=str)
def test_legacy_sizes_must_be_the_caches(name, value, version, device):
    batch = LegacyBatch(device)
    message = rf"paged_attention_v{version}: {name} must be .*got {value}"
    with pytest.raises(ValueError, match=message):
        batch.run(version, **{name: value})


# What is refused

REFUSED = {
    "q_v": lambda device: torch.ones(1, device=device),
    "dropout_p": lambda device: 0.1,
    "return_attn_probs": lambda device: True,
    "output_scale": ones,
    "cp_world_size": lambda device: 2,
    "mask_mod": lambda device: lambda *_: True,
    "aux_tensors": lambda device: [ones(device)],
    "dynamic_causal": lambda device: ints([1] * 5, device),
}


@pytest.mark.parametrize("name", REFUSED)
def test_varlen_refuses(name, device):
    batch = Batch(device)
    out = torch.full_like(batch.q, 7)
    with pytest.raises(NotImplementedError, match=rf"flash_attn_varlen_func: {name} .*allowed: "):
        batch.run(out=out, **{name: REFUSED[name](device)})
    assert (out == 7).all()


def test_varlen_refuses_lengths_without_pages(device):
    batch = Batch(device)
    message = r"flash_attn_varlen_func: block_table .*cu_seqlens_k"
    with pytest.raises(NotImplementedError, match=message):
        batch.run(block_table=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seqused_k": None}, "either cu_seqlens_k or seqused_k must be given, got neither"),
        ({"cu_seqlens_k": [0, 1]}, "either cu_seqlens_k or seqused_k must be given, got both"),
        ({"cu_seqlens_k": [0, 1], "seqused_k": None}, "cu_seqlens_k must be None with block_table"),
        ({"window_size": (1, 2, 3)}, r"window_size must be \(left, right\), got \(1, 2, 3\)"),
        ({"window_size": (-2, 0)}, "window_size must be"),
    ],
    ids=["neither", "both", "offsets_with_pages", "window_of_three", "window_minus_two"],
)
def test_varlen_wrong_value(changes, message, device):
    if "cu_seqlens_k" in changes:
        changes = {**changes, "cu_seqlens_k": ints(changes["cu_seqlens_k"], device)}
    with pytest.raises(ValueError, match=f"flash_attn_varlen_func: {message}"):
        Batch(device).run(**changes)


@pytest.mark.parametrize("name", ["nvfp4", "int8_per_token_head", "fp8_ds_mla", "turboquant_k8v4"])
@pytest.mark.parametrize("function", ["reshape_and_cache_flash", "reshape_and_cache"])
@pytest.mark.uses("cache_write")
def test_write_refuses_a_kv_cache_dtype(function, name, device):
    key = torch.ones(1, 1, 64, dtype=torch.bfloat16, device=device)
    cache = torch.full((1, 16, 1, 64), 7, dtype=torch.bfloat16, device=device)
    slots = ints([0], device, torch.int64)
    message = rf"{function}: kv_cache_dtype .*'{name}' \(allowed: auto, .*fp8_e5m2\)"
    with pytest.raises(NotImplementedError, match=message):
        getattr(vllm, function)(key, key, cache, cache, slots, name, ones(device), ones(device))
    assert (cache == 7).all()


@pytest.mark.parametrize("version", [1, 2], ids="v{}".format)
@pytest.mark.parametrize(
    ("name", "value"), [("blocksparse_vert_stride", 2), ("kv_cache_dtype", "nvfp4")], ids=str
)
def test_legacy_read_refuses(name, value, version, device):
    batch = LegacyBatch(device)
    out = torch.full_like(batch.q, 7)
    message = rf"paged_attention_v{version}: {name} .*allowed: "
    with pytest.raises(NotImplementedError, match=message):
        batch.run(version, out=out, **{name: value})
    assert (out == 7).all()


def test_blocks_that_are_not_sparse_are_accepted(device):
    batch = LegacyBatch(device)
    given = {"tp_rank": 1, "blocksparse_local_blocks": 4, "blocksparse_vert_stride": 1}
    assert same_bits(batch.run(1, **given), batch.run(1))


def test_merge_refuses(device):
    sides = states(device)
    output = torch.full_like(sides[0], 7)
    message = r"merge_attn_states: output_scale .*allowed: None"
    with pytest.raises(NotImplementedError, match=message):
        vllm.merge_attn_states(output, *sides, output_scale=ones(device))
    message = "merge_attn_states: prefill_tokens_with_context must be >= 0 or None, got -1"
    with pytest.raises(ValueError, match=message):
        vllm.merge_attn_states(output, *sides, prefill_tokens_with_context=-1)
    assert (output == 7).all()


@pytest.mark.parametrize("name", ["q", "k", "v", "cu_seqlens_q"])
def test_varlen_needs(name, device):
    message = f"^flash_attn_varlen_func: {name} must be a DLPack tensor, got None"
    with pytest.raises(TypeError, match=message):
        Batch(device).run(**{name: None}, out=torch.empty(0))


# Errors of the kernels, in the caller's words


class Calls:
    """One right call of each function, to be spoilt."""

    def __init__(self, device):
        self.batch, self.legacy = Batch(device), LegacyBatch(device)
        self.sides = states(device)
        rows = torch.ones(2, 2, 64, dtype=torch.bfloat16, device=device)
        slots = ints([0, 1], device, torch.int64)
        self.write = {
            "key": rows, "value": rows, "key_cache": self.batch.k, "value_cache": self.batch.v,
            "slot_mapping": slots, "kv_cache_dtype": "auto", "k_scale": None, "v_scale": None,
        }  # fmt: skip

    def flash_write(self, **changes):
        vllm.reshape_and_cache_flash(**{**self.write, **changes})

    def legacy_write(self, **changes):
        caches = dict(zip(("key_cache", "value_cache"), self.legacy.caches, strict=True))
        vllm.reshape_and_cache(**{**self.write, **caches, **changes})

    def varlen(self, **changes):
        self.batch.run(**changes)

    def v1(self, **changes):
        self.legacy.run(1, **changes)

    def v2(self, **changes):
        self.legacy.run(2, **changes)

    def merge(self, **changes):
        names = ("prefix_output", "prefix_lse", "suffix_output", "suffix_lse")
        sides = dict(zip(names, self.sides, strict=True))
        vllm.merge_attn_states(torch.empty_like(self.sides[0]), **{**sides, **changes})


FLAT = torch.ones(1)
SPOILT = [  # function, argument, its wrong value from Calls, the message
    ("flash_write", "key", lambda c: c.write["key"][0], "reshape_and_cache_flash: key must have 3"),
    ("flash_write", "value", lambda c: c.write["key"][:1], "reshape_and_cache_flash: value must "),
    ("flash_write", "value_cache", lambda c: c.batch.v[0], "reshape_and_cache_flash: value_cache "),
    ("flash_write", "kv_cache_dtype", lambda c: "fp8", "reshape_and_cache_flash: kv_cache_dtype "),
    ("flash_write", "slot_mapping", lambda c: [0], "reshape_and_cache_flash: slot_mapping "),
    ("legacy_write", "key_cache", lambda c: c.batch.k, "reshape_and_cache: key_cache must have 5"),
    ("legacy_write", "value_cache", lambda c: FLAT, "reshape_and_cache: value_cache must "),
    ("varlen", "q", lambda c: c.batch.q[0], "flash_attn_varlen_func: q must have 3 dimensions"),
    ("varlen", "k", lambda c: c.batch.k[..., :32], "flash_attn_varlen_func: k must have q's head"),
    ("varlen", "v", lambda c: c.batch.v[:1], "flash_attn_varlen_func: v must have .* of k, got"),
    ("varlen", "block_table", lambda c: ints(c.batch.table, c.batch.device, torch.int64),
     "flash_attn_varlen_func: block_table must be int32, got int64"),
    ("varlen", "seqused_k", lambda c: FLAT, "flash_attn_varlen_func: seqused_k must "),
    ("varlen", "s_aux", lambda c: FLAT, "flash_attn_varlen_func: s_aux must have shape"),
    ("varlen", "num_splits", lambda c: -1, "flash_attn_varlen_func: num_splits must be >= 0"),
    ("varlen", "softcap", lambda c: "high", "flash_attn_varlen_func: softcap must be float, "),
    ("varlen", "window_size", lambda c: 5, "flash_attn_varlen_func: window_size must be "),
    ("varlen", "window_size", lambda c: (1, "2"), "flash_attn_varlen_func: window_size must "),
    ("varlen", "max_seqlen_k", lambda c: 1.5, "flash_attn_varlen_func: max_seqlen_k must be int"),
    ("v1", "query", lambda c: c.legacy.q[0], "paged_attention_v1: query must have 3 dimensions"),
    ("v1", "key_cache", lambda c: c.batch.k, "paged_attention_v1: key_cache must have 5"),
    ("v2", "value_cache", lambda c: c.batch.v, "paged_attention_v2: value_cache must have "),
    ("v2", "seq_lens", lambda c: ints(c.legacy.lens, c.legacy.device, torch.int64),
     "paged_attention_v2: seq_lens must be int32, got int64"),
    ("v1", "scale", lambda c: torch.inf, "paged_attention_v1: scale must be finite"),
    ("merge", "suffix_output", lambda c: c.sides[2][0], "merge_attn_states: suffix_output must "),
    ("merge", "suffix_lse", lambda c: c.sides[3][0], "merge_attn_states: suffix_lse must have"),
    ("merge", "output_lse", lambda c: c.sides[0], "merge_attn_states: output_lse must be float32"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "name", "value", "message"), SPOILT, ids=[f"{x[0]}-{x[1]}" for x in SPOILT]
)
def test_error_names_function_and_argument(function, name, value, message, device):
    calls = Calls(device)
    getattr(calls, function)()  # right as it is
    value = value(calls)
    value = value.to(device) if value is FLAT else value
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        getattr(calls, function)(**{name: value})


# Other frameworks


def test_numpy_arrays():
    """Write and read without torch; the result is NumPy's too."""
    rng = np.random.default_rng(7)
    key, value, q = (rng.standard_normal((20, 2, 32)).astype(np.float32) for _ in range(3))
    key_cache, value_cache = (np.full((3, 8, 2, 32), np.nan, np.float32) for _ in range(2))
    table = np.array([[2, 0, 1]], np.int32)
    slots = np.array([table[0, j // 8] * 8 + j % 8 for j in range(20)])
    one = np.ones((), np.float32)
    vllm.reshape_and_cache_flash(key, value, key_cache, value_cache, slots, "auto", one, one)
    offsets = np.array([0, 20], np.int32)
    out, lse = vllm.flash_attn_varlen_func(
        q, key_cache, value_cache, 20, offsets, 20, seqused_k=offsets[1:], causal=True,
        block_table=table, return_softmax_lse=True,
    )  # fmt: skip
    assert type(out) is np.ndarray
    assert type(lse) is np.ndarray
    caches = [np.nan_to_num(x.astype(np.float64)) for x in (key_cache, value_cache)]
    full = [
        reference.attention(
            q.astype(np.float64), *caches, block_table=table, seqused_k=[20], cu_seqlens_q=[0, 20],
            round_dtype=low,
        )
        for low in (None, "float32")
    ]  # fmt: skip
    check_pair(out.astype(np.float64), lse.astype(np.float64), *full)


class Foreign:
    """A tensor of an unknown framework."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def __dlpack__(self, **kwargs):
        return self.tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def test_tensors_of_an_unknown_framework():
    batch = Batch("cpu")
    names = ("q", "k", "v", "cu_seqlens_q", "seqused_k", "block_table")
    foreign = {name: Foreign(batch.arguments()[name]) for name in names}
    with pytest.raises(TypeError, match=r"out must be given where q is a .*Foreign"):
        batch.run(**foreign)
    out = torch.empty_like(batch.q)
    batch.run(**foreign, out=Foreign(out), return_softmax_lse=False)
    assert same_bits(out, batch.run()[0])
