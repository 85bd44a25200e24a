#pragma once

// Tiles of the split-KV kernel: how its warps share the work, by head dimension, size of an element
// and rows, and how deep the rings are that fit into an architecture's shared memory.

namespace pagetile::sm80 {

// A warp multiplies keys (16 an instruction) with row_steps x 8 rows. key_warps take tiles of `keys`
// keys in turn; row_warps share a tile, each with rows of its own.
struct TileShape {
    int keys;
    int key_warps;
    int row_warps;
    int row_steps;
    int stages;           // tiles of keys of the ring that row_warps share
    bool by_tma = false;  // TMA fills the rings

    constexpr int num_threads() const { return 32 * key_warps * row_warps; }

    constexpr int rows() const { return 8 * row_warps * row_steps; }
};

// Bytes of shared memory that a CTA may have, by __CUDA_ARCH__.
constexpr int max_shared_memory(int arch) {
    if (arch >= 1200 || arch == 860 || arch == 890) {
        return 99 * 1024;
    }
    return arch < 900 ? 163 * 1024 : 227 * 1024;
}

// One row of the warps' results in shared memory, in floats. The pad keeps a store of a fragment
// free of bank conflicts.
constexpr int merge_row_floats(int head_dim_v) { return head_dim_v + 4; }

constexpr int merge_bytes(const TileShape& shape, int head_dim_v) {
    const int row = merge_row_floats(head_dim_v) * 4 + 8;  // and its largest score and sum
    return shape.key_warps * shape.rows() * row + 16;
}

// Where the pieces of rows meet in a cluster's shared memory. A thread block has the rows of its
// share from all pieces: at most 7 more than there are rows.
constexpr bool meets_in_clusters(const TileShape& shape, int arch) {
    return arch >= 900 && shape.rows() == 8 && !shape.by_tma;
}

constexpr int meeting_bytes(const TileShape& shape, int head_dim_v, int arch) {
    return meets_in_clusters(shape, arch) ? (shape.rows() + 7) * (head_dim_v * 4 + 8) : 0;
}

// The rings begin at multiples of so many bytes. (A ring at an odd multiple of 16 takes copies at 3.7
// TB/s instead of 4.4, H200.) TMA swizzles by the address, in slabs of 1024 bytes.
constexpr int ring_alignment(const TileShape& shape) { return shape.by_tma ? 1024 : 128; }

// The warps' lists of work, and the barriers of rings that TMA fills, at most; the rings follow.
constexpr int list_bytes(const TileShape& shape) {
    const int lists = (shape.key_warps * shape.row_warps + 1) * 144 + 2860;
    const int barriers = shape.by_tma ? shape.key_warps * shape.stages * 8 : 0;
    const int alignment = ring_alignment(shape);
    return (lists + barriers + alignment - 1) / alignment * alignment;
}

// The queries of an item and of the next one, 16 bits an element.
constexpr int query_bytes(const TileShape& shape, int head_dim) {
    return 2 * shape.rows() * head_dim * 2;
}

constexpr int stage_bytes(const TileShape& shape, int head_dim, int head_dim_v, int element_bytes) {
    return shape.keys * (head_dim + head_dim_v) * element_bytes;
}

constexpr int shared_memory(
    const TileShape& shape, int head_dim, int head_dim_v, int element_bytes, int arch
) {
    return shape.key_warps * shape.stages *
               stage_bytes(shape, head_dim, head_dim_v, element_bytes) +
           query_bytes(shape, head_dim) + merge_bytes(shape, head_dim_v) +
           meeting_bytes(shape, head_dim_v, arch);
}

// H200, docs/kernels/attention_decode.md: eight warps with rings of their own and 128 KB in flight
// take what the memory gives; four warps suffice where a stage is 12 KB or more; two row warps beat
// one with twice the rows (32 rows of 128: 492 us against 538).
constexpr TileShape tile_shape(
    int head_dim, int head_dim_v, int element_bytes, int rows, int arch
) {
    const int shared_memory_limit = max_shared_memory(arch);
    TileShape shape = {};
    shape.row_steps = rows >= 16 && head_dim_v <= 128 && head_dim <= 128 ? 2 : 1;
    shape.row_warps = rows / 8 / shape.row_steps;
    const bool fits_registers = head_dim <= 64 || (head_dim <= 128 && shape.row_steps == 1);
    // Where fp8 is widened by several instructions (8.0, 8.6), 32 keys take too many registers.
    const bool widens_cheaply = element_bytes == 2 || shared_memory_limit > 200 * 1024;
    const bool shares_tiles = shape.row_warps > 1 && head_dim <= 128 && widens_cheaply;
    const bool small_rows = (element_bytes == 1 || head_dim <= 64) && fits_registers;
    shape.keys = small_rows || shares_tiles ? 32 : 16;
    const int most = (head_dim + head_dim_v) * shape.keys * element_bytes > 10 * 1024 ? 4 : 8;
    for (int least_stages = 2; least_stages >= 1; --least_stages) {
        for (shape.key_warps = most; shape.key_warps >= 1; shape.key_warps /= 2) {
            if (shape.key_warps * shape.row_warps > 8) {
                continue;
            }
            const int ring =
                shape.key_warps * stage_bytes(shape, head_dim, head_dim_v, element_bytes);
            const int others = list_bytes(shape) + query_bytes(shape, head_dim) +
                               merge_bytes(shape, head_dim_v) +
                               meeting_bytes(shape, head_dim_v, arch);
            const int stages = (shared_memory_limit - others) / ring;
            if (stages >= least_stages) {
                // 128 KB in flight saturate the memory; more wins nothing (H200).
                const int enough = ring < 64 * 1024 ? 128 * 1024 / ring : 2;
                shape.stages = stages < enough ? stages : enough;
                return shape;
            }
        }
    }
    return shape;  // unreachable for the head dimensions built: checked where it is used
}

// Beside a kernel that prefills, on Hopper, for 8 rows and elements of 16 bits. There are few
// multiprocessors then, and what limits each is not the memory but how long its warps take for a tile:
// TMA copies for them, and they are two more, as many as the shared memory has rings for.
constexpr TileShape tile_shape_beside(int head_dim) {
    return {
        .keys = head_dim <= 64 ? 32 : 16,
        .key_warps = 10,
        .row_warps = 1,
        .row_steps = 1,
        .stages = 2,
        .by_tma = true,
    };
}

static_assert(
    shared_memory(tile_shape_beside(128), 128, 128, 2, 900) + list_bytes(tile_shape_beside(128)) <=
    max_shared_memory(900)
);

}  // namespace pagetile::sm80
