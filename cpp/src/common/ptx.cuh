#pragma once

// Instructions that CUDA and CUTLASS 4.2 have no function for, or none that orders memory. One
// instruction each.

#include <cstdint>

namespace pagetile::ptx {

// 2^x within two units in the last place; 2^-inf is 0.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The same, where it stands: never behind an instruction that waits.
__device__ __forceinline__ float exp2_in_place(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Four e4m3 as fp16: the first two and the last two. (CUDA's function takes two in 16 bits, and the
// upper two of a register to it by another instruction.)
__device__ __forceinline__ void widen_e4m3(uint32_t& low, uint32_t& high, uint32_t four) {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; "
        "cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high;}"
        : "=r"(low), "=r"(high)
        : "r"(four));
}

// Copies 16 bytes to shared memory behind the thread's back, or zeroes them and reads nothing if
// is_there is 0. (The source size of CUTLASS's atom, a number in a register, takes six more
// instructions.)
__device__ __forceinline__ void cp_async_16_bytes_if(
    uint32_t is_there, void* to, const void* from
) {
    asm volatile(
        "{.reg .pred ignore; setp.eq.u32 ignore, %2, 0; "
        "cp.async.cg.shared.global [%0], [%1], 16, ignore;}" ::"r"(
            static_cast<uint32_t>(__cvta_generic_to_shared(to))
        ),
        "l"(from),
        "r"(is_there)
        : "memory"
    );
}

// The number itself, as something that is not worked out again where it is used.
__device__ __forceinline__ int keep(int number) {
    asm volatile("" : "+r"(number));
    return number;
}

// Waits until so many threads, whole warps, have come to one of the barriers 0 to 15. 0 is
// __syncthreads'. (CUTLASS's function traps before 9.0.)
__device__ __forceinline__ void sync_at_barrier(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Adds 1 to a counter that goes from 0 to last and then back to 0; returns what it was. What this
// thread has seen written before, is seen by whoever sees the count.
__device__ __forceinline__ uint32_t count_arrival(uint32_t* counter, uint32_t last) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(last)
                 : "memory");
    return before;
}

// Adds 1 to a counter; returns what it was. (Of an addition nvcc 13.0 makes one for the whole warp,
// and waits for it at once; not of this.)
__device__ __forceinline__ uint32_t take_number(uint32_t* counter) {
    uint32_t before;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0xfffffffe;"
                 : "=r"(before)
                 : "l"(counter)
                 : "memory");
    return before;
}

// Where a place in shared memory is in another thread block of the cluster.
__device__ __forceinline__ void* place_in_cluster(void* here, int rank) {
#if __CUDA_ARCH__ >= 900
    void* there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(here), "r"(rank));
    return there;
#else
    return here;
#endif
}

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
