#pragma once

// A consumer warpgroup where queries, keys and values are multiplied as e4m3: 64 rows of each item.
//
// A turn is one tile of keys: its scores, its weights, its values, each waited for. There are no registers
// for scores beside the values' product, and the other two warpgroups are at their weights, or at the
// tensor cores, meanwhile.
//
// The tensor cores add up products of 8 bits with about 14 bits. So what they add up is short: a tile's
// product of weights and values goes to registers of its own, and from there to the sums, which are fp32.
// Half of the columns at a time, for there are no registers for all.

#include "attention/sm90/finish_item.cuh"

#include <cstdint>

namespace pagetile::sm90 {

template <class Config>
class Fp8Consumer {
public:
    using Storage = Shared<Config>;
    static constexpr int kKeys = Config::kKeys;
    static constexpr int kBuffers = Config::kTile.query_buffers;
    using Place = RingPlace<Config::kTile.stages>;
    static constexpr int kHalf = Config::kHeadDimV / 2;
    static_assert(Config::kHeadDim == kSlabBytes && Config::kHeadDimV == kSlabBytes);

    __device__ __forceinline__
    Fp8Consumer(const PrefillParams& params, Storage& shared, int warpgroup)
        : params_(params), shared_(shared), items_(shared), warpgroup_(warpgroup) {}

    __device__ __forceinline__ void run() {
        while (items_.wait().num_tokens != kNoMore) {
            const Item& item = items_.item();
            const bool has_rows = warpgroup_ < item.warpgroups;
            const bool has_left_out =
                items_.has_previous() && warpgroup_ >= items_.previous().warpgroups;
            items_.begin(warpgroup_, has_rows && has_left_out);
            if (has_rows) {
                attend(item);
            } else {
                // Its queries are not read, and producers free its places in the rings.
                arrive(&shared_.q_free[queries().index]);
            }
            items_.release(item);
        }
    }

private:
    __device__ __forceinline__ void attend(const Item& item) {
        softmax_.begin();
#pragma unroll
        for (float& sum : out_) {
            sum = 0.0f;
        }
        wait(&shared_.q_full[queries().index], queries().turn);
        for (int32_t tile = item.last_tile; tile >= item.first_tile; --tile) {
            const Place place = place_of(tile);
            multiply_keys(place);
            if (tile == item.first_tile) {
                arrive(&shared_.q_free[queries().index]);
            }
            weigh(item, tile);
            multiply_values(place);
        }
        finish_item<Config>(
            params_.call,
            params_.pieces,
            params_.is_e5m2,
            shared_,
            item,
            warpgroup_,
            softmax_.largest,
            softmax_.sum,
            out_
        );
    }

    // The scores of a tile.
    __device__ __forceinline__ void multiply_keys(Place place) {
        constexpr int kSteps = Config::kHeadDim / 32;
        const Operand q =
            Operand::at(shared_.q[0], 16)
                .plus(
                    uniform(static_cast<uint32_t>(queries().index)) * Config::kQueryBytes +
                    static_cast<uint32_t>(warpgroup_ * 64 * kSlabBytes)
                );
        const Operand k = Operand::at(shared_.k[0], 16)
                              .plus(static_cast<uint32_t>(place.index * Config::kKeyBytes));
        wait(&shared_.k_full[place.index], place.turn);
        cute::warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            multiply_keys_e4m3<kKeys>(q.plus(32 * step), k.plus(32 * step), scores_, step > 0);
        }
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<0>();
        arrive(&shared_.k_free[place.index]);
    }

    // Scores become weights.
    __device__ __forceinline__ void weigh(const Item& item, int32_t tile) {
        // The scales may differ from head to head, and be negative: then scores are scaled first.
        float factor = item.factor;
        if (!(factor > 0.0f)) [[unlikely]] {
#pragma unroll
            for (float& score : scores_) {
                score *= factor;
            }
            factor = 1.0f;
        }
        if (is_at_edge<Config>(item, tile) != 0) [[unlikely]] {
            mask_rows(item, tile);
        }
        softmax_.rescale[0] = softmax_.rescale[1] = 1.0f;  // which changes no bits
        softmax_.step(scores_, factor);
        pack_weights();
    }

    // One row after the other, and what both need is worked out twice: for want of registers.
    __device__ __forceinline__ void mask_rows(const Item& item, int32_t tile) {
        const PlanShape& shape = params_.call.shape;
        int warpgroup = warpgroup_;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            asm volatile("" : "+r"(warpgroup)::"memory");
            const int32_t token = Rows(params_.call, warpgroup).token[i];
            mask_row<Config, false>(shape, item, token, tile, i, scores_);
            if (shape.window_left >= 0) {
                mask_row<Config, true>(shape, item, token, tile, i, scores_);
            }
            __syncwarp();
        }
    }

    // A word has a row's weights of four keys, which lie side by side in transposed values, too.
    __device__ __forceinline__ void pack_weights() {
#pragma unroll
        for (int i = 0; i < kKeys / 8; ++i) {
            const float* of_row = scores_ + i / 2 * 8 + i % 2 * 2;
            weights_[i] = pack_e4m3(of_row[0], of_row[1], of_row[4], of_row[5]);
        }
    }

    __device__ __forceinline__ void multiply_values(Place place) {
        const Operand v = Operand::at(shared_.v[0], 16)
                              .plus(static_cast<uint32_t>(place.index * Config::kValueBytes));
        wait(&shared_.v_full[place.index], place.turn);
        add_columns<0>(v);
        add_columns<1>(v);
        arrive(&shared_.v_free[place.index]);
    }

    // Of a half of the columns.
    template <int kPart>
    __device__ __forceinline__ void add_columns(Operand v) {
        float part[kHalf / 2];
        cute::warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < kKeys / 32; ++step) {
            multiply_values_e4m3<kHalf>(
                weights_ + 4 * step, v.plus(kPart * kHalf * kSlabBytes + 32 * step), part, step > 0
            );
        }
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<0>();
#pragma unroll
        for (int i = 0; i < kHalf / 2; ++i) {
            float& sum = out_[kPart * kHalf / 2 + i];
            sum = fmaf(sum, softmax_.rescale[i / 2 % 2], part[i]);
        }
    }

    __device__ __forceinline__ RingPlace<kBuffers> queries() const {
        return items_.template place<kBuffers>();
    }

    // In the rings.
    __device__ __forceinline__ Place place_of(int32_t tile) const {
        const int32_t place = shared_.raw.places[items_.template place<kItems>().index];
        const uint32_t number = uniform(static_cast<uint32_t>(place - tile));
        return {static_cast<int>(number % Config::kTile.stages), number / Config::kTile.stages % 2};
    }

    // The same in all lanes, also for the compiler: else every product takes six more instructions.
    static __device__ __forceinline__ uint32_t uniform(uint32_t x) {
        return __shfl_sync(kWarp, x, 0);
    }

    // One thread speaks for the warpgroup: its products are done when they are done for all.
    static __device__ __forceinline__ void arrive(uint64_t* barrier) {
        if (threadIdx.x % 128 == 0) {
            ClusterBarrier::arrive(barrier);
        }
    }

    const PrefillParams& params_;
    Storage& shared_;
    ItemReader<Config> items_;
    int warpgroup_;
    Softmax<NarrowWeights> softmax_;
    float scores_[kKeys / 2];
    uint32_t weights_[kKeys / 8];
    float out_[Config::kHeadDimV / 2];
};

}  // namespace pagetile::sm90
