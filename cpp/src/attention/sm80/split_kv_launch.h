#pragma once

#include "attention/cuda/kernel_params.h"
#include "attention/dispatch.h"
#include "pagetile/device.h"
#include "pagetile/dtype.h"

#include <cuda_runtime_api.h>

namespace pagetile::sm80 {

using gpu::KernelParams;

// The instances, by the type of a page's elements.
const void* split_kv_half_t(HeadDims dims, int rows);
const void* split_kv_bfloat16_t(HeadDims dims, int rows);
const void* split_kv_float_e4m3_t(HeadDims dims, int rows);
const void* split_kv_float_e5m2_t(HeadDims dims, int rows);

void launch_split_kv(
    KernelParams& params, DType kv_dtype, HeadDims dims, Device device, cudaStream_t stream
);

}  // namespace pagetile::sm80
