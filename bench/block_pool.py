"""Host time of BlockPool.append, as an engine calls it from Python: a line a case.

Usage: python bench/block_pool.py [--sequences 10000] [--steps 200]

The bar is 5 ms for a step of 10,000 sequences.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable

import numpy as np
import pagetile

PAGE_SIZE = 16
MAX_LENGTH = 4096


class Batch:
    """A pool and a batch of sequences in it, prefilled."""

    def __init__(self, sequences: int, steps: int) -> None:
        self.random = np.random.default_rng(0)
        lengths = self.random.integers(1, MAX_LENGTH + 1, sequences)
        pages = sequences * (-(-(MAX_LENGTH + 8 * steps) // PAGE_SIZE) + 1)
        self.pool = pagetile.BlockPool(pages, PAGE_SIZE)
        self.ids = [self.pool.allocate() for _ in range(sequences)]
        self.counts: int | np.ndarray = 1
        self.pool.append(self.ids, lengths)


def same_batch(batch: Batch) -> None:
    """The batch of the last step, one new token each; ids in a list."""


def ids_in_array(batch: Batch) -> None:
    """The same, ids in an int64 array."""
    batch.ids = np.array(batch.ids)


def eight_tokens(batch: Batch) -> None:
    """The same, eight new tokens each."""
    batch.counts = 8


def one_replaced(batch: Batch) -> None:
    """A sequence has ended, a new one of 512 tokens takes its row."""
    row = int(batch.random.integers(len(batch.ids)))
    batch.pool.free(batch.ids[row])
    batch.ids[row] = batch.pool.allocate()
    batch.counts = np.ones(len(batch.ids), np.int64)
    batch.counts[row] = 512


def half_forked(batch: Batch) -> None:
    """Every second sequence is a new fork of its neighbour: copy-on-write for half the batch."""
    for i in range(1, len(batch.ids), 2):
        batch.pool.free(batch.ids[i])
        batch.ids[i] = batch.pool.fork(batch.ids[i - 1])


def rows_shifted(batch: Batch) -> None:
    """The first sequence goes to the end of the batch: every row of the table is new."""
    batch.ids.append(batch.ids.pop(0))


CASES = (same_batch, ids_in_array, eight_tokens, one_replaced, half_forked, rows_shifted)


def measure(prepare: Callable[[Batch], None], sequences: int, steps: int) -> np.ndarray:
    """Return the milliseconds of append in each step."""
    batch = Batch(sequences, steps)
    times = []
    for _ in range(steps):
        prepare(batch)
        start = time.perf_counter()
        batch.pool.append(batch.ids, batch.counts)
        times.append(1e3 * (time.perf_counter() - start))
    return np.array(times)


def fork_and_free(sequences: int) -> float:
    """Return the milliseconds of one fork and the free of that fork: O(pages)."""
    batch = Batch(sequences, 0)
    start = time.perf_counter()
    for sequence in batch.ids:
        batch.pool.free(batch.pool.fork(sequence))
    return 1e3 * (time.perf_counter() - start) / len(batch.ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    sequences, steps = arguments.sequences, arguments.steps

    print(f"# Python {platform.python_version()}, NumPy {np.__version__}, {platform.machine()}")
    print(
        f"# {sequences} sequences of 1..{MAX_LENGTH} tokens, page_size {PAGE_SIZE}, {steps} steps"
    )
    print("# the worst step is the one in which the block table grows, or the machine's noise")
    print(f"{'case':<16} {'median ms':>10} {'IQR ms':>8} {'worst ms':>9}")
    for case in CASES:
        times = measure(case, sequences, steps)
        low, median, high = np.percentile(times, [25, 50, 75])
        print(f"{case.__name__:<16} {median:>10.4f} {high - low:>8.4f} {times.max():>9.4f}")
    print(f"{'fork_and_free':<16} {fork_and_free(sequences):>10.4f} (one sequence)")


if __name__ == "__main__":
    main()
