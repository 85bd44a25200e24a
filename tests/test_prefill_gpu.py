"""Long queries: by each prefill kernel of a GPU, at the edges of its tiles, and beside short ones.

On a GPU every test runs twice: by the kernel that fits best (WGMMA on Hopper, where TMA can read
the tensors) and by the portable one. On the CPU, which has one kernel, once.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import STORAGES, Case
from gpu import captured, is_long, needs_gpus, prefill_by
from pagetile import _C
from pagetile.compat.vllm import flash_attn_varlen_func
from problem import check_pair, pasted, same_bits
from test_attention_gpu import (
    D128,
    KINDS,
    SCORE_OPTIONS,
    WILD,
    Attention,
    gpu_of,
    int32,
    moved,
    poisoned,
    raw,
)

USES = ("paged_attention",)
KERNELS = ("best", "portable")
on_a_gpu = needs_gpus(1)

SIDES = [pytest.param(("cpu", "best"), id="cpu")]
if torch.cuda.is_available():
    SIDES += [
        pytest.param(("cuda", kernel), id=f"cuda-{kernel}", marks=pytest.mark.gpu)
        for kernel in KERNELS
    ]


@pytest.fixture(params=SIDES)
def device(request):
    """As everywhere, once for each prefill kernel."""
    device, kernel = request.param
    with prefill_by(kernel):
        yield device


@pytest.fixture(params=KERNELS)
def kernel(request):
    """For what a GPU alone can do."""
    with prefill_by(request.param):
        yield request.param


def prefill_problem(case: Case, device: str, kind: type[Attention] = Attention) -> Attention:
    """With a bound for queries that makes a prefill kernel worth it, and with long queries."""
    problem = kind(case, device)
    problem.arguments["max_seqlen_q"] = 4096
    group = case.heads[0] // case.heads[1]
    for invariant in (False, True):
        _, shape = _C.attention_plan(
            int32("cpu", problem.cu), int32("cpu", case.kv_lens), num_q_heads=case.heads[0],
            num_kv_heads=case.heads[1], head_dim=case.head_dim[0], head_dim_v=case.head_dim[1],
            max_seqlen_q=4096, max_seqlen_k=4096, batch_invariant=invariant, **gpu_of(device),
        )  # fmt: skip
        if group <= 128:
            assert 0 <= shape["long_rows"] < max(case.q_lens) * group, "all are short"
    return problem


def check_case(case: Case, device: str) -> None:
    """Right, by itself and with a plan and a workspace of its own, to the bit; and invariant."""
    problem = prefill_problem(case, device)
    for invariant in (False, True):
        problem.arguments["batch_invariant"] = invariant
        out, lse = problem.run()
        problem.check(out, lse)
        more = {"plan": problem.plan(), "workspace": problem.workspace()}
        for _ in range(2):  # the second call finds the workspace as the first one left it
            assert all(map(same_bits, problem.run(**more), (out, lse)))


# Shapes

# fmt: off
DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))
TRANSFORMS = {"softcap": 9.0}  # and whatever else makes scores more than a product with a factor


def edges() -> list[Case]:
    """Around tiles of 32 and 48 tokens, and of each number of keys that a kernel's tiles have."""
    cases = []
    for keys, dims, more in (
        (128, (64, 64), {}), (160, (64, 64), TRANSFORMS), (160, (96, 96), {}),
        (160, (128, 128), {}), (128, (192, 128), {}), (112, (192, 192), {}), (80, (256, 256), {}),
        (64, (128, 128), {}), (32, (256, 256), TRANSFORMS),
    ):
        kv_lens = [n * keys + away for n in (1, 2, 3) for away in (-1, 0, 1)]
        kv_lens += [kv_lens[0] // 2, 1, 20, 0]
        q_lens = (16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 96, 97)
        cases += [
            Case(f"edges_{keys}_{dims[0]}_{dims[1]}_{kind}", q, tuple(kv_lens), (8, 2), dims,
                 **more, **KINDS[kind])
            for kind, q in (("bf16", q_lens), ("fp16", q_lens[::-1]))
        ]
    return cases


def groups() -> list[Case]:
    """Whole tokens in tiles of 128 and 192 rows, and around 64 rows."""
    cases = []
    for i, group in enumerate((1, 3, 4, 5, 7, 8, 16, 20, 64, 128, 200)):
        kv_heads = 2 if group <= 20 else 1
        around = {rows // group + away for rows in (64, 128, 192, 256) for away in (-1, 0, 1)}
        q_lens = sorted({max(n, 1) for n in around} | {1})
        kv_lens = tuple(n + 37 * j for j, n in enumerate(q_lens))
        for dims in dict.fromkeys(((64, 64), DIMS[i % len(DIMS)])):
            cases.append(Case(f"group{group}_{dims[0]}", tuple(q_lens), kv_lens,
                              (kv_heads * group, kv_heads), dims, **KINDS[("bf16", "fp16")[i % 2]]))
    return cases


LENS = (70, 1, 33, 0, 130), (300, 470, 33, 90, 200)


def head_dims() -> list[Case]:
    more = ((40, 40), (72, 72), (160, 160), (136, 128), (128, 64), (64, 128), (40, 256), (256, 40))
    return [
        Case(f"dims{dims[0]}_{dims[1]}_{kind}_{name}", *LENS, (8, 2), dims, **options,
             **KINDS[kind])
        for dims in (*DIMS, *more)
        for kind, name, options in (("bf16", "plain", {}), ("fp16", "softcap", TRANSFORMS),
                                    ("fp16", "plain", {}), ("bf16", "softcap", TRANSFORMS))
        if dims in DIMS or (kind == "bf16") == (name == "plain")
    ]


def pages() -> list[Case]:
    """Pages of each size in every other storage, with one of the head dims each."""
    equal = [dims for dims in DIMS if dims[0] == dims[1]]
    sizes = (1, 3, 7, 8, 12, 16, 24, 32, 64, 256)
    return [
        Case(f"page{size}_{storage}", *LENS, (8, 2), equal[(i + j) % len(equal)], size,
             storage=storage, table_pad=j % 3, **KINDS[("bf16", "fp16")[(i + j) % 2]])
        for i, size in enumerate(sizes) for j, storage in enumerate(STORAGES) if (i + j) % 2
    ] + [
        Case(f"page{size}_{storage}_192_128", *LENS, (8, 2), (192, 128), size, storage=storage)
        for size, storage in ((8, "nhd"), (16, "hnd"), (24, "packed"), (64, "packed_hnd"),
                              (24, "nhd"), (8, "packed_hnd"), (7, "nhd"), (1, "packed_hnd"))
    ] + [
        Case(f"page{size}_{dims[0]}_{dims[1]}", *LENS, (8, 2), dims, size, window=window,
             sinks="float32", **KINDS[kind])
        for size, dims, window, kind in (
            (1, (40, 40), (-1, -1), "bf16"), (7, (72, 72), (90, 0), "fp16"),
            (5, (120, 120), (100, 3), "bf16"), (1, (160, 160), (-1, -1), "fp16"),
            (9, (128, 64), (-1, -1), "bf16"), (1, (40, 256), (120, 0), "bf16"),
        )
    ]


def masks() -> list[Case]:
    windows = ((0, 0), (31, 0), (100, 0), (127, 5), (160, -1), (-1, 40), (3, 200))
    return [
        *(Case(f"window_{w[0]}_{w[1]}_{causal}_{dims[0]}".replace("-1", "any"), *LENS, (8, 2), dims,
               causal=causal, window=w)
          for w in windows for causal, dims in ((True, (64, 64)), (False, (128, 128)))),
        *(Case(f"{name}_{dims[0]}", *LENS, (8, 2), dims, **more, **KINDS[kind])
          for dims, kind in (((64, 64), "fp16"), ((128, 128), "bf16"), ((256, 256), "bf16"))
          for name, more in (
              ("noncausal", {"causal": False}),
              *SCORE_OPTIONS,
              ("negative", {"softmax_scale": -0.11}),
              ("negative_window", {"softmax_scale": -0.11, "window": (99, 0)}),
              ("everything", {"softcap": 8.0, "alibi": "batch_heads", "sinks": "float16",
                              "window": (150, 1), "causal": False, "storage": "packed"}),
          )),
        Case("queries_longer_than_keys", (130, 70, 40, 33), (9, 0, 20, 32), (8, 2),
             sinks="float32"),
    ]


def few_rows() -> list[Case]:
    """Some items for each multiprocessor, one after the other: some warpgroups have rows of
    them and others have not. With one tile of keys, with two, with more."""
    q_lens = (5, 50, 32, 33, 7, 20, 64, 65, 31, 5, 6, 8) * 3
    return [
        Case(f"few_rows_{dims[0]}_{name}", q_lens,
             tuple((q_len + 37 * i * i) % most + 1 for i, q_len in enumerate(q_lens)),
             (16, 8), dims, **more, **KINDS[kind])
        for dims, kind, most, name, more in (
            ((128, 128), "bf16", 600, "plain", {}), ((64, 64), "fp16", 700, "plain", {}),
            ((128, 128), "fp16", 240, "short", {"causal": False}),
            ((64, 64), "bf16", 300, "short", {}),
            ((96, 96), "bf16", 500, "window", {"window": (130, 0)}),
            ((128, 128), "e4m3", 600, "e4m3", {"scales": "heads"}),
            ((128, 128), "e5m2", 240, "e5m2", {"dtype": "float16"}),
            ((64, 64), "e4m3", 300, "e4m3", {"causal": False}),
            ((128, 128), "bf16", 300, "page7", {"page_size": 7}),
        )
    ]


def rows() -> list[Case]:
    """Where queries and results lie, and fp8."""
    return [
        *(Case(f"q_{q}_out_{o}_{dims[0]}", *LENS, (8, 2), dims, q_layout=q, out=o,
               first_row=int(o != "new"), spare_rows=3 * (o != "new"))
          for q in ("dense", "fused_qkv", "heads_first") for o in ("new", "given", "strided")
          for dims in ((64, 64), (128, 128))),
        *(Case(f"{dtype}_over_{cache}_{scales}", *LENS, (8, 2), dtype=dtype, cache_dtype=cache,
               scales=scales, **D128)
          for cache in ("float8_e4m3fn", "float8_e5m2")
          for dtype, scales in (("bfloat16", "heads"), ("float16", None), (cache, "batch_heads"))),
    ]
# fmt: on


CASES = [*edges(), *groups(), *head_dims(), *pages(), *masks(), *few_rows(), *rows()]


def test_case_names_are_unique():
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_prefill(case, device):
    check_case(case, device)


# Packed rows


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "noncausal"])
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256)], ids=str)
def test_packed_rows(dims, causal, fused, device):
    """No pages. A sequence may be full of NaN: the others, beside it in memory, are right."""
    q_lens, kv_lens = (70, 1, 50, 33, 130), (70, 91, 129, 33, 200)
    case = Case("packed_rows", q_lens, kv_lens, (8, 2), dims, causal=causal)
    problem = prefill_problem(case, device)
    k, v = problem.stored
    if fused:
        k, v = torch.cat([k, v], -1).split(dims, -1)
    cu_k = np.cumsum([0, *kv_lens]).tolist()

    def run():
        return flash_attn_varlen_func(
            problem.arguments["q"], k, v, 4096, problem.arguments["cu_seqlens_q"], max(kv_lens),
            int32(device, cu_k), causal=causal, return_softmax_lse=True,
        )  # fmt: skip

    problem.check(*run())
    v[cu_k[2] : cu_k[3]] = torch.nan
    out, lse = run()
    others = [*range(problem.cu[2]), *range(problem.cu[3], problem.cu[-1])]
    problem.check(out, lse, others)
    assert out[problem.cu[2] : problem.cu[3]].isnan().all()


