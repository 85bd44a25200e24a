#pragma once

// Elements of 8 bits as fp16.

#include "common/ptx.cuh"

#include <cutlass/numeric_types.h>

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace pagetile::gpu {

// e4m3 as fp16, exactly, where no instruction does it: the lowest and the third byte. As bits of an
// fp16, an e4m3 moved up by 7 is its value times 2^-8, subnormals too; 0x7f is NaN.
__device__ __forceinline__ uint32_t widen_e4m3_by_bits(uint32_t apart) {
    const uint32_t magnitude = apart & 0x007f007f;
    const uint32_t bits = (apart & 0x00800080) << 8 | magnitude << 7;
    const uint32_t nan = ((magnitude + 0x00010001) >> 7 & 0x00010001) * 0x7e00;
    const __half2 wide = __hmul2(
        reinterpret_cast<const __half2&>(bits), __half2half2(__ushort_as_half(0x5c00))  // 2^8
    );
    return reinterpret_cast<const uint32_t&>(wide) | nan;
}

// Four bytes of fp8 as fp16, exactly: the first two and the last two.
template <class Stored>
__device__ __forceinline__ void widen(uint32_t& low, uint32_t& high, uint32_t four) {
    if constexpr (std::is_same_v<Stored, cutlass::float_e5m2_t>) {
        low = __byte_perm(four, 0, 0x1404);  // the upper half of an fp16 is an e5m2
        high = __byte_perm(four, 0, 0x3424);
    } else {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
        ptx::widen_e4m3(low, high, four);
#else
        low = widen_e4m3_by_bits(__byte_perm(four & 0xffff, 0, 0x4140));
        high = widen_e4m3_by_bits(__byte_perm(four >> 16, 0, 0x4140));
#endif
    }
}

// The first and the third, the second and the fourth.
template <class Stored>
__device__ __forceinline__ void widen_in_turn(uint32_t& even, uint32_t& odd, uint32_t four) {
    if constexpr (std::is_same_v<Stored, cutlass::float_e5m2_t>) {
        even = __byte_perm(four, 0, 0x2404);
        odd = __byte_perm(four, 0, 0x3414);
    } else {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
        ptx::widen_e4m3(even, odd, __byte_perm(four, 0, 0x3120));
#else
        even = widen_e4m3_by_bits(four);
        odd = widen_e4m3_by_bits(four >> 8);
#endif
    }
}

}  // namespace pagetile::gpu
