#pragma once

// What the attention kernels offer the C++ entry points. Plain C++: no CuTe.

#include "attention/plan.h"
#include "pagetile/attention.h"

#include <cuda_runtime_api.h>

namespace pagetile::gpu {

struct PlanKernelParams {
    PlanShape shape;
    const int32_t* cu_seqlens_q;
    const int32_t* seqused_k;
    const int32_t* cu_seqlens_k;
    LaneWork* plan;  // [shape.lanes]
    bool pdl;
    bool next_waits;  // the next kernel waits for this one before it reads the plan
};

void launch_plan(const PlanKernelParams& params, Device device, cudaStream_t stream);

void paged_attention(const AttentionParams& params, cudaStream_t stream);

}  // namespace pagetile::gpu
