"""paged_attention where only a GPU can go wrong, and at lengths that one worker does not do alone.

Plans made on the device, graphs, streams, workspaces, programmatic launches; then long sequences of
every layout, page size, group and type. The small cases of test_attention.py and the faults of
test_bugs.py run on a GPU as well.
"""

from __future__ import annotations

import copy
import functools
import itertools
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pagetile
import pytest
import reference
import torch
from cases import STORAGES, Case, crc
from gpu import captured, keep_busy, needs_gpus, one_kernel, prefill_by
from memory import huge_tensor
from pagetile import _C
from problem import (
    DEAD_PAGES,
    cache_layout,
    check_pair,
    pasted,
    rows_layout,
    same_bits,
    scale_values,
    send,
)

USES = ("paged_attention",)
DEVICE = "cuda"
on_a_gpu = needs_gpus(1)


# Long problems


def int32(device, values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def poisoned(size: int, dtype: str, device: str) -> torch.Tensor:
    """All ones: a NaN in every format."""
    dtype = getattr(torch, dtype)
    return torch.full((size * dtype.itemsize,), 0xFF, dtype=torch.uint8, device=device).view(dtype)


def raw(x: torch.Tensor) -> torch.Tensor:
    """The bits, as integers."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


def wide(x: torch.Tensor) -> torch.Tensor:
    return x.float().double()


class Attention:
    """A case whose tensors are made on the device, so that it may be long, and what is right.

    All memory that the case does not use is NaN; tables hold page numbers that do not exist where
    nobody may look.
    """

    def __init__(self, case: Case, device: str = DEVICE) -> None:
        self.case, self.device = case, device
        self.random = torch.Generator(device).manual_seed(crc(case.name) + case.seed)
        rng = case.rng("memory")
        batch, (num_q_heads, num_kv_heads) = len(case.q_lens), case.heads
        self.kv_lens = case.kv_lens
        self.cu = list(itertools.accumulate(case.q_lens, initial=case.first_row))
        self.rows = self.cu[-1] + case.spare_rows

        # Pages
        pages_of = [-(-n // case.page_size) for n in case.kv_lens]
        self.num_pages = sum(pages_of) + 3
        pool = rng.permutation(self.num_pages)
        pool = pool if case.page_order == "shuffled" else np.sort(pool)[::-1]
        width = max(pages_of, default=0) + 2
        table = rng.choice(DEAD_PAGES, (batch, width + case.table_pad)).astype(np.int32)
        for b, (first, count) in enumerate(zip(np.cumsum(pages_of), pages_of, strict=True)):
            table[b, :count] = pool[first - count : first]
        self.table = torch.from_numpy(table).to(device)[:, :width]
        layout = cache_layout(
            case.storage, self.num_pages, case.page_size, num_kv_heads, *case.head_dim
        )
        self.memory = poisoned(layout.size, case.kv, device)
        self.caches, self.stored = [], []
        for (strides, offset), dim in zip((layout.k, layout.v), case.head_dim, strict=True):
            shape = (self.num_pages, case.page_size, num_kv_heads, dim)
            self.caches.append(self.memory.as_strided(shape, strides, offset))
            self.stored.append(self.normal(sum(case.kv_lens), num_kv_heads, dim, dtype=case.kv))
        self.write(self.stored, self.slots())

        # Queries and results
        size, strides, offset = rows_layout(case.q_layout, self.rows, num_q_heads, case.head_dim[0])
        shape = (self.rows, num_q_heads, case.head_dim[0])
        q = poisoned(size + 1, case.dtype, device).as_strided(shape, strides, offset)
        used = slice(self.cu[0], self.cu[-1])
        raw(q)[used] = raw(self.normal(*q[used].shape, dtype=case.dtype, scale=1.5))
        self.out_shape = (self.rows, num_q_heads, case.head_dim[1])
        size, self.out_strides, _ = rows_layout(case.out, *self.out_shape)
        self.out_memory = poisoned(size + 1, case.out_dtype, device)

        # The small ones
        rng = case.rng("small")
        self.scales = {
            name: scale_values(case.scales, batch, num_kv_heads, rng) for name in ("k", "v", "q")
        }
        if not reference.is_fp8(case.dtype):
            self.scales["q"] = (None, np.ones((batch, num_kv_heads)))
        slopes = 2.0 ** -rng.uniform(1, 6, (batch, num_q_heads)).astype(np.float32)
        slopes = slopes[:1].repeat(batch, 0) if case.alibi == "heads" else slopes
        self.slopes = torch.from_numpy(slopes).to(device) if case.alibi else None
        self.sinks = self.normal(num_q_heads, dtype=case.sinks, scale=2) if case.sinks else None
        kv_dtype = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}.get(case.kv)
        caches = [x.view(torch.uint8) if case.uint8 else x for x in self.caches]
        hnd = layout.hnd
        self.arguments = {
            "q": q,
            "k_cache": caches[0].transpose(1, 2) if hnd else caches[0],
            "v_cache": caches[1].transpose(1, 2) if hnd else caches[1],
            "block_table": self.table,
            "seqused_k": int32(device, case.kv_lens),
            "cu_seqlens_q": int32(device, self.cu),
            "max_seqlen_q": max(case.q_lens, default=0),
            "max_seqlen_k": max(case.kv_lens, default=0) or 1,
            "softmax_scale": case.softmax_scale,
            "causal": case.causal,
            "window": case.window,
            "softcap": case.softcap,
            "alibi_slopes": self.slopes[0] if case.alibi == "heads" else self.slopes,
            "sinks": self.sinks,
            "q_scale": send(self.scales["q"][0], device),
            "k_scale": send(self.scales["k"][0], device),
            "v_scale": send(self.scales["v"][0], device),
            "num_splits": case.num_splits,
            "batch_invariant": case.batch_invariant,
            "layout": "HND" if hnd else "NHD",
            "kv_dtype": kv_dtype if case.uint8 else "auto",
        }

    def normal(self, *shape, dtype, scale=1.0) -> torch.Tensor:
        x = torch.randn(*shape, device=self.device, generator=self.random)
        return (scale * x).to(getattr(torch, dtype))

    def slots(self) -> torch.Tensor:
        """Of every key of every sequence, one after the other."""
        size, slots = self.case.page_size, []
        for b, length in enumerate(self.case.kv_lens):
            keys = torch.arange(length, device=self.device)
            slots.append(self.table[b, keys // size].long() * size + keys % size)
        return torch.cat(slots) if slots else torch.empty(0, dtype=torch.long, device=self.device)

    def write(self, rows, slots) -> None:
        size = self.case.page_size
        for cache, side in zip(self.caches, rows, strict=True):
            raw(cache)[slots // size, slots % size] = raw(side)

    def replaced(self, **fields) -> Attention:
        """The same memory, but for what is given; expectations are computed anew."""
        other = copy.copy(self)
        other.arguments = dict(self.arguments)
        for name in ("expected", "low_precision"):
            other.__dict__.pop(name, None)
        for name, value in fields.items():
            setattr(other, name, value)
        return other

    def with_lens(self, kv_lens) -> Attention:
        """Shorter sequences, with real keys behind their ends."""
        other = self.replaced(kv_lens=tuple(kv_lens))
        other.arguments["seqused_k"] = int32(self.device, kv_lens)
        return other

    # Calls

    def run(self, **changes):
        """(out, softmax_lse)"""
        arguments = {**self.arguments, "return_softmax_lse": True, **changes}
        if self.case.out != "new":
            lse = poisoned(self.case.heads[0] * self.rows, "float32", self.device)
            arguments.setdefault(
                "out", self.out_memory.as_strided(self.out_shape, self.out_strides)
            )
            arguments.setdefault("softmax_lse", lse.view(self.case.heads[0], self.rows))
        tensors = [arguments.pop(name) for name in ("q", "k_cache", "v_cache")]
        return pagetile.paged_attention(*tensors, **arguments)

    def alone(self, b, rows=None, length=None, **changes):
        """Sequence b by itself; rows and length may cut a chunk out of it."""
        begin, end = rows or (0, self.case.q_lens[b])
        arguments = {
            "q": self.arguments["q"][self.cu[b] + begin : self.cu[b] + end],
            "block_table": self.table[b : b + 1],
            "seqused_k": int32(self.device, [self.kv_lens[b] if length is None else length]),
            "cu_seqlens_q": int32(self.device, [0, end - begin]),
            "max_seqlen_q": end - begin,
        }
        for name in ("alibi_slopes", "q_scale", "k_scale", "v_scale"):
            whole = self.arguments[name]
            if whole is not None and whole.ndim == 2:
                arguments[name] = whole[b : b + 1]
        return self.run(**{**arguments, **changes})

    def of(self, b, out, lse):
        """The results of sequence b."""
        rows = slice(self.cu[b], self.cu[b + 1])
        return out[rows], lse[:, rows]

    def sizes(self) -> dict:
        """What plans and workspaces are made for."""
        return {
            "num_q_heads": self.case.heads[0],
            "num_kv_heads": self.case.heads[1],
            "head_dim": self.case.head_dim[0],
            "head_dim_v": self.case.head_dim[1],
            **{n: self.arguments[n] for n in ("max_seqlen_q", "max_seqlen_k", "batch_invariant")},
        }

    def plan(self, **changes):
        names = ("seqused_k", "cu_seqlens_q", "causal", "window", "num_splits")
        arguments = {name: self.arguments[name] for name in names} | self.sizes()
        return pagetile.make_plan(**{**arguments, "page_size": self.case.page_size, **changes})

    def workspace(self) -> torch.Tensor:
        size = pagetile.workspace_size(**self.sizes(), device=self.device)
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    # What is right

    @functools.cached_property
    def expected(self):
        return self._reference(None)

    @functools.cached_property
    def low_precision(self):
        return self._reference(getattr(torch, self.case.out_dtype))

    def _reference(self, dtype):
        """reference.attention with whole tensors in the place of its loops."""
        case = self.case
        rounded = (lambda x: x.to(dtype).double()) if dtype else (lambda x: x)
        float64 = {"dtype": torch.float64, "device": self.device}
        out = torch.full(self.out_shape, torch.nan, **float64)
        lse = torch.full((case.heads[0], self.rows), torch.nan, **float64)
        group = case.heads[0] // case.heads[1]
        starts = np.cumsum([0, *case.kv_lens])
        scale = case.head_dim[0] ** -0.5 if case.softmax_scale is None else case.softmax_scale
        sinks = torch.full((case.heads[0],), -torch.inf, **float64)
        sinks = sinks if self.sinks is None else wide(self.sinks)
        for b, (q_len, kv_len) in enumerate(zip(case.q_lens, self.kv_lens, strict=True)):
            factor = {n: torch.tensor(x[b], **float64) for n, (_, x) in self.scales.items()}
            rows, keys = slice(self.cu[b], self.cu[b + 1]), slice(starts[b], starts[b] + kv_len)
            q = wide(self.arguments["q"][rows]).unflatten(1, (-1, group))  # [q_len, Hkv, G, D]
            q = rounded(q * factor["q"][:, None, None]).transpose(0, 1)
            k, v = (
                rounded(wide(x[keys]) * factor[name][:, None]).transpose(0, 1)  # [Hkv, kv_len, D]
                for x, name in zip(self.stored, "kv", strict=True)
            )
            if dtype:
                q, k = q.float(), k.float()
            score = (q.flatten(1, 2) @ k.mT).double().unflatten(1, (q_len, group)) * scale
            if case.softcap > 0:
                score = case.softcap * torch.tanh(score / case.softcap)
            diagonal = torch.arange(q_len, device=self.device)[:, None] + kv_len - q_len
            away = torch.arange(kv_len, device=self.device) - diagonal  # [q_len, kv_len]
            if self.slopes is not None:
                slope = self.slopes[b].double().unflatten(0, (-1, 1, group, 1))
                score = score - slope * away.abs()[:, None]
            left, right = case.window
            seen = away <= 0 if case.causal else torch.ones_like(away, dtype=torch.bool)
            seen &= away >= -left if left >= 0 else seen
            seen &= away <= right if right >= 0 else seen
            score = score.masked_fill(~seen[:, None], -torch.inf)
            sink = sinks.unflatten(0, (-1, 1, group)).expand(-1, q_len, -1)
            top = torch.maximum(score.amax(-1), sink) if kv_len else sink
            finite = torch.where(top.isfinite(), top, 0)
            p = torch.exp(score - finite[..., None])
            total = p.sum(-1) + torch.exp(sink - finite)
            weights = rounded(p * reference.LARGEST_WEIGHT) / reference.LARGEST_WEIGHT
            weighted = (weights.flatten(1, 2) @ v).unflatten(1, (q_len, group))
            values = torch.where(total > 0, 1 / total, 0)[..., None] * weighted
            out[rows] = rounded(values.transpose(0, 1).flatten(1, 2))
            lse[:, rows] = (finite + torch.log(total)).transpose(1, 2).flatten(0, 1)
        return out, lse

    def used(self, out, lse, rows=None):
        """The batch's rows, or some of them, as float64 NumPy."""
        rows = slice(self.cu[0], self.cu[-1]) if rows is None else rows
        return out[rows].double().cpu().numpy(), lse[:, rows].double().cpu().numpy()

    def check(self, out, lse, rows=None) -> None:
        """Within the tolerance rule; rows of no sequence are not written."""
        assert tuple(out.shape) == self.out_shape
        assert out.dtype == getattr(torch, self.case.out_dtype)
        assert lse.dtype == torch.float32
        pairs = (self.expected, self.low_precision)
        check_pair(*self.used(out, lse, rows), *(self.used(*pair, rows) for pair in pairs))
        others = [*range(self.cu[0]), *range(self.cu[-1], self.rows)]
        if self.case.out != "new" and others:
            assert (raw(out)[others] == -1).all()
            assert (raw(lse)[:, others] == -1).all()


def attend(case: Case, device: str = DEVICE, **changes):
    problem = Attention(case, device)
    out, lse = problem.run(**changes)
    problem.check(out, lse)
    return problem, out, lse


# fmt: off
REFERENCE = [
    Case("reference", (3, 1, 0, 9), (40, 17, 5, 7), (6, 2), (16, 24)),
    Case("reference_everything", (3, 0, 12, 2), (40, 17, 9, 0), (6, 2), (24, 16), 7, softcap=8.0,
         window=(9, 3), causal=False, alibi="batch_heads", sinks="float32", first_row=1,
         spare_rows=2),
    Case("reference_fp8", (3, 9), (40, 33), (4, 4), window=(9, 3), cache_dtype="float8_e4m3fn",
         scales="batch_heads", alibi="heads", sinks="bfloat16", storage="packed_hnd"),
    Case("reference_fp8_query", (3, 9), (40, 5), (4, 1), dtype="float8_e5m2",
         cache_dtype="float8_e5m2", scales="heads"),
]
# fmt: on


@pytest.mark.parametrize("case", REFERENCE, ids=lambda case: case.name)
def test_the_reference_is_the_plain_one(case):
    """Whole tensors at once, or loops over rows: the same numbers, rounded ones too."""
    problem = Attention(case, "cpu")
    slopes, sinks = problem.slopes, problem.sinks
    caches = [
        wide(cache).nan_to_num(0).numpy() * problem.scales[name][1][0][:, None]
        for name, cache in zip("kv", problem.caches, strict=True)
    ]
    for b, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        rows = slice(problem.cu[b], problem.cu[b + 1])
        factors = {name: full[b] for name, (_, full) in problem.scales.items()}
        first = {name: full[0] for name, (_, full) in problem.scales.items()}
        caches_of_b = [
            x * (factors[name] / first[name])[:, None] for name, x in zip("kv", caches, strict=True)
        ]
        group = case.heads[0] // case.heads[1]
        q = wide(problem.arguments["q"][rows]).numpy() * factors["q"].repeat(group)[:, None]
        for dtype, actual in ((None, problem.expected), (case.out_dtype, problem.low_precision)):
            out, lse = reference.attention(
                q, *caches_of_b, block_table=problem.table[b : b + 1].numpy(),
                seqused_k=[kv_len], cu_seqlens_q=[0, q_len], softmax_scale=case.softmax_scale,
                causal=case.causal, window=case.window, softcap=case.softcap,
                alibi_slopes=None if slopes is None else slopes[b : b + 1].double().numpy(),
                sinks=None if sinks is None else wide(sinks).numpy(),
                round_dtype=dtype,
            )  # fmt: skip
            tolerance = 2e-3 if dtype else 1e-12  # a sum may round to the next value
            np.testing.assert_allclose(actual[0][rows].numpy(), out, tolerance, tolerance)
            np.testing.assert_allclose(actual[1][:, rows].numpy(), lse, 1e-5 if dtype else 1e-12)


# Long sequences in every form. Each list is run on both devices.

# fmt: off
BF16, E4M3, E5M2 = {}, {"cache_dtype": "float8_e4m3fn"}, {"cache_dtype": "float8_e5m2"}
FP16 = {"dtype": "float16"}
KINDS = {"bf16": BF16, "fp16": FP16, "e4m3": E4M3, "e5m2": E5M2, "fp16_e4m3": {**FP16, **E4M3}}
D128 = {"head_dim": (128, 128)}
SCORE_OPTIONS = (
    ("softcap", {"softcap": 5.0, "softmax_scale": 1.0}),
    ("alibi", {"alibi": "heads"}),
    ("alibi_batch", {"alibi": "batch_heads", "causal": False}),
    ("sinks", {"sinks": "float32"}),
    ("sinks_window", {"sinks": "bfloat16", "window": (60, 0)}),
    ("scale0", {"softmax_scale": 0.0}),
)
APART = [s for s in STORAGES if s not in ("interleaved", "halves")]


def page_sizes() -> list[Case]:
    cases = []
    for size in (1, 2, 3, 5, 8, 16, 17, 64, 528):
        for storage, kind in (("nhd", "bf16"), ("hnd", "e4m3"), ("packed", "fp16_e4m3"),
                              ("hnd", "bf16")):
            cases.append(Case(f"page{size}_{storage}_{kind}", (1, 5, 1), (1300, 701, 529), (8, 2),
                              page_size=size, storage=storage, **D128, **KINDS[kind]))
    return cases


def storages() -> list[Case]:
    lens = (1, 3, 1), (900, 333, 70)
    return [
        *(Case(f"{s}_{k}", *lens, (8, 2), storage=s, **D128, **KINDS[k])
          for s in STORAGES for k in ("bf16", "e4m3", "e5m2")),
        *(Case(f"{s}_{k}_192_128", *lens, (4, 2), (192, 128), storage=s, **KINDS[k])
          for s in APART for k in ("fp16", "e4m3")),
        *(Case(f"q_{q}_out_{o}_{k}", *lens, (8, 2), q_layout=q, out=o, first_row=1, spare_rows=3,
               table_pad=3, **D128, **KINDS[k])
          for q, o in (("fused_qkv", "strided"), ("heads_first", "given")) for k in KINDS),
    ]


def head_dims() -> list[Case]:
    one = (8, 16, 40, 56, 64, 72, 88, 96, 104, 120, 128, 136, 160, 184, 192, 200, 232, 248, 256)
    two = ((192, 128), (64, 128), (128, 64), (40, 256), (256, 40), (192, 96), (136, 128), (96, 72))
    dims = [(d, d) for d in one] + [*two]
    return [
        Case(f"head_dim{d[0]}_{d[1]}_{kind}", (1, 4, 1), (800, 333, 65), (8, 2), d, **KINDS[kind])
        for i, d in enumerate(dims)
        for kind in (("bf16", "e4m3") if i % 2 else ("fp16", "e5m2"))
    ]


def groups() -> list[Case]:
    cases = []
    for i, group in enumerate((1, 3, 4, 5, 7, 8, 12, 16, 20, 64)):
        heads = (2 * group, 2)
        kind = ("bf16", "e4m3")[i % 2]
        cases += [
            Case(f"group{group}_decode", (1, 1, 1), (900, 70, 333), heads, **D128),
            Case(f"group{group}_few", (2, 1, 4), (900, 70, 333), heads, **D128),
            Case(f"group{group}_many", (1, 2, 5, 17, 70, 33), (800, 400, 70, 600, 500, 100), heads,
                 **KINDS[kind]),
        ]
    return cases


def query_lengths() -> list[Case]:
    lens = (*range(2, 18), 24, 31, 32, 33, 40, 63, 64, 65, 70)
    return [
        Case(f"q_len{n}_heads{heads[0]}_{heads[1]}", (n, 1, n), (700, 500, n), heads,
             **KINDS[kind])
        for n in lens
        for heads, kind in (((8, 2), "bf16"), ((2, 2), "e4m3"))
    ]


def types() -> list[Case]:
    lens = (1, 9, 1), (700, 333, 1)
    cases = []
    for scales in (None, "one", "heads", "batch_heads", "expanded"):
        for cache in reference.FP8:
            for dtype in ("bfloat16", "float16", *reference.FP8):
                cases.append(Case(f"{dtype}_over_{cache}_{scales}", *lens, (8, 2), **D128,
                                  dtype=dtype, cache_dtype=cache, scales=scales,
                                  uint8=scales == "heads"))
    return cases


def masks() -> list[Case]:
    lens = (1, 9, 40, 1), (900, 333, 700, 15)
    windows = ((0, 0), (31, 0), (32, 0), (100, 5), (600, -1), (-1, 3), (511, 0))
    return [
        *(Case(f"window_{w[0]}_{w[1]}_{causal}".replace("-1", "any"), *lens, (8, 2), causal=causal,
               window=w, **KINDS[kind])
          for w in windows for causal, kind in ((True, "bf16"), (False, "e4m3"))),
        *(Case(f"{name}_{kind}", *lens, (8, 2), **more, **KINDS[kind])
          for kind in ("bf16", "fp16", "e4m3")
          for name, more in (
              *SCORE_OPTIONS,
              ("scale_negative", {"softmax_scale": -0.11}),
              ("scale_negative_window", {"softmax_scale": -0.11, "window": (99, 0)}),
              ("scale0_alibi_softcap", {"softmax_scale": 0.0, "alibi": "heads", "softcap": 3.0}),
              ("everything", {"softcap": 8.0, "alibi": "batch_heads", "sinks": "float16",
                              "window": (200, 1), "causal": False, "storage": "packed"}),
          )),
        Case("queries_longer_than_keys", (70, 33, 40), (9, 0, 20), (8, 2), sinks="float32"),
        Case("mostly_empty", (0, 1, 0, 0, 3, 0), (900, 0, 0, 5, 700, 40), (8, 2)),
    ]


def splits() -> list[Case]:
    return [
        *(Case(f"splits{n}_{kind}", (1, 1, 5, 1), (4000, 1, 1100, 40), (8, 2), num_splits=n,
               **more, **KINDS[kind])
          for n in (1, 2, 3, 5, 9, 33, 300)
          for kind, more in (("bf16", {}), ("e4m3", {"window": (900, 0), "sinks": "float32"}))),
        *(Case(f"invariant_{kind}", (1, 1, 5, 1), (4500, 1, 2100, 40), (8, 2), batch_invariant=True,
               **more, **KINDS[kind])
          for kind, more in (("bf16", {}), ("e4m3", {"window": (2500, 0)}),
                             ("fp16", {"alibi": "heads"}))),
    ]


def clusters() -> list[Case]:
    """One sequence whose KV heads are clusters of thread blocks where the GPU has them."""
    return [
        *(Case(f"cluster_{heads[0]}_{heads[1]}_q{q}_{kv}", (q,), (kv,), heads, **D128)
          for heads, q in (((32, 8), 1), ((64, 8), 1), ((8, 8), 8), ((16, 8), 3), ((63, 9), 1),
                           ((24, 12), 4), ((56, 14), 2))
          for kv in (1, 33, 200, 1024, 5000)),
        *(Case(f"cluster_splits{n}", (1,), (3000,), (32, 8), num_splits=n, **D128)
          for n in (1, 2, 3, 5, 7, 8, 9, 100)),
        *(Case(f"cluster_head_dim{d[0]}_{d[1]}_{kind}", (2,), (900,), (16, 8), d, **KINDS[kind])
          for d in ((64, 64), (96, 96), (72, 72), (192, 192), (192, 128), (256, 256), (40, 136))
          for kind in ("fp16", "e4m3", "e5m2")),
        *(Case(f"cluster_{name}", (2,), (2500,), (32, 8), **D128, **more) for name, more in (
            ("window", {"window": (700, 0)}), ("short_window", {"window": (3, 0)}),
            ("noncausal", {"causal": False, "window": (900, 9)}), ("sinks", {"sinks": "float32"}),
            ("alibi", {"alibi": "heads", **E4M3}), ("softcap", {"softcap": 5.0}),
            ("hnd", {"storage": "hnd"}), ("page1", {"page_size": 1}),
            ("scales", {"scales": "heads", **E4M3}))),
        Case("cluster_no_queries", (0,), (300,), (32, 8), out="given", spare_rows=2),
        Case("cluster_no_keys", (2,), (0,), (32, 8)),
    ]


# fmt: on
LONG = [
    *page_sizes(),
    *storages(),
    *head_dims(),
    *groups(),
    *query_lengths(),
    *types(),
    *masks(),
    *splits(),
    *clusters(),
]


def test_case_names_are_unique():
    names = [case.name for case in LONG]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_long(case, device):
    """By itself, and with a plan and a workspace of its own: right, and the same bits."""
    problem, out, lse = attend(case, device)
    more = {"plan": problem.plan(), "workspace": problem.workspace()}
    for _ in range(2):  # the second call finds the workspace as the first one left it
        assert all(map(same_bits, problem.run(**more), (out, lse)))


@on_a_gpu
@pytest.mark.parametrize("where", ["nowhere", "first", "in_the_midst", "last", "seldom", "often"])
def test_items_are_dealt_or_found(where):
    """720 sequences, 45 a lane, so that items are dealt twice. Behind one of two tiles of rows the
    list finds them. Some have no queries, some no keys, and most have no tile for most warps.
    """
    rng = np.random.default_rng(crc(where))
    lens = rng.integers(0, 60, 720) * (rng.random(720) > 0.05)
    lens[::77] += 700
    q_lens = (rng.random(720) > 0.1).astype(int)
    place = np.arange(720) % 90
    wide = {
        "nowhere": place < 0, "first": place == 0, "in_the_midst": place == 20, "last": place == 89,
        "seldom": rng.random(720) < 0.01, "often": rng.random(720) < 0.2,
    }[where]  # fmt: skip
    q_lens[wide] = 9
    case = Case(f"dealt_{where}", tuple(q_lens.tolist()), tuple(lens.tolist()), (32, 8), **D128)
    with prefill_by("none"):
        attend(case)


# fmt: off
UNEVEN = {
    "bf16": {},
    "e4m3": E4M3,
    "window": {"window": (1500, 0)},
    "splits": {"num_splits": 6, **FP16},
    "invariant": {"batch_invariant": True},
    "invariant_window": {"batch_invariant": True, "window": (3000, 0), **E5M2},
}
# fmt: on


@on_a_gpu
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("options", UNEVEN)
def test_uneven_lengths(options, heads):
    """1 to 5,000 keys, a few very long: more tiles than workers, cut anywhere."""
    rng = np.random.default_rng(heads)
    lens = rng.integers(1, 5000, 30).tolist() + [60_000, 17_001] + [1, 31, 33] * 30
    q_lens = (rng.integers(1, 5, len(lens)) * (rng.random(len(lens)) > 0.1)).tolist()
    case = Case(f"uneven_{options}", tuple(q_lens), tuple(lens), (4 * heads, heads), **D128,
                **UNEVEN[options])  # fmt: skip
    problem, out, lse = attend(case)
    assert all(map(same_bits, problem.run(plan=problem.plan()), (out, lse)))


@on_a_gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("cache_dtype", reference.FP8)
def test_out_of_an_fp8_query(cache_dtype, dtype):
    """The caller says what out is."""
    case = Case("fp8_out", (1, 5), (700, 90), (8, 2), dtype="float8_e4m3fn",
                cache_dtype=cache_dtype, scales="heads")  # fmt: skip
    problem = Attention(case)
    out, lse = problem.run(
        out=torch.empty(problem.out_shape, dtype=getattr(torch, dtype), device=DEVICE)
    )
    assert out.dtype == getattr(torch, dtype)
    check_pair(*problem.used(out, lse), problem.used(*problem.expected),
               problem.used(*problem.low_precision))  # fmt: skip


# Where keys and rows lie


def moved(x: torch.Tensor, pad: int, offset: int) -> torch.Tensor:
    """The same values, rows `pad` elements longer, from element `offset` on; NaN between."""
    *rest, dim = x.shape
    strides = [s // dim * (dim + pad) for s in torch.empty(x.shape, device="meta").stride()[:-1]]
    size = sum((n - 1) * s for n, s in zip(rest, strides, strict=True)) + dim + offset
    dtype = str(x.dtype).removeprefix("torch.")
    there = poisoned(size, dtype, str(x.device)).as_strided(x.shape, (*strides, 1), offset)
    raw(there).copy_(raw(x))
    return there


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4, 8])
@pytest.mark.parametrize("pad", [0, 1, 2, 4, 6, 8, 24])
@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
def test_alignment_is_no_matter(kind, pad, offset, device):
    """Strides and bases of any alignment, of K, of V, of both, of the queries: the same bits."""
    case = Case(f"alignment_{kind}", (1, 4), (300, 90), (4, 2), (72, 72), **KINDS[kind])
    problem = Attention(case, device)
    expected = problem.run()
    for names in (("k_cache",), ("v_cache",), ("k_cache", "v_cache"), ("q",)):
        changes = {name: moved(problem.arguments[name], pad, offset) for name in names}
        assert all(map(same_bits, problem.run(**changes), expected)), names
    out = moved(torch.empty_like(expected[0]), pad, offset)
    assert same_bits(problem.run(out=out)[0], expected[0])


