"""Which CUDA stream a call uses, and what a call on a GPU says while its kernel is not built."""

from __future__ import annotations

import pagetile
import pytest
import torch
from pagetile import _C

GPU = pytest.mark.gpu


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda", 0)


class Stream:
    """An object of the CUDA stream protocol."""

    def __init__(self, address: int) -> None:
        self.address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


def test_cpu_tensor_has_stream_0():
    assert _C.stream_of(torch.zeros(1), None) == 0


@pytest.mark.parametrize("stream", [7, Stream(7)], ids=["int", "protocol"])
def test_given_stream_wins(stream: object):
    assert _C.stream_of(torch.zeros(1), stream) == 7


@pytest.mark.parametrize("stream", ["7", 7.0, True, -1, object()], ids=repr)
def test_bad_stream_is_refused(stream: object):
    with pytest.raises(
        TypeError, match="stream must be None, an int or an object with __cuda_stream__, got"
    ):
        _C.stream_of(torch.zeros(1), stream)


@GPU
def test_torch_current_stream(cuda: torch.device):
    tensor = torch.zeros(1, device=cuda)
    assert _C.stream_of(tensor, None) == torch.cuda.current_stream().cuda_stream
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert _C.stream_of(tensor, None) == side.cuda_stream != 0
    assert _C.stream_of(tensor, side) == side.cuda_stream


@GPU
def test_cupy_current_stream(cuda: torch.device):
    cupy = pytest.importorskip("cupy")
    array = cupy.zeros(1, cupy.float32)
    assert _C.stream_of(array, None) == cupy.cuda.get_current_stream().ptr
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        assert _C.stream_of(array, None) == side.ptr != 0


@GPU
def test_other_frameworks_use_the_legacy_default_stream(cuda: torch.device):
    class Export:
        """A tensor type that offers __dlpack__ alone."""

        tensor = torch.zeros(1, device=cuda)

        def __dlpack__(self, **kwargs: object) -> object:
            return self.tensor.__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.tensor.__dlpack_device__()

    assert _C.stream_of(Export(), None) == 0


@GPU
@pytest.mark.parametrize(
    "function", ["cache_write", "copy_pages", "paged_attention", "merge_states"]
)
def test_missing_kernel_is_named(cuda: torch.device, function: str):
    rows = torch.zeros(1, 1, 64, device=cuda)
    cache = torch.zeros(1, 16, 1, 64, device=cuda)
    one = torch.ones(1, dtype=torch.int32, device=cuda)
    lse = torch.zeros(1, 1, device=cuda)
    calls = {
        "cache_write": lambda: pagetile.cache_write(rows, rows, cache, cache, one),
        "copy_pages": lambda: pagetile.copy_pages(cache, cache, one, one),
        "paged_attention": lambda: pagetile.paged_attention(
            rows, cache, cache, block_table=one[None] * 0, seqused_k=one,
            cu_seqlens_q=torch.arange(2, dtype=torch.int32, device=cuda), max_seqlen_q=1,
        ),
        "merge_states": lambda: pagetile.merge_states(rows, lse, rows, lse),
    }  # fmt: skip
    families = _C.build_info()["families"]
    if any(function in families[name]["kernels"] for name in families if name != "cpu"):
        pytest.skip(f"{function} is built")
    with pytest.raises(
        RuntimeError,
        match=rf"{function}: not built for CUDA device 0 \(.*capability \d+\.\d+\); built: cpu ",
    ):
        calls[function]()
