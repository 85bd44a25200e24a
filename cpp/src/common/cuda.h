#pragma once

#include "common/not_built.h"
#include "pagetile/device.h"
#include "pagetile/error.h"

#include <cuda_runtime_api.h>

// Host side of a launch: status checks and the current device.

namespace pagetile {

inline void check_cuda(cudaError_t status, const char* function) {
    if (status != cudaSuccess) [[unlikely]] {
        throw std::runtime_error(message(function, ": ", cudaGetErrorString(status)));
    }
}

// After a launch: an architecture that this build has no code for is told apart from a fault.
inline void check_launch(cudaError_t status, const char* function, Device device) {
    if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction)
        [[unlikely]] {
        cudaGetLastError();  // or the next call, maybe somebody else's, would report it
        throw_not_built(function, device);
    }
    check_cuda(status, function);
}

// Makes the tensors' device the current one, and puts the former one back.
class DeviceGuard {
public:
    DeviceGuard(Device device, const char* function) : wanted_(device.index) {
        check_cuda(cudaGetDevice(&former_), function);
        if (former_ != wanted_) {
            check_cuda(cudaSetDevice(wanted_), function);
        }
    }

    ~DeviceGuard() {
        if (former_ != wanted_) {
            cudaSetDevice(former_);
        }
    }

    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

private:
    int wanted_;
    int former_ = 0;
};

}  // namespace pagetile
