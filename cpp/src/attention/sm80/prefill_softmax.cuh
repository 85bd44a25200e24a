#pragma once

// The online softmax of the portable prefill kernel, in log2 units, and what scores go through before.

#include "attention/sm80/prefill_queries.cuh"
#include "attention/sm80/softmax.cuh"
#include "common/ptx.cuh"

#include <cstdint>

namespace pagetile::sm80 {

template <class Config>
class PrefillSoftmax {
public:
    static constexpr int kRowSteps = Config::kRowSteps;
    static constexpr int kKeyTiles = Config::kKeys / 8;
    static constexpr int kValueTiles = Config::kHeadDimV / 8;
    using Math = MathType<typename Config::Math>;
    using Scores = typename PrefillQueries<Config>::Scores;
    using Output = float[kRowSteps][kValueTiles][4];
    // Of 16 keys: an operand of the tensor cores.
    using Weights = uint32_t[kRowSteps][4];
    static constexpr int kSteps = Config::kKeysAtOnce / 16;

    __device__ __forceinline__ void begin(Output& out) {
#pragma unroll
        for (int n = 0; n < kRowSteps; ++n) {
#pragma unroll
            for (int j = 0; j < kValueTiles; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    out[n][j][i] = 0.0f;
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                reference[n][i] = kNoKeys;
                sum[n][i] = 0.0f;
            }
        }
    }

    // The s-th keys become weights, kSteps x 16 of them. factor(n, i): from scores to log2 units, > 0. A
    // reference is seldom passed by, so scores are weighed before anybody has looked for the largest: a
    // weight above 2^8 makes a sum that is, too, or a NaN, and then they are weighed again.
    template <int s, class Factor>
    __device__ __forceinline__ void weigh(
        const Scores& scores, Weights (&weights)[kSteps], Output& out, const Factor& factor
    ) {
        float sums[kRowSteps][2];
        weigh_at_once<s>(scores, weights, sums, factor);
        float total = 0.0f;
#pragma unroll
        for (int n = 0; n < kRowSteps; ++n) {
            total += sums[n][0] + sums[n][1];
        }
        if (__any_sync(kWarp, !(total <= kMost))) [[unlikely]] {
            raise<s>(scores, out, factor);
            weigh_at_once<s>(scores, weights, sums, factor);
        }
#pragma unroll
        for (int n = 0; n < kRowSteps; ++n) {
            sum[n][0] += sums[n][0];
            sum[n][1] += sums[n][1];
        }
    }

    // Sums over the lanes that share a row.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int n = 0; n < kRowSteps; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                sum[n][i] += __shfl_xor_sync(kWarp, sum[n][i], 1);
                sum[n][i] += __shfl_xor_sync(kWarp, sum[n][i], 2);
            }
        }
    }

    float reference[kRowSteps][2];  // the largest score, up to kSlack
    float sum[kRowSteps][2];

private:
    static constexpr float kNoKeys = -3e38f;  // a reference that any score is above
    // A row keeps its reference until a score is above it by more: weights up to 2^8 fit every type,
    // and most rescaling falls away.
    static constexpr float kSlack = 8.0f;
    static constexpr float kMost = 256.0f;

    template <int s, class Factor>
    __device__ __forceinline__ void weigh_at_once(
        const Scores& scores,
        Weights (&weights)[kSteps],
        float (&sums)[kRowSteps][2],
        const Factor& factor
    ) const {
#pragma unroll
        for (int n = 0; n < kRowSteps; ++n) {
            float part[2][2];
#pragma unroll
            for (int j = 0; j < 2 * kSteps; ++j) {
                float p[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    p[i] = ptx::exp2_approx(fmaf(
                        scores[n][2 * kSteps * s + j][i], factor(n, i / 2), -reference[n][i / 2]
                    ));
                    float& of_row = part[i / 2][i % 2];
                    of_row = j == 0 ? p[i] : of_row + p[i];
                }
                weights[j / 2][n][2 * (j % 2)] = Math::pack(p[0], p[1]);
                weights[j / 2][n][2 * (j % 2) + 1] = Math::pack(p[2], p[3]);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                sums[n][i] = part[i][0] + part[i][1];
            }
        }
    }

    // Which of the rows' references rise, each by its own scores: a row's bits do not depend on others.
    template <int s, class Factor>
    __device__ __forceinline__ void raise(const Scores& scores, Output& out, const Factor& factor) {
        static constexpr int kFirst = 2 * kSteps * s;
        float largest[kRowSteps][2];
#pragma unroll
        for (int n = 0; n < kRowSteps; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& of_row = largest[n][i];
                of_row = fmaxf(scores[n][kFirst][2 * i], scores[n][kFirst][2 * i + 1]);
#pragma unroll
                for (int j = kFirst + 1; j < kFirst + 2 * kSteps; ++j) {
                    of_row = fmaxf(of_row, fmaxf(scores[n][j][2 * i], scores[n][j][2 * i + 1]));
                }
                of_row = fmaxf(of_row, __shfl_xor_sync(kWarp, of_row, 1));
                of_row = fmaxf(of_row, __shfl_xor_sync(kWarp, of_row, 2)) * factor(n, i);
            }
        }
        rescale(largest, out);
    }

    __device__ __forceinline__ void rescale(const float (&largest)[kRowSteps][2], Output& out) {
#pragma unroll
        for (int n = 0; n < kRowSteps; ++n) {
            float factor[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float former = reference[n][i];
                const bool rises = largest[n][i] > former + kSlack;
                reference[n][i] = rises ? largest[n][i] : former;
                factor[i] = rises ? ptx::exp2_approx(former - largest[n][i]) : 1.0f;
                sum[n][i] *= factor[i];
            }
#pragma unroll
            for (int j = 0; j < kValueTiles; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    out[n][j][i] *= factor[i / 2];
                }
            }
        }
    }
};

