#include "attention/sm80/prefill_launch.h"

#include "attention/cuda/instance_index.h"
#include "attention/sm80/prefill_shapes.h"
#include "common/cuda.h"

#include <algorithm>
#include <atomic>

namespace pagetile::sm80 {
namespace {

constexpr const char* kFunction = "paged_attention";

const void* find_instance(DType kv_dtype, HeadDims dims) {
    switch (kv_dtype) {
        case DType::kFloat16:
            return prefill_half_t(dims);
        case DType::kBFloat16:
            return prefill_bfloat16_t(dims);
        case DType::kFloat8E4M3:
            return prefill_float_e4m3_t(dims);
        default:
            return prefill_float_e5m2_t(dims);
    }
}

// What a launch of an instance on a device needs, asked for once.
struct Launch {
    std::atomic<int> threads;  // 0: not asked yet
    std::atomic<int> shared_memory;
    std::atomic<int> ctas;  // that run at a time
};

constexpr int kInstances = gpu::kKvTypes * gpu::kHeadDimPairs;

Launch& launch_of(DType kv_dtype, HeadDims dims, Device device) {
    static Launch launches[kMaxDevices][kInstances];
    check_device_index(device, kFunction);
    const int instance = gpu::index_of(kv_dtype) * gpu::kHeadDimPairs + gpu::index_of(dims);
    return launches[device.index][instance];
}

void prepare(Launch& launch, const void* kernel, HeadDims dims, int element_bytes, Device device) {
    const RelaxedCapture relaxed(kFunction);
    cudaFuncAttributes attributes;
    check_launch(cudaFuncGetAttributes(&attributes, kernel), kFunction, device);
    // The code may be older than the GPU: PTX, compiled by the driver.
    const int arch = attributes.ptxVersion * 10;
    const PrefillTile tile = prefill_tile(dims.k, dims.v, element_bytes, arch);
    const int bytes = prefill_shared_memory(tile, dims.k, dims.v, element_bytes);
    check_launch(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        kFunction,
        device
    );
    int ctas_per_sm = 0;
    check_launch(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(
            &ctas_per_sm, kernel, tile.num_threads(), static_cast<size_t>(bytes)
        ),
        kFunction,
        device
    );
    launch.shared_memory = bytes;
    launch.ctas = std::max(ctas_per_sm, 1) * num_sms_of(device, kFunction);
    launch.threads.store(tile.num_threads(), std::memory_order_release);
}

}  // namespace

int32_t prefill_rows(HeadDims, DType) { return kPrefillRows; }

void launch_prefill(
    const gpu::KernelParams& params,
    const gpu::PrefillSchedule& schedule,
    DType kv_dtype,
    HeadDims dims,
    Device device,
    cudaStream_t stream
) {
    const void* kernel = find_instance(kv_dtype, dims);
    Launch& launch = launch_of(kv_dtype, dims, device);
    if (launch.threads.load(std::memory_order_acquire) == 0) {
        prepare(launch, kernel, dims, static_cast<int>(dtype_size(kv_dtype)), device);
    }
    // More CTAs than this have nothing to do, whatever the lengths are.
    const int64_t most_items =
        (static_cast<int64_t>(params.total_q) / schedule.shape.tokens + params.shape.batch) *
        schedule.shape.num_kv_heads;
    const auto ctas = std::min<int64_t>(launch.ctas.load(std::memory_order_relaxed), most_items);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(ctas));
    config.blockDim = dim3(static_cast<unsigned>(launch.threads.load(std::memory_order_relaxed)));
    config.dynamicSmemBytes =
        static_cast<size_t>(launch.shared_memory.load(std::memory_order_relaxed));
    config.stream = stream;
    void* arguments[] = {
        const_cast<gpu::KernelParams*>(&params), const_cast<gpu::PrefillSchedule*>(&schedule)
    };
    check_launch(cudaLaunchKernelExC(&config, kernel, arguments), kFunction, device);
}

}  // namespace pagetile::sm80
