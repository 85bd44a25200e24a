#pragma once

// Producer warps of tiles that come with 8 bits and are changed before they are multiplied: each warp
// brings its part of every tile by TMA, a tile ahead, and changes it into the ring that the consumers
// multiply from. No warp waits for another.

#include "attention/sm90/producer.cuh"

#include <cstdint>

namespace pagetile::sm90 {

template <class Mine, class Config>
__device__ __forceinline__ char* raw_tile(Shared<Config>& shared, int stage) {
    if constexpr (Mine::kIsV) {
        return shared.raw.v[stage];
    } else {
        return shared.raw.k[stage];
    }
}

// Change::run<Mine>() fills the warp's part of a place in the ring, once that is free, from the raw tile
// that has come. `looks`: these are values that not all rows see.
template <class Config, class Change>
class StagedProducer {
public:
    using Storage = Shared<Config>;
    static constexpr int kStages = Config::kTile.stages;

    __device__ StagedProducer(const PrefillParams& params, Storage& shared)
        : params_(params), shared_(shared) {}

    __device__ __forceinline__ void load_keys() { load<typename Parts<Config>::Keys>(); }

    __device__ __forceinline__ void load_values() { load<typename Parts<Config>::Values>(); }

    __device__ __forceinline__ void load_more_keys() { load<typename Parts<Config>::MoreKeys>(); }

    __device__ __forceinline__ void load_lent_values() {
        load<typename Parts<Config>::LentValues>();
    }

private:
    using Raw = RingPlace<Config::kRawStages>;

    template <class Mine>
    __device__ __forceinline__ void load() {
        ItemReader<Config> items(shared_);
        RingPlace<kStages> ring;
        Raw raw;
        // Where copies are: in registers, for behind the stores of a tile a load waits long.
        const Item* place = &items.wait();
        if (place->num_tokens == kNoMore) {
            return;
        }
        Item item = *place;
        int tile = item.last_tile;
        int32_t page = find_page<Config>(params_, item, tile);
        copy<Mine>(item, tile, page, raw.index);
        page = find_page<Config>(params_, item, tile - 1);
        while (true) {
            // The tile to change, and on to the next one.
            const Item* const mine = place;
            const int my_tile = tile;
            const bool is_last = tile == item.first_tile;
            const bool looks = Mine::kIsV && is_at_edge<Config>(item, tile) != 0;
            const bool has_others =
                Config::kLeavesOut && item.warpgroups < Config::kTile.warpgroups;
            if (is_last) {
                place = &items.wait();
                item = *place;
                tile = item.last_tile;
            } else {
                --tile;
            }
            const bool is_end = item.num_tokens == kNoMore;
            if (!is_end) {
                if (is_last) {
                    page = find_page<Config>(params_, item, tile);
                }
                copy<Mine>(item, tile, page, raw.index ^ 1);
                page = find_page<Config>(params_, item, tile - 1);
            }
            change<Mine>(*mine, my_tile, looks, has_others, ring, raw);
            ring.advance();
            raw.advance();
            if (is_last) {
                items.release(*mine);
                if (is_end) {
                    return;
                }
            }
        }
    }

    // The boxes of the warp's granules, each by the lane that knows its page. (By one lane for all of
    // them, pages by shuffles: 10 % of the time more, H200.)
    template <class Mine>
    __device__ __forceinline__ void copy(
        const Item& item, int tile, int32_t page, int stage
    ) const {
        constexpr int kRowBytes = Mine::kIsV ? Config::kHeadDimV : Config::kHeadDim;
        uint64_t* full = &shared_.raw.full[Mine::kWarp][stage];
        const int32_t in_tile = static_cast<int32_t>(threadIdx.x % 32) * params_.box_rows;
        const int32_t offset = find_offset(params_, item, tile * Config::kKeys + in_tile);
        if (threadIdx.x % 32 == 0) {
            ClusterTransactionBarrier::arrive_and_expect_tx(full, Mine::kRows * kRowBytes);
        }
        __syncwarp();  // and all have read the tile that was there
        if (Mine::has(in_tile / kGranule)) {
            cute::SM90_TMA_LOAD_4D::copy(
                Mine::kIsV ? &params_.pages.v : &params_.pages.k,
                full,
                kEvictNormal,
                raw_tile<Mine>(shared_, stage) + in_tile * kRowBytes,
                0,
                offset,
                item.kv_head,
                page
            );
        }
        __syncwarp();
    }

    template <class Mine>
    __device__ __forceinline__ void change(
        const Item& item, int tile, bool looks, bool has_others, RingPlace<kStages> ring, Raw raw
    ) const {
        wait(&shared_.raw.full[Mine::kWarp][raw.index], raw.turn);
        Change::template run<Mine>(params_, shared_, item, tile, looks, ring, raw.index);
        hand_over(full_of<Mine>(shared_, ring.index));
        if (Mine::kFirst == 0 && has_others && threadIdx.x % 32 == 0) {
            free_for_others<Config, Mine::kIsV>(item, tile, free_of<Mine>(shared_, ring.index));
        }
    }

    const PrefillParams& params_;
    Storage& shared_;
};

}  // namespace pagetile::sm90
