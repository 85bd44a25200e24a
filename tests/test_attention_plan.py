"""The schedule of the split-KV kernel: who computes which keys of which rows.

_C.attention_plan is the serial planner, for a GPU of so many multiprocessors. Here each plan is
walked lane by lane as plan.h says that a lane reads it, and compared with a model that knows tiles
and nothing of how they are cut. That a GPU's planner writes the same is test_attention_gpu.py's.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from dataclasses import dataclass

import pytest
import reference
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from pagetile import _C

KEYS = 32  # of a unit
WHOLE = 2**31 - 1  # the unit behind a tile's last key
LEAST = 4  # units of a piece where the line is cut evenly
H200 = 132
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)


@dataclass(frozen=True)
class Tile:
    """Rows of one sequence and one KV head of the chain, and the units that some row sees."""

    place: tuple[int, int, int]  # sequence, head, row tile
    units: range


class Plan:
    """A plan, beside the tiles that it must cover in this order."""

    def __init__(self, cu_seqlens_q, seqused_k, heads=(32, 8), head_dim=(128, 128), sms=H200,
                 max_seqlen_q=None, max_seqlen_k=None, causal=True, window=(-1, -1), num_splits=0,
                 batch_invariant=False, clusters=True, prefill=False,
                 wgmma=True) -> None:  # fmt: skip
        batch = len(seqused_k)
        spans = list(itertools.pairwise(cu_seqlens_q)) if cu_seqlens_q else [(0, 1)] * batch
        if max_seqlen_q is None:
            max_seqlen_q = max((end - begin for begin, end in spans), default=1)
        if max_seqlen_k is None:
            max_seqlen_k = max([1, *seqused_k])
        int32 = functools.partial(torch.tensor, dtype=torch.int32)
        self.lanes, self.shape = _C.attention_plan(
            int32(cu_seqlens_q) if cu_seqlens_q else None, int32(seqused_k),
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
            num_q_heads=heads[0], num_kv_heads=heads[1],
            head_dim=head_dim[0], head_dim_v=head_dim[1], causal=causal,
            window_left=window[0], window_right=window[1], num_splits=num_splits,
            batch_invariant=batch_invariant, num_sms=sms, has_clusters=clusters,
            has_prefill=prefill,
            has_wgmma=wgmma,
        )  # fmt: skip
        self.causal, self.window, self.heads, self.sms = causal, window, heads, sms
        self.num_splits, self.batch_invariant = num_splits, batch_invariant

        # What the metadata say, as far as they can be believed
        starts = [max(0, begin) for begin, _ in spans]
        ends = [end for _, end in spans]
        longest = max_seqlen_q or INT_MAX  # 0 is unknown
        q_lens = [
            min(max(0, end - start), longest) for start, end in zip(starts, ends, strict=True)
        ]
        self.long_q_lens = [n if self.is_long(n) else 0 for n in q_lens]  # the prefill kernel's
        self.q_lens = [0 if self.is_long(n) else n for n in q_lens]
        self.kv_lens = [max(0, used) for used in seqused_k]
        self.tiles = self._tiles()

    @classmethod
    def of(cls, *sequences, **options) -> Plan:
        """Of (q_len, kv_len) pairs."""
        cu = list(itertools.accumulate((q_len for q_len, _ in sequences), initial=0))
        return cls(cu, [kv_len for _, kv_len in sequences], **options)

    def is_long(self, q_len) -> bool:
        return 0 <= self.shape["long_rows"] < q_len * self.shape["group"]

    @property
    def workers(self) -> int:
        """Lanes that may have work: the prefill kernel may have the others' multiprocessors."""
        sms, ctas = self.sms, self.shape.get("prefill_ctas", self.sms)
        return (sms - ctas) // self.shape["chains"] if ctas < sms else self.shape["lanes"]

    def _tiles(self) -> list[Tile]:
        rows, group = self.shape["rows"], self.shape["group"]
        tiles = []
        for b, (q_len, kv_len) in enumerate(zip(self.q_lens, self.kv_lens, strict=True)):
            spans = []
            for first in range(0, q_len * group, rows):
                tokens = range(first // group, (min(first + rows, q_len * group) - 1) // group + 1)
                keys = [self.visible(token, q_len, kv_len) for token in tokens]
                keys = [k for k in keys if k]
                begin, end = (
                    min((k[0] for k in keys), default=0),
                    max((k[-1] + 1 for k in keys), default=0),
                )
                spans.append(range(begin // KEYS, -(-end // KEYS)))
            for head in range(self.shape["heads_per_chain"]):
                tiles += [Tile((b, head, m), units) for m, units in enumerate(spans)]
        return tiles

    def visible(self, token, q_len, kv_len) -> range:
        """Keys that a query sees."""
        diagonal = token + kv_len - q_len
        left, right = self.window
        begin = max(0, diagonal - left) if left >= 0 else 0
        end = diagonal + right + 1 if right >= 0 else kv_len
        end = min(end, diagonal + 1) if self.causal else end
        return range(begin, min(end, kv_len))

    # The walk

    @functools.cached_property
    def places(self) -> dict[tuple[int, int, int], int]:
        places = {tile.place: i for i, tile in enumerate(self.tiles)}
        return {**places, (len(self.kv_lens), 0, 0): len(self.tiles)}

    def walk(self, lane) -> list[tuple[int, int, int]]:
        """(tile, first unit, last unit + 1) of each piece, as a worker goes through them."""
        (*begin, unit), (*end, end_unit) = lane["begin"], lane["end"]
        tile, end = self.places[tuple(begin)], self.places[tuple(end)]
        if unit == WHOLE:
            tile, unit = tile + 1, 0
        pieces = []
        while (tile, unit) < (end, end_unit):
            stop = end_unit if tile == end else WHOLE
            pieces.append((tile, unit, stop))
            tile, unit = tile + 1, 0
        return pieces

    @functools.cached_property
    def work(self) -> list[list[tuple[int, int, int]]]:
        return [self.walk(lane) for lane in self.lanes]

    @functools.cached_property
    def pieces(self) -> dict[int, list[tuple[int, int, int]]]:
        """Of each tile: (lane, first unit, last unit + 1)."""
        pieces = {i: [] for i in range(len(self.tiles))}
        for lane, work in enumerate(self.work):
            for tile, begin, end in work:
                pieces[tile].append((lane, begin, end))
        return pieces

    def cost(self, tile) -> int:
        return len(self.tiles[tile].units) + self.shape["tile_cost"]

    @functools.cached_property
    def line(self) -> list[int]:
        """Where each tile begins, and the end."""
        return list(itertools.accumulate(map(self.cost, range(len(self.tiles))), initial=0))

    def on_the_line(self, position) -> int:
        *place, unit = position
        tile = self.places[tuple(place)]
        if unit == 0 or tile == len(self.tiles):
            return self.line[tile]
        if unit == WHOLE:
            return self.line[tile + 1]
        return self.line[tile] + self.shape["tile_cost"] + unit - self.tiles[tile].units.start

    @functools.cached_property
    def loads(self) -> list[int]:
        """How much of the line each lane has."""
        return [self.on_the_line(x["end"]) - self.on_the_line(x["begin"]) for x in self.lanes]

    @property
    def splits(self) -> int:
        """Most pieces of a tile."""
        return max(map(len, self.pieces.values()), default=0)

    # What every plan owes

    def check(self) -> Plan:
        self.check_shape()
        self.check_coverage()
        self.check_pieces()
        self.check_balance()
        return self

    def check_shape(self) -> None:
        shape, (q_heads, kv_heads) = self.shape, self.heads
        assert shape["batch"] == len(self.kv_lens)
        assert shape["group"] == q_heads // kv_heads
        assert shape["chains"] * shape["heads_per_chain"] == kv_heads
        assert shape["chains"] * shape["lanes"] <= max(self.sms, shape["chains"])
        assert len(self.lanes) == shape["lanes"] <= 256
        assert shape["rows"] in (8, 16, 32)
        assert bool(shape["piece_units"]) == self.batch_invariant

    def check_coverage(self) -> None:
        """Each tile is covered from end to end, each unit that a row sees exactly once."""
        for tile, pieces in self.pieces.items():
            edges = [0, *(end for _, _, end in pieces)]
            assert [begin for _, begin, _ in pieces] == edges[:-1], f"{self.tiles[tile]}: {pieces}"
            assert edges[-1] == WHOLE, f"{self.tiles[tile]}: {pieces}"
        for tile, pieces in self.pieces.items():
            units = self.tiles[tile].units
            if len(units) <= 4096:
                seen = Counter(
                    unit
                    for _, begin, end in pieces
                    for unit in range(max(begin, units.start), min(end, units.stop))
                )
                assert seen == Counter(units)

    def check_pieces(self) -> None:
        """How a tile's pieces are numbered, where they are cut and how many they are."""
        for tile, pieces in self.pieces.items():
            place, units = self.tiles[tile].place, self.tiles[tile].units
            first = pieces[0][0]
            inside = [
                i
                for i, lane in enumerate(self.lanes)
                if i > first and (*lane["begin"][:3],) == place and 0 < lane["begin"][3] < WHOLE
            ] if len(pieces) > 1 else []  # fmt: skip
            count = len(inside) + 1
            assert inside == [*range(first + 1, first + count)], "lanes in a row"
            for piece, i in enumerate(inside, 1):
                lane = self.lanes[i]
                assert (lane["first_lane"], lane["first_piece"]) == (first, piece)
                assert lane["first_pieces"] == count
            if count > 1:
                assert self.lanes[first]["last_pieces"] == count
            cuts = [begin for _, begin, _ in pieces[1:]]
            assert all(units.start < cut < units.stop for cut in cuts), "a piece without keys"
            if self.batch_invariant:
                size = self.shape["piece_units"]
                assert size == 64
                assert all(cut % size == 0 for cut in cuts)
                grid = -(-units.stop // size) - units.start // size
                assert len(pieces) <= max(1, grid) <= max(1, self.shape["max_pieces"])
                continue
            assert count == len(pieces), "an empty piece"
            assert not self.num_splits or count <= self.num_splits
            if count > 1 and max(map(len, self.work)) > 1:
                edges = [units.start, *cuts, units.stop]
                assert all(end - begin >= LEAST for begin, end in itertools.pairwise(edges))

    def check_balance(self) -> None:
        """The slowest lane is as close to even as its kind of cut allows."""
        if not self.tiles:
            return
        shape, lanes = self.shape, self.workers
        slowest, even = max(self.loads), -(-sum(self.loads) // lanes)
        largest = max(map(self.cost, range(len(self.tiles))))
        assert sum(self.loads) == self.line[-1]
        if self.batch_invariant:
            assert slowest <= even + shape["piece_units"] + shape["tile_cost"]
            return
        if self.num_splits in (1, 2):
            assert slowest <= even + largest
            if len(self.tiles) > lanes:
                self.check_nearest(even, largest)
        else:
            share = max(even, 16)
            if self.num_splits:
                share = max(share, -(-(largest - shape["tile_cost"]) // (self.num_splits - 2)))
            assert slowest <= share + 2 * shape["split_cost"] + shape["tile_cost"] + 2 * LEAST
        if len(self.tiles) <= lanes:
            self.check_dealt()

    def check_nearest(self, even, largest) -> None:
        """Lanes begin between tiles, where it is nearest to even."""
        for i, lane in enumerate(self.lanes):
            distance = abs(self.on_the_line(lane["begin"]) - min(i * even, self.line[-1]))
            assert 2 * distance <= largest

    def check_dealt(self) -> None:
        """Lanes enough: a tile has lanes of its own, unless cutting the line evenly is faster."""
        shape, lanes = self.shape, self.workers
        units = [len(tile.units) for tile in self.tiles]
        times = {}
        for count in range(1, min(self.num_splits or lanes, lanes) + 1):
            piece = max(1, -(-max(units) // count))
            if sum(max(1, -(-n // piece)) for n in units) <= lanes:
                times[count] = piece + shape["split_cost"] * (count > 1)
        if max(map(len, self.work)) <= 1:
            longest = max(
                min(end, self.tiles[tile].units.stop) - max(begin, self.tiles[tile].units.start)
                for tile, pieces in self.pieces.items()
                for _, begin, end in pieces
            )
            assert longest + shape["split_cost"] * (self.splits > 1) <= min(times.values())
        else:
            assert max(self.loads) < min(times.values()) + shape["tile_cost"]


# Batches


def decodes(*kv_lens):
    return [(1, kv_len) for kv_len in kv_lens]


BATCHES = {
    "none": [],
    "one": decodes(1),
    "one_of_nothing": decodes(0),
    "one_without_queries": [(0, 500)],
    "nothing_at_all": [(0, 0)] * 7,
    "short": decodes(200),
    "some_short": decodes(70, 330, 0, 512),
    "one_among_empties": decodes(*[0] * 9, 960, *[0] * 9),
    "long": decodes(131_072),
    "edges": decodes(0, 1, 31, 32, 33, 63, 64, 65, 2047, 2048, 2049, 4096),
    "empties_between": [(0, 9), (1, 700), (0, 0), (0, 5000), (1, 0), (3, 900), (0, 70)],
    "lanes_exactly": decodes(*range(100, 1700, 100)),
    "one_tile_more_than_lanes": decodes(*range(100, 1800, 100)),
    "one_long_many_short": decodes(*[512] * 31, 131_072, *[512] * 32),
    "hundred": decodes(*(37 * i * i % 9001 for i in range(100))),
    "padded": [*decodes(*[3000] * 20), *[(0, 0)] * 200],
    "speculative": [(n % 8 + 1, 700 * n) for n in range(1, 30)],
    "prefill": [(2048, 2048), (1, 900), (77, 5000)],
    "chunk": [(512, 16_384)],
    "long_queries": [(1500, 1500), (1025, 30_000), *decodes(*[900] * 60)],
    "queries_longer_than_keys": [(100, 3), (40, 0), (9, 8)],
}
OPTIONS = {
    "plain": {},
    "window": {"window": (1000, 0)},
    "narrow_window": {"window": (40, 3), "causal": False},
    "noncausal": {"causal": False},
    "unsplit": {"num_splits": 1},
    "halves": {"num_splits": 2},
    "thirds": {"num_splits": 3},
    "splits7": {"num_splits": 7},
    "invariant": {"batch_invariant": True},
    "invariant_window": {"batch_invariant": True, "window": (1000, 0)},
    "invariant_splits": {"batch_invariant": True, "num_splits": 3},
    "one_kv_head": {"heads": (8, 1)},
    "ten_kv_heads": {"heads": (70, 10)},
    "group64": {"heads": (64, 1)},
    "many_kv_heads": {"heads": (160, 160)},
    "one_sm": {"sms": 1},
    "head_dim64": {"head_dim": (64, 64)},
    "head_dim192_128": {"head_dim": (192, 128)},
    "head_dim256": {"head_dim": (256, 256)},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("batch", BATCHES)
def test_plan(batch, options):
    Plan.of(*BATCHES[batch], **OPTIONS[options]).check()


def test_model_sees_what_the_reference_sees():
    """The model's keys of a row, against the mask of the reference."""
    for causal, window in itertools.product((True, False), ((-1, -1), (5, 0), (0, 7), (9, -1))):
        for q_len, kv_len in itertools.product((1, 3, 20), (0, 1, 17, 40)):
            plan = Plan.of((q_len, kv_len), causal=causal, window=window)
            for row in range(q_len):
                mask = reference.visible_keys(row, q_len, kv_len, causal, window)
                assert [*plan.visible(row, q_len, kv_len)] == mask.nonzero()[0].tolist()


def test_five_thousand_sequences():
    Plan.of(*decodes(*(i * i % 1777 for i in range(5000)))).check()


def test_one_query_a_sequence_without_offsets():
    lens = [700, 0, 90, 3000]
    without = Plan(None, lens).check()
    assert without.lanes == Plan.of(*decodes(*lens)).lanes


def test_plans_are_reproducible():
    batch = BATCHES["hundred"]
    assert Plan.of(*batch).lanes == Plan.of(*batch).lanes


@pytest.mark.parametrize("bound", [6, 7, 100, INT_MAX])
def test_bounds_are_only_bounds(bound):
    """Looser bounds may change the tiles' rows, not what is covered."""
    Plan.of((6, 300), (1, 4000), (2, 77), max_seqlen_q=bound, max_seqlen_k=INT_MAX).check()


# The plans of the benchmarks


def pieces_of_lanes(plan) -> list[int]:
    return [len(work) for work in plan.work]


def test_uniform_batch_of_whole_tiles():
    """64 x 8192 over 8 KV heads: 16 lanes for each head, 4 whole tiles a lane."""
    plan = Plan.of(*decodes(*[8192] * 64)).check()
    assert (plan.shape["chains"], plan.shape["lanes"]) == (8, 16)
    assert plan.splits == 1
    assert pieces_of_lanes(plan) == [4] * 16


@pytest.mark.parametrize(("batch", "context"), [(16, 1024), (16, 8192), (64, 1024), (256, 2048)])
def test_uniform_batches_are_not_cut(batch, context):
    plan = Plan.of(*decodes(*[context] * batch)).check()
    assert plan.splits == 1
    assert pieces_of_lanes(plan) == [batch // 16] * 16


@pytest.mark.parametrize("clusters", [False, True])
@pytest.mark.parametrize("context", [1024, 8192, 131_072])
def test_one_sequence_takes_all_lanes(context, clusters):
    """Equal pieces of each of 8 KV heads; 8 lanes are one cluster."""
    plan = Plan.of((1, context), clusters=clusters).check()
    lanes = 8 if clusters else 16
    assert plan.shape["in_clusters"] == clusters
    assert plan.splits == lanes
    assert pieces_of_lanes(plan) == [1] * lanes
    sizes = [end - begin for _, begin, end in plan.pieces[0][:-1]]
    assert sizes == [context // KEYS // lanes] * (lanes - 1)


@pytest.mark.parametrize(("sequences", "options"), [
    ([(1, 500), (1, 500)], {}),  # two tiles a KV head
    ([(3, 500)], {}),  # 12 rows
    ([(1, 500)], {"heads": (64, 4)}),  # 16 rows
    ([(1, 500)], {"heads": (8, 2)}),  # 16 multiprocessors would work
    ([(1, 500)], {"heads": (28, 7)}),  # 56
    ([(1, 500)], {"heads": (32, 16)}),  # 16 clusters do not fit at once
    ([(1, 500)], {"heads": (33, 33)}),
    ([(1, 500)], {"sms": 60}),
    ([(1, 500)], {"batch_invariant": True}),
], ids=str)  # fmt: skip
def test_what_is_not_for_clusters(sequences, options):
    plan, without = (Plan.of(*sequences, **options, clusters=x).check() for x in (True, False))
    assert not plan.shape["in_clusters"]
    assert plan.lanes == without.lanes


@pytest.mark.parametrize("heads", [(36, 9), (32, 8), (14, 14)])
@pytest.mark.parametrize("kv_len", [0, 1, 31, 200, 257, 5000])
def test_a_clusters_lanes_are_its_pieces(heads, kv_len):
    """Piece i is lane i's: by that the thread blocks of a cluster find each other."""
    for options in ({}, {"window": (40, 0)}, {"num_splits": 3}, {"num_splits": 20}):
        plan = Plan.of((1, kv_len), heads=heads, **options).check()
        assert plan.shape["in_clusters"]
        assert plan.shape["lanes"] == 8
        assert [len(pieces) for pieces in plan.work] == [1] * plan.splits + [0] * (8 - plan.splits)


def test_a_long_sequence_among_short_ones_is_shared():
    """One of 131,072 keys, 63 of 512: no lane has a tenth more than its share."""
    for place in (0, 20, 63):
        lens = [512] * 63
        lens.insert(place, 131_072)
        plan = Plan.of(*decodes(*lens)).check()
        assert max(plan.loads) <= 1.1 * sum(plan.loads) / len(plan.loads)
        assert plan.splits > 8


@pytest.mark.parametrize("num_splits", range(1, 20))
def test_num_splits_is_the_most(num_splits):
    """And is used, where a sequence is alone."""
    for clusters, most in ((False, 16), (True, 8)):
        plan = Plan.of((1, 65_536), num_splits=num_splits, clusters=clusters).check()
        assert plan.splits == min(num_splits, most)
    Plan.of(*BATCHES["one_long_many_short"], num_splits=num_splits).check()


@pytest.mark.parametrize("num_splits", [4, 5, 6, 9])
def test_num_splits_is_the_most_wherever_the_cuts_fall(num_splits):
    for before in range(0, 6000, 100):
        lens = [before, 60_000, *[500] * 40]
        assert Plan.of(*decodes(*lens), num_splits=num_splits).check().splits > 1


@pytest.mark.parametrize("q_len", [1, 2, 4, 8])
def test_few_queries_share_a_tile(q_len):
    """Up to 32 packed rows are one tile: 8 tokens of 4 heads cost what one token does."""
    plan = Plan.of(*[(q_len, 8192)] * 32).check()
    assert len(plan.tiles) == 32
    assert plan.shape["rows"] == max(8, 4 * q_len)


def test_a_window_is_all_that_costs():
    """Keys outside the window are nobody's work: every lane has the same, wherever it ends."""
    near, far = (Plan.of(*decodes(*[n] * 64), window=(1023, 0)).check() for n in (2048, 200_000))
    assert near.loads == far.loads


# Batch-invariant plans


def test_invariant_tiles_depend_on_the_sequence_alone():
    """The rows of a tile and the size of a piece are the same whatever stands in the batch."""
    shapes = [
        Plan.of(*batch, batch_invariant=True).shape
        for batch in ([(1, 5000)], [(1, 5000), (300, 300)], [(7, 9), (1, 5000)], [(1, 5000)] * 99)
    ]
    assert len({(shape["rows"], shape["piece_units"]) for shape in shapes}) == 1


def test_invariant_plans_ignore_num_splits():
    plans = [Plan.of(*BATCHES["hundred"], batch_invariant=True, num_splits=n) for n in (0, 1, 5)]
    assert plans[0].lanes == plans[1].lanes == plans[2].lanes


@pytest.mark.parametrize("left", [*range(0, 2100, 70), 3000, 5000])
def test_invariant_windows_begin_inside_a_piece(left):
    """The window cuts a piece; the first lane still begins where the line does."""
    for lens in ([6000], [6000, 3000], [6000] * 20):
        Plan.of(*decodes(*lens), batch_invariant=True, window=(left, 0)).check()


# Any batch


@st.composite
def plans(draw, **fixed):
    pick = lambda *options: draw(st.sampled_from(options))  # noqa: E731
    longest = pick(70, 9000, 9000, 200_000)
    lens = st.integers(0, 70) | st.integers(longest // 4, longest)
    queries = pick(st.just(1), st.just(1), st.integers(0, 4), st.integers(0, 40))
    kv_heads = pick(1, 2, 4, 8, 8, 10, 20, draw(st.integers(1, 70)))
    options = {
        "heads": (kv_heads * pick(1, 4, 8, draw(st.integers(1, 20))), kv_heads),
        "head_dim": pick((128, 128), (64, 64), (192, 128), (256, 256), (8, 8)),
        "sms": pick(H200, H200, H200, 108, 144, draw(st.integers(1, 200))),
        "causal": draw(st.booleans()),
        "window": pick((-1, -1), (-1, -1), (draw(lens), draw(st.integers(-1, 60)))),
        "num_splits": pick(0, 0, 0, 0, 1, 2, 3, 4, 7, 16, 300),
        "batch_invariant": draw(st.booleans()),
    }
    count = pick(draw(st.integers(0, 3)), draw(st.integers(4, 50)))
    sequence = st.tuples(queries, lens)
    sequences = draw(st.lists(sequence, min_size=count, max_size=count))
    copies = pick(1, 1, 9)
    return Plan.of(*sequences * copies, **{**options, **fixed})


@given(plan=plans())
def test_any_plan(plan):
    plan.check()


@given(plan=plans(batch_invariant=True))
def test_any_invariant_plan(plan):
    plan.check()


# Metadata that nobody should believe

int32s = st.integers(INT_MIN, INT_MAX) | st.sampled_from(
    [INT_MIN, INT_MIN + 1, -1, 0, 1, INT_MAX - 1, INT_MAX]
)


@given(
    offsets=st.lists(int32s, min_size=2, max_size=9),
    lens=st.lists(int32s, min_size=8, max_size=8),
    window=st.sampled_from([(-1, -1), (100, 0), (INT_MAX, 0), (0, INT_MAX), (2**40, -1)]),
    num_splits=st.sampled_from([0, 1, 5, 2**40]),
    batch_invariant=st.booleans(),
    longest=st.sampled_from([1, 8, 70]),
)
@example([0, 5, 3, 9], [100] * 8, (-1, -1), 0, False, 8)
@example([-7, 2, -3, 4], [100] * 8, (-1, -1), 0, False, 8)
@example([INT_MIN, INT_MAX], [INT_MAX] * 8, (-1, -1), 0, False, 70)
@example([0, INT_MAX, 0, INT_MAX], [INT_MAX, INT_MIN, INT_MAX] * 3, (100, 0), 5, False, 70)
@example([0, 70], [INT_MAX] * 8, (-1, -1), 0, True, 70)
@example([0, 1, 2, 3, 4, 5, 6, 7, 8], [INT_MAX] * 8, (INT_MAX, 0), 0, True, 1)
def test_wrong_metadata(offsets, lens, window, num_splits, batch_invariant, longest):
    """Ends, and stays among the sequences, heads and row tiles that there are."""
    lens = lens[: len(offsets) - 1]
    plan = Plan(offsets, lens, max_seqlen_q=longest, max_seqlen_k=5000, window=window,
                num_splits=num_splits, batch_invariant=batch_invariant)  # fmt: skip
    plan.check_shape()
    plan.check_coverage()
    for lane in plan.lanes:
        assert 0 <= lane["first_piece"] < max(1, lane["first_pieces"]) <= 256
        assert 0 <= lane["first_lane"] < len(plan.lanes)
