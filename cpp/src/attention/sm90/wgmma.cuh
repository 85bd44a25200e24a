#pragma once

// The matrix products of a warpgroup. Operands in shared memory are rows of 128 bytes, swizzled in
// groups of eight rows as TMA writes them: a row of head_dim elements is head_dim / 64 such rows, in
// slabs.
//
// Of an accumulator of 64 x N, lane 4 g + t of warp w holds rows 16 w + g ([0], [1] of every four)
// and 16 w + g + 8 ([2], [3]), in columns 8 j + 2 t and 8 j + 2 t + 1 for the j-th four. Of 64 x 32
// elements of 8 bits in registers the lane holds, in words, columns 4 t to 4 t + 3 of both rows, then
// columns 16 + 4 t to 16 + 4 t + 3 of both.

// Products of every width that is a multiple of 8.
#ifndef CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#endif
#include <cute/arch/mma_sm90.hpp>
#include <cute/layout.hpp>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <utility>

namespace pagetile::sm90 {

using cute::SM90::GMMA::Major;
using cute::SM90::GMMA::ScaleOut;

inline constexpr int kSlabBytes = 128;    // of a row in a slab
inline constexpr int kSlabElements = 64;  // of 16 bits
inline constexpr int kGranule = 16;       // keys of a box of TMA, and of one product with V
inline constexpr int kGranuleBytes = kGranule * kSlabBytes;

// An operand's place: where it begins, in 16 bytes, and from there to the next slab along its dense
// dimension. Eight rows of 128 bytes lie one after the other.
class Operand {
public:
    static __device__ __forceinline__ Operand at(const void* place, uint32_t bytes_to_slab) {
        const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(place));
        return Operand(address >> 4 | (bytes_to_slab >> 4) << 16);
    }

    // Shared addresses have 18 bits: no sum of theirs carries into the slab's distance.
    __device__ __forceinline__ Operand plus(uint32_t bytes) const {
        return Operand(low_ + (bytes >> 4));
    }

    __device__ __forceinline__ uint64_t descriptor() const {
        constexpr uint32_t kEightRows = 8 * kSlabBytes >> 4;
        constexpr uint32_t kSwizzle128 = 1u << 30;
        cute::GmmaDescriptor descriptor;
        descriptor.reg32_[0] = low_;
        descriptor.reg32_[1] = kEightRows | kSwizzle128;
        return descriptor.desc_;
    }

private:
    explicit __device__ Operand(uint32_t low) : low_(low) {}

    uint32_t low_;
};

// Two floats as two elements of 16 bits.
__device__ __forceinline__ uint32_t pack(cutlass::half_t, float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ uint32_t pack(cutlass::bfloat16_t, float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
}

// Four floats as four e4m3, the first in the lowest byte. What is larger than 448 becomes 448.
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
    return high << 16 | low;
}

// sum + 0 * pair, two at a time.
__device__ __forceinline__ uint32_t add_times_zero(cutlass::half_t, uint32_t pair, uint32_t sum) {
    const __half2 result = __hfma2(
        reinterpret_cast<const __half2&>(pair), __half2{}, reinterpret_cast<const __half2&>(sum)
    );
    return reinterpret_cast<const uint32_t&>(result);
}

__device__ __forceinline__ uint32_t
add_times_zero(cutlass::bfloat16_t, uint32_t pair, uint32_t sum) {
    const __nv_bfloat162 result = __hfma2(
        reinterpret_cast<const __nv_bfloat162&>(pair),
        __nv_bfloat162{},
        reinterpret_cast<const __nv_bfloat162&>(sum)
    );
    return reinterpret_cast<const uint32_t&>(result);
}

// The lower or the upper one of two.
__device__ __forceinline__ float unpack(cutlass::half_t, uint32_t pair, int upper) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(pair >> 16 * upper)));
}

__device__ __forceinline__ float unpack(cutlass::bfloat16_t, uint32_t pair, int upper) {
    return __uint_as_float(upper ? pair & 0xffff0000 : pair << 16);
}

template <class Op, size_t... kI>
__device__ __forceinline__ void multiply_shared(
    uint64_t a, uint64_t b, float* sums, ScaleOut scale, std::index_sequence<kI...>
) {
    Op::fma(a, b, sums[kI]..., scale);
}

template <class Op, size_t... kI>
__device__ __forceinline__ void multiply_registers(
    const uint32_t* a, uint64_t b, float* sums, ScaleOut scale, std::index_sequence<kI...>
) {
    Op::fma(a[0], a[1], a[2], a[3], b, sums[kI]..., scale);
}

// scores = Q K^T, 16 elements of the head dimension: 64 rows with N keys.
template <class Element, int kN>
__device__ __forceinline__ void multiply_keys(
    Operand q, Operand k, float (&scores)[kN / 2], bool adds
) {
    using Tile = cute::Shape<cute::_64, cute::Int<kN>, cute::_16>;
    using Op = decltype(cute::SM90::GMMA::
                            ss_op_selector<Element, Element, float, Tile, Major::K, Major::K>());
    multiply_shared<Op>(
        q.descriptor(),
        k.descriptor(),
        scores,
        adds ? ScaleOut::One : ScaleOut::Zero,
        std::make_index_sequence<kN / 2>{}
    );
}

// out = P V, 16 keys: 64 rows with N elements of the values' head dimension.
template <class Element, int kN>
__device__ __forceinline__ void multiply_values(
    const uint32_t* weights, Operand v, float (&out)[kN / 2], bool adds
) {
    using Tile = cute::Shape<cute::_64, cute::Int<kN>, cute::_16>;
    using Op = decltype(cute::SM90::GMMA::
                            rs_op_selector<Element, Element, float, Tile, Major::K, Major::MN>());
    multiply_registers<Op>(
        weights,
        v.descriptor(),
        out,
        adds ? ScaleOut::One : ScaleOut::Zero,
        std::make_index_sequence<kN / 2>{}
    );
}

// scores = Q K^T, 32 elements of e4m3 of the head dimension.
template <int kN>
__device__ __forceinline__ void multiply_keys_e4m3(
    Operand q, Operand k, float (&scores)[kN / 2], bool adds
) {
    using Element = cute::float_e4m3_t;
    using Tile = cute::Shape<cute::_64, cute::Int<kN>, cute::_32>;
    using Op = decltype(cute::SM90::GMMA::
                            ss_op_selector<Element, Element, float, Tile, Major::K, Major::K>());
    multiply_shared<Op>(
        q.descriptor(),
        k.descriptor(),
        scores,
        adds ? ScaleOut::One : ScaleOut::Zero,
        std::make_index_sequence<kN / 2>{}
    );
}

// part = P V, 32 keys, from rows of V^T: of 8 bits, WGMMA takes no other.
template <int kN>
__device__ __forceinline__ void multiply_values_e4m3(
    const uint32_t* weights, Operand v, float (&part)[kN / 2], bool adds
) {
    using Element = cute::float_e4m3_t;
    using Tile = cute::Shape<cute::_64, cute::Int<kN>, cute::_32>;
    using Op = decltype(cute::SM90::GMMA::
                            rs_op_selector<Element, Element, float, Tile, Major::K, Major::K>());
    multiply_registers<Op>(
        weights,
        v.descriptor(),
        part,
        adds ? ScaleOut::One : ScaleOut::Zero,
        std::make_index_sequence<kN / 2>{}
    );
}

}  // namespace pagetile::sm90
