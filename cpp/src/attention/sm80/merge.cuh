#pragma once

// From the warps' sums to the result: the warps of a CTA in shared memory, the pieces of a tile in
// the workspace, by whichever CTA comes last.

#include "attention/sm80/queries.cuh"
#include "attention/sm80/softmax.cuh"
#include "common/ptx.cuh"

#include <cstdint>

namespace pagetile::sm80 {

inline constexpr float kLn2 = 0.6931471805599453f;

// Of a row and some keys: the largest score in log2 units, -inf if there were none; the sum of
// weights relative to it.
using RowSum = float2;

__device__ __forceinline__ float weight_of(const RowSum& part, float largest) {
    return part.x == -kInfinity ? 0.0f : ptx::exp2_approx(part.x - largest);
}

__device__ __forceinline__ void add_scaled(float4& sum, float factor, const float4& part) {
    sum.x = fmaf(factor, part.x, sum.x);
    sum.y = fmaf(factor, part.y, sum.y);
    sum.z = fmaf(factor, part.z, sum.z);
    sum.w = fmaf(factor, part.w, sum.w);
}

template <class Config>
class Merge {
public:
    static constexpr TileShape kShape = Config::kShape;
    static constexpr int kRows = Config::kRows;
    static constexpr int kVectors = Config::kHeadDimV / 4;  // of a row
    static constexpr int kRowFloats = merge_row_floats(Config::kHeadDimV);
    static constexpr int kThreads = kShape.num_threads();
    using Frag = Fragments<Config>;

    // What the warps leave to each other.
    struct Storage {
        float out[kShape.key_warps][kRows][kRowFloats];
        RowSum sums[kShape.key_warps][kRows];
    };

    __device__ Merge(const SplitKvParams& params, const Item& item, int chain, Storage& storage)
        : params_(params), item_(item), storage_(storage), chain_(chain) {
        rows_ = min(max(num_rows(params, item) - item.row_tile * kRows, 0), kRows);
    }

    // One warp's sums; the CTA must then meet.
    static __device__ __forceinline__ void leave(
        Storage& storage,
        int key_warp,
        int row_warp,
        const Softmax<Config>& softmax,
        const typename Softmax<Config>::Output& out
    ) {
        const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
        for (int n = 0; n < kShape.row_steps; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = (row_warp * kShape.row_steps + n) * 8 + 2 * (lane % 4) + i;
                if (lane < 4) {
                    const bool has_keys = softmax.largest[n][i] != -kInfinity;
                    storage.sums[key_warp][row] = make_float2(
                        has_keys ? softmax.reference[n][i] : -kInfinity, softmax.sum[n][i]
                    );
                }
                float* to = storage.out[key_warp][row];
#pragma unroll
                for (int step = 0; step < Frag::kVSteps; ++step) {
                    to[Frag::upper_element(step, lane)] = out[n][step][i];
                    to[Frag::lower_element(step, lane)] = out[n][step][i + 2];
                }
            }
        }
    }

    // All warps, after they have met; each has its rows. The pieces of a row meet in the workspace:
    // the warp that counts the last one sums them.
    __device__ __forceinline__ void run() const {
        const int warp = static_cast<int>(threadIdx.x / 32);
        const int lane = static_cast<int>(threadIdx.x % 32);
        const bool is_whole = item_.part.pieces <= 1;
        for (int row = warp; row < rows_; row += kWarps) {
#pragma unroll
            for (int first_vector = 0; first_vector < kVectors; first_vector += 32) {
                if (first_vector + lane < kVectors) {
                    merge_row(row, first_vector + lane, is_whole);
                }
            }
        }
        if (is_whole || warp >= rows_) {
            return;
        }
        __syncwarp();
        bool is_last = false;
        if (lane == 0) {
            const int tile = item_.part.place * params_.shape.chains + chain_;
            const auto last = static_cast<uint32_t>(item_.part.pieces - 1);
            is_last =
                ptx::count_arrival(params_.counters + tile * kCountersPerTile + warp, last) == last;
        }
        if (__any_sync(kWarp, is_last)) {
            for (int row = warp; row < rows_; row += kWarps) {
                sum_pieces(row);
            }
        }
    }

private:
    static constexpr int kWarps = kThreads / 32;
    static_assert(kWarps <= kCountersPerTile);

