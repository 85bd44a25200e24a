"""Eight sequences decode over a paged KV cache; every step is checked against dense attention.

Run: python examples/quickstart.py   (needs pagetile, numpy and tqdm; no GPU)
"""

from __future__ import annotations

import sys

import numpy as np
import pagetile
from tqdm import tqdm

PROMPT_LENGTHS = (1, 7, 16, 17, 40, 63, 100, 129)  # one prompt a sequence, of uneven length
DECODE_STEPS = 32
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 64  # four query heads share a KV head
NUM_PAGES, PAGE_SIZE = 64, 16
TOLERANCE = 1e-5

Array = np.ndarray


def dense_attention(q: Array, k: Array, v: Array) -> Array:
    """Attend the plain way. q [Tq, Hq, D] ends the sequence, k and v [Tk, Hkv, D] are all of it."""
    repeats = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, repeats, axis=1), np.repeat(v, repeats, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k, dtype=np.float64) / np.sqrt(q.shape[2])
    position_q = np.arange(len(k) - len(q), len(k))
    scores[:, np.arange(len(k)) > position_q[:, None]] = -np.inf  # causal: no key from the future
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    out: Array = np.einsum("hqk,khd->qhd", weights, v)
    return out


def main() -> int:
    """Decode, compare, and return the exit code."""
    random = np.random.default_rng(0)

    def rows(num_tokens: int, num_heads: int) -> Array:
        """Stand in for the model's projections: [T, heads, D]."""
        return random.standard_normal((num_tokens, num_heads, HEAD_DIM), dtype=np.float32)

    # The cache: pages for all sequences. What stands in it before a write never matters: here, NaN.
    cache_shape = (NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    k_cache = np.full(cache_shape, np.nan, np.float32)
    v_cache = np.full(cache_shape, np.nan, np.float32)

    # The pool decides which page holds which tokens of which sequence.
    pool = pagetile.BlockPool(NUM_PAGES, PAGE_SIZE)
    sequences = [pool.allocate() for _ in PROMPT_LENGTHS]

    # For the check alone: each sequence's K and V in one piece.
    empty = np.empty((0, NUM_KV_HEADS, HEAD_DIM), np.float32)
    k_dense, v_dense = [empty] * len(sequences), [empty] * len(sequences)

    largest_error = 0.0
    for step_idx in tqdm(range(1 + DECODE_STEPS), desc="prefill, then decode", unit="step"):
        # 1. Room for the new tokens: the whole prompt in the first step, then one token a sequence.
        step = pool.append(sequences, PROMPT_LENGTHS if step_idx == 0 else 1)

        # 2. The new rows of all sequences, one after the other.
        q = rows(step.total_q, NUM_Q_HEADS)
        k, v = rows(step.total_q, NUM_KV_HEADS), rows(step.total_q, NUM_KV_HEADS)

        # 3. Write them into their pages and attend over the pages.
        pagetile.cache_write(k, v, k_cache, v_cache, step.slot_mapping)
        out = pagetile.paged_attention(
            q,
            k_cache,
            v_cache,
            block_table=step.block_table,
            seqused_k=step.seqused_k,
            cu_seqlens_q=step.cu_seqlens_q,
            max_seqlen_q=step.max_seqlen_q,
            max_seqlen_k=step.max_seqlen_k,
        )

        # 4. Compare with dense attention, sequence by sequence.
        for i in range(len(sequences)):
            new = slice(step.cu_seqlens_q[i], step.cu_seqlens_q[i + 1])
            k_dense[i] = np.concatenate([k_dense[i], k[new]])
            v_dense[i] = np.concatenate([v_dense[i], v[new]])
            expected = dense_attention(q[new], k_dense[i], v_dense[i])
            # np.maximum keeps a NaN, so that it fails below.
            largest_error = np.maximum(largest_error, np.abs(out[new] - expected).max())

    right = bool(largest_error <= TOLERANCE)
    tokens = sum(pool.length(sequence) for sequence in sequences)
    pages = pool.num_pages - pool.num_free_pages
    verdict = "OK" if right else "WRONG"
    print(
        f"{verdict}: {len(sequences)} sequences, {tokens} tokens on {pages} pages, "
        f"largest error {largest_error:.1e} (at most {TOLERANCE:.0e})"
    )
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
