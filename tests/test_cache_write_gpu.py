"""cache_write where only a GPU can go wrong: its own arithmetic, graphs, streams, many gigabytes.

The CPU backend, which test_cache_write.py holds to the reference, says what each byte must be.
"""

from __future__ import annotations

import functools
import subprocess
import sys

import numpy as np
import pagetile
import pytest
import torch
from gpu import captured, keep_busy, needs_gpus
from memory import huge_tensor
from problem import same_bits
from reference import FP8, FP8_TABLES

USES = ("cache_write",)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = "cuda"
KINDS = [(t, c) for t in ("float32", "float16", "bfloat16") for c in (None, *FP8)]


# Bits


def neighbours(values) -> np.ndarray:
    """fp32 values, each with the one below and the one above."""
    values = np.asarray(values, np.float32)
    below, above = (np.nextafter(values, np.float32(x)) for x in (-np.inf, np.inf))
    return np.concatenate([below, values, above])


@functools.cache
def scales() -> torch.Tensor:
    """8,400 scales, among them all sorts for which x * (1 / scale) is not x / scale."""
    ratios = np.arange(128, 256)[:, None] / np.arange(16, 32)
    values = [
        [1.0, 0.00181361602],
        np.arange(1, 2001) / 16 / 448,
        neighbours(ratios.ravel()),
        2.0 ** np.arange(-140.0, 128),
        neighbours([2.0**-60, 2.0**60, 2.0**-126, 0.37, 2.5]),
        [0.0, -0.0, -1.0, -0.37, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4028235e38],
    ]
    values = np.concatenate([np.asarray(x, np.float32) for x in values])
    return torch.from_numpy(np.concatenate([values, values[: len(values) % 2]]))


def check_against_cpu(rows, k_scale, v_scale, name):
    """One launch with a scale of each head, every byte compared. rows [T, 1 or heads, D]."""
    tokens, _, dim = rows.shape
    heads = len(k_scale)
    caches = {}
    for device in (DEVICE, "cpu"):
        raw = torch.full((2, tokens, 1, heads, dim), 0x55, dtype=torch.uint8, device=device)
        there = rows.to(device).expand(-1, heads, -1)  # one head's rows may serve all
        pagetile.cache_write(
            there, there, *raw.view(getattr(torch, name)), torch.arange(tokens, device=device),
            k_scale=k_scale.to(device), v_scale=v_scale.to(device),
        )  # fmt: skip
        caches[device] = raw
    actual, expected = caches[DEVICE], caches["cpu"].to(DEVICE)
    if torch.equal(actual, expected):
        return
    wrong = actual != expected
    place = tuple(int(i) for i in np.unravel_index(wrong.byte().argmax().item(), wrong.shape))
    side, token, _, head, d = place
    x, scale = there[token, head, d].item(), (k_scale, v_scale)[side][head].item()
    pytest.fail(
        f"{wrong.sum()} of {wrong.numel()} bytes differ; first: {x!r} / {scale!r} is "
        f"{actual[place]:#x}, on the CPU {expected[place]:#x}"
    )


def one_head(bits: np.ndarray, dtype: str) -> torch.Tensor:
    """[T, 1, 256]"""
    return torch.from_numpy(bits.reshape(-1, 1, 256)).to(DEVICE).view(getattr(torch, dtype))


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_value_at_every_scale(dtype, name):
    """All 65,536 patterns x 8,400 scales, exact: 5.5e8 quotients."""
    k_scale, v_scale = scales().chunk(2)
    rows = one_head(np.arange(65_536, dtype=np.uint16), dtype)
    check_against_cpu(rows, k_scale, v_scale, name)


