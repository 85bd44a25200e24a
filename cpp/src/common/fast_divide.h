#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define PAGETILE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PAGETILE_HOST_DEVICE inline
#endif

namespace pagetile {

// Division of 0 <= n < 2^31 by a divisor known on the host: one product and one shift, with no case
// for the divisor 1. (CUTLASS's FastDivmod tests for it, which puts two constant loads behind a
// third: 0.1 us of a kernel that takes 1.3 us, H200.)
//
// multiplier = ceil(2^(31 + shift) / divisor), 2^shift the next power of two. Its error is below
// 2^shift / 2^(31 + shift), too little to carry any n < 2^31 over a multiple of the divisor.
class FastDivide {
public:
    FastDivide() = default;

    explicit FastDivide(uint32_t divisor) : divisor_(divisor) {
        while ((1ull << shift_) < divisor) {
            ++shift_;
        }
        multiplier_ = static_cast<uint32_t>(((1ull << (31 + shift_)) + divisor - 1) / divisor);
    }

    PAGETILE_HOST_DEVICE uint32_t operator()(uint32_t& remainder, uint32_t n) const {
#if defined(__CUDA_ARCH__)
        const uint32_t quotient = __umulhi(2 * n, multiplier_) >> shift_;
#else
        const uint32_t quotient =
            static_cast<uint32_t>((static_cast<uint64_t>(2 * n) * multiplier_) >> 32) >> shift_;
#endif
        remainder = n - quotient * divisor_;
        return quotient;
    }

    PAGETILE_HOST_DEVICE uint32_t divisor() const { return divisor_; }

private:
    uint32_t divisor_ = 1;
    uint32_t multiplier_ = 1u << 31;
    uint32_t shift_ = 0;
};

}  // namespace pagetile
