"""What the prefill kernel gets: which sequences, which multiprocessors, in which order.

No GPU is needed: _C.attention_plan and _C.prefill_places, _claims and _piece are what
the kernels run, serially.
"""

from __future__ import annotations

import itertools

import numpy as np
import pagetile
import pytest
import torch
from gpu import prefill_by
from hypothesis import given
from hypothesis import strategies as st
from pagetile import _C
from test_attention_plan import BATCHES, H200, OPTIONS, Plan, decodes, plans

# Which sequences

UNKNOWN = 0  # max_seqlen_q
MANY = [(1, 900)] * 40


def long_rows(batch, heads, max_seqlen_q, **options) -> int:
    """Of a batch of so many; the lengths themselves are not looked at."""
    sequences = [(1, 100)] * batch
    return Plan.of(*sequences, heads=heads, max_seqlen_q=max_seqlen_q, prefill=True, **options)\
        .shape["long_rows"]  # fmt: skip


# fmt: off
WHO = [
    # Up to 32 packed rows: nobody is long
    (-1, 64, (32, 8), 1, {}),
    (-1, 64, (32, 8), 8, {}),
    (-1, 64, (64, 1), 1, {}),
    # Up to 64: on Hopper, if there are enough tiles: more where items are not cut
    (8, 64, (32, 8), 9, {}),
    (8, 64, (32, 8), 16, {}),
    (-1, 64, (32, 8), 16, {"wgmma": False}),
    (-1, 64, (32, 8), 16, {"batch_invariant": True}),
    (-1, 4, (64, 8), 8, {}),  # 32 tiles
    (8, 5, (64, 8), 8, {}),  # 40
    (-1, 10, (64, 8), 8, {"head_dim": (256, 256)}),  # 80
    (8, 11, (64, 8), 8, {"head_dim": (256, 256)}),  # 88
    (-1, 1, (32, 8), 16, {}),
    # More: what has more rows than single tokens
    (8, 64, (32, 8), 17, {}),
    (8, 64, (8, 8), 65, {}),
    (16, 64, (128, 8), 5, {}),
    (32, 64, (128, 8), 5, {"head_dim": (256, 256)}),
    (32, 64, (160, 8), 4, {}),
    (64, 64, (64, 1), 2, {}),
    (128, 64, (128, 1), 2, {}),
    (-1, 64, (128, 1), 1, {}),  # single tokens are never long
    # One sequence is the prefill kernel's whatever its length
    (0, 1, (32, 8), 2048, {}),
    (0, 1, (64, 1), 2048, {}),
    # Too few tiles for a sixth of the multiprocessors, or for a twelfth where items are cut
    (-1, 1, (32, 8), 32, {}),  # 8 tiles
    (0, 1, (32, 8), 64, {}),  # 16
    (-1, 1, (32, 8), 64, {"wgmma": False}),
    (-1, 1, (32, 8), 64, {"head_dim": (256, 256)}),
    (0, 1, (32, 8), 65, {}),  # 24
    (0, 1, (32, 8), 65, {"wgmma": False}),
    (-1, 2, (32, 8), 32, {}),  # 16
    (8, 3, (32, 8), 32, {}),  # 24
    (0, 1, (32, 8), 64, {"sms": 96}),  # 16 are enough
    # Bits depend on the sequence alone: so does the kernel
    (64, 1, (32, 8), 17, {"batch_invariant": True}),
    (64, 1, (32, 8), 2048, {"batch_invariant": True}),
    (64, 64, (32, 8), 17, {"batch_invariant": True}),
    (64, 64, (64, 1), 2, {"batch_invariant": True}),
    (128, 64, (128, 1), 2, {"batch_invariant": True}),
    # Nobody knows how long queries are
    (8, 1, (32, 8), UNKNOWN, {}),
    (8, 64, (32, 8), UNKNOWN, {}),
    (16, 64, (128, 8), UNKNOWN, {}),
    (64, 1, (32, 8), UNKNOWN, {"batch_invariant": True}),
    # The heads of a token must fit into a tile
    (-1, 64, (129, 1), 2048, {}),
    (-1, 64, (200, 1), 2048, {}),
    (-1, 1, (200, 1), UNKNOWN, {}),
    (-1, 1, (200, 1), 2048, {"batch_invariant": True}),
]
# fmt: on


@pytest.mark.parametrize(("expected", "batch", "heads", "max_seqlen_q", "options"), WHO)
def test_who_is_long(expected, batch, heads, max_seqlen_q, options):
    assert long_rows(batch, heads, max_seqlen_q, **options) == expected


def test_nobody_is_long_without_a_prefill_kernel():
    for prefill, expected in ((True, 8), (False, -1)):
        assert Plan.of((2048, 2048), *MANY, prefill=prefill).shape["long_rows"] == expected


