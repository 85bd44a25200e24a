#pragma once

// What a CTA has to do, one item after the other: it walks its lane of the plan. Whole warps call
// it, and every warp of a CTA comes to the same items.

#include "attention/cuda/sequences.cuh"
#include "attention/dispatch.h"
#include "attention/plan.h"

#include <cstdint>

namespace pagetile::sm80 {

using gpu::KernelParams;
using gpu::kWarp;
using gpu::load_sequence;
using gpu::Sequence;
using gpu::take;
using gpu::token_of;

// Packed rows, below 2^31.
__device__ __forceinline__ int32_t num_rows(const KernelParams& params, const Sequence& sequence) {
    return sequence.q_len * params.shape.group;
}

// A tile of rows, or a piece of one: some of its keys.
struct Item {
    int32_t batch_idx;
    int32_t kv_head;
    int32_t row_tile;
    Sequence sequence;
    TileKeys keys;
    TilePart part;
};

// One sequence for each lane of a warp, in a row.
struct NearbySequences {
    int32_t first;
    Sequence of_lane;

    // Those around where a lane of the plan begins if sequences are alike: read before the plan says
    // where it does begin.
    static __device__ __forceinline__ NearbySequences
    load(const KernelParams& params, int32_t lane) {
        const auto guess =
            static_cast<int32_t>((static_cast<uint32_t>(lane) * params.batch_per_lane) >> 8);
        const auto me = static_cast<int32_t>(threadIdx.x % 32);
        NearbySequences nearby;
        nearby.first = max(min(guess - 8, params.shape.batch - 32), 0);
        nearby.of_lane = load_sequence(params, min(nearby.first + me, params.shape.batch - 1));
        return nearby;
    }
};

// In shared memory, for what comes next: a load from global memory would wait for all the keys and
// values that were called for before it.
struct SequenceWindow {
    static constexpr int kSize = 32;

    int32_t first;
    Sequence sequences[kSize];

    // A sequence, or one without queries if there is none. window: null where it is not there yet.
    static __device__ __forceinline__ Sequence
    find(const KernelParams& params, const SequenceWindow* window, int32_t batch_idx) {
        if (batch_idx >= params.shape.batch) {
            return {0, 0, 0, 0};
        }
        const int32_t place = window != nullptr ? batch_idx - window->first : -1;
        return place >= 0 && place < kSize ? window->sequences[place]
                                           : load_sequence(params, batch_idx);
    }

    // By a warp.
    __device__ void store(const NearbySequences& nearby) {
        first = nearby.first;
        sequences[threadIdx.x % 32] = nearby.of_lane;
        __syncwarp();
    }
};

// Begun in registers. If there is more than the first item, it then lives in shared memory, one for a
// warp: it is asked for the next item once in thousands of instructions and would else hold fifty
// registers.
template <int kRows>
class alignas(16) WorkList {
public:
    // Reads the lane. True: item() is its first item, as the plan worked it out. False: if there is
    // one, begin_anew() finds it.
    __device__ __forceinline__ bool begin(
        const KernelParams& params, int32_t chain, int32_t lane, NearbySequences& nearby
    ) {
        const LaneWork work = load_lane(params, lane);
        nearby = NearbySequences::load(params, lane);
        const int32_t place = work.begin.batch_idx - nearby.first;
        const Sequence sequence = take(nearby.of_lane, place % 32);
        stand_at(work, chain, lane);
        item_ = {
            work.begin.batch_idx,
            work.begin.head * params.shape.chains + chain,
            work.begin.row_tile,
            sequence,
            work.first.keys,
            work.first.part,
        };
        item_.part.unit_end = work.first.item_end;
        rest_ = {work.first.item_end, work.first.part.unit_end};
        has_begun_ = true;
        // The plan may have been made for other lengths.
        return static_cast<uint32_t>(place) < 32 && work.first.q_len == sequence.q_len &&
               work.first.kv_len == sequence.kv_len;
    }

    // In shared memory. False if the lane has no item.
    __device__ __noinline__ bool begin_anew(
        const KernelParams& params, int32_t chain, int32_t lane
    ) {
        WorkList here;
        here.stand_at(load_lane(params, lane), chain, lane);
        here.rest_ = {0, 0};
        here.has_begun_ = false;
        here.item_ = {};
        if (here.at_.batch_idx < params.shape.batch) {
            here.item_.sequence = load_sequence(params, here.at_.batch_idx);
        }
        const bool found = here.find_item(params, nullptr);
        here.store(*this);
        return found;
    }

    // Into shared memory, or from there. The warp meets.
    __device__ __forceinline__ void store(WorkList& shared) const {
        if (threadIdx.x % 32 == 0) {
            shared = *this;
        }
        __syncwarp();
    }

    // The item that next() found.
    __device__ const Item& item() const { return item_; }

    // Where the lane ends.
    __device__ const Position& end() const { return end_; }

    // What the lane has of a sequence behind its first one, whose rows are one tile, if a chain has one KV
    // head. False: it has nothing.
    __device__ __forceinline__ bool find_tile(
        const KernelParams& params, int32_t batch_idx, const Sequence& sequence, Item& item
    ) const {
        const Position at = {batch_idx, 0, 0, 0};
        if (sequence.q_len == 0 || is_behind(at, end_)) {
            return false;
        }
        const TileKeys keys =
            tile_keys(params.shape, sequence.q_len, sequence.kv_len, 0, sequence.q_len - 1);
        const TilePart part = tile_part(params.shape, end_, cuts_, lane_, at, keys);
        item = {batch_idx, chain_, 0, sequence, keys, part};
        return true;
    }

