#pragma once

// Finds the items of the prefill kernels on the device: whole warps call it.

#include "attention/cuda/sequences.cuh"
#include "attention/prefill_schedule.h"

#include <cstdint>

namespace pagetile::gpu {

struct PrefillItem {
    int32_t batch_idx;
    int32_t kv_head;
    int32_t first_token;  // of the sequence
    int32_t num_tokens;   // of the tile
    Sequence sequence;
    TileKeys keys;
};

// Counts the items of 32 sequences at a time, one a lane, and goes forward only: items are asked for
// in rising order. Keeps little in registers, of which the warp that calls it may have 24.
class PrefillItems {
public:
    // Where a lane is: for a warp that keeps it elsewhere in between.
    struct State {
        int32_t first_sequence;
        uint32_t first_item;
        uint32_t end_of_mine;
    };

    __device__ PrefillItems(const KernelParams& params, const PrefillShape& shape)
        : params_(params), shape_(shape) {
        load();
    }

    __device__ PrefillItems(
        const KernelParams& params, const PrefillShape& shape, const State& state
    )
        : params_(params),
          shape_(shape),
          first_sequence_(state.first_sequence),
          first_item_(state.first_item),
          end_of_mine_(state.end_of_mine) {}

    __device__ State state() const { return {first_sequence_, first_item_, end_of_mine_}; }

    // False: there are only count() items.
    __device__ bool find(uint32_t number, PrefillItem& item) {
        while (number - first_item_ >= __shfl_sync(kWarp, end_of_mine_, 31)) {
            first_item_ += __shfl_sync(kWarp, end_of_mine_, 31);
            first_sequence_ += 32;
            if (first_sequence_ >= params_.shape.batch) {
                end_of_mine_ = 0;
                return false;
            }
            load();
        }
        const uint32_t here = number - first_item_;
        const unsigned behind = __ballot_sync(kWarp, here < end_of_mine_);
        const int lane = __ffs(static_cast<int>(behind)) - 1;
        const uint32_t begin = __shfl_sync(kWarp, end_of_mine_, max(lane - 1, 0));
        item.batch_idx = first_sequence_ + lane;
        item.sequence = make_sequence(params_, fetch_sequence(params_, item.batch_idx));
        const PrefillPlace place = prefill_place(
            shape_, item.sequence.q_len, item.sequence.kv_len, here - (lane > 0 ? begin : 0)
        );
        item.kv_head = place.kv_head;
        item.first_token = place.tile * shape_.tokens;
        item.num_tokens = min(shape_.tokens, item.sequence.q_len - item.first_token);
        item.keys = tile_keys(
            params_.shape,
            item.sequence.q_len,
            item.sequence.kv_len,
            item.first_token,
            item.first_token + item.num_tokens - 1
        );
        return true;
    }

    // Once find() has returned false: of all items.
    __device__ uint32_t count() const { return first_item_; }

    // The same beforehand. Reads the lengths of all sequences.
    __device__ uint32_t count_ahead() const {
        uint32_t sum = 0;
#pragma unroll 4
        for (auto i = static_cast<int32_t>(threadIdx.x % 32); i < params_.shape.batch; i += 32) {
            sum += items_of(i);
        }
        return __reduce_add_sync(kWarp, sum);
    }

private:
    __device__ uint32_t items_of(int32_t batch_idx) const {
        const RawSequence raw = fetch_sequence(params_, batch_idx);
        const int32_t items = prefill_items(shape_, make_sequence(params_, raw).q_len);
        return is_long(params_, raw) ? static_cast<uint32_t>(items) : 0;
    }

    __device__ void load() {
        const auto me = static_cast<int32_t>(threadIdx.x % 32);
        end_of_mine_ = 0;
        if (first_sequence_ + me < params_.shape.batch) {
            end_of_mine_ = items_of(first_sequence_ + me);
        }
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const uint32_t before = __shfl_up_sync(kWarp, end_of_mine_, step);
            end_of_mine_ += me >= step ? before : 0;
        }
    }

    const KernelParams& params_;
    const PrefillShape& shape_;
    int32_t first_sequence_ = 0;
    uint32_t first_item_ = 0;   // of those sequences
    uint32_t end_of_mine_ = 0;  // items up to the lane's sequence, counted from first_item_
};

}  // namespace pagetile::gpu
