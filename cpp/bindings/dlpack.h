#pragma once

#include <nanobind/ndarray.h>

#include <cstdint>

// The part of DLPack 1.3 that nanobind does not know yet: the table of C functions that a tensor
// type offers as `__dlpack_c_exchange_api__`, a capsule named "dlpack_exchange_api". Layout as the
// DLPack specification gives it.
namespace pagetile::dlpack {

struct Version {
    uint32_t major;
    uint32_t minor;
};

struct ExchangeApi {
    Version version;
    const ExchangeApi* previous;  // a table of an older major version, or null

    // Not used here: allocation and owning import and export.
    void* managed_tensor_allocator;
    void* managed_tensor_from_py_object_no_sync;
    void* managed_tensor_to_py_object_no_sync;

    // Describes a tensor without owning it. May be null. -1 with a Python exception set on failure.
    int (*dltensor_from_py_object_no_sync)(void* py_object, nanobind::dlpack::dltensor* out);

    // The framework's current stream of a device. -1 with a Python exception set on failure.
    int (*current_work_stream)(int32_t device_type, int32_t device_id, void** out);
};

inline constexpr uint32_t kMajorVersion = 1;
inline constexpr const char* kExchangeCapsule = "dlpack_exchange_api";

}  // namespace pagetile::dlpack
