"""paged_attention on a GPU: time, share of the time that its bytes take, host time, and its peers.

Medians over replays of a CUDA graph that holds many calls, in us a call. The calls go through
distinct block tables in turn, of 320 MB of keys and values together at least, so that the L2 serves
nothing twice. The plan is made ahead, as an engine does once a step; out is given.

    us     of one call; of a chain: of one write and one attention
    GB/s   bytes of the visible keys and values, of queries and results
    TF/s   products of queries and keys, and of weights and values
    floor  the time of those bytes at the rate at which a plain kernel reads, or of those products
           at the rate of a large product of matrices, whichever is longer, over `us`
    plan   make_plan, which another kernel of the step may hide
    host   from Python into the library and back, nothing captured
    err    relative L2 error of a sample of rows against fp32

Peers get two columns each, their us and how many times as long that is. A case that a peer does not
take, or takes in another way, is left out. Peers: fa3, fa3_contiguous (K and V gathered before, as
sdpa's are), flashinfer, flashinfer_fa3, flashinfer_xqa, sdpa, legacy (legacy_v1 and legacy_v2); and
pagetile in other ways: no_plan (plans in the call), sm80, sm90a, split_kv (long queries by the
kernels of that family, or by the split-KV kernel), fp8_products (queries of e4m3 over such caches,
with the option of that name). bench/peers/fetch.sh gets FlashAttention 3.

Suites: decode, uneven, spec, fp8, pages, groups, layouts, qlen, window, invariant, pdl; with long
queries: prefill, chunk, mixed, prefill_pages, prefill_qlen, prefill_fp8.

    python bench/attention.py                            # decode uneven spec fp8: those with bars
    python bench/attention.py pages layouts --json out.json
    python bench/attention.py decode --match "b64 ctx8192" --peers fa3,flashinfer,sdpa,legacy
    python bench/attention.py prefill --family sm80 --peers sm90a  # one family beside the other
    python bench/attention.py prefill_fp8 --peers fp8_products,fa3
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import peers
import torch
from harness.cases import BAR_PEER, SUITES, WITH_BARS, Case
from harness.gpu import Timer, describe_machine, measure_product, measure_read
from harness.problem import Problem
from harness.report import Report
from peers.pagetile import KERNELS, Fp8Products, Pagetile, choose, family_unavailable
from peers.peer import Peer

WORST_ERROR = 5e-3
WORST_PEER_ERROR = 0.1  # fp8 queries and weights cost 0.04
HOST_BAR = 8.0
SELF = Pagetile("pagetile")

# Measuring


def measure_times(
    peer: Peer, problem: Problem, timer: Timer, worst_error: float
) -> dict[str, float]:
    calls = peer.prepare(problem.case, problem)
    error = problem.error(peer, calls)
    if not error < worst_error:  # NaN too
        raise AssertionError(f"relative error {error:.2e}")
    times, a_table = timer.warm(calls), len(calls) // len(problem.tables)
    return {
        "us": times.median * a_table,
        "iqr": times.iqr * a_table,
        "err": error,
        "host_us": timer.host(calls[a_table - 1]),
    }


def measure_peer(peer: Peer, problem: Problem, timer: Timer) -> dict[str, Any]:
    is_fine = isinstance(peer, Pagetile) and not isinstance(peer, Fp8Products)
    worst = WORST_ERROR if is_fine else WORST_PEER_ERROR
    try:
        return measure_times(peer, problem, timer, worst)
    except Exception as error:  # of another library: pagetile's line is still worth having
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        torch.cuda.empty_cache()


def measure(case: Case, timer: Timer, others: list[Peer]) -> dict[str, Any]:
    problem = Problem(case)
    row: dict[str, Any] = {
        "bytes": case.bytes,
        "flops": case.flops,
        "tables": len(problem.tables),
        "bar_us": case.bar,
        "bar_ratio": case.ratio_bar,
    }
    row |= measure_times(SELF, problem, timer, WORST_ERROR)
    make_plan = SELF.make_plan(case, problem)
    refill = functools.partial(make_plan, out=make_plan())
    row["plan_us"] = timer.warm([refill] * 8).median
    theirs = [peer for peer in others if peer.supports(case)]
    row["peers"] = {peer.name: measure_peer(peer, problem, timer) for peer in theirs}
    return row


# Results

COLUMNS = (  # key, title, format
    ("us", "us", "9.2f"),
    ("iqr", "IQR", "7.2f"),
    ("gbps", "GB/s", "7.0f"),
    ("tflops", "TF/s", "7.1f"),
    ("of_floor", "floor", "8.1%"),
    ("plan_us", "plan", "7.2f"),
    ("host_us", "host", "7.2f"),
    ("err", "err", "9.1e"),
    ("bar_us", "bar us", "8.1f"),
)
NAME_WIDTH = 46


def columns_of(others: list[Peer]) -> tuple[tuple[str, str, str], ...]:
    pairs = [
        ((f"peers.{p.name}.us", p.name, f"{max(9, len(p.name) + 2)}.2f"),
         (f"peers.{p.name}.ratio", "ratio", "6.2f"))
        for p in others
    ]  # fmt: skip
    return (*COLUMNS, *(column for pair in pairs for column in pair))


class AttentionReport(Report):
    def __init__(
        self, timer: Timer, arguments: argparse.Namespace, others: list[Peer], total: int
    ) -> None:
        self.read_gbps = measure_read(timer)
        self.product_tflops = measure_product(timer)
        found = {
            "machine": [*describe_machine(), *arguments.absent],
            "family": arguments.family,
            "read_gbps": self.read_gbps,
            "product_tflops": self.product_tflops,
        }
        super().__init__(columns_of(others), NAME_WIDTH, found, arguments.json, total)
        print(f"# a kernel that reads: {self.read_gbps:.0f} GB/s; ", end="")
        print(f"a product of matrices: {self.product_tflops:.0f} TFLOP/s")

    def suite(self, name: str, cases: list[Case], measure_it: Callable[[Case], Any]) -> None:
        self.titles(name)
        for case in cases:
            row = {"suite": name, "name": case.name}
            self.case(case.name, row, functools.partial(measure_it, case))
            torch.cuda.empty_cache()

    def judge(self, row: dict[str, Any]) -> None:
        super().judge(row)
        row["tflops"] = row["flops"] / row["us"] / 1e6
        row["of_floor"] = max(row["gbps"] / self.read_gbps, row["tflops"] / self.product_tflops)
        ratio = row["peers"].get(BAR_PEER, {}).get("ratio")
        if row["bar_ratio"] and ratio and "H200" in torch.cuda.get_device_name():
            row["ok"] = 1 / ratio <= row["bar_ratio"]

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
        self._summary_of_peers()
        missed = [row["name"] for row in judged if not row["ok"]]
        for what, names in (("missed", missed), ("failed", failed)):
            if names:
                print(f"{what}: {'; '.join(names)}")
        return 1 if failed else 0

    def _summary_of_peers(self) -> None:
        names = dict.fromkeys(name for row in self.rows for name in row.get("peers", {}))
        for name in names:
            theirs = [row["peers"][name] for row in self.rows if name in row.get("peers", {})]
            ratios = [peer["ratio"] for peer in theirs if "ratio" in peer]
            text = f"{name}: {len(ratios)} of {len(theirs)} cases"
            if ratios:
                faster = sum(ratio < 1 for ratio in ratios)
                text += f", {min(ratios):.2f} to {max(ratios):.2f} times as long, "
                text += f"{np.median(ratios):.2f} in the middle; faster in {faster}"
            print(text)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("suites", nargs="*", metavar="SUITE", help=f"of: {', '.join(SUITES)}, all")
    add("--match", default="", metavar="TEXT,TEXT", help="only names that contain one of these")
    add("--seconds", type=float, default=0.12, help="of replays for each number (default: 0.12)")
    add("--peers", default="", metavar="NAME,NAME", help="what to time beside, see above; or all")
    add("--family", choices=tuple(KERNELS), default="best", help="whose kernels to time")
    add("--json", type=pathlib.Path, metavar="FILE", help="write all numbers there")
    arguments = parser.parse_args(words)
    arguments.suites = arguments.suites or list(WITH_BARS)
    if "all" in arguments.suites:
        arguments.suites = list(SUITES)
    if unknown := set(arguments.suites) - set(SUITES):
        parser.error(f"no suite {', '.join(sorted(unknown))}; there are: {', '.join(SUITES)}, all")
    try:
        arguments.peers = peers.pick(arguments.peers)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        # No failure: `make bench` runs this on machines without a GPU as well.
        print("bench/attention.py: torch sees no CUDA device here, so there is nothing to measure")
        return 0
    if reason := family_unavailable(arguments.family):
        print(f"bench/attention.py: family {arguments.family}: {reason}")
        return 2
    choose(arguments.family)
    others, arguments.absent = peers.present(arguments.peers)
    timer = Timer(quick=False)
    timer.seconds = arguments.seconds
    wanted = arguments.match.split(",")
    suites = {
        name: [case for case in SUITES[name]() if any(text in case.name for text in wanted)]
        for name in arguments.suites
    }
    report = AttentionReport(timer, arguments, others, sum(map(len, suites.values())))
    for name, cases in suites.items():
        if cases:
            report.suite(name, cases, functools.partial(measure, timer=timer, others=others))
    return report.summary()


if __name__ == "__main__":
    sys.exit(main())
