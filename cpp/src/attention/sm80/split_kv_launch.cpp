#include "attention/sm80/split_kv_launch.h"

#include "attention/cuda/instance_index.h"
#include "attention/sm80/tile_shapes.h"
#include "common/cuda.h"

#include <atomic>

namespace pagetile::sm80 {
namespace {

constexpr const char* kFunction = "paged_attention";

const void* find_instance(DType kv_dtype, HeadDims dims, int rows, bool is_beside) {
    switch (kv_dtype) {
        case DType::kFloat16:
            return split_kv_half_t(dims, rows, is_beside);
        case DType::kBFloat16:
            return split_kv_bfloat16_t(dims, rows, is_beside);
        case DType::kFloat8E4M3:
            return split_kv_float_e4m3_t(dims, rows, is_beside);
        default:
            return split_kv_float_e5m2_t(dims, rows, is_beside);
    }
}

// What a launch of an instance on a device needs, asked for once.
struct Launch {
    std::atomic<int> threads;  // 0: not asked yet
    std::atomic<int> shared_memory;
    std::atomic<bool> is_hopper;  // has code for programmatic launches
    std::atomic<bool> has_clusters;
};

// 8, 16 and 32 rows, and beside a kernel that prefills
constexpr int kKinds = 4;
constexpr int kBeside = 3;
constexpr int kInstances = gpu::kKvTypes * gpu::kHeadDimPairs * kKinds;

Launch& launch_of(DType kv_dtype, HeadDims dims, int kind, Device device) {
    static Launch launches[kMaxDevices][kInstances];
    check_device_index(device, kFunction);
    const int instance = gpu::index_of(kv_dtype) * gpu::kHeadDimPairs + gpu::index_of(dims);
    return launches[device.index][instance * kKinds + kind];
}

cudaLaunchAttribute clusters() {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = kClusterLanes;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    return attribute;
}

// Whether a cluster of the kernel fits anywhere on the device: not on a small slice of a GPU.
bool fits_clusters(const void* kernel, int threads, int shared_memory) {
    cudaLaunchAttribute attribute = clusters();
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(kClusterLanes);
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_memory);
    config.attrs = &attribute;
    config.numAttrs = 1;
    int count = 0;
    if (cudaOccupancyMaxActiveClusters(&count, kernel, &config) != cudaSuccess) {
        cudaGetLastError();  // or the next call would report it
        return false;
    }
    return count > 0;
}

void prepare(
    Launch& launch,
    const void* kernel,
    HeadDims dims,
    int element_bytes,
    int rows,
    bool is_beside,
    Device device
) {
    const RelaxedCapture relaxed(kFunction);
    cudaFuncAttributes attributes;
    check_launch(cudaFuncGetAttributes(&attributes, kernel), kFunction, device);
    // The code may be older than the GPU: PTX, compiled by the driver.
    const int arch = attributes.ptxVersion * 10;
    const TileShape shape = is_beside ? tile_shape_beside(dims.k)
                                      : tile_shape(dims.k, dims.v, element_bytes, rows, arch);
    const int bytes = shared_memory(shape, dims.k, dims.v, element_bytes, arch);
    check_launch(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        kFunction,
        device
    );
    launch.shared_memory = bytes;
    launch.is_hopper = attributes.ptxVersion >= 90;
    launch.has_clusters =
        meets_in_clusters(shape, arch) && fits_clusters(kernel, shape.num_threads(), bytes);
    launch.threads.store(shape.num_threads(), std::memory_order_release);
}

}  // namespace

void launch_split_kv(
    KernelParams& params,
    const gpu::PageBoxes* boxes,
    DType kv_dtype,
    HeadDims dims,
    Device device,
    cudaStream_t stream
) {
    const int rows = params.shape.rows;
    const void* kernel = boxes != nullptr ? find_instance(kv_dtype, dims, rows, true) : nullptr;
    const bool is_beside = kernel != nullptr;
    if (!is_beside) {
        kernel = find_instance(kv_dtype, dims, rows, false);
    }
    Launch& launch = launch_of(kv_dtype, dims, is_beside ? kBeside : rows / 16, device);
    if (launch.threads.load(std::memory_order_acquire) == 0) {
        const auto element_bytes = static_cast<int>(dtype_size(kv_dtype));
        prepare(launch, kernel, dims, element_bytes, rows, is_beside, device);
    }
    params.in_clusters = params.in_clusters && launch.has_clusters.load(std::memory_order_relaxed);
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = {};
    config.attrs = attributes;
    if ((params.pdl || params.plan_waits || params.joins) &&
        launch.is_hopper.load(std::memory_order_relaxed)) {
        attributes[config.numAttrs++] = programmatic_launch();
    }
    if (params.in_clusters) {
        attributes[config.numAttrs++] = clusters();
    }
    config.gridDim = dim3(static_cast<unsigned>(params.shape.chains * params.shape.lanes));
    config.blockDim = dim3(static_cast<unsigned>(launch.threads.load(std::memory_order_relaxed)));
    config.dynamicSmemBytes =
        static_cast<size_t>(launch.shared_memory.load(std::memory_order_relaxed));
    config.stream = stream;
    void* arguments[] = {&params, const_cast<gpu::PageBoxes*>(boxes)};
    check_launch(cudaLaunchKernelExC(&config, kernel, arguments), kFunction, device);
}

}  // namespace pagetile::sm80
