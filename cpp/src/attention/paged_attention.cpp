// The C++ entry point of attention: checks sizes and types, reads the metadata if asked to, picks
// the backend.

#include "attention/check_call.h"
#include "attention/cpu/attention_cpu.h"
#include "common/cpu_kernels.h"
#include "common/not_built.h"
#include "pagetile/attention.h"
#include "pagetile/error.h"

#include <cmath>
#include <limits>
#include <vector>

#if PAGETILE_HAS_CUDA
#include "attention/cuda/attention_gpu.h"
#include "common/cuda.h"
#endif

namespace pagetile {
namespace {

constexpr int64_t kMaxLength = std::numeric_limits<int32_t>::max();

void check_head_dim(const char* name, int64_t value) {
    check(
        value > 0 && value % 8 == 0 && value <= kMaxHeadDim,
        "paged_attention: ",
        name,
        " must be a multiple of 8 from 8 to ",
        kMaxHeadDim,
        ", got ",
        value
    );
}

void check_types(const AttentionParams& params) {
    check(
        is_float(params.q_dtype) || is_float8(params.q_dtype),
        "paged_attention: q must be float32, float16, bfloat16, float8_e4m3fn or float8_e5m2, got ",
        dtype_name(params.q_dtype)
    );
    check(
        params.kv_dtype == params.q_dtype || is_float8(params.kv_dtype),
        "paged_attention: k_cache and v_cache must be ",
        dtype_name(params.q_dtype),
        " like q, or fp8, got ",
        dtype_name(params.kv_dtype)
    );
    const bool out_fits =
        is_float8(params.q_dtype) ? is_float(params.out_dtype) : params.out_dtype == params.q_dtype;
    check(
        out_fits,
        "paged_attention: out must be ",
        is_float8(params.q_dtype) ? "float32, float16 or bfloat16" : dtype_name(params.q_dtype),
        " for a ",
        dtype_name(params.q_dtype),
        " q, got ",
        dtype_name(params.out_dtype)
    );
    check(
        params.sinks == nullptr || is_float(params.sinks_dtype),
        "paged_attention: sinks must be float32, float16 or bfloat16, got ",
        dtype_name(params.sinks_dtype)
    );
    check(
        !params.fp8_products || params.q_dtype == DType::kFloat8E4M3,
        "paged_attention: fp8_products needs a float8_e4m3fn q, got ",
        dtype_name(params.q_dtype)
    );
    check(
        !params.fp8_products || params.kv_dtype == DType::kFloat8E4M3,
        "paged_attention: fp8_products needs float8_e4m3fn caches, got ",
        dtype_name(params.kv_dtype)
    );
    check(
        params.q_scale.data == nullptr || is_float8(params.q_dtype),
        "paged_attention: q_scale needs an fp8 q, got ",
        dtype_name(params.q_dtype)
    );
    check(
        params.k_scale.data == nullptr || is_float8(params.kv_dtype),
        "paged_attention: k_scale needs fp8 caches, got ",
        dtype_name(params.kv_dtype)
    );
    check(
        params.v_scale.data == nullptr || is_float8(params.kv_dtype),
        "paged_attention: v_scale needs fp8 caches, got ",
        dtype_name(params.kv_dtype)
    );
}

void check_sizes(const AttentionParams& params) {
    check(params.batch >= 0, "paged_attention: batch must be >= 0, got ", params.batch);
    check(params.total_q >= 0, "paged_attention: total_q must be >= 0, got ", params.total_q);
    check(
        params.num_kv_heads > 0,
        "paged_attention: num_kv_heads must be > 0, got ",
        params.num_kv_heads
    );
    check(
        params.num_q_heads > 0 && params.num_q_heads % params.num_kv_heads == 0,
        "paged_attention: num_q_heads must be a multiple of num_kv_heads (",
        params.num_kv_heads,
        "), got ",
        params.num_q_heads
    );
    check_head_dim("head_dim", params.head_dim);
    check_head_dim("head_dim of v_cache", params.head_dim_v);
    check(params.page_size > 0, "paged_attention: page_size must be > 0, got ", params.page_size);
    check(params.num_pages >= 0, "paged_attention: num_pages must be >= 0, got ", params.num_pages);
    check(
        params.max_pages >= 0,
        "paged_attention: the width of block_table must be >= 0, got ",
        params.max_pages
    );
    check(
        params.max_seqlen_q >= 0,
        "paged_attention: max_seqlen_q must be >= 0, got ",
        params.max_seqlen_q
    );
    check(
        params.max_seqlen_k >= 0 && params.max_seqlen_k <= kMaxLength,
        "paged_attention: max_seqlen_k must be from 0 to 2**31 - 1, got ",
        params.max_seqlen_k
    );
    check(
        params.cu_seqlens_q != nullptr || params.batch <= params.total_q,
        "paged_attention: without cu_seqlens_q every sequence has one query, but q has ",
        params.total_q,
        " rows for ",
        params.batch,
        " sequences"
    );
}

void check_options(const AttentionParams& params) {
    check(
        std::isfinite(params.softmax_scale),
        "paged_attention: softmax_scale must be finite, got ",
        params.softmax_scale
    );
    check(
        params.window_left >= -1,
        "paged_attention: window must be >= 0, or -1 for unlimited, got left ",
        params.window_left
    );
    check(
        params.window_right >= -1,
        "paged_attention: window must be >= 0, or -1 for unlimited, got right ",
        params.window_right
    );
    check(
        params.softcap >= 0.0f && std::isfinite(params.softcap),
        "paged_attention: softcap must be >= 0 and finite (0 is off), got ",
        params.softcap
    );
    check(
        params.num_splits >= 0,
        "paged_attention: num_splits must be >= 0 (0 chooses), got ",
        params.num_splits
    );
    check(
        params.block_table != nullptr || params.cu_seqlens_k != nullptr,
        "paged_attention: either block_table or cu_seqlens_k must be given"
    );
    check(
        params.block_table == nullptr || params.cu_seqlens_k == nullptr,
        "paged_attention: block_table and cu_seqlens_k exclude each other"
    );
    check(
        params.block_table == nullptr || params.seqused_k != nullptr,
        "paged_attention: block_table needs seqused_k"
    );
}

// Offsets must start at 0 or later, never fall, and end inside the packed rows.
void check_offsets(const char* name, const int32_t* offsets, int64_t batch, int64_t total) {
    check(offsets[0] >= 0, "paged_attention: ", name, "[0] must be >= 0, got ", offsets[0]);
    for (int64_t b = 0; b < batch; ++b) {
        check(
            offsets[b + 1] >= offsets[b] && offsets[b + 1] <= total,
            "paged_attention: ",
            name,
            " must not fall and not pass the ",
            total,
            " packed rows: sequence ",
            b,
            " runs from ",
            offsets[b],
            " to ",
            offsets[b + 1]
        );
    }
}

void check_sequence(const AttentionParams& params, int64_t b) {
    if (params.cu_seqlens_q != nullptr && params.max_seqlen_q > 0) {
        const int64_t q_len = params.cu_seqlens_q[b + 1] - params.cu_seqlens_q[b];
        check(
            q_len <= params.max_seqlen_q,
            "paged_attention: max_seqlen_q is ",
            params.max_seqlen_q,
            ", but sequence ",
            b,
            " of cu_seqlens_q has ",
            q_len,
            " queries"
        );
    }
    if (params.seqused_k == nullptr) {
        return;
    }
    const int64_t used = params.seqused_k[b];
    const int64_t capacity = params.block_table != nullptr
                                 ? params.max_pages * params.page_size
                                 : params.cu_seqlens_k[b + 1] - params.cu_seqlens_k[b];
    check(
        used >= 0 && used <= capacity,
        "paged_attention: seqused_k must be from 0 to what the sequence's pages hold (",
        capacity,
        "), got ",
        used,
        " for sequence ",
        b
    );
    check(
        params.max_seqlen_k == 0 || used <= params.max_seqlen_k,
        "paged_attention: max_seqlen_k is ",
        params.max_seqlen_k,
        ", but seqused_k of sequence ",
        b,
        " is ",
        used
    );
    if (params.block_table == nullptr) {
        return;
    }
    for (int64_t i = 0; i * params.page_size < used; ++i) {
        const int64_t page = params.block_table[b * params.block_table_stride + i];
        check(
            page >= 0 && page < params.num_pages,
            "paged_attention: block_table must hold pages from 0 to ",
            params.num_pages - 1,
            ", got ",
            page,
            " at page ",
            i,
            " of sequence ",
            b
        );
    }
}

void check_metadata(const AttentionParams& params) {
    if (params.cu_seqlens_q != nullptr) {
        check_offsets("cu_seqlens_q", params.cu_seqlens_q, params.batch, params.total_q);
    }
    if (params.cu_seqlens_k != nullptr) {
        check_offsets("cu_seqlens_k", params.cu_seqlens_k, params.batch, params.num_pages);
    }
    for (int64_t b = 0; b < params.batch; ++b) {
        check_sequence(params, b);
    }
}

#if PAGETILE_HAS_CUDA
// A copy of the metadata on the host. Waits for the stream.
class HostMetadata {
public:
    HostMetadata(const AttentionParams& params, cudaStream_t stream) : params_(params) {
        const DeviceGuard guard(params.device, "paged_attention: validate");
        params_.cu_seqlens_q = fetch(cu_seqlens_q_, params.cu_seqlens_q, params.batch + 1, stream);
        params_.seqused_k = fetch(seqused_k_, params.seqused_k, params.batch, stream);
        params_.cu_seqlens_k = fetch(cu_seqlens_k_, params.cu_seqlens_k, params.batch + 1, stream);
        const int64_t entries =
            params.batch == 0 || params.max_pages == 0
                ? 0
                : (params.batch - 1) * params.block_table_stride + params.max_pages;
        params_.block_table = fetch(block_table_, params.block_table, entries, stream);
        check_cuda(cudaStreamSynchronize(stream), "paged_attention: validate");
    }

