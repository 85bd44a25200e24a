// Host side of attention on a GPU: the plan, the workspace, the kernel's parameters.

#include "attention/cuda/attention_gpu.h"
#include "attention/cuda/workspace.h"
#include "attention/dispatch.h"
#include "attention/sm80/prefill_launch.h"
#include "attention/sm80/split_kv_launch.h"
#if PAGETILE_HAS_SM90
#include "attention/sm90/prefill_launch.h"
#endif
#include "common/cuda.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <mutex>

namespace pagetile::gpu {
namespace {

constexpr const char* kFunction = "paged_attention";
constexpr float kLog2e = 1.4426950408889634f;
// Positions of keys, rounded up to whole tiles, are 32-bit integers.
constexpr int64_t kMaxKeys = std::numeric_limits<int32_t>::max() - 256;

void check_limits(const AttentionParams& params) {
    if (!is_float8(params.kv_dtype) && params.kv_dtype != DType::kFloat16 &&
        params.kv_dtype != DType::kBFloat16) {
        throw NotBuiltError(message(
            "paged_attention: not built for ",
            dtype_name(params.kv_dtype),
            " on a GPU; built: float16, bfloat16, and float8_e4m3fn and float8_e5m2 caches"
        ));
    }
    if (params.q_dtype == DType::kFloat32) {
        throw NotBuiltError(
            "paged_attention: not built for float32 queries on a GPU; built: float16, bfloat16, "
            "float8_e4m3fn, float8_e5m2"
        );
    }
    constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
    const auto check_below = [](const char* name, int64_t value, int64_t limit) {
        if (value > limit) {
            fail("paged_attention: ", name, " must be at most ", limit, " on a GPU, got ", value);
        }
    };
    check_below("batch", params.batch, kMaxInt);
    check_below(
        "query tokens x query heads of a KV head",
        params.total_q * (params.num_q_heads / params.num_kv_heads),
        kMaxInt
    );
    check_below("num_pages", params.num_pages, kMaxInt);
    check_below("page_size", params.page_size, kMaxInt);
}

KvSide make_side(const CacheView& view, int64_t element_bytes, int64_t head_dim) {
    const bool chunked = view.chunk < head_dim;
    return {
        .data = static_cast<const char*>(view.data),
        .page_stride = view.page_stride * element_bytes,
        .token_stride = view.token_stride * element_bytes,
        .head_stride = view.head_stride * element_bytes,
        .chunk_stride = chunked ? view.chunk_stride * element_bytes : 0,
        .chunk_log2 = chunked ? std::countr_zero(static_cast<uint64_t>(view.chunk)) : kNoChunks,
        .row_bytes = static_cast<int32_t>(head_dim * element_bytes),
    };
}

bool is_multiple(int64_t n, int64_t divisor) { return n % divisor == 0; }

bool is_aligned(const void* pointer, int64_t bytes) {
    return is_multiple(static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer)), bytes);
}

// Whether every row begins and ends at a multiple of 16 bytes. A stride that is never stepped does
// not matter.
bool takes_16_bytes(const AttentionParams& params, const KvSide& side) {
    const auto fits = [](int64_t count, int64_t stride) {
        return count <= 1 || is_multiple(stride, 16);
    };
    return side.chunk_log2 == kNoChunks && side.row_bytes % 16 == 0 && is_aligned(side.data, 16) &&
           fits(params.num_pages, side.page_stride) && fits(params.page_size, side.token_stride) &&
           fits(params.num_kv_heads, side.head_stride);
}

// Whether the place of every row in its pool, counted in 16 bytes, fits 32 bits.
bool fits_32_bits(const AttentionParams& params, const KvSide& side) {
    constexpr double kEnd = 16.0 * std::numeric_limits<uint32_t>::max();
    const auto reach = [](int64_t count, int64_t stride) {
        if (count <= 1) {
            return 0.0;
        }
        return stride < 0 ? kEnd : static_cast<double>(count - 1) * static_cast<double>(stride);
    };
    return reach(params.num_pages, side.page_stride) + reach(params.page_size, side.token_stride) +
               reach(params.num_kv_heads, side.head_stride) <
           kEnd;
}

