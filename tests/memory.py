"""Memory that tells: address space of many gigabytes, and arrays between forbidden pages.

Run as a program, it calls every kernel on arrays whose first or last byte borders on a forbidden
page, so that one byte read outside ends the process.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys

import numpy as np
import pagetile
import pytest
import torch

NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
PAGE = mmap.PAGESIZE


def huge_tensor(shape, dtype, device):
    """Zeros; on the CPU, address space alone until a page is written."""
    if device != "cpu":
        needed, free = math.prod(shape) * dtype.itemsize, torch.cuda.mem_get_info()[0]
        if needed > 0.9 * free:
            pytest.skip(f"needs {needed >> 30} GiB of GPU memory, {free >> 30} are free")
        return torch.zeros(shape, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Fence:
    """Copies arrays to memory that a forbidden page follows (`at_end`) or precedes."""

    def __init__(self, at_end: bool) -> None:
        self.at_end = at_end
        self.mprotect = ctypes.CDLL(None, use_errno=True).mprotect
        self.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def __call__(self, array):
        size = -(-array.nbytes // PAGE) * PAGE
        memory = mmap.mmap(-1, size + 2 * PAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for forbidden in (address, address + PAGE + size):
            assert self.mprotect(forbidden, PAGE, 0) == 0, ctypes.get_errno()
        offset = PAGE + (size - array.nbytes if self.at_end else 0)
        copy = np.frombuffer(memory, array.dtype, array.size, offset).reshape(array.shape)
        copy[...] = array
        return copy


def attention_arguments(rng, batch, head_dim, dtype, fp8):
    """Full pages, a tight table, every optional tensor."""
    page_size, width = 4, 3
    pages = batch * width
    floats = lambda *shape: rng.standard_normal(shape).astype(dtype)  # noqa: E731
    cache = (pages, page_size, 2, head_dim)
    caches = [rng.integers(0, 120, cache, np.uint8) if fp8 else floats(*cache) for _ in "kv"]
    return {
        "q": floats(2 * batch, 4, head_dim),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "block_table": rng.permutation(pages).astype(np.int32).reshape(batch, width),
        "seqused_k": np.full(batch, width * page_size, np.int32),
        "cu_seqlens_q": np.arange(0, 2 * batch + 1, 2, dtype=np.int32),
        "alibi_slopes": np.full((batch, 4), 0.1, np.float32),
        "sinks": floats(4),
        "k_scale": np.full((batch, 2), 0.01, np.float32) if fp8 else None,
        "v_scale": np.full((batch, 2), 0.01, np.float32) if fp8 else None,
        "out": np.zeros((2 * batch, 4, head_dim), dtype),
        "softmax_lse": np.zeros((4, 2 * batch), np.float32),
    }


def write_arguments(rng, tokens, head_dim, dtype, fp8):
    rows = rng.standard_normal((2, tokens, 3, head_dim)).astype(dtype)
    caches = np.zeros((2, tokens, 1, 3, head_dim), np.uint8 if fp8 else dtype)
    return {
        "k": rows[0],
        "v": rows[1],
        "k_cache": caches[0],
        "v_cache": caches[1],
        "slot_mapping": rng.permutation(tokens),
        "k_scale": np.full(3, 0.5, np.float32) if fp8 else None,
        "v_scale": np.full(3, 0.5, np.float32) if fp8 else None,
    }


def compare(function, arguments, fences, **options):
    """The same call on common memory and behind each fence: the same results."""
    plain = {n: None if x is None else x.copy() for n, x in arguments.items()}
    function(**plain, **options)
    for fence in fences:
        fenced = {n: None if x is None else fence(x) for n, x in arguments.items()}
        function(**fenced, **options)
        for name, array in fenced.items():
            if array is not None:
                np.testing.assert_array_equal(array, plain[name], err_msg=name)


def main() -> None:
    rng = np.random.default_rng(0)
    fences = (Fence(at_end=True), Fence(at_end=False))
    kinds = [(np.float32, False), (np.float16, False), (np.float32, True), (np.float16, True)]
    for dtype, fp8 in kinds:
        kv = {"kv_dtype": "fp8_e4m3"} if fp8 else {}
        for batch in (1, 2, 3, 7, 64, 255, 256):
            for head_dim in (8, 40, 128) if batch < 64 else (8,):
                arguments = attention_arguments(rng, batch, head_dim, dtype, fp8)
                for splits in (0, 3):
                    compare(pagetile.paged_attention, arguments, fences, max_seqlen_q=2,
                            num_splits=splits, **kv)  # fmt: skip
        for tokens, head_dim in ((1, 46), (5, 1), (7, 64), (33, 40)):
            compare(pagetile.cache_write, write_arguments(rng, tokens, head_dim, dtype, fp8),
                    fences, **kv)  # fmt: skip
    for shape in ((1, 1, 1), (5, 3, 46), (3, 2, 64)):
        out_a, out_b, out = rng.standard_normal((3, *shape)).astype(np.float16)
        lse_a, lse_b, lse = rng.standard_normal((3, shape[1], shape[0])).astype(np.float32)
        arguments = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
        compare(pagetile.merge_states, {**arguments, "out": out, "lse": lse}, fences)
    print("nothing outside was touched")


if __name__ == "__main__":
    if "--read-outside" in sys.argv:  # proof that a fence works: this must not return
        fenced = Fence(at_end=True)(np.zeros(3, np.uint8))
        ctypes.string_at(fenced.ctypes.data, 4)
    main()