@pytest.mark.parametrize("far", ["page", "slot", "head", "slot_beyond_64_gib"])
@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
def test_strides_beyond_2_32_elements(kind, far, device):
    """Three pages, two slots or two heads, each 2^32 + 64 elements from the last, or so far that
    places counted in 16 bytes have more than 32 bits."""
    distance = 2**32 + 64
    if far == "slot_beyond_64_gib":
        far, distance = "slot", (2**36 + 128) // (2 if kind == "bf16" else 1)
    size = 2 if far == "slot" else 16
    case = Case("far", (1, 1), (size, 2 * size - 1), (4, 2), page_size=size, **KINDS[kind])
    near = Attention(case, device)
    assert near.num_pages == 6
    shape = (3, size, 2, 64)
    strides = {
        "page": (distance, 256, 128, 1),
        "slot": (512, distance, 128, 1),
        "head": (128 * size, 128, distance, 1),
    }[far]
    count = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 128
    memory = huge_tensor((count,), near.caches[0].dtype, device)
    caches = [memory.as_strided(shape, strides, offset) for offset in (0, 64)]
    table, pages = near.table.clone(), iter((2, 0, 1))
    for b, i in ((0, 0), (1, 0), (1, 1)):
        page = next(pages)
        for there, here in zip(caches, near.caches, strict=True):
            raw(there)[page] = raw(here)[int(near.table[b, i])]
        table[b, i] = page
    near.check(*near.run(k_cache=caches[0], v_cache=caches[1], block_table=table))


