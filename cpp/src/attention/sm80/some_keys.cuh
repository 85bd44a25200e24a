#pragma once

// Copies of 16 keys that are not simply 16 rows of one page: small pages, the ends of what is visible, head
// dimensions that are padded, rows in chunks, odd addresses.

#include "attention/cuda/sequences.cuh"
#include "attention/sm80/row_layout.cuh"
#include "attention/sm80/tile_shapes.h"
#include "common/ptx.cuh"

#include <cstdint>

namespace pagetile::sm80 {

using gpu::is_page;
using gpu::KernelParams;
using gpu::kWarp;

// 16 bytes of a row, an element at a time: odd addresses, rows in chunks.
template <int kElement>
static __device__ uint4
load_elements(const gpu::KvSide& side, const char* row, int first, bool is_there) {
    uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int d = first; d < first + 16 / kElement; ++d) {
        uint32_t value = 0;
        if (is_there && d * kElement < side.row_bytes) {
            const char* from = row + (d >> side.chunk_log2) * side.chunk_stride +
                               (d & ((1 << side.chunk_log2) - 1)) * kElement;
            value = kElement == 2 ? *reinterpret_cast<const uint16_t*>(from)
                                  : *reinterpret_cast<const uint8_t*>(from);
        }
        // Shifts the element into a place that the loop would else have to index.
        static constexpr int kBits = 8 * kElement;
        words[0] = __funnelshift_r(words[0], words[1], kBits);
        words[1] = __funnelshift_r(words[1], words[2], kBits);
        words[2] = __funnelshift_r(words[2], words[3], kBits);
        words[3] = words[3] >> kBits | value << (32 - kBits);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// 16 keys of which some may not be visible, and that may lie on several pages.
template <class Config>
struct SomeKeys {
    using KLayout = typename Config::KLayout;
    using VLayout = typename Config::VLayout;
    static constexpr TileShape kShape = Config::kShape;
    static constexpr int kKeys = kShape.keys;
    static constexpr int kRowBytesK = Config::kHeadDim * Config::kElementBytes;
    static constexpr int kRowBytesV = Config::kHeadDimV * Config::kElementBytes;

    int page;  // this lane's, as in Batch
    int offset;
    int kv_head;
    int lane;   // that has the first key's page
    int begin;  // visible ones, counted from the first key
    int end;
    int group;  // of the tile
    int row_warp;

    // Small pages, the ends of what is visible, other alignments, rows in chunks. Out of the way of
    // the loop: instructions that are jumped over are fetched, too.
    static __device__ __noinline__ void copy(const KernelParams& params, SomeKeys some, char* to) {
        const int key = static_cast<int>(threadIdx.x % 16);
        const int from = some.lane + (key >> params.granule_log2);
        const int in_granule = key & ((1 << params.granule_log2) - 1);
        OfKey mine;
        mine.page = __shfl_sync(kWarp, some.page, from);
        mine.offset = __shfl_sync(kWarp, some.offset, from) + in_granule;
        mine.is_there = is_page(params, mine.page) && key >= some.begin && key < some.end;
        mine.page = mine.is_there ? mine.page : 0;
        if (!params.copies_by_places) [[unlikely]] {
            copy_elements<KLayout, kRowBytesK>(params, params.kv[0], some, mine, to);
            copy_elements<VLayout, kRowBytesV>(
                params, params.kv[1], some, mine, to + kKeys * kRowBytesK
            );
        } else if constexpr (kRowBytesK == kRowBytesV) {
            copy_rows<KLayout, kRowBytesK, 0, 2>(params, some, mine, to);
        } else {
            copy_rows<KLayout, kRowBytesK, 0, 1>(params, some, mine, to);
            copy_rows<VLayout, kRowBytesV, 1, 1>(params, some, mine, to + kKeys * kRowBytesK);
        }
    }

private:
    // Where the key of a lane is, one of 16.
    struct OfKey {
        int page;
        int offset;
        bool is_there;
    };

    // The 16 bytes of a lane in a pass over 16 keys.
    template <int kRowBytes>
    struct Pass {
        static constexpr int kChunks = kRowBytes / 16;
        static constexpr int kCount = 16 * kChunks / 32;
        static_assert(kCount * 32 == 16 * kChunks);

        int key;
        int chunk;

        __device__ __forceinline__ explicit Pass(int number) {
            const int i = number * 32 + static_cast<int>(threadIdx.x % 32);
            key = i / kChunks;
            chunk = i % kChunks;
        }
    };

    // Of kSides sides from kFirst on.
    template <class Layout, int kRowBytes, int kFirst, int kSides>
    static __device__ __forceinline__ void copy_rows(
        const KernelParams& params, const SomeKeys& some, const OfKey& mine, char* to
    ) {
        static constexpr int kCount = Pass<kRowBytes>::kCount;
        // Shuffles before copies, as far as there are registers: behind them they wait long.
        static constexpr int kAtOnce = Config::kBeside ? 1 : 4;
        const uint32_t there = __ballot_sync(kWarp, mine.is_there);
        uint32_t places[kSides];  // of the lane's key
        const char* data[kSides];
        int row_chunks[kSides];
#pragma unroll
        for (int i = 0; i < kSides; ++i) {
            const gpu::KvSide& side = params.kv[kFirst + i];
            data[i] = side.data;
            row_chunks[i] = side.row_bytes / 16;
            places[i] = mine.page * gpu::in_chunks(side.page_stride) +
                        mine.offset * gpu::in_chunks(side.token_stride) +
                        some.kv_head * gpu::in_chunks(side.head_stride);
        }
#pragma unroll 1
        for (int first = some.row_warp; first < kCount; first += kAtOnce * kShape.row_warps) {
            uint32_t from[kAtOnce][kSides];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const Pass<kRowBytes> pass(first + i * kShape.row_warps);
#pragma unroll
                for (int side = 0; side < kSides; ++side) {
                    from[i][side] = __shfl_sync(kWarp, places[side], pass.key & 15);
                }
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int number = first + i * kShape.row_warps;
                if (kCount % (kAtOnce * kShape.row_warps) != 0 && number >= kCount) {
                    break;
                }
                const Pass<kRowBytes> pass(number);
                char* place = to + Layout::offset(some.group + pass.key, pass.chunk);
#pragma unroll
                for (int side = 0; side < kSides; ++side) {
                    const bool is_in_row = pass.chunk < row_chunks[side];
                    ptx::cp_async_16_bytes_if(
                        is_in_row ? there & 1u << pass.key : 0,
                        place + side * kKeys * kRowBytes,
                        data[side] + static_cast<uint64_t>(from[i][side]) * 16 + pass.chunk * 16
                    );
                }
            }
        }
    }

    template <class Layout, int kRowBytes>
    static __device__ __forceinline__ void copy_elements(
        const KernelParams& params,
        const gpu::KvSide& side,
        const SomeKeys& some,
        const OfKey& mine,
        char* to
    ) {
        static constexpr int kElement = Config::kElementBytes;
#pragma unroll 1
        for (int number = some.row_warp; number < Pass<kRowBytes>::kCount;
             number += kShape.row_warps) {
            const Pass<kRowBytes> pass(number);
            const int page = __shfl_sync(kWarp, mine.page, pass.key);
            const int offset = __shfl_sync(kWarp, mine.offset, pass.key);
            const bool is_there = __shfl_sync(kWarp, mine.is_there, pass.key);
            const char* row = side.data + some.kv_head * side.head_stride +
                              page * side.page_stride + offset * side.token_stride;
            char* place = to + Layout::offset(some.group + pass.key, pass.chunk);
            *reinterpret_cast<uint4*>(place) =
                load_elements<kElement>(side, row, pass.chunk * 16 / kElement, is_there);
        }
    }
};

}  // namespace pagetile::sm80
