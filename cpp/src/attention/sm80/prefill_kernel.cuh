#pragma once

// Attention for long queries on every GPU since 8.0: a CTA has 128 packed rows, all of them in
// registers, and streams keys and values past them. docs/kernels/attention_prefill_portable.md tells
// how it works.

#include "attention/sm80/prefill_copies.cuh"
#include "attention/sm80/prefill_queries.cuh"
#include "attention/sm80/prefill_softmax.cuh"
#include "attention/sm80/prefill_values.cuh"

namespace pagetile::sm80 {

template <class Config>
class Prefill {
public:
    using Copies = PrefillCopies<Config>;
    using Queries = PrefillQueries<Config>;
    using Rules = PrefillRules<Config>;
    using SoftmaxOf = PrefillSoftmax<Config>;
    using Values = PrefillValues<Config>;
    using Output = typename SoftmaxOf::Output;
    static constexpr int kKeys = Config::kKeys;
    static constexpr int kQueryBytes = prefill_query_bytes(Config::kHeadDim);

    // The item that the CTA works at and the next one, and where the warp that looks for them is.
    struct Shared {
        PrefillItem items[2];  // kv_head < 0: none
        PrefillItems::State places[32];
        typename Queries::Scales scales;
    };

    static __device__ void run(
        const KernelParams& params, const PrefillSchedule& schedule, char* dynamic_shared
    ) {
        __shared__ Shared shared;
        static_assert(sizeof(Shared) <= kPrefillItemBytes);
        const int warp = __shfl_sync(kWarp, static_cast<int>(threadIdx.x / 32), 0);
        const bool is_scout = warp == 0;
        char* query_rows = dynamic_shared;
        Copies copies(params, dynamic_shared + kQueryBytes);

        if (is_scout) {
            find_first(params, schedule, shared);
        }
        __syncthreads();
        Output out = {};
        SoftmaxOf softmax;
        bool has_former = false;
#pragma unroll 1
        for (int turn = 0;; turn ^= 1) {
            const PrefillItem& item = shared.items[turn];
            PrefillItem& other = shared.items[turn ^ 1];  // the one before, then the one after
            const bool has_item = item.kv_head >= 0;
            if (has_item) {
                Queries::copy(params, item, query_rows);
                cute::cp_async_fence();
                copies.begin(item);
            }
            if (has_former) {
                Values::write(params, other, softmax, out);
            }
            if (!has_item) {
                break;
            }
            has_former = true;
            cute::cp_async_wait<1>();  // the queries are there, the keys may be on their way
            __syncwarp();
            Queries queries;
            queries.load(params, item, query_rows, shared.scales);
            softmax.begin(out);
            const uint32_t claim =
                attend(params, schedule, item, queries, shared.scales, copies, softmax, out);
            if (is_scout) {
                find_next(params, schedule, shared, claim, other);
            }
            softmax.finish();
            __syncthreads();  // all has been read, and the next item is known
        }
    }

private:
    static __device__ __forceinline__ uint32_t ask(const PrefillSchedule& schedule) {
        return threadIdx.x == 0 ? ptx::take_number(schedule.next_item) : 0;
    }

    static __device__ __noinline__ void find_first(
        const KernelParams& params, const PrefillSchedule& schedule, Shared& shared
    ) {
        const uint32_t claim = ask(schedule);
        PrefillItems items(params, schedule.shape);
        find(schedule, items, shared, claim, shared.items[0]);
    }

    static __device__ __noinline__ void find_next(
        const KernelParams& params,
        const PrefillSchedule& schedule,
        Shared& shared,
        uint32_t claim,
        PrefillItem& item
    ) {
        PrefillItems items(params, schedule.shape, shared.places[threadIdx.x % 32]);
        find(schedule, items, shared, claim, item);
    }

    // By the scout. Each CTA's last claim is behind the last item; the last of those makes the
    // counter 0 again.
    static __device__ __forceinline__ void find(
        const PrefillSchedule& schedule,
        PrefillItems& items,
        Shared& shared,
        uint32_t claim,
        PrefillItem& to
    ) {
        claim = __shfl_sync(kWarp, claim, 0);
        PrefillItem item = {};
        if (!items.find(claim, item)) {
            item.kv_head = -1;
            if (threadIdx.x % 32 == 0 && claim == items.count() + gridDim.x - 1) {
                *schedule.next_item = 0;
            }
        }
        shared.places[threadIdx.x % 32] = items.state();
        if (threadIdx.x % 32 == 0) {
            to = item;
        }
    }

