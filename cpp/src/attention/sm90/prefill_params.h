#pragma once

#include "attention/cuda/kernel_params.h"
#include "attention/prefill_schedule.h"
#include "attention/sm90/tile_shapes.h"

#include <cuda.h>

#include <cstdint>

namespace pagetile::sm90 {

// Where the pieces of an item leave their sums.
struct PieceSums {
    float4* sums;        // [2 CTAs, warps, 1 + head_dim_v / 8, 32 threads]
    uint32_t* counters;  // [CTAs, warps, 2]: pieces that are there; not 0: one is to be repaired
    uint32_t most_pieces;
};

struct PrefillParams {
    CUtensorMap q;  // {head_dim, query head, row}; a box is a slab of a tile's rows
    // A box of K is a slab of box_rows keys. So is one of V, in a map like K's, where it is not all
    // slabs of 16 keys. Of 8 bits: {head_dim, token, KV head, page}, a box box_rows keys.
    gpu::PageBoxes pages;
    bool v_in_one_box;
    bool is_e5m2;
    int32_t box_rows;        // 16, or 8 where pages are no multiple of 16
    int32_t granules_on[2];  // 16 and 32 keys, less whole pages
    int32_t page_end;        // a page's keys; packed rows have no end
    int32_t query_bytes;     // of a tile's boxes
    gpu::KernelParams call;
    PrefillShape schedule;
    uint32_t* next_item;  // 0 between launches
    PieceSums pieces;
    const int32_t* num_ctas;  // of this launch that have work; null: all
    Loading loading;  // of the instance; kRows needs neither k and v nor what is said of boxes
    bool pdl;         // queries, keys and values are written by a kernel before this one
};

}  // namespace pagetile::sm90
