// Attention over one tile of query rows, with an online softmax over tiles of keys. Compiled once
// per instruction set.

#include "attention/cpu/gather.h"
#include "attention/cpu/merge.h"
#include "attention/cpu/scratch.h"
#include "attention/cpu/softmax.h"
#include "attention/cpu/tile_math.h"
#include "common/cpu_kernels.h"
#include "common/rows.h"
#include "common/vec.h"

namespace pagetile::PAGETILE_ISA {
namespace {

float scale_at(const Scale& scale, int64_t batch_idx, int64_t head) {
    return scale.data == nullptr
               ? 1.0f
               : scale.data[batch_idx * scale.batch_stride + head * scale.head_stride];
}

// The keys [begin, end) that a query token sees.
struct KeyRange {
    int64_t begin;
    int64_t end;
};

KeyRange visible_keys(const AttentionParams& params, const AttentionTile& tile, int64_t q_idx) {
    // Bottom-right: the last query stands at the last key.
    const int64_t diagonal = q_idx + tile.kv_len - tile.q_len;
    KeyRange range = {tile.key_begin, tile.key_end};
    if (params.causal) {
        range.end = smaller(range.end, diagonal + 1);
    }
    if (params.window_right >= 0) {
        range.end = smaller(range.end, diagonal + params.window_right + 1);
    }
    if (params.window_left >= 0) {
        range.begin = larger(range.begin, diagonal - params.window_left);
    }
    range.end = larger(range.end, range.begin);
    return range;
}

// Divides one row by its sum, the sink included, and writes it and its log-sum-exp.
void finish_row(
    const AttentionParams& params,
    const AttentionTile& tile,
    int64_t row,
    float row_max,
    float row_sum,
    float* values,
    RowWriter write
) {
    const int64_t group = params.num_q_heads / params.num_kv_heads;
    const int64_t token = tile.q_begin + row / group;
    const int64_t head = tile.kv_head * group + row % group;
    float factor = 1.0f;
    if (params.sinks != nullptr) {
        const int64_t size = static_cast<int64_t>(dtype_size(params.sinks_dtype));
        float sink = 0.0f;
        row_reader(params.sinks_dtype)(
            offset_bytes(params.sinks, head * params.sinks_stride, size), &sink, 1, 1, 0
        );
        const float sink_log2 = sink * kLog2e;
        const float new_max = larger(row_max, sink_log2);
        if (new_max != -kInfinity) {
            factor = exp2(broadcast(row_max - new_max))[0];
            row_sum = row_sum * factor + exp2(broadcast(sink_log2 - new_max))[0];
            row_max = new_max;
        }
    }
    const bool empty = row_sum == 0.0f;
    const float v_scale = scale_at(params.v_scale, tile.batch_idx, tile.kv_head);
    scale_row(
        values, round_up(params.head_dim_v, kLanes), empty ? 0.0f : factor / row_sum * v_scale
    );
    const int64_t size = static_cast<int64_t>(dtype_size(params.out_dtype));
    write(
        values,
        offset_bytes(
            params.out, token * params.out_row_stride + head * params.out_head_stride, size
        ),
        params.head_dim_v
    );
    if (params.softmax_lse != nullptr) {
        params.softmax_lse[head * params.lse_head_stride + token * params.lse_row_stride] =
            empty ? -kInfinity : (row_max + log2_of(row_sum)) * kLn2;
    }
}

// Scores of all rows against keys [begin, end) of the tile at `first`, four rows at a time.
void score_tile(
    const Scratch& scratch, const KeyRows& keys, int64_t rows, int64_t begin, int64_t end
) {
    const int64_t d = scratch.d_padded;
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) {
        score_rows<4>(scratch.q + row * d, d, keys.k, begin, end, scratch.scores + row * kTileN);
    }
    for (; row + 2 <= rows; row += 2) {
        score_rows<2>(scratch.q + row * d, d, keys.k, begin, end, scratch.scores + row * kTileN);
    }
    for (; row < rows; ++row) {
        score_rows<1>(scratch.q + row * d, d, keys.k, begin, end, scratch.scores + row * kTileN);
    }
}

// out += weights x values. Four rows share the keys that all of them see; the rest of each row goes
// alone, so that a value that a row may not see (it may be NaN) never meets that row, not even with
// weight 0.
void weigh_tile(const Scratch& scratch, const KeyRows& keys, const KeyRange* ranges, int64_t rows) {
    const int64_t dv = scratch.dv_padded;
    constexpr int64_t kBlock = 4;
    for (int64_t row = 0; row < rows; row += kBlock) {
        const int64_t count = smaller(kBlock, rows - row);
        KeyRange shared = ranges[row];
        for (int64_t r = 1; r < count; ++r) {
            shared.begin = larger(shared.begin, ranges[row + r].begin);
            shared.end = smaller(shared.end, ranges[row + r].end);
        }
        if (count < kBlock || shared.begin >= shared.end) {
            shared = {0, 0};
        }
        float* out = scratch.out + row * dv;
        const float* weights = scratch.scores + row * kTileN;
        const bool alone = shared.begin >= shared.end;
        for (int64_t r = 0; r < count; ++r) {
            weigh_rows<1>(
                weights + r * kTileN,
                keys.v,
                ranges[row + r].begin,
                alone ? ranges[row + r].end : shared.begin,
                dv,
                out + r * dv
            );
        }
        weigh_rows<kBlock>(weights, keys.v, shared.begin, shared.end, dv, out);
        for (int64_t r = 0; r < count && !alone; ++r) {
            weigh_rows<1>(
                weights + r * kTileN, keys.v, shared.end, ranges[row + r].end, dv, out + r * dv
            );
        }
    }
}

void load_queries(
    const AttentionParams& params, const AttentionTile& tile, const Scratch& scratch
) {
    const int64_t group = params.num_q_heads / params.num_kv_heads;
    const int64_t size = static_cast<int64_t>(dtype_size(params.q_dtype));
    const RowReader read = row_reader(params.q_dtype);
    for (int64_t row = tile.row_begin; row < tile.row_end; ++row) {
        const int64_t token = tile.q_begin + row / group;
        const int64_t head = tile.kv_head * group + row % group;
        const int64_t element = token * params.q_row_stride + head * params.q_head_stride;
        float* to = scratch.q + (row - tile.row_begin) * scratch.d_padded;
        read(offset_bytes(params.q, element, size), to, params.head_dim, params.head_dim, 0);
    }
}

ScoreRule score_rule(const AttentionParams& params, const AttentionTile& tile, int64_t row) {
    const int64_t group = params.num_q_heads / params.num_kv_heads;
    const int64_t head = tile.kv_head * group + row % group;
    const float scale = params.softmax_scale *
                        scale_at(params.q_scale, tile.batch_idx, tile.kv_head) *
                        scale_at(params.k_scale, tile.batch_idx, tile.kv_head);
    ScoreRule rule = {};
    rule.scale = params.softcap != 0.0f ? scale / params.softcap : scale * kLog2e;
    rule.softcap = params.softcap * kLog2e;
    if (params.alibi_slopes != nullptr) {
        rule.slope =
            params.alibi_slopes
                [tile.batch_idx * params.alibi_batch_stride + head * params.alibi_head_stride] *
            kLog2e;
    }
    rule.diagonal = row / group + tile.kv_len - tile.q_len;
    return rule;
}

void attend(const AttentionParams& params, const AttentionTile& tile, float* floats) {
    const int64_t group = params.num_q_heads / params.num_kv_heads;
    const int64_t rows = tile.row_end - tile.row_begin;
    const Scratch scratch = lay_out(params, floats);

    clear(params, scratch, rows);
    for (int64_t r = 0; r < rows; ++r) {
        scratch.row_max[r] = -kInfinity;
    }
    load_queries(params, tile, scratch);

    // What each row sees
    KeyRange seen[kTileM];
    ScoreRule rules[kTileM];
    KeyRange all = {tile.key_end, tile.key_begin};
    for (int64_t r = 0; r < rows; ++r) {
        seen[r] = visible_keys(params, tile, (tile.row_begin + r) / group);
        rules[r] = score_rule(params, tile, tile.row_begin + r);
        if (seen[r].begin < seen[r].end) {
            all.begin = smaller(all.begin, seen[r].begin);
            all.end = larger(all.end, seen[r].end);
        }
    }

    // Tiles of keys, at absolute positions: the same tiles whatever the window, the split or the
    // query's chunk
    const HeadRows k_rows(params.k_cache, params.kv_dtype, params.head_dim, tile.kv_head);
    const HeadRows v_rows(params.v_cache, params.kv_dtype, params.head_dim_v, tile.kv_head);
    KeyRows keys;
    for (int64_t first = all.begin / kTileN * kTileN; first < all.end; first += kTileN) {
        const int64_t begin = larger(first, all.begin);
        const int64_t end = smaller(first + kTileN, all.end);
        gather(
            params,
            tile,
            k_rows,
            v_rows,
            first,
            begin,
            end,
            smaller(end + kTileN, all.end),
            scratch,
            keys
        );
        score_tile(scratch, keys, rows, begin - first, end - first);

        KeyRange in_tile[kTileM];
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t row_begin = larger(begin, seen[r].begin);
            const int64_t row_end = smaller(end, seen[r].end);
            in_tile[r] = {0, 0};
            if (row_begin < row_end) {
                in_tile[r] = {row_begin - first, row_end - first};
                float* scores = scratch.scores + r * kTileN;
                const float rescale = softmax_step(
                    scores,
                    rules[r],
                    first,
                    in_tile[r].begin,
                    in_tile[r].end,
                    scratch.row_max[r],
                    scratch.row_sum[r]
                );
                if (rescale != 1.0f) {
                    scale_row(scratch.out + r * scratch.dv_padded, scratch.dv_padded, rescale);
                }
            }
        }
        weigh_tile(scratch, keys, in_tile, rows);
    }

