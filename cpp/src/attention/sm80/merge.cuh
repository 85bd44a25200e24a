#pragma once

// From the warps' sums to the result: the warps of a CTA in shared memory, the pieces of a tile in
// the workspace, by whichever CTA comes last.

#include "attention/sm80/queries.cuh"
#include "attention/sm80/results.cuh"
#include "attention/sm80/softmax.cuh"
#include "common/ptx.cuh"

#include <cstdint>

namespace pagetile::sm80 {

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

    // Where the pieces of rows meet if their CTAs are one cluster: piece i's is the i-th. Row r is
    // summed by the CTA of piece r % pieces.
    struct Meeting {
        float4 out[kRows + 7][kVectors];
        RowSum sums[kRows + 7];
    };

    // Best before the CTA meets: what is read of the item is then there when it is needed.
    __device__ Merge(const KernelParams& params, const Item& item, int chain, Storage& storage)
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
    // the warp that counts the last one sums them. Or in a cluster, if a meeting is given.
    __device__ __forceinline__ void run(Meeting* meeting) const {
        const int warp = static_cast<int>(threadIdx.x / 32);
        const int lane = static_cast<int>(threadIdx.x % 32);
        const bool is_whole = item_.part.pieces <= 1;
        for (int row = warp; row < rows_; row += kWarps) {
#pragma unroll
            for (int first_vector = 0; first_vector < kVectors; first_vector += 32) {
                if (first_vector + lane < kVectors) {
                    merge_row(row, first_vector + lane, is_whole, meeting);
                }
            }
        }
        if (is_whole || warp >= rows_ || meeting != nullptr) {
            return;
        }
        // Before the count is known, for nothing but loads to follow it.
        Pieces pieces = pieces_of(warp);
        Target target = target_of(params_, item_, warp);
        __syncwarp();
        bool is_last = false;
        if (lane == 0) {
            const int tile = item_.part.place * params_.shape.chains + chain_;
            const auto last = static_cast<uint32_t>(item_.part.pieces - 1);
            is_last =
                ptx::count_arrival(params_.counters + tile * kCountersPerTile + warp, last) == last;
        }
        if (!__any_sync(kWarp, is_last)) {
            return;
        }
        int row = warp;
#pragma unroll 1
        do {
            sum_pieces(pieces, target);
            row += kWarps;
            pieces = pieces_of(row);
            target = target_of(params_, item_, row);
        } while (row < rows_);
    }

    // After the cluster has met: this CTA's rows.
    __device__ __forceinline__ void sum_meeting(const Meeting& meeting) const {
        const int pieces = item_.part.pieces;
        if (pieces <= 1) {
            return;
        }
        const int lane = static_cast<int>(threadIdx.x % 32);
        int first = static_cast<int>(threadIdx.x / 32) * pieces;
        for (int row = first + item_.part.piece; row < rows_; row += kWarps * pieces) {
            const Target target = target_of(params_, item_, row);
            RowSum sum = {-kInfinity, 0.0f};
            for (int i = 0; i < pieces; ++i) {
                sum.x = fmaxf(sum.x, meeting.sums[first + i].x);
            }
#pragma unroll
            for (int first_vector = 0; first_vector < kVectors; first_vector += 32) {
                const int vector = first_vector + lane;
                if (vector < kVectors) {
                    RowSum of_all = {sum.x, 0.0f};
                    float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
                    for (int i = 0; i < kClusterLanes; ++i) {
                        if (i < pieces) {
                            const RowSum part = meeting.sums[first + i];
                            const float factor = weight_of(part, sum.x);
                            of_all.y = fmaf(factor, part.y, of_all.y);
                            add_scaled(out, factor, meeting.out[first + i][vector]);
                        }
                    }
                    write(params_, item_, target, vector, of_all, out);
                }
            }
            first += kWarps * pieces;
        }
    }

private:
    static constexpr int kWarps = kThreads / 32;
    static_assert(kWarps <= kCountersPerTile || kRows <= kCountersPerTile);

    // Where a row's pieces are in the workspace: the first one, the second one, others at even steps
    // from that. In bytes.
    struct Pieces {
        const char* out_first;
        const char* out_second;
        int64_t out_step;
        const char* sum_first;
        const char* sum_second;
        int64_t sum_step;
    };

    // Where a row's result belongs.
    struct Target {
        int64_t token;
        int32_t head;
    };

