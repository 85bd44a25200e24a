"""What tests of a GPU share: their marks, graphs, and a stream that is busy."""

from __future__ import annotations

import pytest
import torch


def needs_gpus(count: int):
    """A decorator."""
    few = torch.cuda.device_count() < count
    skip = pytest.mark.skipif(few, reason=f"needs {count} CUDA device{'s' * (count > 1)}")
    return lambda test: pytest.mark.gpu(skip(test))


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
