#pragma once

// Items dealt to the lanes of a warp. Where a chain has one KV head (KernelParams::is_dealt) and rows of a
// sequence are one tile, a CTA has one item a sequence, and need not find one behind the other: each lane
// works out another one. Finding them in turn, a warp took 1.8 us an item (270 instructions, H200), in which
// it called for no keys.

#include "attention/sm80/work_list.cuh"

#include <cstdint>

namespace pagetile::sm80 {

// The next items, in shared memory.
template <int kRows>
class DealtItems {
public:
    // By a warp. `first` is the CTA's first item.
    __device__ __forceinline__ void begin(const KernelParams& params, const Item& first) {
        first_ = first.batch_idx + 1 - 32;
        left_ = 0;
        is_dealt_ = params.is_dealt && num_rows(params, first.sequence) <= kRows;
        __syncwarp();
    }

    // Whether the next item is one of these. If not, the list has it, behind those before batch_idx().
    __device__ bool is_dealt() const { return is_dealt_; }

    __device__ int32_t batch_idx() const { return first_; }

    // Copies the next item. False: there is none, or it is no longer dealt.
    __device__ __forceinline__ bool next(
        const KernelParams& params,
        const WorkList<kRows>& list,
        const SequenceWindow& window,
        Item& item
    ) {
        uint32_t left = left_;
        if (left == 0) {
            left = deal(params, list, window);
            if (left == 0) {
                return false;
            }
        }
        const int place = __ffs(static_cast<int>(left)) - 1;
        const auto me = static_cast<int>(threadIdx.x % 32);
        static constexpr int kWords = sizeof(Item) / 4;
        static_assert(kWords <= 32);
        if (me < kWords) {
            reinterpret_cast<uint32_t*>(&item)[me] =
                reinterpret_cast<const uint32_t*>(&items_[place])[me];
        }
        __syncwarp();
        left_ = left & (left - 1);
        return true;
    }

    // False only if the last item has been dealt: cheap to ask.
    __device__ bool may_have_more(const WorkList<kRows>& list) const {
        return left_ != 0 || first_ + 32 <= list.end().batch_idx;
    }

private:
    // A bit for each lane that has an item.
    __device__ __forceinline__ uint32_t
    deal(const KernelParams& params, const WorkList<kRows>& list, const SequenceWindow& window) {
        const auto me = static_cast<int32_t>(threadIdx.x % 32);
        int32_t first = first_;
        uint32_t left = 0;
        while (left == 0 && first + 32 <= list.end().batch_idx) {
            first += 32;
            const Sequence sequence = SequenceWindow::find(params, &window, first + me);
            if (__any_sync(kWarp, num_rows(params, sequence) > kRows)) {
                is_dealt_ = false;
                break;
            }
            left = __ballot_sync(
                kWarp, list.find_tile(params, first + me, sequence, items_[me])
            );
        }
        first_ = first;
        __syncwarp();
        return left;
    }

    int32_t first_;  // the sequence of the first lane
    uint32_t left_;  // a bit for each item that has not been taken
    bool is_dealt_;
    Item items_[32];
};

}  // namespace pagetile::sm80