# Alignment


@pytest.mark.parametrize(("pad", "offset"), [(0, 1), (0, 4), (1, 0), (4, 0), (8, 8), (3, 5)])
@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
def test_strides_and_bases(name, pad, offset, device):
    """What TMA cannot read is another kernel's, with the plan that was made for this one, too."""
    problem = prefill_problem(Case("aligned", *LENS, (8, 2), **D128), device)
    changes = {name: moved(problem.arguments[name], pad, offset)}
    out, lse = problem.run(**changes)
    problem.check(out, lse)
    for plan in (problem.plan(), problem.plan()):
        problem.check(*problem.run(plan=plan, **changes))
        problem.check(*problem.run(plan=plan))


@pytest.mark.parametrize(
    ("pad", "offset"), [(0, 1), (0, 2), (0, 4), (0, 8), (1, 0), (2, 0), (4, 0), (8, 0), (4, 4)]
)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (192, 128)], ids=str)
def test_where_out_lies_is_no_matter(dims, pad, offset, device):
    problem = prefill_problem(Case("out", *LENS, (8, 2), dims), device)
    expected = problem.run()
    problem.check(*expected)
    out = moved(torch.empty_like(expected[0]), pad, offset)
    assert all(map(same_bits, problem.run(out=out), expected))


# Bits

