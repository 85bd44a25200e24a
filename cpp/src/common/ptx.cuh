#pragma once

// Instructions that CUDA and CUTLASS 4.2 have no function for, or none that orders memory. One
// instruction each.

namespace pagetile::ptx {

// 1 / x within one unit in the last place; subnormals count as 0.
__device__ __forceinline__ float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Lets the next kernel in the stream start, if it was launched as a programmatic dependent.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the kernels that this one depends on have ended and their writes are seen. CUTLASS's
// function lets the compiler move loads above it.
__device__ __forceinline__ void wait_for_dependencies() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace pagetile::ptx
