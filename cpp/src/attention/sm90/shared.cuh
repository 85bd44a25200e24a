#pragma once

// What the warps of a CTA share: rings of queries, keys, values and items, each place with a barrier
// that says it is full and one that says it is free again.

#include "attention/cuda/prefill_items.cuh"
#include "attention/sm90/prefill_params.h"
#include "attention/sm90/tile_shapes.h"
#include "attention/sm90/wgmma.cuh"

#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_types.h>

#include <cstdint>
#include <type_traits>

namespace pagetile::sm90 {

using cutlass::arch::ClusterBarrier;
using cutlass::arch::ClusterTransactionBarrier;
using gpu::kWarp;

// kTransforms: scores need more than a positive factor. (A test of that in each tile takes 1 % of the
// time at head_dim 128, 2.4 % at 64: H200.)
//
// kWidens: keys and values have 8 bits, and the producers widen them: keys to the queries' type, values
// to fp16, which holds them all and weights, too.
//
// kTransposes: queries, keys and values are e4m3, and multiplied as that. Element is the results' type.
template <
    class Element_,
    int kHeadDim_,
    int kHeadDimV_,
    bool kTransforms_,
    Loading kLoading = Loading::kBoxes>
struct Config {
    using Element = Element_;
    static constexpr bool kWidens = kLoading == Loading::kWidened;
    static constexpr bool kTransposes = kLoading == Loading::kTransposed;
    static constexpr bool kLoadsRows = kLoading == Loading::kRows;
    static constexpr bool kIsFloat8 =
        kWidens || kTransposes;  // keys and values, where they come from
    using Value = std::conditional_t<kIsFloat8, cutlass::half_t, Element>;
    static constexpr int kBytes = kTransposes ? 1 : 2;  // of an element that is multiplied
    static constexpr bool kTransforms = kTransforms_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDimV_;
    static constexpr PrefillTile kTile = prefill_tile(kHeadDim, kHeadDimV, kTransforms, kLoading);
    static constexpr bool kCuts = cuts_items(kHeadDimV, kTransforms);
    // Warpgroups leave out items of which they have no rows. Others lack registers for it.
    static constexpr bool kLeavesOut = kTile.warpgroups == 3 && !(kWidens && kHeadDim == 64);
    // And all of such an item, not all but its first tile.
    static constexpr bool kSkipsItems = kTransposes;
    // There are registers for the weights of two tiles.
    static constexpr bool kKeepsWeights = kHeadDim != 128;
    static constexpr int kRows = kTile.rows();
    static constexpr int kKeys = kTile.keys;
    static constexpr int kGranules = kKeys / kGranule;
    static constexpr int kSlabs = kHeadDim * kBytes / kSlabBytes;
    static constexpr int kSlabsV = kHeadDimV * kBytes / kSlabBytes;
    static constexpr int kQueryBytes = kRows * kHeadDim * kBytes;
    static constexpr int kKeyBytes = kKeys * kHeadDim * kBytes;
    static constexpr int kValueBytes = (kTransposes ? kSlabBytes : kKeys * kBytes) * kHeadDimV;
    static constexpr int kLentGranules = lent_granules(kHeadDim, kLoading);
    // Tiles of 8 bits that the producers are ahead by.
    static constexpr int kRawStages = kIsFloat8 ? 2 : 0;
};

// An item, or a piece of it.
struct Item : gpu::PrefillItem {
    int32_t warpgroups;  // that have rows of it: the first ones
    int32_t first_tile;  // of keys: gone through from the last one down to this
    int32_t last_tile;
    int32_t piece;
    int32_t pieces;
    int32_t cut_item;    // among those that are cut
    int32_t first_slot;  // of its pieces' sums
    float factor;        // kIsFloat8: from scores to log2 units
    float v_scale;
};

// Whether some row does not see all of a tile of keys.
template <class Config>
__device__ __forceinline__ int32_t is_at_edge(const Item& item, int32_t tile) {
    return static_cast<int32_t>((tile + 1) * Config::kKeys > item.keys.all_end) |
           static_cast<int32_t>(tile * Config::kKeys < item.keys.all_begin);
}

inline constexpr int32_t kNoMore = -1;  // num_tokens of what comes after the last item

inline constexpr int kItems = 4;  // of the ring of items: a power of two

inline constexpr int kLoaders = 3;  // warps that bring keys and values

// Tiles of 8 bits, [key][head_dim], and a barrier for each warp that loads them. Where only values are
// changed, keys come to where they are multiplied from.
template <class Config, bool = Config::kWidens, bool = Config::kTransposes>
struct RawTiles {};

template <class Config>
struct RawTiles<Config, true, false> {
    char k[Config::kRawStages][Config::kKeys * Config::kHeadDim];
    char v[Config::kRawStages][Config::kKeys * Config::kHeadDimV];
    uint64_t full[kLoaders][Config::kRawStages];
};

template <class Config>
struct RawTiles<Config, false, true> {
    char v[Config::kRawStages][Config::kKeys * Config::kHeadDimV];
    uint64_t full[kLoaders][Config::kRawStages];
    int32_t places
        [kItems];  // of items: tile t is the (place - t)-th of all that come through the rings
};

// Q: [slab][row][128 bytes]. K: [slab][key][128 bytes]. V: [granule][slab][key of 16][128 bytes];
// kTransposes: [element][128 keys].
template <class Config>
struct alignas(1024) Shared {
    static constexpr int kStages = Config::kTile.stages;
    static constexpr int kBuffers = Config::kTile.query_buffers;