@pytest.mark.parametrize("name", FP8)
def test_fp32_of_any_size_at_every_scale(name):
    """Half of them any bits, half within the range of some scale."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 32_768, np.uint32)
    sizes = (rng.standard_normal(32_768) * 10 ** rng.uniform(-4, 4, 32_768)).astype(np.float32)
    k_scale, v_scale = scales().chunk(2)
    rows = one_head(np.concatenate([bits, sizes.view(np.uint32)]), "float32")
    check_against_cpu(rows, k_scale, v_scale, name)


@pytest.mark.parametrize("name", FP8)
def test_fp32_around_every_boundary_at_every_scale(name):
    """Values, ties and the end of the range, times the scale, within four fp32 steps."""
    table = FP8_TABLES[name][:0x80]
    values = table[np.isfinite(table)]
    edges = np.concatenate([values, (values[1:] + values[:-1]) / 2, [values[-1] * 17 / 16]])
    edges = torch.from_numpy(np.resize(edges, 256).astype(np.float32)).to(DEVICE)
    steps = torch.arange(-4, 5, dtype=torch.int32, device=DEVICE)
    for scale in scales().chunk(2):
        x = (scale.to(DEVICE)[:, None] * edges).view(torch.int32)  # [heads, 256]
        x = x + steps[:, None, None]  # [9, heads, 256]
        x = torch.cat([x, x ^ -(2**31)]).view(torch.float32)
        check_against_cpu(x, scale, scale, name)


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("offset", [1, 2, 4], ids="offset{}".format)
def test_narrow_vectors_round_alike(offset, dtype, name):
    """Rows that start at an odd element go one by one, others by 2 or by 4: the same bytes."""
    scale = scales()[[0, 1, 7, 2000, 3000, -1, -2, -4, -8]]
    if dtype == "float32":
        bits = np.random.default_rng(1).integers(0, 2**32, 65_536, np.uint32)
        bits[::2] = np.linspace(-500, 500, 32_768, dtype=np.float32).view(np.uint32)
    else:
        bits = np.arange(65_536, dtype=np.uint16)
    memory = torch.empty(65_536 + offset, dtype=getattr(torch, dtype), device=DEVICE)
    rows = memory[offset:].view(256, 1, 256)
    rows.copy_(one_head(bits, dtype))
    check_against_cpu(rows, scale, scale.flip(0), name)


# Graphs


class Write:
    """One call's tensors on the GPU: rows, poisoned caches, slots, scales."""

    def __init__(self, dtype="bfloat16", cache_dtype=None, tokens=64, heads=4, dim=64, seed=0,
                 layout="NHD", device=None, page_size=16, pages=40):  # fmt: skip
        device = device or DEVICE
        random = torch.Generator(device).manual_seed(seed)
        normal = lambda: 4 * torch.randn(tokens, heads, dim, device=device, generator=random)  # noqa: E731
        self.k, self.v = (normal().to(getattr(torch, dtype)) for _ in "kv")
        kind = getattr(torch, cache_dtype or dtype)
        x = 16 // kind.itemsize
        shapes = {
            "NHD": [(pages, page_size, heads, dim)] * 2,
            "HND": [(pages, heads, page_size, dim)] * 2,
            "legacy": [(pages, heads, dim // x, page_size, x), (pages, heads, dim, page_size)],
        }[layout]
        self.caches = [
            torch.full((*shape[:-1], shape[-1] * kind.itemsize), 0x55, dtype=torch.uint8,
                       device=device).view(kind)
            for shape in shapes
        ]  # fmt: skip
        order = torch.randperm(pages * page_size, device=device, generator=random)
        self.slots = order[:tokens].contiguous()
        self.slots[::7] = -1
        self.options = {"layout": layout}
        if cache_dtype:
            self.options["k_scale"] = torch.tensor(0.37, device=device)
            self.options["v_scale"] = torch.rand(heads, device=device, generator=random) + 0.5

    def __call__(self, **more) -> None:
        pagetile.cache_write(self.k, self.v, *self.caches, self.slots, **self.options, **more)

    def poison(self) -> None:
        for cache in self.caches:
            cache.view(torch.uint8).fill_(0x55)

    def taken(self) -> list[torch.Tensor]:
        """The caches as they are, copied; then poisoned again."""
        result = [cache.clone() for cache in self.caches]
        self.poison()
        return result

    def on_cpu(self) -> list[torch.Tensor]:
        """What the CPU backend makes of the same tensors."""
        caches = [torch.full_like(x.view(torch.uint8), 0x55, device="cpu").view(x.dtype)
                  for x in self.caches]  # fmt: skip
        options = {n: x.cpu() if isinstance(x, torch.Tensor) else x
                   for n, x in self.options.items()}  # fmt: skip
        pagetile.cache_write(self.k.cpu(), self.v.cpu(), *caches, self.slots.cpu(), **options)
        return caches

    def check(self) -> None:
        assert all(map(same_bits, [x.cpu() for x in self.caches], self.on_cpu()))


LAYOUTS = ("NHD", "HND", "legacy")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "cache_dtype"), KINDS, ids=str)
def test_graph(dtype, cache_dtype, layout):
    """Replays give the bits of a direct call, with what the tensors hold at the replay (W13)."""
    write, other = (Write(dtype, cache_dtype, layout=layout, seed=seed) for seed in (0, 1))
    graph = captured(write)
    write.poison()
    graph.replay()
    write.check()
    first = write.taken()
    graph.replay()
    assert all(map(same_bits, write.taken(), first))

    write.k.copy_(other.k)
    write.v.copy_(other.v)
    write.slots.copy_(other.slots)
    if cache_dtype:
        write.options["k_scale"].fill_(1.75)
        write.options["v_scale"].mul_(0.3)
    graph.replay()
    write.check()
    replayed = write.taken()
    write()
    assert all(map(same_bits, write.taken(), replayed))
    assert not all(map(same_bits, first, replayed))


