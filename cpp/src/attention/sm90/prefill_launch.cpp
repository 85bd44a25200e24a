#include "attention/sm90/prefill_launch.h"

#include "attention/cuda/instance_index.h"
#include "common/cuda.h"

#include <atomic>

namespace pagetile::sm90 {
namespace {

constexpr const char* kFunction = "paged_attention";
constexpr int kVariants = 8;  // of a type and a pair of head dimensions
constexpr int kInstances = 2 * gpu::kHeadDimPairs * kVariants;

// Whether an instance may have its shared memory on a device, asked for once.
std::atomic<bool>& is_ready(
    DType dtype, HeadDims dims, bool transforms, Loading loading, Device device
) {
    static std::atomic<bool> ready[kMaxDevices][kInstances];
    check_device_index(device, kFunction);
    const int instance = gpu::index_of(dtype) * gpu::kHeadDimPairs + gpu::index_of(dims);
    const int variant = 2 * static_cast<int>(loading) + (transforms ? 1 : 0);
    return ready[device.index][kVariants * instance + variant];
}

}  // namespace

bool can_widen(DType q_dtype, HeadDims dims, bool transforms) {
    const bool is_built =
        dims == HeadDims{128, 128} || (dims == HeadDims{64, 64} && q_dtype == DType::kBFloat16);
    return is_built && !is_float8(q_dtype) && !transforms;
}

void launch_prefill(
    PrefillParams& params,
    DType out_dtype,
    HeadDims dims,
    int num_ctas,
    Device device,
    cudaStream_t stream
) {
    const bool transforms = params.call.transforms;
    const PrefillInstance instance = out_dtype == DType::kFloat16
                                         ? prefill_half_t(dims, transforms, params.loading)
                                         : prefill_bfloat16_t(dims, transforms, params.loading);
    std::atomic<bool>& ready = is_ready(out_dtype, dims, transforms, params.loading, device);
    if (!ready.load(std::memory_order_acquire)) {
        const RelaxedCapture relaxed(kFunction);
        check_launch(
            cudaFuncSetAttribute(
                instance.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, instance.shared_memory
            ),
            kFunction,
            device
        );
        ready.store(true, std::memory_order_release);
    }
    cudaLaunchAttribute attribute = programmatic_launch();
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(num_ctas));
    config.blockDim = dim3(static_cast<unsigned>(instance.tile.num_threads()));
    config.dynamicSmemBytes = static_cast<size_t>(instance.shared_memory);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = params.pdl ? 1 : 0;
    void* arguments[] = {&params};
    check_launch(cudaLaunchKernelExC(&config, instance.kernel, arguments), kFunction, device);
}

}  // namespace pagetile::sm90