    // All tiles of an item. The scout asks for the next item before the last one, and has the answer
    // when it is needed.
    static __device__ __forceinline__ uint32_t attend(
        const KernelParams& params,
        const PrefillSchedule& schedule,
        const PrefillItem& item,
        const Queries& queries,
        const typename Queries::Scales& scales,
        Copies& copies,
        SoftmaxOf& softmax,
        Output& out
    ) {
        int tile = Copies::first_tile(item);
        uint32_t claim = 0;
        if (Copies::end_tile(item) - tile < 2) {
            claim = ask(schedule);
        }
        const bool transforms =
            params.transforms || (Config::kFloat8 && !are_positive(params, scales));
        const auto factor = [&](int n, int i) {
            const float of_row = Queries::scale_of(params, scales, n, i);
            return transforms ? 1.0f : of_row;
        };
#pragma unroll 1
        for (; tile < Copies::end_tile(item); ++tile) {
            // What the item says is read before the wait. Keys that all rows see need no mask.
            const bool is_boundary =
                tile * kKeys < item.keys.all_begin || (tile + 1) * kKeys > item.keys.all_end;
            const char* k_tile = copies.wait_for_keys(item, tile);
            const int first_key = tile * kKeys;
            if (Copies::end_tile(item) - tile == 2) {
                claim = ask(schedule);
            }

            typename Queries::Scores scores;
            queries.multiply_keys(scores, k_tile);
            if (transforms) [[unlikely]] {
                Rules::transform(params, item, scales, first_key, scores);
            }
            if (is_boundary) [[unlikely]] {
                Rules::mask(params, item, first_key, scores);
            }
            char* v_tile = copies.wait_for_values(item, tile);
            if (is_boundary) [[unlikely]] {
                const bool rows_differ =
                    item.keys.all_begin > item.keys.first || item.keys.all_end < item.keys.end;
                if (rows_differ) {
                    Values::take_non_finite(params, item, first_key, v_tile, out);
                }
            }
            add_values<0>(v_tile, scores, factor, softmax, out);
        }
        return claim;
    }

    // Some keys at a time, from step s on. (No loop: nvcc 13.0 does not unroll this one on 8.0, where fp8
    // is widened by several instructions, and scores would lie in local memory.)
    template <int s, class Factor>
    static __device__ __forceinline__ void add_values(
        const char* v_tile,
        const typename Queries::Scores& scores,
        const Factor& factor,
        SoftmaxOf& softmax,
        Output& out
    ) {
        static constexpr int kSteps = SoftmaxOf::kSteps;
        typename SoftmaxOf::Weights weights[kSteps];
        softmax.template weigh<s>(scores, weights, out, factor);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            Values::multiply(v_tile, (s * kSteps + i) * 16, weights[i], out);
        }
        if constexpr ((s + 1) * kSteps * 16 < kKeys) {
            add_values<s + 1>(v_tile, scores, factor, softmax, out);
        }
    }

    static __device__ __forceinline__ bool are_positive(
        const KernelParams& params, const typename Queries::Scales& scales
    ) {
        bool positive = true;
#pragma unroll
        for (int n = 0; n < Config::kRowSteps; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                positive = positive && Queries::scale_of(params, scales, n, half) > 0.0f;
            }
        }
        return __all_sync(kWarp, positive);
    }
};

// The code's own architecture.
#if defined(__CUDA_ARCH__)
inline constexpr int kPrefillArch = __CUDA_ARCH__;
#else
inline constexpr int kPrefillArch = 900;  // parsed for the host, never run there
#endif

// Its name, and so the kernel's, is the same for all architectures.
template <class Math, class Stored, int kHeadDim, int kHeadDimV>
struct PrefillInstance {
    using Config = PrefillConfig<Math, Stored, kHeadDim, kHeadDimV, kPrefillArch>;
    static constexpr int kThreads = Config::kThreads;
    static constexpr int kCtas = Config::kTile.ctas;
};

template <class Instance>
__global__ void __launch_bounds__(Instance::kThreads, Instance::kCtas) prefill_kernel(
    const __grid_constant__ KernelParams params, const __grid_constant__ PrefillSchedule schedule
) {
    extern __shared__ __align__(128) char prefill_shared[];
    Prefill<typename Instance::Config>::run(params, schedule, prefill_shared);
}

}  // namespace pagetile::sm80
