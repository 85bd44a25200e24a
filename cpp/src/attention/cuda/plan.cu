// The plan, on the device: one CTA, a thread for each sequence of a round. Writes what plan_on_host
// writes, byte for byte.

#include "attention/cuda/attention_gpu.h"
#include "attention/plan_cuts.h"
#include "common/cuda.h"
#include "common/ptx.cuh"

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

namespace pagetile::gpu {
namespace {

constexpr int kThreads = 512;  // more would leave each too few registers

struct AddTotals {
    __device__ PlanTotals operator()(const PlanTotals& a, const PlanTotals& b) const {
        return add_totals(a, b);
    }
};

struct LongerLane {
    __device__ int64_t operator()(int64_t a, int64_t b) const { return larger_of(a, b); }
};

using ReduceTotals = cub::BlockReduce<PlanTotals, kThreads>;
using ReduceTimes = cub::BlockReduce<int64_t, kThreads>;
using ScanCosts = cub::BlockScan<int64_t, kThreads>;

struct SharedStorage {
    union {
        ReduceTotals::TempStorage totals;
        ReduceTimes::TempStorage times;
        ScanCosts::TempStorage costs;
    } cub;

    PlanTotals totals;
    int64_t slowest;
    int32_t best_pieces;
    int32_t prefill_ctas;
    int32_t tile_units[kMaxLanes];  // of each tile, where there are no more than lanes
    int64_t moved[kMaxLanes];
    alignas(16) LaneWork work[kMaxLanes];
};

class Planner {
public:
    __device__ Planner(const PlanKernelParams& params, SharedStorage& shared)
        : params_(params), shape_(params.shape), shared_(shared) {}

    __device__ void run() {
        sum_totals();
        const SmShare share = share_sms(shape_, shared_.totals);
        shape_.lanes = share.lanes;
        if (threadIdx.x == 0) {
            shared_.prefill_ctas = share.prefill_ctas;
        }
        if (shape_.piece_units > 0) {
            cut_line(Cut::kPieces);
            return;
        }
        const bool may_cut_evenly = shape_.max_splits == 0 || shape_.max_splits > 2;
        const int64_t even_time =
            fair_share(shape_, shared_.totals, Cut::kEven) + 2 * shape_.split_cost;
        if (shared_.totals.tiles > shape_.lanes) {
            if (cut_line(Cut::kWhole) > even_time && may_cut_evenly) {
                cut_line(Cut::kEven);
            }
            return;
        }
        const int32_t best = choose_pieces();
        if (may_cut_evenly && even_time < dealt_time(shape_, shared_.totals.max_units, best)) {
            cut_line(Cut::kEven);
            return;
        }
        deal(best);
    }

private:
    __device__ PlanLengths lengths(int32_t batch_idx) const {
        if (batch_idx >= shape_.batch) {
            return {};
        }
        return plan_lengths(
            shape_, params_.cu_seqlens_q, params_.seqused_k, params_.cu_seqlens_k, batch_idx
        );
    }

    // Calls visit(batch_idx, lengths, sum of what count() says of all sequences before), for every
    // sequence, each by a thread of its own.
    template <class Count, class Visit>
    __device__ void for_each_sequence(const Count& count, const Visit& visit) {
        int64_t before = 0;
        for (int32_t round = 0; round < shape_.batch; round += kThreads) {
            const int32_t b = round + static_cast<int32_t>(threadIdx.x);
            const PlanLengths of_b = lengths(b);
            int64_t in_round = 0;
            int64_t of_round = 0;
            __syncthreads();  // the last round has been read
            ScanCosts(shared_.cub.costs).ExclusiveSum(count(of_b), in_round, of_round);
            if (of_b.q_len > 0) {
                visit(b, of_b, before + in_round);
            }
            before += of_round;
        }
    }

    __device__ void sum_totals() {
        PlanTotals mine = {};
        for (int32_t b = static_cast<int32_t>(threadIdx.x); b < shape_.batch; b += kThreads) {
            mine = add_totals(mine, sequence_totals(shape_, lengths(b)));
        }
        const PlanTotals sum = ReduceTotals(shared_.cub.totals).Reduce(mine, AddTotals());
        if (threadIdx.x == 0) {
            shared_.totals = sum;
        }
        __syncthreads();
    }

    __device__ void clear() {
        const auto lane = static_cast<int32_t>(threadIdx.x);
        if (lane < shape_.lanes) {
            clear_lane(shape_, shared_.work, lane);
            shared_.moved[lane] = shared_.totals.cost;
        }
        __syncthreads();
    }

    // Returns the time of the slowest lane, in units.
    __device__ int64_t cut_line(Cut cut) {
        clear();
        const int64_t share = fair_share(shape_, shared_.totals, cut);
        for_each_sequence(
            [&](PlanLengths of_b) { return sequence_totals(shape_, of_b).cost; },
            [&](int32_t b, PlanLengths of_b, int64_t first) {
                cut_sequence(shape_, cut, share, first, b, of_b, shared_.work, shared_.moved);
            }
        );
        __syncthreads();
        const auto lane = static_cast<int32_t>(threadIdx.x);
        int64_t time = 0;
        if (lane < shape_.lanes) {
            const int64_t end =
                lane + 1 < shape_.lanes ? shared_.moved[lane + 1] : shared_.totals.cost;
            time = end - shared_.moved[lane];
        }
        const int64_t slowest = ReduceTimes(shared_.cub.times).Reduce(time, LongerLane());
        if (threadIdx.x == 0) {
            shared_.slowest = slowest;
        }
        __syncthreads();
        return shared_.slowest;
    }

