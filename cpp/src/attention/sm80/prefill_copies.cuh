#pragma once

// Copies of keys and values into shared memory, a tile ahead of the arithmetic, and page lookups a
// tile ahead of the copies. Each warp copies its own rows of every tile.

#include "attention/sm80/kv_ring.cuh"
#include "attention/sm80/prefill_config.cuh"
#include "common/ptx.cuh"

#include <cute/arch/copy_sm80.hpp>

#include <cstdint>

namespace pagetile::sm80 {

template <class Config>
class PrefillCopies {
public:
    using KLayout = typename Config::KLayout;
    using VLayout = typename Config::VLayout;
    static constexpr PrefillTile kTile = Config::kTile;
    static constexpr int kKeys = kTile.keys;
    static constexpr int kRowBytesK = Config::kHeadDim * Config::kElementBytes;
    static constexpr int kRowBytesV = Config::kHeadDimV * Config::kElementBytes;
    static constexpr int kBytesK = kKeys * kRowBytesK;
    static constexpr int kBytesV = kKeys * kRowBytesV;
    // Keys and values of a tile come together, or the values' place is free only when the next keys
    // are already on their way.
    static constexpr bool kTogether = kTile.v_stages == 2;

    __device__ PrefillCopies(const KernelParams& params, char* tiles)
        : params_(params), tiles_(tiles) {}

    // The first tile's keys, and its values if they come together. All places are free.
    __device__ __forceinline__ void begin(const PrefillItem& item) {
        const int tile = first_tile(item);
        look_up(item, tile);
        copy_keys(item, tile, ahead_);
        if constexpr (kTogether) {
            copy_values(item, tile, ahead_);
        }
        cute::cp_async_fence();
        now_ = ahead_;
        look_up(item, tile + 1);
    }

    // Waits for the tile's keys; calls for what has a place now. All warps come here.
    __device__ __forceinline__ const char* wait_for_keys(const PrefillItem& item, int tile) {
        cute::cp_async_wait<0>();
        __syncthreads();
        if constexpr (kTogether) {
            copy_keys(item, tile + 1, ahead_);
            copy_values(item, tile + 1, ahead_);
            cute::cp_async_fence();
            look_up(item, tile + 2);
        } else {
            copy_values(item, tile, now_);
            cute::cp_async_fence();
            if constexpr (kTile.k_stages == 2) {
                copy_next_keys(item, tile);
            }
        }
        return keys_at(tile);
    }

    // Waits for the tile's values. All warps come here, behind their products with the keys.
    __device__ __forceinline__ char* wait_for_values(const PrefillItem& item, int tile) {
        if constexpr (!kTogether) {
            cute::cp_async_wait<kTile.k_stages - 1>();
            __syncthreads();
            if constexpr (kTile.k_stages == 1) {
                copy_next_keys(item, tile);
            }
        }
        return values_at(tile);
    }

    // Tiles are counted from the sequence's first key, so that their sums do not depend on the item.
    static __device__ __forceinline__ int first_tile(const PrefillItem& item) {
        return item.keys.first / kKeys;
    }

    static __device__ __forceinline__ int end_tile(const PrefillItem& item) {
        return item.keys.end > item.keys.first
                   ? static_cast<int>((static_cast<uint32_t>(item.keys.end) + kKeys - 1) / kKeys)
                   : first_tile(item);
    }

private:
    static constexpr int kRows = kKeys / kTile.warps;  // of this warp
    static_assert(kRows <= 16);

    // Where the warp's keys of a tile are: row r's is lane r's, and lanes behind that repeat.
    struct Places {
        int page;  // outside the pool: nothing there
        int offset;
    };

    // One side of a tile, for this warp.
    struct Rows {
        Places places;
        int kv_head;
        int begin;  // rows that are there
        int end;
    };

    __device__ char* keys_at(int tile) const {
        return tiles_ + (kTile.k_stages == 2 ? (tile & 1) * kBytesK : 0);
    }

    __device__ char* values_at(int tile) const {
        return tiles_ + kTile.k_stages * kBytesK + (kTile.v_stages == 2 ? (tile & 1) * kBytesV : 0);
    }

    static __device__ int first_row() { return static_cast<int>(threadIdx.x / 32) * kRows; }

    static __device__ int lane() { return static_cast<int>(threadIdx.x % 32); }

    __device__ __forceinline__ void look_up(const PrefillItem& item, int tile) {
        const auto key = static_cast<uint32_t>(tile) * kKeys +
                         static_cast<uint32_t>(first_row() + lane() % kRows);
        const bool is_needed = key >= static_cast<uint32_t>(item.keys.first) &&
                               key < static_cast<uint32_t>(item.keys.end);
        uint32_t offset;
        const uint32_t index = params_.page_size(offset, key);
        const bool has_pages = params_.block_table != nullptr;
        ahead_.page = is_needed ? 0 : -1;
        ahead_.offset = static_cast<int32_t>(has_pages ? offset : item.sequence.kv_begin + key);
        if (is_needed && has_pages) {
            // Nobody waits for it here.
            ahead_.page = params_.block_table[item.batch_idx * params_.block_table_stride + index];
        }
    }

