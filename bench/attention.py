"""paged_attention on a GPU: time, share of the time that its bytes take, host time.

Medians over replays of a CUDA graph that holds many calls, in us a call. The calls go through
distinct block tables in turn, of 320 MB of keys and values together at least, so that the L2 serves
nothing twice. The plan is made ahead, as an engine does once a step; out is given.

    us     of one call; of a chain: of one write and one attention
    GB/s   bytes of the visible keys and values, of queries and results
    TF/s   products of queries and keys, and of weights and values
    floor  the time of those bytes at the rate at which a plain kernel reads, or of those products
           at 690 TFLOP/s, whichever is longer, over `us`
    plan   make_plan, which another kernel of the step may hide
    self   a call without a plan, which plans by itself (with --self)
    host   from Python into the library and back, nothing captured
    err    relative L2 error of a sample of rows against fp32

Suites: decode, uneven, spec, fp8, pages, groups, layouts, qlen, window, invariant, pdl; with long
queries: prefill, mixed, prefill_pages, prefill_qlen, prefill_fp8.

    python bench/attention.py                            # decode uneven spec fp8: those with bars
    python bench/attention.py pages layouts --json out.json
    python bench/attention.py decode --match "b64 ctx8192"
    python bench/attention.py prefill --prefill portable # the portable kernel where WGMMA would do
"""

from __future__ import annotations

import argparse
import functools
import math
import pathlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pagetile
import torch
from harness.gpu import Call, Timer, describe_machine
from harness.report import Report

BF16, FP16 = torch.bfloat16, torch.float16
SHORT = {BF16: "bf16", FP16: "fp16", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
COLD_BYTES = 320 << 20  # five times the L2 of an H200
MOST_SETS = 128
MOST_POOL_BYTES = 24 << 30
WORST_ERROR = 5e-3
HOST_BAR = 8.0
MATRIX_RATE = 690e12  # FLOP/s of a large product of bf16 matrices, H200

# Cases


@dataclass(frozen=True)
class Case:
    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    page_size: int = 16
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype | None = None  # None: dtype
    layout: str = "NHD"  # NHD, HND, or what is built in make_caches
    window: int = -1  # keys left of the query's own
    batch_invariant: bool = False
    writes: bool = False  # a cache_write before each call
    pdl: bool = False
    bar: float | None = None  # us, H200

    @property
    def stored(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    @property
    def kv_bytes(self) -> int:
        """Of all pages' keys and values."""
        return sum(self.kv_lens) * self.token_bytes

    @property
    def token_bytes(self) -> int:
        return 2 * self.heads[1] * self.head_dim * self.stored.itemsize

    @property
    def bytes(self) -> int:
        """What a call must read and write."""
        seen = (
            kv_len if self.window < 0 else min(kv_len, q_len + self.window)
            for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True)
        )
        rows = 2 * sum(self.q_lens) * self.heads[0] * self.head_dim * self.dtype.itemsize
        return sum(seen) * self.token_bytes + rows

    @property
    def flops(self) -> int:
        pairs = 0
        for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True):
            last = kv_len if self.window < 0 else min(kv_len, self.window + 1)
            first = min(last, kv_len - q_len + 1)  # keys that the first token sees
            rising = last - first
            pairs += q_len * last - rising * (rising + 1) // 2
        return 4 * self.heads[0] * self.head_dim * pairs


def uniform(batch: int, context: int, q_len: int = 1, name: str = "", **more: Any) -> Case:
    heads = more.get("heads", (32, 8))
    text = f"{heads[0]}/{heads[1]} d{more.get('head_dim', 128)} b{batch} ctx{context}"
    return Case(f"{name}{text}", (q_len,) * batch, (context,) * batch, **more)


