#pragma once

// Attention at the speed of the bytes, for short queries: each warp streams its share of the keys
// through a ring of its own and multiplies them as they come; nothing in the loop waits for another
// warp. docs/kernels/attention_decode.md tells how it works and what it was measured to do.

#include "attention/sm80/merge.cuh"
#include "attention/sm80/queries.cuh"
#include "attention/sm80/softmax.cuh"

#include <cute/arch/cluster_sm90.hpp>

namespace pagetile::sm80 {

// One instance of the kernel. Stored is Math, or an fp8 type with fp16 as Math. kBeside: it runs beside
// a kernel that prefills, and there are gpu::PageBoxes.
template <
    class Math_,
    class Stored_,
    int kHeadDim_,
    int kHeadDimV_,
    int kRows_,
    int kArch,
    bool kBeside_ = false>
struct Config {
    using Math = Math_;
    using Stored = Stored_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDimV_;
    static constexpr int kRows = kRows_;
    static constexpr int kElementBytes = sizeof(Stored);
    static constexpr bool kBeside = kBeside_;
    static constexpr TileShape kShape =
        kBeside ? tile_shape_beside(kHeadDim)
                : tile_shape(kHeadDim, kHeadDimV, kElementBytes, kRows, kArch);
    static constexpr bool kMeetsInClusters = meets_in_clusters(kShape, kArch);
    static_assert(kShape.rows() == kRows && kShape.stages > 0);
    using KLayout = RowLayout<kShape.keys, kHeadDim * kElementBytes>;
    using VLayout = RowLayout<kShape.keys, kHeadDimV * kElementBytes>;
};

template <class Config>
class SplitKv {
public:
    static constexpr TileShape kShape = Config::kShape;
    using Frag = Fragments<Config>;
    using Rules = ScoreRules<Config>;
    using SoftmaxOf = Softmax<Config>;
    using MergeOf = Merge<Config>;
    using RingOf = KvRing<Config>;
    using List = WorkList<Config::kRows>;
    static constexpr int kRingBytes = kShape.stages * RingOf::kStageBytes;
    static constexpr int kTilesPerUnit = kPlanKeys / kShape.keys;
    static constexpr bool kDeals = RingOf::kDeals;

    // The warp that looks for the next item: the last one, which has the fewest keys.
    static constexpr int kScout = kShape.num_threads() / 32 - 1;

    // What the CTA's warps share besides rings and results: the item they work at and the next one.
    struct Shared {
        List ahead[kShape.num_threads() / 32];  // each warp's own: where its copies are
        List list;                              // the scout's: where the work is
        SequenceWindow window;
        DealtItems<Config::kRows> dealt;
        Item items[2];
        bool has_next;
    };

