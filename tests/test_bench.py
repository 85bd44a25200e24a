"""The benchmarks' parts that need no GPU: what cases count, adapters, tables, plots, arguments."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import attention
import cache_write
import pagetile
import peers
import pytest
import results_table
import torch
from gpu import prefill_by
from harness.cases import BAR_PEER, SUITES, Case, uniform
from harness.gpu import Times
from harness.problem import Problem
from harness.report import Report
from pagetile.compat import vllm as compat
from peers import fa3, flashinfer, vllm_write
from peers.pagetile import by_family, choose
from peers.peer import Call, Peer

ROOT = Path(__file__).parent.parent
SMALL = {"heads": (8, 2), "head_dim": 64}
DECODE = Case("decode", (1, 1), (70, 70), **SMALL)
PROMPTS = Case("prompts", (33, 33), (33, 33), **SMALL)
CHUNKS = Case("chunks", (5, 5), (40, 40), **SMALL)
UNEVEN = Case("uneven", (1, 7, 20), (40, 9, 33), **SMALL)
FP8 = Case("fp8", (1, 1), (40, 33), kv_dtype=torch.float8_e4m3fn, **SMALL)
OTHERS = [
    Case("HND", (1, 7, 20), (40, 9, 33), layout="HND", **SMALL),
    Case("window", (1, 3), (40, 33), window=7, **SMALL),
    Case("writes", (1, 3), (40, 33), writes=True, **SMALL),
]
CASES = [DECODE, PROMPTS, CHUNKS, UNEVEN, FP8, *OTHERS]


@pytest.fixture(autouse=True)
def kernels():
    """Chosen as other tests expect it, afterwards."""
    with prefill_by("best"):
        yield


# Cases


def visible(case: Case, q_len: int, kv_len: int, token: int) -> range:
    """Keys that a token sees."""
    position = kv_len - q_len + token
    return range(0 if case.window < 0 else max(0, position - case.window), position + 1)


@pytest.mark.parametrize("suite", SUITES)
def test_cases_count_what_their_queries_see(suite):
    cases = list(SUITES[suite]())
    assert len({case.name for case in cases}) == len(cases) > 0
    for case in cases:
        pairs = keys = 0
        for q_len, kv_len in set(zip(case.q_lens, case.kv_lens, strict=True)):
            times = list(zip(case.q_lens, case.kv_lens, strict=True)).count((q_len, kv_len))
            seen = [visible(case, q_len, kv_len, token) for token in range(q_len)]
            pairs += times * sum(map(len, seen))
            keys += times * (seen[-1].stop - seen[0].start)
        rows = sum(case.q_lens) * case.heads[0] * case.head_dim
        stored = 2 * keys * case.heads[1] * case.head_dim
        assert case.flops == pairs * case.heads[0] * case.head_dim * 4, case.name
        assert case.bytes == stored * case.stored.itemsize + 2 * rows * case.dtype.itemsize


def test_writes_count_what_they_read_and_write():
    for case in [*cache_write.bar_cases(quick=False), *cache_write.layout_cases(quick=False)]:
        elements = 2 * case.tokens * case.heads * case.head_dim
        stored = {"auto": case.dtype.itemsize}.get(case.kv_dtype, 1)
        assert case.bytes == elements * case.dtype.itemsize + elements * stored, case.name


# Adapters


def check_second_table(
    peer: Peer, calls: list[Call], problem: Problem, worst: float = attention.WORST_ERROR
) -> None:
    """The first call attends over other pages, the second over these. The tables end as before."""
    problem.tables.reverse()
    assert problem.error(peer, calls) > 0.5, peer.name
    assert problem.error(peer, calls[::-1]) < worst, peer.name
    problem.tables.reverse()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_adapters_compute_the_same(case):
    problem = Problem(case, "cpu", sets=2)
    names = {"no_plan", "sm80", "split_kv", "sdpa", "legacy_v1", "legacy_v2"}
    compared = [attention.SELF] + [peers.ATTENTION[name] for name in sorted(names)]
    for peer in compared:
        if peer.supports(case):
            calls = peer.prepare(case, problem)
            assert len(calls) == len(problem.tables) * (2 if case.writes else 1)
            assert problem.error(peer, calls) < attention.WORST_ERROR, peer.name
            if not case.writes:
                check_second_table(peer, calls, problem)


def test_who_takes_what():
    def takers(case: Case) -> set[str]:
        return {name for name, peer in peers.ATTENTION.items() if peer.supports(case)}

    ours = {"no_plan", "sm80", "sm90a", "split_kv"}
    paged = {"fa3", "fa3_contiguous", "flashinfer", "flashinfer_fa3"}
    legacy = {"legacy_v1", "legacy_v2"}
    assert takers(DECODE) == ours | paged | legacy | {"flashinfer_xqa", "sdpa"}
    assert takers(PROMPTS) == takers(CHUNKS) == ours | paged | {"sdpa"}
    assert takers(UNEVEN) == ours | paged
    others = {"fa3", "flashinfer", "flashinfer_xqa", "fp8_products"}
    assert takers(FP8) == ours | legacy | others
    for case in (*OTHERS, replace(DECODE, pdl=True), replace(DECODE, batch_invariant=True)):
        assert takers(case) == ours, case.name


def test_queries_of_fp8_cost_what_rounding_does():
    problem, peer = Problem(FP8, "cpu", sets=2), peers.ATTENTION["fp8_products"]
    calls = peer.prepare(FP8, problem)
    assert all(call.args[0].dtype == FP8.stored for call in calls)
    assert all(call.keywords["fp8_products"] for call in calls)
    assert attention.WORST_ERROR < problem.error(peer, calls) < attention.WORST_PEER_ERROR
    check_second_table(peer, calls, problem, attention.WORST_PEER_ERROR)


class Planted(Peer):
    name = "planted"

    def __init__(self, factor: float | None) -> None:
        self.factor = factor

    def supports(self, case):
        return True

    def prepare(self, case, tensors):
        if self.factor is None:
            return [lambda: None for _ in tensors.tables]
        calls = attention.SELF.prepare(case, tensors)
        return [lambda call=call: call().mul_(self.factor) for call in calls]


def test_wrong_results_are_seen():
    problem = Problem(UNEVEN, "cpu", sets=1)
    for factor, error in ((1.0, 0.0016), (1.1, 0.1), (None, float("nan"))):
        peer = Planted(factor)
        found = problem.error(peer, peer.prepare(UNEVEN, problem))
        assert found == pytest.approx(error, rel=0.1, nan_ok=True)


def test_a_family_is_chosen_for_a_call_and_no_longer():
    """The CPU plans for an H200, whose kernels for long queries leave the others other work."""
    case = Case("mixed", (1, 1, 1, 2000), (900, 900, 900, 3000))
    problem = Problem(case, "cpu", sets=1)
    make_plan = attention.SELF.make_plan(case, problem)

    def plan() -> bytes:
        return make_plan().buffer.numpy().tobytes()

    best, sm80, split_kv = (by_family(name, plan)() for name in ("best", "sm80", "split_kv"))
    assert len({best, sm80, split_kv}) == 3
    assert best == plan() == by_family("sm90a", plan)()
    with pytest.raises(ZeroDivisionError):
        by_family("split_kv", lambda: 1 / 0)()
    assert plan() == best
    try:
        choose("split_kv")
        assert plan() == split_kv and by_family("sm80", plan)() == sm80
        assert plan() == split_kv
    finally:
        choose("best")
    for family, expected in (("sm80", sm80), ("split_kv", split_kv)):
        refill = peers.ATTENTION[family].make_plan(case, problem)
        assert refill().buffer.numpy().tobytes() == expected


# What is not installed

FA3 = """
import torch
FA3_AVAILABLE, FA3_UNAVAILABLE_REASON = {available}, "planted"