// Whether a page and a token of it are found by products of 32 bits. (Of packed rows there is one page.)
bool has_32_bit_strides(const KvSide& side) {
    constexpr int64_t kMost = std::numeric_limits<uint32_t>::max();
    return side.page_stride >= 0 && side.page_stride <= kMost && side.token_stride >= 0 &&
           side.token_stride <= kMost;
}

// All of a call but the schedule.
KernelParams kernel_params(const AttentionParams& params, int64_t capacity) {
    KernelParams p = {};
    const auto element_bytes = static_cast<int64_t>(dtype_size(params.kv_dtype));
    p.group = FastDivide(static_cast<uint32_t>(params.num_q_heads / params.num_kv_heads));
    p.cu_seqlens_q = params.cu_seqlens_q;
    p.seqused_k = params.seqused_k;
    p.cu_seqlens_k = params.cu_seqlens_k;
    p.total_q = static_cast<int32_t>(params.total_q);
    p.kv_capacity = static_cast<int32_t>(capacity);
    p.kv[0] = make_side(params.k_cache, element_bytes, params.head_dim);
    p.kv[1] = make_side(params.v_cache, element_bytes, params.head_dim_v);
    p.block_table = params.block_table;
    p.block_table_stride = params.block_table_stride;
    p.page_size = FastDivide(static_cast<uint32_t>(params.page_size));
    p.num_pages = static_cast<int32_t>(params.num_pages);
    p.granule_log2 = std::min(4, std::countr_zero(static_cast<uint64_t>(params.page_size)));
    p.copies_16_bytes = takes_16_bytes(params, p.kv[0]) && takes_16_bytes(params, p.kv[1]);
    p.copies_by_places =
        p.copies_16_bytes && fits_32_bits(params, p.kv[0]) && fits_32_bits(params, p.kv[1]);
    if (params.block_table == nullptr) {
        // Packed rows are one page; each sequence begins somewhere in it.
        p.granule_log2 = 4;
        for (KvSide& side : p.kv) {
            side.token_stride = side.page_stride;
            side.page_stride = 0;
        }
    }

    const HeadDims dims = built_head_dims(params.head_dim, params.head_dim_v);
    p.copies_whole_rows = p.copies_16_bytes && p.granule_log2 == 4 && params.head_dim == dims.k &&
                          params.head_dim_v == dims.v && has_32_bit_strides(p.kv[0]) &&
                          has_32_bit_strides(p.kv[1]);

    const auto q_bytes = static_cast<int64_t>(dtype_size(params.q_dtype));
    p.q = static_cast<const char*>(params.q);
    p.q_row_stride = params.q_row_stride * q_bytes;
    p.q_head_stride = params.q_head_stride * q_bytes;
    p.q_dtype = params.q_dtype;
    p.head_dim = static_cast<int32_t>(params.head_dim);
    p.q_is_aligned = is_aligned(params.q, 16) && is_multiple(params.head_dim * q_bytes, 16) &&
                     is_multiple(p.q_row_stride, 16) && is_multiple(p.q_head_stride, 16);

    p.scale = params.softmax_scale * kLog2e;
    p.softcap = params.softcap * kLog2e;
    p.softcap_inverse = params.softcap == 0.0f ? 0.0f : 1.0f / p.softcap;
    p.transforms = transforms_scores(params);
    p.alibi_slopes = params.alibi_slopes;
    p.alibi_batch_stride = params.alibi_batch_stride;
    p.alibi_head_stride = params.alibi_head_stride;
    p.q_scale = params.q_scale;
    p.k_scale = params.k_scale;
    p.v_scale = params.v_scale;
    p.sinks = params.sinks;
    p.sinks_dtype = params.sinks_dtype;
    p.sinks_stride = params.sinks_stride;

    const auto out_bytes = static_cast<int64_t>(dtype_size(params.out_dtype));
    p.out = params.out;
    p.out_row_stride = params.out_row_stride;
    p.out_head_stride = params.out_head_stride;
    p.out_dtype = params.out_dtype;
    p.head_dim_v = static_cast<int32_t>(params.head_dim_v);
    p.out_is_aligned = is_aligned(params.out, 4 * out_bytes) &&
                       is_multiple(params.out_row_stride, 4) &&
                       is_multiple(params.out_head_stride, 4);
    p.softmax_lse = params.softmax_lse;
    p.lse_head_stride = params.lse_head_stride;
    p.lse_row_stride = params.lse_row_stride;
    return p;
}