    // What the warps have of four elements of a row.
    __device__ __forceinline__ void merge_row(int row, int vector, bool is_whole) const {
        RowSum sum = {-kInfinity, 0.0f};
#pragma unroll
        for (int w = 0; w < kShape.key_warps; ++w) {
            sum.x = fmaxf(sum.x, storage_.sums[w][row].x);
        }
        float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < kShape.key_warps; ++w) {
            const RowSum part = storage_.sums[w][row];
            const float factor = weight_of(part, sum.x);
            sum.y = fmaf(factor, part.y, sum.y);
            add_scaled(
                out, factor, *reinterpret_cast<const float4*>(&storage_.out[w][row][vector * 4])
            );
        }
        if (is_whole) {
            write(params_, item_, row, vector, sum, out);
            return;
        }
        __stcg(piece_out(item_.part.piece, row) + vector, out);
        if (vector == 0) {
            __stcg(piece_sum(item_.part.piece, row), sum);
        }
    }

    // A warp's work: the pieces of a row, in their order.
    __device__ __forceinline__ void sum_pieces(int row) const {
        static constexpr int kAtOnce = 16;  // loads in flight
        const int lane = static_cast<int>(threadIdx.x % 32);
        const int pieces = item_.part.pieces;
#pragma unroll 1
        for (int first_vector = 0; first_vector < kVectors; first_vector += 32) {
            const int vector = first_vector + lane;
            const bool has_vector = vector < kVectors;
            RowSum mine = {-kInfinity, 0.0f};  // of piece first + lane, every second time
            RowSum sum = {-kInfinity, 0.0f};
            float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
            for (int first = 0; first < pieces; first += kAtOnce) {
                if (first % 32 == 0) {
                    mine = load_sum(first + lane, row);
                }
                float4 parts[kAtOnce];
                const float4* from = piece_out(first, row) + vector;
                const int64_t stride = piece_out(first + 2, row) - piece_out(first + 1, row);
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    parts[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    if (i == 1) {
                        from = piece_out(first + 1, row) + vector;
                    }
                    if (has_vector && first + i < pieces) {
                        parts[i] = __ldcg(from);
                    }
                    from += stride;
                }
                if (first == 0) {
                    // The loads are on their way.
                    sum.x = mine.x;
                    for (int piece = lane + 32; piece < pieces; piece += 32) {
                        sum.x = fmaxf(sum.x, load_sum(piece, row).x);
                    }
                    for (int other = 1; other < 32; other *= 2) {
                        sum.x = fmaxf(sum.x, __shfl_xor_sync(kWarp, sum.x, other));
                    }
                }
                const float factor = weight_of(mine, sum.x);
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    const float f = __shfl_sync(kWarp, factor, first % 32 + i);
                    sum.y = fmaf(f, __shfl_sync(kWarp, mine.y, first % 32 + i), sum.y);
                    add_scaled(out, f, parts[i]);
                }
            }
            if (has_vector) {
                write(params_, item_, row, vector, sum, out);
            }
        }
    }

    __device__ RowSum load_sum(int piece, int row) const {
        return piece < item_.part.pieces ? __ldcg(piece_sum(piece, row))
                                         : make_float2(-kInfinity, 0.0f);
    }

    __device__ int64_t slot_row(int piece, int row) const {
        const int slot =
            slot_of(params_.shape, item_.part.place, piece) * params_.shape.chains + chain_;
        return static_cast<int64_t>(slot) * params_.slot_rows + row;
    }

    __device__ float4* piece_out(int piece, int row) const {
        return reinterpret_cast<float4*>(params_.rows_out) + slot_row(piece, row) * kVectors;
    }

    __device__ RowSum* piece_sum(int piece, int row) const {
        return params_.rows_max + slot_row(piece, row);
    }

    // Four elements of a row's result; its first thread writes the log-sum-exp.
    static __device__ __forceinline__ void write(
        const SplitKvParams& params,
        const Item& item,
        int row_of_tile,
        int vector,
        RowSum sum,
        float4 out
    ) {
        const Row row = find_row(params, item, item.row_tile * kRows + row_of_tile);
        const int64_t token = item.sequence.q_begin + row.token;
        float factor = 1.0f;
        if (params.sinks != nullptr) {
            const float sink = read_sink(params, row.head) * kLog2e;
            const float largest = fmaxf(sum.x, sink);
            if (largest != -kInfinity) {
                factor = weight_of(sum, largest);
                sum.y = sum.y * factor + ptx::exp2_approx(sink - largest);
                sum.x = largest;
            }
        }
        const bool is_empty = sum.y == 0.0f;
        factor = is_empty ? 0.0f : factor / sum.y;
        if constexpr (Config::kElementBytes == 1) {
            factor *= scale_at(params.v_scale, item);
        }
        if (vector == 0 && params.softmax_lse != nullptr) {
            params.softmax_lse[row.head * params.lse_head_stride + token * params.lse_row_stride] =
                is_empty ? -kInfinity : (sum.x + log2f(sum.y)) * kLn2;
        }
        const float values[4] = {out.x * factor, out.y * factor, out.z * factor, out.w * factor};
        const int64_t at =
            token * params.out_row_stride + row.head * params.out_head_stride + vector * 4;
        if (vector * 4 >= params.head_dim_v) {
            return;
        }
        if constexpr (Config::kElementBytes == 2) {
            write_16_bits<typename Config::Math>(params, at, values);
        } else if (params.out_dtype == DType::kBFloat16) {
            write_16_bits<cutlass::bfloat16_t>(params, at, values);
        } else if (params.out_dtype == DType::kFloat16) {
            write_16_bits<cutlass::half_t>(params, at, values);
        } else {
            auto* to = static_cast<float*>(params.out) + at;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                to[i] = values[i];
            }
        }
    }

    template <class Element>
    static __device__ __forceinline__ void write_16_bits(
        const SplitKvParams& params, int64_t at, const float (&values)[4]
    ) {
        const uint2 four = make_uint2(
            MathType<Element>::pack(values[0], values[1]),
            MathType<Element>::pack(values[2], values[3])
        );
        auto* to = static_cast<uint16_t*>(params.out) + at;
        if (params.out_is_aligned) {
            *reinterpret_cast<uint2*>(to) = four;
            return;
        }
        to[0] = static_cast<uint16_t>(four.x);
        to[1] = static_cast<uint16_t>(four.x >> 16);
        to[2] = static_cast<uint16_t>(four.y);
        to[3] = static_cast<uint16_t>(four.y >> 16);
    }

    static __device__ float read_sink(const SplitKvParams& params, int head) {
        const int64_t at = head * params.sinks_stride;
        if (params.sinks_dtype == DType::kFloat32) {
            return static_cast<const float*>(params.sinks)[at];
        }
        const uint16_t bits = static_cast<const uint16_t*>(params.sinks)[at];
        return params.sinks_dtype == DType::kBFloat16
                   ? __uint_as_float(static_cast<uint32_t>(bits) << 16)
                   : __half2float(__ushort_as_half(bits));
    }

    const SplitKvParams& params_;
    const Item& item_;
    Storage& storage_;
    int chain_;
    int rows_;
};

}  // namespace pagetile::sm80
