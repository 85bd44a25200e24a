#include "pagetile/cache_write.h"

#include "cache_write/write_plan.h"
#include "calls.h"
#include "define.h"
#include "paged_cache.h"
#include "tensor.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>

namespace nb = nanobind;

namespace pagetile {
namespace {

constexpr const char* kFunction = "cache_write";

NewRows parse_rows(const Tensor& rows, const PagedCache& cache, int64_t num_tokens) {
    rows.require_ndim(3, "[T, Hkv, D]");
    rows.require_dense_last_dim();
    if (rows.size(0) < num_tokens) {
        fail(
            kFunction,
            ": ",
            rows.name(),
            " must have a row for each of the ",
            num_tokens,
            " slots, got shape ",
            rows.shape_text()
        );
    }
    if (rows.size(1) != cache.num_kv_heads || rows.size(2) != cache.head_dim) {
        fail(
            kFunction,
            ": ",
            rows.name(),
            " must have the cache's ",
            cache.num_kv_heads,
            " heads of ",
            cache.head_dim,
            ", got shape ",
            rows.shape_text()
        );
    }
    return {
        .data = rows.data(),
        .row_stride = rows.stride(0),
        .head_stride = rows.stride(1),
        .head_dim = rows.size(2)
    };
}

}  // namespace

CacheWriteParams parse_cache_write(
    const CacheWriteTensors& tensors, const std::string& kv_dtype, const std::string& layout_name
) {
    const auto& [k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale] = tensors;
    require_tensors(k, {&v, &k_cache, &v_cache, &slot_mapping}, {&k_scale, &v_scale});

    // Types
    k.require_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
    v.require_dtype({k.dtype()});
    const DType cache_dtype = resolve_kv_dtype(kFunction, kv_dtype, k_cache);
    v_cache.require_dtype({k_cache.dtype()});
    slot_mapping.require_dtype({DType::kInt64, DType::kInt32});

    // Shapes
    const CacheLayout layout = parse_layout(kFunction, layout_name);
    const PagedCache k_pages(k_cache, layout, /*is_key=*/true);
    const PagedCache v_pages(v_cache, layout, /*is_key=*/false);
    require_same_pages(kFunction, k_pages, v_pages, v_cache);
    slot_mapping.require_ndim(1, "[T]");
    slot_mapping.require_dense_last_dim();
    const int64_t num_tokens = slot_mapping.size(0);

    return {
        .num_tokens = num_tokens,
        .num_kv_heads = k_pages.num_kv_heads,
        .num_pages = k_pages.num_pages,
        .page_size = k_pages.page_size,
        .dtype = k.dtype(),
        .cache_dtype = cache_dtype,
        .k = parse_rows(k, k_pages, num_tokens),
        .v = parse_rows(v, v_pages, num_tokens),
        .k_cache = k_pages.view,
        .v_cache = v_pages.view,
        .slot_mapping = slot_mapping.data(),
        .slot_dtype = slot_mapping.dtype(),
        .k_scale = parse_scale(k_scale, k_pages.num_kv_heads, /*batch=*/0),
        .v_scale = parse_scale(v_scale, k_pages.num_kv_heads, /*batch=*/0),
        .pdl = false,
        .device = k.device(),
    };
}

namespace {

void cache_write_binding(
    nb::handle k_object,
    nb::handle v_object,
    nb::handle k_cache_object,
    nb::handle v_cache_object,
    nb::handle slot_mapping_object,
    nb::handle k_scale_object,
    nb::handle v_scale_object,
    const std::string& kv_dtype,
    const std::string& layout,
    bool pdl,
    nb::handle stream
) {
    const CacheWriteTensors tensors = {
        .k = Tensor(kFunction, "k", k_object),
        .v = Tensor(kFunction, "v", v_object),
        .k_cache = Tensor(kFunction, "k_cache", k_cache_object, Access::kWrite),
        .v_cache = Tensor(kFunction, "v_cache", v_cache_object, Access::kWrite),
        .slot_mapping = Tensor(kFunction, "slot_mapping", slot_mapping_object),
        .k_scale = Tensor(kFunction, "k_scale", k_scale_object),
        .v_scale = Tensor(kFunction, "v_scale", v_scale_object),
    };
    CacheWriteParams params = parse_cache_write(tensors, kv_dtype, layout);
    params.pdl = pdl;
    const Stream on_stream = resolve_stream(kFunction, stream, k_object, params.device);
    const nb::gil_scoped_release release;
    cache_write(params, on_stream);
}

// What a GPU would launch for such tensors, wherever they are. Launches nothing.
nb::list cache_write_plan(
    nb::handle k_object,
    nb::handle v_object,
    nb::handle k_cache_object,
    nb::handle v_cache_object,
    nb::handle slot_mapping_object,
    const std::string& kv_dtype,
    const std::string& layout
) {
    const CacheWriteTensors tensors = {
        .k = Tensor(kFunction, "k", k_object),
        .v = Tensor(kFunction, "v", v_object),
        .k_cache = Tensor(kFunction, "k_cache", k_cache_object, Access::kWrite),
        .v_cache = Tensor(kFunction, "v_cache", v_cache_object, Access::kWrite),
        .slot_mapping = Tensor(kFunction, "slot_mapping", slot_mapping_object),
        .k_scale = Tensor(kFunction, "k_scale"),
        .v_scale = Tensor(kFunction, "v_scale"),
    };
    const CacheWriteParams params = parse_cache_write(tensors, kv_dtype, layout);
    const WritePlan plan = plan_cache_write(params);
    nb::list launches;
    for (int i = 0; i < plan.num_launches; ++i) {
        const WriteLaunch& part = plan.launches[i];
        for (int64_t token = 0; token < params.num_tokens; token += part.tokens_per_launch) {
            const int64_t tokens = std::min(part.tokens_per_launch, params.num_tokens - token);
            for (int64_t head = 0; head < params.num_kv_heads; head += part.heads_per_launch) {
                nb::dict launch;
                launch["kernel"] = params.cache_dtype == DType::kFloat8E4M3   ? "e4m3"
                                   : params.cache_dtype == DType::kFloat8E5M2 ? "e5m2"
                                                                              : "copy";
                launch["sides"] = part.has_k && part.has_v ? "kv" : part.has_k ? "k" : "v";
                launch["vector"] = part.vector;
                launch["load_bytes"] = load_bytes(params, part.vector);
                launch["store_bytes"] = store_bytes(params, part.vector);
                launch["tokens"] = tokens;
                launch["threads"] = static_cast<int>(WriteLaunch::kThreads);
                launch["grid"] = part.grid(tokens);
                launches.append(launch);
            }
        }
    }
    return launches;
}

}  // namespace
}  // namespace pagetile

void export_cache_write(nb::module_& m) {
    pagetile::define(
        m,
        "cache_write",
        &pagetile::cache_write_binding,
        nb::sig(
            "def cache_write(k: object, v: object, k_cache: object, v_cache: object, "
            "slot_mapping: object, k_scale: object, v_scale: object, kv_dtype: str, layout: str, "
            "pdl: bool, stream: object, /) -> None"
        )
    );
    pagetile::define(
        m,
        "cache_write_plan",
        &pagetile::cache_write_plan,
        nb::sig(
            "def cache_write_plan(k: object, v: object, k_cache: object, v_cache: object, "
            "slot_mapping: object, kv_dtype: str, layout: str, /) -> list[dict[str, object]]"
        )
    );
}