def get_scheduler_metadata(batch, max_q, max_k, heads, kv_heads, dim, lengths, *, qkv_dtype,
                           cu_seqlens_q, page_size, causal, num_splits):
    return batch, max_q, max_k, heads, kv_heads, dim, qkv_dtype, page_size

def flash_attn_varlen_func(q, k, v, *, max_seqlen_q, cu_seqlens_q, max_seqlen_k, softmax_scale,
                           causal, out, fa_version, seqused_k=None, scheduler_metadata=None,
                           block_table=None, cu_seqlens_k=None, **descales):
    assert fa_version == 3 and causal and q.dtype == k.dtype
    names = ["q_descale", "k_descale", "v_descale"] if q.dtype.itemsize == 1 else []
    assert list(descales) == names
    for scale in descales.values():
        assert scale.shape == (len(seqused_k), k.shape[2]) and (scale == 1).all()
    for b, (begin, end) in enumerate(zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist())):
        if block_table is None:
            keys, values = (x[cu_seqlens_k[b] : cu_seqlens_k[b + 1]] for x in (k, v))
        else:
            keys, values = (x[block_table[b].long()].flatten(0, 1)[: seqused_k[b]] for x in (k, v))
        assert end - begin <= max_seqlen_q and len(keys) <= max_seqlen_k
        group = q.shape[1] // k.shape[-2]
        keys, values = (x.float().repeat_interleave(group, 1) for x in (keys, values))
        mask = torch.ones(end - begin, len(keys)).tril(len(keys) - (end - begin)).bool()
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), keys) * softmax_scale
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
    return out
