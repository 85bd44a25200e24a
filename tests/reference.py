"""Reference of what pagetile promises: NumPy, one sequence, one head, one row at a time.

Numbers are decoded from their bits and rounded by the format's definition, never by a framework.
Caches are logical arrays [num_pages, page_size, num_kv_heads, head_dim]; where they lie in memory
is the caller's affair.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: its raw integer type, its precision, its range."""

    raw: type
    mantissa_bits: int
    min_exponent: int  # of the smallest normal number
    max_value: float


FORMATS = {
    "float32": Format(np.uint32, 23, -126, float(np.finfo(np.float32).max)),
    "float16": Format(np.uint16, 10, -14, 65504.0),
    "bfloat16": Format(np.uint16, 7, -126, (2 - 2.0**-7) * 2.0**127),
    "float8_e4m3fn": Format(np.uint8, 3, -6, 448.0),
    "float8_e5m2": Format(np.uint8, 2, -14, 57344.0),
}
FP8 = ("float8_e4m3fn", "float8_e5m2")


def is_fp8(name: str) -> bool:
    return name in FP8


# Rounding


def round_to(x, name: str) -> np.ndarray:
    """Nearest even in the format; beyond its range, infinity."""
    fmt = FORMATS[name]
    x = np.asarray(x, np.float64)
    _, exponent = np.frexp(x)  # x = fraction * 2^exponent, 0.5 <= fraction < 1
    quantum = np.ldexp(1.0, np.maximum(exponent - 1, fmt.min_exponent) - fmt.mantissa_bits)
    with np.errstate(invalid="ignore"):
        rounded = np.rint(x / quantum) * quantum
    rounded = np.where(np.abs(rounded) > fmt.max_value, np.copysign(np.inf, x), rounded)
    return np.where(np.isfinite(x), rounded, x)


def fp8_table(name: str) -> np.ndarray:
    """The 256 values of a format, from sign, exponent and mantissa."""
    fmt = FORMATS[name]
    mantissa_bits, bias = fmt.mantissa_bits, 1 - fmt.min_exponent
    exponent_mask = (1 << (7 - mantissa_bits)) - 1
    values = np.empty(256, np.float64)
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent = (code >> mantissa_bits) & exponent_mask
        mantissa = code & ((1 << mantissa_bits) - 1)
        if name == "float8_e4m3fn" and code & 0x7F == 0x7F:
            magnitude = np.nan  # e4m3fn has one NaN for each sign and no infinity
        elif name == "float8_e5m2" and exponent == exponent_mask:
            magnitude = np.nan if mantissa else np.inf
        elif exponent == 0:
            magnitude = mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            magnitude = (1 + mantissa * 2.0**-mantissa_bits) * 2.0 ** (exponent - bias)
        values[code] = sign * magnitude
    return values


FP8_TABLES = {name: fp8_table(name) for name in FP8}


def fp8_encode(x, name: str) -> np.ndarray:
    """Codes of the nearest values; ties to the even code, saturating, any NaN to 0x7F."""
    x = np.asarray(x, np.float64)
    table = FP8_TABLES[name][:0x80]
    positive = table[np.isfinite(table)]  # ascending, so that an index is a code
    midpoints = (positive[1:] + positive[:-1]) / 2
    magnitude = np.minimum(np.abs(np.where(np.isnan(x), 0, x)), positive[-1])
    code = np.searchsorted(midpoints, magnitude, side="left")  # at a tie: the lower neighbour
    tie = (code < midpoints.size) & (midpoints[np.minimum(code, midpoints.size - 1)] == magnitude)
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    code = np.where(np.isnan(x), 0x7F, code | np.where(np.signbit(x), 0x80, 0))
    return code.astype(np.uint8)


def decode(raw: np.ndarray, name: str) -> np.ndarray:
    """float64 values of raw bits."""
    raw = np.ascontiguousarray(raw)
    if is_fp8(name):
        return FP8_TABLES[name][raw]
    if name == "bfloat16":
        raw, name = raw.astype(np.uint32) << 16, "float32"
    with np.errstate(invalid="ignore"):  # of signalling NaN
        return raw.view({"float32": np.float32, "float16": np.float16}[name]).astype(np.float64)


def encode(x, name: str) -> np.ndarray:
    """Raw bits of the nearest values."""
    if is_fp8(name):
        return fp8_encode(x, name)
    rounded = round_to(x, name)
    if name == "float16":
        return rounded.astype(np.float16).view(np.uint16)
    bits = rounded.astype(np.float32).view(np.uint32)
    return (bits >> 16).astype(np.uint16) if name == "bfloat16" else bits


# Cache writes


