"""Host bookkeeping of a paged KV cache: sequences, their pages, and the metadata of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagetile import _C
from pagetile._C import OutOfPagesError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["BlockPool", "OutOfPagesError", "Step"]

OutOfPagesError.__module__ = "pagetile"  # the name under which callers know it


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What one step gives to ``cache_write`` and ``paged_attention``: B sequences, T new tokens.

    The arrays are writable NumPy arrays in host memory; one conversion each puts them on a device
    (``torch.from_numpy(step.seqused_k).to(device)``). All but ``block_table`` are the caller's own.
    ``block_table`` is a view of the pool's table, so that a step writes only the rows that changed:
    the next ``append`` may rewrite it. Copy it if it must live longer; its memory stays valid.
    """

    slot_mapping: npt.NDArray[np.int64]
    """[T], page * page_size + offset of each new token, in the order of the batch."""
    block_table: npt.NDArray[np.int32]
    """[B, max_pages], strides (row stride, 1): a sequence's pages in order, 0 past its last page.
    max_pages is that of the longest sequence, at least 1."""
    seqused_k: npt.NDArray[np.int32]
    """[B], length of each sequence, new tokens included."""
    cu_seqlens_q: npt.NDArray[np.int32]
    """[B+1], offsets of the sequences' new tokens in the packed batch."""
    copy_src: npt.NDArray[np.int32]
    """[n], pages to copy before this step's cache_write: ``cache[copy_dst] = cache[copy_src]`` for
    each layer's K and V. n is 0 unless a forked sequence gets its first new token."""
    copy_dst: npt.NDArray[np.int32]
    """[n], where they go. No page is in both, none is here twice: one indexed copy does it."""
    total_q: int
    """T."""
    max_seqlen_q: int
    """The most new tokens of a sequence."""
    max_seqlen_k: int
    """The longest sequence, new tokens included."""


class BlockPool:
    """The pages of a KV cache and the sequences on them.

    The pool counts; it never sees the cache. A sequence is an int id that is used once: after
    ``free`` the id is refused for ever. Forked sequences share pages. Pages are reused last in,
    first out. A call that raises has changed nothing. Not thread-safe.

    Example::

        pool = pagetile.BlockPool(num_pages=1024, page_size=16)
        a, b = pool.allocate(), pool.allocate()
        step = pool.append([a, b], [17, 5])          # prefill
        pagetile.cache_write(k, v, k_cache, v_cache, step.slot_mapping)
        step = pool.append([a, b], 1)                # decode: one token each
        c = pool.fork(a)                             # same tokens, same pages
        pool.free(a)

    Args:
        num_pages: P, pages of the cache, 1 .. 2**31 - 1. The pool's memory grows with their use.
        page_size: S, tokens a page holds, 1 .. 2**31 - 1.

    Raises:
        ValueError: a size is out of range.
        TypeError: a size is not an int.
    """

    __slots__ = ("_pool",)

    def __init__(self, num_pages: int, page_size: int) -> None:
        """Make a pool in which every page is free."""
        self._pool = _C.BlockPool(num_pages, page_size)

    def allocate(self) -> int:
        """Start an empty sequence and return its id. It takes a page when it gets a token."""
        return self._pool.allocate()

    def fork(self, sequence: int) -> int:
        """Start a sequence with the tokens of ``sequence``, on the same pages; return its id.

        No page is taken or copied. The first of the owners to append to a shared, partly filled
        last page gets its own copy of it (``Step.copy_src``); full pages stay shared.

        Raises:
            ValueError: ``sequence`` is not live.
        """
        return self._pool.fork(sequence)

    def free(self, sequence: int) -> None:
        """End a sequence. Its pages return to the pool, save those that a fork still holds.

        Raises:
            ValueError: ``sequence`` is not live.
        """
        self._pool.free(sequence)

    def append(
        self,
        sequences: Iterable[int] | npt.NDArray[np.int64],
        num_tokens: int | Iterable[int] | npt.NDArray[np.int64],
    ) -> Step:
        """Make room for new tokens and return the step's metadata. One call a step.

        The cost is O(T + B), and O(pages) for each row of the block table that does not hold the
        sequence it held in the last step. So keep sequences at their rows: when one ends, put the
        last of the batch in its place. The table doubles when it is too small; that step writes
        every row.

        Args:
            sequences: [B] ids, each at most once; a list, or an int64 array.
            num_tokens: [B] new tokens of each sequence, or one int for all. 0 is allowed: the
                sequence is then in the batch without a query.

        Raises:
            OutOfPagesError: the step needs more pages than are free, copies included.
            ValueError: an id is not live or comes twice, a count is negative, the lengths differ,
                or a sequence or the step would pass 2**31 - 1 tokens.
            TypeError: an id or a count is not an int.
        """
        return Step(*self._pool.append(sequences, num_tokens))

    def length(self, sequence: int) -> int:
        """Return the tokens of a sequence. Raises ValueError if it is not live."""
        return self._pool.length(sequence)

    def pages(self, sequence: int) -> npt.NDArray[np.int32]:
        """Return the pages of a sequence, in order: int32 [ceil(length / page_size)], a copy.

        Raises:
            ValueError: ``sequence`` is not live.
        """
        pages: npt.NDArray[np.int32] = self._pool.pages(sequence)
        return pages

    @property
    def num_pages(self) -> int:
        """P, pages of the cache."""
        return self._pool.num_pages

    @property
    def page_size(self) -> int:
        """S, tokens a page holds."""
        return self._pool.page_size

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence holds."""
        return self._pool.num_free_pages

    def __len__(self) -> int:
        """Return the number of live sequences."""
        return len(self._pool)

    def __repr__(self) -> str:
        """Return sizes and use, as in ``BlockPool(num_pages=8, page_size=16, ...)``."""
        return (
            f"BlockPool(num_pages={self.num_pages}, page_size={self.page_size}, "
            f"num_free_pages={self.num_free_pages}, sequences={len(self)})"
        )
