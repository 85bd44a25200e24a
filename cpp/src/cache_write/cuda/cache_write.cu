// Host side of the write kernel: picks the instance that the plan asks for, fills in its parameters.

#include "cache_write/cuda/cache_write_gpu.h"
#include "cache_write/cuda/cache_write_kernel.cuh"
#include "cache_write/write_plan.h"
#include "common/cuda.h"

#include <algorithm>
#include <initializer_list>
#include <limits>

namespace pagetile::gpu {
namespace {

constexpr const char* kFunction = "cache_write";

template <bool kWide>
using Kernel = void (*)(CacheWriteKernelParams<kWide>);

template <DType kSource, DType kCache, bool kWide, bool kPdl, int kTokens>
Kernel<kWide> instance(int vector) {
    switch (vector) {
        case 8:
            if constexpr (kSource != kCache || kSource != DType::kFloat32) {
                return cache_write_kernel<kSource, kCache, 8, kWide, kPdl, kTokens>;
            }
            break;
        case 4:
            return cache_write_kernel<kSource, kCache, 4, kWide, kPdl, kTokens>;
        case 2:
            return cache_write_kernel<kSource, kCache, 2, kWide, kPdl, kTokens>;
        default:
            break;
    }
    return cache_write_kernel<kSource, kCache, 1, kWide, kPdl, kTokens>;
}

// A copy asks only for the size of an element: bf16 takes fp16's instance.
template <bool kWide, bool kPdl, int kTokens>
Kernel<kWide> copy_instance(DType dtype, int vector) {
    return dtype == DType::kFloat32
               ? instance<DType::kFloat32, DType::kFloat32, kWide, kPdl, kTokens>(vector)
               : instance<DType::kFloat16, DType::kFloat16, kWide, kPdl, kTokens>(vector);
}

template <DType kSource, bool kWide, bool kPdl>
Kernel<kWide> float8_instance(DType cache, int vector) {
    return cache == DType::kFloat8E4M3
               ? instance<kSource, DType::kFloat8E4M3, kWide, kPdl, /*kTokens=*/1>(vector)
               : instance<kSource, DType::kFloat8E5M2, kWide, kPdl, /*kTokens=*/1>(vector);
}

template <bool kWide, bool kPdl, int kTokens>
Kernel<kWide> instance(DType source, DType cache, int vector) {
    if (source == cache || kTokens == 2) {
        return copy_instance<kWide, kPdl, kTokens>(source, vector);
    }
    switch (source) {
        case DType::kFloat32:
            return float8_instance<DType::kFloat32, kWide, kPdl>(cache, vector);
        case DType::kFloat16:
            return float8_instance<DType::kFloat16, kWide, kPdl>(cache, vector);
        default:
            return float8_instance<DType::kBFloat16, kWide, kPdl>(cache, vector);
    }
}

// Programmatic launch is for kernels that wait by themselves: code for compute capability 9.0 and up.
// PTX of 8.0, compiled for a newer GPU by the driver, does not.
bool can_wait(Device device) {
    static AnswerOfDevice answers;
    return answers.get(device, kFunction, [&] {
        const auto any_kernel =
            copy_instance</*kWide=*/false, /*kPdl=*/true, /*kTokens=*/1>(DType::kFloat16, 8);
        const RelaxedCapture relaxed(kFunction);
        cudaFuncAttributes attributes;
        check_launch(
            cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(any_kernel)),
            kFunction,
            device
        );
        return attributes.ptxVersion >= 90 ? 1 : 0;
    }) == 1;
}

// A part of the batch that one launch writes.
struct Part {
    int64_t first_token;
    int64_t num_tokens;
    int64_t first_head;
};

// K or V of a part, strides in accesses.
Side<true> make_side(
    const CacheWriteParams& params,
    const WriteLaunch& plan,
    const Part& part,
    bool is_active,
    const NewRows& rows,
    const MutableCacheView& cache,
    const Scale& scale
) {
    const auto row_size = static_cast<int64_t>(dtype_size(params.dtype));
    const auto cache_size = static_cast<int64_t>(dtype_size(params.cache_dtype));
    const bool chunked = plan.chunks_per_head > 1;
    const int64_t num_heads = plan.heads_per_launch * plan.chunks_per_head;
    const auto row_stride = [&](int64_t count, int64_t stride) {
        return count <= 1 ? 0 : stride * row_size / load_bytes(params, plan.vector);
    };
    const auto cache_stride = [&](int64_t count, int64_t stride) {
        return count <= 1 ? 0 : stride * cache_size / store_bytes(params, plan.vector);
    };
    const int64_t first_element =
        part.first_token * rows.row_stride + part.first_head * rows.head_stride;
    return {
        .rows = static_cast<const char*>(rows.data) + first_element * row_size,
        .cache = static_cast<char*>(cache.data) + part.first_head * cache.head_stride * cache_size,
        .scale = scale.data == nullptr ? nullptr : scale.data + part.first_head * scale.head_stride,
        .row_stride = row_stride(params.num_tokens, rows.row_stride),
        .row_head_stride = row_stride(num_heads, chunked ? cache.chunk : rows.head_stride),
        .page_stride = cache_stride(params.num_pages, cache.page_stride),
        .token_stride = cache_stride(params.page_size, cache.token_stride),
        .head_stride = cache_stride(num_heads, chunked ? cache.chunk_stride : cache.head_stride),
        .scale_stride = chunked ? 0 : scale.head_stride,
        .items = is_active
                     ? static_cast<uint32_t>(std::min(cache.chunk, rows.head_dim) / plan.vector)
                     : 0,
    };
}

// Every distance that a part steps is from 0 to 2^32.
bool is_within_32_bits(
    const CacheWriteParams& params,
    const WriteLaunch& plan,
    const Part& part,
    const Side<true>& side
) {
    static constexpr int64_t kLimit = 1LL << 32;
    const int64_t num_heads = plan.heads_per_launch * plan.chunks_per_head;
    const auto fits = [&](int64_t farthest, std::initializer_list<int64_t> strides) {
        return farthest < kLimit &&
               std::all_of(
                   strides.begin(),
                   strides.end(),
                   [](int64_t stride) { return stride >= 0 && stride < kLimit; }
               );
    };
    const int64_t row = (part.num_tokens - 1) * side.row_stride +
                        (num_heads - 1) * side.row_head_stride +
                        2 * static_cast<int64_t>(side.items);
    const int64_t cache = (params.num_pages - 1) * side.page_stride +
                          (params.page_size - 1) * side.token_stride +
                          (num_heads - 1) * side.head_stride + side.items;
    return fits(row, {side.row_stride, side.row_head_stride}) &&
           fits(cache, {side.page_stride, side.token_stride, side.head_stride}) &&
           fits((num_heads - 1) * side.scale_stride, {side.scale_stride});
}

template <bool kWide>
Side<kWide> convert_side(const Side<true>& side) {
    using To = Distance<kWide>;
    return {
        .rows = side.rows,
        .cache = side.cache,
        .scale = side.scale,
        .row_stride = static_cast<To>(side.row_stride),
        .row_head_stride = static_cast<To>(side.row_head_stride),
        .page_stride = static_cast<To>(side.page_stride),
        .token_stride = static_cast<To>(side.token_stride),
        .head_stride = static_cast<To>(side.head_stride),
        .scale_stride = static_cast<To>(side.scale_stride),
        .items = side.items,
    };
}

template <bool kWide, bool kPdl, int kTokens>
void launch(
    const CacheWriteParams& params,
    const WriteLaunch& plan,
    const Part& part,
    const Side<true>& k,
    const Side<true>& v,
    cudaStream_t stream
) {
    CacheWriteKernelParams<kWide> kernel_params;
    const uint32_t words_per_slot = params.slot_dtype == DType::kInt64 ? 2 : 1;
    kernel_params.slots =
        static_cast<const uint32_t*>(params.slot_mapping) + part.first_token * words_per_slot;
    kernel_params.k = convert_side<kWide>(k);
    kernel_params.v = convert_side<kWide>(v);
    kernel_params.items_per_token = FastDivide(static_cast<uint32_t>(plan.items_per_token));
    kernel_params.items_per_head = FastDivide(static_cast<uint32_t>(plan.items_per_head));
    kernel_params.page_size =
        decltype(kernel_params.page_size)(static_cast<uint32_t>(params.page_size));
    kernel_params.num_slots =
        static_cast<decltype(kernel_params.num_slots)>(params.num_pages * params.page_size);
    const int64_t token_step = (part.num_tokens + kTokens - 1) / kTokens;
    kernel_params.num_items = static_cast<uint32_t>(token_step * plan.items_per_token);
    kernel_params.num_tokens = static_cast<uint32_t>(part.num_tokens);
    kernel_params.token_step = static_cast<uint32_t>(token_step);
    kernel_params.words_per_slot = words_per_slot;
    cudaLaunchAttribute attribute = programmatic_launch();
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(plan.grid(token_step)));
    config.blockDim = dim3(WriteLaunch::kThreads);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = kPdl ? 1 : 0;
    const Kernel<kWide> kernel =
        instance<kWide, kPdl, kTokens>(params.dtype, params.cache_dtype, plan.vector);
    check_launch(cudaLaunchKernelEx(&config, kernel, kernel_params), kFunction, params.device);
}

