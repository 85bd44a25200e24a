#pragma once

#include "cache_write/cuda/quantize.cuh"
#include "cache_write/write_plan.h"
#include "common/fast_divide.h"
#include "common/ptx.cuh"
#include "pagetile/cache_write.h"

#include <cute/tensor.hpp>
#include <cutlass/fast_math.h>

#include <type_traits>

namespace pagetile::gpu {

// How far it is into rows and caches, in accesses of a vector's width: 32 bits where everything is
// within 2^32 accesses (64 GB in 16-byte ones) and the pool below 2^31 slots, 64 bits elsewhere.
template <bool kWide>
using Distance = std::conditional_t<kWide, int64_t, uint32_t>;

// K or V. "Head" is a dense run of a cache row: a head, or a chunk of one. A stride that is never
// stepped is 0.
template <bool kWide>
struct Side {
    const char* rows;
    char* cache;
    const float* scale;  // null: 1
    Distance<kWide> row_stride;
    Distance<kWide> row_head_stride;
    Distance<kWide> page_stride;
    Distance<kWide> token_stride;
    Distance<kWide> head_stride;
    Distance<kWide> scale_stride;  // elements
    uint32_t items;                // vectors of a head; 0: this launch leaves the side alone
};

template <bool kWide>
struct CacheWriteKernelParams {
    const uint32_t* slots;  // [T] or, as words, [T, 2]
    Side<kWide> k;
    Side<kWide> v;
    FastDivide items_per_token;
    FastDivide items_per_head;
    std::conditional_t<kWide, cutlass::FastDivmodU64, FastDivide> page_size;
    std::conditional_t<kWide, int64_t, int32_t> num_slots;
    uint32_t num_items;
    uint32_t num_tokens;
    uint32_t token_step;  // between the tokens of a thread that has two
    uint32_t words_per_slot;
};

// Where a slot stands.
struct Place {
    uint32_t page;
    uint32_t offset;
};

// False for a slot that is none of the pool's: padding, or out of range.
template <bool kWide>
__device__ __forceinline__ bool find_place(
    const CacheWriteKernelParams<kWide>& params, uint32_t low, uint32_t high, Place& place
) {
    if constexpr (kWide) {
        const auto slot = static_cast<int64_t>(static_cast<uint64_t>(high) << 32 | low);
        if (slot < 0 || slot >= params.num_slots) {
            return false;
        }
        uint64_t page;
        uint64_t offset;
        params.page_size(page, offset, static_cast<uint64_t>(slot));
        place = {static_cast<uint32_t>(page), static_cast<uint32_t>(offset)};
        return true;
    } else {
        place.page = params.page_size(place.offset, low);
        return low < static_cast<uint32_t>(params.num_slots) && high == 0;
    }
}

// One vector of a row and of its cache row.
template <DType kSource, DType kCache, int kVector>
struct Vectors {
    using Source = typename SourceElement<kSource>::Type;
    using Cache = std::conditional_t<kSource == kCache, Source, uint8_t>;
    using Layout = cute::Layout<cute::Int<kVector>>;  // (VECTOR)

    static constexpr bool kConvert = kSource != kCache;
    static constexpr int kSourceBytes = kVector * static_cast<int>(sizeof(Source));
    static constexpr int kLoadBytes = cute::min(16, kSourceBytes);
    static constexpr int kLoads = kSourceBytes / kLoadBytes;
    static constexpr int kStoreBytes = kVector * static_cast<int>(sizeof(Cache));

    using Packed = typename PackedBytes<kSourceBytes>::Type;
    using PackedCache = typename PackedBytes<kStoreBytes>::Type;

    // `distance` in accesses.
    template <class Distance>
    __device__ __forceinline__ static void load(
        const char* rows, Distance distance, Packed& packed
    ) {
        const char* row = rows + static_cast<uint64_t>(distance) * kLoadBytes;
        const auto gRow = cute::make_tensor(
            cute::make_gmem_ptr(reinterpret_cast<const Source*>(row)), Layout{}
        );  // (VECTOR)
        auto rRow = cute::make_tensor(
            cute::make_rmem_ptr(reinterpret_cast<Source*>(&packed)), Layout{}
        );  // (VECTOR)
        cute::copy(cute::AutoVectorizingCopyWithAssumedAlignment<8 * kLoadBytes>{}, gRow, rRow);
    }

    template <class Distance>
    __device__ __forceinline__ static void store(
        char* cache, Distance distance, PackedCache packed
    ) {
        char* row = cache + static_cast<uint64_t>(distance) * kStoreBytes;
        auto gCache = cute::make_tensor(
            cute::make_gmem_ptr(reinterpret_cast<Cache*>(row)), Layout{}
        );  // (VECTOR)
        const auto rCache = cute::make_tensor(
            cute::make_rmem_ptr(reinterpret_cast<Cache*>(&packed)), Layout{}
        );  // (VECTOR)
        cute::copy(
            cute::AutoVectorizingCopyWithAssumedAlignment<8 * kStoreBytes>{}, rCache, gCache
        );
    }