    char q[kBuffers][Config::kQueryBytes];
    char k[kStages][Config::kKeyBytes];
    char v[kStages][Config::kValueBytes];
    RawTiles<Config> raw;
    uint64_t q_full[kBuffers];
    uint64_t q_free[kBuffers];
    uint64_t k_full[kStages];
    uint64_t k_free[kStages];
    uint64_t v_full[kStages];
    uint64_t v_free[kStages];
    uint64_t v_loaded[kStages];  // before v_full, where values are looked at first
    uint64_t item_full[kItems];
    uint64_t item_free[kItems];
    uint64_t item_begun[kItems];  // by the first warpgroup, which has rows of every item
    Item items[kItems];
    bool is_wild[kItems];  // values have been left out, and the results are to be repaired
    PrefillCuts cuts;
};

// Until a barrier has completed a turn.
__device__ __forceinline__ void wait(const uint64_t* barrier, uint32_t turn) {
    ClusterBarrier::wait(barrier, turn);
}

// Whoever fills a place with a tile has waited for it to be free: the next time it need not wait for
// warpgroups that leave the tile out.
template <class Config, bool kIsV>
__device__ __forceinline__ void free_for_others(const Item& item, int tile, uint64_t* free) {
    const bool is_left_out =
        Config::kSkipsItems || (kIsV ? item.first_tile < item.last_tile : tile < item.last_tile);
    if (Config::kLeavesOut && is_left_out) {
        for (int32_t i = item.warpgroups; i < Config::kTile.warpgroups; ++i) {
            ClusterBarrier::arrive(free);
        }
    }
}

// Warps of the producer warpgroup.
enum class Role : int {
    kKeys = 0,
    kValues = 1,
    kSchedule = 2,  // and queries
    kMoreKeys = 3,  // and values that are lent
};

// What a warp brings of every tile: granules of 16 keys or values, kStep apart.
template <int kWarp_, bool kIsV_, int kFirst_, int kStep_, int kGranules_>
struct Part {
    static constexpr int kWarp = kWarp_;  // of the loaders
    static constexpr bool kIsV = kIsV_;
    static constexpr int kFirst = kFirst_;
    static constexpr int kStep = kStep_;
    static constexpr int kGranules = kGranules_;
    static constexpr int kRows = kGranules * kGranule;
    static constexpr int kEnd = kFirst + (kGranules - 1) * kStep + 1;

