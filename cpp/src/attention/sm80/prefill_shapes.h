#pragma once

// Tiles of the portable prefill kernel: how its warps share the work, by head dimension, size of an
// element and the architecture's shared memory.

#include "attention/sm80/tile_shapes.h"

namespace pagetile::sm80 {

// Packed rows of a tile, on every architecture: they decide which items there are.
inline constexpr int kPrefillRows = 128;

// Each warp has row_steps x 16 rows of its own, and all of them share the tiles of keys.
struct PrefillTile {
    int keys;
    int warps;
    int row_steps;
    int k_stages;        // tiles of keys in shared memory: 1 or 2
    int v_stages;        // of values; not more than of keys
    int ctas;            // on a multiprocessor
    bool keeps_queries;  // in registers

    constexpr int num_threads() const { return 32 * warps; }
};

// What a CTA has besides the tiles: its items, and 1 KB that the system takes.
inline constexpr int kPrefillItemBytes = 1024;
inline constexpr int kReservedBytes = 1024;

constexpr int prefill_query_bytes(int head_dim) { return kPrefillRows * head_dim * 2; }

constexpr int prefill_shared_memory(
    const PrefillTile& tile, int head_dim, int head_dim_v, int element_bytes
) {
    return prefill_query_bytes(head_dim) +
           tile.keys * element_bytes * (tile.k_stages * head_dim + tile.v_stages * head_dim_v);
}

// The most keys of a tile. Where fp8 is widened by several instructions (8.0, 8.6), or two CTAs have
// little shared memory and scores wait for values, there are registers for fewer.
constexpr int most_keys(int head_dim, int element_bytes, int row_steps, int arch) {
    const bool widens_cheaply = arch >= 890;
    const bool is_roomy = max_shared_memory(arch) > 200 * 1024 && head_dim <= 128;
    const bool has_registers = row_steps == 2 ? is_roomy : widens_cheaply;
    return element_bytes == 1 && head_dim >= 128 && !has_registers ? 32 : 64;
}

// 32 rows a warp halve what is read of keys and values from shared memory, which is as busy as the
// tensor cores; up to 128 of head_dim_v there are registers for their sums. Then two CTAs beside each
// other: one multiplies while the other one is at its exponentials.
constexpr PrefillTile prefill_tile(int head_dim, int head_dim_v, int element_bytes, int arch) {
    for (int ctas = head_dim_v <= 128 ? 2 : 1; ctas >= 1; --ctas) {
        PrefillTile tile = {};
        tile.ctas = ctas;
        tile.row_steps = ctas;
        tile.warps = kPrefillRows / 16 / tile.row_steps;
        tile.keeps_queries = tile.row_steps * head_dim <= (ctas == 2 ? 128 : 192);
        tile.keys = most_keys(head_dim, element_bytes, tile.row_steps, arch);
        // Rather one CTA than two with tiny tiles.
        for (const int least = ctas == 2 ? tile.keys : 32; tile.keys >= least; tile.keys /= 2) {
            for (int stages = 4; stages >= 2; --stages) {
                tile.k_stages = (stages + 1) / 2;
                tile.v_stages = stages / 2;
                const int bytes = prefill_shared_memory(tile, head_dim, head_dim_v, element_bytes) +
                                  kPrefillItemBytes + kReservedBytes;
                if (ctas * bytes <= max_shared_memory(arch) + kReservedBytes) {
                    return tile;
                }
            }
        }
    }
    return {};  // unreachable for the head dimensions built: checked where it is used
}

}  // namespace pagetile::sm80
