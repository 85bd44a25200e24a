"""paged_attention against the reference: every named case, then what a case cannot express."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pagetile
import pytest
import reference
import torch
from cases import ATTENTION, Case
from problem import Problem, same_bits, to_numpy

USES = ("paged_attention",)


def test_case_names_are_unique():
    names = [case.name for case in ATTENTION]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: case.name)
def test_attention(case, device):
    """Right within the tolerance rule, nothing else touched, and the same bits a second time."""
    skip_unless_meant_for(case, device)
    problem = Problem(case, device)
    out, lse = problem.run()
    problem.check(out, lse)
    first = [torch.from_numpy(x) for x in problem.used(out, lse)]
    second = [torch.from_numpy(x) for x in problem.used(*problem.run())]
    assert all(map(same_bits, first, second))


def skip_unless_meant_for(case: Case, device: str) -> None:
    if device == "cuda" and case.dtype == "float32":
        pytest.skip("fp32 attention is for the CPU alone")


# Return values and optional arguments


def test_out_is_returned_and_alone_by_default(device):
    problem = Problem(Case("returns"), device)
    arguments = dict(problem.arguments)
    tensors = [arguments.pop(name) for name in ("q", "k_cache", "v_cache")]
    out = pagetile.paged_attention(*tensors, **arguments)
    assert isinstance(out, torch.Tensor)
    assert same_bits(out, problem.run()[0])
    given = torch.empty_like(out)
    assert pagetile.paged_attention(*tensors, out=given, **arguments) is given
    assert same_bits(given, out)
    lse = torch.full((4, out.shape[0]), torch.nan, device=device)
    both = pagetile.paged_attention(
        *tensors, out=given, softmax_lse=lse, return_softmax_lse=True, **arguments
    )
    assert both[0] is given
    assert both[1] is lse
    problem.check(*both)


def test_softmax_lse_given_but_not_returned(device):
    problem = Problem(Case("lse_given"), device)
    lse = torch.full((4, problem.rows), torch.nan, device=device)
    out = problem.run(softmax_lse=lse, return_softmax_lse=False)
    assert isinstance(out, torch.Tensor)
    problem.check(out, lse)


def test_lse_costs_no_bits(device):
    problem = Problem(Case("with_and_without_lse"), device)
    assert same_bits(problem.run()[0], problem.run(return_softmax_lse=False))


@pytest.mark.parametrize("bound", [None, 41, 100_000, 2**31 - 1], ids=str)
def test_max_seqlen_k_is_only_a_bound(bound, device):
    problem = Problem(Case("max_seqlen_k", window=(20, 0)), device)
    assert same_bits(problem.run(max_seqlen_k=bound)[0], problem.run()[0])


@pytest.mark.parametrize("bound", [13, 1000], ids=str)
def test_max_seqlen_q_is_only_a_bound(bound, device):
    problem = Problem(Case("max_seqlen_q"), device)
    problem.check(*problem.run(max_seqlen_q=bound))


def test_default_softmax_scale_is_of_the_query_head_dim(device):
    problem = Problem(Case("scale_default", head_dim=(192, 128)), device)
    out = problem.run(softmax_scale=192**-0.5)
    assert same_bits(out[0], problem.run(softmax_scale=None)[0])


@pytest.mark.parametrize("validate", [None, False, True], ids=str)
def test_validate_accepts_what_is_right(validate, device):
    problem = Problem(Case("validated", (1, 5, 0), (17, 33, 0)), device)
    problem.check(*problem.run(validate=validate))


@pytest.mark.parametrize("batch", [0, 3], ids=["no_sequences", "no_queries"])
def test_no_work(batch, device):
    """A batch without sequences or without queries is not an error."""
    problem = Problem(Case("no_work", (0,) * batch, (16,) * batch), device)
    out, lse = problem.run()
    assert tuple(out.shape) == (0, 4, 64)
    assert tuple(lse.shape) == (4, 0)


def test_scale_shapes_agree(device):
    """One value as (), (1,), [Hkv] and [B, Hkv], dense and expanded, gives the same bits."""
    problem = Problem(Case("scale_shapes", cache_dtype="float8_e4m3fn"), device)
    outs, scales = [], (0.37, 2.5)
    for shape in ((), (1,), (2,), (4, 2)):
        full = [torch.full(shape, x, device=device) for x in scales]
        expanded = [torch.tensor(x, device=device).expand(shape) for x in scales]
        outs += [problem.run(k_scale=k, v_scale=v)[0] for k, v in (full, expanded)]
    assert all(same_bits(out, outs[0]) for out in outs)
    assert not same_bits(outs[0], problem.run()[0])


def test_kv_dtype_names_agree(device):
    """fp8 is fp8_e4m3; a float8 tensor needs no name; a 16-bit cache may be named."""
    problem = Problem(Case("kv_dtype", cache_dtype="float8_e4m3fn"), device)
    outs = [problem.run(kv_dtype=name)[0] for name in ("auto", "fp8", "fp8_e4m3")]
    raw = {n: problem.arguments[n].view(torch.uint8) for n in ("k_cache", "v_cache")}
    outs += [problem.run(kv_dtype=name, **raw)[0] for name in ("fp8", "fp8_e4m3")]
    assert all(same_bits(out, outs[0]) for out in outs)
    problem = Problem(Case("kv_dtype_16"), device)
    assert same_bits(problem.run(kv_dtype="bfloat16")[0], problem.run()[0])


# Masks, one key at a time


def one_hot_problem(device, length=70, dtype="bfloat16"):
    """Every key equal, so that weights are uniform; V of key j is the unit vector j."""
    problem = Problem(Case("one_hot", (1,), (length,), (1, 1), (64, 128), 16, dtype), device)
    k_cache, v_cache = problem.caches.tensors()
    for j in range(length):
        page, slot = int(problem.table[0, j // 16]), j % 16
        k_cache[page, slot] = 0
        v_cache[page, slot] = 0
        v_cache[page, slot, :, j] = 1
    return problem


WINDOWS = [(0, 0), (1, 0), (15, 0), (16, 0), (17, 0), (63, -1), (64, 0), (68, 0), (69, 0), (70, 0)]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_window_edge_of_a_decode(window, device):
    """Key W away is the last one seen: the weights say exactly which keys were."""
    length = 70
    problem = one_hot_problem(device, length)
    out, lse = problem.run(window=window)
    seen = to_numpy(out)[0, 0, :length] != 0
    np.testing.assert_array_equal(np.flatnonzero(seen), range(max(0, 69 - window[0]), 70))
    np.testing.assert_allclose(lse.item(), np.log(seen.sum()), rtol=1e-6)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "noncausal"])
@pytest.mark.parametrize("q_len", [1, 9, 70, 81])
def test_mask_of_each_row(q_len, causal, device):
    length, window = 70, (12, 3)
    problem = one_hot_problem(device, length)
    q = torch.ones(q_len, 1, 64, dtype=torch.bfloat16, device=device)
    cu = torch.tensor([0, q_len], dtype=torch.int32, device=device)
    more = {"cu_seqlens_q": cu, "max_seqlen_q": q_len, "causal": causal, "window": window}
    out = to_numpy(problem.run(q=q, **more)[0])
    for row in range(q_len):
        expected = reference.visible_keys(row, q_len, length, causal, window)
        np.testing.assert_array_equal(out[row, 0, :length] != 0, expected, err_msg=f"row {row}")


# Metadata that is wrong: defined, never out of bounds


def test_lengths_beyond_the_table_are_clamped(device):
    problem = Problem(Case("clamped_lengths", (1, 3), (32, 48), page_size=16), device)
    width = 2
    table = problem.arguments["block_table"][:, :width]
    clamped = torch.tensor([32, 32], dtype=torch.int32, device=device)
    huge = torch.tensor([2**31 - 1, 33], dtype=torch.int32, device=device)
    right = problem.run(block_table=table, seqused_k=clamped)
    for a, b in zip(problem.run(block_table=table, seqused_k=huge), right, strict=True):
        assert same_bits(a, b)


def test_negative_lengths_are_empty(device):
    problem = Problem(Case("negative_lengths", (1, 3), (0, 0)), device)
    wrong = torch.tensor([-1, -(2**31)], dtype=torch.int32, device=device)
    problem.check(*problem.run(seqused_k=wrong))


def test_pages_outside_the_cache_read_as_zeros(device):
    problem = Problem(Case("wild_pages", (1, 4), (40, 40), causal=False), device)
    for b, wrong in enumerate((2**31 - 1, -1)):
        problem.table[b, 1] = wrong
        problem.arguments["block_table"][b, 1] = wrong
    problem.check(*problem.run())


def test_query_offsets_beyond_the_rows_are_clamped(device):
    """The second sequence claims rows that q does not have; the third has a negative length."""
    problem = Problem(Case("clamped_offsets", (2, 3), (20, 30)), device)
    lens = torch.tensor([20, 30, 10], dtype=torch.int32, device=device)
    table = problem.arguments["block_table"]
    wrong = torch.tensor([0, 2, 90, 4], dtype=torch.int32, device=device)
    more = {"seqused_k": lens, "block_table": torch.cat([table, table[:1]])}
    problem.check(*problem.run(cu_seqlens_q=wrong, max_seqlen_q=88, **more))


# Large batches and caches


@pytest.mark.parametrize("batch", [65_535, 65_536, 65_537])
def test_batch_beyond_65535(batch, device):
    """One key or none for each sequence: out is that key's V, or 0."""
    rng = np.random.default_rng(batch)
    pages = 1000
    v_cache = torch.from_numpy(rng.standard_normal((pages, 1, 1, 8)).astype(np.float16)).to(device)
    table = torch.from_numpy(rng.integers(0, pages, (batch, 1)).astype(np.int32)).to(device)
    lens = torch.arange(batch, dtype=torch.int32, device=device) % 3 != 0
    q = torch.ones(batch, 1, 8, dtype=torch.float16, device=device)
    out, lse = pagetile.paged_attention(
        q, v_cache, v_cache, block_table=table, seqused_k=lens.int(), max_seqlen_q=1,
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=device),
        return_softmax_lse=True,
        out=torch.full_like(q, 77.0),
    )  # fmt: skip
    expected = v_cache[table[:, 0].long(), 0] * lens[:, None, None]
    assert torch.equal(out, expected)
    assert torch.equal(lse[0] == -torch.inf, ~lens)


