#pragma once

#include "attention/cuda/kernel_params.h"
#include "attention/dispatch.h"
#include "attention/prefill_schedule.h"

#include <cuda_runtime_api.h>

namespace pagetile::sm80 {

// The instances, by the type of a page's elements.
const void* prefill_half_t(HeadDims dims);
const void* prefill_bfloat16_t(HeadDims dims);
const void* prefill_float_e4m3_t(HeadDims dims);
const void* prefill_float_e5m2_t(HeadDims dims);

// Packed rows of a tile: schedule.shape.tokens is this divided by the group, which is not larger.
int32_t prefill_rows(HeadDims dims, DType kv_dtype);

void launch_prefill(
    const gpu::KernelParams& params,
    const gpu::PrefillSchedule& schedule,
    DType kv_dtype,
    HeadDims dims,
    Device device,
    cudaStream_t stream
);

}  // namespace pagetile::sm80