def cache_write(cache, rows, slots, *, dtype: str, cache_dtype: str, scale=None) -> None:
    """Writes raw rows [T, Hkv, D] into the raw logical cache of `cache_dtype`, in place."""
    num_pages, page_size, num_kv_heads, _ = cache.shape
    for token, slot in enumerate(slots):
        if not 0 <= slot < num_pages * page_size:
            continue
        row = rows[token]
        if is_fp8(cache_dtype):
            row = fp8_encode(quantised_input(row, dtype, scale, num_kv_heads), cache_dtype)
        cache[slot // page_size, slot % page_size] = row


def quantised_input(row, dtype: str, scale, num_kv_heads: int) -> np.ndarray:
    """x / scale, both in fp32, rounded to fp32: what the fp8 rounding starts from."""
    scale = np.float32(1) if scale is None else np.asarray(scale, np.float32)
    scale = np.broadcast_to(scale.reshape(-1), (num_kv_heads,))[:, None]
    with np.errstate(all="ignore"):
        return decode(row, dtype).astype(np.float32) / scale


# Attention


def gather(cache, page_ids, length: int) -> np.ndarray:
    """The first `length` rows of a sequence; a page outside the cache reads as zeros."""
    num_pages, page_size = cache.shape[:2]
    rows = np.zeros((length, *cache.shape[2:]))
    for j in range(length):
        page = int(page_ids[j // page_size])
        if 0 <= page < num_pages:
            rows[j] = cache[page, j % page_size]
    return rows


def visible_keys(row, q_len, kv_len, causal, window) -> np.ndarray:
    """Which keys a query row sees: bottom-right aligned, the window inclusive, -1 unlimited."""
    left, right = window
    keys = np.arange(kv_len)
    diagonal = row + kv_len - q_len
    visible = np.ones(kv_len, bool)
    if causal:
        visible &= keys <= diagonal
    if left >= 0:
        visible &= keys >= diagonal - left
    if right >= 0:
        visible &= keys <= diagonal + right
    return visible


def attention(
    q,
    k_cache,
    v_cache,
    *,
    block_table,
    seqused_k,
    cu_seqlens_q,
    softmax_scale=None,
    causal=True,
    window=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    key_range=None,
    round_dtype=None,
):
    """Returns (out [total_q, Hq, Dv], lse [Hq, total_q]) in float64; rows of no sequence are NaN.

    q [total_q, Hq, D] and the caches are float64, scales already multiplied in; alibi_slopes is
    [B, Hq].
    With key_range (begin, end), only those keys are seen: one of the parts that merge to the whole.
    With round_dtype, the tensors, the probabilities and out are rounded to that dtype, and scores
    are summed in fp32.
    """
    rounded = (lambda x: round_to(x, round_dtype)) if round_dtype else (lambda x: x)
    accumulator = np.float32 if round_dtype else np.float64
    total_q, num_q_heads, head_dim = q.shape
    group = num_q_heads // k_cache.shape[2]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    out = np.full((total_q, num_q_heads, v_cache.shape[3]), np.nan)
    lse = np.full((num_q_heads, total_q), np.nan)
    for b, kv_len in enumerate(map(int, seqused_k)):
        begin, end = int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1])
        if begin == end:
            continue
        keys = rounded(gather(k_cache, block_table[b], kv_len))
        values = rounded(gather(v_cache, block_table[b], kv_len))
        for head in range(num_q_heads):
            k, v = keys[:, head // group], values[:, head // group]
            slope = 0.0 if alibi_slopes is None else alibi_slopes[b][head]
            sink = -np.inf if sinks is None else sinks[head]
            for row in range(end - begin):
                seen = visible_keys(row, end - begin, kv_len, causal, window)
                if key_range is not None:
                    in_range = np.zeros(kv_len, bool)
                    in_range[slice(*key_range)] = True
                    seen &= in_range
                query = rounded(q[begin + row, head]).astype(accumulator)
                score = (k[seen].astype(accumulator) @ query).astype(np.float64) * scale
                if softcap > 0:
                    score = softcap * np.tanh(score / softcap)
                distance = np.abs(row + kv_len - (end - begin) - np.arange(kv_len)[seen])
                score = score - slope * distance
                row_out, row_lse = softmax_row(score, v[seen], sink, rounded)
                out[begin + row, head] = rounded(row_out)
                lse[head, begin + row] = row_lse
    return out, lse


# Kernels keep a row's maximum until it has grown by much, so no weight is exact, not even the
# largest: this one lies between two numbers of 16 bits, of either type.
LARGEST_WEIGHT = 1 + 2**-8 + 2**-11


def softmax_row(score, v, sink, rounded):
    """One row: probabilities times values, and the log of the denominator, sink included."""
    top = max([sink, *score])
    if top == -np.inf:
        return np.zeros(v.shape[1]), -np.inf
    p = np.exp(score - top)
    total = p.sum() + np.exp(sink - top)
    return rounded(p * LARGEST_WEIGHT) @ v / (total * LARGEST_WEIGHT), top + np.log(total)


# Merge


def merge(out_a, lse_a, out_b, lse_b):
    """Exact union of two partial attentions: out [T, H, D], lse [H, T]; +inf counts as empty."""
    out = np.zeros(out_a.shape)
    lse = np.full(lse_a.shape, -np.inf)
    for token in range(out.shape[0]):
        for head in range(out.shape[1]):
            sides = ((lse_a, out_a), (lse_b, out_b))
            parts = [(lse_x[head, token], out_x[token, head]) for lse_x, out_x in sides]
            parts = [(weight, row) for weight, row in parts if np.isfinite(weight)]
            if not parts:
                continue
            top = max(weight for weight, _ in parts)
            total = sum(np.exp(weight - top) for weight, _ in parts)
            out[token, head] = sum(np.exp(weight - top) * row for weight, row in parts) / total
            lse[head, token] = top + np.log(total)
    return out, lse


# The tolerance rule


def assert_close(actual, expected, low_precision, what="out", floor=1e-5) -> None:
    """max|actual - expected| <= 2 * max|low_precision - expected| + 1e-5, with equal infinities."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}"
    assert not np.isnan(actual).any(), f"{what}: {np.isnan(actual).sum()} NaN of {actual.size}"
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite], err_msg=what)
    if not finite.any():
        return
    error = np.abs(actual[finite] - expected[finite])
    bound = 2 * np.abs(np.asarray(low_precision)[finite] - expected[finite]).max() + floor
    assert error.max() <= bound, f"{what}: error {error.max():.3g} above {bound:.3g}"