# fmt: off
AGAIN = {
    "plain": {},
    "group1": {"heads": (4, 4)},
    "group16": {"heads": (16, 1)},
    "group20": {"heads": (20, 1)},
    "head_dim128": {"head_dim": (128, 128)},
    "head_dim192_128": {"head_dim": (192, 128)},
    "head_dim256": {"head_dim": (256, 256), "dtype": "float16"},
    "page8": {"page_size": 8, "head_dim": (128, 128)},
    "page7": {"page_size": 7, "head_dim": (128, 128)},
    "window": {"window": (170, 0)},
    "everything": {"alibi": "heads", "sinks": "float32", "softcap": 9.0},
    "fp8": {"cache_dtype": "float8_e4m3fn", "scales": "heads", "head_dim": (128, 128)},
}
# fmt: on


@pytest.mark.parametrize("options", AGAIN)
def test_twenty_runs_are_the_same(options, device):
    """Whoever takes which tile: long and short queries, alone on the GPU and beside others."""
    lens = (300, 1, 90, 1, 1, 200), (700, 900, 90, 30, 1500, 333)
    case = Case(f"again_{options}", *lens, **{"heads": (8, 2), **AGAIN[options]})
    problem = prefill_problem(case, device)
    expected = problem.run()
    problem.check(*expected)
    side = torch.cuda.Stream() if device == "cuda" else None
    for i in range(20):
        if side is not None and i >= 10:
            with torch.cuda.stream(side):
                x = torch.randn(1024, 1024, device=device)
                for _ in range(i % 4):
                    x = torch.tanh(x @ x)
        assert all(map(same_bits, problem.run(), expected))


