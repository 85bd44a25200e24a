#pragma once

// The schedule of the split-KV kernel: who computes which keys of which rows. One line of work, cut
// into as many parts as there are workers.
//
// A tile is up to `rows` packed rows (query token, head of the KV head's group) of one sequence and
// one KV head; its keys are counted in units of 32. The tiles stand on a line, sequence by
// sequence, KV head by KV head, and a lane is a contiguous piece of that line. Where a lane begins
// or ends inside a tile, that tile is split: each lane leaves a partial result of its piece.
//
// KV heads that lie side by side in a page are read at the same time: worker w belongs to chain
// w % chains and takes the KV heads h with h % chains == w % chains. All chains have the same plan.
//
// Everything here is host and device code: the plan kernel runs it in parallel, make_plan on the
// CPU and the tests run it serially, and both write the same bytes.

#include "common/fast_divide.h"

#include <cstdint>

namespace pagetile {

inline constexpr int32_t kPlanKeys = 32;           // keys of a unit
inline constexpr int32_t kWholeTile = 0x7fffffff;  // Position::unit: behind the tile's last key
inline constexpr int32_t kMaxLanes = 256;
inline constexpr int32_t kPieceUnits = 64;  // batch_invariant: pieces of 2048 keys
inline constexpr int32_t kClusterLanes = 8;

// What the host knows of a step, and all that the plan depends on besides the lengths.
struct PlanShape {
    int32_t batch = 0;            // B
    int32_t max_q_len = 0;        // longer queries are cut: metadata cannot be trusted
    int32_t group = 1;            // query heads of a KV head
    int32_t rows = 8;             // packed rows of a tile
    int32_t chains = 1;           // workers side by side
    int32_t heads_per_chain = 1;  // KV heads of a chain, one after the other
    int32_t lanes = 1;            // workers of a chain, at most kMaxLanes
    int32_t long_rows = -1;       // sequences of more packed rows are not in the plan; -1: all are
    // Where another kernel works at those at the same time: the multiprocessors that both share, and
    // the time of one of them, in picoseconds, over a unit of this plan and over a pair of query token
    // and key of theirs. 0: it has them all, before or after.
    int32_t num_sms = 0;
    int32_t unit_time = 0;
    int32_t pair_time = 0;
    bool in_clusters = false;   // a chain's workers are one cluster, and have one tile between them
    int32_t window_left = -1;   // tokens around the diagonal; -1: all
    int32_t window_right = -1;  // causal: 0
    int32_t max_splits = 0;     // of a tile; 0: any number
    int32_t piece_units = 0;    // batch_invariant: tiles are cut at multiples of it; 0: anywhere
    int32_t max_pieces = 0;     // batch_invariant: of a tile
    int32_t tile_cost = 2;      // what a tile costs besides its keys, in units
    int32_t split_cost = 6;     // what a piece of a split tile costs, in units

    bool operator==(const PlanShape&) const = default;
};

// A place on the line: before the unit `unit` of a tile. Unit 0 is the tile's beginning wherever
// its first visible key is, kWholeTile the tile's end.
struct Position {
    int32_t batch_idx;
    int32_t head;      // of the chain
    int32_t row_tile;  // of the sequence
    int32_t unit;
};

// Keys of a tile: those that some row sees, and those that every row sees.
struct TileKeys {
    int32_t first;
    int32_t end;
    int32_t all_begin;
    int32_t all_end;
};

// What a lane has of a tile: units [unit_begin, unit_end), the tile's piece `piece` of `pieces` (or
// several, from that one on, where tiles are cut at multiples of piece_units), and where in the
// chain's workspace the tile's pieces meet.
struct TilePart {
    int32_t unit_begin;
    int32_t unit_end;
    int32_t piece;
    int32_t pieces;
    int32_t place;
};

// The part of its first tile that a lane has, worked out ahead: right while the lengths are these.
struct FirstPart {
    int32_t q_len;  // -1: not worked out
    int32_t kv_len;
    TileKeys keys;
    TilePart part;
    int32_t item_end;  // of the first item: part.unit_end, or the first multiple of piece_units
    int32_t has_more;  // 0: the lane has this item alone
    int32_t padding[3];
};

// Where a lane's ends cut tiles.
struct LaneCuts {
    int32_t first_lane;    // if it begins inside a tile: the lane where that tile begins,
    int32_t first_piece;   // which piece of the tile it has,
    int32_t first_pieces;  // of how many
    int32_t last_pieces;   // if it ends inside a tile that began in this lane: of how many pieces
};

// What one lane does: the line from `begin` to `end`.
struct alignas(16) LaneWork {
    Position begin;
    Position end;
    LaneCuts cuts;
    FirstPart first;
};

static_assert(sizeof(LaneWork) == 112);

// Behind the lanes, where sequences may be long.
struct alignas(16) PlanTail {
    int32_t prefill_ctas;  // of the other kernel, one on a multiprocessor
    int32_t padding[3];
};

PAGETILE_HOST_DEVICE int64_t plan_bytes(const PlanShape& shape) {
    return shape.lanes * static_cast<int64_t>(sizeof(LaneWork)) +
           (shape.num_sms > 0 ? static_cast<int64_t>(sizeof(PlanTail)) : 0);
}

// Units [begin, end).
struct UnitSpan {
    int32_t begin;
    int32_t end;
};

struct KeyRange {
    int32_t begin;
    int32_t end;
};

PAGETILE_HOST_DEVICE int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }

