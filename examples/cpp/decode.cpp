// Two sequences decode nine tokens over a paged KV cache. The last step is checked against attention
// over plain rows.
#include "pagetile/attention.h"
#include "pagetile/block_pool.h"
#include "pagetile/cache_write.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

constexpr int64_t kHeads = 2, kDim = 16, kRow = kHeads * kDim;
constexpr int64_t kPages = 8, kPageSize = 4, kSteps = 9;

// What a model would compute: element i of a step's rows.
double query(int64_t i, int64_t t) { return std::sin(0.3 * i + t); }

double key(int64_t i, int64_t t) { return std::cos(0.7 * i - t); }

double value(int64_t i, int64_t t) { return std::sin(1.1 * i + 2 * t); }

int main() {
    std::vector<float> k_cache(kPages * kPageSize * kRow), v_cache(k_cache);
    std::vector<float> q(2 * kRow), k(q), v(q), out(q);
    pagetile::BlockPool pool(kPages, kPageSize);
    const std::vector<int64_t> sequences{pool.allocate(), pool.allocate()}, one_token{1};
    pagetile::Step step;
    for (int64_t t = 0; t < kSteps; ++t) {
        for (int64_t i = 0; i < 2 * kRow; ++i) {
            q[i] = query(i, t), k[i] = key(i, t), v[i] = value(i, t);
        }
        pool.append(sequences, one_token, step);

        pagetile::CacheWriteParams write;
        write.num_tokens = 2, write.num_kv_heads = kHeads;
        write.num_pages = kPages, write.page_size = kPageSize;
        // Strides of [tokens, heads, dim] and of [pages, page_size, heads, dim].
        write.k = {k.data(), kRow, kDim, kDim};
        write.v = {v.data(), kRow, kDim, kDim};
        write.k_cache = {k_cache.data(), kPageSize * kRow, kRow, kDim, kDim, kDim};
        write.v_cache = {v_cache.data(), kPageSize * kRow, kRow, kDim, kDim, kDim};
        write.slot_mapping = step.slot_mapping.data();
        pagetile::cache_write(write, 0);

        pagetile::AttentionParams attend;
        attend.batch = 2, attend.total_q = 2, attend.num_q_heads = kHeads;
        attend.num_kv_heads = kHeads, attend.head_dim = kDim, attend.head_dim_v = kDim;
        attend.num_pages = kPages, attend.page_size = kPageSize;
        attend.q = q.data(), attend.q_row_stride = kRow, attend.q_head_stride = kDim;
        attend.k_cache = {k_cache.data(), kPageSize * kRow, kRow, kDim, kDim, kDim};
        attend.v_cache = {v_cache.data(), kPageSize * kRow, kRow, kDim, kDim, kDim};
        attend.block_table = step.block_table.get(), attend.max_pages = step.max_pages;
        attend.block_table_stride = step.block_table_stride;
        attend.seqused_k = step.seqused_k.data();
        attend.out = out.data(), attend.out_row_stride = kRow, attend.out_head_stride = kDim;
        pagetile::paged_attention(attend, 0);
    }

    double largest_error = 0;
    // A mean of the values, weighted by the softmax of the scores.
    for (int64_t i = 0; i < 2 * kRow; ++i) {
        double weights = 0, mean = 0;
        for (int64_t t = 0; t < kSteps; ++t) {
            double score = 0;
            for (int64_t d = i / kDim * kDim; d < (i / kDim + 1) * kDim; ++d) {
                score += query(d, kSteps - 1) * key(d, t);
            }
            weights += std::exp(score), mean += std::exp(score) * value(i, t);
        }
        largest_error = std::max(largest_error, std::abs(mean / weights - out[i]));
    }
    std::printf("largest error against attention over plain rows: %.1e\n", largest_error);
    return largest_error < 1e-5 ? 0 : 1;
}