// The workspace of a call, and where in it things are.
struct WorkspaceOfCall {
    WorkspaceLayout layout;
    char* data;
};

WorkspaceOfCall find_workspace(
    const AttentionParams& params, const PlanShape& shape, const Gpu& gpu, cudaStream_t stream
) {
    const WorkspaceLayout layout =
        workspace_layout(shape, gpu, params.max_seqlen_q, params.head_dim, params.head_dim_v);
    if (params.workspace == nullptr) {
        return {layout, stream_workspace(params.device, stream, layout.bytes)};
    }
    if (params.workspace_bytes < layout.bytes) {
        fail(
            "paged_attention: workspace must have at least ",
            layout.bytes,
            " bytes, got ",
            params.workspace_bytes
        );
    }
    return {layout, static_cast<char*>(params.workspace)};
}

void set_schedule(
    KernelParams& p, const PlanShape& shape, const WorkspaceOfCall& workspace, const LaneWork* plan
) {
    const WorkspaceLayout& layout = workspace.layout;
    p.shape = shape;
    p.is_dealt = shape.heads_per_chain == 1 && shape.piece_units == 0;
    p.plan = plan;
    p.batch_per_lane =
        (static_cast<uint32_t>(shape.batch) << 8) / static_cast<uint32_t>(shape.lanes);
    p.counters = reinterpret_cast<uint32_t*>(workspace.data);
    p.rows_max = reinterpret_cast<float2*>(workspace.data + layout.rows_max);
    p.rows_out = reinterpret_cast<float*>(workspace.data + layout.rows_out);
    p.slot_rows = layout.slot_rows;
    p.chains = FastDivide(static_cast<uint32_t>(shape.chains));
}

// A call on its way to the launches.
struct Call {
    const AttentionParams& params;
    cudaStream_t stream;
    Gpu gpu;
    PlanShape shape;
    HeadDims dims;
    WorkspaceOfCall workspace;
    const LaneWork* plan;  // null: there is none yet
    KernelParams kernel;
};

// A plan does not know whether items can be cut. It must not leave sequences to a kernel that does not
// run for that.
bool is_plan_for(const PlanShape& shape, const PlanParams& step, Gpu gpu) {
    if (gpu.cuts_items) {
        return true;
    }
    gpu.cuts_items = true;
    return plan_shape(step, gpu).long_rows == shape.long_rows;
}

// Whether the prefill kernel that would run makes good use of few tiles: it cuts items, and warpgroups leave
// out those of which they have no rows. The portable one does neither, nor what widens 64 elements the latter.
bool cuts_items(const AttentionParams& params, HeadDims dims) {
    if (transforms_scores(params)) {
        return false;
    }
#if PAGETILE_HAS_SM90
    constexpr int64_t kLeastBox = 8;  // keys
    const bool has_boxes = params.block_table == nullptr || params.page_size % kLeastBox == 0;
    return !is_float8(params.kv_dtype) ||
           (has_boxes && dims.k > 64 &&
            (multiplies_e4m3(params) ||
             sm90::can_widen(params.q_dtype, sm90::prefill_dims(dims), false)));
#else
    return !is_float8(params.kv_dtype);
#endif
}