    // boxes: of an instance beside another kernel.
    static __device__ void run(
        const KernelParams& params, const gpu::PageBoxes* boxes, char* dynamic_shared
    ) {
        __shared__ Shared shared;
        static_assert(sizeof(Shared) <= list_bytes(kShape));
        const int warp = __shfl_sync(kWarp, static_cast<int>(threadIdx.x / 32), 0);
        const int key_warp = warp / kShape.row_warps;
        const int row_warp = warp % kShape.row_warps;
        uint32_t chain;
        auto lane = static_cast<int32_t>(params.chains(chain, static_cast<uint32_t>(blockIdx.x)));
        const bool in_cluster = Config::kMeetsInClusters && params.in_clusters;
        if (in_cluster) {
            cute::cluster_arrive_relaxed();
            chain = blockIdx.x / kClusterLanes;
            lane = static_cast<int32_t>(blockIdx.x % kClusterLanes);
        }
        auto* queries_of = reinterpret_cast<QueryTile<Config>*>(
            dynamic_shared + kShape.key_warps * kRingBytes
        );  // of the item and the next one
        auto& storage = *reinterpret_cast<typename MergeOf::Storage*>(queries_of + 2);
        auto& meeting = *reinterpret_cast<typename MergeOf::Meeting*>(&storage + 1);

        if (params.plan_waits) {
            ptx::wait_for_dependencies();
        }
        List list;
        NearbySequences nearby;
        bool has_work = list.begin(params, static_cast<int32_t>(chain), lane, nearby);
        if (!has_work) [[unlikely]] {
            has_work = shared.ahead[warp].begin_anew(params, static_cast<int32_t>(chain), lane);
            list = shared.ahead[warp];
            __syncwarp();
        }
        const Item& first = list.item();
        bool has_more = has_work && list.may_have_more();
        RingOf ring(
            params,
            boxes,
            shared.ahead[warp],
            shared.window,
            dynamic_shared + key_warp * kRingBytes,
            key_warp,
            row_warp
        );
        ring.begin(has_work, has_more, first);
        if (has_more) {
            list.store(shared.ahead[warp]);
        }
        if (warp == kScout) {
            shared.items[0] = first;
            if (has_more) {
                list.store(shared.list);
                shared.window.store(nearby);
                if constexpr (kDeals) {
                    shared.dealt.begin(params, first);
                }
            }
        }
        if (params.pdl) {
            ptx::wait_for_dependencies();
            ptx::launch_dependents();
        }
        if (has_work) {
            queries_of[0].load(params, first, static_cast<int>(threadIdx.x), kShape.num_threads());
        }
        cute::cp_async_fence();
        ring.fill();
        cute::cp_async_wait<kShape.stages>();  // the queries are there
        __syncthreads();
        if (in_cluster) {
            cute::cluster_wait();  // all of it runs: its shared memory can be written
        }

        bool has_item = has_work;
        for (int turn = 0; has_item; turn ^= 1) {
            const Item& item = shared.items[turn];
            Queries<Config> queries;
            SoftmaxOf softmax;
            typename SoftmaxOf::Output out = {};
            queries.load(params, item, queries_of[turn], row_warp);
            softmax.begin();
            bool looks = warp == kScout;
            const auto look = [&] {
                if (looks) {
                    has_more = find_next(params, shared, has_more, turn ^ 1, queries_of[turn ^ 1]);
                    looks = false;
                }
            };
            attend(params, item, queries, key_warp, row_warp, ring, softmax, out, look);
            look();  // there was no tile for this warp
            if (warp == kScout) {
                ring.wait_for_others(item);
            }
            softmax.finish();
            MergeOf::leave(storage, key_warp, row_warp, softmax, out);
            const MergeOf merge(params, item, static_cast<int>(chain), storage);
            __syncthreads();
            merge.run(in_cluster ? &meeting : nullptr);
            has_item = shared.has_next;
            if (has_item) {
                __syncthreads();  // the storage is free again
            }
        }
        ring.drain();
        if (params.joins) {
            ptx::wait_for_dependencies();
        }
        if constexpr (Config::kMeetsInClusters) {
            if (in_cluster) {
                cute::cluster_arrive();
                cute::cluster_wait();
                if (has_work) {
                    MergeOf(params, shared.items[0], static_cast<int>(chain), storage)
                        .sum_meeting(meeting);
                }
            }
        }
    }

private:
    // One warp finds the next item while all work at this one, and calls for its queries, in the
    // same cp.async group as the next tile of its ring. Whether there may be more behind it.
    static __device__ __noinline__ bool find_next(
        const KernelParams& params,
        Shared& shared,
        bool has_more,
        int turn,
        QueryTile<Config>& queries
    ) {
        Item& item = shared.items[turn];
        const bool has_item = has_more && find_item(params, shared, item);
        shared.has_next = has_item;
        if (!has_item) {
            return false;
        }
        queries.load(params, item, static_cast<int>(threadIdx.x % 32), 32);
        return kDeals && shared.dealt.is_dealt() ? shared.dealt.may_have_more(shared.list)
                                                 : shared.list.may_have_more();
    }

    static __device__ __forceinline__ bool find_item(
        const KernelParams& params, Shared& shared, Item& item
    ) {
        if constexpr (kDeals) {
            if (shared.dealt.is_dealt() &&
                shared.dealt.next(params, shared.list, shared.window, item)) {
                return true;
            }
            if (shared.dealt.is_dealt()) {
                return false;
            }
        }
        do {
            if (!shared.list.next(params, &shared.window)) {
                return false;
            }
        } while (kDeals && shared.list.item().batch_idx < shared.dealt.batch_idx());
        item = shared.list.item();
        __syncwarp();
        return true;
    }

