#pragma once

#include "attention/cuda/kernel_params.h"
#include "attention/dispatch.h"
#include "pagetile/device.h"
#include "pagetile/dtype.h"

#include <cuda_runtime_api.h>

namespace pagetile::sm80 {

using gpu::KernelParams;

// The instances, by the type of a page's elements. is_beside: those that run beside a kernel that
// prefills; null if there is none.
const void* split_kv_half_t(HeadDims dims, int rows, bool is_beside);
const void* split_kv_bfloat16_t(HeadDims dims, int rows, bool is_beside);
const void* split_kv_float_e4m3_t(HeadDims dims, int rows, bool is_beside);
const void* split_kv_float_e5m2_t(HeadDims dims, int rows, bool is_beside);

// boxes: null, or for an instance that runs beside a kernel that prefills, if there is one.
void launch_split_kv(
    KernelParams& params,
    const gpu::PageBoxes* boxes,
    DType kv_dtype,
    HeadDims dims,
    Device device,
    cudaStream_t stream
);

}  // namespace pagetile::sm80
