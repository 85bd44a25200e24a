#pragma once

// A consumer warpgroup: 64 rows of each item.
//
// One loop runs over the tiles of all items. Each turn starts the scores of the next tile (of the
// next item, after the last tile of this one) and then the products of this tile's weights with its
// values; the softmax of the next tile runs while the tensor cores are at the latter. So they are
// never without work, and an item has no prologue of its own.

#include "attention/sm90/finish_item.cuh"

#include <cstdint>

namespace pagetile::sm90 {

template <class Config>
class Consumer {
public:
    using Element = typename Config::Element;
    using Storage = Shared<Config>;
    static constexpr int kKeys = Config::kKeys;
    static constexpr int kStages = Config::kTile.stages;
    static constexpr int kBuffers = Config::kTile.query_buffers;

    __device__ __forceinline__ Consumer(const PrefillParams& params, Storage& shared, int warpgroup)
        : params_(params.call),
          pieces_(params.pieces),
          is_e5m2_(params.is_e5m2),
          shared_(shared),
          items_(shared),
          rows_(params.call, warpgroup),
          warpgroup_(warpgroup) {
        factor_ = Config::kTransforms ? 1.0f : params_.scale;
    }

    __device__ __forceinline__ void run() {
        const Item* item = &items_.wait();
        if (item->num_tokens == kNoMore) {
            return;
        }
        int32_t tile = item->last_tile;
        int32_t first = first_of(*item);
        softmax_.begin();
        items_.begin(warpgroup_, false);
        wait(&shared_.q_full[0], 0);
        wait(&shared_.k_full[0], 0);
        cute::warpgroup_arrive();
        start_scores();
        cute::warpgroup_wait<0>();
        end_scores(tile == first, left_out(*item, first));
        set_factor(*item);
        rule(*item, tile, is_at_edge<Config>(*item, tile));
        softmax_.step(scores_, factor_);
        pack_weights();

        int32_t is_new = 1;  // no values have been added yet
        float largest[2];    // of the item that ends
        float sum[2];
        while (true) {
            const bool is_last = tile == first;
            const int32_t rest = is_last ? left_out(*item, first) : 0;
            const Item* next = item;
            int32_t next_tile = tile - 1;
            if (is_last) {
                next = &items_.wait();
                if (next->num_tokens == kNoMore) {
                    break;
                }
                next_tile = next->last_tile;
                first = first_of(*next);
                items_.begin(warpgroup_, rest > 0);
                wait(&shared_.q_full[num_queries_ % kBuffers], num_queries_ / kBuffers % 2);
            }
            wait(&shared_.k_full[k_.index], k_.turn);
            cute::warpgroup_arrive();
            start_scores();
            wait_for_values(rest);
            if (is_last) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    largest[i] = softmax_.largest[i];
                    sum[i] = softmax_.sum[i];
                }
                softmax_.begin();
            }
            // Again: else ptxas adds one in a branch, and makes every product wait for the one before.
            cute::warpgroup_arrive();
            start_values(weights_, is_new == 0);
            const int32_t next_at_edge = is_at_edge<Config>(*next, next_tile);
            cute::warpgroup_wait<1>();
            end_scores(next_tile == first, left_out(*next, first));
            if (is_last) {
                set_factor(*next);
            }
            rule(*next, next_tile, next_at_edge);
            weigh(rest);
            pack_weights();
            if (!is_last) {
                rescale();
            } else {
                end_item(*item, largest, sum);
            }
            is_new = is_last ? 1 : 0;
            item = next;
            tile = next_tile;
            if constexpr (!Config::kTransforms) {
                const bool is_plain = !Config::kWidens || item->factor > 0.0f;
                if (is_new == 0 && is_at_edge<Config>(*item, tile) == 0 && is_plain) {
                    pass_inside(*item, tile, first);
                }
            }
        }
        wait_for_values(left_out(*item, first));
        cute::warpgroup_arrive();
        start_values(weights_, is_new == 0);
        cute::warpgroup_wait<0>();
        end_item(*item, softmax_.largest, softmax_.sum);
    }

