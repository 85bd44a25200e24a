#pragma once

// The producer warpgroup: fills the rings by TMA. Each warp does one thing, and in it one elected
// lane issues the copies (16 lanes that issue cost 5 %, H200).

#include "attention/sm90/values.cuh"

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include <cstdint>

namespace pagetile::sm90 {

inline constexpr auto kEvictNormal = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);

// The page of the lane's box of a tile; the pool's end where no key of it is visible: such a box is
// zeros. Of the block table only entries are read that hold visible keys.
template <class Config>
__device__ __forceinline__ int32_t
find_page(const PrefillParams& params, const Item& item, int tile) {
    const int32_t in_tile = static_cast<int32_t>(threadIdx.x % 32) * params.box_rows;
    const int32_t key = tile * Config::kKeys + in_tile;
    const bool is_there = tile >= item.first_tile && key < item.keys.end && in_tile < Config::kKeys;
    if (!is_there) {
        return params.call.num_pages;
    }
    if (params.call.block_table == nullptr) {
        return 0;
    }
    uint32_t offset;
    const uint32_t page = params.call.page_size(offset, static_cast<uint32_t>(key));
    return __ldg(params.call.block_table + item.batch_idx * params.call.block_table_stride + page);
}

// Where in its page a key lies; packed rows are all one page.
__device__ __forceinline__ int32_t
find_offset(const PrefillParams& params, const Item& item, int32_t key) {
    uint32_t offset;
    params.call.page_size(offset, static_cast<uint32_t>(key));
    return item.sequence.kv_begin + static_cast<int32_t>(offset);
}

// What the warp has written of a stage is there for WGMMA, which reads by another proxy.
__device__ __forceinline__ void hand_over(uint64_t* full) {
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        ClusterBarrier::arrive(full);
    }
}

__device__ __forceinline__ uint32_t num_ctas_with_work(const PrefillParams& params) {
    return params.num_ctas == nullptr ? gridDim.x : static_cast<uint32_t>(*params.num_ctas);
}

template <class Config>
class Producer {
public:
    using Storage = Shared<Config>;
    static constexpr int kStages = Config::kTile.stages;

    __device__ Producer(const PrefillParams& params, Storage& shared)
        : params_(params), shared_(shared) {}

    __device__ __forceinline__ void load_keys() { load<typename Parts<Config>::Keys>(); }

    __device__ __forceinline__ void load_more_keys() { load<typename Parts<Config>::MoreKeys>(); }

    __device__ __forceinline__ void load_values() { load<typename Parts<Config>::Values>(); }

private:
    template <class Mine>
    __device__ __forceinline__ void load() {
        if (params_.box_rows == kGranule && (!Mine::kIsV || params_.v_in_one_box)) [[likely]] {
            load_tiles<Mine, true>();
        } else {
            load_tiles<Mine, false>();
        }
    }

    // A stage is free one tile's time before it is needed again: the copies must follow at once. So
    // all that can be known before is.
    template <class Mine, bool kWholeGranules>
    __device__ __forceinline__ void load_tiles() {
        constexpr bool kIsV = Mine::kIsV;
        constexpr int kFirst = Mine::kFirst;
        constexpr int kStep = Mine::kStep;
        constexpr int kBoxes = Mine::kGranules;
        ItemReader<Config> items(shared_);
        RingPlace<kStages> ring;
        while (true) {
            const Item& item = items.wait();
            if (item.num_tokens == kNoMore) {
                break;
            }
            const int first = item.first_tile;
            int tile = item.last_tile;
            int32_t page = find_page<Config>(params_, item, tile);
            for (; tile >= first; --tile) {
                const int32_t next_page = find_page<Config>(params_, item, tile - 1);
                const int32_t kv_head = item.kv_head;
                const int32_t key =
                    tile * Config::kKeys +
                    (kWholeGranules ? kFirst * kGranule
                                    : static_cast<int32_t>(threadIdx.x % 32) * params_.box_rows);
                int32_t offset = find_offset(params_, item, key);
                int32_t pages[kBoxes];
                if constexpr (kWholeGranules) {
#pragma unroll
                    for (int i = 0; i < kBoxes; ++i) {
                        pages[i] = __shfl_sync(kWarp, page, kFirst + i * kStep);
                    }
                }
                const bool looks = kIsV && is_at_edge<Config>(item, tile) != 0;
                uint64_t* free = kIsV ? shared_.v_free : shared_.k_free;
                uint64_t* full = looks ? shared_.v_loaded : kIsV ? shared_.v_full : shared_.k_full;
                full += ring.index;
                wait(&free[ring.index], ring.turn ^ 1);
                if constexpr (kWholeGranules) {
                    if (cute::elect_one_sync()) {
                        begin_tile<kIsV, kFirst>(item, tile, full, &free[ring.index]);
#pragma unroll
                        for (int i = 0; i < kBoxes; ++i) {
                            const int in_tile = (kFirst + i * kStep) * kGranule;
                            if constexpr (kIsV) {
                                copy_values(kv_head, pages[i], offset, full, ring.index, in_tile);
                            } else {
                                copy_keys(kv_head, pages[i], offset, full, ring.index, in_tile);
                            }
                            offset = next_offset<kStep>(offset);
                        }
                    }
                } else {
                    if (cute::elect_one_sync()) {
                        begin_tile<kIsV, kFirst>(item, tile, full, &free[ring.index]);
                    }
                    __syncwarp();
                    const int in_tile = key - tile * Config::kKeys;
                    if (threadIdx.x % kStep == kFirst && in_tile < Config::kKeys) {
                        if constexpr (kIsV) {
                            copy_values_by_slabs(kv_head, page, offset, full, ring.index, in_tile);
                        } else {
                            copy_keys(kv_head, page, offset, full, ring.index, in_tile);
                        }
                    }
                }
                __syncwarp();
                if (looks) {
                    look_at_values(item, tile, ring.index);
                }
                ring.advance();
                page = next_page;
            }
            items.release(item);
        }
    }

