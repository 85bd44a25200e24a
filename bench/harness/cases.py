"""The problems that bench/attention.py times, by suite, with what a call must read and multiply.

Bars are of an H200: us, or a share of the time that FlashAttention 3 takes over contiguous K and V
in the same run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

BF16, FP16 = torch.bfloat16, torch.float16
SHORT = {BF16: "bf16", FP16: "fp16", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


@dataclass(frozen=True)
class Case:
    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    page_size: int = 16
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype | None = None  # None: dtype
    layout: str = "NHD"  # NHD, HND, or what make_caches builds
    window: int = -1  # keys left of the query's own
    batch_invariant: bool = False
    writes: bool = False  # a cache_write before each call
    pdl: bool = False
    bar: float | None = None  # us
    ratio_bar: float | None = None  # of the time of BAR_PEER

    @property
    def stored(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    @property
    def kv_bytes(self) -> int:
        """Of all pages' keys and values."""
        return sum(self.kv_lens) * self.token_bytes

    @property
    def token_bytes(self) -> int:
        return 2 * self.heads[1] * self.head_dim * self.stored.itemsize

    @property
    def bytes(self) -> int:
        """What a call must read and write."""
        seen = (
            kv_len if self.window < 0 else min(kv_len, q_len + self.window)
            for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True)
        )
        rows = 2 * sum(self.q_lens) * self.heads[0] * self.head_dim * self.dtype.itemsize
        return sum(seen) * self.token_bytes + rows

    @property
    def flops(self) -> int:
        """Of the products of queries and visible keys, and of weights and values."""
        pairs = 0
        for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True):
            last = kv_len if self.window < 0 else min(kv_len, self.window + 1)
            first = min(last, kv_len - q_len + 1)  # keys that the first token sees
            rising = last - first
            pairs += q_len * last - rising * (rising + 1) // 2
        return 4 * self.heads[0] * self.head_dim * pairs


def uniform(batch: int, context: int, q_len: int = 1, name: str = "", **more: Any) -> Case:
    heads = more.get("heads", (32, 8))
    text = f"{heads[0]}/{heads[1]} d{more.get('head_dim', 128)} b{batch} ctx{context}"
    return Case(f"{name}{text}", (q_len,) * batch, (context,) * batch, **more)


def decode_cases() -> Iterator[Case]:
    bars = {(1, 1024): 5.6, (1, 8192): 12.4, (1, 131_072): 127, (16, 1024): 19, (16, 8192): 125,
            (64, 1024): 66, (64, 8192): 488, (256, 2048): 488}  # fmt: skip
    for heads in ((32, 8), (64, 8)):
        for (batch, context), bar in bars.items():
            yield uniform(batch, context, heads=heads, bar=bar)
    yield uniform(16, 8192, heads=(16, 16), bar=245)
    yield uniform(64, 8192, heads=(8, 1), bar=69)
    yield uniform(64, 8192, heads=(64, 8), head_dim=64, bar=248)
    yield uniform(16, 8192, heads=(16, 4), head_dim=256, bar=125)


def log_uniform(count: int, least: int, most: int) -> tuple[int, ...]:
    x = torch.rand(count, generator=torch.Generator().manual_seed(1)).tolist()
    return tuple(int(math.exp(math.log(least) + u * math.log(most / least))) for u in x)


def uneven_cases() -> Iterator[Case]:
    lens = log_uniform(64, 512, 131_072)
    yield Case("32/8 d128 b64 512..128k", (1,) * 64, lens, bar=1490)
    yield Case("32/8 d128 b64 512..128k sorted", (1,) * 64, tuple(sorted(lens)))
    yield Case("32/8 d128 1 of 131072, 63 of 512", (1,) * 64, (131_072, *[512] * 63))
    yield Case("32/8 d128 b256 1..5000", (1,) * 256, log_uniform(256, 1, 5000))
    yield Case("8/1 d128 b64 512..128k", (1,) * 64, lens, (8, 1))


def spec_cases() -> Iterator[Case]:
    for q_len, bar in ((2, 247), (4, 248), (8, 254)):
        yield uniform(32, 8192, q_len, f"q{q_len} ", bar=bar)


def fp8_cases() -> Iterator[Case]:
    e4m3 = {"kv_dtype": torch.float8_e4m3fn}
    yield uniform(64, 8192, name="e4m3 ", bar=258, **e4m3)
    yield uniform(16, 32_768, name="e4m3 ", heads=(64, 8), bar=254, **e4m3)
    yield uniform(64, 8192, name="e4m3 HND ", layout="HND", **e4m3)
    yield uniform(64, 8192, name="fp16, e4m3 ", dtype=FP16, **e4m3)
    yield uniform(64, 8192, name="e5m2 ", kv_dtype=torch.float8_e5m2)
    for batch, context in ((1, 1024), (1, 8192), (16, 1024)):
        yield uniform(batch, context, name="e4m3 ", **e4m3)
    yield uniform(32, 8192, 8, "q8 e4m3 ", **e4m3)


def page_cases() -> Iterator[Case]:
    """16 and up should be within 5 % of each other."""
    for kv_dtype in (None, torch.float8_e4m3fn):
        kind = SHORT[kv_dtype or BF16]
        for layout in ("NHD", "HND"):
            for size in (1, 8, 16, 64, 256):
                yield uniform(64, 8192, name=f"page{size} {layout} {kind} ", page_size=size,
                              layout=layout, kv_dtype=kv_dtype)  # fmt: skip
    yield uniform(16, 32_000, name="page8 fp16 ", heads=(32, 4), page_size=8, dtype=FP16)


