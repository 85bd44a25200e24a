"""copy_pages: every byte of both pools is compared, whatever their layout."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pagetile
import pytest
import torch
from gpu import captured, keep_busy, needs_gpus
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import huge_tensor, resident_bytes
from numpy.lib.stride_tricks import as_strided
from problem import same_bits

USES = ("copy_pages",)
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "uint8")
RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class Pools:
    """The caches of one side: views of equal shape and strides, all in one memory."""

    def __init__(self, dtype, shape, strides, offsets, seed, device) -> None:
        self.dtype = getattr(torch, dtype)
        self.places = [(shape, strides, offset) for offset in offsets]
        size = max(offsets) + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 9
        rng = np.random.default_rng(seed)
        raw = RAW[self.dtype.itemsize]
        self.raw = rng.integers(0, np.iinfo(raw).max, max(size, 1), raw, endpoint=True)
        self.storage = torch.from_numpy(self.raw.copy()).to(device)

    def views(self) -> list[np.ndarray]:
        """Of the host's bits."""
        step = self.raw.itemsize
        return [as_strided(self.raw[o:], n, [x * step for x in s]) for n, s, o in self.places]

    def tensors(self) -> list[torch.Tensor]:
        return [self.storage.view(self.dtype).as_strided(*place) for place in self.places]

    def check(self, what) -> None:
        changed = np.flatnonzero(self.storage.cpu().numpy() != self.raw)
        assert changed.size == 0, f"{what}: {changed.size} elements differ, first {changed[:5]}"


def copy(src: Pools, dst: Pools, src_pages, dst_pages, device, page_dtype="int32", give=list):
    """The call, and what it must leave in both memories."""
    pages = [torch.tensor(p, dtype=getattr(torch, page_dtype)).to(device)
             for p in (src_pages, dst_pages)]  # fmt: skip
    result = pagetile.copy_pages(give(src.tensors()), give(dst.tensors()), *pages)
    assert result is None
    for source, target in zip(src.views(), dst.views(), strict=True):
        for i, j in zip(src_pages, dst_pages, strict=True):
            if 0 <= i < len(source) and 0 <= j < len(target):
                target[j] = source[i]
    dst.check("dst_caches")
    src.check("src_caches")


def dense(shape) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


# Name -> (shape of a page, (strides, first element, elements to the next cache) for P pages and L
# caches). The letters: page, slot, head, dim, caches.
def layouts(p, s, h, d, caches):
    def apart(shape, strides=None, gap=0, first=0):
        """Each cache in a memory of its own."""
        strides = strides or dense((p, *shape))
        extent = sum((n - 1) * x for n, x in zip((p, *shape), strides, strict=True)) + 1
        return shape, strides, first, extent + gap

    page = s * h * d
    return {
        "nhd": apart((s, h, d)),
        "hnd": apart((h, s, d)),
        "transposed": apart((s, h, d), [page, d, s * d, 1]),
        "packed": apart((s, h, 2 * d)),
        "packed_half": apart((s, h, d), [2 * page, 2 * h * d, 2 * d, 1], first=d),
        "pairs": apart((2, s, h, d)),
        "pairs_half": apart((s, h, d), [2 * page, h * d, d, 1], first=page),
        "layers": ((s, h, d), [caches * page, h * d, d, 1], 0, page),
        "legacy_k": apart((h, d // 2, s, 2)),
        "legacy_v": apart((h, d, s)),
        "padded": apart((s, h, d), dense((p, s, h, d + 3))),
        "offset": apart((s, h, d), gap=3, first=1),
        "pages_inside": apart((s, h, d), [1, h * d * p, d * p, p]),
        "sparse": apart((s, h, d), [2 * x for x in dense((p, s, h, d))]),
        "flat": apart((page,)),
    }


LAYOUTS = list(layouts(1, 1, 1, 2, 1))


def pools(layout, dtype, pages, caches, device, page=(16, 2, 64), seed=0) -> Pools:
    shape, strides, first, step = layouts(pages, *page, caches)[layout]
    return Pools(dtype, (pages, *shape), strides, [first + step * i for i in range(caches)], seed,
                 device)  # fmt: skip


SRC, DST = [3, 0, 5, 6], [2, 6, 0, 4]  # of 7 and 9 pages


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout, dtype, device):
    src, dst = (pools(layout, dtype, n, 3, device, seed=n) for n in (7, 9))
    copy(src, dst, SRC, DST, device)


@pytest.mark.parametrize("page", [(7, 1, 46), (1, 1, 2), (5, 3, 6), (1, 40, 128)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "uint8", "float32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_sizes(layout, dtype, page, device):
    """Pages of 4 bytes to 20 KB; of 644 bytes, so that most are at odd places."""
    src, dst = (pools(layout, dtype, n, 2, device, page, seed=n) for n in (7, 9))
    copy(src, dst, SRC, DST, device)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 1, 1), (7, 1, 3)], ids=str)
