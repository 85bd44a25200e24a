#pragma once

// Fixed-width float vectors on the compiler's vector extension: one source for every instruction
// set. Included only by the kernels that are compiled once per instruction set. Everything lives in
// that set's namespace and nothing comes from the standard library, so that no function compiled
// for AVX-512 can be linked into code that runs everywhere.

#include "pagetile/dtype.h"

#include <cstddef>
#include <cstdint>
#include <limits>

namespace pagetile::PAGETILE_ISA {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

using Vec = float __attribute__((vector_size(kLanes * 4)));
using VecI = int32_t __attribute__((vector_size(kLanes * 4)));
using VecU = uint32_t __attribute__((vector_size(kLanes * 4)));
using VecU16 = uint16_t __attribute__((vector_size(kLanes * 2)));
using VecU8 = uint8_t __attribute__((vector_size(kLanes)));

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <class T>
constexpr T smaller(T a, T b) {
    return b < a ? b : a;
}

template <class T>
constexpr T larger(T a, T b) {
    return a < b ? b : a;
}

constexpr int64_t round_up(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

template <class To, class From>
[[gnu::always_inline]] inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    return __builtin_bit_cast(To, from);
}

template <class V, class T>
[[gnu::always_inline]] inline V load_as(const T* from) {
    V v;
    __builtin_memcpy(&v, from, sizeof(V));
    return v;
}

template <class V, class T>
[[gnu::always_inline]] inline void store_as(T* to, V v) {
    __builtin_memcpy(to, &v, sizeof(V));
}

[[gnu::always_inline]] inline Vec load(const float* from) { return load_as<Vec>(from); }

[[gnu::always_inline]] inline Vec broadcast(float x) { return Vec{} + x; }

[[gnu::always_inline]] inline VecI lane_index() {
    VecI v;
    for (int i = 0; i < kLanes; ++i) {
        v[i] = i;
    }
    return v;
}

[[gnu::always_inline]] inline Vec vec_max(Vec a, Vec b) { return a > b ? a : b; }

// The last step of a reduction tree over [from, from + n): the same tree for every caller, so the
// same bits.
[[gnu::always_inline]] inline float reduce_add(Vec v) {
    float lanes[kLanes];
    store_as(lanes, v);
    for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) {
            lanes[i] += lanes[i + width];
        }
    }
    return lanes[0];
}

[[gnu::always_inline]] inline float reduce_max(Vec v) {
    float largest = v[0];
    for (int i = 1; i < kLanes; ++i) {
        largest = v[i] > largest ? v[i] : largest;
    }
    return largest;
}

// 2^x: Taylor to degree 7 on [-1/2, 1/2] (5e-9), times a power of two. Below 2^-126 it is 0, at
// -inf too; NaN stays NaN.
[[gnu::always_inline]] inline Vec exp2(Vec x) {
    constexpr float kRound =
        0x1.8p23f;  // adding it leaves the nearest integer in the low mantissa bits
    const Vec clamped = x > 127.0f ? broadcast(127.0f) : x;
    const Vec shifted = clamped + kRound;
    const Vec f = clamped - (shifted - kRound);
    Vec y = broadcast(1.52527338e-5f);
    y = y * f + 1.54035304e-4f;
    y = y * f + 1.33335581e-3f;
    y = y * f + 9.61812911e-3f;
    y = y * f + 5.55041087e-2f;
    y = y * f + 2.40226507e-1f;
    y = y * f + 6.93147181e-1f;
    y = y * f + 1.0f;
    const VecU power = (bit_cast<VecU>(shifted) - bit_cast<uint32_t>(kRound) + 127u) << 23;
    const Vec result =
        y * bit_cast<Vec>(power);  // a product, so that NaN is not shifted into a number
    return x < -126.0f ? Vec{} : result;
}

// tanh(x): odd series near 0, where 1 - 2 / (e^2x + 1) would cancel; |error| < 1e-7 of the value.
[[gnu::always_inline]] inline Vec tanh(Vec x) {
    constexpr float kTwoLog2e = 2.885390081777927f;
    const Vec magnitude = x < 0.0f ? -x : x;
    const Vec t = exp2(-kTwoLog2e * magnitude);
    const Vec far = (1.0f - t) / (1.0f + t);
    const Vec x2 = x * x;
    Vec series = broadcast(2.18694885e-2f);
    series = series * x2 - 5.39682540e-2f;
    series = series * x2 + 1.33333333e-1f;
    series = series * x2 - 3.33333333e-1f;
    series = series * x2 + 1.0f;
    const Vec near = x * series;
    const Vec signed_far = x < 0.0f ? -far : far;
    return magnitude < 0.15f ? near : signed_far;
}

