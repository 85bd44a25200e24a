#pragma once

// Operands of the tensor cores where packed rows are the 16 rows of an instruction and keys, or
// elements of V, its 8 columns: S = Q K^T, O = P V. One load gives the second operands of two
// instructions, b[0], b[1] and b[2], b[3]: in registers side by side, as the instruction wants them.

#include "attention/sm80/prefill_config.cuh"

#include <cute/arch/copy_sm75.hpp>

#include <cstdint>

namespace pagetile::sm80 {

template <class Config>
struct PrefillFragments {
    using Math = MathType<typename Config::Math>;
    using Stored = typename Config::Stored;
    using KLayout = typename Config::KLayout;
    using VLayout = typename Config::VLayout;

    // Calls use(j, b) with the operands of keys 8 j to 8 j + 15 and step k of the head dimension, for
    // all keys.
    template <class Use>
    static __device__ __forceinline__ void for_each_key(const char* k_tile, int k, const Use& use) {
        // What one load reads: 32 keys of 16 bytes, or 16 keys of 32 bytes
        static constexpr int kKeysAtOnce = Config::kFloat8 ? 32 : 16;
        const int first = Config::kFloat8
                              ? KLayout::offset(lane(), 0)
                              : KLayout::offset(lane() % 8 + lane() / 16 * 8, lane() / 8 % 2);
#pragma unroll
        for (int key = 0; key < Config::kKeys; key += kKeysAtOnce) {
            uint32_t r[4];
            load(r, k_tile + KLayout::offset_from(first, key, Config::kFloat8 ? k : 2 * k));
            if constexpr (Config::kFloat8) {
                // Lane (g, t) has elements 4t..4t+3 where the instruction wants 2t, 2t + 1, 2t + 8,
                // 2t + 9: the order of the head dimension is free, Q comes in the same.
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    uint32_t b[4];
                    widen<Stored>(b[0], b[1], r[i]);
                    widen<Stored>(b[2], b[3], r[i + 1]);
                    use(key / 8 + i, b);
                }
            } else {
                use(key / 8, r);
            }
        }
    }

    // Calls use(step, b) with the operands of 16 of V's head dimension and 16 keys, from `key` on.
    template <class Use>
    static __device__ __forceinline__ void for_each_value(
        const char* v_tile, int key, const Use& use
    ) {
        // 16 bytes of an fp8 row are 16 elements: what a load reads for two steps, two steps use.
        static constexpr int kStepsPerLoad = Config::kFloat8 ? 2 : 1;
        const int first = VLayout::offset(lane() % 16, lane() / 16);
#pragma unroll
        for (int step = 0; step < Config::kHeadDimV / 16; step += kStepsPerLoad) {
            uint32_t r[4];
            cute::SM75_U16x8_LDSM_T::copy(
                *reinterpret_cast<const cute::uint128_t*>(
                    v_tile + VLayout::offset_from(first, key, 2 * step / kStepsPerLoad)
                ),
                r[0],
                r[1],
                r[2],
                r[3]
            );
            if constexpr (Config::kFloat8) {
                // Transposed in pairs: an even and an odd element of two keys. The even ones of 16
                // are the columns of one instruction, the odd ones those of the other.
                uint32_t b[2][4];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    uint32_t (&here)[4] = b[half];
                    widen_in_turn<Stored>(here[0], here[2], r[2 * half]);
                    widen_in_turn<Stored>(here[1], here[3], r[2 * half + 1]);
                    use(step + half, here);
                }
            } else {
                use(step, r);
            }
        }
    }

    // The two instructions of a load.
    template <int kColumns>
    static __device__ __forceinline__ void multiply(
        float (&d)[kColumns][4], int column, const uint32_t (&a)[4], const uint32_t (&b)[4]
    ) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float (&c)[4] = d[column + i];
            Math::Mma::fma(
                c[0],
                c[1],
                c[2],
                c[3],
                a[0],
                a[1],
                a[2],
                a[3],
                b[2 * i],
                b[2 * i + 1],
                c[0],
                c[1],
                c[2],
                c[3]
            );
        }
    }

    static __device__ __forceinline__ void load(uint32_t (&r)[4], const char* from) {
        cute::SM75_U32x4_LDSM_N::copy(
            *reinterpret_cast<const cute::uint128_t*>(from), r[0], r[1], r[2], r[3]
        );
    }

private:
    static __device__ int lane() { return static_cast<int>(threadIdx.x % 32); }
};

}  // namespace pagetile::sm80
