#pragma once

// Keys and values of 8 bits, widened by producer warps.

#include "attention/sm90/staged_producer.cuh"

#include <cstdint>
#include <type_traits>

namespace pagetile::sm90 {

template <class Config>
struct Widening {
    template <class Mine>
    static __device__ __forceinline__ void run(
        const PrefillParams& params,
        Shared<Config>& shared,
        const Item& item,
        int tile,
        bool looks,
        RingPlace<Config::kTile.stages> ring,
        int raw
    ) {
        wait(free_of<Mine>(shared, ring.index), ring.turn ^ 1);
        const char* from = raw_tile<Mine>(shared, raw);
        char* to = Mine::kIsV ? shared.v[ring.index] : shared.k[ring.index];
        if (params.is_e5m2) {
            widen_granules<cutlass::float_e5m2_t, Mine>(from, to);
        } else {
            widen_granules<cutlass::float_e4m3_t, Mine>(from, to);
        }
        if constexpr (Mine::kIsV) {
            if (looks) {
                __syncwarp();
                EdgeValues<Config>::template clean<Mine>(shared, item, tile, ring.index);
            }
        }
    }

private:
    // A lane takes 16 elements at a time, 16 bytes that become twice as many. Eight lanes have four such
    // parts of two rows, which are chosen so that they meet no bank twice: rows of 128 bytes are swizzled
    // on both sides.
    template <class Stored, class Mine>
    static __device__ __forceinline__ void widen_granules(const char* from, char* to) {
        constexpr bool kIsV = Mine::kIsV;
        constexpr int kSlabs = kIsV ? Config::kSlabsV : Config::kSlabs;
        constexpr int kRowBytes = kSlabs * kSlabElements;
        static_assert(kSlabs <= 2);
        const auto lane = static_cast<int>(threadIdx.x % 32);
        const int part = lane % 4;
        const bool is_second = lane / 4 % 2 != 0;
        const int row = kSlabs == 2 ? lane / 8 ^ (is_second ? 5 : 0)
                                    : lane / 8 * 2 + (is_second ? 1 : 0);  // of eight
#pragma unroll 1
        for (int granule = Mine::kFirst; granule < Mine::kEnd; granule += Mine::kStep) {
            // All loads first: the compiler does not know that they read other memory than is stored to.
            uint4 bytes[2 * kSlabs];
#pragma unroll
            for (int i = 0; i < 2 * kSlabs; ++i) {
                const int key = granule * kGranule + i / kSlabs * 8 + row;
                const int slab = i % kSlabs;
                const int part_of_row = kSlabs == 2 ? (slab * 4 + part) ^ row : part;
                bytes[i] =
                    *reinterpret_cast<const uint4*>(from + key * kRowBytes + part_of_row * 16);
            }
#pragma unroll
            for (int i = 0; i < 2 * kSlabs; ++i) {
                const int slab = i % kSlabs;
                const int in_granule = i / kSlabs * 8 + row;
                const int first_row = kIsV ? (granule * kSlabs + slab) * kGranule
                                           : slab * Config::kKeys + granule * kGranule;
                char* row_of_slab = to + (first_row + in_granule) * kSlabBytes;
                const int place = (part * 2 ^ row) * 16;
                uint32_t pairs[8];
                widen_16<Stored, kIsV>(pairs, bytes[i]);
                *reinterpret_cast<uint4*>(row_of_slab + place) =
                    make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
                *reinterpret_cast<uint4*>(row_of_slab + (place ^ 16)) =
                    make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
            }
        }
    }

    template <class Stored, bool kIsV>
    static __device__ __forceinline__ void widen_16(uint32_t (&pairs)[8], const uint4& bytes) {
        gpu::widen<Stored>(pairs[0], pairs[1], bytes.x);
        gpu::widen<Stored>(pairs[2], pairs[3], bytes.y);
        gpu::widen<Stored>(pairs[4], pairs[5], bytes.z);
        gpu::widen<Stored>(pairs[6], pairs[7], bytes.w);
        if constexpr (!kIsV && std::is_same_v<typename Config::Element, cutlass::bfloat16_t>) {
#pragma unroll
            for (uint32_t& pair : pairs) {
                const float2 wide = __half22float2(reinterpret_cast<const __half2&>(pair));
                pair = pack(cutlass::bfloat16_t{}, wide.x, wide.y);
            }
        }
    }
};

template <class Config>
using WideningProducer = StagedProducer<Config, Widening<Config>>;

}  // namespace pagetile::sm90