void launch(
    const CacheWriteParams& params, const WriteLaunch& plan, const Part& part, cudaStream_t stream
) {
    const Side<true> k =
        make_side(params, plan, part, plan.has_k, params.k, params.k_cache, params.k_scale);
    const Side<true> v =
        make_side(params, plan, part, plan.has_v, params.v, params.v_cache, params.v_scale);
    const bool pool_is_small =
        params.num_pages * params.page_size <= std::numeric_limits<int32_t>::max();
    const bool narrow = pool_is_small &&
                        (!plan.has_k || is_within_32_bits(params, plan, part, k)) &&
                        (!plan.has_v || is_within_32_bits(params, plan, part, v));
    // Distances beyond 32 bits are rare: their instances do without programmatic launch.
    if (!narrow) {
        launch</*kWide=*/true, /*kPdl=*/false, /*kTokens=*/1>(params, plan, part, k, v, stream);
    } else if (params.pdl && can_wait(params.device)) {
        launch</*kWide=*/false, /*kPdl=*/true, /*kTokens=*/1>(params, plan, part, k, v, stream);
    } else if (plan.tokens_per_thread(part.num_tokens, num_sms_of(params.device, kFunction)) == 2) {
        launch</*kWide=*/false, /*kPdl=*/false, /*kTokens=*/2>(params, plan, part, k, v, stream);
    } else {
        launch</*kWide=*/false, /*kPdl=*/false, /*kTokens=*/1>(params, plan, part, k, v, stream);
    }
}

}  // namespace

void cache_write(const CacheWriteParams& params, Stream stream) {
    constexpr int64_t kMaxPages = std::numeric_limits<int32_t>::max();
    check(
        params.num_pages <= kMaxPages,
        "cache_write: num_pages must be below 2^31 on a GPU, got ",
        params.num_pages
    );
    check(
        params.page_size <= kMaxPages,
        "cache_write: page_size must be below 2^31 on a GPU, got ",
        params.page_size
    );
    const WritePlan plan = plan_cache_write(params);
    if (plan.num_launches == 0) {
        return;
    }
    const DeviceGuard guard(params.device, kFunction);
    for (int i = 0; i < plan.num_launches; ++i) {
        const WriteLaunch& part = plan.launches[i];
        for (int64_t token = 0; token < params.num_tokens; token += part.tokens_per_launch) {
            const int64_t num_tokens = std::min(part.tokens_per_launch, params.num_tokens - token);
            for (int64_t head = 0; head < params.num_kv_heads; head += part.heads_per_launch) {
                launch(
                    params, part, {token, num_tokens, head}, reinterpret_cast<cudaStream_t>(stream)
                );
            }
        }
    }
}

}  // namespace pagetile::gpu