"""


@pytest.fixture
def peers_folder(tmp_path, monkeypatch):
    """An empty $PEERS_DIR, and no library of it in memory before or after."""

    def forget() -> None:
        fa3.load.cache_clear()
        vllm_write.why_not.cache_clear()
        for name in ("vllm_fa", f"vllm_fa.{fa3.INTERFACE}"):
            sys.modules.pop(name, None)

    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setenv("PEERS_DIR", str(folder))
    forget()
    yield folder
    forget()


def test_absent_peers_are_lines_of_the_header(peers_folder, monkeypatch):
    find = importlib.util.find_spec
    absent = ("vllm", "flashinfer")
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name in absent else find(name)
    )
    monkeypatch.setitem(sys.modules, "pagetile.legacy", None)
    here, lines = peers.present(peers.pick("fa3,fa3_contiguous,flashinfer,legacy,sdpa"))
    assert [peer.name for peer in here] == ["sdpa"]
    assert lines == [
        f"not here: fa3, fa3_contiguous (no {fa3.LIBRARY} in PEERS_DIR, and no vLLM)",
        "not here: flashinfer (not installed)",
        "not here: legacy_v1, legacy_v2 (import of pagetile.legacy halted; None in sys.modules)",
    ]
    assert vllm_write.why_not() == f"no {vllm_write.LIBRARY} in PEERS_DIR, and no vLLM"


def test_libraries_that_do_not_load_say_why(peers_folder):
    (peers_folder / fa3.LIBRARY).write_bytes(b"")
    (peers_folder.parent / f"{fa3.INTERFACE}.py").write_text(FA3.format(available=False))
    (peers_folder / vllm_write.LIBRARY).write_bytes(b"no library")
    assert peers.ATTENTION["fa3"].unavailable() == "planted"
    assert vllm_write.LIBRARY in vllm_write.why_not()


@pytest.mark.parametrize("place", [".", "vllm_fa", ".."])
def test_flash_attention_gets_the_problem(peers_folder, place):
    """Its interface stands in for itself, in each folder where fetch.sh or a hand may put it."""
    (peers_folder / place).mkdir(exist_ok=True)
    (peers_folder / fa3.LIBRARY).write_bytes(b"")
    (peers_folder / place / f"{fa3.INTERFACE}.py").write_text(FA3.format(available=True))
    for peer in fa3.PEERS:
        assert peer.unavailable() is None
        for case in (DECODE, PROMPTS, CHUNKS, UNEVEN, FP8):
            if peer.supports(case):
                problem = Problem(case, "cpu", sets=2)
                calls = peer.prepare(case, problem)
                worst = attention.WORST_PEER_ERROR if case is FP8 else attention.WORST_ERROR
                assert problem.error(peer, calls) < worst
                check_second_table(peer, calls, problem, worst)


class StandInWrapper:
    """FlashInfer's, as far as the adapter uses it, on top of pagetile."""

    def __init__(self, workspace, layout, backend):
        assert layout == "NHD" and backend in ("fa2", "fa3")

    def plan(self, starts, page_starts, pages, last_lens, heads, kv_heads, dim, page_size, *,
             causal, q_data_type, kv_data_type):  # fmt: skip
        counts = page_starts.diff().tolist()
        self.table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, its_pages in zip(self.table, pages.split(counts), strict=True):
            row[: len(its_pages)] = its_pages
        self.lengths = ((page_starts.diff() - 1) * page_size + last_lens).int()
        self.starts, self.sizes, self.causal = starts, (heads, kv_heads, dim, page_size), causal
        self.dtypes = (q_data_type, kv_data_type)

    def run(self, q, caches, *, out):
        heads, kv_heads, dim, page_size = self.sizes
        assert q.shape[1:] == (heads, dim) and caches[0].shape[1:] == (page_size, kv_heads, dim)
        assert (q.dtype, caches[0].dtype) == self.dtypes
        pagetile.paged_attention(
            q, *caches, block_table=self.table, seqused_k=self.lengths, cu_seqlens_q=self.starts,
            max_seqlen_q=len(q), causal=self.causal, out=out,
        )  # fmt: skip


