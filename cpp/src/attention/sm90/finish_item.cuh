#pragma once

// The end of an item in a consumer warpgroup.

#include "attention/sm90/pieces.cuh"
#include "attention/sm90/results.cuh"
#include "attention/sm90/values.cuh"

#include <cstdint>

namespace pagetile::sm90 {

// The results of an item, once all of its pieces are there.
template <class Config>
__device__ __forceinline__ void finish_item(
    const gpu::KernelParams& params,
    const PieceSums& pieces,
    const bool& is_e5m2,
    Shared<Config>& shared,
    const Item& item,
    int warpgroup,
    float (&largest)[2],
    float (&sum)[2],
    float (&out)[Config::kHeadDimV / 2]
) {
    bool is_whole = true;
    bool is_wild = false;
    if constexpr (Config::kCuts) {
        is_wild = shared.is_wild[&item - shared.items];
        is_whole =
            item.pieces == 1 || Pieces<Config>::merge(pieces, item, largest, sum, out, is_wild);
    }
    if (is_whole) {
        store_results<Config>(params, item, warpgroup, largest, sum, out);
        if (is_wild || (!Config::kCuts && shared.is_wild[&item - shared.items])) [[unlikely]] {
            Repair<Config>::run(params, item, warpgroup, is_e5m2);
        }
    }
}

}  // namespace pagetile::sm90
