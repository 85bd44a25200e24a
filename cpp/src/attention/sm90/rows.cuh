#pragma once

// The two packed rows of a tile that a thread has, and what it does with their scores: rules that
// change them, keys that they may not see, the online softmax in log2 units.

#include "attention/sm90/shared.cuh"
#include "common/ptx.cuh"

#include <cstdint>

namespace pagetile::sm90 {

inline constexpr float kInfinity = __builtin_huge_valf();
inline constexpr float kLowest =
    -3.402823466e38f;  // the largest score of a row that has seen no key
inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// Which rows a thread has: the same in every tile, for tiles begin with a token.
struct Rows {
    int32_t token[2];  // of the tile
    int32_t head[2];   // of the group

    __device__ __forceinline__ Rows(const gpu::KernelParams& params, int warpgroup) {
        const auto lane = static_cast<int32_t>(threadIdx.x % 32);
        const auto warp = static_cast<int32_t>(threadIdx.x / 32 % 4);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int32_t row = warpgroup * 64 + warp * 16 + lane / 4 + i * 8;
            uint32_t in_group;
            token[i] = static_cast<int32_t>(params.group(in_group, static_cast<uint32_t>(row)));
            head[i] = static_cast<int32_t>(in_group);
        }
    }
};

// The key at which the tile's first token stands.
__device__ __forceinline__ int32_t diagonal_of(const Item& item) {
    return item.sequence.kv_len - item.sequence.q_len + item.first_token;
}

// Keys [begin, end) of a tile that a row sees, counted from the thread's first column.
struct Visible {
    int32_t begin;
    int32_t end;
};

template <class Config>
__device__ __forceinline__ Visible
visible_in_tile(const PlanShape& shape, const Item& item, int32_t token, int32_t tile) {
    // As visible_keys(), with the sequence's last query at its last key.
    const int32_t diagonal = diagonal_of(item) + token;
    Visible keys = {0, item.sequence.kv_len};
    if (shape.window_left >= 0) {
        keys.begin = diagonal - shape.window_left;
    }
    if (shape.window_right >= 0 &&
        static_cast<int64_t>(diagonal) + shape.window_right < item.sequence.kv_len) {
        keys.end = diagonal + shape.window_right + 1;
    }
    const auto first = static_cast<int32_t>(tile * Config::kKeys + threadIdx.x % 4 * 2);
    return {keys.begin - first, keys.end - first};
}

// Keys that row i of the thread's two, one of `token`, may not see: from `end` on, or, with kBelow, before
// `begin`.
template <class Config, bool kBelow>
__device__ __forceinline__ void mask_row(
    const PlanShape& shape,
    const Item& item,
    int32_t token,
    int32_t tile,
    int i,
    float (&scores)[Config::kKeys / 2]
) {
    const Visible keys = visible_in_tile<Config>(shape, item, token, tile);
#pragma unroll
    for (int j = 0; j < Config::kKeys / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int column = 8 * j + c;
            float& score = scores[4 * j + 2 * i + c];
            const bool is_seen = kBelow ? column >= keys.begin : column < keys.end;
            score = is_seen ? score : -kInfinity;
        }
    }
}

template <class Config, bool kBelow>
__device__ __forceinline__ void mask_side(
    const PlanShape& shape,
    const Item& item,
    const Rows& rows,
    int32_t tile,
    float (&scores)[Config::kKeys / 2]
) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        mask_row<Config, kBelow>(shape, item, rows.token[i], tile, i, scores);
    }
}

template <class Config>
__device__ __forceinline__ void mask(
    const PlanShape& shape,
    const Item& item,
    const Rows& rows,
    int32_t tile,
    float (&scores)[Config::kKeys / 2]
) {
    mask_side<Config, false>(shape, item, rows, tile, scores);
    if (shape.window_left >= 0) {
        mask_side<Config, true>(shape, item, rows, tile, scores);
    }
}

__device__ __forceinline__ float tanh_of(float x) {
    return 1.0f - 2.0f * ptx::rcp_approx(ptx::exp2_approx(2.0f * kLog2e * x) + 1.0f);
}

// Softcap, bias, a factor that is not positive: scores come out in log2 units.
template <class Config>
__device__ __forceinline__ void transform(
    const gpu::KernelParams& params,
    const Item& item,
    const Rows& rows,
    int32_t tile,
    float (&scores)[Config::kKeys / 2]
) {
    const auto first = static_cast<int32_t>(tile * Config::kKeys + threadIdx.x % 4 * 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float slope = 0.0f;
        if (params.alibi_slopes != nullptr) {
            // Rows behind the last one have no slope to read.
            const int32_t token = min(rows.token[i], item.num_tokens - 1);
            const int32_t head = item.kv_head * params.shape.group + rows.head[i];
            slope = token < rows.token[i]
                        ? 0.0f
                        : kLog2e * params.alibi_slopes
                                       [item.batch_idx * params.alibi_batch_stride +
                                        head * params.alibi_head_stride];
        }
        const int32_t distance = diagonal_of(item) + rows.token[i] - first;
#pragma unroll
        for (int j = 0; j < Config::kKeys / 8; ++j) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& score = scores[4 * j + 2 * i + c];
                score *= params.scale;
                if (params.softcap != 0.0f) {
                    score = params.softcap * tanh_of(score * params.softcap_inverse);
                }
                score -= slope * fabsf(static_cast<float>(distance - (8 * j + c)));
            }
        }
    }
}