    // Between the first tile and the copies that take its place: look().
    template <class Look>
    static __device__ __forceinline__ void attend(
        const KernelParams& params,
        const Item& item,
        const Queries<Config>& queries,
        int key_warp,
        int row_warp,
        RingOf& ring,
        SoftmaxOf& softmax,
        typename SoftmaxOf::Output& out,
        Look look
    ) {
        // Keys that all rows see need no mask.
        const int all_begin = item.keys.all_begin;
        const int all_end = item.keys.all_end;
        const bool rows_differ = all_begin > item.keys.first || all_end < item.keys.end;
        const bool transforms =
            params.transforms || (Config::kElementBytes == 1 && !are_positive(queries));

        const int first_of_keys = ptx::keep(Frag::first_of_keys(ring.address()));
        const int values = ring.address() + kShape.keys * RingOf::kRowBytesK;
        const int first_of_values = Config::kBeside ? Frag::first_of_values(values)
                                                    : ptx::keep(Frag::first_of_values(values));
        const int end_tile = item.part.unit_end * kTilesPerUnit;
        for (int tile = first_tile<kShape>(item.part.unit_begin * kTilesPerUnit, key_warp);
             tile < end_tile;
             tile += kShape.key_warps) {
            const int at = ring.wait();
            const int k_tile = first_of_keys + at;
            const int v_tile = first_of_values + at;
            const int first_key = tile * kShape.keys;

            typename SoftmaxOf::Scores scores = {};
#pragma unroll
            for (int s = 0; s < SoftmaxOf::kKeySteps; ++s) {
                Frag::multiply_keys(scores[s], k_tile, s * 16, queries.q);
            }
            if (transforms) [[unlikely]] {
                Rules::transform(params, item, queries, row_warp, first_key, scores);
            }
            const bool is_boundary = first_key < all_begin || first_key + kShape.keys > all_end;
            if (is_boundary) [[unlikely]] {
                Rules::mask(params, item, row_warp, first_key, scores);
            }
            uint32_t weights[SoftmaxOf::kKeySteps][kShape.row_steps][2];
            softmax.step(scores, out, weights, [&](int n, int i) {
                const float factor =
                    Config::kElementBytes == 1 ? queries.scale[n][i] : params.scale;
                return transforms ? 1.0f : factor;
            });
            if (is_boundary && rows_differ && has_non_finite(v_tile)) [[unlikely]] {
                multiply_values_apart(params, item, row_warp, first_key, v_tile, weights, out);
            } else {
                multiply_values(v_tile, weights, out);
            }
            look();
            ring.release();
        }
    }

    static __device__ __forceinline__ bool are_positive(const Queries<Config>& queries) {
        bool positive = true;
#pragma unroll
        for (int n = 0; n < kShape.row_steps; ++n) {
            positive = positive && queries.scale[n][0] > 0.0f && queries.scale[n][1] > 0.0f;
        }
        return __all_sync(kWarp, positive);
    }

    static __device__ __forceinline__ void multiply_values(
        int v_tile,
        const uint32_t (&weights)[SoftmaxOf::kKeySteps][kShape.row_steps][2],
        typename SoftmaxOf::Output& out
    ) {
#pragma unroll
        for (int s = 0; s < SoftmaxOf::kKeySteps; ++s) {
            Frag::for_each_value(v_tile, s * 16, [&](int step, const uint32_t (&a)[4]) {
#pragma unroll
                for (int n = 0; n < kShape.row_steps; ++n) {
                    Frag::multiply(out[n][step], a, weights[s][n]);
                }
            });
        }
    }