def test_heads_are_independent(device):
    """A query head's result is that of the same head alone with its KV head."""
    problem = Problem(Case("heads_alone", heads=(6, 2), alibi="heads", sinks="float32"), device)
    out, lse = problem.run(batch_invariant=True)
    names = ("q", "k_cache", "v_cache", "alibi_slopes", "sinks")
    q, k_cache, v_cache, slopes, sinks = (problem.arguments[n] for n in names)
    for head in range(6):
        kv = slice(head // 3, head // 3 + 1)
        one = slice(head, head + 1)
        alone = problem.run(
            q=q[:, one], k_cache=k_cache[:, :, kv], v_cache=v_cache[:, :, kv],
            alibi_slopes=slopes[one], sinks=sinks[one], batch_invariant=True,
        )  # fmt: skip
        torch.testing.assert_close(alone[0], out[:, one], atol=1e-5, rtol=2**-8)
        torch.testing.assert_close(alone[1], lse[one], atol=1e-5, rtol=1e-5)


def test_small_tensors_may_be_strided(device):
    """ALiBi slopes, sinks and scales with gaps in every dimension, NaN in the gaps."""
    case = Case("strided_small", scales="batch_heads", alibi="batch_heads", sinks="bfloat16",
                cache_dtype="float8_e5m2")  # fmt: skip
    problem = Problem(case, device)
    strided = {}
    for name in ("alibi_slopes", "sinks", "k_scale", "v_scale"):
        x = problem.arguments[name]
        wide = torch.full([2 * n + 1 for n in x.shape], torch.nan).to(x)
        strided[name] = wide[tuple(slice(1, None, 2) for _ in x.shape)]
        strided[name].copy_(x)
    problem.check(*problem.run(**strided))


def test_shared_prefix_pages(device):
    """Two sequences name the same pages: each is as if it had a copy."""
    case = Case("shared_prefix", (1, 3), (40, 40), heads=(8, 2))
    problem = Problem(case, device)
    problem.table[1, :2] = problem.table[0, :2]
    problem.arguments["block_table"][1, :2] = problem.arguments["block_table"][0, :2]
    problem.check(*problem.run())


def test_dead_table_entries_do_not_matter(device):
    """Entries of the table that no sequence uses may change between calls without any effect."""
    problem = Problem(replace(ATTENTION[0], name="table_changes"), device)
    first = problem.run()
    used = [-(-n // problem.case.page_size) for n in problem.case.kv_lens]
    for b, count in enumerate(used):
        problem.arguments["block_table"][b, count:] = 0
    for a, b in zip(first, problem.run(), strict=True):
        assert same_bits(a, b)


# Callers of several threads, and of several processes


def test_concurrent_calls(device):
    """Eight threads at once, each with its own problem: the bits of a lonely call."""
    problems = [
        Problem(Case("threads", (1, 33), (300, 40 + i), (8, 2), seed=i), device) for i in range(8)
    ]
    expected = [problem.run() for problem in problems]

    def call(i):
        runs = (problems[i].run() for _ in range(20))
        return all(all(map(same_bits, run, expected[i])) for run in runs)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(8)))


FORK = """
import os
import numpy as np
import pagetile
rng = np.random.default_rng(0)
k_cache, v_cache = rng.standard_normal((2, 64, 64, 2, 64)).astype(np.float32)
table = np.arange(64, dtype=np.int32).reshape(8, 8)
def attend():
    return pagetile.paged_attention(
        k_cache[:8, 0].repeat(4, 1), k_cache, v_cache, block_table=table, max_seqlen_q=1,
        seqused_k=np.full(8, 512, np.int32), cu_seqlens_q=np.arange(9, dtype=np.int32),
    )
expected = attend()
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(attend(), expected) else 1)
print("child", os.waitpid(child, 0)[1])
"""


def test_child_of_a_fork(device):
    """A process that forked after a call may call in the child: no wait for threads left behind."""
    if device != "cpu":
        pytest.skip("CUDA does not survive a fork")
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "child 0", done.stderr