PAGETILE_HOST_DEVICE int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

PAGETILE_HOST_DEVICE int64_t divide_up(int64_t n, int64_t divisor) {
    return (n + divisor - 1) / divisor;
}

// Keys [begin, end) that a query token sees. The last token stands at the last key.
PAGETILE_HOST_DEVICE KeyRange
visible_keys(const PlanShape& shape, int32_t q_len, int32_t kv_len, int32_t token) {
    // Modulo 2^32: the sum on the way may not fit.
    const auto diagonal = static_cast<int32_t>(
        static_cast<uint32_t>(token) + static_cast<uint32_t>(kv_len) - static_cast<uint32_t>(q_len)
    );
    const int32_t left = shape.window_left;
    const int32_t right = shape.window_right;
    KeyRange keys = {0, kv_len};
    if (left >= 0 && diagonal > left) {
        keys.begin = diagonal - left;
    }
    if (right >= 0 && static_cast<int64_t>(diagonal) + right < kv_len - 1) {
        keys.end = diagonal + right >= 0 ? diagonal + right + 1 : 0;
    }
    return keys;
}

// Keys of the rows of tokens from first_token to last_token.
PAGETILE_HOST_DEVICE TileKeys tile_keys(
    const PlanShape& shape, int32_t q_len, int32_t kv_len, int32_t first_token, int32_t last_token
) {
    const KeyRange of_first = visible_keys(shape, q_len, kv_len, first_token);
    const KeyRange of_last = visible_keys(shape, q_len, kv_len, last_token);
    return {
        of_first.begin,
        of_last.end > of_first.begin ? of_last.end : of_first.begin,
        of_last.begin,
        of_first.end,
    };
}

PAGETILE_HOST_DEVICE UnitSpan units_of(const TileKeys& keys) {
    return {
        keys.first / kPlanKeys,
        static_cast<int32_t>((static_cast<uint32_t>(keys.end) + kPlanKeys - 1) / kPlanKeys),
    };
}

PAGETILE_HOST_DEVICE int32_t num_row_tiles(const PlanShape& shape, int32_t q_len) {
    return static_cast<int32_t>(
        (static_cast<int64_t>(q_len) * shape.group + shape.rows - 1) / shape.rows
    );
}

PAGETILE_HOST_DEVICE TileKeys
keys_of_tile(const PlanShape& shape, int32_t q_len, int32_t kv_len, int32_t row_tile) {
    const int64_t first_row = static_cast<int64_t>(row_tile) * shape.rows;
    const int64_t num_rows = static_cast<int64_t>(q_len) * shape.group;
    const int64_t last_row = smaller_of(first_row + shape.rows, num_rows) - 1;
    return tile_keys(
        shape,
        q_len,
        kv_len,
        static_cast<int32_t>(first_row / shape.group),
        static_cast<int32_t>(last_row / shape.group)
    );
}

PAGETILE_HOST_DEVICE UnitSpan
tile_units(const PlanShape& shape, int32_t q_len, int32_t kv_len, int32_t row_tile) {
    const UnitSpan units = units_of(keys_of_tile(shape, q_len, kv_len, row_tile));
    // No key at all: begin and end may round differently.
    return {units.begin, units.end > units.begin ? units.end : units.begin};
}

// Whether the sequence belongs to the prefill kernel.
PAGETILE_HOST_DEVICE bool is_long(const PlanShape& shape, int64_t q_len) {
    return shape.long_rows >= 0 && q_len * shape.group > shape.long_rows;
}

