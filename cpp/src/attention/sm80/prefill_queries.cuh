#pragma once

// The queries of a tile: from global memory to shared memory, from there to the tensor cores as the
// 16 rows of an instruction, and their scores.

#include "attention/sm80/prefill_fragments.cuh"
#include "common/ptx.cuh"

#include <cstdint>

namespace pagetile::sm80 {

template <class Config>
class PrefillQueries {
public:
    using Layout = typename Config::QLayout;
    using Frag = PrefillFragments<Config>;
    static constexpr int kRowSteps = Config::kRowSteps;
    static constexpr int kKSteps = Config::kHeadDim / 16;
    static constexpr int kKeyTiles = Config::kKeys / 8;
    static constexpr bool kKeeps = Config::kTile.keeps_queries;
    // Of lane (g, t): rows g [0, 1] and g + 8 [2, 3], keys 2t and 2t + 1 of each eight.
    using Scores = float[kRowSteps][kKeyTiles][4];

    // Copies a tile's rows, as they are, as part of the next cp.async group. Zeros behind their ends. Each
    // warp copies its own rows, eight at a time, four lanes a row.
    static __device__ __forceinline__ void copy(
        const KernelParams& params, const PrefillItem& item, char* rows
    ) {
        static constexpr int kChunks = Config::kHeadDim / 8;  // of 16 bytes
        const int row_bytes = is_float8(params.q_dtype) ? params.head_dim : 2 * params.head_dim;
        const int num_rows = item.num_tokens * params.shape.group;
#pragma unroll 1
        for (int eight = 0; eight < 2 * kRowSteps; ++eight) {
            const int row = row_of_lane<Config>(0, eight);
            const Row at = find_row_of_tile(params, item, row);
            const char* from =
                params.q +
                static_cast<int64_t>(item.sequence.q_begin + at.token) * params.q_row_stride +
                at.head * params.q_head_stride;
#pragma unroll
            for (int first = 0; first < kChunks; first += 4) {
                const int chunk = first + static_cast<int>(threadIdx.x % 4);
                const int byte = chunk * 16;
                const bool is_there = row < num_rows && byte < row_bytes;
                char* to = rows + Layout::offset(row, chunk);
                if (params.q_is_aligned) [[likely]] {
                    ptx::cp_async_16_bytes_if(is_there, to, is_there ? from + byte : params.q);
                } else {
                    copy_bytes(to, from + byte, is_there ? row_bytes - byte : 0);
                }
            }
        }
    }

    // What the rows' scores are multiplied with, times log2(e). Kept in shared memory: there are not
    // registers enough.
    struct Scales {
        float of_row[Config::kFloat8 ? kPrefillRows : 1];
    };

    // Once the warp's rows are there.
    __device__ __forceinline__ void load(
        const KernelParams& params, const PrefillItem& item, char* rows, Scales& scales
    ) {
        rows_ = rows;
        first_ = Layout::offset(
            static_cast<int>(threadIdx.x / 32) * Config::kRowsOfWarp +
                static_cast<int>(threadIdx.x % 16),
            static_cast<int>(threadIdx.x % 32) / 16
        );
        if constexpr (Config::kFloat8) {
            turn_to_half(params, item, rows, scales);
        }
        if constexpr (kKeeps) {
#pragma unroll
            for (int k = 0; k < kKSteps; ++k) {
                fetch(k, kept_[k]);
            }
        }
    }

    // Of a lane's row.
    static __device__ __forceinline__ float scale_of(
        const KernelParams& params, const Scales& scales, int n, int half
    ) {
        return Config::kFloat8 ? scales.of_row[row_of_lane<Config>(n, half)] : params.scale;
    }

    // Scores of the warp's rows with a tile of keys.
    __device__ __forceinline__ void multiply_keys(Scores& scores, const char* k_tile) const {
#pragma unroll
        for (int n = 0; n < kRowSteps; ++n) {
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    scores[n][j][i] = 0.0f;
                }
            }
        }
#pragma unroll
        for (int k = 0; k < kKSteps; ++k) {
            uint32_t q[kRowSteps][4];
            get(k, q);
            Frag::for_each_key(k_tile, k, [&](int j, const uint32_t (&keys)[4]) {
#pragma unroll
                for (int n = 0; n < kRowSteps; ++n) {
                    Frag::multiply(scores[n], j, q[n], keys);
                }
            });
        }
    }

private:
    __device__ __forceinline__ void get(int k, uint32_t (&q)[kRowSteps][4]) const {
        if constexpr (kKeeps) {
#pragma unroll
            for (int n = 0; n < kRowSteps; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    q[n][i] = kept_[k][n][i];
                }
            }
        } else {
            fetch(k, q);
        }
    }

    __device__ __forceinline__ void fetch(int k, uint32_t (&q)[kRowSteps][4]) const {
#pragma unroll
        for (int n = 0; n < kRowSteps; ++n) {
            Frag::load(q[n], rows_ + Layout::offset_from(first_, n * 16, 2 * k));
        }
    }

    // The warp's own rows become fp16, in the order in which fp8 keys come: elements 4t, 4t + 1 of
    // each 16 stand where the instruction wants 2t, 2t + 1, and 4t + 2, 4t + 3 eight behind them.
    static __device__ __forceinline__ void turn_to_half(
        const KernelParams& params, const PrefillItem& item, char* rows, Scales& scales
    ) {
        const float of_all =
            params.scale * scale_at(params.q_scale, item) * scale_at(params.k_scale, item);
        const int t = static_cast<int>(threadIdx.x % 4);
#pragma unroll 1
        for (int eight = 0; eight < 2 * kRowSteps; ++eight) {
            const int row = row_of_lane<Config>(0, eight);
            uint32_t q[kKSteps][2];
            const float of_row = load_row_as_half<Layout>(params, rows, row, q);
            scales.of_row[row] = of_all * of_row;  // all four lanes
            __syncwarp();                          // all have read what is overwritten
#pragma unroll
            for (int k = 0; k < kKSteps; ++k) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    char* to = rows + Layout::offset(row, 2 * k + i) + 4 * t;
                    *reinterpret_cast<uint32_t*>(to) = q[k][i];
                }
            }
        }
        __syncwarp();
    }

    const char* rows_;
    int first_;
    uint32_t kept_[kKeeps ? kKSteps : 1][kRowSteps][4];
};

}  // namespace pagetile::sm80
