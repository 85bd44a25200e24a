#pragma once

// The ring of K and V tiles that a key warp (with its row warps) fills for itself: page lookups a
// batch ahead, copies `stages` tiles ahead, into the next item too, so that memory never waits for
// a tile's end.

#include "attention/sm80/dealing.cuh"
#include "attention/sm80/row_layout.cuh"
#include "attention/sm80/some_keys.cuh"
#include "attention/sm80/tile_shapes.h"
#include "common/ptx.cuh"

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cutlass/arch/barrier.h>

#include <cstdint>

namespace pagetile::sm80 {

template <class Config>
class KvRing {
public:
    using KLayout = typename Config::KLayout;
    using VLayout = typename Config::VLayout;
    static constexpr TileShape kShape = Config::kShape;
    static constexpr int kKeys = kShape.keys;
    static constexpr int kStages = kShape.stages;
    static constexpr int kRowBytesK = Config::kHeadDim * Config::kElementBytes;
    static constexpr int kRowBytesV = Config::kHeadDimV * Config::kElementBytes;
    // Beside another kernel there are no registers for it.
    static constexpr bool kDeals = !Config::kBeside;
    static constexpr int kStageBytes = kKeys * (kRowBytesK + kRowBytesV);

    // `ring` is this key warp's; `list` this warp's own. boxes: of an instance beside another kernel.
    __device__ KvRing(
        const KernelParams& params,
        const gpu::PageBoxes* boxes,
        WorkList<Config::kRows>& list,
        const SequenceWindow& window,
        char* ring,
        int key_warp,
        int row_warp
    )
        : params_(params),
          boxes_(boxes),
          list_(list),
          window_(window),
          ring_(static_cast<int>(__cvta_generic_to_shared(ring))),
          key_warp_(key_warp),
          row_warp_(row_warp),
          lane_(static_cast<int>(threadIdx.x % 32)) {
        first_to_[0] = first_to<KLayout, kRowBytesK>();
        first_to_[1] = kRowBytesV == kRowBytesK ? first_to_[0] : first_to<VLayout, kRowBytesV>();
        if constexpr (Config::kBeside) {
            if (lane_ == 0) {
                for (int stage = 0; stage < kStages; ++stage) {
                    cutlass::arch::ClusterBarrier::init(filled(stage), 1);
                }
            }
            cutlass::arch::fence_barrier_init();
            __syncwarp();
        }
    }

    // Looks up the first pages, before the wait for the kernels before. `item` is the first one, if
    // there is one; only if `has_more` may the list have others.
    __device__ __forceinline__ void begin(bool has_item, bool has_more, const Item& item) {
        is_done_ = !has_more;
        if (has_item) {
            if constexpr (kDeals) {
                dealt_.begin(params_, item);
            }
            take_item(item);
            has_ahead_ = ahead_.tile < ahead_.end_tile;
            if (has_ahead_) {
                look_up(ahead_.tile);
            }
        }
    }

    // The first copies. The list is in shared memory, if it has more than one item.
    __device__ __forceinline__ void fill() {
#pragma unroll 1
        for (int stage = -1; stage < kStages; ++stage) {
            if (stage >= 0) {
                copy_next(stage);
            }
            if (now_.tile >= batch_end_) {
                look_ahead(nullptr);
            }
        }
    }

    // Waits for the tile in `stage_`; returns where it is, from the ring's beginning.
    __device__ __forceinline__ int wait() {
        cute::cp_async_wait<kStages - 1>();
        if constexpr (Config::kBeside) {
            if ((by_boxes_ >> stage_ & 1) != 0) {
                cutlass::arch::ClusterBarrier::wait(filled(stage_), turns_ >> stage_ & 1);
                turns_ ^= 1u << stage_;
            } else {
                cutlass::arch::fence_view_async_shared();  // TMA may be next to write there
            }
        }
        sync_row_warps();
        return stage_ * kStageBytes;
    }

    // The tile has been read: its place takes the next one. The CTA has met since fill().
    __device__ __forceinline__ void release() {
        sync_row_warps();
        // Before the copies, not behind: a call would wait until the memory has taken them all.
        static constexpr int kSoon = 3;  // tiles: in time for a lookup to be answered
        if (now_.tile + kSoon * kShape.key_warps >= batch_end_) {
            look_ahead(&window_);
        }
        copy_next(stage_);
        stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
    }

    // In shared memory.
    __device__ __forceinline__ int address() const { return ring_; }

    // What was called for at the beginning of an item together with tiles of the ring is there at the
    // item's end, too: by the ring's own waits if the item had enough tiles, or else by waiting.
    __device__ __forceinline__ void wait_for_others(const Item& item) {
        const int tiles = item.part.unit_end * kTilesPerUnit -
                          first_tile<kShape>(item.part.unit_begin * kTilesPerUnit, key_warp_);
        if (tiles <= kStages * kShape.key_warps) {
            drain();
        }
    }