def test_a_graph_may_hold_many_calls():
    """One call a layer, as an engine captures them."""
    writes = [Write(seed=seed, cache_dtype=("float8_e4m3fn", None)[seed % 2]) for seed in range(40)]

    def step():
        for write in writes:
            write()

    graph = captured(step)
    for write in writes:
        write.poison()
    graph.replay()
    for write in writes:
        write.check()


FIRST_CALL = """
import pagetile, torch
rows = torch.randn(5, 2, 64, device="cuda").bfloat16()
caches = torch.zeros(2, 3, 4, 2, 64, device="cuda", dtype=torch.bfloat16)
slots = torch.tensor([7, 3, -1, 0, 11], device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    pagetile.cache_write(rows, rows, *caches, slots)
assert not caches.any(), "a capture has written"
graph.replay()
torch.cuda.synchronize()
expected = torch.zeros(12, 2, 64, device="cuda", dtype=torch.bfloat16)
expected[[7, 3, 0, 11]] = rows[[0, 1, 3, 4]]
assert all(torch.equal(x.view(12, 2, 64), expected) for x in caches)
print("right")
"""


def test_the_first_call_of_a_process_may_be_captured():
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True,
                          timeout=300, check=False)  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "right"), done.stderr


def test_calls_allocate_nothing():
    write = Write(cache_dtype="float8_e4m3fn")
    write()
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(200):
        write()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations


# Streams


@pytest.mark.parametrize("how", ["current", "object", "address", "event"])
def test_the_rows_may_be_late(how):
    """Rows, slots and scales that a busy stream makes; the caller waits for none of them."""
    write, late = Write(cache_dtype="float8_e4m3fn"), Write(cache_dtype="float8_e4m3fn", seed=1)
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    write()  # what loads the kernel may wait
    write.poison()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        keep_busy()
        write.k.copy_(late.k)
        write.v.copy_(late.v)
        write.slots.copy_(late.slots)
        for name in ("k_scale", "v_scale"):
            write.options[name].copy_(late.options[name])
        made = torch.cuda.Event()
        made.record()
        if how == "current":
            write()
    if how == "object":
        write(stream=side)
    elif how == "address":
        write(stream=side.cuda_stream)
    elif how == "event":
        other.wait_event(made)
        with torch.cuda.stream(other):
            write()
    assert not made.query(), "the call has waited"
    side.synchronize()
    other.synchronize()
    assert same_bits(write.slots, late.slots)
    write.check()