    // Finish the rows, or leave them for combine()
    const RowWriter write = row_writer(params.out_dtype);
    for (int64_t r = 0; r < rows; ++r) {
        float* values = scratch.out + r * scratch.dv_padded;
        if (tile.partial == nullptr) {
            finish_row(
                params,
                tile,
                tile.row_begin + r,
                scratch.row_max[r],
                scratch.row_sum[r],
                values,
                write
            );
        } else {
            float* partial = tile.partial + r * partial_row_size(params);
            partial[0] = scratch.row_max[r];
            partial[1] = scratch.row_sum[r];
            __builtin_memcpy(
                partial + 2, values, static_cast<size_t>(params.head_dim_v) * sizeof(float)
            );
        }
    }
}

// Sums the splits of each row in their order.
void combine(
    const AttentionParams& params,
    const AttentionTile& tile,
    const float* partials,
    int64_t num_splits,
    int64_t stride
) {
    const RowWriter write = row_writer(params.out_dtype);
    const int64_t dim = params.head_dim_v;
    for (int64_t row = tile.row_begin; row < tile.row_end; ++row) {
        const float* first = partials + (row - tile.row_begin) * partial_row_size(params);
        float row_max = -kInfinity;
        for (int64_t split = 0; split < num_splits; ++split) {
            row_max = larger(row_max, first[split * stride]);
        }
        const float reference = row_max == -kInfinity ? 0.0f : row_max;
        float row_sum = 0.0f;
        alignas(64) float values[kMaxHeadDim] = {};
        for (int64_t split = 0; split < num_splits; ++split) {
            const float* partial = first + split * stride;
            const float factor = exp2(broadcast(partial[0] - reference))[0];
            row_sum += factor * partial[1];
            for (int64_t d = 0; d < dim; ++d) {
                values[d] += factor * partial[2 + d];
            }
        }
        finish_row(params, tile, row, row_max, row_sum, values, write);
    }
}

}  // namespace

void cache_write(
    const CacheWriteParams& params, int64_t token_begin, int64_t token_end
);  // cache_write_kernel.cpp

#define PAGETILE_STRING_OF(name) #name
#define PAGETILE_STRING(name) PAGETILE_STRING_OF(name)

extern const CpuKernels kKernels;
const CpuKernels kKernels = {
    .isa = PAGETILE_STRING(PAGETILE_ISA),
    .attend = attend,
    .combine = combine,
    .merge_states = merge_states,
    .cache_write = cache_write,
};

}  // namespace pagetile::PAGETILE_ISA