// What weights are relative to: a score of the row's. They may grow to 2^kGrowth before another one is
// taken. 16 bits hold large weights with the same relative precision as small ones.
struct WideWeights {
    static constexpr float kGrowth = 8.0f;

    static __device__ __forceinline__ float reference(float top) { return top; }
};

// e4m3 holds up to 448, and nothing below 2^-10: the largest weight is to be as large as it can. At a new
// reference it is one of more than 128 and up to 256, and it may grow to 430. A whole number for a reference
// changes no mantissa: how a weight is rounded does not depend on which tile brought the row's maximum.
struct NarrowWeights {
    static constexpr float kGrowth = 8.75f;

    static __device__ __forceinline__ float reference(float top) { return ceilf(top) - 8.0f; }
};

// The softmax of two rows. A row keeps its maximum until a score passes it by 2^8: so seldom are
// the sums scaled, and weights stay below 256. A row alone decides, so its bits do not depend on
// the rows beside it.
template <class Weights = WideWeights>
class Softmax {
public:
    float largest[2];  // in log2 units: what weights are relative to
    float sum[2];      // of this thread's keys
    float rescale[2];  // if has_grown: for the sums of before the last tile
    bool has_grown;    // a maximum of the warp's rows

    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            largest[i] = kLowest;
            sum[i] = 0.0f;
        }
    }

    // Scores become weights, in their place.
    template <int kScores>
    __device__ __forceinline__ void step(float (&scores)[kScores], float factor) {
        raise(scores, factor);
        float sums[2];
        weigh(scores, factor, sums, [&](int j, const float (&four)[4]) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scores[j + i] = four[i];
            }
        });
        add(sums);
    }

    // Scores of a tile that all rows see, after others, go to weights. A maximum seldom grows, so scores are
    // weighed before anybody has looked for theirs: a weight above 2^8 makes a sum that is, too, or a NaN,
    // and then they are weighed again. It is the same to the bit.
    template <class Element, int kScores>
    __device__ __forceinline__ void step_at_once(
        const float (&scores)[kScores], float factor, uint32_t (&weights)[kScores / 2]
    ) {
        constexpr float kMost = 1 << static_cast<int>(Weights::kGrowth);
        float sums[2];
        const auto keep = [&](int j, const float (&four)[4]) {
            weights[j / 2] = pack(Element{}, four[0], four[1]);
            weights[j / 2 + 1] = pack(Element{}, four[2], four[3]);
        };
        weigh(scores, factor, sums, keep);
        has_grown = __any_sync(kWarp, !(sums[0] <= kMost) | !(sums[1] <= kMost));
        if (has_grown) [[unlikely]] {
            raise(scores, factor);
            weigh(scores, factor, sums, keep);
        }
        add(sums);
    }

private:
    // The vote also holds back the exponentials until both rows have their maximum: else ptxas takes one
    // row after the other, and all wait for the second one's shuffles.
    template <int kScores>
    __device__ __forceinline__ void raise(const float (&scores)[kScores], float factor) {
        float top[2] = {fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3])};
#pragma unroll
        for (int j = 4; j < kScores; j += 4) {
            top[0] = fmaxf(top[0], fmaxf(scores[j], scores[j + 1]));
            top[1] = fmaxf(top[1], fmaxf(scores[j + 2], scores[j + 3]));
        }
        bool grows[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            top[i] = fmaxf(top[i], __shfl_xor_sync(kWarp, top[i], 1));
            top[i] = fmaxf(top[i], __shfl_xor_sync(kWarp, top[i], 2)) * factor;
            grows[i] = top[i] - largest[i] > Weights::kGrowth;
        }
        has_grown = __any_sync(kWarp, grows[0] | grows[1]);
        if (has_grown) [[unlikely]] {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float now = grows[i] ? Weights::reference(top[i]) : largest[i];
                rescale[i] = ptx::exp2_approx(largest[i] - now);
                sum[i] *= rescale[i];
                largest[i] = now;
            }
        }
    }

    // keep(j, four) gets the weights of scores j to j + 3; sums are this thread's, of each row.
    template <int kScores, class Keep>
    __device__ __forceinline__ void weigh(
        const float (&scores)[kScores], float factor, float (&sums)[2], const Keep& keep
    ) const {
        float part[2][2] = {};
#pragma unroll
        for (int j = 0; j < kScores; j += 4) {
            float four[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                four[i] = ptx::exp2_in_place(fmaf(scores[j + i], factor, -largest[i / 2]));
                part[i / 2][i % 2] += four[i];
            }
            keep(j, four);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            sums[i] = part[i][0] + part[i][1];
        }
    }

    __device__ __forceinline__ void add(const float (&sums)[2]) {
        sum[0] += sums[0];
        sum[1] += sums[1];
    }
};

}  // namespace pagetile::sm90
