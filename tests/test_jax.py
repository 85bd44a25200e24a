"""pagetile.jax: cache writes and attention under jax.jit, in place, and what is refused."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pagetile
import pagetile.jax
import pytest
import reference
import torch
from pagetile import _C
from pagetile.jax import cache_write, merge_states, paged_attention
from problem import POISON, check_pair, scale_values

USES = ("cache_write", "paged_attention", "merge_states")


def gpus() -> list[jax.Device]:
    try:
        return jax.devices("gpu")
    except RuntimeError:
        return []


DEVICES = ["cpu", *([pytest.param("gpu", marks=pytest.mark.gpu)] if gpus() else [])]


@pytest.fixture(autouse=True, params=DEVICES)
def platform(request):
    """Where arrays are made and calls run: the CPU, and a GPU where JAX has one."""
    with jax.default_device(jax.devices(request.param)[0]):
        yield request.param


# Decoding, step by step, beside the reference


@dataclass(frozen=True)
class Decode:
    """A prefill and some steps of decoding, each a cache write and an attention in one jit."""

    name: str
    heads: tuple[int, int] = (4, 4)
    head_dim: tuple[int, int] = (32, 32)
    page_size: int = 4
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    uint8: bool = False
    layout: str = "NHD"
    scales: str | None = None  # of problem.scale_values
    sinks: str | None = None
    alibi: str | None = None  # heads, batch_heads
    padding: int = 0  # tokens of no sequence at the end of each step
    options: dict = field(default_factory=dict)

    @property
    def kv(self) -> str:
        return self.cache_dtype or self.dtype


# fmt: off
DECODES = [
    Decode("mha_fp32", dtype="float32"),
    Decode("mha_bf16"),
    Decode("gqa_fp16", heads=(8, 2), dtype="float16"),
    Decode("mqa_192_128_page7", heads=(5, 1), head_dim=(192, 128), page_size=7),
    Decode("hnd", heads=(4, 2), layout="HND"),
    Decode("legacy", heads=(4, 2), head_dim=(32, 40), layout="legacy"),
    Decode("padding", heads=(4, 2), padding=3),
    Decode("bounds", options={"max_seqlen_k": 64, "softmax_scale": 0.3}),
    Decode("window", options={"window": (5, 0)}),
    Decode("noncausal_window", options={"window": (5, 1), "causal": False}),
    Decode("softcap", options={"softcap": 3.0}),
    Decode("sinks", heads=(8, 2), sinks="float32"),
    Decode("sinks_bf16_window", sinks="bfloat16", options={"window": (2, 0)}),
    Decode("alibi", alibi="heads"),
    Decode("alibi_batch", alibi="batch_heads"),
    Decode("splits", options={"num_splits": 2}),
    Decode("invariant", options={"batch_invariant": True, "max_seqlen_k": 64}),
    Decode("e4m3", heads=(4, 2), cache_dtype="float8_e4m3fn"),
    Decode("e4m3_scales", heads=(4, 2), cache_dtype="float8_e4m3fn", scales="heads"),
    Decode("e5m2_fp16", dtype="float16", cache_dtype="float8_e5m2", scales="one"),
    Decode("e4m3_uint8", cache_dtype="float8_e4m3fn", uint8=True, scales="one",
           options={"kv_dtype": "fp8"}),
    Decode("everything", heads=(8, 2), head_dim=(64, 32), cache_dtype="float8_e4m3fn",
           layout="HND", scales="heads", sinks="float32", alibi="heads", padding=2,
           options={"window": (9, 0), "softcap": 5.0, "max_seqlen_k": 100}),
]
# fmt: on
STEPS = ([5, 12, 1], [1, 1, 1], [3, 1, 2], [1, 1, 1], [1, 1, 1])  # new tokens of the sequences


def to_layout(logical: np.ndarray, layout: str, is_key: bool) -> np.ndarray:
    """[P, S, H, D] as the layout has it."""
    if layout == "NHD":
        return logical
    by_head = logical.transpose(0, 2, 1, 3)
    if layout == "HND":
        return by_head
    if not is_key:
        return by_head.transpose(0, 1, 3, 2)  # [P, H, D, S]
    pages, heads, slots, dim = by_head.shape
    return by_head.reshape(pages, heads, slots, dim // 8, 8).transpose(0, 1, 3, 2, 4)


def bits(array) -> np.ndarray:
    array = np.asarray(array)
    return array.view(np.dtype(f"u{array.itemsize}"))


def from_raw(raw: np.ndarray, dtype: str) -> jax.Array:
    return jnp.asarray(np.ascontiguousarray(raw).view(jnp.dtype(dtype)))


@partial(
    jax.jit,
    donate_argnames=("k_cache", "v_cache"),
    static_argnames=("max_seqlen_q", "options", "kv_dtype", "layout"),
)
def decode_step(
    q, k, v, k_cache, v_cache, slots, metadata, extras, scales, max_seqlen_q, options, **kwargs
):
    k_cache, v_cache = cache_write(k, v, k_cache, v_cache, slots, **scales, **kwargs)
    out, lse = paged_attention(
        q, k_cache, v_cache, **metadata, **extras, **scales, **kwargs,
        max_seqlen_q=max_seqlen_q, return_softmax_lse=True, **dict(options),
    )  # fmt: skip
    return out, lse, k_cache, v_cache


@pytest.mark.parametrize("case", DECODES, ids=lambda case: case.name)
def test_decode(case, platform):
    """Every step's out, LSE and caches; the caches stay where they are, from step to step."""
    if platform == "gpu" and case.dtype == "float32":
        pytest.skip("attention in float32 is the CPU's")
    rng = np.random.default_rng(7)
    (num_q_heads, num_kv_heads), batch, num_pages = case.heads, len(STEPS[0]), 24
    pool = pagetile.BlockPool(num_pages=num_pages, page_size=case.page_size)
    sequences = [pool.allocate() for _ in range(batch)]
    logical = [
        rng.choice(
            np.array(POISON[case.kv], reference.FORMATS[case.kv].raw),
            (num_pages, case.page_size, num_kv_heads, dim),
        )
        for dim in case.head_dim
    ]
    stored = "uint8" if case.uint8 else case.kv
    caches = [
        # A copy: an array that shares its memory with NumPy's cannot be written in place
        from_raw(to_layout(raw, case.layout, is_key), stored).copy()
        for raw, is_key in zip(logical, (True, False), strict=True)
    ]
    places = [cache.unsafe_buffer_pointer() for cache in caches]
    scales = {n: scale_values(case.scales, batch, num_kv_heads, rng) for n in ("k", "v")}
    slopes = 2.0 ** -rng.uniform(1, 6, (batch, num_q_heads)).astype(np.float32)
    slopes = slopes[:1].repeat(batch, 0) if case.alibi == "heads" else slopes
    sinks = reference.encode(2 * rng.standard_normal(num_q_heads), case.sinks or "float32")
    extras = {}
    if case.alibi:
        extras["alibi_slopes"] = jnp.asarray(slopes[0] if case.alibi == "heads" else slopes)
    if case.sinks:
        extras["sinks"] = from_raw(sinks, case.sinks)
    options = dict(case.options)
    kv_dtype = options.pop("kv_dtype", "auto")

    for new_tokens in STEPS:
        step = pool.append(sequences, new_tokens)
        total = step.total_q + case.padding
        q, k, v = (
            reference.encode(rng.standard_normal((total, heads, dim)), case.dtype)
            for heads, dim in ((num_q_heads, case.head_dim[0]), (num_kv_heads, case.head_dim[0]),
                               (num_kv_heads, case.head_dim[1]))
        )  # fmt: skip
        slots = np.concatenate([step.slot_mapping, np.full(case.padding, -1)]).astype(np.int32)
        out, lse, *caches = decode_step(
            *(from_raw(x, case.dtype) for x in (q, k, v)),
            *caches,
            jnp.asarray(slots),
            {n: jnp.asarray(getattr(step, n).copy())
             for n in ("block_table", "seqused_k", "cu_seqlens_q")},
            extras,
            {f"{n}_scale": None if value is None else jnp.asarray(value)
             for n, (value, _) in scales.items()},
            max_seqlen_q=step.max_seqlen_q,
            options=tuple(options.items()),
            kv_dtype=kv_dtype,
            layout=case.layout,
        )  # fmt: skip

        # The caches: every bit, and in place
        for raw, rows, name in zip(logical, (k, v), "kv", strict=True):
            reference.cache_write(
                raw, rows, slots, dtype=case.dtype, cache_dtype=case.kv, scale=scales[name][0]
            )
        for cache, raw, is_key in zip(caches, logical, (True, False), strict=True):
            np.testing.assert_array_equal(bits(cache), to_layout(raw, case.layout, is_key))
        assert [cache.unsafe_buffer_pointer() for cache in caches] == places

        # The attention
        covered = slice(0, step.total_q)
        values = [
            reference.decode(raw, case.kv) * scales[name][1][0][:, None]
            for raw, name in zip(logical, "kv", strict=True)
        ]
        expected, low = (
            reference.attention(
                reference.decode(q[covered], case.dtype), *values, block_table=step.block_table,
                seqused_k=step.seqused_k, cu_seqlens_q=step.cu_seqlens_q, round_dtype=round_dtype,
                alibi_slopes=slopes if case.alibi else None,
                sinks=reference.decode(sinks, case.sinks) if case.sinks else None,
                **{n: x for n, x in options.items() if n in (
                    "softmax_scale", "causal", "window", "softcap")},
            )
            for round_dtype in (None, case.dtype)
        )  # fmt: skip
        assert out.dtype == case.dtype
        assert lse.dtype == jnp.float32
        out, lse = np.asarray(out).astype(np.float64), np.asarray(lse)
        check_pair(out[covered], lse[:, covered], expected, low)
        assert (out[step.total_q :] == 0).all()
        assert (lse[:, step.total_q :] == -np.inf).all()