# What must not be seen

WILD = {"nan": torch.nan, "inf": torch.inf, "minus_inf": -torch.inf, "large": 3e4}


@pytest.mark.parametrize("kind", ["bf16", "fp16", "e5m2", "e4m3"])
@pytest.mark.parametrize("wild", WILD)
def test_what_no_query_may_see(wild, kind, device):
    """Page tails, unused pages and pages behind the window hold infinities, NaN or huge numbers."""
    case = Case("unseen", (1, 7, 1), (900, 333, 65), (8, 2), window=(200, 0), **KINDS[kind])
    problem = Attention(case, device)
    before = problem.run()
    keys = torch.cat([
        torch.arange(n, device=device) >= max(0, n - q_len - 200)
        for n, q_len in zip(case.kv_lens, case.q_lens, strict=True)
    ])  # fmt: skip
    junk = torch.tensor(WILD[wild], device=device).to(problem.memory.dtype)
    raw(problem.memory).fill_(raw(junk))
    problem.write([x[keys] for x in problem.stored], problem.slots()[keys])
    for b, (n, q_len) in enumerate(zip(case.kv_lens, case.q_lens, strict=True)):
        problem.table[b, : max(0, n - q_len - 200) // 16] = 2**31 - 1  # evicted
    assert all(map(same_bits, problem.run(), before))
    problem.check(*before)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "e5m2", "e4m3"])