Call make_call(const AttentionParams& params, cudaStream_t stream) {
    PlanParams step = plan_params(params);
    const int64_t capacity = std::min(
        params.block_table == nullptr ? params.num_pages : params.max_pages * params.page_size,
        kMaxKeys
    );
    step.max_seqlen_k = step.max_seqlen_k > 0 ? std::min(step.max_seqlen_k, capacity) : capacity;
    Gpu gpu = gpu_of(params.device);
    const HeadDims dims = built_head_dims(params.head_dim, params.head_dim_v);
    gpu.cuts_items = cuts_items(params, dims);
    PlanShape shape = plan_shape(step, gpu);
    const bool uses_plan = params.plan != nullptr && is_plan_for(shape, step, gpu);
    shape.max_q_len = static_cast<int32_t>(params.total_q);
    Call call = {
        .params = params,
        .stream = stream,
        .gpu = gpu,
        .shape = shape,
        .dims = dims,
        .workspace = find_workspace(params, shape, gpu, stream),
        .plan = uses_plan ? static_cast<const LaneWork*>(params.plan) : nullptr,
        .kernel = kernel_params(params, capacity),
    };
    set_schedule(call.kernel, shape, call.workspace, call.plan);
    return call;
}

// Into the workspace.
void make_plan(Call& call) {
    auto* made = reinterpret_cast<LaneWork*>(call.workspace.data + call.workspace.layout.plan);
    launch_plan(
        {.shape = call.shape,
         .cu_seqlens_q = call.params.cu_seqlens_q,
         .seqused_k = call.params.seqused_k,
         .cu_seqlens_k = call.params.cu_seqlens_k,
         .plan = made,
         .pdl = call.params.pdl,
         .next_waits = true},
        call.params.device,
        call.stream
    );
    call.plan = made;
}

PrefillShape prefill_shape(const Call& call, int32_t rows) {
    constexpr int64_t kBytesInCache = 32 << 20;  // of keys and values; an L2 cache has 50 MB (H200)
    const AttentionParams& params = call.params;
    const int64_t key_bytes =
        (params.head_dim + params.head_dim_v) * static_cast<int64_t>(dtype_size(params.kv_dtype));
    return {
        .tokens = rows / call.shape.group,
        .num_kv_heads = static_cast<int32_t>(params.num_kv_heads),
        .keys_in_cache = static_cast<int32_t>(kBytesInCache / key_bytes),
    };
}

uint32_t* next_item_of(const Call& call) {
    return reinterpret_cast<uint32_t*>(call.workspace.data + kCounterBytes - sizeof(uint32_t));
}

void launch_portable_prefill(const Call& call) {
    const DType kv_dtype = call.params.kv_dtype;
    const PrefillSchedule schedule = {
        prefill_shape(call, sm80::prefill_rows(call.dims, kv_dtype)), next_item_of(call)
    };
    sm80::launch_prefill(
        call.kernel, schedule, kv_dtype, call.dims, call.params.device, call.stream
    );
}

#if PAGETILE_HAS_SM90

sm90::PieceSums pieces_of(const Call& call) {
    constexpr int32_t kMostSequences = 512;  // each CTA looks at all of their lengths
    const WorkspaceLayout& layout = call.workspace.layout;
    const auto most = static_cast<int32_t>(kMostPieces);
    const int32_t asked = call.shape.max_splits;
    const bool cuts = sm90::cuts_items(call.dims.v, call.kernel.transforms) &&
                      layout.piece_bytes > 0 && call.shape.batch <= kMostSequences;
    return {
        .sums = reinterpret_cast<float4*>(call.workspace.data + layout.pieces),
        .counters = reinterpret_cast<uint32_t*>(call.workspace.data + kSplitKvCounterBytes),
        .most_pieces = static_cast<uint32_t>(
            !cuts       ? 1
            : asked > 0 ? std::min(asked, most)
                        : most
        ),
    };
}

