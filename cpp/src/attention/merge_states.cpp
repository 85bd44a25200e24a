// The C++ entry point of the merge: checks sizes and types, picks the backend.

#include "attention/cpu/attention_cpu.h"
#include "common/not_built.h"
#include "pagetile/attention.h"
#include "pagetile/error.h"

#if PAGETILE_HAS_CUDA
#include "attention/cuda/merge_states_gpu.h"
#endif

namespace pagetile {

void merge_states(const MergeStatesParams& params, Stream stream) {
    check(
        is_float(params.dtype),
        "merge_states: out_a must be float32, float16 or bfloat16, got ",
        dtype_name(params.dtype)
    );
    check(params.num_tokens >= 0, "merge_states: num_tokens must be >= 0, got ", params.num_tokens);
    check(params.num_heads >= 0, "merge_states: num_heads must be >= 0, got ", params.num_heads);
    check(params.head_dim > 0, "merge_states: head_dim must be > 0, got ", params.head_dim);
    check(
        params.tokens_with_a >= -1,
        "merge_states: tokens_with_a must be >= 0, or -1 for all, got ",
        params.tokens_with_a
    );
    if (params.device.kind == DeviceKind::kCpu) {
        cpu::merge_states(params);
        return;
    }
#if PAGETILE_HAS_CUDA
    gpu::merge_states(params, stream);
#else
    static_cast<void>(stream);
    throw_not_built("merge_states", params.device);
#endif
}

}  // namespace pagetile
