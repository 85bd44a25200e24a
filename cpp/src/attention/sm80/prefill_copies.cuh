#pragma once

// Copies of keys and values into shared memory, a tile ahead of the arithmetic, and page lookups a
// tile ahead of the copies. Each warp copies its own rows of every tile.

#include "attention/sm80/prefill_config.cuh"
#include "attention/sm80/some_keys.cuh"
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
        const Source source(item);
        const int tile = first_tile(item);
        look_up(source, tile);
        copy<true, kTogether>(source, tile, ahead_);
        cute::cp_async_fence();
        now_ = ahead_;
        look_up(source, tile + 1);
    }

    // Waits for the tile's keys; calls for what has a place now. All warps come here.
    __device__ __forceinline__ const char* wait_for_keys(const PrefillItem& item, int tile) {
        const Source source(item);
        cute::cp_async_wait<0>();
        __syncthreads();
        if constexpr (kTogether) {
            copy<true, true>(source, tile + 1, ahead_);
            cute::cp_async_fence();
            look_up(source, tile + 2);
        } else {
            copy<false, true>(source, tile, now_);
            cute::cp_async_fence();
            if constexpr (kTile.k_stages == 2) {
                copy_next_keys(source, tile);
            }
        }
        return keys_at(tile);
    }

    // Waits for the tile's values. All warps come here, behind their products with the keys.
    __device__ __forceinline__ char* wait_for_values(const PrefillItem& item, int tile) {
        if constexpr (!kTogether) {
            const Source source(item);
            cute::cp_async_wait<kTile.k_stages - 1>();
            __syncthreads();
            if constexpr (kTile.k_stages == 1) {
                copy_next_keys(source, tile);
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

    // What copies need of an item. It is in shared memory: read before a wait, nobody waits for it.
    struct Source {
        int batch_idx;
        int kv_head;
        int kv_begin;
        int begin;  // keys
        int end;

        __device__ __forceinline__ explicit Source(const PrefillItem& item)
            : batch_idx(item.batch_idx),
              kv_head(item.kv_head),
              kv_begin(item.sequence.kv_begin),
              begin(item.keys.first),
              end(item.keys.end) {}
    };

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

    __device__ __forceinline__ void look_up(const Source& source, int tile) {
        const auto key = static_cast<uint32_t>(tile) * kKeys +
                         static_cast<uint32_t>(first_row() + lane() % kRows);
        const bool is_needed =
            key >= static_cast<uint32_t>(source.begin) && key < static_cast<uint32_t>(source.end);
        uint32_t offset;
        const uint32_t index = params_.page_size(offset, key);
        const bool has_pages = params_.block_table != nullptr;
        ahead_.page = is_needed ? 0 : -1;
        ahead_.offset = static_cast<int32_t>(has_pages ? offset : source.kv_begin + key);
        if (is_needed && has_pages) {
            // Nobody waits for it here.
            ahead_.page =
                params_.block_table[source.batch_idx * params_.block_table_stride + index];
        }
    }

    __device__ __forceinline__ void copy_next_keys(const Source& source, int tile) {
        copy<true, false>(source, tile + 1, ahead_);
        cute::cp_async_fence();
        now_ = ahead_;
        look_up(source, tile + 2);
    }

    template <bool kOfKeys, bool kOfValues>
    __device__ __forceinline__ void copy(
        const Source& source, int tile, const Places& places
    ) const {
        if (tile * kKeys >= source.end) {
            return;  // behind the last tile
        }
        const int first_key = tile * kKeys + first_row();
        const bool is_simple = params_.copies_whole_rows && params_.copies_by_places &&
                               is_page(params_, places.page) && first_key >= source.begin &&
                               first_key + kRows <= source.end;
        if (__all_sync(kWarp, is_simple)) [[likely]] {
            if constexpr (kOfKeys) {
                copy_page<KLayout>(params_.kv[0], source.kv_head, places, keys_at(tile));
            }
            if constexpr (kOfValues) {
                copy_page<VLayout>(params_.kv[1], source.kv_head, places, values_at(tile));
            }
        } else {
            const Rows rows = {
                places, source.kv_head, source.begin - first_key, source.end - first_key
            };
            if constexpr (kOfKeys) {
                copy_some<KLayout>(params_, params_.kv[0], rows, keys_at(tile));
            }
            if constexpr (kOfValues) {
                copy_some<VLayout>(params_, params_.kv[1], rows, values_at(tile));
            }
        }
    }

    // Rows of one page, all of them whole and visible: then all lanes have the page. An instruction takes
    // one slab of several rows, so the next one's addresses differ by constants.
    template <class Layout>
    static __device__ __forceinline__ void copy_page(
        const gpu::KvSide& side, int kv_head, const Places& places, char* to
    ) {
        static constexpr int kSlab = Layout::kSlab;
        static constexpr int kRowsAtOnce = 32 / kSlab < kRows ? 32 / kSlab : kRows;
        const int chunk = lane() % kSlab;
        const int row = lane() / kSlab;
        if (kRowsAtOnce * kSlab < 32 && row >= kRowsAtOnce) {
            return;
        }
        const int first = Layout::offset(first_row() + row, chunk);
        const int offset = places.offset - lane() % kRows + row;
        uint32_t from = places.page * gpu::in_chunks(side.page_stride) +
                        offset * gpu::in_chunks(side.token_stride) +
                        kv_head * gpu::in_chunks(side.head_stride) + chunk;
#pragma unroll
        for (int more = 0; more < kRows; more += kRowsAtOnce) {
            const char* const row_of_slab = side.data + static_cast<uint64_t>(from) * 16;
#pragma unroll
            for (int slab = 0; slab < Layout::kChunks; slab += kSlab) {
                cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>::copy(
                    *reinterpret_cast<const cute::uint128_t*>(row_of_slab + slab * 16),
                    *reinterpret_cast<cute::uint128_t*>(to + Layout::offset_from(first, more, slab))
                );
            }
            from += kRowsAtOnce * gpu::in_chunks(side.token_stride);
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
