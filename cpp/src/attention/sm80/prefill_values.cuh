#pragma once

// The product of weights and values, and the results of a tile.

#include "attention/sm80/prefill_softmax.cuh"
#include "attention/sm80/results.cuh"

#include <cstdint>
#include <type_traits>

namespace pagetile::sm80 {

// Infinities and NaNs among the elements of a word: one bit is carried into each sign.
template <class Stored>
struct NonFiniteElements {
    static constexpr bool kFloat8 = sizeof(Stored) == 1;
    static constexpr uint32_t kSigns = kFloat8 ? 0x80808080 : 0x80008000;
    static constexpr uint32_t kAllOnes = std::is_same_v<Stored, cutlass::half_t>       ? 0x7c007c00
                                         : std::is_same_v<Stored, cutlass::bfloat16_t> ? 0x7f807f80
                                         : std::is_same_v<Stored, cutlass::float_e5m2_t>
                                             ? 0x7c7c7c7c
                                             : 0x7f7f7f7f;

    // The sign bit of each.
    static __device__ uint32_t find(uint32_t word) {
        return ((word & kAllOnes) + (kSigns - kAllOnes)) & kSigns;
    }

    static __device__ uint32_t only(uint32_t word) { return word & mask(word); }

    static __device__ uint32_t clear(uint32_t word) { return word & ~mask(word); }

private:
    static __device__ uint32_t mask(uint32_t word) {
        const uint32_t signs = find(word);
        return signs | (signs - (signs >> (kFloat8 ? 7 : 15)));
    }
};

template <class Config>
class PrefillValues {
public:
    static constexpr int kRowSteps = Config::kRowSteps;
    using Frag = PrefillFragments<Config>;
    using Math = MathType<typename Config::Math>;
    using Rules = PrefillRules<Config>;
    using SoftmaxOf = PrefillSoftmax<Config>;
    using Output = typename SoftmaxOf::Output;
    using Weights = typename SoftmaxOf::Weights;

    // Adds the values of 16 keys, `key` and following.
    static __device__ __forceinline__ void multiply(
        const char* v_tile, int key, const Weights& weights, Output& out
    ) {
        Frag::for_each_value(v_tile, key, [&](int step, const uint32_t (&values)[4]) {
#pragma unroll
            for (int n = 0; n < kRowSteps; ++n) {
                Frag::multiply(out[n], 2 * step, weights[n], values);
            }
        });
    }

    // A key that a row may not see can hold an infinity or a NaN, and that must not meet the row even
    // with weight 0. If the tile has any, rows that see it take it, and in shared memory it becomes 0.
    // Only for tiles that some rows do not see all of. All warps come here.
    static __device__ __forceinline__ void take_non_finite(
        const KernelParams& params,
        const PrefillItem& item,
        int first_key,
        char* v_tile,
        Output& out
    ) {
        static constexpr int kWords =
            Config::kKeys * Config::kHeadDimV * Config::kElementBytes / 16;
        auto* words = reinterpret_cast<uint4*>(v_tile);
        bool found = false;
#pragma unroll 1
        for (int i = static_cast<int>(threadIdx.x); i < kWords; i += Config::kThreads) {
            const uint4 four = words[i];
            found = found || (NonFinite::find(four.x) | NonFinite::find(four.y) |
                              NonFinite::find(four.z) | NonFinite::find(four.w)) != 0;
        }
        if (!__syncthreads_or(found ? 1 : 0)) [[likely]] {
            return;
        }
        add_non_finite(params, item, first_key, v_tile, out);
        __syncthreads();
#pragma unroll 1
        for (int i = static_cast<int>(threadIdx.x); i < kWords; i += Config::kThreads) {
            const uint4 four = words[i];
            words[i] = make_uint4(
                NonFinite::clear(four.x),
                NonFinite::clear(four.y),
                NonFinite::clear(four.z),
                NonFinite::clear(four.w)
            );
        }
        __syncthreads();
    }

    // Writes the rows of a tile.
    static __device__ __forceinline__ void write(
        const KernelParams& params,
        const PrefillItem& item,
        const SoftmaxOf& softmax,
        const Output& out
    ) {
        const int num_rows = item.num_tokens * params.shape.group;
        const float scale = Config::kFloat8 ? scale_at(params.v_scale, item) : 1.0f;
#pragma unroll
        for (int n = 0; n < kRowSteps; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = row_of_lane<Config>(n, half);
                const Row at = find_row_of_tile(params, item, row);
                const RowSum sum = {softmax.reference[n][half], softmax.sum[n][half]};
                write_row(params, item, at, row < num_rows, sum, scale, half, out[n]);
            }
        }
    }

private:
    using VLayout = typename Config::VLayout;
    using NonFinite = NonFiniteElements<typename Config::Stored>;

