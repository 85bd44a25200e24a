// What TMA must know of queries, keys and values.

#include "attention/sm90/prefill_launch.h"
#include "common/cuda.h"

#include <array>
#include <cstdlib>
#include <limits>

namespace pagetile::sm90 {
namespace {

constexpr const char* kFunction = "paged_attention";
constexpr uint32_t kSlab = 64;  // elements of 16 bits: a row of the swizzle
constexpr int64_t kSlabBytes = 128;
constexpr uint32_t kGranule = 16;
constexpr int64_t kMostBytes = int64_t{1} << 40;  // of a stride

using Encode = CUresult (*)(
    CUtensorMap*,
    CUtensorMapDataType,
    cuuint32_t,
    void*,
    const cuuint64_t*,
    const cuuint64_t*,
    const cuuint32_t*,
    const cuuint32_t*,
    CUtensorMapInterleave,
    CUtensorMapSwizzle,
    CUtensorMapL2promotion,
    CUtensorMapFloatOOBfill
);

// From the driver, so that nothing links libcuda.
Encode find_encode() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    check_cuda(
        cudaGetDriverEntryPointByVersion(
            "cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result
        ),
        kFunction
    );
    return result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
}

// A dimension of a tensor: how many, how far apart in bytes, and how many in a box.
struct Dimension {
    int64_t count;
    int64_t stride;  // of the first one: the size of an element
    uint32_t box;
};

CUtensorMapDataType type_of(DType dtype) {
    switch (dtype) {
        case DType::kFloat16:
            return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
        case DType::kBFloat16:
            return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
        default:
            return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    }
}

// Rows of 128 bytes in shared memory are swizzled.
template <size_t kRank>
bool describe(
    CUtensorMap& map, DType dtype, const void* data, const std::array<Dimension, kRank>& dimensions
) {
    const int64_t row_bytes = dimensions[0].box * static_cast<int64_t>(dtype_size(dtype));
    static const Encode encode = find_encode();
    std::array<cuuint64_t, kRank> counts;
    std::array<cuuint64_t, kRank> strides;  // the last is not used
    std::array<cuuint32_t, kRank> box;
    std::array<cuuint32_t, kRank> steps;
    bool fits = encode != nullptr && reinterpret_cast<uintptr_t>(data) % 16 == 0;
    for (size_t i = 0; i < kRank; ++i) {
        const Dimension& dimension = dimensions[i];
        fits = fits && dimension.count > 0;
        counts[i] = static_cast<cuuint64_t>(dimension.count);
        box[i] = dimension.box;
        steps[i] = 1;
        if (i > 0) {
            // A stride that is never stepped may be anything.
            const int64_t stride = dimension.count > 1 ? dimension.stride : 16;
            fits = fits && stride % 16 == 0 && stride >= 0 && stride < kMostBytes;
            strides[i - 1] = static_cast<cuuint64_t>(stride);
        }
    }
    if (!fits) {
        return false;
    }
    const auto try_encode = [&] {
        return encode(
            &map,
            type_of(dtype),
            kRank,
            const_cast<void*>(data),
            counts.data(),
            strides.data(),
            box.data(),
            steps.data(),
            CU_TENSOR_MAP_INTERLEAVE_NONE,
            row_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
            CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
        );
    };
    CUresult result = try_encode();
    if (result == CUDA_ERROR_INVALID_CONTEXT) {
        // The thread has not called the runtime yet: setting its device makes the context current.
        int device = 0;
        check_cuda(cudaGetDevice(&device), kFunction);
        check_cuda(cudaSetDevice(device), kFunction);
        result = try_encode();
    }
    return result == CUDA_SUCCESS;
}

bool describe_queries(PrefillParams& params, DType q_dtype, HeadDims dims) {
    const gpu::KernelParams& call = params.call;
    const auto element_bytes = static_cast<int64_t>(dtype_size(q_dtype));
    params.query_bytes =
        params.schedule.tokens * call.shape.group * dims.k * static_cast<int32_t>(element_bytes);
    return describe<3>(
        params.q,
        q_dtype,
        call.q,
        {{{call.head_dim, element_bytes, static_cast<uint32_t>(kSlabBytes / element_bytes)},
          {static_cast<int64_t>(params.schedule.num_kv_heads) * call.shape.group,
           call.q_head_stride,
           static_cast<uint32_t>(call.shape.group)},
          {call.total_q, call.q_row_stride, static_cast<uint32_t>(params.schedule.tokens)}}}
    );
}

bool describe_boxes(PrefillParams& params, DType kv_dtype, HeadDims dims) {
    const gpu::KernelParams& call = params.call;
    const int64_t num_kv_heads = params.schedule.num_kv_heads;
    const auto is_packed = call.block_table == nullptr;
    const int64_t tokens = is_packed ? call.num_pages : call.page_size.divisor();
    const int64_t pages = is_packed ? 1 : call.num_pages;
    if (!is_packed && tokens % 8 != 0) {
        return false;
    }
    params.box_rows = is_packed || tokens % kGranule == 0 ? kGranule : 8;
    params.page_end =
        is_packed ? std::numeric_limits<int32_t>::max() : static_cast<int32_t>(tokens);
    params.granules_on[0] = static_cast<int32_t>(kGranule) % params.page_end;
    params.granules_on[1] = static_cast<int32_t>(2 * kGranule) % params.page_end;
    const bool is_float8_cache = is_float8(kv_dtype);
    params.is_e5m2 = kv_dtype == DType::kFloat8E5M2;
    params.v_in_one_box =
        !is_float8_cache && params.box_rows == kGranule && call.head_dim_v % kSlab == 0;

    const gpu::KvSide& k = call.kv[0];
    const gpu::KvSide& v = call.kv[1];
    if (k.chunk_log2 != gpu::kNoChunks || v.chunk_log2 != gpu::kNoChunks) {
        return false;
    }
    const auto rows = static_cast<uint32_t>(params.box_rows);
    const auto element_bytes = static_cast<int64_t>(dtype_size(kv_dtype));
    const auto by_rows =
        [&](CUtensorMap& map, const gpu::KvSide& side, int64_t head_dim, int width) {
            return describe<4>(
                map,
                kv_dtype,
                side.data,
                {{{head_dim, element_bytes, is_float8_cache ? static_cast<uint32_t>(width) : kSlab},
                  {tokens, side.token_stride, rows},
                  {num_kv_heads, side.head_stride, 1},
                  {pages, side.page_stride, 1}}}
            );
        };
    const bool has_values =
        params.v_in_one_box
            ? describe<5>(
                  params.pages.v,
                  kv_dtype,
                  v.data,
                  {{{kSlab, 2, kSlab},
                    {tokens, v.token_stride, kGranule},
                    {call.head_dim_v / kSlab, kSlab * 2, static_cast<uint32_t>(dims.v) / kSlab},
                    {num_kv_heads, v.head_stride, 1},
                    {pages, v.page_stride, 1}}}
              )
            : by_rows(params.pages.v, v, call.head_dim_v, dims.v);
    return by_rows(params.pages.k, k, call.head_dim, dims.k) && has_values;
}

}  // namespace

bool describe_tensors(PrefillParams& params, DType q_dtype, DType kv_dtype, HeadDims dims) {
    if (!describe_queries(params, q_dtype, dims)) {
        return false;
    }
    const gpu::KernelParams& call = params.call;
    const bool is_float8_cache = is_float8(kv_dtype);
    if (describe_boxes(params, kv_dtype, dims)) {
        params.loading = is_float8(q_dtype) ? Loading::kTransposed
                         : is_float8_cache  ? Loading::kWidened
                                            : Loading::kBoxes;
        return true;
    }
    params.loading = Loading::kRows;
    return !is_float8_cache && !call.transforms && call.block_table != nullptr &&
           call.copies_by_places &&
           std::abs(call.block_table_stride) <= std::numeric_limits<int32_t>::max();
}

}  // namespace pagetile::sm90
