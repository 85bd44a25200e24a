"""The tensors of a case: a pool of pages, block tables that share none, and the right results."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from harness.cases import FP16, Case
from peers.peer import Call, Peer

COLD_BYTES = 320 << 20  # five times the L2 of an H200
MOST_SETS = 128
MOST_POOL_BYTES = 24 << 30


def fill(x: torch.Tensor) -> None:
    """Normal values, in parts: an fp8 tensor takes them by way of a wider one."""
    torch.manual_seed(0)
    for part in x.view(-1).split(1 << 27):
        if part.dtype.itemsize == 1:
            part.copy_(torch.randn(part.shape, dtype=FP16, device=x.device).to(part.dtype))
        else:
            part.normal_()


def make_caches(case: Case, pages: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """As they are passed: [P, S, Hkv, D], or [P, Hkv, S, D] where "HND" is in the layout's name."""
    heads, dim, size = case.heads[1], case.head_dim, case.page_size
    hnd = "HND" in case.layout
    middle = (heads, size) if hnd else (size, heads)
    shapes = {
        "packed": (pages, *middle, 2, dim),
        "packed HND": (pages, *middle, 2, dim),
        "interleaved": (pages, 2, *middle, dim),
        "halves": (2, pages, *middle, dim),
        "padded": (2, pages, *middle, dim + 64),
    }
    shape = shapes.get(case.layout, (2, pages, *middle, dim))
    both = torch.empty(shape, dtype=case.stored, device=device)
    fill(both)
    if case.layout.startswith("packed"):
        return both[..., 0, :], both[..., 1, :]
    if case.layout == "interleaved":
        return both[:, 0], both[:, 1]
    return both[0][..., :dim], both[1][..., :dim]


class Problem:
    """What every peer computes from. Each writes its results to `out`.

    There are `sets` block tables over pages of their own, unless given as many as the L2 demands.
    """

    def __init__(self, case: Case, device: str = "cuda", sets: int | None = None) -> None:
        self.case, self.device = case, device
        if sets is None:
            most = max(1, MOST_POOL_BYTES // case.kv_bytes)
            sets = min(MOST_SETS, most, math.ceil(COLD_BYTES / case.kv_bytes))
        self.pages_of = [-(-n // case.page_size) for n in case.kv_lens]
        self.layout = "HND" if "HND" in case.layout else "NHD"
        self.caches = make_caches(case, sum(self.pages_of) * sets, device)
        self.tables = self._make_tables(sets)
        tokens = sum(case.q_lens)
        self.q = torch.randn(tokens, case.heads[0], case.head_dim, device=device).to(case.dtype)
        self.out = torch.full_like(self.q, torch.nan)
        int32 = functools.partial(torch.tensor, dtype=torch.int32, device=device)
        self.starts = np.cumsum([0, *case.q_lens]).tolist()
        self.seqused_k, self.cu_seqlens_q = int32(case.kv_lens), int32(self.starts)
        self.scales: dict[str, torch.Tensor] = {}
        if case.stored.itemsize == 1:
            self.scales = {n: torch.ones(1, device=device) for n in ("k_scale", "v_scale")}

    def _make_tables(self, sets: int) -> list[torch.Tensor]:
        pages = sum(self.pages_of)
        generator = torch.Generator().manual_seed(1)
        order = torch.randperm(pages * sets, generator=generator).int().view(sets, pages)
        tables = []
        for pages_of_set in order:
            table = torch.zeros(len(self.pages_of), max(self.pages_of), dtype=torch.int32)
            for row, its_pages in zip(table, pages_of_set.split(self.pages_of), strict=True):
                row[: len(its_pages)] = its_pages
            tables.append(table.to(self.device))
        return tables

    def gathered(self, table: torch.Tensor, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a sequence, [keys, Hkv, D], as they are stored."""
        pages = table[sequence, : self.pages_of[sequence]].long()
        both = (cache[pages] for cache in self.caches)
        if self.layout == "HND":
            both = (x.transpose(1, 2) for x in both)
        k, v = (x.flatten(0, 1)[: self.case.kv_lens[sequence]] for x in both)
        return k, v

    def error(self, peer: Peer, calls: list[Call], rows: int = 24) -> float:
        """Relative L2 error of a sample of rows of the first table, fp32; NaN if nothing came."""
        case, table = self.case, self.tables[0]
        self.out.fill_(torch.nan)
        for call in calls[: len(calls) // len(self.tables)]:  # a write may come first
            returned = call()
        result = peer.result(returned, self)
        generator = torch.Generator().manual_seed(2)
        wrong = right = 0.0
        for b in torch.randint(len(case.q_lens), (rows,), generator=generator).tolist():
            row = int(torch.randint(case.q_lens[b], (1,), generator=generator))
            end = case.kv_lens[b] - (case.q_lens[b] - 1 - row)
            begin = 0 if case.window < 0 else max(0, end - 1 - case.window)
            k, v = (x[begin:end].float() for x in self.gathered(table, b))
            expected = self._attend(self.starts[b] + row, k, v)
            actual = result[self.starts[b] + row].float()
            wrong += float((actual - expected).square().sum())
            right += float(expected.square().sum())
        return math.sqrt(wrong / right)

    def _attend(self, token: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        case = self.case
        q = self.q[token].float().view(case.heads[1], -1, case.head_dim)
        score = torch.einsum("hgd,khd->hgk", q, k) * case.head_dim**-0.5
        return torch.einsum("hgk,khd->hgd", score.softmax(-1), v).flatten(0, 1)
