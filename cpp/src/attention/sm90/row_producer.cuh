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
    // Pages of the next tile are looked up among the copies of this one, as early as can be; or behind
    // them, where there are too few registers.
    static constexpr bool kLooksUpEarly = producer_registers(Config::kTile, Loading::kRows) >= 32;

    __device__ RowProducer(const PrefillParams& params, Storage& shared)
        : params_(params), shared_(shared) {}

    // Every kStep-th granule of each tile from granule kFirst on, of K or of V.
    template <bool kIsV, int kFirst, int kStep>
    __device__ __forceinline__ void load() {
        using Mine = Part<kIsV, kFirst, kStep>;
        ItemReader<Config> items(shared_);
        RingPlace<kStages> ring;
        while (true) {
            const Item& item = items.wait();
            if (item.num_tokens == kNoMore) {
                break;
            }
            const gpu::KvSide& side = params_.call.kv[kIsV ? 1 : 0];
            const char* of_head = side.data + item.kv_head * side.head_stride;
            int tile = item.last_tile;
            int32_t pages[Mine::kTurns];
            find_pages<Mine>(item, tile, pages);
            for (; tile >= item.first_tile; --tile) {
                // Whatever can be known before a stage is free.
                const Rows rows = find_rows<Mine>(item, of_head, tile, 0, pages[0]);
                uint64_t* const free =
                    kIsV ? &shared_.v_free[ring.index] : &shared_.k_free[ring.index];
                wait(free, ring.turn ^ 1);
                if (kFirst == 0 && threadIdx.x % 32 == 0) {
                    free_for_others<Config, kIsV>(item, tile, free);
                }
                copy<Mine>(item, of_head, tile, pages, rows, ring.index);
                if constexpr (!kLooksUpEarly) {
                    find_pages<Mine>(item, tile - 1, pages);
                }
                const int32_t looks = kIsV ? is_at_edge<Config>(item, tile) : 0;
                cute::cp_async_wait<0>();
                if (looks != 0) {
                    __syncwarp();
                    EdgeValues<Config>::clean(shared_, item, tile, ring.index);
                }
                hand_over(kIsV ? &shared_.v_full[ring.index] : &shared_.k_full[ring.index]);
                ring.advance();
            }
            items.release(item);
        }
    }

private:
    // What a warp has of a tile: granules, or as many rows. Of each 32 a lane knows one, so that eight
    // lanes know the eight that they copy.
    template <bool kIsV_, int kFirst_, int kStep_>
    struct Part {
        static constexpr bool kIsV = kIsV_;
        static constexpr int kFirst = kFirst_;
        static constexpr int kStep = kStep_;
        static constexpr int kGranules = (Config::kKeys / kGranule - kFirst + kStep - 1) / kStep;
        static constexpr int kRows = kGranules * kGranule;
        static constexpr int kTurns = (kRows + 31) / 32;

        // The lane's key in the tile, of the rows of a turn; none from kKeys on.
        static __device__ __forceinline__ int32_t key(int turn) {
            const uint32_t lane = opaque_lane();
            const uint32_t row = lane % 8 * 4 + lane / 8;
            const uint32_t left_out = row / kGranule * ((kStep - 1) * kGranule);
            return static_cast<int32_t>((turn * 2 * kStep + kFirst) * kGranule + row + left_out);
        }
    };

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
        const int32_t in_tile = Mine::key(turn);
        const int32_t key = tile * Config::kKeys + in_tile;
        if (in_tile >= Config::kKeys || key < item.keys.first || key >= item.keys.end) {
            return -1;
        }
        uint32_t offset;
        const uint32_t index = params_.call.page_size(offset, static_cast<uint32_t>(key));
        return __ldg(
            params_.call.block_table + item.batch_idx * params_.call.block_table_stride + index
        );
    }

    template <class Mine>
    __device__ __forceinline__ void find_pages(
        const Item& item, int tile, int32_t (&pages)[Mine::kTurns]
    ) const {
#pragma unroll
        for (int turn = 0; turn < Mine::kTurns; ++turn) {
            pages[turn] = find_page<Mine>(item, tile, turn);
        }
    }

    // Where the lane's row begins, and which rows of its warp there are.
    struct Rows {
        uint64_t mine;
        uint32_t are_there;
    };

    template <class Mine>
    __device__ __forceinline__ Rows
    find_rows(const Item& item, const char* of_head, int tile, int turn, int32_t& page) const {
        const gpu::KvSide& side = params_.call.kv[Mine::kIsV ? 1 : 0];
        const int32_t key = tile * Config::kKeys + Mine::key(turn);
        uint32_t offset;
        params_.call.page_size(offset, static_cast<uint32_t>(key));
        const bool is_there =
            static_cast<uint32_t>(page) < static_cast<uint32_t>(params_.call.num_pages);
        const char* begin = of_head +
                            static_cast<uint32_t>(is_there ? page : 0) * side.page_stride +
                            offset * side.token_stride;
        if constexpr (kLooksUpEarly) {
            page = find_page<Mine>(item, tile - 1, turn);
        }
        return {reinterpret_cast<uint64_t>(begin), __ballot_sync(kWarp, is_there)};
    }

    // Eight lanes take a slab of a row, and the warp four rows at a time.
    template <class Mine>
    __device__ __forceinline__ void copy(
        const Item& item,
        const char* of_head,
        int tile,
        int32_t (&pages)[Mine::kTurns],
        Rows rows,
        int stage
    ) {
        constexpr int kSlabs = Mine::kIsV ? Config::kSlabsV : Config::kSlabs;
        constexpr int kSlabDistance = Mine::kIsV ? kGranuleBytes : Config::kKeys * kSlabBytes;
        constexpr int kGranuleDistance = Mine::kIsV ? kSlabs * kGranuleBytes : kGranuleBytes;
        constexpr int kSteps = Mine::kRows / 4;
        const uint32_t lane = opaque_lane();
        const uint32_t row = lane / 8;
        const uint32_t chunk = lane % 8;
        const auto row_bytes = static_cast<uint32_t>(params_.call.kv[Mine::kIsV ? 1 : 0].row_bytes);
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
        // A shuffle takes as long as four copies.
        constexpr int kAhead = kSlabs > 2 ? 1 : 2;  // steps
        uint64_t from[2 * kAhead];
        const auto fetch = [&](int step) {
            if (step % 8 == 0 && step > 0 && step < kSteps) {
                rows = find_rows<Mine>(item, of_head, tile, step / 8, pages[step / 8]);
            }
            if (step < kSteps) {
                from[step % (2 * kAhead)] = __shfl_sync(kWarp, rows.mine, step % 8, 8) + chunk * 16;
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
                    const bool is_in_row = slab * kSlabBytes + chunk * 16 < row_bytes;
                    mine[slab] = is_in_row ? rows.are_there >> row * 8 : 0;
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
#pragma unroll
            for (int slab = 0; slab < kSlabs; ++slab) {
                ptx::cp_async_16_bytes_if(
                    mine[slab] & 1u << step % 8,
                    __cvta_shared_to_generic(place + slab * kSlabDistance),
                    reinterpret_cast<const char*>(from[step % (2 * kAhead)]) + slab * kSlabBytes
                );
            }
        }
    }

    const PrefillParams& params_;
    Storage& shared_;
};

}  // namespace pagetile::sm90