@pytest.mark.parametrize("dtype", ["uint8", "float8_e4m3fn", "bfloat16"])
def test_pages_of_a_few_bytes(dtype, shape, device):
    """No page but the first is aligned to anything; neighbours stay."""
    src, dst = (Pools(dtype, (n, *shape), dense((n, *shape)), [0, 200], n, device) for n in (7, 9))
    copy(src, dst, SRC, DST, device)


@pytest.mark.parametrize("offset", range(1, 9))
def test_any_byte_may_be_the_first(offset, device):
    src = Pools("uint8", (7, 3, 40), [120, 40, 1], [offset, offset + 1000], 1, device)
    dst = Pools("uint8", (9, 3, 40), [120, 40, 1], [8, 1109], 2, device)
    copy(src, dst, SRC, DST, device)


SAME_PAGE = [x for x in LAYOUTS if x in (
    "nhd", "transposed", "packed_half", "pairs_half", "layers", "padded", "offset", "pages_inside",
    "sparse",
)]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "uint8"])
@pytest.mark.parametrize(("src", "dst"), [*itertools.permutations(SAME_PAGE, 2)])
def test_from_one_layout_to_another(src, dst, dtype, device):
    """Shapes agree, strides need not."""
    copy(pools(src, dtype, 7, 2, device, seed=1), pools(dst, dtype, 9, 2, device, seed=2),
         SRC, DST, device)  # fmt: skip


@pytest.mark.parametrize("caches", [1, 2, 3, 63, 64, 65, 128, 200, 1000])
def test_many_caches(caches, device):
    src, dst = (pools("nhd", "bfloat16", n, caches, device, (4, 2, 8), seed=n) for n in (7, 9))
    copy(src, dst, SRC, DST, device)


@pytest.mark.parametrize("give", [list, tuple], ids=["list", "tuple"])
def test_sequences_of_caches(give, device):
    copy(*(pools("hnd", "float16", n, 2, device, seed=n) for n in (7, 9)), SRC, DST, device,
         give=give)  # fmt: skip


@pytest.mark.parametrize("layout", ["nhd", "transposed", "flat"])
def test_one_tensor_for_a_list(layout, device):
    copy(*(pools(layout, "float16", n, 1, device, seed=n) for n in (7, 9)), SRC, DST, device,
         give=lambda tensors: tensors[0])  # fmt: skip


@pytest.mark.parametrize("listed", ["src", "dst"])
def test_a_list_of_one_and_a_tensor(listed, device):
    src, dst = (pools("nhd", "uint8", n, 1, device, seed=n).tensors()[0] for n in (7, 9))
    sides = ([src], dst) if listed == "src" else (src, [dst])
    pagetile.copy_pages(*sides, *torch.tensor([[3], [8]], device=device))
    assert same_bits(dst[8], src[3])


@pytest.mark.parametrize("page_dtype", ["int32", "int64"])
@pytest.mark.parametrize("pages", [(7, 9), (9, 7), (1, 1), (70, 3)], ids=str)
def test_pools_of_different_sizes(pages, page_dtype, device):
    count = min(*pages, 5)
    rng = np.random.default_rng(3)
    numbers = [rng.permutation(n)[:count].tolist() for n in pages]
    src, dst = (pools("nhd", "float16", n, 2, device, seed=i) for i, n in enumerate(pages))
    copy(src, dst, *numbers, device, page_dtype)


