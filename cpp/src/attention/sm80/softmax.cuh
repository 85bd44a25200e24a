#pragma once

// The online softmax of one tile of keys: scores -> weights, in log2 units. Lane (g, t) has rows 2t
// and 2t + 1 of each eight, and of each 16 keys the two at g and g + 8.

#include "attention/sm80/queries.cuh"
#include "common/ptx.cuh"

#include <cstdint>

namespace pagetile::sm80 {

inline constexpr float kInfinity = __builtin_huge_valf();

__device__ __forceinline__ float tanh_of(float x) {
    return 1.0f - 2.0f * ptx::rcp_approx(ptx::exp2_approx(2.0f * kLog2e * x) + 1.0f);
}

template <class Config>
class Softmax {
public:
    static constexpr int kRowSteps = Config::kShape.row_steps;
    static constexpr int kKeySteps = Config::kShape.keys / 16;
    using Frag = Fragments<Config>;
    using Scores = float[kKeySteps][kRowSteps][4];
    using Output = float[kRowSteps][Frag::kVSteps][4];

    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int n = 0; n < kRowSteps; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                largest[n][i] = -kInfinity;
                reference[n][i] = 0.0f;
                sum[n][i] = 0.0f;
            }
        }
    }

    // factor[n][i]: from scores to log2 units, > 0.
    template <class Factor>
    __device__ __forceinline__ void step(
        Scores& scores,
        Output& out,
        uint32_t (&weights)[kKeySteps][kRowSteps][2],
        const Factor& factor
    ) {
#pragma unroll
        for (int n = 0; n < kRowSteps; ++n) {
            float tile_largest[2] = {-kInfinity, -kInfinity};
#pragma unroll
            for (int s = 0; s < kKeySteps; ++s) {
                tile_largest[0] = fmaxf(tile_largest[0], fmaxf(scores[s][n][0], scores[s][n][2]));
                tile_largest[1] = fmaxf(tile_largest[1], fmaxf(scores[s][n][1], scores[s][n][3]));
            }
#pragma unroll
            for (int other = 4; other < 32; other *= 2) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    tile_largest[i] =
                        fmaxf(tile_largest[i], __shfl_xor_sync(kWarp, tile_largest[i], other));
                }
            }
            // Seldom after the first tile. A factor of 1 changes no bits, so that rows need not be alone
            // to be the same.
            bool rises[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                rises[i] = (tile_largest[i] - largest[n][i]) * factor(n, i) > kMostRise;
            }
            if (__any_sync(kWarp, rises[0] || rises[1])) {
                raise(n, rises, tile_largest, out, factor);
            }
#pragma unroll
            for (int s = 0; s < kKeySteps; ++s) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float& score = scores[s][n][i];
                    score = ptx::exp2_approx(fmaf(score, factor(n, i % 2), -reference[n][i % 2]));
                    sum[n][i % 2] += score;
                }
                Frag::turn_weights(weights[s][n], scores[s][n]);
            }
        }
    }

    // Sums over the lanes that share a row.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int n = 0; n < kRowSteps; ++n) {
#pragma unroll
            for (int other = 4; other < 32; other *= 2) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    sum[n][i] += __shfl_xor_sync(kWarp, sum[n][i], other);
                }
            }
        }
    }

    float largest[kRowSteps][2];    // score, when it was last raised
    float reference[kRowSteps][2];  // in log2 units; 0 while no key has been seen
    float sum[kRowSteps][2];

private:
    // In log2 units: up to 2^8 weights may grow before their reference does.
    static constexpr float kMostRise = 8.0f;

    template <class Factor>
    __device__ __forceinline__ void raise(
        int n,
        const bool (&rises)[2],
        const float (&tile_largest)[2],
        Output& out,
        const Factor& factor
    ) {
        float rescale[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            rescale[i] = 1.0f;
            if (rises[i]) {
                const float now = tile_largest[i] * factor(n, i);
                rescale[i] =
                    largest[n][i] == -kInfinity ? 0.0f : ptx::exp2_approx(reference[n][i] - now);
                largest[n][i] = tile_largest[i];
                reference[n][i] = now;
                sum[n][i] *= rescale[i];
            }
        }
#pragma unroll
        for (int step = 0; step < Frag::kVSteps; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                out[n][step][i] *= rescale[i % 2];
            }
        }
    }
};

// What scores go through besides a positive factor, and which keys a row may see.
template <class Config>
class ScoreRules {
public:
    static constexpr int kRowSteps = Config::kShape.row_steps;
    static constexpr int kKeySteps = Config::kShape.keys / 16;
    using Scores = typename Softmax<Config>::Scores;

    // Softcap, bias, a factor that is not positive: scores come out in log2 units.
    static __device__ __forceinline__ void transform(
        const KernelParams& params,
        const Item& item,
        const Queries<Config>& queries,
        int row_warp,
        int first_key,
        Scores& scores
    ) {
        const int lane = static_cast<int>(threadIdx.x % 32);
        const int32_t first_row = first_row_of(item, row_warp) + 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < kRowSteps; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int32_t diagonal = diagonal_of(params, item, first_row + n * 8 + i);
                float slope = 0.0f;
                if (params.alibi_slopes != nullptr) {
                    const Row row = find_row(params, item, first_row + n * 8 + i);
                    slope = kLog2e * params.alibi_slopes
                                         [item.batch_idx * params.alibi_batch_stride +
                                          row.head * params.alibi_head_stride];
                }
                const float factor =
                    Config::kElementBytes == 1 ? queries.scale[n][i] : params.scale;
#pragma unroll
                for (int s = 0; s < kKeySteps; ++s) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float& score = scores[s][n][2 * half + i];
                        score *= factor;
                        if (params.softcap != 0.0f) {
                            score = params.softcap * tanh_of(score * params.softcap_inverse);
                        }
                        const int key = first_key + s * 16 + half * 8 + lane / 4;
                        const auto distance = static_cast<float>(diagonal - key);
                        score -= slope * fabsf(distance);
                    }
                }
            }
        }
    }

    // Keys outside [first, end) of their row weigh nothing.
    static __device__ __forceinline__ void mask(
        const KernelParams& params, const Item& item, int row_warp, int first_key, Scores& scores
    ) {
        const int lane = static_cast<int>(threadIdx.x % 32);
        const int32_t first_row = first_row_of(item, row_warp) + 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < kRowSteps; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const Row row = find_row(params, item, first_row + n * 8 + i);
                const KeyRange keys = visible_keys(
                    params.shape, item.sequence.q_len, item.sequence.kv_len, row.token
                );
#pragma unroll
                for (int s = 0; s < kKeySteps; ++s) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int key = first_key + s * 16 + half * 8 + lane / 4;
                        if (key < keys.begin || key >= keys.end) {
                            scores[s][n][2 * half + i] = -kInfinity;
                        }
                    }
                }
            }
        }
    }

    static __device__ int32_t first_row_of(const Item& item, int row_warp) {
        return item.row_tile * Config::kRows + row_warp * 8 * kRowSteps;
    }
};

}  // namespace pagetile::sm80
