#include "attention/cuda/workspace.h"

#include "attention/dispatch.h"
#include "common/cuda.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

namespace pagetile::gpu {
namespace {

constexpr const char* kFunction = "paged_attention: workspace";
constexpr int64_t kLeastBytes = 8 << 20;

struct Workspace {
    char* data = nullptr;
    int64_t bytes = 0;
};

Workspace allocate(int64_t bytes) {
    const RelaxedCapture relaxed(kFunction);
    void* data = nullptr;
    cudaStream_t stream = nullptr;
    check_cuda(cudaMalloc(&data, static_cast<size_t>(bytes)), kFunction);
    cudaError_t status = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (status == cudaSuccess) {
        status = cudaMemsetAsync(data, 0, kCounterBytes, stream);
    }
    if (status == cudaSuccess) {
        status = cudaStreamSynchronize(stream);
    }
    if (stream != nullptr) {
        cudaStreamDestroy(stream);
    }
    if (status != cudaSuccess) {
        cudaFree(data);
    }
    check_cuda(status, kFunction);
    return {static_cast<char*>(data), bytes};
}

}  // namespace

char* stream_workspace(Device device, cudaStream_t stream, int64_t bytes) {
    static std::mutex mutex;
    static std::map<std::pair<int, cudaStream_t>, Workspace> workspaces;
    const std::lock_guard lock(mutex);
    Workspace& workspace = workspaces[{device.index, stream}];
    if (workspace.bytes < bytes) {
        workspace = allocate(std::max({bytes, 2 * workspace.bytes, kLeastBytes}));
    }
    return workspace.data;
}

}  // namespace pagetile::gpu
