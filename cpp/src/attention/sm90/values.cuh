#pragma once

// Values of tiles at the edge of what rows see. A weight of 0 does not hide a NaN or an infinity from
// a product, so such values must not be there.

#include "attention/sm90/rows.cuh"

#include <cstdint>

namespace pagetile::sm90 {

// Named barriers of the consumers; 0 is __syncthreads'.
enum class Barrier : int {
    kAllConsumers = 1,
    kWarpgroup = 2,  // and the next ones, one for each consumer warpgroup
};

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

template <class Config>
class EdgeValues {
public:
    using Element = typename Config::Element;
    static constexpr int kChunks = Config::kSlabsV * 8;  // of 16 bytes, of a key

    __device__ __forceinline__ EdgeValues(
        const PlanShape& shape,
        const PrefillItem& item,
        const Rows& rows,
        int32_t tile,
        char* values,
        int warpgroup
    )
        : shape_(shape),
          item_(item),
          rows_(rows),
          tile_(tile),
          values_(values),
          warpgroup_(warpgroup) {}

    // By all consumers, before the products with the tile's values. Keys behind the end of the
    // sequence become zeros. True: `out` has got what is not finite of the keys that only some rows
    // see, and the tile no longer has it.
    __device__ __forceinline__ bool clean(float (&out)[Config::kHeadDimV / 2], bool is_first) {
        const int32_t first = tile_ * Config::kKeys;
        const auto in_tile = [&](int32_t key) { return min(max(key - first, 0), Config::kKeys); };
        const int32_t end = in_tile(item_.keys.end);
        const int32_t seen_by_some = in_tile(item_.keys.all_begin);
        const int32_t seen_by_all = max(in_tile(item_.keys.all_end), seen_by_some);
        clear(in_tile(item_.sequence.kv_len));
        const bool found = has_non_finite(0, seen_by_some) || has_non_finite(seen_by_all, end);
        cutlass::arch::fence_view_async_shared();
        if (!ptx::any_at_barrier(static_cast<int>(Barrier::kWarpgroup) + warpgroup_, 128, found))
            [[likely]] {
            return false;
        }
        // Both warpgroups have read the same values, and so have come here.
        meet();
        if (is_first) {
#pragma unroll
            for (int i = 0; i < Config::kHeadDimV / 2; ++i) {
                out[i] = 0.0f;
            }
        }
        add_non_finite(0, seen_by_some, out);
        add_non_finite(seen_by_all, end, out);
        meet();
        remove_non_finite(0, seen_by_some);
        remove_non_finite(seen_by_all, end);
        cutlass::arch::fence_view_async_shared();
        meet();
        return true;
    }

private:
    __device__ __forceinline__ void meet() const {
        ptx::sync_at_barrier(
            static_cast<int>(Barrier::kAllConsumers), 128 * Config::kTile.warpgroups
        );
    }

    // 16 bytes of a key; which ones does not matter where all are gone through.
    __device__ __forceinline__ uint4& chunk(int32_t key, int32_t index) const {
        return *reinterpret_cast<uint4*>(
            values_ + (key / kGranule * Config::kSlabsV + index / 8) * kGranuleBytes +
            key % kGranule * kSlabBytes + index % 8 * 16
        );
    }

    template <class Do>
    __device__ __forceinline__ void for_each_chunk(int32_t begin, int32_t end, const Do& act) const {
#pragma unroll 1
        for (int32_t i = begin * kChunks + static_cast<int32_t>(threadIdx.x % 128);
             i < end * kChunks;
             i += 128) {
            act(chunk(i / kChunks, i % kChunks));
        }
    }

    // Both warpgroups write the same.
    __device__ __forceinline__ void clear(int32_t begin) const {
        for_each_chunk(begin, Config::kKeys, [](uint4& bytes) { bytes = {0, 0, 0, 0}; });
    }

    __device__ __forceinline__ bool has_non_finite(int32_t begin, int32_t end) const {
        uint32_t found = 0;
        for_each_chunk(begin, end, [&](const uint4& bytes) {
            found |= non_finite_halves<Element>(bytes.x) | non_finite_halves<Element>(bytes.y) |
                     non_finite_halves<Element>(bytes.z) | non_finite_halves<Element>(bytes.w);
        });
        return found != 0;
    }

    __device__ __forceinline__ void remove_non_finite(int32_t begin, int32_t end) const {
        for_each_chunk(begin, end, [](uint4& bytes) {
            bytes.x &= ~non_finite_halves<Element>(bytes.x);
            bytes.y &= ~non_finite_halves<Element>(bytes.y);
            bytes.z &= ~non_finite_halves<Element>(bytes.z);
            bytes.w &= ~non_finite_halves<Element>(bytes.w);
        });
    }

    // Whatever the weight of a key that a row sees, infinity and NaN stay what they are.
    __device__ __forceinline__ void add_non_finite(
        int32_t begin, int32_t end, float (&out)[Config::kHeadDimV / 2]
    ) const {
        const auto t = static_cast<int32_t>(threadIdx.x % 4);
#pragma unroll 1
        for (int32_t key = begin; key < end; ++key) {
            bool sees[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const Visible keys =
                    visible_in_tile<Config>(shape_, item_, rows_.token[i], tile_);
                sees[i] = key - 2 * t >= keys.begin && key - 2 * t < keys.end;
            }
#pragma unroll
            for (int j = 0; j < Config::kHeadDimV / 8; ++j) {
                // TMA has swapped the chunks of 16 bytes by the row's number.
                const char* row =
                    values_ + (key / kGranule * Config::kSlabsV + j / 8) * kGranuleBytes +
                    key % kGranule * kSlabBytes;
                const uint32_t pair = *reinterpret_cast<const uint32_t*>(
                    row + (j % 8 ^ key % 8) * 16 + 4 * t
                );
                const uint32_t wild = non_finite_halves<Element>(pair);
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const bool is_wild = (wild >> 16 * c & 0xffff) != 0;
                    const float value = unpack(Element{}, pair, c);
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        if (is_wild && sees[i]) {
                            out[4 * j + 2 * i + c] += value;
                        }
                    }
                }
            }
        }
    }

    const PlanShape& shape_;
    const PrefillItem& item_;
    const Rows& rows_;
    int32_t tile_;
    char* values_;
    int warpgroup_;
};

}  // namespace pagetile::sm90