@pytest.mark.parametrize("wild", ["nan", "inf"])
@pytest.mark.parametrize("q_len", [2, 8, 33])
def test_what_some_rows_of_a_tile_may_see(q_len, wild, kind, device):
    """Wild K and V of keys that some rows of a tile see: rows that do not see them are right."""
    if kind == "e4m3" and wild == "inf":
        pytest.skip("e4m3 has no infinity")
    length, left = 400, 100
    case = Case(f"half_seen{q_len}", (q_len, 1), (length, 70), (8, 2), window=(left, 0),
                **KINDS[kind])  # fmt: skip
    problem = Attention(case, device)
    last = length - 1  # seen by the last row alone
    first = length - q_len - left  # seen by the first row alone
    for side, keys, blind in (
        ("v", [last], slice(0, q_len - 1)),
        ("v", [first], slice(1, q_len)),
        ("k", [last], slice(0, q_len - 1)),
        ("kv", [first, last], slice(1, q_len - 1)),
    ):
        for name, rows in zip("kv", problem.stored, strict=True):
            changed = rows[: case.kv_lens[0]].clone()
            if name in side:
                changed[keys] = torch.tensor(WILD[wild], device=device).to(rows.dtype)
            slots = problem.slots()[: case.kv_lens[0]]
            raw(problem.caches["kv".index(name)])[slots // 16, slots % 16] = raw(changed)
        out, lse = problem.run()
        indices = [*range(q_len)[blind], q_len]  # and the other sequence
        problem.check(out, lse, indices)
        seeing = sorted({*range(q_len)} - {*range(q_len)[blind]})
        assert not torch.isfinite(out[seeing].float()).all(), "the test has shown nothing"


def test_wild_queries_stay_in_their_rows(device):
    """A NaN in one query: the other rows of its tile are right."""
    case = Case("wild_query", (5, 3), (300, 90), (8, 2))
    problem = Attention(case, device)
    problem.arguments["q"][2, 3] = torch.nan
    out, lse = problem.run()
    rows = [0, 1, 3, 4, 5, 6, 7]
    problem.check(out, lse, rows)
    heads = [0, 1, 2, 4, 5, 6, 7]
    wrong, low = (x[0][2, heads].cpu().numpy() for x in (problem.expected, problem.low_precision))
    reference.assert_close(out[2, heads].double().cpu().numpy(), wrong, low)


# Large batches


@on_a_gpu
@pytest.mark.parametrize("batch", [65_535, 65_536, 70_000])
@pytest.mark.parametrize("options", [{}, {"num_splits": 1}, {"batch_invariant": True}], ids=str)
def test_large_batches(options, batch):
    """0 to 99 keys each, over shared pages; every row against fp32."""
    random = torch.Generator(DEVICE).manual_seed(batch)
    normal = functools.partial(torch.randn, device=DEVICE, generator=random)
    q, caches = normal(batch, 4, 64).bfloat16(), normal(2, 500, 16, 2, 64).bfloat16()
    table = torch.randint(0, 500, (batch, 7), device=DEVICE, generator=random, dtype=torch.int32)
    lens = torch.randint(0, 100, (batch,), device=DEVICE, generator=random, dtype=torch.int32)
    out, lse = pagetile.paged_attention(
        q, *caches, block_table=table, seqused_k=lens, max_seqlen_q=1, max_seqlen_k=99,
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=DEVICE),
        out=torch.full_like(q, torch.nan), return_softmax_lse=True, **options,
    )  # fmt: skip
    for part in torch.arange(batch, device=DEVICE).split(10_000):
        k, v = (cache[table[part].long()].flatten(1, 2).float() for cache in caches)
        score = torch.einsum("bhgd,bkhd->bhgk", q[part].float().view(-1, 2, 2, 64), k) / 8
        seen = torch.arange(112, device=DEVICE) < lens[part, None]
        score = score.masked_fill(~seen[:, None, None], -torch.inf)
        p = score.softmax(-1).nan_to_num(0)
        expected = torch.einsum("bhgk,bkhd->bhgd", p, v).flatten(1, 2)
        torch.testing.assert_close(out[part].float(), expected, atol=2e-2, rtol=2e-2)
        assert (out[part][lens[part] == 0] == 0).all()
        actual = lse[:, part].T.unflatten(1, (2, 2))
        torch.testing.assert_close(actual, score.logsumexp(-1), atol=1e-4, rtol=1e-4)


