#pragma once

// The producer warps for pages that TMA has no boxes for: each row has a page and a place of its own
// there, and goes to shared memory by cp.async, 16 bytes a lane, to where TMA would have put it.

#include "attention/sm90/producer.cuh"
#include "common/ptx.cuh"

#include <cute/arch/copy_sm80.hpp>

#include <cstdint>

namespace pagetile::sm90 {

template <class Config>
class RowProducer {
public:
    using Storage = Shared<Config>;
    static constexpr int kStages = Config::kTile.stages;

    __device__ RowProducer(const PrefillParams& params, Storage& shared)
        : params_(params), shared_(shared) {}

    __device__ __forceinline__ void load_keys() { load<typename Parts<Config>::Keys>(); }

    __device__ __forceinline__ void load_values() { load<typename Parts<Config>::Values>(); }

    __device__ __forceinline__ void load_more_keys() {
        if constexpr (Config::kLentGranules > 0) {
            load_keys_and_values();
        } else {
            load<typename Parts<Config>::MoreKeys>();
        }
    }

private:
    // Of each 32 rows of a warp's part of a tile a lane knows one, so that eight lanes know the eight that
    // they copy.
    template <class Mine>
    static constexpr int kTurns = (Mine::kRows + 31) / 32;

    template <class Mine>
    __device__ __forceinline__ void load() {
        ItemReader<Config> items(shared_);
        RingPlace<kStages> ring;
        while (true) {
            const Item& item = items.wait();
            if (item.num_tokens == kNoMore) {
                break;
            }
            int tile = item.last_tile;
            int32_t pages[kTurns<Mine>];
            find_pages<Mine>(item, tile, pages);
            for (; tile >= item.first_tile; --tile) {
                fill<Mine>(item, tile, pages, ring);
                find_pages<Mine>(item, tile - 1, pages);
                cute::cp_async_wait<0>();
                finish<Mine>(item, tile, ring.index);
                ring.advance();
            }
            items.release(item);
        }
    }

    // Of each tile keys, and values of the tile before: they are needed later.
    __device__ __forceinline__ void load_keys_and_values() {
        using Keys = typename Parts<Config>::MoreKeys;
        using Values = typename Parts<Config>::LentValues;
        ItemReader<Config> items(shared_);
        RingPlace<kStages> ring;
        int32_t pages[kTurns<Keys>];
        int32_t pages_of_values[kTurns<Values>];
        const auto begin = [&](const Item& item) {
            if (item.num_tokens != kNoMore) {
                find_pages<Keys>(item, item.last_tile, pages);
            }
            return item.last_tile;
        };
        int tile = begin(items.wait());
        while (true) {
            const bool has_keys = items.item().num_tokens != kNoMore;
            if (has_keys) {
                fill<Keys>(items.item(), tile, pages, ring);
            }
            cute::cp_async_fence();
            const bool is_first = tile == items.item().last_tile;
            const bool has_values = !is_first || items.has_previous();
            const Item& before = is_first ? items.previous() : items.item();
            const int tile_before = is_first ? before.first_tile : tile + 1;
            if (has_values) {
                fill<Values>(before, tile_before, pages_of_values, ring.previous());
            }
            cute::cp_async_fence();
            if (has_keys) {
                find_pages<Values>(items.item(), tile, pages_of_values);
                find_pages<Keys>(items.item(), tile - 1, pages);
                cute::cp_async_wait<1>();
                finish<Keys>(items.item(), tile, ring.index);
            }
            cute::cp_async_wait<0>();
            if (has_values) {
                finish<Values>(before, tile_before, ring.previous().index);
                if (is_first) {
                    items.release(before);
                }
            }
            if (!has_keys) {
                return;
            }
            ring.advance();
            if (--tile < items.item().first_tile) {
                tile = begin(items.wait());
            }
        }
    }

    template <class Mine>
    __device__ __forceinline__ void fill(
        const Item& item,
        int tile,
        const int32_t (&pages)[kTurns<Mine>],
        const RingPlace<kStages>& ring
    ) const {
        // Whatever can be known before a stage is free. (Behind copies a load waits for all of them.)
        Rows rows[kTurns<Mine>];
#pragma unroll
        for (int turn = 0; turn < kTurns<Mine>; ++turn) {
            rows[turn] = find_rows<Mine>(item, tile, turn, pages[turn]);
        }
        uint64_t* const free = free_of<Mine>(shared_, ring.index);
        wait(free, ring.turn ^ 1);
        copy<Mine>(rows, ring.index);
        if (Mine::kFirst == 0 && threadIdx.x % 32 == 0) {
            free_for_others<Config, Mine::kIsV>(item, tile, free);
        }
    }

    // The warp's part of the tile has come.
    template <class Mine>
    __device__ __forceinline__ void finish(const Item& item, int tile, int stage) const {
        if constexpr (Mine::kIsV) {
            if (is_at_edge<Config>(item, tile) != 0) {
                __syncwarp();
                EdgeValues<Config>::template clean<Mine>(shared_, item, tile, stage);
            }
        }
        hand_over(full_of<Mine>(shared_, stage));
    }

    // The lane's key in the tile, of the rows of a turn; none from kKeys on.
    template <class Mine>
    static __device__ __forceinline__ int32_t key_of_lane(int turn) {
        const uint32_t lane = opaque_lane();
        const uint32_t row = lane % 8 * 4 + lane / 8;
        const uint32_t left_out = row / kGranule * ((Mine::kStep - 1) * kGranule);
        const int first = (turn * 2 * Mine::kStep + Mine::kFirst) * kGranule;
        return first + static_cast<int32_t>(row + left_out);
    }