    // What the cache holds for K and V. Both at once, so that the two chains of arithmetic overlap.
    __device__ __forceinline__ static void convert(
        Packed k, float k_scale, Packed v, float v_scale, PackedCache& k_codes, PackedCache& v_codes
    ) {
        if constexpr (!kConvert) {
            k_codes = k;
            v_codes = v;
        } else if (
            Quantizer<kSource, kCache, kVector>::is_usual(k, k_scale) &&
            Quantizer<kSource, kCache, kVector>::is_usual(v, v_scale)
        ) {
            k_codes = Quantizer<kSource, kCache, kVector>::by_reciprocal(k, k_scale);
            v_codes = Quantizer<kSource, kCache, kVector>::by_reciprocal(v, v_scale);
        } else {
            k_codes = Quantizer<kSource, kCache, kVector>::by_division(k, k_scale);
            v_codes = Quantizer<kSource, kCache, kVector>::by_division(v, v_scale);
        }
    }
};

// grid: one thread for each (kTokens tokens, head, vector of the head), K and V together; a thread's
// tokens are params.token_step apart. No loop over memory, nothing shared: all of a thread's loads are
// in flight before the first of them is used.
//
// kPdl costs 0.14 us where it is not used, so it has instances of its own. (H200)
template <DType kSource, DType kCache, int kVector, bool kWide, bool kPdl, int kTokens>
__global__ void __launch_bounds__(WriteLaunch::kThreads) cache_write_kernel(
    const __grid_constant__ CacheWriteKernelParams<kWide> params
) {
    using V = Vectors<kSource, kCache, kVector>;

    // This thread's vector
    const uint32_t id = blockIdx.x * WriteLaunch::kThreads + threadIdx.x;
    if (id >= params.num_items) {
        return;
    }
    uint32_t item_of_token;
    uint32_t vec;
    const uint32_t first_token = params.items_per_token(item_of_token, id);
    const uint32_t head = params.items_per_head(vec, item_of_token);
    const bool has_k = vec < params.k.items;
    const bool has_v = vec < params.v.items;

    // Loads: slots and scales need not wait for the kernel before this one, the rows do
    if constexpr (kPdl) {
        ptx::launch_dependents();
    }
    uint32_t slots_low[kTokens];
    uint32_t slots_high[kTokens];
    CUTE_UNROLL
    for (int i = 0; i < kTokens; ++i) {
        // The last token may have no partner: it then is its own.
        const uint32_t token =
            i == 0 ? first_token
                   : cute::min(first_token + i * params.token_step, params.num_tokens - 1);
        const uint32_t* slot = params.slots + static_cast<uint64_t>(token) * params.words_per_slot;
        slots_low[i] = slot[0];
        slots_high[i] = 0;  // a negative 32-bit slot is beyond every small pool as it is
        if (params.words_per_slot == 2) {
            slots_high[i] = slot[1];
        }
    }
    float k_scale = 1.0f;
    float v_scale = 1.0f;
    if constexpr (V::kConvert) {
        if (params.k.scale != nullptr) {
            k_scale = params.k.scale[head * params.k.scale_stride];
        }
        if (params.v.scale != nullptr) {
            v_scale = params.v.scale[head * params.v.scale_stride];
        }
    }
    if constexpr (kPdl) {
        ptx::wait_for_dependencies();
    }
    typename V::Packed k[kTokens] = {};
    typename V::Packed v[kTokens] = {};
    CUTE_UNROLL
    for (int i = 0; i < kTokens; ++i) {
        const uint32_t token =
            i == 0 ? first_token
                   : cute::min(first_token + i * params.token_step, params.num_tokens - 1);
        const auto distance = [&](const Side<kWide>& side) {
            return token * side.row_stride + head * side.row_head_stride + vec * V::kLoads;
        };
        if (has_k) {
            V::load(params.k.rows, distance(params.k), k[i]);
        }
        if (has_v) {
            V::load(params.v.rows, distance(params.v), v[i]);
        }
    }

    // Where the tokens go
    CUTE_UNROLL
    for (int i = 0; i < kTokens; ++i) {
        if (kWide && params.words_per_slot == 1) {
            slots_high[i] = static_cast<int32_t>(slots_low[i]) >> 31;
        }
        Place place;
        if (!find_place(params, slots_low[i], slots_high[i], place)) {
            continue;
        }
        typename V::PackedCache k_codes;
        typename V::PackedCache v_codes;
        V::convert(k[i], k_scale, v[i], v_scale, k_codes, v_codes);
        const auto distance = [&](const Side<kWide>& side) {
            return place.page * side.page_stride + place.offset * side.token_stride +
                   head * side.head_stride + vec;
        };
        if (has_k) {
            V::store(params.k.cache, distance(params.k), k_codes);
        }
        if (has_v) {
            V::store(params.v.cache, distance(params.v), v_codes);
        }
    }
}

}  // namespace pagetile::gpu