@pytest.mark.parametrize("page_dtype", ["int32", "int64"])
def test_nothing_to_copy(page_dtype, device):
    copy(*(pools("nhd", "float16", n, 2, device, seed=n) for n in (7, 9)), [], [], device,
         page_dtype)  # fmt: skip


def test_no_caches(device):
    pages = torch.tensor([1, 2], device=device)
    assert pagetile.copy_pages([], [], pages, pages) is None


def test_pages_without_elements(device):
    src, dst = (torch.empty(n, 0, 4, device=device) for n in (7, 9))
    pages = torch.tensor([1, 2], device=device)
    assert pagetile.copy_pages(src, dst, pages, pages) is None


OUTSIDE = {
    "int32": [-1, -2, 9, 10, 100, 2**31 - 1, -(2**31)],
    "int64": [-1, 9, 10, 2**31, 2**32, 2**32 + 1, 2**40, 2**63 - 1, -(2**63), -(2**32) + 2],
}


@pytest.mark.parametrize("page_dtype", ["int32", "int64"])
@pytest.mark.parametrize("side", ["src", "dst", "both"])
def test_pages_outside_a_pool_are_skipped(side, page_dtype, device):
    """What a wrapped number would reach stays as it is. Source pages end at 6, the others at 8."""
    src, dst = (pools("nhd", "uint8", n, 2, device, seed=n) for n in (7, 9))
    outside = OUTSIDE[page_dtype]
    src_pages, dst_pages = [0, 3, 5, 6], [5, 8, 7, 6]
    src_pages += [*outside, 7, 8] if side != "dst" else [i % 7 for i in range(len(outside))]
    dst_pages += [*outside, 1, 2] if side == "both" else []
    dst_pages += outside if side == "dst" else []
    dst_pages += [i % 4 for i in range(len(outside) + 2)] if side == "src" else []
    copy(src, dst, src_pages, dst_pages, device, page_dtype)


def test_one_source_many_copies(device):
    copy(*(pools("nhd", "bfloat16", n, 2, device, seed=n) for n in (7, 9)),
         [3, 3, 3, 3, 1, 1], [0, 8, 2, 4, 1, 6], device)  # fmt: skip


def test_inside_one_pool(device):
    """Copy on write: the same caches on both sides."""
    both = pools("layers", "bfloat16", 9, 4, device)
    copy(both, both, [0, 0, 5], [7, 3, 2], device)


def test_many_pages(device):
    """More pairs than a grid has rows (65,535), in a pool of tiny pages."""
    count = 70_001
    src, dst = (Pools("uint8", (n, 6), [6, 1], [0, 6 * n + 1], n, device)
                for n in (count, count + 100))  # fmt: skip
    rng = np.random.default_rng(4)
    numbers = [rng.permutation(n)[:count].tolist() for n in (count, count + 100)]
    copy(src, dst, *numbers, device)


def test_numpy_arrays():
    """A read-only source is a source."""
    rng = np.random.default_rng(5)
    src, dst = rng.integers(0, 255, (2, 7, 4, 2, 8), np.uint8)
    src.flags.writeable = False
    expected = dst.copy()
    expected[[2, 5]] = src[[0, 1]]
    pagetile.copy_pages([src], [dst], np.array([0, 1]), np.array([2, 5]))
    np.testing.assert_array_equal(dst, expected)


# Caches beyond 32 bits


def test_a_pool_beyond_2_32_elements(device):
    """Page 40 starts at element 5.4e9: it is written, and nothing that an overflow would reach."""
    memory = huge_tensor((41, 1 << 27), torch.float16, device)
    pages = memory[:, :96]
    pages[[7, 38]] = torch.randn(2, 96, device=device).half()
    before = resident_bytes()
    numbers = torch.tensor([[7, 38], [40, 3]], device=device)
    pagetile.copy_pages(pages, pages, *numbers)
    assert resident_bytes() - before < 256 << 20
    for page in range(41):
        source = {40: 7, 3: 38, 7: 7, 38: 38}.get(page)
        if source is None:
            assert not pages[page].any()
        else:
            assert pages[page].all()
            assert same_bits(pages[page], pages[source])
        assert not memory[page, 96:1000].any()
        assert not memory[page, -1000:].any()


