"""Fixtures of every test: the devices, the kernels a test needs, the hypothesis profiles."""

from __future__ import annotations

import functools
import os

import hypothesis
import pagetile
import pytest
import torch

# JAX would take three quarters of a GPU's memory for itself, and others need some.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))

_profile = {
    "deadline": None,
    "suppress_health_check": [
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.data_too_large,
    ],
}
hypothesis.settings.register_profile("ci", max_examples=120, derandomize=True, **_profile)
hypothesis.settings.register_profile("dev", max_examples=120, **_profile)
hypothesis.settings.register_profile("thorough", max_examples=2000, **_profile)
hypothesis.settings.load_profile(os.environ.get("PAGETILE_HYPOTHESIS_PROFILE", "ci"))


# For long queries: the kernel that fits best, the portable one, or none of the prefill kernels.
if choice := os.environ.get("PAGETILE_TEST_PREFILL"):
    pagetile._C.choose_prefill(choice)


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line(
        "markers", "uses(*functions): the functions a test calls, where it is not its module's USES"
    )


@pytest.fixture(params=DEVICES, scope="module")
def device(request):
    """cpu, and cuda where there is one."""
    return request.param


def pytest_runtest_setup(item):
    """A test on a GPU needs the kernels of the functions that it, or its module, says it uses."""
    if item.get_closest_marker("gpu") is None or not torch.cuda.is_available():
        return
    uses = item.get_closest_marker("uses")
    for function in uses.args if uses else getattr(item.module, "USES", ()):
        if reason := missing_kernels(function):
            pytest.skip(reason)


@functools.cache
def missing_kernels(function: str) -> str | None:
    """Why `function` cannot run on this GPU, or None: one tiny call of the most usual kind."""
    cuda = functools.partial(torch.zeros, device="cuda")
    rows, cache = cuda(1, 1, 64, dtype=torch.bfloat16), cuda(1, 16, 1, 64, dtype=torch.bfloat16)
    one, lse = cuda(1, dtype=torch.int32), cuda(1, 1)
    calls = {
        "cache_write": lambda: pagetile.cache_write(rows, rows, cache, cache.clone(), one.long()),
        "copy_pages": lambda: pagetile.copy_pages(cache, cache.clone(), one, one),
        "paged_attention": lambda: pagetile.paged_attention(
            rows, cache, cache, block_table=one[None], seqused_k=one + 1,
            cu_seqlens_q=torch.arange(2, dtype=torch.int32, device="cuda"), max_seqlen_q=1,
        ),
        "merge_states": lambda: pagetile.merge_states(rows, lse, rows, lse),
    }  # fmt: skip
    try:
        calls[function]()
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "not built" in str(error):
            return f"{function} has no CUDA kernel in this build: {error}"
        raise
    return None
