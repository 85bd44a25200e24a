#include "pagetile/copy_pages.h"

#include "define.h"
#include "tensor.h"

#include <nanobind/nanobind.h>

#include <deque>
#include <string>
#include <vector>

namespace nb = nanobind;

namespace pagetile {
namespace {

constexpr const char* kFunction = "copy_pages";

// The caches of one side, all alike.
class CacheList {
public:
    // `objects`: a tensor, or a sequence of tensors.
    CacheList(const char* name, nb::handle objects, Access access) {
        if (PyList_Check(objects.ptr()) == 0 && PyTuple_Check(objects.ptr()) == 0) {
            add(name, objects, access);
            return;
        }
        int64_t i = 0;
        for (nb::handle object : objects) {
            add(message(name, "[", i, "]"), object, access);
            ++i;
        }
    }

    int64_t size() const { return static_cast<int64_t>(tensors_.size()); }

    const Tensor& front() const { return tensors_.front(); }

    const std::deque<Tensor>& tensors() const { return tensors_; }

    void* const* addresses() const { return addresses_.data(); }

private:
    void add(std::string name, nb::handle object, Access access) {
        names_.push_back(std::move(name));
        const Tensor& tensor =
            tensors_.emplace_back(kFunction, names_.back().c_str(), object, access);
        tensor.require_given();
        tensor.require_dtype(
            {DType::kFloat32,
             DType::kFloat16,
             DType::kBFloat16,
             DType::kFloat8E4M3,
             DType::kFloat8E5M2,
             DType::kUInt8}
        );
        if (tensor.ndim() < 1 || tensor.ndim() > PageShape::kMaxDims + 1) {
            fail(
                kFunction,
                ": ",
                tensor.name(),
                " must have 1 to ",
                PageShape::kMaxDims + 1,
                " dimensions [P, ...], got shape ",
                tensor.shape_text()
            );
        }
        const Tensor& first = tensors_.front();
        tensor.require_device(first);
        tensor.require_dtype({first.dtype()});
        bool alike = tensor.ndim() == first.ndim();
        for (int i = 0; alike && i < tensor.ndim(); ++i) {
            alike = tensor.size(i) == first.size(i) &&
                    (tensor.size(i) <= 1 || tensor.stride(i) == first.stride(i));
        }
        if (!alike) {
            fail(
                kFunction,
                ": ",
                tensor.name(),
                " must have the shape and strides of ",
                first.name(),
                " ",
                first.shape_text(),
                ", got ",
                tensor.shape_text()
            );
        }
        addresses_.push_back(tensor.data());
    }

    std::deque<std::string> names_;  // a Tensor keeps the address of its name
    std::deque<Tensor> tensors_;
    std::vector<void*> addresses_;
};

// [n] page numbers on the device of the caches.
void require_pages(const Tensor& pages, const Tensor& like) {
    pages.require_given();
    pages.require_device(like);
    pages.require_dtype({DType::kInt32, DType::kInt64});
    pages.require_ndim(1, "[n]");
    pages.require_dense_last_dim();
}

void copy_pages_binding(
    nb::handle src_objects,
    nb::handle dst_objects,
    nb::handle src_pages_object,
    nb::handle dst_pages_object,
    nb::handle stream
) {
    const CacheList src("src_caches", src_objects, Access::kRead);
    const CacheList dst("dst_caches", dst_objects, Access::kWrite);
    const Tensor src_pages(kFunction, "src_pages", src_pages_object);
    const Tensor dst_pages(kFunction, "dst_pages", dst_pages_object);
    check(
        src.size() == dst.size(),
        kFunction,
        ": dst_caches must have as many caches as src_caches (",
        src.size(),
        "), got ",
        dst.size()
    );
    if (src.size() == 0) {
        return;
    }
    const Tensor& src_cache = src.front();
    const Tensor& dst_cache = dst.front();
    dst_cache.require_device(src_cache);
    dst_cache.require_dtype({src_cache.dtype()});
    bool alike = src_cache.ndim() == dst_cache.ndim();
    for (int i = 1; alike && i < src_cache.ndim(); ++i) {
        alike = src_cache.size(i) == dst_cache.size(i);
    }
    if (!alike) {
        fail(
            kFunction,
            ": ",
            dst_cache.name(),
            " must have pages like those of ",
            src_cache.name(),
            " ",
            src_cache.shape_text(),
            ", got ",
            dst_cache.shape_text()
        );
    }
    require_pages(src_pages, src_cache);
    require_pages(dst_pages, src_cache);
    dst_pages.require_dtype({src_pages.dtype()});
    dst_pages.require_shape({src_pages.size(0)}, "(n,)");

    CopyPagesParams params = {
        .num_caches = src.size(),
        .src_caches = src.addresses(),
        .dst_caches = dst.addresses(),
        .element_size = static_cast<int64_t>(dtype_size(src_cache.dtype())),
        .src_num_pages = src_cache.size(0),
        .dst_num_pages = dst_cache.size(0),
        .src_page_stride = src_cache.stride(0),
        .dst_page_stride = dst_cache.stride(0),
        .page = {},
        .num_pairs = src_pages.size(0),
        .src_pages = src_pages.data(),
        .dst_pages = dst_pages.data(),
        .page_dtype = src_pages.dtype(),
        .device = src_cache.device(),
    };
    params.page.num_dims = src_cache.ndim() - 1;
    for (int i = 0; i < params.page.num_dims; ++i) {
        params.page.sizes[i] = src_cache.size(i + 1);
        params.page.src_strides[i] = src_cache.stride(i + 1);
        params.page.dst_strides[i] = dst_cache.stride(i + 1);
    }
    const nb::object first =
        PyList_Check(src_objects.ptr()) != 0 || PyTuple_Check(src_objects.ptr()) != 0
            ? nb::object(src_objects[0])
            : nb::borrow(src_objects);
    const Stream on_stream = resolve_stream(kFunction, stream, first, params.device);
    const nb::gil_scoped_release release;
    copy_pages(params, on_stream);
}

}  // namespace
}  // namespace pagetile

void export_copy_pages(nb::module_& m) {
    pagetile::define(
        m,
        "copy_pages",
        &pagetile::copy_pages_binding,
        nb::sig(
            "def copy_pages(src_caches: object, dst_caches: object, src_pages: object, "
            "dst_pages: object, stream: object, /) -> None"
        )
    );
}
