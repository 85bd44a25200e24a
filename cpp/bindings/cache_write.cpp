#include "pagetile/cache_write.h"

#include "define.h"
#include "paged_cache.h"
#include "tensor.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

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

void cache_write_binding(
    nb::handle k_object,
    nb::handle v_object,
    nb::handle k_cache_object,
    nb::handle v_cache_object,
    nb::handle slot_mapping_object,
    nb::handle k_scale_object,
    nb::handle v_scale_object,
    const std::string& kv_dtype,
    const std::string& layout_name,
    nb::handle stream
) {
    const Tensor k(kFunction, "k", k_object);
    const Tensor v(kFunction, "v", v_object);
    const Tensor k_cache(kFunction, "k_cache", k_cache_object, Access::kWrite);
    const Tensor v_cache(kFunction, "v_cache", v_cache_object, Access::kWrite);
    const Tensor slot_mapping(kFunction, "slot_mapping", slot_mapping_object);
    const Tensor k_scale(kFunction, "k_scale", k_scale_object);
    const Tensor v_scale(kFunction, "v_scale", v_scale_object);
    for (const Tensor* tensor : {&k, &v, &k_cache, &v_cache, &slot_mapping}) {
        tensor->require_given();
    }
    for (const Tensor* tensor : {&v, &k_cache, &v_cache, &slot_mapping, &k_scale, &v_scale}) {
        if (tensor->given()) {
            tensor->require_device(k);
        }
    }

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

    const CacheWriteParams params = {
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
        .device = k.device(),
    };
    const Stream on_stream = resolve_stream(kFunction, stream, k_object, params.device);
    const nb::gil_scoped_release release;
    cache_write(params, on_stream);
}

}  // namespace
}  // namespace pagetile

void export_cache_write(nb::module_& m) {
    pagetile::define(
        m,
        "cache_write",
        &pagetile::cache_write_binding,
        nb::sig(
            "def cache_write(k: object, v: object, k_cache: object, v_cache: object, slot_mapping: "
            "object, k_scale: object, "
            "v_scale: object, kv_dtype: str, layout: str, stream: object, /) -> None"
        )
    );
}
