#pragma once

#include "attention/cuda/kernel_params.h"

#include <cuda_fp16.h>

#include <cstdint>

namespace pagetile::gpu {

// The sink of a query head: a logit in natural units.
__device__ __forceinline__ float read_sink(const KernelParams& params, int head) {
    const int64_t at = head * params.sinks_stride;
    if (params.sinks_dtype == DType::kFloat32) {
        return static_cast<const float*>(params.sinks)[at];
    }
    const uint16_t bits = static_cast<const uint16_t*>(params.sinks)[at];
    return params.sinks_dtype == DType::kBFloat16
               ? __uint_as_float(static_cast<uint32_t>(bits) << 16)
               : __half2float(__ushort_as_half(bits));
}

}  // namespace pagetile::gpu
