// Host side of the legacy kernels: instances, shared memory, launches.

#include "attention/legacy/legacy_gpu.h"
#include "attention/legacy/legacy_kernel.cuh"
#include "common/cuda.h"

#include <algorithm>
#include <bit>
#include <string>

namespace pagetile::gpu {
namespace {

constexpr const char* kFunction = "paged_attention";

LegacyCache make_cache(const CacheView& cache, const Scale& scale, int64_t element_bytes) {
    return {
        .data = static_cast<const char*>(cache.data),
        .page_stride = cache.page_stride * element_bytes,
        .head_stride = cache.head_stride * element_bytes,
        .step_stride = cache.chunk_stride * element_bytes,
        .scale = scale,
    };
}

LegacyParams make_params(
    const AttentionParams& params, const LegacyScratch& scratch, int64_t longest
) {
    const auto element_bytes = static_cast<int64_t>(dtype_size(params.kv_dtype));
    return {
        .q = params.q,
        .q_row_stride = params.q_row_stride,
        .q_head_stride = params.q_head_stride,
        .k = make_cache(params.k_cache, params.k_scale, element_bytes),
        .v = make_cache(params.v_cache, params.v_scale, element_bytes),
        .block_table = params.block_table,
        .block_table_stride = params.block_table_stride,
        .lengths = params.seqused_k,
        .longest = static_cast<int32_t>(longest),
        .num_pages = static_cast<int32_t>(params.num_pages),
        .page_size_log2 = std::countr_zero(static_cast<uint64_t>(params.page_size)),
        .head_dim = static_cast<int32_t>(params.head_dim),
        .group = static_cast<int32_t>(params.num_q_heads / params.num_kv_heads),
        .scale = params.softmax_scale,
        .alibi_slopes = params.alibi_slopes,
        .alibi_batch_stride = params.alibi_batch_stride,
        .alibi_head_stride = params.alibi_head_stride,
        .out = params.out,
        .out_row_stride = params.out_row_stride,
        .out_head_stride = params.out_head_stride,
        .scratch = scratch,
    };
}

// How much dynamic shared memory an instance may have. Asked for, and allowed, once for a device.
template <class Element, class Stored, bool kPartitions>
int64_t most_shared_memory(Device device) {
    static AnswerOfDevice answers;
    return answers.get(device, kFunction, [&] {
        constexpr int kStatic = 1024;  // and what the system keeps
        int most = 0;
        check_cuda(
            cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device.index),
            kFunction
        );
        const RelaxedCapture relaxed(kFunction);
        check_launch(
            cudaFuncSetAttribute(
                legacy_kernel<Element, Stored, kPartitions>,
                cudaFuncAttributeMaxDynamicSharedMemorySize,
                most - kStatic
            ),
            kFunction,
            device
        );
        return most - kStatic;
    });
}

// "" or why there is too little shared memory for the scores of a CTA.
template <class Element, class Stored, bool kPartitions>
std::string launch(
    const AttentionParams& call, const LegacyParams& params, int64_t scores, cudaStream_t stream
) {
    const auto kernel = legacy_kernel<Element, Stored, kPartitions>;
    const int64_t bytes = (kLegacyMostHeadDim + scores) * static_cast<int64_t>(sizeof(float));
    const int64_t most = most_shared_memory<Element, Stored, kPartitions>(call.device);
    if (bytes > most) {
        return message(
            "max_seqlen_k up to ",
            most / static_cast<int64_t>(sizeof(float)) - kLegacyMostHeadDim,
            " on this GPU, whose shared memory holds the scores of a whole sequence "
            "(paged_attention_v2 takes longer ones), got ",
            scores
        );
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(
        static_cast<unsigned>(call.batch),
        static_cast<unsigned>(call.num_q_heads),
        kPartitions ? static_cast<unsigned>(std::max<int64_t>(legacy_partitions(call), 1)) : 1
    );
    config.blockDim = dim3(kLegacyThreads);
    config.dynamicSmemBytes = static_cast<size_t>(bytes);
    config.stream = stream;
    check_launch(cudaLaunchKernelEx(&config, kernel, params), kFunction, call.device);
    if constexpr (kPartitions) {
        config.gridDim.z = 1;
        config.dynamicSmemBytes = 0;
        check_launch(
            cudaLaunchKernelEx(&config, legacy_reduce_kernel<Element>, params),
            kFunction,
            call.device
        );
    }
    return "";
}

template <class Element, class Stored>
std::string launch(
    const AttentionParams& call, const LegacyParams& params, int64_t longest, cudaStream_t stream
) {
    if (params.scratch.tmp_out != nullptr) {
        return launch<Element, Stored, true>(call, params, kLegacyPartition, stream);
    }
    return launch<Element, Stored, false>(call, params, longest, stream);
}

template <class Element>
std::string launch(
    const AttentionParams& call, const LegacyParams& params, int64_t longest, cudaStream_t stream
) {
    switch (call.kv_dtype) {
        case DType::kFloat8E4M3:
            return launch<Element, cutlass::float_e4m3_t>(call, params, longest, stream);
        case DType::kFloat8E5M2:
            return launch<Element, cutlass::float_e5m2_t>(call, params, longest, stream);
        default:
            return launch<Element, Element>(call, params, longest, stream);
    }
}

}  // namespace

std::string legacy_attention(
    const AttentionParams& call, const LegacyScratch& scratch, int64_t longest, Stream stream
) {
    if (call.batch == 0) {
        return "";
    }
    const DeviceGuard guard(call.device, kFunction);
    const LegacyParams params = make_params(call, scratch, longest);
    const auto on = reinterpret_cast<cudaStream_t>(stream);
    return call.q_dtype == DType::kFloat16 ? launch<cutlass::half_t>(call, params, longest, on)
                                           : launch<cutlass::bfloat16_t>(call, params, longest, on);
}

}  // namespace pagetile::gpu
