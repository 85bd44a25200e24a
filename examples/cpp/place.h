#pragma once

// Where tensors are: the memory of a GPU in the order of a stream, or the host's. Owners of what CUDA
// hands out.

#include "pagetile/device.h"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

inline void check_cuda(cudaError_t status, const char* call) {
    if (status != cudaSuccess) {
        throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
    }
}

// Of these calls alone nobody looks at the status: a destructor could not report it.
template <auto kDestroy>
struct Destroy {
    template <class T>
    void operator()(T* handle) const {
        kDestroy(handle);
    }
};

using OwnStream = std::unique_ptr<CUstream_st, Destroy<cudaStreamDestroy>>;
using Graph = std::unique_ptr<CUgraph_st, Destroy<cudaGraphDestroy>>;
using GraphExec = std::unique_ptr<CUgraphExec_st, Destroy<cudaGraphExecDestroy>>;

inline OwnStream make_stream() {
    cudaStream_t stream = nullptr;
    check_cuda(
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"
    );
    return OwnStream(stream);
}

// False where there is no driver or no device. A driver that is there and fails is an error.
inline bool has_gpu() {
    int driver = 0;
    check_cuda(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (driver == 0 || status == cudaErrorNoDevice) {
        return false;
    }
    check_cuda(status, "cudaGetDeviceCount");
    return count > 0;
}

struct Place {
    pagetile::Device device;
    cudaStream_t stream = nullptr;

    bool is_gpu() const { return device.kind == pagetile::DeviceKind::kCuda; }
};

// Bytes of a place, not initialised. Copies to it and fills run in the order of the stream.
class Memory {
public:
    Memory(const Place& place, int64_t bytes)
        : place_(place), bytes_(static_cast<size_t>(bytes)), data_(nullptr, {place.is_gpu()}) {
        if (place.is_gpu()) {
            void* data = nullptr;
            check_cuda(cudaMalloc(&data, bytes_), "cudaMalloc");
            data_.reset(static_cast<std::byte*>(data));
        } else {
            data_.reset(static_cast<std::byte*>(::operator new(bytes_)));
        }
    }

    int64_t bytes() const { return static_cast<int64_t>(bytes_); }

    template <class T = std::byte>
    T* data() const {
        return reinterpret_cast<T*>(data_.get());
    }

    void fill(uint8_t byte) {
        if (place_.is_gpu()) {
            check_cuda(cudaMemsetAsync(data(), byte, bytes_, place_.stream), "cudaMemsetAsync");
        } else {
            std::memset(data(), byte, bytes_);
        }
    }

    // Of ordinary memory the copy is taken before this returns; pinned memory would have to stay as
    // it is until the stream has come here.
    template <class Range>
    void upload(const Range& from) {
        copy(data(), from.data(), from.size() * sizeof(from[0]), cudaMemcpyHostToDevice);
    }

    // Waits for the stream.
    template <class Range>
    void download(Range& to) const {
        copy(to.data(), data(), to.size() * sizeof(to[0]), cudaMemcpyDeviceToHost);
        if (place_.is_gpu()) {
            check_cuda(cudaStreamSynchronize(place_.stream), "cudaStreamSynchronize");
        }
    }

private:
    struct Free {
        bool on_gpu;

        void operator()(std::byte* data) const {
            if (on_gpu) {
                cudaFree(data);
            } else {
                ::operator delete(data);
            }
        }
    };

    void copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) const {
        if (bytes > bytes_) {
            throw std::length_error("Memory: copy of more bytes than there are");
        }
        if (place_.is_gpu()) {
            check_cuda(cudaMemcpyAsync(to, from, bytes, kind, place_.stream), "cudaMemcpyAsync");
        } else {
            std::memcpy(to, from, bytes);
        }
    }

    Place place_;
    size_t bytes_;
    std::unique_ptr<std::byte, Free> data_;
};
