#pragma once

// The rows of a tile: which query tokens and heads they are, their operand for the tensor cores.

#include "attention/sm80/fragments.cuh"
#include "attention/sm80/work_list.cuh"
#include "common/ptx.cuh"

#include <cstdint>

namespace pagetile::sm80 {

inline constexpr float kLog2e = 1.4426950408889634f;

// A packed row: a token of the sequence and a query head.
struct Row {
    int32_t token;
    int32_t head;
};

__device__ __forceinline__ int32_t num_rows(const KernelParams& params, const Item& item) {
    return num_rows(params, item.sequence);
}

// Rows behind the last one are taken for it; whatever they compute is dropped.
__device__ __forceinline__ Row find_row(const KernelParams& params, const Item& item, int32_t row) {
    const int32_t last = max(num_rows(params, item) - 1, 0);
    uint32_t in_group;
    const uint32_t token = params.group(in_group, static_cast<uint32_t>(min(row, last)));
    return {
        static_cast<int32_t>(token),
        item.kv_head * params.shape.group + static_cast<int32_t>(in_group),
    };
}

// The key at which a packed row's query stands.
__device__ __forceinline__ int32_t
diagonal_of(const KernelParams& params, const Item& item, int32_t row) {
    return find_row(params, item, row).token + item.sequence.kv_len - item.sequence.q_len;
}

__device__ __forceinline__ const char* query_row(
    const KernelParams& params, const Item& item, Row row
) {
    return params.q +
           static_cast<int64_t>(item.sequence.q_begin + row.token) * params.q_row_stride +
           row.head * params.q_head_stride;
}

template <class AnyItem>
__device__ __forceinline__ float scale_at(const Scale& scale, const AnyItem& item) {
    const int64_t at = item.batch_idx * scale.batch_stride + item.kv_head * scale.head_stride;
    return scale.data == nullptr ? 1.0f : scale.data[at];
}

// The first `count` of 16 bytes; the others are 0.
static __device__ __noinline__ void copy_bytes(char* to, const char* from, int count) {
    for (int b = 0; b < 16; ++b) {
        to[b] = b < count ? from[b] : char{0};
    }
}

// The rows of a tile in shared memory, as they are in global memory, behind their ends zero. Called
// for an item ahead: in the midst of keys and values, a load takes as long as all that were called
// for before it.
template <class Config>
struct QueryTile {
    using Layout = RowLayout<Config::kRows, Config::kHeadDim * 2>;
    static constexpr int kChunks = Config::kHeadDim / 8;  // of 16 bytes

    char rows[Config::kRows * Config::kHeadDim * 2];