def decode_cases() -> Iterator[Case]:
    bars = {(1, 1024): 5.6, (1, 8192): 12.4, (1, 131_072): 127, (16, 1024): 19, (16, 8192): 125,
            (64, 1024): 66, (64, 8192): 488, (256, 2048): 488}  # fmt: skip
    for heads in ((32, 8), (64, 8)):
        for (batch, context), bar in bars.items():
            yield uniform(batch, context, heads=heads, bar=bar)
    yield uniform(16, 8192, heads=(16, 16), bar=245)
    yield uniform(64, 8192, heads=(8, 1), bar=69)
    yield uniform(64, 8192, heads=(64, 8), head_dim=64, bar=248)
    yield uniform(16, 8192, heads=(16, 4), head_dim=256, bar=125)


def log_uniform(count: int, least: int, most: int) -> tuple[int, ...]:
    x = torch.rand(count, generator=torch.Generator().manual_seed(1)).tolist()
    return tuple(int(math.exp(math.log(least) + u * math.log(most / least))) for u in x)


def uneven_cases() -> Iterator[Case]:
    lens = log_uniform(64, 512, 131_072)
    yield Case("32/8 d128 b64 512..128k", (1,) * 64, lens, bar=1490)
    yield Case("32/8 d128 b64 512..128k sorted", (1,) * 64, tuple(sorted(lens)))
    yield Case("32/8 d128 1 of 131072, 63 of 512", (1,) * 64, (131_072, *[512] * 63))
    yield Case("32/8 d128 b256 1..5000", (1,) * 256, log_uniform(256, 1, 5000))
    yield Case("8/1 d128 b64 512..128k", (1,) * 64, lens, (8, 1))


def spec_cases() -> Iterator[Case]:
    for q_len, bar in ((2, 247), (4, 248), (8, 254)):
        yield uniform(32, 8192, q_len, f"q{q_len} ", bar=bar)


def fp8_cases() -> Iterator[Case]:
    e4m3 = {"kv_dtype": torch.float8_e4m3fn}
    yield uniform(64, 8192, name="e4m3 ", bar=258, **e4m3)
    yield uniform(16, 32_768, name="e4m3 ", heads=(64, 8), bar=254, **e4m3)
    yield uniform(64, 8192, name="e4m3 HND ", layout="HND", **e4m3)
    yield uniform(64, 8192, name="fp16, e4m3 ", dtype=FP16, **e4m3)
    yield uniform(64, 8192, name="e5m2 ", kv_dtype=torch.float8_e5m2)
    for batch, context in ((1, 1024), (1, 8192), (16, 1024)):
        yield uniform(batch, context, name="e4m3 ", **e4m3)
    yield uniform(32, 8192, 8, "q8 e4m3 ", **e4m3)


def page_cases() -> Iterator[Case]:
    """16 and up should be within 5 % of each other."""
    for kv_dtype in (None, torch.float8_e4m3fn):
        kind = SHORT[kv_dtype or BF16]
        for layout in ("NHD", "HND"):
            for size in (1, 8, 16, 64, 256):
                yield uniform(64, 8192, name=f"page{size} {layout} {kind} ", page_size=size,
                              layout=layout, kv_dtype=kv_dtype)  # fmt: skip
    yield uniform(16, 32_000, name="page8 fp16 ", heads=(32, 4), page_size=8, dtype=FP16)


def group_cases() -> Iterator[Case]:
    """The same bytes."""
    for group in (*range(1, 9), 12, 16):
        yield uniform(16, 8192, name=f"group{group} ", heads=(8 * group, 8))


def layout_cases() -> Iterator[Case]:
    for kv_dtype in (None, torch.float8_e4m3fn):
        for layout in ("NHD", "HND", "packed", "packed HND", "interleaved", "halves", "padded"):
            kind = SHORT[kv_dtype or BF16]
            yield uniform(64, 8192, name=f"{layout} {kind} ", layout=layout, kv_dtype=kv_dtype)


def query_length_cases() -> Iterator[Case]:
    """Up to 32 packed rows should take at most a tenth more than one query."""
    for q_len in (1, 2, 4, 8):
        yield uniform(16, 31_744, q_len, f"q{q_len} ")