    // False only if the last item has been found: cheap to ask.
    __device__ bool may_have_more() const {
        return rest_.begin < rest_.end || !is_same_tile(at_, end_);
    }

    // False when there is no more. In shared memory. A function of its own: it is seldom called, and
    // instructions that are jumped over are fetched, too.
    __device__ __noinline__ bool next(const KernelParams& params, const SequenceWindow* window) {
        WorkList here = *this;
        const bool found = here.find_item(params, window);
        __syncwarp();  // all have read it
        here.store(*this);
        return found;
    }

private:
    static __device__ __forceinline__ LaneWork load_lane(const KernelParams& params, int32_t lane) {
        LaneWork work;
        const auto* from = reinterpret_cast<const int4*>(params.plan + lane);
        auto* to = reinterpret_cast<int4*>(&work);
#pragma unroll
        for (size_t i = 0; i < sizeof(LaneWork) / sizeof(int4); ++i) {
            to[i] = from[i];
        }
        return work;
    }

    __device__ __forceinline__ void stand_at(const LaneWork& work, int32_t chain, int32_t lane) {
        at_ = work.begin;
        end_ = work.end;
        cuts_ = work.cuts;
        chain_ = chain;
        lane_ = lane;
    }

    __device__ void end_item(const KernelParams& params) {
        rest_.begin = item_end(params.shape, rest_.begin, rest_.end);
        item_.part.unit_end = rest_.begin;
    }

    __device__ bool find_item(const KernelParams& params, const SequenceWindow* window) {
        if (params.shape.piece_units > 0 && rest_.begin < rest_.end) {
            item_.part.piece += 1;
            item_.part.unit_begin = rest_.begin;
            item_.part.unit_end = rest_.end;
        } else {
            do {
                if (!next_tile(params, window)) {
                    return false;
                }
            } while (item_.part.pieces < 0);
        }
        end_item(params);
        return true;
    }

    // The first sequence from `batch_idx` on that has queries; behind the end where none has.
    __device__ void find_sequence(
        const KernelParams& params, const SequenceWindow* window, int32_t batch_idx
    ) {
        const int32_t end = min(end_.batch_idx + 1, params.shape.batch);
        const auto me = static_cast<int32_t>(threadIdx.x % 32);
        for (; batch_idx < end; batch_idx += 32) {
            Sequence mine = {0, 0, 0, 0};
            if (batch_idx + me < end) {
                mine = SequenceWindow::find(params, window, batch_idx + me);
            }
            const unsigned with_queries = __ballot_sync(kWarp, mine.q_len > 0);
            if (with_queries != 0) {
                const int first = __ffs(static_cast<int>(with_queries)) - 1;
                item_.sequence = take(mine, first);
                at_.batch_idx = batch_idx + first;
                return;
            }
        }
        at_.batch_idx = params.shape.batch;
    }

    __device__ void advance(const KernelParams& params, const SequenceWindow* window) {
        at_.unit = 0;
        at_.row_tile += 1;
        if (at_.row_tile * kRows < item_.sequence.q_len * params.shape.group) {
            return;
        }
        at_.row_tile = 0;
        at_.head += 1;
        if (at_.head < params.shape.heads_per_chain) {
            return;
        }
        at_.head = 0;
        find_sequence(params, window, at_.batch_idx + 1);
    }

    __device__ bool next_tile(const KernelParams& params, const SequenceWindow* window) {
        if (at_.batch_idx >= params.shape.batch) {
            return false;
        }
        if (has_begun_ || at_.unit == kWholeTile) {
            advance(params, window);
        }
        has_begun_ = true;
        if (at_.batch_idx >= params.shape.batch || is_behind(at_, end_)) {
            return false;
        }
        const Sequence& sequence = item_.sequence;
        const int32_t first_row = at_.row_tile * kRows;
        const int32_t last_row = min(first_row + kRows, sequence.q_len * params.shape.group) - 1;
        item_.batch_idx = at_.batch_idx;
        item_.kv_head = at_.head * params.shape.chains + chain_;
        item_.row_tile = at_.row_tile;
        item_.keys = tile_keys(
            params.shape,
            sequence.q_len,
            sequence.kv_len,
            token_of(params, first_row),
            token_of(params, last_row)
        );
        item_.part = tile_part(params.shape, end_, cuts_, lane_, at_, item_.keys);
        rest_ = {item_.part.unit_begin, item_.part.unit_end};
        return true;
    }

    Position at_;
    Position end_;
    LaneCuts cuts_;
    Item item_;
    UnitSpan rest_;  // of the tile, in this lane
    int32_t chain_;
    int32_t lane_;
    bool has_begun_;
};

// Slots of a tile's pieces, in the chain's workspace.
__device__ __forceinline__ int32_t slot_of(const PlanShape& shape, int32_t place, int32_t piece) {
    return shape.piece_units > 0 ? place * shape.max_pieces + piece
                                 : place + 2 * piece + (piece == 0 ? 1 : 0);
}

}  // namespace pagetile::sm80
