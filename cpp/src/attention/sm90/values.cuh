#pragma once

// Values of tiles at the edge of what rows see. A weight of 0 does not hide a NaN or an infinity from
// a product, so such values must not be there.

#include "attention/cuda/widen.cuh"
#include "attention/sm90/rows.cuh"

#include <cstdint>
#include <type_traits>

namespace pagetile::sm90 {

template <class Element>
inline constexpr uint32_t kExponents = 0x7f807f80;  // all ones: infinity or NaN

template <>
inline constexpr uint32_t kExponents<cutlass::half_t> = 0x7c007c00;

template <class Element>
__device__ __forceinline__ uint32_t non_finite_halves(uint32_t pair) {
    constexpr uint32_t kOnes = kExponents<Element>;
    const uint32_t low = (pair & kOnes & 0xffff) == (kOnes & 0xffff) ? 0xffff : 0;
    const uint32_t high = (pair & kOnes & 0xffff0000) == (kOnes & 0xffff0000) ? 0xffff0000 : 0;
    return low | high;
}

// Bytes of e4m3, which has no infinity: 0xff for each NaN.
template <>
__device__ __forceinline__ uint32_t non_finite_halves<cutlass::float_e4m3_t>(uint32_t four) {
    const uint32_t nan = ((four & 0x7f7f7f7f) + 0x01010101) & 0x80808080;
    return (nan >> 7) * 0xff;
}

// A sum of 0 and NaN, as bytes.
__device__ __forceinline__ uint32_t
add_times_zero(cutlass::float_e4m3_t, uint32_t four, uint32_t sum) {
    return sum | non_finite_halves<cutlass::float_e4m3_t>(four);
}

// Four elements of 8 bits as fp16.
__device__ __forceinline__ void widen(bool is_e5m2, uint32_t (&pairs)[2], uint32_t four) {
    if (is_e5m2) {
        gpu::widen<cutlass::float_e5m2_t>(pairs[0], pairs[1], four);
    } else {
        gpu::widen<cutlass::float_e4m3_t>(pairs[0], pairs[1], four);
    }
}

// Values of a tile at an edge, in shared memory: as they will be multiplied, or before they are transposed.
template <class Config>
class EdgeValues {
public:
    using Element =
        std::conditional_t<Config::kTransposes, cutlass::float_e4m3_t, typename Config::Value>;
    static constexpr int kChunks = Config::kSlabsV * 8;  // of 16 bytes, of a key

    // By the warp that has loaded this part of a tile: what is not finite of the keys that not all rows
    // see becomes 0. Mostly there is nothing to do. (Boxes behind the last key that a row sees are zeros.)
    // Else the item is marked: its results may have to be repaired. hand_over() is to follow.
    template <class Mine>
    static __device__ __forceinline__ void clean(
        Shared<Config>& shared, const Item& item, int32_t tile, int stage
    ) {
        static_assert(Mine::kIsV && Mine::kStep == 1);
        char* const values =
            tile_of(shared, stage) + Mine::kFirst * Config::kSlabsV * kGranuleBytes;
        const int32_t first = tile * Config::kKeys + Mine::kFirst * kGranule;
        const auto in_part = [&](int32_t key) { return min(max(key - first, 0), Mine::kRows); };
        const int32_t begin_of_all = in_part(item.keys.all_begin);
        const int32_t end_of_all = max(in_part(item.keys.all_end), begin_of_all);
        const int32_t end_of_box = (in_part(item.keys.end) + kGranule - 1) / kGranule * kGranule;
        const Chunks edges = {begin_of_all * kChunks, end_of_all * kChunks, end_of_box * kChunks};
        if (!__any_sync(kWarp, has_non_finite(values, edges))) [[likely]] {
            return;
        }
        remove_non_finite(values, edges);
        if (threadIdx.x % 32 == 0) {
            shared.is_wild[&item - shared.items] = true;
        }
    }

private:
    static __device__ __forceinline__ char* tile_of(Shared<Config>& shared, int stage) {
        if constexpr (Config::kTransposes) {
            return shared.raw.v[stage];
        } else {
            return shared.v[stage];
        }
    }