def window_cases() -> Iterator[Case]:
    """The time of the window, not of the context."""
    for context in (1024, 8192, 65_536):
        yield uniform(16, context, name="window1023 ", heads=(32, 16), head_dim=256, window=1023)
    yield uniform(64, 32_768, name="window4095 ", window=4095)


def invariant_cases() -> Iterator[Case]:
    """Each beside the same without batch_invariant."""
    for batch, context in ((1, 8192), (1, 131_072), (16, 1024), (16, 8192), (64, 8192)):
        for name, on in (("", False), ("invariant ", True)):
            yield uniform(batch, context, name=name, batch_invariant=on)
    for name, on in (("", False), ("invariant ", True)):
        lens = log_uniform(64, 512, 131_072)
        yield Case(f"{name}32/8 d128 b64 512..128k", (1,) * 64, lens, batch_invariant=on)


def pdl_cases() -> Iterator[Case]:
    """Attention after attention, and a write before each; launched plainly, then as dependents."""
    for batch, context in ((1, 1024), (1, 8192), (16, 1024), (64, 8192)):
        plain = uniform(batch, context)
        for writes in (False, True):
            for pdl in (False, True):
                name = f"{'write+' if writes else ''}attention{' pdl' if pdl else ''} "
                yield replace(plain, name=name + plain.name, writes=writes, pdl=pdl)


def prefill_cases() -> Iterator[Case]:
    """Their bars are ratios to FlashAttention 3 in the same run: the peers' harness has those."""
    for q_len, context, batch in (
        (8192, 8192, 1),
        (32_768, 32_768, 1),
        (2048, 2048, 8),
        (2048, 32_768, 1),
        (512, 16_384, 4),
    ):
        yield uniform(batch, context, q_len, f"q{q_len} ")
    yield uniform(1, 16_384, 16_384, "q16384 ", heads=(64, 8), head_dim=64)
    yield uniform(1, 8192, 8192, "q8192 ", heads=(16, 8), head_dim=192)
    yield uniform(1, 8192, 8192, "q8192 ", heads=(16, 8), head_dim=256)


def mixed_cases() -> Iterator[Case]:
    lens = log_uniform(63, 512, 32_768)
    yield Case("63 decodes, q2048 of 8192", (*[1] * 63, 2048), (*lens, 8192), bar=700)
    yield Case("63 decodes", (1,) * 63, lens)
    yield Case("q2048 of 8192", (2048,), (8192,))
    yield Case("255 decodes, q512 of 512", (*[1] * 255, 512), (*log_uniform(255, 64, 8192), 512))
    yield Case("8 decodes, 8 of q1024", (*[1] * 8, *[1024] * 8), (*[4096] * 8, *[1024] * 8))


def prefill_page_cases() -> Iterator[Case]:
    """16 and up should be within 2 % of each other."""
    for layout in ("NHD", "HND"):
        for size in (1, 7, 8, 16, 32, 64, 128, 256):
            yield uniform(1, 8192, 8192, f"page{size} {layout} ", page_size=size, layout=layout)


def prefill_length_cases() -> Iterator[Case]:
    """Where the kernels meet: 64 packed rows are 16 tokens here."""
    for batch, context in ((1, 8192), (32, 8192)):
        for q_len in (8, 16, 17, 24, 32, 64, 128, 256):
            yield uniform(batch, context, q_len, f"q{q_len} ")


def prefill_fp8_cases() -> Iterator[Case]:
    for kv_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        yield uniform(1, 8192, 8192, f"q8192 {SHORT[kv_dtype]} ", kv_dtype=kv_dtype, bar=960)


SUITES: dict[str, Callable[[], Iterator[Case]]] = {
    "decode": decode_cases,
    "uneven": uneven_cases,
    "spec": spec_cases,
    "fp8": fp8_cases,
    "pages": page_cases,
    "groups": group_cases,
    "layouts": layout_cases,
    "qlen": query_length_cases,
    "window": window_cases,
    "invariant": invariant_cases,
    "pdl": pdl_cases,
    "prefill": prefill_cases,
    "mixed": mixed_cases,
    "prefill_pages": prefill_page_cases,
    "prefill_qlen": prefill_length_cases,
    "prefill_fp8": prefill_fp8_cases,
}
WITH_BARS = ("decode", "uneven", "spec", "fp8")


