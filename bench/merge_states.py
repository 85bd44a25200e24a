"""merge_states on a GPU: time, share of the copy rate, ratio to vLLM's kernel where it is present.

Medians over replays of a CUDA graph that holds many calls, in us a call.
    warm   up to 16 sets of tensors in turn.
    cold   256 MB are copied to flush the L2, then the sets are merged, each once.
    host   from Python into the library and back, nothing captured.
GB/s counts the bytes of out_a, out_b, out and of the three lse. What a kernel wrote is compared
before it is timed.

    python bench/merge_states.py                     # all cases
    python bench/merge_states.py --cases 4096x,fp32  # names that contain one of these
"""

from __future__ import annotations

import argparse
import functools
import math
import pathlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pagetile
import torch
from harness.gpu import Call, Timer, describe_machine, measure_limits
from harness.report import Report
from peers.vllm_write import why_not

SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SHAPES = ((1, 32, 128), (64, 32, 128), (512, 32, 128), (4096, 32, 128), (16384, 32, 128))


@dataclass(frozen=True)
class Case:
    tokens: int
    heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    variant: str = ""  # "in_place": out and lse lie where a does; "odd_rows": no 16-byte vectors

    @property
    def name(self) -> str:
        shape = f"{self.tokens}x{self.heads}x{self.head_dim}"
        return f"{shape} {SHORT[self.dtype]} {self.variant}".rstrip()

    @property
    def bytes(self) -> int:
        rows = self.tokens * self.heads
        return 3 * rows * (self.head_dim * self.dtype.itemsize + 4)


def cases() -> Iterator[Case]:
    for shape in SHAPES:
        yield Case(*shape)
    for head_dim in (64, 80, 96, 192, 256, 512, 576):
        yield Case(4096, 32, head_dim)
    yield Case(4096, 32, 128, torch.float16)
    yield Case(4096, 32, 128, torch.float32)
    yield Case(4096, 32, 128, variant="in_place")
    yield Case(4096, 32, 128, variant="odd_rows")
    yield Case(4096, 32, 46)


class Problem:
    """Sets of tensors: no two share a byte."""

    def __init__(self, case: Case) -> None:
        self.case = case
        free, _ = torch.cuda.mem_get_info()
        sets = max(2, min(256, math.ceil(450e6 / case.bytes), free // 3 // case.bytes))
        self.warm_sets = min(16, sets)
        torch.manual_seed(0)
        pad = 1 if case.variant == "odd_rows" else 0
        shape = (sets, case.tokens, case.heads, case.head_dim + pad)

        def rows() -> torch.Tensor:
            return torch.randn(shape, dtype=case.dtype, device="cuda")[..., : case.head_dim]

        def lses() -> torch.Tensor:
            return torch.randn(sets, case.heads, case.tokens, device="cuda")

        out_a, lse_a, out_b, lse_b = rows(), lses(), rows(), lses()
        in_place = case.variant == "in_place"
        out, lse = (out_a, lse_a) if in_place else (rows(), lses())
        self.sets = list(zip(out_a, lse_a, out_b, lse_b, out, lse, strict=True))

    def calls(self) -> list[Call]:
        merge = pagetile.merge_states
        return [functools.partial(merge, *x[:4], out=x[4], lse=x[5]) for x in self.sets]

    def peer_calls(self) -> list[Call]:
        merge = torch.ops._C.merge_attn_states
        return [functools.partial(merge, x[4], x[5], *x[:4], None, None) for x in self.sets]

    def check(self, calls: list[Call]) -> None:
        """Raises unless the first and the last set are merged right."""
        for call, (out_a, lse_a, out_b, lse_b, out, lse) in (
            (calls[i], self.sets[i]) for i in (0, -1)
        ):
            total = torch.logaddexp(lse_a, lse_b)
            weight_a, weight_b = ((x - total).exp().T[..., None] for x in (lse_a, lse_b))
            expected = weight_a * out_a.float() + weight_b * out_b.float()
            call()
            bound = max(4 * torch.finfo(self.case.dtype).eps, 1e-5)
            torch.testing.assert_close(out.float(), expected, rtol=bound, atol=bound)
            torch.testing.assert_close(lse, total, rtol=1e-5, atol=1e-5)


def measure(case: Case, timer: Timer, peer: bool) -> dict[str, Any]:
    problem = Problem(case)
    calls = problem.calls()
    problem.check(calls)
    warm, cold = timer.warm(calls[: problem.warm_sets]), timer.cold(calls)
    row = {
        "us": warm.median,
        "iqr": warm.iqr,
        "gbps": case.bytes / warm.median / 1e3,
        "cold_us": cold.median,
        "host_us": timer.host(calls[0]),
    }
    if peer:
        try:
            calls = problem.peer_calls()
            problem.check(calls)
            row["peers"] = {"vllm": {"us": timer.warm(calls[: problem.warm_sets]).median}}
        except (AssertionError, AttributeError, RuntimeError) as error:  # refused, or got wrong
            row["peers"] = {"vllm": {"error": str(error)}}
    return row


COLUMNS = (  # key, title, format
    ("us", "warm us", "9.2f"),
    ("iqr", "IQR", "7.2f"),
    ("gbps", "GB/s", "7.0f"),
    ("of_copy", "of copy", "9.1%"),
    ("cold_us", "cold us", "9.2f"),
    ("host_us", "host us", "9.2f"),
    ("peers.vllm.us", "vLLM us", "9.2f"),
    ("peers.vllm.ratio", "ratio", "7.2f"),
)


class MergeReport(Report):
    def __init__(
        self, timer: Timer, json_file: pathlib.Path | None, absent: list[str], total: int
    ) -> None:
        self.limits = measure_limits(timer)
        found = {"machine": [*describe_machine(), *absent], "limits": self.limits}
        super().__init__(COLUMNS, 28, found, json_file, total)
        print(
            f"# a copy kernel: {self.limits['copy_gbps']:.0f} GB/s; an empty one in a graph: ",
            end="",
        )
        print(f"{self.limits['empty_us']:.2f} us")

    def judge(self, row: dict[str, Any]) -> None:
        super().judge(row)
        row["of_copy"] = row["gbps"] / self.limits["copy_gbps"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cases", default="", metavar="TEXT,TEXT", help="only names that contain one of these")
    add("--quick", action="store_true", help="fewer replays")
    add("--json", type=pathlib.Path, metavar="FILE", help="write all numbers there")
    add("--no-peers", action="store_true", help="leave vLLM's kernel out")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        # No failure: `make bench` runs this on machines without a GPU as well.
        print("bench/merge_states.py: torch sees no CUDA device here: there is nothing to measure")
        return 0
    timer = Timer(arguments.quick)
    reason = "left out" if arguments.no_peers else why_not()
    wanted = arguments.cases.split(",")
    chosen = [case for case in cases() if any(text in case.name for text in wanted)]
    absent = [f"vllm is not here: {reason}"] if reason else []
    report = MergeReport(timer, arguments.json, absent, len(chosen))
    report.titles("merge_states")
    for case in chosen:
        row = {"name": case.name, "bytes": case.bytes}
        report.case(case.name, row, functools.partial(measure, case, timer, not reason))
    return 1 if any("error" in row for row in report.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
