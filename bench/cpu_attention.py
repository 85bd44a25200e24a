"""The CPU backend over pages against PyTorch's attention over K and V that are already gathered.

Same process, same number of threads (OMP_NUM_THREADS), distinct data. PyTorch is given its best
form: the query heads of a KV head as rows of one matrix (decode), K and V contiguous. Prints
medians; the gathering that PyTorch would need first is timed apart.

    python bench/cpu_attention.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pagetile
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

HQ, HKV, D, PAGE = 32, 8, 128, 16


def milliseconds(call: Callable[[], Any], rounds: int) -> float:
    call()
    call()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


class Problem:
    """B sequences of `length` tokens on shuffled pages, with `q_len` queries each."""

    def __init__(self, batch: int, length: int, q_len: int, dtype: torch.dtype) -> None:
        pages = batch * length // PAGE
        q_dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype
        self.batch, self.length, self.q_len = batch, length, q_len
        self.q = torch.randn(batch * q_len, HQ, D).to(q_dtype)
        self.k_cache = torch.randn(pages, PAGE, HKV, D).to(dtype)
        self.v_cache = torch.randn(pages, PAGE, HKV, D).to(dtype)
        self.table = torch.randperm(pages, dtype=torch.int32).view(batch, -1)
        self.out = torch.empty_like(self.q)
        self.lengths = torch.full((batch,), length, dtype=torch.int32)
        self.offsets = torch.arange(batch + 1, dtype=torch.int32) * q_len

    def paged(self) -> torch.Tensor:
        return pagetile.paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            block_table=self.table,
            seqused_k=self.lengths,
            cu_seqlens_q=self.offsets,
            max_seqlen_q=self.q_len,
            out=self.out,
        )

    def gather(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.table.long().flatten()
        return tuple(
            cache[rows].view(self.batch, self.length, HKV, D).transpose(1, 2).contiguous()
            for cache in (self.k_cache, self.v_cache)
        )

    def dense(self, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
        if self.q_len == 1:
            q = self.q.view(self.batch, HKV, HQ // HKV, D)
            return lambda: sdpa(q, k, v)
        q = self.q.view(self.batch, self.q_len, HQ, D).transpose(1, 2).contiguous()
        k, v = (t.repeat_interleave(HQ // HKV, 1) for t in (k, v))
        return lambda: sdpa(q, k, v, is_causal=True)


def main() -> None:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    build = pagetile.show_config("dicts")["build"]
    print(
        f"pagetile {build['version']} (git {build['git_hash']}, {build['cpu_isa']}), "
        f"torch {torch.__version__}, {threads} threads"
    )
    print(f"{HQ}/{HKV} heads, head_dim {D}, page_size {PAGE}")
    print(
        f"{'case':34s} {'pagetile ms':>12s} {'GB/s':>6s} {'torch ms':>9s} {'ratio':>6s} "
        f"{'gather ms':>10s} {'max error':>10s}"
    )
    cases = [
        (f"decode 8 x 2048 {name}", 8, 2048, 1, getattr(torch, name))
        for name in ("float32", "bfloat16", "float16", "float8_e4m3fn")
    ]
    cases += [
        (f"prefill 1 x 2048 {name}", 1, 2048, 2048, getattr(torch, name))
        for name in ("float32", "bfloat16")
    ]
    for name, batch, length, q_len, dtype in cases:
        problem = Problem(batch, length, q_len, dtype)
        rounds = 31 if q_len == 1 else 5
        ours = milliseconds(problem.paged, rounds)
        speed = problem.k_cache.nbytes * 2 / ours / 1e6
        line = f"{name:34s} {ours:12.2f} {speed:6.1f}"
        if dtype.itemsize > 1:
            dense = problem.dense(*problem.gather())
            theirs, gathering = milliseconds(dense, rounds), milliseconds(problem.gather, 5)
            out = dense() if q_len == 1 else dense().transpose(1, 2)
            error = (out.reshape(problem.out.shape).float() - problem.out.float()).abs().max()
            line += f" {theirs:9.2f} {ours / theirs:6.2f} {gathering:10.2f} {error:10.1e}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