def stand_in_xqa(q, caches, workspace, table, lengths, max_length, *, bmm1_scale, bmm2_scale, out,
                 kv_layout, backend):  # fmt: skip
    assert (kv_layout, backend, bmm2_scale) == ("NHD", "xqa", 1.0)
    assert lengths.max() <= max_length and not workspace.any()
    pagetile.paged_attention(
        q, *caches, block_table=table, seqused_k=lengths, max_seqlen_q=1, softmax_scale=bmm1_scale,
        cu_seqlens_q=torch.arange(len(q) + 1, dtype=torch.int32), out=out,
    )  # fmt: skip


def test_flashinfer_gets_the_problem(monkeypatch):
    decode = SimpleNamespace(trtllm_batch_decode_with_kv_cache=stand_in_xqa)
    module = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=StandInWrapper, decode=decode)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1 << 10)
    for peer in flashinfer.PEERS:
        for case in (DECODE, PROMPTS, CHUNKS, UNEVEN, FP8):
            if peer.supports(case):
                problem = Problem(case, "cpu", sets=2)
                calls = peer.prepare(case, problem)
                assert problem.error(peer, calls) < attention.WORST_ERROR
                check_second_table(peer, calls, problem)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
def test_vllms_write_gets_the_problem(monkeypatch, kv_dtype):
    """By compat.vllm, which takes vLLM's arguments."""
    ops = SimpleNamespace(reshape_and_cache_flash=compat.reshape_and_cache_flash)
    monkeypatch.setattr(torch.ops, "_C_cache_ops", ops, raising=False)
    case = cache_write.Case(3, 2, 16, kv_dtype=kv_dtype)
    k, v = torch.randn(2, 3, 2, 16).bfloat16()
    caches = torch.zeros(
        2, 4, 16, 2, 16, dtype=torch.bfloat16 if kv_dtype == "auto" else torch.uint8
    )
    inputs = [(k, v, torch.tensor([5, 40, 63])), (v, k, torch.tensor([1, 2, 3]))]
    problem = SimpleNamespace(
        inputs=inputs, scales=(torch.ones(1), torch.ones(1)), tokens_first=lambda: tuple(caches)
    )
    for call in vllm_write.PEERS[0].prepare(case, problem):
        call()
    expected = torch.zeros_like(caches)
    for rows_k, rows_v, slots in inputs:
        pagetile.cache_write(rows_k, rows_v, *expected, slots, kv_dtype=kv_dtype)
    assert expected.any() and torch.equal(caches, expected)


# Reports


class StandInTimer:
    """Times that no clock gave: for tests of what is done with them."""

    def warm(self, calls):
        for call in calls:
            call()
        return Times(9.0, 10.0, 12.0)

    def host(self, call):
        return 5.0


