"""Faults of cache writes that users of other kernels met in public; the id names the fault.

GPU only, so not here: W13 with a graph replayed between two values of the scale, which is in
test_cache_write_gpu.py; the times of B7.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pagetile
import pytest
import reference
import torch
from cases import Case, WriteCase
from memory import huge_tensor, resident_bytes
from problem import Problem, WriteProblem, to_numpy
from registry import Registry

USES = ("cache_write",)
READ_TOO = ("W12", "W13")  # these go through paged_attention as well
BUGS = Registry()
bug = BUGS.bug


def write(device, case):
    problem = WriteProblem(case, device)
    problem.run()
    problem.check()


@bug("W1-last_blocks_of_64000")
def _(device):
    """4.19e9 elements a tensor: the last slots are written, and nothing an overflow would reach."""
    shape = (64_000, 16, 32, 128)
    caches = [huge_tensor(shape, torch.float16, device) for _ in "kv"]
    rows = torch.randn(2, 5, 32, 128, device=device).half()
    last = 64_000 * 16 - 1
    slots = torch.tensor([last, last - 1, last - 16, last - 47, 2**19 - 1], device=device)
    before = resident_bytes()
    pagetile.cache_write(*rows, *caches, slots)
    assert resident_bytes() - before < 256 << 20
    for cache, source in zip(caches, rows, strict=True):
        flat = cache.view(-1, 32 * 128)
        assert torch.equal(flat[slots], source.view(5, -1))
        for slot in slots.tolist():
            for wrap in (2**31, 2**32):
                alias = slot * 4096 % wrap // 4096
                if alias not in slots.tolist():
                    assert not flat[alias].any()
            for neighbour in {slot - 1, slot + 1} - set(slots.tolist()):
                assert not flat[neighbour : neighbour + 1].any()


@bug("W2", *((f"head_dim{d}_{s}", d, s) for d in (46, 48, 64) for s in ("nhd", "packed", "hnd")))
def _(device, dim, storage):
    """Rows of 92 bytes: all but the first are unaligned."""
    write(device, WriteCase(f"W2_{dim}_{storage}", heads=1, head_dim=(dim, dim), storage=storage))


W3 = [
    (f"{dtype}_{cache or dtype}", dtype, cache)
    for dtype in ("float32", "float16", "bfloat16")
    for cache in (None, *reference.FP8)
]


@bug("W3-hnd", *W3)
def _(device, dtype, cache_dtype):
    """Eight heads, four slots: whoever takes dim 1 of an HND cache for its slots is found out."""
    case = WriteCase("W3", heads=8, page_size=4, num_pages=7, dtype=dtype, cache_dtype=cache_dtype)
    problems = [WriteProblem(replace(case, storage=s), device) for s in ("nhd", "hnd")]
    caches = []
    for problem in problems:
        problem.slots, problem.sources = problems[0].slots, problems[0].sources
        arguments = problem.send()
        pagetile.cache_write(**arguments)
        problem.check()
        caches.append([arguments[name] for name in ("k_cache", "v_cache")])
    rows = problems[0].slots
    for nhd, hnd in zip(*caches, strict=True):
        page, slot = torch.from_numpy(rows // 4), torch.from_numpy(rows % 4)
        nhd, hnd = nhd.view(torch.uint8).cpu(), hnd.view(torch.uint8).cpu()
        assert torch.equal(nhd[page, slot], hnd.permute(0, 2, 1, 3)[page, slot])


@bug("W6-unbind", ("nhd", "interleaved"), ("halves", "halves"), ("layers", "layers"))
def _(device, storage):
    """K and V unbound from one tensor: the page stride is not page_size rows."""
    write(device, WriteCase(f"W6_{storage}", storage=storage, skipped=2))


@bug("W7-padded_rows")
def _(device):
    """16 rows, 11 slots: the other rows are graph padding."""
    write(device, WriteCase("W7", tokens=11, extra_rows=5))


@bug("W8-skipped", *((n, n) for n in ("first", "middle", "last", "scattered", "all")))
def _(device, which):
    problem = WriteProblem(WriteCase(f"W8_{which}"), device)
    skipped = {"first": [0], "middle": [10], "last": [-1], "scattered": [0, 3, 4, 11, 20]}
    problem.slots[skipped.get(which, slice(None))] = -1
    problem.run()
    problem.check()


@bug("W9-saturation", *((c, c) for c in reference.FP8))
def _(device, name):
    """Beyond the range, infinity included: the largest value. NaN stays NaN."""
    top = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}[name]
    x = torch.tensor([500.0, -500, 6e4, -6e4, 1e30, -1e30, torch.inf, -torch.inf, torch.nan])
    rows = (x / 500 * top * 1.1).view(1, 1, 9).to(device)
    caches = torch.zeros(2, 1, 1, 1, 9, dtype=torch.uint8, device=device)
    caches = caches.view(getattr(torch, name))
    pagetile.cache_write(rows, rows, *caches, torch.zeros(1, dtype=torch.int64, device=device))
    stored = to_numpy(caches[0].float()).ravel()
    np.testing.assert_array_equal(stored, [top, -top] * 4 + [np.nan])


@bug("W11-requantised_ties", *((f"scale{i}", i) for i in range(8)))
def _(device, seed):
    """x on a tie times the scale: dividing by the scale and multiplying by 1/scale differ."""
    scale = np.random.default_rng(seed).uniform(1e-3, 2, 2).astype(np.float32)
    case = WriteCase("W11", 1, 0, 1, (126, 126), 1, 1, "float32", "float8_e4m3fn", seed=seed)
    problem = WriteProblem(case, device)
    table = reference.FP8_TABLES["float8_e4m3fn"][:0x7F]
    ties = ((table[1:] + table[:-1]) / 2).astype(np.float32)
    for (_, raw, _), s in zip(problem.sources, scale, strict=True):
        raw[...] = (ties * s).view(np.uint32)
    problem.scales = {"k": scale[:1], "v": scale[1:]}
    problem.run()
    problem.check()


def round_trip(device, case, k_scale, v_scale):
    """Keys written by cache_write with two scales, read by paged_attention with the same two."""
    problem = Problem(case, device)
    batch = range(len(case.kv_lens))
    pages, offsets = (np.concatenate(x) for x in zip(*map(problem.places_of, batch), strict=True))
    rows = torch.randn(2, len(pages), case.heads[1], case.head_dim[0], device=device).bfloat16()
    scales = {n: torch.tensor([x], device=device) for n, x in (("k", k_scale), ("v", v_scale))}
    named = {f"{name}_scale": scale for name, scale in scales.items()}
    caches = problem.arguments["k_cache"], problem.arguments["v_cache"]
    slots = pages.astype(np.int64) * case.page_size + offsets
    pagetile.cache_write(*rows, *caches, torch.from_numpy(slots).to(device), **named)
    raws = (problem.caches.k_raw, problem.caches.v_raw)
    for raw, source, (name, scale) in zip(raws, rows, scales.items(), strict=True):
        x = source.float().cpu().numpy() / np.float32(scale.item())
        raw[pages, offsets] = reference.fp8_encode(x, case.kv)
        problem.scales[name] = (None, np.full((len(batch), case.heads[1]), scale.item()))
    problem.check(*problem.run(**named))


W12 = [
    (f"{phase}_{c[7:]}_{scales[0]}", phase, c, scales)
    for phase in ("decode", "prefill", "mixed")
    for c in reference.FP8
    for scales in ((0.37, 2.5), (2.5, 0.37))
]


@bug("W12-two_scales", *W12)
def _(device, phase, cache_dtype, scales):
    q_lens = {"decode": (1, 1), "prefill": (40, 33), "mixed": (1, 33)}[phase]
    case = Case(f"W12_{phase}", q_lens, (40, 33), heads=(8, 2), cache_dtype=cache_dtype)
    round_trip(device, case, *scales)


@bug("W13-scale_value_changes")
def _(device):
    """The scale is read at each call, from the tensor: no copy of its first value."""
    problem = Problem(Case("W13", scales="one", cache_dtype="float8_e4m3fn"), device)
    problem.check(*problem.run())
    for name, value in (("k", 0.75), ("v", 1.5)):
        problem.arguments[f"{name}_scale"].fill_(value)
        problem.scales[name] = (None, np.full((4, 2), value))
    for cached in ("expected", "low_precision"):
        problem.__dict__.pop(cached)
    problem.check(*problem.run())


W15 = [
    (f"{k}_{v}_{s}", k, v, s)
    for k, v in ((192, 128), (512, 64), (64, 512))
    for s in ("nhd", "hnd", "packed", "layers")
]


@bug("W15", *W15)
def _(device, k_dim, v_dim, storage):
    write(device, WriteCase(f"W15_{storage}", head_dim=(k_dim, v_dim), storage=storage, skipped=3))


@bug("W17", *((f"tokens{n}", n) for n in (65_535, 65_536, 65_537, 200_000)))
def _(device, tokens):
    write(device, WriteCase("W17", tokens, 0, 1, (4, 4), 16, -(-tokens // 16)))


def with_marks(name):
    uses = ("cache_write", "paged_attention") if name.startswith(READ_TOO) else USES
    return pytest.param(name, marks=pytest.mark.uses(*uses))


@pytest.mark.parametrize("name", [*map(with_marks, BUGS)])
def test_bug(name, device):
    BUGS[name](device)