    // What the warps have of four elements of a row.
    __device__ __forceinline__ void merge_row(
        int row, int vector, bool is_whole, Meeting* meeting
    ) const {
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
            write(params_, item_, target_of(params_, item_, row), vector, sum, out);
            return;
        }
        if (meeting != nullptr) {
            const int at = row / item_.part.pieces * item_.part.pieces + item_.part.piece;
            auto* there =
                static_cast<Meeting*>(ptx::place_in_cluster(meeting, row % item_.part.pieces));
            there->out[at][vector] = out;
            if (vector == 0) {
                there->sums[at] = sum;
            }
            return;
        }
        const int64_t slot = slot_row(item_.part.piece, row);
        __stcg(reinterpret_cast<float4*>(params_.rows_out) + slot * kVectors + vector, out);
        if (vector == 0) {
            __stcg(params_.rows_max + slot, sum);
        }
    }

    // A warp's work: the pieces of a row, in their order.
    __device__ __forceinline__ void sum_pieces(const Pieces& at, const Target& target) const {
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
            const char* from = at.out_first + vector * 16;
#pragma unroll 1
            for (int first = 0; first < pieces; first += kAtOnce) {
                if (first % 32 == 0) {
                    mine = load_sum(at, first + lane);
                }
                float4 parts[kAtOnce];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    parts[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    if (has_vector && first + i < pieces) {
                        parts[i] = __ldcg(reinterpret_cast<const float4*>(from));
                    }
                    from = i == 0 && first == 0 ? at.out_second + vector * 16 : from + at.out_step;
                }
                if (first == 0) {
                    // The loads are on their way.
                    sum.x = mine.x;
#pragma unroll 1
                    for (int piece = lane + 32; piece < pieces; piece += 32) {
                        sum.x = fmaxf(sum.x, load_sum(at, piece).x);
                    }
#pragma unroll
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
                write(params_, item_, target, vector, sum, out);
            }
        }
    }

    // Rows of slots, from the workspace's beginning.
    __device__ int64_t slot_row(int piece, int row) const {
        const int slot =
            slot_of(params_.shape, item_.part.place, piece) * params_.shape.chains + chain_;
        return static_cast<int64_t>(slot) * params_.slot_rows + row;
    }

    __device__ __forceinline__ Pieces pieces_of(int row) const {
        static constexpr int kOutBytes = kVectors * 16;
        static constexpr int kSumBytes = sizeof(RowSum);
        const int64_t first = slot_row(0, row);
        const int64_t second = slot_row(1, row);
        const int64_t step = slot_row(2, row) - second;
        const auto* outs = reinterpret_cast<const char*>(params_.rows_out);
        const auto* sums = reinterpret_cast<const char*>(params_.rows_max);
        return {
            outs + first * kOutBytes,
            outs + second * kOutBytes,
            step * kOutBytes,
            sums + first * kSumBytes,
            sums + second * kSumBytes,
            step * kSumBytes,
        };
    }

    __device__ RowSum load_sum(const Pieces& at, int piece) const {
        if (piece >= item_.part.pieces) {
            return make_float2(-kInfinity, 0.0f);
        }
        const char* from = piece == 0 ? at.sum_first : at.sum_second + (piece - 1) * at.sum_step;
        return __ldcg(reinterpret_cast<const RowSum*>(from));
    }

    static __device__ __forceinline__ Target
    target_of(const KernelParams& params, const Item& item, int row_of_tile) {
        const Row row = find_row(params, item, item.row_tile * kRows + row_of_tile);
        return {item.sequence.q_begin + row.token, row.head};
    }

    // Four elements of a row's result; its first thread writes the log-sum-exp.
    static __device__ __forceinline__ void write(
        const KernelParams& params,
        const Item& item,
        const Target& target,
        int vector,
        RowSum sum,
        float4 out
    ) {
        const int64_t token = target.token;
        float factor = finish_row(params, target.head, sum);
        if constexpr (Config::kElementBytes == 1) {
            factor *= scale_at(params.v_scale, item);
        }
        if (vector == 0 && params.softmax_lse != nullptr) {
            params
                .softmax_lse[target.head * params.lse_head_stride + token * params.lse_row_stride] =
                lse_of(sum);
        }
        const float values[4] = {out.x * factor, out.y * factor, out.z * factor, out.w * factor};
        const int64_t at =
            token * params.out_row_stride + target.head * params.out_head_stride + vector * 4;
        if (vector * 4 < params.head_dim_v) {
            write_four<Config>(params, at, values);
        }
    }

    const KernelParams& params_;
    const Item item_;
    Storage& storage_;
    int chain_;
    int rows_;
};

}  // namespace pagetile::sm80
