#pragma once

// Items whose keys are cut into pieces. Each piece leaves its sums in the workspace, and the last to
// arrive merges them: always in the pieces' order, so that bits do not depend on who that is. A warp
// meets only the same warp of the other pieces, thread by thread.

#include "attention/sm90/rows.cuh"
#include "common/ptx.cuh"

#include <cstdint>

namespace pagetile::sm90 {

template <class Config>
class Pieces {
public:
    // True: all are there, and the results are of all pieces.
    static __device__ __forceinline__ bool merge(
        const PieceSums& memory,
        const Item& item,
        float (&largest)[2],
        float (&sum)[2],
        float (&out)[Config::kHeadDimV / 2],
        bool& is_wild
    ) {
        const auto warp = static_cast<int32_t>(threadIdx.x / 32) - 4;
        float4* const sums = memory.sums + static_cast<int64_t>(item.first_slot) * kPieceParts +
                             warp * kWarpParts + threadIdx.x % 32;
        float4* const mine = sums + item.piece * kPieceParts;
        __stcg(mine, make_float4(largest[0], largest[1], sum[0], sum[1]));
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const float* four = out + 4 * i;
            __stcg(mine + 32 * (i + 1), make_float4(four[0], four[1], four[2], four[3]));
        }
        uint32_t* const counter = memory.counters + 2 * (item.cut_item * kWarps + warp);
        if (!is_last(counter, item.pieces, is_wild)) {
            return false;
        }
        largest[0] = largest[1] = kLowest;
        for (int32_t piece = 0; piece < item.pieces; ++piece) {
            const float4 of_piece = __ldcg(sums + piece * kPieceParts);
            largest[0] = fmaxf(largest[0], of_piece.x);
            largest[1] = fmaxf(largest[1], of_piece.y);
        }
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < Config::kHeadDimV / 2; ++i) {
            out[i] = 0.0f;
        }
#pragma unroll 1
        for (int32_t piece = 0; piece < item.pieces; ++piece) {
            const float4* from = sums + piece * kPieceParts;
            const float4 of_piece = __ldcg(from);
            const float weights[2] = {
                ptx::exp2_approx(of_piece.x - largest[0]), ptx::exp2_approx(of_piece.y - largest[1])
            };
            sum[0] = fmaf(weights[0], of_piece.z, sum[0]);
            sum[1] = fmaf(weights[1], of_piece.w, sum[1]);
#pragma unroll
            for (int i = 0; i < kParts; ++i) {
                const float4 four = __ldcg(from + 32 * (i + 1));
                out[4 * i] = fmaf(weights[0], four.x, out[4 * i]);
                out[4 * i + 1] = fmaf(weights[0], four.y, out[4 * i + 1]);
                out[4 * i + 2] = fmaf(weights[1], four.z, out[4 * i + 2]);
                out[4 * i + 3] = fmaf(weights[1], four.w, out[4 * i + 3]);
            }
        }
        return true;
    }

private:
    static constexpr int kParts = Config::kHeadDimV / 8;
    static constexpr int kWarps = 4 * Config::kTile.warpgroups;
    static constexpr int kWarpParts = 32 * (kParts + 1);
    static constexpr int kPieceParts = kWarps * kWarpParts;

    // Whether this warp is the last of the pieces'. is_wild is then of all of them.
    static __device__ __forceinline__ bool is_last(
        uint32_t* counter, int32_t pieces, bool& is_wild
    ) {
        __syncwarp();
        uint32_t arrived = 0;
        uint32_t wild = 0;
        if (threadIdx.x % 32 == 0) {
            if (is_wild) [[unlikely]] {
                atomicExch(counter + 1, 1);
            }
            const auto last = static_cast<uint32_t>(pieces - 1);
            arrived = ptx::count_arrival(counter, last) == last ? 1 : 0;
            if (arrived != 0) {
                wild = __ldcg(counter + 1);
            }
            if (wild != 0) [[unlikely]] {
                __stcg(counter + 1, 0);
            }
        }
        is_wild = __shfl_sync(kWarp, wild, 0) != 0;
        return __shfl_sync(kWarp, arrived, 0) != 0;
    }
};

}  // namespace pagetile::sm90