def test_a_page_beyond_2_32_bytes(device):
    """The rows of a page 2 GiB apart: the third is 4 GiB from the first."""
    row = (1 << 31) + 64
    memory = huge_tensor((2 * row + 4096,), torch.uint8, device)
    src, dst = (memory[first:].as_strided((2, 3, 64), (64, row, 1)) for first in (0, 1024))
    src.copy_(torch.randint(1, 255, (2, 3, 64), device=device))
    kept = dst.clone()
    pagetile.copy_pages(src, dst, *(torch.tensor([n], device=device) for n in (1, 0)))
    assert same_bits(dst[0], src[1])
    assert same_bits(dst[1], kept[1])
    for at in (row, 2 * row):
        assert not memory[at + 128 : at + 1024].any()
        assert not memory[at + 1024 + 64 : at + 2048].any()
        assert not memory[(at + 1024) % 2**32 + 64 :][:64].any()


# Any problem


@st.composite
def problems(draw):
    """Sizes and strides of both sides; axes in any order, with padding between."""
    pick = lambda *options: draw(st.sampled_from(options))  # noqa: E731
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 8, 16, 24]), max_size=4))
    caches = draw(st.integers(1, 4))
    sides = []
    for _ in range(2):
        pages = draw(st.integers(1, 12))
        full = (pages, *shape)
        order = draw(st.permutations(range(len(full)))) if pick(False, False, True) else None
        order = order or range(len(full))
        unit, strides, extent = pick(1, 1, 4, 16), [0] * len(full), 1
        for axis in reversed(order):
            extent = -(-extent // unit) * unit if extent > 1 else 1
            strides[axis] = extent + unit * pick(0, 0, 0, 1, 3)
            extent = strides[axis] * full[axis]
        first = draw(st.integers(0, 17)) * pick(1, unit)
        step = extent + draw(st.integers(0, 3)) * unit
        sides.append((full, strides, [first + step * i for i in range(caches)]))
    dst_pages = draw(st.permutations(range(-1, sides[1][0][0] + 1)))
    dst_pages = list(dst_pages)[: draw(st.integers(0, len(dst_pages)))]
    src_page = st.integers(-1, sides[0][0][0])
    src_pages = [draw(src_page) for _ in dst_pages]
    return sides, src_pages, dst_pages, pick(*DTYPES), pick("int32", "int64")


@given(problem=problems(), seed=st.integers(0, 2**16))
@settings(max_examples=3 * settings().max_examples)
def test_any_copy(problem, seed, device):
    (src, dst), src_pages, dst_pages, dtype, page_dtype = problem
    src, dst = Pools(dtype, *src, seed, device), Pools(dtype, *dst, seed + 1, device)
    copy(src, dst, src_pages, dst_pages, device, page_dtype)


# With a BlockPool


class Model:
    """Sequences as lists of tokens, beside caches of two layers that must tell the same."""

    def __init__(self, device, num_pages=40, page_size=4) -> None:
        self.device, self.page_size = device, page_size
        self.pool = pagetile.BlockPool(num_pages, page_size)
        shape = (num_pages, page_size, 2, 8)
        self.caches = [torch.zeros(shape, device=device, dtype=torch.float16) for _ in range(4)]
        self.tokens: dict[int, list[int]] = {}
        self.next_token = 1
        self.copies = 0

    def fork(self, sequence) -> int:
        child = self.pool.fork(sequence)
        self.tokens[child] = list(self.tokens[sequence])
        return child

    def start(self) -> int:
        sequence = self.pool.allocate()
        self.tokens[sequence] = []
        return sequence

    def append(self, sequences, counts) -> None:
        """One step: pages copied for all layers at once, then each layer's rows written."""
        step = self.pool.append(sequences, counts)
        to = lambda array: torch.from_numpy(array.copy()).to(self.device)  # noqa: E731
        pagetile.copy_pages(self.caches, self.caches, to(step.copy_src), to(step.copy_dst))
        self.copies += len(step.copy_src)
        new = []
        for sequence, count in zip(sequences, counts, strict=True):
            mine = range(self.next_token, self.next_token + count)
            self.next_token += count
            self.tokens[sequence] += mine
            new += mine
        slots = to(step.slot_mapping)
        for layer in range(2):
            rows = self.rows(new, layer)
            pagetile.cache_write(rows, -rows, *self.caches[2 * layer : 2 * layer + 2], slots)

    def rows(self, tokens, layer) -> torch.Tensor:
        values = torch.tensor(tokens, dtype=torch.float16, device=self.device) + 0.25 * layer
        return values[:, None, None].repeat(1, 2, 8)

    def check(self) -> None:
        for sequence, tokens in self.tokens.items():
            pages = torch.from_numpy(self.pool.pages(sequence)).long().to(self.device)
            for i, cache in enumerate(self.caches):
                rows = self.rows(tokens, i // 2)
                held = cache[pages].flatten(0, 1)[: len(tokens)]
                assert torch.equal(held, -rows if i % 2 else rows), sequence


def test_fork_and_append_keep_both_sequences(device):
    model = Model(device)
    parent = model.start()
    model.append([parent], [6])  # a page, and half of one
    child = model.fork(parent)
    model.append([child], [1])
    assert model.copies == 1
    model.check()
    model.append([parent, child], [1, 5])
    assert model.copies == 1
    model.check()
    assert model.tokens[parent] != model.tokens[child]


def test_many_forks_in_one_step(device):
    model = Model(device)
    parent = model.start()
    model.append([parent], [7])
    beams = [parent, *(model.fork(parent) for _ in range(5))]
    model.append(beams, [1] * 6)
    assert model.copies == 5
    model.check()
    model.append(beams, [3] * 6)
    model.check()


@given(data=st.data())
@settings(max_examples=max(settings().max_examples // 4, 20))
def test_any_forks(data, device):
    model = Model(device, num_pages=200)
    live = [model.start()]
    for _ in range(data.draw(st.integers(1, 8))):
        for parent in data.draw(st.lists(st.sampled_from(live), max_size=3)):
            live.append(model.fork(parent))
        if len(live) > 3 and data.draw(st.booleans()):
            gone = live.pop(data.draw(st.integers(0, len(live) - 1)))
            model.pool.free(gone)
            del model.tokens[gone]
        batch = data.draw(st.lists(st.sampled_from(live), unique=True))
        model.append(batch, [data.draw(st.integers(0, 6)) for _ in batch])
        model.check()


# Errors


def arguments(device, caches=5) -> dict:
    return {
        "src_caches": [torch.full((7, 4, 2, 8), 1.0, device=device) for _ in range(caches)],
        "dst_caches": [torch.full((9, 4, 2, 8), 2.0, device=device) for _ in range(caches)],
        "src_pages": torch.tensor([0, 1], device=device),
        "dst_pages": torch.tensor([5, 6], device=device),
    }


def at(index, change):
    """Replaces one of a list."""

    def changed(tensors):
        tensors = list(tensors)
        tensors[index] = change(tensors[index])
        return tensors

    return changed


SIDES = ("src_caches", "dst_caches")
PAGES = ("src_pages", "dst_pages")
META = (TypeError, ValueError)
halved = lambda x: x.half()  # noqa: E731
all_halved = lambda tensors: [x.half() for x in tensors]  # noqa: E731
shorter = lambda x: x[:, :3]  # noqa: E731
flatter = lambda x: x.flatten(2)  # noqa: E731
transposed = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)  # noqa: E731

# fmt: off
BAD = [
    # (name, argument, change, what is said of it, type)
    *((f"{n}_fewer", n, lambda x: x[:3], r"\w+_caches .*\b3\b", ValueError) for n in SIDES),
    *((f"{n}_one_for_many", n, lambda x: x[0], r"\w+_caches .*\b1\b", ValueError) for n in SIDES),
    *((f"{n}_dtype", n, at(3, halved), rf"{n}\[3\] must be float32.*got float16", ValueError)
      for n in SIDES),
    ("sides_of_other_dtype", "dst_caches", all_halved,
     r"dst_caches\[0\] must be float32.*got float16", ValueError),
    *((f"{n}_shape", n, at(3, shorter), rf"{n}\[3\] .*got .*\(\d, 3, 2, 8\)", ValueError)
      for n in SIDES),
    *((f"{n}_rank", n, at(3, flatter), rf"{n}\[3\] .*got .*\(\d, 4, 16\)", ValueError)
      for n in SIDES),
    *((f"{n}_pages", n, at(3, lambda x: x[:6]), rf"{n}\[3\] .*got .*\(6, 4, 2, 8\)", ValueError)
      for n in SIDES),
    *((f"{n}_strides", n, at(3, transposed), rf"{n}\[3\] .*stride", ValueError) for n in SIDES),
    ("sides_of_other_shape", "dst_caches", lambda t: [x[:, :3] for x in t],
     r"dst_caches\[0\] .*got .*\(9, 3, 2, 8\)", ValueError),
    *((f"{n}_of_nothing", n, at(0, lambda x: x.sum()), rf"{n}\[0\] ", ValueError) for n in SIDES),
    *((f"{n}_rank_6", n, at(0, lambda x: x[:, :, :, :, None, None]), rf"{n}\[0\] .*shape \(\d, 4,",
       ValueError) for n in SIDES),
    *((f"{n}_float64", n, lambda t: [x.double() for x in t], rf"{n}\[0\] must .*got float64",
       ValueError) for n in SIDES),
    *((f"{n}_holds_{type(x).__name__}", n, at(3, lambda _, x=x: x),
       rf"{n}\[3\] must be a DLPack tensor, got .*{type(x).__name__.replace('NoneType', 'None')}",
       TypeError) for n in SIDES for x in (None, 1.0, "cache", [1.0])),
    *((f"{n}_is_{type(x).__name__}", n, lambda _, x=x: x, rf"{n} must be .*got .*"
       rf"{type(x).__name__.replace('NoneType', 'None')}", TypeError)
      for n in SIDES for x in (None, 1.0)),
    *((f"{n}_meta", n, at(3, lambda x: x.to("meta")), rf"{n}\[3\] ", META) for n in SIDES),
    *((f"{n}_shorter", n, lambda x: x[:1], r"\w+_pages .*\(1,\)", ValueError)
      for n in PAGES),
    *((f"{n}_{t}", n, lambda x, t=t: x.to(getattr(torch, t)),
       rf"{n} must be int(32|64) or int(32|64), got {t}", ValueError)
      for n in PAGES for t in ("float32", "uint8")),
    *((f"{n}_int16", n, lambda x: x.short(), rf"{n} must be .*got int16", ValueError)
      for n in PAGES),
    *((f"{n}_rank", n, lambda x: x[None], rf"{n} must have 1 dimension.*got shape \(1, 2\)",
       ValueError) for n in PAGES),
    *((f"{n}_strided", n, lambda x: torch.stack([x, x], 1)[:, 0], rf"{n} must be dense .*stride 2",
       ValueError) for n in PAGES),
    *((f"{n}_is_{type(x).__name__}", n, lambda _, x=x: x, rf"{n} must be a DLPack tensor, got",
       TypeError) for n in PAGES for x in (None, [0, 1], 3)),
]
# fmt: on


@pytest.mark.parametrize(("name", "change", "match", "error"), [x[1:] for x in BAD],
                         ids=[x[0] for x in BAD])  # fmt: skip
def test_error(name, change, match, error, device):
    given = arguments(device)
    given[name] = change(given[name])
    tensors = given["dst_caches"]
    tensors = [x for x in (tensors if isinstance(tensors, list) else [tensors])
               if isinstance(x, torch.Tensor) and x.device.type != "meta"]  # fmt: skip
    before = [x.clone() for x in tensors]
    with pytest.raises(error, match=f"^copy_pages: {match}"):
        pagetile.copy_pages(**given)
    assert all(map(same_bits, tensors, before))


@pytest.mark.parametrize("dtype", ["int64", "float64", "int32", "int16", "int8", "bool"])
def test_types_of_no_cache(dtype, device):
    given = arguments(device)
    given.update({side: [x.to(getattr(torch, dtype)) for x in given[side]] for side in SIDES})
    with pytest.raises(ValueError, match=rf"^copy_pages: src_caches\[0\] must .*got {dtype}"):
        pagetile.copy_pages(**given)


def test_page_arrays_of_two_types(device):
    given = arguments(device)
    given["dst_pages"] = given["dst_pages"].int()
    with pytest.raises(ValueError, match=r"^copy_pages: dst_pages must be int64, got int32"):
        pagetile.copy_pages(**given)
    assert all((x == 2).all() for x in given["dst_caches"])


def test_read_only_destinations_are_refused():
    caches = [np.full((7, 4), i, np.float32) for i in range(3)]
    caches[1].flags.writeable = False
    pages = np.array([0]), np.array([1])
    with pytest.raises(META, match=r"^copy_pages: dst_caches\[1\] .*read-only"):
        pagetile.copy_pages(caches, caches, *pages)
    assert all((x == i).all() for i, x in enumerate(caches))


def test_options_are_keywords():
    given = arguments("cpu")
    with pytest.raises(TypeError, match="positional"):
        pagetile.copy_pages(*given.values(), None)
    pagetile.copy_pages(*given.values(), stream=None)


# On a GPU alone


class OnGpu:
    """Three caches a side, filled so that a page tells where it comes from."""

    def __init__(self, device="cuda", pages=9) -> None:
        numbers = torch.arange(pages, dtype=torch.float16, device=device)
        page = numbers[:, None, None].expand(pages, 16, 128)
        self.src = [page + 100 * i for i in range(3)]
        self.dst = [torch.zeros_like(x) for x in self.src]

    def copy(self, src_pages, dst_pages, **options) -> None:
        pagetile.copy_pages(self.src, self.dst, src_pages, dst_pages, **options)

    def check(self, pairs) -> None:
        for src, dst in zip(self.src, self.dst, strict=True):
            expected = torch.zeros_like(dst)
            for i, j in pairs:
                expected[j] = src[i]
            assert torch.equal(dst, expected)


@needs_gpus(1)
def test_graph_reads_the_pages_of_the_replay():
    """Captured with some pages, replayed with others: numbers and contents of now."""
    pools = OnGpu()
    pages = torch.tensor([[0, 1], [2, 3]], device="cuda")
    graph = captured(lambda: pools.copy(*pages))
    for cache in pools.dst:
        cache.zero_()
    pages.copy_(torch.tensor([[8, -1], [0, 5]]))
    pools.src[1][8] = 7
    graph.replay()
    pools.check([(8, 0)])


@needs_gpus(1)
@pytest.mark.parametrize("how", ["current", "object", "address"])
def test_stream(how):
    """The copy waits for the stream it is on, and the caller does not."""
    pools = OnGpu()
    pages = torch.tensor([[1], [2]], device="cuda")
    expected = [x[1] + 50 for x in pools.src]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        busy = keep_busy()
        for cache in pools.src:
            cache[1] += 50
        if how == "current":
            pools.copy(*pages)
    if how != "current":
        pools.copy(*pages, stream=side if how == "object" else side.cuda_stream)
    assert not busy.query(), "the call has waited"
    side.synchronize()
    assert all(map(torch.equal, (x[2] for x in pools.dst), expected))


@needs_gpus(2)
def test_the_second_gpu():
    """Tensors there, the current device here: it stays the current one, and untouched."""
    here, there = OnGpu("cuda:0"), OnGpu("cuda:1")
    there.copy(*torch.tensor([[1], [2]], device="cuda:1"))
    assert torch.cuda.current_device() == 0
    there.check([(1, 2)])
    here.check([])
    with pytest.raises(ValueError, match=r"^copy_pages: src_pages must be on CUDA device 0"):
        here.copy(*torch.tensor([[1], [2]], device="cuda:1"))


@needs_gpus(1)
def test_tensors_of_two_devices_are_refused():
    pools = OnGpu()
    pages = torch.tensor([[1], [2]], device="cuda")
    with pytest.raises(ValueError, match=r"^copy_pages: \w+_pages must be on CUDA device 0"):
        pools.copy(*pages.cpu())
    pools.dst[2] = pools.dst[2].cpu()
    with pytest.raises(ValueError, match=r"^copy_pages: dst_caches\[2\] must be on CUDA device 0"):
        pools.copy(*pages)
    pools.dst[2] = pools.dst[2].cuda()
    pools.check([])