    __device__ __forceinline__ void drain() { cute::cp_async_wait<0>(); }

private:
    // Tiles whose pages are looked up at once: a page of each granule, one to a lane.
    struct Batch {
        int32_t page;    // this lane's; outside the pool: nothing there
        int32_t offset;  // of the granule in its page
        int32_t tile;
        int32_t end_tile;
        int32_t first_key;
        int32_t end_key;
        int32_t kv_head;
    };

    static constexpr int kKeysLog2 = kKeys == 16 ? 4 : 5;
    static constexpr int kGroups = kKeys / 16;  // of 16 keys, in a tile
    static constexpr int kTilesPerUnit = kPlanKeys / kKeys;
    // More would hold more addresses in registers than there are.
    static constexpr int kUnroll = 8;

    __device__ __forceinline__ void sync_row_warps() const {
        if constexpr (kShape.row_warps == 1) {
            __syncwarp();
        } else {
            ptx::sync_at_barrier(1 + key_warp_, 32 * kShape.row_warps);
        }
    }

    __device__ int tiles_per_batch() const { return 32 >> (kKeysLog2 - params_.granule_log2); }

    // An item's tiles, those that are this key warp's.
    __device__ __forceinline__ void take_item(const Item& item) {
        ahead_.tile = first_tile<kShape>(item.part.unit_begin * kTilesPerUnit, key_warp_);
        ahead_.end_tile = item.part.unit_end * kTilesPerUnit;
        ahead_.first_key = item.keys.first;
        ahead_.end_key = item.keys.end;
        ahead_.kv_head = item.kv_head;
        table_ = params_.block_table + item.batch_idx * params_.block_table_stride;
        first_offset_ = params_.block_table == nullptr ? item.sequence.kv_begin : 0;
    }

    // The next sequence of which this key warp has tiles, as it was dealt: if there is one, and the list does
    // not have it.
    __device__ __forceinline__ void take_dealt(const SequenceWindow* window) {
        Dealt found;
        if (!dealt_.next(params_, list_, window, key_warp_, found)) {
            is_done_ = dealt_.is_dealt();
            return;
        }
        ahead_.tile = found.tile;
        ahead_.end_tile = found.end_tile;
        ahead_.first_key = found.first_key;
        ahead_.end_key = found.end_key;
        table_ = params_.block_table + found.batch_idx * params_.block_table_stride;
        first_offset_ = params_.block_table == nullptr ? found.kv_begin : 0;
    }

    // Looks up the batch from `tile` on, of the same item or of one that comes later.
    __device__ __forceinline__ void fetch(int tile, const SequenceWindow* window) {
        has_ahead_ = true;
        ahead_.tile = tile;
        if constexpr (kDeals) {
            if (dealt_.is_dealt() && tile >= ahead_.end_tile && !is_done_) {
                take_dealt(window);
            }
        }
        while (ahead_.tile >= ahead_.end_tile) {
            if (is_done_ || !list_.next(params_, window)) {
                is_done_ = true;
                ahead_.tile = ahead_.end_tile = 0;
                return;
            }
            if (!kDeals || list_.item().batch_idx >= dealt_.batch_idx()) {  // or it was dealt
                take_item(list_.item());
            }
            is_done_ = !list_.may_have_more();
        }
        look_up(ahead_.tile);
    }

    // Asks for the pages from a tile on.
    __device__ __forceinline__ void look_up(int first_tile) {
        const int granule_log2 = params_.granule_log2;
        const int granules_log2 = kKeysLog2 - granule_log2;  // of a tile
        const int tile = first_tile + (lane_ >> granules_log2) * kShape.key_warps;
        const int in_tile = lane_ & ((1 << granules_log2) - 1);
        const int key = tile * kKeys + (in_tile << granule_log2);
        const bool is_needed = tile < ahead_.end_tile && key < ahead_.end_key &&
                               key + (1 << granule_log2) > ahead_.first_key;
        uint32_t offset;
        const uint32_t index = params_.page_size(offset, static_cast<uint32_t>(key));
        const bool has_pages = params_.block_table != nullptr;
        ahead_.page = is_needed ? 0 : -1;
        ahead_.offset = has_pages ? static_cast<int32_t>(offset) : first_offset_ + key;
        if (is_needed && has_pages) {
            ahead_.page = table_[index];  // nobody waits for it here
        }
    }

    __device__ __forceinline__ void look_ahead(const SequenceWindow* window) {
        if (!has_ahead_) {
            fetch(ahead_.tile + tiles_per_batch() * kShape.key_warps, window);
        }
    }