// What scores go through besides a positive factor, and which keys a row may see.
template <class Config>
class PrefillRules {
public:
    static constexpr int kRowSteps = Config::kRowSteps;
    static constexpr int kKeyTiles = Config::kKeys / 8;
    using Scores = typename PrefillQueries<Config>::Scores;

    // Softcap, bias, a factor that is not positive: scores come out in log2 units.
    static __device__ __forceinline__ void transform(
        const KernelParams& params,
        const PrefillItem& item,
        const typename PrefillQueries<Config>::Scales& scales,
        int first_key,
        Scores& scores
    ) {
#pragma unroll
        for (int n = 0; n < kRowSteps; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float factor = PrefillQueries<Config>::scale_of(params, scales, n, i);
                for_each_key(n, i, scores, [&](float& score, int) { score *= factor; });
            }
        }
        if (params.softcap != 0.0f) {
            cap(params, scores);
        }
        if (params.alibi_slopes != nullptr) {
            add_bias(params, item, first_key, scores);
        }
    }

    // Keys outside [begin, end) of their row weigh nothing.
    static __device__ __forceinline__ void mask(
        const KernelParams& params, const PrefillItem& item, int first_key, Scores& scores
    ) {
#pragma unroll
        for (int n = 0; n < kRowSteps; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const KeyRange keys = visible_to(params, item, row_of_lane<Config>(n, i));
                const int begin = keys.begin - first_key - first_key_of_lane();
                const int end = keys.end - first_key - first_key_of_lane();
                for_each_key(n, i, scores, [&](float& score, int key) {
                    score = key < begin || key >= end ? -kInfinity : score;
                });
            }
        }
    }

    static __device__ __forceinline__ KeyRange
    visible_to(const KernelParams& params, const PrefillItem& item, int row) {
        return visible_keys(
            params.shape,
            item.sequence.q_len,
            item.sequence.kv_len,
            find_row_of_tile(params, item, row).token
        );
    }

private:
    // Counted from a tile's first key.
    static __device__ int first_key_of_lane() { return 2 * static_cast<int>(threadIdx.x % 4); }

    static __device__ __forceinline__ void cap(const KernelParams& params, Scores& scores) {
#pragma unroll
        for (int n = 0; n < kRowSteps; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                for_each_key(n, i, scores, [&](float& score, int) {
                    score = params.softcap * tanh_of(score * params.softcap_inverse);
                });
            }
        }
    }

    static __device__ __forceinline__ void add_bias(
        const KernelParams& params, const PrefillItem& item, int first_key, Scores& scores
    ) {
#pragma unroll
        for (int n = 0; n < kRowSteps; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const Row row = find_row_of_tile(params, item, row_of_lane<Config>(n, i));
                const float slope = kLog2e * params.alibi_slopes
                                                 [item.batch_idx * params.alibi_batch_stride +
                                                  row.head * params.alibi_head_stride];
                const int32_t first = row.token + item.sequence.kv_len - item.sequence.q_len -
                                      first_key - first_key_of_lane();
                for_each_key(n, i, scores, [&](float& score, int key) {
                    score -= slope * fabsf(static_cast<float>(first - key));
                });
            }
        }
    }

    // Keys are counted from the lane's first one.
    template <class Use>
    static __device__ __forceinline__ void for_each_key(
        int n, int i, Scores& scores, const Use& use
    ) {
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
            use(scores[n][j][2 * i], j * 8);
            use(scores[n][j][2 * i + 1], j * 8 + 1);
        }
    }
};

}  // namespace pagetile::sm80