    // Whatever its weight, it is an infinity or a NaN.
    static __device__ __forceinline__ void add_non_finite(
        const KernelParams& params,
        const PrefillItem& item,
        int first_key,
        const char* v_tile,
        Output& out
    ) {
        const int t = static_cast<int>(threadIdx.x % 4);
#pragma unroll 1
        for (int key = 0; key < Config::kKeys; ++key) {
            bool sees[kRowSteps][2];
#pragma unroll
            for (int n = 0; n < kRowSteps; ++n) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const KeyRange keys =
                        Rules::visible_to(params, item, row_of_lane<Config>(n, half));
                    sees[n][half] = first_key + key >= keys.begin && first_key + key < keys.end;
                }
            }
#pragma unroll
            for (int step = 0; step < SoftmaxOf::kValueTiles / 2; ++step) {
                // The elements that this lane has of the step's two eights
                float values[4];
                if constexpr (Config::kFloat8) {
                    const uint32_t four = NonFinite::only(*reinterpret_cast<const uint32_t*>(
                        v_tile + VLayout::offset(key, step) + 4 * t
                    ));
                    uint32_t low;
                    uint32_t high;
                    widen<typename Config::Stored>(low, high, four);
                    // Even elements are in one accumulator, odd ones in the other.
                    const float2 early = Math::unpack(low);
                    const float2 late = Math::unpack(high);
                    values[0] = early.x;
                    values[1] = late.x;
                    values[2] = early.y;
                    values[3] = late.y;
                } else {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const uint32_t two = NonFinite::only(*reinterpret_cast<const uint32_t*>(
                            v_tile + VLayout::offset(key, 2 * step + i) + 4 * t
                        ));
                        const float2 pair = Math::unpack(two);
                        values[2 * i] = pair.x;
                        values[2 * i + 1] = pair.y;
                    }
                }
#pragma unroll
                for (int n = 0; n < kRowSteps; ++n) {
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        const int half = i / 2 % 2;
                        out[n][2 * step + i / 4][i % 4] +=
                            sees[n][half] ? values[i / 4 * 2 + i % 2] : 0.0f;
                    }
                }
            }
        }
    }

    // Each of the four lanes that have a row has four elements in a row of every 16. All lanes of the warp
    // come here: with the row's alone, each shuffle would first have to find out who is there.
    static __device__ __forceinline__ void write_row(
        const KernelParams& params,
        const PrefillItem& item,
        const Row& at,
        bool is_there,
        RowSum sum,
        float scale,
        int half,
        const float (&out)[SoftmaxOf::kValueTiles][4]
    ) {
        const int t = static_cast<int>(threadIdx.x % 4);
        const int64_t token = item.sequence.q_begin + at.token;
        const float factor = finish_row(params, at.head, sum) * scale;
        if (is_there && t == 0 && params.softmax_lse != nullptr) {
            params.softmax_lse[at.head * params.lse_head_stride + token * params.lse_row_stride] =
                lse_of(sum);
        }
        const int64_t to = token * params.out_row_stride + at.head * params.out_head_stride;
#pragma unroll
        for (int step = 0; step < SoftmaxOf::kValueTiles / 2; ++step) {
            const float* early = out[2 * step] + 2 * half;
            const float* late = out[2 * step + 1] + 2 * half;
            if constexpr (Config::kFloat8) {
                // Even elements are in one accumulator, odd ones in the other.
                const int element = step * 16 + 4 * t;
                const float values[4] = {
                    early[0] * factor, late[0] * factor, early[1] * factor, late[1] * factor
                };
                if (is_there && element < params.head_dim_v) {
                    write_four<Config>(params, to + element, values);
                }
            } else {
                // Elements 2t, 2t + 1 of each eight: lanes that are neighbours exchange one eight for
                // the other.
                const uint32_t first = Math::pack(early[0] * factor, early[1] * factor);
                const uint32_t second = Math::pack(late[0] * factor, late[1] * factor);
                const bool is_odd = t % 2 == 1;
                const uint32_t got = __shfl_xor_sync(kWarp, is_odd ? first : second, 1);
                const int element = step * 16 + (is_odd ? 8 : 0) + t / 2 * 4;
                if (is_there && element < params.head_dim_v) {
                    write_words(
                        params,
                        to + element,
                        is_odd ? make_uint2(got, second) : make_uint2(first, got)
                    );
                }
            }
        }
    }
};

}  // namespace pagetile::sm80