private:
    // A warpgroup without rows of an item takes the scores of its first tile only, with whatever values
    // there are: so it goes through the same turns as for other items. Nobody waits for it.
    __device__ __forceinline__ int32_t first_of(const Item& item) const {
        const bool has_rows = !Config::kLeavesOut || warpgroup_ < item.warpgroups;
        return has_rows ? item.first_tile : item.last_tile;
    }

    static __device__ __forceinline__ int32_t left_out(const Item& item, int32_t first) {
        return Config::kLeavesOut ? first - item.first_tile : 0;
    }

    __device__ __forceinline__ void wait_for_values(int32_t num_left_out) const {
        if (num_left_out == 0) {
            wait(&shared_.v_full[v_.index], v_.turn);
        }
    }

    // Through tiles that all rows see in full, but for an item's last one: the same with nothing to ask, so
    // that instructions stand in the order in which they run. Where tiles go by twos, one may be left over.
    __device__ __forceinline__ void pass_inside(const Item& item, int32_t& tile, int32_t first) {
        const int32_t first_inside = (item.keys.all_begin + kKeys - 1) / kKeys;
        const int32_t end = max(first_inside, first + 1);
        if constexpr (Config::kKeepsWeights) {
            uint32_t other[kKeys / 4];
            while (tile > end + 1) {
                pass_tile(weights_, other);
                pass_tile(other, weights_);
                tile -= 2;
            }
        } else {
            while (tile > end) {
                pass_tile(weights_, weights_);
                --tile;
            }
        }
    }

    // A turn. Without registers for the next tile's weights beside this one's, only the other warpgroups'
    // softmax runs while this one's products do; then stages are free the earlier.
    __device__ __forceinline__ void pass_tile(
        const uint32_t (&weights)[kKeys / 4], uint32_t (&next)[kKeys / 4]
    ) {
        wait(&shared_.k_full[k_.index], k_.turn);
        cute::warpgroup_arrive();
        start_scores();
        wait(&shared_.v_full[v_.index], v_.turn);
        cute::warpgroup_arrive();
        start_values(weights, true);
        if constexpr (Config::kKeepsWeights) {
            cute::warpgroup_wait<1>();
            end_scores(false, 0);
            softmax_.template step_at_once<typename Config::Value>(scores_, factor_, next);
            cute::warpgroup_wait<0>();
            end_values(0);
        } else {
            cute::warpgroup_wait<0>();
            end_scores(false, 0);
            end_values(0);
            softmax_.template step_at_once<typename Config::Value>(scores_, factor_, next);
        }
        rescale();
    }

    // The softmax of the next tile while this one's values are multiplied, and their end.
    __device__ __forceinline__ void weigh(int32_t num_left_out) {
        softmax_.step(scores_, factor_);
        stay_before_wait();
        cute::warpgroup_wait<0>();
        end_values(num_left_out);
    }

    // Of a tile of keys, with the queries at hand.
    __device__ __forceinline__ void start_scores() {
        constexpr int kSteps = Config::kHeadDim / 16;
        constexpr int kStepsOfSlab = kSlabElements / 16;
        const Operand q = Operand::at(shared_.q[0], 16)
                              .plus(
                                  num_queries_ % kBuffers * Config::kQueryBytes +
                                  static_cast<uint32_t>(warpgroup_ * 64 * kSlabBytes)
                              );
        const Operand k =
            Operand::at(shared_.k[0], 16).plus(static_cast<uint32_t>(k_.index * Config::kKeyBytes));
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const int slab = step / kStepsOfSlab;
            const int byte = step % kStepsOfSlab * 32;
            multiply_keys<Element, kKeys>(
                q.plus(slab * Config::kRows * kSlabBytes + byte),
                k.plus(slab * kKeys * kSlabBytes + byte),
                scores_,
                step > 0
            );
        }
        cute::warpgroup_commit_batch();
    }

    // They are there: the keys are free, and so are the queries after an item's last tile.
    __device__ __forceinline__ void end_scores(bool is_last_of_item, int32_t num_left_out) {
        arrive(&shared_.k_free[k_.index]);
        k_.advance(1 + (is_last_of_item ? num_left_out : 0));
        if (is_last_of_item) {
            arrive(&shared_.q_free[num_queries_ % kBuffers]);
        }
        num_queries_ += is_last_of_item ? 1 : 0;  // without a branch it stays a uniform register
    }

    __device__ __forceinline__ void start_values(const uint32_t (&weights)[kKeys / 4], bool adds) {
        constexpr int kSteps = kKeys / kGranule;
        const Operand v = Operand::at(shared_.v[0], kGranuleBytes)
                              .plus(static_cast<uint32_t>(v_.index * Config::kValueBytes));
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            multiply_values<typename Config::Value, Config::kHeadDimV>(
                weights + 4 * step,
                v.plus(step * Config::kSlabsV * kGranuleBytes),
                out_,
                step > 0 || adds
            );
        }
        cute::warpgroup_commit_batch();
    }

    __device__ __forceinline__ void end_values(int32_t num_left_out) {
        if (num_left_out == 0) {
            arrive(&shared_.v_free[v_.index]);
        }
        v_.advance(1 + num_left_out);
    }

    // One thread speaks for the warpgroup: its products are done when they are done for all.
    static __device__ __forceinline__ void arrive(uint64_t* barrier) {
        if (threadIdx.x % 128 == 0) {
            ClusterBarrier::arrive(barrier);
        }
    }

    // Worked out again where there are no registers to keep it.
    __device__ __forceinline__ Rows rows() const {
        return Config::kWidens ? Rows(params_, warpgroup_) : rows_;
    }

    // The scale of keys may differ from head to head, and be negative: then scores are scaled first.
    __device__ __forceinline__ void set_factor(const Item& item) {
        if constexpr (Config::kWidens) {
            factor_ = item.factor > 0.0f ? item.factor : 1.0f;
        }
    }

    // What a score is besides a product.
    __device__ __forceinline__ void rule(const Item& item, int32_t tile, int32_t at_edge) {
        if constexpr (Config::kTransforms) {
            transform<Config>(params_, item, rows(), tile, scores_);
        }
        if constexpr (Config::kWidens) {
            if (!(item.factor > 0.0f)) [[unlikely]] {
#pragma unroll
                for (float& score : scores_) {
                    score *= item.factor;
                }
            }
        }
        if (at_edge != 0) [[unlikely]] {
            mask<Config>(params_.shape, item, rows(), tile, scores_);
        }
    }

    __device__ __forceinline__ void end_item(
        const Item& item, float (&largest)[2], float (&sum)[2]
    ) {
        finish_item<Config>(
            params_, pieces_, is_e5m2_, shared_, item, warpgroup_, largest, sum, out_
        );
        items_.release(item);
    }

    // ptxas moves `wgmma.wait_group 0` above the exponentials, for which it should be late (5 % of the
    // time, nvcc 13.0). A branch on their sum holds it: the loop never runs.
    __device__ __forceinline__ void stay_before_wait() {
        while (__any_sync(kWarp, softmax_.sum[0] < 0.0f || softmax_.sum[1] < 0.0f)) {
            __nanosleep(20);
            asm volatile("" : "+f"(softmax_.sum[0]), "+f"(softmax_.sum[1])::"memory");
        }
    }

    __device__ __forceinline__ void rescale() {
        if (softmax_.has_grown) {
#pragma unroll
            for (int i = 0; i < Config::kHeadDimV / 2; ++i) {
                out_[i] *= softmax_.rescale[i / 2 % 2];
            }
        }
    }

    __device__ __forceinline__ void pack_weights() {
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i) {
            weights_[i] = pack(typename Config::Value{}, scores_[2 * i], scores_[2 * i + 1]);
        }
    }

    const gpu::KernelParams& params_;
    const PieceSums& pieces_;
    const bool& is_e5m2_;
    Storage& shared_;
    ItemReader<Config> items_;
    Rows rows_;
    int warpgroup_;
    float factor_;              // from scores to log2 units
    uint32_t num_queries_ = 0;  // items whose queries are no longer needed
    RingPlace<kStages> k_;
    RingPlace<kStages> v_;
    Softmax<> softmax_;
    float scores_[kKeys / 2];
    uint32_t weights_[kKeys / 4];
    float out_[Config::kHeadDimV / 2];
};

}  // namespace pagetile::sm90
