#pragma once

// The order in which the prefill kernels take their work. An item is a tile of query tokens of one
// sequence, with all heads of one KV head's group, over all keys that it sees.
//
// Items are counted sequence by sequence. Within a sequence, so many KV heads are taken together as
// the L2 cache holds keys and values of: all their tiles, those with the most keys first. Then the
// next heads. Every tile of a KV head reads the same keys, so from memory they come once.

#include "attention/plan.h"

#include <cstdint>

namespace pagetile {

struct PrefillShape {
    int32_t tokens = 1;  // of a tile
    int32_t num_kv_heads = 1;
    int32_t keys_in_cache = 1;  // of one KV head, in the L2 cache
};

PAGETILE_HOST_DEVICE int32_t prefill_tiles(const PrefillShape& shape, int32_t q_len) {
    return static_cast<int32_t>(divide_up(q_len, shape.tokens));
}

PAGETILE_HOST_DEVICE int32_t prefill_items(const PrefillShape& shape, int32_t q_len) {
    return prefill_tiles(shape, q_len) * shape.num_kv_heads;
}

// Where an item of a sequence is.
struct PrefillPlace {
    int32_t kv_head;
    int32_t tile;
};

PAGETILE_HOST_DEVICE PrefillPlace
prefill_place(const PrefillShape& shape, int32_t q_len, int32_t kv_len, uint32_t item) {
    const auto tiles = static_cast<uint32_t>(prefill_tiles(shape, q_len));
    const auto all_heads = static_cast<uint32_t>(shape.num_kv_heads);
    const auto fit = static_cast<uint32_t>(shape.keys_in_cache / (kv_len > 0 ? kv_len : 1));
    uint32_t heads = fit < 1 ? 1 : fit < all_heads ? fit : all_heads;
    const uint32_t first_head = item / (tiles * heads) * heads;
    const uint32_t in_group = item - first_head * tiles;
    heads = heads < all_heads - first_head ? heads : all_heads - first_head;
    return {
        static_cast<int32_t>(first_head + in_group % heads),
        static_cast<int32_t>(tiles - 1 - in_group / heads),
    };
}

// The last items of a launch, which no longer are one for each CTA, are cut into pieces by their keys,
// so that all CTAs end together. CTAs claim one number after another: an item, or a piece of one.
struct PrefillCuts {
    uint32_t whole = 0xffffffff;  // items that are not cut, the first ones
    uint32_t cut = 0;             // those behind them
    uint32_t pieces = 1;          // of each of those
};

inline constexpr uint32_t kMostPieces = 8;

PAGETILE_HOST_DEVICE PrefillCuts cut_items(uint32_t items, uint32_t ctas, uint32_t most_pieces) {
    constexpr uint32_t kRound = 840;  // the time of an item, which pieces up to kMostPieces divide
    constexpr uint32_t kPiece = 20;   // what a piece costs besides its keys
    const uint32_t last = items % ctas;
    uint32_t pieces = 1;
    uint32_t least = kRound;
    for (uint32_t n = 2; n <= most_pieces && last * n <= 2 * ctas; ++n) {
        const uint32_t rounds = (last * n + ctas - 1) / ctas;
        const uint32_t time = rounds * kRound / n + kPiece * n;
        pieces = time < least ? n : pieces;
        least = time < least ? time : least;
    }
    return pieces == 1 ? PrefillCuts{} : PrefillCuts{items - last, last, pieces};
}

// What a number stands for.
struct PrefillClaim {
    uint32_t item;
    uint32_t piece;
};

PAGETILE_HOST_DEVICE PrefillClaim claim_of(const PrefillCuts& cuts, uint32_t number) {
    if (number < cuts.whole) {
        return {number, 0};
    }
    const uint32_t behind = number - cuts.whole;
    return {cuts.whole + behind / cuts.pieces, behind % cuts.pieces};
}

// Tiles of keys [first, end), taken from the last one down.
struct KeyTiles {
    int32_t first;
    int32_t end;
};

// A piece of an item's tiles, the last ones first.
PAGETILE_HOST_DEVICE KeyTiles piece_of(KeyTiles tiles, uint32_t piece, uint32_t pieces) {
    const auto n = static_cast<uint32_t>(tiles.end - tiles.first);
    return {
        tiles.end - static_cast<int32_t>(n * (piece + 1) / pieces),
        tiles.end - static_cast<int32_t>(n * piece / pieces),
    };
}

}  // namespace pagetile

namespace pagetile::gpu {

// What a prefill kernel is launched with, besides what all attention kernels are.
struct PrefillSchedule {
    PrefillShape shape;
    uint32_t* next_item;  // 0 between launches
};

}  // namespace pagetile::gpu
