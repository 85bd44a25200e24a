#include "attention/legacy/legacy.h"

#include "calls.h"
#include "define.h"
#include "tensor.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

namespace nb = nanobind;

namespace pagetile {
namespace {

constexpr const char* kFunction = "paged_attention";

// [B, Hq, partitions] or [B, Hq, partitions, D], dense.
void require_scratch(
    const Tensor& scratch, const AttentionParams& params, int64_t partitions, int ndim
) {
    if (ndim == 4) {
        scratch.require_ndim(4, "[B, Hq, partitions, D]");
        scratch.require_shape(
            {params.batch, params.num_q_heads, partitions, params.head_dim},
            "(B, Hq, partitions of max_logits, D)"
        );
    } else {
        scratch.require_shape(
            {params.batch, params.num_q_heads, partitions}, "(B, Hq, partitions of max_logits)"
        );
    }
    int64_t stride = 1;
    for (int i = ndim - 1; i >= 0; --i) {
        check(
            scratch.size(i) <= 1 || scratch.stride(i) == stride,
            kFunction,
            ": ",
            scratch.name(),
            " must be contiguous"
        );
        stride *= scratch.size(i);
    }
}

LegacyScratch parse_scratch(
    const Tensor& exp_sums,
    const Tensor& max_logits,
    const Tensor& tmp_out,
    const AttentionParams& params
) {
    max_logits.require_ndim(3, "[B, Hq, partitions]");
    const int64_t partitions = max_logits.size(2);
    check(
        partitions >= legacy_partitions(params),
        kFunction,
        ": max_logits must have the ",
        legacy_partitions(params),
        " partitions of ",
        kLegacyPartition,
        " keys that max_seqlen_k and block_table need, got ",
        partitions
    );
    require_scratch(max_logits, params, partitions, 3);
    require_scratch(exp_sums, params, partitions, 3);
    require_scratch(tmp_out, params, partitions, 4);
    max_logits.require_dtype({DType::kFloat32});
    exp_sums.require_dtype({DType::kFloat32});
    tmp_out.require_dtype({params.out_dtype});
    return {
        .exp_sums = exp_sums.data_as<float>(),
        .max_logits = max_logits.data_as<float>(),
        .tmp_out = tmp_out.data(),
        .partitions = partitions,
    };
}

std::string legacy_attention_binding(
    nb::handle out_object,
    nb::handle exp_sums_object,
    nb::handle max_logits_object,
    nb::handle tmp_out_object,
    nb::handle q_object,
    nb::handle k_cache_object,
    nb::handle v_cache_object,
    nb::handle block_table_object,
    nb::handle seqused_k_object,
    int64_t max_seqlen_k,
    std::optional<double> softmax_scale,
    nb::handle alibi_slopes_object,
    const std::string& kv_dtype,
    nb::handle k_scale_object,
    nb::handle v_scale_object,
    nb::handle stream
) {
    const Tensor block_table(kFunction, "block_table", block_table_object);
    block_table.require_given();
    const AttentionTensors tensors = {
        .q = Tensor(kFunction, "q", q_object),
        .k_cache = Tensor(kFunction, "k_cache", k_cache_object),
        .v_cache = Tensor(kFunction, "v_cache", v_cache_object),
        .block_table = block_table,
        .seqused_k = Tensor(kFunction, "seqused_k", seqused_k_object),
        .cu_seqlens_q = Tensor(kFunction, "cu_seqlens_q"),
        .cu_seqlens_k = Tensor(kFunction, "cu_seqlens_k"),
        .alibi_slopes = Tensor(kFunction, "alibi_slopes", alibi_slopes_object),
        .sinks = Tensor(kFunction, "sinks"),
        .q_scale = Tensor(kFunction, "q_scale"),
        .k_scale = Tensor(kFunction, "k_scale", k_scale_object),
        .v_scale = Tensor(kFunction, "v_scale", v_scale_object),
        .out = Tensor(kFunction, "out", out_object, Access::kWrite),
        .softmax_lse = Tensor(kFunction, "softmax_lse"),
        .workspace = Tensor(kFunction, "workspace"),
    };
    const AttentionParams params = parse_attention(
        tensors,
        {
            .max_seqlen_q = 1,
            .max_seqlen_k = max_seqlen_k,
            .softmax_scale = softmax_scale,
            .kv_dtype = kv_dtype,
            .layout = "legacy",
        }
    );
    const Tensor exp_sums(kFunction, "exp_sums", exp_sums_object, Access::kWrite);
    const Tensor max_logits(kFunction, "max_logits", max_logits_object, Access::kWrite);
    const Tensor tmp_out(kFunction, "tmp_out", tmp_out_object, Access::kWrite);
    LegacyScratch scratch;
    if (tmp_out.given() || exp_sums.given() || max_logits.given()) {
        require_tensors(tensors.q, {&exp_sums, &max_logits, &tmp_out}, {});
        scratch = parse_scratch(exp_sums, max_logits, tmp_out, params);
    }
    const Stream on_stream = resolve_stream(kFunction, stream, q_object, params.device);
    const nb::gil_scoped_release release;
    return legacy_attention(params, scratch, on_stream);
}

}  // namespace
}  // namespace pagetile

void export_legacy(nb::module_& m) {
    pagetile::define(
        m,
        "legacy_attention",
        &pagetile::legacy_attention_binding,
        nb::sig(
            "def legacy_attention(out: object, exp_sums: object, max_logits: object, tmp_out: "
            "object, q: object, k_cache: object, v_cache: object, block_table: object, "
            "seqused_k: object, max_seqlen_k: int, softmax_scale: float | None, alibi_slopes: "
            "object, kv_dtype: str, k_scale: object, v_scale: object, stream: object, /) -> str"
        )
    );
}
