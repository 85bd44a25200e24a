#pragma once

// Items dealt to the lanes of a warp. Where a chain has one KV head (KernelParams::is_dealt) and rows of a
// sequence are one tile, a CTA has one item a sequence, and need not find one behind the other: each lane
// works out another one. Finding them in turn, a warp took 1.8 us an item (270 instructions, H200), in which
// it called for no keys.

#include "attention/sm80/tile_shapes.h"
#include "attention/sm80/work_list.cuh"

#include <cstdint>

namespace pagetile::sm80 {

// The next items, in shared memory.
template <int kRows>
class DealtItems {
public:
    // By a warp. `first` is the CTA's first item.
    __device__ __forceinline__ void begin(const KernelParams& params, const Item& first) {
        first_ = first.batch_idx + 1 - 32;
        left_ = 0;
        is_dealt_ = params.is_dealt && num_rows(params, first.sequence) <= kRows;
        __syncwarp();
    }

    // Whether the next item is one of these. If not, the list has it, behind those before batch_idx().
    __device__ bool is_dealt() const { return is_dealt_; }

    __device__ int32_t batch_idx() const { return first_; }

    // Copies the next item. False: there is none, or it is no longer dealt.
    __device__ __forceinline__ bool next(
        const KernelParams& params,
        const WorkList<kRows>& list,
        const SequenceWindow& window,
        Item& item
    ) {
        uint32_t left = left_;
        if (left == 0) {
            left = deal(params, list, window);
            if (left == 0) {
                return false;
            }
        }
        const int place = __ffs(static_cast<int>(left)) - 1;
        const auto me = static_cast<int>(threadIdx.x % 32);
        static constexpr int kWords = sizeof(Item) / 4;
        static_assert(kWords <= 32);
        if (me < kWords) {
            reinterpret_cast<uint32_t*>(&item)[me] =
                reinterpret_cast<const uint32_t*>(&items_[place])[me];
        }
        __syncwarp();
        left_ = left & (left - 1);
        return true;
    }

    // False only if the last item has been dealt: cheap to ask.
    __device__ bool may_have_more(const WorkList<kRows>& list) const {
        return left_ != 0 || first_ + 32 <= list.end().batch_idx;
    }

private:
    // A bit for each lane that has an item.
    __device__ __forceinline__ uint32_t
    deal(const KernelParams& params, const WorkList<kRows>& list, const SequenceWindow& window) {
        const auto me = static_cast<int32_t>(threadIdx.x % 32);
        int32_t first = first_;
        uint32_t left = 0;
        while (left == 0 && first + 32 <= list.end().batch_idx) {
            first += 32;
            const Sequence sequence = SequenceWindow::find(params, &window, first + me);
            if (__any_sync(kWarp, num_rows(params, sequence) > kRows)) {
                is_dealt_ = false;
                break;
            }
            left = __ballot_sync(kWarp, list.find_tile(params, first + me, sequence, items_[me]));
        }
        first_ = first;
        __syncwarp();
        return left;
    }

    int32_t first_;  // the sequence of the first lane
    uint32_t left_;  // a bit for each item that has not been taken
    bool is_dealt_;
    Item items_[32];
};

// The first of a key warp's tiles from `tile` on. Which warp has which keys depends on their position alone.
template <TileShape kShape>
__device__ __forceinline__ int first_tile(int tile, int key_warp) {
    constexpr uint32_t kWarps = kShape.key_warps;
    const uint32_t before = kWarps - static_cast<uint32_t>(tile) % kWarps;
    return tile + static_cast<int>((static_cast<uint32_t>(key_warp) + before) % kWarps);
}

// What a key warp has of a sequence: tiles of keys.
struct Dealt {
    int32_t batch_idx;
    int32_t tile;
    int32_t end_tile;
    int32_t first_key;
    int32_t end_key;
    int32_t kv_begin;
};

// The next tiles of a key warp, in registers.
template <class Config>
class DealtTiles {
public:
    using List = WorkList<Config::kRows>;

    __device__ __forceinline__ void begin(const KernelParams& params, const Item& first) {
        first_ = first.batch_idx + 1 - 32;
        is_dealt_ = params.is_dealt && num_rows(params, first.sequence) <= Config::kRows;
    }

    // As DealtItems have it.
    __device__ bool is_dealt() const { return is_dealt_; }

    __device__ int32_t batch_idx() const { return first_; }

    // The next sequence of which the warp has tiles. False: there is none, or it is no longer dealt.
    __device__ __forceinline__ bool next(
        const KernelParams& params,
        const List& list,
        const SequenceWindow* window,
        int key_warp,
        Dealt& found
    ) {
        uint32_t has_tiles;
        while ((has_tiles = __ballot_sync(kWarp, mine_.tile < mine_.end_tile)) == 0) {
            first_ += 32;
            if (first_ > list.end().batch_idx) {
                return false;
            }
            mine_ = deal(params, list, first_, key_warp, window);
            is_dealt_ = __all_sync(kWarp, mine_.is_one_tile);
            if (!is_dealt_) {
                return false;
            }
        }
        const int place = __ffs(static_cast<int>(has_tiles)) - 1;
        found = {
            first_ + place,
            __shfl_sync(kWarp, mine_.tile, place),
            __shfl_sync(kWarp, mine_.end_tile, place),
            __shfl_sync(kWarp, mine_.first_key, place),
            __shfl_sync(kWarp, mine_.end_key, place),
            __shfl_sync(kWarp, mine_.kv_begin, place),
        };
        if (static_cast<int>(threadIdx.x % 32) == place) {
            mine_.end_tile = mine_.tile;  // taken
        }
        return true;
    }

private:
    static constexpr int kTilesPerUnit = kPlanKeys / Config::kShape.keys;

    // Of the sequence that a lane has.
    struct Mine {
        bool is_one_tile;
        int32_t tile;
        int32_t end_tile;
        int32_t first_key;
        int32_t end_key;
        int32_t kv_begin;
    };

    // Of the sequences from `first` on. Out of the way of the ring's loop.
    static __device__ __noinline__ Mine deal(
        const KernelParams& params,
        const List& list,
        int32_t first,
        int key_warp,
        const SequenceWindow* window
    ) {
        const int32_t batch_idx = first + static_cast<int32_t>(threadIdx.x % 32);
        const Sequence sequence = SequenceWindow::find(params, window, batch_idx);
        Item item;
        if (!list.find_tile(params, batch_idx, sequence, item)) {
            return {true, 0, 0, 0, 0, 0};
        }
        return {
            num_rows(params, sequence) <= Config::kRows,
            first_tile<Config::kShape>(item.part.unit_begin * kTilesPerUnit, key_warp),
            item.part.unit_end * kTilesPerUnit,
            item.keys.first,
            item.keys.end,
            sequence.kv_begin,
        };
    }

    Mine mine_ = {true, 0, 0, 0, 0, 0};
    int32_t first_ = 0;  // the sequence that lane 0 has
    bool is_dealt_ = false;
};

}  // namespace pagetile::sm80
