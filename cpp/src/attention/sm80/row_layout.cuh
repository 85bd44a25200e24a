#pragma once

// Rows in shared memory: where their bytes are, and which lane copies which.

#include <cute/swizzle.hpp>

#include <cstddef>

namespace pagetile::sm80 {

template <class T>
__device__ __forceinline__ T& in_shared_memory(int address) {
    return *static_cast<T*>(__cvta_shared_to_generic(static_cast<size_t>(address)));
}

// A tile of rows in shared memory, in slabs of up to eight 16-byte chunks. Within a slab the chunks
// are swizzled so that eight rows of one chunk, what ldmatrix reads at a time, lie in eight banks.
template <int kKeys, int kRowBytes>
struct RowLayout {
    static constexpr int kChunks = kRowBytes / 16;
    static constexpr int kSlabLog2 = kChunks % 8 == 0 ? 3 : kChunks % 4 == 0 ? 2 : 1;
    static constexpr int kSlab = 1 << kSlabLog2;
    static_assert(kChunks % kSlab == 0);
    using Swizzle = cute::Swizzle<kSlabLog2, 0, 3>;

    // Bytes from the tile's beginning.
    static __device__ constexpr int offset(int key, int chunk) {
        const int in_slab = Swizzle::apply(key << kSlabLog2 | (chunk & (kSlab - 1)));
        return ((chunk >> kSlabLog2) * kKeys * kSlab + in_slab) * 16;
    }

    // offset(key | more_keys, chunk | more_chunks) from offset(key, chunk), where no bit is set in
    // both: an exclusive or and a sum with constants. Or addresses from an address, if the tile is at a
    // multiple of 128.
    static __device__ constexpr int offset_from(int offset_of, int more_keys, int more_chunks) {
        const int slabs = more_chunks >> kSlabLog2;
        const int index = more_keys << kSlabLog2 | (more_chunks & (kSlab - 1));
        const int turned = Swizzle::apply(index) & (kSlab - 1);
        return (offset_of ^ (turned * 16)) + ((index & ~(kSlab - 1)) + slabs * kKeys * kSlab) * 16;
    }
};

// How the lanes of a warp share the copy of rows: each instruction takes whole rows.
template <int kRowBytes>
struct RowCopy {
    static constexpr int kChunks = kRowBytes / 16;
    static constexpr int kRows = 32 / kChunks >= 8   ? 8
                                 : 32 / kChunks >= 4 ? 4
                                 : 32 / kChunks >= 2 ? 2
                                                     : 1;  // of an instruction
    static constexpr bool kAllLanes = kRows * kChunks == 32;
};

}  // namespace pagetile::sm80