# Calls: the arguments by name, the same at every call of the function


def floats(*shape, seed=0, dtype=jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def write_call(**changes) -> dict:
    return {
        "k": floats(5, 2, 16, seed=1),
        "v": floats(5, 2, 24, seed=2),
        "k_cache": floats(6, 4, 2, 16, seed=3),
        "v_cache": floats(6, 4, 2, 24, seed=4),
        "slot_mapping": jnp.array([3, 9, -1, 20, 21]),
        **changes,
    }


def attention_call(**changes) -> dict:
    return {
        "q": floats(5, 4, 16, seed=5),
        "k_cache": floats(6, 4, 2, 16, seed=3),
        "v_cache": floats(6, 4, 2, 24, seed=4),
        "block_table": jnp.array([[3, 0], [1, 4]]),
        "seqused_k": jnp.array([5, 8]),
        "cu_seqlens_q": jnp.array([0, 2, 5]),
        "max_seqlen_q": 3,
        **changes,
    }


def merge_call(**changes) -> dict:
    return {
        "out_a": floats(5, 4, 24, seed=6),
        "lse_a": floats(4, 5, seed=7, dtype=jnp.float32),
        "out_b": floats(5, 4, 24, seed=8),
        "lse_b": floats(4, 5, seed=9, dtype=jnp.float32),
        **changes,
    }


CALLS = {
    "cache_write": (cache_write, write_call),
    "paged_attention": (paged_attention, attention_call),
    "merge_states": (merge_states, merge_call),
}


def run_jitted(function: str, arguments: dict):
    """The call under jit, its arrays as arguments, the rest in a closure."""
    arrays = {n: x for n, x in arguments.items() if isinstance(x, jax.Array)}
    rest = {n: x for n, x in arguments.items() if n not in arrays}
    return jax.jit(lambda arrays: CALLS[function][0](**arrays, **rest))(arrays)


def same_bits(a, b) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((bits(a) == bits(b)).all())


# Results


@pytest.mark.parametrize("function", CALLS)
def test_eager_calls_equal_jitted_ones(function):
    arguments = CALLS[function][1]()
    kept = {n: np.array(x) for n, x in arguments.items()}
    eager = jax.tree.leaves(CALLS[function][0](**arguments))
    jitted = jax.tree.leaves(run_jitted(function, arguments))
    assert len(eager) == len(jitted)
    assert all(isinstance(x, jax.Array) for x in eager)
    assert all(same_bits(a, b) for a, b in zip(eager, jitted, strict=True))
    for name, value in arguments.items():  # nothing was donated, so nothing was written to
        np.testing.assert_array_equal(np.array(value), kept[name], err_msg=name)


def test_numpy_arrays_go_in():
    arguments = {n: np.asarray(x) if n != "max_seqlen_q" else x
                 for n, x in attention_call().items()}  # fmt: skip
    assert same_bits(paged_attention(**arguments), paged_attention(**attention_call()))


def test_eager_calls_are_traced_once():
    traced = pagetile.jax._paged_attention._cache_size
    paged_attention(**attention_call())
    before = traced()
    paged_attention(**attention_call(q=floats(5, 4, 16, seed=77)))
    assert traced() == before
    paged_attention(**attention_call(softcap=2.0))
    assert traced() == before + 1


def test_out_of_fp8_queries_is_bfloat16(platform):
    arguments = attention_call(
        q=floats(5, 4, 16, seed=5, dtype=jnp.float8_e4m3fn),
        k_cache=floats(6, 4, 2, 16, seed=3, dtype=jnp.float8_e4m3fn),
        v_cache=floats(6, 4, 2, 24, seed=4, dtype=jnp.float8_e4m3fn),
        q_scale=jnp.array([2.0]),
    )
    out = run_jitted("paged_attention", arguments)
    assert out.dtype == jnp.bfloat16
    of_bf16 = {n: arguments[n].astype(jnp.bfloat16) for n in ("q", "k_cache", "v_cache")}
    same = run_jitted("paged_attention", {**attention_call(), **of_bf16, "q": 2 * of_bf16["q"]})
    np.testing.assert_allclose(out.astype(float), same.astype(float), atol=0.03, rtol=0.03)
    allowed = {**arguments, "fp8_products": True}  # short queries are multiplied as ever
    assert same_bits(run_jitted("paged_attention", allowed), out)


def test_given_out_keeps_its_other_rows():
    """Rows of no sequence hold what they held; without out they hold zeros."""
    offsets = {"cu_seqlens_q": jnp.array([1, 2, 4])}  # not rows 0 and 4
    sevens = jnp.full((5, 4, 24), 7, jnp.bfloat16)
    fresh = run_jitted("paged_attention", attention_call(**offsets))
    kept = run_jitted("paged_attention", attention_call(**offsets, out=sevens))
    covered, others = slice(1, 4), jnp.array([0, 4])
    assert same_bits(fresh[covered], kept[covered])
    assert (fresh[others] == 0).all()
    assert (kept[others] == 7).all()
    assert (sevens == 7).all()


def test_parts_merge_to_the_whole():
    """Keys of one sequence in two parts, by their pages."""
    whole = {
        "block_table": jnp.array([[3, 1]]),
        "seqused_k": jnp.array([7]),
        "cu_seqlens_q": jnp.array([0, 5]),
        "max_seqlen_q": 5,
        "causal": False,
        "return_softmax_lse": True,
    }
    parts = ({"block_table": jnp.array([[3]]), "seqused_k": jnp.array([4])},
             {"block_table": jnp.array([[1]]), "seqused_k": jnp.array([3])})  # fmt: skip

    @jax.jit
    def run(q, k_cache, v_cache):
        a, b = (paged_attention(q, k_cache, v_cache, **{**whole, **part}) for part in parts)
        return paged_attention(q, k_cache, v_cache, **whole), merge_states(*a, *b)

    q, k_cache, v_cache = (attention_call()[n] for n in ("q", "k_cache", "v_cache"))
    (out, lse), (merged, merged_lse) = run(q, k_cache, v_cache)
    np.testing.assert_allclose(merged.astype(float), out.astype(float), atol=0.02)
    np.testing.assert_allclose(merged_lse, lse, rtol=1e-5)


def test_merge_of_sides_that_saw_nothing():
    arguments = merge_call(lse_a=jnp.full((4, 5), -jnp.inf), lse_b=jnp.full((4, 5), -jnp.inf))
    out, lse = run_jitted("merge_states", arguments)
    assert (out == 0).all()
    assert (lse == -jnp.inf).all()
    one_sided = run_jitted("merge_states", {**merge_call(), "lse_a": arguments["lse_a"]})
    assert same_bits(one_sided[0], merge_call()["out_b"])


@pytest.mark.parametrize("function", CALLS)
def test_calls_without_tokens(function):
    nothing = {
        "cache_write": {"k": floats(0, 2, 16), "v": floats(0, 2, 24),
                        "slot_mapping": jnp.zeros(0, jnp.int32)},
        "paged_attention": {"q": floats(0, 4, 16), "cu_seqlens_q": jnp.zeros(3, jnp.int32),
                            "return_softmax_lse": True},
        "merge_states": {n: x[:0] if n.startswith("out") else x[:, :0]
                         for n, x in merge_call().items()},
    }[function]  # fmt: skip
    arguments = CALLS[function][1](**nothing)
    first, second = run_jitted(function, arguments)
    if function == "cache_write":
        assert same_bits(first, arguments["k_cache"])
        assert same_bits(second, arguments["v_cache"])
    else:
        assert (first.shape, second.shape) == ((0, 4, 24), (4, 0))


def test_threads():
    """XLA's threads and Python's: calls at the same time, none of them waits for the GIL."""
    attend = jax.jit(partial(paged_attention, max_seqlen_q=3))
    arrays = {n: x for n, x in attention_call().items() if n != "max_seqlen_q"}
    expected, results = attend(**arrays), []

    def work():
        for _ in range(20):
            results.append(same_bits(attend(**arrays), expected))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == [True] * 80


# In place


def test_donated_caches_are_written_in_place():
    write = jax.jit(cache_write, donate_argnames=("k_cache", "v_cache"))
    arguments = write_call()
    places = [arguments[n].unsafe_buffer_pointer() for n in ("k_cache", "v_cache")]
    caches = write(**arguments)
    assert [cache.unsafe_buffer_pointer() for cache in caches] == places
    assert arguments["k_cache"].is_deleted()


def copies_of(hlo: str, shape: str) -> list[str]:
    return [line for line in hlo.splitlines() if re.search(rf"= {re.escape(shape)}\S* copy", line)]


def test_loops_over_steps_and_layers_copy_no_cache():
    """Caches that a loop carries, two layers of them, are updated where they are."""

    def decode(caches, q, k, v, slots, metadata):
        def step(i, state):
            caches, total = state
            new = []
            for k_cache, v_cache in caches:
                k_cache, v_cache = cache_write(k, v, k_cache, v_cache, slots + i)
                total += paged_attention(q, k_cache, v_cache, **metadata, max_seqlen_q=3)
                new.append((k_cache, v_cache))
            return new, total

        return jax.lax.fori_loop(0, 3, step, (caches, jnp.zeros((5, 4, 24), q.dtype)))

    w, a = write_call(), attention_call()
    caches = [(w["k_cache"] + i, w["v_cache"] + i) for i in range(2)]
    metadata = {n: a[n] for n in ("block_table", "seqused_k", "cu_seqlens_q")}
    arguments = caches, a["q"], w["k"], w["v"], w["slot_mapping"], metadata
    donated = jax.jit(decode, donate_argnums=0).lower(*arguments).compile().as_text()
    kept = jax.jit(decode).lower(*arguments).compile().as_text()
    for shape in ("bf16[6,4,2,16]", "bf16[6,4,2,24]"):
        assert "pagetile_cache_write" in donated
        assert copies_of(donated, shape) == []
        assert copies_of(kept, shape) != []  # the same search finds them where they must be


# What is refused, before anything runs

BAD = [
    ("cache_write", {"k": floats(5, 2, 8)}),
    ("cache_write", {"k": floats(5, 32)}),
    ("cache_write", {"k": floats(4, 2, 16)}),
    ("cache_write", {"k": floats(5, 2, 16, dtype=jnp.int32)}),
    ("cache_write", {"v": floats(5, 2, 24, dtype=jnp.float16)}),
    ("cache_write", {"k_cache": floats(6, 4, 2, 16, dtype=jnp.float16)}),
    ("cache_write", {"k_cache": floats(6, 4, 2, 16).astype(jnp.uint8)}),
    ("cache_write", {"v_cache": floats(5, 4, 2, 24)}),
    ("cache_write", {"slot_mapping": jnp.zeros(5, jnp.int16)}),
    ("cache_write", {"slot_mapping": jnp.zeros((5, 1), jnp.int32)}),
    ("cache_write", {"k_scale": jnp.ones(1)}),
    ("cache_write", {"kv_dtype": "fp8"}),
    ("cache_write", {"kv_dtype": "int4"}),
    ("cache_write", {"layout": "SHD"}),
    ("paged_attention", {"q": floats(5, 4, 24)}),
    ("paged_attention", {"q": floats(20, 16)}),
    ("paged_attention", {"q": floats(5, 3, 16)}),
    ("paged_attention", {"q": floats(5, 4, 16, dtype=jnp.float16)}),
    ("paged_attention", {"q": floats(5, 4, 16).astype(jnp.int8)}),
    ("paged_attention", {"q": floats(5, 4, 12), "k_cache": floats(6, 4, 2, 12)}),
    ("paged_attention", {"k_cache": floats(6, 4, 32)}),
    ("paged_attention", {"v_cache": floats(6, 4, 1, 24)}),
    ("paged_attention", {"v_cache": floats(6, 4, 48)}),
    ("paged_attention", {"v_cache": floats(6, 4, 2, 24, dtype=jnp.float8_e5m2)}),
    ("paged_attention", {"fp8_products": True}),
    ("paged_attention", {"block_table": jnp.zeros(2, jnp.int32)}),
    ("paged_attention", {"block_table": jnp.zeros((3, 2), jnp.int32)}),
    ("paged_attention", {"block_table": jnp.zeros((2, 2), jnp.uint32)}),
    ("paged_attention", {"seqused_k": jnp.zeros(3, jnp.int32)}),
    ("paged_attention", {"seqused_k": jnp.zeros(2)}),
    ("paged_attention", {"cu_seqlens_q": jnp.zeros(0, jnp.int32)}),
    ("paged_attention", {"cu_seqlens_q": jnp.zeros((3, 1), jnp.int32)}),
    ("paged_attention", {"alibi_slopes": jnp.zeros(3)}),
    ("paged_attention", {"alibi_slopes": jnp.zeros((3, 4))}),
    ("paged_attention", {"sinks": jnp.zeros(4, jnp.int32)}),
    ("paged_attention", {"sinks": jnp.zeros(5)}),
    ("paged_attention", {"q_scale": jnp.ones(1)}),
    ("paged_attention", {"v_scale": jnp.ones(1)}),
    ("paged_attention", {"out": floats(5, 4, 16)}),
    ("paged_attention", {"out": floats(5, 4, 24, dtype=jnp.float32)}),
    ("paged_attention", {"max_seqlen_q": -1}),
    ("paged_attention", {"max_seqlen_k": 2**31}),
    ("paged_attention", {"num_splits": 2**63}),
    ("paged_attention", {"softmax_scale": float("inf")}),
    ("paged_attention", {"softcap": -1.0}),
    ("paged_attention", {"window": (-2, 0)}),
    ("paged_attention", {"window": (1, 2, 3)}),
    ("paged_attention", {"num_splits": -1}),
    ("paged_attention", {"kv_dtype": "float16"}),
    ("paged_attention", {"layout": "legacy"}),
    ("merge_states", {"out_a": floats(5, 96)}),
    ("merge_states", {"out_a": floats(5, 4, 24, dtype=jnp.float8_e5m2)}),
    ("merge_states", {"out_b": floats(5, 4, 32)}),
    ("merge_states", {"out_b": floats(5, 4, 24, dtype=jnp.float16)}),
    ("merge_states", {"lse_a": floats(5, 4, dtype=jnp.float32)}),
    ("merge_states", {"lse_b": floats(4, 5)}),
]
BAD_IDS = [f"{function}-{'-'.join(change)}-{i}" for i, (function, change) in enumerate(BAD)]


WRITTEN = {"cache_write": ("k_cache", "v_cache"), "paged_attention": ("out",), "merge_states": ()}


def eager_message(function: str, arguments: dict) -> str:
    """What pagetile's own call says to the same arrays; to what it writes, as PyTorch's."""

    def convert(name, x):
        if not isinstance(x, jax.Array):
            return x
        if name in WRITTEN[function]:
            raw = torch.from_numpy(bits(x).view(f"i{x.dtype.itemsize}").copy())
            return raw.view(getattr(torch, x.dtype.name))
        return jax.device_put(x, jax.devices("cpu")[0])

    with pytest.raises(ValueError, match=rf"^{function}: ") as caught:
        getattr(pagetile, function)(**{n: convert(n, x) for n, x in arguments.items()})
    return str(caught.value)


@pytest.mark.parametrize(("function", "change"), BAD, ids=BAD_IDS)
def test_what_does_not_fit_is_refused_when_traced(function, change):
    """By a ValueError with the words of the other doors; jax.eval_shape runs nothing."""
    arguments = CALLS[function][1](**change)
    arrays = {n: x for n, x in arguments.items() if isinstance(x, jax.Array)}
    rest = {n: x for n, x in arguments.items() if n not in arrays}
    with pytest.raises(ValueError, match=rf"^{function}: ") as caught:
        jax.eval_shape(lambda arrays: CALLS[function][0](**arrays, **rest), arrays)
    assert str(caught.value) == eager_message(function, arguments)
    with pytest.raises(ValueError, match=re.escape(str(caught.value))):
        CALLS[function][0](**arguments)


@pytest.mark.parametrize("dtype", ["bool", "complex64", "uint16", "float8_e4m3b11fnuz", "int4"])
def test_other_dtypes_are_named(dtype):
    got = "bool8" if dtype == "bool" else dtype  # as DLPack has it
    with pytest.raises(ValueError, match=r"^paged_attention: block_table must be") as caught:
        paged_attention(**attention_call(block_table=jnp.zeros((2, 2), dtype)))
    assert str(caught.value).endswith(f", got {got}")


OPTIONS = [
    ("max_seqlen_q", 2.5, "int", "float"),
    ("max_seqlen_q", None, "int", "NoneType"),
    ("max_seqlen_k", "9", "int", "str"),
    ("softmax_scale", "1", "float", None),
    ("softmax_scale", [1.0], "float", "list"),
    ("causal", 1, "bool", "int"),
    ("window", (1.5, 0), "int", "float"),
    ("kv_dtype", 8, "str", "int"),
    ("layout", None, "str", "NoneType"),
    ("batch_invariant", None, "bool", "NoneType"),
    ("fp8_products", 1, "bool", "int"),
]


@pytest.mark.parametrize(("name", "value", "wanted", "got"), OPTIONS)
def test_options_of_another_type(name, value, wanted, got):
    if got is None:  # a string may be a number to Python: float("1")
        assert same_bits(
            paged_attention(**attention_call(**{name: value})),
            paged_attention(**attention_call(**{name: float(value)})),
        )
        return
    with pytest.raises(TypeError, match=f"^paged_attention: {name} must be {wanted}, got {got}$"):
        paged_attention(**attention_call(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_seqlen_q", 3), ("max_seqlen_k", 8), ("softmax_scale", 0.5), ("softcap", 1.0),
     ("causal", True), ("num_splits", 1)],
)  # fmt: skip
def test_traced_options_are_refused(name, value):
    rest = attention_call()
    rest.pop(name, None)
    with pytest.raises(TypeError, match=f"^paged_attention: {name} must be known when .*static"):
        jax.jit(lambda x: paged_attention(**rest, **{name: x}))(value)


@pytest.mark.parametrize(("function", "name"), [
    ("cache_write", "k"), ("cache_write", "slot_mapping"), ("paged_attention", "q"),
    ("paged_attention", "block_table"), ("paged_attention", "cu_seqlens_q"),
    ("merge_states", "lse_b"),
])  # fmt: skip
@pytest.mark.parametrize(("value", "got"), [(None, "None"), ([1, 2], "builtins.list")])
def test_what_is_no_array(function, name, value, got):
    with pytest.raises(TypeError, match=f"^{function}: {name} must be an array of .*, got {got}$"):
        CALLS[function][0](**CALLS[function][1](**{name: value}))


# Transformations


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("function", CALLS)
def test_vmap_is_refused(function, jitted):
    arguments = CALLS[function][1]()
    name = next(iter(arguments))
    call = partial(CALLS[function][0], **{n: x for n, x in arguments.items() if n != name})
    call = jax.jit(call) if jitted and function != "paged_attention" else call
    batched = jax.vmap(lambda x: call(**{name: x}))
    batched = jax.jit(batched) if jitted else batched
    with pytest.raises(NotImplementedError, match=rf"^pagetile\.jax\.{function} cannot be batched"):
        batched(arguments[name][None])


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("derive", [jax.grad, jax.jacfwd], ids=["grad", "jacfwd"])
@pytest.mark.parametrize("function", CALLS)
def test_derivatives_are_refused(function, derive, jitted):
    arguments = CALLS[function][1]()
    name = next(iter(arguments))
    call = partial(CALLS[function][0], **{n: x for n, x in arguments.items() if n != name})
    derived = derive(lambda x: jax.tree.leaves(call(**{name: x}))[0].sum())
    derived = jax.jit(derived) if jitted else derived
    with pytest.raises(NotImplementedError, match=rf"^pagetile\.jax\.{function} has no derivative"):
        derived(arguments[name])


def test_stop_gradient_lets_the_rest_be_derived():
    arguments = attention_call()
    q = arguments.pop("q")

    def loss(q):
        out = paged_attention(jax.lax.stop_gradient(q), **arguments)
        return (out.sum() * q.sum()).astype(jnp.float32)

    gradient = jax.jit(jax.grad(loss))(q)
    expected = paged_attention(q, **arguments).sum()
    np.testing.assert_allclose(gradient.astype(float), float(expected), rtol=1e-2)


# Errors of the run

RUN_ERRORS = (ValueError, jax.errors.JaxRuntimeError)  # JAX has two ways to run a call


def test_validation_by_environment(monkeypatch):
    """What only the run can tell comes back through XLA, with its words."""
    attend = jax.jit(partial(paged_attention, max_seqlen_q=3))
    arrays = {n: x for n, x in attention_call().items() if n != "max_seqlen_q"}
    wrong = {**arrays, "block_table": jnp.array([[3, 6], [1, 4]])}
    jax.block_until_ready(attend(**wrong))  # harmless: it reads as zeros
    monkeypatch.setenv("PAGETILE_VALIDATE", "1")
    words = "block_table must hold pages from 0 to 5, got 6 at page 1 of sequence 0"
    for _ in range(2):
        with pytest.raises(RUN_ERRORS, match=f"paged_attention: {words}"):
            jax.block_until_ready(attend(**wrong))
    jax.block_until_ready(attend(**arrays))


@pytest.mark.gpu
@pytest.mark.skipif(not gpus(), reason="JAX has no GPU")
def test_not_built_for_a_gpu():
    """float32 queries."""
    wide = {n: attention_call()[n].astype(jnp.float32) for n in ("q", "k_cache", "v_cache")}
    with (
        jax.default_device(gpus()[0]),
        pytest.raises((NotImplementedError, *RUN_ERRORS), match="paged_attention: not built for"),
    ):
        jax.block_until_ready(run_jitted("paged_attention", {**attention_call(), **wide}))


# Processes of their own


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, pagetile.jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((2, h, 16)).astype(np.float32) for h in (8, 2, 2))
caches = rng.standard_normal((2, 6, 4, 2, 16)).astype(np.float32)
metadata = dict(block_table=np.array([[3, 0], [1, 4]], np.int32),
                seqused_k=np.array([5, 8], np.int32), cu_seqlens_q=np.arange(3, dtype=np.int32))
