"""BlockPool: named cases, messages, and a plain Python model beside which random calls run."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pagetile
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pagetile import BlockPool
from pagetile.block_pool import Step

MAX_INT32 = 2**31 - 1
ARRAYS = ("slot_mapping", "block_table", "seqused_k", "cu_seqlens_q", "copy_src", "copy_dst")


def lists(step: Step) -> dict[str, Any]:
    return {name: getattr(step, name).tolist() for name in ARRAYS}


def state(pool: BlockPool, sequences: list[int]) -> dict[str, Any]:
    """All that a caller can see of a pool."""
    return {
        "free": pool.num_free_pages,
        "live": len(pool),
        "lengths": [pool.length(s) for s in sequences],
        "pages": [pool.pages(s).tolist() for s in sequences],
    }


def started(pool: BlockPool, *lengths: int) -> list[int]:
    """Sequences of these lengths."""
    sequences = [pool.allocate() for _ in lengths]
    pool.append(sequences, lengths)
    return sequences


# One step


def test_prefill_then_decode_across_a_page_boundary() -> None:
    pool = BlockPool(num_pages=8, page_size=4)
    a, b = pool.allocate(), pool.allocate()

    step = pool.append([a, b], [6, 3])
    assert lists(step) == {
        "slot_mapping": [0, 1, 2, 3, 4, 5, 8, 9, 10],
        "block_table": [[0, 1], [2, 0]],
        "seqused_k": [6, 3],
        "cu_seqlens_q": [0, 6, 9],
        "copy_src": [],
        "copy_dst": [],
    }
    assert (step.total_q, step.max_seqlen_q, step.max_seqlen_k) == (9, 6, 6)

    step = pool.append([a, b], 1)
    assert step.slot_mapping.tolist() == [6, 11]
    step = pool.append([a, b], 1)
    assert lists(step) == {
        "slot_mapping": [7, 12],
        "block_table": [[0, 1], [2, 3]],
        "seqused_k": [8, 5],
        "cu_seqlens_q": [0, 1, 2],
        "copy_src": [],
        "copy_dst": [],
    }
    assert (step.total_q, step.max_seqlen_q, step.max_seqlen_k) == (2, 1, 8)
    assert pool.num_free_pages == 4


def test_types_of_a_step() -> None:
    pool = BlockPool(8, 4)
    step = pool.append(started(pool, 3), 1)
    assert step.slot_mapping.dtype == np.int64
    assert {getattr(step, name).dtype for name in ARRAYS[1:]} == {np.dtype(np.int32)}
    assert {type(n) for n in (step.total_q, step.max_seqlen_q, step.max_seqlen_k)} == {int}


@pytest.mark.parametrize("page_size", [1, 7, 16, 528])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_lengths_around_a_page_boundary(page_size: int, offset: int) -> None:
    length = 2 * page_size + offset
    pool = BlockPool(4, page_size)
    (a,) = started(pool, length)
    assert pool.length(a) == length
    assert len(pool.pages(a)) == -(-length // page_size)


def test_chunked_prefill_takes_the_same_slots_as_one_step() -> None:
    whole, chunked = BlockPool(8, 4), BlockPool(8, 4)
    a, b = whole.allocate(), chunked.allocate()
    chunks = [chunked.append([b], n).slot_mapping for n in (3, 1, 5, 4, 8)]
    assert whole.append([a], 21).slot_mapping.tolist() == np.concatenate(chunks).tolist()


def test_no_new_tokens_is_a_row_without_a_query() -> None:
    pool = BlockPool(8, 4)
    a, b = started(pool, 5, 0)
    step = pool.append([b, a], 0)
    assert step.cu_seqlens_q.tolist() == [0, 0, 0]
    assert step.seqused_k.tolist() == [0, 5]
    assert step.block_table.tolist() == [[0, 0], [0, 1]]
    assert (step.total_q, step.max_seqlen_q, step.max_seqlen_k) == (0, 0, 5)


@pytest.mark.parametrize("num_tokens", [[], 1], ids=["list", "int"])
def test_empty_batch(num_tokens: Any) -> None:
    step = BlockPool(8, 4).append([], num_tokens)
    assert step.block_table.shape == (0, 1)
    assert step.cu_seqlens_q.tolist() == [0]
    assert step.slot_mapping.shape == step.seqused_k.shape == step.copy_src.shape == (0,)


def test_the_table_is_as_wide_as_the_longest_sequence_of_the_batch() -> None:
    pool = BlockPool(64, 4)
    a, b = started(pool, 40, 2)
    assert pool.append([a, b], 1).block_table.shape == (2, 11)
    assert pool.append([b], 1).block_table.shape == (1, 1)
    assert pool.append([pool.allocate()], 0).block_table.shape == (1, 1)


def test_entries_past_the_end_are_0_where_a_longer_sequence_stood() -> None:
    pool = BlockPool(64, 4)
    a, b, c = started(pool, 24, 20, 4)
    pool.append([a, b, c], 0)
    step = pool.append([c, b, a], 0)
    assert step.block_table[0].tolist() == [11, 0, 0, 0, 0, 0]


def test_slots_are_64_bit() -> None:
    pool = BlockPool(num_pages=MAX_INT32, page_size=MAX_INT32)
    step = pool.append([pool.allocate() for _ in range(3)], 2)
    assert step.slot_mapping.tolist() == [
        page * MAX_INT32 + i for page in range(3) for i in range(2)
    ]


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        iter,
        np.array,
        lambda x: np.array([x, x]).T[:, 0],
        lambda x: np.array(x, np.int32),
        lambda x: [np.int64(i) for i in x],
    ],
    ids=["list", "tuple", "iterator", "array", "strided", "int32_array", "numpy_ints"],
)
def test_ways_to_give_ids_and_counts(make: Callable[[list[int]], Any]) -> None:
    pool = BlockPool(8, 4)
    sequences = [pool.allocate(), pool.allocate()]
    assert pool.append(make(sequences), make([3, 2])).seqused_k.tolist() == [3, 2]


@pytest.mark.parametrize("one", [2, np.int32(2), True + True], ids=["int", "numpy_int", "sum"])
def test_one_count_for_all(one: Any) -> None:
    pool = BlockPool(8, 4)
    assert pool.append([pool.allocate() for _ in range(3)], one).seqused_k.tolist() == [2, 2, 2]


def test_torch_tensors_both_ways() -> None:
    torch = pytest.importorskip("torch")
    pool = BlockPool(8, 4)
    sequences = torch.tensor([pool.allocate(), pool.allocate()])
    step = pool.append(sequences, torch.tensor([5, 2]))
    assert torch.from_numpy(step.block_table).tolist() == [[0, 1], [2, 0]]
    assert torch.from_numpy(step.slot_mapping).dtype == torch.int64


# Views


@pytest.mark.filterwarnings("error")
def test_arrays_are_writable_so_that_torch_takes_them_without_a_warning() -> None:
    torch = pytest.importorskip("torch")
    pool = BlockPool(8, 4)
    step = pool.append(started(pool, 3), 1)
    for name in ARRAYS:
        assert getattr(step, name).flags.writeable
        torch.from_numpy(getattr(step, name))


def test_all_but_the_table_belong_to_the_caller() -> None:
    pool = BlockPool(64, 4)
    a, b = started(pool, 5, 9)
    step = pool.append([a, b], [1, 2])
    before = lists(step)
    for _ in range(20):
        pool.append([b, a], 1)
    after = lists(step)
    assert {k: v for k, v in after.items() if k != "block_table"} == {
        k: v for k, v in before.items() if k != "block_table"
    }


def test_a_view_of_an_outgrown_table_keeps_its_memory() -> None:
    pool = BlockPool(4096, 1)
    (a,) = started(pool, 3)
    step = pool.append([a], 1)
    view = step.block_table
    pool.append([a], 2000)  # a wider table
    pool.append([a, *(pool.allocate() for _ in range(1000))], 0)  # a longer one
    del step, pool
    gc.collect()
    assert view.tolist() == [[0, 1, 2, 3]]


def test_a_step_writes_only_the_rows_that_changed() -> None:
    pool = BlockPool(64, 2)
    a, b, c, d = started(pool, 5, 5, 5, 4)
    first = pool.append([a, b, c], 0)
    first.block_table[:, 0] = -1  # seen again only where the pool leaves a row alone

    step = pool.append([a, b, c], 1)
    assert step.block_table[:, 0].tolist() == [-1, -1, -1]
    step = pool.append([a, b, c], 1)  # a new page each: only the new entry is written
    assert step.block_table[:, 0].tolist() == [-1, -1, -1]
    assert step.block_table[:, 3].tolist() == [pool.pages(s)[3] for s in (a, b, c)]
    step = pool.append([a, d, c], 1)
    assert step.block_table[:, 0].tolist() == [-1, pool.pages(d)[0], -1]


def test_a_row_is_right_after_its_sequence_was_elsewhere() -> None:
    pool = BlockPool(64, 2)
    a, b = started(pool, 3, 3)
    pool.append([a, b], 0)
    child = pool.fork(b)
    pool.append([b], 1)  # b at row 0, with a copied page
    step = pool.append([a, b], 0)  # row 1 still holds b, as it was
    assert step.block_table[1].tolist() == pool.pages(b).tolist() != pool.pages(child).tolist()
    pool.append([b], 3)  # and with new pages
    step = pool.append([a, b], 1)
    assert step.block_table[1].tolist() == pool.pages(b).tolist()


# Sharing


def test_fork_shares_pages_and_takes_none() -> None:
    pool = BlockPool(8, 4)
    (a,) = started(pool, 6)
    b = pool.fork(a)
    assert b != a
    assert pool.length(b) == 6
    assert pool.pages(b).tolist() == pool.pages(a).tolist() == [0, 1]
    assert (pool.num_free_pages, len(pool)) == (6, 2)


def test_first_owner_to_append_copies_the_partly_filled_page() -> None:
    pool = BlockPool(8, 4)
    (a,) = started(pool, 6)
    b = pool.fork(a)
    step = pool.append([b], 1)
    assert lists(step) == {
        "slot_mapping": [2 * 4 + 2],
        "block_table": [[0, 2]],
        "seqused_k": [7],
        "cu_seqlens_q": [0, 1],
        "copy_src": [1],
        "copy_dst": [2],
    }
    step = pool.append([a, b], 1)  # each has its own now
    assert step.copy_src.tolist() == []
    assert step.block_table.tolist() == [[0, 1], [0, 2]]


def test_all_owners_in_one_step_leave_the_page_to_the_last() -> None:
    pool = BlockPool(8, 4)
    (a,) = started(pool, 2)
    b, c = pool.fork(a), pool.fork(a)
    step = pool.append([b, a, c], [1, 1, 1])
    assert step.copy_src.tolist() == [0, 0]
    assert step.copy_dst.tolist() == [1, 2]
    assert step.block_table.tolist() == [[1], [2], [0]]
    assert pool.num_free_pages == 5


def test_full_pages_are_never_copied() -> None:
    pool = BlockPool(8, 4)
    (a,) = started(pool, 8)
    b = pool.fork(a)
    step = pool.append([a, b], 1)
    assert step.copy_src.tolist() == []
    assert step.block_table.tolist() == [[0, 1, 2], [0, 1, 3]]


def test_no_copy_when_the_other_owner_is_gone() -> None:
    pool = BlockPool(8, 4)
    (a,) = started(pool, 6)
    b = pool.fork(a)
    pool.free(a)
    assert pool.num_free_pages == 6
    step = pool.append([b], 1)
    assert step.copy_src.tolist() == []
    assert step.block_table.tolist() == [[0, 1]]


def test_no_copy_without_a_new_token() -> None:
    pool = BlockPool(2, 4)
    (a,) = started(pool, 6)
    b = pool.fork(a)
    assert pool.append([a, b], 0).copy_src.tolist() == []  # there would be no page for one
    assert pool.pages(a).tolist() == pool.pages(b).tolist()


def test_fork_of_an_empty_sequence() -> None:
    pool = BlockPool(8, 4)
    a = pool.allocate()
    b = pool.fork(a)
    assert pool.append([a, b], 1).block_table.tolist() == [[0], [1]]


def test_shared_pages_return_with_their_last_owner() -> None:
    pool = BlockPool(8, 4)
    (a,) = started(pool, 8)
    b = pool.fork(a)
    c = pool.fork(b)
    for sequence, free in ((b, 6), (a, 6), (c, 8)):
        pool.free(sequence)
        assert pool.num_free_pages == free


def test_pages_freed_last_are_used_first_in_their_order() -> None:
    pool = BlockPool(8, 4)
    a, b, _ = started(pool, 8, 8, 4)
    pool.free(b)
    pool.free(a)
    c = pool.allocate()
    pool.append([c], 16)
    assert pool.pages(c).tolist() == [0, 1, 2, 3]


def test_copy_on_write_keeps_the_contents_apart() -> None:
    pool = BlockPool(num_pages=32, page_size=4)
    cache = np.full((32, 4), -1)

    def append(sequences: list[int], tokens: list[list[int]]) -> Step:
        step = pool.append(sequences, [len(t) for t in tokens])
        cache[step.copy_dst] = cache[step.copy_src]
        cache.reshape(-1)[step.slot_mapping] = np.concatenate(tokens)
        return step

    def read(step: Step, row: int) -> list[int]:
        tokens: list[int] = cache[step.block_table[row]].reshape(-1)[: step.seqused_k[row]].tolist()
        return tokens

    a = pool.allocate()
    append([a], [[1, 2, 3, 4, 5, 6]])
    b = pool.fork(a)
    c = pool.fork(b)
    step = append([a, b, c], [[7], [70, 80, 90], [700]])
    assert [read(step, row) for row in range(3)] == [
        [1, 2, 3, 4, 5, 6, 7],
        [1, 2, 3, 4, 5, 6, 70, 80, 90],
        [1, 2, 3, 4, 5, 6, 700],
    ]
    d = pool.fork(b)
    pool.free(b)
    step = append([c, d], [[701], [91]])
    assert [read(step, row) for row in range(2)] == [
        [1, 2, 3, 4, 5, 6, 700, 701],
        [1, 2, 3, 4, 5, 6, 70, 80, 90, 91],
    ]


# Errors: the message names argument, value and what is allowed, and nothing has changed

STEP_ERRORS: dict[str, tuple[Callable[[list[int]], tuple[Any, Any]], type[Exception], str]] = {
    "unknown_id": (
        lambda s: ([s[0], 77], 1),
        ValueError,
        "sequences[1] must be a live sequence of this pool, got 77 (never allocated)",
    ),
    "negative_id": (
        lambda s: ([s[0], -1], 1),
        ValueError,
        "sequences[1] must be a live sequence of this pool, got -1 (never allocated)",
    ),
    "freed_id": (
        lambda s: ([s[0], s[3]], 1),
        ValueError,
        "sequences[1] must be a live sequence of this pool, got 3 (freed)",
    ),
    "id_of_the_future": (
        lambda s: ([s[3] + (5 << 32)], 1),
        ValueError,
        f"sequences[0] must be a live sequence of this pool, got {3 + (5 << 32)} (never allocated)",
    ),
    "id_twice": (
        lambda s: ([s[0], s[1], s[2], s[1]], 1),
        ValueError,
        "sequences must name a sequence once, got 1 at 1 and 3",
    ),
    "id_beyond_int64": (
        lambda s: ([2**70], 1),
        ValueError,
        f"sequences[0] must fit in an int64, got {2**70}",
    ),
    "id_float": (lambda s: ([s[0], 1.0], 1), TypeError, "sequences[1] must be an int, got float"),
    "ids_float_array": (
        lambda s: (np.array(s[:3], np.float32), 1),
        TypeError,
        "sequences[0] must be an int, got float32",
    ),
    "ids_one_int": (
        lambda s: (s[0], 1),
        TypeError,
        "sequences must be a list of ints or an int64 array [B], got int",
    ),
    "ids_none": (
        lambda s: (None, 1),
        TypeError,
        "sequences must be a list of ints or an int64 array [B], got NoneType",
    ),
    "negative_count": (
        lambda s: (s[:3], [1, 1, -2]),
        ValueError,
        "num_tokens[2] must be >= 0, got -2",
    ),
    "count_too_few": (
        lambda s: (s[:3], [1, 1]),
        ValueError,
        "num_tokens must be one int, or one for each of 3 sequences, got 2",
    ),
    "count_list_of_one": (
        lambda s: (s[:3], [1]),
        ValueError,
        "num_tokens must be one int, or one for each of 3 sequences, got 1",
    ),
    "count_float": (
        lambda s: (s[:3], 1.5),
        TypeError,
        "num_tokens must be an int, a list of ints or an int64 array [B], got float",
    ),
    "count_string": (lambda s: (s[:1], "1"), TypeError, "num_tokens[0] must be an int, got str"),
    "count_beyond_int64": (
        lambda s: (s[:1], 2**64),
        ValueError,
        f"num_tokens must fit in an int64, got {2**64}",
    ),
    "length_beyond_int32": (
        lambda s: ([s[1], s[0]], [1, MAX_INT32 - 5]),
        ValueError,
        f"num_tokens[1] must be at most {MAX_INT32 - 6} (sequence 0 has 6 of {MAX_INT32} tokens), "
        f"got {MAX_INT32 - 5}",
    ),
    "step_beyond_int32": (
        lambda s: (s[:3], 2**30),
        ValueError,
        f"num_tokens must add up to at most {MAX_INT32} (cu_seqlens_q is int32), got {3 * 2**30}",
    ),
    "out_of_pages": (
        lambda s: (s[:3], [1, 1, 21]),
        pagetile.OutOfPagesError,
        "out of pages: 6 needed, 5 free of 9 (page_size 4)",
    ),
}


@pytest.mark.parametrize("name", STEP_ERRORS)
def test_append_error_names_the_argument_and_changes_nothing(name: str) -> None:
    arguments, error, text = STEP_ERRORS[name]
    pools = BlockPool(9, 4), BlockPool(9, 4)
    for pool in pools:
        sequences = started(pool, 6, 4, 3, 2)
        pool.free(sequences[3])
    pool, untouched = pools
    before = state(pool, sequences[:3])

    with pytest.raises(error) as caught:
        pool.append(*arguments(sequences))
    assert str(caught.value) == "BlockPool.append: " + text
    assert state(pool, sequences[:3]) == before
    steps = [p.append(sequences[:3], [1, 2, 3]) for p in (pool, untouched)]
    assert lists(steps[0]) == lists(steps[1])


def test_out_of_pages_counts_the_copies() -> None:
    pool = BlockPool(num_pages=3, page_size=4)
    (a,) = started(pool, 2)
    b, c, d = pool.fork(a), pool.fork(a), pool.fork(a)
    before = state(pool, [a, b, c, d])
    with pytest.raises(pagetile.OutOfPagesError, match=r"3 needed, 2 free of 3"):
        pool.append([a, b, c, d], 1)
    assert state(pool, [a, b, c, d]) == before
    step = pool.append([a, b], 1)  # just enough, and c and d still share the page
    assert (step.copy_src.tolist(), pool.num_free_pages) == ([0, 0], 0)


def test_a_full_pool_still_appends_inside_its_pages() -> None:
    pool = BlockPool(num_pages=2, page_size=4)
    (a,) = started(pool, 7)
    pool.append([a], 1)
    with pytest.raises(pagetile.OutOfPagesError):
        pool.append([a], 1)
    pool.free(a)
    assert pool.append([pool.allocate()], 8).block_table.tolist() == [[0, 1]]


def test_out_of_pages_is_a_runtime_error_of_pagetile() -> None:
    assert issubclass(pagetile.OutOfPagesError, RuntimeError)
    assert f"{pagetile.OutOfPagesError.__module__}.{pagetile.OutOfPagesError.__qualname__}" == (
        "pagetile.OutOfPagesError"
    )


@pytest.mark.parametrize("function", ["free", "fork", "length", "pages"])
def test_stale_ids_are_refused_for_ever(function: str) -> None:
    pool = BlockPool(8, 4)
    stale = []
    for _ in range(100):  # one slot, used again and again
        sequence = pool.allocate()
        pool.append([sequence], 1)
        pool.free(sequence)
        stale.append(sequence)
    live = pool.allocate()
    assert len({*stale, live}) == 101
    for sequence in stale:
        with pytest.raises(ValueError) as caught:
            getattr(pool, function)(sequence)
        expected = f"sequence must be a live sequence of this pool, got {sequence} (freed)"
        assert str(caught.value) == f"BlockPool.{function}: {expected}"
    assert (len(pool), pool.length(live)) == (1, 0)


@pytest.mark.parametrize("function", ["free", "fork", "length", "pages"])
@pytest.mark.parametrize("sequence", [0, 1, -1, 1 << 40, MAX_INT32, 2**63 - 1])
def test_ids_never_allocated_are_refused(function: str, sequence: int) -> None:
    with pytest.raises(ValueError) as caught:
        getattr(BlockPool(8, 4), function)(sequence)
    expected = f"sequence must be a live sequence of this pool, got {sequence} (never allocated)"
    assert str(caught.value) == f"BlockPool.{function}: {expected}"


@pytest.mark.parametrize("function", ["free", "fork", "length", "pages"])
@pytest.mark.parametrize("sequence", ["0", None, 0.0], ids=["str", "none", "float"])
def test_ids_that_are_no_ints_are_refused(function: str, sequence: Any) -> None:
    with pytest.raises(TypeError) as caught:
        getattr(BlockPool(8, 4), function)(sequence)
    expected = f"BlockPool.{function}: sequence must be an int, got {type(sequence).__name__}"
    assert str(caught.value) == expected


@pytest.mark.parametrize("argument", ["num_pages", "page_size"])
@pytest.mark.parametrize("value", [0, -1, MAX_INT32 + 1])
def test_sizes_out_of_range(argument: str, value: int) -> None:
    sizes = {"num_pages": 8, "page_size": 4, argument: value}
    with pytest.raises(ValueError) as caught:
        BlockPool(**sizes)
    assert str(caught.value) == f"BlockPool: {argument} must be in [1, {MAX_INT32}], got {value}"


@pytest.mark.parametrize("argument", ["num_pages", "page_size"])
def test_sizes_that_are_no_ints(argument: str) -> None:
    sizes: dict[str, Any] = {"num_pages": 8, "page_size": 4, argument: 4.0}
    with pytest.raises(TypeError) as caught:
        BlockPool(**sizes)
    assert str(caught.value) == f"BlockPool: {argument} must be an int, got float"


def test_errors_of_the_callers_own_objects_pass() -> None:
    class Index:
        def __index__(self) -> int:
            raise KeyError("mine")

    def ids() -> Any:
        yield a
        raise KeyError("mine")

    pool = BlockPool(8, 4)
    a = pool.allocate()
    for sequences, num_tokens in ((ids(), 1), ([Index()], 1), ([a], Index())):
        with pytest.raises(KeyError, match="mine"):
            pool.append(sequences, num_tokens)
    assert pool.length(a) == 0


def test_sizes_and_repr() -> None:
    pool = BlockPool(num_pages=8, page_size=4)
    started(pool, 5, 1)
    assert (pool.num_pages, pool.page_size, pool.num_free_pages, len(pool)) == (8, 4, 5, 2)
    assert repr(pool) == "BlockPool(num_pages=8, page_size=4, num_free_pages=5, sequences=2)"
    with pytest.raises(AttributeError):
        pool.num_pages = 9  # type: ignore[misc]


# A model in plain Python


class Model:
    """What BlockPool should do: lists, no counts kept, nothing incremental."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.free_pages = list(range(num_pages - 1, -1, -1))  # a stack
        self.pages: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def owners(self) -> Counter[int]:
        return Counter(page for pages in self.pages.values() for page in pages)

    def free(self, sequence: int) -> None:
        pages = self.pages.pop(sequence)
        del self.lengths[sequence]
        owners = self.owners()
        self.free_pages += [page for page in reversed(pages) if not owners[page]]

    def append(self, sequences: list[int], counts: list[int]) -> dict[str, Any] | None:
        """Return the step, or None if the pages do not suffice."""
        old = {s: list(p) for s, p in self.pages.items()}, dict(self.lengths), list(self.free_pages)
        slots, copy_src, copy_dst = [], [], []
        try:
            for sequence, count in zip(sequences, counts, strict=True):
                pages = self.pages[sequence]
                for _ in range(count):
                    offset = self.lengths[sequence] % self.page_size
                    if offset == 0:
                        pages.append(self.free_pages.pop())
                    elif self.owners()[pages[-1]] > 1:
                        copy_src.append(pages[-1])
                        pages[-1] = self.free_pages.pop()
                        copy_dst.append(pages[-1])
                    slots.append(pages[-1] * self.page_size + offset)
                    self.lengths[sequence] += 1
        except IndexError:
            self.pages, self.lengths, self.free_pages = old
            return None
        width = max([1, *(len(self.pages[s]) for s in sequences)])
        lengths = [self.lengths[s] for s in sequences]
        return {
            "slot_mapping": slots,
            "block_table": [self.pages[s] + [0] * (width - len(self.pages[s])) for s in sequences],
            "seqused_k": lengths,
            "cu_seqlens_q": [sum(counts[:i]) for i in range(len(counts) + 1)],
            "copy_src": copy_src,
            "copy_dst": copy_dst,
            "sizes": (sum(counts), max([0, *counts]), max([0, *lengths])),
        }


