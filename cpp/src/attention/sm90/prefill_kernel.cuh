#pragma once

// Attention at the speed of the tensor cores, for long queries on Hopper: a producer warpgroup brings
// pages by TMA, consumer warpgroups multiply. docs/kernels/attention_sm90.md tells how it works and
// what it was measured to do.

#include "attention/sm90/consumer.cuh"
#include "attention/sm90/fp8_consumer.cuh"
#include "attention/sm90/producer.cuh"
#include "attention/sm90/row_producer.cuh"
#include "attention/sm90/transposing_producer.cuh"
#include "attention/sm90/widening_producer.cuh"

#include <cutlass/arch/reg_reconfig.h>

#include <cstdint>
#include <type_traits>

namespace pagetile::sm90 {

template <class Config>
__device__ __forceinline__ void begin_barriers(Shared<Config>& shared) {
    constexpr int kWarpgroups = Config::kTile.warpgroups;
    constexpr int kBringKeys =
        Config::kWidens || Config::kLoadsRows ? 2 : 1;  // TMA counts for itself
    constexpr int kBringValues = Config::kLentGranules > 0 || Config::kTransposes ? 2 : 1;
    if (threadIdx.x == 0) {
        for (int i = 0; i < Config::kTile.stages; ++i) {
            ClusterBarrier::init(&shared.k_full[i], kBringKeys);
            ClusterBarrier::init(&shared.v_full[i], kBringValues);
            ClusterBarrier::init(&shared.v_loaded[i], 1);
            ClusterBarrier::init(&shared.k_free[i], kWarpgroups);
            ClusterBarrier::init(&shared.v_free[i], kWarpgroups);
        }
        for (int i = 0; i < Config::kTile.query_buffers; ++i) {
            ClusterBarrier::init(&shared.q_full[i], 1);
            ClusterBarrier::init(&shared.q_free[i], kWarpgroups);
        }
        for (int i = 0; i < kItems; ++i) {
            ClusterBarrier::init(&shared.item_full[i], 1);
            ClusterBarrier::init(&shared.item_free[i], kLoaders + 4 * kWarpgroups);
            ClusterBarrier::init(&shared.item_begun[i], 1);
        }
        if constexpr (Config::kIsFloat8) {
            for (auto& of_warp : shared.raw.full) {
                for (uint64_t& full : of_warp) {
                    ClusterBarrier::init(&full, 1);
                }
            }
        }
        shared.cuts = {};
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
}

// Uniform for the compiler, too: else every product takes six more instructions.
__device__ __forceinline__ int my_warp() {
    return __shfl_sync(kWarp, static_cast<int>(threadIdx.x / 32), 0);
}

template <class Config>
__device__ __forceinline__ void produce(
    const PrefillParams& params, Shared<Config>& shared, Role role
) {
    using Copier = std::conditional_t<Config::kLoadsRows, RowProducer<Config>, Producer<Config>>;
    using Changer =
        std::conditional_t<Config::kWidens, WideningProducer<Config>, TransposingProducer<Config>>;
    using Loader = std::conditional_t<Config::kIsFloat8, Changer, Copier>;
    switch (role) {
        case Role::kKeys:
            Loader(params, shared).load_keys();
            break;
        case Role::kMoreKeys:
            Loader(params, shared).load_more_keys();
            break;
        case Role::kValues:
            Loader(params, shared).load_values();
            break;
        case Role::kSchedule:
            Scheduler<Config>(params, shared).run();
            break;
    }
}

template <class Element, int kHeadDim, int kHeadDimV, bool kTransforms, Loading kLoading>
__global__ void __launch_bounds__(
    prefill_tile(kHeadDim, kHeadDimV, kTransforms, kLoading).num_threads(), 1
) prefill_kernel(const __grid_constant__ PrefillParams params) {
    using ThisConfig = Config<Element, kHeadDim, kHeadDimV, kTransforms, kLoading>;
    constexpr PrefillTile kTile = ThisConfig::kTile;
    extern __shared__ __align__(1024) char dynamic_shared[];
    auto& shared = *reinterpret_cast<Shared<ThisConfig>*>(dynamic_shared);
    begin_barriers(shared);
    const bool has_work = blockIdx.x < num_ctas_with_work(params);
    if (params.pdl) {
        ptx::wait_for_dependencies();
    }
    ptx::launch_dependents();
    if (!has_work) {
        return;
    }
    if (my_warp() < 4) {
        cutlass::arch::warpgroup_reg_dealloc<producer_registers(kTile, kLoading)>();
        produce(params, shared, static_cast<Role>(my_warp()));
    } else {
        cutlass::arch::warpgroup_reg_alloc<consumer_registers(kTile, kLoading)>();
        using Multiplier = std::
            conditional_t<ThisConfig::kTransposes, Fp8Consumer<ThisConfig>, Consumer<ThisConfig>>;
        Multiplier(params, shared, my_warp() / 4 - 1).run();
    }
}

}  // namespace pagetile::sm90