# Tensors


def fill(x: torch.Tensor) -> None:
    """Normal values, in parts: an fp8 tensor takes them by way of a wider one."""
    torch.manual_seed(0)
    for part in x.view(-1).split(1 << 27):
        if part.dtype.itemsize == 1:
            part.copy_(torch.randn(part.shape, dtype=FP16, device="cuda").to(part.dtype))
        else:
            part.normal_()


def make_caches(case: Case, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As they are passed: [P, S, Hkv, D], or [P, Hkv, S, D] where "HND" is in the layout's name."""
    heads, dim, size = case.heads[1], case.head_dim, case.page_size
    hnd = "HND" in case.layout
    middle = (heads, size) if hnd else (size, heads)
    shapes = {
        "packed": (pages, *middle, 2, dim),
        "packed HND": (pages, *middle, 2, dim),
        "interleaved": (pages, 2, *middle, dim),
        "halves": (2, pages, *middle, dim),
        "padded": (2, pages, *middle, dim + 64),
    }
    both = torch.empty(
        shapes.get(case.layout, (2, pages, *middle, dim)), dtype=case.stored, device="cuda"
    )
    fill(both)
    if case.layout.startswith("packed"):
        return both[..., 0, :], both[..., 1, :]
    if case.layout == "interleaved":
        return both[:, 0], both[:, 1]
    return both[0][..., :dim], both[1][..., :dim]


class Problem:
    """A pool of pages, and sets of block tables over it that share none."""

    def __init__(self, case: Case) -> None:
        self.case = case
        batch, tokens = len(case.q_lens), sum(case.q_lens)
        self.pages_of = [-(-n // case.page_size) for n in case.kv_lens]
        most = max(1, MOST_POOL_BYTES // case.kv_bytes)
        sets = min(MOST_SETS, most, math.ceil(COLD_BYTES / case.kv_bytes))
        pages = sum(self.pages_of)
        self.caches = make_caches(case, pages * sets)
        generator = torch.Generator().manual_seed(1)
        order = torch.randperm(pages * sets, generator=generator).int().view(sets, pages)
        self.tables = []
        for pages_of_set in order:
            table = torch.zeros(batch, max(self.pages_of), dtype=torch.int32)
            for row, its_pages in zip(table, pages_of_set.split(self.pages_of), strict=True):
                row[: len(its_pages)] = its_pages
            self.tables.append(table.cuda())
        self.q = torch.randn(tokens, case.heads[0], case.head_dim, device="cuda").to(case.dtype)
        self.out = torch.full_like(self.q, torch.nan)
        int32 = functools.partial(torch.tensor, dtype=torch.int32, device="cuda")
        self.starts = np.cumsum([0, *case.q_lens]).tolist()
        self.step = {
            "seqused_k": int32(case.kv_lens),
            "cu_seqlens_q": int32(self.starts),
            "max_seqlen_q": max(case.q_lens),
            "max_seqlen_k": max(case.kv_lens),
            "window": (case.window, 0 if case.window >= 0 else -1),
            "batch_invariant": case.batch_invariant,
        }
        self.make_plan = functools.partial(
            pagetile.make_plan,
            num_q_heads=case.heads[0],
            num_kv_heads=case.heads[1],
            head_dim=case.head_dim,
            page_size=case.page_size,
            **self.step,
        )
        self.plan = self.make_plan()
        self.layout = "HND" if "HND" in case.layout else "NHD"
        self.scales = {}
        if case.stored.itemsize == 1:
            self.scales = {n: torch.ones(1, device="cuda") for n in ("k_scale", "v_scale")}

    def attention(self, table: torch.Tensor, planned: bool = True) -> Call:
        return functools.partial(
            pagetile.paged_attention,
            self.q,
            *self.caches,
            block_table=table,
            out=self.out,
            layout=self.layout,
            **self.step,
            **self.scales,
            **({"plan": self.plan} if planned else {}),
            **({"pdl": True} if self.case.pdl else {}),
        )

    def write(self, table: torch.Tensor) -> Call:
        """The last tokens of each sequence, as many as it has queries."""
        case = self.case
        slots = []
        for b, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
            keys = torch.arange(kv_len - q_len, kv_len, device="cuda")
            pages = table[b, keys // case.page_size].long()
            slots.append(pages * case.page_size + keys % case.page_size)
        rows = torch.randn(2, len(self.q), case.heads[1], case.head_dim, device="cuda")
        return functools.partial(
            pagetile.cache_write,
            *rows.to(case.dtype),
            *self.caches,
            torch.cat(slots),
            layout=self.layout,
            pdl=case.pdl,
            **self.scales,
        )

    def calls(self, planned: bool = True) -> list[Call]:
        calls = []
        for table in self.tables:
            calls += [self.write(table)] if self.case.writes else []
            calls.append(self.attention(table, planned))
        return calls

    def error(self, rows: int = 24) -> float:
        """Relative L2 error of a sample of rows of the first table, fp32; NaN if nothing came."""
        case, table = self.case, self.tables[0]
        self.out.fill_(torch.nan)
        self.attention(table)()
        generator = torch.Generator().manual_seed(2)
        wrong = right = 0.0
        for b in torch.randint(len(case.q_lens), (rows,), generator=generator).tolist():
            row = int(torch.randint(case.q_lens[b], (1,), generator=generator))
            end = case.kv_lens[b] - (case.q_lens[b] - 1 - row)
            begin = 0 if case.window < 0 else max(0, end - 1 - case.window)
            expected = self._attend(self.starts[b] + row, table[b, : self.pages_of[b]], begin, end)
            actual = self.out[self.starts[b] + row].float()
            wrong += float((actual - expected).square().sum())
            right += float(expected.square().sum())
        return math.sqrt(wrong / right)

    def _attend(self, token: int, pages: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        case = self.case
        k, v = (cache[pages.long()].float() for cache in self.caches)
        if self.layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        k, v = (x.flatten(0, 1)[begin:end] for x in (k, v))  # [keys, Hkv, D]
        q = self.q[token].float().view(case.heads[1], -1, case.head_dim)
        score = torch.einsum("hgd,khd->hgk", q, k) * case.head_dim**-0.5
        return torch.einsum("hgk,khd->hgd", score.softmax(-1), v).flatten(0, 1)


# Measuring


def measure_read(timer: Timer) -> float:
    """GB/s of a plain kernel that reads 4 GiB."""
    x = torch.ones(min(1 << 30, torch.cuda.mem_get_info()[0] // 16), device="cuda")
    return x.nbytes / timer.warm([lambda: torch.sum(x)]).median / 1e3


def measure(case: Case, timer: Timer, by_itself: bool) -> dict[str, Any]:
    problem = Problem(case)
    error = problem.error()
    if not error < WORST_ERROR:  # NaN too
        raise AssertionError(f"relative error {error:.2e}")
    calls = problem.calls()
    times = timer.warm(calls)
    per_table = len(calls) // len(problem.tables)
    row = {
        "bytes": case.bytes,
        "flops": case.flops,
        "tables": len(problem.tables),
        "bar_us": case.bar,
        "us": times.median * per_table,
        "iqr": times.iqr * per_table,
        "err": error,
        "plan_us": timer.warm([functools.partial(problem.make_plan, out=problem.plan)] * 8).median,
        "host_us": timer.host(problem.attention(problem.tables[0])),
    }
    if by_itself:
        row["self_us"] = timer.warm(problem.calls(planned=False)).median * per_table
    return row


# Results

COLUMNS = (  # key, title, format
    ("us", "us", "9.2f"),
    ("iqr", "IQR", "7.2f"),
    ("gbps", "GB/s", "7.0f"),
    ("tflops", "TF/s", "7.1f"),
    ("of_floor", "floor", "8.1%"),
    ("plan_us", "plan", "7.2f"),
    ("self_us", "self", "9.2f"),
    ("host_us", "host", "7.2f"),
    ("err", "err", "9.1e"),
    ("bar_us", "bar us", "8.1f"),
)
NAME_WIDTH = 46


class AttentionReport(Report):
    def __init__(self, timer: Timer, json_file: pathlib.Path | None) -> None:
        self.read_gbps = measure_read(timer)
        found = {"machine": describe_machine(), "read_gbps": self.read_gbps}
        super().__init__(COLUMNS, NAME_WIDTH, found, json_file)
        print(f"# a kernel that reads: {self.read_gbps:.0f} GB/s")

    def suite(self, name: str, cases: list[Case], measure_it: Callable[[Case], Any]) -> None:
        print(f"\n# {name}")
        self.titles()
        for case in cases:
            row = {"suite": name, "name": case.name}
            self.case(case.name, row, functools.partial(measure_it, case))
            torch.cuda.empty_cache()

    def judge(self, row: dict[str, Any]) -> None:
        super().judge(row)
        row["tflops"] = row["flops"] / row["us"] / 1e6
        row["of_floor"] = max(
            row["gbps"] / self.read_gbps, row["flops"] / MATRIX_RATE / (row["us"] * 1e-6)
        )

    def summary(self) -> int:
        """Prints it, and returns the exit status: a missed bar is no failure, a wrong row is."""
        judged = [row for row in self.rows if "ok" in row]
        hosts = [row["host_us"] for row in self.rows if "host_us" in row]
        plans = [row["plan_us"] for row in self.rows if "plan_us" in row]
        failed = [row["name"] for row in self.rows if "error" in row]
        print()
        if judged:
            print(f"bars met: {sum(row['ok'] for row in judged)} of {len(judged)}")
        if hosts:
            median, most = np.median(hosts), max(hosts)
            print(f"host: {median:.2f} us a call, {most:.2f} at most; the bar is {HOST_BAR:.0f}")
            print(f"plan: {np.median(plans):.2f} us, {max(plans):.2f} at most")
        missed = [row["name"] for row in judged if not row["ok"]]
        for what, names in (("missed", missed), ("failed", failed)):
            if names:
                print(f"{what}: {'; '.join(names)}")
        return 1 if failed else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("suites", nargs="*", metavar="SUITE", help=f"of: {', '.join(SUITES)}, all")
    add("--match", default="", metavar="TEXT,TEXT", help="only names that contain one of these")
    add("--seconds", type=float, default=0.12, help="of replays for each number (default: 0.12)")
    add(
        "--self",
        action="store_true",
        dest="by_itself",
        help="fill the column of calls without a plan",
    )
    add(
        "--prefill",
        choices=("best", "portable", "none"),
        default="best",
        help="the kernel for long queries: WGMMA where it may run, the portable one, or split-KV",
    )
    add("--json", type=pathlib.Path, metavar="FILE", help="write all numbers there")
    arguments = parser.parse_args()
    arguments.suites = arguments.suites or list(WITH_BARS)
    if "all" in arguments.suites:
        arguments.suites = list(SUITES)
    if unknown := set(arguments.suites) - set(SUITES):
        parser.error(f"no suite {', '.join(sorted(unknown))}; there are: {', '.join(SUITES)}, all")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        # No failure: `make bench` runs this on machines without a GPU as well.
        print("bench/attention.py: torch sees no CUDA device here, so there is nothing to measure")
        return 0
    pagetile._C.choose_prefill(arguments.prefill)
    timer = Timer(quick=False)
    timer.seconds = arguments.seconds
    report = AttentionReport(timer, arguments.json)
    wanted = arguments.match.split(",")
    for name in arguments.suites:
        cases = [case for case in SUITES[name]() if any(text in case.name for text in wanted)]
        if cases:
            report.suite(
                name, cases, functools.partial(measure, timer=timer, by_itself=arguments.by_itself)
            )
    return report.summary()


if __name__ == "__main__":
    sys.exit(main())