@pytest.fixture
def report_of(monkeypatch, tmp_path):
    """What attention.py would write on a GPU, of a problem on the CPU, with stand-in times."""
    monkeypatch.setattr(attention, "Problem", lambda case: Problem(case, "cpu", sets=2))
    monkeypatch.setattr(attention, "describe_machine", lambda: ["pagetile", "a machine"])
    monkeypatch.setattr(attention, "measure_read", lambda timer: 1e-3)
    monkeypatch.setattr(attention, "measure_product", lambda timer: 1e-3)

    def report_of(others: list[Peer], cases: list[Case], suite: str) -> tuple[int, dict]:
        file = tmp_path / "attention.json"
        arguments = attention.parse_arguments(["--json", str(file)])
        arguments.absent = ["not here: nobody"]
        timer = StandInTimer()
        report = attention.AttentionReport(timer, arguments, others, len(cases))
        report.suite(suite, cases, lambda case: attention.measure(case, timer, others))
        return report.summary(), json.loads(file.read_text())

    return report_of


def test_peers_stand_side_by_side(report_of, capsys):
    others = [*peers.pick("sdpa,no_plan"), Planted(None)]
    status, found = report_of(others, [PROMPTS, UNEVEN], "prefill")
    first, second = found["cases"]
    assert status == 0
    assert found["machine"] == ["pagetile", "a machine", "not here: nobody"]
    assert (first["us"], first["iqr"], first["tables"]) == (10.0, 3.0, 2)
    assert first["peers"]["sdpa"]["ratio"] == first["peers"]["no_plan"]["ratio"] == 1.0
    assert set(second["peers"]) == {"no_plan", "planted"}
    assert first["peers"]["planted"] == {"error": "AssertionError: relative error nan"}
    out = capsys.readouterr().out
    assert "# not here: nobody" in out
    assert "planted: AssertionError: relative error nan" in out
    assert "sdpa: 1 of 1 cases, 1.00 to 1.00 times as long" in out
    assert "planted: 0 of 2 cases" in out


