#pragma once

// How a plan is made: what there is to do, who shares the multiprocessors, where the line is cut. As
// plan.h, host and device code.

#include "attention/plan.h"

#include <cstdint>

namespace pagetile {

// Sums over the tiles of sequences, and their largest.
struct PlanTotals {
    int64_t tiles;
    int64_t cost;
    int32_t max_units;
    int64_t long_time;  // of one multiprocessor for all long sequences, in picoseconds
};

// Pairs of query token and key of a long sequence, from what five of its tokens see: exact where that
// rises evenly, and near where a window ends the rise.
PAGETILE_HOST_DEVICE int64_t num_pairs(const PlanShape& shape, PlanLengths lengths) {
    constexpr int32_t kParts = 4;
    const int64_t q_len = lengths.long_q_len;
    int64_t seen = 0;  // twice, by the token at each part's beginning and end
    for (int32_t i = 0; q_len > 0 && i <= kParts; ++i) {
        const auto token = static_cast<int32_t>((q_len - 1) * i / kParts);
        const KeyRange keys = visible_keys(shape, lengths.long_q_len, lengths.kv_len, token);
        const int64_t by_token = larger_of(keys.end - static_cast<int64_t>(keys.begin), 0);
        seen += i == 0 || i == kParts ? by_token : 2 * by_token;
    }
    return seen * q_len / (2 * kParts);
}

PAGETILE_HOST_DEVICE PlanTotals sequence_totals(const PlanShape& shape, PlanLengths lengths) {
    PlanTotals totals = {0, 0, 0, num_pairs(shape, lengths) * shape.pair_time};
    const int32_t row_tiles = num_row_tiles(shape, lengths.q_len);
    for (int32_t m = 0; m < row_tiles; ++m) {
        const UnitSpan span = tile_units(shape, lengths.q_len, lengths.kv_len, m);
        const int32_t units = span.end - span.begin;
        totals.cost += units + shape.tile_cost;
        totals.max_units = units > totals.max_units ? units : totals.max_units;
    }
    totals.cost *= shape.heads_per_chain;
    totals.tiles = static_cast<int64_t>(row_tiles) * shape.heads_per_chain;
    return totals;
}

PAGETILE_HOST_DEVICE PlanTotals add_totals(const PlanTotals& a, const PlanTotals& b) {
    return {
        a.tiles + b.tiles,
        a.cost + b.cost,
        a.max_units > b.max_units ? a.max_units : b.max_units,
        a.long_time + b.long_time,
    };
}

// How the plan's lanes and the prefill kernel share the multiprocessors, so that both end together.
struct SmShare {
    int32_t lanes;
    int32_t prefill_ctas;
};

PAGETILE_HOST_DEVICE SmShare share_sms(const PlanShape& shape, const PlanTotals& totals) {
    const int64_t short_time = totals.cost * shape.chains * shape.unit_time;
    const int64_t all_time = short_time + totals.long_time;
    const bool has_both = short_time > 0 && totals.long_time > 0;
    const int64_t sms = has_both ? shape.num_sms * (short_time / 1000) / (all_time / 1000 + 1) : 0;
    const int64_t lanes = smaller_of((sms + shape.chains / 2) / shape.chains, shape.lanes);
    // Less than half a lane: then better all lanes, once the prefill kernel has ended.
    if (lanes == 0 || lanes * shape.chains >= shape.num_sms) {
        return {shape.lanes, shape.num_sms};
    }
    return {
        static_cast<int32_t>(lanes),
        static_cast<int32_t>(shape.num_sms - lanes * shape.chains),
    };
}

// How the line is cut.
enum class Cut : int32_t {
    kWhole,   // between tiles only, the nearest to even
    kEven,    // evenly, inside tiles too
    kPieces,  // the nearest to even that is a multiple of piece_units
    kDealt,   // no more tiles than lanes: a tile has lanes of its own, each an equal piece
};

// The lanes' fair share of the line. Never so small that two of kEven's cuts could meet.
PAGETILE_HOST_DEVICE int64_t fair_share(const PlanShape& shape, const PlanTotals& totals, Cut cut) {
    int64_t share = larger_of(divide_up(totals.cost, shape.lanes), 1);
    if (cut == Cut::kEven) {
        share = larger_of(share, 16);
        if (shape.max_splits > 2) {  // a tile is then cut at most max_splits - 1 times
            share = larger_of(share, divide_up(totals.max_units, shape.max_splits - 1));
        }
    }
    return share;
}

// kDealt: pieces of a tile when the largest tile has `pieces_of_largest`.
PAGETILE_HOST_DEVICE int32_t
dealt_pieces(int32_t units, int32_t max_units, int32_t pieces_of_largest) {
    const int64_t piece = larger_of(divide_up(max_units, pieces_of_largest), 1);
    return static_cast<int32_t>(larger_of(divide_up(units, piece), 1));
}

// kDealt: the most pieces of a tile.
PAGETILE_HOST_DEVICE int32_t most_pieces(const PlanShape& shape) {
    return shape.max_splits > 0 && shape.max_splits < shape.lanes ? shape.max_splits : shape.lanes;
}

// kDealt: the lanes that the tiles of a sequence take.
PAGETILE_HOST_DEVICE int32_t dealt_lanes(
    const PlanShape& shape, int32_t max_units, int32_t pieces_of_largest, PlanLengths lengths
) {
    const int32_t row_tiles = num_row_tiles(shape, lengths.q_len);
    int32_t lanes = 0;
    for (int32_t m = 0; m < row_tiles; ++m) {
        const UnitSpan span = tile_units(shape, lengths.q_len, lengths.kv_len, m);
        lanes += dealt_pieces(span.end - span.begin, max_units, pieces_of_largest);
    }
    return lanes * shape.heads_per_chain;
}

// The time, in units, of the slowest lane where the largest tile is cut into `pieces`.
PAGETILE_HOST_DEVICE int64_t dealt_time(const PlanShape& shape, int32_t max_units, int32_t pieces) {
    return divide_up(max_units, pieces) + (pieces > 1 ? shape.split_cost : 0);
}

// Where target x of the line falls in the tile at [first, first + tile_cost + units): the unit
// before which to cut; 0 and kWholeTile are the tile's two ends.
PAGETILE_HOST_DEVICE int32_t
cut_unit(const PlanShape& shape, Cut cut, UnitSpan span, int64_t offset) {
    const int64_t units = span.end - span.begin;
    const int64_t in_tile = offset - shape.tile_cost;  // < 0: in the cost of starting it
    if (cut == Cut::kWhole) {
        return 2 * offset <= units + shape.tile_cost ? 0 : kWholeTile;
    }
    if (in_tile <= 0) {
        return 0;
    }
    if (cut == Cut::kPieces) {
        const int64_t unit = span.begin + in_tile;
        const int64_t nearest =
            (unit + shape.piece_units / 2) / shape.piece_units * shape.piece_units;
        return nearest <= span.begin ? 0
               : nearest >= span.end ? kWholeTile
                                     : static_cast<int32_t>(nearest);
    }
    static constexpr int64_t kLeast = 4;  // units of a piece
    if (in_tile < kLeast || units < 2 * kLeast) {
        return 0;
    }
    return static_cast<int32_t>(span.begin + smaller_of(in_tile, units - kLeast));
}

// Both sides of the cut between lane - 1 and lane.
PAGETILE_HOST_DEVICE void write_cut(LaneWork* work, int32_t lanes, int32_t lane, Position cut) {
    if (lane < lanes) {
        work[lane].begin = cut;
    }
    if (lane > 0) {
        work[lane - 1].end = cut;
    }
}

// The line is empty behind its end: lanes that no cut reaches have nothing to do.
PAGETILE_HOST_DEVICE void clear_lane(const PlanShape& shape, LaneWork* work, int32_t lane) {
    const Position end = {shape.batch, 0, 0, 0};
    work[lane] = {end, end, {0, 0, 1, 1}, {}};
    work[lane].first.q_len = -1;
}

// kWhole, kEven, kPieces: writes every cut that falls into the tiles of a sequence, which begin at
// `first` on the line. Lane c begins at c * share, moved to where cut_unit allows; targets fall
// into [first, first + cost), so each is met once. Returns where on the line each of those cuts
// went through `moved` (may be null), to tell how even the lanes are.
PAGETILE_HOST_DEVICE void cut_sequence(
    const PlanShape& shape,
    Cut cut,
    int64_t share,
    int64_t first,
    int32_t batch_idx,
    PlanLengths lengths,
    LaneWork* work,
    int64_t* moved
) {
    const int32_t row_tiles = num_row_tiles(shape, lengths.q_len);
    int64_t lane = divide_up(first, share);
    for (int32_t head = 0; head < shape.heads_per_chain; ++head) {
        for (int32_t m = 0; m < row_tiles && lane < shape.lanes; ++m) {
            const UnitSpan span = tile_units(shape, lengths.q_len, lengths.kv_len, m);
            const int64_t cost = span.end - span.begin + shape.tile_cost;
            int32_t inside = 0;  // cuts inside the tile so far, all of lanes in a row
            int32_t first_cut = 0;
            for (; lane < shape.lanes && lane * share < first + cost; ++lane) {
                const auto c = static_cast<int32_t>(lane);
                const int32_t unit = cut_unit(shape, cut, span, lane * share - first);
                write_cut(work, shape.lanes, c, {batch_idx, head, m, unit});
                if (moved != nullptr) {
                    moved[c] = unit == 0 ? first : unit == kWholeTile ? first + cost : lane * share;
                }
                if (unit != 0 && unit != kWholeTile) {
                    first_cut = inside == 0 ? c : first_cut;
                    ++inside;
                    work[c].cuts.first_lane = first_cut - 1;
                    work[c].cuts.first_piece = c - first_cut + 1;
                }
            }
            for (int32_t c = first_cut; c < first_cut + inside; ++c) {
                work[c].cuts.first_pieces = inside + 1;
            }
            if (inside > 0) {
                work[first_cut - 1].cuts.last_pieces = inside + 1;
            }
            first += cost;
        }
    }
}

// kDealt: the lanes of a sequence's tiles, of which the first is `lane`.
PAGETILE_HOST_DEVICE void deal_sequence(
    const PlanShape& shape,
    int32_t max_units,
    int32_t pieces_of_largest,
    int32_t lane,
    int32_t batch_idx,
    PlanLengths lengths,
    LaneWork* work
) {
    const int32_t row_tiles = num_row_tiles(shape, lengths.q_len);
    for (int32_t head = 0; head < shape.heads_per_chain; ++head) {
        for (int32_t m = 0; m < row_tiles; ++m) {
            const UnitSpan span = tile_units(shape, lengths.q_len, lengths.kv_len, m);
            const int32_t units = span.end - span.begin;
            const int32_t pieces = dealt_pieces(units, max_units, pieces_of_largest);
            for (int32_t i = 0; i < pieces; ++i) {
                const auto at = [&](int64_t piece) {
                    return span.begin + static_cast<int32_t>(units * piece / pieces);
                };
                work[lane + i] = {
                    {batch_idx, head, m, i == 0 ? 0 : at(i)},
                    {batch_idx, head, m, i == pieces - 1 ? kWholeTile : at(i + 1)},
                    {lane, i, pieces, pieces},
                    {},
                };
            }
            lane += pieces;
        }
    }
}

// Once all lanes are cut. Lanes that begin behind a tile are left to find the next one themselves.
PAGETILE_HOST_DEVICE void work_out_first(
    const PlanShape& shape, LaneWork& work, int32_t lane, PlanLengths lengths
) {
    work.first = {};
    work.first.q_len = -1;
    if (work.begin.batch_idx >= shape.batch || work.begin.unit == kWholeTile ||
        is_behind(work.begin, work.end)) {
        return;
    }
    const TileKeys keys = keys_of_tile(shape, lengths.q_len, lengths.kv_len, work.begin.row_tile);
    const TilePart part = tile_part(shape, work.end, work.cuts, lane, work.begin, keys);
    if (part.pieces < 0) {
        return;
    }
    work.first.q_len = lengths.q_len;
    work.first.kv_len = lengths.kv_len;
    work.first.keys = keys;
    work.first.part = part;
    work.first.item_end = item_end(shape, part.unit_begin, part.unit_end);
    work.first.has_more =
        work.first.item_end < part.unit_end || !is_same_tile(work.begin, work.end) ? 1 : 0;
}

// Runs the whole plan serially. What make_plan does on CPU tensors. Writes plan_bytes().
void plan_on_host(
    const PlanShape& shape,
    const int32_t* cu_seqlens_q,
    const int32_t* seqused_k,
    const int32_t* cu_seqlens_k,
    LaneWork* work
);

}  // namespace pagetile
