#include "tensor.h"

#include <algorithm>
#include <iterator>

namespace nb = nanobind;

namespace pagetile {
namespace {

// DLPack's device types.
enum : int32_t { kDlCpu = 1, kDlCuda = 2, kDlCudaHost = 3, kDlCudaManaged = 13 };

struct TensorType {
    PyTypeObject* type;
    const dlpack::ExchangeApi* api;  // null: this type goes through __dlpack__
    bool immutable;  // JAX exports its arrays as writable, although they must never change
    bool has_grad;   // PyTorch's autograd follows those that require it
};

const dlpack::ExchangeApi* find_exchange_api(PyTypeObject* type) {
    const dlpack::ExchangeApi* api = nullptr;
    const nb::object capsule = nb::getattr(
        nb::handle(reinterpret_cast<PyObject*>(type)), "__dlpack_c_exchange_api__", nb::none()
    );
    if (PyCapsule_IsValid(capsule.ptr(), dlpack::kExchangeCapsule) != 0) {
        api = static_cast<const dlpack::ExchangeApi*>(
            PyCapsule_GetPointer(capsule.ptr(), dlpack::kExchangeCapsule)
        );
        while (api != nullptr && api->version.major != dlpack::kMajorVersion) {
            api = api->previous;
        }
        if (api != nullptr && api->dltensor_from_py_object_no_sync == nullptr) {
            api = nullptr;
        }
    }
    return api;
}

// What is known of an object's type. Types are few and looked up often: the last ones are
// remembered, and kept alive so that no other type can take their address.
const TensorType& tensor_type(nb::handle object) {
    constexpr int kRemembered = 4;
    static TensorType known[kRemembered] = {};
    static int next = 0;

    PyTypeObject* type = Py_TYPE(object.ptr());
    for (const TensorType& entry : known) {
        if (entry.type == type) {
            return entry;
        }
    }
    const std::string module =
        nb::str(nb::getattr(object.type(), "__module__", nb::str(""))).c_str();
    TensorType& entry = known[next];
    next = (next + 1) % kRemembered;
    Py_INCREF(type);
    Py_XDECREF(entry.type);
    entry = {
        .type = type,
        .api = find_exchange_api(type),
        .immutable = module.starts_with("jax"),
        .has_grad = nb::hasattr(object.type(), "requires_grad"),
    };
    return entry;
}

// Whether a write to a PyTorch tensor would have to be recorded.
bool autograd_follows(nb::handle tensor) {
    return nb::cast<bool>(tensor.attr("requires_grad")) &&
           nb::cast<bool>(nb::module_::import_("torch").attr("is_grad_enabled")());
}

// First line of the Python exception that is set, which is cleared. (PyTorch puts a stack trace
// behind it.)
std::string take_error() {
    try {
        nb::raise_python_error();
    } catch (nb::python_error& error) {
        const std::string text = nb::str(error.value()).c_str();
        return text.substr(0, text.find('\n'));
    }
}

std::string type_text(nb::handle object) { return nb::type_name(object.type()).c_str(); }

[[noreturn]] void throw_not_a_tensor(const char* function, const char* name, nb::handle object) {
    std::string reason;
    const nb::object dlpack = nb::getattr(object, "__dlpack__", nb::none());
    if (!dlpack.is_none()) {
        PyObject* capsule = PyObject_CallNoArgs(dlpack.ptr());
        reason =
            capsule == nullptr ? message(" that DLPack cannot describe (", take_error(), ")") : "";
        Py_XDECREF(capsule);
    }
    throw nb::type_error(
        message(function, ": ", name, " must be a DLPack tensor, got ", type_text(object), reason)
            .c_str()
    );
}

// False for a type that pagetile has no use for.
bool known_dtype(nb::dlpack::dtype dtype, DType& result) {
    using Code = nb::dlpack::dtype_code;
    const auto is = [&](Code code, int bits) {
        return dtype.code == static_cast<uint8_t>(code) && dtype.bits == bits && dtype.lanes == 1;
    };

    constexpr struct {
        Code code;
        int bits;
        DType dtype;
    } kKnown[] = {
        {Code::Float, 32, DType::kFloat32},
        {Code::Float, 16, DType::kFloat16},
        {Code::Bfloat, 16, DType::kBFloat16},
        {Code::Float8_E4M3FN, 8, DType::kFloat8E4M3},
        {Code::Float8_E5M2, 8, DType::kFloat8E5M2},
        {Code::UInt, 8, DType::kUInt8},
        {Code::Int, 32, DType::kInt32},
        {Code::Int, 64, DType::kInt64},
    };

    for (const auto& entry : kKnown) {
        if (is(entry.code, entry.bits)) {
            result = entry.dtype;
            return true;
        }
    }
    return false;
}

std::string dtype_text(nb::dlpack::dtype dtype) {
    constexpr const char* kNames[] = {
        "int", "uint", "float", "handle", "bfloat", "complex", "bool"
    };
    if (dtype.code < std::size(kNames)) {
        return message(kNames[dtype.code], static_cast<int>(dtype.bits));
    }
    return message(
        "DLPack type ", static_cast<int>(dtype.code), " of ", static_cast<int>(dtype.bits), " bits"
    );
}

std::string sizes_text(const int64_t* sizes, int count) {
    std::string text = "(";
    for (int i = 0; i < count; ++i) {
        text += message(i == 0 ? "" : ", ", sizes[i]);
    }
    return text + (count == 1 ? ",)" : ")");
}

}  // namespace

std::string device_text(Device device) {
    return device.kind == DeviceKind::kCpu ? "the CPU" : message("CUDA device ", device.index);
}

Tensor::Tensor(const char* function, const char* name, nb::handle object, Access access)
    : function_(function), name_(name) {
    if (object.is_none()) {
        return;
    }
    const TensorType& type = tensor_type(object);
    if (type.immutable && access == Access::kWrite) {
        fail(function, ": ", name, " is written to, but JAX arrays are immutable");
    }
    if (type.has_grad && access == Access::kWrite && autograd_follows(object)) {
        fail(
            function,
            ": ",
            name,
            " is written to, but requires grad, and pagetile has no autograd: give it detached, or "
            "call under torch.no_grad()"
        );
    }
    if (const dlpack::ExchangeApi* api = type.api) {
        nb::dlpack::dltensor tensor;
        if (api->dltensor_from_py_object_no_sync(object.ptr(), &tensor) != 0) {
            throw nb::type_error(
                message(function, ": ", name, " cannot be read through DLPack: ", take_error())
                    .c_str()
            );
        }
        describe(tensor);
        return;
    }
    if (access == Access::kWrite) {
        nb::ndarray<> writable;
        if (nb::try_cast(object, writable, /*convert=*/false)) {
            owner_ = nb::ndarray<nb::ro>(writable);
        } else if (nb::try_cast(object, owner_, /*convert=*/false)) {
            fail(
                function,
                ": ",
                name,
                " is written to, but the given ",
                type_text(object),
                " is read-only"
            );
        }
    } else {
        nb::try_cast(object, owner_, /*convert=*/false);
    }
    if (!owner_.is_valid()) {
        throw_not_a_tensor(function, name, object);
    }
    nb::dlpack::dltensor tensor;
    tensor.data = const_cast<void*>(owner_.data());
    tensor.device = {.device_type = owner_.device_type(), .device_id = owner_.device_id()};
    tensor.ndim = static_cast<int32_t>(owner_.ndim());
    tensor.dtype = owner_.dtype();
    tensor.shape = const_cast<int64_t*>(owner_.shape_ptr());
    tensor.strides = const_cast<int64_t*>(owner_.stride_ptr());
    describe(tensor);
}

Tensor::Tensor(
    const char* function,
    const char* name,
    nb::dlpack::dtype dtype,
    std::span<const int64_t> sizes,
    void* data,
    Device device
)
    : Tensor(function, name) {
    nb::dlpack::dltensor tensor = {};
    tensor.data = data;
    tensor.device = {
        .device_type = device.kind == DeviceKind::kCpu ? kDlCpu : kDlCuda,
        .device_id = device.index,
    };
    tensor.ndim = static_cast<int32_t>(sizes.size());
    tensor.dtype = dtype;
    tensor.shape = const_cast<int64_t*>(sizes.data());
    describe(tensor);
}

void Tensor::describe(const nb::dlpack::dltensor& tensor) {
    check(
        tensor.ndim <= kMaxDims,
        function_,
        ": ",
        name_,
        " must have at most ",
        kMaxDims,
        " dimensions, got ",
        tensor.ndim
    );
    if (!known_dtype(tensor.dtype, dtype_)) {
        unknown_ = tensor.dtype;
    }
    switch (tensor.device.device_type) {
        case kDlCpu:
        case kDlCudaHost:
            device_ = {.kind = DeviceKind::kCpu, .index = 0};
            break;
        case kDlCuda:
        case kDlCudaManaged:
            device_ = {.kind = DeviceKind::kCuda, .index = tensor.device.device_id};
            break;
        default:
            fail(
                function_,
                ": ",
                name_,
                " must be on the CPU or on a CUDA device, got DLPack device type ",
                tensor.device.device_type
            );
    }
    ndim_ = tensor.ndim;
    int64_t dense = 1;
    for (int i = ndim_ - 1; i >= 0; --i) {
        sizes_[i] = tensor.shape[i];
        strides_[i] = tensor.strides == nullptr ? dense : tensor.strides[i];
        dense *= sizes_[i];
    }
    if (tensor.data == nullptr && numel() > 0) {
        throw nb::type_error(
            message(function_, ": ", name_, " has no memory (a fake or meta tensor?)").c_str()
        );
    }
    static char empty = 0;  // a given tensor without elements still is a given tensor
    data_ = tensor.data == nullptr ? &empty : static_cast<char*>(tensor.data) + tensor.byte_offset;
}

void Tensor::fail_unknown_dtype() const {
    fail(
        function_,
        ": ",
        name_,
        " must be float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, uint8, int32 or int64, "
        "got ",
        dtype_text(unknown_)
    );
}

int64_t Tensor::numel() const {
    int64_t count = 1;
    for (int i = 0; i < ndim_; ++i) {
        count *= sizes_[i];
    }
    return count;
}

std::string Tensor::shape_text() const { return sizes_text(sizes_, ndim_); }

void Tensor::require_given() const {
    if (!given()) {
        throw nb::type_error(
            message(function_, ": ", name_, " must be a DLPack tensor, got None").c_str()
        );
    }
}

void Tensor::require_dtype(std::initializer_list<DType> allowed) const {
    const bool is_known = unknown_.bits == 0;
    if (is_known && std::find(allowed.begin(), allowed.end(), dtype_) != allowed.end()) {
        return;
    }
    std::string names;
    for (const DType dtype : allowed) {
        names += message(names.empty() ? "" : " or ", dtype_name(dtype));
    }
    const std::string got = is_known ? dtype_name(dtype_) : dtype_text(unknown_);
    fail(function_, ": ", name_, " must be ", names, ", got ", got);
}

void Tensor::require_ndim(int ndim, const char* meaning) const {
    if (ndim_ != ndim) {
        fail(
            function_,
            ": ",
            name_,
            " must have ",
            ndim,
            " dimensions ",
            meaning,
            ", got shape ",
            shape_text()
        );
    }
}

void Tensor::require_shape(std::initializer_list<int64_t> sizes, const char* meaning) const {
    const bool same_rank = ndim_ == static_cast<int>(sizes.size());
    if (!same_rank || !std::equal(sizes.begin(), sizes.end(), sizes_)) {
        fail(
            function_,
            ": ",
            name_,
            " must have shape ",
            meaning,
            " = ",
            sizes_text(sizes.begin(), static_cast<int>(sizes.size())),
            ", got ",
            shape_text()
        );
    }
}

void Tensor::require_dense_last_dim() const {
    const int last = ndim_ - 1;
    check(
        sizes_[last] <= 1 || strides_[last] == 1 || numel() == 0,
        function_,
        ": ",
        name_,
        " must be dense in its last dimension (stride 1), got stride ",
        strides_[last]
    );
}

void Tensor::require_device(const Tensor& like) const {
    if (device_ != like.device_) {
        fail(
            function_,
            ": ",
            name_,
            " must be on ",
            device_text(like.device_),
            " like ",
            like.name_,
            ", got ",
            device_text(device_)
        );
    }
}

void require_tensors(
    const Tensor& like,
    std::initializer_list<const Tensor*> required,
    std::initializer_list<const Tensor*> optional
) {
    like.require_given();
    for (const Tensor* tensor : required) {
        tensor->require_given();
    }
    for (const Tensor* tensor : required) {
        tensor->require_device(like);
    }
    for (const Tensor* tensor : optional) {
        if (tensor->given()) {
            tensor->require_device(like);
        }
    }
}

Stream resolve_stream(const char* function, nb::handle stream, nb::handle object, Device device) {
    if (stream.is_none()) {
        if (device.kind == DeviceKind::kCpu) {
            return 0;
        }
        if (const dlpack::ExchangeApi* api = tensor_type(object).api) {
            void* current = nullptr;
            if (api->current_work_stream(kDlCuda, device.index, &current) != 0) {
                nb::raise_python_error();
            }
            return reinterpret_cast<Stream>(current);
        }
        return nb::cast<Stream>(
            nb::module_::import_("pagetile._tensor").attr("current_stream")(object, device.index)
        );
    }
    nb::object address = nb::borrow(stream);
    if (nb::hasattr(stream, "__cuda_stream__")) {
        const nb::object pair =
            stream.attr("__cuda_stream__")();  // (version of the protocol, address)
        address = pair[1];
    }
    Stream result = 0;
    if (nb::isinstance<nb::bool_>(address) || !nb::try_cast(address, result)) {
        throw nb::type_error(
            message(
                function,
                ": stream must be None, an int or an object with __cuda_stream__, got ",
                type_text(stream)
            )
                .c_str()
        );
    }
    return result;
}

DType resolve_kv_dtype(const char* function, const std::string& kv_dtype, const Tensor& cache) {
    const DType stored = cache.dtype();
    if (kv_dtype == "auto") {
        check(
            stored != DType::kUInt8,
            function,
            ": kv_dtype must be 'fp8_e4m3' or 'fp8_e5m2' where ",
            cache.name(),
            " is uint8, got 'auto'"
        );
        return stored;
    }

    constexpr struct {
        const char* name;
        DType dtype;
    } kNames[] = {
        {"fp8", DType::kFloat8E4M3},
        {"fp8_e4m3", DType::kFloat8E4M3},
        {"fp8_e5m2", DType::kFloat8E5M2},
        {"float16", DType::kFloat16},
        {"bfloat16", DType::kBFloat16},
        {"float32", DType::kFloat32},
    };

    for (const auto& entry : kNames) {
        if (kv_dtype == entry.name) {
            check(
                stored == entry.dtype || (stored == DType::kUInt8 && is_float8(entry.dtype)),
                function,
                ": kv_dtype '",
                kv_dtype,
                "' does not fit ",
                cache.name(),
                ", which is ",
                dtype_name(stored)
            );
            return entry.dtype;
        }
    }
    fail(
        function,
        ": kv_dtype must be 'auto', 'fp8', 'fp8_e4m3', 'fp8_e5m2', 'float16', 'bfloat16' or "
        "'float32', got '",
        kv_dtype,
        "'"
    );
}

}  // namespace pagetile