# Plans made on the device

# fmt: off
PLAN_OPTIONS = {
    "plain": {},
    "window": {"window": (1000, 0)},
    "noncausal_window": {"window": (50, 9), "causal": False},
    "unsplit": {"num_splits": 1},
    "splits4": {"num_splits": 4},
    "invariant": {"batch_invariant": True},
    "invariant_window": {"batch_invariant": True, "window": (3000, 0)},
    "ten_kv_heads": {"num_q_heads": 70, "num_kv_heads": 10},
    "one_kv_head": {"num_q_heads": 8, "num_kv_heads": 1},
    "head_dim256": {"head_dim": 256, "num_kv_heads": 4},
}
# fmt: on


def gpu_of(device) -> dict[str, int | bool]:
    """What of a GPU a plan depends on; the CPU plans for an H200."""
    if device == "cpu":
        return {"num_sms": 132, "has_clusters": True, "has_wgmma": True}
    properties = torch.cuda.get_device_properties(device)
    return {
        "num_sms": properties.multi_processor_count,
        "has_clusters": properties.major >= 9,
        "has_wgmma": (properties.major, properties.minor) == (9, 0),
    }


def check_plan(device, cu_seqlens_q, seqused_k, **options) -> None:
    """The device's plan is plan_on_host's, byte for byte."""
    arguments = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "max_seqlen_q": 0,
                 "max_seqlen_k": 1 << 17, **options}  # fmt: skip
    tensors = {"cu_seqlens_q": int32("cpu", cu_seqlens_q), "seqused_k": int32("cpu", seqused_k)}
    left, right = arguments.pop("window", (-1, -1))
    lanes, shape = _C.attention_plan(
        *tensors.values(), **arguments, window_left=left, window_right=right, **gpu_of(device)
    )
    rows = [x["words"] for x in lanes]
    there = {name: x.to(device) for name, x in tensors.items()}
    plan = pagetile.make_plan(**there, **arguments, window=(left, right), page_size=16)
    assert len(rows) == shape["lanes"]
    tail = [shape["prefill_ctas"], 0, 0, 0] if shape["num_sms"] > 0 else []
    np.testing.assert_array_equal(plan.buffer.cpu().numpy(), [*np.ravel(rows), *tail])


@pytest.mark.parametrize("options", PLAN_OPTIONS)
@pytest.mark.parametrize("batch", [0, 1, 2, 16, 31, 100, 1023, 1024, 1025, 5000, 70_000])
def test_plan_is_the_hosts(batch, options, device):
    for seed in range(1 if batch > 1025 else 4):
        rng = np.random.default_rng([batch, seed])
        lens = (10 ** rng.uniform(0, 5, batch)).astype(int)
        lens[rng.random(batch) < 0.1] = 0
        q_lens = rng.integers(0, 4, batch) if seed % 2 else np.ones(batch, int)
        if seed == 3:
            q_lens[rng.random(batch) < 0.2] = 130
        cu = np.cumsum([0, *q_lens]).tolist()
        bound = max(1, *q_lens, 0) if batch else 1
        check_plan(
            device, cu, lens.tolist(), **{"max_seqlen_q": int(bound), **PLAN_OPTIONS[options]}
        )


@pytest.mark.parametrize("seed", range(12))
def test_plan_of_wrong_metadata_is_the_hosts(seed, device):
    rng = np.random.default_rng(seed)
    for batch in (1, 7, 300, 2000):
        wild = rng.integers(-(2**31), 2**31, 2 * batch + 1)
        small = rng.integers(-50, 50, 2 * batch + 1)
        values = np.where(rng.random(2 * batch + 1) < (0.5, 0.05)[seed % 2], wild, small).tolist()
        options = list(PLAN_OPTIONS.values())[seed % len(PLAN_OPTIONS)]
        check_plan(device, values[batch:], values[:batch], **{"max_seqlen_q": 9, **options})


# fmt: off
REUSED = {
    "plain": {},
    "splits": {"num_splits": 5},
    "window": {"window": (1500, 0)},
    "noncausal": {"causal": False, "window": (2500, 7)},
    "invariant": {"batch_invariant": True},
    "invariant_window": {"batch_invariant": True, "window": (2500, 0)},
    "one_kv_head": {"heads": (8, 1)},
    "fp8": {**E4M3},
}
LENGTHS = {
    "made_for": (9000, 300, 2100, 1, 4100),
    "one_more": (9001, 301, 2101, 2, 4101),
    "longest": (12_000, 9000, 9000, 3000, 12_000),
    "shortest": (5, 1, 0, 1, 3),
    "other_order": (300, 9000, 5, 3000, 700),
    "a_tile_less": (8967, 257, 2048, 0, 4096),
}
# fmt: on


@on_a_gpu
@pytest.mark.parametrize("options", REUSED)
@pytest.mark.parametrize("made_for", ["made_for", "shortest", "longest"])
def test_plan_serves_other_lengths(made_for, options):
    """A31: right, whatever was added or is gone since the plan was made; and no state is left."""
    case = Case(
        f"reused_{options}",
        (1, 3, 1, 2, 1),
        LENGTHS["longest"],
        **{"heads": (8, 2), **REUSED[options]},
    )
    problem = Attention(case)
    workspace = problem.workspace()
    mine = problem.with_lens(LENGTHS[made_for])
    plan = mine.plan()
    before = mine.run(plan=plan, workspace=workspace)
    mine.check(*before)
    for lens in LENGTHS.values():
        other = problem.with_lens(lens)
        for _ in range(3):
            other.check(*other.run(plan=plan, workspace=workspace))
    assert all(map(same_bits, mine.run(plan=plan, workspace=workspace), before))


@on_a_gpu
@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
def test_plan_serves_other_lengths_in_clusters(kind):
    problem = Attention(Case(f"reused_cluster_{kind}", (2,), (9000,), (32, 8), **KINDS[kind]))
    workspace = problem.workspace()
    lengths = (9000, 1, 0, 40, 2500, 8999)
    for made_for in lengths:
        plan = problem.with_lens((made_for,)).plan()
        for length in lengths:
            other = problem.with_lens((length,))
            other.check(*other.run(plan=plan, workspace=workspace))


@on_a_gpu
def test_more_queries_than_a_cluster_was_planned_for():
    """max_seqlen_q is a bound that nobody can check: what it cuts off is computed all the same."""
    problem = Attention(Case("unbounded_cluster", (9,), (700,), (32, 8)))
    problem.check(*problem.run(max_seqlen_q=1))


def test_plan_of_a_padded_batch(device):
    """Sequences without queries at the end, and rows behind them that nobody writes."""
    case = Case(
        "padded", (1,) * 9 + (0,) * 40, (3000,) * 9 + (0,) * 40, (8, 2), out="given", spare_rows=40
    )
    problem, out, lse = attend(case, device)
    assert all(map(same_bits, problem.run(plan=problem.plan()), (out, lse)))


# The same bits