# The plan of the others

MIXED = {
    **BATCHES,
    "long_among_short": [(1, 900), (300, 300), *decodes(*range(50, 3000, 50)), (17, 700)],
    "all_long": [(100, 500), (2048, 2048), (65, 9000)] * 4,
    "at_the_edge": [(n, 1000) for n in (1, 2, 3, 8, 9, 15, 16, 17, 18, 64, 65)] * 3,
    "one_long": [(1000, 1000)],
    "long_without_keys": [(1000, 0), *MANY],
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("batch", MIXED)
def test_long_sequences_are_left_out(batch, options):
    """All others are covered exactly once, and as evenly as without long ones."""
    plan = Plan.of(*MIXED[batch], prefill=True, **OPTIONS[options]).check()
    for b, n in enumerate(plan.long_q_lens):
        assert n == 0 or not any(tile.place[0] == b for tile in plan.tiles)
    assert all(lane["begin"] == lane["end"] for lane in plan.lanes[plan.workers :])


def test_what_is_left_out_is_the_prefill_kernels():
    plan = Plan.of(*MIXED["at_the_edge"], prefill=True)
    assert plan.shape["long_rows"] == 8
    assert {n for n in plan.q_lens if n} == {1, 2}
    assert {n for n in plan.long_q_lens if n} == {3, 8, 9, 15, 16, 17, 18, 64, 65}


@given(plan=plans(prefill=True))
def test_any_plan_beside_a_prefill(plan):
    plan.check()
    check_share(plan)


@given(plan=plans(prefill=True, max_seqlen_q=0))
def test_any_plan_of_unknown_queries(plan):
    plan.check()
    check_share(plan)


# Which multiprocessors


def times(plan) -> tuple[int, int]:
    """Of one multiprocessor for all short and for all long sequences, as the plan estimates."""
    short = plan.line[-1] * plan.shape["chains"] * plan.shape["unit_time"]
    pairs = 0
    for q_len, kv_len in zip(plan.long_q_lens, plan.kv_lens, strict=True):
        if q_len:
            tokens = ((q_len - 1) * i // 4 for i in range(5))
            seen = [len(plan.visible(token, q_len, kv_len)) for token in tokens]
            pairs += (2 * sum(seen) - seen[0] - seen[-1]) * q_len // 8
    return short, pairs * plan.shape["pair_time"]


def check_share(plan) -> None:
    """Both sides end together, but for a lane; where there is one side, it has everything."""
    shape = plan.shape
    sms, chains, ctas = shape["num_sms"], shape["chains"], shape.get("prefill_ctas", 0)
    if sms == 0:
        assert "prefill_ctas" not in shape
        return
    assert sms == plan.sms
    short, long = times(plan)
    ideal = sms * short / max(1, short + long) / chains  # lanes
    if ctas == sms:
        nothing_to_share = short == 0 or long == 0
        assert nothing_to_share or ideal < 0.5 + 1 / chains or ideal > sms / chains - 1
        return
    assert short > 0
    assert long > 0
    assert 0 < ctas < sms
    lanes = plan.workers
    assert ctas + lanes * chains == sms
    assert sum(begin != end for begin, end in ((x["begin"], x["end"]) for x in plan.lanes)) <= lanes
    assert abs(lanes - ideal) <= 1 or lanes == shape["lanes"] < ideal


# fmt: off
SHARES = {
    "one_prompt_many_tokens": [(2048, 2048), *decodes(*[3000] * 63)],
    "many_prompts_few_tokens": [*[(2048, 2048)] * 20, *decodes(9000, 9000, 9000)],
    "chunk_over_long_keys": [(512, 100_000), *decodes(*[100_000] * 16)],
    "evenly": [(1000, 1000), *decodes(*[2000] * 40)],
}
# fmt: on


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "noncausal"])
@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (16, 16), (70, 10), (32, 4)], ids=str)
@pytest.mark.parametrize("batch", SHARES)
def test_both_sides_end_together(batch, heads, causal):
    for dims in ((64, 64), (128, 128), (192, 128), (256, 256)):
        plan = Plan.of(*SHARES[batch], heads=heads, head_dim=dims, causal=causal, prefill=True)
        check_share(plan.check())
        assert plan.shape["num_sms"] == H200


def test_times_are_near_one_another():
    """By numbers: what each side takes on its share of an H200."""
    plan = Plan.of(*SHARES["one_prompt_many_tokens"], prefill=True)
    short, long = times(plan)
    ctas = plan.shape["prefill_ctas"]
    assert 0 < ctas < H200
    each = short / (H200 - ctas), long / ctas
    assert max(each) <= 1.5 * min(each)