// The WGMMA kernel's parameters. False: these tensors are not for it.
bool describe_wgmma_prefill(const Call& call, sm90::PrefillParams& prefill) {
    const AttentionParams& params = call.params;
    const HeadDims dims = sm90::prefill_dims(call.dims);
    const bool has_instance =
        is_float8(params.kv_dtype)
            ? multiplies_e4m3(params) ||
                  sm90::can_widen(params.q_dtype, dims, call.kernel.transforms)
            : params.kv_dtype == params.q_dtype;
    if (call.shape.long_rows < 0 || !call.gpu.has_wgmma || !has_instance) {
        return false;
    }
    prefill.call = call.kernel;
    prefill.call.out_is_aligned = is_aligned(params.out, 16) &&
                                  is_multiple(params.out_row_stride, 8) &&
                                  is_multiple(params.out_head_stride, 8);
    prefill.schedule =
        prefill_shape(call, sm90::prefill_tile(dims.k, dims.v, call.kernel.transforms).rows());
    prefill.next_item = next_item_of(call);
    if (!sm90::describe_tensors(prefill, params.q_dtype, params.kv_dtype, dims)) {
        return false;
    }
    prefill.pieces = pieces_of(call);
    if (params.block_table == nullptr) {
        prefill.call.page_size = FastDivide(std::numeric_limits<int32_t>::max());
    }
    return true;
}

// If the plan shares the multiprocessors out, the next kernel runs beside this one.
void launch_wgmma_prefill(Call& call, sm90::PrefillParams& prefill) {
    prefill.pdl = call.kernel.pdl;
    if (call.shape.num_sms > 0) {
        const auto* tail = reinterpret_cast<const PlanTail*>(call.plan + call.shape.lanes);
        prefill.num_ctas = &tail->prefill_ctas;
        // What this kernel waits for, is there when that one may start.
        call.kernel.joins = true;
        call.kernel.plan_waits = false;
        call.kernel.pdl = false;
    }
    sm90::launch_prefill(
        prefill,
        call.params.out_dtype,
        sm90::prefill_dims(call.dims),
        call.gpu.num_sms,
        call.params.device,
        call.stream
    );
}

#endif

}  // namespace

void paged_attention(const AttentionParams& params, cudaStream_t stream) {
    check_limits(params);
    if (params.batch == 0 || params.total_q == 0) {
        return;
    }
    const DeviceGuard guard(params.device, kFunction);
    Call call = make_call(params, stream);
    bool has_wgmma = false;
#if PAGETILE_HAS_SM90
    sm90::PrefillParams prefill = {};
    has_wgmma = describe_wgmma_prefill(call, prefill);
#endif
    if (call.shape.num_sms > 0 && !has_wgmma) {
        call.shape.num_sms = 0;
        call.plan = nullptr;  // it leaves multiprocessors to a kernel that does not run
    }
    // The plan of the call lies in the stream's workspace until the kernel behind it has run: no other
    // thread may launch one in between.
    static std::mutex planning;
    std::unique_lock<std::mutex> lock;
    const bool plans = call.plan == nullptr && call.shape.long_rows != 0;
    if (plans) {
        lock = std::unique_lock(planning);
        make_plan(call);
    }
    set_schedule(call.kernel, call.shape, call.workspace, call.plan);
    call.kernel.plan_waits = plans;
    call.kernel.pdl = params.pdl && !plans;
    const PageBoxes* boxes = nullptr;
    if (has_wgmma) {
#if PAGETILE_HAS_SM90
        launch_wgmma_prefill(call, prefill);
        if (call.kernel.joins && call.kernel.copies_whole_rows && prefill.v_in_one_box &&
            prefill.loading == sm90::Loading::kBoxes) {
            boxes = &prefill.pages;
        }
#endif
    } else if (call.shape.long_rows >= 0) {
        launch_portable_prefill(call);
    }
    if (call.shape.long_rows == 0) {
        return;
    }
    // What the plan was made for is a bound, but not one that has been checked. In a programmatic
    // chain clusters find no place beside the kernel before (H200: 16 us for 13 without the chain).
    call.kernel.in_clusters = call.shape.in_clusters && !call.kernel.pdl &&
                              params.total_q * call.shape.group <= call.shape.rows;
    sm80::launch_split_kv(call.kernel, boxes, params.kv_dtype, call.dims, params.device, stream);
}

}  // namespace pagetile::gpu