# fmt: off
SPLIT = [
    Case("again_dealt", (1, 1), (9000, 700), (32, 8), **D128),
    Case("again_cluster", (2,), (9000,), (32, 8), **D128),
    Case("again_even", (1,) * 60, (40_000, *[300] * 59), (32, 8), **D128),
    Case("again_splits", (1, 3), (9000, 9000), (8, 2), num_splits=7, **D128),
    Case("again_window", (1, 8), (9000, 9000), (8, 2), window=(4000, 0), **D128),
    Case("again_fp8", (1, 4), (9000, 7000), (32, 8), **D128, **E4M3),
    Case("again_invariant", (1, 4), (9000, 7000), (32, 8), batch_invariant=True, **D128),
    Case("again_head_dim256", (1, 4), (9000, 7000), (8, 4), (256, 256)),
    Case("again_one_kv_head", (1,), (30_000,), (8, 1), **D128),
]
# fmt: on


@on_a_gpu
@pytest.mark.parametrize("case", SPLIT, ids=lambda case: case.name)
def test_twenty_runs_are_the_same(case):
    """Whichever piece comes last: alone on the GPU, and beside kernels that take SMs away."""
    problem, *expected = attend(case)
    side, x = torch.cuda.Stream(), torch.randn(1024, 1024, device=DEVICE)
    for i in range(20):
        if i >= 10:
            with torch.cuda.stream(side):
                for _ in range(i % 4):
                    x = torch.tanh(x @ x)
        assert all(map(same_bits, problem.run(), expected))


# fmt: off
INVARIANT = {
    "mha": {"heads": (4, 4)},
    "gqa": {"heads": (8, 2)},
    "group16": {"heads": (16, 1)},
    "head_dim128": {"heads": (32, 8), **D128},
    "head_dim256": {"heads": (4, 2), "head_dim": (256, 256)},
    "head_dim192_128": {"heads": (4, 2), "head_dim": (192, 128)},
    "fp8": {"heads": (8, 2), **E4M3, "scales": "heads", **D128},
    "fp8_query": {"heads": (8, 2), **E4M3, "dtype": "float8_e4m3fn", **D128},
    "page5": {"heads": (8, 2), "page_size": 5},
    "window": {"heads": (8, 2), "window": (2500, 0)},
    "alibi_sinks_softcap": {"heads": (8, 2), "alibi": "heads", "sinks": "float32", "softcap": 9.0},
}
# fmt: on


@pytest.mark.parametrize("options", INVARIANT)
def test_invariant_alone_and_in_batches(options, device):
    """A sequence alone, in batches of other sizes, at other places, padded, with other bounds."""
    lens, q_lens = (9000, 1, 2048, 2049, 333, 4100), (1, 1, 5, 1, 2, 1)
    case = Case(f"batches_{options}", q_lens, lens, batch_invariant=True, **INVARIANT[options])
    problem, out, lse = attend(case, device)
    again = functools.partial(problem.run, return_softmax_lse=True)
    for n in (1, 2, 7):
        assert all(map(same_bits, again(num_splits=n), (out, lse)))
    for bounds in ({"max_seqlen_k": 100_000}, {"max_seqlen_k": None}, {"max_seqlen_q": 70}):
        assert all(map(same_bits, again(**bounds), (out, lse)))
    for b in range(len(lens)):
        expected = problem.of(b, out, lse)
        assert all(map(same_bits, problem.alone(b), expected))
        assert all(map(same_bits, problem.alone(b, num_splits=3, max_seqlen_k=20_000), expected))
    order = [4, 0, 0, 3, 5, 0, 1] * 9  # the long one several times, and among many
    rows = [torch.arange(problem.cu[b], problem.cu[b + 1], device=device) for b in order]
    pad = 30
    cu = list(itertools.accumulate(map(len, rows), initial=0))
    others = problem.run(
        q=raw(problem.arguments["q"])[torch.cat(rows)].view(problem.arguments["q"].dtype),
        block_table=torch.cat([problem.table[order], problem.table[:1].expand(pad, -1)]),
        seqused_k=int32(device, [lens[b] for b in order] + [0] * pad),
        cu_seqlens_q=int32(device, cu + [cu[-1]] * pad),
    )
    for place, b in enumerate(order):
        part = slice(cu[place], cu[place + 1])
        expected = problem.of(b, out, lse)
        assert all(map(same_bits, (others[0][part], others[1][:, part]), expected))


@pytest.mark.parametrize("options", INVARIANT)
def test_invariant_in_chunks(options, device):
    """A query whole, in chunks, and row by row, each over the keys up to its end: the same bits.

    On a GPU among chunks of one kernel; a chunk of the other one is right.
    """
    q_len, kv_len = 150, 4300
    case = Case(
        f"chunks_{options}", (q_len,), (kv_len,), batch_invariant=True, **INVARIANT[options]
    )
    problem, out, lse = attend(case, device)
    group = case.heads[0] // case.heads[1]
    chunks = [(0, 100), (66, 133), (100, 101), (101, 150), (0, 1), (31, 33), (149, 150), (7, 30)]
    for begin, end in chunks:
        part = problem.alone(0, (begin, end), kv_len - q_len + end)
        if one_kernel(device, group, q_len, end - begin):
            assert same_bits(part[0], out[begin:end]), (begin, end)
            assert same_bits(part[1], lse[:, begin:end]), (begin, end)
            continue
        problem.check(*pasted((out, lse), part, begin))
        for row in range(begin, end, 7):
            one = problem.alone(0, (row, row + 1), kv_len - q_len + row + 1)
            assert same_bits(one[0][0], part[0][row - begin]), (begin, end, row)
            assert same_bits(one[1][:, 0], part[1][:, row - begin]), (begin, end, row)


# Workspaces

# fmt: off
SHARING = [
    Case("share_decode", (1, 1, 1), (5000, 90, 1200), (32, 8), **D128),
    Case("share_mqa", (1, 3), (6000, 1000), (8, 1), **D128),
    Case("share_mha", (1, 9), (2000, 3000), (16, 16)),
    Case("share_wide", (2, 1), (4000, 700), (8, 4), (256, 256)),
    Case("share_invariant", (1, 2), (9000, 4500), (8, 2), batch_invariant=True),
    Case("share_fp8", (1, 40), (6000, 600), (20, 4), **D128, **E4M3),
    Case("share_heads66", (1,), (3000,), (66, 66)),
    Case("share_heads7", (1, 1), (3000, 5000), (28, 7)),
]
# fmt: on


@on_a_gpu
@pytest.mark.parametrize("planned", [False, True], ids=["by_itself", "planned"])
def test_shapes_share_a_workspace(planned):
    """One after the other, in turn, with what each leaves behind: counters are all that is kept."""
    problems = [Attention(case) for case in SHARING]
    plans = [{"plan": p.plan()} if planned else {} for p in problems]
    alone = []
    for problem, plan in zip(problems, plans, strict=True):
        alone.append(problem.run(workspace=problem.workspace(), **plan))
        problem.check(*alone[-1])
    shared = max((p.workspace() for p in problems), key=len)
    order = [*range(len(SHARING)), *range(len(SHARING) - 1, -1, -1), 0, 0, 3, 3, 4, 4]
    for i in order * 3:
        outs = problems[i].run(workspace=shared, **plans[i])
        assert all(map(same_bits, outs, alone[i])), SHARING[i].name


@on_a_gpu
@pytest.mark.parametrize("case", SHARING, ids=lambda case: case.name)
def test_workspace_may_hold_anything_but_in_its_counters(case):
    """What a call has written may be overwritten with NaN; what it left zero is what must be."""
    problem = Attention(case)
    workspace = problem.workspace()
    expected = problem.run(workspace=workspace)
    for _ in range(3):
        workspace[workspace != 0] = 0xFF
        assert all(map(same_bits, problem.run(workspace=workspace), expected))


@on_a_gpu
def test_no_byte_behind_the_workspace_is_written():
    for case in SHARING:
        problem = Attention(case)
        size = len(problem.workspace())
        guarded = torch.full((size + 4096,), 0x5A, dtype=torch.uint8, device=DEVICE)
        guarded[:size] = 0
        problem.check(*problem.run(workspace=guarded[:size]))
        assert (guarded[size:] == 0x5A).all(), case.name


# Graphs


