#include "pagetile/attention.h"

#include "attention/dispatch.h"
#include "calls.h"
#include "define.h"
#include "paged_cache.h"
#include "plan.h"
#include "tensor.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <optional>
#include <vector>

namespace nb = nanobind;

namespace pagetile {
namespace {

constexpr const char* kAttention = "paged_attention";
constexpr const char* kMerge = "merge_states";

constexpr uintptr_t kWorkspaceAlignment = 16;

// PAGETILE_VALIDATE=1 in the environment is validate=True for every call.
bool validate_by_environment() {
    const char* value = std::getenv("PAGETILE_VALIDATE");
    return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

// Contiguous, and where 16-byte accesses may begin. How large it must be, the library knows.
void require_workspace(const Tensor& workspace) {
    int64_t dense = 1;
    for (int i = workspace.ndim() - 1; i >= 0; --i) {
        if (workspace.size(i) > 1 && workspace.stride(i) != dense && workspace.numel() > 0) {
            fail(
                kAttention,
                ": workspace must be contiguous, got stride ",
                workspace.stride(i),
                " in dimension ",
                i,
                " of shape ",
                workspace.shape_text()
            );
        }
        dense *= workspace.size(i);
    }
    const auto past = reinterpret_cast<uintptr_t>(workspace.data()) % kWorkspaceAlignment;
    check(
        past == 0 || workspace.numel() == 0,
        kAttention,
        ": workspace must begin at a multiple of ",
        kWorkspaceAlignment,
        " bytes, got ",
        past,
        " bytes past one"
    );
}

}  // namespace

AttentionParams parse_attention(const AttentionTensors& tensors, const AttentionOptions& options) {
    const auto& [q, k_cache, v_cache, block_table, seqused_k, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, q_scale, k_scale, v_scale, out, softmax_lse, workspace] =
        tensors;
    require_tensors(
        q,
        {&k_cache, &v_cache, &out},
        {&block_table,
         &seqused_k,
         &cu_seqlens_q,
         &cu_seqlens_k,
         &alibi_slopes,
         &sinks,
         &q_scale,
         &k_scale,
         &v_scale,
         &softmax_lse,
         &workspace}
    );

    // Queries
    q.require_ndim(3, "[T, Hq, D]");
    q.require_dense_last_dim();
    q.require_dtype(
        {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2}
    );
    const int64_t total_q = q.size(0);
    const int64_t num_q_heads = q.size(1);
    const int64_t head_dim = q.size(2);

    // Keys and values
    const CacheLayout layout =
        block_table.given() ? parse_layout(kAttention, options.layout) : CacheLayout::kPacked;
    const PagedCache k_pages(k_cache, layout, /*is_key=*/true);
    const PagedCache v_pages(v_cache, layout, /*is_key=*/false);
    require_same_pages(kAttention, k_pages, v_pages, v_cache);
    check(
        k_pages.head_dim == head_dim,
        kAttention,
        ": k_cache must have q's head_dim ",
        head_dim,
        ", got ",
        k_pages.head_dim
    );
    const DType cache_dtype = resolve_kv_dtype(kAttention, options.kv_dtype, k_cache);
    v_cache.require_dtype({k_cache.dtype()});

    // Metadata
    const auto require_offsets = [](const Tensor& offsets, int64_t batch) {
        offsets.require_dtype({DType::kInt32});
        offsets.require_shape({batch + 1}, "(B + 1,)");
        offsets.require_dense_last_dim();
    };
    int64_t batch = 0;
    if (cu_seqlens_q.given()) {
        cu_seqlens_q.require_ndim(1, "[B + 1]");
        check(
            cu_seqlens_q.size(0) > 0,
            kAttention,
            ": cu_seqlens_q must have B + 1 elements, got shape (0,)"
        );
        batch = cu_seqlens_q.size(0) - 1;
        require_offsets(cu_seqlens_q, batch);
    } else {
        batch = total_q;
    }
    if (block_table.given()) {
        block_table.require_dtype({DType::kInt32});
        block_table.require_ndim(2, "[B, max_pages]");
        block_table.require_shape({batch, block_table.size(1)}, "(B, max_pages)");
        block_table.require_dense_last_dim();
    }
    if (seqused_k.given()) {
        seqused_k.require_dtype({DType::kInt32});
        seqused_k.require_shape({batch}, "(B,)");
        seqused_k.require_dense_last_dim();
    }
    if (cu_seqlens_k.given()) {
        require_offsets(cu_seqlens_k, batch);
    }

    // Scores
    int64_t alibi_batch_stride = 0;
    int64_t alibi_head_stride = 0;
    if (alibi_slopes.given()) {
        alibi_slopes.require_dtype({DType::kFloat32});
        if (alibi_slopes.ndim() == 2) {
            alibi_slopes.require_shape({batch, num_q_heads}, "(B, Hq)");
            alibi_batch_stride = alibi_slopes.stride(0);
            alibi_head_stride = alibi_slopes.stride(1);
        } else {
            alibi_slopes.require_shape({num_q_heads}, "(Hq,)");
            alibi_head_stride = alibi_slopes.stride(0);
        }
    }
    if (sinks.given()) {
        sinks.require_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
        sinks.require_shape({num_q_heads}, "(Hq,)");
    }

    // Schedule
    int64_t workspace_bytes = 0;
    if (workspace.given()) {
        require_workspace(workspace);
        workspace_bytes = workspace.numel() * static_cast<int64_t>(dtype_size(workspace.dtype()));
    }

    // Results
    out.require_shape({total_q, num_q_heads, v_pages.head_dim}, "(T, Hq, Dv)");
    out.require_dense_last_dim();
    if (softmax_lse.given()) {
        softmax_lse.require_dtype({DType::kFloat32});
        softmax_lse.require_shape({num_q_heads, total_q}, "(Hq, T)");
    }

    return {
        .batch = batch,
        .total_q = total_q,
        .num_q_heads = num_q_heads,
        .num_kv_heads = k_pages.num_kv_heads,
        .head_dim = head_dim,
        .head_dim_v = v_pages.head_dim,
        .num_pages = k_pages.num_pages,
        .page_size = k_pages.page_size,
        .max_pages = block_table.given() ? block_table.size(1) : 0,
        .max_seqlen_q = options.max_seqlen_q,
        .max_seqlen_k = options.max_seqlen_k,
        .q_dtype = q.dtype(),
        .kv_dtype = cache_dtype,
        .out_dtype = out.dtype(),
        .q = q.data(),
        .q_row_stride = q.stride(0),
        .q_head_stride = q.stride(1),
        .cu_seqlens_q = cu_seqlens_q.data_as<const int32_t>(),
        .k_cache = k_pages.read_only(),
        .v_cache = v_pages.read_only(),
        .block_table = block_table.data_as<const int32_t>(),
        .block_table_stride = block_table.given() ? block_table.stride(0) : 0,
        .seqused_k = seqused_k.data_as<const int32_t>(),
        .cu_seqlens_k = cu_seqlens_k.data_as<const int32_t>(),
        .softmax_scale = static_cast<float>(options.softmax_scale.value_or(
            1.0 / std::sqrt(static_cast<double>(std::max<int64_t>(head_dim, 1)))
        )),
        .causal = options.causal,
        .window_left = options.window_left,
        .window_right = options.window_right,
        .softcap = static_cast<float>(options.softcap),
        .alibi_slopes = alibi_slopes.data_as<const float>(),
        .alibi_batch_stride = alibi_batch_stride,
        .alibi_head_stride = alibi_head_stride,
        .sinks = sinks.data(),
        .sinks_dtype = sinks.dtype(),
        .sinks_stride = sinks.given() ? sinks.stride(0) : 0,
        .q_scale = parse_scale(q_scale, k_pages.num_kv_heads, batch),
        .k_scale = parse_scale(k_scale, k_pages.num_kv_heads, batch),
        .v_scale = parse_scale(v_scale, k_pages.num_kv_heads, batch),
        .out = out.data(),
        .out_row_stride = out.stride(0),
        .out_head_stride = out.stride(1),
        .softmax_lse = softmax_lse.data_as<float>(),
        .lse_head_stride = softmax_lse.given() ? softmax_lse.stride(0) : 0,
        .lse_row_stride = softmax_lse.given() ? softmax_lse.stride(1) : 0,
        .num_splits = options.num_splits,
        .batch_invariant = options.batch_invariant,
        .validate = options.validate.value_or(false) || validate_by_environment(),
        .fp8_products = options.fp8_products,
        .workspace = workspace.data(),
        .workspace_bytes = workspace_bytes,
        .pdl = options.pdl,
        .device = q.device(),
    };
}

MergeStatesParams parse_merge(const MergeTensors& tensors, int64_t tokens_with_a) {
    const auto& [out_a, lse_a, out_b, lse_b, out, lse] = tensors;
    for (const Tensor* tensor : {&out_a, &lse_a, &out_b, &lse_b, &out}) {
        tensor->require_given();
    }
    out_a.require_ndim(3, "[T, Hq, Dv]");
    out_a.require_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
    const int64_t num_tokens = out_a.size(0);
    const int64_t num_heads = out_a.size(1);
    const int64_t head_dim = out_a.size(2);
    for (const Tensor* tensor : {&out_a, &out_b, &out}) {
        tensor->require_device(out_a);
        tensor->require_dtype({out_a.dtype()});
        tensor->require_shape({num_tokens, num_heads, head_dim}, "(T, Hq, Dv)");
        tensor->require_dense_last_dim();
    }
    for (const Tensor* tensor : {&lse_a, &lse_b, &lse}) {
        if (tensor->given()) {
            tensor->require_device(out_a);
            tensor->require_dtype({DType::kFloat32});
            tensor->require_shape({num_heads, num_tokens}, "(Hq, T)");
        }
    }

    return {
        .num_tokens = num_tokens,
        .num_heads = num_heads,
        .head_dim = head_dim,
        .tokens_with_a = tokens_with_a,
        .dtype = out_a.dtype(),
        .out_a = out_a.data(),
        .a_row_stride = out_a.stride(0),
        .a_head_stride = out_a.stride(1),
        .out_b = out_b.data(),
        .b_row_stride = out_b.stride(0),
        .b_head_stride = out_b.stride(1),
        .lse_a = lse_a.data_as<const float>(),
        .lse_a_head_stride = lse_a.stride(0),
        .lse_a_row_stride = lse_a.stride(1),
        .lse_b = lse_b.data_as<const float>(),
        .lse_b_head_stride = lse_b.stride(0),
        .lse_b_row_stride = lse_b.stride(1),
        .out = out.data(),
        .out_row_stride = out.stride(0),
        .out_head_stride = out.stride(1),
        .lse = lse.data_as<float>(),
        .lse_head_stride = lse.given() ? lse.stride(0) : 0,
        .lse_row_stride = lse.given() ? lse.stride(1) : 0,
        .device = out_a.device(),
    };
}

namespace {

void paged_attention_binding(
    nb::handle out_object,
    nb::handle softmax_lse_object,
    nb::handle q_object,
    nb::handle k_cache_object,
    nb::handle v_cache_object,
    nb::handle block_table_object,
    nb::handle seqused_k_object,
    nb::handle cu_seqlens_q_object,
    nb::handle cu_seqlens_k_object,
    int64_t max_seqlen_q,
    int64_t max_seqlen_k,
    std::optional<double> softmax_scale,
    bool causal,
    int64_t window_left,
    int64_t window_right,
    double softcap,
    nb::handle alibi_slopes_object,
    nb::handle sinks_object,
    nb::handle q_scale_object,
    nb::handle k_scale_object,
    nb::handle v_scale_object,
    const std::string& kv_dtype,
    const std::string& layout_name,
    int64_t num_splits,
    bool batch_invariant,
    nb::handle plan_object,
    nb::handle workspace_object,
    bool pdl,
    bool fp8_products,
    std::optional<bool> validate,
    nb::handle stream
) {
    const AttentionTensors tensors = {
        .q = Tensor(kAttention, "q", q_object),
        .k_cache = Tensor(kAttention, "k_cache", k_cache_object),
        .v_cache = Tensor(kAttention, "v_cache", v_cache_object),
        .block_table = Tensor(kAttention, "block_table", block_table_object),
        .seqused_k = Tensor(kAttention, "seqused_k", seqused_k_object),
        .cu_seqlens_q = Tensor(kAttention, "cu_seqlens_q", cu_seqlens_q_object),
        .cu_seqlens_k = Tensor(kAttention, "cu_seqlens_k", cu_seqlens_k_object),
        .alibi_slopes = Tensor(kAttention, "alibi_slopes", alibi_slopes_object),
        .sinks = Tensor(kAttention, "sinks", sinks_object),
        .q_scale = Tensor(kAttention, "q_scale", q_scale_object),
        .k_scale = Tensor(kAttention, "k_scale", k_scale_object),
        .v_scale = Tensor(kAttention, "v_scale", v_scale_object),
        .out = Tensor(kAttention, "out", out_object, Access::kWrite),
        .softmax_lse = Tensor(kAttention, "softmax_lse", softmax_lse_object, Access::kWrite),
        .workspace = Tensor(kAttention, "workspace", workspace_object, Access::kWrite),
    };
    const AttentionOptions options = {
        .max_seqlen_q = max_seqlen_q,
        .max_seqlen_k = max_seqlen_k,
        .softmax_scale = softmax_scale,
        .causal = causal,
        .window_left = window_left,
        .window_right = window_right,
        .softcap = softcap,
        .kv_dtype = kv_dtype,
        .layout = layout_name,
        .num_splits = num_splits,
        .batch_invariant = batch_invariant,
        .pdl = pdl,
        .fp8_products = fp8_products,
        .validate = validate,
    };
    AttentionParams params = parse_attention(tensors, options);
    if (const Plan* plan = parse_plan(kAttention, "plan", plan_object)) {
        plan->require_fits(kAttention, "plan", plan_params(params), params.page_size);
        params.plan = plan->data;
        // Tiles follow from these, so they must be those of the plan.
        params.max_seqlen_q = plan->params.max_seqlen_q;
        params.max_seqlen_k = plan->params.max_seqlen_k;
    }
    const Stream on_stream = resolve_stream(kAttention, stream, q_object, params.device);
    const nb::gil_scoped_release release;
    paged_attention(params, on_stream);
}

void merge_states_binding(
    nb::handle out_object,
    nb::handle lse_object,
    nb::handle out_a_object,
    nb::handle lse_a_object,
    nb::handle out_b_object,
    nb::handle lse_b_object,
    int64_t tokens_with_a,
    nb::handle stream
) {
    const MergeTensors tensors = {
        .out_a = Tensor(kMerge, "out_a", out_a_object),
        .lse_a = Tensor(kMerge, "lse_a", lse_a_object),
        .out_b = Tensor(kMerge, "out_b", out_b_object),
        .lse_b = Tensor(kMerge, "lse_b", lse_b_object),
        .out = Tensor(kMerge, "out", out_object, Access::kWrite),
        .lse = Tensor(kMerge, "lse", lse_object, Access::kWrite),
    };
    const MergeStatesParams params = parse_merge(tensors, tokens_with_a);
    const Stream on_stream = resolve_stream(kMerge, stream, out_a_object, params.device);
    const nb::gil_scoped_release release;
    merge_states(params, on_stream);
}

// The stream that a call with this tensor and this `stream` argument would use.
Stream stream_of(nb::handle object, nb::handle stream) {
    const Tensor tensor("stream_of", "object", object);
    tensor.require_given();
    return resolve_stream("stream_of", stream, object, tensor.device());
}

// An uninitialised CPU array that exports DLPack, for frameworks whose own arrays cannot be written
// to.
nb::ndarray<nb::array_api> empty(const std::vector<int64_t>& shape, const std::string& dtype_name) {
    using Code = nb::dlpack::dtype_code;

    constexpr struct {
        const char* name;
        Code code;
        uint8_t bits;
    } kTypes[] = {
        {"float32", Code::Float, 32},
        {"float16", Code::Float, 16},
        {"bfloat16", Code::Bfloat, 16},
        {"int32", Code::Int, 32},
    };

    constexpr std::align_val_t kAlignment{64};  // what XLA wants to take the memory without a copy
    for (const auto& type : kTypes) {
        if (dtype_name == type.name) {
            size_t bytes = type.bits / 8;
            for (const int64_t size : shape) {
                bytes *= static_cast<size_t>(size);
            }
            void* data = ::operator new(std::max<size_t>(bytes, 1), kAlignment);
            const nb::capsule owner(data, [](void* owned) noexcept {
                ::operator delete(owned, kAlignment);
            });
            const std::vector<size_t> sizes(shape.begin(), shape.end());
            const nb::dlpack::dtype dtype = {
                .code = static_cast<uint8_t>(type.code), .bits = type.bits, .lanes = 1
            };
            return nb::ndarray<nb::array_api>(
                data, sizes.size(), sizes.data(), owner, nullptr, dtype, nb::device::cpu::value, 0
            );
        }
    }
    throw nb::value_error(
        message("empty: dtype must be float32, float16, bfloat16 or int32, got ", dtype_name)
            .c_str()
    );
}

}  // namespace
}  // namespace pagetile

void export_attention(nb::module_& m) {
    pagetile::define(
        m,
        "paged_attention",
        &pagetile::paged_attention_binding,
        nb::sig(
            "def paged_attention(out: object, softmax_lse: object, q: object, k_cache: object, "
            "v_cache: object, block_table: object, "
            "seqused_k: object, cu_seqlens_q: object, cu_seqlens_k: object, max_seqlen_q: int, "
            "max_seqlen_k: int, softmax_scale: float | None, "
            "causal: bool, window_left: int, window_right: int, softcap: float, alibi_slopes: "
            "object, sinks: object, q_scale: object, "
            "k_scale: object, v_scale: object, kv_dtype: str, layout: str, num_splits: int, "
            "batch_invariant: bool, plan: object, workspace: object, pdl: bool, "
            "fp8_products: bool, validate: bool | None, stream: object, /) -> None"
        )
    );
    pagetile::define(
        m,
        "merge_states",
        &pagetile::merge_states_binding,
        nb::sig(
            "def merge_states(out: object, lse: object, out_a: object, lse_a: object, out_b: "
            "object, lse_b: object, tokens_with_a: int, "
            "stream: object, /) -> None"
        )
    );
    m.def(
        "empty",
        &pagetile::empty,
        nb::sig("def empty(shape: tuple[int, ...], dtype: str, /) -> Any")
    );
    pagetile::define(
        m,
        "stream_of",
        &pagetile::stream_of,
        nb::sig("def stream_of(object: object, stream: object, /) -> int")
    );
}
