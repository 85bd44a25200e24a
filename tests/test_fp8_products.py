"""`fp8_products`: long queries multiplied in e4m3 where a kernel does it, and as ever elsewhere.

The kernel is one of Hopper's. On a GPU of another kind, and on the CPU, the same tests say that the
option changes nothing.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import Case
from gpu import captured, prefill_by
from pagetile import _C
from problem import same_bits
from test_attention_gpu import WILD, Attention, moved, raw, wide
from test_prefill_gpu import (
    D128,
    EDGES,
    KV_LEN,
    LEFT,
    LENS,
    ON_HOPPER,
    Q_LEN,
    check_wild_values,
    prefill_problem,
    results_of,
)

USES = ("paged_attention",)
E4M3 = {"dtype": "float8_e4m3fn", "cache_dtype": "float8_e4m3fn"}
LARGEST = 256  # weight of a row, once it has a reference (sm90/rows.cuh)
SCORE_BITS = 12  # of the sums of a product of 8 bits, which tensor cores cut off
on_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a GPU of compute capability 9.0")


class Products(Attention):
    """A problem with the option. What is right is rounded as the kernel may round it."""

    def __init__(self, case: Case, device: str) -> None:
        super().__init__(case, device)
        self.arguments["fp8_products"] = True

    def plan(self, **changes):
        return super().plan(**{"fp8_products": True, **changes})

    @functools.cached_property
    def low_precision(self):
        return self.rounded()

    def rounded(self, cuts_scores: bool = True, rounds_weights: bool = True):
        """(out, softmax_lse), the former in its type."""
        case = self.case
        float64 = {"dtype": torch.float64, "device": self.device}
        out = torch.full(self.out_shape, torch.nan, **float64)
        lse = torch.full((case.heads[0], self.rows), torch.nan, **float64)
        scale = case.head_dim[0] ** -0.5 if case.softmax_scale is None else case.softmax_scale
        starts = np.cumsum([0, *case.kv_lens])
        for b, kv_len in enumerate(self.kv_lens):
            factor = {n: torch.tensor(x[b], **float64) for n, (_, x) in self.scales.items()}
            rows, keys = slice(self.cu[b], self.cu[b + 1]), slice(starts[b], starts[b] + kv_len)
            k, v = (wide(x[keys]).transpose(0, 1) for x in self.stored)  # [Hkv, kv_len, D]
            q = wide(self.arguments["q"][rows]).unflatten(1, (k.shape[0], -1))
            score = torch.einsum("qhgd,hkd->hqgk", q, k)
            if cuts_scores:
                score = cut(score)
            score = score * (scale * factor["q"] * factor["k"])[:, None, None, None]
            score = score.masked_fill(~self.seen(b)[:, None], -torch.inf) * math.log2(math.e)
            values, logs = self.of_rows(score, v, rounds_weights)
            values = values * factor["v"][:, None, None, None]
            out[rows] = values.transpose(0, 1).flatten(1, 2)
            lse[:, rows] = logs.transpose(1, 2).flatten(0, 1)
        return out.to(getattr(torch, case.out_dtype)).double(), lse

    def of_rows(self, score, v, rounds_weights: bool):
        """(values, log of the denominator) from scores in log2 units [Hkv, q_len, G, kv_len]."""
        num_q_heads, num_kv_heads = self.case.heads
        sink = torch.full((num_q_heads,), -torch.inf, dtype=torch.float64, device=self.device)
        sink = sink if self.sinks is None else wide(self.sinks)
        sink = sink.view(num_kv_heads, 1, -1) * math.log2(math.e)
        top = score.amax(-1) if score.shape[-1] else score.new_full(score.shape[:-1], -torch.inf)
        reference = torch.where(top.isfinite(), top.ceil() - math.log2(LARGEST), 0)
        weights = torch.exp2(score - reference[..., None])
        total = weights.sum(-1) + torch.exp2(sink - reference)
        if rounds_weights:
            weights = wide(weights.to(torch.float8_e4m3fn))
        values = torch.einsum("hqgk,hkd->hqgd", weights, v)
        logs = (reference + torch.log2(total)) * math.log(2)
        return torch.where(total > 0, 1 / total, 0)[..., None] * values, logs

    def seen(self, b: int) -> torch.Tensor:
        """[q_len, kv_len]"""
        case, kv_len = self.case, self.kv_lens[b]
        diagonal = torch.arange(case.q_lens[b], device=self.device)[:, None] + kv_len
        away = torch.arange(kv_len, device=self.device) - (diagonal - case.q_lens[b])
        left, right = case.window
        right = 0 if case.causal else right
        seen = torch.ones_like(away, dtype=torch.bool)
        seen &= away >= -left if left >= 0 else seen
        return seen & (away <= right) if right >= 0 else seen


def cut(score: torch.Tensor) -> torch.Tensor:
    """What follows the first bits of a row's largest score is gone."""
    if score.shape[-1] == 0:
        return score
    largest = score.abs().amax(-1, keepdim=True)
    _, exponent = torch.frexp(largest)
    quantum = torch.ldexp(torch.ones_like(largest), exponent - SCORE_BITS)
    return torch.trunc(score / quantum) * quantum