    // Of the 16 bytes of a tile, counted key by key: [0, before) and [after, end).
    struct Chunks {
        int32_t before;
        int32_t after;
        int32_t end;

        __device__ __forceinline__ int32_t count() const { return before + end - after; }

        __device__ __forceinline__ int32_t operator[](int32_t i) const {
            return i < before ? i : i - before + after;
        }
    };

    static __device__ __forceinline__ uint4& chunk_at(char* values, int32_t number) {
        const int32_t key = number / kChunks;
        const int32_t chunk = number % kChunks;
        return *reinterpret_cast<uint4*>(
            values + (key / kGranule * Config::kSlabsV + chunk / 8) * kGranuleBytes +
            key % kGranule * kSlabBytes + chunk % 8 * 16
        );
    }

    // 0 times what is not finite is a NaN, and a sum with a NaN is one. Four loads at a time,
    // for the latency of one.
    static __device__ __forceinline__ bool has_non_finite(char* values, const Chunks& chunks) {
        constexpr int kAtOnce = 4;
        const int32_t count = chunks.count();
        uint32_t sum = 0;
#pragma unroll 1
        for (auto i = static_cast<int32_t>(threadIdx.x % 32); i < count; i += 32 * kAtOnce) {
            uint4 bytes[kAtOnce];
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) {
                // Behind the end once more the first one.
                bytes[k] = chunk_at(values, chunks[i + 32 * k < count ? i + 32 * k : i]);
            }
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) {
                sum = add_times_zero(Element{}, bytes[k].x, sum);
                sum = add_times_zero(Element{}, bytes[k].y, sum);
                sum = add_times_zero(Element{}, bytes[k].z, sum);
                sum = add_times_zero(Element{}, bytes[k].w, sum);
            }
        }
        return non_finite_halves<Element>(sum) != 0;
    }

    static __device__ __forceinline__ void remove_non_finite(char* values, const Chunks& chunks) {
        const int32_t count = chunks.count();
#pragma unroll 1
        for (auto i = static_cast<int32_t>(threadIdx.x % 32); i < count; i += 32) {
            uint4& bytes = chunk_at(values, chunks[i]);
            bytes.x &= ~non_finite_halves<Element>(bytes.x);
            bytes.y &= ~non_finite_halves<Element>(bytes.y);
            bytes.z &= ~non_finite_halves<Element>(bytes.z);
            bytes.w &= ~non_finite_halves<Element>(bytes.w);
        }
    }
};

// Whatever weight a row gives to it, infinity or NaN stays what it is: it is added to the results of
// the rows that see its key, which a warp has just stored, from where the values come from. For items
// that need it, so slowly, and out of the way.
template <class Config>
class Repair {
public:
    using Element = typename Config::Element;

    // is_e5m2: where values have 8 bits.
    static __device__ __noinline__ void run(
        const gpu::KernelParams& params, const Item& item, int warpgroup, bool is_e5m2
    ) {
        __syncwarp();  // the rows are stored
        const int32_t begin_of_all = item.keys.all_begin;
        const int32_t end_of_all = max(item.keys.all_end, begin_of_all);
        add_keys(
            params, item, warpgroup, {item.keys.first, min(begin_of_all, item.keys.end)}, is_e5m2
        );
        add_keys(
            params, item, warpgroup, {max(end_of_all, item.keys.first), item.keys.end}, is_e5m2
        );
    }

private:
    // Of 32 keys at a time those that have such a value: mostly none has, and what was found before
    // the products lay behind the keys that rows see.
    static __device__ void add_keys(
        const gpu::KernelParams& params,
        const Item& item,
        int warpgroup,
        KeyRange keys,
        bool is_e5m2
    ) {
        for (int32_t first = keys.begin; first < keys.end; first += 32) {
            const auto mine = first + static_cast<int32_t>(threadIdx.x % 32);
            const bool is_wild = mine < keys.end && has_non_finite(params, item, mine, is_e5m2);
            unsigned wild = __ballot_sync(kWarp, is_wild);
            for (; wild != 0; wild &= wild - 1) {
                const int32_t key = first + __ffs(static_cast<int>(wild)) - 1;
                add_key(params, item, warpgroup, key, is_e5m2);
            }
        }
    }

