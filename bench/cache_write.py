"""cache_write on a GPU: time, share of the copy rate, ratio to vLLM's kernel where that is present.

Medians over replays of a CUDA graph that holds many calls, in us a call.
    warm   up to 16 sets of rows and slots in turn. Up to 256 tokens all of them stay in the L2.
           The bars (for an H200) and the ratio to vLLM are about this column.
    cold   256 MB are copied to flush the L2, then 16 to 256 sets are written, each once.
    PDL    the same two with pdl=True: a chain of programmatic dependent launches.
    host   from Python into the library and back, nothing captured.
GB/s counts bytes read and written, of K and of V. What a kernel wrote is compared before it is
timed.

    python bench/cache_write.py                          # the table of the bars
    python bench/cache_write.py --cases 8192x,e4m3       # names that contain one of these
    python bench/cache_write.py --layouts --copy-pages   # these sections instead
    PEERS_DIR=.peers/run python bench/cache_write.py     # where bench/peers/fetch.sh put vLLM's
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
from harness.gpu import Call, Timer, describe_machine, measure_limits
from harness.report import Report
from peers import present
from peers.peer import Peer
from peers.vllm_write import VllmWrite

PAGE_SIZE = 16
POOL_SLOTS = 1 << 19  # 1.07 GB a cache at 8 heads of 128 in bf16: no pool stays in the L2
FP8 = {"fp8_e4m3": (torch.float8_e4m3fn, 448.0), "fp8_e5m2": (torch.float8_e5m2, 57344.0)}
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

# us, warm, H200; tokens, heads, head_dim: bf16 NHD, bf16 HND, e4m3 NHD, e4m3 HND
BARS = {
    (1, 8, 128): (1.4, 1.4, 1.5, 1.5),
    (64, 8, 128): (1.6, 1.6, 1.7, 1.7),
    (256, 8, 128): (2.1, 2.1, 1.95, 1.95),
    (2048, 8, 128): (6.2, 6.2, 5.4, 5.6),
    (8192, 8, 128): (20.0, 20.0, 15.2, 16.0),
    (32768, 8, 128): (73.0, 73.0, 53.0, 57.0),
    (8192, 1, 128): (4.1, 4.1, 3.75, 3.75),
    (8192, 8, 64): (11.0, 11.4, 8.7, 11.2),
}
QUICK = ((64, 8, 128), (2048, 8, 128), (8192, 8, 128))
HOST_BAR = 6.0
TABLE = "cache_write, page_size 16, random slots"
COPIES = {"64 pages x 64 tensors": (64, 64), "1 page x 2 tensors": (1, 2)}

# Cases


@dataclass(frozen=True)
class Case:
    tokens: int
    heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: str = "auto"
    layout: str = "NHD"
    variant: str = ""  # what is unlike the table of the bars, see layout_cases
    bar: float | None = None

    @property
    def name(self) -> str:
        target = "" if self.kv_dtype == "auto" else f"->{self.kv_dtype.removeprefix('fp8_')}"
        shape = f"{self.tokens}x{self.heads}x{self.head_dim}"
        return f"{shape} {SHORT[self.dtype]}{target} {self.layout} {self.variant}".rstrip()

    @property
    def bytes(self) -> int:
        """Read and written, K and V."""
        stored = self.dtype.itemsize if self.kv_dtype == "auto" else 1
        return 2 * self.tokens * self.heads * self.head_dim * (self.dtype.itemsize + stored)


def bar_cases(quick: bool) -> Iterator[Case]:
    kinds = [(kv_dtype, layout) for kv_dtype in ("auto", "fp8_e4m3") for layout in ("NHD", "HND")]
    for shape in QUICK if quick else BARS:
        for (kv_dtype, layout), bar in zip(kinds, BARS[shape], strict=True):
            yield Case(*shape, kv_dtype=kv_dtype, layout=layout, bar=bar)


def layout_cases(quick: bool) -> Iterator[Case]:
    """What else a cache or its rows may look like; the plain ones of each size come first."""
    for tokens in (8192,) if quick else (64, 8192):
        for kv_dtype in ("auto", "fp8_e4m3"):
            nhd = Case(tokens, 8, 128, kv_dtype=kv_dtype)
            hnd = replace(nhd, layout="HND")
            yield from (nhd, hnd)
            for case in (nhd, hnd):
                yield replace(case, variant="packed")  # K and V side by side: [.., 2 * D]
                yield replace(case, variant="pages")  # slots fill whole pages, in random order
                if kv_dtype != "auto":
                    yield replace(case, variant="heads")  # a scale for each KV head
            yield replace(nhd, variant="qkv")  # K and V are slices of rows three times as long
            yield from (replace(nhd, dtype=dtype) for dtype in (torch.float16, torch.float32))
        yield Case(tokens, 8, 128, kv_dtype="fp8_e5m2")


class Problem:
    """The caches of a case, and sets of rows and slots: no two share a slot."""

    def __init__(self, case: Case) -> None:
        self.case = case
        spacing = max(case.tokens, 32)  # so that no two share a line of slot_mapping
        cold_sets = min(256, max(16, math.ceil(450e6 / case.bytes)), POOL_SLOTS // spacing)
        self.warm_sets = min(16, max(2, math.ceil((400 << 20) / case.bytes)))
        self.caches = self._make_caches()
        self.scales = self._make_scales()
        shape = (cold_sets, case.tokens, case.heads, case.head_dim)
        rows = make_rows(shape, case.dtype, case.variant == "qkv")
        slots = shuffled_slots(case.variant == "pages")
        self.inputs = [
            (rows[0][i], rows[1][i], slots[i * spacing : i * spacing + case.tokens])
            for i in range(cold_sets)
        ]

    def _make_caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        case = self.case
        dtype = case.dtype if case.kv_dtype == "auto" else torch.uint8
        middle = (PAGE_SIZE, case.heads) if case.layout == "NHD" else (case.heads, PAGE_SIZE)
        shape = (POOL_SLOTS // PAGE_SIZE, *middle, case.head_dim)
        if case.variant == "packed":
            both = torch.zeros(*shape[:-1], 2 * case.head_dim, dtype=dtype, device="cuda")
            return both[..., : case.head_dim], both[..., case.head_dim :]
        return tuple(torch.zeros(shape, dtype=dtype, device="cuda") for _ in "kv")

    def _make_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.case.variant == "heads":
            scale = torch.linspace(0.01, 0.03, self.case.heads, device="cuda")
            return scale, scale.flip(0)
        return tuple(torch.ones(1, device="cuda") for _ in "kv")

    def tokens_first(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The caches as [P, S, Hkv, D], whatever their order in memory."""
        hnd = self.case.layout == "HND"
        return tuple(cache.transpose(1, 2) if hnd else cache for cache in self.caches)

    def calls(self, pdl: bool = False) -> list[Call]:
        options = {"kv_dtype": self.case.kv_dtype, "layout": self.case.layout}
        if self.case.kv_dtype != "auto":
            options |= {"k_scale": self.scales[0], "v_scale": self.scales[1]}
        if pdl:
            options |= {"pdl": True}
        write, caches = pagetile.cache_write, self.caches
        return [functools.partial(write, k, v, *caches, s, **options) for k, v, s in self.inputs]

    def check(self, calls: list[Call]) -> None:
        """Raises unless the first and the last set arrive whole, and nothing else changes."""
        for cache in self.caches:
            cache.zero_()
        written = (0, len(calls) - 1)
        for i in written:
            calls[i]()
        for kv, (cache, scale) in enumerate(zip(self.tokens_first(), self.scales, strict=True)):
            stray = torch.count_nonzero(cache)
            for i in written:
                rows, slots = self.inputs[i][kv], self.inputs[i][2]
                stored = cache[slots // PAGE_SIZE, slots % PAGE_SIZE]
                stray -= torch.count_nonzero(stored)
                if not torch.equal(stored, self._expected(rows, scale)):
                    raise AssertionError(f"wrong rows in {'kv'[kv]}_cache")
            if stray:
                raise AssertionError(f"{int(stray)} elements of {'kv'[kv]}_cache changed")

    def _expected(self, rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if self.case.kv_dtype == "auto":
            return rows
        dtype, largest = FP8[self.case.kv_dtype]
        quotient = rows.float() / scale[:, None]
        return quotient.clamp(-largest, largest).to(dtype).view(torch.uint8)


@functools.lru_cache(maxsize=1)
def make_rows(
    shape: tuple[int, ...], dtype: torch.dtype, fused: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, [sets, T, Hkv, D] each."""
    torch.manual_seed(0)
    if fused:
        qkv = torch.randn(*shape[:2], 3, *shape[2:], dtype=dtype, device="cuda")
        return qkv[:, :, 1], qkv[:, :, 2]
    return tuple(torch.randn(shape, dtype=dtype, device="cuda") for _ in "kv")


@functools.cache
def shuffled_slots(whole_pages: bool) -> torch.Tensor:
    """Every slot of the pool once."""
    torch.manual_seed(1)
    if not whole_pages:
        return torch.randperm(POOL_SLOTS, device="cuda")
    pages = torch.randperm(POOL_SLOTS // PAGE_SIZE, device="cuda")
    return (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device="cuda")).flatten()


# Measuring


def measure(timer: Timer, calls: list[Call], warm_sets: int) -> dict[str, Any]:
    warm, cold = timer.warm(calls[:warm_sets]), timer.cold(calls)
    return {
        "us": warm.median,
        "iqr": warm.iqr,
        "cold_us": cold.median,
        "cold_iqr": cold.iqr,
        "host_us": timer.host(calls[0]),
    }


def measure_peer(peer: Peer, problem: Problem, timer: Timer) -> dict[str, Any]:
    try:
        calls = peer.prepare(problem.case, problem)
        problem.check(calls)
        times = timer.warm(calls[: problem.warm_sets])
        return {"us": times.median, "iqr": times.iqr, "host_us": timer.host(calls[0])}
    except (AssertionError, RuntimeError) as error:  # a case it refuses, or gets wrong
        return {"error": str(error)}


def measure_write(case: Case, timer: Timer, pdl: bool, others: list[Peer]) -> dict[str, Any]:
    problem = Problem(case)
    calls, warm_sets = problem.calls(), problem.warm_sets
    problem.check(calls)
    row = {"bytes": case.bytes, "bar_us": case.bar} | measure(timer, calls, warm_sets)
    if pdl:
        calls = problem.calls(pdl=True)
        problem.check(calls)
        row["pdl_us"] = timer.warm(calls[:warm_sets]).median
        row["pdl_cold_us"] = timer.cold(calls).median
    theirs = [peer for peer in others if peer.supports(case)]
    row["peers"] = {peer.name: measure_peer(peer, problem, timer) for peer in theirs}
    return row


def measure_copy_pages(pages: int, tensors: int, timer: Timer) -> dict[str, Any]:
    """Pages of 16 x 8 x 128 bf16, in as many caches as the layers have K and V."""
    make_rows.cache_clear()
    sets = max(4, min(256, 2048 // (pages * tensors)))
    shape = (2 * pages * sets, PAGE_SIZE, 8, 128)
    caches = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(tensors)]
    numbers = torch.zeros(sets, 2, max(pages, 32), dtype=torch.int64, device="cuda")
    numbers[..., :pages] = torch.randperm(shape[0], device="cuda").view(sets, 2, pages)
    calls = [
        functools.partial(pagetile.copy_pages, caches, caches, source[:pages], target[:pages])
        for source, target in numbers
    ]
    expected = [cache.clone() for cache in caches]
    for cache in expected:
        cache[numbers[0, 1, :pages]] = cache[numbers[0, 0, :pages]]
    calls[0]()
    if not all(map(torch.equal, caches, expected)):
        raise AssertionError("wrong pages")
    moved = 2 * pages * tensors * caches[0][0].nbytes
    return {"bytes": moved} | measure(timer, calls, min(sets, 16))


# Results

COLUMNS = (  # key, title, format
    ("us", "warm us", "9.2f"),
    ("iqr", "IQR", "6.2f"),
    ("gbps", "GB/s", "7.0f"),
    ("of_copy", "of copy", "9.1%"),
    ("cold_us", "cold us", "9.2f"),
    ("cold_iqr", "IQR", "6.2f"),
    ("pdl_us", "PDL us", "8.2f"),
    ("pdl_cold_us", "cold", "7.2f"),
    ("host_us", "host us", "8.2f"),
    ("peers.vllm_write.us", "vLLM us", "9.2f"),
    ("peers.vllm_write.ratio", "ratio", "7.2f"),
    ("bar_us", "bar us", "8.2f"),
)


class WriteReport(Report):
    def __init__(
        self, timer: Timer, json_file: pathlib.Path | None, absent: list[str], total: int
    ) -> None:
        self.limits = measure_limits(timer)
        found = {"machine": [*describe_machine(), *absent], "limits": self.limits}
        super().__init__(COLUMNS, 38, found, json_file, total)
        copied = self.limits["copy_bytes"] / 2**30
        print(f"# a copy kernel over {copied:.0f} GiB: {self.limits['copy_gbps']:.0f} GB/s")
        print(f"# an empty kernel in a graph: {self.limits['empty_us']:.2f} us")
        print(f"# clocks, power, temperature while copying: {self.limits['clocks_while_copying']}")

    def section(self, title: str, measures: dict[str, Callable[[], dict[str, Any]]]) -> None:
        self.titles(title)
        for i, (name, measure_it) in enumerate(measures.items(), 1):
            row = {"section": title, "name": name}
            self.case(f"[{i:>2}/{len(measures)}] {name}", row, measure_it)

    def judge(self, row: dict[str, Any]) -> None:
        super().judge(row)
        row["of_copy"] = row["gbps"] / self.limits["copy_gbps"]

    def summary(self) -> int:
        """Prints it, and returns the exit status: a missed bar is no failure, a wrong row is."""
        judged = [row for row in self.rows if "ok" in row]
        missed = [row["name"] for row in judged if not row["ok"]]
        hosts = [row["host_us"] for row in self.rows if row.get("bar_us")]
        failed = [row["name"] for row in self.rows if "error" in row]
        theirs = {
            row["name"]: row["peers"]["vllm_write"]
            for row in self.rows
            if "vllm_write" in row.get("peers", {})
        }
        ratios = [peer["ratio"] for peer in theirs.values() if "ratio" in peer]
        refused = [name for name, peer in theirs.items() if "error" in peer]
        print()
        if judged:
            print(f"bars met: {len(judged) - len(missed)} of {len(judged)}")
        if hosts:
            median, most = np.median(hosts), max(hosts)
            print(f"host: {median:.2f} us a call, {most:.2f} at most; the bar is {HOST_BAR:.0f}")
        if ratios:
            print(f"vLLM takes {min(ratios):.2f} to {max(ratios):.2f} times as long")
        for what, names in (("missed", missed), ("failed", failed), ("vLLM failed", refused)):
            if names:
                print(f"{what}: {'; '.join(names)}")
        return 1 if failed else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cases", default="", metavar="TEXT,TEXT", help="only names that contain one of these")
    add("--quick", action="store_true", help="three sizes, fewer replays")
    add("--json", type=pathlib.Path, metavar="FILE", help="write all numbers there")
    add("--pdl", action="store_true", help="fill the columns of pdl=True")
    add("--layouts", action="store_true", help="other layouts, sources, slots, scales and types")
    add("--copy-pages", action="store_true", help="copy_pages")
    add("--table", action="store_true", help="the table of the bars beside other sections")
    add("--no-peers", action="store_true", help="leave vLLM's kernel out")
    return parser.parse_args()


def sections_of(
    arguments: argparse.Namespace, timer: Timer, others: list[Peer]
) -> dict[str, dict[str, Callable[[], dict[str, Any]]]]:
    def writes(cases: Iterator[Case]) -> dict[str, Callable[[], dict[str, Any]]]:
        wanted = arguments.cases.split(",")
        return {
            case.name: functools.partial(measure_write, case, timer, arguments.pdl, others)
            for case in cases
            if any(text in case.name for text in wanted)
        }

    sections = {}
    if arguments.table or not (arguments.layouts or arguments.copy_pages):
        sections[TABLE] = writes(bar_cases(arguments.quick))
    if arguments.layouts:
        sections["cache_write, other layouts"] = writes(layout_cases(arguments.quick))
    if arguments.copy_pages:
        sections["copy_pages, pages of 32 KB"] = {
            name: functools.partial(measure_copy_pages, *size, timer)
            for name, size in COPIES.items()
        }
    return sections


def main() -> int:
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        # No failure: `make bench` runs this on machines without a GPU as well.
        print(
            "bench/cache_write.py: torch sees no CUDA device here, so there is nothing to measure"
        )
        return 0
    timer = Timer(arguments.quick)
    others, absent = present([] if arguments.no_peers else [VllmWrite()])
    sections = sections_of(arguments, timer, others)
    report = WriteReport(timer, arguments.json, absent, sum(map(len, sections.values())))
    for title, measures in sections.items():
        report.section(title, measures)
    return report.summary()


if __name__ == "__main__":
    sys.exit(main())