    // Whether a tile of values holds an infinity or a NaN, for which 0 times it is not 0.
    static __device__ __forceinline__ bool has_non_finite(int v_tile) {
        constexpr uint32_t kExponents = MathType<typename Config::Math>::kExponents;
        bool found = false;
#pragma unroll 1
        for (int key = 0; key < kShape.keys; key += 16) {
            Frag::for_each_value(v_tile, key, [&](int, const uint32_t (&a)[4]) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    found = found || (a[i] & kExponents & 0xffff) == (kExponents & 0xffff) ||
                            (a[i] & kExponents & 0xffff0000) == (kExponents & 0xffff0000);
                }
            });
        }
        return __any_sync(kWarp, found);
    }

    // A key that a row may not see can hold a NaN, and that must not meet the row even with weight 0:
    // each row by itself, over the keys that it sees. Only for tiles that need it.
    static __device__ __forceinline__ void multiply_values_apart(
        const KernelParams& params,
        const Item& item,
        int row_warp,
        int first_key,
        int v_tile,
        const uint32_t (&weights)[SoftmaxOf::kKeySteps][kShape.row_steps][2],
        typename SoftmaxOf::Output& out
    ) {
        const int t = static_cast<int>(threadIdx.x % 4);
#pragma unroll
        for (int n = 0; n < kShape.row_steps; ++n) {
#pragma unroll 1
            for (int row = 0; row < 8; ++row) {
                const int32_t in_tile = Rules::first_row_of(item, row_warp) + n * 8 + row;
                const KeyRange keys = visible_keys(
                    params.shape,
                    item.sequence.q_len,
                    item.sequence.kv_len,
                    find_row(params, item, in_tile).token
                );
#pragma unroll
                for (int s = 0; s < SoftmaxOf::kKeySteps; ++s) {
                    // a[0], a[1] hold keys 2t, 2t + 1 in their two halves, a[2], a[3] 8 later
                    const auto seen = [&](int key) {
                        const auto bits = [&](int k) {
                            return k >= keys.begin && k < keys.end ? 0xffffu : 0u;
                        };
                        return bits(key) | bits(key + 1) << 16;
                    };
                    const uint32_t early = seen(first_key + s * 16 + 2 * t);
                    const uint32_t late = seen(first_key + s * 16 + 2 * t + 8);
                    Frag::for_each_value(v_tile, s * 16, [&](int step, const uint32_t (&a)[4]) {
                        const uint32_t visible[4] = {
                            a[0] & early, a[1] & early, a[2] & late, a[3] & late
                        };
                        float sum[4] = {};
                        Frag::multiply(sum, visible, weights[s][n]);
                        if (row / 2 == t) {
#pragma unroll
                            for (int i = 0; i < 4; ++i) {
                                if (i % 2 == row % 2) {
                                    out[n][step][i] += sum[i];
                                }
                            }
                        }
                    });
                }
            }
        }
    }
};

#if defined(__CUDA_ARCH__)
inline constexpr int kDeviceArch = __CUDA_ARCH__;
#else
inline constexpr int kDeviceArch = 900;  // parsed for the host, never run there
#endif

template <class Math, class Stored, int kHeadDim, int kHeadDimV, int kRows>
__global__ void __launch_bounds__(256, 1) split_kv_kernel(
    const __grid_constant__ KernelParams params
) {
    extern __shared__ __align__(128) char shared[];
    using ThisConfig = Config<Math, Stored, kHeadDim, kHeadDimV, kRows, kDeviceArch>;
    SplitKv<ThisConfig>::run(params, nullptr, shared);
}

// The same beside a kernel that prefills: tile_shape_beside(). For nothing but Hopper.
template <class Math, int kHeadDim>
__global__ void
__launch_bounds__(tile_shape_beside(kHeadDim).num_threads(), 1) split_kv_beside_kernel(
    const __grid_constant__ KernelParams params, const __grid_constant__ gpu::PageBoxes boxes
) {
    if constexpr (kDeviceArch == 900) {
        extern __shared__ __align__(
            ring_alignment(tile_shape_beside(kHeadDim))
        ) char shared_beside[];
        using ThisConfig = Config<Math, Math, kHeadDim, kHeadDim, 8, kDeviceArch, true>;
        SplitKv<ThisConfig>::run(params, &boxes, shared_beside);
    }
}

}  // namespace pagetile::sm80