def fp8_problem(case: Case, device: str) -> Products:
    problem = prefill_problem(case, device, Products)
    assert isinstance(problem, Products)
    return problem


# fmt: off
def edges() -> list[Case]:
    """Around tiles of 128 keys and of 192 rows, with 64 and 128 of them left over."""
    kv_lens = [n * 128 + away for n in (1, 2, 3) for away in (-1, 0, 1)] + [64, 1, 20, 0, 500]
    q_lens = (16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 96, 97, 1)
    return [
        Case(f"edges_{name}", q, tuple(kv_lens), (8, 2), scales="heads", causal=causal, **D128,
             **E4M3)
        for name, q, causal in (("causal", q_lens, True), ("back", q_lens[::-1], True),
                                ("noncausal", q_lens, False))
    ]


def groups() -> list[Case]:
    cases = []
    for group in (1, 4, 5, 7, 8, 16, 64, 128):
        around = {rows // group + away for rows in (64, 128, 192) for away in (-1, 0, 1)}
        q_lens = sorted({max(n, 1) for n in around} | {1})
        kv_lens = tuple(n + 137 * j for j, n in enumerate(q_lens))
        kv_heads = 1 if group > 16 else 2
        cases.append(Case(f"group{group}", tuple(q_lens), kv_lens, (group * kv_heads, kv_heads),
                          **D128, **E4M3))
    return cases


def layouts() -> list[Case]:
    return [
        *(Case(f"page{size}_{storage}", *LENS, (8, 2), (128, 128), size, storage=storage,
               table_pad=i % 3, scales="batch_heads", **E4M3)
          for i, size in enumerate((8, 16, 24, 32, 64))
          for storage in ("nhd", "hnd", "packed", "packed_hnd")),
        *(Case(f"dims{k}_{v}_{storage}", *LENS, (8, 2), (k, v), storage=storage, **E4M3)
          for k, v in ((96, 96), (80, 112), (64, 128), (128, 64), (128, 96))
          for storage in ("nhd", "hnd")),
        *(Case(f"q_{q}_out_{o}", *LENS, (8, 2), q_layout=q, out=o, first_row=int(o != "new"),
               spare_rows=3 * (o != "new"), **D128, **E4M3)
          for q, o in (("fused_qkv", "strided"), ("heads_first", "given"))),
        Case("uint8", *LENS, (8, 2), uint8=True, scales="one", **D128, **E4M3),
        # No boxes, or no rows of 16 bytes: another kernel's.
        Case("page7", *LENS, (8, 2), (128, 128), 7, **E4M3),
        Case("padded", *LENS, (8, 2), storage="padded", **D128, **E4M3),
        Case("dims72", *LENS, (8, 2), (72, 72), **E4M3),
    ]


def masks() -> list[Case]:
    windows = ((0, 0), (31, 0), (100, 0), (127, 5), (160, -1), (-1, 40), (3, 200))
    return [
        *(Case(f"window_{w[0]}_{w[1]}_{causal}".replace("-1", "any"), *LENS, (8, 2), causal=causal,
               window=w, **D128, **E4M3) for w in windows for causal in (True, False)),
        Case("sinks", *LENS, (8, 2), sinks="float32", **D128, **E4M3),
        Case("sinks_window", *LENS, (8, 2), sinks="bfloat16", window=(60, 0), **D128, **E4M3),
        Case("flat", *LENS, (8, 2), softmax_scale=1e-4, **D128, **E4M3),
        Case("peaks", *LENS, (8, 2), softmax_scale=0.5, **D128, **E4M3),
        Case("queries_longer_than_keys", (130, 70, 40, 33), (9, 0, 20, 32), (8, 2),
             sinks="float32", **D128, **E4M3),
    ]


def schedules() -> list[Case]:
    few = (5, 50, 32, 33, 7, 20, 64, 65, 31, 5, 6, 8) * 3
    return [
        Case("few_rows", few, tuple((n + 37 * i * i) % 600 + 1 for i, n in enumerate(few)),
             (16, 8), scales="heads", **D128, **E4M3),
        Case("few_rows_one_tile", few,
             tuple((n + 37 * i * i) % 120 + 1 for i, n in enumerate(few)), (16, 8), causal=False,
             **D128, **E4M3),
        Case("mixed", (1, 1, 300, 1, 0, 1, 77, 1), (900, 300, 700, 33, 9, 65, 77, 800), (32, 8),
             **D128, **E4M3),
        Case("pieces", (200,), (7000,), (8, 2), scales="heads", **D128, **E4M3),
        Case("pieces_sinks", (205, 99), (5000, 8200), (8, 2), sinks="float32", **D128, **E4M3),
    ]


CASES = [*edges(), *groups(), *layouts(), *masks(), *schedules()]
# fmt: on


def test_case_names_are_unique():
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("case", CASES[::5], ids=lambda case: case.name)
def test_what_is_right_is_right_unrounded(case):
    """Both references say the same, but for the results' type."""
    problem = Products(case, "cpu")
    for x, y in zip(problem.rounded(False, False), problem.expected, strict=True):
        used = ~y.isnan()
        torch.testing.assert_close(x[used], y[used], rtol=2**-8, atol=1e-9)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_products(case, device):
    """Right, and the same bits with a plan and a workspace; with batch_invariant, too."""
    problem = fp8_problem(case, device)
    for invariant in (False, True):
        problem.arguments["batch_invariant"] = invariant
        out, lse = problem.run()
        problem.check(out, lse)
        more = {"plan": problem.plan(), "workspace": problem.workspace()}
        for _ in range(2):
            assert all(map(same_bits, problem.run(**more), (out, lse)))


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [-0.7, 0.0])
def test_scales_that_are_not_positive(name, value, device):
    case = Case("negative", *LENS, (8, 2), scales="heads", window=(150, 0), **D128, **E4M3)
    problem = fp8_problem(case, device)
    scale, full = problem.scales[name]
    scale[1] = value
    full = np.array(full)
    full[:, 1] = value
    problem.scales[name] = (scale, full)
    problem.arguments[f"{name}_scale"] = torch.from_numpy(scale).to(device)
    problem.check(*problem.run())


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_out_of_another_type(dtype, device):
    problem = fp8_problem(Case("out", *LENS, (8, 2), scales="heads", **D128, **E4M3), device)
    out = torch.empty(problem.out_shape, dtype=getattr(torch, dtype), device=device)
    out, lse = problem.run(out=out)
    problem.check(out.bfloat16(), lse)


