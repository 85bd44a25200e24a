#pragma once

#include "common/not_built.h"
#include "pagetile/device.h"
#include "pagetile/error.h"

#include <cuda_runtime_api.h>

#include <atomic>

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

// While it lives, calls that a capture in progress would else forbid are allowed: loading a kernel,
// asking about one, allocating. They do not become part of the graph.
class RelaxedCapture {
public:
    explicit RelaxedCapture(const char* function) {
        check_cuda(cudaThreadExchangeStreamCaptureMode(&mode_), function);
    }

    ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

    RelaxedCapture(const RelaxedCapture&) = delete;
    RelaxedCapture& operator=(const RelaxedCapture&) = delete;

private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

constexpr int kMaxDevices = 64;

inline void check_device_index(Device device, const char* function) {
    if (device.index >= kMaxDevices) [[unlikely]] {
        fail(
            function,
            ": CUDA devices from ",
            kMaxDevices,
            " on are not supported, got ",
            device.index
        );
    }
}

// An answer for each device, asked for once: the runtime takes longer over it than a launch's own
// bookkeeping.
class AnswerOfDevice {
public:
    template <class Ask>
    int get(Device device, const char* function, const Ask& ask) {
        check_device_index(device, function);
        std::atomic<int>& answer = known_[device.index];  // plus 1; 0 is not asked yet
        if (answer.load(std::memory_order_relaxed) == 0) {
            answer.store(ask() + 1, std::memory_order_relaxed);
        }
        return answer.load(std::memory_order_relaxed) - 1;
    }

private:
    std::atomic<int> known_[kMaxDevices] = {};
};

// Multiprocessors of a GPU.
inline int num_sms_of(Device device, const char* function) {
    static AnswerOfDevice answers;
    return answers.get(device, function, [&] {
        int count = 0;
        const cudaError_t status =
            cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device.index);
        if (status != cudaSuccess) {
            cudaGetLastError();  // or the next call, maybe somebody else's, would report it
        }
        check_cuda(status, function);
        return count;
    });
}

// Of a GPU: 90 is 9.0. From there on thread blocks can form clusters, with shared memory that all
// of them reach.
inline int capability_of(Device device, const char* function) {
    static AnswerOfDevice answers;
    return answers.get(device, function, [&] {
        int major = 0;
        int minor = 0;
        check_cuda(
            cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index),
            function
        );
        check_cuda(
            cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device.index),
            function
        );
        return 10 * major + minor;
    });
}

// Lets a kernel start before the one ahead of it in the stream has ended.
inline cudaLaunchAttribute programmatic_launch() {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    return attribute;
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