@pytest.mark.parametrize("sequences", [
    decodes(*[3000] * 60),  # nobody is long
    [(2048, 2048)] * 9,  # all are
    [*[(0, 700)] * 9, *[(2048, 2048)] * 3],
    [*decodes(*[3000] * 60), (0, 2048)],
], ids=str)  # fmt: skip
def test_one_side_has_everything(sequences):
    plan = Plan.of(*sequences, max_seqlen_q=4096, prefill=True).check()
    assert plan.shape["prefill_ctas"] == plan.shape["num_sms"] == H200
    assert plan.workers == plan.shape["lanes"]


def test_the_share_is_monotone():
    """Longer prompts take multiprocessors from the tokens, longer contexts take them back."""
    prompts = [
        Plan.of((n, n), *decodes(*[4000] * 40), max_seqlen_q=10_000, prefill=True)
        for n in range(500, 8000, 500)
    ]
    contexts = [
        Plan.of((3000, 3000), *decodes(*[n] * 40), max_seqlen_q=10_000, prefill=True)
        for n in range(1000, 16_000, 1000)
    ]
    for shares in (prompts, contexts[::-1]):
        ctas = [plan.shape["prefill_ctas"] for plan in shares]
        assert ctas == sorted(ctas)
        assert ctas[0] < ctas[-1]
        assert len(set(ctas)) > 3


def test_a_kernel_that_runs_alone_shares_nothing():
    """One sequence, or the portable kernel: the plan has all multiprocessors."""
    assert Plan.of((2048, 2048), prefill=True).shape["num_sms"] == 0
    lens = torch.tensor([2048, *[3000] * 40], dtype=torch.int32)
    cu = torch.tensor([0, *range(2048, 2089)], dtype=torch.int32)
    for has_wgmma in (True, False):
        _, shape = _C.attention_plan(
            cu, lens, num_q_heads=32, num_kv_heads=8, max_seqlen_q=2048, has_wgmma=has_wgmma
        )
        assert shape["long_rows"] == 8
        assert shape["num_sms"] == (H200 if has_wgmma else 0)


# The workspace