@pytest.mark.parametrize("options", AGAIN)
def test_chunks_are_the_whole(options, device):
    """batch_invariant: any chunk that is still long, alone or in a batch, has the same bits."""
    q_len, kv_len = 290, 700
    case = Case(f"chunks_{options}", (q_len, 1, 70), (kv_len, 500, 90), batch_invariant=True,
                **{"heads": (8, 2), **AGAIN[options]})  # fmt: skip
    problem = prefill_problem(case, device)
    group = case.heads[0] // case.heads[1]
    whole = problem.run()
    problem.check(*whole)
    least = 64 // group + 1
    chunks = [(0, 145), (145, 290), (0, least), (31, 31 + least), (290 - least, 290), (99, 230)]
    for begin, end in chunks:
        assert is_long(end - begin, group)
        part = problem.alone(0, (begin, end), kv_len - q_len + end)
        assert same_bits(part[0], whole[0][begin:end]), (begin, end)
        assert same_bits(part[1], whole[1][:, begin:end]), (begin, end)
    for b in range(3):
        assert all(map(same_bits, problem.alone(b), problem.of(b, *whole)))
    part = problem.alone(0, (64, 64 + least - 1), kv_len - q_len + 64 + least - 1)
    problem.check(*pasted(whole, part, 64))


@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 128), (256, 256)], ids=str)
def test_where_keys_lie_is_no_matter(dims, device):
    """Storages and page sizes that one kernel reads: the same bits."""
    aligned = [s for s in STORAGES if s not in ("padded", "offset")]
    sizes = (8, 16, 24, 64, 256)
    expected = None
    for i, storage in enumerate(aligned):
        for size in (16, sizes[i % len(sizes)]):
            case = Case("where", *LENS, (8, 2), dims, size, storage=storage)
            problem = prefill_problem(case, device)
            results = problem.run()
            if expected is None:
                expected = results
                problem.check(*expected)
            assert all(map(same_bits, results, expected)), (storage, size)


# Long and short queries in one call

MOST_ROWS, MOST_KEYS = 700, (900, 300, 700, 900, 64, 900, 333, 900, 17, 500, 900, 129)
# fmt: off
STEPS = {
    "mixed": ((1, 1, 300, 1, 0, 1, 77, 1, 1, 0, 1, 90),
              (900, 300, 700, 33, 9, 65, 77, 800, 1, 0, 129, 129)),
    "all_short": ((1,) * 12, MOST_KEYS),
    "all_long": ((50, 60, 40, 33, 64, 65, 70, 45, 17, 90, 80, 86), MOST_KEYS),
    "one_long": ((0, 0, 700, 0, 0, 0, 0, 0, 0, 0, 0, 0), MOST_KEYS),
    "one_token": ((0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0), MOST_KEYS),
    "nothing": ((0,) * 12, (0,) * 12),
    "few_each": ((1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4), MOST_KEYS),
    "no_keys": ((1, 100, 1, 100, 1, 100, 1, 0, 0, 3, 1, 1), (0,) * 12),
    "more_queries_than_keys": ((1, 100, 1, 100, 40, 100, 1, 0, 17, 3, 1, 129),
                               (0, 33, 5, 1, 0, 99, 9, 0, 16, 2, 0, 128)),
}
MIXED = {
    "plain": {},
    "head_dim128": {"heads": (32, 8), **D128},
    "invariant": {"batch_invariant": True, **D128},
    "window": {"window": (100, 0)},
    "splits": {"num_splits": 3, "dtype": "float16", "head_dim": (192, 128)},
    "fp8": {"cache_dtype": "float8_e5m2", "scales": "heads"},
}
# fmt: on


def mixed_problem(options: str, device: str) -> Attention:
    """Room for every step."""
    q_lens = STEPS["all_long"][0]
    assert sum(q_lens) == MOST_ROWS
    case = Case(f"mixed_{options}", q_lens, MOST_KEYS, out="given",
                **{"heads": (8, 2), **MIXED[options]})  # fmt: skip
    return prefill_problem(case, device)


def at_step(problem: Attention, q_lens, kv_lens) -> Attention:
    """The same memory and bounds."""
    step = problem.replaced(
        case=replace(problem.case, q_lens=q_lens),
        cu=[*itertools.accumulate(q_lens, initial=0)],
        kv_lens=kv_lens,
    )
    step.arguments["cu_seqlens_q"] = int32(problem.device, step.cu)
    step.arguments["seqused_k"] = int32(problem.device, kv_lens)
    return step


def results_of(problem: Attention) -> dict[str, torch.Tensor]:
    """NaN, to be written."""
    heads, device = problem.case.heads[0], problem.device
    size = int(np.prod(problem.out_shape))
    return {
        "out": poisoned(size, problem.case.out_dtype, device).view(problem.out_shape),
        "softmax_lse": poisoned(heads * problem.rows, "float32", device).view(heads, -1),
    }