    // The next batch, which has been looked up.
    __device__ __forceinline__ void take_batch() {
        now_ = ahead_;
        has_ahead_ = now_.tile >= now_.end_tile;  // behind the last one there is nothing
        in_batch_ = 0;
        if constexpr (!Config::kBeside) {
            first_place_[0] = first_place<kRowBytesK>(params_.kv[0]);
            first_place_[1] = first_place<kRowBytesV>(params_.kv[1]);
        }
        batch_end_ = min(now_.tile + tiles_per_batch() * kShape.key_warps, now_.end_tile);
        // 16 keys a lane, if there are pages enough for that
        const int tile = now_.tile + lane_ / kGroups * kShape.key_warps;
        const int first_key = tile * kKeys + lane_ % kGroups * 16;
        simple_ = __ballot_sync(
            kWarp,
            params_.copies_whole_rows && is_page(params_, now_.page) &&
                first_key >= now_.first_key && first_key + 16 <= now_.end_key
        );
    }

    // Copies the next tile into a stage; leaves it alone where there is none. The next batch has been
    // looked up if this one is over.
    __device__ __forceinline__ void copy_next(int stage) {
        if (now_.tile >= batch_end_) {
            take_batch();
        }
        if (now_.tile < now_.end_tile) {
            const int to = ring_ + stage * kStageBytes;
            bool by_boxes = false;
            if constexpr (Config::kBeside) {
                by_boxes = is_tile_simple();
                by_boxes_ = (by_boxes_ & ~(1u << stage)) | static_cast<uint32_t>(by_boxes) << stage;
                if (by_boxes) {
                    copy_boxes(stage, &in_shared_memory<char>(to));
                }
            }
            if (!by_boxes) {
#pragma unroll
                for (int group = 0; group < kKeys; group += 16) {
                    copy_keys(to, group);
                }
            }
            now_.tile += kShape.key_warps;
            ++in_batch_;
        }
        cute::cp_async_fence();
    }

    __device__ int granule_lane(int key_in_tile) const {
        return (in_batch_ * kKeys + key_in_tile) >> params_.granule_log2;
    }

    // Whether 16 keys of the tile are whole rows of one page, and visible.
    __device__ __forceinline__ bool is_simple(int group) const {
        return (simple_ >> (in_batch_ * kGroups + group) & 1) != 0;
    }

    // Where TMA counts the bytes of a stage.
    __device__ __forceinline__ uint64_t* filled(int stage) const {
        __shared__ uint64_t barriers[kShape.key_warps][kStages];
        return &barriers[key_warp_][stage];
    }

    __device__ __forceinline__ bool is_tile_simple() const {
        static constexpr uint32_t kAll = (1u << kGroups) - 1;
        return (simple_ >> in_batch_ * kGroups & kAll) == kAll;
    }

    // Copies the whole tile by TMA: into the same places, for the swizzle is the same. (By the lanes that
    // have the pages, without shuffles: they take turns, in loops that take longer.)
    __device__ __forceinline__ void copy_boxes(int stage, char* to) const {
        static constexpr int kSlabBytes = 128;
        static constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
        int pages[kGroups];
        int offsets[kGroups];
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
            pages[i] = __shfl_sync(kWarp, now_.page, in_batch_ * kGroups + i);
            offsets[i] = __shfl_sync(kWarp, now_.offset, in_batch_ * kGroups + i);
        }
        if (cute::elect_one_sync()) {
            cutlass::arch::ClusterTransactionBarrier::arrive_and_expect_tx(
                filled(stage), kStageBytes
            );
#pragma unroll
            for (int i = 0; i < kGroups; ++i) {
                char* const group = to + i * 16 * kSlabBytes;
#pragma unroll
                for (int slab = 0; slab < kRowBytesK / kSlabBytes; ++slab) {
                    cute::SM90_TMA_LOAD_4D::copy(
                        &boxes_->k,
                        filled(stage),
                        kHint,
                        group + slab * kKeys * kSlabBytes,
                        slab * kSlabBytes / Config::kElementBytes,
                        offsets[i],
                        now_.kv_head,
                        pages[i]
                    );
                }
                cute::SM90_TMA_LOAD_5D::copy(
                    &boxes_->v,
                    filled(stage),
                    kHint,
                    group + kKeys * kRowBytesK,
                    0,
                    offsets[i],
                    0,
                    now_.kv_head,
                    pages[i]
                );
            }
        }
        __syncwarp();
    }