    // The compiler does not know that it is always the same: else it keeps sums with it in registers, of
    // which there are few.
    static __device__ __forceinline__ uint32_t opaque_lane() {
        uint32_t lane = threadIdx.x % 32;
        asm volatile("" : "+r"(lane));
        return lane;
    }

    // The entry of the block table for the lane's row; none if its key is not visible.
    template <class Mine>
    __device__ __forceinline__ int32_t find_page(const Item& item, int tile, int turn) const {
        const int32_t in_tile = key_of_lane<Mine>(turn);
        const int32_t key = tile * Config::kKeys + in_tile;
        // Without branches but one: the bounds are loaded together.
        const bool is_visible = static_cast<int32_t>(key >= item.keys.first) &
                                static_cast<int32_t>(key < item.keys.end);
        if (in_tile >= Config::kKeys || !is_visible) {
            return -1;
        }
        uint32_t offset;
        const uint32_t index = params_.call.page_size(offset, static_cast<uint32_t>(key));
        return __ldg(
            params_.call.block_table +
            static_cast<int64_t>(item.batch_idx) *
                static_cast<int32_t>(params_.call.block_table_stride) +
            index
        );
    }

    template <class Mine>
    __device__ __forceinline__ void find_pages(
        const Item& item, int tile, int32_t (&pages)[kTurns<Mine>]
    ) const {
#pragma unroll
        for (int turn = 0; turn < kTurns<Mine>; ++turn) {
            pages[turn] = find_page<Mine>(item, tile, turn);
        }
    }

    // Where the lane's row begins, in 16 bytes from the pool's beginning (which dispatch has seen to fit),
    // and which rows of its warp there are.
    struct Rows {
        uint32_t mine;
        uint32_t are_there;
    };

    template <class Mine>
    __device__ __forceinline__ Rows
    find_rows(const Item& item, int tile, int turn, int32_t page) const {
        const gpu::KvSide& side = params_.call.kv[Mine::kIsV ? 1 : 0];
        const int32_t key = tile * Config::kKeys + key_of_lane<Mine>(turn);
        uint32_t offset;
        params_.call.page_size(offset, static_cast<uint32_t>(key));
        const bool is_there = gpu::is_page(params_.call, page);
        const uint32_t begin = (is_there ? page : 0) * gpu::in_chunks(side.page_stride) +
                               offset * gpu::in_chunks(side.token_stride) +
                               item.kv_head * gpu::in_chunks(side.head_stride);
        return {begin, __ballot_sync(kWarp, is_there)};
    }

    // Eight lanes take a slab of a row, and the warp four rows at a time.
    template <class Mine>
    __device__ __forceinline__ void copy(const Rows (&rows)[kTurns<Mine>], int stage) const {
        constexpr int kSlabs = Mine::kIsV ? Config::kSlabsV : Config::kSlabs;
        constexpr int kSlabDistance = Mine::kIsV ? kGranuleBytes : Config::kKeys * kSlabBytes;
        constexpr int kGranuleDistance = Mine::kIsV ? kSlabs * kGranuleBytes : kGranuleBytes;
        constexpr int kSteps = Mine::kRows / 4;
        const uint32_t lane = opaque_lane();
        const uint32_t row = lane / 8;
        const uint32_t chunk = lane % 8;
        const gpu::KvSide& side = params_.call.kv[Mine::kIsV ? 1 : 0];
        const char* const pool = side.data + chunk * 16;
        // Of rows that are four apart: all others lie constants away from these. (The compiler must not
        // know what they have in common, or it keeps a sum for each copy.)
        char* const begin = Mine::kIsV ? shared_.v[stage] : shared_.k[stage];
        uint32_t places[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            places[i] = static_cast<uint32_t>(
                __cvta_generic_to_shared(begin + row * kSlabBytes + (chunk ^ row ^ i * 4) * 16)
            );
            asm volatile("" : "+r"(places[i]));
        }
        // Ahead by so many steps: behind copies a shuffle, too, waits for them.
        constexpr int kAhead = kSlabs > 2 ? 2 : 4;
        uint32_t from[2 * kAhead];
        const auto fetch = [&](int step) {
            if (step < kSteps) {
                from[step % (2 * kAhead)] = __shfl_sync(kWarp, rows[step / 8].mine, step % 8, 8);
            }
        };
#pragma unroll
        for (int step = 0; step < kAhead; ++step) {
            fetch(step);
        }
        uint32_t mine[kSlabs];  // bits of the rows of which the lane has a part
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (step % 8 == 0) {
#pragma unroll
                for (int slab = 0; slab < kSlabs; ++slab) {
                    const bool is_in_row =
                        slab * kSlabBytes + chunk * 16 < static_cast<uint32_t>(side.row_bytes);
                    mine[slab] = is_in_row ? rows[step / 8].are_there >> row * 8 : 0;
                    asm volatile("" : "+r"(mine[slab]));
                }
            }
            if (step % kAhead == 0) {
#pragma unroll
                for (int i = 0; i < kAhead; ++i) {
                    fetch(step + kAhead + i);
                }
            }
            const uint32_t place = places[step % 2] +
                                   (Mine::kFirst + step / 4 * Mine::kStep) * kGranuleDistance +
                                   step % 4 * 4 * kSlabBytes;
            const char* const row_begin =
                pool + static_cast<uint64_t>(from[step % (2 * kAhead)]) * 16;
#pragma unroll
            for (int slab = 0; slab < kSlabs; ++slab) {
                ptx::cp_async_16_bytes_if(
                    mine[slab] & 1u << step % 8,
                    __cvta_shared_to_generic(place + slab * kSlabDistance),
                    row_begin + slab * kSlabBytes
                );
            }
        }
    }

    const PrefillParams& params_;
    Storage& shared_;
};

}  // namespace pagetile::sm90
