"""JAX calls: pagetile under `jax.jit`, on CPU and CUDA, as custom calls of XLA.

The arguments mean what they mean in `pagetile.cache_write`, `pagetile.paged_attention` and
`pagetile.merge_states`, and have the same defaults. What differs: JAX arrays never change, so
`cache_write` returns the caches it has written, in the memory of those it was given where these are
donated; options are Python values, known when the call is traced; there is no ``stream``, which is
XLA's own, no ``plan`` and ``workspace``, no ``pdl``, since XLA decides which kernel comes before,
and no ``validate``, which PAGETILE_VALIDATE=1 sets.

What shapes, dtypes and options alone can tell raises when the call is traced, as in the other
calls. What only the run can tell comes back from XLA as a `jax.errors.JaxRuntimeError`. There are
no derivatives and no batching rule: `jax.grad` and `jax.vmap` are refused.

It needs JAX >= 0.6 and a build of pagetile that has found XLA's FFI headers, and links nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

try:
    import jax
    import jax.numpy as jnp
    from jax.custom_batching import custom_vmap
    from jax.ffi import ffi_call, register_ffi_target
except ImportError as error:
    raise ImportError(f"pagetile.jax needs JAX >= 0.6: {error}") from error

from pagetile import _C
from pagetile.attention import window_sides

__all__ = ["cache_write", "merge_states", "paged_attention"]

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")

_untyped: Any = jax  # what has no types in JAX

# A NumPy array will do, too: JAX makes an array of its own from it.
Array = jax.Array | np.ndarray[Any, Any]


def _register() -> None:
    platforms = _C.xla_ffi_handlers()
    if not platforms:
        raise ImportError(
            "pagetile.jax: this build of pagetile has no handlers for XLA, because it found no "
            "headers of XLA's FFI. They come with jaxlib: build pagetile again without "
            "PAGETILE_JAX=OFF, or with XLA_FFI_ROOT set to what jax.ffi.include_dir() returns"
        )
    for platform, handlers in platforms.items():
        for function, handler in handlers.items():
            register_ffi_target(f"pagetile_{function}", handler, platform=platform)


_register()


def cache_write(
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    slot_mapping: Array,
    *,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    kv_dtype: str = "auto",
    layout: str = "NHD",
) -> tuple[jax.Array, jax.Array]:
    """Return the caches with T rows of keys and values in their slots.

    T tokens, Hkv KV heads, head dimension D (of V: Dv, which may differ), P pages of S tokens.

    XLA writes in place where it may: in a jitted function whose caches are donated, or made in it.
    Else it copies both caches first. What was donated is gone: go on with the caches returned, also
    because a write whose result nobody uses is not made.

    Args:
        k: [T or more, Hkv, D], float32, float16 or bfloat16. Rows past T are ignored.
        v: [T or more, Hkv, Dv], k's dtype.
        k_cache: [P, S, Hkv, D] ("NHD") or [P, Hkv, S, D] ("HND"); k's dtype, or float8_e4m3fn,
            float8_e5m2, or uint8 with ``kv_dtype``.
        v_cache: likewise with Dv, k_cache's dtype.
        slot_mapping: [T], int32 or int64: page * S + offset. A slot below 0 or at P * S and above
            is skipped. A slot that comes twice is a race.
        k_scale: float32, 1 or Hkv elements, only for fp8 caches: stored = saturate(k / k_scale),
            rounded to the nearest, ties to even; infinities saturate, NaN stays NaN. None is 1.
        v_scale: likewise for v.
        kv_dtype: "auto" (the caches' own dtype), "fp8" or "fp8_e4m3", "fp8_e5m2", "float16",
            "bfloat16", "float32".
        layout: "NHD", "HND", or "legacy": the layout of vLLM's first kernels, k_cache
            [P, Hkv, D / x, S, x] and v_cache [P, Hkv, Dv, S].

    Returns:
        (k_cache, v_cache), of the same shapes and dtypes.

    Raises:
        ValueError: a shape, dtype or option does not fit; nothing runs.
        TypeError: an argument is no array, or an option is traced.
        NotImplementedError: under `jax.vmap` or `jax.grad`.
        jax.errors.JaxRuntimeError: no kernel is built for the device; the message lists what is.

    Example:
        8 pages of 16 tokens, 4 heads of 64; two tokens go to page 1, the third is skipped:

        >>> import jax, jax.numpy as jnp, pagetile.jax
        >>> write = jax.jit(pagetile.jax.cache_write, donate_argnames=("k_cache", "v_cache"))
        >>> k_cache, v_cache = jnp.zeros((2, 8, 16, 4, 64))
        >>> k, v = jnp.ones((2, 3, 4, 64))
        >>> slots = jnp.array([16, 17, -1])
        >>> k_cache, v_cache = write(k, v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slots)
    """
    function = "cache_write"
    arrays = _arrays(
        function, k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping
    )
    scales = _arrays(function, optional=True, k_scale=k_scale, v_scale=v_scale)
    kv_dtype = _option(function, "kv_dtype", str, kv_dtype)
    layout = _option(function, "layout", str, layout)
    written: tuple[jax.Array, jax.Array] = _cache_write(arrays + scales, kv_dtype, layout)
    return written


def paged_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    block_table: Array,
    seqused_k: Array,
    cu_seqlens_q: Array,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    q_scale: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    kv_dtype: str = "auto",
    layout: str = "NHD",
    num_splits: int = 0,
    batch_invariant: bool = False,
    fp8_products: bool = False,
    out: Array | None = None,
    return_softmax_lse: bool = False,
) -> Any:
    """Attend from a packed batch of queries to the pages of each sequence, without gathering them.

    B sequences with T query tokens in all, Hq query and Hkv KV heads (Hq % Hkv == 0), head
    dimensions D of q and k and Dv of v (multiples of 8 up to 256), P pages of S tokens. Accumulates
    in float32.

    Args:
        q: [T, Hq, D], float32 (CPU), float16, bfloat16, or fp8 with ``q_scale``.
        k_cache: [P, S, Hkv, D] ("NHD") or [P, Hkv, S, D] ("HND"); q's dtype, float8_e4m3fn,
            float8_e5m2, or uint8 with ``kv_dtype``.
        v_cache: likewise with Dv; k_cache's dtype.
        block_table: int32 [B, max_pages]: physical page of each logical page. Entries past a
            sequence's last page are never read. A page outside [0, P) reads as zeros.
        seqused_k: int32 [B], KV tokens of each sequence, new ones included; clamped to [0,
            max_pages * S].
        cu_seqlens_q: int32 [B + 1], offsets of the sequences in q.
        max_seqlen_q: longest query of the batch, or a bound.
        max_seqlen_k: longest sequence, or a bound; None is unknown. A bound that holds for all
            steps spares a compilation each.
        softmax_scale: None is D ** -0.5.
        causal: aligned bottom-right: query i of a sequence sees key j iff j <= i + seqused_k -
            q_len.
        window: (left, right) tokens around that diagonal, inclusive; -1 is unlimited.
        softcap: score = softcap * tanh(score / softcap), before bias and mask; 0 is off.
        alibi_slopes: float32 [Hq] or [B, Hq]: adds
            ``-slope * |i + seqused_k - q_len - j|``.
        sinks: float32, float16 or bfloat16 [Hq]: a logit that joins the softmax's denominator,
            unscaled.
        q_scale: float32, 1, [Hkv] or [B, Hkv] elements, only for an fp8 q: q * q_scale is what it
            stands for.
        k_scale: likewise, only for fp8 caches.
        v_scale: likewise, only for fp8 caches.
        kv_dtype: "auto" (the caches' own dtype), "fp8" or "fp8_e4m3", "fp8_e5m2", "float16",
            "bfloat16", "float32".
        layout: "NHD", "HND", or "legacy": the layout of vLLM's first kernels, k_cache
            [P, Hkv, D / x, S, x] and v_cache [P, Hkv, Dv, S].
        num_splits: cuts of each sequence that run in parallel: 0 chooses, 1 is off, n is at most n.
        batch_invariant: a sequence's bits depend on nothing but the sequence: not on the batch,
            splits or query chunks.
        fp8_products: allow products of e4m3 with e4m3, for a float8_e4m3fn q over such caches: q, k
            and v as they are, the softmax's weights rounded to e4m3. Less precise. One kernel does
            it: on compute capability 9.0, for long queries with head_dim 72 to 128, without softcap
            and ALiBi. Everything else is multiplied as without it.
        out: [T, Hq, Dv], q's dtype (fp8 q: any 16- or 32-bit float): the result takes its memory
            where it may, and keeps its rows that no sequence covers. None is zeros of q's dtype
            (fp8 q: bfloat16).
        return_softmax_lse: also return softmax_lse.

    Returns:
        out, or (out, softmax_lse) with ``return_softmax_lse``. softmax_lse is float32 [Hq, T],
        natural logarithm, sink included. A row that sees no key, or belongs to no sequence, has out
        0 and lse -inf (one that sees no key, with sinks: the sink's logit).

    Raises:
        ValueError: a shape, dtype or option does not fit; nothing runs.
        TypeError: an argument is no array, or an option is traced.
        NotImplementedError: under `jax.vmap` or `jax.grad`.
        jax.errors.JaxRuntimeError: no kernel is built for the device; the message lists what is.
            With PAGETILE_VALIDATE=1 in the environment: metadata is out of range.

    Example:
        8 pages of 16 tokens, 4 KV heads of 64; one new token with 8 query heads, 20 tokens on pages
        5 and 2:

        >>> import functools, jax, jax.numpy as jnp, pagetile.jax
        >>> attend = jax.jit(functools.partial(pagetile.jax.paged_attention, max_seqlen_q=1))
        >>> k_cache, v_cache = jax.random.normal(jax.random.key(0), (2, 8, 16, 4, 64))
        >>> out = attend(
        ...     jnp.ones((1, 8, 64)), k_cache, v_cache, block_table=jnp.array([[5, 2]]),
        ...     seqused_k=jnp.array([20]), cu_seqlens_q=jnp.array([0, 1]))
    """
    function = "paged_attention"
    option = partial(_option, function)
    window_left, window_right = window_sides(function, window)
    arrays = _arrays(
        function,
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        seqused_k=seqused_k,
        cu_seqlens_q=cu_seqlens_q,
    )
    optional = _arrays(
        function,
        optional=True,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        out=out,
    )
    if softmax_scale is None:  # of a q without columns, the check of the call says so
        softmax_scale = max([1, *np.shape(arrays[0])[-1:]]) ** -0.5
    options = _AttentionOptions(
        max_seqlen_q=option("max_seqlen_q", int, max_seqlen_q),
        max_seqlen_k=0 if max_seqlen_k is None else option("max_seqlen_k", int, max_seqlen_k),
        softmax_scale=option("softmax_scale", float, softmax_scale),
        causal=option("causal", bool, causal),
        window_left=option("window", int, window_left),
        window_right=option("window", int, window_right),
        softcap=option("softcap", float, softcap),
        kv_dtype=option("kv_dtype", str, kv_dtype),
        layout=option("layout", str, layout),
        num_splits=option("num_splits", int, num_splits),
        batch_invariant=option("batch_invariant", bool, batch_invariant),
        fp8_products=option("fp8_products", bool, fp8_products),
    )
    returns_lse = option("return_softmax_lse", bool, return_softmax_lse)
    results = _paged_attention(arrays + optional, options, returns_lse)
    return results if returns_lse else results[0]


def merge_states(
    out_a: Array, lse_a: Array, out_b: Array, lse_b: Array
) -> tuple[jax.Array, jax.Array]:
    """Merge two attentions of the same queries over disjoint sets of keys, exactly.

    T query tokens, Hq heads, head dimension Dv.

    Args:
        out_a: [T, Hq, Dv], float32, float16 or bfloat16.
        lse_a: float32 [Hq, T], natural logarithm. Either infinity says that this side saw no key;
            its values in out_a are then ignored.
        out_b: likewise, out_a's dtype.
        lse_b: likewise.

    Returns:
        (out, lse). Where both sides saw no key, out is 0 and lse -inf.

    Raises:
        ValueError: a shape or dtype does not fit; nothing runs.
        TypeError: an argument is no array.
        NotImplementedError: under `jax.vmap` or `jax.grad`.
        jax.errors.JaxRuntimeError: no kernel is built for the device; the message lists what is.
    """
    arrays = _arrays("merge_states", out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    merged: tuple[jax.Array, jax.Array] = _merge_states(arrays)
    return merged


# Arguments


def _arrays(function: str, optional: bool = False, **arrays: Any) -> tuple[Any, ...]:
    """Return the arrays in their order, or say which of them is none."""
    for name, array in arrays.items():
        if array is None and optional:
            continue
        if not (hasattr(array, "shape") and hasattr(array, "dtype")):
            kind = type(array)
            got = "None" if array is None else f"{kind.__module__}.{kind.__qualname__}"
            raise TypeError(f"{function}: {name} must be an array of JAX or NumPy, got {got}")
    return tuple(arrays.values())


def _option(function: str, name: str, wanted: type[Any], value: Any) -> Any:
    """Return an option as a Python value, or say why it is none."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{function}: {name} must be known when the call is traced, got a traced value: make "
            "it a static argument of jax.jit, or give a bound that always holds"
        )
    try:
        if wanted is float:
            return float(value)
        if wanted is int:
            value = operator.index(value)
            if not -(2**63) <= value < 2**63:
                raise ValueError(f"{function}: {name} must be a 64-bit int, got {value}")
    except TypeError:
        pass
    if not isinstance(value, wanted):
        kind = type(value)
        got = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        raise TypeError(f"{function}: {name} must be {wanted.__name__}, got {got}")
    return value


class _AttentionOptions(NamedTuple):
    """Attributes of a call, which XLA compiles in."""

    max_seqlen_q: int
    max_seqlen_k: int  # 0 is unknown
    softmax_scale: float
    causal: bool
    window_left: int
    window_right: int
    softcap: float
    kv_dtype: str
    layout: str
    num_splits: int
    batch_invariant: bool
    fp8_products: bool


# Calls, compiled also where the caller does not, so that an eager call is traced once. Their
# operands are None where they are not given, in the order of cpp/bindings/operands.h.


@partial(jax.jit, static_argnums=(1, 2), inline=True)
def _cache_write(operands: tuple[Any, ...], kv_dtype: str, layout: str) -> Any:
    _C.check_cache_write(_described(operands), kv_dtype, layout)
    aliases = {2: 0, 3: 1}  # k_cache, v_cache
    return _call("cache_write", operands, aliases, kv_dtype=kv_dtype, layout=layout)


@partial(jax.jit, static_argnums=(1, 2), inline=True)
def _paged_attention(
    operands: tuple[Any, ...], options: _AttentionOptions, returns_lse: bool
) -> Any:
    q, v_cache, out = operands[0], operands[2], operands[-1]
    if out is None:
        head_dim_v = v_cache.shape[2 if options.layout == "legacy" else -1] if v_cache.ndim else 0
        dtype = jnp.bfloat16 if q.dtype.name in _FLOAT8 else q.dtype
        out = jnp.zeros((*q.shape[:2], head_dim_v), dtype)
    lse = jnp.full(q.shape[1::-1], -jnp.inf, jnp.float32) if returns_lse else None
    operands = (*operands[:-1], out, lse)
    _C.check_paged_attention(
        _described(operands), *(x for name, x in options._asdict().items() if name not in _FREE)
    )
    aliases = {11: 0, 12: 1} if returns_lse else {11: 0}  # out, softmax_lse
    return _call("paged_attention", operands, aliases, **options._asdict())


_FREE = ("causal", "batch_invariant")  # options that fit whatever they are


@partial(jax.jit, inline=True)
def _merge_states(operands: tuple[Any, ...]) -> Any:
    out_a, lse_a, _, _ = operands
    _C.check_merge_states(_described((*operands, out_a, lse_a)))
    return _call("merge_states", operands, {}, results=(out_a, lse_a))


def _described(operands: Sequence[Any]) -> list[tuple[str, tuple[int, ...]] | None]:
    return [None if x is None else (x.dtype.name, x.shape) for x in operands]


def _call(
    function: str,
    operands: Sequence[Any],
    aliases: dict[int, int],
    results: Sequence[Any] = (),
    **attributes: Any,
) -> Any:
    """Call a handler. Results are like ``results``, or like the operands that they alias."""
    given = [place for place, operand in enumerate(operands) if operand is not None]
    if aliases:
        results = [operands[place] for place in aliases]
        attributes["given"] = sum(1 << place for place in given)
    call = ffi_call(
        f"pagetile_{function}",
        tuple(_untyped.ShapeDtypeStruct(x.shape, x.dtype) for x in results),
        input_output_aliases={given.index(place): result for place, result in aliases.items()},
    )
    attributes = {name: _sized(value) for name, value in attributes.items()}
    return _without_rules(function, partial(call, **attributes))(*(operands[i] for i in given))


def _sized(value: Any) -> Any:
    """Return a number of the 64 bits that the handlers expect, whatever jax_enable_x64 says."""
    if isinstance(value, bool | str):
        return value
    return np.int64(value) if isinstance(value, int) else np.float64(value)


def _without_rules(function: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Say why where JAX asks for a batching rule or a derivative: XLA's own words mislead."""
    unbatched = custom_vmap(call)

    @unbatched.def_vmap
    def refuse_to_batch(axis_size: int, in_batched: Any, *operands: Any) -> Any:
        raise NotImplementedError(
            f"pagetile.jax.{function} cannot be batched by jax.vmap: pack the sequences of a batch "
            "into one call (cu_seqlens_q, block_table), and loop over what has caches of its own"
        )

    underived = jax.custom_jvp(unbatched)

    @underived.defjvp
    def refuse_to_derive(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            f"pagetile.jax.{function} has no derivatives: give it what jax.grad must not see as "
            "jax.lax.stop_gradient(x)"
        )

    return underived