def test_weights_are_rounded_to_e4m3(device):
    """Scores that no sum rounds: so the results are those of rounded weights, or, where no kernel
    multiplies in e4m3, of weights that are not."""
    case = Case("weights", (96, 49), (700, 333), (8, 2), softmax_scale=0.2, **D128, **E4M3)
    problem = fp8_problem(case, device)
    numbers = torch.Generator(device).manual_seed(7)
    for x in (problem.arguments["q"], problem.stored[0]):
        few = torch.randint(-1, 2, x.shape, device=device, generator=numbers)
        raw(x)[:] = raw(few.float().to(x.dtype))
    problem.write(problem.stored, problem.slots())
    of_rounded, exact = (problem.rounded(False, rounds)[0] for rounds in (True, False))
    by_kernel = ON_HOPPER and device == "cuda"
    right, wrong = (of_rounded, exact) if by_kernel else (exact, of_rounded)
    out = wide(problem.run()[0])
    bound = 2.0**-7 * right.abs() + 2.0**-12 * wide(problem.stored[1]).abs().max()
    assert ((out - right).abs() <= bound).all(), ((out - right).abs() / bound).max()
    assert ((wrong - right).abs() > 2 * bound).any(), "the test has shown nothing"


def kernels_of(call) -> set[str]:
    """Which prefill kernels a call launches, as a profiler names them."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    if not names:
        pytest.skip("the profiler sees no kernels")
    return {kind_of(name) for name in names if "prefill_kernel" in name}


def kind_of(name: str) -> str:
    """Of a prefill kernel, by its mangled or its plain name: 3 is sm90::Loading::kTransposed."""
    if "Loading)3" in name or "LoadingE3" in name:
        return "fp8"
    return "sm90" if "sm90" in name else "sm80"


@pytest.mark.gpu
@on_hopper
def test_the_kernel_that_runs():
    problem = fp8_problem(Case("which", *LENS, (8, 2), **D128, **E4M3), "cuda")
    assert kernels_of(problem.run) == {"fp8"}
    assert kernels_of(lambda: problem.run(plan=problem.plan())) == {"fp8"}
    assert kernels_of(lambda: problem.run(fp8_products=False)) == {"sm80"}
    for dtype, expected in (("float16", {"fp8"}), ("float32", {"sm80"})):
        out = torch.empty(problem.out_shape, dtype=getattr(torch, dtype), device="cuda")
        assert kernels_of(lambda out=out: problem.run(out=out)) == expected
    for options, expected in (
        ({"head_dim": (96, 96)}, {"fp8"}), ({"page_size": 8}, {"fp8"}),
        ({"head_dim": (64, 64)}, {"sm80"}), ({"head_dim": (192, 128)}, {"sm80"}),
        ({"page_size": 7}, {"sm80"}), ({"softcap": 9.0}, {"sm80"}), ({"alibi": "heads"}, {"sm80"}),
        ({"storage": "padded"}, {"sm80"}),
    ):  # fmt: skip
        case = Case("which", *LENS, (8, 2), **{**D128, **E4M3, **options})
        assert kernels_of(fp8_problem(case, "cuda").run) == expected, options
    with prefill_by("portable"):
        assert kernels_of(problem.run) == {"sm80"}


@pytest.mark.parametrize("options", [
    {"head_dim": (64, 64)}, {"page_size": 7}, {"softcap": 9.0}, {"alibi": "heads"},
    {"softmax_scale": -0.1}, {"head_dim": (256, 256)},
], ids=str)  # fmt: skip
def test_what_no_kernel_does_is_as_without(options, device):
    case = Case("as_without", *LENS, (8, 2), **{**D128, **E4M3, **options})
    problem = fp8_problem(case, device)
    out, lse = problem.run()
    assert all(map(same_bits, problem.run(fp8_products=False), (out, lse)))


def test_short_queries_are_as_without(device):
    case = Case("short", (1, 3, 1), (900, 333, 70), (8, 2), **D128, **E4M3)
    problem = Products(case, device)
    assert all(map(same_bits, problem.run(), problem.run(fp8_products=False)))


def test_another_kernel_is_as_without(device):
    problem = fp8_problem(Case("portable", *LENS, (8, 2), **D128, **E4M3), device)
    with prefill_by("portable"):
        assert all(map(same_bits, problem.run(), problem.run(fp8_products=False)))


@pytest.mark.parametrize(("pad", "offset"), [(0, 1), (0, 8), (8, 0), (16, 16)])
@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
def test_strides_and_bases(name, pad, offset, device):
    problem = fp8_problem(Case("aligned", *LENS, (8, 2), **D128, **E4M3), device)
    problem.check(*problem.run(**{name: moved(problem.arguments[name], pad, offset)}))


# Bits

# fmt: off
AGAIN = {
    "plain": {},
    "group1": {"heads": (4, 4)},
    "group7": {"heads": (14, 2)},
    "page8": {"page_size": 8},
    "window": {"window": (170, 0), "sinks": "float32"},
}
# fmt: on


@pytest.mark.parametrize("options", AGAIN)
def test_twenty_runs_are_the_same(options, device):
    lens = (300, 1, 90, 1, 1, 200), (700, 900, 90, 30, 1500, 333)
    case = Case(f"again_{options}", *lens, **{"heads": (8, 2), **D128, **E4M3, **AGAIN[options]})
    problem = fp8_problem(case, device)
    expected = problem.run()
    problem.check(*expected)
    for _ in range(20):
        assert all(map(same_bits, problem.run(), expected))


@pytest.mark.parametrize("options", AGAIN)
def test_chunks_are_the_whole(options, device):
    q_len, kv_len = 290, 700
    case = Case(f"chunks_{options}", (q_len, 1, 70), (kv_len, 500, 90), batch_invariant=True,
                **{"heads": (8, 2), **D128, **E4M3, **AGAIN[options]})  # fmt: skip
    problem = fp8_problem(case, device)
    least = 64 * case.heads[1] // case.heads[0] + 1
    whole = problem.run()
    problem.check(*whole)
    for begin, end in ((0, 145), (145, 290), (0, least), (31, 31 + least), (99, 230)):
        part = problem.alone(0, (begin, end), kv_len - q_len + end)
        assert same_bits(part[0], whole[0][begin:end]), (begin, end)
        assert same_bits(part[1], whole[1][:, begin:end]), (begin, end)


@pytest.mark.gpu
@on_hopper
def test_pieces_in_a_graph():
    """200 replays, each from the counters that the one before has left."""
    case = Case("graph", (1, 200, 1, 0, 150), (900, 7000, 3000, 50, 2100), (8, 2), **D128, **E4M3)
    problem = fp8_problem(case, "cuda")
    results, workspace = results_of(problem), problem.workspace()
    expected = [x.clone() for x in problem.run(**results, workspace=workspace)]
    problem.check(*expected)
    graph = captured(lambda: problem.run(**results, workspace=workspace))
    for _ in range(200):
        for tensor in results.values():
            raw(tensor).fill_(-1)
        graph.replay()
        assert all(map(same_bits, results.values(), expected))


# What must not be seen


@pytest.mark.parametrize("page_size", [8, 16, 24, 256])
@pytest.mark.parametrize("code", [0x7F, 0xFF, 0x7E, 0xFE])
def test_what_no_query_may_see(code, page_size, device):
    """Page tails, unused pages and pages behind the window hold NaN or the largest numbers."""
    left = 200
    case = Case("unseen", (70, 1, 100, 33), (900, 333, 465, 33), (8, 2), page_size=page_size,
                window=(left, 0), **D128, **E4M3)  # fmt: skip
    problem = fp8_problem(case, device)
    before = problem.run()
    problem.check(*before)
    behind = [max(0, n - q - left) for n, q in zip(case.kv_lens, case.q_lens, strict=True)]
    keys = torch.cat([
        torch.arange(n, device=device) >= first
        for n, first in zip(case.kv_lens, behind, strict=True)
    ])  # fmt: skip
    raw(problem.memory).fill_(code)
    problem.write([x[keys] for x in problem.stored], problem.slots()[keys])
    for b, first in enumerate(behind):
        problem.table[b, : first // page_size] = 2**31 - 1  # evicted
    assert all(map(same_bits, problem.run(), before))


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize(
    ("dims", "page_size"), [((128, 128), 16), ((128, 128), 64), ((112, 112), 8)], ids=str
)
def test_wild_values_that_some_rows_see(dims, page_size, edge, device):
    """e4m3 has no infinity: each is a NaN there."""
    case = Case("wild_values", (Q_LEN, 1, 33), (KV_LEN, 70, 33), (8, 2), dims, page_size,
                window=(LEFT, 0), **E4M3)  # fmt: skip
    check_wild_values(fp8_problem(case, device), dict.fromkeys(EDGES[edge], "nan"))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
def test_wild_values_at_the_end_of_rows_of_120(dtype, device):
    """Rows of no whole number of 16 bytes, that begin at multiples of as many."""
    case = Case("wild_120", (Q_LEN, 1, 33), (KV_LEN, 70, 33), (8, 2), (120, 120), window=(LEFT, 0),
                **{**E4M3, "dtype": dtype})  # fmt: skip
    problem = prefill_problem(case, device, Products if dtype == E4M3["dtype"] else Attention)
    problem.caches = [moved(cache, 8, 0) for cache in problem.caches]
    problem.arguments |= dict(zip(("k_cache", "v_cache"), problem.caches, strict=True))
    problem.arguments["q"] = moved(problem.arguments["q"], 8, 0)
    problem.check(*problem.run())
    check_wild_values(problem, dict.fromkeys(EDGES["both_edges"], "nan"))


@pytest.mark.parametrize("edge", ["last_token", "at_the_tiles", "many_of_a_tile"])
def test_wild_values_in_pieces(edge, device):
    case = Case("wild_pieces", (Q_LEN, 1), (6000, 70), (8, 2), **D128, **E4M3)
    problem = fp8_problem(case, device)
    keys = {key + 6000 - KV_LEN: "nan" for key in EDGES[edge]}
    for _ in range(3):
        check_wild_values(problem, keys)


@pytest.mark.parametrize("wild", [name for name in WILD if name != "large"])
def test_a_wild_query_stays_in_its_row(wild, device):
    problem = fp8_problem(Case("wild_query", (70, 3), (300, 90), (8, 2), **D128, **E4M3), device)
    q = problem.arguments["q"]
    raw(q)[20, 3] = 0xFF if wild == "minus_inf" else 0x7F
    out, lse = problem.run()
    problem.check(out, lse, [row for row in range(73) if row != 20])
    assert out[20, 3].isnan().all()
    assert torch.isfinite(out[20, [head for head in range(8) if head != 3]].float()).all()


def test_pages_outside_the_cache_read_as_zeros(device):
    case = Case("wild_pages", (70, 33), (300, 290), (8, 2), **D128, **E4M3)
    problem = fp8_problem(case, device)
    problem.stored = [x.clone() for x in problem.stored]
    for b, index, page in ((0, 0, -1), (0, 2, 2**31 - 1), (1, 18, problem.num_pages)):
        problem.table[b, index] = page
        first = sum(case.kv_lens[:b]) + index * 16
        for x in problem.stored:
            raw(x)[first : min(first + 16, sum(case.kv_lens[: b + 1]))] = 0
    problem.check(*problem.run())


# Plans, and who gets the kernel

# fmt: off
WHO = [
    ({}, True), ({"out": "float16"}, True), ({"out": "float32"}, False),
    ({"fp8_products": False}, False),
    ({"q": "bfloat16"}, False), ({"q": "float8_e5m2"}, False), ({"cache": "float8_e5m2"}, False),
    *(({"head_dim": k, "head_dim_v": v}, k <= 128 >= v and max(k, v) > 64)
      for k in (8, 64, 72, 96, 104, 128, 136, 192, 256) for v in (8, 64, 72, 128, 136, 256)),
    ({"softcap": 5.0}, False), ({"has_alibi": True}, False), ({"softmax_scale": 0.05}, True),
    ({"softmax_scale": 0.0}, False), ({"softmax_scale": -0.1}, False),
]
# fmt: on


@pytest.mark.parametrize(("call", "expected"), WHO, ids=str)
def test_who_gets_the_kernel(call, expected):
    assert _C.multiplies_e4m3(**call) is expected


def test_a_plan_for_the_other_products(device):
    problem = fp8_problem(Case("plans", *LENS, (8, 2), **D128, **E4M3), device)
    for made, called in ((True, False), (False, True)):
        plan = problem.plan(fp8_products=made)
        assert plan.fp8_products is made
        with pytest.raises(ValueError, match=f"made for fp8_products {made}, got {called}"):
            problem.run(plan=plan, fp8_products=called)


def test_the_schedule_is_that_of_other_types():
    """Which sequences are long does not depend on the option."""
    case = Case("shape", (33, 1), (900, 70), (8, 2), **D128, **E4M3)
    plans = [fp8_problem(case, "cpu").plan(fp8_products=x) for x in (False, True)]
    assert torch.equal(*(plan.buffer for plan in plans))
    short = replace(case, q_lens=(1, 1))
    assert torch.equal(*(Products(short, "cpu").plan(fp8_products=x).buffer for x in (False, True)))
    assert "fp8_products=True" in repr(plans[1])
    assert isinstance(plans[1], _C.Plan)
