"""Host time of one call: from Python into the library and back, with almost nothing to compute.

One sequence, one token, one head of 8: the arithmetic is below 0.1 us, and is left in. Ten tensors:
q, k_cache, v_cache, block_table, seqused_k, cu_seqlens_q, k_scale, v_scale, out, softmax_lse.
Through PyTorch's dispatcher (torch.ops) as well as directly, beside an operator of the same schema
that does nothing: what PyTorch takes for itself. And through XLA: jitted calls of
pagetile.jax, beside a jitted function that adds two of the same arrays. XLA allocates the results.
Where there is a GPU, the same calls of PyTorch with tensors there, in rounds that are too short to
fill the stream's queue.

    python bench/host_overhead.py
    python bench/host_overhead.py --json out.json
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pagetile
import pagetile.torch
import torch
from harness.gpu import describe_machine, describe_software

CALLS = 20_000
ROUNDS = 15
GPU_CALLS, GPU_ROUNDS = 60, 100
RESULTS = ("out", "softmax_lse")


def microseconds(call: Callable[[], Any], gpu: bool = False) -> tuple[float, float]:
    """Median and best round, in us a call."""
    calls, rounds = (GPU_CALLS, GPU_ROUNDS) if gpu else (CALLS, ROUNDS)
    call()
    times = []
    for _ in range(rounds):
        if gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times), min(times)


def arguments(
    convert: Callable[[np.ndarray], Any], dtype: type = np.float32
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    cache = np.zeros((4, 16, 1, 8), np.uint8)
    one = np.ones(1, np.float32)
    tensors = {
        "block_table": np.array([[1]], np.int32),
        "seqused_k": np.array([1], np.int32),
        "cu_seqlens_q": np.array([0, 1], np.int32),
        "k_scale": one,
        "v_scale": one.copy(),
        "out": np.zeros((1, 1, 8), dtype),
        "softmax_lse": np.zeros((1, 1), np.float32),
    }
    options = {"max_seqlen_q": 1, "max_seqlen_k": 1, "softmax_scale": 0.125, "kv_dtype": "fp8_e4m3"}
    positional = tuple(convert(a) for a in (np.ones((1, 1, 8), dtype), cache, cache.copy()))
    return positional, {name: convert(a) for name, a in tensors.items()} | options


_library: Any = torch.library.Library("pagetile_bench", "DEF")


@functools.cache
def idle_operator() -> Callable[..., None]:
    """Takes what torch.ops.pagetile.paged_attention.out takes, in Python too, and does nothing."""
    schema = str(torch.ops.pagetile.paged_attention.out._schema).partition("(")[2]
    _library.define(f"idle({schema}")
    for key in ("CPU", "CUDA"):
        _library.impl("idle", lambda *_: None, key)
    return torch.ops.pagetile_bench.idle.default


def through_torch_ops(
    args: tuple[Any, ...], kwargs: dict[str, Any], new: dict[str, Any], write: tuple[Any, ...]
) -> dict[str, Callable[[], Any]]:
    """The same calls as operators."""
    ops, idle = torch.ops.pagetile, idle_operator()
    return {
        "an operator that does nothing, 10 tensors": lambda: idle(*args, **kwargs),
        "ops.paged_attention.out, 10 tensors": lambda: ops.paged_attention.out(*args, **kwargs),
        "ops.paged_attention, 8 tensors": lambda: ops.paged_attention(*args, **new),
        "ops.cache_write, 5 tensors": lambda: ops.cache_write(*write),
    }


def through_jax() -> dict[str, Callable[[], Any]]:
    """Jitted calls, each waited for: on the CPU JAX may run them on a thread of its own."""
    import jax
    import jax.numpy as jnp
    import pagetile.jax

    jax.config.update("jax_default_device", jax.devices("cpu")[0])
    args, kwargs = arguments(jnp.asarray)
    arrays = {n: x for n, x in kwargs.items() if isinstance(x, jax.Array) and n not in RESULTS}
    options = {n: x for n, x in kwargs.items() if not isinstance(x, jax.Array)}
    attend = jax.jit(functools.partial(pagetile.jax.paged_attention, **options))
    write = jax.jit(pagetile.jax.cache_write, donate_argnums=(2, 3))
    add = jax.jit(jnp.add)
    k, slots = jnp.ones((1, 1, 8)), jnp.array([3])
    caches = [jnp.zeros((4, 16, 1, 8)), jnp.zeros((4, 16, 1, 8))]

    def write_in_place() -> None:
        caches[:] = write(k, k, *caches, slots)
        caches[1].block_until_ready()

    return {
        f"paged_attention, {3 + len(arrays)} tensors": lambda: attend(
            *args, **arrays
        ).block_until_ready(),
        "cache_write, 5 tensors, caches donated": write_in_place,
        "jnp.add, 2 tensors": lambda: add(args[0], args[0]).block_until_ready(),
    }


def on_gpu(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).cuda()


def through_arrays(framework: str, convert: Callable[[np.ndarray], Any]) -> dict[str, Any]:
    """Calls without and with what they write to; a GPU takes no queries in fp32."""
    args, kwargs = arguments(convert, np.float16 if convert is on_gpu else np.float32)
    new = {name: value for name, value in kwargs.items() if name not in RESULTS}
    k = convert(np.ones((1, 1, 8), np.float32))
    cache = convert(np.zeros((4, 16, 1, 8), np.float32))
    write = (k, k, cache, cache, convert(np.array([3])))
    cases = {
        "paged_attention, 10 tensors, out given": lambda: pagetile.paged_attention(*args, **kwargs),
        "paged_attention, 8 tensors, out allocated": lambda: pagetile.paged_attention(*args, **new),
        "cache_write, 5 tensors": lambda: pagetile.cache_write(*write),
    }
    if framework.startswith("torch"):
        cases |= through_torch_ops(args, kwargs, new, write)
    return cases


def report(
    framework: str, cases: dict[str, Callable[[], Any]], gpu: bool = False
) -> list[dict[str, Any]]:
    rows = []
    for name, call in cases.items():
        median, best = microseconds(call, gpu)
        rows.append({"name": f"{framework}: {name}", "us": median, "best_us": best})
        print(f"{rows[-1]['name']:52s} {median:10.2f} {best:10.2f}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all numbers there")
    given = parser.parse_args()
    gpu = torch.cuda.is_available()
    machine = describe_machine() if gpu else describe_software()
    for line in machine:
        print(f"# {line}")
    print(f"{'call':52s} {'median us':>10s} {'best us':>10s}")
    rows = report("torch", through_arrays("torch", torch.from_numpy))
    rows += report("numpy", through_arrays("numpy", lambda array: array))
    if gpu:
        rows += report("torch on the GPU", through_arrays("torch on the GPU", on_gpu), gpu=True)
    if importlib.util.find_spec("jax") and pagetile.show_config("dicts")["xla_handlers"]:
        rows += report("jax", through_jax())
    else:
        print("jax: not installed, or this build has no handlers for XLA")
    if given.json:
        found = {"machine": machine, "cases": rows}
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