slots = np.array([0, 19], np.int32)

def step(q, k, v, k_cache, v_cache, slots, metadata):
    k_cache, v_cache = pagetile.jax.cache_write(k, v, k_cache, v_cache, slots)
    return pagetile.jax.paged_attention(q, k_cache, v_cache, **metadata, max_seqlen_q=1), k_cache

mesh = Mesh(np.array(jax.devices()), ("heads",))
rows, pages = P(None, "heads"), P(None, None, "heads")
specs = (rows, rows, rows, pages, pages, P(), P())
args = (q, k, v, *caches, slots, metadata)
alone, alone_cache = jax.jit(step)(*args)
args = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, specs)]
sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(rows, pages)))
out, cache = sharded(*args)
assert len(out.sharding.device_set) == 2
np.testing.assert_array_equal(np.asarray(out), np.asarray(alone))
np.testing.assert_array_equal(np.asarray(cache), np.asarray(alone_cache))
"""


def test_heads_on_two_devices():
    done = python(SHARDED, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert done.returncode == 0, done.stderr[-3000:]


WIDE = """
import jax, jax.numpy as jnp, numpy as np, pagetile.jax
k = jnp.ones((2, 1, 8), jnp.float32)
cache = jnp.zeros((4, 4, 1, 8), jnp.float32)
slots = jnp.array([5, 2**40])
assert slots.dtype == jnp.int64
new, _ = jax.jit(pagetile.jax.cache_write)(k, k, cache, cache, slots)
assert new[1, 1].all() and new.sum() == 8
lengths = dict(seqused_k=jnp.array([2], jnp.int32), cu_seqlens_q=jnp.array([0, 1], jnp.int32))
pagetile.jax.paged_attention(k[:1], new, new, block_table=jnp.array([[1]], jnp.int32),
                             max_seqlen_q=1, softmax_scale=np.float32(0.5), **lengths)
