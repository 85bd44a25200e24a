// The C++ entry points of plans and workspaces.

#include "attention/dispatch.h"
#include "attention/plan_cuts.h"
#include "common/cpu_kernels.h"
#include "common/not_built.h"
#include "pagetile/attention.h"
#include "pagetile/error.h"

#include <limits>

#if PAGETILE_HAS_CUDA
#include "attention/cuda/attention_gpu.h"
#include "common/cuda.h"
#endif

namespace pagetile {
namespace {

void check_params(const char* function, const PlanParams& params) {
    constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
    const auto check_range = [&](const char* name, int64_t value, int64_t least) {
        check(
            value >= least && value <= kMaxInt,
            function,
            ": ",
            name,
            " must be from ",
            least,
            " to 2**31 - 1, got ",
            value
        );
    };
    check_range("the number of sequences", params.batch, 0);
    check_range("num_kv_heads", params.num_kv_heads, 1);
    check_range("num_q_heads", params.num_q_heads, 1);
    check(
        params.num_q_heads % params.num_kv_heads == 0,
        function,
        ": num_q_heads must be a multiple of num_kv_heads (",
        params.num_kv_heads,
        "), got ",
        params.num_q_heads
    );
    for (const int64_t dim : {params.head_dim, params.head_dim_v}) {
        check(
            dim > 0 && dim % 8 == 0 && dim <= kMaxHeadDim,
            function,
            ": head_dim and head_dim_v must be multiples of 8 from 8 to ",
            kMaxHeadDim,
            ", got ",
            dim
        );
    }
    check_range("max_seqlen_q", params.max_seqlen_q, 0);
    check_range("max_seqlen_k", params.max_seqlen_k, 0);
    for (const int64_t side : {params.window_left, params.window_right}) {
        check(side >= -1, function, ": window must be >= 0, or -1 for unlimited, got ", side);
    }
    check(
        params.num_splits >= 0,
        function,
        ": num_splits must be >= 0 (0 chooses), got ",
        params.num_splits
    );
}

}  // namespace

int64_t plan_size(const PlanParams& params) {
    check_params("make_plan", params);
    return plan_bytes(plan_shape(params, gpu_of(params.device)));
}

int64_t workspace_size(const PlanParams& params) {
    check_params("workspace_size", params);
    if (params.device.kind == DeviceKind::kCpu) {
        return 0;
    }
    check(
        !params.batch_invariant || params.max_seqlen_k > 0,
        "workspace_size: batch_invariant needs max_seqlen_k"
    );
    return largest_workspace(params, gpu_of(params.device));
}

void make_plan(const PlanParams& params, void* plan, [[maybe_unused]] Stream stream) {
    check_params("make_plan", params);
    const PlanShape shape = plan_shape(params, gpu_of(params.device));
    auto* work = static_cast<LaneWork*>(plan);
    if (params.device.kind == DeviceKind::kCpu) {
        plan_on_host(shape, params.cu_seqlens_q, params.seqused_k, params.cu_seqlens_k, work);
        return;
    }
#if PAGETILE_HAS_CUDA
    const DeviceGuard guard(params.device, "make_plan");
    gpu::launch_plan(
        {.shape = shape,
         .cu_seqlens_q = params.cu_seqlens_q,
         .seqused_k = params.seqused_k,
         .cu_seqlens_k = params.cu_seqlens_k,
         .plan = work,
         .pdl = false,
         .next_waits = false},
        params.device,
        reinterpret_cast<cudaStream_t>(stream)
    );
#else
    throw_not_built("make_plan", params.device);
#endif
}

}  // namespace pagetile
