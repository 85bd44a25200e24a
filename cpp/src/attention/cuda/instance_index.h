#pragma once

// Where in a table of a family's instances one is.

#include "attention/dispatch.h"
#include "pagetile/dtype.h"

namespace pagetile::gpu {

inline constexpr int kHeadDimPairs = 8;
inline constexpr int kKvTypes = 4;

// 64, 96, 128, 192, 256 and 192/128 are built.
constexpr int index_of(HeadDims dims) { return dims.k == dims.v ? dims.k / 32 - 2 : 7; }

constexpr int index_of(DType kv_dtype) {
    switch (kv_dtype) {
        case DType::kFloat16:
            return 0;
        case DType::kBFloat16:
            return 1;
        case DType::kFloat8E4M3:
            return 2;
        default:
            return 3;
    }
}

}  // namespace pagetile::gpu