try:
    pagetile.jax.paged_attention(k[:1], new, new, block_table=jnp.array([[1]]), max_seqlen_q=1,
                                 **lengths)
except ValueError as error:
    assert str(error) == "paged_attention: block_table must be int32, got int64"
else:
    raise AssertionError
"""


def test_with_64_bit_types():
    done = python(WIDE, JAX_ENABLE_X64="1")
    assert done.returncode == 0, done.stderr[-3000:]


def test_without_jax():
    done = python("import sys; sys.modules['jax'] = None; import pagetile.jax")
    assert "ImportError: pagetile.jax needs JAX >= 0.6" in done.stderr


# The module


def test_without_handlers(monkeypatch):
    """A build that found no headers says so when pagetile.jax is imported."""
    with monkeypatch.context() as patch:
        patch.setattr(_C, "xla_ffi_handlers", dict)
        with pytest.raises(ImportError, match=r"no handlers for XLA.*jaxlib.*XLA_FFI_ROOT"):
            importlib.reload(pagetile.jax)
    importlib.reload(pagetile.jax)  # registers the same handlers again, which XLA allows


def test_handlers():
    """Both platforms, always: without the CUDA part, those for CUDA say that it was not built."""
    names = {"cache_write", "paged_attention", "merge_states"}
    handlers = _C.xla_ffi_handlers()
    assert {platform: set(found) for platform, found in handlers.items()} == {
        "cpu": names,
        "CUDA": names,
    }
    assert all(
        type(x).__name__ == "PyCapsule" for found in handlers.values() for x in found.values()
    )


LEFT_OUT = {"stream", "pdl", "plan", "workspace", "validate", "softmax_lse"}


@pytest.mark.parametrize("function", CALLS)
def test_signatures_are_those_of_the_other_calls(function):
    """Names, kinds and defaults, without what has no place in a traced call."""

    def described(call, left_out=frozenset()):
        found = inspect.signature(call).parameters.values()
        return {p.name: (p.kind, p.default) for p in found if p.name not in left_out}

    left_out = LEFT_OUT | ({"out", "lse"} if function == "merge_states" else set())
    assert described(CALLS[function][0]) == described(getattr(pagetile, function), left_out)
    for parameter in inspect.signature(CALLS[function][0]).parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty
        assert re.search(rf"\b{parameter.name}\b", CALLS[function][0].__doc__)
