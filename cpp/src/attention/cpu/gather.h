#pragma once

// Finds the rows of one KV head through the block table. Part of the per-instruction-set kernels.

#include "attention/cpu/scratch.h"
#include "common/cpu_kernels.h"
#include "common/rows.h"
#include "common/vec.h"

namespace pagetile::PAGETILE_ISA {

// The rows of one KV head in one of the caches, read into fp32 where they cannot be used in place.
struct HeadRows {
    CacheView cache;
    RowReader read;
    int64_t element_size;
    int64_t dim;
    const char* head;  // the head's first row in page 0
    bool in_place;     // dense fp32 rows of whole vectors

    HeadRows(const CacheView& view, DType dtype, int64_t head_dim, int64_t kv_head)
        : cache(view),
          read(row_reader(dtype)),
          element_size(static_cast<int64_t>(dtype_size(dtype))),
          dim(head_dim),
          head(offset_bytes(view.data, kv_head * view.head_stride, element_size)),
          in_place(
              dtype == DType::kFloat32 && view.chunk == head_dim && head_dim % kLanes == 0 &&
              reinterpret_cast<uintptr_t>(view.data) % alignof(float) == 0
          ) {}

    const char* at(int64_t page, int64_t token) const {
        return offset_bytes(
            head, page * cache.page_stride + token * cache.token_stride, element_size
        );
    }

    const float* fetch(int64_t page, int64_t token, float* copy) const {
        const char* row = at(page, token);
        if (in_place) {
            return reinterpret_cast<const float*>(row);
        }
        read(row, copy, dim, cache.chunk, cache.chunk_stride);
        return copy;
    }

    // Rows of a head lie apart, in pages that lie apart: no hardware prefetcher finds the next one.
    void prefetch(int64_t page, int64_t token) const {
        constexpr int64_t kCacheLine = 64;
        const char* row = at(page, token);
        for (int64_t i = 0; i < cache.chunk * element_size; i += kCacheLine) {
            __builtin_prefetch(row + i);
        }
    }
};

// Walks the keys of one sequence: logical page -> physical page, one look into the block table a
// page.
struct PageCursor {
    const int32_t* pages;  // the sequence's row of the block table; null for packed rows
    int64_t page_size;
    int64_t num_pages;
    int64_t logical;
    int64_t token;
    int64_t page;  // -1: outside the pool

    PageCursor(const AttentionParams& params, const AttentionTile& tile, int64_t key)
        : pages(
              params.block_table == nullptr
                  ? nullptr
                  : params.block_table + tile.batch_idx * params.block_table_stride
          ),
          page_size(params.page_size),
          num_pages(params.num_pages),
          logical(key / params.page_size),
          token(key % params.page_size) {
        if (pages == nullptr) {
            logical += larger<int64_t>(params.cu_seqlens_k[tile.batch_idx], 0);
        }
        look_up();
    }

    void look_up() {
        page = pages == nullptr ? logical : pages[logical];
        page = page >= 0 && page < num_pages ? page : -1;
    }

    // To the next key; `last` says that there is none, and that the block table may end here.
    void step(bool last) {
        if (++token == page_size) {
            token = 0;
            ++logical;
            if (!last) {
                look_up();
            }
        }
    }
};

struct KeyRows {
    const float* k[kTileN];
    const float* v[kTileN];
};

// Fills rows.k and rows.v for keys [begin, end) of the tile that starts at key `first`; the others
// point at zeros. Prefetches the keys that follow, up to `prefetch_end`.
inline void gather(
    const AttentionParams& params,
    const AttentionTile& tile,
    const HeadRows& k_rows,
    const HeadRows& v_rows,
    int64_t first,
    int64_t begin,
    int64_t end,
    int64_t prefetch_end,
    const Scratch& scratch,
    KeyRows& rows
) {
    for (int64_t n = 0; n < kTileN; ++n) {
        rows.k[n] = scratch.zero_row;
        rows.v[n] = scratch.zero_row;
    }
    PageCursor cursor(params, tile, begin);
    PageCursor ahead = cursor;
    if (end < prefetch_end) {
        ahead = PageCursor(params, tile, end);
    }
    int64_t next = end;
    for (int64_t key = begin; key < end; ++key) {
        const int64_t n = key - first;
        if (cursor.page >= 0) {
            rows.k[n] = k_rows.fetch(cursor.page, cursor.token, scratch.k + n * scratch.d_padded);
            rows.v[n] = v_rows.fetch(cursor.page, cursor.token, scratch.v + n * scratch.dv_padded);
        }
        cursor.step(key + 1 == end);
        if (next < prefetch_end) {
            if (ahead.page >= 0) {
                k_rows.prefetch(ahead.page, ahead.token);
                v_rows.prefetch(ahead.page, ahead.token);
            }
            ++next;
            ahead.step(next == prefetch_end);
        }
    }
}

}  // namespace pagetile::PAGETILE_ISA