@pytest.mark.parametrize("options", MIXED)
@pytest.mark.parametrize("step", STEPS)
def test_long_and_short_in_one_call(step, options, device):
    """By itself, with a plan, as a programmatic dependent, on a workspace: right, the same bits."""
    problem = at_step(mixed_problem(options, device), *STEPS[step])
    expected = problem.run(**results_of(problem))
    problem.check(*expected)
    workspace = problem.workspace()
    for more in (
        {"workspace": workspace},
        {"plan": problem.plan()},
        {"pdl": True},
        {"pdl": True, "workspace": workspace},
        {"pdl": True, "plan": problem.plan(), "workspace": workspace},
        {"workspace": workspace},
    ):
        assert all(map(same_bits, problem.run(**results_of(problem), **more), expected)), more


@pytest.mark.parametrize("options", ["plain", "invariant", "window"])
@pytest.mark.parametrize("queries", ["mixed", "all_short", "all_long", "one_long", "few_each"])
def test_plan_serves_other_keys(queries, options, device):
    """The same queries, whatever was added or is gone since the plan was made."""
    problem = mixed_problem(options, device)
    q_lens = STEPS[queries][0]
    steps = [at_step(problem, q_lens, kv_lens) for _, kv_lens in STEPS.values()]
    workspace = problem.workspace()
    for made_for in steps[::3]:
        plan = made_for.plan()
        for step in steps:
            step.check(*step.run(plan=plan, workspace=workspace, **results_of(problem)))


@on_a_gpu
@pytest.mark.parametrize("pdl", [False, True], ids=["", "pdl"])
@pytest.mark.parametrize("planned", [False, True], ids=["by_itself", "planned"])
@pytest.mark.parametrize("options", MIXED)
def test_graph_replays(options, planned, pdl, kernel):
    """Captured once, replayed 1,000 times over steps in any order."""
    problem = mixed_problem(options, "cuda")
    lengths = {n: problem.arguments[n].clone() for n in ("cu_seqlens_q", "seqused_k")}
    results, workspace = results_of(problem), problem.workspace()
    plan = problem.plan() if planned else None

    def call(**more):
        if planned:
            problem.plan(**lengths, out=plan)
        problem.run(**lengths, **results, workspace=workspace, plan=plan, **more)

    graph = captured(lambda: call(pdl=pdl))
    steps = [at_step(problem, *lens) for lens in STEPS.values()]

    def fill(step):
        for name, tensor in lengths.items():
            tensor.copy_(step.arguments[name])
        for tensor in results.values():
            raw(tensor).fill_(-1)

    expected = []
    for step in steps:
        fill(step)
        call()
        step.check(*results.values())
        expected.append([raw(x).clone() for x in results.values()])
    mistakes = torch.zeros((), dtype=torch.long, device="cuda")
    for i in np.random.default_rng(0).integers(len(steps), size=1000):
        fill(steps[i])
        graph.replay()
        for x, e in zip(results.values(), expected[i], strict=True):
            mistakes += (raw(x) != e).sum()
    assert mistakes.item() == 0


# Which kernel runs

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def prefill_kernels(call) -> set[str]:
    """The prefill kernels that `call` launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    if not names:
        pytest.skip("the profiler sees no kernels")
    return {
        kind
        for kind in ("sm90", "sm80")
        if any(kind in name and "prefill_kernel" in name for name in names)
    }


@on_a_gpu
def test_the_kernel_that_runs(kernel):
    best = {"sm90"} if ON_HOPPER and kernel == "best" else {"sm80"}
    problem = prefill_problem(Case("which", *LENS, (8, 2), **D128), "cuda")
    assert prefill_kernels(problem.run) == best
    for name in ("q", "k_cache", "v_cache"):
        far = moved(problem.arguments[name], 0, 1)
        assert prefill_kernels(lambda far=far, name=name: problem.run(**{name: far})) == {"sm80"}
    for size, expected, options in (
        (8, best, {}), (24, best, {}), (7, best, {}), (1, best, {"head_dim": (192, 128)}),
        (7, {"sm80"}, {"softcap": 9.0}), (7, {"sm80"}, {**D128, "cache_dtype": "float8_e4m3fn"}),
    ):  # fmt: skip
        case = Case("which_page", *LENS, (8, 2), page_size=size, **options)
        assert prefill_kernels(prefill_problem(case, "cuda").run) == expected, (size, options)
    for options, expected in (
        ({}, best),
        ({**D128, "dtype": "float16"}, best),
        ({"dtype": "float16"}, {"sm80"}),
        ({"head_dim": (192, 128)}, {"sm80"}),
        ({"softcap": 9.0}, {"sm80"}),
        ({**D128, "dtype": "float8_e4m3fn"}, {"sm80"}),
    ):
        case = Case("which_fp8", *LENS, (8, 2), cache_dtype="float8_e4m3fn", **options)
        assert prefill_kernels(prefill_problem(case, "cuda").run) == expected, options
    short = Attention(Case("which_short", (1, 1), (900, 33), (8, 2)), "cuda")
    assert prefill_kernels(short.run) == set()
    # 64 rows a tile, with or without a plan: where items are cut, fewer tiles are enough
    early = best if best == {"sm90"} else set()
    for batch, options, expected in (
        (8, {}, early), (8, {"softcap": 9.0}, set()), (12, {"softcap": 9.0}, early),
        (8, {"cache_dtype": "float8_e4m3fn"}, early), (3, {}, set()),
        (8, {"cache_dtype": "float8_e4m3fn", "page_size": 7}, set()),
    ):  # fmt: skip
        lens = (8,) * batch, tuple(range(100, 100 + 90 * batch, 90))
        problem = Attention(Case("which_64_rows", *lens, (64, 8), **D128, **options), "cuda")
        for plan in (None, problem.plan()):
            assert prefill_kernels(lambda p=problem, plan=plan: p.run(plan=plan)) == expected
        problem.check(*problem.run(plan=problem.plan()))


@on_a_gpu
def test_first_call_of_a_thread(kernel):
    """TMA wants a context that a new thread does not have: the same kernel all the same."""
    problem = prefill_problem(Case("thread", *LENS, (8, 2), **D128), "cuda")
    expected = problem.run()
    results = results_of(problem)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(problem.run, **results).result()
    torch.cuda.synchronize()
    assert all(map(same_bits, results.values(), expected))
    if ON_HOPPER:
        with prefill_by("portable" if kernel == "best" else "best"):
            assert not same_bits(problem.run()[0], expected[0]), "both kernels have the same bits"


def test_threads_at_once(device):
    """Four threads with a plan each to make in one stream: nobody takes another one's."""
    problems = [
        prefill_problem(Case("threads", (90, 1, 1, 40), (300 + 9 * i, 500, 7, 40), (8, 2), seed=i),
                        device)
        for i in range(4)
    ]  # fmt: skip
    expected = [problem.run() for problem in problems]

    def call(i):
        return all(all(map(same_bits, problems[i].run(), expected[i])) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(4)))