def group_cases() -> Iterator[Case]:
    """The same bytes."""
    for group in (*range(1, 9), 12, 16):
        yield uniform(16, 8192, name=f"group{group} ", heads=(8 * group, 8))


def layout_cases() -> Iterator[Case]:
    for kv_dtype in (None, torch.float8_e4m3fn):
        for layout in ("NHD", "HND", "packed", "packed HND", "interleaved", "halves", "padded"):
            kind = SHORT[kv_dtype or BF16]
            yield uniform(64, 8192, name=f"{layout} {kind} ", layout=layout, kv_dtype=kv_dtype)


def query_length_cases() -> Iterator[Case]:
    """Up to 32 packed rows should take at most a tenth more than one query."""
    for q_len in (1, 2, 4, 8):
        yield uniform(16, 31_744, q_len, f"q{q_len} ")


def window_cases() -> Iterator[Case]:
    """The time of the window, not of the context."""
    for context in (1024, 8192, 65_536):
        yield uniform(16, context, name="window1023 ", heads=(32, 16), head_dim=256, window=1023)
    yield uniform(64, 32_768, name="window4095 ", window=4095)


def invariant_cases() -> Iterator[Case]:
    """Each beside the same without batch_invariant."""
    for batch, context in ((1, 8192), (1, 131_072), (16, 1024), (16, 8192), (64, 8192)):
        for name, on in (("", False), ("invariant ", True)):
            yield uniform(batch, context, name=name, batch_invariant=on)
    for name, on in (("", False), ("invariant ", True)):
        lens = log_uniform(64, 512, 131_072)
        yield Case(f"{name}32/8 d128 b64 512..128k", (1,) * 64, lens, batch_invariant=on)


def pdl_cases() -> Iterator[Case]:
    """Attention after attention, and a write before each; launched plainly, then as dependents."""
    for batch, context in ((1, 1024), (1, 8192), (16, 1024), (64, 8192)):
        plain = uniform(batch, context)
        for writes in (False, True):
            for pdl in (False, True):
                name = f"{'write+' if writes else ''}attention{' pdl' if pdl else ''} "
                yield replace(plain, name=name + plain.name, writes=writes, pdl=pdl)


def prefill_cases() -> Iterator[Case]:
    for length, batch, bar in ((8192, 1, 0.995), (32_768, 1, 0.985), (2048, 8, 0.93)):
        yield uniform(batch, length, length, f"q{length} ", ratio_bar=bar)
    d64 = {"heads": (64, 8), "head_dim": 64, "ratio_bar": 0.965}
    yield uniform(1, 16_384, 16_384, "q16384 ", **d64)
    yield uniform(1, 8192, 8192, "q8192 ", heads=(16, 8), head_dim=192)
    yield uniform(1, 8192, 8192, "q8192 ", heads=(16, 8), head_dim=256, ratio_bar=1.0)


def chunk_cases() -> Iterator[Case]:
    """The last tokens of prompts whose first ones are in the cache."""
    yield uniform(1, 32_768, 2048, "q2048 ", ratio_bar=1.0)
    yield uniform(4, 16_384, 512, "q512 ", ratio_bar=1.0)
    yield uniform(1, 131_072, 8192, "q8192 ")
    yield uniform(16, 4096, 256, "q256 ")


def mixed_cases() -> Iterator[Case]:
    lens = log_uniform(63, 512, 32_768)
    yield Case("63 decodes, q2048 of 8192", (*[1] * 63, 2048), (*lens, 8192), bar=700)
    yield Case("63 decodes", (1,) * 63, lens)
    yield Case("q2048 of 8192", (2048,), (8192,))
    yield Case("255 decodes, q512 of 512", (*[1] * 255, 512), (*log_uniform(255, 64, 8192), 512))
    yield Case("8 decodes, 8 of q1024", (*[1] * 8, *[1024] * 8), (*[4096] * 8, *[1024] * 8))


def prefill_page_cases() -> Iterator[Case]:
    """16 and up should be within 2 % of each other."""
    for layout in ("NHD", "HND"):
        for size in (1, 7, 8, 16, 32, 64, 128, 256):
            yield uniform(1, 8192, 8192, f"page{size} {layout} ", page_size=size, layout=layout)


def prefill_length_cases() -> Iterator[Case]:
    """Where the kernels meet: 64 packed rows are 16 tokens here."""
    for batch, context in ((1, 8192), (32, 8192)):
        for q_len in (8, 16, 17, 24, 32, 64, 128, 256):
            yield uniform(batch, context, q_len, f"q{q_len} ")


def prefill_fp8_cases() -> Iterator[Case]:
    for kv_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        yield uniform(1, 8192, 8192, f"q8192 {SHORT[kv_dtype]} ", kv_dtype=kv_dtype, bar=960)


SUITES: dict[str, Callable[[], Iterator[Case]]] = {
    "decode": decode_cases,
    "uneven": uneven_cases,
    "spec": spec_cases,
    "fp8": fp8_cases,
    "pages": page_cases,
    "groups": group_cases,
    "layouts": layout_cases,
    "qlen": query_length_cases,
    "window": window_cases,
    "invariant": invariant_cases,
    "pdl": pdl_cases,
    "prefill": prefill_cases,
    "chunk": chunk_cases,
    "mixed": mixed_cases,
    "prefill_pages": prefill_page_cases,
    "prefill_qlen": prefill_length_cases,
    "prefill_fp8": prefill_fp8_cases,
}
WITH_BARS = ("decode", "uneven", "spec", "fp8")
BAR_PEER = "fa3_contiguous"