// A small float format inside fp32: sign, exponent, kMantissa bits.
template <int kMantissa_, int kBias_, uint32_t kLargest_, bool kInfinities_>
struct Format {
    static constexpr int kMantissa = kMantissa_;
    static constexpr int kBias = kBias_;
    static constexpr uint32_t kLargest = kLargest_;  // code of the largest finite value
    static constexpr bool kInfinities = kInfinities_;
};

using Half = Format<10, 15, 0x7BFF, true>;
using E4M3 = Format<3, 7, 0x7E, false>;
using E5M2 = Format<2, 15, 0x7B, true>;

constexpr float power_of_two(int exponent) {
    return __builtin_bit_cast(float, static_cast<uint32_t>(exponent + 127) << 23);
}

// Codes without their sign bit -> values. Exact; built from normal numbers only, so a flush-to-zero
// mode changes nothing.
template <class F>
[[gnu::always_inline]] inline Vec decode_magnitude(VecU code) {
    constexpr int kShift = 23 - F::kMantissa;
    constexpr uint32_t kFirstNormal = 1u << F::kMantissa;
    constexpr float kUnit = power_of_two(1 - F::kBias - F::kMantissa);
    const VecU normal = (code << kShift) + (static_cast<uint32_t>(127 - F::kBias) << 23);
    const VecU subnormal =
        bit_cast<VecU>(__builtin_convertvector(bit_cast<VecI>(code), Vec) * kUnit);
    VecU bits = code < kFirstNormal ? subnormal : normal;
    const VecU special = F::kInfinities ? ((code << kShift) | 0x7F800000u) : (VecU{} + 0x7FC00000u);
    bits = code > F::kLargest ? special : bits;
    return bit_cast<Vec>(bits);
}

// |values| -> codes without their sign bit, round to nearest even. Overflow saturates or goes to
// infinity; NaN -> kNan.
template <class F, bool kSaturate, uint32_t kNan>
[[gnu::always_inline]] inline VecU encode_magnitude(VecU bits) {
    constexpr int kShift = 23 - F::kMantissa;
    constexpr uint32_t kMinNormal = static_cast<uint32_t>(128 - F::kBias) << 23;
    constexpr float kMagic = power_of_two(
        1 - F::kBias - F::kMantissa + 23
    );  // its last bit is the format's smallest step
    const VecU rounded = bits + ((1u << (kShift - 1)) - 1u) + ((bits >> kShift) & 1u);
    const VecU normal =
        (rounded >> kShift) - (static_cast<uint32_t>(127 - F::kBias) << F::kMantissa);
    const VecU subnormal =
        bit_cast<VecU>(bit_cast<Vec>(bits) + kMagic) - bit_cast<uint32_t>(kMagic);
    VecU code = bits < kMinNormal ? subnormal : normal;
    constexpr uint32_t kOverflow = kSaturate ? F::kLargest : F::kLargest + 1;
    code = code > kOverflow ? (VecU{} + kOverflow) : code;
    return bits > 0x7F800000u ? (VecU{} + kNan) : code;
}

// Bytes -> 32-bit lanes, by way of 16: GCC 12 takes a vector apart to widen it fourfold at once (3x
// slower).
[[gnu::always_inline]] inline VecU widen(VecU8 bytes) {
    return __builtin_convertvector(__builtin_convertvector(bytes, VecU16), VecU);
}

// The low byte of every lane, likewise.
[[gnu::always_inline]] inline VecU8 narrow(VecU lanes) {
    return __builtin_convertvector(__builtin_convertvector(lanes, VecU16), VecU8);
}

// Storage type, load and store of kLanes elements of each dtype.
template <DType kType>
struct Element;

template <>
struct Element<DType::kFloat32> {
    using Storage = float;

    [[gnu::always_inline]] static Vec load(const Storage* from) { return load_as<Vec>(from); }

    [[gnu::always_inline]] static void store(Storage* to, Vec v) { store_as(to, v); }
};

template <>
struct Element<DType::kBFloat16> {
    using Storage = uint16_t;

