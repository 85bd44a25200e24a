"""Named problems: one attention or one cache write each, the same for every backend."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np


def crc(text: str) -> int:
    return zlib.crc32(text.encode())


@dataclass(frozen=True)
class Case:
    """One paged_attention call. Lengths are by sequence, heads are (query, KV), dims are (K, V)."""

    name: str
    q_lens: tuple[int, ...] = (1, 5, 0, 12)
    kv_lens: tuple[int, ...] = (17, 33, 8, 40)
    heads: tuple[int, int] = (4, 2)
    head_dim: tuple[int, int] = (64, 64)
    page_size: int = 16
    dtype: str = "bfloat16"
    cache_dtype: str | None = None  # None: as q
    uint8: bool = False  # an fp8 cache held as uint8 and named by kv_dtype
    storage: str = "nhd"  # see STORAGES
    scales: str | None = None  # one, heads, batch_heads, expanded
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    softmax_scale: float | None = None
    alibi: str | None = None  # heads, batch_heads
    sinks: str | None = None  # a dtype
    num_splits: int = 0
    batch_invariant: bool = False
    table_pad: int = 0  # block_table row stride - width
    q_layout: str = "dense"  # dense, fused_qkv, heads_first
    out: str = "new"  # new, given, strided
    first_row: int = 0  # rows of q before and after the batch belong to no sequence
    spare_rows: int = 0
    page_order: str = "shuffled"  # shuffled, descending
    seed: int = 0

    @property
    def kv(self) -> str:
        return self.cache_dtype or self.dtype

    @property
    def out_dtype(self) -> str:
        return "bfloat16" if self.dtype.startswith("float8") else self.dtype

    def rng(self, stream: str) -> np.random.Generator:
        """What is drawn from one stream does not depend on the others."""
        return np.random.default_rng([*map(crc, (self.name, stream)), self.seed])


# How K and V lie in memory, written as the order of (page, slot, head, dim) and what is between.
STORAGES = (
    "nhd",  # two dense tensors
    "hnd",  # two dense tensors [page, head, slot, dim], passed with layout="HND"
    "transposed",  # the same memory, passed as an NHD view
    "packed",  # one tensor [page, slot, head, Dk + Dv]
    "packed_hnd",  # one tensor [page, head, slot, Dk + Dv], passed with layout="HND"
    "interleaved",  # one tensor [page, 2, slot, head, dim]; K and V are [:, 0] and [:, 1]
    "halves",  # one tensor [2, page, slot, head, dim]
    "layers",  # one tensor [page, 3 layers, K then V]; the middle layer is used
    "padded",  # rows of dim + 3, so that no row is aligned
    "offset",  # dense, but the first element is an odd one
)


def lengths(name: str, kv_lens, page_size, **more) -> Case:
    return Case(name, (1,) * len(kv_lens), tuple(kv_lens), page_size=page_size, **more)


def _lengths() -> list[Case]:
    edges = lambda size: (0, 1, 2, size - 1, size, size + 1, 2 * size, 2 * size + 1)  # noqa: E731
    return [
        *(lengths(f"decode_page{s}_edges", edges(s), s) for s in (7, 16, 64)),
        lengths("decode_page1_edges", (0, 1, 2, 3, 31, 32, 33), 1),
        lengths("decode_page528_edges", (0, 1, 527, 528, 529), 528),
        lengths("decode_one_token", (1,), 16),
        lengths("decode_long", (1500, 1, 700), 16, heads=(8, 2)),
        Case("prefill_whole", (17, 100), (17, 100)),
        Case("prefill_chunks", (17, 100, 2), (64, 163, 530), page_size=64),
        Case("prefill_page1", (17, 33), (40, 33), page_size=1),
        Case("prefill_page7", (17, 33), (40, 33), page_size=7),
        Case("prefill_page528", (17, 100), (528, 600), page_size=528),
        Case("ragged_with_empties", (0, 1, 0, 17, 2, 0), (5, 0, 0, 17, 31, 0)),
        Case("all_empty", (0, 0), (0, 0)),
        Case("no_keys", (1, 5, 17), (0, 0, 0)),
        Case("q_longer_than_kv", (8, 5, 20, 1), (5, 0, 1, 0)),
        Case("q_longer_than_kv_noncausal", (8, 5, 20), (5, 0, 1), causal=False),
        Case("noncausal", (17, 1, 33), (40, 7, 33), causal=False),
        Case("spare_rows", (3, 1), (20, 4), first_row=2, spare_rows=5),
        Case("spare_rows_given_out", (3, 0, 1), (20, 4, 0), first_row=2, spare_rows=5, out="given"),
    ]


def _shapes() -> list[Case]:
    groups = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 20, 64)
    head_dims = (8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128)
    wide = (136, 144, 160, 168, 176, 184, 192, 200, 216, 224, 240, 248, 256)
    return [
        *(Case(f"group{g}", (1, 5), (17, 40), heads=(g * 2, 2), head_dim=(32, 32)) for g in groups),
        Case("group_of_one_kv_head", (1, 6), (17, 40), heads=(5, 1)),
        *(Case(f"head_dim{d}", (1, 6), (17, 40), head_dim=(d, d)) for d in head_dims + wide),
        Case("head_dim192_128", (1, 17), (40, 33), head_dim=(192, 128)),
        Case("head_dim64_40", (1, 17), (40, 33), head_dim=(64, 40)),
        Case("head_dim40_64", (1, 17), (40, 33), head_dim=(40, 64)),
        Case("head_dim256_8", (1, 17), (40, 33), head_dim=(256, 8)),
        *(Case(f"dtype_{t}", (1, 17), (40, 33), dtype=t) for t in ("float32", "float16")),
        Case("float32_long", (1, 33), (900, 300), dtype="float32", heads=(8, 2)),
        *(Case(f"softmax_scale{x}", (1, 9), (17, 40), softmax_scale=x) for x in (0.0, 0.03, 1.0)),
    ]


def _storages() -> list[Case]:
    apart = [s for s in STORAGES if s not in ("interleaved", "halves")]
    return [
        *(Case(f"{s}_bf16", storage=s) for s in STORAGES),
        *(Case(f"{s}_fp16_page7", storage=s, dtype="float16", page_size=7) for s in STORAGES),
        *(Case(f"{s}_192_128", storage=s, head_dim=(192, 128)) for s in apart),
        *(
            Case(f"{s}_e4m3", storage=s, cache_dtype="float8_e4m3fn", scales="heads")
            for s in STORAGES
        ),
        Case("one_kv_head_hnd", heads=(5, 1), storage="hnd"),
        Case("one_slot_pages_hnd", page_size=1, storage="hnd"),
        Case("table_stride", table_pad=5),
        Case("q_fused_qkv", q_layout="fused_qkv"),
        Case("q_heads_first", q_layout="heads_first"),
        Case("out_given", out="given"),
        Case("out_strided", out="strided"),
        Case("out_strided_fp32", out="strided", dtype="float32", q_layout="fused_qkv"),
    ]


def _fp8() -> list[Case]:
    cases = []
    for short, cache in (("e4m3", "float8_e4m3fn"), ("e5m2", "float8_e5m2")):
        for dtype in ("bfloat16", "float16", "float32"):
            more = {"dtype": dtype, "cache_dtype": cache}
            cases += [
                Case(f"{short}_{dtype}_unscaled", **more),
                Case(f"{short}_{dtype}_scale", scales="one", uint8=True, **more),
                Case(f"{short}_{dtype}_scale_heads", scales="heads", storage="packed", **more),
            ]
        more = {"dtype": cache, "cache_dtype": cache}
        cases += [
            Case(f"{short}_query", **more),
            Case(f"{short}_query_scale", scales="one", **more),
            Case(f"{short}_query_scale_heads", scales="heads", out="given", **more),
            Case(f"{short}_query_scale_batch", scales="batch_heads", **more),
        ]
    e4m3 = {"cache_dtype": "float8_e4m3fn"}
    return [
        *cases,
        Case("e4m3_scale_batch", scales="batch_heads", **e4m3),
        Case("e4m3_scale_expanded", scales="expanded", **e4m3),
        Case("e4m3_uint8_page7_192_128", page_size=7, head_dim=(192, 128), uint8=True, **e4m3),
        Case(
            "e4m3_window_softcap_sinks",
            scales="heads",
            window=(9, 0),
            softcap=20.0,
            sinks="bfloat16",
            **e4m3,
        ),
    ]


# fmt: off
def _masks() -> list[Case]:
    windows = ((0, 0), (4, 0), (7, 2), (0, 3), (5, -1), (-1, 0), (-1, 3), (100, 100))
    lens = ((1, 17, 30, 9), (40, 33, 30, 4))
    both = (("causal", True), ("noncausal", False))
    return [
        *(
            Case(f"window_{w[0]}_{w[1]}_{name}".replace("-1", "any"), *lens, causal=c, window=w)
            for w in windows
            for name, c in both
        ),
        Case("window_long_decode", (1, 1), (700, 512), window=(511, 0), page_size=7),
        Case("softcap", *lens, softcap=3.0, softmax_scale=1.0),
        Case("softcap_noncausal", *lens, softcap=30.0, causal=False),
        *(Case(f"alibi_{a}_{n}", *lens, alibi=a, causal=c)
          for a in ("heads", "batch_heads") for n, c in both),
        *(Case(f"sinks_{t}", *lens, sinks=t) for t in ("float32", "bfloat16", "float16")),
        Case("sinks_empty_rows", (8, 5, 1), (5, 0, 0), sinks="float32"),
        Case("sinks_window", *lens, sinks="float32", window=(4, 0)),
        Case("everything", *lens, heads=(14, 2), head_dim=(192, 128), page_size=7, window=(20, 1),
             causal=False, softcap=8.0, alibi="batch_heads", sinks="bfloat16", storage="packed_hnd",
             table_pad=3, q_layout="fused_qkv", out="strided", spare_rows=3),
    ]


def _splits() -> list[Case]:
    cases = []
    for splits in (0, 1, 2, 7):
        cases += [
            Case(f"splits{splits}_decode", (1, 1, 1), (300, 1, 0), num_splits=splits),
            Case(f"splits{splits}_ragged", (2, 17, 1), (65, 40, 129), num_splits=splits),
            Case(f"splits{splits}_window_sinks", (1, 9), (300, 90), num_splits=splits,
                 window=(70, 0), sinks="float32", heads=(8, 1)),
        ]
    return [
        *cases,
        Case("invariant_decode", (1, 1, 1), (300, 1, 0), batch_invariant=True),
        Case("invariant_ragged", (2, 17, 1), (65, 40, 129), batch_invariant=True),
    ]


# fmt: on
ATTENTION = [*_lengths(), *_shapes(), *_storages(), *_fp8(), *_masks(), *_splits()]


@dataclass(frozen=True)
class WriteCase:
    """One cache_write call. Slots are drawn without repetition; skipped ones are scattered."""

    name: str
    tokens: int = 21
    skipped: int = 0  # of the tokens, so many get a negative or out-of-range slot
    heads: int = 3
    head_dim: tuple[int, int] = (64, 64)
    page_size: int = 16
    num_pages: int = 5
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    uint8: bool = False
    storage: str = "nhd"
    scales: str | None = None  # one, scalar, heads
    slot_dtype: str = "int64"
    source: str = "dense"  # dense, fused_qkv, heads_first, offset
    extra_rows: int = 0  # rows of k and v beyond the slots
    seed: int = 0

    @property
    def kv(self) -> str:
        return self.cache_dtype or self.dtype

    def rng(self) -> np.random.Generator:
        return np.random.default_rng([crc(self.name), self.seed])


# fmt: off
def _writes() -> list[WriteCase]:
    kinds = [(t, None) for t in ("float32", "float16", "bfloat16")]
    kinds += [(t, c) for t, _ in kinds for c in ("float8_e4m3fn", "float8_e5m2")]
    dims = (1, 2, 7, 8, 40, 46, 48, 80, 128, 256, 576)
    apart = [s for s in STORAGES if s not in ("interleaved", "halves")]
    cases = []
    for storage in STORAGES:
        for dtype, cache in kinds:
            name = f"{storage}_{dtype}" + (f"_{cache[7:]}" if cache else "")
            scales = "heads" if cache else None
            cases.append(WriteCase(name, dtype=dtype, cache_dtype=cache, storage=storage,
                                   scales=scales, skipped=4))
    e4m3 = {"cache_dtype": "float8_e4m3fn"}
    return [
        *cases,
        *(WriteCase(f"head_dim{d}", head_dim=(d, d), skipped=2) for d in dims),
        *(WriteCase(f"head_dim{d}_e4m3", head_dim=(d, d), scales="one", **e4m3) for d in dims),
        *(WriteCase(f"192_128_{s}", head_dim=(192, 128), storage=s) for s in apart),
        *(WriteCase(f"512_64_{s}_e4m3", head_dim=(512, 64), storage=s, **e4m3) for s in apart),
        *(WriteCase(f"page{p}", page_size=p, num_pages=n) for p, n in ((1, 60), (7, 9), (528, 2))),
        *(WriteCase(f"source_{s}", source=s, skipped=3)
          for s in ("fused_qkv", "heads_first", "offset")),
        *(WriteCase(f"source_{s}_e4m3", source=s, scales="heads", **e4m3)
          for s in ("fused_qkv", "heads_first", "offset")),
        WriteCase("slots_int32", slot_dtype="int32", skipped=5),
        WriteCase("no_tokens", tokens=0),
        WriteCase("no_tokens_but_rows", tokens=0, extra_rows=3),
        WriteCase("one_token", tokens=1),
        WriteCase("all_skipped", skipped=21),
        WriteCase("whole_cache", tokens=80),
        WriteCase("extra_rows", tokens=11, extra_rows=5),
        WriteCase("one_head", heads=1, head_dim=(46, 46)),
        WriteCase("many_heads", heads=40, head_dim=(128, 128), tokens=7),
        WriteCase("scale_scalar", scales="scalar", **e4m3),
        WriteCase("uint8_e4m3", scales="one", uint8=True, **e4m3),
        WriteCase("uint8_e5m2", scales="one", uint8=True, cache_dtype="float8_e5m2"),
        *(WriteCase(f"tokens{n}", tokens=n, heads=1, head_dim=(8, 8), page_size=64, num_pages=1026,
                    skipped=100) for n in (65_535, 65_536, 65_537)),
    ]


# fmt: on
WRITES = _writes()