def test_bars_are_an_h200s(report_of, monkeypatch, capsys):
    others = [Planted(1.0)]
    others[0].name = BAR_PEER
    bars = ({"bar": 10.0}, {"bar": 9.0}, {"ratio_bar": 1.0}, {"ratio_bar": 0.9}, {})
    cases = [replace(UNEVEN, name=str(i), **bar) for i, bar in enumerate(bars)]
    for name, verdicts in (
        ("NVIDIA H200", [True, False, True, False, None]),
        ("NVIDIA A100", [None] * len(bars)),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        status, found = report_of(others, cases, "prefill")
        assert status == 0, "a missed bar is no failure"
        assert [row.get("ok") for row in found["cases"]] == verdicts
    assert "bars met: 2 of 4\n" in capsys.readouterr().out


def test_a_case_that_fails_fails_the_run(report_of, monkeypatch):
    monkeypatch.setattr(attention, "WORST_ERROR", 1e-9)
    status, found = report_of([], [UNEVEN], "prefill")
    assert status == 1
    assert found["cases"][0]["error"].startswith("AssertionError: relative error")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_bar_runs_on_a_terminal_alone(monkeypatch, capsys, terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    report = Report((("us", "us", "6.1f"),), 8, {"machine": []}, None, total=2)
    report.titles("section")
    for name in ("one", "two"):
        report.case(name, {"name": name}, lambda: {"us": 2.0, "bytes": 4000})
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "",
        "# section",
        "case        us",
        "one        2.0",
        "two        2.0",
    ]
    assert ("1/2" in err) == terminal
    assert report.rows[1]["gbps"] == 2.0


# Arguments


def test_arguments_of_attention(capsys):
    assert attention.parse_arguments([]).suites == ["decode", "uneven", "spec", "fp8"]
    chosen = attention.parse_arguments(["all", "--peers", "legacy,sdpa,sdpa", "--family", "sm80"])
    assert chosen.suites == list(SUITES)
    assert [peer.name for peer in chosen.peers] == ["legacy_v1", "legacy_v2", "sdpa"]
    for words, message in (
        (["decode", "dcode"], "no suite dcode; there are: decode, uneven"),
        (["--peers", "fa9,sdpa"], "no peer fa9; there are: fa3, fa3_contiguous"),
        (["--family", "sm70"], "invalid choice: 'sm70'"),
    ):
        with pytest.raises(SystemExit) as stop:
            attention.parse_arguments(words)
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is something to measure")
@pytest.mark.parametrize("script", ["attention", "cache_write", "merge_states"])
def test_without_a_gpu_nothing_is_measured(script):
    command = [sys.executable, f"bench/{script}.py"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "nothing to measure" in run.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is something to measure")
def test_without_a_gpu_no_page_is_touched(tmp_path):
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path / "out")}
    command = ["bench/run_all.sh", "nobody"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 2 and "sees no CUDA device" in run.stderr
    assert not list((ROOT / "bench" / "results").glob("nobody.*"))


# Tables and plots. Their numbers are nobody's measurements.


def row(suite: str, case: Case, us: float, **others: float) -> dict:
    theirs = {name: {"us": value} for name, value in others.items()}
    bars = {"bar_us": case.bar, "bar_ratio": case.ratio_bar}
    rates = {"gbps": case.bytes / us / 1e3, "tflops": case.flops / us / 1e6}
    found = {"suite": suite, "name": case.name, "bytes": case.bytes, "flops": case.flops}
    return {**found, **bars, **rates, "us": us, "peers": theirs}


def sections() -> dict:
    decode = [
        row("decode", uniform(1, 1000, bar=2.0), 2.5, fa3=5.0, sdpa=10.0),
        row("fp8", uniform(1, 8000, bar=4000.0), 4000.0, fa3=3000.0),
    ]
    prefill = [
        row("prefill", uniform(1, 64, 64, "q64 ", ratio_bar=0.9), 8.0, fa3_contiguous=10.0),
        row("chunk", uniform(1, 128, 64, "q64 ", ratio_bar=0.9), 9.5, fa3_contiguous=10.0),
    ]
    pages = [row("pages", uniform(1, 16, name=f"page{n} NHD "), n, fa3=n + 1) for n in (1, 16)]
    groups = [
        row("groups", uniform(1, 16, name=f"group{n} ", heads=(8 * n, 8)), n) for n in (2, 12)
    ]
    machine = ["pagetile, commit 0", "a machine"]
    return {
        "decode": {"machine": machine, "read_gbps": 10.0, "cases": decode},
        "prefill": {"machine": machine, "product_tflops": 20.0, "cases": prefill},
        "sweeps": {"machine": machine, "cases": [*pages, *groups]},
    }


PAGE = """# A page

By hand.

<!-- table: decode -->
old
<!-- end -->
<!-- table: prefill -->
<!-- end -->
<!-- table: pages -->
<!-- end -->
<!-- table: groups -->
<!-- end -->
<!-- table: cache_write -->
by hand
<!-- end -->
The end.
"""


def test_tables_come_from_the_json_file(tmp_path, capsys):
    page, collected = tmp_path / "gpu.md", tmp_path / "new"
    collected.mkdir()
    page.write_text(PAGE)
    for name, section in sections().items():
        (collected / f"{name}.json").write_text(json.dumps(section))
    words = ["gpu", "--results", str(tmp_path)]
    assert results_table.main([*words, "--collect", str(collected)]) == 0
    assert capsys.readouterr().out == (
        "gpu.md: 4 tables written; left as they are, having no data: cache_write\n"
    )
    assert json.loads((tmp_path / "gpu.json").read_text()) == sections()
    lines = page.read_text().splitlines()
    assert "pagetile, commit 0; a machine; a kernel that reads: 10 GB/s." in lines
    assert "| case | us | GB/s | bar |  | FA3 us | FA3 / ours | SDPA us | SDPA / ours |" in lines
    decode = (
        "| decode 32/8 d128 b1 ctx1000 | 2.5 | 1645 | 2 | **+25 %** | 5.0 | 2.00 | 10.0 | 4.00 |"
    )
    assert decode in lines
    assert "| fp8 32/8 d128 b1 ctx8000 | 4000 | 8 | 4000 | ok | 3000 | 0.75 |  |  |" in lines
    prefill = [line for line in lines if line.startswith(("| prefill", "| chunk"))]
    bar = "0.9 of FA3 contiguous"
    assert [line.split(" | ")[3:5] for line in prefill] == [[bar, "0.800, ok"], [bar, "**0.950**"]]
    assert "| us, by page | 1 | 16 |" in lines
    assert "| NHD 32/8 d128 b1 ctx16: FA3 | 2.0 | 17.0 |" in lines
    assert lines[lines.index("| us, by group | 2 | 12 |") + 2] == (
        "| 8 KV heads d128 b1 ctx16 | 2.0 | 12.0 |"
    )
    assert "old" not in lines and "by hand" in lines and lines[-1] == "The end."

    assert results_table.main([*words, "--check"]) == 0
    page.write_text(page.read_text().replace("**+25 %**", "ok"))
    assert results_table.main([*words, "--check"]) == 1


def test_sections_that_were_not_measured_again_stay(tmp_path):
    (tmp_path / "prefill.json").write_text(json.dumps({"machine": ["new"], "cases": []}))
    found = results_table.collect(tmp_path, sections())
    assert found["decode"] == sections()["decode"]
    assert found["prefill"] == {"machine": ["new"], "cases": []}


def test_a_new_page_has_every_table(tmp_path):
    (tmp_path / "gpu.json").write_text(results_table.text_of(sections()))
    assert results_table.main(["gpu", "--results", str(tmp_path)]) == 0
    page = (tmp_path / "gpu.md").read_text()
    assert all(f"<!-- table: {name} -->" in page for name in results_table.TABLES)
    assert "| decode 32/8 d128 b1 ctx1000 | 2.5 |" in page


def test_unknown_tables_are_refused():
    with pytest.raises(ValueError, match="no table decod; there are: decode"):
        results_table.with_tables("<!-- table: decod -->\n<!-- end -->\n", {})


def test_pages_of_the_repository_are_as_their_files_have_them():
    pages = [file.stem for file in (ROOT / "bench" / "results").glob("*.json")]
    assert pages
    for name in pages:
        assert results_table.main([name, "--check"]) == 0


def test_plots_are_the_same_every_time(tmp_path):
    import plot

    results = tmp_path / "gpu.json"
    write = {"section": cache_write.TABLE, "name": "1x8x128 bf16 NHD", "bytes": 8192, "us": 1.0}
    limits = {"limits": {"copy_gbps": 9.0}, "machine": ["a machine"]}
    found = sections() | {"cache_write": {**limits, "cases": [write]}}
    results.write_text(results_table.text_of(found))
    figures = ("cache_write", "memory", "products")
    names = [f"gpu_{figure}.{kind}" for figure in figures for kind in ("png", "svg")]
    for folder in ("first", "second"):
        assert plot.main([str(results), "--out", str(tmp_path / folder)]) == 0
        assert sorted(file.name for file in (tmp_path / folder).iterdir()) == names
    for name in names:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    memory = (tmp_path / "first" / "gpu_memory.svg").read_text()
    for text in ("pagetile, commit 0; a machine", "FA3", "SDPA", "floor: a kernel that reads"):
        assert text in memory
    assert "few tokens" not in memory, "a panel without cases"
    assert "floor: a product" in (tmp_path / "first" / "gpu_products.svg").read_text()
    assert "floor: a copy" in (tmp_path / "first" / "gpu_cache_write.svg").read_text()


def test_points_are_rates_against_sizes():
    import plot

    rows = sections()["decode"]["cases"]
    size = rows[0]["bytes"]
    found = plot.points(plot.PLOTS["memory"], rows)
    assert list(found) == ["pagetile", "fa3", "sdpa"]
    assert found["pagetile"][0] == (size, pytest.approx(size / 2.5e-6 / 1e9))
    assert found["sdpa"] == [(size, pytest.approx(size / 10e-6 / 1e9))]
    rows = sections()["prefill"]["cases"]
    flops = rows[0]["flops"]
    found = plot.points(plot.PLOTS["products"], rows)
    assert found["fa3_contiguous"][0] == (flops, pytest.approx(flops / 10e-6 / 1e12))


def test_nothing_to_draw_is_an_error(tmp_path, capsys):
    import plot

    results = tmp_path / "gpu.json"
    results.write_text(json.dumps({"machine": ["a machine"], "cases": []}))
    assert plot.main([str(results), "--out", str(tmp_path)]) == 1
    assert "has no case of a figure" in capsys.readouterr().err
