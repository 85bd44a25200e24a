#pragma once

// Tiles of the WGMMA prefill kernel, by head dimensions. For the host as well.

#include "attention/dispatch.h"

#include <cstdint>

namespace pagetile::sm90 {

// How keys and values come to shared memory.
enum class Loading {
    kBoxes,    // by TMA
    kRows,     // row by row: pages that TMA has no boxes for
    kWidened,  // by TMA, and from 8 bits by producer warps
    // By TMA, and multiplied as they are, like queries of 8 bits: values are transposed by producer warps.
    kTransposed,
};

// Each consumer warpgroup has 64 packed rows. All of them share tiles of `keys` keys, which come in
// rings of `stages`.
struct PrefillTile {
    int warpgroups;
    int keys;
    int stages;
    int query_buffers;

    constexpr int rows() const { return 64 * warpgroups; }

    constexpr int num_threads() const { return 128 * (warpgroups + 1); }
};

// H200, docs/kernels/attention_sm90.md. The scores, the weights and the sums of a row live in
// registers, K and V in what the queries leave of 227 KB of shared memory. A warp stands still while
// its products are issued: three warpgroups keep the tensor cores busier than two with tiles twice as
// wide do (1 x 8192: 7 % fewer clocks). Otherwise wide tiles win, because a row's softmax costs the
// same for every tile; but at head_dim 64 tiles of 96 keys leave registers for the weights of two, which
// wins 3 %. A third stage is worth 3 % at 1 x 32768, and lets pages without boxes come in time; beside
// tiles of 8 bits there is no room for it.
//
// Products of 8 bits take half the time of those of 16, and the softmax as long as ever: so tiles are as
// wide as the swizzle, 128 bytes of keys in a row of transposed values, which also halves how often a
// tile's product is added to the sums.
//
// transforms: scores need more than a positive factor, which takes registers.
constexpr PrefillTile prefill_tile(
    int head_dim, int head_dim_v, bool transforms, Loading loading = Loading::kBoxes
) {
    if (loading == Loading::kTransposed) {
        return {.warpgroups = 3, .keys = 128, .stages = 4, .query_buffers = 2};
    }
    if (head_dim <= 64 && transforms) {
        return {.warpgroups = 2, .keys = 160, .stages = 3, .query_buffers = 2};
    }
    if (head_dim <= 64) {
        return {.warpgroups = 3, .keys = 96, .stages = 4, .query_buffers = 2};
    }
    if (head_dim <= 128 && transforms) {
        return {.warpgroups = 2, .keys = 160, .stages = 2, .query_buffers = 2};
    }
    if (head_dim <= 128) {
        const int stages = loading == Loading::kWidened ? 2 : 3;
        return {.warpgroups = 3, .keys = 80, .stages = stages, .query_buffers = 2};
    }
    if (head_dim <= 192 && head_dim_v <= 128) {
        return {.warpgroups = 2, .keys = 128, .stages = 2, .query_buffers = 1};
    }
    if (head_dim <= 192) {
        return {.warpgroups = 2, .keys = 112, .stages = 2, .query_buffers = 1};
    }
    return {.warpgroups = 2, .keys = 80, .stages = 2, .query_buffers = 1};
}

// The head dimensions of the instance that serves these: whole slabs of 64.
constexpr HeadDims prefill_dims(HeadDims dims) { return dims.k == 96 ? HeadDims{128, 128} : dims; }

// Whether an instance cuts items into pieces: others lack registers for it.
constexpr bool cuts_items(int head_dim_v, bool transforms) {
    return head_dim_v <= 128 && !transforms;
}

// Where a copy costs a warp work by the row: so many granules of 16 values are brought by the second warp
// of keys. (At other head dimensions it lacks registers for it.)
constexpr int lent_granules(int head_dim, Loading loading) {
    return loading == Loading::kRows && head_dim == 128 ? 1 : 0;
}

// Items that may be cut into pieces: so many have counters.
inline constexpr int kMostCuts = 160;
static_assert(kMostCuts * 12 * 2 * sizeof(uint32_t) < kPrefillCounterBytes);

// Of the sums of a piece of an item (pieces.cuh).
constexpr int64_t piece_bytes(const PrefillTile& tile, int head_dim_v) {
    return 4 * tile.warpgroups * 32 * (head_dim_v / 2 + 4) * static_cast<int64_t>(sizeof(float));
}

// Registers of a thread after the warpgroups have settled between them what the launch gave to all:
// consumers take what they need, producers keep the rest.
constexpr int consumer_registers(const PrefillTile& tile, Loading loading) {
    if (tile.warpgroups == 3) {
        return loading == Loading::kWidened && tile.keys == 80 ? 152 : 160;
    }
    return tile.keys == 128 ? 232 : 240;
}

constexpr int producer_registers(const PrefillTile& tile, Loading loading) {
    constexpr int kOfFile = 65536;
    const int at_launch = kOfFile / tile.num_threads() / 8 * 8;
    return at_launch * (tile.warpgroups + 1) - consumer_registers(tile, loading) * tile.warpgroups;
}

static_assert(producer_registers(prefill_tile(128, 128, true), Loading::kBoxes) == 24);
static_assert(producer_registers(prefill_tile(128, 128, false), Loading::kBoxes) == 32);
static_assert(producer_registers(prefill_tile(128, 128, false), Loading::kWidened) == 56);
static_assert(producer_registers(prefill_tile(192, 128, false), Loading::kBoxes) == 40);

// What the workspace holds is that of the other instance.
static_assert(
    piece_bytes(prefill_tile(128, 128, false, Loading::kTransposed), 128) ==
    piece_bytes(prefill_tile(128, 128, false), 128)
);

}  // namespace pagetile::sm90