// The lengths of one sequence, as far as they can be believed.
struct PlanLengths {
    int32_t q_len;
    int32_t kv_len;
    int32_t long_q_len;  // of a long sequence, for which q_len is 0
};

PAGETILE_HOST_DEVICE PlanLengths plan_lengths(
    const PlanShape& shape,
    const int32_t* cu_seqlens_q,
    const int32_t* seqused_k,
    const int32_t* cu_seqlens_k,
    int32_t batch_idx
) {
    int64_t q_len = 1;
    if (cu_seqlens_q != nullptr) {
        const int64_t begin = larger_of(0, cu_seqlens_q[batch_idx]);
        q_len = larger_of(0, smaller_of(cu_seqlens_q[batch_idx + 1] - begin, shape.max_q_len));
    }
    int64_t long_q_len = 0;
    if (is_long(shape, q_len)) {
        long_q_len = q_len;
        q_len = 0;
    }
    int64_t kv_len = seqused_k != nullptr ? seqused_k[batch_idx] : 0x7fffffff;
    if (cu_seqlens_k != nullptr) {
        const int64_t begin = larger_of(0, cu_seqlens_k[batch_idx]);
        kv_len = smaller_of(kv_len, cu_seqlens_k[batch_idx + 1] - begin);
    }
    return {
        static_cast<int32_t>(q_len),
        static_cast<int32_t>(larger_of(0, kv_len)),
        static_cast<int32_t>(long_q_len),
    };
}

// Whether a lane that ends at `end` has nothing of the tile at `at` and those behind it.
PAGETILE_HOST_DEVICE bool is_behind(const Position& at, const Position& end) {
    if (at.batch_idx != end.batch_idx) {
        return at.batch_idx > end.batch_idx;
    }
    if (at.head != end.head) {
        return at.head > end.head;
    }
    return at.row_tile > end.row_tile || (at.row_tile == end.row_tile && at.unit >= end.unit);
}

PAGETILE_HOST_DEVICE bool is_same_tile(const Position& a, const Position& b) {
    return a.batch_idx == b.batch_idx && a.head == b.head && a.row_tile == b.row_tile;
}

// Where tiles are cut at multiples of piece_units, an item ends at the first of them.
PAGETILE_HOST_DEVICE int32_t
item_end(const PlanShape& shape, int32_t unit_begin, int32_t unit_end) {
    if (shape.piece_units == 0) {
        return unit_end;
    }
    const int32_t end = (unit_begin / shape.piece_units + 1) * shape.piece_units;
    return end < unit_end ? end : unit_end;
}

// What the lane has of the tile at `at`; at.unit says where in the tile it begins. No pieces at all
// (-1) where the keys that the plan gave to the lane are no longer there.
PAGETILE_HOST_DEVICE TilePart tile_part(
    const PlanShape& shape,
    const Position& end,
    const LaneCuts& cuts,
    int32_t lane,
    const Position& at,
    const TileKeys& keys
) {
    const UnitSpan tile = units_of(keys);
    const bool begins_inside = at.unit != 0;
    const bool ends_inside = is_same_tile(at, end) && end.unit != kWholeTile;
    const bool is_cut = begins_inside || ends_inside;
    TilePart part;
    part.unit_begin = at.unit > tile.begin ? at.unit : tile.begin;
    part.unit_end = ends_inside && end.unit < tile.end ? end.unit : tile.end;
    part.unit_end = part.unit_end > part.unit_begin ? part.unit_end : part.unit_begin;
    const int32_t first_lane = begins_inside ? cuts.first_lane : lane;
    if (shape.piece_units == 0) {
        part.piece = begins_inside ? cuts.first_piece : 0;
        part.pieces = !is_cut ? 1 : begins_inside ? cuts.first_pieces : cuts.last_pieces;
        part.place = 2 * first_lane;
        return part;
    }
    const int32_t first_piece = tile.begin / shape.piece_units;
    part.piece = part.unit_begin / shape.piece_units - first_piece;
    part.pieces = (tile.end + shape.piece_units - 1) / shape.piece_units - first_piece;
    part.place = 2 * first_lane + (is_cut ? 0 : 1);
    const bool has_units = part.unit_begin < part.unit_end;
    if (!has_units && (begins_inside || tile.begin < tile.end)) {
        part.pieces = -1;
    }
    return part;
}

}  // namespace pagetile