class Decode:
    """A step of an engine in tensors that stay: pages, queries, metadata, plan, workspace, out."""

    MOST = 40  # sequences
    LONGEST = 6000  # keys
    PAGES = 2500

    def __init__(self, kind="bf16", batch_invariant=False, workspace="own", seed=0) -> None:
        random = torch.Generator(DEVICE).manual_seed(crc(kind) + seed)
        normal = functools.partial(torch.randn, device=DEVICE, generator=random)
        case = Case("graph", **KINDS[kind])
        caches = [normal(self.PAGES, 16, 4, 64).to(getattr(torch, case.kv)) for _ in "kv"]
        q = normal(3 * self.MOST, 16, 64).to(getattr(torch, case.dtype))
        self.out = torch.empty_like(q)
        self.lse = torch.empty(16, len(q), device=DEVICE)
        self.metadata = {
            "seqused_k": int32(DEVICE, [self.LONGEST] * self.MOST),
            "cu_seqlens_q": int32(DEVICE, [3 * i for i in range(self.MOST + 1)]),
            "block_table": int32(DEVICE, [[0] * -(-self.LONGEST // 16)] * self.MOST),
        }
        if case.cache_dtype:
            self.metadata["k_scale"] = torch.ones(4, device=DEVICE)
            self.metadata["v_scale"] = torch.ones((), device=DEVICE)
        sizes = {
            "max_seqlen_q": 3,
            "max_seqlen_k": self.LONGEST,
            "batch_invariant": batch_invariant,
        }
        heads = {"num_q_heads": 16, "num_kv_heads": 4, "head_dim": 64}
        self.workspace = None
        if workspace == "given":
            size = pagetile.workspace_size(**sizes, **heads, device=DEVICE)
            self.workspace = torch.zeros(2 * size, dtype=torch.uint8, device=DEVICE)
        self.attention = functools.partial(
            pagetile.paged_attention, q, *caches, out=self.out, softmax_lse=self.lse,
            workspace=self.workspace, **sizes, **self.metadata,
        )  # fmt: skip
        lengths = {name: self.metadata[name] for name in ("seqused_k", "cu_seqlens_q")}
        self.make_plan = functools.partial(
            pagetile.make_plan, page_size=16, **sizes, **heads, **lengths
        )
        self.plan = self.make_plan()
        self.steps = self._steps(np.random.default_rng(seed))

    def __call__(self, planned: bool) -> None:
        if planned:
            self.attention(plan=self.make_plan(out=self.plan))
        else:
            self.attention()

    def _steps(self, rng) -> list[dict]:
        """Fewer sequences, others, padding, lengths of 0, tables, scales."""
        steps = []
        for batch in (40, 1, 7, 0, 23, 40):
            lens, q_lens = np.zeros((2, self.MOST), int)
            lens[:batch] = 10 ** rng.uniform(0, 3.7, batch)
            lens[rng.random(self.MOST) < 0.1] = 0
            q_lens[:batch] = rng.integers(0 if batch > 7 else 1, 4, batch)
            table = rng.integers(0, self.PAGES, tuple(self.metadata["block_table"].shape))
            values = {
                "seqused_k": lens,
                "cu_seqlens_q": np.cumsum([0, *q_lens]),
                "block_table": table,
                "k_scale": rng.uniform(0.3, 2, 4),
                "v_scale": rng.uniform(0.3, 2, ()),
            }
            steps.append({n: torch.from_numpy(values[n]).to(x) for n, x in self.metadata.items()})
        return steps

    def fill(self, step) -> None:
        """The step's metadata into the tensors that stay; the results become NaN."""
        for name, value in step.items():
            self.metadata[name].copy_(value)
        raw(self.out).fill_(-1)
        raw(self.lse).fill_(-1)

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        return raw(self.out).clone(), raw(self.lse).clone()

    def mistakes(self, expected) -> torch.Tensor:
        """How many elements are not those; does not wait."""
        actual = raw(self.out), raw(self.lse)
        return sum((a != e).sum() for a, e in zip(actual, expected, strict=True))

    def check(self) -> None:
        """Against the CPU backend on the same tensors; what no sequence covers is still NaN."""
        there = {n: x.cpu() if isinstance(x, torch.Tensor) else x
                 for n, x in self.attention.keywords.items()}  # fmt: skip
        raw(there["out"]).fill_(-1)
        raw(there["softmax_lse"]).fill_(-1)
        pagetile.paged_attention(*(x.cpu() for x in self.attention.args), **there)
        for x, name, tolerance in ((self.out, "out", 1e-2), (self.lse, "softmax_lse", 1e-4)):
            torch.testing.assert_close(x.cpu(), there[name], atol=tolerance, rtol=tolerance,
                                       equal_nan=True)  # fmt: skip

    def expectations(self, planned: bool) -> list:
        """Of each step, by calls that are not captured."""
        expected = []
        for step in self.steps:
            self.fill(step)
            self(planned)
            self.check()
            expected.append(self.results())
        return expected


def make_calls_that_raise(decode: Decode) -> None:
    """Refused before anything is launched."""
    for text, arguments in (
        ("plan was made for num_splits 2, got 0", {"plan": decode.make_plan(num_splits=2)}),
        ("workspace must have", {"workspace": torch.zeros(16, dtype=torch.uint8, device=DEVICE)}),
        ("block_table must be int32", {"block_table": decode.metadata["block_table"].long()}),
    ):
        with pytest.raises(ValueError, match=f"^paged_attention: {text}"):
            decode.attention(**arguments)


@on_a_gpu
@pytest.mark.parametrize("workspace", ["given", "own"])
@pytest.mark.parametrize("planned", [False, True], ids=["by_itself", "planned"])
@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
@pytest.mark.parametrize("invariant", [False, True], ids=["plain", "invariant"])
def test_graph_replays(invariant, kind, planned, workspace):
    """Captured with the largest batch, replayed 1,000 times with others, and calls in between.

    A28, A30, A32: other lengths, tables, scales; padding; eager calls of the same and of another
    shape over the same workspace; calls that raise.
    """
    decode = Decode(kind, invariant, workspace)
    other = Attention(Case("between", (1, 3), (3000, 70), (8, 2)))
    other_workspace = {}
    if workspace == "given":
        assert len(other.workspace()) <= len(decode.workspace)
        other_workspace = {"workspace": decode.workspace}
    other_expected = other.run(**other_workspace)
    other.check(*other_expected)
    decode.fill(decode.steps[0])
    graph = captured(lambda: decode(planned))
    expected = decode.expectations(planned)
    rng = np.random.default_rng(1)
    mistakes = torch.zeros((), dtype=torch.long, device=DEVICE)
    for i in range(1000 if workspace == "given" else 200):
        step = rng.integers(len(expected))
        decode.fill(decode.steps[step])
        graph.replay()
        mistakes += decode.mistakes(expected[step])
        if i % 5 == 0:
            outs = other.run(**other_workspace)
            mistakes += sum(
                (raw(a) != raw(e)).sum() for a, e in zip(outs, other_expected, strict=True)
            )
        if i % 7 == 0:
            raw(decode.out).fill_(-1)
            raw(decode.lse).fill_(-1)
            decode(not planned)
            mistakes += decode.mistakes(expected[step])
        if i % 100 == 0:
            make_calls_that_raise(decode)
    assert mistakes.item() == 0


@on_a_gpu
def test_one_plan_for_the_layers_of_a_graph():
    """As an engine captures a step: the plan once, 24 layers that use it."""
    first = Decode(workspace="given")
    layers = [first] + [Decode(seed=seed, workspace="given") for seed in range(1, 24)]
    for layer in layers[1:]:
        layer.metadata = first.metadata
        layer.attention.keywords.update(first.metadata, workspace=first.workspace)

    def step():
        first.make_plan(out=first.plan)
        for layer in layers:
            layer.attention(plan=first.plan)

    graph = captured(step)
    for metadata in first.steps:
        for layer in layers:
            layer.fill(metadata)
        graph.replay()
        results = [layer.results() for layer in layers]
        for layer, result in zip(layers, results, strict=True):
            layer.fill({})
            layer.attention()
            assert layer.mistakes(result).item() == 0
    first.check()


FIRST_CALL = """
import pagetile, torch
lens = torch.tensor([5000, 70], device="cuda", dtype=torch.int32)
table = torch.arange(2 * 313, device="cuda", dtype=torch.int32).view(2, -1)
caches = torch.randn(2, 2 * 313, 16, 2, 64, device="cuda").half()
q = torch.randn(2, 8, 64, device="cuda").half()
cu = torch.arange(3, device="cuda", dtype=torch.int32)
out = torch.zeros_like(q)
call = lambda: pagetile.paged_attention(
    q, *caches, block_table=table, seqused_k=lens, cu_seqlens_q=cu, max_seqlen_q=1, out=out
)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    call()
assert not out.any(), "a capture has written"
for _ in range(3):
    out.zero_()
    graph.replay()
    replayed = out.clone()
    assert out.any() and torch.equal(replayed, call())
print("right")
"""


@on_a_gpu
def test_the_first_call_of_a_process_may_be_captured():
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True,
                          timeout=300, check=False)  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "right"), done.stderr


@on_a_gpu
@pytest.mark.parametrize("workspace", ["given", "own"])
@pytest.mark.parametrize("planned", [False, True], ids=["by_itself", "planned"])
def test_calls_allocate_nothing(planned, workspace):
    decode = Decode(workspace=workspace)
    decode(planned)
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    free, _ = torch.cuda.mem_get_info()
    for _ in range(100):
        decode(planned)
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    assert torch.cuda.mem_get_info()[0] == free


# Streams


def captured_on(stream, call) -> torch.cuda.CUDAGraph:
    """As captured, but on a stream that has a workspace of its own."""
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
    return graph


@on_a_gpu
@pytest.mark.parametrize("how", ["eager", "graphs"])
@pytest.mark.parametrize("workspace", ["given", "own"])
@pytest.mark.parametrize("planned", [False, True], ids=["by_itself", "planned"])
def test_two_streams_at_once(planned, workspace, how):
    """Each with a workspace of its own, given or kept by the library for the stream."""
    decodes = [Decode(kind, workspace=workspace) for kind in ("bf16", "e4m3")]
    expected = [decode.expectations(planned) for decode in decodes]
    streams = [torch.cuda.Stream() for _ in decodes]
    calls = [functools.partial(decode, planned) for decode in decodes]
    torch.cuda.synchronize()
    if how == "graphs":
        calls = [
            captured_on(stream, call).replay for stream, call in zip(streams, calls, strict=True)
        ]
    mistakes = [torch.zeros((), dtype=torch.long, device=DEVICE) for _ in decodes]
    torch.cuda.synchronize()
    for i in range(200):
        for j, (decode, stream, call) in enumerate(zip(decodes, streams, calls, strict=True)):
            step = (i + j) % len(decode.steps)
            with torch.cuda.stream(stream):
                decode.fill(decode.steps[step])
                call()
                mistakes[j] += decode.mistakes(expected[j][step])
    torch.cuda.synchronize()
    assert [x.item() for x in mistakes] == [0, 0]


@on_a_gpu
@pytest.mark.parametrize("planned", [False, True], ids=["by_itself", "planned"])
@pytest.mark.parametrize("how", ["current", "object", "address", "event"])
def test_everything_may_be_late(how, planned):
    """A48: queries, caches, metadata and scales that a busy stream makes; no call waits."""
    case = Case("late", (1, 3), (3000, 70), (8, 2), scales="heads", **E4M3)
    now, late = (Attention(replace(case, seed=seed)) for seed in (0, 1))
    expected = late.run()
    late.check(*expected)
    out = torch.empty_like(expected[0])
    plan = now.plan() if planned else None
    names = ("q", "seqused_k", "block_table", "k_scale", "v_scale")
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for stream in (side, other):  # what loads a kernel or makes a workspace may wait
        now.run(stream=stream, plan=plan)
    torch.cuda.synchronize()
    now.arguments["seqused_k"].zero_()
    raw(now.memory).fill_(-1 if now.memory.dtype.itemsize > 1 else 255)
    now.arguments["q"].zero_()
    run = functools.partial(now.run, out=out, return_softmax_lse=False)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        keep_busy()
        raw(now.memory).copy_(raw(late.memory))
        for name in names:
            now.arguments[name].copy_(late.arguments[name])
        if planned:
            late.plan(out=plan)
        made = torch.cuda.Event()
        made.record()
        if how == "current":
            run(plan=plan)
    if how == "object":
        run(plan=plan, stream=side)
    elif how == "address":
        run(plan=plan, stream=side.cuda_stream)
    elif how == "event":
        other.wait_event(made)
        with torch.cuda.stream(other):
            run(plan=plan)
    assert not made.query(), "the call has waited"
    side.synchronize()
    other.synchronize()
    assert same_bits(out, expected[0])


@on_a_gpu
def test_cupy_arrays_on_a_stream_of_cupy():
    cupy = pytest.importorskip("cupy")
    problem = Attention(Case("cupy", (1, 3), (3000, 70), (8, 2), dtype="float16"))
    expected = problem.run()
    arrays = {n: cupy.asarray(x) if isinstance(x, torch.Tensor) else x
              for n, x in problem.arguments.items()}  # fmt: skip
    side = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with side:
        out = pagetile.paged_attention(**arrays)
    side.synchronize()
    assert isinstance(out, cupy.ndarray)
    np.testing.assert_array_equal(cupy.asnumpy(out), expected[0].cpu().numpy())


# Programmatic dependent launch


@on_a_gpu
@pytest.mark.parametrize("planned", [False, True], ids=["by_itself", "planned"])
@pytest.mark.parametrize("case", SPLIT[:5], ids=lambda case: case.name)
def test_pdl_computes_the_same(case, planned):
    problem = Attention(case)
    plan = problem.plan() if planned else None
    expected = problem.run(plan=plan)
    for _ in range(3):
        assert all(map(same_bits, problem.run(plan=plan, pdl=True), expected))


class Layers:
    """Layers of cache_write and paged_attention, each fed with what the one before has left.

    A read before the last kernel's end, or a write while others still read, changes the last bits.
    """

    def __init__(self, batch, length, kind, q_len=1, layers=16) -> None:
        case = Case("layers", **KINDS[kind])
        random = torch.Generator(DEVICE).manual_seed(batch)
        normal = functools.partial(torch.randn, device=DEVICE, generator=random)
        tokens, pages = batch * q_len, -(-length // 16)
        shape = (layers, 2, batch * pages, 16, 4, 64)
        self.filled = normal(shape).to(getattr(torch, case.kv))
        self.caches = self.filled.clone()
        self.start = normal(tokens, 16, 64).to(getattr(torch, case.dtype))
        self.outs = torch.empty(layers, tokens, 16, 64, dtype=self.start.dtype, device=DEVICE)
        table = torch.randperm(batch * pages, device=DEVICE, generator=random).int()
        self.table = table.view(batch, pages)
        last = torch.arange(length - q_len, length, device=DEVICE)
        self.slots = (self.table[:, last // 16].long() * 16 + last % 16).flatten()
        lengths = {
            "seqused_k": int32(DEVICE, [length] * batch),
            "cu_seqlens_q": int32(DEVICE, [q_len * i for i in range(batch + 1)]),
            "max_seqlen_q": q_len,
            "max_seqlen_k": length,
        }
        self.arguments = {**lengths, "block_table": self.table}
        if case.cache_dtype:
            self.scales = {n: torch.full((4,), 0.02, device=DEVICE) for n in ("k_scale", "v_scale")}
        else:
            self.scales = {}
        self.plan = pagetile.make_plan(
            **lengths, num_q_heads=16, num_kv_heads=4, head_dim=64, page_size=16
        )

    def __call__(self, pdl: bool, planned: bool) -> None:
        x = self.start
        plan = self.plan if planned else None
        for caches, out in zip(self.caches, self.outs, strict=True):
            pagetile.cache_write(x[:, :4], x[:, 4:8], *caches, self.slots, pdl=pdl, **self.scales)
            pagetile.paged_attention(
                x, *caches, out=out, plan=plan, pdl=pdl, **self.arguments, **self.scales
            )
            x = out

    def results(self, call) -> tuple[torch.Tensor, torch.Tensor]:
        """After a kernel that nobody depends on, the caches as they were."""
        self.caches.view(torch.uint8).copy_(self.filled.view(torch.uint8))
        raw(self.outs).fill_(-1)
        torch.cuda.synchronize()
        call()
        torch.cuda.synchronize()
        return raw(self.outs).clone(), raw(self.caches).clone()


@on_a_gpu
@pytest.mark.uses("paged_attention", "cache_write")
@pytest.mark.parametrize("planned", [False, True], ids=["by_itself", "planned"])
@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
@pytest.mark.parametrize(
    ("batch", "length", "q_len"), [(1, 100, 1), (1, 5000, 1), (16, 1000, 1), (5, 700, 4)]
)
def test_pdl_chain_of_writes_and_attention(batch, length, q_len, kind, planned):
    layers = Layers(batch, length, kind, q_len)
    expected = layers.results(lambda: layers(False, planned))
    assert torch.isfinite(layers.outs.float()).all()
    assert not torch.equal(expected[1], raw(layers.filled))
    for _ in range(3):
        actual = layers.results(lambda: layers(True, planned))
        assert all(map(torch.equal, actual, expected))
    graph = captured(lambda: layers(True, planned))
    for _ in range(5):
        assert all(map(torch.equal, layers.results(graph.replay), expected))


# Two GPUs


@needs_gpus(2)
@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("planned", [False, True], ids=["by_itself", "planned"])
def test_the_tensors_say_which_gpu(planned, current):
    """The current device is no matter and stays what it was."""
    here, there = (Attention(Case("gpus", (1, 3), (3000, 70), (8, 2)), f"cuda:{i}") for i in (0, 1))
    expected = here.run()
    with torch.cuda.device(current):
        for problem in (there, here):
            plan = problem.plan() if planned else None
            out, lse = problem.run(plan=plan)
            assert torch.cuda.current_device() == current
            assert out.device == problem.arguments["q"].device
            problem.check(out, lse)
            assert all(map(same_bits, (x.cpu() for x in (out, lse)), (x.cpu() for x in expected)))