    // By `count` threads, of which this is number `index`, as part of their next cp.async group.
    __device__ __forceinline__ void load(
        const KernelParams& params, const Item& item, int index, int count
    ) {
        const int row_bytes = is_float8(params.q_dtype) ? params.head_dim : 2 * params.head_dim;
        const int left = num_rows(params, item) - item.row_tile * Config::kRows;
#pragma unroll 1
        for (int i = index; i < Config::kRows * kChunks; i += count) {
            const int row = i / kChunks;
            const int byte = i % kChunks * 16;
            const bool is_there = row < left && byte < row_bytes;
            const char* from =
                query_row(
                    params, item, find_row(params, item, item.row_tile * Config::kRows + row)
                ) +
                byte;
            char* to = rows + Layout::offset(row, i % kChunks);
            if (params.q_is_aligned) [[likely]] {
                ptx::cp_async_16_bytes_if(is_there, to, is_there ? from : params.q);
            } else {
                copy_bytes(to, from, is_there ? row_bytes - byte : 0);
            }
        }
    }
};

__device__ __forceinline__ float power_of_two(int exponent) {
    return __int_as_float((exponent + 127) << 23);
}

// A row of a tile in shared memory, of which lanes t = 0..3 hold elements 4t to 4t + 3 of every 16,
// as fp16. That holds fp16 and fp8 queries exactly. A bf16 row is first divided by a power of two, so
// that its largest element fits: what is then too small for fp16 is 2^-38 of the largest. Returns
// what the row must be multiplied with. All lanes come here.
template <class Layout, int kKSteps>
__device__ __forceinline__ float load_row_as_half(
    const KernelParams& params, const char* rows, int row, uint32_t (&q)[kKSteps][2]
) {
    const int t = static_cast<int>(threadIdx.x % 4);
    if (is_float8(params.q_dtype)) [[unlikely]] {
#pragma unroll
        for (int k = 0; k < kKSteps; ++k) {
            const uint32_t four =
                *reinterpret_cast<const uint32_t*>(rows + Layout::offset(row, k) + 4 * t);
            if (params.q_dtype == DType::kFloat8E4M3) {
                widen<cutlass::float_e4m3_t>(q[k][0], q[k][1], four);
            } else {
                widen<cutlass::float_e5m2_t>(q[k][0], q[k][1], four);
            }
        }
        return 1.0f;
    }
    const int first = Layout::offset(row, t / 2) + t % 2 * 8;
#pragma unroll
    for (int k = 0; k < kKSteps; ++k) {
        const uint2 four =
            *reinterpret_cast<const uint2*>(rows + Layout::offset_from(first, 0, 2 * k));
        q[k][0] = four.x;
        q[k][1] = four.y;
    }
    if (params.q_dtype != DType::kBFloat16) {
        return 1.0f;
    }
    uint32_t largest = 0;  // exponent bits of a bf16
#pragma unroll
    for (int k = 0; k < kKSteps; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t pair = q[k][i];
            largest = max(largest, max((pair >> 7) & 0xff, (pair >> 23) & 0xff));
        }
    }
    largest = max(largest, __shfl_xor_sync(kWarp, largest, 1));
    largest = max(largest, __shfl_xor_sync(kWarp, largest, 2));
    // Below 2^14, so that sums of products stay far from fp16's end; infinity and NaN stay.
    const int exponent = min(max(static_cast<int>(largest), 1), 254) - 127 - 13;
    const float down = power_of_two(-exponent / 2);
    const float down_too = power_of_two(-exponent - -exponent / 2);
#pragma unroll
    for (int k = 0; k < kKSteps; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t pair = q[k][i];
            q[k][i] = MathType<cutlass::half_t>::pack(
                __uint_as_float(pair << 16) * down * down_too,
                __uint_as_float(pair & 0xffff0000) * down * down_too
            );
        }
    }
    return power_of_two(min(max(exponent, -126), 127));
}

// The rows of one row warp. Lane (g, t) has row g of each eight, and gets scores of rows 2t and
// 2t + 1.
template <class Config>
struct Queries {
    using Frag = Fragments<Config>;
    using Tile = QueryTile<Config>;
    static constexpr int kRowSteps = Config::kShape.row_steps;
    static constexpr int kKSteps = Frag::kKSteps;
    static constexpr bool kFloat8 = Frag::kFloat8;

    uint32_t q[kRowSteps][kKSteps][2];
    float scale[kRowSteps][2];  // fp8: of the lane's two rows' scores, times log2(e)

    __device__ __forceinline__ void load(
        const KernelParams& params, const Item& item, const Tile& tile, int row_warp
    ) {
        const int lane = static_cast<int>(threadIdx.x % 32);
        float item_scale = 1.0f;
        if constexpr (kFloat8) {
            item_scale =
                params.scale * scale_at(params.q_scale, item) * scale_at(params.k_scale, item);
        }
#pragma unroll
        for (int n = 0; n < kRowSteps; ++n) {
            const int row = (row_warp * kRowSteps + n) * 8;
            float my_scale = 1.0f;
            if constexpr (kFloat8) {
                my_scale = load_row_as_half<typename Tile::Layout>(
                    params, tile.rows, row + lane / 4, q[n]
                );
            } else {
                load_as_is(n, tile, row);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int column = 2 * (lane % 4) + i;
                scale[n][i] = 1.0f;
                if constexpr (kFloat8) {
                    scale[n][i] = item_scale * __shfl_sync(kWarp, my_scale, 4 * column);
                }
            }
        }
    }

private:
    __device__ __forceinline__ void load_as_is(int n, const Tile& tile, int row) {
        const int lane = static_cast<int>(threadIdx.x % 32);
        const int first = Tile::Layout::offset(row + lane % 8, lane / 8);
#pragma unroll
        for (int k = 0; k < kKSteps; k += 2) {
            const char* from = tile.rows + Tile::Layout::offset_from(first, 0, 2 * k);
            cute::SM75_U32x4_LDSM_N::copy(
                *reinterpret_cast<const cute::uint128_t*>(from),
                q[n][k][0],
                q[n][k][1],
                q[n][k + 1][0],
                q[n][k + 1][1]
            );
        }
    }
};

}  // namespace pagetile::sm80