    __device__ __forceinline__ void copy_next_keys(const PrefillItem& item, int tile) {
        copy_keys(item, tile + 1, ahead_);
        cute::cp_async_fence();
        now_ = ahead_;
        look_up(item, tile + 2);
    }

    __device__ __forceinline__ void copy_keys(
        const PrefillItem& item, int tile, const Places& places
    ) const {
        copy<KLayout>(params_.kv[0], item, tile, places, keys_at(tile));
    }

    __device__ __forceinline__ void copy_values(
        const PrefillItem& item, int tile, const Places& places
    ) const {
        copy<VLayout>(params_.kv[1], item, tile, places, values_at(tile));
    }

    template <class Layout>
    __device__ __forceinline__ void copy(
        const gpu::KvSide& side, const PrefillItem& item, int tile, const Places& places, char* to
    ) const {
        const int first_key = tile * kKeys + first_row();
        if (tile * kKeys >= item.keys.end) {
            return;  // behind the last tile
        }
        const int page = __shfl_sync(kWarp, places.page, 0);
        const bool is_simple = params_.copies_whole_rows && is_page(params_, page) &&
                               first_key >= item.keys.first && first_key + kRows <= item.keys.end;
        if (is_simple) [[likely]] {
            const int offset = __shfl_sync(kWarp, places.offset, 0);
            copy_page<Layout>(side, item.kv_head, page, offset, to);
        } else {
            const Rows rows = {
                places, item.kv_head, item.keys.first - first_key, item.keys.end - first_key
            };
            copy_some<Layout>(params_, side, rows, to);
        }
    }

    static __device__ bool is_page(const KernelParams& params, int page) {
        return static_cast<uint32_t>(page) < static_cast<uint32_t>(params.num_pages);
    }

    // Rows of one page, all of them whole and visible. An instruction takes one slab of several rows:
    // then the next one's addresses differ by constants.
    template <class Layout>
    static __device__ __forceinline__ void copy_page(
        const gpu::KvSide& side, int kv_head, int page, int offset, char* to
    ) {
        static constexpr int kSlab = Layout::kSlab;
        static constexpr int kRowsAtOnce = 32 / kSlab < kRows ? 32 / kSlab : kRows;
        const int chunk = lane() % kSlab;
        const int row = lane() / kSlab;
        if (kRowsAtOnce * kSlab < 32 && row >= kRowsAtOnce) {
            return;
        }
        const int first = Layout::offset(first_row() + row, chunk);
        const char* from = side.data + kv_head * side.head_stride + chunk * 16 +
                           page * side.page_stride +
                           static_cast<int64_t>(offset + row) * side.token_stride;
#pragma unroll
        for (int more = 0; more < kRows; more += kRowsAtOnce) {
#pragma unroll
            for (int slab = 0; slab < Layout::kChunks; slab += kSlab) {
                cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>::copy(
                    *reinterpret_cast<const cute::uint128_t*>(from + slab * 16),
                    *reinterpret_cast<cute::uint128_t*>(to + Layout::offset_from(first, more, slab))
                );
            }
            from += kRowsAtOnce * side.token_stride;
        }
    }

    // Small pages, the ends of what is visible, other alignments, rows in chunks. Out of the way of
    // the loop: instructions that are jumped over are fetched, too.
    template <class Layout>
    static __device__ __noinline__ void copy_some(
        const KernelParams& params, const gpu::KvSide& side, Rows rows, char* to
    ) {
        static constexpr int kElement = Config::kElementBytes;
        static constexpr int kChunks = Layout::kChunks;
#pragma unroll 1
        for (int first = 0; first < kRows * kChunks; first += 32) {
            const int i = first + lane();
            const int row = i / kChunks;
            const int chunk = i % kChunks;
            const int page = __shfl_sync(kWarp, rows.places.page, row % kRows);
            const int offset = __shfl_sync(kWarp, rows.places.offset, row % kRows);
            if (row >= kRows) {
                continue;
            }
            const bool is_there = is_page(params, page) && row >= rows.begin && row < rows.end;
            const char* from = side.data + rows.kv_head * side.head_stride +
                               (is_there ? page : 0) * side.page_stride +
                               static_cast<int64_t>(offset) * side.token_stride;
            char* place = to + Layout::offset(first_row() + row, chunk);
            if (params.copies_16_bytes) {
                const bool is_copied = is_there && chunk * 16 < side.row_bytes;
                ptx::cp_async_16_bytes_if(
                    is_copied, place, is_copied ? from + chunk * 16 : side.data
                );
            } else {
                *reinterpret_cast<uint4*>(place) =
                    load_elements<kElement>(side, from, chunk * 16 / kElement, is_there);
            }
        }
    }

    const KernelParams& params_;
    char* tiles_;
    Places now_ = {-1, 0};    // of the tile whose keys came last
    Places ahead_ = {-1, 0};  // of the next one
};

}  // namespace pagetile::sm80