def test_cupy_arrays_on_a_stream_of_cupy():
    cupy = pytest.importorskip("cupy")
    rows = cupy.zeros((5, 2, 64), cupy.float16)
    caches = cupy.zeros((2, 3, 4, 2, 64), cupy.float16)
    slots = cupy.array([7, 3, -1, 0, 11])
    values = cupy.arange(1, 6, dtype=cupy.float16)[:, None, None]
    rows += 0 * values  # compiles what is to be fast below
    side = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with side:
        with torch.cuda.stream(torch.cuda.ExternalStream(side.ptr)):
            keep_busy()
        rows += values
        pagetile.cache_write(rows, rows, *caches, slots)
    side.synchronize()
    expected = np.zeros((12, 2, 64), np.float16)
    expected[[7, 3, 0, 11]] = np.array([1, 2, 4, 5], np.float16)[:, None, None]
    for cache in cupy.asnumpy(caches):
        np.testing.assert_array_equal(cache.reshape(12, 2, 64), expected)


# Programmatic dependent launch


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "cache_dtype"), KINDS, ids=str)
def test_pdl_writes_the_same(dtype, cache_dtype, layout):
    write = Write(dtype, cache_dtype, layout=layout)
    write(pdl=True)
    write.check()


class Chain:
    """Rows go back and forth between two caches, each call reading what the one before wrote.

    A row that is read before the last call has ended, or written while it is still being read,
    does not arrive.
    """

    def __init__(self, tokens, heads=8, dim=128, calls=40) -> None:
        random = torch.Generator(DEVICE).manual_seed(tokens)
        self.k = torch.zeros(2, tokens, heads, dim, dtype=torch.bfloat16, device=DEVICE)
        self.v = torch.zeros_like(self.k)
        self.start = torch.arange(tokens * heads * dim, device=DEVICE).view_as(self.k[0]) % 65_521
        self.start = self.start.to(torch.int32).short().view(torch.bfloat16)
        self.orders = [torch.randperm(tokens, device=DEVICE, generator=random)
                       for _ in range(calls)]  # fmt: skip
        self.expected = self.start.clone()
        for order in self.orders:
            moved = torch.empty_like(self.expected)
            moved[order] = self.expected
            self.expected = moved

    def restart(self) -> None:
        self.k[0], self.v[0] = self.start, self.start.flip(1)
        torch.cuda.synchronize()

    def __call__(self) -> None:
        for i, order in enumerate(self.orders):
            here, there = i % 2, 1 - i % 2
            caches = self.k[there].unsqueeze(1), self.v[there].unsqueeze(1)  # pages of one token
            pagetile.cache_write(self.k[here], self.v[here], *caches, order, pdl=True)

    def check(self) -> None:
        last = len(self.orders) % 2
        assert same_bits(self.k[last], self.expected)
        assert same_bits(self.v[last], self.expected.flip(1))


@pytest.mark.parametrize("tokens", [1, 64, 2048, 20_000])
def test_pdl_chain(tokens):
    chain = Chain(tokens)
    for _ in range(5):
        chain.restart()
        chain()
        chain.check()


@pytest.mark.parametrize("tokens", [1, 64, 2048, 20_000])
def test_pdl_chain_in_a_graph(tokens):
    chain = Chain(tokens)
    graph = captured(chain)
    for _ in range(5):
        chain.restart()
        graph.replay()
        chain.check()