    // Of two warps that fill a stage, one says how much will come, and who will not take it.
    template <bool kIsV, int kFirst>
    static __device__ __forceinline__ void begin_tile(
        const Item& item, int tile, uint64_t* full, uint64_t* free
    ) {
        if constexpr (kFirst == 0) {
            ClusterTransactionBarrier::arrive_and_expect_tx(
                full, kIsV ? Config::kValueBytes : Config::kKeyBytes
            );
            free_for_others<Config, kIsV>(item, tile, free);
        }
    }

    // Before the consumers get them: there is time, for they get to them one tile later.
    __device__ __forceinline__ void look_at_values(const Item& item, int tile, int stage) {
        wait(&shared_.v_loaded[stage], looks_ >> stage & 1);
        looks_ ^= 1u << stage;
        EdgeValues<Config>::template clean<typename Parts<Config>::Values>(
            shared_, item, tile, stage
        );
        hand_over(&shared_.v_full[stage]);
    }

    // kStep granules on, in whichever page that is: without a division between two copies.
    template <int kStep>
    __device__ __forceinline__ int32_t next_offset(int32_t offset) const {
        offset += params_.granules_on[kStep - 1];
        return offset >= params_.page_end ? offset - params_.page_end : offset;
    }

    // All slabs of 16 keys, `in_tile` and the following.
    __device__ __forceinline__ void copy_values(
        int32_t kv_head, int32_t page, int32_t offset, uint64_t* full, int stage, int in_tile
    ) {
        cute::SM90_TMA_LOAD_5D::copy(
            &params_.pages.v,
            full,
            kEvictNormal,
            shared_.v[stage] + in_tile * Config::kSlabsV * kSlabBytes,
            0,
            offset,
            0,
            kv_head,
            page
        );
    }

    // 16 or 8 keys.
    __device__ __forceinline__ void copy_values_by_slabs(
        int32_t kv_head, int32_t page, int32_t offset, uint64_t* full, int stage, int in_tile
    ) {
        char* to = shared_.v[stage] + in_tile / kGranule * Config::kSlabsV * kGranuleBytes +
                   in_tile % kGranule * kSlabBytes;
#pragma unroll
        for (int slab = 0; slab < Config::kSlabsV; ++slab) {
            cute::SM90_TMA_LOAD_4D::copy(
                &params_.pages.v,
                full,
                kEvictNormal,
                to + slab * kGranuleBytes,
                slab * kSlabElements,
                offset,
                kv_head,
                page
            );
        }
    }

    __device__ __forceinline__ void copy_keys(
        int32_t kv_head, int32_t page, int32_t offset, uint64_t* full, int stage, int in_tile
    ) {
#pragma unroll
        for (int slab = 0; slab < Config::kSlabs; ++slab) {
            cute::SM90_TMA_LOAD_4D::copy(
                &params_.pages.k,
                full,
                kEvictNormal,
                shared_.k[stage] + (slab * Config::kKeys + in_tile) * kSlabBytes,
                slab * kSlabElements,
                offset,
                kv_head,
                page
            );
        }
    }

    const PrefillParams& params_;
    Storage& shared_;
    uint32_t looks_ = 0;  // a bit a stage: whether v_loaded is in an odd turn
};

// One warp: claims items, tells them to all others, and loads their queries.
template <class Config>
class Scheduler {
public:
    using Storage = Shared<Config>;
    static constexpr int kBuffers = Config::kTile.query_buffers;

    __device__ Scheduler(const PrefillParams& params, Storage& shared)
        : params_(params), shared_(shared) {}