    // A thread tries each number of pieces of the largest tile.
    __device__ int32_t choose_pieces() {
        const auto num_tiles = static_cast<int32_t>(shared_.totals.tiles);
        for_each_sequence(
            [&](PlanLengths of_b) {
                return static_cast<int64_t>(num_row_tiles(shape_, of_b.q_len)) *
                       shape_.heads_per_chain;
            },
            [&](int32_t, PlanLengths of_b, int64_t first) {
                auto tile = static_cast<int32_t>(first);
                for (int32_t head = 0; head < shape_.heads_per_chain; ++head) {
                    for (int32_t m = 0; m < num_row_tiles(shape_, of_b.q_len); ++m) {
                        const UnitSpan span = tile_units(shape_, of_b.q_len, of_b.kv_len, m);
                        shared_.tile_units[tile++] = span.end - span.begin;
                    }
                }
            }
        );
        __syncthreads();
        const int32_t max_units = shared_.totals.max_units;
        const int32_t pieces = static_cast<int32_t>(threadIdx.x) + 1;
        int64_t key = INT64_MIN;  // the shortest time, and of equals the fewest pieces, is largest
        if (pieces <= most_pieces(shape_)) {
            int64_t used = 0;
            for (int32_t tile = 0; tile < num_tiles && used <= shape_.lanes; ++tile) {
                used += dealt_pieces(shared_.tile_units[tile], max_units, pieces);
            }
            if (used <= shape_.lanes) {
                key = -(dealt_time(shape_, max_units, pieces) * kThreads + pieces);
            }
        }
        const int64_t best = ReduceTimes(shared_.cub.times).Reduce(key, LongerLane());
        if (threadIdx.x == 0) {
            shared_.best_pieces = static_cast<int32_t>(-best % kThreads);
        }
        __syncthreads();
        return shared_.best_pieces;
    }

    __device__ void deal(int32_t best) {
        clear();
        const int32_t max_units = shared_.totals.max_units;
        for_each_sequence(
            [&](PlanLengths of_b) {
                return static_cast<int64_t>(dealt_lanes(shape_, max_units, best, of_b));
            },
            [&](int32_t b, PlanLengths of_b, int64_t lane) {
                deal_sequence(
                    shape_, max_units, best, static_cast<int32_t>(lane), b, of_b, shared_.work
                );
            }
        );
    }

    const PlanKernelParams& params_;
    PlanShape shape_;  // with the lanes that have work
    SharedStorage& shared_;
};

__global__ void __launch_bounds__(kThreads, 1) plan_kernel(
    const __grid_constant__ PlanKernelParams params
) {
    __shared__ SharedStorage shared;
    if (params.next_waits) {
        ptx::launch_dependents();
    }
    if (threadIdx.x < params.shape.lanes) {
        clear_lane(params.shape, shared.work, static_cast<int32_t>(threadIdx.x));
    }
    shared.prefill_ctas = params.shape.num_sms;
    __syncthreads();
    if (params.shape.batch > 0) {
        Planner(params, shared).run();
    }
    __syncthreads();
    if (threadIdx.x < params.shape.lanes) {
        const auto lane = static_cast<int32_t>(threadIdx.x);
        const int32_t b = shared.work[lane].begin.batch_idx;
        PlanLengths lengths = {};
        if (b < params.shape.batch) {
            lengths = plan_lengths(
                params.shape, params.cu_seqlens_q, params.seqused_k, params.cu_seqlens_k, b
            );
        }
        work_out_first(params.shape, shared.work[lane], lane, lengths);
    }
    __syncthreads();
    // Whoever waits for this kernel waits for all before it, too.
    if (params.pdl) {
        ptx::wait_for_dependencies();
    }
    const auto* from = reinterpret_cast<const int4*>(shared.work);
    const int32_t count =
        params.shape.lanes * static_cast<int32_t>(sizeof(LaneWork) / sizeof(int4));
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < count; i += kThreads) {
        reinterpret_cast<int4*>(params.plan)[i] = from[i];
    }
    if (params.shape.num_sms > 0 && threadIdx.x == 0) {
        *reinterpret_cast<PlanTail*>(params.plan + params.shape.lanes) = {shared.prefill_ctas, {}};
    }
}

}  // namespace

void launch_plan(const PlanKernelParams& params, Device device, cudaStream_t stream) {
    cudaLaunchAttribute attribute = programmatic_launch();
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(1);
    config.blockDim = dim3(kThreads);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = params.pdl ? 1 : 0;
    check_launch(cudaLaunchKernelEx(&config, plan_kernel, params), "make_plan", device);
}

}  // namespace pagetile::gpu