    const AttentionParams& params() const { return params_; }

private:
    static const int32_t* fetch(
        std::vector<int32_t>& to, const int32_t* from, int64_t count, cudaStream_t stream
    ) {
        if (from == nullptr) {
            return nullptr;
        }
        to.resize(static_cast<size_t>(count) + 1);  // a place for an empty one, too
        check_cuda(
            cudaMemcpyAsync(
                to.data(),
                from,
                static_cast<size_t>(count) * sizeof(int32_t),
                cudaMemcpyDeviceToHost,
                stream
            ),
            "paged_attention: validate"
        );
        return to.data();
    }

    AttentionParams params_;
    std::vector<int32_t> cu_seqlens_q_;
    std::vector<int32_t> seqused_k_;
    std::vector<int32_t> cu_seqlens_k_;
    std::vector<int32_t> block_table_;
};
#endif

// A window at least as wide as the longest sequence is none; below, so that sums with it cannot
// overflow.
int64_t bounded_window(int64_t window) { return window > kMaxLength ? -1 : window; }

}  // namespace

void check_call(const AttentionParams& params, [[maybe_unused]] Stream stream) {
    check_types(params);
    check_sizes(params);
    check_options(params);
    if (!params.validate) {
        return;
    }
#if PAGETILE_HAS_CUDA
    if (params.device.kind != DeviceKind::kCpu) {
        check_metadata(HostMetadata(params, reinterpret_cast<cudaStream_t>(stream)).params());
        return;
    }
#endif
    if (params.device.kind == DeviceKind::kCpu) {
        check_metadata(params);
    }
}

void paged_attention(const AttentionParams& given, [[maybe_unused]] Stream stream) {
    check_call(given, stream);
    AttentionParams params = given;
    params.window_left = bounded_window(given.window_left);
    params.window_right = bounded_window(given.window_right);
    if (params.device.kind == DeviceKind::kCpu) {
        cpu::paged_attention(params);
        return;
    }
#if PAGETILE_HAS_CUDA
    gpu::paged_attention(params, reinterpret_cast<cudaStream_t>(stream));
#else
    throw_not_built("paged_attention", params.device);
#endif
}

}  // namespace pagetile