    // Copies the tile's 16 keys from `group` on.
    __device__ __forceinline__ void copy_keys(int to, int group) const {
        if (is_simple(group / 16)) [[likely]] {
            const int lane = in_batch_ * kGroups + group / 16;
            const int page = __shfl_sync(kWarp, now_.page, lane);
            const int offset = __shfl_sync(kWarp, now_.offset, lane);
            copy_page<KLayout, kRowBytesK, 0>(page, offset, to, group);
            copy_page<VLayout, kRowBytesV, 1>(page, offset, to + kKeys * kRowBytesK, group);
        } else {
            const int first_key = now_.tile * kKeys + group;
            const SomeKeys<Config> some = {
                now_.page,
                now_.offset,
                now_.kv_head,
                granule_lane(group),
                now_.first_key - first_key,
                now_.end_key - first_key,
                group,
                row_warp_,
            };
            SomeKeys<Config>::copy(params_, some, &in_shared_memory<char>(to));
        }
    }

    // How this lane takes part in the copy of 16 whole rows.
    template <int kRowBytes>
    struct Share {
        using Copy = RowCopy<kRowBytes>;
        // Instructions for 16 keys, those of a row warp
        static constexpr int kSteps = 16 / Copy::kRows / kShape.row_warps;
        static_assert(kSteps * Copy::kRows * kShape.row_warps == 16);

        int chunk;
        bool has_row;
        int row;

        __device__ __forceinline__ Share(int lane, int row_warp)
            : chunk(lane % Copy::kChunks),
              has_row(Copy::kAllLanes || lane / Copy::kChunks < Copy::kRows),
              row(row_warp * kSteps * Copy::kRows + lane / Copy::kChunks % Copy::kRows) {}
    };

    // Where this lane's first 16 bytes would be in page 0.
    template <int kRowBytes>
    __device__ __forceinline__ const char* first_place(const gpu::KvSide& side) const {
        const Share<kRowBytes> share(lane_, row_warp_);
        return side.data + now_.kv_head * side.head_stride + share.row * side.token_stride +
               share.chunk * 16;
    }

    template <class Layout, int kRowBytes>
    __device__ __forceinline__ int first_to() const {
        const Share<kRowBytes> share(lane_, row_warp_);
        const int offset = Layout::offset(share.row, share.chunk);
        return Config::kBeside ? offset : ptx::keep(offset);
    }

    // 16 whole rows of one page, all of them visible.
    template <class Layout, int kRowBytes, int kSide>
    __device__ __forceinline__ void copy_page(int page, int offset, int to, int group) const {
        using Copy = RowCopy<kRowBytes>;
        static constexpr int kSteps = Share<kRowBytes>::kSteps;
        const Share<kRowBytes> share(lane_, row_warp_);
        const bool has_row = share.has_row;
        const int first = to + first_to_[kSide];
        const gpu::KvSide& side = params_.kv[kSide];
        const char* from = (Config::kBeside ? first_place<kRowBytes>(side) : first_place_[kSide]) +
                           static_cast<uint64_t>(static_cast<uint32_t>(page)) *
                               static_cast<uint32_t>(side.page_stride) +
                           static_cast<uint64_t>(static_cast<uint32_t>(offset)) *
                               static_cast<uint32_t>(side.token_stride);
        const int64_t step_stride = Copy::kRows * side.token_stride;
#pragma unroll(kUnroll)
        for (int step = 0; step < kSteps; ++step) {
            if (has_row) {
                cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>::copy(
                    *reinterpret_cast<const cute::uint128_t*>(from),
                    in_shared_memory<cute::uint128_t>(
                        Layout::offset_from(first, group + step * Copy::kRows, 0)
                    )
                );
            }
            from += step_stride;
        }
    }

    const KernelParams& params_;
    const gpu::PageBoxes* boxes_;
    WorkList<Config::kRows>& list_;
    const SequenceWindow& window_;
    int ring_;  // in shared memory
    int key_warp_;
    int row_warp_;
    int lane_;
    int stage_ = 0;          // the next to be read
    int in_batch_ = 0;       // the next tile of the batch to be copied
    int batch_end_ = 0;      // the tile behind the batch's last one
    uint32_t simple_ = 0;    // a bit for 16 keys of the batch each
    uint32_t by_boxes_ = 0;  // a bit a stage: TMA fills it
    uint32_t turns_ = 0;     // a bit a stage: whether its barrier is in an odd turn
    bool has_ahead_ = false;
    bool is_done_ = false;
    Batch now_ = {-1, 0, 0, 0, 0, 0, 0};
    Batch ahead_ = {-1, 0, 0, 0, 0, 0, 0};
    DealtTiles<Config> dealt_;
    int first_to_[2];  // of K and V: where this lane copies 16 bytes of a tile's first rows
    const char* first_place_[2] = {};  // and from where, if they are page 0's, for the batch
    const int32_t* table_ = nullptr;
    int32_t first_offset_ = 0;  // where there are no pages: of the sequence's first key
};

}  // namespace pagetile::sm80
