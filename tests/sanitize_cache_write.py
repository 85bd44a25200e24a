"""Small calls of cache_write and copy_pages, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python3 tests/sanitize_cache_write.py
    compute-sanitizer --tool racecheck python3 tests/sanitize_cache_write.py

Each tensor has an allocation of its own that ends with its last element: a byte past it is seen.
What the calls leave behind is compared with the CPU backend's.
"""

from __future__ import annotations

import itertools
import math
import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import pagetile
import torch

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SOURCES = (torch.float32, torch.float16, torch.bfloat16)
PAGES, PAGE_SIZE, HEADS = 3, 4, 2


def dense(shape) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


class Tensor:
    """Twins on both devices, of random bits; strides in elements, the first element at `offset`."""

    def __init__(self, dtype, shape, strides=None, offset=0) -> None:
        self.place = (shape, strides or dense(shape), offset)
        last = offset + sum((n - 1) * s for n, s in zip(*self.place[:2], strict=True))
        self.dtype = dtype
        bits = torch.randint(0, 256, ((last + 1) * dtype.itemsize,), dtype=torch.uint8)
        self.memory = {"cpu": bits, "cuda": bits.cuda()}

    def on(self, device) -> torch.Tensor:
        return self.memory[device].view(self.dtype).as_strided(*self.place)

    def check(self) -> None:
        assert torch.equal(self.memory["cuda"].cpu(), self.memory["cpu"])


def cache(layout, dtype, dim, pad, offset, is_key) -> Tensor:
    row = dim + pad
    if layout == "NHD":
        shape = (PAGES, PAGE_SIZE, HEADS, dim)
        return Tensor(dtype, shape, dense((PAGES, PAGE_SIZE, HEADS, row)), offset)
    if layout == "HND":
        shape = (PAGES, HEADS, PAGE_SIZE, dim)
        return Tensor(dtype, shape, dense((PAGES, HEADS, PAGE_SIZE, row)), offset)
    x = math.gcd(dim, 16 // dtype.itemsize)
    shape = (PAGES, HEADS, dim // x, PAGE_SIZE, x) if is_key else (PAGES, HEADS, dim, PAGE_SIZE)
    return Tensor(dtype, shape, offset=offset)


def write(dtype, cache_dtype, layout, dims, pad=0, offset=0, slot_dtype=torch.int64, pdl=False):
    slots = [PAGES * PAGE_SIZE - 1, 0, -1, 5, PAGES * PAGE_SIZE, 4, 7]
    slots = torch.tensor(slots, dtype=slot_dtype)
    rows = [
        Tensor(dtype, (len(slots), HEADS, dim), dense((len(slots), HEADS, dim + pad)), offset)
        for dim in dims
    ]
    caches = [cache(layout, cache_dtype, dim, pad, offset, is_key)
              for dim, is_key in zip(dims, (True, False), strict=True)]  # fmt: skip
    scales = {}
    if cache_dtype in FP8:
        scales = {"k_scale": torch.tensor([0.37, 2.5]), "v_scale": torch.tensor(1.75)}
    for device in ("cpu", "cuda"):
        pagetile.cache_write(
            *(x.on(device) for x in (*rows, *caches)), slots.to(device), layout=layout, pdl=pdl,
            **{name: scale.to(device) for name, scale in scales.items()},
        )  # fmt: skip
    for tensor in (*rows, *caches):
        tensor.check()


def writes() -> int:
    """Every pair of types in every layout and at every alignment, K and V of unequal widths."""
    kinds = [(t, t) for t in SOURCES] + [*itertools.product(SOURCES, FP8)]
    dims = [(64, 64), (46, 46), (33, 33), (192, 128), (5, 64), (1, 1)]
    alignments = [(0, 0), (0, 1), (3, 0), (2, 2), (64, 4)]  # pad of a row, first element
    count = 0
    for i, (kind, layout) in enumerate(itertools.product(kinds, ("NHD", "HND", "legacy"))):
        for j, dim in enumerate(dims):
            pad, offset = alignments[(i + j) % len(alignments)]
            write(*kind, layout, dim, pad, offset, (torch.int64, torch.int32)[j % 2], i % 2 == 1)
            count += 1
    return count


def copy(dtype, shape, caches=2, strides=(None, None), offset=0, page_dtype=torch.int32):
    sides = [[Tensor(dtype, (pages, *shape), steps, offset) for _ in range(caches)]
             for pages, steps in zip((4, 5), strides, strict=True)]  # fmt: skip
    pages = torch.tensor([[3, 0, 9, 1], [0, 4, 1, -1]], dtype=page_dtype)
    for device in ("cpu", "cuda"):
        src, dst = ([x.on(device) for x in side] for side in sides)
        src_pages, dst_pages = (x.clone().to(device) for x in pages)
        pagetile.copy_pages(src, dst, src_pages, dst_pages)
    for tensor in itertools.chain(*sides):
        tensor.check()


def copies() -> int:
    count = 0
    for dtype in (torch.uint8, torch.bfloat16, torch.float32):
        for shape in ((7, 1, 46), (16, 2, 8), (3,), (2, 4, 3, 8)):
            for offset, page_dtype in ((0, torch.int32), (1, torch.int64)):
                copy(dtype, shape, offset=offset, page_dtype=page_dtype)
                count += 1
        padded = dense((5, 4, 2, 11))
        heads_first = [64, 8, 32, 1]
        for strides in ((None, padded), (padded, None), (heads_first, None), (None, heads_first)):
            copy(dtype, (4, 2, 8), strides=strides)
            count += 1
    copy(torch.float16, (4, 2, 8), caches=130)
    return count + 1


def main() -> None:
    torch.manual_seed(0)
    counts = writes(), copies()
    torch.cuda.synchronize()
    print(f"OK: {counts[0]} calls of cache_write, {counts[1]} of copy_pages")


if __name__ == "__main__":
    main()
