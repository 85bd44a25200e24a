#pragma once

// The producer warps where keys and values have 8 bits. Each brings its part of every tile by TMA, a
// tile ahead, and widens it into the ring that the consumers multiply from: no warp waits for another.

#include "attention/sm90/producer.cuh"

#include <cstdint>

namespace pagetile::sm90 {

template <class Config>
class WideningProducer {
public:
    using Storage = Shared<Config>;
    static constexpr int kStages = Config::kTile.stages;

    __device__ WideningProducer(const PrefillParams& params, Storage& shared)
        : params_(params), shared_(shared) {}

    __device__ __forceinline__ void load_keys() { load<typename Parts<Config>::Keys>(); }

    __device__ __forceinline__ void load_values() { load<typename Parts<Config>::Values>(); }

    __device__ __forceinline__ void load_more_keys() { load<typename Parts<Config>::MoreKeys>(); }

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
            // The tile to widen, and on to the next one.
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
            widen<Mine>(*mine, my_tile, looks, has_others, ring, raw);
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

    template <class Mine>
    __device__ __forceinline__ char* raw_tile(int stage) const {
        return Mine::kIsV ? shared_.raw.v[stage] : shared_.raw.k[stage];
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
                raw_tile<Mine>(stage) + in_tile * kRowBytes,
                0,
                offset,
                item.kv_head,
                page
            );
        }
        __syncwarp();
    }

    template <class Mine>
    __device__ __forceinline__ void widen(
        const Item& item, int tile, bool looks, bool has_others, RingPlace<kStages> ring, Raw raw
    ) const {
        uint64_t* const free = free_of<Mine>(shared_, ring.index);
        wait(&shared_.raw.full[Mine::kWarp][raw.index], raw.turn);
        wait(free, ring.turn ^ 1);
        const char* from = raw_tile<Mine>(raw.index);
        char* to = Mine::kIsV ? shared_.v[ring.index] : shared_.k[ring.index];
        if (params_.is_e5m2) {
            widen_granules<cutlass::float_e5m2_t, Mine>(from, to);
        } else {
            widen_granules<cutlass::float_e4m3_t, Mine>(from, to);
        }
        if constexpr (Mine::kIsV) {
            if (looks) {
                __syncwarp();
                EdgeValues<Config>::template clean<Mine>(shared_, item, tile, ring.index);
            }
        }
        hand_over(full_of<Mine>(shared_, ring.index));
        if (Mine::kFirst == 0 && has_others && threadIdx.x % 32 == 0) {
            free_for_others<Config, Mine::kIsV>(item, tile, free);
        }
    }

    // A lane takes 16 elements at a time, 16 bytes that become twice as many. Eight lanes have four such
    // parts of two rows, which are chosen so that they meet no bank twice: rows of 128 bytes are swizzled
    // on both sides.
    template <class Stored, class Mine>
    static __device__ __forceinline__ void widen_granules(const char* from, char* to) {
        constexpr bool kIsV = Mine::kIsV;
        constexpr int kSlabs = kIsV ? Config::kSlabsV : Config::kSlabs;
        constexpr int kRowBytes = kSlabs * kSlabElements;
        static_assert(kSlabs <= 2);
        const auto lane = static_cast<int>(threadIdx.x % 32);
        const int part = lane % 4;
        const bool is_second = lane / 4 % 2 != 0;
        const int row = kSlabs == 2 ? lane / 8 ^ (is_second ? 5 : 0)
                                    : lane / 8 * 2 + (is_second ? 1 : 0);  // of eight
#pragma unroll 1
        for (int granule = Mine::kFirst; granule < Mine::kEnd; granule += Mine::kStep) {
            // All loads first: the compiler does not know that they read other memory than is stored to.
            uint4 bytes[2 * kSlabs];
#pragma unroll
            for (int i = 0; i < 2 * kSlabs; ++i) {
                const int key = granule * kGranule + i / kSlabs * 8 + row;
                const int slab = i % kSlabs;
                const int part_of_row = kSlabs == 2 ? (slab * 4 + part) ^ row : part;
                bytes[i] =
                    *reinterpret_cast<const uint4*>(from + key * kRowBytes + part_of_row * 16);
            }
#pragma unroll
            for (int i = 0; i < 2 * kSlabs; ++i) {
                const int slab = i % kSlabs;
                const int in_granule = i / kSlabs * 8 + row;
                const int first_row = kIsV ? (granule * kSlabs + slab) * kGranule
                                           : slab * Config::kKeys + granule * kGranule;
                char* row_of_slab = to + (first_row + in_granule) * kSlabBytes;
                const int place = (part * 2 ^ row) * 16;
                uint32_t pairs[8];
                widen_16<Stored, kIsV>(pairs, bytes[i]);
                *reinterpret_cast<uint4*>(row_of_slab + place) =
                    make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
                *reinterpret_cast<uint4*>(row_of_slab + (place ^ 16)) =
                    make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
            }
        }
    }

    template <class Stored, bool kIsV>
    static __device__ __forceinline__ void widen_16(uint32_t (&pairs)[8], const uint4& bytes) {
        gpu::widen<Stored>(pairs[0], pairs[1], bytes.x);
        gpu::widen<Stored>(pairs[2], pairs[3], bytes.y);
        gpu::widen<Stored>(pairs[4], pairs[5], bytes.z);
        gpu::widen<Stored>(pairs[6], pairs[7], bytes.w);
        if constexpr (!kIsV && std::is_same_v<typename Config::Element, cutlass::bfloat16_t>) {
#pragma unroll
            for (uint32_t& pair : pairs) {
                const float2 wide = __half22float2(reinterpret_cast<const __half2&>(pair));
                pair = pack(cutlass::bfloat16_t{}, wide.x, wide.y);
            }
        }
    }

    const PrefillParams& params_;
    Storage& shared_;
};

}  // namespace pagetile::sm90