def test_pdl_the_last_write_wins():
    """The same slots again and again: an earlier call's rows never land later."""
    writes = [Write(tokens=4096, pages=512, seed=seed) for seed in range(30)]
    for write in writes:
        write.slots, write.caches = writes[-1].slots, writes[-1].caches
    for _ in range(5):
        writes[-1].poison()
        for write in writes:
            write(pdl=True)
        writes[-1].check()


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_pdl_after_a_kernel_of_another_library(graph):
    """The rows are the work of the kernel just before: they are not read before it has ended."""
    tokens, steps = 8192, 16
    rows = torch.empty(tokens, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    caches = torch.empty(2, tokens * steps // 16, 16, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    slots = torch.arange(tokens * steps, device=DEVICE).flip(0).chunk(steps)

    def call():
        rows.zero_()
        for step in slots:
            rows.add_(1)
            pagetile.cache_write(rows, rows, *caches, step, pdl=True)

    if graph:
        call = captured(call).replay
    for _ in range(3):
        caches.zero_()
        call()
        expected = torch.arange(steps, 0, -1, device=DEVICE).repeat_interleave(tokens)
        for cache in caches:
            assert (cache.view(-1, 8 * 128) == expected[:, None]).all()


# Sizes


def as_bytes(x) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def nonzero_bytes(x) -> int:
    """In parts, since count_nonzero makes a copy."""
    return sum(torch.count_nonzero(part).item() for part in as_bytes(x).view(-1).split(1 << 28))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_caches_beyond_2_32_elements(cache_dtype, layout):
    """W1: 4.33e9 elements in each, 8.7 GB in bf16. Every element is looked at."""
    pages, size, heads, dim = 66_000, 16, 32, 128
    kind = getattr(torch, cache_dtype)
    shape = (pages, size, heads, dim) if layout == "NHD" else (pages, heads, size, dim)
    rows = torch.randint(1, 9, (2, 9, heads, dim), device=DEVICE).bfloat16()
    end = pages * size
    wraps = [2**32 // (heads * dim), 2**31 // (heads * dim)]  # where offsets of 32 bits begin anew
    slots = torch.tensor([end - 1, end - 2, end - 16, end - 17, wraps[0], wraps[0] - 1, wraps[1],
                          wraps[1] - 1, 5], device=DEVICE)  # fmt: skip
    outside = torch.tensor([end, end + 1, -1, 2**31, 2**40], device=DEVICE)
    caches = [huge_tensor(shape, kind, DEVICE) for _ in "kv"]
    more = torch.cat([rows, rows[:, : len(outside)]], 1)
    pagetile.cache_write(*more, *caches, torch.cat([slots, outside]), layout=layout)
    for cache, source in zip(caches, rows, strict=True):
        view = cache if layout == "NHD" else cache.transpose(1, 2)
        for slot, row in zip(slots.tolist(), source.to(kind), strict=True):
            assert same_bits(view[slot // size, slot % size], row)
        assert nonzero_bytes(cache) == nonzero_bytes(source.to(kind)), "more was written"


def test_a_pool_beyond_2_31_slots():
    """Pages of 32,768 tokens of one byte, 70,000 of them: a slot needs more than 31 bits."""
    pages, size = 70_000, 32_768
    caches = [huge_tensor((pages, size, 1, 1), torch.float8_e5m2, DEVICE) for _ in "kv"]
    end = pages * size
    slots = [end - 1, end - size, 2**31, 2**31 - 1, 2**31 + size + 3, 12_345, 0]
    outside = [end, end + 5, -1, -(2**31), 2**32, 2**40]
    rows = torch.arange(1, 14, device=DEVICE).half()[:, None, None]
    pagetile.cache_write(rows, -rows, *caches, torch.tensor(slots + outside, device=DEVICE))
    for cache, sign in zip(caches, (1, -1), strict=True):
        flat = cache.view(-1)
        assert [flat[slot].item() for slot in slots] == [sign * i for i in range(1, 8)]
        assert nonzero_bytes(cache) == len(slots)


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("tokens", [65_535, 65_536, 65_537, 1_000_000])
def test_many_tokens(tokens, cache_dtype, slot_dtype):
    """W17: more tokens than a grid has rows. All arrive."""
    heads, dim, size = 2, 64, 16
    pages = tokens // size + 100
    rows = torch.randint(1, 16, (2, tokens, heads, dim), device=DEVICE).bfloat16()
    kind = getattr(torch, cache_dtype)
    caches = torch.zeros(2, pages * size, heads, dim, device=DEVICE, dtype=kind)
    slots = torch.randperm(pages * size, device=DEVICE)[:tokens]
    given = slots.clone()
    given[::1000] = -1
    paged = [cache.view(pages, size, heads, dim) for cache in caches]
    pagetile.cache_write(*rows, *paged, given.to(slot_dtype))
    for cache, source in zip(caches, rows, strict=True):
        expected = torch.zeros_like(as_bytes(cache))
        expected[slots[given >= 0]] = as_bytes(source[given >= 0].to(kind))
        assert torch.equal(as_bytes(cache), expected)


def test_more_elements_than_an_int_counts():
    """3,000,000 rows of 1,024, one by one: 3e9 threads. Row t starts at element t of one line."""
    tokens, dim = 3_000_000, 1024
    line = torch.randint(1, 16, (tokens + dim,), device=DEVICE).bfloat16()
    rows = line.as_strided((tokens, 1, dim), (1, dim, 1))
    caches = [huge_tensor((tokens, 1, 1, dim), torch.float8_e4m3fn, DEVICE) for _ in "kv"]
    slots = torch.arange(tokens - 1, -1, -1, device=DEVICE)
    pagetile.cache_write(rows, rows, *caches, slots)
    codes = line.to(torch.float8_e4m3fn).view(torch.uint8)
    windows = codes.as_strided((tokens, dim), (1, 1))
    for cache in caches:
        held = cache.view(torch.uint8).view(tokens, dim)
        for begin in range(0, tokens, 250_000):
            part = windows[begin : begin + 250_000]
            mirrored = held[tokens - begin - len(part) : tokens - begin].flip(0)
            assert torch.equal(mirrored, part)


# Two GPUs


@needs_gpus(2)
@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("pdl", [False, True], ids=["plain", "pdl"])
def test_the_tensors_say_which_gpu(pdl, current):
    """The current device is no matter, stays what it was, and nothing there is touched."""
    writes = [Write(device=f"cuda:{i}", cache_dtype="float8_e4m3fn") for i in (0, 1)]
    with torch.cuda.device(current):
        writes[1 - current](pdl=pdl)
        assert torch.cuda.current_device() == current
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    writes[1 - current].check()
    for cache in writes[current].caches:
        assert (cache.view(torch.uint8) == 0x55).all()


@needs_gpus(2)
def test_the_stream_of_the_other_gpu():
    write, late = (Write(device="cuda:1", seed=seed) for seed in (0, 1))
    side = torch.cuda.Stream("cuda:1")
    torch.cuda.synchronize(1)
    with torch.cuda.stream(side):
        keep_busy()
        write.k.copy_(late.k)
    assert torch.cuda.current_device() == 0
    write(stream=side)
    side.synchronize()
    assert same_bits(write.k, late.k)
    write.check()


@needs_gpus(2)
def test_tensors_of_two_gpus_are_refused():
    here, there = (Write(device=f"cuda:{i}") for i in (0, 1))
    for name in ("v", "slots"):
        given = {"v": here.v, "slots": here.slots, name: getattr(there, name)}
        with pytest.raises(ValueError, match=r"^cache_write: \w+ must be on CUDA device 0"):
            pagetile.cache_write(here.k, given["v"], *here.caches, given["slots"])
    with pytest.raises(ValueError, match=r"^cache_write: k_cache must be on CUDA device 0"):
        pagetile.cache_write(here.k, here.v, *there.caches, here.slots)


def test_cupy_views_that_run_backwards():
    """Negative strides of rows, heads, pages and scales: as the same views on the CPU."""
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(3)
    k, v = rng.standard_normal((2, 6, 4, 64)).astype(np.float16)
    slots = rng.permutation(20)[:6]
    scales = np.array([0.5, 0.01, 3.0, 0.00181361602], np.float32)

    def write(library):
        rows = [library.asarray(x)[::-1, ::-1] for x in (k, v)]
        caches = library.zeros((2, 5, 4, 4, 64), np.uint8)
        scale = library.asarray(scales)[::-1]
        pagetile.cache_write(
            *rows,
            caches[0][::-1],
            caches[1][:, :, ::-1],
            library.asarray(slots),
            k_scale=scale,
            v_scale=scale,
            kv_dtype="fp8_e4m3",
        )
        return caches

    expected = write(np)
    assert expected.any()
    np.testing.assert_array_equal(cupy.asnumpy(write(cupy)), expected)
