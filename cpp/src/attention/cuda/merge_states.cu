// Host side of the merge: picks the vector that all addresses allow, cuts what one launch cannot
// number.

#include "attention/cuda/merge_states_gpu.h"
#include "attention/cuda/merge_states_kernel.cuh"
#include "common/cuda.h"

#include <cutlass/numeric_types.h>

#include <algorithm>

namespace pagetile::gpu {
namespace {

constexpr const char* kFunction = "merge_states";
constexpr int64_t kVectorBytes = 16;
constexpr int64_t kMaxRows = (1LL << 31) - kMergeThreads;
constexpr int64_t kMaxHeadDim = (1LL << 31) - 1;
constexpr uint32_t kMaxLanesLog2 = 5;  // a warp

// What one launch merges.
struct Part {
    int64_t first_token;
    int64_t num_tokens;
    int64_t first_head;
    int64_t num_heads;
};

// Every row of a, b and out begins and ends at a multiple of `bytes`. A stride that is never stepped
// does not count.
bool rows_allow(const MergeStatesParams& params, int64_t bytes) {
    const auto size = static_cast<int64_t>(dtype_size(params.dtype));
    const auto allow = [&](const void* data, int64_t row_stride, int64_t head_stride) {
        return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0 &&
               (params.num_tokens == 1 || row_stride * size % bytes == 0) &&
               (params.num_heads == 1 || head_stride * size % bytes == 0);
    };
    return params.head_dim * size % bytes == 0 &&
           allow(params.out_a, params.a_row_stride, params.a_head_stride) &&
           allow(params.out_b, params.b_row_stride, params.b_head_stride) &&
           allow(params.out, params.out_row_stride, params.out_head_stride);
}

// Threads of a row: the fewest that take one vector each, in one warp.
uint32_t lanes_log2(uint32_t vectors) {
    uint32_t log2 = 0;
    while (log2 < kMaxLanesLog2 && (1u << log2) < vectors) {
        ++log2;
    }
    return log2;
}

// A part of a tensor, given strides in elements.
template <class T, class Void>
MergeRows<T> make_rows(
    const MergeStatesParams& params,
    const Part& part,
    Void* data,
    int64_t row_stride,
    int64_t head_stride,
    int64_t vector
) {
    if (data == nullptr) {
        return {};
    }
    const int64_t token_step = params.num_tokens == 1 ? 0 : row_stride / vector;
    const int64_t head_step = params.num_heads == 1 ? 0 : head_stride / vector;
    return {
        .data = static_cast<T*>(data) + part.first_token * token_step + part.first_head * head_step,
        .token_stride = token_step,
        .head_stride = head_step,
    };
}

template <class Element, int kVector>
void launch(const MergeStatesParams& params, const Part& part, cudaStream_t stream) {
    using Vector = cutlass::AlignedArray<Element, kVector>;
    const int64_t tokens_with_a =
        params.tokens_with_a < 0 ? params.num_tokens : params.tokens_with_a;
    const auto vectors = static_cast<uint32_t>(params.head_dim / kVector);
    const MergeKernelParams<Vector> kernel_params = {
        .out_a = make_rows<const Vector>(
            params, part, params.out_a, params.a_row_stride, params.a_head_stride, kVector
        ),
        .out_b = make_rows<const Vector>(
            params, part, params.out_b, params.b_row_stride, params.b_head_stride, kVector
        ),
        .out = make_rows<Vector>(
            params, part, params.out, params.out_row_stride, params.out_head_stride, kVector
        ),
        .lse_a = make_rows<const float>(
            params, part, params.lse_a, params.lse_a_row_stride, params.lse_a_head_stride, 1
        ),
        .lse_b = make_rows<const float>(
            params, part, params.lse_b, params.lse_b_row_stride, params.lse_b_head_stride, 1
        ),
        .lse = make_rows<float>(
            params, part, params.lse, params.lse_row_stride, params.lse_head_stride, 1
        ),
        .num_heads = FastDivide(static_cast<uint32_t>(part.num_heads)),
        .num_rows = static_cast<uint32_t>(part.num_tokens * part.num_heads),
        .tokens_with_a = static_cast<uint32_t>(
            std::clamp<int64_t>(tokens_with_a - part.first_token, 0, part.num_tokens)
        ),
        .vectors = vectors,
        .lanes_log2 = lanes_log2(vectors),
    };
    const int64_t rows_per_cta = kMergeThreads >> kernel_params.lanes_log2;
    cudaLaunchConfig_t config = {};
    config.gridDim =
        dim3(static_cast<unsigned>((kernel_params.num_rows + rows_per_cta - 1) / rows_per_cta));
    config.blockDim = dim3(kMergeThreads);
    config.stream = stream;
    check_launch(
        cudaLaunchKernelEx(&config, merge_states_kernel<Element, kVector>, kernel_params),
        kFunction,
        params.device
    );
}

template <class Element>
void launch(const MergeStatesParams& params, const Part& part, bool wide, cudaStream_t stream) {
    if (wide) {
        launch<Element, kVectorBytes / sizeof(Element)>(params, part, stream);
    } else {
        launch<Element, 1>(params, part, stream);
    }
}

void launch(const MergeStatesParams& params, const Part& part, bool wide, cudaStream_t stream) {
    switch (params.dtype) {
        case DType::kFloat32:
            return launch<float>(params, part, wide, stream);
        case DType::kFloat16:
            return launch<cutlass::half_t>(params, part, wide, stream);
        default:
            return launch<cutlass::bfloat16_t>(params, part, wide, stream);
    }
}

}  // namespace

void merge_states(const MergeStatesParams& params, Stream stream) {
    check(
        params.head_dim <= kMaxHeadDim,
        "merge_states: head_dim must be below 2^31 on a GPU, got ",
        params.head_dim
    );
    if (params.num_tokens == 0 || params.num_heads == 0) {
        return;
    }
    const DeviceGuard guard(params.device, kFunction);
    const bool wide = rows_allow(params, kVectorBytes);
    const int64_t heads_per_launch = std::min(params.num_heads, kMaxRows);
    const int64_t tokens_per_launch = kMaxRows / heads_per_launch;
    for (int64_t token = 0; token < params.num_tokens; token += tokens_per_launch) {
        const int64_t num_tokens = std::min(tokens_per_launch, params.num_tokens - token);
        for (int64_t head = 0; head < params.num_heads; head += heads_per_launch) {
            const int64_t num_heads = std::min(heads_per_launch, params.num_heads - head);
            launch(
                params,
                {token, num_tokens, head, num_heads},
                wide,
                reinterpret_cast<cudaStream_t>(stream)
            );
        }
    }
}

}  // namespace pagetile::gpu
