#pragma once

#include "common/ptx.cuh"
#include "pagetile/dtype.h"

#include <cute/numeric/math.hpp>
#include <cutlass/numeric_types.h>

#include <cuda_fp16.h>
#include <cuda_fp8.h>

// x / scale as fp8, bit for bit what a division and a conversion with saturation give.

namespace pagetile::gpu {

template <DType kType>
struct SourceElement;

template <>
struct SourceElement<DType::kFloat32> {
    using Type = float;
};

template <>
struct SourceElement<DType::kFloat16> {
    using Type = cutlass::half_t;
};

template <>
struct SourceElement<DType::kBFloat16> {
    using Type = cutlass::bfloat16_t;
};

template <DType kCache>
struct Float8Traits;

template <>
struct Float8Traits<DType::kFloat8E4M3> {
    static constexpr __nv_fp8_interpretation_t kInterpretation = __NV_E4M3;
    static constexpr float kBeyond = 512.0f;  // a quotient from here on saturates (at 448)
};

template <>
struct Float8Traits<DType::kFloat8E5M2> {
    static constexpr __nv_fp8_interpretation_t kInterpretation = __NV_E5M2;
    static constexpr float kBeyond = 65536.0f;  // (at 57344)
};

// Two quotients at once: the low byte is the first one's.
template <DType kCache>
__device__ __forceinline__ uint16_t to_float8(float first, float second) {
    return __nv_cvt_float2_to_fp8x2(
        make_float2(first, second), __NV_SATFINITE, Float8Traits<kCache>::kInterpretation
    );
}

// A vector as one register value, so that it can be an argument of a function that is not inlined.
template <int kBytes>
struct PackedBytes;

template <>
struct PackedBytes<1> {
    using Type = uint8_t;
};

template <>
struct PackedBytes<2> {
    using Type = uint16_t;
};

template <>
struct PackedBytes<4> {
    using Type = uint32_t;
};

template <>
struct PackedBytes<8> {
    using Type = uint2;
};

template <>
struct PackedBytes<16> {
    using Type = uint4;
};

template <>
struct PackedBytes<32> {
    struct alignas(16) Type {
        uint4 halves[2];
    };
};

// A vector of x -> fp8 of divide(x), which gives the quotient in fp32.
template <DType kSource, DType kCache, int kVector, class Divide>
__device__ __forceinline__ auto convert_quotients(
    typename PackedBytes<kVector * sizeof(typename SourceElement<kSource>::Type)>::Type packed,
    const Divide& divide
) {
    using Source = typename SourceElement<kSource>::Type;
    Source values[kVector];
    memcpy(values, &packed, sizeof(values));
    uint16_t pairs[(kVector + 1) / 2];
    CUTE_UNROLL
    for (int i = 0; i < kVector; i += 2) {
        const float first = divide(static_cast<float>(values[i]));
        const float second = i + 1 < kVector
                                 ? divide(static_cast<float>(values[cute::min(i + 1, kVector - 1)]))
                                 : 0.0f;
        pairs[i / 2] = to_float8<kCache>(first, second);
    }
    typename PackedBytes<kVector>::Type codes;
    memcpy(&codes, pairs, sizeof(codes));
    return codes;
}

// Out of line, a vector at once: what needs it is rare, and inlined it costs 10 registers.
template <DType kSource, DType kCache, int kVector>
__device__ __noinline__ typename PackedBytes<kVector>::Type quantize_by_division(
    typename PackedBytes<2 * kVector>::Type packed, float scale
) {
    return convert_quotients<kSource, kCache, kVector>(packed, [scale](float x) {
        return __fdiv_rn(x, scale);
    });
}

// Bits of the largest |x| of a vector, both halves of a word at a time.
template <int kVector, class Packed>
__device__ __forceinline__ uint32_t largest_magnitude(Packed packed) {
    constexpr uint32_t kMagnitudes = 0x7FFF7FFF;
    uint32_t words[(kVector + 1) / 2] = {};
    memcpy(words, &packed, sizeof(packed));
    uint32_t largest = words[0] & kMagnitudes;
    CUTE_UNROLL
    for (int i = 1; i < (kVector + 1) / 2; ++i) {
        largest = __vmaxu2(largest, words[i] & kMagnitudes);
    }
    return cute::max(largest & 0xFFFF, largest >> 16);
}

// Bits of a source value that is at most `x`: x > 0.
template <DType kSource>
__device__ __forceinline__ uint32_t bits_rounded_down(float x) {
    if constexpr (kSource == DType::kBFloat16) {
        return __float_as_uint(x) >> 16;
    } else {
        return __half_as_ushort(__float2half_rz(x));
    }
}

// x / scale as fp8, for a vector.
//
// For a 16-bit x, a quotient is the product with the reciprocal and one correction by the exact
// remainder: equal to the rounded quotient for every significand of x and of the scale (checked
// exhaustively), as long as nothing over- or underflows. A vector with a value that saturates, an
// infinity or a NaN is divided, and so is every vector under an odd scale, and every fp32 vector.
template <DType kSource, DType kCache, int kVector>
struct Quantizer {
    using Packed =
        typename PackedBytes<kVector * sizeof(typename SourceElement<kSource>::Type)>::Type;
    using Codes = typename PackedBytes<kVector>::Type;

    __device__ __forceinline__ static bool is_usual(Packed packed, float scale) {
        if constexpr (kSource == DType::kFloat32) {
            return false;
        } else {
            const uint32_t beyond =
                bits_rounded_down<kSource>(Float8Traits<kCache>::kBeyond * scale);
            const bool usual_scale = scale >= 0x1p-60f && scale <= 0x1p60f;  // false for NaN
            return usual_scale && largest_magnitude<kVector>(packed) < beyond;
        }
    }

    __device__ __forceinline__ static Codes by_reciprocal(Packed packed, float scale) {
        const float estimate = ptx::rcp_approx(scale);
        const float reciprocal = fmaf(estimate, fmaf(-scale, estimate, 1.0f), estimate);
        return convert_quotients<kSource, kCache, kVector>(packed, [=](float x) {
            const float quotient = x * reciprocal;
            const float remainder = fmaf(quotient, scale, -x);
            return fmaf(remainder, -reciprocal, quotient);  // these signs keep -0
        });
    }

    __device__ __forceinline__ static Codes by_division(Packed packed, float scale) {
        if constexpr (kSource == DType::kFloat32) {
            return convert_quotients<kSource, kCache, kVector>(packed, [scale](float x) {
                return __fdiv_rn(x, scale);
            });
        } else {
            return quantize_by_division<kSource, kCache, kVector>(packed, scale);
        }
    }
};

}  // namespace pagetile::gpu