@pytest.mark.parametrize("invariant", [False, True], ids=["plain", "invariant"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("heads", [(32, 8), (64, 8), (8, 8), (20, 1), (160, 8), (128, 1)], ids=str)
def test_workspace_of_any_batch(heads, dims, invariant):
    """workspace_size() does not know how many sequences there will be: none may need more.

    Nor a call with smaller bounds; and what is known to be smaller may need less.
    """
    most_so_far = 0
    for most in (1, 2, 3, 5, 8, 9, 16, 17, 33, 64, 2048, UNKNOWN):
        shapes = [
            _C.attention_plan(
                torch.arange(batch + 1, dtype=torch.int32),
                torch.full((batch,), 100, dtype=torch.int32),
                num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=dims[0], head_dim_v=dims[1],
                max_seqlen_q=most, max_seqlen_k=5000, batch_invariant=invariant,
            )[1]
            for batch in (0, 1, 2, 4, 40, 300)
        ]  # fmt: skip
        most_so_far = max(most_so_far, *(shape["workspace_bytes"] for shape in shapes))
        largest = {shape["largest_workspace"] for shape in shapes}
        assert len(largest) == 1
        assert most_so_far <= min(largest)
    assert most_so_far >= 0.9 * min(largest)


# The plan in memory


@pytest.mark.parametrize("invariant", [False, True], ids=["plain", "invariant"])
@pytest.mark.parametrize("batch", ["long_among_short", "all_long", "one_long", "hundred"])
@pytest.mark.parametrize("kernel", ["best", "portable", "none"])
def test_buffer_of_a_plan(kernel, batch, invariant):
    """Lanes, and behind them the prefill kernel's share where there is one: all of it written."""
    cu = torch.tensor(
        [*itertools.accumulate((q_len for q_len, _ in MIXED[batch]), initial=0)], dtype=torch.int32
    )
    lens = torch.tensor([kv_len for _, kv_len in MIXED[batch]], dtype=torch.int32)
    arguments = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "max_seqlen_q": 2048,
                 "max_seqlen_k": 9001, "batch_invariant": invariant}  # fmt: skip
    lanes, shape = _C.attention_plan(
        cu, lens, **arguments, has_wgmma=kernel == "best", has_prefill=kernel != "none"
    )
    words = [*np.ravel([lane["words"] for lane in lanes])]
    shares = kernel == "best" and (invariant or batch != "one_long")
    if shares:
        words += [shape["prefill_ctas"], 0, 0, 0]
    with prefill_by(kernel):
        plan = pagetile.make_plan(seqused_k=lens, cu_seqlens_q=cu, page_size=16, **arguments)
        assert plan.buffer.tolist() == words
        plan.buffer.fill_(-1)
        pagetile.make_plan(seqused_k=lens, cu_seqlens_q=cu, page_size=16, **arguments, out=plan)
        assert plan.buffer.tolist() == words


# In which order


def places(tokens, kv_heads, keys_in_cache, q_len, kv_len) -> list[tuple[int, int]]:
    """(KV head, tile): so many heads at a time as the cache holds, the last tile first."""
    tiles = -(-q_len // tokens)
    fit = max(1, keys_in_cache // max(1, kv_len))
    return [
        (head, tile)
        for first in range(0, kv_heads, fit)
        for tile in reversed(range(tiles))
        for head in range(first, min(first + fit, kv_heads))
    ]


@pytest.mark.parametrize(("kv_len", "groups"), [
    (1, [8]), (0, [8]), (1000, [8]), (8000, [8]), (8001, [7, 1]), (16_000, [4, 4]),
    (20_000, [3, 3, 2]), (64_000, [1] * 8), (2**31 - 1, [1] * 8),
])  # fmt: skip
def test_heads_that_fit_the_cache_go_together(kv_len, groups):
    items = iter(_C.prefill_places(32, 8, 64_000, 100, kv_len))
    first = 0
    for heads in groups:
        for tile in (3, 2, 1, 0):
            for head in range(first, first + heads):
                assert next(items) == (head, tile)
        first += heads
    assert not [*items]


@given(
    tokens=st.integers(1, 192),
    kv_heads=st.integers(1, 20),
    keys_in_cache=st.integers(0, 3000) | st.just(2**31 - 1),
    q_len=st.integers(0, 500),
    kv_len=st.integers(0, 2000) | st.just(2**31 - 1),
)
def test_any_order(tokens, kv_heads, keys_in_cache, q_len, kv_len):
    items = _C.prefill_places(tokens, kv_heads, keys_in_cache, q_len, kv_len)
    every = itertools.product(range(kv_heads), range(-(-q_len // tokens)))
    assert sorted(items) == [*every]
    assert items == places(tokens, kv_heads, keys_in_cache, q_len, kv_len)


# The last items in pieces


def rounds(claims, ctas: int) -> float:
    """The time, in items, until the last CTA ends, where an item takes 1 and a piece its part."""
    ends = [0.0] * ctas
    for _, _, pieces in claims:
        first = ends.index(min(ends))
        ends[first] += 1 / pieces
    return max(ends)


@given(st.integers(0, 3000), st.integers(1, 160), st.integers(1, 8))
def test_every_piece_is_claimed_once(items, ctas, most_pieces):
    """Whole items first, in their order; and no more sums than there are places for."""
    claims = _C.prefill_claims(items, ctas, most_pieces)
    expected = [(item, piece, n) for item, n in {i: n for i, _, n in claims}.items()
                for piece in range(n)]  # fmt: skip
    assert claims == expected
    assert [item for item, piece, _ in claims if piece == 0] == [*range(items)]
    cut = [item for item, piece, n in claims if n > 1 and piece == 0]
    assert cut == [*range(items - len(cut), items)]
    assert len(cut) < ctas
    assert sum(n > 1 for _, _, n in claims) <= 2 * ctas
    assert max((n for _, _, n in claims), default=1) <= most_pieces


@pytest.mark.parametrize(("items", "expected"), [
    (352, 2 + 2 / 3),  # 4 chunks of 512, 8 KV heads, tiles of 48 tokens, on 132 multiprocessors
    (344, 2 + 2 / 3),
    (132, 1), (264, 2), (16, 1 / 8), (66, 1 / 2), (200, 1 + 2 / 3), (263, 2),
])  # fmt: skip
def test_pieces_shorten_the_last_round(items, expected):
    assert rounds(_C.prefill_claims(items, H200, 8), H200) == pytest.approx(expected, abs=0.13)


@given(st.integers(1, 500), st.integers(1, 160))
def test_pieces_never_take_longer(items, ctas):
    whole = rounds(_C.prefill_claims(items, ctas, 1), ctas)
    assert whole == -(-items // ctas)
    assert rounds(_C.prefill_claims(items, ctas, 8), ctas) <= whole + 1e-9


@given(st.integers(0, 10**6), st.integers(1, 10**7), st.integers(1, 8))
def test_pieces_of_keys(first, tiles, pieces):
    """The last keys first, nothing twice, nothing left out, none much longer than another."""
    parts = [_C.prefill_piece(first, first + tiles, i, pieces) for i in range(pieces)]
    assert parts[0][1] == first + tiles
    assert parts[-1][0] == first
    assert all(a[0] == b[1] for a, b in itertools.pairwise(parts))
    sizes = [end - begin for begin, end in parts]
    assert max(sizes) - min(sizes) <= 1