    // Values lie at multiples of 16 bytes, and there are eight of them, or a multiple of that.
    static __device__ bool has_non_finite(
        const gpu::KernelParams& params, const Item& item, int32_t key, bool is_e5m2
    ) {
        using Eight = std::conditional_t<Config::kIsFloat8, uint2, uint4>;
        const auto* values = reinterpret_cast<const Eight*>(find_values(params, item, key));
        uint32_t sum = 0;
#pragma unroll 4
        for (int32_t i = 0; values != nullptr && i < params.head_dim_v / 8; ++i) {
            const Eight bytes = values[i];
            if constexpr (Config::kIsFloat8) {
                for (const uint32_t word : {bytes.x, bytes.y}) {
                    uint32_t pairs[2];
                    widen(is_e5m2, pairs, word);
                    sum = add_times_zero(cutlass::half_t{}, pairs[0], sum);
                    sum = add_times_zero(cutlass::half_t{}, pairs[1], sum);
                }
            } else {
                for (const uint32_t word : {bytes.x, bytes.y, bytes.z, bytes.w}) {
                    sum = add_times_zero(Element{}, word, sum);
                }
            }
        }
        return non_finite_halves<typename Config::Value>(sum) != 0;
    }

    static __device__ void add_key(
        const gpu::KernelParams& params, const Item& item, int warpgroup, int32_t key, bool is_e5m2
    ) {
        const char* values = find_values(params, item, key);
        if (values == nullptr) {
            return;
        }
        for (auto d = static_cast<int32_t>(threadIdx.x % 32); d < params.head_dim_v; d += 32) {
            const float value = value_at(values, d, is_e5m2);
            if (!isfinite(value)) {
                add(params, item, warpgroup, key, d, value);
            }
        }
    }

    static __device__ float value_at(const char* values, int32_t d, bool is_e5m2) {
        if constexpr (Config::kIsFloat8) {
            uint32_t pairs[2];
            widen(is_e5m2, pairs, static_cast<uint8_t>(values[d]));
            return unpack(cutlass::half_t{}, pairs[0], 0);
        } else {
            return unpack(Element{}, reinterpret_cast<const uint16_t*>(values)[d], 0);
        }
    }

    // Of the warp's 16 rows, by the lane that has the column.
    static __device__ void add(
        const gpu::KernelParams& params,
        const Item& item,
        int warpgroup,
        int32_t key,
        int32_t column,
        float value
    ) {
        const auto warp = static_cast<int32_t>(threadIdx.x / 32 % 4);
        for (int32_t row = warpgroup * 64 + warp * 16, end = row + 16; row < end; ++row) {
            uint32_t in_group;
            const auto token =
                static_cast<int32_t>(params.group(in_group, static_cast<uint32_t>(row)));
            const KeyRange keys = visible_keys(
                params.shape, item.sequence.q_len, item.sequence.kv_len, item.first_token + token
            );
            if (token >= item.num_tokens || key < keys.begin || key >= keys.end) {
                continue;
            }
            const int64_t q_row = item.sequence.q_begin + item.first_token + token;
            const int64_t head = item.kv_head * params.shape.group + static_cast<int64_t>(in_group);
            auto* out = static_cast<uint16_t*>(params.out) + q_row * params.out_row_stride +
                        head * params.out_head_stride + column;
            *out = static_cast<uint16_t>(pack(Element{}, unpack(Element{}, *out, 0) + value, 0.0f));
        }
    }

    static __device__ const char* find_values(
        const gpu::KernelParams& params, const Item& item, int32_t key
    ) {
        const gpu::KvSide& v = params.kv[1];
        const char* row = v.data + item.kv_head * v.head_stride;
        if (params.block_table == nullptr) {
            const int64_t token = static_cast<int64_t>(item.sequence.kv_begin) + key;
            return row + token * v.token_stride;
        }
        uint32_t offset;
        const uint32_t index = params.page_size(offset, static_cast<uint32_t>(key));
        const int32_t page = params.block_table[item.batch_idx * params.block_table_stride + index];
        if (page < 0 || page >= params.num_pages) {
            return nullptr;
        }
        return row + page * v.page_stride + static_cast<int64_t>(offset) * v.token_stride;
    }
};

}  // namespace pagetile::sm90
