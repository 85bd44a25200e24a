"""What tests of a GPU share: their marks, which kernel serves whom, graphs, a busy stream."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch
from pagetile import _C


def needs_gpus(count: int):
    """A decorator."""
    few = torch.cuda.device_count() < count
    skip = pytest.mark.skipif(few, reason=f"needs {count} CUDA device{'s' * (count > 1)}")
    return lambda test: pytest.mark.gpu(skip(test))


def is_long(q_len: int, group: int) -> bool:
    """Whether a batch_invariant call gives a sequence to the prefill kernel (dispatch.cpp)."""
    return group <= 128 and q_len * group > max(64, group)


def one_kernel(device: str, group: int, *q_lens: int) -> bool:
    """Whether sequences of so many queries must have the same bits in batch_invariant calls.

    The CPU has one kernel. A GPU's split-KV and prefill kernels add in other orders.
    """
    return device == "cpu" or len({is_long(q_len, group) for q_len in q_lens}) == 1


@contextlib.contextmanager
def prefill_by(kernel: str):
    """Long queries go to the best kernel, to the portable one, or (none) to the split-KV kernel."""
    _C.choose_prefill(kernel)
    try:
        yield
    finally:
        _C.choose_prefill(os.environ.get("PAGETILE_TEST_PREFILL", "best"))


def captured(call) -> torch.cuda.CUDAGraph:
    """A graph of the launches of `call`, which has run once before.

    During a capture, CUDA refuses to synchronise and to allocate.
    """
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def keep_busy(milliseconds: float = 50) -> torch.cuda.Event:
    """Occupies the current stream; the event tells when that is over."""
    torch.cuda._sleep(int(milliseconds * 2e6))  # cycles, at about 2 GHz
    event = torch.cuda.Event()
    event.record()
    return event
