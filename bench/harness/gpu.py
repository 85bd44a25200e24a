"""Timing on a GPU: replays of CUDA graphs that hold many calls; what the GPU is and can do."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pagetile
import torch

Call = Callable[[], Any]


@dataclass
class Times:
    """Quartiles, in us a call."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, samples: list[float]) -> Times:
        return cls(*(float(q) for q in np.percentile(samples, [25, 50, 75])))

    @property
    def iqr(self) -> float:
        return self.high - self.low


class Timer:
    def __init__(self, quick: bool) -> None:
        self.seconds = 0.05 if quick else 0.15  # of warm replays
        self.cold_replays = 7 if quick else 15
        self.stream = torch.cuda.Stream()
        self.flush_source, self.flush_target = torch.zeros(2, 64 << 20, device="cuda")  # 256 MB

    def warm(self, calls: list[Call]) -> Times:
        """All calls in turn, repeated until a graph holds about 2 ms of them, or 20 times."""
        once = self._eager(calls)
        repeats = max(1, min(20, math.ceil(2.0 / max(once, 1e-3) / len(calls))))
        graph = self._capture(calls * repeats)
        graph.replay()
        torch.cuda.synchronize()
        samples: list[float] = []
        end = time.perf_counter() + self.seconds
        while len(samples) < 5 or (len(samples) < 100 and time.perf_counter() < end):
            samples.append(self._replay(graph, len(calls) * repeats))
        return Times.of(samples)

    def cold(self, calls: list[Call]) -> Times:
        """Each call once, after a flush of the L2: let no two calls touch the same lines."""
        self._eager(calls)
        graph = self._capture(calls)
        for _ in range(2):
            graph.replay()
        count = len(calls)
        return Times.of([self._replay(graph, count, cold=True) for _ in range(self.cold_replays)])

    def host(self, call: Call) -> float:
        """Median us a call, over rounds that are too short to fill the stream's queue."""
        rounds = []
        for _ in range(10):
            start = time.perf_counter()
            for _ in range(60):
                call()
            rounds.append((time.perf_counter() - start) / 60 * 1e6)
            torch.cuda.synchronize()
        return float(np.median(rounds[1:]))

    def _eager(self, calls: list[Call]) -> float:
        """Milliseconds a call outside a graph, once everything is loaded."""
        self.stream.wait_stream(torch.cuda.current_stream())
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            for call in calls:
                call()
            self.stream.synchronize()
            start.record()
            for call in calls:
                call()
            end.record()
            self.stream.synchronize()
        return start.elapsed_time(end) / len(calls)

    def _capture(self, calls: list[Call]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for call in calls:
                call()
        return graph

    def _replay(self, graph: torch.cuda.CUDAGraph, count: int, cold: bool = False) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if cold:  # takes 0.1 ms: the replay is enqueued before the flush ends
            torch.mul(self.flush_source, 1.0, out=self.flush_target)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / count * 1e3


def query_gpu(fields: str) -> str:
    """What nvidia-smi says of the current GPU. Reads only: no setting is touched."""
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    which = [] if uuid is None else [f"--id=GPU-{uuid}"]
    command = ["nvidia-smi", *which, f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return found.stdout.strip().splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def describe_software() -> list[str]:
    build = pagetile.show_config("dicts")["build"]
    families = ", ".join(sorted(build["families"])) or "the CPU"
    cuda = f", CUDA {build['cuda_version']}" if build["cuda_version"] else ""
    return [
        f"pagetile {build['version']}, commit {build['git_hash']}{cuda}, kernels of {families}",
        f"torch {torch.__version__}, Python {sys.version.split()[0]}",
        time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    ]


def describe_machine() -> list[str]:
    """Commit first, then the GPU: what a figure says of a run."""
    commit, *others = describe_software()
    gpu = torch.cuda.get_device_properties(0)
    memory, l2 = gpu.total_memory / 2**30, gpu.L2_cache_size / 2**20
    clocks = query_gpu("clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem")
    return [
        commit,
        f"{gpu.name}, {gpu.multi_processor_count} SMs, {memory:.0f} GiB, L2 {l2:.0f} MiB",
        f"driver {query_gpu('driver_version')}; SM and memory clock now, and at most: {clocks}",
        *others,
    ]


def measure_read(timer: Timer) -> float:
    """GB/s of a plain kernel that reads 4 GiB."""
    x = torch.ones(min(1 << 30, torch.cuda.mem_get_info()[0] // 16), device="cuda")
    return x.nbytes / timer.warm([lambda: torch.sum(x)]).median / 1e3


def measure_product(timer: Timer) -> float:
    """TFLOP/s of a large product of bf16 matrices."""
    size = 8192
    a, b, out = torch.randn(3, size, size, device="cuda").bfloat16()
    return 2 * size**3 / timer.warm([lambda: torch.mm(a, b, out=out)]).median / 1e6


def measure_limits(timer: Timer) -> dict[str, Any]:
    """What a plain copy kernel reaches here (cudaMemcpy does not), and what a launch costs."""
    free, _ = torch.cuda.mem_get_info()
    x = torch.randn(min(1 << 30, free // 16), device="cuda")  # 4 GiB
    y = torch.empty_like(x)

    def copy() -> torch.Tensor:
        return torch.mul(x, 1.0, out=y)

    copy_us = timer.warm([copy]).median
    empty_us = timer.warm([lambda: torch.cuda._sleep(0)] * 16).median
    for _ in range(math.ceil(1.5e6 / copy_us)):  # 1.5 s
        copy()
    clocks = query_gpu("clocks.sm,clocks.mem,power.draw,temperature.gpu")
    torch.cuda.synchronize()
    return {
        "copy_bytes": x.nbytes,
        "copy_gbps": 2 * x.nbytes / copy_us / 1e3,
        "empty_us": empty_us,
        "clocks_while_copying": clocks,
    }
