#pragma once

// The producer warps where queries, keys and values are multiplied as the e4m3 that they are. TMA brings
// keys to where they are multiplied from. WGMMA takes operands of 8 bits only with the summed dimension
// dense, which for values is that of the keys: so two warps transpose them.

#include "attention/sm90/staged_producer.cuh"

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>

#include <cstdint>

namespace pagetile::sm90 {

// Of 16 keys, a row of transposed values has the keys in the order 0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, ...
// A lane has the scores of keys 2 t, 2 t + 1, 8 + 2 t and 8 + 2 t + 1 of a row, and these are the weights
// that it must hold side by side to multiply them. So weights stay in their lanes.
template <class Config>
struct Transposing {
    template <class Mine>
    static __device__ __forceinline__ void run(
        const PrefillParams&,
        Shared<Config>& shared,
        const Item& item,
        int tile,
        bool looks,
        RingPlace<Config::kTile.stages> ring,
        int raw
    ) {
        static_assert(Mine::kIsV && Mine::kStep == 1);
        if (looks) {
            EdgeValues<Config>::template clean<Mine>(shared, item, tile, raw);
            __syncwarp();
        }
        wait(free_of<Mine>(shared, ring.index), ring.turn ^ 1);
        transpose<Mine>(raw_tile<Mine>(shared, raw), shared.v[ring.index]);
    }

private:
    // By ldmatrix a lane gets elements 2 g and 2 g + 1 of keys 2 t and 2 t + 1, of eight keys: of two such
    // words one byte permutation makes four keys of one element. It is one of even number in half of the
    // lanes and one of odd number in the others, so that the eight rows that stmatrix writes meet no bank
    // twice: rows of 128 bytes are swizzled on both sides.
    template <class Mine>
    static __device__ __forceinline__ void transpose(char* from, char* to) {
        constexpr int kSteps = 2;  // of 32 elements, loaded before they are stored: registers
        static_assert(Config::kHeadDimV == kSlabBytes && Config::kKeys <= kSlabBytes);
        const auto lane = static_cast<uint32_t>(threadIdx.x % 32);
        // A lane gives the address of a row of a matrix.
        const uint32_t in_eight = lane % 8;
        const uint32_t matrix = lane / 8;
        const uint32_t key = matrix % 2 * 8 + in_eight;
        const uint32_t from_lane = key * kSlabBytes + (matrix / 2 ^ in_eight) * 16;
        const uint32_t is_odd = matrix % 2 ^ in_eight / 4;
        const uint32_t element = matrix / 2 * 16 + in_eight * 2 + is_odd;
        const uint32_t to_lane = element * kSlabBytes + element % 8 * 16;
        const bool odd_first = lane >= 16;
        const uint32_t first = odd_first ? 0x7531 : 0x6420;
        const uint32_t second = odd_first ? 0x6420 : 0x7531;
#pragma unroll 1
        for (int turn = 2 * Mine::kFirst; turn < 2 * Mine::kEnd; ++turn) {
            const int granule = turn / 2;
            uint32_t words[kSteps][4];
#pragma unroll
            for (int i = 0; i < kSteps; ++i) {
                const char* place =
                    from + granule * kGranuleBytes + (from_lane ^ (turn % 2 * 64 + i * 32));
                cute::SM75_U16x8_LDSM_T::copy(
                    *reinterpret_cast<const cute::uint128_t*>(place),
                    words[i][0],
                    words[i][1],
                    words[i][2],
                    words[i][3]
                );
            }
#pragma unroll
            for (int i = 0; i < kSteps; ++i) {
                char* place = to + (turn % 2 * 64 + i * 32) * kSlabBytes + (to_lane ^ granule * 16);
                cute::SM90_U32x4_STSM_N::copy(
                    __byte_perm(words[i][0], words[i][1], first),
                    __byte_perm(words[i][0], words[i][1], second),
                    __byte_perm(words[i][2], words[i][3], first),
                    __byte_perm(words[i][2], words[i][3], second),
                    *reinterpret_cast<cute::uint128_t*>(place)
                );
            }
        }
    }
};

template <class Config>
class TransposingProducer {
public:
    __device__ TransposingProducer(const PrefillParams& params, Shared<Config>& shared)
        : params_(params), shared_(shared) {}

    __device__ __forceinline__ void load_keys() { Producer<Config>(params_, shared_).load_keys(); }

    __device__ __forceinline__ void load_values() { Values(params_, shared_).load_values(); }

    __device__ __forceinline__ void load_more_keys() {
        Values(params_, shared_).load_lent_values();
    }

private:
    using Values = StagedProducer<Config, Transposing<Config>>;

    const PrefillParams& params_;
    Shared<Config>& shared_;
};

}  // namespace pagetile::sm90
