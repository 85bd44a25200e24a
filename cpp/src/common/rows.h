#pragma once

// Rows of any float type to fp32 and back, through plain or chunked addresses. For the
// per-instruction-set kernels.

#include "common/vec.h"

namespace pagetile::PAGETILE_ISA {

// Reads n elements that stand in chunks: element d at (d / chunk) * chunk_stride + d % chunk.
using RowReader =
    void (*)(const void* from, float* to, int64_t n, int64_t chunk, int64_t chunk_stride);
// Writes n elements densely.
using RowWriter = void (*)(const float* from, void* to, int64_t n);

template <DType kFrom>
void read_row(const void* from, float* to, int64_t n, int64_t chunk, int64_t chunk_stride) {
    using Storage = typename Element<kFrom>::Storage;
    const auto* source = static_cast<const Storage*>(from);
    for (int64_t begin = 0; begin < n; begin += chunk) {
        const int64_t count = smaller(chunk, n - begin);
        for_each_vector<kFrom>(source, count, [&](int64_t i, int64_t lanes, Vec v) {
            store_first<DType::kFloat32>(to + begin + i, lanes, v);
        });
        source += chunk_stride;
    }
}

template <DType kTo>
void write_row(const float* from, void* to, int64_t n) {
    auto* target = static_cast<typename Element<kTo>::Storage*>(to);
    for_each_vector<DType::kFloat32>(from, n, [&](int64_t i, int64_t lanes, Vec v) {
        store_first<kTo>(target + i, lanes, v);
    });
}

inline RowReader row_reader(DType dtype) {
    RowReader reader = nullptr;
    dispatch_float(dtype, [&]<DType kType>() { reader = &read_row<kType>; });
    return reader;
}

inline RowWriter row_writer(DType dtype) {
    RowWriter writer = nullptr;
    dispatch_float(dtype, [&]<DType kType>() { writer = &write_row<kType>; });
    return writer;
}

inline const char* offset_bytes(const void* base, int64_t elements, int64_t element_size) {
    return static_cast<const char*>(base) + elements * element_size;
}

inline char* offset_bytes(void* base, int64_t elements, int64_t element_size) {
    return static_cast<char*>(base) + elements * element_size;
}

}  // namespace pagetile::PAGETILE_ISA