    static __device__ __forceinline__ bool has(int granule) {
        return granule >= kFirst && granule < kEnd && granule % kStep == kFirst % kStep;
    }
};

// The barriers of a stage of the ring that a part belongs to.
template <class Mine, class Config>
__device__ __forceinline__ uint64_t* full_of(Shared<Config>& shared, int stage) {
    return Mine::kIsV ? &shared.v_full[stage] : &shared.k_full[stage];
}

template <class Mine, class Config>
__device__ __forceinline__ uint64_t* free_of(Shared<Config>& shared, int stage) {
    return Mine::kIsV ? &shared.v_free[stage] : &shared.k_free[stage];
}

// How the three loaders share a tile. (Where the second one has values, too, and all cost work by the row,
// 4 and 1 granules of keys with 4 and 1 of values take 5 % less time than 3 and 2 with 5: H200.)
template <class Config, bool = Config::kTransposes>
struct Parts {
    static constexpr int kLent = Config::kLentGranules;
    static constexpr bool kLends = kLent > 0;
    static constexpr int kStep = kLends ? 1 : 2;
    static constexpr int kKeys = kLends ? Config::kGranules - kLent : (Config::kGranules + 1) / 2;
    using Keys = Part<0, false, 0, kStep, kKeys>;
    using MoreKeys = Part<1, false, kLends ? kKeys : 1, kStep, Config::kGranules - kKeys>;
    using Values = Part<2, true, 0, 1, Config::kGranules - kLent>;
    using LentValues =
        Part<1, true, Config::kGranules - kLent, 1, kLent>;  // by the warp of MoreKeys
};

// Keys cost one warp nothing but copies, values two of them the rest.
template <class Config>
struct Parts<Config, true> {
    static constexpr int kHalf = Config::kGranules / 2;
    using Keys = Part<0, false, 0, 1, Config::kGranules>;
    using Values = Part<2, true, 0, 1, kHalf>;
    using LentValues = Part<1, true, kHalf, 1, Config::kGranules - kHalf>;
};

// A place in a ring, and whether its barriers are in an odd turn.
template <int kSize>
struct RingPlace {
    int index = 0;
    uint32_t turn = 0;

    __device__ __forceinline__ void advance() {
        if (++index == kSize) {
            index = 0;
            turn ^= 1;
        }
    }

    __device__ __forceinline__ RingPlace previous() const {
        return index > 0 ? RingPlace{index - 1, turn} : RingPlace{kSize - 1, turn ^ 1};
    }

    __device__ __forceinline__ void advance(int32_t steps) {
        const uint32_t places = static_cast<uint32_t>(index + steps);
        index = static_cast<int>(places % kSize);
        turn ^= places / kSize & 1;
    }
};

// The ring of items, as a warp reads it: an item stays until it is released.
template <class Config>
class ItemReader {
public:
    __device__ explicit ItemReader(Shared<Config>& shared) : shared_(shared) {
        if constexpr (Config::kTransposes) {
            // Here, where the warpgroup has its registers: else ptxas keeps it from before that, and spills it.
            asm volatile("mov.u32 %0, 0;" : "=r"(next_));
        }
    }

    __device__ __forceinline__ const Item& wait() {
        sm90::wait(&shared_.item_full[next_ % kItems], next_ / kItems % 2);
        ++next_;
        return item();
    }

    __device__ __forceinline__ const Item& item() const {
        return shared_.items[(next_ - 1) % kItems];
    }

    // Its place in a ring where every item has one.
    template <int kSize>
    __device__ __forceinline__ RingPlace<kSize> place() const {
        return {static_cast<int>((next_ - 1) % kSize), (next_ - 1) / kSize % 2};
    }

    // The one before.
    __device__ __forceinline__ bool has_previous() const { return next_ > 1; }

    __device__ __forceinline__ const Item& previous() const {
        return shared_.items[(next_ - 2) % kItems];
    }

    __device__ __forceinline__ void release(const Item& item) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            ClusterBarrier::arrive(&shared_.item_free[&item - shared_.items]);
        }
    }

    // For a warpgroup that has left out tiles: that the rings are not further from its place than one
    // turn. To the first one, which leaves out none, this says where it is.
    __device__ __forceinline__ void begin(int warpgroup, bool has_left_out) {
        const uint32_t mine = next_ - 1;
        uint64_t* const begun = &shared_.item_begun[mine % kItems];
        if (warpgroup == 0) {
            if (threadIdx.x % 128 == 0) {
                ClusterBarrier::arrive(begun);
            }
        } else if (has_left_out) {
            sm90::wait(begun, mine / kItems % 2);
        }
    }

private:
    Shared<Config>& shared_;
    uint32_t next_ = 0;
};

}  // namespace pagetile::sm90