class PoolMachine(RuleBasedStateMachine):
    """BlockPool beside the model, and a cache whose contents must follow the sequences."""

    @initialize(num_pages=st.integers(1, 24), page_size=st.integers(1, 5))
    def start(self, num_pages: int, page_size: int) -> None:
        self.pool = BlockPool(num_pages, page_size)
        self.model = Model(num_pages, page_size)
        self.cache = np.full((num_pages, page_size), -1)
        self.tokens: dict[int, list[int]] = {}
        self.freed: set[int] = set()
        self.next_token = 0

    def live(self) -> list[int]:
        return sorted(self.tokens)

    @rule()
    def allocate(self) -> None:
        sequence = self.pool.allocate()
        assert sequence not in self.freed | set(self.tokens)
        self.tokens[sequence] = []
        self.model.pages[sequence], self.model.lengths[sequence] = [], 0

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.live()))
        child = self.pool.fork(parent)
        assert child not in self.freed | set(self.tokens)
        self.tokens[child] = list(self.tokens[parent])
        self.model.pages[child] = list(self.model.pages[parent])
        self.model.lengths[child] = self.model.lengths[parent]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live()))
        self.pool.free(sequence)
        self.model.free(sequence)
        del self.tokens[sequence]
        self.freed.add(sequence)

    @rule(data=st.data(), one_count=st.booleans())
    def append(self, data: st.DataObject, one_count: bool) -> None:
        batch = data.draw(st.permutations(self.live()))
        batch = batch[: data.draw(st.integers(0, len(batch)))]
        count = st.integers(0, 7)
        counts = [data.draw(count)] * len(batch) if one_count else [data.draw(count) for _ in batch]
        num_tokens: Any = counts[0] if one_count and counts else counts
        expected = self.model.append(batch, counts)
        if expected is None:
            with pytest.raises(pagetile.OutOfPagesError):
                self.pool.append(batch, num_tokens)
            return
        step = self.pool.append(batch, num_tokens)
        sizes = (step.total_q, step.max_seqlen_q, step.max_seqlen_k)
        assert lists(step) | {"sizes": sizes} == expected
        self.write(step, batch)
        for row, sequence in enumerate(batch):
            seen = self.cache[step.block_table[row]].reshape(-1)[: step.seqused_k[row]]
            assert seen.tolist() == self.tokens[sequence]

    def write(self, step: Step, batch: list[int]) -> None:
        new = np.arange(self.next_token, self.next_token + step.total_q)
        self.next_token += step.total_q
        self.cache[step.copy_dst] = self.cache[step.copy_src]
        self.cache.reshape(-1)[step.slot_mapping] = new
        for row, sequence in enumerate(batch):
            begin, end = step.cu_seqlens_q[row : row + 2]
            self.tokens[sequence] += new[begin:end].tolist()

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), what=st.sampled_from(["freed", "twice", "unknown", "negative"]))
    def wrong_append(self, data: st.DataObject, what: str) -> None:
        batch = data.draw(st.permutations(self.live()))
        counts = [1] * len(batch)
        place = data.draw(st.integers(0, len(batch)))
        if what == "negative":
            counts[place % len(batch)] = -1
        else:
            freed, unknown = max(self.freed, default=-2), max(self.tokens) + 1000
            wrong = {"freed": freed, "twice": batch[0], "unknown": unknown}
            batch.insert(place, wrong[what])
            counts.append(1)
        with pytest.raises(ValueError):
            self.pool.append(batch, counts)

    @invariant()
    def same_as_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.num_free_pages == len(self.model.free_pages)
        assert len(self.pool) == len(self.tokens)
        for sequence in self.tokens:
            assert self.pool.length(sequence) == self.model.lengths[sequence]
            assert self.pool.pages(sequence).tolist() == self.model.pages[sequence]

    def teardown(self) -> None:
        for sequence in self.live():
            self.pool.free(sequence)
        if hasattr(self, "pool"):
            assert self.pool.num_free_pages == self.pool.num_pages


TestPoolAgainstModel = PoolMachine.TestCase
TestPoolAgainstModel.settings = settings(stateful_step_count=40)
