#pragma once

#include "dlpack.h"
#include "pagetile/device.h"
#include "pagetile/dtype.h"
#include "pagetile/error.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

namespace pagetile {

enum class Access : uint8_t {
    kRead,
    kWrite,  // refuses tensors that say they are read-only, or that autograd follows
};

// One tensor argument of one call: any DLPack object, read without owning or copying it. Valid
// during the call.
//
// A type with `__dlpack_c_exchange_api__` (PyTorch >= 2.10) is read through it, without calling
// Python. Anything else goes through `__dlpack__`. What is neither, and what the export refuses, is
// a TypeError that names the argument.
class Tensor {
public:
    // `function` and `name` must outlive the tensor (string literals). None gives a tensor that is
    // not given().
    Tensor(
        const char* function,
        const char* name,
        nanobind::handle object,
        Access access = Access::kRead
    );

    // One that is not given(). Unlike the others, this and the next need no Python.
    Tensor(const char* function, const char* name) : function_(function), name_(name) {}

    // A dense one, in memory that the caller keeps.
    Tensor(
        const char* function,
        const char* name,
        nanobind::dlpack::dtype dtype,
        std::span<const int64_t> sizes,
        void* data,
        Device device
    );

    bool given() const { return ndim_ >= 0; }

    const char* name() const { return name_; }

    // Never null for a given tensor, not even for an empty one.
    void* data() const { return data_; }

    DType dtype() const {
        if (unknown_.bits != 0) [[unlikely]] {
            fail_unknown_dtype();
        }
        return dtype_;
    }

    Device device() const { return device_; }

    int ndim() const { return ndim_; }

    int64_t size(int dim) const { return sizes_[dim]; }

    // In elements.
    int64_t stride(int dim) const { return strides_[dim]; }

    int64_t numel() const;

    // "(3, 8, 128)"
    std::string shape_text() const;

    template <class T>
    T* data_as() const {
        return static_cast<T*>(data_);
    }

    // All throw std::invalid_argument with "function: name must ..., got ...".
    void require_given() const;
    void require_dtype(std::initializer_list<DType> allowed) const;
    void require_ndim(int ndim, const char* meaning) const;  // meaning: "[T, Hq, D]"
    void require_shape(std::initializer_list<int64_t> sizes, const char* meaning) const;
    void require_dense_last_dim() const;
    void require_device(const Tensor& like) const;

private:
    static constexpr int kMaxDims = 8;

    void describe(const nanobind::dlpack::dltensor& tensor);
    [[noreturn]] void fail_unknown_dtype() const;

    const char* function_;
    const char* name_;
    nanobind::ndarray<nanobind::ro> owner_;  // of a tensor that came through __dlpack__
    void* data_ = nullptr;
    DType dtype_ = DType::kFloat32;
    nanobind::dlpack::dtype unknown_ = {0, 0, 0};  // one that no argument may have
    Device device_;
    int ndim_ = -1;
    int64_t sizes_[kMaxDims];
    int64_t strides_[kMaxDims];
};

// All of `required` are given, and they and those of `optional` that are given share a device with
// `like`.
void require_tensors(
    const Tensor& like,
    std::initializer_list<const Tensor*> required,
    std::initializer_list<const Tensor*> optional
);

// As messages name it: "the CPU", "CUDA device 0".
std::string device_text(Device device);

// The stream of a call: `stream` if it is given (an int, or an object with `__cuda_stream__`), else
// the current stream of the framework that `object` comes from, else the legacy default stream. 0
// on the CPU.
Stream resolve_stream(
    const char* function, nanobind::handle stream, nanobind::handle object, Device device
);

// The type that a cache's bytes have: `kv_dtype` is "auto", or a name that must agree with the
// tensor; uint8 needs an fp8 one.
DType resolve_kv_dtype(const char* function, const std::string& kv_dtype, const Tensor& cache);

}  // namespace pagetile