    __device__ __forceinline__ void run() {
        gpu::PrefillItems items(params_.call, params_.schedule);
        if (Config::kCuts && params_.pieces.most_pieces > 1) {
            const uint32_t count = items.count_ahead();
            shared_.cuts =
                cut_items(count, num_ctas_with_work(params_), params_.pieces.most_pieces);
            __syncwarp();
        }
        RingPlace<kBuffers> buffer;
        [[maybe_unused]] int32_t num_tiles = 0;
        for (uint32_t turn = 0;; ++turn) {
            wait(&shared_.item_free[turn % kItems], (turn / kItems % 2) ^ 1);
            if (kBuffers > 1) {
                // Not claimed before its queries have a place: others may come to it sooner.
                wait(&shared_.q_free[buffer.index], buffer.turn ^ 1);
            }
            Item& item = shared_.items[turn % kItems];
            shared_.is_wild[turn % kItems] = false;
            const bool found = find(items, item);
            if (!found) {
                item.num_tokens = kNoMore;
            }
            if constexpr (Config::kSkipsItems) {
                shared_.raw.places[turn % kItems] = num_tiles + item.last_tile;
                num_tiles += item.last_tile - item.first_tile + 1;
            }
            __syncwarp();
            if (threadIdx.x % 32 == 0) {
                ClusterBarrier::arrive(&shared_.item_full[turn % kItems]);
            }
            if (!found) {
                return;
            }
            if (kBuffers == 1) {
                wait(&shared_.q_free[buffer.index], buffer.turn ^ 1);
            }
            load_queries(item, buffer.index);
            buffer.advance();
        }
    }

private:
    static constexpr uint32_t kLeastTiles = 1024 / Config::kKeys;  // of a piece

    // Claims what is there to do. False: there is no more.
    __device__ __forceinline__ bool find(gpu::PrefillItems& items, Item& item) {
        while (true) {
            const uint32_t number = claim();
            const PrefillClaim place =
                Config::kCuts ? claim_of(shared_.cuts, number) : PrefillClaim{number, 0};
            if (!items.find(place.item, item)) {
                const uint32_t more =
                    Config::kCuts ? shared_.cuts.cut * (shared_.cuts.pieces - 1) : 0;
                const uint32_t claims = items.count() + more;
                if (number == claims + num_ctas_with_work(params_) - 1 && threadIdx.x % 32 == 0) {
                    *params_.next_item = 0;  // this was the last of all claims
                }
                return false;
            }
            if (find_keys(place, item)) {
                return true;
            }
        }
    }

    // At least one tile. False: the item has too few keys for so many pieces.
    __device__ __forceinline__ bool find_keys(PrefillClaim place, Item& item) {
        const KeyTiles all = {
            item.keys.first / Config::kKeys,
            max(item.keys.end - 1, item.keys.first) / Config::kKeys + 1,
        };
        if constexpr (Config::kIsFloat8) {
            item.factor = params_.call.scale * scale_at(params_.call.k_scale, item);
            item.v_scale = scale_at(params_.call.v_scale, item);
        }
        if constexpr (Config::kTransposes) {
            item.factor *= scale_at(params_.call.q_scale, item);
        }
        item.warpgroups = (item.num_tokens * params_.call.shape.group + 63) / 64;
        item.pieces = 1;
        item.first_tile = all.first;
        item.last_tile = all.end - 1;
        if (!Config::kCuts || place.item < shared_.cuts.whole) {
            return true;
        }
        const uint32_t most = static_cast<uint32_t>(all.end - all.first) / kLeastTiles;
        const uint32_t pieces = max(min(shared_.cuts.pieces, most), 1);
        if (place.piece >= pieces) {
            return false;
        }
        const KeyTiles mine = piece_of(all, place.piece, pieces);
        item.first_tile = mine.first;
        item.last_tile = mine.end - 1;
        item.piece = static_cast<int32_t>(place.piece);
        item.pieces = static_cast<int32_t>(pieces);
        item.cut_item = static_cast<int32_t>(place.item - shared_.cuts.whole);
        item.first_slot = item.cut_item * static_cast<int32_t>(shared_.cuts.pieces);
        return true;
    }

    static __device__ __forceinline__ float scale_at(const Scale& scale, const Item& item) {
        const int64_t at = item.batch_idx * scale.batch_stride + item.kv_head * scale.head_stride;
        return scale.data == nullptr ? 1.0f : scale.data[at];
    }

    __device__ __forceinline__ uint32_t claim() {
        uint32_t number = 0;
        if (threadIdx.x % 32 == 0) {
            number = atomicAdd(params_.next_item, 1);
        }
        return __shfl_sync(kWarp, number, 0);
    }

    __device__ __forceinline__ void load_queries(const Item& item, int buffer) {
        if (cute::elect_one_sync()) {
            ClusterTransactionBarrier::arrive_and_expect_tx(
                &shared_.q_full[buffer], static_cast<uint32_t>(params_.query_bytes)
            );
#pragma unroll
            for (int slab = 0; slab < Config::kSlabs; ++slab) {
                cute::SM90_TMA_LOAD_3D::copy(
                    &params_.q,
                    &shared_.q_full[buffer],
                    kEvictNormal,
                    shared_.q[buffer] + slab * Config::kRows * kSlabBytes,
                    slab * kSlabElements,
                    item.kv_head * params_.call.shape.group,
                    item.sequence.q_begin + item.first_token
                );
            }
        }
        __syncwarp();
    }

    const PrefillParams& params_;
    Storage& shared_;
};

}  // namespace pagetile::sm90
