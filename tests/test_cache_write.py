"""cache_write against the reference: every element of the memory, and exact fp8 rounding."""

from __future__ import annotations

import numpy as np
import pagetile
import pytest
import reference
import torch
from cases import WRITES, WriteCase
from problem import WriteProblem, same_bits

USES = ("cache_write",)
FP8_MAX = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def test_case_names_are_unique():
    names = [case.name for case in WRITES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("case", WRITES, ids=lambda case: case.name)
def test_write(case, device):
    problem = WriteProblem(case, device)
    problem.run()
    problem.check()


# Rounding


def quantise(bits, dtype, name, scale, device):
    """fp8 codes that cache_write stores for raw inputs, 256 to a row."""
    rows = torch.from_numpy(np.ascontiguousarray(bits).reshape(-1, 1, 256)).to(device)
    rows = rows.view(getattr(torch, dtype))
    caches = torch.full((2, len(rows), 1, 1, 256), 0x55, dtype=torch.uint8, device=device)
    caches = caches.view(getattr(torch, name))
    slots = torch.arange(len(rows), device=device)
    scale = torch.tensor(scale, dtype=torch.float32, device=device)
    pagetile.cache_write(rows, rows, *caches, slots, k_scale=scale, v_scale=scale)
    k, v = caches.view(torch.uint8).cpu().numpy().reshape(2, -1)
    np.testing.assert_array_equal(k, v)
    return k


def check_codes(bits, dtype, name, scale, device):
    """All elements; a NaN, a zero's sign and a saturated value included."""
    bits = np.resize(bits, -(-bits.size // 256) * 256)
    actual = quantise(bits, dtype, name, scale, device)
    with np.errstate(all="ignore"):
        x = reference.decode(bits, dtype).astype(np.float32) / np.float32(scale)
    expected = reference.fp8_encode(x, name)
    wrong = np.flatnonzero(actual != expected)
    assert wrong.size == 0, (
        f"{wrong.size} of {bits.size} wrong; first: x/scale {x[wrong[0]]!r} stored as "
        f"{actual[wrong[0]]:#x}, not {expected[wrong[0]]:#x}"
    )


@pytest.mark.parametrize("name", reference.FP8)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("scale", [0.0, -0.0, -1.0, -0.37, np.inf, -np.inf, np.nan, 1e-45, -1e-45,
                                   2.0**-140, 2.0**-126, 2.0**-61, 2.0**61, 2.0**127, 3.4028235e38],
                         ids=str)  # fmt: skip
def test_scales_that_nobody_should_give(scale, dtype, name, device):
    """Zero, infinity, NaN, subnormals: the stored code is still that of the fp32 quotient."""
    check_codes(np.arange(65_536, dtype=np.uint16), dtype, name, np.float32(scale), device)


# absmax / 448 of a calibrated layer; sixteenths of the range; powers of two; far ends
SCALES = [1.0, 0.00181361602, *(i / 16 / 448 for i in range(1, 17)), 0.37, 2.5]
SCALES += [2.0**e for e in (-20, -9, -3, -1, 1, 4, 11, 20)]


@pytest.mark.parametrize("name", reference.FP8)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_value(dtype, name, device):
    """All 65,536 patterns, NaN and infinities among them, at many scales."""
    bits = np.arange(65_536, dtype=np.uint16)
    for scale in SCALES:
        check_codes(bits, dtype, name, scale, device)


@pytest.mark.parametrize("name", reference.FP8)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scales_of_the_data(dtype, name, device):
    """scale = x / max: the calibrated case, x itself lands on the largest value or one ulp off."""
    bits = np.arange(65_536, dtype=np.uint16)
    x = np.abs(np.random.default_rng(0).standard_normal(25)) * 8
    for value in reference.decode(reference.encode(x, dtype), dtype):
        check_codes(bits, dtype, name, value / FP8_MAX[name], device)


@pytest.mark.parametrize("name", reference.FP8)
@pytest.mark.parametrize("scale", [1.0, 0.00181361602, 0.37, 2.5, 3.0, 2.0**-9, 2.0**7], ids=str)
def test_fp32_around_every_rounding_boundary(scale, name, device):
    """Values, ties and their neighbours within four fp32 steps, both signs."""
    table = reference.FP8_TABLES[name][:0x80]
    values = table[np.isfinite(table)]
    boundaries = np.concatenate([values, (values[1:] + values[:-1]) / 2, [values[-1] * 17 / 16]])
    steps = np.arange(-4, 5, dtype=np.int32)
    x = (boundaries * np.float32(scale)).astype(np.float32).view(np.int32)
    x = np.maximum(x[:, None] + steps, 0).astype(np.uint32).ravel()
    check_codes(np.concatenate([x, x | 0x80000000]), "float32", name, scale, device)


@pytest.mark.parametrize("name", reference.FP8)
def test_fp32_of_any_size(name, device):
    rng = np.random.default_rng(1)
    check_codes(rng.integers(0, 2**32, 200_000, np.uint32), "float32", name, 1.0, device)
    x = rng.standard_normal(200_000).astype(np.float32)
    check_codes(x.view(np.uint32), "float32", name, 0.0123, device)


@pytest.mark.parametrize("name", reference.FP8)
def test_ties_go_to_the_even_code(name, device):
    """Exact ties: with a power-of-two scale the quotient is exact."""
    table = reference.FP8_TABLES[name][:0x80]
    values = table[np.isfinite(table)]
    ties = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    for scale in (1.0, 0.25, 64.0):
        x = np.resize(ties * np.float32(scale), 256)
        codes = quantise(x.view(np.uint32), "float32", name, scale, device)[: ties.size]
        lower = np.arange(ties.size)
        np.testing.assert_array_equal(codes, lower + lower % 2)


@pytest.mark.parametrize("name", reference.FP8)
def test_special_values(name, device):
    """NaN to 0x7F, infinity and all beyond the range to the largest value, -0 keeps its sign."""
    top = {"float8_e4m3fn": 0x7E, "float8_e5m2": 0x7B}[name]
    x = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-30, -1e-30, 1e38, -1e38]
    x += [FP8_MAX[name], -FP8_MAX[name], FP8_MAX[name] * 1.07, -FP8_MAX[name] * 1.07]
    expected = [0x7F, 0x7F, top, top | 0x80, 0, 0x80, 0, 0x80] + [top, top | 0x80] * 3
    x = np.resize(np.array(x, np.float32), 256)
    codes = quantise(x.view(np.uint32), "float32", name, 1.0, device)
    np.testing.assert_array_equal(codes[: len(expected)], expected)


def test_requantised_data_are_stable(device):
    """decode(code) * scale written with the same scale gives the code back, for every scale."""
    codes = np.arange(256).astype(np.uint8)
    codes = np.where(codes & 0x7F == 0x7F, 0, codes).astype(np.uint8)
    values = reference.FP8_TABLES["float8_e4m3fn"][codes].astype(np.float32)
    for scale in np.random.default_rng(2).uniform(1e-3, 4, 200).astype(np.float32):
        x = (values * scale).astype(np.float32)
        again = quantise(x.view(np.uint32), "float32", "float8_e4m3fn", scale, device)
        np.testing.assert_array_equal(again, codes)


# The legacy layout


def legacy_caches(rng, pages, heads, dims, page_size, x, kind, pad):
    """Poisoned K [P, Hkv, D / x, S, x] and V [P, Hkv, D, S], with gaps between pages, or heads."""
    caches, gap = [], int(pad == "heads")
    for chunks, *inner in ((dims[0] // x, page_size, x), (dims[1], page_size)):
        shape = (heads, chunks + gap, *inner)
        size = int(np.prod(shape))
        pitch = size + 3 * (pad == "pages")
        memory = rng.integers(0, 256, pages * pitch * kind.itemsize, np.uint8)
        memory = torch.from_numpy(memory).view(kind).view(pages, pitch)
        caches.append((memory, memory[:, :size].unflatten(1, shape)[:, :, :chunks]))
    return caches


@pytest.mark.parametrize("pad", [None, "pages", "heads", "rows"])
@pytest.mark.parametrize(
    ("heads", "dims", "x"),
    [(2, (64, 64), 8), (3, (48, 40), 16), (2, (64, 64), 4), (1, (46, 46), 2), (2, (8, 5), 1),
     (40, (128, 128), 8), (65, (128, 64), 16), (3, (192, 128), 8), (2, (9, 9), 3)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [("bfloat16", None), ("float32", None), ("float16", "float8_e4m3fn"),
     ("bfloat16", "float8_e5m2"), ("float32", "float8_e4m3fn")],
    ids=str,
)  # fmt: skip
def test_legacy_layout(dtype, cache_dtype, heads, dims, x, pad, device):
    """Chunks of any x, heads of more chunks than a CTA has threads, gaps anywhere."""
    pages, page_size, tokens = 3, 8, 11
    rng = np.random.default_rng(5)
    name = cache_dtype or dtype
    caches = legacy_caches(rng, pages, heads, dims, page_size, x, getattr(torch, name), pad)
    slots = rng.permutation(pages * page_size)[:tokens]
    slots[[1, 4]] = -1, pages * page_size
    scale = rng.uniform(0.3, 3, 1 if pad is None else heads).astype(np.float32)
    scale = scale if cache_dtype else None
    given, rows = [], []
    for d, (memory, view) in zip(dims, caches, strict=True):
        wide = d + 8 * (pad == "rows")
        raw = reference.encode(4 * rng.standard_normal((tokens, heads, wide)), dtype)
        rows.append(torch.from_numpy(raw).view(getattr(torch, dtype)).to(device)[..., :d])
        raw = raw[..., :d]
        there = memory.clone().to(device)
        given.append((there, there.as_strided(view.shape, view.stride())))
        bits = view.view(BITS[view.itemsize]).numpy()  # shares the memory
        bits = bits.transpose(0, 3, 1, 2, 4) if view.ndim == 5 else bits.transpose(0, 3, 1, 2)
        logical = bits.reshape(pages, page_size, heads, d)
        reference.cache_write(logical, raw, slots, dtype=dtype, cache_dtype=name, scale=scale)
        bits[...] = logical.reshape(bits.shape)
    scales = None if scale is None else torch.from_numpy(scale).to(device)
    pagetile.cache_write(
        *rows, given[0][1], given[1][1], torch.from_numpy(slots).to(device),
        k_scale=scales, v_scale=scales, layout="legacy",
    )  # fmt: skip
    for (actual, _), (expected, _) in zip(given, caches, strict=True):
        assert same_bits(actual.cpu(), expected)


BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


# Copies


def test_pdl_is_no_matter_to_the_result(device):
    problem = WriteProblem(WriteCase("pdl", cache_dtype="float8_e4m3fn", scales="heads"), device)
    pagetile.cache_write(**problem.send(), pdl=True)
    problem.check()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_copies_keep_every_bit(dtype, device):
    """NaN payloads, infinities, -0 and subnormals arrive as they are."""
    raw = reference.FORMATS[dtype].raw
    rng = np.random.default_rng(3)
    bits = np.arange(65_536, dtype=raw)
    if raw is np.uint32:  # any bits, then infinity and NaN
        bits[256:] = rng.integers(0, 2**32, 65_280, np.uint32)
        bits[:256] += 0xFF800000
    rows = torch.from_numpy(bits.reshape(256, 2, 128)).to(device)
    cache = torch.zeros((2, 16, 16, 2, 128), dtype=rows.dtype, device=device)
    slots = torch.arange(255, -1, -1, device=device)
    as_dtype = getattr(torch, dtype)
    pagetile.cache_write(rows.view(as_dtype), rows.view(as_dtype), *cache.view(as_dtype), slots)
    for half in cache.reshape(2, 256, 2, 128).flip(1):
        assert torch.equal(half.view(torch.uint8), rows.view(torch.uint8))


@pytest.mark.parametrize("case", [c for c in WRITES if c.name.startswith("nhd_")],
                         ids=lambda case: case.name)  # fmt: skip
def test_hnd_is_nhd_permuted(case, device):
    """One write through layout="HND", one through "NHD": the same cache."""
    problem = WriteProblem(case, device)
    arguments = problem.send()
    hnd = {n: arguments[n].view(torch.uint8).permute(0, 2, 1, 3).contiguous()
           for n in ("k_cache", "v_cache")}  # fmt: skip
    hnd = {n: x.view(arguments[n].dtype) for n, x in hnd.items()}
    pagetile.cache_write(**arguments)
    pagetile.cache_write(**{**arguments, **hnd, "layout": "HND"})
    for name, x in hnd.items():
        assert same_bits(x.permute(0, 2, 1, 3), arguments[name])


def test_the_last_of_equal_rows_may_win(device):
    """A slot named twice by equal rows is no race: the cache holds that row."""
    rows = torch.randn(1, 2, 64, device=device).expand(4, 2, 64)
    k_cache, v_cache = torch.zeros(2, 3, 4, 2, 64, device=device)
    pagetile.cache_write(rows, rows, k_cache, v_cache, torch.full((4,), 7, device=device))
    assert torch.equal(k_cache[1, 3], rows[0])
    assert torch.count_nonzero(v_cache).item() == torch.count_nonzero(rows[0]).item()


def test_broadcast_rows(device):
    """Stride 0 over tokens and heads is a stride like any other."""
    row = torch.randn(64, device=device)
    rows = row.expand(5, 2, 64)
    k_cache, v_cache = torch.zeros(2, 2, 4, 2, 64, device=device)
    pagetile.cache_write(rows, rows, k_cache, v_cache, torch.arange(5, device=device))
    expected = torch.zeros(8, 2, 64, device=device)
    expected[:5] = row
    assert torch.equal(k_cache.reshape(8, 2, 64), expected)
    assert torch.equal(v_cache.reshape(8, 2, 64), expected)


@pytest.mark.parametrize("offset", [1, 2, 3, 5])
@pytest.mark.parametrize("dim", [33, 64])
def test_odd_addresses(dim, offset, device):
    """fp8 caches that start at any byte; what is around them stays."""
    problem = WriteProblem(
        WriteCase(f"odd{dim}", cache_dtype="float8_e4m3fn", head_dim=(dim, dim)), device
    )
    arguments = problem.send()
    shape, size = (5, 16, 3, dim), 5 * 16 * 3 * dim
    heap = torch.full((2, size + 64), 0x55, dtype=torch.uint8, device=device)
    views = [x[offset : offset + size].view(shape) for x in heap]
    names = ("k_cache", "v_cache")
    for view, name in zip(views, names, strict=True):
        view.copy_(arguments[name].view(torch.uint8))
    given = {n: x.view(torch.float8_e4m3fn) for n, x in zip(names, views, strict=True)}
    pagetile.cache_write(**arguments)
    pagetile.cache_write(**{**arguments, **given})
    for name in names:
        assert same_bits(given[name], arguments[name])
    assert (heap[:, :offset] == 0x55).all()
    assert (heap[:, offset + size :] == 0x55).all()
