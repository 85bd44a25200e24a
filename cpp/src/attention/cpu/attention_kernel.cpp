// Attention over one tile of query rows, with an online softmax over tiles of keys. Compiled once per instruction set.

#include "attention/cpu/tile_math.h"
#include "common/cpu_kernels.h"
#include "common/rows.h"
#include "common/vec.h"

namespace pagetile::PAGETILE_ISA {
namespace {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

float scale_at(const Scale& scale, int64_t batch_idx, int64_t head) {
    return scale.data == nullptr ? 1.0f : scale.data[batch_idx * scale.batch_stride + head * scale.head_stride];
}

// Where the parts of attend_scratch_bytes() stand. Row lengths are padded with zeros to whole vectors.
struct Scratch {
    float* q;         // [kTileM, d_padded]
    float* k;         // [kTileN, d_padded]
    float* v;         // [kTileN, dv_padded]
    float* out;       // [kTileM, dv_padded]
    float* scores;    // [kTileM, kTileN]
    float* row_max;   // [kTileM], log2 units
    float* row_sum;   // [kTileM]
    float* zero_row;  // [max(d_padded, dv_padded)]: what a page outside the pool holds
    int64_t d_padded;
    int64_t dv_padded;
};

Scratch lay_out(const AttentionParams& params, float* floats) {
    Scratch scratch;
    scratch.d_padded = round_up(params.head_dim, kLanes);
    scratch.dv_padded = round_up(params.head_dim_v, kLanes);
    const auto take = [&](int64_t count) {
        float* taken = floats;
        floats += count;
        return taken;
    };
    scratch.q = take(kTileM * scratch.d_padded);
    scratch.k = take(kTileN * scratch.d_padded);
    scratch.v = take(kTileN * scratch.dv_padded);
    scratch.out = take(kTileM * scratch.dv_padded);
    scratch.scores = take(kTileM * kTileN);
    scratch.row_max = take(kTileM);
    scratch.row_sum = take(kTileM);
    scratch.zero_row = take(larger(scratch.d_padded, scratch.dv_padded));
    return scratch;
}

void fill_zero(float* floats, int64_t count) {
    __builtin_memset(floats, 0, static_cast<size_t>(count) * sizeof(float));
}

// Clears the accumulators and the padding of every row, and no more: a tile may hold one key.
void clear(const AttentionParams& params, const Scratch& scratch, int64_t rows) {
    fill_zero(scratch.q, rows * scratch.d_padded);
    fill_zero(scratch.out, rows * scratch.dv_padded);
    fill_zero(scratch.zero_row, larger(scratch.d_padded, scratch.dv_padded));
    fill_zero(scratch.row_sum, rows);
    if (scratch.d_padded != params.head_dim) {
        fill_zero(scratch.k, kTileN * scratch.d_padded);
    }
    if (scratch.dv_padded != params.head_dim_v) {
        fill_zero(scratch.v, kTileN * scratch.dv_padded);
    }
}

// The keys [begin, end) that a query token sees.
struct KeyRange {
    int64_t begin;
    int64_t end;
};

KeyRange visible_keys(const AttentionParams& params, const AttentionTile& tile, int64_t q_idx) {
    const int64_t diagonal = q_idx + tile.kv_len - tile.q_len;  // bottom-right: the last query stands at the last key
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

// Finds the rows of one of the caches, reading them into fp32 where they cannot be used in place.
struct RowFinder {
    CacheView cache;
    RowReader read;
    int64_t element_size;
    int64_t dim;
    bool in_place;  // dense fp32 rows of whole vectors

    RowFinder(const CacheView& view, DType dtype, int64_t head_dim)
        : cache(view),
          read(row_reader(dtype)),
          element_size(static_cast<int64_t>(dtype_size(dtype))),
          dim(head_dim),
          in_place(dtype == DType::kFloat32 && view.chunk == head_dim && head_dim % kLanes == 0) {}

    const float* find(int64_t page, int64_t token, int64_t head, float* copy) const {
        const int64_t element = page * cache.page_stride + token * cache.token_stride + head * cache.head_stride;
        const char* row = offset_bytes(cache.data, element, element_size);
        if (in_place && reinterpret_cast<uintptr_t>(row) % alignof(float) == 0) {
            return reinterpret_cast<const float*>(row);
        }
        read(row, copy, dim, cache.chunk, cache.chunk_stride);
        return copy;
    }
};

struct KeyRows {
    const float* k[kTileN];
    const float* v[kTileN];
};

// Fills rows.k and rows.v for keys [begin, end) of the tile that starts at key `first`; the others point at zeros.
void gather(
    const AttentionParams& params,
    const AttentionTile& tile,
    const RowFinder& k_rows,
    const RowFinder& v_rows,
    int64_t first,
    int64_t begin,
    int64_t end,
    const Scratch& scratch,
    KeyRows& rows
) {
    for (int64_t n = 0; n < kTileN; ++n) {
        const int64_t key = first + n;
        rows.k[n] = scratch.zero_row;
        rows.v[n] = scratch.zero_row;
        if (key < begin || key >= end) {
            continue;
        }
        int64_t page = 0;
        int64_t token = 0;
        if (params.block_table != nullptr) {
            page = params.block_table[tile.batch_idx * params.block_table_stride + key / params.page_size];
            token = key % params.page_size;
        } else {
            page = larger<int64_t>(params.cu_seqlens_k[tile.batch_idx], 0) + key;
        }
        if (page >= 0 && page < params.num_pages) {
            rows.k[n] = k_rows.find(page, token, tile.kv_head, scratch.k + n * scratch.d_padded);
            rows.v[n] = v_rows.find(page, token, tile.kv_head, scratch.v + n * scratch.dv_padded);
        }
    }
}

// How raw dot products of a row become scores in log2 units.
struct ScoreRule {
    float scale;    // times log2(e), or to softcap's own unit
    float softcap;  // times log2(e); 0 is off
    float slope;    // ALiBi, times log2(e)
    int64_t diagonal;
};

// One step of the online softmax on one row: scores -> weights of the keys [begin, end), counted from the tile's first.
// Returns the factor for what the row has summed so far.
float softmax_step(float* row, const ScoreRule& rule, int64_t first, int64_t begin, int64_t end, float& row_max, float& row_sum) {
    const int64_t first_vec = begin / kLanes * kLanes;
    Vec largest = broadcast(-kInfinity);
    for (int64_t n = first_vec; n < end; n += kLanes) {
        Vec x = load(row + n) * rule.scale;
        if (rule.softcap != 0.0f) {
            x = rule.softcap * tanh(x);
        }
        const VecI position = lane_index() + static_cast<int32_t>(n);
        if (rule.slope != 0.0f) {
            const Vec distance = static_cast<float>(rule.diagonal - first) - __builtin_convertvector(position, Vec);
            x -= rule.slope * (distance < 0.0f ? -distance : distance);
        }
        const VecI seen = (position >= static_cast<int32_t>(begin)) & (position < static_cast<int32_t>(end));
        x = seen ? x : broadcast(-kInfinity);
        largest = vec_max(largest, x);
        store_as(row + n, x);
    }
    const float new_max = larger(row_max, reduce_max(largest));
    const float reference = new_max == -kInfinity ? 0.0f : new_max;  // no key seen so far: every weight is 2^-inf
    Vec sum = {};
    for (int64_t n = first_vec; n < end; n += kLanes) {
        const Vec weight = exp2(load(row + n) - reference);
        sum += weight;
        store_as(row + n, weight);
    }
    const float rescale = exp2(broadcast(row_max - reference))[0];
    row_sum = row_sum * rescale + reduce_add(sum);
    row_max = new_max;
    return rescale;
}

void scale_row(float* row, int64_t dim, float factor) {
    for (int64_t d = 0; d < dim; d += kLanes) {
        store_as(row + d, load(row + d) * factor);
    }
}

float log2_of(float x) {
    return __builtin_log2f(x);
}

// Divides one row by its sum, the sink included, and writes it and its log-sum-exp.
void finish_row(
    const AttentionParams& params, const AttentionTile& tile, int64_t row, float row_max, float row_sum, float* values, RowWriter write
) {
    const int64_t group = params.num_q_heads / params.num_kv_heads;
    const int64_t token = tile.q_begin + row / group;
    const int64_t head = tile.kv_head * group + row % group;
    float factor = 1.0f;
    if (params.sinks != nullptr) {
        const int64_t size = static_cast<int64_t>(dtype_size(params.sinks_dtype));
        float sink = 0.0f;
        row_reader(params.sinks_dtype)(offset_bytes(params.sinks, head * params.sinks_stride, size), &sink, 1, 1, 0);
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
    scale_row(values, round_up(params.head_dim_v, kLanes), empty ? 0.0f : factor / row_sum * v_scale);
    const int64_t size = static_cast<int64_t>(dtype_size(params.out_dtype));
    write(values, offset_bytes(params.out, token * params.out_row_stride + head * params.out_head_stride, size), params.head_dim_v);
    if (params.softmax_lse != nullptr) {
        params.softmax_lse[head * params.lse_head_stride + token * params.lse_row_stride] =
            empty ? -kInfinity : (row_max + log2_of(row_sum)) * kLn2;
    }
}

// Scores of all rows against keys [begin, end) of the tile at `first`, four rows at a time.
void score_tile(const Scratch& scratch, const KeyRows& keys, int64_t rows, int64_t begin, int64_t end) {
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

// out += weights x values. Four rows share the keys that all of them see; the rest of each row goes alone, so that a
// value that a row may not see (it may be NaN) never meets that row, not even with weight 0.
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
            weigh_rows<1>(weights + r * kTileN, keys.v, ranges[row + r].begin, alone ? ranges[row + r].end : shared.begin, dv, out + r * dv);
        }
        weigh_rows<kBlock>(weights, keys.v, shared.begin, shared.end, dv, out);
        for (int64_t r = 0; r < count && !alone; ++r) {
            weigh_rows<1>(weights + r * kTileN, keys.v, shared.end, ranges[row + r].end, dv, out + r * dv);
        }
    }
}

void load_queries(const AttentionParams& params, const AttentionTile& tile, const Scratch& scratch) {
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
    const float scale = params.softmax_scale * scale_at(params.q_scale, tile.batch_idx, tile.kv_head)
                        * scale_at(params.k_scale, tile.batch_idx, tile.kv_head);
    ScoreRule rule = {};
    rule.scale = params.softcap != 0.0f ? scale / params.softcap : scale * kLog2e;
    rule.softcap = params.softcap * kLog2e;
    if (params.alibi_slopes != nullptr) {
        rule.slope = params.alibi_slopes[tile.batch_idx * params.alibi_batch_stride + head * params.alibi_head_stride] * kLog2e;
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

    // Tiles of keys, at absolute positions: the same tiles whatever the window, the split or the query's chunk
    const RowFinder k_rows(params.k_cache, params.kv_dtype, params.head_dim);
    const RowFinder v_rows(params.v_cache, params.kv_dtype, params.head_dim_v);
    KeyRows keys;
    for (int64_t first = all.begin / kTileN * kTileN; first < all.end; first += kTileN) {
        const int64_t begin = larger(first, all.begin);
        const int64_t end = smaller(first + kTileN, all.end);
        gather(params, tile, k_rows, v_rows, first, begin, end, scratch, keys);
        score_tile(scratch, keys, rows, begin - first, end - first);

        KeyRange in_tile[kTileM];
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t row_begin = larger(begin, seen[r].begin);
            const int64_t row_end = smaller(end, seen[r].end);
            in_tile[r] = {0, 0};
            if (row_begin < row_end) {
                in_tile[r] = {row_begin - first, row_end - first};
                float* scores = scratch.scores + r * kTileN;
                const float rescale =
                    softmax_step(scores, rules[r], first, in_tile[r].begin, in_tile[r].end, scratch.row_max[r], scratch.row_sum[r]);
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
            finish_row(params, tile, tile.row_begin + r, scratch.row_max[r], scratch.row_sum[r], values, write);
        } else {
            float* partial = tile.partial + r * partial_row_size(params);
            partial[0] = scratch.row_max[r];
            partial[1] = scratch.row_sum[r];
            __builtin_memcpy(partial + 2, values, static_cast<size_t>(params.head_dim_v) * sizeof(float));
        }
    }
}

// Sums the splits of each row in their order.
void combine(const AttentionParams& params, const AttentionTile& tile, const float* partials, int64_t num_splits, int64_t stride) {
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

// One row of one head: the weights of the two sides are exp(lse - max), and a side that saw no key has none.
void merge_row(const MergeStatesParams& params, int64_t token, int64_t head, RowReader read, RowWriter write) {
    const int64_t size = static_cast<int64_t>(dtype_size(params.dtype));
    const auto finite = [](float lse) { return lse == kInfinity ? -kInfinity : lse; };  // FA2 writes +inf for no key
    const float lse_a = params.tokens_with_a >= 0 && token >= params.tokens_with_a
                            ? -kInfinity
                            : finite(params.lse_a[head * params.lse_a_head_stride + token * params.lse_a_row_stride]);
    const float lse_b = finite(params.lse_b[head * params.lse_b_head_stride + token * params.lse_b_row_stride]);

    float lse = -kInfinity;
    float weight_a = 0.0f;
    float weight_b = 0.0f;
    const float largest = lse_b == lse_b ? larger(lse_a, lse_b) : lse_b;  // NaN from either side is kept
    if (largest != -kInfinity) {
        const float exp_a = exp2(broadcast((lse_a - largest) * kLog2e))[0];
        const float exp_b = exp2(broadcast((lse_b - largest) * kLog2e))[0];
        const float sum = exp_a + exp_b;
        lse = largest + log2_of(sum) * kLn2;
        weight_a = exp_a / sum;
        weight_b = exp_b / sum;
    }

    alignas(64) float values_a[kMaxHeadDim];
    alignas(64) float values_b[kMaxHeadDim];
    for (int64_t d = 0; d < params.head_dim; d += kMaxHeadDim) {
        const int64_t count = smaller<int64_t>(kMaxHeadDim, params.head_dim - d);
        const auto side = [&](const void* out, int64_t row_stride, int64_t head_stride, float* values) {
            read(offset_bytes(out, token * row_stride + head * head_stride + d, size), values, count, count, 0);
        };
        side(params.out_a, params.a_row_stride, params.a_head_stride, values_a);
        side(params.out_b, params.b_row_stride, params.b_head_stride, values_b);
        for (int64_t i = 0; i < count; ++i) {
            // An empty side may hold anything, NaN too: it is left out, not multiplied by 0.
            const float a = lse_a == -kInfinity ? 0.0f : weight_a * values_a[i];
            const float b = lse_b == -kInfinity ? 0.0f : weight_b * values_b[i];
            values_a[i] = a + b;
        }
        write(values_a, offset_bytes(params.out, token * params.out_row_stride + head * params.out_head_stride + d, size), count);
    }
    if (params.lse != nullptr) {
        params.lse[head * params.lse_head_stride + token * params.lse_row_stride] = lse;
    }
}

void merge_states(const MergeStatesParams& params, int64_t token_begin, int64_t token_end) {
    const RowReader read = row_reader(params.dtype);
    const RowWriter write = row_writer(params.dtype);
    for (int64_t token = token_begin; token < token_end; ++token) {
        for (int64_t head = 0; head < params.num_heads; ++head) {
            merge_row(params, token, head, read, write);
        }
    }
}

}  // namespace

void cache_write(const CacheWriteParams& params, int64_t token_begin, int64_t token_end);  // cache_write_kernel.cpp

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