# What must not be seen


@pytest.mark.parametrize(
    ("page_size", "kind"), [(7, "bf16"), (16, "bf16"), (16, "e5m2"), (24, "fp16"), (256, "bf16")]
)
@pytest.mark.parametrize("wild", WILD)
def test_what_no_query_may_see(wild, kind, page_size, device):
    """Page tails, unused pages and pages behind the window hold infinities, NaN or huge numbers."""
    left = 200
    case = Case("unseen", (70, 1, 100, 33), (900, 333, 465, 33), (8, 2), page_size=page_size,
                window=(left, 0), **D128, **KINDS[kind])  # fmt: skip
    problem = prefill_problem(case, device)
    before = problem.run()
    problem.check(*before)
    behind = [max(0, n - q - left) for n, q in zip(case.kv_lens, case.q_lens, strict=True)]
    keys = torch.cat([
        torch.arange(n, device=device) >= first
        for n, first in zip(case.kv_lens, behind, strict=True)
    ])  # fmt: skip
    junk = torch.tensor(WILD[wild], device=device).to(problem.memory.dtype)
    raw(problem.memory).fill_(raw(junk))
    problem.write([x[keys] for x in problem.stored], problem.slots()[keys])
    for b, first in enumerate(behind):
        problem.table[b, : first // page_size] = 2**31 - 1  # evicted
    assert all(map(same_bits, problem.run(), before))


Q_LEN, KV_LEN, LEFT = 70, 400, 100
FIRST, LAST = KV_LEN - Q_LEN, KV_LEN - 1  # the keys at the diagonal of the first and the last token
# fmt: off
EDGES = {
    "last_token": {LAST: "nan"},
    "some_of_the_first_tile": {FIRST + 5: "inf"},
    "at_the_tiles": {FIRST + n: "nan" for n in (31, 47)},
    "behind_the_tiles": {FIRST + n: "minus_inf" for n in (32, 48)},
    "first_token": {FIRST - LEFT: "nan"},
    "window_of_some": {FIRST - LEFT + n: "inf" for n in (3, 20, 40)},
    "many_of_a_tile": {FIRST + n: ("nan", "inf", "minus_inf")[n % 3] for n in range(1, 30, 4)},
    "both_edges": {FIRST - LEFT: "inf", FIRST - LEFT + 9: "nan", FIRST - LEFT + 20: "minus_inf",
                   FIRST + 40: "inf", FIRST + 50: "nan", LAST: "minus_inf"},
}
# fmt: on


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize(("dims", "kind", "page_size"), [
    ((64, 64), "bf16", 16), ((96, 96), "fp16", 16), ((128, 128), "bf16", 16),
    ((128, 128), "fp16", 16), ((128, 128), "e5m2", 16), ((192, 128), "bf16", 16),
    ((256, 256), "fp16", 16), ((64, 64), "fp16", 7), ((128, 128), "bf16", 1),
    ((128, 128), "fp16", 7), ((192, 128), "bf16", 5), ((128, 128), "e5m2", 64),
], ids=str)  # fmt: skip
def test_wild_values_that_some_rows_see(kind, dims, page_size, edge, device):
    """Three columns of V. Rows that see such a key are not finite there; all else is right."""
    case = Case("wild_values", (Q_LEN, 1, 33), (KV_LEN, 70, 33), (8, 2), dims, page_size,
                window=(LEFT, 0), **KINDS[kind])  # fmt: skip
    check_wild_values(prefill_problem(case, device), EDGES[edge])


def test_wild_values_at_the_end_of_rows_of_120(device):
    """Rows of 8 bits that are no multiple of 16 bytes, but begin at such multiples."""
    case = Case("wild_120", (Q_LEN, 1, 33), (KV_LEN, 70, 33), (8, 2), (120, 120), 16,
                window=(LEFT, 0), **KINDS["e5m2"])  # fmt: skip
    problem = prefill_problem(case, device)
    problem.caches = [moved(cache, 8, 0) for cache in problem.caches]
    problem.arguments |= dict(zip(("k_cache", "v_cache"), problem.caches, strict=True))
    check_wild_values(problem, EDGES["both_edges"], columns=[119])


def check_wild_values(
    problem: Attention, wild_keys: dict[int, str], columns: list[int] | None = None
) -> None:
    """Of the first sequence."""
    q_len, kv_len = problem.case.q_lens[0], problem.case.kv_lens[0]
    first, left = kv_len - q_len, problem.case.window[0]
    columns = columns or [0, 37, problem.case.head_dim[1] - 1]
    values = problem.stored[1][:kv_len].clone()
    for key, wild in wild_keys.items():
        spoilt = values[key].float()
        spoilt[:, columns] = WILD[wild]
        raw(values)[key] = raw(spoilt.to(values.dtype))
    slots = problem.slots()[:kv_len]
    page_size = problem.case.page_size
    raw(problem.caches[1])[slots // page_size, slots % page_size] = raw(values)

    diagonal = np.arange(first, kv_len)[:, None]
    keys = np.array([*wild_keys])
    sees = keys <= diagonal  # [token, wild key]
    if left >= 0:
        sees &= keys >= diagonal - left
    is_nan = np.array([wild == "nan" for wild in wild_keys.values()])
    assert 0 < sees.any(1).sum() < q_len, "the case has no edge"
    out, lse = problem.used(*problem.run())
    heads = range(problem.case.heads[0])
    spoilt = np.ix_(np.flatnonzero(sees.any(1)), heads, columns)
    assert not np.isfinite(out[spoilt]).any()
    of_nan = np.ix_(np.flatnonzero((sees & is_nan).any(1)), heads, columns)
    assert np.isnan(out[of_nan]).all()
    right = [problem.used(*pair) for pair in (problem.expected, problem.low_precision)]
    for x in (out, *(pair[0] for pair in right)):
        x[spoilt] = 0
    check_pair(out, lse, *right)


@pytest.mark.parametrize("wild", ["nan", "inf"])
@pytest.mark.parametrize("side", ["k", "kv"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_wild_keys_that_some_rows_see(dims, side, wild, device):
    """Rows that do not see them are right."""
    case = Case("wild_keys", (Q_LEN, 1), (KV_LEN, 70), (8, 2), dims, window=(LEFT, 0))
    problem = prefill_problem(case, device)
    for keys, blind in (
        ([LAST], range(Q_LEN - 1)),
        ([FIRST - LEFT], range(1, Q_LEN)),
        ([FIRST - LEFT + 10, LAST - 10], range(11, Q_LEN - 11)),
    ):
        slots = problem.slots()[:KV_LEN]
        for name, cache, rows in zip("kv", problem.caches, problem.stored, strict=True):
            changed = rows[:KV_LEN].clone()
            if name in side:
                changed[keys] = WILD[wild]
            raw(cache)[slots // 16, slots % 16] = raw(changed)
        out, lse = problem.run()
        problem.check(out, lse, [*blind, Q_LEN])  # and the other sequence
        seeing = sorted({*range(Q_LEN)} - {*blind})
        assert not torch.isfinite(out[seeing].float()).all(), "the test has shown nothing"


def test_a_wild_query_stays_in_its_row(device):
    problem = prefill_problem(Case("wild_query", (70, 3), (300, 90), (8, 2), **D128), device)
    problem.arguments["q"][20, 3] = torch.nan
    out, lse = problem.run()
    problem.check(out, lse, [row for row in range(73) if row != 20])
    heads = [head for head in range(8) if head != 3]
    right = [x[0][20, heads].cpu().numpy() for x in (problem.expected, problem.low_precision)]
    lses = [x[1][heads, 20].cpu().numpy() for x in (problem.expected, problem.low_precision)]
    check_pair(
        out[20, heads].double().cpu().numpy(), lse[heads, 20].double().cpu().numpy(),
        *zip(right, lses, strict=True),
    )  # fmt: skip
    assert out[20, 3].isnan().all()


# The last items in pieces: few tiles, many keys

# fmt: off
PIECES = {
    "one_sequence": Case("pieces", (300,), (9000,), (8, 2), **D128),
    "rows_behind_the_tiles": Case("pieces_rows", (205, 99), (5000, 8200), (8, 2), **D128),
    "short_among_long": Case("pieces_short", (1, 200, 1, 0, 150), (900, 7000, 3000, 50, 2100),
                             (8, 2), **D128),
    "few_keys_among_many": Case("pieces_few", (200, 100, 60), (6000, 300, 1500), (8, 2), **D128),
    "head_dim64": Case("pieces_64", (300,), (9000,), (8, 2)),
    "head_dim192_128": Case("pieces_192", (200,), (8000,), (8, 2), (192, 128), dtype="float16"),
    "head_dim96": Case("pieces_96", (200,), (8000,), (8, 2), (96, 96)),
    "window": Case("pieces_window", (200,), (9000,), (8, 2), window=(5000, 0), **D128),
    "no_mask": Case("pieces_full", (200,), (7000,), (8, 2), causal=False, **D128),
    "sinks": Case("pieces_sinks", (200,), (7000,), (8, 2), sinks="float32", **D128),
    "group5": Case("pieces_group5", (150,), (7000,), (20, 4), **D128),
    "uncut": Case("pieces_softcap", (200,), (7000,), (8, 2), softcap=9.0, **D128),
    "e4m3": Case("pieces_e4m3", (200,), (7000,), (8, 2), scales="heads", **KINDS["e4m3"], **D128),
    "e5m2_64": Case("pieces_e5m2", (200, 70), (7000, 9000), (8, 2), scales="batch_heads",
                    **KINDS["e5m2"]),
    "page1": Case("pieces_page1", (200, 70), (7000, 9000), (8, 2), page_size=1, **D128),
    "uncut_256": Case("pieces_256", (200,), (7000,), (8, 2), (256, 256)),
}
# fmt: on


@pytest.mark.parametrize("case", PIECES.values(), ids=PIECES.keys())
def test_items_in_pieces(case, device):
    """Right, with the same bits whoever comes last; and with few splits or none."""
    problem = prefill_problem(case, device)
    expected = problem.run()
    problem.check(*expected)
    workspace = problem.workspace()
    for _ in range(10 if device == "cuda" else 1):
        assert all(map(same_bits, problem.run(workspace=workspace), expected))
    for num_splits in (1, 2, 3):
        problem.check(*problem.run(num_splits=num_splits))


@pytest.mark.parametrize(
    "edge", ["last_token", "at_the_tiles", "behind_the_tiles", "many_of_a_tile"]
)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
def test_wild_values_in_pieces(dims, edge, device):
    """What the piece with the diagonal leaves out, the last piece to come adds."""
    case = Case("wild_pieces", (Q_LEN, 1), (6000, 70), (8, 2), dims)
    problem = prefill_problem(case, device)
    moved_keys = {key + 6000 - KV_LEN: wild for key, wild in EDGES[edge].items()}
    for _ in range(3):
        check_wild_values(problem, moved_keys)


@on_a_gpu
def test_pieces_in_a_graph(kernel):
    """1,000 replays, the counters of pieces as each left them."""
    problem = prefill_problem(PIECES["short_among_long"], "cuda")
    results, workspace = results_of(problem), problem.workspace()
    expected = [x.clone() for x in problem.run(**results, workspace=workspace)]
    graph = captured(lambda: problem.run(**results, workspace=workspace))
    for i in range(1000):
        if i % 100 == 0:
            for tensor in results.values():
                raw(tensor).fill_(-1)
        graph.replay()
        if i % 100 == 0:
            assert all(map(same_bits, results.values(), expected))


# Metadata that is wrong


@pytest.mark.parametrize("wrong", [2**31 - 1, -1, -(2**31), "beyond"])
@pytest.mark.parametrize("page_size", [8, 16, 64])
def test_pages_outside_the_cache_read_as_zeros(page_size, wrong, device):
    case = Case("wild_pages", (70, 33), (300, 290), (8, 2), page_size=page_size, **D128)
    problem = prefill_problem(case, device)
    page = problem.num_pages if wrong == "beyond" else wrong
    problem.stored = [x.clone() for x in problem.stored]
    for b, index in ((0, 0), (0, 2), (1, 1), (1, 290 // page_size)):
        problem.table[b, index] = page
        first = sum(case.kv_lens[:b]) + index * page_size
        for x in problem.stored:
            x[first : min(first + page_size, sum(case.kv_lens[: b + 1]))] = 0
    problem.check(*problem.run())


def test_query_offsets_beyond_the_rows_are_clamped(device):
    """The second sequence claims rows that q does not have; the third has a negative length."""
    problem = prefill_problem(Case("clamped_offsets", (70, 33), (90, 77), (8, 2)), device)
    problem.check(*problem.run(
        cu_seqlens_q=int32(device, [0, 70, 10_000, 44]), seqused_k=int32(device, [90, 77, 10]),
        block_table=torch.cat([problem.table, problem.table[:1]]), max_seqlen_q=9930,
    ))  # fmt: skip


def test_lengths_beyond_the_table_are_clamped(device):
    problem = prefill_problem(Case("clamped_lengths", (70, 33), (96, 96), (8, 2)), device)
    table = problem.table[:, :6]
    huge = int32(device, [2**31 - 1, 97])
    problem.check(*problem.run(block_table=table, seqused_k=huge, max_seqlen_k=None))
