#pragma once

#include <cstddef>
#include <cstdint>

namespace pagetile {

enum class DType : uint8_t {
    kFloat32,
    kFloat16,
    kBFloat16,
    kFloat8E4M3,  // finite and NaN only ("e4m3fn"): largest value 448
    kFloat8E5M2,  // with infinities: largest finite value 57344
    kUInt8,
    kInt32,
    kInt64,
};

constexpr size_t dtype_size(DType dtype) {
    switch (dtype) {
        case DType::kFloat8E4M3:
        case DType::kFloat8E5M2:
        case DType::kUInt8:
            return 1;
        case DType::kFloat16:
        case DType::kBFloat16:
            return 2;
        case DType::kFloat32:
        case DType::kInt32:
            return 4;
        case DType::kInt64:
            return 8;
    }
    return 0;
}

constexpr const char* dtype_name(DType dtype) {
    switch (dtype) {
        case DType::kFloat32:
            return "float32";
        case DType::kFloat16:
            return "float16";
        case DType::kBFloat16:
            return "bfloat16";
        case DType::kFloat8E4M3:
            return "float8_e4m3fn";
        case DType::kFloat8E5M2:
            return "float8_e5m2";
        case DType::kUInt8:
            return "uint8";
        case DType::kInt32:
            return "int32";
        case DType::kInt64:
            return "int64";
    }
    return "unknown";
}

constexpr bool is_float8(DType dtype) {
    return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
}

// The types that queries, keys, values and outputs are computed from.
constexpr bool is_float(DType dtype) {
    return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

}  // namespace pagetile