    [[gnu::always_inline]] static Vec load(const Storage* from) {
        return bit_cast<Vec>(__builtin_convertvector(load_as<VecU16>(from), VecU) << 16);
    }

    [[gnu::always_inline]] static void store(Storage* to, Vec v) {
        const VecU bits = bit_cast<VecU>(v);
        const VecU rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
        const VecU quiet = bits | 0x400000u;
        const VecU kept = (bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded;
        store_as(to, __builtin_convertvector(kept >> 16, VecU16));
    }
};

template <>
struct Element<DType::kFloat16> {
    using Storage = uint16_t;

    [[gnu::always_inline]] static Vec load(const Storage* from) {
        const VecU code = __builtin_convertvector(load_as<VecU16>(from), VecU);
        const VecU magnitude = bit_cast<VecU>(decode_magnitude<Half>(code & 0x7FFFu));
        return bit_cast<Vec>(magnitude | ((code & 0x8000u) << 16));
    }

    [[gnu::always_inline]] static void store(Storage* to, Vec v) {
        const VecU bits = bit_cast<VecU>(v);
        const VecU code =
            encode_magnitude<Half, /*kSaturate=*/false, /*kNan=*/0x7E00>(bits & 0x7FFFFFFFu);
        store_as(to, __builtin_convertvector(code | ((bits >> 16) & 0x8000u), VecU16));
    }
};

template <class F>
struct Float8 {
    using Storage = uint8_t;

    [[gnu::always_inline]] static Vec load(const Storage* from) {
        const VecU code = widen(load_as<VecU8>(from));
        const VecU magnitude = bit_cast<VecU>(decode_magnitude<F>(code & 0x7Fu));
        return bit_cast<Vec>(magnitude | ((code & 0x80u) << 24));
    }

    // As the hardware's saturating conversion: infinities become the largest value, every NaN
    // becomes 0x7F.
    [[gnu::always_inline]] static void store(Storage* to, Vec v) {
        const VecU bits = bit_cast<VecU>(v);
        const VecU magnitude = bits & 0x7FFFFFFFu;
        const VecU code = encode_magnitude<F, /*kSaturate=*/true, /*kNan=*/0x7F>(magnitude);
        const VecU sign = magnitude > 0x7F800000u ? VecU{} : ((bits >> 24) & 0x80u);
        store_as(to, narrow(code | sign));
    }
};

template <>
struct Element<DType::kFloat8E4M3> : Float8<E4M3> {};

template <>
struct Element<DType::kFloat8E5M2> : Float8<E5M2> {};

// Calls body.template operator()<kType>() for the run-time type. The callers have checked that it
// is one of these five.
template <class Body>
inline void dispatch_float(DType dtype, Body&& body) {
    switch (dtype) {
        case DType::kFloat16:
            return body.template operator()<DType::kFloat16>();
        case DType::kBFloat16:
            return body.template operator()<DType::kBFloat16>();
        case DType::kFloat8E4M3:
            return body.template operator()<DType::kFloat8E4M3>();
        case DType::kFloat8E5M2:
            return body.template operator()<DType::kFloat8E5M2>();
        default:
            return body.template operator()<DType::kFloat32>();
    }
}

// n elements, whole vectors first; the rest goes through a padded vector, so nothing past the row
// is touched.
template <DType kFrom, class Body>
[[gnu::always_inline]] inline void for_each_vector(
    const typename Element<kFrom>::Storage* from, int64_t n, Body&& body
) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        body(i, static_cast<int64_t>(kLanes), Element<kFrom>::load(from + i));
    }
    if (i < n) {
        typename Element<kFrom>::Storage padded[kLanes] = {};
        __builtin_memcpy(padded, from + i, static_cast<size_t>(n - i) * sizeof(padded[0]));
        body(i, n - i, Element<kFrom>::load(padded));
    }
}

// The first n lanes of v, as kTo.
template <DType kTo>
[[gnu::always_inline]] inline void store_first(
    typename Element<kTo>::Storage* to, int64_t n, Vec v
) {
    if (n == kLanes) {
        Element<kTo>::store(to, v);
    } else {
        typename Element<kTo>::Storage padded[kLanes];
        Element<kTo>::store(padded, v);
        __builtin_memcpy(to, padded, static_cast<size_t>(n) * sizeof(padded[0]));
    }
}

}  // namespace pagetile::PAGETILE_ISA
